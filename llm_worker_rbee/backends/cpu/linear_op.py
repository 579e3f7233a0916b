"""A weight as the CPU backend holds it, and its product with activations.

Tensors that share a layout are packed into one matrix; a stack of several layouts (a Q4_K_M file has q and k in Q4_K, v
in Q6_K) is as many matrices, each of which writes its own columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import forget_pages
from ..ops import Ints
from . import activations, elementwise, matmul, threads
from .layouts import ROWS, layout_of
from .pack import Packed, pack
from .program import Instruction, Program, doubles, table_of
from .step import Step, new_step
from .unpack import unpack

Floats = NDArray[np.float32]
PIECES = 8  # of a matrix, for each thread


# What is lost where attention's values are made costs most: of the error of a whole model's log-probabilities half came
# from there, with 3% of the arithmetic (docs/decisions.md). The head's product is made finely too, whatever its name.
FINE_TENSORS = ("attn_v.weight",)


@dataclass(frozen=True, eq=False)
class Weight:
    """One or several packed matrices, stacked by rows."""

    parts: tuple[Packed, ...]
    fine: tuple[bool, ...]  # which of them want each token as two rows of bytes

    @property
    def rows(self) -> int:
        """Rows of the whole stack."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Columns, the same in every part."""
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)

    @property
    def wants_bytes(self) -> bool:
        """Whether some part multiplies activations as bytes."""
        return not all(part.layout.numbers for part in self.parts)

    @property
    def wants_floats(self) -> bool:
        """Whether some part multiplies them as they are."""
        return any(part.layout.numbers for part in self.parts)

    def finely(self) -> Weight:
        """The same, all of it made finely."""
        return Weight(self.parts, tuple(not part.layout.numbers for part in self.parts))

    def rows_at(self, ids: Ints) -> Floats:
        """Some rows, as floats."""
        (part,) = self.parts
        return unpack(part, ids)

    @cached_property
    def _program(self) -> Program:
        width, fine = self.columns, any(self.fine)
        made = to_bytes(Step.TOKENS, Step.DELTA, 1, width, width, self.wants_bytes, fine=fine)
        return Program(made + products(self, Step.TOKENS, Step.DELTA, Step.QKV))

    def times(self, x: Floats) -> Floats:
        """x @ self.T: (T, columns) -> (T, rows)."""
        x, tokens = np.ascontiguousarray(x, np.float32), x.shape[0]
        out, step = np.empty((tokens, self.rows), np.float32), new_step()
        step[Step.TOKENS], step[Step.DELTA], step[Step.QKV] = tokens, x.ctypes.data, out.ctypes.data
        room: tuple[NDArray[Any], ...] = activations.room(2 * tokens, self.columns)
        for entry, array in enumerate(room, Step.ACTIVATIONS):
            step[entry] = array.ctypes.data
        self._program.run(step)
        return out


def prepare(tensors: Sequence[Tensor]) -> Weight:
    """Pack tensors, those that stand beside each other and share a layout as one."""
    grouped = [(key, list(same)) for key, same in groupby(tensors, lambda t: (layout_of(t), _is_fine(t)))]
    parts = tuple(pack(same) for _, same in grouped)
    for tensor in tensors:
        forget_pages(tensor.data)
    return Weight(parts, tuple(fine for (_, fine), _ in grouped))


def _is_fine(tensor: Tensor) -> bool:
    return tensor.name.endswith(FINE_TENSORS) and not layout_of(tensor).numbers


def products(w: Weight, count: int, source: int, output: int) -> list[Instruction]:
    """The instructions of a product; `source` holds floats, whose bytes (if wanted) are in the activations already."""
    made, first = [], 0
    for part, fine in zip(w.parts, w.fine, strict=True):
        made.append(_product(part, count, source, output, w.rows, first, fine))
        first += part.rows
    return made


def _product(part: Packed, count: int, source: int, output: int, stride: int, first: int, fine: bool) -> Instruction:
    groups = -(-part.rows // ROWS)
    chunk = max(1, groups // (PIECES * threads.count()))
    entry, small = source if part.layout.numbers else Step.ACTIVATIONS, 0 if part.small is None else part.small
    args = table_of(
        count, entry, output, stride, first, part.rows, part.columns, chunk, part.packed, part.scales, part.minima,
        small, 0, fine,
    )  # fmt: skip
    doubles(args, matmul.UNIT, [part.unit])
    return Instruction(matmul.task_for(part.layout), args, ceil(groups / chunk), count, matmul.TOGETHER)


def to_bytes(
    count: int, source: int, heads: int, dim: int, padded: int, quantized: bool, *, fine: bool = False
) -> list[Instruction]:
    """The instruction that turns rows of heads into bytes, or moves padded heads together, or both."""
    if padded == dim and not quantized:
        return []
    bytes_at = Step.ACTIVATIONS if quantized else 0
    args = table_of(count, source, 0, Step.COMPACT, bytes_at, 0, heads, dim, padded, fine)
    return [Instruction(elementwise.TO_BYTES, args, 1, count, elementwise.FEW)]
