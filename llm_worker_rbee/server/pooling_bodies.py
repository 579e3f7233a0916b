"""The records that bodies for pooling models become, and the fields that their APIs share.

A record passes between processes as those of `bodies` do: token ids are packed.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from .bodies import header_lists, num_bytes
from .json_schema import Schema, array_schema
from .object_fields import ListOf, ObjectOf
from .schema import (
    Boolean,
    Enum,
    Field,
    FieldType,
    Text,
    TokenIds,
    ValidationIssue,
    are_token_ids,
    integer,
    require,
    type_name,
)

MAX_INPUTS = 2048
BYTES_PER_TOKEN = 4  # an estimate
MAX_TOKEN_ID = (1 << 31) - 1


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
    """Inputs, and what their embeddings are to be."""

    inputs: Inputs
    model: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    input_type: str | None = None  # "query" or "document", instead of it
    truncate: bool = False
    is_base64: bool = False
    ignored: list[str] = []  # names of unknown fields

    def notice_headers(self) -> dict[str, str]:
        return header_lists({"x-ignored-fields": self.ignored})


class RankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of texts to score: each document with the query, or with its own where there are several."""

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


class EmbeddingInput(FieldType):
    """A string, strings, token ids, or lists of token ids; none of them empty, and at most `MAX_INPUTS`."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, str):
            return Text(1).validate(name, value)
        if not isinstance(value, list):
            message = f"{name} must be a string, strings, token ids or lists of token ids, not {type_name(value)}"
            return ValidationIssue(name, "type", message)
        if not value:
            return ValidationIssue(name, "length", f"{name} is an empty list")
        if not isinstance(value[0], str | list):
            return TokenIds().validate(name, value)
        if len(value) > MAX_INPUTS:
            message = f"{name} has {len(value)} items: at most {MAX_INPUTS} are accepted"
            return ValidationIssue(name, "length", message)
        return next((issue for i, one in enumerate(value) if (issue := self._validate_item(name, i, one, value))), None)

    def _validate_item(self, name: str, i: int, one: Any, value: list[Any]) -> ValidationIssue | None:
        place = f"{name}[{i}]"
        if type(one) is not type(value[0]):
            return ValidationIssue(place, "type", f"{place} is {type_name(one)}, and {name}[0] is not: do not mix them")
        if not one:
            return ValidationIssue(place, "length", f"{place} is empty")
        if isinstance(one, list) and not are_token_ids(one):
            return ValidationIssue(place, "type", f"{place} must be a list of token ids")
        return None

    def json_schema(self) -> Schema:
        ids: Schema = {**TokenIds().json_schema(), "minItems": 1}
        text = Text(1).json_schema()
        lists = ({**array_schema(one, 1), "maxItems": MAX_INPUTS} for one in (text, ids))
        return {"anyOf": [text, ids, *lists]}


class Documents(FieldType):
    """Strings, or objects with a `text`."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, list):
            return ValidationIssue(name, "type", f"{name} must be a list, not {type_name(value)}")
        if not 1 <= len(value) <= MAX_INPUTS:
            message = f"{name} has {len(value)} items: it must have 1 to {MAX_INPUTS}"
            return ValidationIssue(name, "length", message)
        for i, one in enumerate(value):
            text = one.get("text") if isinstance(one, dict) else one
            if (issue := Text(1).validate(f"{name}[{i}]", text)) is not None:
                return issue
        return None

    def json_schema(self) -> Schema:
        text = Text(1).json_schema()
        nested = ObjectOf({"text": Field(Text(1), required=True)}, is_open=True).json_schema()
        return {**array_schema({"anyOf": [text, nested]}, 1), "maxItems": MAX_INPUTS}

    def coerce(self, value: Any) -> list[str]:
        return [one["text"] if isinstance(one, dict) else one for one in value]


class Texts(FieldType):
    """A string, or strings."""

    _items = ListOf(Text(1), 1, MAX_INPUTS)

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        return Text(1).validate(name, value) if isinstance(value, str) else self._items.validate(name, value)

    def json_schema(self) -> Schema:
        return {"anyOf": [Text(1).json_schema(), self._items.json_schema()]}

    def coerce(self, value: Any) -> list[str]:
        return [value] if isinstance(value, str) else value


TRUNCATE: dict[str, Field] = {
    "truncate": Field(Boolean(), False),
    "truncate_prompt_tokens": Field(Enum((-1,), is_supported=False)),  # of vLLM; -1 is the model's maximum
}
DIMENSIONS = Field(integer(1, 1 << 20))


def truncates(values: dict[str, Any]) -> bool:
    """Return whether inputs that are too long are cut."""
    return bool(values["truncate"] or values["truncate_prompt_tokens"] is not None)


def parse_pairs(values: dict[str, Any], ignored: list[str], names: tuple[str, str]) -> RankRequest:
    """Return the pairs of two fields of texts: one with each, or as many as the others."""
    first, second = (values[name] for name in names)
    require(len(first) in (1, len(second)), names[1], "length",
            f"{names[0]} has {len(first)} items and {names[1]} {len(second)}: "
            f"give as many, or one of {names[0]}")  # fmt: skip
    return RankRequest(
        queries=first, documents=second, model=values["model"], truncate=truncates(values), ignored=ignored
    )
