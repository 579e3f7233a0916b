"""What the text of an answer must conform to: a JSON schema, a regular expression, one of a few texts, or a grammar.

A plain record that passes between processes; grammar.py compiles it, in the engine's process.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError

FIELD = "structured_outputs"
MAX_CHARS = 1 << 20  # of a schema, an expression or a grammar
MAX_CHOICES = 10_000
KINDS = ("json", "json_object", "regex", "choice", "grammar")
FIELDS = (*KINDS, "additional_properties")
OBJECTS = ("closed", "open")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """One kind of text. `json` is a JSON schema, as an object or as text; `grammar` is Lark or GBNF.

    `additional_properties` goes with `json`. "open": objects may have properties that their schema does not name.
    "closed", the default: an object that lists its properties has no others, unless the schema says so.
    """

    json: str | bool | Mapping[str, Any] | None = None  # text once it is validated
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    additional_properties: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        given += ["json"] if self.json is False else []
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequestError(f"{FIELD} must have one of {', '.join(KINDS)}: it has {found}", FIELD)
        (name,) = given
        if self.additional_properties is not None and (name != "json" or self.additional_properties not in OBJECTS):
            reason = f'must be "closed" or "open", beside json: it is {self.additional_properties!r:.100} beside {name}'
            raise InvalidRequestError(f"{FIELD}.additional_properties {reason}", FIELD)
        value = getattr(self, name)
        if name == "json":
            value = _schema_text(value)
        elif name == "choice":
            value = _check_choices(value)
        elif not isinstance(value, bool if name == "json_object" else str):
            kind = "true or false" if name == "json_object" else "text"
            raise InvalidRequestError(f"{FIELD}.{name} must be {kind}, not {type(value).__name__}", FIELD)
        if name == "regex" and len(value) - len(value.rstrip("\\")) & 1:
            raise InvalidRequestError(f"{FIELD}.regex ends in a backslash that escapes nothing", FIELD)
        size = sum(map(len, value)) if name == "choice" else 0 if value is True else len(value)
        if size > MAX_CHARS:
            raise InvalidRequestError(f"{FIELD}.{name} has {size} characters: at most {MAX_CHARS} are allowed", FIELD)
        object.__setattr__(self, name, value)

    @classmethod
    def from_fields(cls, fields: Any) -> StructuredOutputsParams:
        """Return the parameters of a JSON object; raise on fields that do not exist."""
        if not isinstance(fields, Mapping):
            raise InvalidRequestError(f"{FIELD} must be an object with one of {', '.join(KINDS)}", FIELD)
        if unknown := sorted(set(map(str, fields)) - set(FIELDS)):
            raise InvalidRequestError(f"{FIELD} has no field {unknown[0]!r}: it has {', '.join(FIELDS)}", FIELD)
        return cls(**fields)

    @property
    def kind(self) -> str:
        """Which of the fields is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text."""
    if isinstance(schema, str):
        try:
            schema = json_module.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{FIELD}.json is not valid JSON: {_describe(error)}", FIELD) from None
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequestError(f"{FIELD}.json must be a JSON schema: an object, not {type(schema).__name__}", FIELD)
    try:
        return json_module.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{FIELD}.json is not plain JSON: {_describe(error)}", FIELD) from None


def _describe(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _check_choices(choices: Any) -> tuple[str, ...]:
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not all(isinstance(text, str) for text in choices):
        raise InvalidRequestError(f"{FIELD}.choice must be a list of texts", FIELD)
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequestError(f"{FIELD}.choice must have 1 to {MAX_CHOICES} texts, none of them empty", FIELD)
    return tuple(choices)
