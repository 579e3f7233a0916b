"""Loading a model: locate and open its files, place it on a device, size the KV cache, load tokenizer and weights.

Everything that can be refused is refused before anything large is allocated. Each phase is timed and reported: its
start (done 0), its progress in bytes or items (about ten times, more often only if it is slow), its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from .backends import cpu_info, fallback_to_cpu, is_automatic, resolve_kv_type, select, select_backend
from .backends.ops import Backend
from .config import DEVICE_SPARE_BYTES, EngineConfig, ModelConfig
from .engine.engine import Engine
from .engine.kv_cache_budget import (
    DEVICE_MEMORY_FRACTION,
    HOST_MEMORY_FRACTION,
    KVCacheBudget,
    available_memory,
    block_bytes,
    plan_kv_cache,
)
from .engine.mtp import MtpDrafter
from .engine.speculative import Drafter, DraftModel
from .engine.state_pool import SLOTS_PER_REQUEST
from .engine.step_limits import SchedulerLimits, Workspace, choose_batch, choose_step_tokens
from .errors import InsufficientMemoryError, InvalidRequestError
from .machine import without_collection
from .models import MtpHead, Transformer, load_model, load_model_with_head, read_model_config, require_decoder
from .models.convert import is_fp8, planned_types, quantize_checkpoint
from .models.mtp import head_config, require_head
from .models.sampling_defaults import read_sampling_defaults
from .progress import OnStage, Stage
from .sampling_params import SamplingDefaults
from .structured_outputs.grammar import GrammarCompiler
from .text_model import open_tokenizer
from .tokenizer import Tokenizer
from .weights import Checkpoint, open_checkpoint
from .weights.hub import Progress, locate_model
from .weights.quant_mix import quant_name

REPORTS_PER_PHASE = 10
MAX_REPORT_INTERVAL_S = 2.0
PLANNED_SETTINGS = ("max_context", "n_blocks", "block_size", "n_slots")  # of EngineConfig: these follow from the memory
CHOSEN_SETTINGS = ("max_batch", "max_step_tokens")  # of EngineConfig: None leaves the choice to `plan_limits`
ENGINE_SETTINGS = {field.name: field.default for field in fields(EngineConfig) if field.name not in PLANNED_SETTINGS}


class LoadPhases:
    """The phases of one load: their seconds, and reports to `on_stage` and `progress`."""

    def __init__(self, on_stage: OnStage | None = None, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}  # of each finished phase
        self._on_stage = on_stage or (lambda stage: None)
        self._progress = progress
        self._last = Stage("", 0, None, 0.0)
        self._started_at = self._reported_at = 0.0

    @contextmanager
    def timed(self, name: str, total: int | None = None) -> Iterator[None]:
        """Time a phase of `total` bytes or items, if that is known."""
        self._started_at = time.perf_counter()
        self._report(Stage(name, 0, total, 0.0))
        yield
        seconds = time.perf_counter() - self._started_at
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        end = total or 1
        self._report(Stage(name, end, end, seconds))

    def advance(self, done: int, detail: str | None = None, total: int | None = None) -> None:
        """Report progress of the present phase; `total` is that of the part that `detail` names."""
        last, now = self._last, time.perf_counter()
        total = last.total if total is None else total
        is_due = total is not None and (done - last.done) * REPORTS_PER_PHASE >= total
        if detail != last.detail or is_due or now - self._reported_at >= MAX_REPORT_INTERVAL_S:
            self._report(Stage(last.stage, done, total, now - self._started_at, detail))

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Report a slow part of a phase (a download, compiling) to both listeners."""
        if self._progress is not None:
            self._progress(what, done, total)
        self.advance(done, what, total)

    def _report(self, stage: Stage) -> None:
        self._last, self._reported_at = stage, time.perf_counter()
        self._on_stage(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which model, where, and how much memory; `LLM.__init__` documents each option."""

    model: str | Path | None
    device: str
    backend: str
    threads: int | None
    kv_type: str
    kv_memory: int | None
    quantize: str | None
    max_context: int | None
    draft_model: str | Path | None
    deterministic: bool
    settings: Mapping[str, Any]  # of EngineConfig
    num_sharing: int = 1  # engines that share the cores and the memory of the device, this one included
    reserved_memory: int = 0  # bytes that engines of other models will take

    @property
    def has_mtp(self) -> bool:
        """Whether the head of the model's own file drafts."""
        return bool(self.settings.get("speculative") == "mtp")


def split_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `LoadOptions` for arguments of `LLM`: engine settings become `settings`."""
    names = {field.name for field in fields(LoadOptions)} - {"settings"}
    known = dict.fromkeys(names) | {"deterministic": False, "num_sharing": 1, "reserved_memory": 0}
    known |= {name: value for name, value in arguments.items() if name in names}
    return known | {"settings": {name: value for name, value in arguments.items() if name not in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to compute."""

    checkpoint: Checkpoint
    config: ModelConfig
    model: Transformer
    tokenizer: Tokenizer | None  # None where the caller has one
    quant: str  # the name of its mix of quantization types
    kv_type: str
    capacity: KVCacheBudget
    limits: SchedulerLimits
    sampling_defaults: SamplingDefaults
    notes: list[str]  # on the choice of device and on ignored metadata, for people
    draft_model: Transformer | None
    mtp_head: MtpHead | None


@without_collection()
def load(
    options: LoadOptions, phases: LoadPhases, *, needs_tokenizer: bool = True,
    on_located: Callable[[Path], None] = lambda path: None, starts_compiler: bool = False,
) -> LoadedModel:  # fmt: skip
    """Load a model and its draft model, with the phases of `LLM.phases`; `on_located` gets the path of its files.
    `starts_compiler`: a warm-up will follow, which may compile many kernels."""
    check_settings(options.settings, options.draft_model)
    with phases.timed("backend"):
        backend = _select_backend(options)
        if starts_compiler:
            backend.start_compiler()
    with phases.timed("locate"):
        path = _locate(options.model, phases)
        draft_path = None if options.draft_model is None else _locate(options.draft_model, phases)
    with phases.timed("open"):
        checkpoint = _open_checkpoint(path, options.quantize)
        draft = None if draft_path is None else open_checkpoint(draft_path)
        for opened in filter(None, (checkpoint, draft)):
            require_decoder(opened)
        if options.has_mtp:
            require_head(checkpoint, read_model_config(checkpoint))
        placed = place_model(backend, [checkpoint] if draft is None else [checkpoint, draft], options)
    on_located(path)
    tokenizer = None
    if needs_tokenizer or draft is not None:
        with phases.timed("tokenizer"):
            tokenizer = open_tokenizer(checkpoint)
            if draft is not None:
                _check_same_vocabulary(tokenizer, open_tokenizer(draft))
    sampling_defaults = read_sampling_defaults(checkpoint)
    model, head = _load_weights(checkpoint, placed, options.quantize, phases, with_head=options.has_mtp)
    is_inexact = placed.kv_type == "int8" and model.config.family.qkv_bias
    kv_notes = ["keys of this model have a bias, which int8 rounds coarsely: float16 is nearer"] * is_inexact
    return LoadedModel(
        checkpoint=checkpoint, config=model.config, model=model, tokenizer=tokenizer,
        quant=quant_name(checkpoint) if options.quantize is None else options.quantize.upper(),
        kv_type=placed.kv_type, capacity=placed.capacity, limits=placed.limits,
        sampling_defaults=sampling_defaults, notes=[*placed.notes, *kv_notes, *sampling_defaults.warnings],
        draft_model=None if draft is None else _load_weights(draft, placed, None, phases)[0], mtp_head=head,
    )  # fmt: skip


def make_engine(loaded: LoadedModel, settings: Mapping[str, Any]) -> Engine:
    """Return the engine of a loaded model; `settings` are those fields of `EngineConfig` that loading does not plan."""
    capacity = loaded.capacity
    planned = {"max_context": capacity.max_context, "n_blocks": capacity.n_blocks, "n_slots": capacity.n_slots}
    limits = loaded.limits
    if capacity.n_slots:
        limits = limits._replace(max_batch=min(limits.max_batch, capacity.n_slots // SLOTS_PER_REQUEST))
    config = EngineConfig(**{**settings, **limits._asdict(), **planned})
    drafter: Drafter | None = None
    if loaded.mtp_head is not None:
        drafter = MtpDrafter(loaded.mtp_head, config, loaded.kv_type)
    if loaded.draft_model is not None:
        drafter = DraftModel(loaded.draft_model, config, loaded.config.vocab_size, loaded.kv_type)
    engine = Engine(loaded.model, config, loaded.kv_type, drafter)
    engine.grammar_compiler = GrammarCompiler(
        lambda: loaded.tokenizer or open_tokenizer(loaded.checkpoint), loaded.config.vocab_size
    )
    return engine


def check_settings(settings: Mapping[str, Any], draft_model: object) -> None:
    """Raise on engine settings that are unknown, out of range or contradictory, before anything is loaded."""
    for name in settings:
        if name not in ENGINE_SETTINGS:
            raise InvalidRequestError(f"unknown option {name!r}: an engine has {', '.join(ENGINE_SETTINGS)}", name)
    EngineConfig(max_context=1, n_blocks=1, **given_settings(settings))
    if draft_model is not None and settings.get("speculative", "off") != "off":
        raise InvalidRequestError("speculative and draft_model are two ways to draft: give one of them", "speculative")


def given_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those whose choice is left to `plan_limits`."""
    return {name: value for name, value in settings.items() if value is not None or name not in CHOSEN_SETTINGS}


def _select_backend(options: LoadOptions) -> Backend:
    """Return the backend; what it cannot do is refused before any file is looked for."""
    cpu_info.share_cores(options.num_sharing)
    backend = select_backend(options.device, options.backend, options.threads, deterministic=options.deterministic)
    if is_fp8(options.quantize):
        backend.require_fp8()
    resolve_kv_type(backend, options.kv_type)
    return backend


def _locate(model: str | Path | None, phases: LoadPhases) -> Path:
    return locate_model(None if model is None else str(model), progress=phases.progress)


def _open_checkpoint(path: Path, quantize: str | None) -> Checkpoint:
    """Open a model file. Matrices that a GPU will keep in FP8 are marked now, so that planning counts them so."""
    checkpoint = open_checkpoint(path)
    return quantize_checkpoint(checkpoint, quantize) if quantize is not None and is_fp8(quantize) else checkpoint


class Placement(NamedTuple):
    """Where a model goes and how large its KV cache is."""

    backend: Backend
    kv_type: str
    capacity: KVCacheBudget
    limits: SchedulerLimits
    notes: list[str]


def place_model(backend: Backend, models: Sequence[Checkpoint], options: LoadOptions) -> Placement:
    """Return the backend and the KV cache for a model and the draft model that may follow it.

    A GPU that `auto` chose gives way to the CPU if the weights, or keys and values, do not fit on it. FP8 weights need
    a GPU, so they stay there and planning the KV cache raises.
    """
    is_fallback_allowed = is_automatic(options.device, options.backend, options.threads) and not is_fp8(
        options.quantize
    )
    notes: list[str] = []
    if is_fallback_allowed:
        backend, note = fallback_to_cpu(backend, device_weight_bytes(models, options.quantize))
        notes = [] if note is None else [note]
    try:
        return _plan_placement(backend, models, options, notes)
    except InsufficientMemoryError as error:
        if not is_fallback_allowed or not backend.has_device_memory:
            raise
        notes = [f"the GPU is not used: {error}"]
    return _plan_placement(select_backend("cpu"), models, options, notes)


def _plan_placement(
    backend: Backend, models: Sequence[Checkpoint], options: LoadOptions, notes: list[str]
) -> Placement:
    kv_type = resolve_kv_type(backend, options.kv_type)
    plan = plan_limits(backend, models, kv_type, options)
    capacity = plan_cache(models, kv_type, options, plan)
    given = given_settings(options.settings)
    if backend.has_device_memory and not all(name in given for name in CHOSEN_SETTINGS):
        notes = [*notes, f"{plan.limits} fit on {backend.device}; max_batch and max_step_tokens set other limits"]
    return Placement(backend, kv_type, capacity, plan.limits, notes)


class MemoryPlan(NamedTuple):
    """The limits of a step, and what is left for the KV cache."""

    limits: SchedulerLimits
    available: int | None  # bytes beside the weights and the arrays of a step; None: unknown
    memory_fraction: float  # of it that the KV cache may take


def _host_bytes(model: Checkpoint) -> int:
    """Return the bytes of the weights on the CPU; blocks of quantized safetensors are larger than in their file."""
    return max(model.nbytes, select.packed_bytes(model)) if "quantization" in model.metadata else model.nbytes


def plan_limits(
    backend: Backend | None, models: Sequence[Checkpoint], kv_type: str, options: LoadOptions
) -> MemoryPlan:
    """Return the limits of a step for a model and the draft model that may follow it; backend None: on the CPU."""
    num_sharing = options.num_sharing
    if backend is None or not backend.has_device_memory:
        given = given_settings(options.settings)
        limits = SchedulerLimits()._replace(**{name: given[name] for name in CHOSEN_SETTINGS if name in given})
        available = available_memory(num_sharing * sum(map(_host_bytes, models)) + options.reserved_memory)
        return MemoryPlan(limits, available, HOST_MEMORY_FRACTION / num_sharing)
    reserved = num_sharing * device_weight_bytes(models, options.quantize) + (num_sharing - 1) * DEVICE_SPARE_BYTES
    reserved += options.reserved_memory
    limits, workspace = _choose_limits(
        (available_memory(reserved, backend) or 0) // num_sharing, models, kv_type, options
    )
    available = available_memory(reserved + num_sharing * workspace, backend)
    return MemoryPlan(limits, available, DEVICE_MEMORY_FRACTION / num_sharing)


def plan_cache(models: Sequence[Checkpoint], kv_type: str, options: LoadOptions, plan: MemoryPlan) -> KVCacheBudget:
    """Return the KV cache of a model and its draft model; raise if it does not fit."""
    config, *drafts = _configs(models, options)
    return plan_kv_cache(
        config, kv_type, kv_memory=options.kv_memory, max_context=options.max_context,
        max_batch=plan.limits.max_batch, available=plan.available, draft_config=drafts[0] if drafts else None,
        memory_fraction=plan.memory_fraction, draft_tokens=_draft_tokens(options, has_draft_model=bool(drafts)),
    )  # fmt: skip


def _configs(models: Sequence[Checkpoint], options: LoadOptions) -> list[ModelConfig]:
    """Return the shape of a model, and of what drafts for it."""
    found = list(map(read_model_config, models))
    return [*found, head_config(found[0])] if options.has_mtp else found


def _draft_tokens(options: LoadOptions, *, has_draft_model: bool) -> int:
    """Return the drafts of a request in a step."""
    given = given_settings(options.settings)
    is_drafting = has_draft_model or given.get("speculative", "off") != "off"
    return int(given.get("draft_tokens", ENGINE_SETTINGS["draft_tokens"])) if is_drafting else 0


def _choose_limits(
    memory: int, models: Sequence[Checkpoint], kv_type: str, options: LoadOptions
) -> tuple[SchedulerLimits, int]:
    """Return the limits of a step on a GPU with `memory` bytes beside the weights, and the bytes that it takes."""
    config, *drafts = _configs(models, options)
    given = given_settings(options.settings)
    draft_tokens = _draft_tokens(options, has_draft_model=bool(drafts))
    workspace = Workspace(config, draft_tokens, options.deterministic, options.has_mtp)
    max_step_tokens = given.get("max_step_tokens") or choose_step_tokens(workspace, memory)
    max_batch = given.get("max_batch") or choose_batch(
        workspace, memory, max_step_tokens, kv_memory=options.kv_memory, memory_fraction=DEVICE_MEMORY_FRACTION,
        kv_token_bytes=sum(block_bytes(one, kv_type, 1) for one in (config, *drafts)),
        context=options.max_context or config.context_length,
        state_bytes=(SLOTS_PER_REQUEST + draft_tokens) * config.state_bytes,
    )  # fmt: skip
    limits = SchedulerLimits(max_batch, max_step_tokens)
    return limits, workspace.bytes(limits)


def device_weight_bytes(models: Sequence[Checkpoint], quantize: str | None) -> int:
    """Return the bytes of the weights on a GPU; the first model's in the type that it is quantized to."""
    first, *others = models
    types = {} if quantize is None or is_fp8(quantize) else planned_types(first, quantize)
    return select.packed_bytes(first, types) + sum(map(select.packed_bytes, others))


def _load_weights(
    checkpoint: Checkpoint, placed: Placement, quantize: str | None, phases: LoadPhases, *, with_head: bool = False
) -> tuple[Transformer, MtpHead | None]:
    config = read_model_config(checkpoint)
    if quantize is not None:
        with phases.timed("quantize"):
            checkpoint = quantize_checkpoint(checkpoint, quantize, progress=phases.progress)
    with phases.timed("kernels"):
        placed.backend.load_kernels(checkpoint, config, placed.kv_type, phases.progress)
    with phases.timed("weights", checkpoint.nbytes):
        source = checkpoint, placed.backend, config, placed.capacity.max_context, phases.advance
        return load_model_with_head(*source) if with_head else (load_model(*source), None)


def _check_same_vocabulary(tokenizer: Tokenizer, draft: Tokenizer) -> None:
    sizes = tokenizer.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] or any(tokenizer.piece(i) != draft.piece(i) for i in range(sizes[0])):
        raise InvalidRequestError(
            f"the draft model's tokenizer ({sizes[1]} tokens) is not that of the model ({sizes[0]} tokens): "
            "a draft model needs the same vocabulary",
            "draft_model",
        )
