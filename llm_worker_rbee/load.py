"""The phases of loading a model: how long each took, and a hook that hears of each while it lasts.

What is told of a phase: its beginning (done 0), how far it is in bytes or things (about ten times, more often only
where it takes long), its end with its seconds. `detail` says what is being done where that is more than the phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .backends import cuda_probe, fallback_to_cpu, resolve_kv_type, select_backend
from .backends.ops import Backend
from .engine.kv_cache_budget import DEFAULT_SHARE, DEVICE_SHARE, Capacity, available_memory, plan
from .errors import InsufficientMemoryError
from .models import read_model_config
from .models.convert import is_fp8, planned_types, quantize_checkpoint
from .weights import Checkpoint, open_checkpoint
from .weights.hub import Progress

PARTS = 10  # of a phase, each of which is told
TOLD_AFTER_S = 2.0  # or after so long


class Stage(NamedTuple):
    """Where loading stands."""

    stage: str
    done: int
    total: int | None
    seconds: float  # since this phase began
    detail: str | None = None


OnStage = Callable[[Stage], None]


class Phases:
    """One load."""

    def __init__(self, on_stage: OnStage | None = None, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}  # of each phase that has ended
        self._tell = on_stage or (lambda stage: None)
        self._progress = progress
        self._stage = Stage("", 0, None, 0.0)  # what was told last
        self._began = self._told_at = 0.0

    @contextmanager
    def timed(self, name: str, total: int | None = None) -> Iterator[None]:
        """A phase, of so many bytes or things if that is known."""
        self._began = time.perf_counter()
        self._say(Stage(name, 0, total, 0.0))
        yield
        seconds = time.perf_counter() - self._began
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        whole = total or 1
        self._say(Stage(name, whole, whole, seconds))

    def advance(self, done: int, detail: str | None = None, total: int | None = None) -> None:
        """The present phase has come so far; of a part of it with a name of its own, `total` is that part's."""
        last, now = self._stage, time.perf_counter()
        total = last.total if total is None else total
        is_part = total is not None and (done - last.done) * PARTS >= total
        if detail != last.detail or is_part or now - self._told_at >= TOLD_AFTER_S:
            self._say(Stage(last.stage, done, total, now - self._began, detail))

    def progress(self, what: str, done: int, total: int | None) -> None:
        """What takes long within a phase, for who draws bars and for who hears of phases."""
        if self._progress is not None:
            self._progress(what, done, total)
        self.advance(done, what, total)

    def _say(self, stage: Stage) -> None:
        self._stage, self._told_at = stage, time.perf_counter()
        self._tell(stage)


def picked(device: str, backend: str, threads: int | None, deterministic: bool, quantize: str | None) -> Backend:
    """The backend, before any file is looked for: what it cannot do is refused."""
    ops = select_backend(device, backend, threads, deterministic=deterministic)
    if is_fp8(quantize):
        ops.require_fp8()
    return ops


def opened(path: Path, quantize: str | None) -> Checkpoint:
    """A model's file. Matrices that a GPU will keep in FP8 are marked at once: what is planned counts them so."""
    found = open_checkpoint(path)
    return quantize_checkpoint(found, quantize) if quantize is not None and is_fp8(quantize) else found


def placed(ops: Backend, models: Sequence[Checkpoint], quantize: str | None = None) -> tuple[Backend, list[str]]:
    """The backend that `auto` picked, or the CPU where the weights do not fit on its GPU; and what to say of it. FP8 is
    only for a GPU: it stays there, and who plans the cache says what is missing."""
    if is_fp8(quantize):
        return ops, []
    ops, told = fallback_to_cpu(ops, device_bytes(models, quantize))
    return ops, [] if told is None else [told]


def settled(
    ops: Backend, models: Sequence[Checkpoint], asked_kv: str, quantize: str | None, *, is_automatic: bool, **sizes: Any
) -> tuple[Backend, str, Capacity, list[str]]:
    """The backend, how keys and values are kept, how large the cache is, and what to say of it. What `auto` picked
    gives way to the CPU where the model, or its keys and values, do not fit on the GPU."""
    notes: list[str] = []
    if is_automatic:
        ops, notes = placed(ops, models, quantize)
    try:
        kv_type = resolve_kv_type(ops, asked_kv)
        return ops, kv_type, planned(ops, models, kv_type, quantize, **sizes), notes
    except InsufficientMemoryError as error:
        if not is_automatic or is_fp8(quantize) or not ops.has_device_memory:
            raise
        notes = [f"the GPU is not used: {error}"]
    ops = select_backend("cpu")
    kv_type = resolve_kv_type(ops, asked_kv)
    return ops, kv_type, planned(ops, models, kv_type, quantize, **sizes), notes


def planned(
    ops: Backend,
    models: Sequence[Checkpoint],
    kv_type: str,
    quantize: str | None = None,
    *,
    kv_memory: int | None,
    max_context: int | None,
    max_batch: int,
) -> Capacity:
    """How large the cache is for a model, and the draft model that may follow it."""
    weights = device_bytes(models, quantize) if ops.has_device_memory else sum(one.nbytes for one in models)
    config, *drafts = map(read_model_config, models)
    return plan(
        config,
        kv_type,
        kv_memory=kv_memory,
        max_context=max_context,
        max_batch=max_batch,
        available=available_memory(weights, ops),
        draft_config=drafts[0] if drafts else None,
        share=DEVICE_SHARE if ops.has_device_memory else DEFAULT_SHARE,
    )


def device_bytes(models: Sequence[Checkpoint], quantize: str | None) -> int:
    """What the weights will take on a GPU; the first model's in the type that they are brought into."""
    first, *others = models
    kinds = {} if quantize is None or is_fp8(quantize) else planned_types(first, quantize)
    return cuda_probe.packed_bytes(first, kinds) + sum(map(cuda_probe.packed_bytes, others))
