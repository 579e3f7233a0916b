"""Where a model goes, and how much room there is for keys and values beside it: before anything large is taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..backends import cuda_probe, fitting, kv_type_for, pick
from ..backends.ops import Ops
from ..engine.kv_cache_budget import DEFAULT_SHARE, DEVICE_SHARE, Capacity, available_memory, plan
from ..errors import InsufficientMemoryError
from ..models import describe
from ..models.convert import is_fp8, kinds_in, quantize_checkpoint
from ..weights import Checkpoint, open_checkpoint


def picked(device: str, backend: str, threads: int | None, deterministic: bool, quantize: str | None) -> Ops:
    """The backend, before any file is looked for: what it cannot do is refused."""
    ops = pick(device, backend, threads)
    if is_fp8(quantize):
        cuda_probe.require_fp8(ops)
    return cuda_probe.deterministic(ops) if deterministic else ops


def opened(path: Path, quantize: str | None) -> Checkpoint:
    """A model's file. Matrices that a GPU will keep in FP8 are marked at once: what is planned counts them so."""
    found = open_checkpoint(path)
    return quantize_checkpoint(found, quantize) if quantize is not None and is_fp8(quantize) else found


def placed(ops: Ops, models: Sequence[Checkpoint], quantize: str | None = None) -> tuple[Ops, list[str]]:
    """The backend that `auto` picked, or the CPU where the weights do not fit on its GPU; and what to say of it. FP8 is
    only for a GPU: it stays there, and who plans the cache says what is missing."""
    if is_fp8(quantize):
        return ops, []
    ops, told = fitting(ops, device_bytes(models, quantize))
    return ops, [] if told is None else [told]


def settled(
    ops: Ops, models: Sequence[Checkpoint], asked_kv: str, quantize: str | None, *, is_automatic: bool, **sizes: Any
) -> tuple[Ops, str, Capacity, list[str]]:
    """The backend, how keys and values are kept, how large the cache is, and what to say of it. What `auto` picked
    gives way to the CPU where the model, or its keys and values, do not fit on the GPU."""
    notes: list[str] = []
    if is_automatic:
        ops, notes = placed(ops, models, quantize)
    try:
        kv_type = kv_type_for(ops, asked_kv)
        return ops, kv_type, planned(ops, models, kv_type, quantize, **sizes), notes
    except InsufficientMemoryError as error:
        if not is_automatic or is_fp8(quantize) or not cuda_probe.is_cuda(ops):
            raise
        notes = [f"the GPU is not used: {error}"]
    ops = pick("cpu")
    kv_type = kv_type_for(ops, asked_kv)
    return ops, kv_type, planned(ops, models, kv_type, quantize, **sizes), notes


def planned(
    ops: Ops,
    models: Sequence[Checkpoint],
    kv_type: str,
    quantize: str | None = None,
    *,
    kv_memory: int | None,
    max_context: int | None,
    max_batch: int,
) -> Capacity:
    """How large the cache is for a model, and the draft model that may follow it."""
    is_cuda = cuda_probe.is_cuda(ops)
    weights = device_bytes(models, quantize) if is_cuda else sum(one.nbytes for one in models)
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


def device_bytes(models: Sequence[Checkpoint], quantize: str | None) -> int:
    """What the weights will take on a GPU; the first model's in the type that they are brought into."""
    first, *others = models
    kinds = {} if quantize is None or is_fp8(quantize) else kinds_in(first, quantize)
    return cuda_probe.packed_bytes(first, kinds) + sum(map(cuda_probe.packed_bytes, others))
