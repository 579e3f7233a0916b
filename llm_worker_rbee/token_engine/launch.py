"""An engine from load options, the facts about its model, and the warm-up before its first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.ops import WarmUp
from ..config import LoadOptions
from ..engine.dummy_model import DummyModel
from ..engine.engine import Engine
from ..engine.request import Request, SchedulerStats
from ..load import LoadedModel, LoadPhases, load, make_engine
from ..models.lora import PackedAdapter
from ..sampling_params import SamplingParams
from ..tokenizer import Tokenizer
from .protocol import LoraInfo, ModelInfo

if TYPE_CHECKING:
    from ..load_pooling import LoadedPooling  # the offline API imports this module

NULL_TEXT = " what a server does besides: it takes a request, hands it on, and sends each token as soon as it exists"


def load_engine(
    options: LoadOptions, phases: LoadPhases, on_located: Callable[[Path], None] = lambda path: None
) -> tuple[Engine, ModelInfo]:
    """Load a model without its tokenizer; `on_located` gets the path of its files before the weights are loaded."""
    loaded = load(options, phases, needs_tokenizer=False, on_located=on_located, starts_compiler=True)
    engine = make_engine(loaded, options)
    return engine, model_info(loaded, engine, phases)


def model_info(loaded: LoadedModel, engine: Engine, phases: LoadPhases) -> ModelInfo:
    """Return the facts that a front needs; `phases` is the dict of the load itself, which may still grow."""
    facts = common_facts(loaded, phases)
    if loaded.capacity.is_context_reduced:
        facts["notes"].append(f"{loaded.capacity}; kv_memory or a smaller kv_type gives longer contexts")
    loras = [None if pair is None else lora_info(*pair) for pair in loaded.loras]
    return ModelInfo(
        kv_type=loaded.kv_type,
        kv_cache_bytes=loaded.capacity.bytes,
        engine=engine.config,
        loras=loras,
        vision=None if loaded.tower is None else loaded.tower.info,
        **facts,
    )


def lora_info(path: Path, packed: PackedAdapter) -> LoraInfo:
    """Return the facts about an adapter."""
    return LoraInfo(path=str(path), digest=packed.digest, rank=packed.rank, nbytes=packed.nbytes)


def common_facts(loaded: LoadedModel | LoadedPooling, phases: LoadPhases) -> dict[str, Any]:
    """Return the fields of `EngineInfo`."""
    checkpoint = loaded.checkpoint
    return {
        "path": str(checkpoint.path),
        "architecture": loaded.config.family.name,
        "quant": loaded.quant,
        "parameters": sum(tensor.size for tensor in checkpoint.tensors.values()),
        "vocab_size": loaded.config.vocab_size,
        "backend": loaded.model.ops.name,
        "device": loaded.model.ops.device,
        "weights_bytes": checkpoint.nbytes,
        "phases": phases.seconds,
        "notes": list(loaded.notes),
    }


def warm_up(engine: Engine, phases: LoadPhases | None = None) -> WarmUp:
    """Do all one-time work, so that no request waits for it: compile and load kernels, capture graphs, and compute a
    token. Offline use (`LLM`, `run`) leaves this out: there the first answer counts, which needs few kernels."""
    phases = phases or LoadPhases()
    with phases.timed("warm-up"):
        done = engine.warm_up(phases.progress)
        _compute_token(engine)
    return done


def _compute_token(engine: Engine) -> None:
    engine.add(Request([0], SamplingParams(temperature=0.0).resolve(), 1, 0, frozenset()))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
    engine.scheduler.stats = SchedulerStats()  # this request does not count


def replace_with_dummy(engine: Engine, tokenizer: Tokenizer, step_s: float) -> None:
    """Replace the model in the engine by a fixed text: what remains is the cost of everything else."""
    ids = tokenizer.encode(NULL_TEXT, add_special=False)
    engine.replace_model(DummyModel([token for token in ids if tokenizer.decode([token])], step_s))
