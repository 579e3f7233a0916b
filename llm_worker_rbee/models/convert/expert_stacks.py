"""The experts of a checkpoint in the layout of GGUF files: one tensor of all experts for each role.

safetensors have a tensor for each expert, or a stack with the rows of gate and up together. Stacks are made when they
are read: nothing is copied here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig
from ...errors import UnsupportedModelError
from ...weights import Checkpoint, Tensor
from ...weights.checkpoint import NO_BYTES, DeferredTensor
from ...weights.quants import BLOCK_TYPES, BlockType

EXPERT = re.compile(r"^(blk\.[0-9]+\.ffn_\w+)\.([0-9]+)\.weight$")
GATE_UP = "ffn_gate_up_exps"
F32 = BLOCK_TYPES["F32"]


def stack_experts(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with its experts stacked by role."""
    if config.experts is None:
        return dict(checkpoint.tensors)
    is_hf, stacks = checkpoint.format != "gguf", dict[str, Tensor]()
    separate: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in checkpoint.tensors.items():
        if expert := EXPERT.match(name):
            separate[f"{expert[1]}_exps.weight"][int(expert[2])] = tensor
        elif is_hf and name.endswith(f"{GATE_UP}.weight"):
            stacks |= _halves(tensor)
        elif name.endswith("ffn_gate_inp_shexp.weight"):
            stacks[name] = replace(tensor, shape=(tensor.size,))
        else:
            stacks[name] = tensor
    return stacks | {name: _stack(name, [parts[i] for i in sorted(parts)]) for name, parts in separate.items()}


def _deferred(
    name: str, kind: BlockType, shape: tuple[int, ...], sources: Sequence[Tensor], make: Callable[[], list[Tensor]]
) -> Tensor:
    """Return a stack of the results of `make`."""

    def join() -> NDArray[np.uint8]:
        return np.concatenate([tensor.load().data for tensor in make()])

    return DeferredTensor(name, kind, shape, NO_BYTES, sources=tuple(sources), make=join)


def _stack(name: str, experts: list[Tensor]) -> Tensor:
    kind, shape = experts[0].kind, experts[0].shape
    if any((expert.kind, expert.shape) != (kind, shape) for expert in experts):
        raise UnsupportedModelError(f"tensor {name!r}: experts have different types or shapes, so they make no stack")
    if any(expert.order is not None for expert in experts):  # each has its own
        return _deferred(name, F32, (len(experts), *shape), experts, lambda: [_as_floats(matrix) for matrix in experts])
    return _deferred(name, kind, (len(experts), *shape), experts, lambda: experts)


def _as_floats(tensor: Tensor) -> Tensor:
    return Tensor(
        tensor.name, F32, tensor.shape, np.ascontiguousarray(tensor.dequantize(), "<f4").reshape(-1).view("u1")
    )


def _halves(stack: Tensor) -> dict[str, Tensor]:
    """Return the stacks of gate and of up."""
    count, rows, columns = stack.shape
    return _gate_and_up(stack.name, stack.kind, (count, rows // 2, columns), [stack], lambda: stack.load().matrices())


def _gate_and_up(
    name: str,
    kind: BlockType,
    shape: tuple[int, int, int],
    sources: Sequence[Tensor],
    matrices: Callable[[], list[Tensor]],
) -> dict[str, Tensor]:
    """Return two stacks of matrices with rows of gate, then of up."""
    half = shape[1]
    parts = {"gate": slice(0, half), "up": slice(half, 2 * half)}

    def stack(part: str) -> Tensor:
        own = name.replace("gate_up", part)
        return _deferred(own, kind, shape, sources, lambda: [matrix.take_rows(parts[part]) for matrix in matrices()])

    return {stack_half.name: stack_half for stack_half in map(stack, parts)}
