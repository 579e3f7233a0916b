"""Random weights of any quantization type without an encoder: draw bytes, keep blocks whose values are usable.

A block is usable if its values are finite and of about the wanted size; a few thousand such blocks, repeated, make a
tensor of any size. For speed only.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..weights import Tensor
from ..weights.quants import BlockType

Seed = int | tuple[int, ...]
DRAWN_BLOCKS = 1 << 13  # a round
POOL_BLOCKS = 1021  # a prime number, so that the rows of a matrix differ
MAX_ROUNDS = 64
SPREAD = 4.0  # factor by which the size of a block's values may differ from the wanted one


def random_tensor(kind: BlockType, shape: tuple[int, ...], seed: Seed = 7, size: float | None = None) -> Tensor:
    """Make a tensor; `size` is the root mean square of its values, by default 1 / sqrt(columns)."""
    wanted = shape[-1] ** -0.5 if size is None else size
    rng = np.random.default_rng(seed)
    count = prod(shape[:-1]) * (kind.row_bytes(shape[-1]) // kind.block_bytes)
    data = np.resize(_rotate(block_pool(kind, float(np.float16(wanted))), rng), count * kind.block_bytes)
    return Tensor("random", kind, shape, data)


def _rotate(blocks: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    return np.roll(blocks, int(rng.integers(len(blocks))), axis=0).reshape(-1)


@lru_cache(maxsize=64)
def block_pool(kind: BlockType, size: float) -> NDArray[np.uint8]:
    """Return usable blocks of a type: (blocks, block_bytes)."""
    rng = np.random.default_rng(kind.id)
    if kind.block_size == 1:
        return _unquantized_values(kind, size, rng)
    kept: list[NDArray[np.uint8]] = []
    for _ in range(MAX_ROUNDS):
        blocks = rng.integers(0, 256, (DRAWN_BLOCKS, kind.block_bytes), np.uint8)
        kept.append(blocks[_is_usable(kind, blocks, size)])
        if sum(map(len, kept)) >= POOL_BLOCKS:
            break
    found = np.concatenate(kept)[:POOL_BLOCKS]
    assert len(found), f"no usable block of {kind.name} was drawn"
    return found


def _is_usable(kind: BlockType, blocks: NDArray[np.uint8], size: float) -> NDArray[np.bool_]:
    with np.errstate(all="ignore"):
        values = kind.decode(blocks)
        rms = np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=1))
        return np.asarray((rms > size / SPREAD) & (rms < size * SPREAD))  # NaN and infinity fail both


def _unquantized_values(kind: BlockType, size: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    values = (size * rng.standard_normal(65521)).astype(np.float32)
    if kind.name == "BF16":
        return np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8).reshape(-1, kind.block_bytes)
    narrow = values.astype({"F32": np.float32, "F16": np.float16}[kind.name])
    return narrow.view(np.uint8).reshape(-1, kind.block_bytes)
