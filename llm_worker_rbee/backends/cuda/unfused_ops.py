"""One op at a time: the launches of rowwise.py and of the attention kernel. paged.py is their twin in plain torch.

The arrays of a step are uploaded once and serve all layers: those of a Batch never change once it is made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from triton import cdiv, next_power_of_2

from ..ops import AttentionParams, Batch, Ints, KVLayer, RopeTable
from . import paged
from .attention_decode import keys_for
from .attention_prefill import prefill_attention
from .device import current, interpreting, upload
from .elementwise import gate_rows, norm_rows, rotate_store, to_bytes
from .packed_weight import Bytes

GELU = {"silu": False, "gelu_tanh": True}
WIDE = 1024  # values of a gate that a program has


class Angles(NamedTuple):
    """Cosines and sines of the tokens of a step, and where their keys go; for which arrays of the host."""

    of: tuple[Any, ...]
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor


class Tiles(NamedTuple):
    """Runs of queries of one request, and what else the attention kernel reads."""

    of: Batch
    queries: int
    arrays: tuple[torch.Tensor, ...]  # query_start, context_len, tile_request, tile_first
    tables: torch.Tensor


_angles: list[Angles] = []  # of the last tables that were asked for: a model has two at most
_tiles: list[Tiles] = []


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(residual + x), residual + x) over the last axis; of three axes the first two may be a view's."""
    width = x.shape[-1]
    rows = x if x.dim() == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, width)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    total = torch.empty_like(out) if residual is not None else out
    norm_rows[(rows.shape[0] * rows.shape[1],)](
        rows, x if residual is None else residual.contiguous(), weight, out, total, eps, rows.shape[1], rows.stride(0),
        rows.stride(1), width=width, SIZE=next_power_of_2(width), ADD=residual is not None,
        num_warps=1 if width <= 256 else 8,
    )  # fmt: skip
    return out, total


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=torch.float32, device=gate_up.device)
    grid = (cdiv(width, WIDE), tokens)
    gate_rows[grid](gate_up.contiguous(), out, width, SIZE=WIDE, GELU=GELU[activation])
    return out


def as_bytes(x: torch.Tensor, rows: int, fine: bool) -> Bytes:
    """x (T, columns) as bytes, and what they lost as T further rows if `fine`; filled up with zeros to `rows`."""
    blocks = x.shape[1] // 32
    make = torch.empty if rows == len(x) * (1 + fine) else torch.zeros
    shapes = ((rows, 8, blocks), torch.int32), ((rows, blocks), torch.float32), ((rows, 2, blocks), torch.float32)
    out = Bytes(*(make(shape, dtype=dtype, device=x.device) for shape, dtype in shapes))
    kb = 64 if interpreting() else 8
    to_bytes[(cdiv(blocks, kb), len(x))](
        x, out.q.view(torch.int8), out.d, out.s, len(x), blocks, KB=kb, FINE=fine, num_warps=2
    )
    return out


def rope_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Ints, table: RopeTable, kv: KVLayer, slots: Ints
) -> torch.Tensor:
    """Rotate q and k, write k and v into the cache, give back q as the attention kernel wants it."""
    if interpreting() and kv.k.dtype == torch.float8_e4m3fn:  # which the interpreter rounds wrongly (1.99 -> 1)
        return paged.rope_store(q, k, v, positions, table, kv, slots)
    tokens, heads, dim = q.shape
    angles = angles_of(positions, table, slots)
    out = torch.empty(tokens, heads, dim, dtype=query_type(kv.k.dtype), device=q.device)
    kv_heads, size = kv.k.shape[1:3]
    rotate_store[(heads + 2 * kv_heads, tokens)](
        q, k, v, angles.cos, angles.sin, angles.slots, out, kv.k, kv.v, *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2],
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=next_power_of_2(dim), HALF=len(table.inv_freq), P=size,
        LARGEST=paged.LARGEST_FLOAT8 if kv.k.dtype == torch.float8_e4m3fn else 0.0, num_warps=1,
    )  # fmt: skip
    return out


def query_type(cache: torch.dtype) -> torch.dtype:
    """What scores are computed in: the cache's own numbers, where the tensor cores (and the interpreter) have them."""
    if interpreting():
        return torch.float32
    return torch.bfloat16 if cache == torch.float8_e4m3fn else cache


def angles_of(positions: Ints, table: RopeTable, slots: Ints) -> Angles:
    """Those of this step and table, computed once: angles in float32, as everywhere."""
    key = (positions, slots, table.inv_freq)
    for held in _angles:
        if all(a is b for a, b in zip(held.of, key, strict=True)):
            return held
    angle = upload(positions, torch.float32)[:, None] * _on_device(table.inv_freq)
    made = Angles(key, torch.cos(angle) * table.scale, torch.sin(angle) * table.scale, upload(slots))
    _angles[:] = [made, *_angles[:1]]
    return made


_frequencies: dict[int, tuple[NDArray[np.float32], torch.Tensor]] = {}  # by the host's table, which is kept alive


def _on_device(inv_freq: NDArray[np.float32]) -> torch.Tensor:
    if id(inv_freq) not in _frequencies:
        _frequencies[id(inv_freq)] = (inv_freq, torch.tensor(inv_freq, device=current()))
    return _frequencies[id(inv_freq)][1]


def attention(q: torch.Tensor, kv: KVLayer, batch: Batch, params: AttentionParams, queries: int = 0) -> torch.Tensor:
    """Each query over its own request's cached keys: (T, heads, dim) -> (T, heads * dim). With a number of `queries` of
    a program its sums depend on the query alone: keys are taken from the first on, 64 at a time."""
    tokens, heads, dim = q.shape
    kv_heads, size = kv.k.shape[1:3]
    tiles = tiles_of(batch, queries)
    out = torch.empty(tokens, heads * dim, dtype=torch.float32, device=q.device)
    start, lengths, requests, firsts = tiles.arrays
    keys, stages = keys_for(dim, q.element_size())
    prefill_attention[(len(requests), heads)](
        q.contiguous(), kv.k, kv.v, tiles.tables, tiles.tables.shape[1], start, lengths, requests, firsts, out,
        params.scale, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, P=size, QUERIES=tiles.queries, KEYS=keys,
        WINDOW=params.window, CAP=params.soft_cap, SIZE=max(16, next_power_of_2(dim)), num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def tiles_of(batch: Batch, queries: int = 0) -> Tiles:
    """Those of this step, made once: so many queries at a time; by default 16 where nobody has more, else 64."""
    held = _tiles[:1]  # other threads have steps of their own
    if held and held[0].of is batch and queries in (0, held[0].queries):
        return held[0]
    counts = np.diff(batch.query_start)
    queries = queries or (16 if counts.max() <= 16 else 64)
    each = -(-counts // queries)
    requests = np.repeat(np.arange(len(counts)), each)
    firsts = (np.arange(len(requests)) - (np.cumsum(each) - each)[requests]) * queries
    arrays = tuple(upload(a) for a in (batch.query_start, batch.context_len, requests, firsts))
    made = Tiles(batch, queries, arrays, upload(batch.block_table))
    _tiles[:] = [made]
    return made
