"""Request bodies, declared once: a table of fields gives the validation and the JSON Schema of `/openapi.json`.

A body is decoded to a plain object, validated against its table (every issue is reported at once), and only then made
into a request. Values are echoed in errors, except prompts, messages and stop strings. JSON has no integers: 5.0 is 5.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..errors import InvalidRequestError
from ..sampling_params import (
    MAX_SEED,
    MAX_STOP_CHARS,
    OBJECT_MODES,
    SAMPLING_BOUNDS,
    Bounds,
    SamplingParams,
    StructuredOutputsParams,
)
from .json_schema import Schema, array_schema, object_schema
from .settings import LATEST

JSON_TYPE = "application/json"  # required of bodies: a page of another origin cannot send it without a CORS preflight
MISSING: Any = object()
MAX_ECHOED_CHARS = 100  # of a value in an error
MAX_REPORTED_UNKNOWN = 32  # unknown fields reported by name
MAX_LISTED_IGNORED = 256  # ignored fields listed in the header
CHUNK_ITEMS = 1 << 15  # items of a long list that are handled at a time, so that other threads get the interpreter
MAX_CHOICES = 16
MAX_TIMEOUT_MS = 24 * 3600 * 1000
SURROGATE = re.compile("[\ud800-\udfff]")
MEDIA = {
    "audio": "audio is",
    "video": "video is",
    "file": "files are",
    "document": "documents are",
}
KINDS = ("chat", "embedding", "rerank")  # of models
TYPE_NAMES = {
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class ValidationIssue(NamedTuple):
    """One fault of a body."""

    field: str
    constraint: str  # type, range, length, required, unknown, unsupported, choice, format, conflict, json, invalid
    message: str
    value: Any = MISSING


class ValidationError(InvalidRequestError):
    """A body with at least one issue."""

    def __init__(self, issues: list[ValidationIssue]) -> None:
        super().__init__("; ".join(issue.message for issue in issues), issues[0].field)
        self.issues = issues


def require(holds: bool, field: str, constraint: str, message: str) -> None:
    """Raise unless a condition holds."""
    if not holds:
        raise ValidationError([ValidationIssue(field, constraint, message)])


class ModelLimits(msgspec.Struct, frozen=True):
    """The limits and settings for checking a body, in addition to its schema."""

    max_context: int
    vocab_size: int


class ParseOptions(msgspec.Struct, frozen=True):
    """How a body is parsed."""

    limits: ModelLimits | None = None  # None while the model is loading
    ignores_unknown: bool = False  # unknown fields are listed in the record instead of refused
    is_stream: bool = False  # of a job: the reply is its stream
    has_pool: bool = False  # models are loaded and unloaded: `keep_alive` has an effect


class FieldType(ABC):
    """The type of a field: validation and JSON Schema side by side, so that they agree."""

    @abstractmethod
    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        """Check a value that is not null."""

    @abstractmethod
    def json_schema(self) -> Schema:
        """Return the JSON Schema that accepts the same values."""

    def coerce(self, value: Any) -> Any:
        """Return a valid value as the worker uses it."""
        return value


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body. A null equals an absent field, unless the field is required."""

    type: FieldType
    default: Any = None
    required: bool = False
    is_secret: bool = False  # never echoed in errors


def decode_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object; raise for anything else, lone surrogates included."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ValidationError([ValidationIssue("body", "json", "the body is nested too deeply")]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        issue = _find_surrogate(body) or ValidationIssue("body", "json", f"the body is not valid JSON: {why}")
        raise ValidationError([issue]) from None
    if not isinstance(value, dict):
        message = f"the body must be a JSON object, not {type_name(value)}"
        raise ValidationError([ValidationIssue("body", "type", message)])
    return value


def _find_surrogate(body: bytes) -> ValidationIssue | None:
    """Return the place of a non-Unicode text in a body that is otherwise JSON."""
    text = body.decode(errors="surrogateescape")
    try:
        values = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return None
    while values:
        place, value = values.pop()
        texts = value if isinstance(value, dict) else [value] if isinstance(value, str) else ()
        if (match := next(filter(None, map(SURROGATE.search, texts)), None)) is not None:
            place = f"a name in {place or 'the body'}" if isinstance(value, dict) else place or "body"
            is_byte, code = match[0] >= "\udc80" and SURROGATE.search(text) is not None, ord(match[0])
            holds = f"UTF-8: it holds the byte 0x{code & 255:02X}"
            holds = holds if is_byte else f"Unicode: it holds the lone surrogate U+{code:04X}"
            return ValidationIssue(place, "format", f"{place} is not valid {holds}")
        if isinstance(value, dict):
            values += [(f"{place}.{key[:MAX_ECHOED_CHARS]}".lstrip("."), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            values += [(f"{place}[{i}]", inner) for i, inner in enumerate(value)]
    return None


def unsupported_part(place: str, kind: Any) -> ValidationIssue | None:
    """Return the issue of a non-text part of a message, by its type; None for an unknown type."""
    media = next((media for word, media in MEDIA.items() if isinstance(kind, str) and word in kind), None)
    message = f"{place} is {str(kind)[:MAX_ECHOED_CHARS]!r}: {media} not supported by this worker, send text"
    return None if media is None else ValidationIssue(place, "unsupported", message)


def tagged_name(name: str) -> str:
    """Return the name of a model with a tag, as in Ollama."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def validate_body(
    body: Mapping[str, Any], table: Mapping[str, Field], *, ignored: list[str] | None = None
) -> dict[str, Any]:
    """Return the values of all fields of the table, with defaults; raise with all issues.

    Unknown fields are issues, or are appended to `ignored` if it is given.
    """
    issues: list[ValidationIssue] = []
    if unknown := [name for name in body if name not in table]:
        if ignored is None:
            issues += _unknown_fields(unknown)
        else:
            ignored += unknown[:MAX_LISTED_IGNORED]
    values: dict[str, Any] = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None:
            if field.required:
                issues.append(ValidationIssue(name, "required", f"{name} is required"))
            values[name] = field.default
            continue
        issue = field.type.validate(name, value)
        if issue is not None:
            issues.append(issue._replace(value=MISSING if field.is_secret else _echo(value)))
        else:
            values[name] = field.type.coerce(value)
    if issues:
        raise ValidationError(issues)
    return values


def validate_known(
    body: bytes | dict[str, Any], table: Mapping[str, Field], options: ParseOptions
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a body, and the names of unknown fields where they are ignored."""
    ignored: list[str] = []
    fields = decode_object(body) if isinstance(body, bytes) else body
    return validate_body(fields, table, ignored=ignored if options.ignores_unknown else None), ignored


def table_parser(table: Mapping[str, Field]) -> tuple[Callable[[bytes, ParseOptions], dict[str, Any]], Any]:
    """Return the parser of a body that is a table of fields, and the type of its record."""
    return lambda body, options: validate_known(body, table, options)[0], dict[str, Any]


def _unknown_fields(names: list[str]) -> list[ValidationIssue]:
    shown = [name[:MAX_ECHOED_CHARS] for name in names[:MAX_REPORTED_UNKNOWN]]
    issues = [ValidationIssue(name, "unknown", f"unknown field {name!r}") for name in shown]
    if (num_hidden := len(names) - len(shown)) > 0:
        issues.append(ValidationIssue("body", "unknown", f"and {num_hidden} more unknown fields"))
    return issues


def _echo(value: Any) -> Any:
    """Return the part of a value that an error echoes; none of lists and objects."""
    if isinstance(value, str):
        return value[:MAX_ECHOED_CHARS]
    if isinstance(value, (list, dict)):
        return MISSING
    return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)[:MAX_ECHOED_CHARS]


def type_name(value: Any) -> str:
    """Return the JSON type of a value, with its article."""
    return "null" if value is None else TYPE_NAMES.get(type(value), type(value).__name__)


def _is_token_id(value: Any) -> bool:
    is_integer = isinstance(value, int) if not isinstance(value, float) else value.is_integer()
    return is_integer and not isinstance(value, bool) and value >= 0


def are_token_ids(values: list[Any]) -> bool:
    """Return whether all are integers of 0 or more. There may be millions: they are checked a chunk at a time."""
    chunks = (values[at : at + CHUNK_ITEMS] for at in range(0, len(values), CHUNK_ITEMS))
    return all(min(part) >= 0 if set(map(type, part)) == {int} else all(map(_is_token_id, part)) for part in chunks)


@dataclass(frozen=True, slots=True)
class Number(FieldType):
    """A number or integer within bounds; the bounds give the range of the error message."""

    bounds: Bounds

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        kind = "a whole number" if self.bounds.is_integer else "a number"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return ValidationIssue(name, "type", f"{name} must be {kind}, not {type_name(value)}")
        if self.bounds.is_integer and isinstance(value, float) and not value.is_integer():
            return ValidationIssue(name, "type", f"{name} must be {kind}, not {value}")
        if value not in self.bounds:
            shown = str(value)[:MAX_ECHOED_CHARS]
            return ValidationIssue(name, "range", f"{name} is {shown}: it must be {self.bounds.describe()}")
        return None

    def json_schema(self) -> Schema:
        low = "exclusiveMinimum" if self.bounds.excludes_minimum else "minimum"
        schema: Schema = {"type": "integer" if self.bounds.is_integer else "number", low: self.bounds.minimum}
        return schema if self.bounds.maximum is None else {**schema, "maximum": self.bounds.maximum}

    def coerce(self, value: Any) -> Any:
        return min(int(value), MAX_SEED - 1) if self.bounds.is_integer else value  # the largest integer of MessagePack


def integer(minimum: int, maximum: int | None = None) -> Number:
    """Return the type of an integer within bounds."""
    return Number(Bounds(minimum, maximum, is_integer=True))


@dataclass(frozen=True, slots=True)
class MaxTokens(FieldType):
    """How many tokens to generate; `unlimited` are what is left of the context, None in the validated body."""

    minimum: int = 1
    unlimited: tuple[int, ...] = (-1,)

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        return None if value in self.unlimited else integer(self.minimum).validate(name, value)

    def json_schema(self) -> Schema:
        unlimited: Schema = {"const": -1} if len(self.unlimited) == 1 else {"enum": [*self.unlimited]}
        return {"anyOf": [unlimited, integer(self.minimum).json_schema()]}

    def coerce(self, value: Any) -> int | None:
        return None if value in self.unlimited else integer(self.minimum).coerce(value)


class AnyObject(FieldType):
    """An object with any content."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        message = f"{name} must be an object, not {type_name(value)}"
        return None if isinstance(value, dict) else ValidationIssue(name, "type", message)

    def json_schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class BoundedObject(AnyObject):
    """A JSON object of bounded size and depth."""

    max_values: int = 1_000
    max_depth: int = 16

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if (issue := AnyObject.validate(self, name, value)) is not None:
            return issue
        count, depth = measure(value)
        if count > self.max_values or depth > self.max_depth:
            message = f"{name} holds {count} values, {depth} deep: at most {self.max_values}, {self.max_depth} deep"
            return ValidationIssue(name, "length", message)
        return None


def measure(value: Any) -> tuple[int, int]:
    """Return the number of values in a JSON value and their depth, without recursion."""
    count, depth, level = 0, 0, [value]
    while level:
        count, depth = count + len(level), depth + 1
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for values in inner for item in values]
    return count, depth


class StructuredOutputs(FieldType):
    """One of json, json_object, regex, choice, grammar, as in vLLM; additional_properties may accompany json."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, dict):
            return ValidationIssue(name, "type", f"{name} must be an object, not {type_name(value)}")
        fields = StructuredOutputsParams.__dataclass_fields__
        if unknown := [key for key in value if key not in fields]:
            return ValidationIssue(name, "unknown", f"{name} has no {unknown[0][:100]!r}: use {', '.join(fields)}")
        try:
            StructuredOutputsParams(**value)
        except InvalidRequestError as error:
            return ValidationIssue(name, "invalid", str(error))
        return None

    def json_schema(self) -> Schema:
        kinds: dict[str, Schema] = {
            "json": {"type": ["object", "boolean", "string"]},
            "json_object": {"const": True},
            "regex": {"type": "string"},
            "choice": array_schema({"type": "string", "minLength": 1}, 1),
            "grammar": {"type": "string"},
        }
        objects: dict[str, Schema] = {"additional_properties": {"enum": [*OBJECT_MODES]}}
        return {
            "anyOf": [
                object_schema({kind: schema, **(objects if kind == "json" else {})}, kind)
                for kind, schema in kinds.items()
            ]
        }


class Boolean(FieldType):
    """True or false."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        message = f"{name} must be true or false, not {type_name(value)}"
        return None if isinstance(value, bool) else ValidationIssue(name, "type", message)

    def json_schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(FieldType):
    """A string with a minimum length."""

    min_length: int = 0

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, str):
            return ValidationIssue(name, "type", f"{name} must be a string, not {type_name(value)}")
        return None if len(value) >= self.min_length else ValidationIssue(name, "length", f"{name} is empty")

    def json_schema(self) -> Schema:
        return {"type": "string", **({"minLength": self.min_length} if self.min_length else {})}


@dataclass(frozen=True, slots=True)
class Enum(FieldType):
    """One of a few values. Not supported: a known field that is accepted only with values that change nothing."""

    allowed: tuple[Any, ...]
    is_supported: bool = True

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if any(type(allowed) is type(value) and allowed == value for allowed in self.allowed):  # 0 is not false
            return None
        if not self.is_supported:
            return ValidationIssue(name, "unsupported", f"{name} is not supported by this worker")
        return ValidationIssue(name, "choice", f"{name} must be one of {', '.join(self.allowed)}")

    def json_schema(self) -> Schema:
        return {"enum": [*self.allowed]}


@dataclass(frozen=True, slots=True)
class StopStrings(FieldType):
    """A stop string, or a list of them."""

    max_items: int

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            return ValidationIssue(name, "type", f"{name} must be a string or a list of strings")
        if len(stops) > self.max_items:
            message = f"{name} holds {len(stops)} strings: at most {self.max_items} are allowed"
            return ValidationIssue(name, "length", message)
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            return ValidationIssue(name, "length", f"each of {name} must have 1 to {MAX_STOP_CHARS} characters")
        return None

    def json_schema(self) -> Schema:
        stop: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
        return {"anyOf": [stop, {**array_schema(stop), "maxItems": self.max_items}]}


class TokenIds(FieldType):
    """A list of token ids; the vocabulary's size is checked once the model is loaded."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, list) and are_token_ids(value):
            return None
        return ValidationIssue(name, "type", f"{name} must be a list of token ids")

    def json_schema(self) -> Schema:
        return array_schema({"type": "integer", "minimum": 0})

    def coerce(self, value: Any) -> list[int]:
        return [int(token) for token in value]


DEFAULTS = SamplingParams()
# Bounds and defaults come from SamplingParams: None where the model has the default. Each dialect has its own
# max_tokens and logprobs.
SAMPLING = {
    name: Field(Number(bounds), getattr(DEFAULTS, name))
    for name, bounds in SAMPLING_BOUNDS.items()
    if name not in ("max_tokens", "logprobs")
}
PRIORITY = Field(integer(-(1 << 31), (1 << 31) - 1), 0)
TIMEOUT_MS = Field(integer(1, MAX_TIMEOUT_MS))


def sampling_params(
    values: Mapping[str, Any], limits: ModelLimits | None, max_tokens: int | None, **extra: Any
) -> SamplingParams:
    """Return the sampling parameters of a validated body; raise for a bias of a token past the vocabulary."""
    same = {name: values[name] for name in (*SAMPLING, "stop", "ignore_eos") if name in values}
    bias = {int(token): float(amount) for token, amount in values.get("logit_bias", {}).items()}
    if limits is not None and (token := max(bias, default=0)) >= limits.vocab_size:
        message = f"logit_bias names token {token}, past the vocabulary of {limits.vocab_size}"
        raise InvalidRequestError(message, "logit_bias")
    return SamplingParams(**same, logit_bias=bias, max_tokens=max_tokens, **extra)


def unsupported(*allowed: Any) -> Field:
    """Return an unsupported field: only these values, which have no effect, are accepted."""
    return Field(Enum(allowed, is_supported=False))


def field_schema(field: Field) -> Schema:
    """Return the JSON Schema of a field, with null and default where it is optional."""
    schema = field.type.json_schema()
    if not field.required:
        schema = _nullable(schema)
        if field.default is not None:
            schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return schema


def _nullable(schema: Schema) -> Schema:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def table_schema(table: Mapping[str, Field], names: Sequence[str] = (), *, is_open: bool = False) -> Schema:
    """Return the JSON Schema of a body; `names` are the values of the field `model`."""
    properties = {name: field_schema(field) for name, field in table.items()}
    if "model" in properties and names:
        both = dict.fromkeys([*names, *map(tagged_name, names)])
        properties["model"] = {"enum": [*both, *([] if table["model"].required else [None])]}
    return object_schema(properties, *(name for name, field in table.items() if field.required), is_open=is_open)
