"""Values of arguments: nearly valid JSON, and other notations, by the tool's schema or as literals."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Literal
from urllib.parse import unquote

MAX_REFERENCES = 8  # of schemas that refer to one another
MAX_OPTIONS_DEPTH = 4  # of options within options
MAX_NESTED = 256
_SPACE = re.compile(r"[ \n\t\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile('[^ \\n\\t\\r,:\\[\\]{}"\ud800-\udfff]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_START = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


def load_json(text: str) -> Any:
    """Return the value of JSON, None for text that is not."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def escape(text: str) -> str:
    """Return a text escaped for use between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def resolve_reference(schema: Any, root: Any) -> Any:
    """Return a schema with its `$ref` into the root schema replaced; a `$ref` that cannot be found stays."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        target = look_up(schema["$ref"], root)
        if not isinstance(target, dict):
            return schema
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def look_up(reference: str, root: Any) -> Any:
    """Return the schema that a reference into the root schema names; None where it cannot be found."""
    target = root if f"{reference}/".startswith("#/") else None
    for key in reference.removeprefix("#").split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, dict) else None
    return target


def schema_types(schema: Any, root: Any = None) -> set[str]:
    """Return the types that a schema allows; empty where it does not say."""
    types: set[str] = set()
    seen: set[int] = set()  # lists of options, which may refer to themselves: each is read once
    waiting = [(schema, 0)]
    for part, depth in waiting:
        schema = resolve_reference(part, root)
        if not isinstance(schema, dict):
            continue
        declared = schema.get("type")
        if isinstance(declared, str):
            types.add(declared)
        elif isinstance(declared, list):
            types.update(item for item in declared if isinstance(item, str))
        elif isinstance(values := schema.get("enum"), list):
            types.update(map(_type_of, values))
        elif "const" in schema:
            types.add(_type_of(schema["const"]))
        elif depth < MAX_OPTIONS_DEPTH:
            for key in ("anyOf", "oneOf", "allOf"):
                options = schema.get(key)
                if isinstance(options, list) and id(options) not in seen:
                    seen.add(id(options))
                    waiting += [(option, depth + 1) for option in options]
    return types


def fits(value: Any, schema: Any, root: Any) -> bool:
    """Return whether a value has the types, the required properties and the enumerated values of a schema."""
    schema = resolve_reference(schema, root)
    if not isinstance(schema, dict):
        return True
    types, kind = schema_types(schema, root), _type_of(value)
    is_number = kind in ("integer", "number") and ("number" in types or ("integer" in types and value % 1 == 0))
    properties, required, values = (schema.get(key) for key in ("properties", "required", "enum"))
    if (types and kind not in types and not is_number) or (isinstance(values, list) and value not in values):
        return False
    if isinstance(value, list):
        return all(fits(item, schema.get("items"), root) for item in value)
    if not isinstance(value, dict):
        return True
    named = properties if isinstance(properties, dict) else {}
    needed = required if isinstance(required, list) else []
    is_closed = schema.get("additionalProperties") is False
    return all(key in value for key in needed if isinstance(key, str)) and all(
        fits(item, named[key], root) if key in named else not is_closed for key, item in value.items()
    )


def without_nulls(arguments: Any, schema: Any) -> Any:
    """Drop optional arguments that are null where their schema has no null: models mean a missing argument."""
    tool = resolve_reference(schema, schema)
    properties, required = (tool.get("properties"), tool.get("required")) if isinstance(tool, dict) else (None, None)
    if not (isinstance(arguments, dict) and isinstance(properties, dict)):
        return arguments
    needed = required if isinstance(required, list) else []
    return {
        key: value
        for key, value in arguments.items()
        if value is not None or key in needed or key not in properties or fits(None, properties[key], schema)
    }


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def value_to_json(text: str, kind: str) -> str:
    """Return the JSON of a value that was written without quotes; text that is no JSON is a string."""
    literal = text.strip()
    lowered = {"True": "true", "False": "false", "None": "null"}.get(literal, literal)
    value = load_json(lowered)
    if value is None and lowered != "null":
        return _literal_to_json(literal) or json.dumps(text, ensure_ascii=False)
    if kind == "any" and isinstance(value, str):
        return json.dumps(text, ensure_ascii=False)
    return lowered


def _literal_to_json(text: str) -> str | None:
    """Return the JSON of a Python literal, None where it is none."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def python_to_json(text: str) -> str:
    """Return the JSON of a Python literal; templates print line breaks in its strings as they are."""
    value = load_json(text.strip())
    if value is None:
        escaped = text.strip().replace("\r", "\\r").replace("\n", "\\n")
        return (_literal_to_json(escaped) if "\n" in text else None) or value_to_json(text, "json")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number beyond the range of floats
        return json.dumps(text.strip(), ensure_ascii=False)


def gemma_to_json(text: str, quote: str) -> str:
    """Return the JSON of a value whose strings have their own quotation mark and whose keys have none."""
    parts = text.split(quote)
    out = []
    for i, part in enumerate(parts):
        if i % 2:
            out.append(json.dumps(part, ensure_ascii=False))
        else:
            out.append(
                re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", lambda match: f"{match[1]}{json.dumps(match[2])}:", part)
            )
    joined = "".join(out)
    return joined.strip() if load_json(joined) is not None or joined.strip() == "null" else json.dumps(text)


class JsonStream:
    """Incremental reader of a JSON object, up to text that cannot be JSON; names and scalars wait for a valid value."""

    def __init__(self) -> None:
        self.is_done = self.is_bad = False
        self.num_held = 0  # characters that were read and may still turn out not to belong to it
        self._given: list[str] = []
        self._held = ""
        self._closers = ""  # of what is open, the innermost first
        self._expects: Literal["object", "key", "colon", "value", "comma"] = "object"
        self._string: Literal["", "key", "value"] = ""
        self._escape = self._scalar = ""

    def read(self, text: str, start: int = 0, stop: int | None = None) -> tuple[str, int]:
        """Read a part of a text; return the JSON that became final, and where reading stopped."""
        position, stop = start, len(text) if stop is None else stop
        while position < stop and not self.is_done and not self.is_bad:
            before = position
            if self._escape:
                position = self._read_escape(text, position)
            elif self._string:
                position = self._read_string(text, position, stop)
            elif self._scalar or (self._expects == "value" and _SCALAR.match(text, position)):
                position = self._read_scalar(text, position, stop)
            elif (space := _SPACE.match(text, position, stop)) is not None:
                position = space.end()
                if self._held:
                    self._held += space[0]
                elif self._closers:
                    self._given.append(space[0])
            else:
                position += self._read_mark(text[position])
            is_held = bool(self._held or self._escape or self._scalar)
            self.num_held = self.num_held + position - before if is_held else 0
        pieces, self._given = "".join(self._given), []
        return pieces, position

    def close(self) -> str:
        """Return the characters that complete the given text to valid JSON; text that is held back is left out."""
        return ('"' if self._string == "value" else "") + self._closers

    def rest(self) -> str:
        """Return the text that is held back, for an answer that ends here."""
        return self._held + self._scalar

    def _give(self, text: str) -> None:
        self._given += [self._held, text]
        self._held = ""

    def _read_string(self, text: str, position: int, stop: int) -> int:
        plain = _PLAIN.match(text, position, stop)
        if plain is not None:
            self._add(plain[0])
            return plain.end()
        char = text[position]
        if char == "\\":
            self._escape = char
        elif char != '"':
            self._add(json.dumps(char)[1:-1])
        else:
            self._add(char)
            self._expects = "colon" if self._string == "key" else "comma"
            self._string = ""
        return position + 1

    def _add(self, text: str) -> None:
        """Add to the string that is open."""
        if self._string == "key":
            self._held += text
        else:
            self._give(text)

    def _read_escape(self, text: str, position: int) -> int:
        escape = self._escape + text[position]
        if _ESCAPE_START.fullmatch(escape):
            self._escape = escape
            return position + 1
        is_valid = _ESCAPE.fullmatch(escape) is not None
        self._add(escape if is_valid else "\\" + self._escape)
        self._escape = ""
        return position + is_valid  # what follows a backslash that begins no escape is text

    def _read_scalar(self, text: str, position: int, stop: int) -> int:
        match = _SCALAR.match(text, position, stop)
        if match is not None:
            self._scalar += match[0]
            return match.end()
        value = self._scalar if _NUMBER.fullmatch(self._scalar) else _WORDS.get(self._scalar)
        if value is None:
            self.is_bad = True
            return position
        self._give(value)
        self._scalar, self._expects = "", "comma"
        return position

    def _read_mark(self, char: str) -> bool:
        """Take a bracket, comma, colon or quote; return whether it may stand here."""
        expects = self._expects
        if self._closers and char == self._closers[0] and self._may_close():
            self._held = self._held.partition(",")[0]
            self._give(char)
            self._closers, self._expects = self._closers[1:], "comma"
            self.is_done = not self._closers
        elif expects == "object" and char == "{":
            self._held, self._closers, self._expects = char, "}", "key"
        elif expects == "comma" and char == ",":
            self._held, self._expects = char, "key" if self._closers[0] == "}" else "value"
        elif expects == "key" and char == '"':
            self._held, self._string = self._held + char, "key"
        elif expects == "colon" and char == ":":
            self._held, self._expects = self._held + char, "value"
        elif expects == "value" and char == '"':
            self._give(char)
            self._string = "value"
        elif expects == "value" and char in "{[" and len(self._closers) < MAX_NESTED:
            self._give(char)
            self._closers = ("}" if char == "{" else "]") + self._closers
            self._expects = "key" if char == "{" else "value"
        else:
            self.is_bad = True
        return not self.is_bad

    def _may_close(self) -> bool:
        return self._expects in ("key", "comma") or (self._expects == "value" and self._closers[0] == "]")


def read_object(text: str) -> str:
    """Return an object as repaired JSON; "" if it cannot be repaired."""
    stream = JsonStream()
    value, _ = stream.read(text)
    return value if stream.is_done else ""
