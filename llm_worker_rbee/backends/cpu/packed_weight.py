"""Packed weights on the CPU: the layout of each block type as data.

repack.py packs matrices, kernels/matmul/ multiplies them, kernels/elementwise.py dequantizes rows.

Rows come in groups of 16, columns in blocks of 32; w = scale * (value - offset) + minimum, where the value is the code
itself or its entry in the table. A block is its bit planes, one after the other. A plane of p bits is p lines of 64
bytes; line v holds at byte 4 * row + column % 4, in bits p*j .. p*j + p-1, the code of quad v + p*j (a quad is four
columns), for every j below 8 / p. The second plane holds the higher bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ...weights import Tensor
from ...weights.quants.codebooks import FP4_VALUES, GRIDS, IQ4_VALUES
from ..ops import StackedWeight

GROUP_ROWS, BLOCK_COLUMNS, LINE_BYTES = 16, 32, 64  # rows in a group, columns in a block, bytes in a line


class Layout(NamedTuple):
    """A packed layout; block types that share one share the kernels and can be stacked."""

    planes: tuple[int, ...]  # bits of each plane; of floats: 16 rows side by side, column after column
    columns_per_scale: int = 32  # 0 for floats but FP8
    table: tuple[int, ...] | None = None  # the value of each code, as int8; without a table the code is the value
    has_minimum: bool = False  # a minimum with each scale
    offset: int = 0  # eight-bit codes are signed instead, stored plus PackedMatrix.bias
    nibble_scales: bool = False  # one byte per 16 columns: scale times its low, minimum times its high nibble
    float_type: str = ""  # of floats: F32, F16, BF16, FP8 (e4m3)

    @property
    def name(self) -> str:
        return next(kind for kind, layout in LAYOUT_BY_TYPE.items() if layout == self)

    @property
    def block_bytes(self) -> int:
        return sum(self.planes) * LINE_BYTES


def _signs_on_top(levels: tuple[int, ...]) -> tuple[int, ...]:
    """Return the table of codes level | sign << 3."""
    padded = levels + (0,) * (8 - len(levels))
    return padded + tuple(-level for level in padded)


_IQ2, _IQ3_XXS, _IQ3_S = (_signs_on_top(GRIDS[name].levels) for name in ("IQ2_XXS", "IQ3_XXS", "IQ3_S"))
# Codes trit | sign << 2: eight times a trit of -1, 0, 1, plus or minus one; the scale has the factor 1/8.
_IQ1_M = (-7, 1, 9, 0, -9, -1, 7, 0)

LAYOUT_BY_TYPE: dict[str, Layout] = {
    "F32": Layout((32,), 0, float_type="F32"),
    "F16": Layout((16,), 0, float_type="F16"),
    "BF16": Layout((16,), 0, float_type="BF16"),
    "Q4_0": Layout((4,), offset=8),
    "Q4_1": Layout((4,), has_minimum=True),
    "Q5_0": Layout((4, 1), offset=16),
    "Q5_1": Layout((4, 1), has_minimum=True),
    "Q8_0": Layout((8,)),
    "Q8_1": Layout((8,)),
    "Q8_K": Layout((8,), 256),
    "Q2_K": Layout((2,), 256, has_minimum=True, nibble_scales=True),
    "Q3_K": Layout((2, 1), 16, offset=4),
    "Q4_K": Layout((4,), has_minimum=True),
    "Q5_K": Layout((4, 1), has_minimum=True),
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
    "IQ1_S": Layout((2,), has_minimum=True, offset=1),
    "IQ1_M": Layout((2, 1), 16, _IQ1_M),
    "TQ1_0": Layout((2,), 256, offset=1),
    "TQ2_0": Layout((2,), 256, offset=1),
    "Q1_0": Layout((1,), 128, has_minimum=True),
    "Q2_0": Layout((2,), 64, offset=1),
    "FP8": Layout((8,), float_type="FP8"),
    "INT4": Layout((4,), offset=8),
    "INT4_ZP": Layout((4,), has_minimum=True),
    "INT8": Layout((8,)),
    "NVFP4_F32": Layout((4,), 16, FP4_VALUES),
}

LAYOUTS = tuple(dict.fromkeys(LAYOUT_BY_TYPE.values()))  # each once; a kernel knows its layout by number


def layout_of_tensor(tensor: Tensor) -> Layout:
    """Return the layout of a tensor, or raise if its type has none."""
    name = tensor.kind.name
    if name not in LAYOUT_BY_TYPE:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r}: {name} weights cannot be multiplied, convert them to F16 or use --quantize"
        )
    return LAYOUT_BY_TYPE[name]


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A packed matrix. Arrays are flat; scales and minima hold the bits of float16.

    Scale i of a row, one per `layout.columns_per_scale` columns, is at (group * scales_per_row + i) * 16 + row % 16.
    """

    packed: NDArray[Any]  # uint8 lines, then `nibble_scales`; of floats: uint16 or float32
    scales: NDArray[np.uint16]
    minima: NDArray[np.uint16]  # empty if the layout has none
    nibble_scales: NDArray[np.uint8] | None  # a view of `packed`: one byte per 16 columns, placed as scales are
    rows: int
    columns: int
    layout: Layout
    unit: float  # factor of every scale and minimum
    bias: int  # added to int8 codes

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + self.minima.nbytes


@dataclass(frozen=True, eq=False)
class PackedMatrices(StackedWeight):
    """Matrices that are multiplied by the same activations; each has a layout of its own."""

    parts: tuple[PackedMatrix, ...]

    @property
    def needs_int8(self) -> bool:
        """Whether a part multiplies quantized activations."""
        return not all(part.layout.float_type for part in self.parts)

    @property
    def needs_floats(self) -> bool:
        """Whether a part multiplies float activations."""
        return any(part.layout.float_type for part in self.parts)
