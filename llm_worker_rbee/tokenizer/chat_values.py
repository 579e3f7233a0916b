"""Values of arguments that a model writes in another notation than JSON, by the schema of the tool or as literals."""

from __future__ import annotations

import ast
import json
import re
from typing import Any


def load_json(text: str) -> Any:
    """Return the value of JSON, None for text that is not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def escape(text: str) -> str:
    """Return a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def schema_types(schema: Any, depth: int = 0) -> set[str]:
    """Return the types that a schema allows; empty where it does not say."""
    if not isinstance(schema, dict) or depth > 4:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {item for item in declared if isinstance(item, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    if "const" in schema:
        return {_type_of(schema["const"])}
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            found |= schema_types(option, depth + 1)
    return found


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def value_to_json(text: str, kind: str) -> str:
    """Return the JSON of a value that was written without quotes; text that is no JSON is a string."""
    literal = text.strip()
    lowered = {"True": "true", "False": "false", "None": "null"}.get(literal, literal)
    value = load_json(lowered)
    if value is None and lowered != "null":
        try:
            value = ast.literal_eval(literal)
            return json.dumps(value, ensure_ascii=False)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return json.dumps(text, ensure_ascii=False)
    if kind == "any" and isinstance(value, str):
        return json.dumps(text, ensure_ascii=False)
    return lowered


def python_to_json(text: str) -> str:
    """Return the JSON of a Python literal."""
    return (
        value_to_json(text, "json")
        if (value := load_json(text.strip())) is None
        else json.dumps(value, ensure_ascii=False)
    )


def gemma_to_json(text: str, quote: str) -> str:
    """Return the JSON of a value whose strings have their own quotation mark and whose keys have none."""
    parts = text.split(quote)
    out = []
    for i, part in enumerate(parts):
        if i % 2:
            out.append(json.dumps(part, ensure_ascii=False))
        else:
            out.append(
                re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", lambda match: f"{match[1]}{json.dumps(match[2])}:", part)
            )
    joined = "".join(out)
    return joined.strip() if load_json(joined) is not None or joined.strip() == "null" else json.dumps(text)
