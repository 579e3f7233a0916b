"""The op table and the arguments of the ops: plain records of arrays, the same for every backend. No arithmetic here.

T tokens and R requests make one flat, ragged batch; P is the number of tokens in a block of the paged KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..weights import Tensor

Array = Any  # the backend's own array: NumPy on a CPU, a torch tensor on a GPU
Handle = Any  # a weight as its backend packed it
Ints = NDArray[np.int64]
NO_TOKENS: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step: which tokens, where they stand, where their keys and values go."""

    ids: Ints  # (T,)
    positions: Ints  # (T,) position in its request, from 0
    slot_mapping: Ints  # (T,) block * P + offset: where this token's key and value are written
    query_start: Ints  # (R + 1,) first token of each request in the flat batch
    context_len: Ints  # (R,) tokens of each request in the cache once this step has written
    block_table: Ints  # (R, blocks) the blocks of each request, in order
    logits_index: Ints  # (N,) the tokens whose logits are wanted


class KVLayer(NamedTuple):
    """Keys and values of one layer."""

    k: Array  # (blocks, P, kv_heads, head_dim)
    v: Array  # (blocks, P, kv_heads, head_dim)


class RopeTable(NamedTuple):
    """Rotary frequencies: angle = position * inv_freq; cos and sin are multiplied by `scale`."""

    inv_freq: NDArray[np.float32]  # (rope_dim / 2,)
    scale: float


class AttentionParams(NamedTuple):
    """What a layer's attention needs beside its arrays."""

    scale: float
    window: int = 0  # a query sees the last `window` positions, itself included; 0 sees everything
    soft_cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: none


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """How the next token of one request is chosen; see sampling.py for the order."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    recent: Ints = field(default_factory=lambda: NO_TOKENS)  # the last repeat_last_n tokens, prompt included
    generated: Ints = field(default_factory=lambda: NO_TOKENS)  # all generated tokens
    bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    position: int = 0


class Logprobs(NamedTuple):
    """Log-softmax of the raw logits at the chosen tokens, and the likeliest tokens, best first."""

    chosen: NDArray[np.float32]  # (N,)
    top_ids: Ints  # (N, k)
    top: NDArray[np.float32]  # (N, k)


class Ops(Protocol):
    """The op table: a backend is a module that has all of these. `reference.py` says what each one means."""

    def prepare(self, tensors: Sequence[Tensor]) -> Handle: ...
    def prepare_vector(self, values: NDArray[np.float32]) -> Array: ...
    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> KVLayer: ...
    def embed(self, table: Handle, ids: Ints, scale: float = 1.0) -> Array: ...
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array: ...
    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]: ...
    def linear(self, x: Array, w: Handle, bias: Array | None = None) -> Array: ...
    def rope_store(
        self, q: Array, k: Array, v: Array, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
    ) -> Array: ...
    def attention(self, q: Array, kv: KVLayer, batch: Batch, params: AttentionParams) -> Array: ...
    def gated(self, gate_up: Array, activation: str) -> Array: ...
    def take(self, x: Array, index: Ints) -> Array: ...
    def logits(self, x: Array, head: Handle, soft_cap: float = 0.0) -> Array: ...
    def sample(self, raw_logits: Array, rows: Sequence[SampleRow]) -> Ints: ...
    def logprobs(self, raw_logits: Array, chosen: Ints, k: int) -> Logprobs: ...


OPS = tuple(name for name in vars(Ops) if not name.startswith("_"))
