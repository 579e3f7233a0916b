"""Loading a model: locate and open its files, place it on a device, size the KV cache, load tokenizer and weights.

Everything that can be refused is refused before anything large is allocated. Each phase is timed and reported: its
start (done 0), its progress in bytes or items (about ten times, more often only if it is slow), its end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import machine
from .backends import cpu_info, resolve_kv_type, select_backend
from .backends.ops import Backend, KVLayer, LayerCache, StateLayer
from .config import FP8, EngineConfig, LoadOptions, ModelConfig, SchedulerLimits
from .engine.engine import Engine
from .engine.kv_store import BlockStore, file_facts, model_digest, open_folder
from .engine.kv_tier import KVTier
from .engine.memory_plan import DEFAULT_LORA_RANK, KVCacheBudget, Placement, place_model
from .engine.mtp import MtpDrafter
from .engine.speculative import Drafter, DraftModel
from .engine.state_pool import SLOTS_PER_REQUEST
from .errors import InvalidRequestError, human_bytes
from .layers.attention import Attention
from .models import (
    ModelAdapters,
    MtpHead,
    PackedAdapter,
    Transformer,
    load_model,
    load_model_with_head,
    read_model_config,
    require_decoder,
    require_head,
)
from .models.convert import quantize_checkpoint
from .models.sampling_defaults import read_sampling_defaults
from .models.vision import Projector, VisionTower, find_projector, load_vision_tower
from .progress import OnStage, Stage
from .sampling_params import SamplingDefaults
from .structured_outputs.grammar import GrammarCompiler
from .text_model import open_tokenizer
from .tokenizer import Tokenizer
from .weights import Checkpoint, open_checkpoint, read_adapter
from .weights.hub import Progress, locate_adapter, locate_model, model_files
from .weights.quant_mix import quant_name

logger = logging.getLogger("llm_worker_rbee")
REPORTS_PER_PHASE = 10
FLUSH_S = 2.0  # for blocks that wait to be written when an engine ends
MAX_REPORT_INTERVAL_S = 2.0


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
        """Report progress of the present phase; `total` belongs to the part that `detail` names."""
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
    files: list[Path]  # of the model and its projector
    file_facts: list[list[int]]  # of these when they were opened; empty where nothing is kept on disk
    loras: list[PackedAdapter]  # in the order of the options
    tower: VisionTower | None  # None: it takes no images


@machine.without_collection()
def load(
    options: LoadOptions,
    phases: LoadPhases,
    *,
    needs_tokenizer: bool = True,
    on_located: Callable[[Path], None] = lambda path: None,
    starts_compiler: bool = False,
) -> LoadedModel:
    """Load a model and its draft model, with the phases of `LLM.phases`; `on_located` gets the path of its files.
    `starts_compiler`: a warm-up will follow, which may compile many kernels."""
    with phases.timed("backend"):
        backend = _select_backend(options)
        if starts_compiler:
            backend.start_compiler()
    with phases.timed("locate"):
        path = _locate(options.model, phases)
        draft_path = None if options.draft_model is None else _locate(options.draft_model, phases)
    with phases.timed("open"):
        checkpoint = _open_checkpoint(path, options)
        options, projector, image_notes = find_projector(checkpoint, options)
        files = _files(path, projector)
        facts = [] if options.kv_dir is None else file_facts(files)
        draft = None if draft_path is None else open_checkpoint(draft_path)
        for opened in filter(None, (checkpoint, draft)):
            require_decoder(opened)
        if options.has_mtp:
            require_head(checkpoint, read_model_config(checkpoint))
        options, adapter_paths = _plan_adapters(options, phases)
        placed = place_model(backend, [checkpoint] if draft is None else [checkpoint, draft], options)
    on_located(path)
    tokenizer = None
    if needs_tokenizer or draft is not None:
        with phases.timed("tokenizer"):
            tokenizer = open_tokenizer(checkpoint)
            if draft is not None:
                _check_same_vocabulary(tokenizer, open_tokenizer(draft))
    sampling_defaults = read_sampling_defaults(checkpoint)
    tower = None if projector is None else _load_tower(projector, placed.backend, phases)
    model, head = _load_weights(checkpoint, placed, options, phases, tower)
    model, packed = _add_adapters(model, checkpoint, options, adapter_paths, phases)
    is_inexact = placed.kv_type == "int8" and model.config.family.attention.qkv_bias
    kv_notes = ["the model's keys have biases, which kv_type int8 rounds coarsely: float16 is more exact"] * is_inexact
    return LoadedModel(
        checkpoint=checkpoint,
        config=model.config,
        model=model,
        tokenizer=tokenizer,
        quant=quant_name(checkpoint) if options.quantize is None else options.quantize.upper(),
        kv_type=placed.kv_type,
        capacity=placed.capacity,
        limits=placed.limits,
        sampling_defaults=sampling_defaults,
        notes=[*placed.notes, *image_notes, *kv_notes, *sampling_defaults.warnings],
        draft_model=None if draft is None else _load_weights(draft, placed, None, phases)[0],
        mtp_head=head,
        files=files,
        file_facts=facts,
        loras=packed,
        tower=tower,
    )


def _plan_adapters(options: LoadOptions, phases: LoadPhases) -> tuple[LoadOptions, list[Path]]:
    """Return the options with the rank that LoRA adapters need, and where they are."""
    paths = [locate_adapter(spec.path, progress=phases.progress) for spec in options.loras]
    rank = options.max_lora_rank or max([DEFAULT_LORA_RANK, *(read_adapter(path).rank for path in paths)])
    return replace(options, max_lora_rank=rank, max_loras=options.lora_slots), paths


def _load_tower(projector: Projector, backend: Backend, phases: LoadPhases) -> VisionTower:
    with phases.timed("vision tower", projector.checkpoint.nbytes):
        return load_vision_tower(projector.checkpoint, backend, config=projector.config)


def _files(path: Path, projector: Projector | None) -> list[Path]:
    """Return the files of a model, and of a projector beside them."""
    own = model_files(path)
    return own if projector is None else list(dict.fromkeys([*own, *model_files(projector.checkpoint.path)]))


def _add_adapters(
    model: Transformer, checkpoint: Checkpoint, options: LoadOptions, paths: list[Path], phases: LoadPhases
) -> tuple[Transformer, list[PackedAdapter]]:
    """Return the model with slots for adapters, and the packed ones; without slots the model as it is."""
    if not options.lora_slots:
        return model, []
    assert options.max_lora_rank is not None
    adapters = ModelAdapters(model, checkpoint, options.max_lora_rank, options.lora_slots, options.num_loras)
    packed: list[PackedAdapter] = []
    with phases.timed("adapters"):
        if model.ops.has_device_memory:
            adapters.prepare()
        for path in paths:
            each = adapters.pack(read_adapter(path))
            packed.append(each if len(packed) < options.lora_slots else replace(each, sites={}))
    return replace(model, adapters=adapters), packed


def make_engine(loaded: LoadedModel, options: LoadOptions) -> Engine:
    """Return the engine of a loaded model."""
    capacity = loaded.capacity
    limits = loaded.limits
    if capacity.n_slots:
        limits = limits._replace(max_batch=min(limits.max_batch, capacity.n_slots // SLOTS_PER_REQUEST))
    config = EngineConfig(
        max_context=capacity.max_context,
        n_blocks=capacity.n_blocks,
        n_slots=capacity.n_slots,
        **limits._asdict(),
        **options.scheduling,
    )
    drafter: Drafter | None = None
    if loaded.mtp_head is not None:
        drafter = MtpDrafter(loaded.mtp_head, config, loaded.kv_type)
    if loaded.draft_model is not None:
        drafter = DraftModel(loaded.draft_model, config, loaded.config.vocab_size, loaded.kv_type)
    engine = Engine(loaded.model, config, loaded.kv_type, drafter)
    if loaded.tower is not None:
        engine.use_tower(loaded.tower)
    for packed in loaded.loras[: options.lora_slots]:
        assert engine.adapters is not None
        engine.adapters.add(packed)
    engine.grammar_compiler = GrammarCompiler(
        lambda: loaded.tokenizer or open_tokenizer(loaded.checkpoint), loaded.config.vocab_size
    )
    if options.kv_dir is not None or options.kv_ram:
        tier = make_tier(engine, partial(_open_store, loaded, engine, options), options.kv_ram)
        engine.use_tier(tier)
        weakref.finalize(engine, tier.close, FLUSH_S)  # at the end of the process at the latest
    return engine


def _cached_layers(engine: Engine) -> list[LayerCache]:
    """Return the layers whose blocks the tiers keep, each once."""
    layers = [*engine.cache.layers, *(engine.drafter.cache.layers if isinstance(engine.drafter, MtpDrafter) else ())]
    return list({id(layer): layer for layer in layers}.values())


def make_tier(engine: Engine, open_store: Callable[[], BlockStore | None], ram: int) -> KVTier:
    """Return the tiers behind the KV cache of an engine, and of the head that drafts: it has the same blocks. `ram` is
    bytes of the host's memory."""
    arrays: dict[type, list[Any]] = {KVLayer: [], StateLayer: []}
    for layer in _cached_layers(engine):
        arrays[type(layer)] += layer
    scheduler, ops, own = (
        engine.scheduler,
        engine.model.ops,
        weakref.proxy(engine),
    )  # the end of an engine ends its tiers

    def seconds(start: int) -> float:
        with suppress(ReferenceError):  # at its end, blocks that wait are written without it
            return own.seconds_per_prefill_token(start)  # type: ignore[no-any-return]
        return 0.0

    if scheduler.states is None:
        return KVTier(ops.host_rows(arrays[KVLayer], ram), scheduler.pool, open_store, seconds)
    rows, states = (ops.host_rows(arrays[kind], ram // 2) for kind in (KVLayer, StateLayer))
    return KVTier(rows, scheduler.pool, open_store, seconds, states, scheduler.states)


def _require_kv_ram(backend: Backend, size: int) -> None:
    """Raise if the host's memory cannot keep blocks of a GPU."""
    if size and not backend.has_device_memory:
        problem = "kv_ram is for a GPU: on a CPU keys and values are in the host's memory, as much as kv_memory says"
        raise InvalidRequestError(problem, "kv_ram")
    free = machine.memory()[1]
    if free is not None and size > free:
        problem = f"kv_ram takes {human_bytes(size)}, and {human_bytes(free)} of the host's memory are free: use less"
        raise InvalidRequestError(problem, "kv_ram")


def _code_digest() -> str:
    """Return a hash of the sources that the bits of keys and values depend on."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    folders = [package / name for name in ("backends", "engine", "images", "layers", "models", "weights")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _open_store(loaded: LoadedModel, engine: Engine, options: LoadOptions) -> BlockStore | None:
    """Open the blocks that have the bits of this engine: of these weights, shapes, kernels and versions."""
    if options.kv_dir is None:
        return None
    folder, cache = open_folder(options.kv_dir), engine.cache
    try:
        digest = model_digest(folder, loaded.files, loaded.file_facts)
    except BaseException:
        os.close(folder)
        raise
    mixers = [block.attention for block in loaded.model.blocks]
    ropes = [mixer.rope for mixer in mixers if isinstance(mixer, Attention)]
    facts = {
        "model": digest.hex(),
        "quantize": options.quantize,
        "config": repr(loaded.config),
        "rope": sorted(
            {hashlib.sha256(rope.inv_freq.tobytes() + repr(rope[1:]).encode()).hexdigest() for rope in ropes}
        ),
        "kv": [cache.kv_type, *(f"{a.dtype}{a.shape[1:]}" for layer in _cached_layers(engine) for a in layer)],
        "backend": [loaded.model.ops.name, *loaded.model.ops.versions, _code_digest()],
    }
    namespace = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()
    age = None if options.kv_max_age_days is None else options.kv_max_age_days * 86_400
    about = {"model": loaded.checkpoint.path.name, "kv_type": cache.kv_type, "backend": loaded.model.ops.name}
    return BlockStore(folder, namespace, cache.block_size, options.kv_disk, age, about)


def _select_backend(options: LoadOptions) -> Backend:
    """Return the backend; what it cannot do is refused before any file is looked for."""
    cpu_info.share_cores(options.num_sharing)
    backend = select_backend(options.device, options.backend, options.threads, deterministic=options.deterministic)
    if options.is_fp8:
        backend.require_fp8()
    resolve_kv_type(backend, options.kv_type)
    _require_kv_ram(backend, options.kv_ram * options.num_sharing)
    return backend


def _locate(model: str | None, phases: LoadPhases) -> Path:
    return locate_model(model, progress=phases.progress)


def _open_checkpoint(path: Path, options: LoadOptions) -> Checkpoint:
    """Open a model file. Matrices that a GPU will keep in FP8 are marked now, so that planning counts them so."""
    checkpoint = open_checkpoint(path)
    return quantize_checkpoint(checkpoint, FP8) if options.is_fp8 else checkpoint


def _load_weights(
    checkpoint: Checkpoint,
    placed: Placement,
    options: LoadOptions | None,
    phases: LoadPhases,
    tower: VisionTower | None = None,
) -> tuple[Transformer, MtpHead | None]:
    """Load a model; options None: one that drafts."""
    config, quantize = read_model_config(checkpoint), None if options is None else options.quantize
    if quantize is not None:
        with phases.timed("quantize"):
            checkpoint = quantize_checkpoint(checkpoint, quantize, progress=phases.progress)
    with phases.timed("kernels"):
        placed.backend.load_kernels(checkpoint, config, placed.kv_type, phases.progress)
    with phases.timed("weights", checkpoint.nbytes):
        source = checkpoint, placed.backend, config, placed.capacity.max_context, phases.advance
        image_parts = 0 if tower is None else tower.row_width // config.d_model
        if options is not None and options.has_mtp:
            return load_model_with_head(*source, image_parts=image_parts)
        return load_model(*source, image_parts=image_parts), None


def _check_same_vocabulary(tokenizer: Tokenizer, draft: Tokenizer) -> None:
    sizes = tokenizer.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1] or any(tokenizer.piece(i) != draft.piece(i) for i in range(sizes[0])):
        raise InvalidRequestError(
            f"the draft model's tokenizer ({sizes[1]} tokens) is not the model's ({sizes[0]} tokens): "
            "a draft model needs the same vocabulary",
            "draft_model",
        )
