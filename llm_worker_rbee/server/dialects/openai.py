"""What the routes of the OpenAI API share: fields, errors, tools, log-probabilities, the usage of a reply."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...engine.request import MAX_STOPS, TokenLogprob
from ...engine.structured_outputs import StructuredOutputsParams
from ...errors import ModelNotFoundError, WorkerError
from ...tokenizer.chat_events import ChatOptions, Tool, thinking_variables
from ..bodies import require
from ..printer import Printer, ReplyState, Usage
from ..schema import (
    COUNT,
    MAX_CHOICES,
    PRIORITY,
    SAMPLING,
    TEXT,
    TIMEOUT_MS,
    AnyObject,
    Boolean,
    BoundedObject,
    Enum,
    Field,
    FieldType,
    LogitBias,
    Schema,
    StopStrings,
    StreamOptions,
    StructuredOutputs,
    Text,
    ValidationIssue,
    array_schema,
    integer,
    object_schema,
    or_null,
    reply_schema,
    type_name,
    unsupported,
    with_field,
    with_values,
)
from ..sse import DONE, encode_event

if TYPE_CHECKING:
    from ...tokenizer import Tokenizer

MAX_TOOLS = 512
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error in the shape that the official client parses."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}


@dataclass(frozen=True, slots=True)
class Tools(FieldType):
    """Functions that the model may call, as chat completions describe them."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, list) or len(value) > MAX_TOOLS:
            return ValidationIssue(name, "type", f"{name} must be a list of at most {MAX_TOOLS} tools")
        for i, tool in enumerate(value):
            if not isinstance(tool, dict) or tool.get("type") != "function":
                return ValidationIssue(name, "unsupported", f"{name}[{i}].type must be function")
            if (issue := check_function(f"{name}[{i}].function", tool.get("function"))) is not None:
                return issue._replace(field=name)
        return None

    def json_schema(self) -> Schema:
        properties: dict[str, Schema] = {
            "name": {"type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME},
            "description": {"type": ["string", "null"]}, "parameters": {"type": ["object", "null"]},
            "strict": {"type": ["boolean", "null"]},
        }  # fmt: skip
        function = object_schema(properties, "name", is_open=True)
        tool = object_schema({"type": {"const": "function"}, "function": function}, "type", "function", is_open=True)
        return {**array_schema(tool), "maxItems": MAX_TOOLS}


MAX_TOOL_NAME = 256


def check_function(name: str, function: Any) -> ValidationIssue | None:
    """Return what is wrong with the description of a function."""
    if not isinstance(function, dict):
        return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(function)}")
    called = function.get("name")
    if not isinstance(called, str) or not 1 <= len(called) <= MAX_TOOL_NAME:
        return ValidationIssue(name, "length", f"{name}.name must have 1 to {MAX_TOOL_NAME} characters")
    for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            return ValidationIssue(name, "type", f"{name}.{key} is {type_name(function[key])}")
    return None


def to_tool(function: Mapping[str, Any]) -> Tool:
    """Return the tool that a validated description of a function is."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description") or "", parameters, bool(function.get("strict")))


class ToolChoice(FieldType):
    """Whether tools are called: auto, none, required, or the one function that must be called."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if value in ("auto", "none", "required") or named_tool(value) is not None:
            return None
        message = f'{name} must be auto, none, required, or {{"type": "function", "function": {{"name": ...}}}}'
        return ValidationIssue(name, "choice", message)

    def json_schema(self) -> Schema:
        function = object_schema({"name": {"type": "string"}}, "name", is_open=True)
        named = object_schema({"type": {"const": "function"}, "function": function}, "type", "function", is_open=True)
        return {"anyOf": [{"enum": ["auto", "none", "required"]}, named]}


def named_tool(choice: Any) -> str | None:
    """Return the name in a choice of one function."""
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    called = function.get("name") if isinstance(function, dict) else None
    return called if isinstance(called, str) else None


def chat_options(
    tools: list[Tool], choice: Any, *, parallel: bool | None, effort: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None, thinking_budget: int | None = None,
) -> ChatOptions:  # fmt: skip
    """Return the options of a chat; raise for a choice without its tool."""
    name = named_tool(choice)
    mode: Any = "required" if name is not None else choice or "auto"
    require(mode != "required" or bool(tools), "tool_choice", "conflict", f"tool_choice {mode} needs tools")
    require(name is None or name in [tool.name for tool in tools], "tool_choice", "choice",
            f"tool_choice names {name!r:.100}, which is not among the tools")  # fmt: skip
    variables = thinking_variables(template_kwargs, effort)
    return ChatOptions(tools, mode, name, parallel is not False, variables, thinking_budget)


class ResponseFormat(FieldType):
    """Text, any JSON object, or JSON of a schema."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in ("text", "json_object", "json_schema"):
            return ValidationIssue(name, "choice", f"{name}.type must be text, json_object or json_schema")
        given = value.get("json_schema")
        if kind == "json_schema" and not (isinstance(given, dict) and isinstance(given.get("schema"), (dict, bool))):
            return ValidationIssue(name, "type", f"{name}.json_schema.schema must be a JSON schema")
        return None

    def json_schema(self) -> Schema:
        schema = object_schema({"schema": {"type": ["object", "boolean"]}}, "schema", is_open=True)
        with_schema: dict[str, Schema] = {"type": {"const": "json_schema"}, "json_schema": schema}
        simple = object_schema({"type": {"enum": ["text", "json_object"]}}, "type", is_open=True)
        return {"anyOf": [simple, object_schema(with_schema, "type", "json_schema", is_open=True)]}


def structured_outputs(values: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return what the fields `response_format`, `structured_outputs` and `grammar` ask for; raise if two do."""
    found = []
    if (grammar := values.get("grammar")) is not None:
        found.append(StructuredOutputsParams(grammar=grammar))
    if (given := values.get("structured_outputs")) is not None:
        found.append(StructuredOutputsParams(**given))
    if (wanted := values.get("response_format")) is not None and wanted["type"] != "text":
        schema = wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else None
        found.append(
            StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
        )
    require(len(found) <= 1, "structured_outputs", "conflict",
            "response_format, structured_outputs and grammar exclude each other: give one of them")  # fmt: skip
    return found[0] if found else None


def guiding_field(values: Mapping[str, Any]) -> str:
    """Return the field that asks for structured outputs."""
    fields = ("grammar", "structured_outputs", "response_format")
    return next((name for name in fields if values.get(name) is not None), "structured_outputs")


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
    "response_format": Field(ResponseFormat()),
    "structured_outputs": Field(StructuredOutputs()),
    "grammar": Field(Text(1)),
    "close_on_length": Field(Boolean(), False),
    "logprobs_mode": Field(Enum(("raw", "masked")), "raw"),
    # Accepted without effect: some clients always send them.
    "metadata": Field(AnyObject()),
    "safety_identifier": Field(Text()),
    "prompt_cache_key": Field(Text()),
    "service_tier": unsupported("auto", "default"),
    "store": unsupported(False),
}
REASONING: dict[str, Field] = {
    "reasoning_effort": Field(Enum(EFFORTS)),
    "thinking_budget_tokens": Field(integer(0, 1 << 31)),
    "chat_template_kwargs": Field(BoundedObject(), {}),
}
GUIDED = ("close_on_length", "logprobs_mode")  # fields of both a body and SamplingParams


def require_stream(values: Mapping[str, Any]) -> None:
    """Raise for options of a stream without one."""
    require(values["stream"] or not values["stream_options"], "stream_options", "conflict",
            "stream_options needs stream: true")  # fmt: skip


def head(reply: ReplyState, kind: str, prefix: str) -> dict[str, Any]:
    """Return what every reply and chunk begins with."""
    return {
        "id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()),
        "model": reply.model, "system_fingerprint": None,
    }  # fmt: skip


class ChunkPrinter(Printer):
    """A stream of chunks, with the usage in the last one where it was requested, and [DONE]."""

    def __init__(self, reply: ReplyState, chunk_head: dict[str, Any]) -> None:
        super().__init__(reply)
        self._chunk_head = chunk_head
        self._tail = {"usage": None} if reply.request.values["includes_usage"] else {}

    def end(self) -> bytes:
        if not self._tail:
            return DONE
        return encode_event({**self._chunk_head, "choices": [], "usage": encode_usage(self.reply.usage())}) + DONE

    def print_error(self, error: WorkerError) -> bytes:
        return encode_event(error_body(error)) + DONE


def encode_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage of a reply."""
    return {
        "prompt_tokens": usage.prompt, "completion_tokens": usage.output, "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }  # fmt: skip


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the shape of chat completions."""

    def encode(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    return {"content": [
        {**encode(entry.token, entry.logprob), "top_logprobs": [encode(*top) for top in entry.top]} for entry in entries
    ], "refusal": None}  # fmt: skip


FINISH: Schema = {"enum": ["stop", "length", "tool_calls", None]}
LOGPROBS: Schema = or_null({"type": "object"})
HEAD: dict[str, Schema] = {"id": TEXT, "object": TEXT, "created": COUNT, "model": TEXT}
STREAM_OPTIONS: Schema = {
    "anyOf": [with_values(stream_options={"enum": [None, {}]}), with_field("stream", const=True)]
}  # they need a stream
SCHEMAS: dict[str, Schema] = {
    "Usage": reply_schema(
        prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
        prompt_tokens_details=reply_schema(cached_tokens=COUNT),
        completion_tokens_details=reply_schema(reasoning_tokens=COUNT)),
    "OpenAIError": reply_schema(
        error=reply_schema(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT))),
}  # fmt: skip


def completion_schema(choice: Schema, **more: Schema) -> Schema:
    """Return the schema of a reply with choices."""
    return reply_schema(**HEAD, choices=array_schema(choice), **more)
