"""The records that request bodies become: token ids, conversations with their tools, the request that every dialect
makes, the requests for pooling models, and the defaults of a model.

Messages come from chat completions, jobs and `/apply-template`. Answers come back as clients keep them: without
content, with a refusal, with calls of custom tools. A record passes between processes: a large body is parsed in
another one (`body_process`). So large fields are one piece of bytes or text: token ids are packed, messages
are JSON for the chat template. That process imports this module and the dialects, so they import little.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import InvalidRequestError, ModelFileError
from ..sampling_params import MAX_COUNT, SamplingDefaults, SamplingParams, StructuredOutputsParams
from ..tokenizer.chat.events import IMAGE, ChatOptions, Image, Tool, thinking_variables, without_images
from .json_schema import TEXT, Schema, array_schema, object_schema, or_null
from .schema import (
    CHUNK_ITEMS,
    BoundedObject,
    Field,
    FieldType,
    ValidationIssue,
    integer,
    require,
    type_name,
    unsupported_part,
)
from .settings import model_name

BYTES_PER_TOKEN, IMAGE_TOKENS = 4, 512  # estimates
DETAILS = ("auto", "low", "high", "original")  # of images: all but "low" are alike
IMAGE_URL = "^(data:image[/;]|https?://)"
MAX_INPUTS = 2048  # of a request to a pooling model
MAX_TOKEN_ID = (1 << 31) - 1
DIMENSIONS = Field(integer(1, 1 << 20))
NOT_IN_HEADERS = re.compile(r"[^!-~]")
MAX_TOOLS = 512
MAX_TOOL_NAME = 256
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BOUNDED_OBJECT = BoundedObject(max_values=100_000, max_depth=100)
ROLES = ("system", "developer", "user", "assistant", "tool")
DEFAULTS_SUFFIX, MAX_DEFAULTS_BYTES = ".defaults.json", 1 << 20
OPTION_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}  # of Ollama, which differ
PARAMETERS = (  # of the defaults of a model
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n"),
    *("seed", "stop", "num_predict", "num_ctx"),
)
CUSTOM = ("name", "input")  # of a call of a custom tool


class PackedIds(msgspec.Struct, frozen=True, tag=True):
    """Token ids as the bytes of 64-bit integers."""

    data: bytes

    @classmethod
    def pack(cls, ids: list[int]) -> PackedIds:
        try:
            return cls(array("q", ids).tobytes())
        except OverflowError:  # past any vocabulary in any case
            return cls(array("q", [min(token, MAX_COUNT) for token in ids]).tobytes())

    def __len__(self) -> int:
        return len(self.data) // 8

    def view(self) -> memoryview[int]:
        return memoryview(self.data).cast("q")

    def max(self) -> int:
        """Return the largest id, 0 of none; a chunk at a time, so that other threads get the interpreter."""
        ids = self.view()
        return max((max(ids[at : at + CHUNK_ITEMS]) for at in range(0, len(ids), CHUNK_ITEMS)), default=0)


class Conversation(msgspec.Struct, frozen=True, tag=True):
    """Validated messages as JSON, with the roles that chat templates know, and the UTF-8 bytes of their text."""

    messages: bytes
    num_bytes: int
    options: ChatOptions = ChatOptions()

    @classmethod
    def encode(cls, messages: list[Any], options: ChatOptions | None = None) -> Conversation:
        """`messages` may have images as parts of their content; they go into the options."""
        options, images = options or ChatOptions(), list[Image]()
        messages = normalize_messages(messages, images)
        size = num_bytes(messages) + sum(num_bytes([tool.description, tool.parameters]) for tool in options.tools)
        try:
            msgspec.msgpack.encode(options)  # as it passes between processes: a small body is refused alike
        except OverflowError:
            raise InvalidRequestError("an integer in tools or variables has more than 64 bits", "tools") from None
        size += IMAGE_TOKENS * BYTES_PER_TOKEN * len(images)
        return cls(msgspec.json.encode(messages), size, replace(options, images=images) if images else options)


Prompt = str | PackedIds | Conversation


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed body of every dialect: prompts, or one conversation, and how to answer them."""

    prompts: list[Prompt]
    params: SamplingParams
    model: str | None = None
    n: int = 1
    stream: bool = False
    priority: int = 0
    timeout_ms: int | None = None
    keep_alive: float | None = None  # seconds that the model stays loaded; infinite: for ever
    cache_salt: str | None = None  # requests with another one share no cached blocks
    lora: list[tuple[int, float]] | None = None  # adapters by their ids, and their scales
    is_scored_only: bool = False  # the prompt's log-probabilities are all that is wanted
    structured_outputs_field: str = "structured_outputs"  # what the body calls it, for errors
    messages_field: str = "messages"  # likewise
    tool_places: list[str] = []  # of the schemas of the tools, likewise
    values: dict[str, Any] = {}  # what the dialect needs for its reply
    ignored: list[str] = []  # names of unknown fields
    skipped: list[str] = []  # types of tools that this worker does not have

    @property
    def timeout_s(self) -> float | None:
        return None if self.timeout_ms is None else self.timeout_ms / 1000

    def time_left(self, started_at: float) -> float | None:
        """Return what is left of the timeout of a request that came then, as time.perf_counter() gives it."""
        return None if self.timeout_s is None else max(0.001, self.timeout_s - (time.perf_counter() - started_at))

    @property
    def chat(self) -> ChatOptions | None:
        """The options of a chat; None where prompts are completed."""
        first = self.prompts[0]
        return first.options if isinstance(first, Conversation) else None

    def notice_headers(self) -> dict[str, str]:
        """Return reply headers that name ignored fields and skipped tools."""
        return header_lists({"x-ignored-fields": self.ignored, "x-skipped-tools": self.skipped})


class Inputs(msgspec.Struct, frozen=True):
    """Texts, or sequences of token ids one after another."""

    texts: list[str] = []
    lengths: list[int] = []  # of the sequences
    ids: bytes = b""  # 32-bit integers

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """Return the inputs of a valid `input`; an id past any vocabulary stays past it."""
        if isinstance(value, str):
            return cls([value])
        if not value or isinstance(value[0], str):
            return cls(value)
        sequences = value if isinstance(value[0], list) else [value]
        packed = array("i", (min(int(token), MAX_TOKEN_ID) for ids in sequences for token in ids))
        return cls(lengths=list(map(len, sequences)), ids=packed.tobytes())

    def __len__(self) -> int:
        return len(self.texts) or len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """The tokens, estimated for texts."""
        return len(self.texts) + num_bytes(self.texts) // BYTES_PER_TOKEN if self.texts else sum(self.lengths)


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs, and the form of their embeddings."""

    inputs: Inputs
    model: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    input_type: str | None = None  # "query" or "document", instead of it
    truncate: bool = False
    is_base64: bool = False
    keep_alive: float | None = None
    ignored: list[str] = []  # names of unknown fields

    def notice_headers(self) -> dict[str, str]:
        return header_lists({"x-ignored-fields": self.ignored})


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of texts to score: each document with the query, or with its own query if there are several."""

    queries: list[str]
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    returns_documents: bool = False
    truncate: bool = False
    ignored: list[str] = []  # names of unknown fields

    def notice_headers(self) -> dict[str, str]:
        return header_lists({"x-ignored-fields": self.ignored})

    @property
    def num_tokens(self) -> int:
        """The tokens, estimated."""
        repeats = 1 if len(self.queries) > 1 else len(self.documents)
        return (repeats * num_bytes(self.queries) + num_bytes(self.documents)) // BYTES_PER_TOKEN + len(self.documents)


def header_lists(named: Mapping[str, list[str]]) -> dict[str, str]:
    """Return headers that list values, without empty ones."""
    return {name: NOT_IN_HEADERS.sub("?", ",".join(values))[:1_000] for name, values in named.items() if values}


def num_bytes(value: Any) -> int:
    """Return the UTF-8 bytes of all text in a prompt or in messages."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(num_bytes, value))
    return sum(map(num_bytes, value.values())) if isinstance(value, dict) else 0


def estimate_tokens(prompt: Prompt, context: int) -> int:
    """Estimate the tokens of a text or of messages that fits the context; return the number of token ids."""
    return len(prompt) if isinstance(prompt, PackedIds) else min(prompt_size(prompt) // BYTES_PER_TOKEN + 1, context)


def prompt_size(prompt: Prompt) -> int:
    """Return the bytes of a text or of messages, or the number of token ids."""
    if isinstance(prompt, PackedIds):
        return len(prompt)
    return prompt.num_bytes if isinstance(prompt, Conversation) else num_bytes(prompt)


def grammar_size(params: StructuredOutputsParams | None) -> int:
    """Return the characters of a schema, an expression, a grammar or choices."""
    if params is None or params.json_object:
        return 0
    return sum(map(len, params.choice)) if params.choice is not None else len(getattr(params, params.kind))


@dataclass(frozen=True, slots=True)
class Messages(FieldType):
    """A conversation: known roles, each with text, or parts: text and images. Other keys are left to the template.

    The assistant's may have no content, refusals and tool calls.
    """

    part_kinds: tuple[str, ...] = ("text", "image_url")  # but of the assistant's

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, list) or not value:
            return ValidationIssue(name, "type", f"{name} must be a list of at least one message")
        checks = (_check_message(f"{name}[{i}]", message, self.part_kinds) for i, message in enumerate(value))
        issue = next((issue for issue in checks if issue is not None), None)
        return None if issue is None else issue._replace(field=name)

    def json_schema(self) -> Schema:
        text = object_schema({"type": {"const": "text"}, "text": TEXT}, "text", is_open=True)
        refusal = object_schema({"type": {"const": "refusal"}, "refusal": TEXT}, "type", "refusal", is_open=True)
        roles = [role for role in ROLES if role != "assistant"]
        url: dict[str, Schema] = {"url": {"type": "string", "pattern": IMAGE_URL}, "detail": {"enum": [*DETAILS, None]}}
        image: dict[str, Schema] = {"type": {"const": "image_url"}, "image_url": object_schema(url, "url")}
        kinds = {"text": text, "image_url": object_schema(image, "type", "image_url", is_open=True)}
        content: Schema = {"anyOf": [TEXT, array_schema({"anyOf": [kinds[kind] for kind in self.part_kinds]})]}
        custom = object_schema({"name": {**TEXT, "minLength": 1}, "input": TEXT}, "name", "input", is_open=True)
        calls = [
            object_schema({"type": {"not": {"const": "custom"}}}, is_open=True),
            object_schema({"type": {"const": "custom"}, "custom": custom}, "type", "custom", is_open=True),
        ]
        answer: dict[str, Schema] = {
            "role": {"const": "assistant"},
            "refusal": or_null(TEXT),
            "content": {"anyOf": [TEXT, array_schema({"anyOf": [text, refusal]}), {"type": "null"}]},
            "tool_calls": or_null(array_schema({"anyOf": calls})),
        }
        other = object_schema({"role": {"enum": roles}, "content": content}, "role", "content", is_open=True)
        return array_schema({"anyOf": [other, object_schema(answer, "role", is_open=True)]}, 1)


def _check_message(name: str, message: Any, part_kinds: Sequence[str]) -> ValidationIssue | None:
    if not isinstance(message, dict):
        actual = type_name(message)
        return ValidationIssue(name, "type", f"{name} must be an object with role and content, not {actual}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return ValidationIssue(name, "choice", f"{name}.role must be one of {', '.join(ROLES)}")
    is_answer = role == "assistant"
    is_text = isinstance(content, str) or (content is None and is_answer)
    if not is_text:
        parts: list[Any] = content if isinstance(content, list) else [None]
        allowed = ("text", "refusal") if is_answer else part_kinds
        bad = next((i for i, part in enumerate(parts) if not _is_part(part, allowed)), None)
        if bad is not None:
            kind = parts[bad].get("type") if isinstance(parts[bad], dict) else None
            usual = ValidationIssue(
                name, "type", f"{name}.content must be text, or a list of parts of the types {' and '.join(allowed)}"
            )
            return unsupported_part(f"{name}.content[{bad}].type", kind) or usual
    return _check_answer(name, message) if is_answer else None


def _is_part(part: Any, kinds: Sequence[str]) -> bool:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in kinds:
        return False
    if kind != "image_url":
        return isinstance(part.get(kind), str)
    source = part.get(kind)
    is_known = isinstance(source, dict) and source.keys() <= {"url", "detail"}
    return is_known and isinstance(source.get("url"), str) and source.get("detail") in (*DETAILS, None)


def _check_answer(name: str, message: dict[str, Any]) -> ValidationIssue | None:
    refusal, calls = message.get("refusal"), message.get("tool_calls")
    if not isinstance(refusal, (str, type(None))):
        return ValidationIssue(name, "type", f"{name}.refusal must be a string, not {type_name(refusal)}")
    if not isinstance(calls, (list, type(None))):
        return ValidationIssue(name, "type", f"{name}.tool_calls must be a list, not {type_name(calls)}")
    for i, call in enumerate(calls or ()):
        place = f"{name}.tool_calls[{i}]"
        if not isinstance(call, dict):
            return ValidationIssue(name, "type", f"{place} must be an object, not {type_name(call)}")
        if call.get("type") == "custom" and not _is_custom(call.get("custom")):
            return ValidationIssue(name, "type", f"{place}.custom must be an object with name and input")
    return None


def _is_custom(call: Any) -> bool:
    return isinstance(call, dict) and bool(call.get("name")) and all(isinstance(call.get(k), str) for k in CUSTOM)


def normalize_messages(messages: list[Any], images: list[Image]) -> list[Any]:
    """Return validated messages as chat templates expect them; `images` gets their images.

    Parts are joined, with a mark for each image, `developer` is `system`, a refusal is text of the answer, the call of
    a custom tool is a function call with one argument, `input`.
    """
    normalized = []
    for i, message in enumerate(messages):
        if message["role"] == "developer":
            message = {**message, "role": "system"}
        if isinstance(parts := message.get("content"), list):
            texts = [_part_text(part, f"messages[{i}].content[{j}]", images) for j, part in enumerate(parts)]
            message = {**message, "content": "".join(texts)}
        elif parts is not None and IMAGE in parts:
            message = {**message, "content": without_images(parts)}
        normalized.append(_normalize_answer(message) if message["role"] == "assistant" else message)
    return normalized


def _part_text(part: Any, place: str, images: list[Image]) -> str:
    """Return the text of a part of a message; an image, which may have been read already, is added to `images`."""
    if isinstance(part, str):
        return without_images(part)
    if not isinstance(part, Image):
        kind = part.get("type", "text")
        if kind != "image_url":
            return without_images(part[kind])
        part = Image.from_url(place, part[kind]["url"], part[kind].get("detail"))
    images.append(part)
    return IMAGE


def join_parts(parts: Sequence[str | Image], separator: str = "") -> Any:
    """Return the content of a message: a text, if there is no image."""
    if any(isinstance(part, Image) for part in parts):
        return parts
    return separator.join(map(str, parts))


def _normalize_answer(message: dict[str, Any]) -> dict[str, Any]:
    calls, refusal = message.get("tool_calls"), message.get("refusal")
    normal = {key: value for key, value in message.items() if key != "refusal"}
    if refusal or not (normal.get("content") or calls):
        normal["content"] = (normal.get("content") or "") + without_images(refusal or "")
    if calls:
        normal["tool_calls"] = [custom_call(call) if call.get("type") == "custom" else call for call in calls]
    return normal


def custom_call(call: dict[str, Any]) -> dict[str, Any]:
    """Convert the call of a custom tool to a function call."""
    return function_call(call.get("id"), call["custom"]["name"], input_arguments(call["custom"]["input"]))


def input_arguments(text: str) -> str:
    """Return the arguments of a custom tool as a function."""
    return msgspec.json.encode({"input": text}).decode()


def function_call(call_id: Any, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form of chat completions, which templates expect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


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
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
            "strict": {"type": ["boolean", "null"]},
        }
        function = object_schema(properties, "name", is_open=True)
        tool = object_schema({"type": {"const": "function"}, "function": function}, "type", "function", is_open=True)
        return {**array_schema(tool), "maxItems": MAX_TOOLS}


def check_function(name: str, function: Any) -> ValidationIssue | None:
    """Check the description of a function."""
    if not isinstance(function, dict):
        return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(function)}")
    called = function.get("name")
    if not isinstance(called, str) or not 1 <= len(called) <= MAX_TOOL_NAME:
        return ValidationIssue(name, "length", f"{name}.name must have 1 to {MAX_TOOL_NAME} characters")
    for key, kind, article in (("description", str, "a string"), ("strict", bool, "true or false")):
        if function.get(key) is not None and not isinstance(function[key], kind):
            return ValidationIssue(name, "type", f"{name}.{key} must be {article}, not {type_name(function[key])}")
    parameters = function.get("parameters")
    return None if parameters is None else BOUNDED_OBJECT.validate(f"{name}.parameters", parameters)


def to_tool(function: Mapping[str, Any]) -> Tool:
    """Convert a validated description of a function to a tool."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description") or "", parameters, bool(function.get("strict")))


def function_places(tools: Sequence[Any]) -> list[str]:
    """Return the places of the schemas of validated tools, for errors."""
    return [f"tools[{i}].function.parameters" for i in range(len(tools))]


def named_tool(choice: Any) -> str | None:
    """Return the name in a choice of one function."""
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    called = function.get("name") if isinstance(function, dict) else None
    return called if isinstance(called, str) else None


def chat_options(
    tools: list[Tool],
    choice: Any,
    *,
    parallel: bool | None,
    effort: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    thinking_budget: int | None = None,
) -> ChatOptions:
    """Return the options of a chat; raise for a choice without its tool."""
    name = named_tool(choice)
    mode: Any = "required" if name is not None else choice or "auto"
    require(mode != "required" or bool(tools), "tool_choice", "conflict", f"tool_choice {mode} needs tools")
    require(
        name is None or name in [tool.name for tool in tools],
        "tool_choice",
        "choice",
        f"tool_choice names {name!r:.100}, which is not among the tools",
    )
    variables = thinking_variables(template_kwargs, effort)
    return ChatOptions(tools, mode, name, parallel is not False, variables, thinking_budget)


class DefaultMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message before the messages of a request."""

    role: Literal["system", "user", "assistant"]
    content: str


class ModelDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file NAME.defaults.json beside a model: what requests start from that do not say otherwise."""

    system: str | None = None
    parameters: dict[str, Any] = {}  # by Ollama's names
    messages: list[DefaultMessage] = []

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ModelDefaults:
        """Return the defaults of the fields of a request that are not None; raise for one that cannot be used."""
        try:
            defaults = msgspec.convert({name: value for name, value in fields.items() if value is not None}, cls)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"the defaults cannot be used: {error}", "parameters") from None
        defaults.sampling()
        limit = MAX_DEFAULTS_BYTES // 8  # indented, and with the defaults of another model, the file has more
        message = f"system and messages have more than {limit} bytes"
        require(len(msgspec.json.encode(defaults)) <= limit, "messages", "length", message)
        return defaults

    @classmethod
    def read(cls, path: Path) -> ModelDefaults:
        """Return the defaults of a model; raise if their file cannot be used."""
        file = defaults_file(path)
        try:
            data = file.read_bytes() if file.exists() else b"{}"
            defaults = msgspec.json.decode(data[: MAX_DEFAULTS_BYTES + 1], type=cls)
            defaults.sampling()
        except (OSError, msgspec.DecodeError, InvalidRequestError) as error:
            raise ModelFileError(f"{file.name} cannot be used: {error}") from None
        return defaults

    def merge(self, other: ModelDefaults) -> ModelDefaults:
        """Return these defaults with what others replace: parameters one by one."""
        system = self.system if other.system is None else other.system
        return ModelDefaults(system, self.parameters | other.parameters, other.messages or self.messages)

    def sampling(self) -> dict[str, Any]:
        """Return the parameters by the names of `SamplingParams`; raise for one that is unknown or out of bounds."""
        if unknown := [name for name in self.parameters if name not in PARAMETERS]:
            known = ", ".join(PARAMETERS)
            raise InvalidRequestError(f"{unknown[0][:100]!r} is no default of a model: use {known}", "parameters")
        if "num_ctx" in self.parameters and self.context is None:
            raise InvalidRequestError("num_ctx must be a whole number above 0", "num_ctx")
        stated = {OPTION_NAMES.get(name, name): value for name, value in self.parameters.items() if name != "num_ctx"}
        if stated.get("max_tokens") in (-1, -2):  # no limit
            del stated["max_tokens"]
        if stated.get("repeat_last_n") == -1:  # the whole context
            stated["repeat_last_n"] = MAX_COUNT
        params = SamplingParams(**stated)
        return {name: getattr(params, name) for name in stated}

    @property
    def context(self) -> int | None:
        """The longest context."""
        length = self.parameters.get("num_ctx")
        return length if isinstance(length, int) and length > 0 else None

    def sampling_over(self, base: SamplingDefaults) -> SamplingDefaults:
        """Return the sampling defaults of the model with these parameters instead."""
        values = self.sampling()
        sources = base.sources | dict.fromkeys(values, f"NAME{DEFAULTS_SUFFIX}")
        return replace(base, values=base.values | values, sources=sources)


def defaults_file(path: Path) -> Path:
    """Return the path of the defaults of a model."""
    return path.with_name(model_name(f"./{path.name}") + DEFAULTS_SUFFIX)


class NamedModel(msgspec.Struct):
    """What a body is read for before its model is known."""

    model: str | None = None


def model_of(body: bytes) -> str | None:
    """Return the model that a body names; one that is not valid is left to its parser."""
    try:
        return msgspec.json.decode(body, type=NamedModel).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
