"""OpenAI's Responses: `/v1/responses`. The worker keeps no state: a request holds the whole conversation.

A custom tool is a function with one string, `input`; the tools of a namespace have its name before theirs. Items of the
input become messages: consecutive reasoning, text and calls are one assistant message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import msgspec

from ...errors import NotFoundError
from ...sampling_params import MAX_LOGPROBS
from ...tokenizer.chat.events import Image, Tool
from ..bodies import (
    DETAILS,
    EFFORTS,
    IMAGE_URL,
    MAX_TOOL_NAME,
    MAX_TOOLS,
    Conversation,
    GenerateRequest,
    chat_options,
    check_function,
    function_call,
    input_arguments,
    join_parts,
    to_tool,
)
from ..dialect import Call, Dialect, Front, GenerateRoute, Handler, Operation, Route
from ..json_schema import COUNT, TEXT, Schema, array_schema, object_schema, or_null, reply_schema
from ..lark_regex import lark_to_regex
from ..schema import (
    AnyObject,
    Boolean,
    Enum,
    Field,
    FieldType,
    ParseOptions,
    Text,
    ValidationError,
    ValidationIssue,
    field_schema,
    integer,
    require,
    sampling_params,
    table_schema,
    type_name,
    unsupported,
    unsupported_part,
    validate_known,
)
from ..settings import ServerSettings
from .openai import COMMON, GUIDED, REASONING, ResponseFormat, error_body, guiding_field, structured_outputs
from .openai_responses_printer import REASONING_PREFIX, ResponsesPrinter, print_overflow

NO_STATE = "this worker keeps no responses: send the whole conversation as input"
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
ITEMS = "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning"


class Input(FieldType):
    """A text, or items; they become messages."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, str):
            return None
        if not isinstance(value, list) or not value:
            return ValidationIssue(name, "type", f"{name} must be a text, or a list of at least one item")
        try:
            _ItemReader().read(name, value)
        except ValidationError as error:
            return error.issues[0]._replace(field=name)
        return None

    def json_schema(self) -> Schema:
        text = object_schema({"type": {"enum": [*TEXT_PARTS]}, "text": TEXT}, "type", "text", is_open=True)
        refusal = object_schema({"type": {"const": "refusal"}, "refusal": TEXT}, "type", "refusal", is_open=True)
        picture = {"type": {"const": "input_image"}, "image_url": {"type": "string", "pattern": IMAGE_URL}}
        image = object_schema({**picture, "detail": {"enum": [*DETAILS, None]}}, *picture)
        content: Schema = {"anyOf": [TEXT, array_schema({"anyOf": [text, refusal, image]})]}
        name: Schema = {"type": "string", "minLength": 1}
        pieces = or_null(array_schema(object_schema({"text": TEXT}, "text", is_open=True)))
        kinds: dict[str, dict[str, Schema]] = {
            "function_call": {"call_id": TEXT, "name": name, "arguments": TEXT},
            "custom_tool_call": {"call_id": TEXT, "name": name, "input": TEXT},
            "function_call_output": {"call_id": TEXT, "output": content},
            "custom_tool_call_output": {"call_id": TEXT, "output": content},
        }
        reasoning: dict[str, Schema] = {
            "type": {"const": "reasoning"},
            "summary": pieces,
            "content": pieces,
            "encrypted_content": or_null(TEXT),
        }
        message: dict[str, Schema] = {
            "type": {"enum": ["message", None]},
            "role": {"enum": [*ROLES]},
            "content": content,
        }
        items = [
            object_schema(message, "role", "content", is_open=True),
            object_schema(reasoning, "type", is_open=True),
        ]
        for kind, fields in kinds.items():
            properties = {"type": {"const": kind}, **fields}
            extra = {"namespace": or_null(TEXT)} if "name" in fields else {}
            items.append(object_schema({**properties, **extra}, *properties, is_open=True))
        return {"anyOf": [TEXT, array_schema({"anyOf": items}, 1)]}

    def coerce(self, value: Any) -> list[dict[str, Any]]:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        return _ItemReader().read("input", value)


class _ItemReader:
    """Makes messages of items."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None  # the assistant's message that further items belong to

    def read(self, name: str, items: list[Any]) -> list[dict[str, Any]]:
        for i, item in enumerate(items):
            self._read_item(f"{name}[{i}]", item)
        return self._messages

    def _read_item(self, name: str, item: Any) -> None:
        _require(isinstance(item, dict), name, "type", f"must be an object, not {type_name(item)}")
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "message":
            self._read_message(name, item)
        elif kind == "reasoning":
            self._part("reasoning_content", _reasoning(name, item))
        elif kind == "function_call":
            self._add_call(name, item, _text(name, item, "arguments"))
        elif kind == "custom_tool_call":
            self._add_call(name, item, input_arguments(_text(name, item, "input")))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._answer = None
            content = _content(f"{name}.output", item.get("output"))
            self._messages.append({"role": "tool", "tool_call_id": _text(name, item, "call_id"), "content": content})
        else:
            _require(kind != "item_reference", name, "unsupported", f"refers to a stored item: {NO_STATE}")
            _require(False, f"{name}.type", "unsupported", f"is {kind!r:.100}: use one of {ITEMS}")

    def _read_message(self, name: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        _require(role in ROLES, f"{name}.role", "choice", f"must be one of {', '.join(ROLES)}")
        content = _content(f"{name}.content", item.get("content"))
        if role == "assistant":
            _require(isinstance(content, str), f"{name}.content", "unsupported", "has an image, in an answer")
            self._part("content", content)
        else:
            self._answer = None
            self._messages.append({"role": role, "content": content})

    def _part(self, key: str, text: str) -> None:
        """Add reasoning or content; begin a new message if the last one already has a later part."""
        later = ("reasoning_content", "content", "tool_calls")
        answer = self._answer
        if answer is None or any(answer.get(part) for part in later[later.index(key) :]):
            answer = self._answer = {"role": "assistant", "content": ""}
            self._messages.append(answer)
        answer[key] = text

    def _add_call(self, name: str, item: dict[str, Any], arguments: str) -> None:
        called, space = _text(name, item, "name"), item.get("namespace")
        _require(bool(called), f"{name}.name", "length", "is empty")
        _require(space is None or isinstance(space, str), f"{name}.namespace", "type", "must be a string")
        if self._answer is None:
            self._part("content", "")
        assert self._answer is not None
        call = function_call(_text(name, item, "call_id"), full_name(space, called), arguments)
        self._answer.setdefault("tool_calls", []).append(call)


def full_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool in the prompt."""
    joint = "" if not namespace or namespace.endswith("_") else "__"
    return f"{namespace or ''}{joint}{name}"


def _require(holds: bool, name: str, constraint: str, message: str) -> None:
    require(holds, name, constraint, f"{name} {message}")


def _text(name: str, item: dict[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        _require(False, f"{name}.{key}", "type", f"must be a string, not {type_name(value)}")
    return str(value)


def _content(name: str, content: Any) -> Any:
    """Return the text and the images of a message, or of the output of a call."""
    if isinstance(content, str):
        return content
    _require(isinstance(content, list), name, "type", f"must be a text, or a list of parts, not {type_name(content)}")
    parts: list[str | Image] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image":
            parts.append(_image(f"{name}[{i}]", part))
            continue
        key = "refusal" if kind == "refusal" else "text"
        is_text = kind in TEXT_PARTS or key == "refusal"
        place = f"{name}[{i}].type"
        if not is_text and (issue := unsupported_part(place, kind)) is not None:
            raise ValidationError([issue])
        _require(is_text, place, "unsupported", f"must be {', '.join(TEXT_PARTS)}, refusal or input_image")
        parts.append(_text(f"{name}[{i}]", part, key))
    return join_parts(parts)


def _image(name: str, part: dict[str, Any]) -> Image:
    unknown = next((key for key in part if key not in ("type", "image_url", "detail")), None)
    _require(unknown is None, f"{name}.{unknown}"[:200], "unsupported", f"cannot be used: {NO_STATE}")
    _require(part.get("detail") in (*DETAILS, None), f"{name}.detail", "choice", f"must be one of {', '.join(DETAILS)}")
    return Image.from_url(name, _text(name, part, "image_url"), part.get("detail"))


def _reasoning(name: str, item: dict[str, Any]) -> str:
    """Return the reasoning of an item: from this worker's own record, its content, or its summary."""
    pieces = {}
    for key in ("content", "summary"):
        parts = item.get(key) or []
        is_list = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
        _require(is_list, f"{name}.{key}", "type", "must be a list of parts")
        pieces[key] = "\n\n".join([_text(f"{name}.{key}[{i}]", part, "text") for i, part in enumerate(parts)])
    kept = item.get("encrypted_content")
    _require(kept is None or isinstance(kept, str), f"{name}.encrypted_content", "type", "must be a string")
    if kept is not None and kept.startswith(REASONING_PREFIX):
        try:
            return base64.b64decode(kept.removeprefix(REASONING_PREFIX), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            pass  # made elsewhere
    return pieces["content"] or pieces["summary"]


TOOL_TYPES = ("function", "custom", "namespace")
MAX_DEFINITION = 20_000  # characters of a custom tool's grammar
MAX_GRAMMARS = 16
INCLUDABLE = (  # the others are of tools that this worker does not have
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)


class ResponseTools(FieldType):
    """Functions and custom tools, in namespaces too; tools of other types are skipped."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if _count_grammars(value) > MAX_GRAMMARS:
            return ValidationIssue(name, "length", f"{name} has more than {MAX_GRAMMARS} grammars")
        issue = _check_tools(name, value, TOOL_TYPES)
        return None if issue is None else issue._replace(field=name)

    def json_schema(self) -> Schema:
        named: dict[str, Schema] = {
            "name": {"type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME},
            "description": or_null(TEXT),
            "strict": or_null({"type": "boolean"}),
        }
        text = object_schema({"type": {"const": "text"}}, "type", is_open=True)
        grammar = object_schema(
            {"type": {"const": "grammar"}, "syntax": {"enum": ["lark", "regex"]}, "definition": TEXT},
            "type",
            "syntax",
            "definition",
            is_open=True,
        )
        parameters = or_null({"type": "object"})
        forms: list[Schema] = [
            object_schema(
                {"type": {"const": "function"}, **named, "parameters": parameters}, "type", "name", is_open=True
            ),
            object_schema(
                {
                    "type": {"const": "custom"},
                    **named,
                    "parameters": parameters,
                    "format": {"anyOf": [text, grammar, {"type": "null"}]},
                },
                "type",
                "name",
                is_open=True,
            ),
        ]
        skipped = object_schema({"type": {"type": "string", "not": {"enum": [*TOOL_TYPES]}}}, "type", is_open=True)
        inner: Schema = {**array_schema({"anyOf": [*forms, skipped]}), "maxItems": MAX_TOOLS}
        space = {"type": {"const": "namespace"}, **named, "tools": or_null(inner)}
        namespace = object_schema(space, "type", "name", is_open=True)
        return {**array_schema({"anyOf": [*forms, namespace, skipped]}), "maxItems": MAX_TOOLS}


def _count_grammars(tools: Any) -> int:
    specs = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    inner = sum(_count_grammars(tool["tools"]) for tool in specs if tool.get("type") == "namespace" and "tools" in tool)
    return inner + sum(isinstance(tool.get("format"), dict) for tool in specs)


def _check_tools(name: str, tools: Any, types: Sequence[str]) -> ValidationIssue | None:
    """Check tools; ignore tools of other types."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        return ValidationIssue(name, "type", f"{name} must be a list of at most {MAX_TOOLS} tools")
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        issue, here = None, f"{name}[{i}]"
        if not isinstance(kind, str) or (kind in TOOL_TYPES and kind not in types):
            return ValidationIssue(name, "type", f"{here}.type must be {', '.join(types)}, or the type of another tool")
        if kind == "namespace":
            issue = check_function(here, {**tool, "parameters": None})
            if issue is None and tool.get("tools") is not None:
                issue = _check_tools(f"{here}.tools", tool["tools"], TOOL_TYPES[:2])
        elif kind in types:
            issue = check_function(here, tool)
            if issue is None and kind == "custom":
                issue = _check_format(f"{here}.format", tool.get("format"))
        if issue is not None:
            return issue
    return None


def _check_format(name: str, value: Any) -> ValidationIssue | None:
    """Check the format of a custom tool's input."""
    if value is None or (isinstance(value, dict) and value.get("type") == "text"):
        return None
    if not isinstance(value, dict) or value.get("type") != "grammar":
        return ValidationIssue(name, "choice", f"{name}.type must be text or grammar")
    definition = value.get("definition")
    if value.get("syntax") not in ("lark", "regex") or not isinstance(definition, str):
        return ValidationIssue(name, "choice", f"{name} must have the syntax lark or regex, and a definition")
    if len(definition) > MAX_DEFINITION:
        return ValidationIssue(name, "length", f"{name}.definition has more than {MAX_DEFINITION} characters")
    try:
        _pattern(value)
    except ValueError as error:
        return ValidationIssue(name, "invalid", f"{name}.definition cannot be used: {error}")
    return None


def _pattern(value: Mapping[str, Any]) -> str:
    """Return the regular expression of a grammar; raise a ValueError where it has none."""
    return lark_to_regex(value["definition"]) if value["syntax"] == "lark" else str(value["definition"])


def custom_tool(tool: Mapping[str, Any]) -> Tool:
    """Return a custom tool as a function whose one argument is its input."""
    description, form = tool.get("description") or "", tool.get("format") or {}
    argument: Schema = {"type": "string"}
    if form.get("type") == "grammar":
        described = f"It has the form of this {form['syntax']} definition:\n{form['definition']}"
        argument = {**argument, "description": described, "pattern": f"^(?:{_pattern(form)})$"}
    return Tool(tool["name"], description, object_schema({"input": argument}, "input"), strict=True)


class ResponseToolChoice(FieldType):
    """Auto, none, required, one required tool, or a set of allowed tools."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if value in ("auto", "none", "required") if isinstance(value, str) else _is_named(value):
            return None
        if isinstance(value, dict) and value.get("type") == "allowed_tools" and value.get("mode") in ALLOWED_MODES:
            tools = value.get("tools")
            if isinstance(tools, list) and tools and all(map(_is_named, tools)):
                return None
        message = (
            f"{name} must be auto, none, required, a function or custom tool by its type and name, or allowed_tools "
            "with a mode and such tools"
        )
        return ValidationIssue(name, "choice", message)

    def json_schema(self) -> Schema:
        named = object_schema({"type": {"enum": ["function", "custom"]}, "name": TEXT}, "type", "name", is_open=True)
        allowed: dict[str, Schema] = {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": [*ALLOWED_MODES]},
            "tools": array_schema(named, 1),
        }
        return {
            "anyOf": [{"enum": ["auto", "none", "required"]}, named, object_schema(allowed, *allowed, is_open=True)]
        }


def _is_named(value: Any) -> bool:
    return (
        isinstance(value, dict) and value.get("type") in ("function", "custom") and isinstance(value.get("name"), str)
    )


@dataclass(frozen=True, slots=True)
class Settings(FieldType):
    """An object of settings; each is one of a few values, or has its own type."""

    fields: Mapping[str, FieldType]

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(value)}")
        for key, item in value.items():
            if key not in self.fields:
                return ValidationIssue(name, "unknown", f"unknown field {f'{name}.{key}'[:200]!r}")
            if item is not None and (issue := self.fields[key].validate(f"{name}.{key}", item)) is not None:
                return issue._replace(field=name)
        return None

    def json_schema(self) -> Schema:
        return object_schema({key: field_schema(Field(kind)) for key, kind in self.fields.items()})


class Include(FieldType):
    """Additional parts of a reply."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, list) and all(isinstance(item, str) and item in INCLUDABLE for item in value):
            return None
        return ValidationIssue(name, "choice", f"{name} must be a list of {', '.join(INCLUDABLE)}")

    def json_schema(self) -> Schema:
        return array_schema({"enum": [*INCLUDABLE]})


@dataclass(frozen=True, slots=True)
class Stored(FieldType):
    """A field for stored responses: only values that request no storage are accepted."""

    allowed: tuple[Any, ...] = ()

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if any(type(allowed) is type(value) and allowed == value for allowed in self.allowed):
            return None
        return ValidationIssue(name, "unsupported", f"{name} cannot be used: {NO_STATE}")

    def json_schema(self) -> Schema:
        return {"enum": [*self.allowed]}


ALLOWED_MODES = ("auto", "required")
SUMMARIES = Enum(("auto", "concise", "detailed"))
# Of OpenAI's other routes: this one has `text`, `include`, one answer, and its own options of a stream.
OTHER_FIELDS = ("n", "response_format", "stream_options", "store")
RESPONSES: dict[str, Field] = {
    **{name: field for name, field in COMMON.items() if name not in OTHER_FIELDS},
    "input": Field(Input(), required=True, is_secret=True),
    "instructions": Field(Text(), is_secret=True),
    "max_output_tokens": Field(integer(1)),
    "text": Field(Settings({"format": ResponseFormat(is_flat=True), "verbosity": Enum(("low", "medium", "high"))}), {}),
    "tools": Field(ResponseTools(), []),
    "tool_choice": Field(ResponseToolChoice()),
    "parallel_tool_calls": Field(Boolean(), True),
    "reasoning": Field(
        Settings(
            {
                "effort": Enum(EFFORTS),
                "summary": SUMMARIES,
                "generate_summary": SUMMARIES,
                "context": Enum(("auto", "current_turn", "all_turns")),
            }
        ),
        {},
    ),
    "include": Field(Include(), []),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS)),
    **{name: field for name, field in REASONING.items() if name != "reasoning_effort"},
    "store": Field(Stored((False,))),
    "background": Field(Stored((False,))),
    "previous_response_id": Field(Stored()),
    "conversation": Field(Stored()),
    "prompt": Field(Stored()),
    "truncation": unsupported("disabled"),
    "context_management": unsupported([]),
    "moderation": unsupported(),
    # Accepted without effect: they concern a stream's padding, the cache, or tools that this worker does not have.
    "stream_options": Field(AnyObject()),
    "client_metadata": Field(AnyObject()),
    "prompt_cache_retention": Field(Text()),
    "prompt_cache_options": Field(AnyObject()),
    "max_tool_calls": Field(integer(1)),
}
ECHOED = (
    "instructions",
    "metadata",
    "max_output_tokens",
    "tools",
    "parallel_tool_calls",
    "user",
    "prompt_cache_key",
    "safety_identifier",
    "max_tool_calls",
)


def parse_responses(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/v1/responses`."""
    values, ignored = validate_known(body, RESPONSES, options)
    text, reasoning, choice = values["text"], values["reasoning"], values["tool_choice"]
    read = _read_tools(values["tools"])
    tools = read.known
    if isinstance(choice, dict):
        if choice["type"] == "allowed_tools":
            allowed = {item["name"] for item in choice["tools"]}
            tools, choice = [tool for tool in tools if tool.name in allowed], choice["mode"]
        else:
            choice = {"type": "function", "name": choice["name"]}
    has_logprobs = values["top_logprobs"] is not None or "message.output_text.logprobs" in values["include"]
    guided = structured_outputs({**values, "response_format": _response_format(text.get("format"))})
    params = sampling_params(
        values,
        options.limits,
        values["max_output_tokens"],
        logprobs=(values["top_logprobs"] or 0) if has_logprobs else None,
        structured_outputs=guided,
        **{name: values[name] for name in GUIDED},
    )
    chat = chat_options(
        tools,
        choice,
        parallel=values["parallel_tool_calls"],
        effort=reasoning.get("effort"),
        template_kwargs=values["chat_template_kwargs"],
        thinking_budget=values["thinking_budget_tokens"],
    )
    ignored += ["text.verbosity"] if text.get("verbosity") not in (None, "medium") else []
    ignored += ["reasoning.context"] if reasoning.get("context") not in (None, "auto") else []
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    echo = {name: values[name] for name in ECHOED} | {
        "metadata": values["metadata"] or {},
        "tool_choice": values["tool_choice"] or "auto",
        "text": {"format": {"type": "text"}, **text},
        "reasoning": {"effort": reasoning.get("effort"), "summary": summary},
    }
    system = [{"role": "system", "content": values["instructions"]}] if values["instructions"] else []
    return GenerateRequest(
        **{name: values[name] for name in ("model", "stream", "priority", "timeout_ms")},
        prompts=[Conversation.encode(system + values["input"], chat)],
        params=params,
        ignored=ignored,
        skipped=read.skipped,
        messages_field="input",
        structured_outputs_field=guiding_field(values, "text.format"),
        tool_places=[place for place, tool in zip(read.places, read.known, strict=True) if tool in tools],
        values={
            "echo": msgspec.json.encode(echo),
            "has_summary": summary is not None,
            "custom": read.custom,
            "namespaces": read.namespaces,
        },
    )


class _Tools(NamedTuple):
    """The tools of a request; the reply prints calls with `custom` and `namespaces`."""

    known: list[Tool]
    custom: list[str]  # names in the prompt
    namespaces: dict[str, tuple[str, str]]  # namespace and name, by the name in the prompt
    skipped: list[str]  # types of tools that this worker does not have
    places: list[str]  # of the schemas of the known tools in the request


def _read_tools(specs: list[dict[str, Any]]) -> _Tools:
    tools = _Tools([], [], {}, [], [])
    for i, spec in enumerate(specs):
        space = spec["name"] if spec["type"] == "namespace" else None
        for j, tool in enumerate([spec] if space is None else spec.get("tools") or []):
            if tool["type"] not in TOOL_TYPES:
                tools.skipped.append(tool["type"])
                continue
            is_custom, name = tool["type"] == "custom", full_name(space, tool["name"])
            converted = custom_tool(tool) if is_custom else to_tool(tool)
            tools.known.append(replace(converted, name=name))
            place = f"tools[{i}]" if space is None else f"tools[{i}].tools[{j}]"
            tools.places.append(f"{place}.{'format' if is_custom else 'parameters'}")
            if is_custom:
                tools.custom.append(name)
            if space is not None:
                tools.namespaces[name] = (space, tool["name"])
    return tools


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a format in the form of chat completions."""
    if form is None or form["type"] != "json_schema":
        return None if form is None else {"type": form["type"]}
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def _make_handlers(_: Front) -> dict[str, Handler]:
    async def stored(_: Call) -> NoReturn:
        raise NotFoundError(f"there is no such response: {NO_STATE}")

    return {"/v1/responses/{id}": stored}


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    usage = reply_schema(
        input_tokens=COUNT,
        output_tokens=COUNT,
        total_tokens=COUNT,
        input_tokens_details=reply_schema(cached_tokens=COUNT),
        output_tokens_details=reply_schema(reasoning_tokens=COUNT),
    )
    item = reply_schema(id=TEXT, type=TEXT)
    status: Schema = {"enum": ["completed", "incomplete", "in_progress", "failed"]}
    return {
        "ResponseRequest": table_schema(RESPONSES, settings.schema_names, is_open=settings.ignore_unknown_fields),
        "Response": reply_schema(
            id=TEXT,
            object={"const": "response"},
            created_at=COUNT,
            status=status,
            model=TEXT,
            output=array_schema(item),
            usage=or_null(usage),
            store={"const": False},
        ),
        "ResponseEvent": reply_schema(type=TEXT, sequence_number=COUNT),
    }


STORED = Operation(summary="A stored response: there are none", reply="Response")
DIALECT = Dialect(
    prefixes=("/v1/responses",), error_body=error_body, schemas=_schemas, error_schema="OpenAIError",
    generate=(GenerateRoute("/v1/responses", parse_responses, ResponsesPrinter, Operation(
        summary="Respond to a conversation", request="ResponseRequest", reply="Response", event="ResponseEvent"),
        print_overflow),),
    routes=(Route("GET", "/v1/responses/{id}", STORED), Route("DELETE", "/v1/responses/{id}", STORED)),
    make_handlers=_make_handlers,
)  # fmt: skip
