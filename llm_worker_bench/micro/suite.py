"""The Rust worker's suite by name, on every backend: float32, batch 1, hidden 4096, 32 heads of 128, positions from 0.

A backend computes each part with what its own ops are made of (`backends.op_parts`); NOTES says where that differs from
a step of the product. `causal_mask_cached` is the worker's change: the mask is found, not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

from llm_worker_rbee.backends.ops import AttentionParams
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from ..backends import op_parts, prepare_attention
from ..roofline import Work
from ..synthetic import random_tensor
from .cases import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    Case,
    F,
    consecutive_batch,
    filled_kv,
    random_array,
    rope_table,
    token_positions,
)
from .timing import Function

SCALE = HEAD_DIM**-0.5
FUSED_SCORES = "a step fuses them with softmax and values, and ends at the query's own position"
NO_MASK = "for comparison: no kernel of this backend makes or applies a mask"
NOTES = {
    "rope_forward": {
        "reference": "with the angles of its positions",
        "cpu": "with the angles of its positions, which a step computes once for all layers",
        "cuda": "cosines and sines from a table; keys go to their slots of a float32 KV cache",
    },
    "qkv_projection": {"cuda": "cuBLAS in float32, without TF32"},
    "attention_scores": {
        "cpu": f"the attention kernel's function for scores, over all keys; {FUSED_SCORES}",
        "cuda": "a kernel with the attention kernel's first product, over all keys, in float32 and so without tensor "
        f"cores; {FUSED_SCORES}",
    },
    "causal_mask": {"cpu": NO_MASK, "cuda": f"PyTorch, {NO_MASK}"},
    "causal_mask_cached": {"cpu": NO_MASK, "cuda": f"PyTorch, {NO_MASK}"},
    "full_attention": {
        "cpu": "a float32 KV cache, where float16 is the default",
        "cuda": "a float32 KV cache, where bfloat16 is the default: in float32 the kernel has no tensor cores, and its "
        "tiles of 64 queries (from 17 tokens on) spill registers",
    },
}
# Means in seconds that the worker's own suite printed, on an unnamed CPU.
ORIGINAL_S = {
    "rope_forward/1": 62.6e-6, "rope_forward/8": 206e-6, "rope_forward/32": 468e-6, "rope_forward/128": 9.23e-3,
    "qkv_projection/1": 19.1e-3, "qkv_projection/8": 21.0e-3, "qkv_projection/32": 50.8e-3,
    "qkv_projection/128": 65.5e-3, "attention_scores/1": 3.84e-6, "attention_scores/8": 44.8e-6,
    "attention_scores/32": 308e-6, "attention_scores/128": 8.49e-3, "causal_mask/8": 9.93e-6, "causal_mask/32": 119e-6,
    "causal_mask/128": 2.12e-3, "causal_mask/512": 58.8e-3, "full_attention/1": 11.5e-6, "full_attention/8": 120e-6,
    "full_attention/32": 1.07e-3, "causal_mask_cached/8": 9.1e-6, "causal_mask_cached/32": 117.4e-6,
    "causal_mask_cached/128": 1.9e-3, "causal_mask_cached/512": 55.0e-3,
}  # fmt: skip


def suite_cases() -> Iterator[Case]:
    """Yield the benchmarks of the suite, in the order in which they run."""
    makers: dict[str, tuple[Callable[[int, Any], Function], Callable[[int], Work]]] = {
        "rope_forward": (
            _rope,
            lambda n: Work(2 * 2 * F * n * HIDDEN, 2 * 3 * n * HIDDEN),
        ),  # q and k, read and written
        "qkv_projection": (_qkv, lambda n: Work(F * (3 * HIDDEN + 4 * n) * HIDDEN, 2 * n * 3 * HIDDEN * HIDDEN)),
        "attention_scores": (_scores, lambda n: Work(F * (2 * n * HIDDEN + HEADS * n * n), 2 * n * n * HIDDEN)),
        "causal_mask": (partial(_mask, False), _mask_work),
        # causality leaves half of the query-key pairs
        "full_attention": (_attention, lambda n: Work(F * HIDDEN * 4 * n, 2 * n * (n + 1) * HIDDEN)),
        "causal_mask_cached": (partial(_mask, True), _mask_work),
    }
    for name, original_s in ORIGINAL_S.items():
        family, _, length = name.partition("/")
        make, work = makers[family]
        yield Case(name, partial(make, int(length)), work(int(length)), notes=NOTES[family], original_s=original_s)


def _mask_work(tokens: int) -> Work:
    return Work(2 * F * HEADS * tokens * tokens)


def _rope(tokens: int, ops: Any) -> Function:
    q, k = random_array(ops, 2, tokens, HEADS, HEAD_DIM)
    return op_parts(ops).rope(q, k, token_positions(tokens), rope_table(HEAD_DIM))


@lru_cache(maxsize=2)
def _qkv_weight(ops: Any) -> Any:
    return ops.prepare([random_tensor(BLOCK_TYPES["F32"], (HIDDEN, HIDDEN), seed) for seed in range(3)])


def _qkv(tokens: int, ops: Any) -> Function:
    return partial(ops.linear, random_array(ops, tokens, HIDDEN), _qkv_weight(ops))


def _scores(tokens: int, ops: Any) -> Function:
    q, k = random_array(ops, 2, tokens, HEADS, HEAD_DIM)
    return op_parts(ops).attention_scores(q, k, SCALE)


def _mask(cached: bool, tokens: int, ops: Any) -> Function:
    return op_parts(ops).causal_mask(random_array(ops, 1, HEADS, tokens, tokens), cached=cached)


def _attention(tokens: int, ops: Any) -> Function:
    q, kv = random_array(ops, tokens, HEADS, HEAD_DIM), filled_kv(ops, tokens, HEADS, HEAD_DIM)
    return prepare_attention(ops, q, kv, consecutive_batch(tokens, tokens), AttentionParams(SCALE))
