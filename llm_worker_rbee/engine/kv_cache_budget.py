"""How large the KV cache is: from the memory there is, and what was asked for, to blocks, contexts and requests.

One pool of blocks serves all requests; nobody owns a part of it beforehand. So what fits is told in two ways: so many
whole contexts, or so many tokens for each of `max_batch` requests. Planned before the weights are loaded, so that
what cannot be is refused before anything large is taken. No arrays here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .. import machine
from ..backends import Backend
from ..config import DEVICE_SPARE, KV_VALUE_BYTES, EngineConfig, ModelConfig
from ..errors import InsufficientMemoryError, InvalidRequestError, human_bytes

# Of the memory that is free beside the weights. The cache fills up in time, since what is computed is kept for requests
# that begin alike; the rest is for the arrays of a step, the files that the system keeps at hand, and other programs:
# two workers that start together on one machine still fit.
DEFAULT_SHARE = 0.4
DEVICE_SHARE = 0.95  # of a GPU's, beside the weights and what is spared for everything else: nobody else computes there
SMALLEST_CONTEXT = 128  # tokens: a short question and its answer. A cache that holds less serves nobody
HEAD_STEP = 16  # the CPU backend pads each head to a multiple of so many values
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]?)(iB?|B)?", re.IGNORECASE | re.ASCII)
BLOCK_SIZE = EngineConfig(max_context=1, n_blocks=1).block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A KV cache, and what fits into it."""

    kv_type: str
    n_blocks: int
    block_size: int
    bytes: int  # of keys and values, those of a draft model included
    max_context: int  # tokens of one request: what was asked for, or what fits
    wanted_context: int  # what was asked for, or the model's own
    max_batch: int

    @property
    def tokens(self) -> int:
        """Of all requests together."""
        return self.n_blocks * self.block_size

    @property
    def contexts(self) -> int:
        """Requests with a whole context each."""
        return self.n_blocks // -(-self.max_context // self.block_size)

    @property
    def requests(self) -> int:
        """Requests that run at once when they are short."""
        return min(self.max_batch, self.n_blocks)

    @property
    def tokens_each(self) -> int:
        """What each of that many requests may have."""
        return min(self.max_context, self.n_blocks // self.requests * self.block_size)

    @property
    def is_cut(self) -> bool:
        """Whether the context is smaller than what was wanted."""
        return self.max_context < self.wanted_context

    def __str__(self) -> str:
        told = f"KV cache {human_bytes(self.bytes)} ({self.kv_type}): {self.tokens:,} tokens = "
        if self.contexts >= self.max_batch:
            return f"{told}{_counted(self.contexts, 'context')} of {self.max_context:,}, a whole one for each request"
        cut = f" (not {self.wanted_context:,})" if self.is_cut else ""
        return (
            f"{told}{_counted(self.contexts, 'context')} of {self.max_context:,}{cut}, "
            f"or {_counted(self.requests, 'request')} of {self.tokens_each:,} each"
        )


def plan(
    config: ModelConfig,
    kv_type: str = "float32",
    *,
    kv_memory: int | None = None,
    max_context: int | None = None,
    max_batch: int,
    available: int | None,
    block_size: int = BLOCK_SIZE,
    draft_config: ModelConfig | None = None,
    share: float = DEFAULT_SHARE,
) -> Capacity:
    """The cache for `max_batch` requests of up to `max_context` tokens (default: the model's own).

    `kv_memory` is its size in bytes; by default what all of them could ever use, but at most that `share` of
    `available`, the bytes that are free beside the weights (None: not known; then it is one whole context). A draft
    model's cache has as many blocks and shares the memory. Only the default context is cut to what fits: one that was
    asked for is refused.
    """
    EngineConfig(max_context=1, n_blocks=1, block_size=block_size, max_batch=max_batch)  # which knows what may be
    wanted = _context(max_context, config.context_length)
    models = [config] if draft_config is None else [config, draft_config]
    block = sum(block_bytes(one, kv_type, block_size) for one in models)
    whole = -(-wanted // block_size)
    by_default = _default(whole * block, max_batch, available, share)
    memory = by_default if kv_memory is None else _allowed(kv_memory, available)
    n_blocks = memory // block
    smallest = whole if max_context is not None else min(whole, -(-SMALLEST_CONTEXT // block_size))
    if n_blocks < smallest:
        tokens = min(wanted, smallest * block_size)
        told = f"the keys and values of {tokens:,} tokens take {human_bytes(smallest * block)}"
        smaller = "model or kv_type" if max_context is None else "max_context or kv_type"
        raise InsufficientMemoryError(f"{told}, and {_too_small(smaller, kv_memory, available, share)}")
    return Capacity(
        kv_type=kv_type, n_blocks=n_blocks, block_size=block_size, bytes=n_blocks * block,
        max_context=min(wanted, n_blocks * block_size), wanted_context=wanted, max_batch=max_batch,
    )  # fmt: skip


def block_bytes(config: ModelConfig, kv_type: str, block_size: int = BLOCK_SIZE) -> int:
    """The memory of a block in all layers, with what the backend pads."""
    padding = -config.head_dim % HEAD_STEP * KV_VALUE_BYTES[kv_type]
    return config.kv_bytes(block_size, kv_type) + 2 * config.n_layers * config.n_kv_heads * padding * block_size


def available_memory(reserved: int = 0, ops: Backend | None = None) -> int | None:
    """Bytes that are free on this machine and under its cgroup's limit, less `reserved`; None where nobody tells. Those
    of a backend on a device of its own are the device's, less what it needs beside weights and cache."""
    on_device = None if ops is None else ops.free_memory()
    if on_device is not None:
        return max(0, on_device - DEVICE_SPARE - reserved)
    total, free = machine.memory()
    limit, used = machine.memory_limit()
    known = [total if free is None else free, None if limit is None else limit - used]
    found = [size for size in known if size is not None]
    return max(0, min(found) - reserved) if found else None


def bytes_of(text: str) -> int:
    """`512M`, `1.5GB`, `2GiB` -> bytes; K, M, G and T are powers of 1,000, with an i of 1,024."""
    found = SIZE.fullmatch(text.strip())
    binary = found is not None and (found[3] or "").lower().startswith("i")
    if found is None or (binary and not found[2]):
        raise InvalidRequestError(f"kv_memory is {text!r}: give a size such as 512M, 1.5GB or 2GiB", "kv_memory")
    size = int(float(found[1]) * (1024 if binary else 1000) ** UNITS[found[2].upper()])
    if size < 1:
        raise InvalidRequestError(f"kv_memory is {text!r}: it must be 1 byte or more", "kv_memory")
    return size


def _default(context: int, max_batch: int, available: int | None, share: float) -> int:
    return context if available is None else min(context * max_batch, int(available * share))


def _allowed(kv_memory: int, available: int | None) -> int:
    if isinstance(kv_memory, bool) or not isinstance(kv_memory, int) or kv_memory < 1:
        raise InvalidRequestError(f"kv_memory is {kv_memory!r}: it must be a number of bytes, 1 or more", "kv_memory")
    if available is not None and kv_memory > available:
        raise InsufficientMemoryError(
            f"kv_memory is {human_bytes(kv_memory)}, and {human_bytes(available)} of memory are free beside the model: "
            "use a smaller kv_memory, or leave it out"
        )
    return kv_memory


def _too_small(smaller: str, kv_memory: int | None, available: int | None, share: float) -> str:
    if kv_memory is not None:
        return f"kv_memory is {human_bytes(kv_memory)}: give more, or use a smaller {smaller}"
    return (
        f"{human_bytes(available or 0)} of memory are free beside the model, of which the KV cache takes "
        f"{share:.0%}: stop other programs, use a smaller {smaller}, or set kv_memory"
    )


def _context(asked: int | None, largest: int) -> int:
    if asked is None:
        return largest
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= largest:
        raise InvalidRequestError(
            f"max_context is {asked!r}: it must be 1 to {largest}, the model's context", "max_context"
        )
    return asked


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)
