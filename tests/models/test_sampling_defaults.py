"""Sampling defaults of a model: what its file states, field by field; what cannot be used gives a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.models.sampling_defaults import read_sampling_defaults
from llm_worker_rbee.sampling_params import BUILT_IN_SAMPLING, NEUTRAL_SAMPLING, SamplingDefaults
from llm_worker_rbee.weights import Checkpoint

HF, GGUF, BUILT_IN = "generation_config.json", "GGUF metadata", "built-in"


def of_folder(**generation_config: Any) -> SamplingDefaults:
    metadata = {"config": {}, "generation_config": generation_config}
    return read_sampling_defaults(Checkpoint(Path("folder"), "safetensors", "llama", metadata, {}, {}))


def of_gguf(**keys: Any) -> SamplingDefaults:
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    return read_sampling_defaults(Checkpoint(Path("model.gguf"), "gguf", "llama", metadata, {}, {}))


def test_model_without_sampling_metadata_has_built_in_defaults() -> None:
    for defaults in (
        of_gguf(),
        of_folder(),
        of_folder(eos_token_id=2, do_sample=True, temperature=None),
        read_sampling_defaults(Checkpoint(Path("folder"), "safetensors", "llama", {"config": {}}, {}, {})),
    ):
        assert defaults.values == {**NEUTRAL_SAMPLING, "temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
        assert set(defaults.sources.values()) == {BUILT_IN}
        assert defaults.warnings == []


def test_generation_config_wins_field_by_field() -> None:
    defaults = of_folder(temperature=0.6, top_k=20, top_p=1, typical_p=0.9, repetition_penalty=1.05, max_length=4096)
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "typical_p": 0.9, "repetition_penalty": 1.05}
    assert defaults.values == {**BUILT_IN_SAMPLING, **stated}
    assert {name for name, source in defaults.sources.items() if source == HF} == set(stated)
    assert defaults.report()["top_p"] == {"value": 1.0, "source": HF}
    assert defaults.report()["min_p"] == {"value": 0.05, "source": BUILT_IN}


def test_do_sample_false_is_temperature_0() -> None:
    greedy = of_folder(do_sample=False, temperature=0.6, top_k=20)
    assert (greedy.values["temperature"], greedy.sources["temperature"]) == (0.0, HF)
    assert greedy.values["top_k"] == 20


def test_gguf_keys_of_llama_cpp_are_read() -> None:
    """Values are float32 in the file: the decimal number that was written comes back."""
    defaults = of_gguf(
        temp=0.6000000238418579, top_k=40, top_p=0.949999988079071, min_p=0.009999999776482582,
        penalty_repeat=1.0499999523162842, penalty_last_n=64, mirostat=2, sequence="tk;tp",
    )  # fmt: skip
    assert defaults.values == {
        "temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 1.0, "repetition_penalty": 1.05,
        "repeat_last_n": 64,
    }  # fmt: skip
    assert {name for name, source in defaults.sources.items() if source == GGUF} == set(NEUTRAL_SAMPLING) - {
        "typical_p"
    }
    assert defaults.warnings == []


def test_top_k_of_minus_one_in_a_file_is_off() -> None:
    assert of_folder(top_k=-1).report()["top_k"] == {"value": 0, "source": HF}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"), ("temperature", float("nan")), ("temperature", 10**400), ("top_p", 7), ("top_p", True),
        ("min_p", [0.1]), ("top_k", 2.5), ("typical_p", {}), ("repetition_penalty", 0), ("top_p", "x" * 10_000),
        ("do_sample", "no"),
    ],
)  # fmt: skip
def test_unusable_value_of_generation_config_is_left_out_with_warning(key: str, value: Any) -> None:
    defaults = of_folder(**{key: value})
    assert defaults.values == BUILT_IN_SAMPLING
    (warning,) = defaults.warnings
    assert warning.startswith(f"generation_config.json: {key} is ignored: ")
    assert len(warning) < 300


@pytest.mark.parametrize(("key", "value"), [("temp", "hot"), ("top_p", 7.0), ("penalty_last_n", -1), ("top_k", [1])])
def test_unusable_value_of_gguf_is_left_out_with_warning(key: str, value: Any) -> None:
    defaults = of_gguf(**{key: value, "min_p": 0.25})
    assert defaults.values == {**BUILT_IN_SAMPLING, "min_p": 0.25}
    (warning,) = defaults.warnings
    assert warning.startswith(f"GGUF metadata: general.sampling.{key} is ignored: ")
