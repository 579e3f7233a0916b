"""An engine from load options, and what it tells about its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..engine.engine import Engine
from ..load import LoadedModel, LoadOptions, LoadPhases, load, make_engine
from .protocol import ModelInfo


def load_engine(
    options: LoadOptions, phases: LoadPhases, on_located: Callable[[Path], None] = lambda path: None
) -> tuple[Engine, ModelInfo]:
    """Load a model without its tokenizer; `on_located` gets the path of its files before the weights are loaded."""
    loaded = load(options, phases, needs_tokenizer=False, on_located=on_located)
    engine = make_engine(loaded, options.settings)
    return engine, model_info(loaded, engine, phases)


def model_info(loaded: LoadedModel, engine: Engine, phases: LoadPhases) -> ModelInfo:
    """Return what a front has to know; its `phases` are those of the load itself, which may still grow."""
    checkpoint = loaded.checkpoint
    notes = [*loaded.notes, *([str(loaded.capacity)] if loaded.capacity.is_context_reduced else ())]
    return ModelInfo(
        path=str(checkpoint.path), architecture=loaded.config.family.name, quant=loaded.quant,
        parameters=sum(tensor.size for tensor in checkpoint.tensors.values()), vocab_size=loaded.config.vocab_size,
        backend=loaded.model.ops.name, device=loaded.model.ops.device, kv_type=loaded.kv_type,
        weights_bytes=checkpoint.nbytes, kv_cache_bytes=loaded.capacity.bytes, engine=engine.config,
        phases=phases.seconds, notes=notes,
    )  # fmt: skip
