"""Tools in the bodies of requests, and the options of a chat that every dialect has: shared by the dialects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..tokenizer.chat.events import ChatOptions, Tool, thinking_variables
from .bodies import require
from .schema import BoundedObject, FieldType, Schema, ValidationIssue, array_schema, object_schema, type_name

MAX_TOOLS = 512
MAX_TOOL_NAME = 256
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BOUNDED_OBJECT = BoundedObject(max_values=100_000, max_depth=100)


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


def check_function(name: str, function: Any) -> ValidationIssue | None:
    """Return what is wrong with the description of a function."""
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
    """Return the tool that a validated description of a function is."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description") or "", parameters, bool(function.get("strict")))


def function_places(tools: Sequence[Any]) -> list[str]:
    """Return where the schemas of validated tools are, for errors."""
    return [f"tools[{i}].function.parameters" for i in range(len(tools))]


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
