"""Loading a pooling model: locate and open its files, choose a device, load tokenizer and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .backends import select_backend
from .config import ModelConfig, PoolingConfig, PoolingOptions
from .engine.memory_plan import place_weights, require_weights_fit
from .errors import InvalidRequestError
from .load import LoadPhases
from .machine import without_collection
from .models import read_model_config
from .models.convert import quantize_checkpoint
from .models.pooling import PoolingModel
from .models.pooling_config import is_pooling_model, read_pooling_config
from .models.pooling_loader import load_pooling_model
from .text_model import open_tokenizer
from .tokenizer.pooling_text import PoolingText
from .weights import Checkpoint, open_checkpoint
from .weights.hub import locate_model
from .weights.quant_mix import quant_name

# The type of keys and values within a step: nothing is kept, so that memory is no reason for a narrow one.
WORKSPACE_TYPES = {"cuda": "float16"}
HOST_STEP_TOKENS, DEVICE_STEP_TOKENS = 1024, 16_384  # on a CPU few: decode steps of a chat model wait for a step


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPooling:
    """A pooling model that is ready to compute."""

    checkpoint: Checkpoint
    config: ModelConfig
    pooling: PoolingConfig
    model: PoolingModel
    text: PoolingText
    quant: str  # the name of its mix of quantization types
    notes: list[str]  # on the choice of device and on what the files do not say, for people

    @property
    def max_step_tokens(self) -> int:
        return DEVICE_STEP_TOKENS if self.model.ops.has_device_memory else HOST_STEP_TOKENS


@without_collection()
def load_pooling(
    options: PoolingOptions, phases: LoadPhases | None = None, *, on_located: Callable[[Path], None] = lambda path: None
) -> LoadedPooling:
    """Load a pooling model, in the phases of `load.load`. Raise if the file is not a pooling model."""
    phases = phases or LoadPhases()
    with phases.timed("backend"):
        backend = select_backend(options.device, options.backend, options.threads, deterministic=options.deterministic)
        if options.is_fp8:
            backend.require_fp8()
    with phases.timed("locate"):
        path = locate_model(options.model, progress=phases.progress)
    with phases.timed("open"):
        checkpoint = open_checkpoint(path)
        config = read_model_config(checkpoint)
        pooling = read_pooling_config(checkpoint, config, options.task)
        if options.refuses_chat_models and options.task == "embed" and not is_pooling_model(checkpoint, config):
            raise InvalidRequestError(
                f"{path.name} is a chat model, not an embedding model: its files do not say how it pools. Serve it "
                "with --model, and give --embedding-model an embedding model such as all-minilm-l6-v2",
                "model",
            )
        pooling = _with_max_length(pooling, config, options.max_length)
        backend, notes = place_weights(backend, [checkpoint], options)
        require_weights_fit(backend, [checkpoint], options)
    on_located(path)
    with phases.timed("tokenizer"):
        text = open_pooling_text(checkpoint, config, pooling)
        pooling = text.pooling
    quant = quant_name(checkpoint) if options.quantize is None else options.quantize.upper()
    if options.quantize is not None:
        with phases.timed("quantize"):
            checkpoint = quantize_checkpoint(checkpoint, options.quantize, progress=phases.progress)
    kv_type = WORKSPACE_TYPES.get(backend.name, "float32")
    with phases.timed("kernels"):
        backend.load_kernels(checkpoint, config, kv_type, phases.progress)
    with phases.timed("weights", checkpoint.nbytes):
        model = load_pooling_model(checkpoint, backend, config, pooling, kv_type, phases.advance)
    notes = [*pooling.notes, *notes]
    return LoadedPooling(
        checkpoint=checkpoint, config=config, pooling=pooling, model=model, text=text, quant=quant, notes=notes
    )


def open_pooling_text(checkpoint: Checkpoint, config: ModelConfig, pooling: PoolingConfig) -> PoolingText:
    """Return the text side of a pooling model."""
    max_length = min(pooling.max_length or config.context_length, config.context_length)
    return PoolingText(open_tokenizer(checkpoint), pooling, config.vocab_size, max_length)


def _with_max_length(pooling: PoolingConfig, config: ModelConfig, max_length: int | None) -> PoolingConfig:
    if max_length is None:
        return pooling
    if not 1 <= max_length <= config.context_length:
        raise InvalidRequestError(
            f"max_length is {max_length}: the model has positions for 1 to {config.context_length} tokens", "max_length"
        )
    return replace(pooling, max_length=max_length)
