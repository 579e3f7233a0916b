"""Types of fields that hold objects and lists, for APIs whose bodies are nested; made of the fields of `schema`.

An issue names the place: `messages[3].content[0].text`. With `is_open` unknown fields are accepted, and
`find_unknown` lists them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .json_schema import Schema, array_schema
from .schema import MAX_ECHOED_CHARS, Field, FieldType, Text, ValidationIssue, table_schema, type_name, unsupported_part

Table = Mapping[str, Field]


class NestedType(FieldType):
    """A type whose values may have unknown fields."""

    @abstractmethod
    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        """Yield the places of unknown fields in a valid value."""


def find_unknown(kind: FieldType, name: str, value: Any) -> Iterator[str]:
    """Yield the places of unknown fields in a valid value of any type."""
    if isinstance(kind, NestedType) and value is not None:
        yield from kind.find_unknown(name, value)


@dataclass(frozen=True)
class ObjectOf(NestedType):
    """An object with the fields of a table, and with `tag`, which is checked elsewhere."""

    table: Table
    is_open: bool = False
    tag: str | None = None

    @cached_property
    def _required(self) -> list[str]:
        return [key for key, field in self.table.items() if field.required]

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {key: field.default for key, field in self.table.items()}

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(value)}")
        for key, item in value.items():
            if (field := self.table.get(key)) is None:
                if not self.is_open and key != self.tag:
                    place = f"{name}.{key[:MAX_ECHOED_CHARS]}"
                    return ValidationIssue(place, "unknown", f"unknown field {place!r}")
            elif item is not None and (issue := field.type.validate(f"{name}.{key}", item)) is not None:
                return issue
        for key in self._required:
            if value.get(key) is None:
                return ValidationIssue(f"{name}.{key}", "required", f"{name}.{key} is required")
        return None

    def json_schema(self) -> Schema:
        return table_schema(self.table, is_open=self.is_open)

    def coerce(self, value: Any) -> dict[str, Any]:
        pairs = {key: (self.table[key], item) for key, item in value.items() if key in self.table}
        fields = {key: field.type.coerce(item) for key, (field, item) in pairs.items() if item is not None}
        return self._defaults | fields

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        for key, item in value.items():
            if key in self.table:
                yield from find_unknown(self.table[key].type, f"{name}.{key}", item)
            elif key != self.tag:
                yield f"{name}.{key}"


@dataclass(frozen=True)
class Tagged(NestedType):
    """An object whose field `tag` says which fields it has."""

    tag: str
    tables: Mapping[str, Table]
    is_open: bool = False

    @cached_property
    def _kinds(self) -> dict[str, ObjectOf]:
        return {kind: ObjectOf(table, self.is_open, self.tag) for kind, table in self.tables.items()}

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(value)}")
        kind = value.get(self.tag)
        if isinstance(kind, str) and kind in self._kinds:
            return self._kinds[kind].validate(name, value)
        place, tags = f"{name}.{self.tag}", ", ".join(self.tables)
        if not isinstance(kind, str):
            return ValidationIssue(place, "required", f"{place} is required: one of {tags}")
        message = f"{place} is {kind[:MAX_ECHOED_CHARS]!r}, which this worker does not support: use {tags}"
        return unsupported_part(place, kind) or ValidationIssue(place, "unsupported", message)

    def json_schema(self) -> Schema:
        schemas = []
        for kind, fields in self._kinds.items():
            schema = fields.json_schema()
            properties = {self.tag: {"const": kind}, **schema["properties"]}
            schemas.append({**schema, "properties": properties, "required": [self.tag, *schema.get("required", ())]})
        return {"anyOf": schemas}

    def coerce(self, value: Any) -> dict[str, Any]:
        return {self.tag: value[self.tag], **self._kinds[value[self.tag]].coerce(value)}

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        return self._kinds[value[self.tag]].find_unknown(name, value)


@dataclass(frozen=True, slots=True)
class ListOf(NestedType):
    """A list whose items have one type."""

    item: FieldType
    min_items: int = 0
    max_items: int | None = None

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, list):
            return ValidationIssue(name, "type", f"{name} must be a list, not {type_name(value)}")
        if len(value) < self.min_items or (self.max_items is not None and len(value) > self.max_items):
            bounds = f"at least {self.min_items}" if self.max_items is None else f"{self.min_items} to {self.max_items}"
            return ValidationIssue(name, "length", f"{name} has {len(value)} items: it must have {bounds}")
        issues = (self.item.validate(f"{name}[{i}]", item) for i, item in enumerate(value))
        return next((issue for issue in issues if issue is not None), None)

    def json_schema(self) -> Schema:
        schema = array_schema(self.item.json_schema(), self.min_items)
        return schema if self.max_items is None else {**schema, "maxItems": self.max_items}

    def coerce(self, value: Any) -> list[Any]:
        return [self.item.coerce(item) for item in value]

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        for i, item in enumerate(value):
            yield from find_unknown(self.item, f"{name}[{i}]", item)


@dataclass(frozen=True, slots=True)
class TextOr(NestedType):
    """A string, or a list."""

    items: ListOf

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, str):
            return None
        if not isinstance(value, list):
            return ValidationIssue(name, "type", f"{name} must be a string or a list, not {type_name(value)}")
        return self.items.validate(name, value)

    def json_schema(self) -> Schema:
        return {"anyOf": [Text().json_schema(), self.items.json_schema()]}

    def coerce(self, value: Any) -> Any:
        return value if isinstance(value, str) else self.items.coerce(value)

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        if isinstance(value, list):
            yield from self.items.find_unknown(name, value)
