"""The bodies and the error shape of the OpenAI dialect: fields that are honoured, and known ones that are refused
unless their value changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine.request import MAX_LOGPROBS, MAX_STOPS, SamplingParams
from ..errors import ModelNotFoundError, WorkerError
from .schema import (
    PRIORITY,
    SAMPLING,
    TIMEOUT_MS,
    Boolean,
    Enum,
    Field,
    FieldType,
    Messages,
    Schema,
    StopStrings,
    Text,
    TokenIds,
    ValidationIssue,
    are_token_ids,
    array_schema,
    integer,
    object_schema,
)

MAX_CHOICES = 16


@dataclass(frozen=True, slots=True)
class LogitBias(FieldType):
    """Token ids, as strings, and what is added to their logits."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must map token ids to numbers")
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                return ValidationIssue(name, "format", f"{name}: {token[:20]!r} is not a token id")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                return ValidationIssue(name, "range", f"{name} of token {token} must be a number, -100 to 100")
        return None

    def json_schema(self) -> Schema:
        bias: Schema = {"type": "number", "minimum": -100, "maximum": 100}
        return {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"}, "additionalProperties": bias}


@dataclass(frozen=True, slots=True)
class StreamOptions(FieldType):
    """`include_usage`: whether the last chunk of a stream has the token counts."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, dict) and all(k == "include_usage" and isinstance(v, bool) for k, v in value.items()):
            return None
        return ValidationIssue(name, "type", f"{name} may hold include_usage, true or false, and nothing else")

    def json_schema(self) -> Schema:
        return object_schema({"include_usage": {"type": "boolean"}})


@dataclass(frozen=True, slots=True)
class Prompts(FieldType):
    """A string, strings, token ids, or lists of token ids."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, str):
            return Text(1).validate(name, value)
        if isinstance(value, list) and value:
            if all(isinstance(prompt, str) for prompt in value):
                return next((issue for prompt in value if (issue := Text(1).validate(name, prompt))), None)
            lists = value if all(isinstance(prompt, list) for prompt in value) else [value]
            if all(ids and are_token_ids(ids) for ids in lists):
                return None
        message = f"{name} must be a string, strings, token ids, or lists of token ids, not empty and not mixed"
        return ValidationIssue(name, "type", message)

    def json_schema(self) -> Schema:
        ids: Schema = {**TokenIds().json_schema(), "minItems": 1}
        text = Text(1).json_schema()
        return {"anyOf": [text, array_schema(text, 1), ids, array_schema(ids, 1)]}

    def coerce(self, value: Any) -> Any:
        if isinstance(value, str) or isinstance(value[0], str):
            return value
        return [self.coerce(ids) for ids in value] if isinstance(value[0], list) else [int(token) for token in value]


def _unsupported(*allowed: Any) -> Field:
    """Return a known field that is not honoured: only these values, which change nothing, are accepted."""
    return Field(Enum(allowed, is_supported=False))


COMMON: dict[str, Field] = {
    "model": Field(Text()),
    "stream": Field(Boolean(), False),
    "stream_options": Field(StreamOptions(), {}),
    "n": Field(integer(1, MAX_CHOICES), 1),
    "stop": Field(StopStrings(MAX_STOPS), (), is_secret=True),
    "logit_bias": Field(LogitBias(), {}),
    "user": Field(Text()),
    "priority": PRIORITY,
    "timeout_ms": TIMEOUT_MS,
    "ignore_eos": Field(Boolean(), False),
    **SAMPLING,
}
CHAT: dict[str, Field] = {
    **COMMON,
    "messages": Field(Messages(), required=True, is_secret=True),
    "max_tokens": Field(integer(1)),
    "max_completion_tokens": Field(integer(1)),
    "logprobs": Field(Boolean(), False),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS)),
    "tools": _unsupported([]),
    "tool_choice": _unsupported("none", "auto"),
    "functions": _unsupported([]),
    "function_call": _unsupported("none", "auto"),
    "parallel_tool_calls": _unsupported(True, False),
    "response_format": _unsupported({"type": "text"}),
    "modalities": _unsupported(["text"]),
    "service_tier": _unsupported("auto", "default"),
    "store": _unsupported(False),
    "metadata": _unsupported({}),
    "audio": _unsupported(),
    "prediction": _unsupported(),
    "reasoning_effort": _unsupported("none"),
    "verbosity": _unsupported("medium"),
    "web_search_options": _unsupported(),
    "safety_identifier": Field(Text()),
    "prompt_cache_key": Field(Text()),
}
COMPLETION: dict[str, Field] = {
    **COMMON,
    "prompt": Field(Prompts(), required=True, is_secret=True),
    "max_tokens": Field(integer(0), 16),
    "echo": Field(Boolean(), False),
    "logprobs": Field(integer(0, MAX_LOGPROBS)),
    "best_of": Field(integer(1, MAX_CHOICES)),
    "suffix": _unsupported(""),
}


def sampling_params(
    values: dict[str, Any], max_tokens: int | None, logprobs: int | None, *, prompt_logprobs: bool = False
) -> SamplingParams:
    """Return the sampling parameters of a validated body."""
    same = {name: values[name] for name in (*SAMPLING, "stop", "ignore_eos")}
    bias = {int(token): float(amount) for token, amount in values["logit_bias"].items()}
    return SamplingParams(
        **same, logit_bias=bias, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error in the shape that the official client parses."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}
