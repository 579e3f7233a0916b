"""The op table and the arguments of the ops: plain records of arrays, the same for every backend. No arithmetic here.

T tokens and R requests make one flat, ragged batch; P is the number of tokens in a block of the paged KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import KV_ON_CPU, KV_ON_CUDA
from ..weights import Tensor

Array = Any  # the backend's own array: NumPy on a CPU, a torch tensor on a GPU
Handle = Any  # a weight as its backend packed it
Ints = NDArray[np.int64]
KV_TYPES, CUDA_KV_TYPES = KV_ON_CPU, KV_ON_CUDA  # what keys and values may be kept as
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


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """Keys and values of one layer, and their scales where they are int8: an iteration gives the arrays there are.

    The shapes are the reference's; another backend may lay them out otherwise.
    """

    k: Array  # (blocks, P, kv_heads, head_dim)
    v: Array  # (blocks, P, kv_heads, head_dim)
    k_scales: Array | None = None  # (blocks, P, kv_heads), float32
    v_scales: Array | None = None  # (blocks, P, kv_heads), float32

    def __iter__(self) -> Iterator[Array]:
        return (part for part in (self.k, self.v, self.k_scales, self.v_scales) if part is not None)


class RopeTable(NamedTuple):
    """Rotary frequencies: angle = position * inv_freq; cos and sin are multiplied by `scale`."""

    inv_freq: NDArray[np.float32]  # (rope_dim / 2,)
    scale: float


class AttentionParams(NamedTuple):
    """What a layer's attention needs beside its arrays."""

    scale: float
    window: int = 0  # a query sees the last `window` positions, itself included; 0 sees everything
    soft_cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: none


class BlockParts(NamedTuple):
    """What a decoder block is made of, for a backend that runs whole blocks at once (`fuse`)."""

    attention_norm: Array
    qkv: Handle
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    rope: RopeTable
    attention: AttentionParams
    n_heads: int
    n_kv_heads: int
    head_dim: int
    output: Handle
    output_bias: Array | None
    post_attention_norm: Array | None
    mlp_norm: Array
    gate_up: Handle
    gate_up_bias: Array | None
    activation: str
    down: Handle
    down_bias: Array | None
    post_mlp_norm: Array | None
    eps: float


class ModelParts(NamedTuple):
    """A whole decoder, likewise."""

    embedding: Handle
    embedding_scale: float
    blocks: tuple[BlockParts, ...]
    norm: Array
    head: Handle
    soft_cap: float


OnClock = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # (part of the model, a function) -> it, timed


class Fused(Protocol):
    """A backend's own way through the whole decoder: what `Transformer.forward` does op by op, with the same bits."""

    def __call__(self, batch: Batch, kv: Sequence[KVLayer]) -> Array: ...
    def in_parts(self, batch: Batch, kv: Sequence[KVLayer], on_clock: OnClock) -> Array: ...


@dataclass(slots=True, eq=False)
class SampleRow:
    """How the next token of one request is chosen; see sampling.py for the order. From step to step only the position
    and the tokens that penalties look at change, so a request keeps its row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: Ints = field(default_factory=lambda: NO_TOKENS)  # the last repeat_last_n tokens, prompt included
    output_ids: Ints = field(default_factory=lambda: NO_TOKENS)  # all generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    sample_index: int = 0
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
    def empty_kv(
        self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32"
    ) -> KVLayer: ...
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
    def fuse(self, model: ModelParts) -> Fused | None: ...
    def sample(self, raw_logits: Array, rows: Sequence[SampleRow]) -> Ints: ...
    def logprobs(self, raw_logits: Array, chosen: Ints, k: int) -> Logprobs: ...


OPS = tuple(name for name in vars(Ops) if not name.startswith("_"))
