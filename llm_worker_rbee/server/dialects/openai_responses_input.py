"""The input of `/v1/responses`: items become messages of a chat.

Reasoning, text and calls that follow each other are one message of the assistant.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from ..bodies import function_call, input_arguments
from ..json_schema import TEXT, Schema, array_schema, object_schema, or_null
from ..schema import FieldType, ValidationError, ValidationIssue, require, type_name, unsupported_part

NO_STATE = "this worker keeps no responses: send the whole conversation as input"
REASONING_PREFIX = "rbee1."  # of `encrypted_content`: the reasoning itself, as base64
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
        content: Schema = {"anyOf": [TEXT, array_schema({"anyOf": [text, refusal]})]}
        name: Schema = {"type": "string", "minLength": 1}
        pieces = or_null(array_schema(object_schema({"text": TEXT}, "text", is_open=True)))
        kinds: dict[str, dict[str, Schema]] = {
            "function_call": {"call_id": TEXT, "name": name, "arguments": TEXT},
            "custom_tool_call": {"call_id": TEXT, "name": name, "input": TEXT},
            "function_call_output": {"call_id": TEXT, "output": content},
            "custom_tool_call_output": {"call_id": TEXT, "output": content},
        }
        reasoning: dict[str, Schema] = {
            "type": {"const": "reasoning"}, "summary": pieces, "content": pieces, "encrypted_content": or_null(TEXT),
        }  # fmt: skip
        message: dict[str, Schema] = {
            "type": {"enum": ["message", None]}, "role": {"enum": [*ROLES]}, "content": content,
        }  # fmt: skip
        items = [
            object_schema(message, "role", "content", is_open=True), object_schema(reasoning, "type", is_open=True),
        ]  # fmt: skip
        for kind, fields in kinds.items():
            properties = {"type": {"const": kind}, **fields}
            more = {"namespace": or_null(TEXT)} if "name" in fields else {}
            items.append(object_schema({**properties, **more}, *properties, is_open=True))
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
            self._part("content", content)
        else:
            self._answer = None
            self._messages.append({"role": role, "content": content})

    def _part(self, key: str, text: str) -> None:
        """Add reasoning or content; a new message begins where the last one has what follows it."""
        later = ("reasoning_content", "content", "tool_calls")
        answer = self._answer
        if answer is None or any(answer.get(one) for one in later[later.index(key) :]):
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


def _content(name: str, content: Any) -> str:
    """Return the text of a message, or of the output of a call."""
    if isinstance(content, str):
        return content
    _require(isinstance(content, list), name, "type", f"must be a text, or a list of parts, not {type_name(content)}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if kind == "refusal" else "text"
        is_text = kind in TEXT_PARTS or key == "refusal"
        place = f"{name}[{i}].type"
        if not is_text and (issue := unsupported_part(place, kind)) is not None:
            raise ValidationError([issue])
        _require(is_text, place, "unsupported", f"must be {', '.join(TEXT_PARTS)} or refusal: text only")
        texts.append(_text(f"{name}[{i}]", part, key))
    return "".join(texts)


def _reasoning(name: str, item: dict[str, Any]) -> str:
    """Return the reasoning of an item: from this worker's own record of it, its content, or its summary."""
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
