"""A weight as the CPU backend holds it, and its product with activations.

Tensors that share a layout are packed into one matrix; a stack of several layouts (a Q4_K_M file has q and k in Q4_K, v
in Q6_K) is as many matrices, each of which writes its own columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...weights import Tensor
from ..types import Ints
from . import activations
from .layouts import ROWS, layout_of
from .matmul import kernel_for
from .pack import Packed, pack
from .unpack import unpack

Floats = NDArray[np.float32]
FEW = 4  # tokens whose activations one thread turns into bytes faster than several


class Quantized(NamedTuple):
    """Activations as bytes: see activations.py."""

    q: NDArray[np.int8]
    scale: Floats
    sums: NDArray[np.int32]
    sums16: NDArray[np.int32]
    scaled: Floats
    scaled16: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One or several packed matrices, stacked by rows."""

    parts: tuple[Packed, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole stack."""
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)

    def rows_at(self, ids: Ints) -> Floats:
        """Some rows, as floats."""
        (part,) = self.parts
        return unpack(part, ids)

    def times(self, x: Floats) -> Floats:
        """x @ self.T: (T, columns) -> (T, rows)."""
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        tokens, first, rows = x.shape[0], 0, self.rows
        quantized = None if all(part.layout.numbers for part in self.parts) else quantize(flat, tokens, x.shape[1])
        whole = all(part.rows % ROWS == 0 for part in self.parts)
        out = np.empty((tokens, rows), np.float32)
        for part in self.parts:
            if whole:
                _multiply(part, flat, quantized, out.reshape(-1), tokens, first, rows)
            else:  # a group of 16 rows is written whole
                padded = -(-part.rows // ROWS) * ROWS
                own = np.empty((tokens, padded), np.float32)
                _multiply(part, flat, quantized, own.reshape(-1), tokens, 0, padded)
                out[:, first : first + part.rows] = own[:, : part.rows]
            first += part.rows
        return out


def prepare(tensors: Sequence[Tensor]) -> Weight:
    """Pack tensors, those that stand beside each other and share a layout as one."""
    return Weight(tuple(pack(list(same)) for _, same in groupby(tensors, layout_of)))


def quantize(x: Floats, tokens: int, columns: int) -> Quantized:
    """Activations as bytes, with their scales and sums."""
    blocks = tokens * (columns // 32)
    room = Quantized(
        np.empty(tokens * columns, np.int8),
        np.empty(blocks, np.float32),
        np.empty(blocks, np.int32),
        np.empty(2 * blocks, np.int32),
        np.empty(blocks, np.float32),
        np.empty(2 * blocks, np.float32),
    )
    work = activations.quantize_few if tokens <= FEW else activations.quantize_many
    work(x, tokens, columns, *room)
    return room


def _multiply(part: Packed, x: Floats, a: Quantized | None, out: Floats, tokens: int, first: int, stride: int) -> None:
    layout, groups = part.layout, -(-part.rows // ROWS)
    run: Any = kernel_for(layout)
    if a is None or layout.numbers:
        run(part.packed, x, out, tokens, part.columns, first, groups, stride)
        return
    halved = layout.columns == 16 or layout.small
    sums, scaled = (a.sums16, a.scaled16) if halved else (a.sums, a.scaled)
    offset = part.bias if layout.table or layout.planes == (8,) else layout.offset
    if part.small is not None:
        offset = part.packed.size - part.small.size
    run(
        part.packed, part.scales, part.minima, a.q, a.scale, scaled, sums, out, tokens, part.columns, first, groups,
        stride, offset, np.float32(part.unit),
    )  # fmt: skip
