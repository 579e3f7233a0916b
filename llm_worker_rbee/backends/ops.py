"""The op table (`Backend`) and the records that ops take, the same for every backend. No arithmetic here.

T tokens and R requests make one flat, ragged batch; P is the number of tokens in a block of the paged KV cache.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..config import KV_DEFAULT, KV_ON_CPU, ModelConfig
from ..errors import InvalidRequestError
from ..weights import Checkpoint, Tensor
from ..weights.lora import LowRank
from . import cpu_info

Array = Any  # the backend's own array: NumPy on a CPU, a torch tensor on a GPU
Vector = Any  # of a weight or a bias, from `prepare_vector`
PackedWeight = Any  # a weight as its backend packed it
PackedExperts = Any  # the same weight of all experts, likewise
LayerCache = Any  # a `KVLayer`, or the `StateLayer` of a layer that has a state instead
Ints = NDArray[np.int64]
KV_TYPES = KV_ON_CPU  # types of the KV cache
NO_TOKENS: Ints = np.empty(0, np.int64)
ROPE_AXES = 3  # of positions in images: time, row, column
NO_SCALES: NDArray[np.float32] = np.empty(0, np.float32)
# sizes of a step in the shapes of a graph: all its tokens, those whose logits are computed, and its requests
TOKENS, LOGITS, REQUESTS = "tokens", "logits", "requests"
Shape = tuple[int | str, ...]
SHAPES: dict[str, Callable[..., Sequence[Shape]]] = {}  # of the results of each op, from its arguments by name
ARRAYS: dict[str, tuple[str, ...]] = {}  # names of the arguments that other ops compute
# Bit t % 32 of word t // 32 says whether token t is allowed; None: all are.
TokenMask = NDArray[np.int32]
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tokens of one step, their positions, and where their keys and values are written."""

    ids: Ints  # (T,) with a `pending_id` for each token that only the device has
    positions: Ints  # (T,) position in its request, from 0
    slot_mapping: Ints  # (T,) block * P + offset: where this token's key and value are written
    query_start: Ints  # (R + 1,) first token of each request in the flat batch
    context_len: Ints  # (R,) tokens of each request in the cache once this step has written
    block_table: Ints  # (R, blocks) the blocks of each request, in order
    logits_index: Ints  # (N,) the tokens whose logits are computed
    pending: Array | None = None  # tokens of the step in flight, on the device
    hidden: Array | None = None  # (T, width) hidden states of the tokens, for multi-token prediction; pixels of patches
    # Slots of states, empty for a model without: a slot is read and written in one step by the same request alone.
    state_in: Ints = field(default_factory=lambda: NO_TOKENS)  # (R,) the state a request goes on from; -1: it begins
    state_out: Ints = field(default_factory=lambda: NO_TOKENS)  # (T,) where the state after a token goes; -1: nowhere
    token_types: Ints = field(default_factory=lambda: NO_TOKENS)  # (T,) segments of a pair, for encoders that have them
    # Images: `positions` are places in the cache, and RoPE has positions of its own.
    rope_positions: Ints = field(default_factory=lambda: NO_TOKENS)  # (T, ROPE_AXES)
    spans: Ints = field(default_factory=lambda: NO_TOKENS)  # (T, 2) of the request's keys: first, last + 1
    places: Array | None = None  # (T, 2) row and column of a patch in a table of positions
    images: Array | None = None  # (N, width) encoded images: rows that stand in for tokens
    image_rows: Ints = field(default_factory=lambda: NO_TOKENS)  # (T,) the row of each token, -1: it has none
    # The LoRA adapter of each token, and its factor. Empty: no token of the step has one.
    adapters: Ints = field(default_factory=lambda: NO_TOKENS)  # (T,) a slot; -1: none
    adapter_scales: NDArray[np.float32] = field(default_factory=lambda: NO_SCALES)  # (T,)
    should_stop: Callable[[], bool] | None = None  # called between parts of the step; it may end with `StepStopped`


class StepStopped(Exception):  # noqa: N818, as StopIteration
    """A step was given up: what it has written is written again when it is computed again."""


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """Keys and values of one layer, with scales if they are int8. Iterating yields the arrays that exist.

    The shapes are the reference's; other backends have their own layout. Keys are rotated if they are int8, and so are
    the queries that meet them.
    """

    k: Array  # (blocks, P, kv_heads, head_dim)
    v: Array  # (blocks, P, kv_heads, head_dim)
    k_scales: Array | None = None  # (blocks, P, kv_heads), float32
    v_scales: Array | None = None  # (blocks, P, kv_heads), float32

    def __iter__(self) -> Iterator[Array]:
        return (part for part in (self.k, self.v, self.k_scales, self.v_scales) if part is not None)


def rotated_values(head_dim: int) -> int:
    """Return how many values of an int8 key are rotated together: the largest power of two that divides the head."""
    size = head_dim & -head_dim
    return size if size >= 16 else 1


def first_kv(layers: Sequence[LayerCache]) -> KVLayer:
    """Return the first layer that has keys and values."""
    return next(layer for layer in layers if isinstance(layer, KVLayer))


@dataclass(frozen=True, slots=True, eq=False)
class StateLayer:
    """The states of sequences in one layer, float32. Iterating yields the arrays that exist."""

    conv: Array  # (slots, kernel - 1, channels) the last inputs of a convolution, oldest first
    matrix: Array | None = None  # (slots, v_heads, k_dim, v_dim) of linear attention

    def __iter__(self) -> Iterator[Array]:
        return (part for part in (self.conv, self.matrix) if part is not None)


class HostRows:
    """The blocks of arrays whose first axis is blocks, as bytes in the host's memory. Here a block is its own row; a
    device with memory of its own has other rows, between which and the blocks it copies."""

    num_rows = 0  # beside the blocks

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._memory = [(memoryview(array).cast("B"), array[0].nbytes) for array in arrays]
        self.row_bytes: int = sum(size for _, size in self._memory)

    def views(self, row: int) -> list[memoryview]:
        """Return the bytes of a row."""
        return [memory[row * size : (row + 1) * size] for memory, size in self._memory]

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """Copy blocks to rows."""

    def load(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Begin to copy rows to blocks."""

    def finish(self) -> None:
        """Wait for the copies that `load` began."""


class StackedWeight:
    """A packed weight of one or several parts, stacked by rows; all have the same columns."""

    __slots__ = ()
    parts: tuple[Any, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return int(self.parts[0].columns)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True, eq=False)
class LoraSite:
    """A product that LoRA adapters add to. Its rows have parts, one after the other, each with a pair of its own."""

    op: str  # whose result they add to: linear, logits, embed or grouped_linear
    columns: int  # of an embedding: its tokens
    part_rows: tuple[int, ...]
    num_experts: int  # 0: it is one matrix
    max_rank: int  # of all parts together, in fours
    is_exact: bool  # the matrix is float32: adapters stay so, too
    packed: Any = None  # what the backend keeps of the adapters, by slot

    @property
    def rows(self) -> int:
        return sum(self.part_rows)


# The pairs of one site: for each expert, or once, a pair for each part that the adapter changes.
SitePairs = Sequence[Sequence[LowRank | None]]


class RopeTable(NamedTuple):
    """Rotary frequencies: angle = position * inv_freq; cos and sin are multiplied by `scale`.

    With `temperature_beta`, rotated queries are multiplied by 1 + beta * ln(1 + position // temperature_length). With
    `axes`, pair i turns by the position on axis axes[i].
    """

    inv_freq: NDArray[np.float32]  # (rope_dim / 2,)
    scale: float
    temperature_beta: float = 0.0
    temperature_length: int = 1
    axes: Ints | None = None  # (rope_dim / 2,)


class AttentionParams(NamedTuple):
    """Parameters of a layer's attention."""

    scale: float
    window: int = 0  # a query sees the last `window` positions, itself included; 0: no limit
    soft_cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: none
    causal: bool = True  # False: a query sees all tokens of its sequence, or `window // 2` of them on each side
    spans: bool = False  # if a step has spans: all of a query's span, and what is outside only before a causal query


class RouteParams(NamedTuple):
    """How a layer's router chooses experts."""

    k: int  # experts of a token
    scoring: str = "softmax"  # or "sigmoid", of the logits of all experts
    renormalize: bool = True  # divide the weights by their sum
    scale: float = 1.0  # then multiply them


class GatedDeltaParams(NamedTuple):
    """The heads of linear attention by the gated delta rule."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    eps: float  # of the norm
    is_tiled: bool = False  # value head h has key head h % k_heads, not h // (v_heads // k_heads)


class GatedDeltaWeights(NamedTuple):
    """The vectors of that rule."""

    a: Array  # (v_heads,) the rate of decay, negative
    dt_bias: Array  # (v_heads,)
    norm: Array  # (v_dim,)


class TaskLabel(NamedTuple):
    """What a profile shows of a task or of a launch."""

    component: str  # of the model
    kernel: str


class KernelSpan(NamedTuple):
    """A kernel, or a copy, on the timeline of a device."""

    name: str
    start: float  # seconds
    end: float


class KernelTrace(Protocol):
    """Records what a device runs."""

    def start(self) -> None: ...
    def mark(self) -> None:
        """Note that what is launched from now on counts."""

    def stop_after_mark(self) -> list[KernelSpan]:
        """Wait for the device, and return its timeline since the last mark, in the order of starts."""


Profiler = Callable[[Sequence[TaskLabel], NDArray[np.float64]], None]  # gets the seconds of each task
Progress = Callable[[str, int, int | None], None]  # (what, done, total)
Forward = Callable[["Batch"], Array]  # one step of a model: the logits
COMPILING = "compiling kernels, once"  # what `load_kernels` reports
CAPTURING = "capturing CUDA graphs"


class StepLimits(NamedTuple):
    """What a step of an engine has at most."""

    max_batch: int  # requests
    max_tokens: int
    max_logits: int  # rows
    max_context: int  # tokens of a request


class WarmUp(NamedTuple):
    """What `Backend.warm_up` has done."""

    kernels: int = 0  # that are ready
    compiled: int = 0  # of them now, and not in an earlier process


class FusedForward(Protocol):
    """A backend's fused forward pass of the whole decoder, with the same bits as op by op."""

    samples: bool  # whether a step can sample its own logits

    @property
    def graph_bytes(self) -> int:
        """Device memory of captured graphs."""

    def __call__(self, batch: Batch, kv: Sequence[LayerCache]) -> Array: ...
    def sample(
        self, batch: Batch, kv: Sequence[LayerCache], rows: Sequence[SampleRow], profiler: Profiler | None = None
    ) -> tuple[Array, list[int]]:
        """Run the same step, and sample in it; return the logits and the tokens: below 0 where only `Backend.sample`
        can decide, or raise."""

    def with_hidden(self, batch: Batch, kv: Sequence[LayerCache]) -> tuple[Array, Array]:
        """Run the same step of a graph that has `hidden`; return the logits and the hidden states."""

    def program(self, kv_type: str) -> list[Any]:
        """Return the program of a step, a `graph.ProgramLine` for each fused op."""

    def run_profiled(self, batch: Batch, kv: Sequence[LayerCache], profiler: Profiler) -> Array:
        """Run the same step and tell the profiler how long each of its tasks took."""


@dataclass(slots=True, eq=False)
class SampleRow:
    """Sampling parameters of one row of logits; reference_sampling.py defines their order.

    A request keeps its row: only the position and the tokens that penalties cover change from step to step. The last of
    these tokens may be a `pending_id`.
    """

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
    logprobs: int | None = None  # of `sample_async`: report the token's log-probability and the likeliest ones
    logprobs_mode: str = "raw"  # likewise: "masked" is over the tokens that the mask allows
    mask: TokenMask | None = None  # tokens that it does not allow count as -inf everywhere
    packed: Any = field(default=None, init=False)  # the backend's own: what never changes, packed

    @property
    def has_penalties(self) -> bool:
        """Whether bias or penalties change a logit."""
        counted = (self.presence_penalty or self.frequency_penalty) and self.output_ids.size
        return bool(self.logit_bias or counted or (self.repetition_penalty != 1.0 and self.penalty_window.size))


class Logprobs(NamedTuple):
    """Log-softmax of the raw logits at the sampled tokens, and at the k likeliest tokens, best first.

    Under a mask that allows fewer than k tokens the rest of `top` is -inf, and of `top_ids` any.
    """

    chosen: NDArray[np.float32]  # (N,)
    top_ids: Ints  # (N, k)
    top: NDArray[np.float32]  # (N, k)


def pending_id(row: int) -> int:
    """Return the negative id that stands for token `row` of the step in flight, which only the device has."""
    return -1 - row


class PendingTokens(Protocol):
    """Sampled tokens that are on the device already and reach the host later."""

    tokens: Array  # on the device

    def result(self) -> list[int] | None:
        """Wait for the tokens; None if a row is undecided: the step is then sampled again by `Backend.sample`."""

    def logprobs(self) -> dict[int, Logprobs]:
        """Return the log-probabilities of the rows that want them, one row each, once `result` has returned."""


def op(shapes: Callable[..., Sequence[Shape]]) -> Callable[[Method], Method]:
    """Declare an op by its signature and the shapes of its results."""

    def declare(method: Method) -> Method:
        name, signature = method.__name__, inspect.signature(method)

        def call(self: Ops, *args: Any, **options: Any) -> Any:
            bound = signature.bind(self, *args, **options)
            bound.apply_defaults()
            return self.compute(name, {key: value for key, value in bound.arguments.items() if key != "self"})

        SHAPES[name] = shapes
        kinds = method.__annotations__.items()
        ARRAYS[name] = tuple(key for key, kind in kinds if kind.startswith("Array") and key != "return")
        return cast(Method, wraps(method)(call))

    return declare


class Ops:
    """The op table: what layers call. `reference.py` defines what each op computes.

    A backend has a method for an op, or computes it in `compute`.
    """

    def compute(self, op: str, args: dict[str, Any]) -> Any:
        """Compute an op that has no method of its own, from its arguments by name."""
        raise NotImplementedError(op)

    @op(lambda table, ids, scale: [(TOKENS, table.columns)])
    def embed(self, table: PackedWeight, ids: Ints, scale: float = 1.0) -> Array: ...
    @op(lambda x, weight, eps: [x.shape])
    def rms_norm(self, x: Array, weight: Vector, eps: float) -> Array: ...
    @op(lambda x, residual, weight, eps, scale: [x.shape, x.shape])
    def add_rms_norm(
        self, x: Array, residual: Array, weight: Vector, eps: float, scale: float = 1.0
    ) -> tuple[Array, Array]:
        raise NotImplementedError

    @op(lambda x, weight, bias, eps: [x.shape])
    def layer_norm(self, x: Array, weight: Vector, bias: Vector | None, eps: float) -> Array: ...
    @op(lambda x, residual, weight, bias, eps: [x.shape, x.shape])
    def add_layer_norm(
        self, x: Array, residual: Array, weight: Vector, bias: Vector | None, eps: float
    ) -> tuple[Array, Array]:
        raise NotImplementedError

    @op(lambda x, residual: [x.shape])
    def add(self, x: Array, residual: Array) -> Array: ...
    @op(lambda x, w, bias: [(x.shape[0], w.rows)])
    def linear(self, x: Array, w: PackedWeight, bias: Vector | None = None) -> Array: ...
    @op(
        lambda qkv, n_heads, n_kv_heads, head_dim: [
            (qkv.shape[0], heads, head_dim) for heads in (n_heads, n_kv_heads, n_kv_heads)
        ]
    )
    def split_heads(self, qkv: Array, n_heads: int, n_kv_heads: int, head_dim: int) -> tuple[Array, Array, Array]:
        raise NotImplementedError

    @op(lambda q, k, v, positions, table, kv, slot_mapping: [q.shape])
    def rope_store(
        self, q: Array, k: Array, v: Array, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
    ) -> Array: ...
    @op(lambda q, kv, batch, params, sinks: [(q.shape[0], q.shape[1] * q.shape[2])])
    def attention(
        self, q: Array, kv: KVLayer, batch: Batch, params: AttentionParams, sinks: Vector | None = None
    ) -> Array: ...
    @op(lambda x, weight, state, batch, activation, gated: [(x.shape[0], weight.shape[0])])
    def causal_conv(
        self, x: Array, weight: Vector, state: StateLayer, batch: Batch, activation: str = "", gated: bool = False
    ) -> Array: ...
    @op(lambda qkv, z, gates, params, weights, state, batch: [(qkv.shape[0], params.v_heads * params.v_dim)])
    def gated_delta(
        self,
        qkv: Array,
        z: Array,
        gates: Array,
        params: GatedDeltaParams,
        weights: GatedDeltaWeights,
        state: StateLayer,
        batch: Batch,
    ) -> Array: ...
    @op(lambda x, gate: [x.shape])
    def sigmoid_gate(self, x: Array, gate: Array) -> Array: ...
    @op(lambda x, activation: [x.shape])
    def activate(self, x: Array, activation: str) -> Array: ...
    @op(lambda gate_up, activation: [(*gate_up.shape[:-1], gate_up.shape[-1] // 2)])
    def gated(self, gate_up: Array, activation: str) -> Array: ...
    @op(lambda x, tokens, weight, eps: [x.shape])
    def per_layer_inputs(self, x: Array, tokens: Array, weight: Vector, eps: float) -> Array: ...
    @op(lambda x, inputs, layer, activation: [x.shape])
    def per_layer_gate(self, x: Array, inputs: Array, layer: int, activation: str) -> Array: ...
    @op(lambda logits, params, bias, scales: [(logits.shape[0], params.k)] * 2)
    def route(
        self, logits: Array, params: RouteParams, bias: Vector | None = None, scales: Vector | None = None
    ) -> tuple[Array, Array]:
        raise NotImplementedError

    @op(lambda x, w, experts, bias: [(*experts.shape, w.rows)])
    def grouped_linear(self, x: Array, w: PackedExperts, experts: Array, bias: Vector | None = None) -> Array: ...
    @op(lambda x, weights, shared, shared_gate: [(x.shape[0], x.shape[2])])
    def combine(
        self, x: Array, weights: Array, shared: Array | None = None, shared_gate: Array | None = None
    ) -> Array: ...
    @op(lambda x, index: [(index.shape[0], *x.shape[1:])])
    def take(self, x: Array, index: Ints) -> Array: ...
    @op(lambda x, index, count: [(index.shape[0], count * x.shape[1])])
    def merge(self, x: Array, index: Ints, count: int) -> Array: ...
    @op(lambda x, index, count: [(index.shape[0], x.shape[1])])
    def pool(self, x: Array, index: Ints, count: int) -> Array: ...
    @op(lambda x, low, high: [x.shape])
    def clamp(self, x: Array, low: Vector, high: Vector) -> Array: ...
    @op(lambda x, y: [(x.shape[0], x.shape[1] + y.shape[1])])
    def join(self, x: Array, y: Array) -> Array: ...
    @op(lambda table, places: [(places.shape[0], table.shape[2])])
    def interpolate(self, table: Vector, places: Array) -> Array: ...
    @op(lambda x, images, rows, part, adds: [x.shape])
    def place_images(self, x: Array, images: Array, rows: Ints, part: int, adds: bool = False) -> Array: ...
    @op(lambda x, batch: [(REQUESTS, *x.shape[1:])])
    def mean_rows(self, x: Array, batch: Batch) -> Array: ...
    @op(lambda x, head, soft_cap: [(x.shape[0], head.rows)])
    def logits(self, x: Array, head: PackedWeight, soft_cap: float = 0.0) -> Array: ...
    @op(
        lambda x, site, batch, index, experts, scale: [
            (*(x.shape[:1] if experts is None else experts.shape), site.max_rank)
        ]
    )
    def shrink(
        self,
        x: Array,
        site: LoraSite,
        batch: Batch,
        index: Any = None,
        experts: Array | None = None,
        scale: float = 1.0,
    ) -> Array: ...
    @op(lambda out, low, site, batch, index, experts: [out.shape])
    def expand(
        self, out: Array, low: Array, site: LoraSite, batch: Batch, index: Any = None, experts: Array | None = None
    ) -> Array: ...


class Backend(Ops, ABC):
    """The op table of one device. What it can do beyond its ops is a field or a method with a default."""

    name: ClassVar[str]
    kv_types: tuple[str, ...] = KV_TYPES
    default_kv_type: ClassVar[str] = KV_DEFAULT
    has_device_memory: ClassVar[bool] = False  # weights and KV cache live on a device with memory of its own
    has_async_sampling: ClassVar[bool] = False
    device: str = "cpu"
    deterministic: bool = True  # batch-invariant: a token's results do not depend on the other tokens of the step
    threads: int | None = None  # of the kernels; None: a library decides
    query_tile: int = 1  # tokens of a prompt for which attention reads the keys once
    kernel_dir: Path | None = None  # where `warm_up` keeps compiled kernels

    @abstractmethod
    def prepare(self, tensors: Sequence[Tensor]) -> PackedWeight: ...
    @abstractmethod
    def prepare_experts(self, experts: Sequence[Sequence[Tensor]]) -> PackedExperts: ...
    @abstractmethod
    def prepare_vector(self, values: NDArray[np.float32]) -> Vector: ...
    @abstractmethod
    def empty_kv(
        self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32"
    ) -> KVLayer: ...
    @abstractmethod
    def empty_state(
        self, slots: int, conv_shape: tuple[int, int], matrix_shape: tuple[int, int, int] | None = None
    ) -> StateLayer: ...
    @abstractmethod
    def fuse(self, record: Callable[[], Any]) -> FusedForward | None: ...
    @abstractmethod
    def sample(self, raw_logits: Array, rows: Sequence[SampleRow]) -> Ints: ...
    @abstractmethod
    def logprobs(
        self, raw_logits: Array, chosen: Ints, k: int, masks: Sequence[TokenMask | None] | None = None
    ) -> Logprobs: ...

    def sample_async(self, raw_logits: Array, rows: Sequence[SampleRow], pending: Array | None = None) -> PendingTokens:
        """Sample without waiting for the tokens, with log-probabilities; only where `has_async_sampling`.

        `pending`: the tokens of the step in flight, for rows whose lists hold a `pending_id`.
        """
        raise NotImplementedError(f"the {self.name} backend samples synchronously")

    def pack_adapter(self, site: LoraSite, pairs: SitePairs) -> Any:
        """Return an adapter's pairs for a site as the ops read them; steps may run meanwhile."""
        return pairs

    def place_adapter(self, site: LoraSite, slot: int, packed: Any, num_slots: int) -> None:
        """Let a slot of a site hold what `pack_adapter` returned, or nothing (None); no step runs meanwhile."""
        site.packed = site.packed or {}
        site.packed.pop(slot, None)
        if packed is not None:
            site.packed[slot] = packed

    @property
    def versions(self) -> Sequence[str]:
        """The device and the libraries on which the bits of results depend."""
        return cpu_info.current_isa(), np.__version__

    def host_rows(self, arrays: Sequence[Array], max_bytes: int) -> HostRows:
        """Return rows for the blocks of arrays; `max_bytes` counts where they need memory of their own."""
        return HostRows(arrays)

    def gather_rows(self, x: Array, index: Ints) -> Array:
        """Return rows of x; zeros where the index is -1."""
        rows: Array = x[index]
        rows[index < 0] = 0
        return rows

    def to_host(self, x: Array) -> NDArray[np.float32]:
        """Return an array of the caller's own in the host's memory."""
        return np.array(x, np.float32)

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched on it."""

    def free_memory(self) -> int | None:
        """Return the free bytes of the device's own memory; None: the host's memory counts."""
        return None

    def allocated_memory(self) -> int:
        """Return the bytes that tensors take in the device's own memory."""
        return 0

    def has_failed(self) -> bool:
        """Return whether the device cannot compute any more until the process is restarted."""
        return False

    def weight_bytes(self, checkpoint: Checkpoint, types: Mapping[str, str] | None = None) -> int:
        """Return the bytes of a checkpoint's weights once prepared; `types` overrides quantization types by name."""
        return checkpoint.nbytes

    def start_compiler(self) -> None:
        """Prepare for compiling many kernels at once, while other parts of a model are loaded."""

    def warm_up(
        self,
        forward: Forward,
        fused: FusedForward | None,
        kv: Sequence[LayerCache],
        limits: StepLimits,
        progress: Progress,
    ) -> WarmUp:
        """Do all one-time work of steps within the limits, so that none is left for a request. Nothing is in `kv`."""
        return WarmUp()

    def load_kernels(
        self, checkpoint: Checkpoint, config: ModelConfig, kv_type: str, progress: Progress | None = None
    ) -> int:
        """Load or compile the kernels that a model needs; return how many were compiled."""
        return 0

    def require_fp8(self) -> None:
        """Raise unless weights can be kept in FP8 (e4m3)."""
        raise InvalidRequestError(
            "quantize fp8 needs an NVIDIA GPU, and this computes on the CPU: use device cuda, or quantize Q8_0",
            "quantize",
        )


OPS = (*SHAPES, *sorted(Backend.__abstractmethods__, key=list(vars(Backend)).index))
