"""What a request may say: tables of fields, and all that is wrong with a body told at once.

A body is decoded to a plain object, checked against a table, and only then made into a request. A field is refused by
name: unknown, of the wrong type, out of range, missing. What it said is repeated, but never prompts, messages or stops.
The kinds of values are in `kinds`; which fields there are is said where they are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..errors import InvalidRequestError

Schema = dict[str, Any]
MISSING: Any = object()
SHOWN_CHARS = 100  # of a value that is repeated
MOST_UNKNOWN = 32  # fields that are told by name
MOST_IGNORED = 256  # fields that are listed


class Problem(NamedTuple):
    """One thing that is wrong."""

    field: str
    constraint: str  # type, range, length, required, unknown, unsupported, choice
    message: str
    value: Any = MISSING


class FieldsError(InvalidRequestError):
    """A body with something wrong in it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems), problems[0].field)
        self.problems = problems


class Kind(ABC):
    """What a value may be: the check and its description, side by side so that they say the same."""

    @abstractmethod
    def problem(self, name: str, value: Any) -> Problem | None:
        """What is wrong with a value that is not null."""

    @abstractmethod
    def schema(self) -> Schema:
        """The same as JSON Schema."""

    def taken(self, value: Any) -> Any:
        """A value without a problem, as the worker wants it."""
        return value


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body; null is as good as absent where it may be absent."""

    kind: Kind
    default: Any = None
    required: bool = False
    is_secret: bool = False  # what it said is never repeated


def read_object(body: bytes) -> dict[str, Any]:
    """JSON bytes -> an object; anything else is refused. Half a character (a lone surrogate) is no JSON text."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        told = (
            f"the body is not valid JSON: {error}"
            if not isinstance(error, RecursionError)
            else "the body is nested too deeply"
        )
        raise FieldsError([Problem("body", "json", told)]) from None
    if not isinstance(found, dict):
        raise FieldsError([Problem("body", "type", f"the body must be a JSON object, not {kind_of(found)}")])
    return found


def checked(body: Mapping[str, Any], table: Mapping[str, Field], *, ignored: list[str] | None = None) -> dict[str, Any]:
    """The values of all fields of the table; unknown ones are refused, or listed in `ignored` where that is given."""
    problems: list[Problem] = []
    if unknown := [name for name in body if name not in table]:
        if ignored is None:
            problems += _unknown(unknown)
        else:
            ignored += unknown[:MOST_IGNORED]
    values: dict[str, Any] = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None:
            if field.required:
                problems.append(Problem(name, "required", f"{name} is required"))
            values[name] = field.default
            continue
        problem = field.kind.problem(name, value)
        if problem is not None:
            problems.append(problem._replace(value=MISSING if field.is_secret else _repeated(value)))
        else:
            values[name] = field.kind.taken(value)
    if problems:
        raise FieldsError(problems)
    return values


def _unknown(names: list[str]) -> list[Problem]:
    told = [Problem(n[:SHOWN_CHARS], "unknown", f"unknown field {n[:SHOWN_CHARS]!r}") for n in names[:MOST_UNKNOWN]]
    if (more := len(names) - len(told)) > 0:
        told.append(Problem("body", "unknown", f"and {more} more unknown fields"))
    return told


def conversation(messages: list[Any]) -> list[Any]:
    """Checked messages as templates know them: `developer` is the newer name of a role."""
    return [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]


def kind_of(value: Any) -> str:
    """What somebody gave, in a word."""
    kinds = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def _repeated(value: Any) -> Any:
    """A value that is told again: a word of it where it is long, nothing where it is large."""
    if isinstance(value, str):
        return value[:SHOWN_CHARS]
    if isinstance(value, (list, dict)):
        return MISSING
    return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)[:SHOWN_CHARS]
