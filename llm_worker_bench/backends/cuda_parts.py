"""Parts of ops one by one, for benchmarks: what a step fuses with others, or does not need. Float32, as given.

RoPE is the kernel of a step without the programs of the values. Scores are the product that the attention kernel
begins with, in a kernel of their own. No kernel has a mask: causality is the bound of a loop; here PyTorch makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

import torch
import triton
import triton.language as tl

from llm_worker_rbee.backends.cuda import cuda_graphs, device
from llm_worker_rbee.backends.cuda.device import shared_memory_bytes, upload
from llm_worker_rbee.backends.cuda.kernels.attention_prefill import SMALL_QUERY_TILE, prefill_tile
from llm_worker_rbee.backends.cuda.kernels.rope import load_first, padded_dim, rope_store_qkv, rope_tables
from llm_worker_rbee.backends.cuda.profile import CudaTrace as CudaTrace
from llm_worker_rbee.backends.ops import Ints, RopeTable

BLOCK = 16  # positions of a KV block


@triton.jit(do_not_specialize=["tokens"])
def score_tile(
    q,
    k,
    out,
    scale,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Write scores (HEADS, tokens, tokens) of q and k (tokens, HEADS, DIM). Program (queries, keys, head)."""
    head, i = tl.program_id(2), tl.arange(0, padded_dim(DIM))
    queries = tl.program_id(0) * TILE_QUERIES + tl.arange(0, TILE_QUERIES)
    keys = tl.program_id(1) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    row, column = tl.minimum(queries, tokens - 1), tl.minimum(keys, tokens - 1)
    x = load_first(q + (row[:, None] * HEADS + head) * DIM + i[None, :], DIM)
    y = load_first(k + (column[:, None] * HEADS + head) * DIM + i[None, :], DIM)
    scores = tl.dot(x, tl.trans(y), input_precision="ieee") * scale
    place = (head * tokens + queries[:, None]) * tokens + keys[None, :]
    tl.store(out + place, scores, mask=(queries < tokens)[:, None] & (keys < tokens)[None, :])


class CudaParts:
    """Launches of single parts, with their tensors."""

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: Ints, table: RopeTable
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Keys are returned as the cache has them: (blocks, heads, BLOCK, dim)."""
        (tokens, heads, dim), where = q.shape, q.device
        rows, places = (torch.arange(tokens, dtype=torch.int32, device=where) for _ in range(2))
        rope, qkv = rope_tables(table, upload(positions, where)), torch.cat((q, k, k), 1).contiguous()
        out, cache = torch.empty_like(q), torch.zeros(-(-tokens // BLOCK), heads, BLOCK, dim, device=where)
        each = gcd(heads, 8)

        def rotate() -> tuple[torch.Tensor, torch.Tensor]:
            rope_store_qkv[(2 * heads // each * tokens,)](
                qkv, rope.cos, rope.sin, rows, places, out, cache, cache, heads, heads, dim, rope.cos.shape[1], BLOCK,
                tokens=tokens, HEADS_PER_PROGRAM=each, GROUPS=2 * heads // each,
                num_warps=max(1, each // 2), enable_fp_fusion=False,
            )  # fmt: skip
            return out, cache

        return rotate

    def attention_scores(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> Callable[[], torch.Tensor]:
        tokens, heads, dim = q.shape
        out = torch.empty(heads, tokens, tokens, device=q.device)
        queries = SMALL_QUERY_TILE  # in float32, without tensor cores, tiles of 64 spill 7 KB of registers a thread
        keys, _ = prefill_tile(shared_memory_bytes(q.device), dim, q.element_size())
        grid = triton.cdiv(tokens, queries), triton.cdiv(tokens, keys), heads

        def score() -> torch.Tensor:
            score_tile[grid](q, k, out, scale, tokens, heads, dim, queries, keys, num_warps=4)
            return out

        return score

    def causal_mask(self, scores: torch.Tensor, *, cached: bool) -> Callable[[], torch.Tensor]:
        positions = torch.arange(scores.shape[-1], device=scores.device)
        masks = {len(positions): positions[:, None] >= positions}
        if cached:
            return lambda: torch.where(masks[len(positions)], scores, -torch.inf)
        return lambda: torch.where(positions[:, None] >= positions, scores, -torch.inf)


def prepare_calls(function: Callable[[], object], count: int, where: torch.device) -> Callable[[], object]:
    """Return a function that replays so many calls as one graph and waits; uncaptured under the interpreter."""
    if where.type == "cpu":
        return lambda: [function() for _ in range(count)]
    function()  # compiles and loads its kernels
    graphs = cuda_graphs.CudaGraphs(where)

    def calls() -> None:
        for _ in range(count):
            function()

    def replay() -> None:
        graphs.run("calls", calls)
        torch.cuda.current_stream(where).synchronize()

    device.activate(where)
    graphs.capture("calls", calls)
    return replay


def measure_limits(
    where: torch.device, size: int = 1 << 30, width: int = 8192
) -> tuple[int, float, float, dict[str, float]]:
    """Return the bytes of a read, the bytes per second of the faster of a read and a copy, and the operations per
    second of matrix products: in float16, and by name in e4m3 where the device has it."""
    data, copied = (torch.ones(size // 4, device=where) for _ in range(2))
    bandwidth = max(size / _min_seconds(data.sum), 2 * size / _min_seconds(lambda: copied.copy_(data)))
    a = torch.ones(width, width, dtype=torch.float16, device=where)
    others = {}
    if device.has_fp8(where):
        e4m3, unit = a.to(torch.float8_e4m3fn), torch.ones((), device=where)
        multiply = partial(torch._scaled_mm, e4m3, e4m3.T, unit, unit, out_dtype=torch.bfloat16, use_fast_accum=True)
        others["fp8"] = 2 * width**3 / _min_seconds(multiply)
    return size, bandwidth, 2 * width**3 / _min_seconds(lambda: a @ a), others


def _min_seconds(work: Callable[[], object], count: int = 20) -> float:
    seconds = []
    for _ in range(count + 1):  # the first one warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(float(begin.elapsed_time(end)) / 1e3)
    return min(seconds[1:])


def peak_memory(where: torch.device) -> dict[str, int]:
    """Return the largest bytes so far of tensors and of the process on a GPU."""
    (free, total), reserved = torch.cuda.mem_get_info(where), torch.cuda.memory_reserved
    taken = total - free - reserved(where) + torch.cuda.max_memory_reserved(where)
    return {"tensors": torch.cuda.max_memory_allocated(where), "process": taken}
