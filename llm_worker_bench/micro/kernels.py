"""Benchmarks of the CPU's kernels at the sizes of models (`kernel/`), for comparing instruction sets.

Matrix products by layout and tokens, with quantizing the activations; attention as HEADS/TOKENS@CONTEXT; quantizing
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from llm_worker_rbee.backends import resolve_kv_type
from llm_worker_rbee.backends.ops import AttentionParams, KVLayer
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from ..roofline import Work, product_program, quantize_program
from ..synthetic import random_tensor
from .cases import Case, F, consecutive_batch, filled_kv, random_array
from .timing import Function

KERNEL = "kernel/"
KERNEL_SHAPE = (11008, 4096)  # gate or up of Llama-2-7B: larger than most caches
# One block type for each layout that common files have; Q4_K is packed as Q4_1.
KERNEL_TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL")
KERNEL_TOKENS = (1, 2, 4, 8, 16, 128)
FLOAT_KERNEL_TOKENS = (1, 16)
# (heads, KV heads, head_dim) of the default model and of Llama-2-7B -> (tokens, context) of attention
KERNEL_CONTEXTS = {
    (9, 3, 64): ((1, 4096), (1, 8192), (128, 128), (512, 512), (512, 4096)),
    (32, 32, 128): ((1, 4096), (128, 128), (512, 512), (128, 4096)),
}
KERNEL_KV_BYTES = 2  # float16


def kernel_cases() -> Iterator[Case]:
    """Yield the benchmarks of the CPU's kernels, in the order in which they run."""
    for name, lengths in (*((name, KERNEL_TOKENS) for name in KERNEL_TYPES), ("F16", FLOAT_KERNEL_TOKENS)):
        for n in lengths:
            yield _kernel(f"matmul/{name}/{n}", partial(_matmul, name, False, n), _matmul_work(name, n))
    for name in ("Q6_K", "Q8_0"):  # the output head, whose activations have two terms
        yield _kernel(f"matmul_two_term/{name}/1", partial(_matmul, name, True, 1), _matmul_work(name, 1, terms=2))
    for heads, contexts in KERNEL_CONTEXTS.items():
        for tokens, context in contexts:
            name = f"attention/{heads[0]}x{heads[2]}/{tokens}@{context}"
            yield _kernel(name, partial(_paged_attention, heads, tokens, context), _paged_work(heads, tokens, context))
    for n in (1, 128):
        work = Work((F + 1) * n * KERNEL_SHAPE[1])  # floats to bytes
        yield _kernel(f"quantize/{n}", partial(_quantize, n), work)


def _kernel(name: str, make: Callable[[Any], Function], work: Work) -> Case:
    return Case(KERNEL + name, make, work, backend="cpu")


@cache
def _kernel_weight(ops: Any, kind: str) -> Any:
    return ops.prepare([random_tensor(BLOCK_TYPES[kind], KERNEL_SHAPE)])


def _matmul(kind: str, two_term: bool, tokens: int, ops: Any) -> Function:
    weight = _kernel_weight(ops, kind)
    return product_program([weight.two_term() if two_term else weight], tokens, ops.threads)


def _matmul_work(kind: str, tokens: int, terms: int = 1) -> Work:
    rows, columns = KERNEL_SHAPE
    moved = rows * BLOCK_TYPES[kind].row_bytes(columns) + F * tokens * (rows + columns)
    arithmetic = "float32" if BLOCK_TYPES[kind].block_size == 1 else "int8"
    return Work(moved, 2 * terms * tokens * rows * columns, arithmetic=arithmetic)


def _quantize(tokens: int, ops: Any) -> Function:
    return quantize_program(KERNEL_SHAPE[1], tokens, ops.threads)


@cache
def _kernel_kv(ops: Any, context: int, kv_heads: int, head_dim: int) -> KVLayer:
    return filled_kv(ops, context, kv_heads, head_dim, resolve_kv_type(ops))


def _paged_attention(heads: tuple[int, int, int], tokens: int, context: int, ops: Any) -> Function:
    n_heads, kv_heads, head_dim = heads
    q, kv = random_array(ops, tokens, n_heads, head_dim), _kernel_kv(ops, context, kv_heads, head_dim)
    return partial(ops.attention, q, kv, consecutive_batch(tokens, context), AttentionParams(head_dim**-0.5))


def _paged_work(heads: tuple[int, int, int], tokens: int, context: int) -> Work:
    n_heads, kv_heads, head_dim = heads
    pairs = tokens * context - tokens * (tokens - 1) // 2  # a query sees the keys up to its own
    moved = 2 * KERNEL_KV_BYTES * context * kv_heads * head_dim + 2 * F * tokens * n_heads * head_dim
    return Work(moved, 4 * pairs * n_heads * head_dim)
