"""What a request may say: one table of fields for each dialect, and all that is wrong with a body told at once.

A body is decoded to a plain object, checked against the table, and only then made into a request. A field is refused by
name: unknown, of the wrong type, out of range, missing. What it said is repeated, but never prompts, messages or stops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..engine.request import INTEGERS, MAX_STOP_CHARS, NUMBERS
from ..errors import InvalidRequestError

MISSING: Any = object()
SHOWN_CHARS = 100  # of a value that is repeated
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
ROLES = ("system", "developer", "user", "assistant", "tool")
LONGEST_TIMEOUT_MS = 24 * 3600 * 1000


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


Check = Callable[[str, Any], Problem | None]  # (name, value) -> what is wrong


@dataclass(frozen=True, slots=True)
class Field:
    """How one field is checked; None is as good as absent where it may be absent."""

    check: Check
    default: Any = None
    required: bool = False
    is_secret: bool = False  # what it said is never repeated


def read_object(body: bytes) -> dict[str, Any]:
    """JSON bytes -> an object; anything else is refused."""
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
        raise FieldsError([Problem("body", "type", f"the body must be a JSON object, not {_kind(found)}")])
    return found


def checked(body: Mapping[str, Any], table: Mapping[str, Field], *, ignored: list[str] | None = None) -> dict[str, Any]:
    """The values of all fields of the table; unknown ones are refused, or listed in `ignored` where that is given."""
    problems: list[Problem] = []
    for name in body:
        if name not in table:
            if ignored is None:
                problems.append(
                    Problem(str(name)[:SHOWN_CHARS], "unknown", f"unknown field {str(name)[:SHOWN_CHARS]!r}")
                )
            else:
                ignored.append(name)
    values: dict[str, Any] = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None:
            if field.required:
                problems.append(Problem(name, "required", f"{name} is required"))
            values[name] = field.default
            continue
        values[name] = value
        problem = field.check(name, value)
        if problem is not None:
            problems.append(problem._replace(value=MISSING if field.is_secret else _repeated(value)))
    if problems:
        raise FieldsError(problems)
    return values


def number(name: str, value: Any) -> Problem | None:
    """Within the bounds that sampling has for it."""
    low, high, open_end = NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Problem(name, "type", f"{name} must be a number, not {_kind(value)}")
    if not low <= value <= high or (open_end and value == low):
        least = f"above {low:g}" if open_end else f"{low:g} or more"
        return Problem(name, "range", f"{name} is {str(value)[:SHOWN_CHARS]}: it must be {least}, at most {high:g}")
    return None


def integer(least: int, most: int | None = None) -> Check:
    """A whole number within bounds."""

    def check(name: str, value: Any) -> Problem | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return Problem(name, "type", f"{name} must be a whole number, not {_kind(value)}")
        if value < least or (most is not None and value > most):
            limit = "" if most is None else f", at most {most}"
            return Problem(name, "range", f"{name} is {str(value)[:SHOWN_CHARS]}: it must be {least} or more{limit}")
        return None

    return check


def sampling_integer(name: str) -> Check:
    """Within the bounds that sampling has for it."""
    least, most, _ = INTEGERS[name]
    return integer(least, most)


def boolean(name: str, value: Any) -> Problem | None:
    """True or false."""
    return (
        None if isinstance(value, bool) else Problem(name, "type", f"{name} must be true or false, not {_kind(value)}")
    )


def text(name: str, value: Any) -> Problem | None:
    """Any text that is text: a lone surrogate is not."""
    if not isinstance(value, str):
        return Problem(name, "type", f"{name} must be a string, not {_kind(value)}")
    return _surrogates(name, value)


def choice(*allowed: str) -> Check:
    """One of a few words."""

    def check(name: str, value: Any) -> Problem | None:
        return None if value in allowed else Problem(name, "choice", f"{name} must be one of {', '.join(allowed)}")

    return check


def messages(name: str, value: Any) -> Problem | None:
    """A conversation: roles that are known, each with text or text parts."""
    if not isinstance(value, list) or not value:
        return Problem(name, "type", f"{name} must be a list of at least one message")
    for i, one in enumerate(value):
        if not isinstance(one, dict):
            return Problem(name, "type", f"{name}[{i}] must be an object with role and content, not {_kind(one)}")
        if one.get("role") not in ROLES:
            return Problem(name, "choice", f"{name}[{i}].role must be one of {', '.join(ROLES)}")
        content = one.get("content")
        if not (isinstance(content, str) or _are_text_parts(content) or (content is None and one.get("tool_calls"))):
            return Problem(name, "type", f"{name}[{i}].content must be text, or a list of text parts")
    return None


def conversation(messages: list[Any]) -> list[Any]:
    """Checked messages as templates know them: `developer` is the newer name of a role."""
    return [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]


def job_id(name: str, value: Any) -> Problem | None:
    """A name that the caller chose."""
    if isinstance(value, str) and JOB_ID.fullmatch(value):
        return None
    return Problem(name, "format", f"{name} must have 1 to 64 of the characters A-Z a-z 0-9 _ -")


def stops(most: int) -> Check:
    """A string, or a few."""

    def check(name: str, value: Any) -> Problem | None:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            return Problem(name, "type", f"{name} must be a string or a list of strings")
        if len(given) > most:
            return Problem(name, "length", f"{name} holds {len(given)} strings: at most {most} are allowed")
        if any(not 1 <= len(one) <= MAX_STOP_CHARS for one in given):
            return Problem(name, "length", f"each of {name} must have 1 to {MAX_STOP_CHARS} characters")
        return next((problem for one in given if (problem := _surrogates(name, one))), None)

    return check


def _are_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _repeated(value: Any) -> Any:
    """A value that is told again: a word of it where it is long, nothing where it is large."""
    if isinstance(value, str):
        return value[:SHOWN_CHARS]
    if isinstance(value, (list, dict)):
        return MISSING
    return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)[:SHOWN_CHARS]


def _surrogates(name: str, value: str) -> Problem | None:
    try:
        value.encode()
    except UnicodeEncodeError:
        return Problem(name, "encoding", f"{name} holds half a character (a lone surrogate)")
    return None


def _kind(value: Any) -> str:
    kinds = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
