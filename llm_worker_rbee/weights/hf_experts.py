"""The experts of gpt-oss in safetensors as stacks of matrices like those of a GGUF, one layer at a time.

Floats are stored transposed, (experts, columns, rows), and the rows of gate and up alternate. MXFP4 is stored by blocks
of 32 columns, (experts, rows, columns / 32, 16), whose byte i holds columns 2 i and 2 i + 1 (in a GGUF block: i and
i + 16), with a tensor of E8M0 scales, (experts, rows, columns / 32). It stays packed: the bits only move.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError
from .checkpoint import Tensor
from .quants import BLOCK_TYPES

Bytes = NDArray[np.uint8]
MXFP4 = BLOCK_TYPES["MXFP4"]


def float_matrices(stack: Tensor, *, interleaved: bool) -> list[Tensor]:
    """Return the matrix of each expert, (rows, columns), of a stack of transposed ones."""
    count, columns, rows = stack.shape
    values = stack.data.view(f"u{stack.kind.block_bytes}").reshape(count, columns, rows)
    return [_matrix(stack, i, _rows_in_order(one.T, interleaved), columns) for i, one in enumerate(values)]


def mxfp4_matrices(blocks: Tensor, scales: Tensor, *, interleaved: bool) -> list[Tensor]:
    """Return the matrix of each expert as MXFP4 blocks of GGUF."""
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise ModelFileError(
            f"tensors {blocks.name!r} {blocks.shape} and {scales.name!r} {scales.shape} are no MXFP4 blocks and scales"
        )
    columns = 32 * blocks.shape[2]
    pairs = zip(blocks.data.reshape(blocks.shape), scales.data.reshape(scales.shape), strict=True)
    made = (gguf_mxfp4_blocks(_rows_in_order(x, interleaved), _rows_in_order(s, interleaved)) for x, s in pairs)
    return [_matrix(replace(blocks, kind=MXFP4), i, rows, columns) for i, rows in enumerate(made)]


def gguf_mxfp4_blocks(codes: Bytes, scales: Bytes) -> Bytes:
    """Return MXFP4 blocks of GGUF, (..., 17), of codes in the order of columns, (..., 16), and scales, (...)."""
    out = np.empty((*scales.shape, MXFP4.block_bytes), np.uint8)
    out[..., 0] = scales
    first, last = codes[..., :8], codes[..., 8:]
    out[..., 1::2] = (first & 15) | (last << 4)
    out[..., 2::2] = (first >> 4) | (last & 0xF0)
    return out


def deinterleave(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return gate, then up, of vectors in which they alternate."""
    return np.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1)


def _rows_in_order(rows: NDArray[Any], interleaved: bool) -> NDArray[Any]:
    return np.concatenate([rows[0::2], rows[1::2]]) if interleaved else rows


def _matrix(stack: Tensor, number: int, rows: NDArray[Any], columns: int) -> Tensor:
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    return replace(stack, name=f"{stack.name}[{number}]", shape=(len(rows), columns), data=data)
