"""JSON schemas with their intended meaning, in keywords that llguidance enforces. Plain values: no grammar, no tokens.

`prepare_schema` drops formats that say nothing, bounds numbers by what doubles and 64-bit integers hold, with which
llguidance counts, and closes objects: one that lists its properties has no others unless the schema says so, as with
`unevaluatedProperties: false`. Unsupported keywords are refused by name; objects that are not safe to close stay open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ..tokenizer.chat.values import look_up

Schema = dict[str, Any]
# Whitespace between the parts of a JSON document: a space, or a new line with its indentation. Small models that may
# write more go on with it to the end.
JSON_SPACES = {"whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,40}"}
ANNOTATIONS = frozenset({"description", "title", "examples", "default", "$comment", "deprecated"})
FORMATS = frozenset({  # of draft 2020-12; others are annotations
    "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri",
    "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference", "uri-template",
    "uuid",
})  # fmt: skip
DATA = frozenset({"enum", "const", "default", "examples"})  # what these hold is no schema
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})

# Bounds of numbers: the smallest but 0; the largest, below 2**63 and exact as a double; those that a schema leaves out.
MIN_BOUND, MAX_BOUND, OPEN_INTEGER, OPEN_NUMBER = 1e-50, 92 * 10**17, 9 * 10**18, 10**17
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
OF_NUMBERS = frozenset({*LOWER, *UPPER, "multipleOf"})

SAME_VALUE = frozenset({"$ref", "allOf", "anyOf", "oneOf"})  # they hold schemas of the same value
OPENERS = frozenset({  # with one of these `properties` is not all that is said of the names in an object
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "dependentSchemas",
    "dependentRequired", "dependencies", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef",
})  # fmt: skip
OF_ITEMS = frozenset({"items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"})
STRUCTURE = SAME_VALUE | OPENERS | OF_ITEMS | {"properties"}
ABOUT_NAMES = STRUCTURE | {"required", "minProperties"}
OF_PLACE = frozenset({"$schema", "$id", "x-guidance", "$defs", "definitions"})  # not copied with a schema
MAX_VISITS = 50_000  # of schemas, to find out which describe the same value


def prepare_schema(schema: Any, *, is_open: bool = False) -> Any:
    """Return a schema that llguidance enforces as it is; raise a `ValueError` that names a part it cannot enforce."""
    try:
        held = map_schemas(schema, _hold)
        if not isinstance(held, dict):
            return held
        text, options = json.dumps(held), held.pop("x-guidance", JSON_SPACES)
        if text.count('"$id": "') <= ("$id" in held):  # else references do not mean what they say
            held = held if is_open else close_objects(held)
            held = held if '"oneOf": ' in text else share_numbers(held)  # options are compared without references
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return {**held, "x-guidance": options}  # at the end: llguidance puts the last keyword in its place


def map_schemas(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a schema with every schema in it changed, the inner ones first."""
    if isinstance(schema, list):
        return [map_schemas(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return change(
        {
            key: {name: map_schemas(item, change) for name, item in value.items()}
            if key in NAMED_SCHEMAS and isinstance(value, dict)
            else value
            if key in DATA
            else map_schemas(value, change)
            for key, value in schema.items()
        }
    )


def without_annotations(schema: Any) -> Any:
    """Return a schema without the keywords that allow and forbid nothing: descriptions are long."""
    return map_schemas(schema, lambda inner: {key: inner[key] for key in inner if key not in ANNOTATIONS})


def _hold(schema: Schema) -> Schema:
    """Return one schema without unknown formats and with bounds, and with `anyOf` for a `oneOf` whose options a
    discriminator tells apart; raise for numbers that cannot be held."""
    for key in schema.keys() & {"const", "enum", *OF_NUMBERS}:
        _require_exact(key, schema[key])
    step = schema.get("multipleOf", 1)
    if _is_number(step) and step <= 0:
        raise ValueError(f"multipleOf is {step}: it must be above 0")
    names = {"oneOf": "anyOf"} if "discriminator" in schema and "anyOf" not in schema else {}
    is_unknown = isinstance(schema.get("format"), str) and schema["format"] not in FORMATS
    return _with_bounds({names.get(key, key): schema[key] for key in schema if key != "format" or not is_unknown})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_exact(key: str, value: Any) -> None:
    """Raise for a number that is not JSON, and for an integer in a constant that a double does not hold."""
    for inner in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        _require_exact(key, inner)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} has {value}, which is not JSON")
    if isinstance(value, int) and key in DATA and (abs(value) > MAX_BOUND or int(float(value)) != value):
        raise ValueError(f"{key} has {value}, an integer that a double does not hold: make it a string")


def _with_bounds(schema: Schema) -> Schema:
    """Return a schema whose numbers are bounded on both sides, rounded inwards to doubles. A number without any bound
    stays so: llguidance allows no exponent where there is one."""
    types = schema["type"] if isinstance(schema.get("type"), (str, list)) else ()
    is_number, is_integer = "number" in types, "integer" in types and "number" not in types
    if not is_integer and schema.keys().isdisjoint(OF_NUMBERS):
        return schema
    ends: dict[str, float] = {}  # of the value, of the negated value for a minimum: the smaller, the narrower
    for key in (key for key in LOWER + UPPER if _is_number(schema.get(key))):
        side, end = (LOWER, -schema[key]) if key in LOWER else (UPPER, schema[key])
        if is_integer:
            end, key = math.floor(end) if key == side[0] else math.ceil(end) - 1, side[0]
        if 0 < abs(end) < MIN_BOUND:
            end = 0 if end > 0 else -MIN_BOUND
        end = min(max(end, -2 * MAX_BOUND), MAX_BOUND, ends.get(key, MAX_BOUND))
        rounded = float(end) if float(end) <= end else math.nextafter(end, -math.inf)
        ends[key] = int(rounded) if isinstance(end, int) else rounded
    size = OPEN_INTEGER if is_integer else OPEN_NUMBER
    for side, opposite in ((LOWER, UPPER), (UPPER, LOWER)):
        if (is_integer or (is_number and ends)) and "multipleOf" not in schema and not ends.keys() & set(side):
            is_beyond = any(-ends[key] >= size for key in opposite if key in ends)
            ends[side[is_number]] = MAX_BOUND if is_beyond else size
    low, high = (min(ends.get(key, MAX_BOUND) for key in side) for side in (LOWER, UPPER))
    is_exclusive = low == ends.get(LOWER[1]) or high == ends.get(UPPER[1])
    if -low > high or (-low == high and is_exclusive):
        bounds = " and ".join(f"{key} {schema[key]}" for key in LOWER + UPPER if key in schema)
        kind = "integer" if is_integer else "number"
        raise ValueError(f"{bounds} leave no {kind} (of those that a double holds, up to {MAX_BOUND:.1e})")
    for key, exclusive in (LOWER, UPPER):  # between two integers llguidance takes one that is excluded for included
        if exclusive in ends and ends[exclusive] == int(ends[exclusive]) and math.trunc(-low) == math.trunc(high):
            ends[key] = min(math.nextafter(ends.pop(exclusive) or -MIN_BOUND, -math.inf), ends.get(key, MAX_BOUND))
    kept = {key: value for key, value in schema.items() if key not in LOWER + UPPER or not _is_number(value)}
    return kept | {key: -end if key in LOWER else end for key, end in ends.items()}


def share_numbers(schema: Schema) -> Schema:
    """Return a schema with one definition for equal numbers: llguidance takes milliseconds to compile each range."""
    names: dict[str, str] = {}

    def share(inner: Schema) -> Schema:
        if inner.keys() - OF_NUMBERS - ANNOTATIONS != {"type"} or not any(
            _is_number(inner.get(key)) for key in OF_NUMBERS
        ):
            return inner
        text = json.dumps({key: inner[key] for key in sorted(inner.keys() - ANNOTATIONS)})
        return {"$ref": f"#/$defs/{names.setdefault(text, f'number-{len(names)}')}"}

    shared = map_schemas(schema, share)
    definitions = {name: json.loads(text) for text, name in names.items()}
    return {**shared, "$defs": {**shared.get("$defs", {}), **definitions}} if definitions else shared


def close_objects(schema: Schema) -> Schema:
    """Return a schema whose objects have only properties that it names, where that is safe."""
    try:
        return _Closer(schema).close_root()
    except (AttributeError, TypeError, LookupError):  # a keyword has a value of the wrong type: llguidance names it
        return schema


class _Closer:
    """Closes the objects of one schema. Definitions stay as they are, open: references get closed copies of them."""

    def __init__(self, root: Schema) -> None:
        self._root, self._num_visits = root, 0
        self._copies: dict[tuple[str, bool], str] = {}  # their names, by what they are copies of, and if as a part
        self._waiting: list[tuple[str, bool]] = []

    def close_root(self) -> Schema:
        """Close the root and all that it refers to."""
        closed: Schema = self.close(self._root)
        definitions = dict(closed.get("$defs", {}))
        for reference, is_part in self._waiting:  # which grows
            copy = {key: value for key, value in look_up(reference, self._root).items() if key not in OF_PLACE}
            definitions[self._copies[reference, is_part]] = self.close(copy, is_part=is_part)
        return {**closed, "$defs": definitions} if definitions else closed

    def close(self, schema: Any, *, is_part: bool = False) -> Any:
        """Close the objects of a schema; in a part, which shares its value with other schemas, only inner objects."""
        if not isinstance(schema, dict) or schema.keys().isdisjoint(STRUCTURE):
            return schema
        if is_part or self._is_choice(schema):
            return self._close_inside(schema, is_part)
        parts = self._parts(schema)
        if not _are_separate(parts):
            return schema
        closed = self._close_inside(schema, bool(schema.keys() & SAME_VALUE))
        properties = dict.fromkeys(_names(parts), True) | closed.get("properties", {})
        num_allowed = sum(inner is not False for inner in properties.values())
        is_listed = any("properties" in part for part in self._parts(schema, ("allOf",)))  # whatever the options say
        if not is_listed or any(_is_open(part) or part.get("minProperties", 0) > num_allowed for part in parts):
            return closed
        return {**closed, "properties": properties, "additionalProperties": False}

    def _close_inside(self, schema: Schema, is_part: bool) -> Schema:
        """Close the schemas inside a schema; schemas of the same value are parts if `is_part`, others stand alone."""
        closed = dict(schema)
        for key, value in schema.items():
            if key == "$ref":
                closed[key] = self._refer(value, is_part)
            elif key in SAME_VALUE:
                closed[key] = [self.close(inner, is_part=is_part) for inner in value]
            elif key in ("properties", "patternProperties"):
                closed[key] = {name: self.close(inner) for name, inner in value.items()}
            elif key in ("items", "prefixItems", "additionalItems", "additionalProperties"):
                closed[key] = [self.close(inner) for inner in value] if isinstance(value, list) else self.close(value)
        return closed

    def _is_choice(self, schema: Schema) -> bool:
        """Whether a schema only refers to another or offers options, so that each describes the value alone."""
        structure = schema.keys() & (STRUCTURE | {"minProperties"})
        if len(structure) != 1 or not structure <= SAME_VALUE or len(schema.get("allOf", ())) > 1 or _is_open(schema):
            return False
        required, options = set(schema.get("required", ())), schema[structure.pop()]
        options = options if isinstance(options, list) else [schema]
        return not required or all(required <= {*_names(self._parts(option), "properties")} for option in options)

    def _refer(self, reference: str, is_part: bool) -> str:
        """Return a reference to a closed copy of a definition, or the same where it cannot be found."""
        if not isinstance(look_up(reference, self._root), dict):
            return reference
        if (reference, is_part) not in self._copies:
            self._copies[reference, is_part] = f"closed-{len(self._copies)}"
            self._waiting.append((reference, is_part))
        return f"#/$defs/{self._copies[reference, is_part]}"

    def _parts(self, schema: Any, keys: tuple[str, ...] = ("allOf", "anyOf", "oneOf")) -> list[Schema]:
        """Return all schemas that describe the same value as one, that one first; none where that is not known."""
        parts, seen = [schema], {id(schema)}
        for part in parts:  # which grows
            self._num_visits += 1
            if not isinstance(part, dict) or self._num_visits > MAX_VISITS:
                return []
            inner = [item for key in keys for item in part.get(key, ())]
            inner += [look_up(part["$ref"], self._root)] if "$ref" in part else []
            parts += [item for item in inner if id(item) not in seen]
            seen.update(map(id, inner))
        return parts


def _names(parts: list[Schema], *keys: str) -> list[str]:
    return [name for part in parts for key in keys or ("properties", "required") for name in part.get(key, ())]


def _is_open(schema: Schema) -> bool:
    """Whether a schema restricts names in an object beyond `properties`."""
    values = (schema.get("const"), *schema.get("enum", ()))
    return bool(schema.keys() & OPENERS) or any(isinstance(value, dict) for value in values)


def _are_separate(parts: list[Schema]) -> bool:
    """Whether no two schemas inside these parts, which describe one value, describe the same value."""
    names, patterns = (
        [
            name
            for part in parts
            for name, inner in part.get(key, {}).items()
            if isinstance(inner, dict) and (inner.keys() & ABOUT_NAMES or _is_open(inner))
        ]
        for key in ("properties", "patternProperties")
    )
    num_arrays = sum(bool(part.keys() & OF_ITEMS) for part in parts)
    is_alone = len(parts) == 1 or (bool(parts) and not any(part.keys() & OPENERS for part in parts))
    return is_alone and num_arrays < 2 and len(set(names)) == len(names) and not (names and patterns)
