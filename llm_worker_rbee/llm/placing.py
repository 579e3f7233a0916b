"""Where a model goes, and how much room there is for keys and values beside it: before anything large is taken."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends import fitting, gpu
from ..backends.types import Ops
from ..engine.capacity import DEFAULT_SHARE, DEVICE_SHARE, Capacity, available_memory, plan
from ..models import describe
from ..weights import Checkpoint


def placed(ops: Ops, models: Sequence[Checkpoint]) -> tuple[Ops, list[str]]:
    """The backend that `auto` picked, or the CPU where the weights do not fit on its GPU; and what to say of it."""
    ops, told = fitting(ops, sum(map(gpu.packed_bytes, models)))
    return ops, [] if told is None else [told]


def planned(
    ops: Ops,
    models: Sequence[Checkpoint],
    kv_type: str,
    *,
    kv_memory: int | None,
    max_context: int | None,
    max_batch: int,
) -> Capacity:
    """How large the cache is for a model, and the draft model that may follow it."""
    is_cuda = gpu.is_cuda(ops)
    weights = sum(gpu.packed_bytes(one) if is_cuda else one.nbytes for one in models)
    config, *drafts = map(describe, models)
    return plan(
        config,
        kv_type,
        kv_memory=kv_memory,
        max_context=max_context,
        max_batch=max_batch,
        available=available_memory(weights, ops),
        draft_config=drafts[0] if drafts else None,
        share=DEVICE_SHARE if is_cuda else DEFAULT_SHARE,
    )
