"""The messages of chat completions, jobs and `/apply-template`: what they may hold, and what the chat template gets.

Answers come back as clients keep them: without content, with a refusal, with calls of custom tools.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .schema import (
    TEXT,
    BoundedObject,
    Field,
    FieldType,
    Schema,
    ValidationIssue,
    array_schema,
    object_schema,
    or_null,
    type_name,
    unsupported_part,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
CUSTOM = ("name", "input")  # of a call of a custom tool


class Messages(FieldType):
    """A conversation: known roles, each with text or text parts. Other keys are left to the template.

    The assistant's may have no content, refusals and tool calls.
    """

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, list) or not value:
            return ValidationIssue(name, "type", f"{name} must be a list of at least one message")
        checks = (_check_message(f"{name}[{i}]", message) for i, message in enumerate(value))
        issue = next((issue for issue in checks if issue is not None), None)
        return None if issue is None else issue._replace(field=name)

    def json_schema(self) -> Schema:
        text = object_schema({"type": {"const": "text"}, "text": TEXT}, "text", is_open=True)
        refusal = object_schema({"type": {"const": "refusal"}, "refusal": TEXT}, "type", "refusal", is_open=True)
        roles = [role for role in ROLES if role != "assistant"]
        content: Schema = {"anyOf": [TEXT, array_schema(text)]}
        custom = object_schema({"name": {**TEXT, "minLength": 1}, "input": TEXT}, "name", "input", is_open=True)
        calls = [
            object_schema({"type": {"not": {"const": "custom"}}}, is_open=True),
            object_schema({"type": {"const": "custom"}, "custom": custom}, "type", "custom", is_open=True),
        ]
        answer: dict[str, Schema] = {
            "role": {"const": "assistant"}, "refusal": or_null(TEXT),
            "content": {"anyOf": [TEXT, array_schema({"anyOf": [text, refusal]}), {"type": "null"}]},
            "tool_calls": or_null(array_schema({"anyOf": calls})),
        }  # fmt: skip
        other = object_schema({"role": {"enum": roles}, "content": content}, "role", "content", is_open=True)
        return array_schema({"anyOf": [other, object_schema(answer, "role", is_open=True)]}, 1)


APPLY_TEMPLATE = {
    "messages": Field(Messages(), required=True, is_secret=True),
    "chat_template_kwargs": Field(BoundedObject(), {}),
}


def _check_message(name: str, message: Any) -> ValidationIssue | None:
    if not isinstance(message, dict):
        found = type_name(message)
        return ValidationIssue(name, "type", f"{name} must be an object with role and content, not {found}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return ValidationIssue(name, "choice", f"{name}.role must be one of {', '.join(ROLES)}")
    is_answer = role == "assistant"
    is_text = isinstance(content, str) or (content is None and is_answer)
    if not is_text:
        parts: list[Any] = content if isinstance(content, list) else [None]
        bad = next((i for i, part in enumerate(parts) if not _is_part(part, is_answer)), None)
        if bad is not None:
            kind = parts[bad].get("type") if isinstance(parts[bad], dict) else None
            usual = ValidationIssue(name, "type", f"{name}.content must be text, or a list of text parts")
            return unsupported_part(f"{name}.content[{bad}].type", kind) or usual
    return _check_answer(name, message) if is_answer else None


def _is_part(part: Any, is_answer: bool) -> bool:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    return kind in (("text", "refusal") if is_answer else ("text",)) and isinstance(part.get(kind), str)


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


def normalize_messages(messages: list[Any]) -> list[Any]:
    """Return validated messages as chat templates expect them.

    Parts are joined, `developer` is `system`, a refusal is text of the answer, the call of a custom tool is that of a
    function with one argument, `input`.
    """
    normalized = []
    for message in messages:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
        if isinstance(parts := message.get("content"), list):
            message = {**message, "content": "".join([part[part.get("type", "text")] for part in parts])}
        normalized.append(_normalize_answer(message) if message["role"] == "assistant" else message)
    return normalized


def _normalize_answer(message: dict[str, Any]) -> dict[str, Any]:
    calls, refusal = message.get("tool_calls"), message.get("refusal")
    made = {key: value for key, value in message.items() if key != "refusal"}
    if refusal or not (made.get("content") or calls):
        made["content"] = (made.get("content") or "") + (refusal or "")
    if calls:
        made["tool_calls"] = [custom_call(call) if call.get("type") == "custom" else call for call in calls]
    return made


def custom_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call of a custom tool as that of a function."""
    return function_call(call.get("id"), call["custom"]["name"], input_arguments(call["custom"]["input"]))


def input_arguments(text: str) -> str:
    """Return the arguments of the function that a custom tool is."""
    return msgspec.json.encode({"input": text}).decode()


def function_call(call_id: Any, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form of chat completions, which templates have."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
