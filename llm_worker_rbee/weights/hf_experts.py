"""The experts of gpt-oss in safetensors, with the names and the order of a GGUF.

Floats are stored transposed, (experts, columns, rows), and the rows of gate and up alternate. MXFP4 is stored by blocks
of 32 columns, (experts, rows, columns / 32, 16), whose byte i holds columns 2 i and 2 i + 1 (in a GGUF block: i and
i + 16), with a tensor of E8M0 scales, (experts, rows, columns / 32). It stays packed: the bits only move, when a layer
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError
from .checkpoint import NO_BYTES, DeferredTensor, Tensor
from .quants import BLOCK_TYPES, BlockType

Bytes = NDArray[np.uint8]
MXFP4 = BLOCK_TYPES["MXFP4"]
BLOCK = np.dtype([("scale", np.uint8), ("codes", "V16")])
SLAB_BLOCKS = 1 << 13  # at a time: they stay in a cache
LOW_NIBBLES, FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
ALL, EVEN, ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
ROWS_OF_ROLES = {"gate_up": {"gate": EVEN, "up": ODD}, "down": {"down": ALL}}


class _Stack(NamedTuple):
    """The weights or the biases of all experts: (experts, rows, columns) or (experts, rows)."""

    suffix: str
    kind: BlockType
    shape: tuple[int, ...]
    sources: dict[str, Tensor]  # by the suffixes of their names
    take: Callable[[slice], NDArray[Any]]  # some rows of all experts


def rearrange_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with gpt-oss's experts rearranged: only these experts have biases."""
    out = dict(tensors)
    for name in [name for name in tensors if name.endswith("ffn_gate_up_exps.bias")]:
        prefix = name.removesuffix("gate_up_exps.bias")
        for stacked, roles in ROWS_OF_ROLES.items():
            for stack in list(_stacks(out, f"{prefix}{stacked}_exps")):
                for suffix in stack.sources:
                    del out[f"{prefix}{stacked}_exps.{suffix}"]
                for i, (role, rows) in enumerate(roles.items()):
                    tensor = _deferred(f"{prefix}{role}_exps.{stack.suffix}", stack, rows, i, len(roles))
                    out[tensor.name] = tensor
    return out


def _stacks(tensors: Mapping[str, Tensor], name: str) -> Iterator[_Stack]:
    bias, floats, blocks, scales = (
        tensors.get(f"{name}.{suffix}") for suffix in ("bias", "weight", "blocks", "scales")
    )
    if bias is not None and len(bias.shape) == 2:
        yield _Stack("bias", bias.kind, bias.shape, {"bias": bias}, partial(_take_floats, bias, (0, 1)))
    if floats is not None and len(floats.shape) == 3:
        count, columns, rows = floats.shape
        take = partial(_take_floats, floats, (0, 2, 1))
        yield _Stack("weight", floats.kind, (count, rows, columns), {"weight": floats}, take)
    elif blocks is not None and scales is not None:
        is_bytes = blocks.kind.block_bytes == scales.kind.block_bytes == 1
        if not is_bytes or len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            names = f"{blocks.name!r} {blocks.shape} and {scales.name!r} {scales.shape}"
            raise ModelFileError(f"tensors {names} are no MXFP4 blocks and scales")
        shape, sources = (*blocks.shape[:2], 32 * blocks.shape[2]), {"blocks": blocks, "scales": scales}
        yield _Stack("weight", MXFP4, shape, sources, partial(_take_blocks, blocks, scales))


def _deferred(name: str, stack: _Stack, rows: slice, part: int, parts: int) -> Tensor:
    """Return some rows of all experts. The bytes of the file are divided among its parts, for totals."""
    count, every, *columns = stack.shape
    shape = (count, len(range(every)[rows]), *columns)
    sources = tuple(replace(source, data=np.array_split(source.data, parts)[part]) for source in stack.sources.values())
    return DeferredTensor(name, stack.kind, shape, NO_BYTES, sources=sources, make=partial(_bytes_of, stack, rows))


def _bytes_of(stack: _Stack, rows: slice) -> Bytes:
    return np.ascontiguousarray(stack.take(rows)).reshape(-1).view(np.uint8)


def _take_floats(tensor: Tensor, axes: tuple[int, ...], rows: slice) -> NDArray[Any]:
    values = tensor.data.view(f"<u{tensor.kind.block_bytes}").reshape(tensor.shape)
    return values.transpose(axes)[:, rows]


def _take_blocks(blocks: Tensor, scales: Tensor, rows: slice) -> Bytes:
    return gguf_mxfp4_blocks(blocks.data.reshape(blocks.shape)[:, rows], scales.data.reshape(scales.shape)[:, rows])


def gguf_mxfp4_blocks(codes: Bytes, scales: Bytes) -> Bytes:
    """Return MXFP4 blocks of GGUF, (..., 17), of codes in the order of columns, (..., 16), and scales, (...)."""
    words, out = np.ascontiguousarray(codes).view("<u8").reshape(-1, 2), np.empty(scales.size, BLOCK)
    out["scale"] = scales.reshape(-1)
    for start in range(0, len(words), SLAB_BLOCKS):
        first, last = words[start : start + SLAB_BLOCKS].T  # columns 0 .. 15 and 16 .. 31
        even = ((first & LOW_NIBBLES) | ((last & LOW_NIBBLES) << FOUR)).view(np.uint8).astype("<u2")
        odd = (((first >> FOUR) & LOW_NIBBLES) | (last & ~LOW_NIBBLES)).view(np.uint8).astype("<u2")
        out["codes"][start : start + SLAB_BLOCKS] = ((odd << np.uint16(8)) | even).view("V16")
    return out.view(np.uint8).reshape(*scales.shape, MXFP4.block_bytes)
