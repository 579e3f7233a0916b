"""The reports of `Engine` replicas to the fronts, every second, through Ray's controller.

Ray copies the module of a request router into each process; this one is imported, so `latest` is the one table of a
front, which its router writes and its `RayEngine` reads.
"""

from __future__ import annotations

import msgspec

from ..engine.block_pool import DIGEST_BYTES
from ..token_engine.protocol import EngineStats

SHORT_BYTES = 8  # of a block hash in a report: a false match is rare, and costs a prefill only
INTERVAL_S = 1.0
KEY = "report"  # in Ray's routing stats


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one replica."""

    status: str
    device: str
    block_size: int
    num_restarts: int  # of its child process
    num_requests: int
    stats: EngineStats
    last_step_age_s: float
    load: int  # as in `routing.Candidate`
    hashes: bytes  # of cached blocks and of those that open requests will add, shortened and joined


latest: dict[str, EngineReport] = {}  # by the ids of replicas


def shorten(block_hash: bytes) -> bytes:
    """Return the part of a hash that is reported."""
    return block_hash[:SHORT_BYTES]


def split_hashes(joined: bytes, size: int = DIGEST_BYTES) -> list[bytes]:
    """Return hashes of `size` bytes that were joined."""
    return [joined[at : at + size] for at in range(0, len(joined), size)]
