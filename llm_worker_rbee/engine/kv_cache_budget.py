"""The size of the KV cache: from free memory and what the user set to blocks, contexts and requests.

All requests share one block pool. So what fits is reported in two ways: whole contexts, or tokens for each of
`max_batch` requests. It is planned before the weights are loaded, so that an impossible size is refused early.
No arrays here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .. import machine
from ..backends import Backend
from ..config import DEVICE_SPARE_BYTES, EngineConfig, ModelConfig
from ..errors import InsufficientMemoryError, InvalidRequestError, counted, human_bytes
from .state_pool import SLOTS_PER_REQUEST, default_slots

# Of the host memory that is free beside the weights. The prefix cache fills the KV cache in time; the rest is for the
# arrays of a step, the page cache and other programs: two workers that start together on one machine still fit.
HOST_MEMORY_FRACTION = 0.4
DEVICE_MEMORY_FRACTION = 0.95  # of a GPU's, beside the weights and DEVICE_SPARE_BYTES: no other program computes there
ADDRESS_SPARE_BYTES = 256 << 20  # of a limited address space: stacks and arenas of threads, libraries loaded later
STATE_FRACTION = 0.5  # of the cache, that the states of running requests may take: fewer requests run if it is less
SNAPSHOT_FRACTION = 0.25  # of the rest, that snapshots may take
MAX_SNAPSHOTS_PER_REQUEST = 64
MIN_CONTEXT = 128  # tokens: a short question and its answer
HEAD_STEP = 16  # the CPU backend pads each head to a multiple of this
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]?)(iB?|B)?", re.IGNORECASE | re.ASCII)
BLOCK_SIZE = EngineConfig(max_context=1, n_blocks=1).block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheBudget:
    """The size of a KV cache, and what fits into it."""

    kv_type: str
    n_blocks: int
    block_size: int
    bytes: int  # of keys and values, those of a draft model included, and of states
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
        """Short requests that run at once."""
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
    config: ModelConfig, kv_type: str = "float32", *, kv_memory: int | None = None, max_context: int | None = None,
    max_batch: int, available: int | None, block_size: int = BLOCK_SIZE, draft_config: ModelConfig | None = None,
    memory_fraction: float = HOST_MEMORY_FRACTION, draft_tokens: int = 0,
) -> KVCacheBudget:  # fmt: skip
    """Return the KV cache for `max_batch` requests of up to `max_context` tokens (default: the model's own).

    `kv_memory` is its size in bytes; by default what all requests could ever use, but at most `memory_fraction` of
    `available`, the bytes that are free beside the weights (None: unknown; then it is one whole context). A draft
    model's cache has as many blocks and shares the memory. Only the default context is reduced to what fits: one that
    was set raises. States take part of the same memory, at most five eighths: half for those of running
    requests, with `draft_tokens` more for each, and a quarter of the rest for snapshots.
    """
    EngineConfig(max_context=1, n_blocks=1, block_size=block_size, max_batch=max_batch)  # checks their ranges
    requested = _check_context(max_context, config.context_length)
    models = [config] if draft_config is None else [config, draft_config]
    block = sum(block_bytes(one, kv_type, block_size) for one in models)
    context_blocks = -(-requested // block_size)
    slot, wanted = config.state_bytes, default_slots(max_batch, draft_tokens) if config.state_bytes else 0
    if kv_memory is not None:
        memory = _check_memory(kv_memory, available)
    elif available is None:
        memory = context_blocks * block + wanted * slot
    else:
        most = wanted + MAX_SNAPSHOTS_PER_REQUEST * max_batch
        memory = min(context_blocks * block * max_batch + most * slot, int(available * memory_fraction))
    is_known = kv_memory is not None or available is not None
    n_slots = _num_slots(slot, memory, max_batch, wanted) if is_known else wanted
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
        kv_type=kv_type, n_blocks=n_blocks, block_size=block_size, bytes=n_blocks * block + n_slots * slot,
        n_slots=n_slots, slot_bytes=slot, max_context=min(requested, n_blocks * block_size),
        requested_context=requested, max_batch=max_batch,
    )  # fmt: skip


def _num_slots(slot: int, memory: int, max_batch: int, wanted: int) -> int:
    """Return how many states of `slot` bytes a cache of `memory` bytes has: up to `wanted`, and snapshots."""
    if not slot:
        return 0
    wanted = max(SLOTS_PER_REQUEST, min(wanted, int(STATE_FRACTION * memory) // slot))
    snapshots = int(SNAPSHOT_FRACTION * max(0, memory - wanted * slot)) // slot
    return wanted + min(snapshots, MAX_SNAPSHOTS_PER_REQUEST * max_batch)


def block_bytes(config: ModelConfig, kv_type: str, block_size: int = BLOCK_SIZE) -> int:
    """Return the bytes of a block in all layers, with the backend's padding."""
    return config.kv_bytes(block_size, kv_type, HEAD_STEP)


def available_memory(reserved: int = 0, ops: Backend | None = None) -> int | None:
    """Return the bytes that are free on this machine and under the limits of its cgroup and of this process, less
    `reserved`; None if unknown.

    For a backend with device memory it is the device's, less DEVICE_SPARE_BYTES.
    """
    on_device = None if ops is None else ops.free_memory()
    if on_device is not None:
        return max(0, on_device - DEVICE_SPARE_BYTES - reserved)
    total, free = machine.memory()
    limit, used = machine.memory_limit()
    space = machine.address_space_left()
    known = [total if free is None else free, None if limit is None else limit - used]
    known.append(None if space is None else space - ADDRESS_SPARE_BYTES)
    found = [size for size in known if size is not None]
    return max(0, min(found) - reserved) if found else None


def parse_size(text: str) -> int:
    """Return the bytes of `512M`, `1.5GB`, `2GiB`; K, M, G and T are powers of 1,000, with an i of 1,024."""
    found = SIZE.fullmatch(text.strip())
    binary = found is not None and (found[3] or "").lower().startswith("i")
    if found is None or (binary and not found[2]):
        raise InvalidRequestError(f"kv_memory is {text!r}: give a size such as 512M, 1.5GB or 2GiB", "kv_memory")
    size = int(float(found[1]) * (1024 if binary else 1000) ** UNITS[found[2].upper()])
    if size < 1:
        raise InvalidRequestError(f"kv_memory is {text!r}: it must be 1 byte or more", "kv_memory")
    return size


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
