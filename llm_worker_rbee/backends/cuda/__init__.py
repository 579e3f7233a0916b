"""The CUDA backend: Triton kernels on PyTorch tensors. `reference.py` defines what each op computes.

Weights are repacked when they are prepared (repack.py), activations are float32 on the device, keys and values
bfloat16, float16, float32 or float8 in (blocks, kv_heads, P, dim). Whole steps go through decoder.py; unfused ops serve
comparison, and the families that it does not take. Their arrays of a step are uploaded once and serve all layers: those
of a Batch never change. Under Triton's interpreter all of it runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from triton import cdiv

from ... import machine
from ...config import KV_CUDA, KV_ON_CUDA
from ...errors import InvalidRequestError
from ...weights import Checkpoint, Tensor
from .. import ops, select
from ..graph import Graph
from ..ops import Ints, KVLayer
from . import decoder, device, linear, sampling
from .attention_prefill import QUERY_TILE, SMALL_QUERY_TILE, prefill_attention, prefill_tile, query_tiles
from .device import is_interpreted, upload
from .elementwise import IS_GELU, gated_rows, launch_rms_norm, launch_rope_store
from .packed_weight import E4M3, E4M3_MAX, PackedWeight
from .repack import pack_weight

KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float8": E4M3}
GATE_TILE = 1024  # columns of a program


class _StepRope(NamedTuple):
    """Cosines and sines of the tokens of a step and their slots, and the host arrays that they were made from."""

    source: tuple[Any, ...]
    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor


class _QueryTiles(NamedTuple):
    """Runs of queries of one request, and the other arrays that the attention kernel reads."""

    batch: ops.Batch
    queries: int
    arrays: tuple[torch.Tensor, ...]  # query_start, context_len, tile_request, tile_first
    block_tables: torch.Tensor


class CudaBackend(ops.Backend):
    """Ops on one GPU; `deterministic` makes products and attention batch-invariant, which costs speed (docs/gpu.md)."""

    name = "cuda"
    kv_types = KV_ON_CUDA
    default_kv_type = KV_CUDA
    has_device_memory = True
    has_async_sampling = True

    def __init__(self, index: int | None = None, *, deterministic: bool = False) -> None:
        """Take GPU `index`, by default the one with most free memory."""
        self.torch_device = device.open_device(index)
        self.device = str(self.torch_device)
        self.deterministic = deterministic
        self._ropes: list[_StepRope] = []  # of the last two tables: a model has two at most
        self._tiles: list[_QueryTiles] = []  # of the last batch
        self._frequencies: dict[int, tuple[NDArray[np.float32], torch.Tensor]] = {}  # by id of the host's, kept alive

    def free_memory(self) -> int:
        """Return the free bytes, with what the allocator holds in reserve."""
        if self.torch_device.type == "cpu":
            return machine.memory()[1] or 0
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free + torch.cuda.memory_reserved(self.torch_device) - self.allocated_memory())

    def allocated_memory(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device)) if self.torch_device.type == "cuda" else 0

    def peak_memory(self) -> dict[str, int]:
        (free, total), reserved = torch.cuda.mem_get_info(self.torch_device), torch.cuda.memory_reserved
        taken = total - free - reserved(self.torch_device) + torch.cuda.max_memory_reserved(self.torch_device)
        return {"tensors": torch.cuda.max_memory_allocated(self.torch_device), "process": taken}

    def measure_limits(self) -> tuple[int, float, float]:
        return device.measure_limits(self.torch_device)

    def has_failed(self) -> bool:
        """Return whether the device cannot compute any more: an illegal access ends all that a process can do on it."""
        if self.torch_device.type == "cpu":
            return False
        try:
            torch.cuda.synchronize(self.torch_device)
        except Exception:  # any error means that no result will come
            return True
        return False

    def weight_bytes(self, checkpoint: Checkpoint, types: Mapping[str, str] | None = None) -> int:
        return select.packed_bytes(checkpoint, types)

    def require_fp8(self) -> None:
        device.require_fp8(self.torch_device)

    def prepare(self, tensors: Sequence[Tensor]) -> PackedWeight:
        with device.as_memory_error():
            return pack_weight(tensors, self.torch_device)

    def prepare_vector(self, values: NDArray[np.float32]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.torch_device)

    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "bfloat16") -> KVLayer:
        if kind not in KV_DTYPES:
            remedy = f"use one of {', '.join(KV_DTYPES)}"
            raise InvalidRequestError(f"kv_type {kind!r} is not for a GPU: {remedy}", "kv_type")
        shape = (blocks, kv_heads, block_size, head_dim)
        with device.as_memory_error():
            return KVLayer(*(torch.zeros(shape, dtype=KV_DTYPES[kind], device=self.torch_device) for _ in range(2)))

    def embed(self, table: PackedWeight, ids: Ints, scale: float = 1.0) -> torch.Tensor:
        device.activate(self.torch_device)  # the first op of a step
        rows = table.dequantize_rows(upload(ids, self.torch_device, torch.int64))
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, weight, eps, residual)

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(residual + x), residual + x) over the last axis; with three axes x may be a strided view."""
        total = x if residual is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return launch_rms_norm(x, weight, eps, residual, None if residual is None else total), total

    def linear(self, x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._linear(x, w)
        return out if bias is None else out + bias

    def _linear(self, x: torch.Tensor, w: PackedWeight, *, two_term: bool = False) -> torch.Tensor:
        return linear.linear_batch_invariant(x, w) if self.deterministic else linear.linear(x, w, two_term=two_term)

    def rope_store(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Ints, table: ops.RopeTable, kv: KVLayer,
        slot_mapping: Ints,
    ) -> torch.Tensor:  # fmt: skip
        """Return q in the attention kernel's dtype."""
        if is_interpreted() and kv.k.dtype == E4M3:  # which the interpreter rounds wrongly (1.99 -> 1)
            wide = KVLayer(kv.k.float(), kv.v.float())
            rotated = self.rope_store(q, k, v, positions, table, wide, slot_mapping)
            for cache, values in zip(kv, wide, strict=True):
                cache.copy_(values.clamp(-E4M3_MAX, E4M3_MAX))
            return rotated
        rope = self._step_rope(positions, table, slot_mapping)
        out = torch.empty(q.shape, dtype=query_dtype(kv.k.dtype), device=q.device)
        launch_rope_store(q, k, v, rope.cos, rope.sin, rope.slot_mapping, out, kv)
        return out

    def _step_rope(self, positions: Ints, table: ops.RopeTable, slots: Ints) -> _StepRope:
        source = (positions, slots, table.inv_freq)
        for rope in self._ropes:
            if all(a is b for a, b in zip(rope.source, source, strict=True)):
                return rope
        key = id(table.inv_freq)
        if key not in self._frequencies:
            self._frequencies[key] = (table.inv_freq, torch.tensor(table.inv_freq, device=self.torch_device))
        angle = upload(positions, self.torch_device, torch.float32)[:, None] * self._frequencies[key][1]
        cos, sin = torch.cos(angle) * table.scale, torch.sin(angle) * table.scale
        made = _StepRope(source, cos, sin, upload(slots, self.torch_device))
        self._ropes[:] = [made, *self._ropes[:1]]
        return made

    def attention(self, q: torch.Tensor, kv: KVLayer, batch: ops.Batch, params: ops.AttentionParams) -> torch.Tensor:
        tokens, heads, dim = q.shape
        kv_heads, block_size = kv.k.shape[1:3]
        # Batch-invariant: the tile has a fixed number of queries, so a query's sums depend on its keys alone.
        tiles = self._query_tiles(batch, SMALL_QUERY_TILE if self.deterministic else 0)
        out = torch.empty(tokens, heads * dim, dtype=torch.float32, device=q.device)
        start, lengths, requests, firsts = tiles.arrays
        keys, stages = prefill_tile(device.shared_memory_bytes(self.torch_device), dim, q.element_size())
        prefill_attention[(len(requests), heads)](
            q.contiguous(), kv.k, kv.v, tiles.block_tables, tiles.block_tables.shape[1], start, lengths, requests,
            firsts, out, params.scale, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, P=block_size,
            TILE_QUERIES=tiles.queries, TILE_KEYS=keys, WINDOW=params.window, CAP=params.soft_cap,
            num_warps=4, num_stages=stages,
        )  # fmt: skip
        return out

    def _query_tiles(self, batch: ops.Batch, queries: int) -> _QueryTiles:
        """Return the tiles of this step; by default of 16 queries if no request has more, else of 64."""
        tiles = self._tiles[:1]  # other threads have steps of their own
        if tiles and tiles[0].batch is batch and queries in (0, tiles[0].queries):
            return tiles[0]
        longest = np.diff(batch.query_start).max()
        queries = queries or (SMALL_QUERY_TILE if longest <= SMALL_QUERY_TILE else QUERY_TILE)
        arrays = batch.query_start, batch.context_len, *query_tiles(batch.query_start, queries)
        uploaded = tuple(upload(array, self.torch_device) for array in arrays)
        made = _QueryTiles(batch, queries, uploaded, upload(batch.block_table, self.torch_device))
        self._tiles[:] = [made]
        return made

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(tokens, width, dtype=torch.float32, device=gate_up.device)
        grid = (cdiv(width, GATE_TILE), tokens)
        gated_rows[grid](gate_up.contiguous(), out, width, SIZE=GATE_TILE, GELU=IS_GELU[activation])
        return out

    def take(self, x: torch.Tensor, index: Ints) -> torch.Tensor:
        return x[upload(index, self.torch_device, torch.int64)]

    def logits(self, x: torch.Tensor, head: PackedWeight, soft_cap: float = 0.0) -> torch.Tensor:
        raw = self._linear(x, head, two_term=True)
        return soft_cap * torch.tanh(raw / soft_cap) if soft_cap else raw

    def fuse(self, record: Callable[[], Graph]) -> ops.FusedForward | None:
        return decoder.fuse(record, self.torch_device, batch_invariant=self.deterministic)

    def sample_async(self, raw_logits: torch.Tensor, rows: Sequence[ops.SampleRow]) -> sampling.PendingSample:
        return sampling.PendingSample(sampling.sample_on_device(raw_logits, rows))

    def sample(self, raw_logits: torch.Tensor, rows: Sequence[ops.SampleRow]) -> Ints:
        return sampling.sample(raw_logits, rows)

    def logprobs(self, raw_logits: torch.Tensor, chosen: Ints, k: int) -> ops.Logprobs:
        return sampling.logprobs(raw_logits, chosen, k)


def query_dtype(cache: torch.dtype) -> torch.dtype:
    """Return the dtype of scores' operands: the cache's, where the tensor cores (and the interpreter) have it."""
    if is_interpreted():
        return torch.float32
    return torch.bfloat16 if cache == E4M3 else cache
