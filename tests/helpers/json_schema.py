"""Whether a value fits a JSON Schema: the part of the standard that our description uses, no more."""

from __future__ import annotations

import re
from typing import Any

KINDS: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def fits(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if "$ref" in schema:
        return fits(root["components"]["schemas"][schema["$ref"].rpartition("/")[2]], value, root)
    kinds = schema.get("type", list(KINDS))
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "enum" in schema and not any(type(one) is type(value) and one == value for one in schema["enum"]):
        return False
    if "const" in schema and schema["const"] != value:
        return False
    if "anyOf" in schema and not any(fits(one, value, root) for one in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(fits(one, value, root) for one in schema["oneOf"]) != 1:
        return False
    if "not" in schema and fits(schema["not"], value, root):
        return False
    return _within(schema, value) and _inside(schema, value, root)


def _is(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):  # JSON has no integers: 5.0 is one
        return value.is_integer()
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _within(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, above = schema.get("minimum", value), schema.get("exclusiveMinimum")
        return low <= value <= schema.get("maximum", value) and (above is None or value > above)
    if isinstance(value, str):
        size = len(value)
        found = re.search(schema.get("pattern", ""), value) is not None
        return found and schema.get("minLength", 0) <= size <= schema.get("maxLength", size)
    return True


def _inside(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if isinstance(value, list):
        size = len(value)
        return schema.get("minItems", 0) <= size <= schema.get("maxItems", size) and all(
            fits(schema.get("items", {}), one, root) for one in value
        )
    if not isinstance(value, dict):
        return True
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    others = {"not": {}} if others is False else {} if others is True else others
    return all(name in value for name in schema.get("required", ())) and all(
        fits(known.get(name, others), one, root) and fits(schema.get("propertyNames", {}), name, root)
        for name, one in value.items()
    )
