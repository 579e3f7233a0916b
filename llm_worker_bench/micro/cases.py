"""What a benchmark is, and the seeded data that several of them share: activations, RoPE, batches, KV caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends.ops import Batch, KVLayer, RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.rope import inverse_frequencies
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from ..backends import prepare_calls
from ..roofline import Work
from .timing import Function, repeated_calls

HIDDEN, HEADS, HEAD_DIM, D_FF, ROPE_BASE = 4096, 32, 128, 11008, 10000.0
VOCABULARY = 49152
F = 4  # bytes of a float32
RANDOM_PERIOD = 65521  # a prime: random values repeat after so many, as drawing millions takes longer than measuring
# The block of the default model: (d_model, n_heads, n_kv_heads, head_dim), and (rows, columns) of its Q4_1 matrices
DEFAULT_MODEL_SHAPE = (576, 9, 3, 64)
BLOCK_SHAPES = ((960, 576), (576, 576), (2 * 1536, 576), (576, 1536))  # qkv, output, gate and up, down
BLOCK_BYTES = sum(rows * BLOCK_TYPES["Q4_1"].row_bytes(columns) for rows, columns in BLOCK_SHAPES)


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark: `make(ops)` builds the data and returns the function to time."""

    name: str
    make: Callable[[Any], Function]
    work: Work
    needs: str | None = None  # a function beyond the op table, which the reference backend has
    backend: str | None = None  # the only one that can run it
    notes: Mapping[str, str] = field(default_factory=dict)  # by backend: what differs from a step of the product
    original_s: float | None = None  # the mean that the Rust worker's suite printed, on an unnamed CPU
    on_host: bool = False  # its result reaches the host, so that calls cannot be one CUDA graph

    @property
    def family(self) -> str:
        """The name without the size."""
        return self.name.split("/")[0]

    def prepare(self, ops: Any) -> Function:
        """Return the function to time on a backend; a GPU replays graphs of many calls."""
        function = self.make(ops)
        return (
            repeated_calls(function, partial(prepare_calls, ops))
            if ops.has_device_memory and not self.on_host
            else function
        )

    def select_ops(self, ops: Any) -> Any:
        """Return the backend that can run this: the given one, or the reference."""
        return ops if self.needs is None or hasattr(ops, self.needs) else ReferenceBackend()


def family(
    name: str,
    lengths: Sequence[int],
    make: Callable[[int, Any], Function],
    work: Callable[[int], Work],
    needs: str | None = None,
) -> Iterator[Case]:
    """Yield a case for each length: `make(length, ops)`, `work(length)`."""
    return (Case(f"{name}/{n}", partial(make, n), work(n), needs) for n in lengths)


def random_array(ops: Any, *shape: int) -> Any:
    """Return seeded standard normal values as an array of the backend."""
    drawn = np.random.default_rng(7).standard_normal(RANDOM_PERIOD, np.float32)
    return ops.prepare_vector(np.resize(drawn, shape))


def rope_table(head_dim: int = HEAD_DIM) -> RopeTable:
    """Return RoPE without scaling."""
    return RopeTable(inverse_frequencies(ROPE_BASE, head_dim), 1.0)


def token_positions(count: int, start: int = 0) -> NDArray[np.int64]:
    """Return the positions of consecutive tokens."""
    return np.arange(start, start + count, dtype=np.int64)


def consecutive_batch(tokens: int, context: int, block_size: int = 16) -> Batch:
    """Return the last `tokens` tokens of one request with `context` tokens, in consecutive blocks."""
    positions = token_positions(tokens, context - tokens)
    blocks = -(-context // block_size)
    return Batch(
        ids=positions,
        positions=positions,
        slot_mapping=positions,
        query_start=np.array([0, tokens]),
        context_len=np.array([context]),
        block_table=np.arange(blocks)[None, :],
        logits_index=np.array([tokens - 1]),
    )


def filled_kv(ops: Any, context: int, kv_heads: int, head_dim: int, kind: str = "float32") -> KVLayer:
    """Return the KV cache of one layer with random keys and values of `context` tokens."""
    kv: KVLayer = ops.empty_kv(-(-context // 16), 16, kv_heads, head_dim, kind)
    keys, values = random_array(ops, 2, context, kv_heads, head_dim)
    ops.rope_store(keys, keys, values, token_positions(context), rope_table(head_dim), kv, token_positions(context))
    return kv
