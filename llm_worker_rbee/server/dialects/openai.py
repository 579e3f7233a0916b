"""OpenAI's chat completions, `/v1/chat/completions`, and the fields, errors, chunks and usage that other routes of this
API share with them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ...errors import ContextLengthError, ModelNotFoundError, WorkerError
from ...sampling_params import MAX_LOGPROBS, MAX_STOPS, StructuredOutputsParams
from ...tokenizer.chat.events import ChatEvent, ContentDelta, EventFold, ReasoningDelta, ToolCallDelta, ToolCallStart
from ..bodies import (
    EFFORTS,
    Conversation,
    GenerateRequest,
    Messages,
    Tools,
    chat_options,
    function_call,
    function_places,
    named_tool,
    to_tool,
)
from ..dialect import Answer, Dialect, GenerateRoute, Operation, Printer, ReplyState, TextDelta, Usage, chat_logprobs
from ..json_schema import (
    COUNT,
    TEXT,
    Schema,
    array_schema,
    object_schema,
    or_null,
    ref,
    reply_schema,
    with_field,
    with_values,
)
from ..schema import (
    MAX_CHOICES,
    PRIORITY,
    SAMPLING,
    TIMEOUT_MS,
    AnyObject,
    Boolean,
    BoundedObject,
    Enum,
    Field,
    FieldType,
    MaxTokens,
    ModelLimits,
    ParseOptions,
    StopStrings,
    StructuredOutputs,
    Text,
    ValidationIssue,
    integer,
    require,
    sampling_params,
    table_schema,
    unsupported,
    validate_known,
)
from ..settings import ServerSettings
from ..sse import DONE, encode_event, encode_json

MAX_LORAS_EACH = 64  # adapters of a request


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error in the shape that the official client parses."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
    message = error_message(error)
    return {"error": {"message": message, "type": kind, "param": getattr(error, "field", None), "code": code}}


def error_message(error: WorkerError) -> str:
    """Return the text of an error; for a prompt that does not fit, clients recognise its first words."""
    is_overflow = isinstance(error, ContextLengthError)
    return f"Input tokens exceed the configured limit: {error}" if is_overflow else str(error)


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


class LogitBias(FieldType):
    """Token ids, as strings, and the values added to their logits."""

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


class StreamOptions(FieldType):
    """Whether the last chunk of a stream has the token counts (`include_usage`), or every chunk."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        keys = ("include_usage", "continuous_usage_stats")
        if not isinstance(value, dict) or not all(k in keys and isinstance(v, bool) for k, v in value.items()):
            message = f"{name} may hold {' and '.join(keys)}, true or false, and nothing else"
            return ValidationIssue(name, "type", message)
        if value.get("continuous_usage_stats") and not value.get("include_usage", True):
            return ValidationIssue(name, "conflict", f"{name}.continuous_usage_stats needs include_usage: true")
        return None

    def json_schema(self) -> Schema:
        flag: Schema = {"type": "boolean"}
        last = object_schema({"include_usage": flag, "continuous_usage_stats": {**flag, "const": False}})
        each = object_schema({"include_usage": {**flag, "const": True}, "continuous_usage_stats": flag})
        return {"anyOf": [last, each]}


class LoraScales(FieldType):
    """Adapters by their ids, with the scale of each, as in llama-server."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        message = f'{name} must be a list of up to {MAX_LORAS_EACH} objects {{"id": 0, "scale": 1.0}}'
        if not isinstance(value, list) or len(value) > MAX_LORAS_EACH:
            return ValidationIssue(name, "type", message)
        for entry in value:
            if not isinstance(entry, dict) or entry.keys() != {"id", "scale"}:
                return ValidationIssue(name, "type", message)
            if {type(entry["id"]), type(entry["scale"])} - {int, float} or entry["id"] % 1:
                return ValidationIssue(name, "type", message)
            if not (-1000 <= entry["scale"] <= 1000 and entry["id"] >= 0):
                return ValidationIssue(name, "range", f"{name}: an id is 0 or more, a scale -1000 to 1000")
        return None

    def json_schema(self) -> Schema:
        scale: Schema = {"type": "number", "minimum": -1000, "maximum": 1000}
        entry = object_schema({"id": {"type": "integer", "minimum": 0}, "scale": scale}, "id", "scale")
        return {**array_schema(entry), "maxItems": MAX_LORAS_EACH}

    def coerce(self, value: Any) -> list[tuple[int, float]]:
        return [(int(entry["id"]), float(entry["scale"])) for entry in value]


LORA_SCALES = LoraScales()


@dataclass(frozen=True, slots=True)
class ResponseFormat(FieldType):
    """Text, any JSON object, or JSON of a schema, which lies in an object `json_schema` unless the format is flat."""

    is_flat: bool = False

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in ("text", "json_object", "json_schema"):
            return ValidationIssue(name, "choice", f"{name}.type must be text, json_object or json_schema")
        holder, place = (value, name) if self.is_flat else (value.get("json_schema"), f"{name}.json_schema")
        if kind == "json_schema" and not (isinstance(holder, dict) and isinstance(holder.get("schema"), (dict, bool))):
            return ValidationIssue(name, "type", f"{place}.schema must be a JSON schema")
        return None

    def json_schema(self) -> Schema:
        simple = object_schema({"type": {"enum": ["text", "json_object"]}}, "type", is_open=True)
        fields: dict[str, Schema] = {"schema": {"type": ["object", "boolean"]}}
        if not self.is_flat:
            fields = {"json_schema": object_schema(fields, "schema", is_open=True)}
        fields = {"type": {"const": "json_schema"}, **fields}
        return {"anyOf": [simple, object_schema(fields, *fields, is_open=True)]}


def structured_outputs(values: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Read `response_format`, `structured_outputs` and `grammar`; raise if two of them are set."""
    requested = []
    if (grammar := values.get("grammar")) is not None:
        requested.append(StructuredOutputsParams(grammar=grammar))
    if (fields := values.get("structured_outputs")) is not None:
        requested.append(StructuredOutputsParams(**fields))
    if (form := values.get("response_format")) is not None and form["type"] != "text":
        schema = form["json_schema"]["schema"] if form["type"] == "json_schema" else None
        requested.append(
            StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
        )
    require(
        len(requested) <= 1,
        "structured_outputs",
        "conflict",
        "response_format, structured_outputs and grammar exclude each other: give one of them",
    )
    return requested[0] if requested else None


def guiding_field(values: Mapping[str, Any], default: str = "structured_outputs") -> str:
    """Return the field that asks for structured outputs."""
    fields = ("grammar", "structured_outputs", "response_format")
    return next((name for name in fields if values.get(name) is not None), default)


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
    "cache_salt": Field(Text(1), is_secret=True),
    "lora": Field(LORA_SCALES),
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
SHARED = ("model", "n", "stream", "priority", "timeout_ms", "cache_salt", "lora")  # of a body and its request
GUIDED = ("close_on_length", "logprobs_mode")  # fields of both a body and SamplingParams
STREAM_CONFLICT = ("stream_options", "conflict", "stream_options needs stream: true")  # for `require`


def shared_fields(
    values: Mapping[str, Any], limits: ModelLimits | None, max_tokens: int | None, **extra: Any
) -> dict[str, Any]:
    """Return the request fields that chats and texts share; `extra` are sampling parameters."""
    is_continuous = values["stream_options"].get("continuous_usage_stats", False)
    includes_usage = values["stream_options"].get("include_usage", is_continuous)
    field, guided = guiding_field(values), structured_outputs(values)
    params = sampling_params(
        values, limits, max_tokens, structured_outputs=guided, **{name: values[name] for name in GUIDED}, **extra
    )
    return {
        **{name: values[name] for name in SHARED},
        "params": params,
        "structured_outputs_field": field,
        "values": {"includes_usage": includes_usage, "has_continuous_usage": is_continuous},
    }


def head(reply: ReplyState, kind: str, prefix: str) -> dict[str, Any]:
    """Return the beginning of every reply and chunk."""
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": reply.model,
        "system_fingerprint": None,
    }


def completion(reply: ReplyState, kind: str, prefix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a whole reply."""
    return {**head(reply, kind, prefix), "choices": choices, "usage": encode_usage(reply.usage()), "seed": reply.seed}


class ChunkPrinter(Printer):
    """A stream of chunks, with the usage in the last one where it was requested, and [DONE]."""

    def __init__(self, reply: ReplyState, chunk_head: dict[str, Any]) -> None:
        super().__init__(reply)
        self._chunk_head = chunk_head
        self._includes_usage = reply.request.values["includes_usage"]
        self._has_continuous_usage = reply.request.values["has_continuous_usage"]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        """Return the chunk of a choice."""
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = encode_usage(self.reply.usage()) if self._has_continuous_usage else None
        return encode_event(chunk)

    def end(self) -> bytes:
        if not self._includes_usage:
            return DONE
        return encode_event({**self._chunk_head, "choices": [], "usage": encode_usage(self.reply.usage())}) + DONE

    def print_error(self, error: WorkerError) -> bytes:
        return encode_event(error_body(error)) + DONE


def encode_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage of a reply."""
    images = {"image_tokens": usage.images} if usage.images else {}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached, **images},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


FINISH: Schema = {"enum": ["stop", "length", "tool_calls", None]}
LOGPROBS: Schema = or_null({"type": "object"})
HEAD: dict[str, Schema] = {"id": TEXT, "object": TEXT, "created": COUNT, "model": TEXT}
STREAM_OPTIONS: Schema = {
    "anyOf": [with_values(stream_options={"enum": [None, {}]}), with_field("stream", const=True)]
}  # they need a stream
SCHEMAS: dict[str, Schema] = {
    "Usage": reply_schema(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=reply_schema(cached_tokens=COUNT),
        completion_tokens_details=reply_schema(reasoning_tokens=COUNT),
    ),
    "OpenAIError": reply_schema(error=reply_schema(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT))),
}


def completion_schema(choice: Schema, **extra: Schema) -> Schema:
    """Return the schema of a reply with choices."""
    return reply_schema(**HEAD, choices=array_schema(choice), **extra)


NOT_HONOURED: dict[str, tuple[Any, ...]] = {  # known fields, with the values that change nothing
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
CHAT: dict[str, Field] = {
    **COMMON,
    "messages": Field(Messages(), required=True, is_secret=True),
    "max_tokens": Field(MaxTokens()),
    "max_completion_tokens": Field(MaxTokens()),
    "logprobs": Field(Boolean(), False),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS)),
    "tools": Field(Tools(), []),
    "tool_choice": Field(ToolChoice()),
    "parallel_tool_calls": Field(Boolean(), True),
    **REASONING,
    **{name: unsupported(*allowed) for name, allowed in NOT_HONOURED.items()},
}


def parse_chat(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/v1/chat/completions`."""
    values, ignored = validate_known(body, CHAT, options)
    max_tokens = values["max_completion_tokens"] or values["max_tokens"]
    require(
        values["max_tokens"] in (None, max_tokens),
        "max_tokens",
        "conflict",
        "max_tokens and max_completion_tokens differ: give one of them",
    )
    require(
        values["top_logprobs"] is None or values["logprobs"],
        "top_logprobs",
        "conflict",
        "top_logprobs needs logprobs: true",
    )
    require(values["stream"] or not values["stream_options"], *STREAM_CONFLICT)
    logprobs = (values["top_logprobs"] or 0) if values["logprobs"] else None
    shared = shared_fields(values, options.limits, max_tokens, logprobs=logprobs)
    chat = chat_options(
        [to_tool(tool["function"]) for tool in values["tools"]],
        values["tool_choice"],
        parallel=values["parallel_tool_calls"],
        effort=values["reasoning_effort"],
        template_kwargs=values["chat_template_kwargs"],
        thinking_budget=values["thinking_budget_tokens"],
    )
    return GenerateRequest(
        **shared,
        prompts=[Conversation.encode(values["messages"], chat)],
        ignored=ignored,
        tool_places=function_places(values["tools"]),
    )


class ChatPrinter(ChunkPrinter):
    """Chunks of chat completions, or one object. Most chunks differ from each other by their text alone."""

    def __init__(self, reply: ReplyState) -> None:
        super().__init__(reply, head(reply, "chat.completion.chunk", "chatcmpl"))
        self._has_logprobs = reply.request.params.logprobs is not None
        self._folds = [EventFold() for _ in reply.generations]
        self._templates: list[tuple[bytes, bytes]] = []

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        for i in range(len(self.reply.generations)):
            event = self._delta_chunk(i, {"content": "-"})
            before, _, after = event.rpartition(b'"content":"-"')  # no string holds it: quotes are escaped
            self._templates.append((before + b'"content":', after))
        return b"".join([self._delta_chunk(i, first) for i in range(len(self.reply.generations))])

    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        chunks = b""
        if self._has_logprobs:
            chunks = self._print_with_logprobs(index, delta)
        elif delta.events is None:
            chunks = self._content(index, delta.text) if delta.text else b""
        else:
            chunks = b"".join([self._print_event(index, event) for event in delta.events])
        self._folds[index].add(delta.events or ())
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, self._folds[index].ends_with_calls)
            chunks += self._delta_chunk(index, {}, finish_reason=reason)
        return chunks

    def _print_with_logprobs(self, index: int, delta: TextDelta) -> bytes:
        """Return the chunks of a delta; its log-probabilities are in the first, which may have no text."""
        events = [ContentDelta(delta.text)] if delta.events is None else delta.events
        if not (delta.logprobs or events):
            return b""
        logprobs = chat_logprobs(self.reply.tokenizer, delta.logprobs)
        deltas = [self._delta(index, event) for event in events] or [{"content": ""}]
        chunks = [self._delta_chunk(index, deltas[0], logprobs=logprobs)]
        return b"".join(chunks + [self._delta_chunk(index, rest) for rest in deltas[1:] if rest])

    def _print_event(self, index: int, event: ChatEvent) -> bytes:
        if isinstance(event, ContentDelta):
            return self._content(index, event.text)
        delta = self._delta(index, event)
        return self._delta_chunk(index, delta) if delta else b""

    def _delta(self, index: int, event: ChatEvent) -> dict[str, Any]:
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        if isinstance(event, ToolCallDelta):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
        return {}

    def _content(self, index: int, text: str) -> bytes:
        if self._has_continuous_usage:
            return self._delta_chunk(index, {"content": text})
        before, after = self._templates[index]
        return before + encode_json(text) + after

    def _delta_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk(choice)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        return completion(self.reply, "chat.completion", "chatcmpl", choices)

    def _choice(self, i: int, answer: Answer) -> dict[str, Any]:
        text, calls = answer.fold.content, answer.fold.calls
        content = None if calls and not text else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := answer.fold.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = [function_call(*call) for call in calls]
        assert answer.finish_reason is not None
        logprobs = chat_logprobs(self.reply.tokenizer, answer.logprobs) if self._has_logprobs else None
        reason = finish_reason(answer.finish_reason, answer.fold.ends_with_calls)
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": reason}


def finish_reason(reason: str, ends_with_calls: bool) -> str:
    """Return this API's finish reason; a call cut by a stop string does not count as a call."""
    return "tool_calls" if reason == "stop" and ends_with_calls else reason


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    message = reply_schema(role={"const": "assistant"}, content=or_null(TEXT))
    choice = reply_schema(index=COUNT, message=message, logprobs=LOGPROBS, finish_reason=FINISH)
    chunk = reply_schema(index=COUNT, delta={"type": "object"}, logprobs=LOGPROBS, finish_reason=FINISH)
    return {
        **SCHEMAS,
        "ChatRequest": {
            **table_schema(CHAT, settings.schema_names, is_open=settings.ignore_unknown_fields),
            "anyOf": [with_values(top_logprobs={"type": "null"}), with_field("logprobs", const=True)],
            "allOf": [STREAM_OPTIONS],
        },
        "ChatCompletion": completion_schema(choice, usage=ref("Usage")),
        "ChatChunk": completion_schema(chunk),
    }


OPERATION = Operation(
    summary="Complete a conversation", request="ChatRequest", reply="ChatCompletion", event="ChatChunk"
)
DIALECT = Dialect(
    prefixes=("/v1",),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OpenAIError",
    generate=(GenerateRoute("/v1/chat/completions", parse_chat, ChatPrinter, OPERATION),),
)
