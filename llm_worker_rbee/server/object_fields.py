"""Types of fields that hold objects and lists, for APIs whose bodies are nested; made of the fields of `schema`.

An issue names the place: `messages[3].content[0].text`. With `is_open` unknown fields are accepted, and
`find_unknown` lists them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .schema import (
    MAX_ECHOED_CHARS,
    Field,
    FieldType,
    Schema,
    Text,
    ValidationIssue,
    array_schema,
    table_schema,
    type_name,
)

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


@dataclass(frozen=True, slots=True)
class ObjectOf(NestedType):
    """An object with the fields of a table; `ignored_key` is looked at elsewhere."""

    table: Table
    is_open: bool = False
    ignored_key: str | None = None

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(value)}")
        if not self.is_open and (unknown := next(self._own_unknown(value), None)) is not None:
            place = f"{name}.{unknown[:MAX_ECHOED_CHARS]}"
            return ValidationIssue(place, "unknown", f"unknown field {place!r}")
        for key, field in self.table.items():
            place = f"{name}.{key}"
            if (given := value.get(key)) is not None:
                if (issue := field.type.validate(place, given)) is not None:
                    return issue
            elif field.required:
                return ValidationIssue(place, "required", f"{place} is required")
        return None

    def json_schema(self) -> Schema:
        return table_schema(self.table, is_open=self.is_open)

    def coerce(self, value: Any) -> dict[str, Any]:
        return {
            key: field.default if (given := value.get(key)) is None else field.type.coerce(given)
            for key, field in self.table.items()
        }

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        yield from (f"{name}.{key}" for key in self._own_unknown(value))
        for key, field in self.table.items():
            yield from find_unknown(field.type, f"{name}.{key}", value.get(key))

    def _own_unknown(self, value: Mapping[str, Any]) -> Iterator[str]:
        return (key for key in value if key not in self.table and key != self.ignored_key)


@dataclass(frozen=True, slots=True)
class Tagged(NestedType):
    """An object whose field `tag` says which fields it has."""

    tag: str
    tables: Mapping[str, Table]
    is_open: bool = False

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(value)}")
        place, kind = f"{name}.{self.tag}", value.get(self.tag)
        if isinstance(kind, str) and kind in self.tables:
            return self._object(kind).validate(name, value)
        known = ", ".join(self.tables)
        if not isinstance(kind, str):
            return ValidationIssue(place, "required", f"{place} is required: one of {known}")
        message = f"{place} is {kind[:MAX_ECHOED_CHARS]!r}, which this worker does not support: use {known}"
        return ValidationIssue(place, "unsupported", message)

    def json_schema(self) -> Schema:
        schemas = []
        for kind in self.tables:
            schema = self._object(kind).json_schema()
            properties = {self.tag: {"const": kind}, **schema["properties"]}
            schemas.append({**schema, "properties": properties, "required": [self.tag, *schema.get("required", ())]})
        return {"anyOf": schemas}

    def coerce(self, value: Any) -> dict[str, Any]:
        return {self.tag: value[self.tag], **self._object(value[self.tag]).coerce(value)}

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        return self._object(value[self.tag]).find_unknown(name, value)

    def _object(self, kind: str) -> ObjectOf:
        return ObjectOf(self.tables[kind], self.is_open, self.tag)


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
        issues = (self.item.validate(f"{name}[{i}]", one) for i, one in enumerate(value))
        return next((issue for issue in issues if issue is not None), None)

    def json_schema(self) -> Schema:
        schema = array_schema(self.item.json_schema(), self.min_items)
        return schema if self.max_items is None else {**schema, "maxItems": self.max_items}

    def coerce(self, value: Any) -> list[Any]:
        return [self.item.coerce(one) for one in value]

    def find_unknown(self, name: str, value: Any) -> Iterator[str]:
        for i, one in enumerate(value):
            yield from find_unknown(self.item, f"{name}[{i}]", one)


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
