"""The memory plan of a model: a table of its uses, the limits of a step, and the size of the KV cache.

`place_model` is the one entry. Every use of the memory is a row of the table (`MemoryRow`): weights, other models and
engines, the arrays of a step; the KV cache gets a share of the rest. It is planned before the weights are loaded, so
that an impossible size is refused early. A further use adds a row. No arrays here.

On a CPU the limits of a step are constants: step time grows linearly with the batch. A GPU computes a hundred requests
in little more than the time of one, so there they follow from the memory without the weights: as many requests as the
KV cache has room for, as many tokens as a step computes in a fraction of a second.

All requests share one block pool. So what fits is reported in two ways: whole contexts, or tokens for each of
`max_batch` requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import machine
from ..backends import Backend, resolve_kv_type, select, select_backend
from ..config import (
    DEVICE_SPARE_BYTES,
    IMAGE_ROWS_BYTES,
    KV_AUTO,
    KV_CUDA,
    KV_DEFAULT,
    MAX_BATCH,
    STEP_TOKENS,
    ComputeOptions,
    EngineConfig,
    LoadOptions,
    ModelConfig,
    SchedulerLimits,
)
from ..errors import InsufficientMemoryError, InvalidRequestError, counted, human_bytes
from ..models import read_model_config
from ..models.convert import planned_types
from ..models.mtp import head_config
from ..weights import Checkpoint
from .scheduler import max_scored_tokens
from .state_pool import SLOTS_PER_REQUEST, default_slots

# Of the host memory that the weights leave free. The prefix cache fills the KV cache in time; the rest is for the
# arrays of a step, the page cache and other programs: two workers that start together on one machine still fit.
HOST_MEMORY_FRACTION = 0.4
DEVICE_MEMORY_FRACTION = 0.95  # of a GPU's, after weights and DEVICE_SPARE_BYTES: no other program computes there
ADDRESS_SPARE_BYTES = 256 << 20  # of a limited address space: stacks and arenas of threads, libraries loaded later
STATE_FRACTION = 0.5  # of the cache, that the states of running requests may take: fewer requests run if it is less
SNAPSHOT_FRACTION = 0.25  # of the rest, that snapshots may take
MAX_SNAPSHOTS_PER_REQUEST = 64
PROCESS_BYTES = 192 << 20  # of an engine's process on a CPU, beside weights, keys and values
MIN_CONTEXT = 128  # tokens: a short question and its answer
HEAD_STEP = 16  # the CPU backend pads each head to a multiple of this
BLOCK_SIZE = EngineConfig.block_size
DELTA_CHUNK = 64  # tokens of a chunk of the gated delta rule on a GPU
BATCH_STEP = 64  # the default is a multiple of this
# Tokens that each request of a full batch has room for: an eighth of the context, within these bounds.
CONTEXT_SHARE, MIN_REQUEST_TOKENS, MAX_REQUEST_TOKENS = 8, 512, 1024
MIN_STEP_TOKENS_BY_TIME = 2048  # however large the model: fewer would leave tensor cores idle
DEFAULT_LORA_RANK = 16
MAX_STEP_FLOPS = 1.5e14  # of the matrix products of a step: 8,192 tokens of 8B parameters, 0.2 to 0.4 s on an H200
WORKSPACE_SHARE = 0.1  # of the memory after the weights: the default share for the arrays of a step
GRAPH_TOKENS = 1024  # of the largest captured step: graphs keep their arrays in a memory pool of their own
LOGIT_COPIES = 3  # as computed, in the buffer that graphs share, capped or gathered for sampling
SAMPLED_ROWS = 192  # at a time, at most: one on each multiprocessor, two numbers of 8 bytes a token of the vocabulary
# Float32 copies of a product: its parts, and joined or scaled; batch-invariant products have 4 splits in every step.
PRODUCT_COPIES, BATCH_INVARIANT_COPIES = 2, 8


class MemoryRow(NamedTuple):
    """One use of a memory."""

    owner: str
    memory: str  # "device" or "host"
    bytes: int
    reason: str


@dataclass(slots=True)
class MemoryPlan:
    """The table of a memory, and the limits of a step in it."""

    memory: str  # "device" or "host"
    free: int | None  # bytes before anything is loaded; None: unknown
    fraction: float  # of what the rows leave, for the KV cache
    limits: SchedulerLimits
    rows: list[MemoryRow] = field(default_factory=list)

    def add(self, owner: str, size: int, reason: str) -> None:
        if size:
            self.rows.append(MemoryRow(owner, self.memory, size, reason))

    @property
    def available(self) -> int | None:
        """The bytes that the rows leave; None: unknown."""
        return None if self.free is None else max(0, self.free - sum(row.bytes for row in self.rows))


class Placement(NamedTuple):
    """The backend of a model, the sizes of its steps and its KV cache, and its memory plan."""

    backend: Backend
    kv_type: str
    capacity: KVCacheBudget
    limits: SchedulerLimits
    notes: list[str]
    rows: list[MemoryRow]


def place_model(backend: Backend, models: Sequence[Checkpoint], options: LoadOptions) -> Placement:
    """Return the backend and the KV cache for a model and the draft model that may follow it.

    A GPU that `auto` chose gives way to the CPU if the weights, or keys and values, do not fit on it. FP8 weights need
    a GPU, so they stay there and planning the KV cache raises.
    """
    backend, notes = place_weights(backend, models, options)
    try:
        return _place_cache(backend, models, options, notes)
    except InsufficientMemoryError as error:
        if not options.may_leave_gpu or not backend.has_device_memory:
            raise
        notes = [f"the GPU is not used: {error}"]
    return _place_cache(select_backend("cpu"), models, options, notes)


def place_weights(backend: Backend, models: Sequence[Checkpoint], options: ComputeOptions) -> tuple[Backend, list[str]]:
    """Return the backend (the CPU's if the weights exceed a GPU that `auto` chose), and notes on it."""
    if not options.may_leave_gpu:
        return backend, []
    needed = device_weight_bytes(models, options)
    backend, note = fallback_to_cpu(backend, needed)
    return backend, [] if note is None else [note]


def fallback_to_cpu(backend: Backend, needed: int) -> tuple[Backend, str | None]:
    """Return the backend that `auto` chose, or the CPU's if `needed` bytes do not fit on the GPU; and a note on it."""
    if not backend.has_device_memory:
        is_unused = select.has_driver() and select.missing_packages()
        return backend, f"there is an NVIDIA GPU; to compute on it: {select.INSTALL_COMMAND}" if is_unused else None
    free, total = backend.free_memory() or 0, needed + DEVICE_SPARE_BYTES
    if free >= total:
        return backend, None
    sizes = f"the GPU has {human_bytes(free)} of memory free, and the model takes {human_bytes(total)}"
    return select_backend("cpu"), f"{sizes}: computing on the CPU"


def require_weights_fit(backend: Backend, models: Sequence[Checkpoint], options: ComputeOptions) -> None:
    """Raise if the memory is too small for weights alone, of a model without a KV cache."""
    size, free = device_weight_bytes(models, options), free_memory(backend if backend.has_device_memory else None)
    if backend.has_device_memory and free is not None:
        free = max(0, free - DEVICE_SPARE_BYTES)
    if free is not None and size > free:
        raise InsufficientMemoryError(
            f"the weights take {human_bytes(size)}, and {human_bytes(free)} of memory are free: use a smaller model, "
            "or quantize it"
        )


def _place_cache(backend: Backend, models: Sequence[Checkpoint], options: LoadOptions, notes: list[str]) -> Placement:
    kv_type = resolve_kv_type(backend, options.kv_type)
    plan = plan_memory(backend, models, kv_type, options)
    capacity = plan_cache(plan, models, kv_type, options)
    if backend.has_device_memory and None in (options.max_batch, options.max_step_tokens):
        notes = [*notes, f"{plan.limits} fit on {backend.device}; max_batch and max_step_tokens set other limits"]
    return Placement(backend, kv_type, capacity, plan.limits, notes, plan.rows)


def plan_memory(
    backend: Backend | None, models: Sequence[Checkpoint], kv_type: str, options: LoadOptions
) -> MemoryPlan:
    """Return the rows other than the KV cache, of a model and an optional draft model, and the limits of a
    step; backend None: on the CPU."""
    sharing, plural = options.num_sharing, f" of {options.num_sharing} engines" if options.num_sharing > 1 else ""
    if backend is None or not backend.has_device_memory:
        usual = SchedulerLimits()
        limits = SchedulerLimits(options.max_batch or usual.max_batch, options.max_step_tokens or usual.max_step_tokens)
        plan = MemoryPlan("host", free_memory(), HOST_MEMORY_FRACTION / sharing, limits)
        plan.add("weights", sharing * sum(map(_host_bytes, models)), f"the files{plural}, mapped or unpacked")
        plan.add("other models", options.reserved_memory, "beside this one: weights and the arrays of a step")
        _add_extras(plan, models[0], options)
        return plan
    return _plan_device(free_memory(backend), DEVICE_MEMORY_FRACTION / sharing, models, kv_type, options)


def _plan_device(
    free: int | None, fraction: float, models: Sequence[Checkpoint], kv_type: str, options: LoadOptions
) -> MemoryPlan:
    """Return the rows and limits on a GPU with `free` bytes, of which the KV cache takes a `fraction` of the rest."""
    sharing, plural = options.num_sharing, f" of {options.num_sharing} engines" if options.num_sharing > 1 else ""
    plan = MemoryPlan("device", free, fraction, SchedulerLimits())
    plan.add("weights", sharing * device_weight_bytes(models, options), f"packed for the GPU{plural}")
    plan.add("runtime", sharing * DEVICE_SPARE_BYTES, f"CUDA context, kernels, graphs{plural}")
    plan.add("other models", options.reserved_memory, "beside this one: weights and the arrays of a step")
    _add_extras(plan, models[0], options)
    config, *drafts = _configs(models, options)
    workspace = Workspace(config, options.drafts_per_step, options.deterministic, options.has_mtp)
    memory = int((plan.available or 0) * fraction / DEVICE_MEMORY_FRACTION)
    plan.limits = _choose_limits(workspace, memory, drafts, kv_type, options)
    plan.add("step", sharing * workspace.bytes(plan.limits), f"arrays of the largest step{plural}: {plan.limits}")
    return plan


def _add_extras(plan: MemoryPlan, model: Checkpoint, options: LoadOptions) -> None:
    """Add a vision tower; and as many LoRA adapters as there may be, of all matrices of the layers but experts."""
    rows = IMAGE_ROWS_BYTES if options.tower_memory and plan.memory == "host" else 0  # rows of a GPU are there too
    size = options.num_sharing * (options.tower_memory + rows)
    plan.add("vision tower", size, f"its weights, a step{', rows of images' if rows else ''}")
    rank = options.max_lora_rank or DEFAULT_LORA_RANK
    shapes = [(t.shape, t.kind.name) for name, t in model.tensors.items() if name.startswith("blk.")]
    each = sum(rank * sum(shape) * (4 if kind == "F32" else 2) for shape, kind in shapes if len(shape) == 2)
    count = options.lora_slots
    plan.add("adapters", options.num_sharing * count * each, f"{counted(count, 'LoRA adapter')} of rank {rank}")


def plan_member(
    checkpoint: Checkpoint, options: LoadOptions, total: int | None, fraction: float, *, on_device: bool = False
) -> MemoryPlan:
    """Return the rows of a chat model that shares `total` bytes of a memory, the host's or a GPU's, with others, of
    which its KV cache takes at most `fraction`; and its KV cache. Raise if it does not fit even alone."""
    if on_device:
        kv_type = KV_CUDA if options.kv_type == KV_AUTO else options.kv_type
        plan = _plan_device(total, fraction, [checkpoint], kv_type, options)
        require_room(plan.rows, total)
        plan_cache(plan, [checkpoint], kv_type, options)
        return plan
    limits = SchedulerLimits()
    limits = SchedulerLimits(options.max_batch or limits.max_batch, options.max_step_tokens or limits.max_step_tokens)
    plan = MemoryPlan("host", total, fraction, limits)
    plan.add("weights", _host_bytes(checkpoint), "the files, mapped or unpacked")
    _add_extras(plan, checkpoint, options)
    plan.add("process", PROCESS_BYTES, "interpreter, kernels, the arrays of a step")
    require_room(plan.rows, total)
    default = "float32" if options.backend == "reference" else KV_DEFAULT
    plan_cache(plan, [checkpoint], default if options.kv_type == KV_AUTO else options.kv_type, options)
    return plan


def require_room(rows: Sequence[MemoryRow], total: int | None) -> None:
    """Raise if the rows of a model exceed the memory of all models, with the size of each."""
    needed = sum(row.bytes for row in rows)
    if total is not None and needed > total:
        sizes = ", ".join(f"{row.owner} {human_bytes(row.bytes)}" for row in rows)
        raise InsufficientMemoryError(
            f"the model takes {human_bytes(needed)} ({sizes}), and all models together may take {human_bytes(total)}: "
            "use a smaller model, --max-context or --kv-memory, or give more with --model-memory"
        )


def plan_cache(plan: MemoryPlan, models: Sequence[Checkpoint], kv_type: str, options: LoadOptions) -> KVCacheBudget:
    """Return the KV cache of a model and its draft model, and add its row; raise if it does not fit."""
    config, *drafts = _configs(models, options)
    capacity = plan_kv_cache(
        config,
        kv_type,
        kv_memory=options.kv_memory,
        max_context=options.max_context,
        max_batch=plan.limits.max_batch,
        available=plan.available,
        draft_config=drafts[0] if drafts else None,
        memory_fraction=plan.fraction,
        draft_tokens=options.drafts_per_step,
    )
    plan.add("KV cache", capacity.bytes, str(capacity))
    return capacity


def _configs(models: Sequence[Checkpoint], options: LoadOptions) -> list[ModelConfig]:
    """Return the shape of a model, and of its drafter."""
    configs = list(map(read_model_config, models))
    return [*configs, head_config(configs[0])] if options.has_mtp else configs


def _choose_limits(
    workspace: Workspace, memory: int, drafts: list[ModelConfig], kv_type: str, options: LoadOptions
) -> SchedulerLimits:
    """Return the limits of a step on a GPU with `memory` bytes after the weights."""
    config = workspace.config
    max_step_tokens = options.max_step_tokens or choose_step_tokens(workspace, memory)
    max_batch = options.max_batch or choose_batch(
        workspace,
        memory,
        max_step_tokens,
        kv_memory=options.kv_memory,
        memory_fraction=DEVICE_MEMORY_FRACTION,
        kv_token_bytes=sum(block_bytes(shape, kv_type, 1) for shape in (config, *drafts)),
        context=options.max_context or config.context_length,
        state_bytes=(SLOTS_PER_REQUEST + options.drafts_per_step) * config.state_bytes,
    )
    return SchedulerLimits(max_batch, max_step_tokens)


def _host_bytes(model: Checkpoint) -> int:
    """Return the bytes of the weights on the CPU; blocks of quantized safetensors are larger than in their file."""
    return max(model.nbytes, select.packed_bytes(model)) if "quantization" in model.metadata else model.nbytes


def device_weight_bytes(models: Sequence[Checkpoint], options: ComputeOptions) -> int:
    """Return the bytes of the weights on a GPU; the first model's in the type that it is quantized to."""
    first, *others = models
    types = {} if options.quantize is None or options.is_fp8 else planned_types(first, options.quantize)
    return select.packed_bytes(first, types) + sum(map(select.packed_bytes, others))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheBudget:
    """The size of a KV cache, and its capacity."""

    kv_type: str
    n_blocks: int
    block_size: int
    bytes: int  # of keys and values, a draft model's included, and of states
    max_context: int  # tokens of one request: what was set, or what fits
    requested_context: int  # what was set, or the model's own
    max_batch: int
    n_slots: int = 0  # of states, in a model that has them
    slot_bytes: int = 0

    @property
    def tokens(self) -> int:
        return self.n_blocks * self.block_size

    @property
    def contexts(self) -> int:
        """Requests with a whole context each."""
        return self.n_blocks // -(-self.max_context // self.block_size)

    @property
    def requests(self) -> int:
        """Concurrent short requests."""
        return min(self.max_batch, self.n_blocks, *([self.n_slots // SLOTS_PER_REQUEST] if self.n_slots else []))

    @property
    def tokens_each(self) -> int:
        """Tokens for each of `requests`."""
        return min(self.max_context, self.n_blocks // self.requests * self.block_size)

    @property
    def is_context_reduced(self) -> bool:
        return self.max_context < self.requested_context

    def __str__(self) -> str:
        states = f", {self.n_slots:,} states of {human_bytes(self.slot_bytes)} each" if self.n_slots else ""
        return f"{self._describe_tokens()}{states}"

    def _describe_tokens(self) -> str:
        size = f"KV cache {human_bytes(self.bytes)} ({self.kv_type}): {self.tokens:,} tokens = "
        if self.contexts >= self.max_batch:
            return f"{size}{counted(self.contexts, 'context')} of {self.max_context:,}, a whole one for each request"
        reduced = f" (not {self.requested_context:,})" if self.is_context_reduced else ""
        return (
            f"{size}{counted(self.contexts, 'context')} of {self.max_context:,}{reduced}, "
            f"or {counted(self.requests, 'request')} of {self.tokens_each:,} each"
        )


def plan_kv_cache(
    config: ModelConfig,
    kv_type: str = "float32",
    *,
    kv_memory: int | None = None,
    max_context: int | None = None,
    max_batch: int,
    available: int | None,
    block_size: int = BLOCK_SIZE,
    draft_config: ModelConfig | None = None,
    memory_fraction: float = HOST_MEMORY_FRACTION,
    draft_tokens: int = 0,
) -> KVCacheBudget:
    """Return the KV cache for `max_batch` requests of up to `max_context` tokens (default: the model's own).

    `kv_memory` is its size in bytes; the default is enough for all requests, but at most `memory_fraction` of
    `available`, the bytes that the weights leave free (None: unknown; then it is one whole context). A draft model's
    cache has as many blocks and shares the memory. Only the default context is reduced to what fits: one that was set
    raises. States take part of the same memory, at most five eighths: half for running requests, with `draft_tokens`
    more for each, and a quarter of the rest for snapshots.
    """
    EngineConfig(max_context=1, n_blocks=1, block_size=block_size, max_batch=max_batch)  # checks their ranges
    requested = _check_context(max_context, config.context_length)
    models = [config] if draft_config is None else [config, draft_config]
    block = sum(block_bytes(model, kv_type, block_size) for model in models)
    context_blocks = -(-requested // block_size)
    slot, slots = config.state_bytes, default_slots(max_batch, draft_tokens) if config.state_bytes else 0
    if kv_memory is not None:
        memory = _check_memory(kv_memory, available)
    elif available is None:
        memory = context_blocks * block + slots * slot
    else:
        most = slots + MAX_SNAPSHOTS_PER_REQUEST * max_batch
        memory = min(context_blocks * block * max_batch + most * slot, int(available * memory_fraction))
    is_known = kv_memory is not None or available is not None
    n_slots = _num_slots(slot, memory, max_batch, slots) if is_known else slots
    n_blocks = (memory - n_slots * slot) // block
    if kv_memory is None and slot:
        n_blocks = min(n_blocks, context_blocks * max_batch)  # more than all requests use
    min_blocks = context_blocks if max_context is not None else min(context_blocks, -(-MIN_CONTEXT // block_size))
    if n_blocks < min_blocks:
        tokens = min(requested, min_blocks * block_size)
        needed = f"the keys and values of {tokens:,} tokens take {human_bytes(min_blocks * block)}"
        if n_slots:
            needed += f" beside states of {human_bytes(n_slots * slot)}"
        smaller = "model or kv_type" if max_context is None else "max_context or kv_type"
        raise InsufficientMemoryError(f"{needed}, and {_shortage(smaller, kv_memory, available, memory_fraction)}")
    return KVCacheBudget(
        kv_type=kv_type,
        n_blocks=n_blocks,
        block_size=block_size,
        bytes=n_blocks * block + n_slots * slot,
        n_slots=n_slots,
        slot_bytes=slot,
        max_context=min(requested, n_blocks * block_size),
        requested_context=requested,
        max_batch=max_batch,
    )


def _num_slots(slot: int, memory: int, max_batch: int, slots: int) -> int:
    """Return the states of `slot` bytes that `memory` bytes hold: up to `slots`, and snapshots."""
    if not slot:
        return 0
    slots = max(SLOTS_PER_REQUEST, min(slots, int(STATE_FRACTION * memory) // slot))
    snapshots = int(SNAPSHOT_FRACTION * max(0, memory - slots * slot)) // slot
    return slots + min(snapshots, MAX_SNAPSHOTS_PER_REQUEST * max_batch)


def block_bytes(config: ModelConfig, kv_type: str, block_size: int = BLOCK_SIZE) -> int:
    """Return the bytes of a block in all layers, with the backend's padding."""
    return config.kv_bytes(block_size, kv_type, HEAD_STEP)


def free_memory(backend: Backend | None = None) -> int | None:
    """Return the bytes that are free on a backend with memory of its own; else on this machine, under the limits of
    its cgroup and of this process. None if unknown."""
    on_device = None if backend is None else backend.free_memory()
    if on_device is not None:
        return on_device
    total, free = machine.memory()
    limit, used = machine.memory_limit()
    space = machine.address_space_left()
    sizes = [total if free is None else free, None if limit is None else limit - used]
    sizes.append(None if space is None else space - ADDRESS_SPARE_BYTES)
    limits = [size for size in sizes if size is not None]
    return max(0, min(limits)) if limits else None


@dataclass(frozen=True, slots=True)
class Workspace:
    """The arrays of a step on a GPU, without weights and KV cache."""

    config: ModelConfig
    draft_tokens: int = 0  # of each decoding request
    batch_invariant: bool = False
    keeps_hidden: bool = False  # of all tokens, for multi-token prediction

    @property
    def token_bytes(self) -> int:
        """The bytes of one token at the largest layer; activations have 2 bytes per value."""
        config, copies = self.config, BATCH_INVARIANT_COPIES if self.batch_invariant else PRODUCT_COPIES
        width, layers = config.d_model, range(config.n_layers)
        heads, kv_heads = max((config.n_heads * dim, n * dim) for n, dim in map(config.kv_shape, layers))
        attention = copies * 4 * (heads + 2 * kv_heads) + (2 + 4 + 2) * heads  # product; queries, output, activations
        if config.family.attention.gated:
            attention += copies * 4 * heads
        if (linear := config.linear) is not None:  # product; convolution; w, u and scores of chunks; result
            values = linear.v_heads * linear.v_dim
            chunks = linear.v_heads * (linear.k_dim + linear.v_dim + DELTA_CHUNK)
            delta = copies * 4 * (linear.channels + values) + 4 * (linear.channels + chunks) + 6 * values
            attention = max(attention, delta)
        d_ff = max(map(config.d_ff_of, layers))
        mlp = copies * 4 * 2 * d_ff + 2 * d_ff  # gate and up; their combination
        if (experts := config.experts) is not None:  # of all experts of a token: products, without splits, and a copy
            routed = experts.used * (12 * experts.d_ff + 4 * width) + copies * 8 * experts.shared_d_ff
            mlp = max(mlp, routed + (4 * width if experts.spec.parallel else 0))  # the MLP's result is kept
        inputs = 4 * config.n_layers * config.layer_input_dim  # per-layer embeddings, kept until the last layer
        first = (1 + copies) * inputs  # rows of their table, and the product
        hidden = 4 * width if self.keeps_hidden else 0
        return 4 * width + 2 * width + hidden + inputs + max(attention, mlp, first)  # with the stream and its norm

    def bytes(self, limits: SchedulerLimits) -> int:
        """Return the bytes of the largest step, including its graphs."""
        decoding = limits.max_batch * (1 + self.draft_tokens)
        tokens = max(limits.max_step_tokens, decoding)
        rows = decoding + min(limits.max_step_tokens, max_scored_tokens(limits.max_step_tokens))
        logits = (LOGIT_COPIES * 4 * rows + 2 * 8 * min(rows, SAMPLED_ROWS)) * self.config.vocab_size
        return (tokens + min(tokens, GRAPH_TOKENS)) * self.token_bytes + logits


def choose_step_tokens(workspace: Workspace, memory: int) -> int:
    """Return the default of `max_step_tokens` on a GPU with `memory` bytes after the weights."""
    config = workspace.config
    experts, d_ff = config.experts, config.d_ff
    if experts is not None:
        d_ff = experts.used * experts.d_ff + experts.shared_d_ff + (d_ff if experts.spec.parallel else 0)
    matrix_rows = 2 * (config.n_heads + config.n_kv_heads) * config.head_dim + 3 * d_ff  # of d_model values each
    flops = 2 * config.n_layers * config.d_model * matrix_rows  # of a token
    for tokens in STEP_TOKENS:
        is_fast = flops * tokens <= MAX_STEP_FLOPS or tokens <= MIN_STEP_TOKENS_BY_TIME
        if is_fast and workspace.bytes(SchedulerLimits(BATCH_STEP, tokens)) <= WORKSPACE_SHARE * memory:
            return tokens
    return STEP_TOKENS[-1]


def choose_batch(
    workspace: Workspace,
    memory: int,
    max_step_tokens: int,
    *,
    kv_token_bytes: int,
    context: int,
    kv_memory: int | None = None,
    memory_fraction: float = 1.0,
    state_bytes: int = 0,
) -> int:
    """Return the default of `max_batch` on a GPU with `memory` bytes after the weights.

    It is the number of requests, of a share of the context and `state_bytes` each, that fit into the KV cache:
    `kv_memory` bytes, or `memory_fraction` of the memory after the arrays of a step.
    """
    tokens_each = min(context, max(MIN_REQUEST_TOKENS, min(MAX_REQUEST_TOKENS, context // CONTEXT_SHARE)))
    for batch in range(MAX_BATCH, BATCH_STEP, -BATCH_STEP):
        rest = memory - workspace.bytes(SchedulerLimits(batch, max_step_tokens))
        room = int(memory_fraction * rest) if kv_memory is None else min(kv_memory, rest)
        if batch * (tokens_each * kv_token_bytes + state_bytes) <= room:
            return batch
    return BATCH_STEP


def _check_memory(kv_memory: int, available: int | None) -> int:
    if isinstance(kv_memory, bool) or not isinstance(kv_memory, int) or kv_memory < 1:
        raise InvalidRequestError(f"kv_memory is {kv_memory!r}: it must be a number of bytes, 1 or more", "kv_memory")
    if available is not None and kv_memory > available:
        raise InsufficientMemoryError(
            f"kv_memory is {human_bytes(kv_memory)}, and {human_bytes(available)} of memory are free beside the model: "
            "use a smaller kv_memory, or leave it out"
        )
    return kv_memory


def _shortage(smaller: str, kv_memory: int | None, available: int | None, fraction: float) -> str:
    if kv_memory is not None:
        return f"kv_memory is {human_bytes(kv_memory)}: give more, or use a smaller {smaller}"
    return (
        f"{human_bytes(available or 0)} of memory are free beside the model, of which the KV cache takes "
        f"{fraction:.0%}: stop other programs, use a smaller {smaller}, or set kv_memory"
    )


def _check_context(max_context: int | None, model_context: int) -> int:
    if max_context is None:
        return model_context
    if isinstance(max_context, bool) or not isinstance(max_context, int) or not 1 <= max_context <= model_context:
        raise InvalidRequestError(
            f"max_context is {max_context!r}: it must be 1 to {model_context}, the model's context", "max_context"
        )
    return max_context
