"""An engine from load options, and what it tells about its model."""

from __future__ import annotations

from ..engine.engine import Engine
from ..load import LoadedModel, LoadOptions, LoadPhases, load, make_engine
from .protocol import ModelInfo


def load_engine(options: LoadOptions, phases: LoadPhases) -> tuple[Engine, ModelInfo]:
    """Load a model without its tokenizer."""
    loaded = load(options, phases, needs_tokenizer=False)
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
