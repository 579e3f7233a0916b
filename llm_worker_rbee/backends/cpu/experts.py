"""Mixture of experts: their packed weights, the tasks of their products, and the ops alone (kernels/experts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ...weights import Tensor
from ...weights.checkpoint import refuse_order, release_pages
from ..ops import Ints, RouteParams
from .kernels import experts as kernels
from .kernels import quantize_activations
from .kernels.elementwise import quantize_task
from .kernels.experts import GroupEntry
from .kernels.matmul.linear import TOKENS_PER_PIECE as UNPACKED_TOKENS_PER_PIECE
from .kernels.matmul.linear import can_unpack, linear_kernel
from .kernels.matmul.packed import TOKENS_PER_PIECE as PACKED_TOKENS_PER_PIECE
from .kernels.matmul.packed import LinearArg
from .kernels.program import Step, Task, pack_args, pack_floats
from .kernels.quantize_activations import PANELS
from .linear import PIECES_PER_THREAD
from .packed_weight import GROUP_ROWS, PackedMatrices, layout_of_tensor
from .program import Program, run_step
from .repack import repack

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PackedExperts(PackedMatrices):
    """Matrices that hold the rows of all experts, one after the other, each padded to whole groups of rows."""

    count: int
    part_rows: tuple[int, ...]  # of an expert, without the padding

    @property
    def rows(self) -> int:
        return sum(self.part_rows)


def pack_experts(experts: Sequence[Sequence[Tensor]], threads: int) -> PackedExperts:
    """Pack the matrices of all experts; matrices of one layout become one."""
    numbers = range(len(experts[0]))
    grouped = [list(same) for _, same in groupby(numbers, lambda i: layout_of_tensor(experts[0][i]))]
    for first, *others in zip(*experts, strict=True):
        if any(layout_of_tensor(other) != layout_of_tensor(first) for other in others):
            raise UnsupportedModelError(f"tensor {first.name!r}: experts have different types")
        refuse_order([first, *others])
    rows = tuple(sum(experts[0][i].shape[0] for i in same) for same in grouped)
    stacks = ([tensors[i] for tensors in experts for i in same] for same in grouped)
    parts = tuple(repack(stack, threads, stack=len(same)) for stack, same in zip(stacks, grouped, strict=True))
    for tensor in (tensor for tensors in experts for tensor in tensors):
        release_pages(tensor.data)
    return PackedExperts(parts, len(experts), rows)


def grouped_tasks(
    w: PackedExperts,
    groups: int,
    k: int,
    floats: tuple[int, int],
    quantized: tuple[int, int],
    output: int,
    bias: Any,
    threads: int,
) -> list[Task]:
    """Return the tasks of a grouped product: entries of the activations of tokens (or 0) and of rows, as floats and
    quantized, and of the output; an array of biases, or 0."""
    tasks, first = [], 0
    for part, rows in zip(w.parts, w.part_rows, strict=True):
        row_groups = -(-rows // GROUP_ROWS)
        per_piece = min(row_groups, max(1, k * row_groups // (PIECES_PER_THREAD * threads)))
        pieces, nibbles = -(-row_groups // per_piece), part.nibble_scales
        lines = part.packed if nibbles is None else part.packed[: part.packed.size - nibbles.size]
        arrays = lines, part.scales, part.minima, nibbles
        strides = [0 if array is None else array.nbytes // w.count for array in arrays]
        shape = w.rows, first, rows, part.columns, per_piece
        linear = pack_args(0, 0, 0, *shape, *(0 if array is None else array for array in arrays), 0, 0, 0)
        pack_floats(linear, LinearArg.UNIT, [part.unit])
        is_float, layout = bool(part.layout.float_type), part.layout
        per_call = UNPACKED_TOKENS_PER_PIECE if can_unpack(layout) else PACKED_TOKENS_PER_PIECE
        places = *(floats if is_float else quantized), output, pieces, k, per_call, is_float, bias
        args = np.concatenate([pack_args(0, groups, *places, *strides), linear])
        tasks.append(Task(kernels.GROUPED, args, pieces, groups + GroupEntry.NUM_UNITS, 1, linear_kernel(layout)))
        first += rows
    return tasks


def route_tokens(
    logits: Floats, params: RouteParams, bias: Floats | None, scales: Floats | None, threads: int
) -> tuple[Ints, Floats]:
    """Choose the experts of each token: (T, experts) -> two of (T, k)."""
    tokens, count = logits.shape
    experts, weights = np.empty((tokens, params.k), np.int64), np.empty((tokens, params.k), np.float32)
    entries: dict[int, Any] = {Step.END: np.ascontiguousarray(logits, np.float32), Step.END + 1: experts}
    entries[Step.END + 2] = weights
    task = kernels.route_task(Step.END, Step.END + 1, Step.END + 2, count, params, bias, scales)
    run_step(Program([task]), entries, {Step.TOKENS: tokens}, threads)
    return experts, weights


def grouped_linear(x: Floats, w: PackedExperts, experts: Ints, bias: Floats | None, threads: int) -> Floats:
    """Multiply each token by the matrices of its experts: (T, columns) or (T, k, columns) -> (T, k, rows)."""
    chosen = np.ascontiguousarray(experts if x.ndim == 2 else experts.reshape(-1, 1), np.int64)
    tokens, k = chosen.shape
    rows = quantize_activations.pad_to_panels(tokens) * kernels.rows_per_token(k)
    places, out = np.empty(tokens * k, np.int64), np.empty((rows, w.rows), np.float32)
    whole = np.ascontiguousarray(x.reshape(tokens, -1), np.float32)
    lists = np.empty(rows, np.int64), places, np.empty(tokens * k * kernels.UNIT_NUMBERS, np.int64)
    entries: dict[int, Any] = dict(enumerate((chosen, *lists), Step.END))
    experts_at, groups = Step.END, Step.END + 1
    floats, floats_out, output, source = range(groups + len(GroupEntry), groups + len(GroupEntry) + 4)
    target = source + PANELS + 1
    entries |= {floats: whole, floats_out: np.empty((rows, w.columns), np.float32), output: out}
    entries |= dict(enumerate(quantize_activations.allocate(tokens, w.columns), source))
    entries |= dict(enumerate(quantize_activations.allocate(rows, w.columns), target))
    tasks = [kernels.group_task(experts_at, groups, w.count, k)]
    both, pairs = (floats, floats_out), (source, target)
    if w.needs_int8:
        tasks.append(quantize_task(Step.TOKENS, floats, source, w.columns, two_term=False))
    copies = both if w.needs_floats else (0, 0), pairs if w.needs_int8 else (0, 0)
    tasks.append(kernels.gather_task(groups, k, w.columns, *copies))
    tasks += grouped_tasks(w, groups, k, both, pairs, output, 0 if bias is None else bias, threads)
    run_step(Program(tasks), entries, {Step.TOKENS: tokens}, threads)
    return out[places].reshape(*experts.shape, w.rows)


def combine_rows(x: Floats, weights: Floats, shared: Floats | None, gate: Floats | None, threads: int) -> Floats:
    """Return the weighted sum over a token's experts, plus the shared one: (T, k, width) -> (T, width)."""
    tokens, k, width = x.shape
    out = np.empty((tokens, width), np.float32)
    arrays = x, weights, out, shared, gate
    entries = {Step.END + i: np.ascontiguousarray(array) for i, array in enumerate(arrays) if array is not None}
    extra = 0 if shared is None else Step.END + 3, 0 if gate is None else Step.END + 4
    task = kernels.combine_task(Step.END, Step.END + 1, 0, extra, Step.END + 2, width, k)
    run_step(Program([task]), entries, {Step.TOKENS: tokens}, threads)
    return out
