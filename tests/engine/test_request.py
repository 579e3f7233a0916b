"""SamplingParams: every value that cannot be honoured is refused with the field named; unset fields are resolved."""

from __future__ import annotations

from typing import Any

import pytest

from llm_worker_rbee import SamplingParams
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.request import Request, fit_max_tokens, resolve_max_tokens
from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError
from llm_worker_rbee.sampling_params import NEUTRAL_SAMPLING, SAMPLING_BOUNDS

NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "temperature": [NAN, INF, -INF, -1, -0.01, 2.01, "1", True, [1], 10**400],
    "top_p": [NAN, -0.1, 1.1, "x", True],
    "min_p": [NAN, -0.1, 1.1, "0"],
    "typical_p": [NAN, -0.1, 1.1, {}],
    "repetition_penalty": [NAN, INF, 0, -1, 2.5, "1.1"],
    "presence_penalty": [NAN, -2.1, 2.1, INF],
    "frequency_penalty": [NAN, -2.1, 2.1, "0"],
    "max_tokens": [0, -1, 1.0, 2.5, True, "5", NAN],
    "top_k": [-2, 1.0, True, "40"],
    "repeat_last_n": [-1, 0.5, True],
    "seed": [2**64, 2**65, -2, 1.0, True, "7"],
    "stop": ["", [""], ["a", ""], ["x"] * 17, [1], 5, None, [None], {"a": 1}, ["a" * 101], b"x"],
    "logprobs": [-2, -1, 21, 1.0, "two", True],
    "structured_outputs": [{"regex": "a"}, "a", True],
    "close_on_length": [1, "yes", None],
    "logprobs_mode": ["both", None, 1],
    "logit_bias": [
        {"a": 1.0},
        {"5": 1.0},
        {1.5: 1.0},
        {True: 1.0},
        {-1: 1.0},
        {1: "x"},
        {1: NAN},
        {1: INF},
        {1: 100.1},
        {1: -100.1},
        {1: None},
        [(1, 2.0)],
        3,
        None,
        {1: True},
    ],
    "ignore_eos": [1, "yes", None],
    "prompt_logprobs": [1, "yes", None],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD.items() for value in values],
    ids=lambda v: repr(v)[:24],
)
def test_sampling_params_bad_value_raises_with_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD: dict[str, list[Any]] = {
    "max_tokens": [1, 10**12, None],
    "seed": [-1, 0, 2**64 - 1, None],
    "stop": ["x", ["a", "b"], ("a",), [], "\n", ["s" * 100], ["x"] * 16],
    "logprobs": [0, 20, None],
    "logit_bias": [{0: -100, 7: 100.0}, {}],
    "temperature": [0, 2, None],
    "top_k": [-1, 0, 1, 10**9, None],
    "repeat_last_n": [0, 10**9, None],
    "repetition_penalty": [0.01, 1, 2.0, None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_sampling_params_value_at_edge_is_accepted(field: str, value: Any) -> None:
    SamplingParams(**{field: value})


@pytest.mark.parametrize("field", [name for name, bounds in SAMPLING_BOUNDS.items() if not bounds.is_integer])
def test_sampling_params_at_both_bounds_are_accepted(field: str) -> None:
    bounds = SAMPLING_BOUNDS[field]
    SamplingParams(**{field: bounds.maximum})  # type: ignore[arg-type]
    if not bounds.excludes_minimum:
        SamplingParams(**{field: bounds.minimum})  # type: ignore[arg-type]


def test_bad_values_cover_every_field() -> None:
    assert set(BAD) == set(SamplingParams.__dataclass_fields__)


def test_sampling_params_single_stop_becomes_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_sampling_params_unknown_or_positional_raises() -> None:
    with pytest.raises(TypeError):
        SamplingParams(top_q=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[call-arg]


def test_minus_one_is_no_top_k_and_no_seed() -> None:
    params = SamplingParams(top_k=-1, seed=-1)
    assert (params.top_k, params.seed) == (0, None)


def test_resolve_fills_unset_fields_only() -> None:
    defaults = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.1,
        "repeat_last_n": 64,
    }  # fmt: skip
    assert SamplingParams().resolve(defaults) == SamplingParams(**defaults)  # type: ignore[arg-type]
    neutral = SamplingParams(**NEUTRAL_SAMPLING, seed=3)  # type: ignore[arg-type]
    assert neutral.resolve(defaults) == neutral, "a field that is set wins, also with a neutral value"
    assert SamplingParams(top_k=-1, seed=3).resolve(defaults).top_k == 0
    assert SamplingParams(temperature=0).resolve() == SamplingParams(**{**NEUTRAL_SAMPLING, "temperature": 0.0})  # type: ignore[arg-type]


def test_request_with_unset_sampling_parameters_is_refused() -> None:
    assert not SamplingParams(temperature=0).is_resolved
    with pytest.raises(AssertionError, match="resolved"):
        Request([1], SamplingParams(temperature=0), 1, 0, frozenset())


@pytest.mark.parametrize("max_context", [20, 32, 33, 100])
def test_fit_max_tokens_is_the_largest_number_that_resolves(max_context: int) -> None:
    """Both limits, context and KV cache; where nothing fits, `resolve_max_tokens` raises."""
    config = EngineConfig(max_context=max_context, n_blocks=2, block_size=16)
    for num_prompt_tokens in range(1, 40):
        fitted = fit_max_tokens(num_prompt_tokens, None, config)
        assert fitted == fit_max_tokens(num_prompt_tokens, 10**12, config)
        assert fit_max_tokens(num_prompt_tokens, 1, config) == 1
        if num_prompt_tokens < min(max_context, 33):
            assert resolve_max_tokens(num_prompt_tokens, fitted, config) == fitted
        else:
            assert fitted == 1
        with pytest.raises(ContextLengthError):
            resolve_max_tokens(num_prompt_tokens, fitted + (num_prompt_tokens < min(max_context, 33)), config)
