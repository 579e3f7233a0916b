"""The fields of the OpenAI dialect: what is honoured, and what is known and refused unless it asks for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...engine.request import MAX_LOGPROBS, MAX_STOPS, SamplingParams
from ...errors import ModelNotFoundError, WorkerError
from ..schema import (
    PRIORITY,
    TIMEOUT_MS,
    Field,
    Flag,
    Ids,
    Kind,
    Messages,
    Only,
    Problem,
    Schema,
    Stops,
    Text,
    Whole,
    are_ids,
    listed,
    made_of,
    sampling,
)

MOST_CHOICES = 16
DEFAULTS = SamplingParams()
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "repeat_last_n", "seed")


@dataclass(frozen=True, slots=True)
class Bias(Kind):
    """Token ids, as strings, and what is added to their logits."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """The first that is none."""
        if not isinstance(value, dict):
            return Problem(name, "type", f"{name} must map token ids to numbers")
        for token, amount in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                return Problem(name, "format", f"{name}: {token[:20]!r} is not a token id")
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not -100 <= amount <= 100:
                return Problem(name, "range", f"{name} of token {token} must be a number, -100 to 100")
        return None

    def schema(self) -> Schema:
        """The ids are in the names."""
        amount: Schema = {"type": "number", "minimum": -100, "maximum": 100}
        return {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"}, "additionalProperties": amount}


@dataclass(frozen=True, slots=True)
class StreamOptions(Kind):
    """Whether the counts of tokens come at the end of a stream."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """Something else is in it."""
        if isinstance(value, dict) and all(k == "include_usage" and isinstance(v, bool) for k, v in value.items()):
            return None
        return Problem(name, "type", f"{name} may hold include_usage, true or false, and nothing else")

    def schema(self) -> Schema:
        """The one."""
        return made_of({"include_usage": {"type": "boolean"}})


@dataclass(frozen=True, slots=True)
class Prompts(Kind):
    """A string, strings, token ids, or lists of token ids."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """None of these, or mixed, or something empty."""
        if isinstance(value, str):
            return Text(1).problem(name, value)
        if isinstance(value, list) and value:
            if all(isinstance(one, str) for one in value):
                return next((problem for one in value if (problem := Text(1).problem(name, one))), None)
            groups = value if all(isinstance(one, list) for one in value) else [value]
            if all(group and are_ids(group) for group in groups):
                return None
        return Problem(
            name, "type", f"{name} must be a string, strings, token ids, or lists of token ids, not empty and not mixed"
        )

    def schema(self) -> Schema:
        """All four."""
        ids: Schema = {**Ids().schema(), "minItems": 1}
        return {"anyOf": [Text(1).schema(), listed(Text(1).schema(), 1), ids, listed(ids, 1)]}

    def taken(self, value: Any) -> Any:
        """Ids are ints, also where they were written 5.0."""
        if isinstance(value, str) or isinstance(value[0], str):
            return value
        return [self.taken(one) for one in value] if isinstance(value[0], list) else [int(one) for one in value]


def _nothing_but(*allowed: Any) -> Field:
    """A field that we know and do not honour: only what asks for nothing is let through."""
    return Field(Only(allowed, is_supported=False))


COMMON: dict[str, Field] = {
    "model": Field(Text()),
    "stream": Field(Flag(), False),
    "stream_options": Field(StreamOptions(), {}),
    "n": Field(Whole(1, MOST_CHOICES), 1),
    "stop": Field(Stops(MAX_STOPS), (), is_secret=True),
    "logit_bias": Field(Bias(), {}),
    "user": Field(Text()),
    "priority": Field(PRIORITY, 0),
    "timeout_ms": Field(TIMEOUT_MS),
    "ignore_eos": Field(Flag(), False),
    **{name: Field(sampling(name), getattr(DEFAULTS, name)) for name in (*NUMBERS, *INTEGERS)},
}
CHAT: dict[str, Field] = {
    **COMMON,
    "messages": Field(Messages(), required=True, is_secret=True),
    "max_tokens": Field(Whole(1)),
    "max_completion_tokens": Field(Whole(1)),
    "logprobs": Field(Flag(), False),
    "top_logprobs": Field(Whole(0, MAX_LOGPROBS)),
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
    "safety_identifier": Field(Text()),
    "prompt_cache_key": Field(Text()),
}
COMPLETION: dict[str, Field] = {
    **COMMON,
    "prompt": Field(Prompts(), required=True, is_secret=True),
    "max_tokens": Field(Whole(0), 16),
    "echo": Field(Flag(), False),
    "logprobs": Field(Whole(0, MAX_LOGPROBS)),
    "best_of": Field(Whole(1, MOST_CHOICES)),
    "suffix": _nothing_but(""),
}


def params_of(values: dict[str, Any], max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
    """How answers are drawn."""
    taken = {name: values[name] for name in (*NUMBERS, *INTEGERS, "stop", "ignore_eos")}
    bias = {int(token): float(amount) for token, amount in values["logit_bias"].items()}
    return SamplingParams(**taken, logit_bias=bias, max_tokens=max_tokens, logprobs=logprobs, **more)


def error_body(error: WorkerError) -> dict[str, Any]:
    """As the official client reads it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}
