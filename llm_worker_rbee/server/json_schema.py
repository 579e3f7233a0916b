"""Pieces of JSON Schema for bodies and replies in `/openapi.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def array_schema(items: Schema, min_items: int = 0) -> Schema:
    """Return the JSON Schema of a list."""
    return {"type": "array", "items": items, **({"minItems": min_items} if min_items else {})}


def object_schema(properties: Mapping[str, Schema], *required: str, is_open: bool = False) -> Schema:
    """Return the JSON Schema of an object; an open one may have other properties too."""
    schema: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": is_open}
    return {**schema, "required": [*required]} if required else schema


# Schemas of replies, for /openapi.json.
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def ref(name: str) -> Schema:
    """Return a reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def reply_schema(**properties: Schema) -> Schema:
    """Return the schema of a reply with all of these fields, and possibly more in later versions."""
    return object_schema(properties, *properties, is_open=True)


def or_null(schema: Schema) -> Schema:
    """Return a schema that accepts null too."""
    return {"anyOf": [schema, {"type": "null"}]}


def with_field(name: str, **value: Any) -> Schema:
    """Return the condition that a body has the field, with the value if one is given."""
    return {**with_values(**{name: value or {"not": {"type": "null"}}}), "required": [name]}


def with_values(**properties: Schema) -> Schema:
    """Return the condition that these fields, if present, have these values."""
    return {"properties": properties}
