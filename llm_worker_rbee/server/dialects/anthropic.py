"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

The same history gives the same beginning of the prompt in each turn, so that the prefix cache holds it: nothing moves,
`cache_control` has no effect, and a block that clients change in every request is dropped (`BILLING`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from uuid import uuid4

import msgspec

from ...errors import ContextLengthError, ModelNotFoundError, WorkerError
from ...sampling_params import MAX_STOPS, Bounds, SamplingParams, StructuredOutputsParams
from ...tokenizer.chat.events import (
    ChatEvent,
    ContentDelta,
    Image,
    ReasoningDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from .. import log
from ..bodies import (
    BOUNDED_OBJECT,
    EFFORTS,
    MAX_TOOL_NAME,
    MAX_TOOLS,
    Conversation,
    GenerateRequest,
    chat_options,
    check_function,
    function_call,
    join_parts,
)
from ..dialect import (
    Answer,
    Call,
    Dialect,
    Front,
    GenerateRoute,
    Handler,
    Operation,
    Printer,
    ReplyState,
    Route,
    TextDelta,
    Usage,
    chat_events,
)
from ..json_schema import COUNT, TEXT, Schema, array_schema, or_null, ref, reply_schema
from ..object_fields import ListOf, NestedType, ObjectOf, Tagged, TextOr, find_unknown
from ..schema import (
    MAX_LISTED_IGNORED,
    SAMPLING,
    AnyObject,
    Boolean,
    Enum,
    Field,
    Number,
    ParseOptions,
    StopStrings,
    Text,
    ValidationIssue,
    decode_object,
    integer,
    require,
    sampling_params,
    table_schema,
    type_name,
    unsupported,
    validate_known,
)
from ..settings import ServerSettings
from ..sse import encode_json

SIGNATURE = "unsigned"  # of reasoning; what a client sends back is not verified
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES_PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
BILLING = "x-anthropic-billing-header:"  # begins a block of the system prompt that differs in every request
# Reasoning of earlier turns stays in the prompt where the template lets it: otherwise the next turn changes the prefix.
KEEP_REASONING = {"preserve_thinking": True, "clear_thinking": False}


class AnyTool(NestedType):
    """A tool with a schema, or one that only Anthropic's servers have, which is skipped."""

    def __init__(self, is_open: bool) -> None:
        self._custom = ObjectOf(TOOL, is_open)

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(value)}")
        if is_skipped(value):
            return None
        if (issue := self._custom.validate(name, value)) is not None:
            return issue
        return check_function(name, {"name": value["name"]})

    def json_schema(self) -> Schema:
        custom = self._custom.json_schema()
        custom["properties"]["name"] |= {"minLength": 1, "maxLength": MAX_TOOL_NAME}
        kind = {"type": "string", "not": {"const": "custom"}}
        return {"anyOf": [custom, {"type": "object", "properties": {"type": kind}, "required": ["type"]}]}

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        return iter(()) if is_skipped(value) else self._custom.find_unknown(name, value)


def is_skipped(tool: Mapping[str, Any]) -> bool:
    """Return whether this worker lacks the type of a tool."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind != "custom"


CACHE_CONTROL: dict[str, Field] = {"cache_control": Field(AnyObject())}  # without effect: every prompt is cached
TOOL: dict[str, Field] = {
    "name": Field(Text(), required=True),
    "description": Field(Text(), ""),
    "input_schema": Field(BOUNDED_OBJECT, required=True),
    "input_examples": Field(ListOf(BOUNDED_OBJECT), []),
    "strict": Field(Boolean(), False),
    "type": Field(Enum(("custom",))),
    **CACHE_CONTROL,
    # Accepted without effect: input is streamed as it is generated, and every tool is described to the model.
    "eager_input_streaming": Field(Boolean()),
    "defer_loading": Field(Boolean()),
    "allowed_callers": Field(ListOf(Enum(("direct",)))),
}
TEXT_BLOCK = {"text": Field(Text(), required=True), **CACHE_CONTROL, "citations": Field(ListOf(AnyObject()))}
THINKING_DISPLAY = {"display": Field(Enum(("summarized", "updates", "omitted")))}  # the first two: all of it
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp")  # what a file is, its bytes tell
PARALLEL = {"disable_parallel_tool_use": Field(Boolean(), False)}


def image_fields(is_open: bool) -> dict[str, Field]:
    """Return the fields of an image."""
    base64 = {"media_type": Field(Enum(IMAGE_TYPES), required=True), "data": Field(Text(1), required=True)}
    sources = {"base64": base64, "url": {"url": Field(Text(1), required=True)}}
    return {"source": Field(Tagged("type", sources, is_open), required=True), **CACHE_CONTROL}


@cache
def message_fields(is_open: bool) -> dict[str, Field]:
    """Return the fields of both routes; where they are open, nested objects may have unknown fields."""

    def blocks(**tables: Mapping[str, Field]) -> Field:
        return Field(TextOr(ListOf(Tagged("type", {"text": TEXT_BLOCK, **tables}, is_open))), required=True)

    call = {
        "id": Field(Text(1), required=True),
        "name": Field(Text(1), required=True),
        "input": Field(BOUNDED_OBJECT, required=True),
        "caller": Field(AnyObject()),
        **CACHE_CONTROL,
    }
    result = {
        "tool_use_id": Field(Text(), required=True),
        "content": Field(blocks(image=image_fields(is_open)).type, ""),
        "is_error": Field(Boolean(), False),
        **CACHE_CONTROL,
    }
    thinking = {"thinking": Field(Text(), required=True), "signature": Field(Text()), **CACHE_CONTROL}
    redacted = {"data": Field(Text(), ""), **CACHE_CONTROL}
    roles = {
        "user": {"content": blocks(image=image_fields(is_open), tool_result=result)},
        "assistant": {"content": blocks(tool_use=call, thinking=thinking, redacted_thinking=redacted)},
        "system": {"content": blocks()},
    }
    output_format = Tagged("type", {"json_schema": {"schema": Field(BOUNDED_OBJECT, required=True)}}, is_open)
    output_config = {"effort": Field(Enum(EFFORTS[2:])), "format": Field(output_format)}
    budget = {"budget_tokens": Field(integer(1), required=True)}
    modes = {"enabled": budget | THINKING_DISPLAY, "adaptive": THINKING_DISPLAY, "disabled": {}}
    choices = {
        "auto": PARALLEL,
        "any": PARALLEL,
        "tool": {"name": Field(Text(), required=True), **PARALLEL},
        "none": {},
    }
    return {
        "model": Field(Text()),
        "messages": Field(ListOf(Tagged("role", roles, is_open), 1), required=True, is_secret=True),
        "system": Field(blocks().type, "", is_secret=True),
        "tools": Field(ListOf(AnyTool(is_open), 0, MAX_TOOLS), []),
        "tool_choice": Field(Tagged("type", choices, is_open), {"type": "auto"}),
        "thinking": Field(Tagged("type", modes, is_open), {"type": "disabled"}),
        "output_config": Field(ObjectOf(output_config, is_open), {}),
        "output_format": Field(output_format),
        "context_management": Field(ObjectOf({"edits": Field(ListOf(AnyObject()), [])}, is_open)),
        "mcp_servers": unsupported([]),
        "speed": unsupported("standard"),
        # Accepted without effect
        **CACHE_CONTROL,
        "user_profile_id": Field(Text()),
    }


@cache
def create_fields(is_open: bool) -> dict[str, Field]:
    """Return the fields of a request for an answer."""
    return {
        **message_fields(is_open),
        "max_tokens": Field(integer(1), required=True),
        "stop_sequences": Field(StopStrings(MAX_STOPS), (), is_secret=True),
        "stream": Field(Boolean(), False),
        "temperature": Field(Number(Bounds(0, 1))),
        **{name: SAMPLING[name] for name in ("top_p", "top_k")},
        "container": unsupported(),
        "compaction": unsupported(),
        "fallbacks": unsupported(),
        "thread": unsupported(),
        # Accepted without effect
        "metadata": Field(AnyObject()),
        "diagnostics": Field(AnyObject()),
        "inference_geo": Field(Text()),
        "service_tier": unsupported("auto", "standard_only"),
    }


def parse_messages(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/v1/messages`."""
    values, ignored = _validate(body, create_fields(options.ignores_unknown), options)
    last = len(values["messages"]) - 1
    require(
        values["messages"][last]["role"] != "assistant",
        f"messages[{last}].role",
        "unsupported",
        f"messages[{last}] is the assistant's, which this worker does not continue: end with a message of the user",
    )
    conversation, skipped = _to_conversation(values)
    output_format = values["output_config"].get("format") or values["output_format"]
    params = sampling_params(
        values,
        options.limits,
        values["max_tokens"],
        stop=values["stop_sequences"],
        structured_outputs=None if output_format is None else StructuredOutputsParams(json=output_format["schema"]),
    )
    return GenerateRequest(
        prompts=[conversation],
        params=params,
        model=values["model"],
        stream=values["stream"],
        ignored=ignored,
        skipped=skipped,
        structured_outputs_field="output_config.format",
        tool_places=[f"tools[{i}].input_schema" for i, tool in enumerate(values["tools"]) if not is_skipped(tool)],
        values={
            "omits_thinking": values["thinking"].get("display") == "omitted",
            "has_edits": values["context_management"] is not None,
        },
    )


def parse_count(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/v1/messages/count_tokens`."""
    values, ignored = _validate(body, message_fields(options.ignores_unknown), options)
    conversation, skipped = _to_conversation(values)
    return GenerateRequest(
        prompts=[conversation], params=SamplingParams(), model=values["model"], ignored=ignored, skipped=skipped
    )


def _validate(body: bytes, table: dict[str, Field], options: ParseOptions) -> tuple[dict[str, Any], list[str]]:
    fields = decode_object(body)
    values, ignored = validate_known(fields, table, options)
    if options.ignores_unknown:
        for name, field in table.items():
            ignored += find_unknown(field.type, name, fields.get(name))
    return values, ignored[:MAX_LISTED_IGNORED]


def _to_conversation(values: Mapping[str, Any]) -> tuple[Conversation, list[str]]:
    """Return the conversation of a body, and the types of tools that were skipped."""
    tools = [_to_tool(tool) for tool in values["tools"] if not is_skipped(tool)]
    chosen, thinking = values["tool_choice"], values["thinking"]
    require(
        bool(tools) or chosen["type"] in ("auto", "none"),
        "tool_choice",
        "conflict",
        f"tool_choice {chosen['type']} needs tools with an input_schema",
    )
    choice = {"any": "required", "tool": {"type": "function", "name": chosen.get("name")}}
    variables = {"enable_thinking": thinking["type"] != "disabled", **KEEP_REASONING}
    options = chat_options(
        tools,
        choice.get(chosen["type"], chosen["type"]),
        parallel=not chosen.get("disable_parallel_tool_use"),
        effort=values["output_config"].get("effort"),
        template_kwargs=variables,
        thinking_budget=thinking.get("budget_tokens"),
    )
    messages = list(to_messages(values["system"], values["messages"]))
    return Conversation.encode(messages, options), [tool["type"] for tool in values["tools"] if is_skipped(tool)]


def _to_tool(tool: Mapping[str, Any]) -> Tool:
    schema = tool["input_schema"]
    if examples := tool.get("input_examples"):
        schema = {**schema, "examples": examples}
    return Tool(tool["name"], tool.get("description") or "", schema, bool(tool.get("strict")))


def to_messages(system: Any, messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages for the chat template; each depends only on itself and on earlier ones."""
    if isinstance(system, list):
        system = [block for block in system if not block["text"].startswith(BILLING)]
    if text := _join(system):
        yield {"role": "system", "content": text}
    names: dict[str, str] = {}  # of called tools, by the ids of their calls
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if isinstance(content, str) or role == "system":
            yield {"role": role, "content": _join(content)}
        elif role == "assistant":
            names |= {block["id"]: block["name"] for block in content if block["type"] == "tool_use"}
            yield _to_assistant(content)
        else:
            yield from _to_user(content, names, f"messages[{i}].content")


def _join(content: Any) -> str:
    """Return the text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    return "\n".join([block["text"] for block in content])


def _to_assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message of an answer: its blocks are parts of one text, joined without a separator."""
    assistant: dict[str, Any] = {"role": "assistant"}
    assistant["content"] = "".join([block["text"] for block in blocks if block["type"] == "text"])
    if reasoning := "".join([block["thinking"] for block in blocks if block["type"] == "thinking"]):
        assistant["reasoning_content"] = reasoning
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if calls:
        assistant["tool_calls"] = [
            function_call(call["id"], call["name"], json.dumps(call["input"], ensure_ascii=False)) for call in calls
        ]
    return assistant


def _to_user(blocks: Sequence[Mapping[str, Any]], names: Mapping[str, str], place: str) -> Iterator[dict[str, Any]]:
    """Yield the results of tools and the texts and images between them, in their order."""
    parts: list[str | Image] = []
    for j, block in enumerate(blocks):
        if block["type"] != "tool_result":
            _add_part(parts, block, f"{place}[{j}]")
            continue
        if parts:
            yield {"role": "user", "content": join_parts(parts)}
        parts, result, call = [], block["content"], block["tool_use_id"]
        own: list[str | Image] = [result] if isinstance(result, str) else []
        for k, inner in enumerate(() if isinstance(result, str) else result):
            _add_part(own, inner, f"{place}[{j}].content[{k}]")
        named = {"name": names[call]} if call in names else {}
        content = join_parts(["Error: ", *own] if block["is_error"] else own)
        yield {"role": "tool", "tool_call_id": call, **named, "content": content}
    if parts or not blocks:
        yield {"role": "user", "content": join_parts(parts)}


def _add_part(parts: list[str | Image], block: Mapping[str, Any], place: str) -> None:
    """Add a text, on a line of its own behind another, or an image."""
    if block["type"] == "text":
        parts.append("\n" * bool(parts and isinstance(parts[-1], str)) + block["text"])
    elif (source := block["source"])["type"] == "url":
        parts.append(Image.from_url(f"{place}.source.url", source["url"]))
    else:
        parts.append(Image.from_base64(f"{place}.source.data", source["data"]))


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error in the shape that the official client parses; some clients look for its first words."""
    message = str(error)
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {message}"
    elif isinstance(error, ModelNotFoundError):
        message += "; the option --served-model-name of the worker gives the model another name"
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": log.correlation_id.get()}


def encode_event(kind: str, **fields: Any) -> bytes:
    """Return the bytes of one event."""
    return f"event: {kind}\ndata: ".encode() + encode_json({"type": kind, **fields}) + b"\n\n"


class MessagePrinter(Printer):
    """The events of a message, or one object. The first event waits for the first token: it has the cached tokens."""

    ping = encode_event("ping")

    def __init__(self, reply: ReplyState) -> None:
        super().__init__(reply)
        self._values = reply.request.values
        self._has_started, self._has_calls = False, False
        self._index = -1  # of the last block
        self._open = ""  # its type, while it is open
        self._delta_head = b""  # of its text

    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        parts: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            parts.append(encode_event("message_start", message=self._message([], None, None)))
        parts += map(self._print_event, chat_events(delta))
        if delta.finish_reason is not None:
            reason = self._stop_reason(delta.finish_reason, delta.stop_sequence)
            ended = {"stop_reason": reason, "stop_sequence": delta.stop_sequence}
            usage = encode_usage(self.reply.usage())
            parts += [self._close(), encode_event("message_delta", delta=ended, usage=usage, **self._edits())]
        return b"".join(parts)

    def _print_event(self, event: ChatEvent) -> bytes:
        if isinstance(event, ContentDelta):
            return self._print_text("text", event.text)
        if isinstance(event, ReasoningDelta):
            return self._print_text("thinking", event.text)
        if isinstance(event, ToolCallStart):
            self._has_calls = True
            return self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        if isinstance(event, ToolCallDelta):
            return self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        return self._close()

    def _print_text(self, kind: str, text: str) -> bytes:
        """Return a delta of text or reasoning; begin a block unless one of its type is open."""
        begin = b"" if self._open == kind else self._begin(_text_block(kind, ""))
        if kind == "thinking" and self._values["omits_thinking"]:
            return begin
        return begin + self._delta_head + encode_json(text) + b"}}\n\n"

    def _begin(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open, self._index = block["type"], self._index + 1
        head = f'{{"type":"content_block_delta","index":{self._index},"delta":{{"type":"{self._open}_delta"'
        self._delta_head = f'event: content_block_delta\ndata: {head},"{self._open}":'.encode()
        return closed + encode_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return encode_event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return signed + encode_event("content_block_stop", index=self._index)

    def end(self) -> bytes:
        return encode_event("message_stop")

    def print_error(self, error: WorkerError) -> bytes:
        body = error_body(error)
        return b"event: error\ndata: " + encode_json(body) + b"\n\n"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        assert answer.finish_reason is not None
        content: list[dict[str, Any]] = []
        calls = iter(answer.fold.calls)
        for event in answer.fold.events:
            if isinstance(event, ContentDelta):
                content.append(_text_block("text", event.text))
            elif isinstance(event, ReasoningDelta):
                shown = "" if self._values["omits_thinking"] else event.text
                content.append({**_text_block("thinking", shown), "signature": SIGNATURE})
            elif isinstance(event, ToolCallStart):
                self._has_calls = True
                content.append(encode_call(next(calls)))
        reason = self._stop_reason(answer.finish_reason, answer.stop_sequence)
        return self._message(content, reason, answer.stop_sequence) | self._edits()

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop_sequence: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.reply.request.model or self.reply.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": encode_usage(self.reply.usage()),
        }

    def _stop_reason(self, finish_reason: str, stop_sequence: str | None) -> str:
        if finish_reason == "length":
            is_whole = self.reply.max_tokens == self.reply.request.params.max_tokens
            return "max_tokens" if is_whole else "model_context_window_exceeded"
        if stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._has_calls else "end_turn"

    def _edits(self) -> dict[str, Any]:
        """Report that no context edit was applied."""
        return {"context_management": {"applied_edits": []}} if self._values["has_edits"] else {}


def _text_block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def encode_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call of a message; truncated arguments, which are no object, stay text."""
    try:
        decoded = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        decoded = None
    arguments = decoded if isinstance(decoded, dict) else {"partial_json": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def encode_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage of a reply; `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "service_tier": "standard",
    }


def make_handlers(worker: Front) -> Mapping[str, Handler]:
    """Return the handler of the route that generates nothing."""

    async def count_tokens(call: Call) -> Any:
        body = await call.body()
        async with call.until_disconnect():
            request: GenerateRequest = await worker.parse(COUNT_PATH, body)
            async with worker.use(request.model) as chat:
                chat.require_ready()
                (prompt,) = await chat.encoder.encode(request.prompts)
            return {"input_tokens": len(prompt.ids)}, 200, request.notice_headers()

    return {COUNT_PATH: count_tokens}


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open = settings.ignore_unknown_fields

    def event(kind: str, **properties: Schema) -> Schema:
        return reply_schema(type={"const": kind}, **properties)

    block = reply_schema(type={"enum": ["text", "thinking", "tool_use"]})
    reason: Schema = {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]}
    ended = {"stop_reason": or_null(reason), "stop_sequence": or_null(TEXT)}
    return {
        "AnthropicRequest": table_schema(create_fields(is_open), settings.schema_names, is_open=is_open),
        "AnthropicCountRequest": table_schema(message_fields(is_open), settings.schema_names, is_open=is_open),
        "AnthropicCount": reply_schema(input_tokens=COUNT),
        "AnthropicUsage": reply_schema(
            input_tokens=COUNT, cache_creation_input_tokens=COUNT, cache_read_input_tokens=COUNT, output_tokens=COUNT),
        "AnthropicMessage": reply_schema(
            id=TEXT, type={"const": "message"}, role={"const": "assistant"}, model=TEXT, content=array_schema(block),
            **ended, usage=ref("AnthropicUsage")),
        "AnthropicEvent": {"oneOf": [
            event("message_start", message=ref("AnthropicMessage")),
            event("content_block_start", index=COUNT, content_block=block),
            event("content_block_delta", index=COUNT, delta=reply_schema(type=TEXT)),
            event("content_block_stop", index=COUNT),
            event("message_delta", delta=reply_schema(**ended), usage=ref("AnthropicUsage")),
            event("message_stop"), event("ping"),
        ]},
        "AnthropicError": reply_schema(
            type={"const": "error"}, error=reply_schema(type=TEXT, message=TEXT), request_id=or_null(TEXT)),
    }  # fmt: skip


CREATE = Operation(
    summary="Answer messages", request="AnthropicRequest", reply="AnthropicMessage", event="AnthropicEvent"
)
COUNTING = Operation(summary="Count the tokens of messages", request="AnthropicCountRequest", reply="AnthropicCount")
DIALECT = Dialect(
    prefixes=(MESSAGES_PATH,),
    error_body=error_body,
    schemas=_schemas,
    error_schema="AnthropicError",
    generate=(GenerateRoute(MESSAGES_PATH, parse_messages, MessagePrinter, CREATE),),
    routes=(Route("POST", COUNT_PATH, COUNTING),),
    make_handlers=make_handlers,
    parsers={COUNT_PATH: (parse_count, GenerateRequest)},
)
