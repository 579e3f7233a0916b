"""The sampling parameters of a request that sets none: the model's own where its file states them, else built-in ones.

Sources, field by field: `generation_config.json` of a safetensors folder, the `general.sampling.*` keys of a GGUF.
An invalid value in a file is dropped with a warning: it must not keep a model from loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequestError
from ..sampling_params import BUILT_IN, BUILT_IN_SAMPLING, SamplingDefaults, SamplingParams
from ..weights import Checkpoint
from .metadata import GGUF_SAMPLING, sampling_from_gguf, sampling_from_hf

GGUF_SOURCE, HF_SOURCE = "GGUF metadata", "generation_config.json"
MAX_WARNING_CHARS = 200


def read_sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """Return the defaults of a model."""
    if checkpoint.format == "gguf":
        stated = {name: _shortest(value) for name, value in sampling_from_gguf(checkpoint.metadata).items()}
        return _validate(stated, GGUF_SOURCE, GGUF_SAMPLING)
    generation_config = checkpoint.metadata.get("generation_config", {})
    defaults = _validate(sampling_from_hf(generation_config), HF_SOURCE, {})
    if not isinstance(generation_config.get("do_sample", True), bool | None):
        defaults.warnings.append(f"{HF_SOURCE}: do_sample is ignored: it must be true or false")
    return defaults


def _shortest(value: Any) -> Any:
    """Return the decimal number that was rounded to a float32: 0.95 for 0.949999988."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _validate(stated: Mapping[str, Any], source: str, keys: Mapping[str, str]) -> SamplingDefaults:
    values, sources = dict(BUILT_IN_SAMPLING), dict.fromkeys(BUILT_IN_SAMPLING, BUILT_IN)
    warnings: list[str] = []
    for name, value in stated.items():
        try:
            values[name] = getattr(SamplingParams(**{name: value}), name)
        except InvalidRequestError as error:
            key = keys.get(name, name)
            warnings.append(f"{source}: {key} is ignored: {str(error)[:MAX_WARNING_CHARS]}")
        else:
            sources[name] = source
    return SamplingDefaults(values, sources, warnings)
