"""What the replicas of `Engine` tell the fronts about themselves, every second, through Ray's controller.

Ray copies the module of a request router into each process; this one is imported, so `latest` is the one table of a
front, which its router writes and its `RayEngine` reads.
"""

from __future__ import annotations

import msgspec

from ..token_engine.protocol import EngineStats

HASH_BYTES = 8  # of a block hash here and in requests: a false match is rare, and costs a prefill only
INTERVAL_S = 1.0
KEY = "report"  # in Ray's routing stats


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one replica."""

    status: str
    num_restarts: int  # of its child process
    last_step_age_s: float
    stats: EngineStats
    block_size: int
    load: int  # tokens of its open requests: prompt tokens that were not cached, and output tokens
    hashes: bytes  # of cached blocks and of those that open requests will add, shortened and joined


latest: dict[str, EngineReport] = {}  # by the ids of replicas


def shorten(block_hash: bytes) -> bytes:
    """Return the part of a hash that is reported."""
    return block_hash[:HASH_BYTES]


def split_hashes(joined: bytes) -> list[bytes]:
    """Return shortened hashes that were joined."""
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]
