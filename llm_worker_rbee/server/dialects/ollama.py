"""Ollama's `/api/chat` and `/api/generate`; their streams are lines of JSON."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from ...config import parse_duration
from ...errors import WorkerError
from ...sampling_params import (
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_STOPS,
    Bounds,
    FinishReason,
    SamplingParams,
    StructuredOutputsParams,
    TokenLogprob,
)
from ...tokenizer.chat.events import (
    ChatEvent,
    ChatOptions,
    ContentDelta,
    Image,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from ..bodies import (
    ROLES,
    Conversation,
    GenerateRequest,
    Prompt,
    Tools,
    chat_options,
    function_call,
    function_places,
    join_parts,
    to_tool,
)
from ..dialect import (
    Answer,
    Dialect,
    GenerateRoute,
    Operation,
    Printer,
    ReplyState,
    TextDelta,
    chat_events,
    chat_logprobs,
)
from ..json_schema import FLAG, TEXT, Schema, array_schema, object_schema, reply_schema, with_field, with_values
from ..object_fields import ListOf
from ..schema import (
    SAMPLING,
    AnyObject,
    Boolean,
    Enum,
    Field,
    FieldType,
    MaxTokens,
    Number,
    ParseOptions,
    StopStrings,
    Text,
    ValidationIssue,
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

SECOND = 1_000_000_000  # durations are in nanoseconds
TIME: Schema = {"type": "string", "format": "date-time"}
EFFORTS = ("low", "medium", "high", "max")
ANY_NUMBER = Number(Bounds(-MAX_COUNT, MAX_COUNT))


@dataclass(frozen=True, slots=True)
class Either(FieldType):
    """A value of any of several types."""

    types: tuple[FieldType, ...]
    described: str

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if any(kind.validate(name, value) is None for kind in self.types):
            return None
        return ValidationIssue(name, "type", f"{name} must be {self.described}")

    def json_schema(self) -> Schema:
        return {"anyOf": [kind.json_schema() for kind in self.types]}


class Options(AnyObject):
    """The object `options`; what it holds is validated by the table OPTIONS."""

    def json_schema(self) -> Schema:
        return table_schema({name.partition(".")[2]: field for name, field in OPTIONS.items()})


BASE64 = Text(1)
IMAGES = ListOf(BASE64)
MESSAGE = ("role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id")
CALL, FUNCTION = ("id", "type", "index", "function"), ("name", "arguments", "index")


class ChatMessages(FieldType):
    """A conversation; without messages it only asks to load the model."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, list):
            return ValidationIssue(name, "type", f"{name} must be a list of messages")
        return next((issue for i, item in enumerate(value) if (issue := _check_message(f"{name}[{i}]", item))), None)

    def json_schema(self) -> Schema:
        text: Schema = {"type": ["string", "null"]}
        function = object_schema(
            {"name": Text(1).json_schema(), "arguments": {"type": "object"}, "index": {}}, "name", "arguments"
        )
        kinds: dict[str, Schema] = {"id": text, "type": {"enum": ["function", None]}, "index": {}, "function": function}
        call = object_schema(kinds, "function")
        properties: dict[str, Schema] = {
            **dict.fromkeys(MESSAGE, text),
            "role": {"enum": [*ROLES]},
            "images": {"type": ["array", "null"], "items": BASE64.json_schema()},
            "tool_calls": {"type": ["array", "null"], "items": call},
        }
        return array_schema(object_schema(properties, "role"))


def _check_message(name: str, message: Any) -> ValidationIssue | None:
    """Check a message; `_unknown_keys` finds unknown keys."""
    if not isinstance(message, dict):
        return ValidationIssue(name, "type", f"{name} must be an object with role and content")
    if message.get("role") not in ROLES:
        return ValidationIssue(f"{name}.role", "choice", f"{name}.role must be one of {', '.join(ROLES)}")
    for key in ("content", "thinking", "tool_name", "tool_call_id"):
        if not isinstance(text := message.get(key), (str, type(None))):
            return ValidationIssue(f"{name}.{key}", "type", f"{name}.{key} must be a string, not {type_name(text)}")
    if (images := message.get("images")) is not None and (issue := IMAGES.validate(f"{name}.images", images)):
        return issue
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, type(None))):
        return ValidationIssue(f"{name}.tool_calls", "type", f"{name}.tool_calls must be a list")
    checks = (_check_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls or ()))
    return next((issue for issue in checks if issue is not None), None)


def _check_call(name: str, call: Any) -> ValidationIssue | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ValidationIssue(name, "type", f"{name}.function must be an object with name and arguments")
    if not isinstance(function.get("name"), str) or not function["name"]:
        return ValidationIssue(name, "type", f"{name}.function.name must be a string")
    if not isinstance(function.get("arguments"), dict):
        return ValidationIssue(name, "type", f"{name}.function.arguments must be an object")
    if not isinstance(call.get("id"), (str, type(None))) or call.get("type") not in ("function", None):
        return ValidationIssue(name, "type", f"{name}: id must be a string, and type function")
    return None


def _unknown_keys(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the places of unknown keys in validated messages."""
    for i, message in enumerate(messages):
        yield from (f"messages[{i}].{key}" for key in message if key not in MESSAGE)
        for j, call in enumerate(message.get("tool_calls") or ()):
            place = f"messages[{i}].tool_calls[{j}]"
            yield from (f"{place}.{key}" for key in call if key not in CALL)
            yield from (f"{place}.function.{key}" for key in call["function"] if key not in FUNCTION)


SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "seed")
# Options that change no answer here, with their types.
WITHOUT_EFFECT: dict[str, FieldType] = {
    **dict.fromkeys(("num_gpu", "num_thread", "num_batch", "main_gpu", "num_keep"), integer(-MAX_COUNT, MAX_COUNT)),
    **dict.fromkeys(("use_mmap", "use_mlock", "numa", "low_vram", "f16_kv", "logits_all"), Boolean()),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), ANY_NUMBER),  # mirostat itself is refused
}
OPTIONS: dict[str, Field] = {
    f"options.{name}": field
    for name, field in {
        **{name: SAMPLING[name] for name in SAME_OPTIONS},
        "repeat_penalty": SAMPLING["repetition_penalty"],
        "repeat_last_n": Field(integer(-1, MAX_COUNT)),
        "num_ctx": Field(integer(1)),
        "num_predict": Field(MaxTokens(unlimited=(-1, -2))),
        "stop": Field(StopStrings(MAX_STOPS), (), is_secret=True),
        "mirostat": unsupported(0),
        "tfs_z": unsupported(1, 1.0),
        "penalize_newline": unsupported(True),
        "vocab_only": unsupported(False),
        "embedding_only": unsupported(False),
        **{name: Field(kind) for name, kind in WITHOUT_EFFECT.items()},
    }.items()
}
COMMON: dict[str, Field] = {
    "model": Field(Text()),
    "stream": Field(Boolean(), True),
    "options": Field(Options(), {}),
    "format": Field(Either((Enum(("", "json")), AnyObject()), '"json" or a JSON schema')),
    "think": Field(Either((Boolean(), Enum(EFFORTS)), f"true, false or one of {', '.join(EFFORTS)}")),
    "logprobs": Field(Boolean(), False),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS), 0),
    "keep_alive": Field(Either((ANY_NUMBER, Text()), "a duration")),
    "truncate": unsupported(False),  # nothing is truncated: a prompt that does not fit is an error
    "shift": unsupported(False),
}
CHAT: dict[str, Field] = {**COMMON, "messages": Field(ChatMessages(), [], is_secret=True), "tools": Field(Tools(), [])}
GENERATE: dict[str, Field] = {
    **COMMON,
    "prompt": Field(Text(), "", is_secret=True),
    "system": Field(Text(), is_secret=True),
    "raw": Field(Boolean(), False),
    "images": Field(IMAGES, [], is_secret=True),
    "suffix": unsupported(""),
    "template": unsupported(""),
    "context": unsupported([]),
    **dict.fromkeys(("width", "height", "steps"), unsupported(0)),  # of images
}


def parse_chat(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/api/chat`."""
    values, ignored = validate_known(body, CHAT, options)
    messages = values["messages"]
    prompts: list[Prompt] = []
    if messages:
        chat = _chat_options(values, [to_tool(tool["function"]) for tool in values["tools"]])
        prompts.append(Conversation.encode(to_openai(messages), chat))
    return _request(values, ignored, prompts, options, _unknown_keys(messages))


def parse_generate(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/api/generate`: a prompt for the chat template, or a raw one."""
    values, ignored = validate_known(body, GENERATE, options)
    prompt, system = values["prompt"], values["system"]
    prompts: list[Prompt] = []
    if values["raw"]:
        require(not system, "system", "conflict", "raw: true needs the whole prompt in prompt: leave system out")
        require(not values["think"], "think", "conflict", "raw: true takes the prompt as it is: leave think out")
        require(not values["images"], "images", "conflict", "raw: true has no place for images: leave raw out")
        prompts += [prompt] if prompt else []
    elif prompt or values["images"]:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": _with_images(prompt, values["images"], "images")})
        prompts.append(Conversation.encode(messages, _chat_options(values, [])))
    return _request(values, ignored, prompts, options)


def _chat_options(values: Mapping[str, Any], tools: list[Any]) -> ChatOptions:
    think = values["think"]
    effort = "none" if think is False else think if isinstance(think, str) else None
    return chat_options(
        tools, None, parallel=True, effort=effort, template_kwargs={"enable_thinking": True} if think is True else {}
    )


def _request(
    values: Mapping[str, Any],
    ignored: list[str],
    prompts: list[Prompt],
    options: ParseOptions,
    unknown: Iterable[str] = (),
) -> GenerateRequest:
    """Return the record of a body, whose options are validated here."""
    fields = {f"options.{name}": value for name, value in values["options"].items()} | dict.fromkeys(unknown)
    known_values, extra = validate_known(fields, OPTIONS, options)
    ignored += extra + [name for name in map("options.{}".format, WITHOUT_EFFECT) if known_values[name] is not None]
    keep_alive = read_keep_alive(values, ignored, options)
    require(
        values["logprobs"] or not values["top_logprobs"],
        "top_logprobs",
        "conflict",
        "top_logprobs needs logprobs: true",
    )
    params = _sampling_params(values, {name.partition(".")[2]: value for name, value in known_values.items()}, options)
    return GenerateRequest(
        prompts=prompts,
        params=params,
        model=values["model"],
        stream=values["stream"],
        ignored=ignored,
        keep_alive=keep_alive,
        structured_outputs_field="format",
        tool_places=function_places(values.get("tools", ())),
    )


def read_keep_alive(values: Mapping[str, Any], ignored: list[str], options: ParseOptions) -> float | None:
    """Return the seconds that a model stays loaded after the request; without a pool it always stays."""
    keep_alive = values["keep_alive"]
    if keep_alive is None:
        return None
    if not options.has_pool:
        ignored.append("keep_alive")
        return None
    return parse_duration(keep_alive, "keep_alive")


def _sampling_params(values: Mapping[str, Any], fields: dict[str, Any], options: ParseOptions) -> SamplingParams:
    limits, num_ctx, last_n = options.limits, fields["num_ctx"], fields["repeat_last_n"]
    if limits is not None and num_ctx is not None:
        require(
            num_ctx <= limits.max_context,
            "options.num_ctx",
            "range",
            f"options.num_ctx is {num_ctx} and the context of this worker {limits.max_context}: ask for less, or "
            "start the worker with a longer one (--max-context)",
        )
    guided = None
    if (schema := values["format"]) not in (None, ""):
        guided = StructuredOutputsParams(**({"json_object": True} if schema == "json" else {"json": schema}))
    same = {
        **fields,
        "repetition_penalty": fields["repeat_penalty"],
        "repeat_last_n": MAX_COUNT if last_n == -1 else last_n,
    }
    return sampling_params(
        same,
        limits,
        fields["num_predict"],
        structured_outputs=guided,
        logprobs=values["top_logprobs"] if values["logprobs"] else None,
    )


def to_openai(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return validated messages in the form of chat completions.

    A call without an id gets its number in the conversation, so that the prompt of the same messages stays the same; a
    result without one belongs to the first open call of its tool, or of any.
    """
    converted: list[dict[str, Any]] = []
    num_calls, open_calls = 0, list[tuple[str, str]]()  # id and name
    for i, message in enumerate(messages):
        content = _with_images(message.get("content") or "", message.get("images") or (), f"messages[{i}].images")
        result: dict[str, Any] = {"role": message["role"], "content": content}
        if message.get("thinking"):
            result["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            result["tool_calls"], open_calls = [], []
            for call in calls:
                name, arguments = call["function"]["name"], encode_json(call["function"]["arguments"]).decode()
                call_id = call.get("id") or f"call{num_calls:05d}"
                num_calls += 1
                open_calls.append((call_id, name))
                result["tool_calls"].append(function_call(call_id, name, arguments))
        if result["role"] == "tool":
            result |= _close_call(message, open_calls)
        converted.append(result)
    return converted


def _with_images(text: str, images: Sequence[str], place: str) -> Any:
    """Return the content of a message: its images, then its text."""
    return join_parts([*(Image.from_base64(f"{place}[{i}]", image) for i, image in enumerate(images)), text])


def _close_call(message: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> dict[str, str]:
    """Return the id and the name of the call that a result belongs to, and close the call."""
    call_id, name = message.get("tool_call_id"), message.get("tool_name")
    same_id = [call for call in open_calls if call[0] == call_id]
    same_name = [call for call in open_calls if call[1] == name]
    matches = (same_id or same_name or open_calls)[:1]
    if matches:
        open_calls.remove(matches[0])
    default_id, default_name = matches[0] if matches else ("call00000", "")
    keys = {"tool_call_id": call_id or default_id}
    return {**keys, "name": name or default_name} if name or default_name else keys


class Piece(NamedTuple):
    """A part of an answer: text, reasoning or calls."""

    text: str = ""
    thinking: str = ""
    calls: Sequence[dict[str, Any]] = ()


class OllamaPrinter(Printer):
    """Lines of JSON, or one object: the last line, with the whole answer."""

    media_type = "application/x-ndjson"
    ping = b""

    def __init__(self, reply: ReplyState) -> None:
        super().__init__(reply)
        self._call: tuple[ToolCallStart, list[str]] | None = None  # that is not complete, with its arguments
        self._finish_reason: FinishReason | None = None

    @abstractmethod
    def fields(self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the fields of an answer, or of a piece of it."""

    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        pieces = [self.fields(*piece) for event in chat_events(delta) for piece in self._read_event(event)]
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            pieces += [self.fields(*piece) for piece in self._read_call()]
        if delta.logprobs:
            first = pieces[0] if pieces else self.fields()
            pieces[:1] = [{**first, "logprobs": self._logprobs(delta.logprobs)}]
        return b"".join([self._line({**piece, "done": False}) for piece in pieces])

    def _read_event(self, event: ChatEvent) -> Iterator[Piece]:
        """Yield the pieces that an event completes; a call is one piece."""
        if isinstance(event, ToolCallDelta):
            assert self._call is not None
            self._call[1].append(event.arguments)
            return
        yield from self._read_call()
        if isinstance(event, ContentDelta):
            yield Piece(event.text)
        elif isinstance(event, ReasoningDelta):
            yield Piece(thinking=event.text)
        elif isinstance(event, ToolCallStart):
            self._call = event, []

    def _read_call(self) -> Iterator[Piece]:
        """Yield the open call, if there is one; as text if its arguments are truncated."""
        if self._call is None:
            return
        (call, parts), self._call = self._call, None
        text = "".join(parts)
        try:
            arguments = msgspec.json.decode(text)
        except msgspec.DecodeError:
            arguments = None
        if isinstance(arguments, dict):
            yield Piece(calls=({"id": call.id, "function": {"name": call.name, "arguments": arguments}},))
        else:
            yield Piece(call.name + text)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[Any]:
        return chat_logprobs(self.reply.tokenizer, entries)["content"]  # type: ignore[no-any-return]

    def _object(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.reply.request.model or self.reply.model, "created_at": timestamp(time.time()), **fields}

    def _line(self, fields: dict[str, Any]) -> bytes:
        return encode_json(self._object(fields)) + b"\n"

    def end(self) -> bytes:
        return self._line(self._last(self.fields(), self._finish_reason))

    def _last(self, fields: dict[str, Any], finish_reason: FinishReason | None) -> dict[str, Any]:
        """Return the fields of the last line; without a prompt the model was only loaded."""
        if not self.reply.generations:
            reason = "unload" if self.reply.request.keep_alive == 0 else "load"
            return {**fields, "done": True, "done_reason": reason}
        return {**fields, "done": True, "done_reason": finish_reason, **statistics(self.reply)}

    def print_error(self, error: WorkerError) -> bytes:
        return encode_json(error_body(error)) + b"\n"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        answer = answers[0] if answers else Answer()
        pieces = [piece for event in answer.fold.events for piece in self._read_event(event)]
        pieces += self._read_call()
        texts, thoughts, calls = zip(Piece(), *pieces, strict=True)
        fields = self.fields("".join(texts), "".join(thoughts), [call for some in calls for call in some])
        if answer.logprobs:
            fields["logprobs"] = self._logprobs(answer.logprobs)
        return self._object(self._last(fields, answer.finish_reason))


class ChatPrinter(OllamaPrinter):
    """The reply of `/api/chat`."""

    def fields(self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GeneratePrinter(OllamaPrinter):
    """The reply of `/api/generate`."""

    def fields(self, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"response": text, "thinking": thinking} if thinking else {"response": text}


def statistics(reply: ReplyState) -> dict[str, int]:
    """Return counts and durations of a finished reply; waiting is part of the total only."""
    (generation,), usage = reply.generations, reply.usage()
    started_at = generation.started_at + generation.request.queue_s
    return {
        "total_duration": int(SECOND * (time.perf_counter() - reply.started_at)),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt,
        "prompt_cached_count": usage.cached,
        "prompt_eval_duration": int(SECOND * max(0.0, generation.first_token_at - started_at)),
        "eval_count": usage.output,
        "eval_duration": int(SECOND * generation.decode_ms / 1000),
    }


def timestamp(seconds: float) -> str:
    """Return a date in Ollama's form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error in the form that Ollama's clients parse."""
    return {"error": str(error)}


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open, names = settings.ignore_unknown_fields, settings.schema_names
    with_logprobs: Schema = {
        "anyOf": [with_values(top_logprobs={"enum": [0, None]}), with_field("logprobs", const=True)]
    }
    not_raw = with_values(raw={"enum": [False, None]})
    whole = with_values(system={"enum": ["", None]}, think={"enum": [False, None]})
    line: dict[str, Schema] = {"model": TEXT, "created_at": TIME, "done": FLAG}
    message = reply_schema(role={"const": "assistant"}, content=TEXT)
    return {
        "OllamaChatRequest": table_schema(CHAT, names, is_open=is_open) | with_logprobs,
        "OllamaGenerateRequest": {
            **table_schema(GENERATE, names, is_open=is_open),
            **with_logprobs,
            "allOf": [{"anyOf": [not_raw, whole]}],
        },
        "OllamaChatReply": reply_schema(**line, message=message),
        "OllamaGenerateReply": reply_schema(**line, response=TEXT),
        "OllamaError": reply_schema(error=TEXT),
    }


DIALECT = Dialect(
    prefixes=("/api",), error_body=error_body, schemas=_schemas, error_schema="OllamaError",
    takes_any_content_type=True,
    generate=(
        GenerateRoute("/api/chat", parse_chat, ChatPrinter, Operation(
            summary="Complete a conversation (Ollama)", request="OllamaChatRequest", reply="OllamaChatReply",
            event="OllamaChatReply"), unloads=True),
        GenerateRoute("/api/generate", parse_generate, GeneratePrinter, Operation(
            summary="Answer a prompt (Ollama)", request="OllamaGenerateRequest", reply="OllamaGenerateReply",
            event="OllamaGenerateReply"), unloads=True),
    ),
)  # fmt: skip
