"""Linear layers: a packed weight, the tasks of its products (kernels/matmul/), and its rows as floats.

Tensors that share a layout are packed into one matrix; a stack of several layouts (a Q4_K_M file has q and k in Q4_K, v
in Q6_K) is several matrices, each of which writes its own columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...weights import Tensor
from ...weights.checkpoint import release_pages, shared_order
from ..ops import Ints
from .kernels import quantize_activations
from .kernels.elementwise import embed_task, quantize_task
from .kernels.matmul.linear import TOKENS_PER_PIECE as UNPACKED_TOKENS_PER_PIECE
from .kernels.matmul.linear import can_unpack, linear_kernel
from .kernels.matmul.packed import TOKENS_PER_PIECE, LinearArg
from .kernels.program import Step, Task, pack_args, pack_floats
from .packed_weight import GROUP_ROWS, PackedMatrices, PackedMatrix, layout_of_tensor
from .program import Program, new_step, run_step
from .repack import repack

Floats = NDArray[np.float32]
PIECES_PER_THREAD = 8  # of a matrix
# The values of attention are the most sensitive: half of the error of a model's log-probabilities came from there, with
# 3% of the arithmetic where heads share them (docs/decisions/cpu.md#d036). The output head uses two terms too.
HIGH_PRECISION_TENSORS = ("attn_v.weight",)


@dataclass(frozen=True, eq=False)
class PackedWeight(PackedMatrices):
    """Packed matrices, and which of them multiply two-term activations."""

    residual_activations: tuple[bool, ...]
    order: NDArray[np.int64] | None = None  # of the columns of activations; None: as they are
    _programs: dict[int, Program] = field(default_factory=dict, init=False, repr=False)  # by number of threads

    def two_term(self) -> PackedWeight:
        """Return the same weight with two-term activations in all parts."""
        return PackedWeight(self.parts, tuple(not part.layout.float_type for part in self.parts), self.order)

    def matmul(self, x: Floats, threads: int) -> Floats:
        """Return x @ self.T: (T, columns) -> (T, rows)."""
        if threads not in self._programs:
            self._programs[threads] = self._matmul_program(threads)
        x = x if self.order is None else x[:, self.order]
        x, tokens = np.ascontiguousarray(x, np.float32), x.shape[0]
        out = np.empty((tokens, self.rows), np.float32)
        arrays = x, out, *quantize_activations.allocate(tokens, self.columns)
        step = new_step(Step.END + len(arrays))
        step[Step.TOKENS], step[Step.END :] = tokens, [array.ctypes.data for array in arrays]
        self._programs[threads].run(step, threads)
        return out

    def _matmul_program(self, threads: int) -> Program:
        x, out, activations = range(Step.END, Step.END + 3)
        tasks = linear_tasks(self, Step.TOKENS, x, activations, out, threads)
        if self.needs_int8:
            two_term = any(self.residual_activations)
            tasks.insert(0, quantize_task(Step.TOKENS, x, activations, self.columns, two_term=two_term))
        return Program(tasks)


def pack_weight(tensors: Sequence[Tensor], threads: int) -> PackedWeight:
    """Pack tensors; adjacent ones that share a layout become one matrix."""
    rows = tensors[0].shape[0]  # of q, in a stack that holds v
    keyed = groupby(tensors, lambda tensor: (layout_of_tensor(tensor), _is_sensitive(tensor, rows)))
    grouped = [(key, list(same)) for key, same in keyed]
    parts = tuple(repack(same, threads) for _, same in grouped)
    for tensor in tensors:
        release_pages(tensor.data)
    order = shared_order(tensors)
    order = None if order is None else np.ascontiguousarray(order, np.int64)
    return PackedWeight(parts, tuple(is_sensitive for (_, is_sensitive), _ in grouped), order)


def _is_sensitive(tensor: Tensor, query_rows: int) -> bool:
    """Return whether a tensor multiplies two-term activations: v, unless each head has a KV head of its own."""
    if not tensor.name.endswith(HIGH_PRECISION_TENSORS) or layout_of_tensor(tensor).float_type:
        return False
    return tensor.shape[0] < query_rows  # otherwise a second term of v is 8% of the arithmetic


def linear_tasks(
    w: PackedWeight, count: int, floats: int, quantized: int, output: int, threads: int, bias: Any = 0
) -> list[Task]:
    """Return the tasks of a product: entries of its input, as floats and quantized, as parts need it, and output; and
    an optional addend."""
    tasks, first = [], 0
    for part, two_term in zip(w.parts, w.residual_activations, strict=True):
        groups = -(-part.rows // GROUP_ROWS)
        groups_per_piece = max(1, groups // (PIECES_PER_THREAD * threads))
        entry, nibbles = floats if part.layout.float_type else quantized, part.nibble_scales
        arrays = part.packed, part.scales, part.minima, 0 if nibbles is None else nibbles
        shape = w.rows, first, part.rows, part.columns, groups_per_piece
        args = pack_args(count, entry, output, *shape, *arrays, 0, two_term, bias)
        pack_floats(args, LinearArg.UNIT, [part.unit])
        tokens_per_piece = UNPACKED_TOKENS_PER_PIECE if can_unpack(part.layout) else TOKENS_PER_PIECE
        tasks.append(Task(linear_kernel(part.layout), args, ceil(groups / groups_per_piece), count, tokens_per_piece))
        first += part.rows
    return tasks


def dequantize_rows(w: PackedMatrix, index: Ints | None = None, factor: float = 1.0, threads: int = 1) -> Floats:
    """Return some rows of a matrix, or all of them, as floats times a factor: (n, columns)."""
    rows = np.arange(w.rows) if index is None else np.ascontiguousarray(index, np.int64)
    if rows.size and not 0 <= rows.min() <= rows.max() < w.rows:
        raise IndexError(f"a row is outside of the matrix, which has {w.rows}")
    out = np.empty((len(rows), w.columns), np.float32)
    entries: dict[int, Any] = {Step.TOKEN_IDS: rows, Step.END: out}
    run_step(Program([embed_task(w, factor, Step.END)]), entries, {Step.TOKENS: len(rows)}, threads)
    return out
