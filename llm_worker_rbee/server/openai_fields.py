"""The fields of the OpenAI dialect: what is honoured, and what is known and refused unless it asks for nothing."""

from __future__ import annotations

from typing import Any

from ..engine.request import MAX_LOGPROBS, MAX_STOPS, SamplingParams
from . import fields
from .fields import Field, Problem

MOST_CHOICES = 16
DEFAULTS = SamplingParams()
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "repeat_last_n", "seed")


def _bias(name: str, value: Any) -> Problem | None:
    if not isinstance(value, dict):
        return Problem(name, "type", f"{name} must map token ids to numbers")
    for token, amount in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            return Problem(name, "format", f"{name}: {token[:20]!r} is not a token id")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not -100 <= amount <= 100:
            return Problem(name, "range", f"{name} of token {token} must be a number, -100 to 100")
    return None


def _stream_options(name: str, value: Any) -> Problem | None:
    if (
        isinstance(value, dict)
        and set(value) <= {"include_usage"}
        and isinstance(value.get("include_usage", False), bool)
    ):
        return None
    return Problem(name, "type", f"{name} may hold include_usage, true or false, and nothing else")


def _prompt(name: str, value: Any) -> Problem | None:
    if isinstance(value, str):
        return fields.text(name, value)
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return next((problem for one in value if (problem := fields.text(name, one))), None)
        groups = value if all(isinstance(one, list) for one in value) else [value]
        if all(
            group and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in group) for group in groups
        ):
            return None
    return Problem(
        name, "type", f"{name} must be a string, strings, token ids, or lists of token ids, not empty and not mixed"
    )


def _nothing_but(*allowed: Any) -> Field:
    """A field that we know and do not honour: only what asks for nothing is let through."""

    def check(name: str, value: Any) -> Problem | None:
        is_allowed = any(type(one) is type(value) and one == value for one in allowed)  # 0 is not False
        return None if is_allowed else Problem(name, "unsupported", f"{name} is not supported by this worker")

    return Field(check)


COMMON: dict[str, Field] = {
    "model": Field(fields.text),
    "stream": Field(fields.boolean, False),
    "stream_options": Field(_stream_options, {}),
    "n": Field(fields.integer(1, MOST_CHOICES), 1),
    "stop": Field(fields.stops(MAX_STOPS), (), is_secret=True),
    "logit_bias": Field(_bias, {}),
    "user": Field(fields.text),
    "priority": Field(fields.integer(-(1 << 31), (1 << 31) - 1), 0),
    "timeout_ms": Field(fields.integer(1, fields.LONGEST_TIMEOUT_MS)),
    **{name: Field(fields.number, getattr(DEFAULTS, name)) for name in NUMBERS},
    **{name: Field(fields.sampling_integer(name), getattr(DEFAULTS, name)) for name in INTEGERS},
}
CHAT: dict[str, Field] = {
    **COMMON,
    "messages": Field(fields.messages, required=True, is_secret=True),
    "max_tokens": Field(fields.integer(1)),
    "max_completion_tokens": Field(fields.integer(1)),
    "logprobs": Field(fields.boolean, False),
    "top_logprobs": Field(fields.integer(0, MAX_LOGPROBS)),
    # known, and not honoured
    "tools": _nothing_but([]),
    "tool_choice": _nothing_but("none", "auto"),
    "functions": _nothing_but([]),
    "function_call": _nothing_but("none", "auto"),
    "parallel_tool_calls": _nothing_but(True, False),
    "response_format": _nothing_but({"type": "text"}),
    "modalities": _nothing_but(["text"]),
    "service_tier": _nothing_but("auto", "default"),
    "store": _nothing_but(False),
    "metadata": _nothing_but({}),
    "audio": _nothing_but(),
    "prediction": _nothing_but(),
    "reasoning_effort": _nothing_but("none"),
    "verbosity": _nothing_but("medium"),
    "web_search_options": _nothing_but(),
    "safety_identifier": Field(fields.text),
    "prompt_cache_key": Field(fields.text),
}
COMPLETION: dict[str, Field] = {
    **COMMON,
    "prompt": Field(_prompt, required=True, is_secret=True),
    "max_tokens": Field(fields.integer(0), 16),
    "echo": Field(fields.boolean, False),
    "logprobs": Field(fields.integer(0, MAX_LOGPROBS)),
    "best_of": Field(fields.integer(1, MOST_CHOICES)),
    "suffix": _nothing_but(""),
}


def params_of(values: dict[str, Any], max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
    """How answers are drawn."""
    taken = {name: values[name] for name in (*NUMBERS, *INTEGERS, "stop")}
    bias = {int(token): float(amount) for token, amount in values["logit_bias"].items()}
    return SamplingParams(**taken, logit_bias=bias, max_tokens=max_tokens, logprobs=logprobs, **more)
