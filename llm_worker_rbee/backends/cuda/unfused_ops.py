"""Ops one at a time, for models that the fused decoder does not take, and for comparison; and the KV cache's arrays.

The cache is (blocks, kv_heads, P, dim). Arrays of a step are uploaded once and serve all layers: those of a Batch never
change. The caches of uploads belong to the object, one per backend.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from triton import cdiv, next_power_of_2

from ...errors import InvalidRequestError
from ..ops import AttentionParams, Batch, Ints, KVLayer, RopeTable
from .attention_prefill import prefill_attention, prefill_tile
from .device import as_memory_error, is_interpreted, shared_memory_bytes, upload
from .elementwise import gated_rows, rms_norm_rows, rope_store_rows
from .fp8 import E4M3, E4M3_MAX

KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float8": E4M3}
IS_GELU = {"silu": False, "gelu_tanh": True}
GATE_TILE = 1024  # columns of a program
SMALL_QUERY_TILE, QUERY_TILE = 16, 64  # queries of a program


class _StepRope(NamedTuple):
    """Cosines and sines of the tokens of a step and their slots, and the host arrays that they were made from."""

    source: tuple[Any, ...]
    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor


class _QueryTiles(NamedTuple):
    """Runs of queries of one request, and the other arrays that the attention kernel reads."""

    batch: Batch
    queries: int
    arrays: tuple[torch.Tensor, ...]  # query_start, context_len, tile_request, tile_first
    block_tables: torch.Tensor


def empty_kv(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str, device: torch.device) -> KVLayer:
    """Allocate the keys and values of one layer."""
    if kind not in KV_DTYPES:
        raise InvalidRequestError(f"kv_type {kind!r} is not for a GPU: use one of {', '.join(KV_DTYPES)}", "kv_type")
    shape = (blocks, kv_heads, block_size, head_dim)
    with as_memory_error():
        k, v = (torch.zeros(shape, dtype=KV_DTYPES[kind], device=device) for _ in range(2))
    return KVLayer(k, v)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(residual + x), residual + x) over the last axis; with three axes x may be a strided view."""
    width = x.shape[-1]
    rows = x if x.dim() == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, width)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    total = torch.empty_like(out) if residual is not None else out
    rms_norm_rows[(rows.shape[0] * rows.shape[1],)](
        rows, x if residual is None else residual.contiguous(), weight, out, total, eps, rows.shape[1], rows.stride(0),
        rows.stride(1), width=width, SIZE=next_power_of_2(width), ADD=residual is not None,
        num_warps=1 if width <= 256 else 8,
    )  # fmt: skip
    return out, total


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) * up."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=torch.float32, device=gate_up.device)
    grid = (cdiv(width, GATE_TILE), tokens)
    gated_rows[grid](gate_up.contiguous(), out, width, SIZE=GATE_TILE, GELU=IS_GELU[activation])
    return out


def query_dtype(cache: torch.dtype) -> torch.dtype:
    """Return the dtype of scores' operands: the cache's, where the tensor cores (and the interpreter) have it."""
    if is_interpreted():
        return torch.float32
    return torch.bfloat16 if cache == E4M3 else cache


class UnfusedOps:
    """RoPE + cache write and attention on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ropes: list[_StepRope] = []  # of the last two tables: a model has two at most
        self._tiles: list[_QueryTiles] = []  # of the last batch
        self._frequencies: dict[int, tuple[NDArray[np.float32], torch.Tensor]] = {}  # by id of the host's, kept alive

    def rope_store(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Ints, table: RopeTable, kv: KVLayer,
        slots: Ints,
    ) -> torch.Tensor:  # fmt: skip
        """Rotate q and k, write k and v into the cache, and return q in the attention kernel's dtype."""
        rope = self._step_rope(positions, table, slots)
        if is_interpreted() and kv.k.dtype == E4M3:  # which the interpreter rounds wrongly (1.99 -> 1)
            return rope_store_torch(q, k, v, rope.cos, rope.sin, kv, slots)
        tokens, heads, dim = q.shape
        out = torch.empty(tokens, heads, dim, dtype=query_dtype(kv.k.dtype), device=q.device)
        kv_heads, block_size = kv.k.shape[1:3]
        rope_store_rows[(heads + 2 * kv_heads, tokens)](
            q, k, v, rope.cos, rope.sin, rope.slot_mapping, out, kv.k, kv.v, *q.stride()[:2], *k.stride()[:2],
            *v.stride()[:2],
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=next_power_of_2(dim), HALF=len(table.inv_freq), P=block_size,
            MAX_VALUE=E4M3_MAX if kv.k.dtype == E4M3 else 0.0, num_warps=1,
        )  # fmt: skip
        return out

    def attention(
        self, q: torch.Tensor, kv: KVLayer, batch: Batch, params: AttentionParams, *, batch_invariant: bool = False
    ) -> torch.Tensor:
        """Attend each query to its own request's keys: (T, heads, dim) -> (T, heads * dim). Batch-invariant: the tile
        has a fixed number of queries, so a query's sums depend on its keys alone."""
        tokens, heads, dim = q.shape
        kv_heads, block_size = kv.k.shape[1:3]
        tiles = self._query_tiles(batch, SMALL_QUERY_TILE if batch_invariant else 0)
        out = torch.empty(tokens, heads * dim, dtype=torch.float32, device=q.device)
        start, lengths, requests, firsts = tiles.arrays
        keys, stages = prefill_tile(shared_memory_bytes(self.device), dim, q.element_size())
        prefill_attention[(len(requests), heads)](
            q.contiguous(), kv.k, kv.v, tiles.block_tables, tiles.block_tables.shape[1], start, lengths, requests,
            firsts, out, params.scale, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, P=block_size,
            TILE_QUERIES=tiles.queries, TILE_KEYS=keys, WINDOW=params.window, CAP=params.soft_cap,
            DIM_PADDED=max(16, next_power_of_2(dim)), num_warps=4, num_stages=stages,
        )  # fmt: skip
        return out

    def _step_rope(self, positions: Ints, table: RopeTable, slots: Ints) -> _StepRope:
        source = (positions, slots, table.inv_freq)
        for rope in self._ropes:
            if all(a is b for a, b in zip(rope.source, source, strict=True)):
                return rope
        key = id(table.inv_freq)
        if key not in self._frequencies:
            self._frequencies[key] = (table.inv_freq, torch.tensor(table.inv_freq, device=self.device))
        angle = upload(positions, self.device, torch.float32)[:, None] * self._frequencies[key][1]
        cos, sin = torch.cos(angle) * table.scale, torch.sin(angle) * table.scale
        made = _StepRope(source, cos, sin, upload(slots, self.device))
        self._ropes[:] = [made, *self._ropes[:1]]
        return made

    def _query_tiles(self, batch: Batch, queries: int) -> _QueryTiles:
        """Return the tiles of this step; by default of 16 queries if no request has more, else of 64."""
        tiles = self._tiles[:1]  # other threads have steps of their own
        if tiles and tiles[0].batch is batch and queries in (0, tiles[0].queries):
            return tiles[0]
        counts = np.diff(batch.query_start)
        queries = queries or (SMALL_QUERY_TILE if counts.max() <= SMALL_QUERY_TILE else QUERY_TILE)
        each = -(-counts // queries)
        requests = np.repeat(np.arange(len(counts)), each)
        firsts = (np.arange(len(requests)) - (np.cumsum(each) - each)[requests]) * queries
        arrays = tuple(upload(array, self.device) for array in (batch.query_start, batch.context_len, requests, firsts))
        made = _QueryTiles(batch, queries, arrays, upload(batch.block_table, self.device))
        self._tiles[:] = [made]
        return made


def rope_store_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVLayer, slots: Ints
) -> torch.Tensor:
    """Do what `rope_store` does, in plain torch."""
    size = kv.k.shape[2]
    block, offset = upload(np.stack((slots // size, slots % size)), q.device, torch.int64)
    for cache, new in ((kv.k, _rotate(k, cos, sin)), (kv.v, v)):
        if cache.dtype == E4M3:  # moved as bytes: few torch ops take float8
            narrow = new.clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
            cache.view(torch.uint8)[block, :, offset] = narrow.view(torch.uint8)
        else:
            cache[block, :, offset] = new.to(cache.dtype)
    return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * half values of each head of x (T, heads, dim): value i pairs with value i + half."""
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), -1)
