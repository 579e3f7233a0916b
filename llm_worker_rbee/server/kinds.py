"""The kinds of values that fields of both dialects hold. Each knows its check and the JSON Schema that says the same.

JSON has no integers: a whole number may be written 5 or 5.0, and is an int from here on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.request import INTEGERS, MAX_STOP_CHARS, NUMBERS
from .fields import SHOWN_CHARS, Kind, Problem, Schema, kind_of

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
    if name in NUMBERS:
        return Number(*NUMBERS[name])
    least, most, _ = INTEGERS[name]
    return Whole(least, most)


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
