"""Where a model goes, and how much room there is for keys and values beside it: before anything large is taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..backends import fitting, gpu, pick
from ..backends.types import Ops
from ..engine.capacity import DEFAULT_SHARE, DEVICE_SHARE, Capacity, available_memory, plan
from ..models import describe
from ..models.convert import is_fp8, quantize_checkpoint
from ..weights import Checkpoint, open_checkpoint


def picked(device: str, backend: str, threads: int | None, deterministic: bool, quantize: str | None) -> Ops:
    """The backend, before any file is looked for: what it cannot do is refused."""
    ops = pick(device, backend, threads)
    if is_fp8(quantize):
        gpu.require_fp8(ops)
    return gpu.deterministic(ops) if deterministic else ops


def opened(path: Path, quantize: str | None) -> Checkpoint:
    """A model's file. Matrices that a GPU will keep in FP8 are marked at once: what is planned counts them so."""
    found = open_checkpoint(path)
    return quantize_checkpoint(found, quantize) if quantize is not None and is_fp8(quantize) else found


def placed(ops: Ops, models: Sequence[Checkpoint], on_gpu: bool = False) -> tuple[Ops, list[str]]:
    """The backend that `auto` picked, or the CPU where the weights do not fit on its GPU; and what to say of it. Those
    that are only for a GPU (`on_gpu`) stay there, and who plans the cache says what is missing."""
    if on_gpu:
        return ops, []
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
