"""How the CPU kernels see a weight of each block type: data, one row a type. How it gets there is in pack.py.

A matrix is rows in groups of 16 and columns in blocks of 32; w = scale * (value - offset) + minimum, where the value is
the code itself or what the table holds at it. A block is its planes, one after the other. A plane of p bits is p lines
of 64 bytes; line v holds at byte 4 * row + column % 4, in bits p*j .. p*j + p-1, the code of quad v + p*j (a quad is
four columns), for every j below 8 / p. The second plane holds the bits above those of the first.
"""

from __future__ import annotations

from typing import NamedTuple

from ...errors import UnsupportedModelError
from ...weights import Tensor
from ...weights.quants.codebooks import FP4_VALUES, GRIDS, IQ4_VALUES

ROWS, COLUMNS, LINE = 16, 32, 64  # rows in a group, columns in a block, bytes in a line


class Layout(NamedTuple):
    """One way of packing; block types that share it share the kernels, and can be stacked."""

    planes: tuple[int, ...]  # bits of each plane; 16 and 32: plain numbers, 16 rows side by side, column after column
    columns: int = 32  # columns that share a scale; 0 in plain numbers
    table: tuple[int, ...] | None = None  # a value for each code, as signed bytes; without one the code is the value
    minimum: bool = False  # a minimum beside each scale
    offset: int = 0  # eight-bit codes are signed instead, stored plus Packed.bias
    small: bool = False  # for each 16 columns a byte: scale times its low, minimum times its high nibble
    numbers: str = ""  # plain numbers: their type

    @property
    def name(self) -> str:
        """The first block type that is packed so."""
        return next(kind for kind, layout in BY_TYPE.items() if layout == self)

    @property
    def lines(self) -> int:
        """Lines of 64 bytes in a block."""
        return sum(self.planes)


def _signs_on_top(levels: tuple[int, ...]) -> tuple[int, ...]:
    """Codes level | sign << 3."""
    padded = levels + (0,) * (8 - len(levels))
    return padded + tuple(-level for level in padded)


_IQ2, _IQ3_XXS, _IQ3_S = (_signs_on_top(GRIDS[name].levels) for name in ("IQ2_XXS", "IQ3_XXS", "IQ3_S"))
# Codes trit | downward << 2: eight times a trit of -1, 0, 1, one up or one down. The eighth is in the scale.
_IQ1_M = (-7, 1, 9, 0, -9, -1, 7, 0)

BY_TYPE: dict[str, Layout] = {
    "F32": Layout((32,), 0, numbers="F32"),
    "F16": Layout((16,), 0, numbers="F16"),
    "BF16": Layout((16,), 0, numbers="BF16"),
    "Q4_0": Layout((4,), offset=8),
    "Q4_1": Layout((4,), minimum=True),
    "Q5_0": Layout((4, 1), offset=16),
    "Q5_1": Layout((4, 1), minimum=True),
    "Q8_0": Layout((8,)),
    "Q8_1": Layout((8,)),
    "Q8_K": Layout((8,), 256),
    "Q2_K": Layout((2,), 256, minimum=True, small=True),
    "Q3_K": Layout((2, 1), 16, offset=4),
    "Q4_K": Layout((4,), minimum=True),
    "Q5_K": Layout((4, 1), minimum=True),
    "Q6_K": Layout((4, 2), 16, offset=32),
    "IQ4_NL": Layout((4,), table=IQ4_VALUES),
    "IQ4_XS": Layout((4,), table=IQ4_VALUES),
    "MXFP4": Layout((4,), table=FP4_VALUES),
    "NVFP4": Layout((4,), 16, FP4_VALUES),
    "IQ2_XXS": Layout((4,), table=_IQ2),
    "IQ2_XS": Layout((4,), 16, _IQ2),
    "IQ2_S": Layout((4,), 16, _IQ2),
    "IQ3_XXS": Layout((4,), table=_IQ3_XXS),
    "IQ3_S": Layout((4,), table=_IQ3_S),
    "IQ1_S": Layout((2,), minimum=True, offset=1),
    "IQ1_M": Layout((2, 1), 16, _IQ1_M),
    "TQ1_0": Layout((2,), 256, offset=1),
    "TQ2_0": Layout((2,), 256, offset=1),
    "Q1_0": Layout((1,), 128, minimum=True),
    "Q2_0": Layout((2,), 64, offset=1),
}

LAYOUTS: tuple[Layout, ...] = tuple(dict.fromkeys(BY_TYPE.values()))  # each one once, for kernels to be told by number


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a tensor's block type."""
    name = tensor.kind.name
    if name not in BY_TYPE:
        raise UnsupportedModelError(f"tensor {tensor.name!r}: {name} weights cannot be multiplied, convert them to F16")
    return BY_TYPE[name]
