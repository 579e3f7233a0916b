"""What must hold between two steps of requests and their places: for tests and for debug runs. No arrays here."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import EngineConfig
from .request import Request


def check_places(
    running: Sequence[Request], waiting: Sequence[Request], free_rows: Sequence[int], config: EngineConfig
) -> None:
    """Every request is in one place, with what belongs to it there and nothing else; no row is lost or given twice."""
    assert not set(running) & set(waiting)
    assert not any(request.is_finished for request in (*running, *waiting))
    rows = [request.batch_slot for request in running]
    assert sorted([*rows, *free_rows]) == list(range(config.max_batch)), "a row is lost or given twice"
    for request in waiting:
        assert (request.batch_slot, request.num_computed_tokens, request.blocks, request.drafts) == (-1, 0, [], [])
    for request in running:
        assert request.num_computed_tokens < len(request.ids)
        assert request.num_computed_tokens <= len(request.blocks) * config.block_size
        assert request.num_blocks_in_table <= len(request.blocks)
