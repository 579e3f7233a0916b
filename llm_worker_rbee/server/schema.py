"""What a request may say: tables of fields, and all that is wrong with a body told at once.

A body is decoded to a plain object, checked against a table, and only then made into a request. A field is refused by
name: unknown, of the wrong type, out of range, missing. What it said is repeated, but never prompts, messages or stops.
The kinds of values are in `kinds`; which fields there are is said where they are used.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..engine.request import MAX_STOP_CHARS, SAMPLING_BOUNDS
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


JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
ROLES = ("system", "developer", "user", "assistant", "tool")
MANY = 1 << 15
LONGEST_TIMEOUT_MS = 24 * 3600 * 1000


def listed(item: Schema, least: int = 0) -> Schema:
    """A list of them, as JSON Schema."""
    return {"type": "array", "items": item, **({"minItems": least} if least else {})}


def made_of(properties: Mapping[str, Schema], *required: str, is_open: bool = False) -> Schema:
    """An object with these properties, as JSON Schema; with others too where it is open."""
    made: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": is_open}
    return {**made, "required": [*required]} if required else made


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number, that or more."""
    is_number = isinstance(value, int) if not isinstance(value, float) else value.is_integer()
    return is_number and not isinstance(value, bool) and value >= least


def are_ids(values: list[Any]) -> bool:
    """Whether all are whole numbers, 0 or more. There may be millions: many at a time, and other threads breathe."""
    parts = (values[at : at + MANY] for at in range(0, len(values), MANY))
    return all(min(part) >= 0 if set(map(type, part)) == {int} else all(map(is_whole, part)) for part in parts)


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number within bounds."""

    least: int
    most: int | None = None

    def problem(self, name: str, value: Any) -> Problem | None:
        """Not whole, or out of bounds."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return Problem(name, "type", f"{name} must be a whole number, not {kind_of(value)}")
        if isinstance(value, float) and not value.is_integer():
            return Problem(name, "type", f"{name} must be a whole number, not {value}")
        if value < self.least or (self.most is not None and value > self.most):
            limit = "" if self.most is None else f", at most {self.most}"
            told = f"{name} is {str(value)[:SHOWN_CHARS]}: it must be {self.least} or more{limit}"
            return Problem(name, "range", told)
        return None

    def schema(self) -> Schema:
        """The bounds."""
        made: Schema = {"type": "integer", "minimum": self.least}
        return made if self.most is None else {**made, "maximum": self.most}

    def taken(self, value: Any) -> int:
        """5.0 is 5."""
        return int(value)


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A number within bounds; the lowest itself may be excluded."""

    low: float
    high: float
    is_open: bool = False

    def problem(self, name: str, value: Any) -> Problem | None:
        """Not a number, or out of bounds."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return Problem(name, "type", f"{name} must be a number, not {kind_of(value)}")
        if not self.low <= value <= self.high or (self.is_open and value == self.low):
            least = f"above {self.low:g}" if self.is_open else f"{self.low:g} or more"
            told = f"{name} is {str(value)[:SHOWN_CHARS]}: it must be {least}, at most {self.high:g}"
            return Problem(name, "range", told)
        return None

    def schema(self) -> Schema:
        """The bounds."""
        return {"type": "number", "exclusiveMinimum" if self.is_open else "minimum": self.low, "maximum": self.high}


def sampling(name: str) -> Kind:
    """What sampling takes under that name."""
    bounds = SAMPLING_BOUNDS[name]
    if bounds.is_integer:
        return Whole(int(bounds.minimum), None if bounds.maximum is None else int(bounds.maximum))
    assert bounds.maximum is not None
    return Number(bounds.minimum, bounds.maximum, bounds.excludes_minimum)


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """True or false."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """Neither."""
        told = f"{name} must be true or false, not {kind_of(value)}"
        return None if isinstance(value, bool) else Problem(name, "type", told)

    def schema(self) -> Schema:
        """Either."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A string of so many characters or more."""

    least: int = 0

    def problem(self, name: str, value: Any) -> Problem | None:
        """Something else, or too short."""
        if not isinstance(value, str):
            return Problem(name, "type", f"{name} must be a string, not {kind_of(value)}")
        return None if len(value) >= self.least else Problem(name, "length", f"{name} is empty")

    def schema(self) -> Schema:
        """Any string."""
        return {"type": "string", **({"minLength": self.least} if self.least else {})}


@dataclass(frozen=True, slots=True)
class Name(Kind):
    """A name that a caller chose for a job."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """Too long, or with other characters."""
        if isinstance(value, str) and JOB_ID.fullmatch(value):
            return None
        return Problem(name, "format", f"{name} must have 1 to 64 of the characters A-Z a-z 0-9 _ -")

    def schema(self) -> Schema:
        """The pattern."""
        return {"type": "string", "pattern": f"^{JOB_ID.pattern}$"}


@dataclass(frozen=True, slots=True)
class Only(Kind):
    """One of a few values: a choice, or what is known and honoured only where it asks for nothing."""

    allowed: tuple[Any, ...]
    is_supported: bool = True

    def problem(self, name: str, value: Any) -> Problem | None:
        """Another one; 0 is not false."""
        if any(type(one) is type(value) and one == value for one in self.allowed):
            return None
        if not self.is_supported:
            return Problem(name, "unsupported", f"{name} is not supported by this worker")
        return Problem(name, "choice", f"{name} must be one of {', '.join(self.allowed)}")

    def schema(self) -> Schema:
        """These."""
        return {"enum": [*self.allowed]}


@dataclass(frozen=True, slots=True)
class Stops(Kind):
    """A string that ends an answer, or a few."""

    most: int

    def problem(self, name: str, value: Any) -> Problem | None:
        """Too many, empty or too long."""
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            return Problem(name, "type", f"{name} must be a string or a list of strings")
        if len(given) > self.most:
            return Problem(name, "length", f"{name} holds {len(given)} strings: at most {self.most} are allowed")
        if any(not 1 <= len(one) <= MAX_STOP_CHARS for one in given):
            return Problem(name, "length", f"each of {name} must have 1 to {MAX_STOP_CHARS} characters")
        return None

    def schema(self) -> Schema:
        """One or several."""
        one: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
        return {"anyOf": [one, {**listed(one), "maxItems": self.most}]}


@dataclass(frozen=True, slots=True)
class Ids(Kind):
    """Token ids; how many there are is known only when the model is."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """Something in it is no id."""
        if isinstance(value, list) and are_ids(value):
            return None
        return Problem(name, "type", f"{name} must be a list of token ids")

    def schema(self) -> Schema:
        """Whole numbers from 0."""
        return listed({"type": "integer", "minimum": 0})

    def taken(self, value: Any) -> list[int]:
        """5.0 is 5."""
        return [int(one) for one in value]


@dataclass(frozen=True, slots=True)
class Messages(Kind):
    """A conversation: roles that are known, each with text, text parts, or calls of tools; other keys are the
    template's business."""

    def problem(self, name: str, value: Any) -> Problem | None:
        """The first message that is none."""
        if not isinstance(value, list) or not value:
            return Problem(name, "type", f"{name} must be a list of at least one message")
        for i, one in enumerate(value):
            if not isinstance(one, dict):
                return Problem(name, "type", f"{name}[{i}] must be an object with role and content, not {kind_of(one)}")
            if one.get("role") not in ROLES:
                return Problem(name, "choice", f"{name}[{i}].role must be one of {', '.join(ROLES)}")
            content, calls = one.get("content"), one.get("tool_calls")
            has_calls = content is None and isinstance(calls, list) and calls
            if not (isinstance(content, str) or _are_text_parts(content) or has_calls):
                return Problem(name, "type", f"{name}[{i}].content must be text, or a list of text parts")
        return None

    def schema(self) -> Schema:
        """With content, or with calls instead of it."""
        part = made_of({"type": {"const": "text"}, "text": {"type": "string"}}, "text", is_open=True)
        content: Schema = {"anyOf": [{"type": "string"}, listed(part)]}
        role: Schema = {"enum": [*ROLES]}
        calls: Schema = listed({}, 1)
        message = made_of({"role": role, "content": content}, "role", "content", is_open=True)
        calling = made_of(
            {"role": role, "content": {"type": "null"}, "tool_calls": calls}, "role", "tool_calls", is_open=True
        )
        return listed({"anyOf": [message, calling]}, 1)


def _are_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


PRIORITY = Whole(-(1 << 31), (1 << 31) - 1)
TIMEOUT_MS = Whole(1, LONGEST_TIMEOUT_MS)


TOKENIZE = {
    "text": Field(Text(), required=True, is_secret=True),
    "add_special": Field(Flag(), True),
    "parse_special": Field(Flag(), False),
}
DETOKENIZE = {"tokens": Field(Ids(), required=True, is_secret=True)}
APPLY_TEMPLATE = {"messages": Field(Messages(), required=True, is_secret=True)}
CANCEL = {"job_id": Field(Name(), required=True)}
