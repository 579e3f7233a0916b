"""The grammar of an answer: reasoning, then structured content or tool calls, in the model's format.

The result is Lark for llguidance. Token markers are written by id. Literals are written as the
template prints them, so that an answer renders back to the same tokens. Free text is a run of tokens without control
tokens, or a lazy expression up to a marker that consists of several tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequestError
from ..sampling_params import STRUCTURED
from ..tokenizer.chat.events import ChatOptions, Tool
from ..tokenizer.chat.format import GEMMA_QUOTE, ID, KEY, ChatFormat, ToolFormat
from ..tokenizer.chat.values import resolve_reference, schema_types
from .json_schema import prepare_schema, without_annotations

MAX_DEPTH = 8  # of a schema in a notation other than JSON
CHARS_PER_TOKEN = 4  # of a thinking budget where the end of the reasoning is not a token
HARMONY_CALLS = ToolFormat(
    kind="tag_json",
    call_start="<|channel|>commentary to=functions.",
    name_suffix=" <|constrain|>json<|message|>",
    is_parallel=False,
)
HARMONY_FINAL, HARMONY_NEXT = "<|channel|>final<|message|>", "<|end|><|start|>assistant"
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates print it
_INTEGER = "-?(0|[1-9][0-9]{0,17})"
_NUMBER = r"-?(0|[1-9][0-9]{0,16})(\.[0-9]{1,17})?([eE][+\-]?[0-9]{1,3})?"


class ToolSchemaError(InvalidRequestError):
    """The schema of a tool's arguments cannot be used; the tool is given by its index."""

    def __init__(self, index: int, name: str, reason: str) -> None:
        super().__init__(f"the parameters of the tool {name!r:.100} cannot be used: {reason}", "tools")
        self.index, self.name, self.reason = index, name, reason


def answer_grammar(
    chat_format: ChatFormat,
    options: ChatOptions,
    structured: tuple[str, Any] | None = None,
    *,
    prompt_tail: str = "",
    open_objects: bool = False,
) -> str | None:
    """Return the grammar of an answer, or None where nothing is constrained.

    `structured` is the form of the content: ("json", schema as text), ("json_object", True), ("regex", expression),
    ("choice", texts) or ("grammar", Lark). `open_objects` lets objects have properties that their schemas do not name.
    """
    tools = _allowed_tools(options)
    is_forced = bool(tools) and (options.tool_choice == "required" or options.tool_name is not None)
    holds_calls = bool(tools) and (any(tool.strict for tool in tools) or not options.parallel_tool_calls)
    forbids_calls = bool(options.tools) and options.tool_choice == "none"
    budget = options.thinking_budget if chat_format.has_reasoning else None
    if structured is None and budget is None and not (is_forced or holds_calls or forbids_calls):
        return None
    writer = _Writer(chat_format, options, open_objects)
    before = writer.reasoning(prompt_tail, budget)
    if is_forced:
        answer = writer.calls(tools)
    elif structured is not None:
        content = f"{writer.literal(writer.content_start)} {writer.structured(*structured)}"
        answer = f"{content} | {writer.calls(tools)}" if tools else content
    elif holds_calls:
        answer = writer.text_with_calls(tools)
    elif forbids_calls:
        answer = writer.text_without_calls()
    else:
        answer = writer.text_without_reasoning()
    return writer.finish(before, answer)


def _allowed_tools(options: ChatOptions) -> list[Tool]:
    if options.tool_name is not None:
        tools = [tool for tool in options.tools if tool.name == options.tool_name]
        if not tools:
            raise InvalidRequestError(f"tool_choice names {options.tool_name!r}, which is not in tools", "tool_choice")
        return tools
    if options.tool_choice == "required" and not options.tools:
        raise InvalidRequestError('tool_choice is "required", and there are no tools', "tool_choice")
    return [] if options.tool_choice == "none" else options.tools


def quote(text: str) -> str:
    """Return a text as a literal of Lark, which allows no DEL; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def _regex(text: str) -> str:
    """Return an expression that matches a text, for use between slashes."""
    escaped = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
    return "".join(escaped.get(char) or (f"\\{char}" if char in r".+*?()|[]{}^$/\-&~#" else char) for char in text)


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, chat_format: ChatFormat, options: ChatOptions, open_objects: bool = False) -> None:
        self._format, self._options, self._open_objects = chat_format, options, open_objects
        is_harmony = chat_format.tools.kind == "harmony"
        self._tools = HARMONY_CALLS if is_harmony else chat_format.tools
        self.content_start = HARMONY_FINAL if is_harmony else ""
        self._ids = dict(chat_format.token_ids)
        self._rules: list[str] = []
        self._shared: dict[str, str] = {}
        self._names: set[str] = set()
        self._root: dict[str, Any] = {}  # the schema of the tool whose values are written
        self._references: dict[str, str] = {}

    def finish(self, before: str, answer: str) -> str:
        """Return the grammar."""
        start = f"start: {before} answer" if before else "start: answer"
        text = "\n".join(["%llguidance {}", start, f"answer: {answer}", *self._rules]) + "\n"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"a tool or a schema is not valid Unicode: {error.reason}", "tools") from None
        return text

    def rule(self, body: str, *, options: str = "", is_terminal: bool = False) -> str:
        """Add a rule; the same body gets the same name."""
        key = f"{options}:{is_terminal}:{body}"
        if key not in self._shared:
            name = f"{'T' if is_terminal else 'r'}{len(self._shared)}"
            self._shared[key] = name
            self._rules.append(f"{name}{options}: {body}")
        return self._shared[key]

    def literal(self, text: str) -> str:
        """Return a text as a sequence of strings and tokens."""
        pieces = self._pieces(text)
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quote(piece) for piece in pieces)

    def _pieces(self, text: str) -> list[str | int]:
        if not self._ids:
            return [text] if text else []
        parts = re.split(f"({'|'.join(map(re.escape, self._ids))})", text)
        return [self._ids.get(part, part) for part in parts if part]

    def _tokens(self, *but: int) -> str:
        """Return the tokens of free text: all tokens except control tokens and `but`."""
        ranges = [f"{first}-{last}" if first < last else str(first) for first, last in self._format.control_ids]
        ranges += [str(token) for token in but if not self._is_control(token)]
        return f"<[^{','.join(ranges)}]>" if ranges else "<[*]>"

    def _is_control(self, token: int) -> bool:
        return any(first <= token <= last for first, last in self._format.control_ids)

    def _text_until(self, end: str, limit: int | None = None) -> str:
        """Return free text and the marker that ends it, of at most `limit` tokens."""
        pieces = self._pieces(end)
        lead = pieces[0] if pieces else ""
        if isinstance(lead, str) and not lead.strip() and len(pieces) > 1:  # whitespace before a token is text too
            pieces = pieces[1:]
        if isinstance(pieces[0], int):
            count = "*" if limit is None else f"{{0,{limit}}}"
            body = "" if limit == 0 else f"{self._tokens(pieces[0])}{count} "
            return body + " ".join(f"<[{piece}]>" if isinstance(piece, int) else quote(piece) for piece in pieces)
        count = "*" if limit is None else f"{{0,{CHARS_PER_TOKEN * limit}}}"
        lazy = self.rule(rf"/(.|\n){count}{_regex(pieces[0])}/", options="[lazy]")
        rest = end[len(pieces[0]) :]
        return f"{lazy} {self.literal(rest)}".strip()

    def reasoning(self, prompt_tail: str, budget: int | None) -> str:
        """Return the rule of the reasoning before the answer: open already, or optional; empty where it is over."""
        reasoning = self._format.reasoning
        if not reasoning.end or prompt_tail.rstrip().endswith(reasoning.end.strip()):
            return ""
        end = HARMONY_NEXT if self.content_start else reasoning.end
        body = self._text_until(end.lstrip(), budget)
        if self._format.is_reasoning_open(prompt_tail):
            return body
        if budget == 0:
            return ""
        return f"({self.literal(reasoning.start.strip())} {body})?"

    def structured(self, kind: str, value: Any) -> str:
        """Return the rule of content of a given form."""
        if kind in ("json", "json_object"):
            schema = json.loads(value) if kind == "json" else {"type": "object"}
            return self._json(schema)
        if kind == "regex":
            return self.rule(f"/{escape_slashes(value)}/", is_terminal=True)
        if kind == "choice":
            return self.rule(" | ".join(map(quote, value)), is_terminal=True)
        lark = re.sub(r"^\s*%llguidance\s*\{\s*\}", "", value)
        return self.rule(f"%lark {{\n{lark}\n}}")

    def _json(self, schema: Any, tool: Tool | None = None) -> str:
        """Return the rule of JSON of a schema, which may be of a tool's arguments."""
        try:
            prepared = prepare_schema(schema, is_open=self._open_objects)
        except ValueError as error:
            if tool is not None:
                raise ToolSchemaError(self._options.tools.index(tool), tool.name, str(error)) from None
            raise InvalidRequestError(f"{STRUCTURED}.json cannot be used: {error}", STRUCTURED) from None
        return self.rule("%json " + json.dumps(prepared, ensure_ascii=False))

    # ------------------------------------------------------------------ calls

    def calls(self, tools: Sequence[Tool], opener: str = "") -> str:
        """Return one call or a list of them, after the `opener` that is written already."""
        shape = self._tools
        start = (shape.section_start + shape.call_start).lstrip()[len(opener) :]
        in_section = len(shape.section_start.lstrip()) - len(opener)
        first_head = shape.call_start if in_section > 0 else start
        section = start[: max(0, in_section)]
        first = self._call_choice(tools, first_head)
        rest = ""
        if self._options.parallel_tool_calls and shape.is_parallel:
            next_call = self._call_choice(tools, shape.call_start)
            joint = self.literal(shape.separator)
            rest = f"({joint} {next_call})*"
            rest += f" ({joint})?" if shape.separator.isspace() else ""  # models print it after the last call too
        return " ".join(filter(None, (self.literal(section), first, rest, self.literal(shape.section_end))))

    def _call_choice(self, tools: Sequence[Tool], head: str) -> str:
        try:
            return self.rule(" | ".join(self._call(tool, head) for tool in tools))
        except RecursionError:
            raise InvalidRequestError("the schema of a tool is nested too deeply", "tools") from None

    def _call(self, tool: Tool, head: str) -> str:
        shape = self._tools
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if shape.kind == "json" else tool.name
        if shape.kind == "pythonic":
            return f"{self.literal(head + name + '(')} {self._items(tool, '=', ', ')} {quote(')')}"
        if shape.name_is_id:
            text = f"{self.literal(head + 'functions.' + name + ':')} /[0-9]+/ {self.literal(shape.name_suffix)}"
        else:
            text = " ".join(filter(None, (self._with_id(part) for part in (head + name + shape.name_suffix,))))
        if shape.kind == "gemma":
            return f"{text} {self._items(tool, ':', ',')} {self.literal(shape.call_end)}"
        if shape.kind == "tag_arguments":
            return f"{text} {self._tagged(tool)} {self.literal(shape.call_end)}"
        arguments = self._json(self._schema(tool), tool)
        return f"{text} {arguments} {self._with_id(shape.call_end)}".strip()

    def _with_id(self, text: str) -> str:
        """Return a literal that may have the place of an id."""
        before, has_id, after = text.partition(ID)
        if not has_id:
            return self.literal(text)
        expression = "/[a-zA-Z0-9]{9}/" if self._format.rules.has_short_ids else r"/[a-zA-Z0-9_\-]{1,40}/"
        return f"{self.literal(before)} {expression} {self.literal(after)}".strip()

    def _schema(self, tool: Tool) -> dict[str, Any]:
        """Return the schema of the arguments; keywords that are not supported count for strict tools only."""
        is_held = tool.strict or self._options.tool_choice == "required" or self._options.tool_name is not None
        return parameters_schema(tool if is_held else replace(tool, parameters={}))

    def _properties(self, tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
        """Return name, schema and whether it is required, of each argument."""
        schema = without_annotations(tool.parameters)
        properties, required = schema.get("properties"), schema.get("required")
        definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        style = {"x-guidance": {**JSON_STYLE, "lenient": not tool.strict}}
        needed = set(required) if isinstance(required, list) else set()
        items = properties.items() if isinstance(properties, dict) else ()
        return [
            (key, {**(value if isinstance(value, dict) else {}), **definitions, **style}, key in needed)
            for key, value in ((key, resolve_reference(value, schema)) for key, value in items)
        ]

    def _sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the rule of items in order with separators between them; only required items must be there."""
        following, leading = "", ""
        joint = self.literal(separator)
        for body, is_required in reversed(items):
            first = f"{body} {following}".strip()
            lead = first if is_required or not leading else f"{first} | {leading}"
            after = f"{joint} {first}".strip() if is_required else f"({joint} {body})? {following}".strip()
            leading = self.rule(lead if is_required or leading else f"{first} |")
            following = self.rule(after)
        return leading

    def _tagged(self, tool: Tool) -> str:
        shape = self._tools
        items = []
        for key, schema, is_required in self._properties(tool):
            end = shape.argument_end.replace(KEY, key)
            types = schema_types(schema, schema)
            if isinstance(schema.get("enum"), list) and types == {"string"}:
                choices = " | ".join(quote(value) for value in schema["enum"] if value)
                value, suffix = f"({choices}) {self.literal(end)}", shape.argument_name_suffix
            elif not types or "string" in types:
                value, suffix = self._text_until(end), shape.argument_name_suffix
            else:
                value, suffix = f"{self._json(schema, tool)} {self.literal(end)}", shape.argument_name_suffix_json
            items.append((self.rule(f"{self.literal(shape.argument_start + key + suffix)} {value}"), is_required))
        return self._sequence(items, shape.argument_separator)

    def _items(self, tool: Tool, equals: str, separator: str) -> str:
        properties = self._properties(tool)
        self._root, self._references = without_annotations(tool.parameters), {}
        if self._tools.kind == "gemma":
            properties.sort(key=lambda item: item[0].lower())
        items = [
            (self.rule(f"{self.literal(key + equals)} {self._value(self._root['properties'][key])}"), is_required)
            for key, _, is_required in properties
        ]
        return self._sequence(items, separator)

    def _value(self, schema: Any, depth: int = 0) -> str:
        """Return the rule of a value in Python's or Gemma's notation; of any value if the schema gives no type."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return self._reference(schema)
        return self._value_without_reference(schema, depth)

    def _value_without_reference(self, schema: Any, depth: int = 0) -> str:
        types = schema_types(schema, self._root)
        if not types or depth > MAX_DEPTH:
            return self._any_value()
        if isinstance(schema.get("enum"), list):
            return self.rule(" | ".join(self._constant(value) for value in schema["enum"]))
        several = None if "type" in schema else schema.get("anyOf", schema.get("oneOf"))
        if isinstance(several, list):
            return self.rule(" | ".join(self._value(option, depth + 1) for option in several))
        options = [self._scalar(kind) for kind in sorted(types) if kind not in ("array", "object")]
        if "array" in types:
            options.append(self._list("[", self._value(schema.get("items"), depth + 1), "]"))
        if "object" in types:
            options.append(self._object(schema, depth))
        return self.rule(" | ".join(options))

    def _reference(self, schema: dict[str, Any]) -> str:
        """Return the rule of a schema that refers to another, perhaps to itself."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._references:
            self._references[key] = f"ref{len(self._names)}"
            self._names.add(self._references[key])
            body = self._value_without_reference(resolve_reference(schema, self._root))
            self._rules.append(f"{self._references[key]}: {body}")
        return self._references[key]

    def _scalar(self, kind: str) -> str:
        if kind == "string":
            return self._string()
        words = ("True", "False", "None") if self._tools.kind == "pythonic" else ("true", "false", "null")
        rules = {
            "integer": f"/{_INTEGER}/",
            "number": f"/{_NUMBER}/",
            "boolean": f"{quote(words[0])} | {quote(words[1])}",
        }
        return self.rule(rules.get(kind, quote(words[2])))

    def _list(self, opening: str, item: str, closing: str) -> str:
        joint = quote(", " if self._tools.kind == "pythonic" else ",")
        return self.rule(f"{quote(opening)} ({item} ({joint} {item})*)? {quote(closing)}")

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not properties:
            return self._list("{", self._pair(self._any_value()), "}")
        is_python = self._tools.kind == "pythonic"
        needed = set(required) if isinstance(required, list) else set()
        names = list(properties) if is_python else sorted(properties, key=str.lower)
        items = [
            (
                self.rule(f"{self._constant(name, is_key=True)} {self._value(properties[name], depth + 1)}"),
                name in needed,
            )
            for name in names
        ]
        return self.rule(f'"{{" {self._sequence(items, ", " if is_python else ",")} "}}"')

    def _pair(self, value: str) -> str:
        if self._tools.kind == "pythonic":
            return self.rule(f'{self._string()} ": " {value}')
        return self.rule(rf"""/[^\s{{}}\[\],:"<]+/ ":" {value}""")

    def _any_value(self) -> str:
        """Return the rule of any value; it refers to itself."""
        if "any_value" not in self._names:
            self._names.add("any_value")
            kinds = [self._scalar(kind) for kind in ("string", "number", "boolean", "null")]
            kinds += [self._list("[", "any_value", "]"), self._list("{", self._pair("any_value"), "}")]
            self._rules.append(f"any_value: {' | '.join(kinds)}")
        return "any_value"

    def _string(self) -> str:
        if self._tools.kind == "pythonic":
            return self.rule(r"""/"([^"\\\n]|\\["'\\nrt])*"|'([^'\\\n]|\\["'\\nrt])*'/""", is_terminal=True)
        return self.rule(f"{self.literal(GEMMA_QUOTE)} {self._text_until(GEMMA_QUOTE)}")

    def _constant(self, value: Any, *, is_key: bool = False) -> str:
        """Return a value of an enumeration, or the key of an object with its colon."""
        if self._tools.kind != "pythonic":
            text = f"{value}:" if is_key else json.dumps(value)
            return (
                self.literal(f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}")
                if isinstance(value, str) and not is_key
                else quote(text)
            )
        colon = ": " if is_key else ""
        spellings = [repr(value), json.dumps(value, ensure_ascii=False)] if isinstance(value, str) else [repr(value)]
        return self.rule(" | ".join(dict.fromkeys(quote(text + colon) for text in spellings)))

    # ------------------------------------------------------------------ free text

    def _opener(self) -> str:
        """Return the marker that begins calls: its first token, or its first tag; empty where there is none."""
        text = (self._tools.section_start + self._tools.call_start).lstrip()
        pieces = self._pieces(text)
        if pieces and isinstance(pieces[0], int):
            return next(name for name, token in self._ids.items() if token == pieces[0])
        lead = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        tag = re.match(r"<[^<>\s]+[>=]?|\[[A-Z_]+\]|\S+", lead)
        return "" if tag is None or tag[0].startswith("{") or tag[0] == "[" else tag[0]

    def text_with_calls(self, tools: Sequence[Tool]) -> str:
        """Return free text in which calls may begin; a call must be well-formed."""
        opener = self._opener()
        many = self._options.parallel_tool_calls and self._tools.is_parallel
        if not opener:
            free = self.rule(r"/([^\s{\[](.|\n)*)?/", is_terminal=True)
            return f"{free} | {self.calls(tools)}"
        call = self.rule(self.calls(tools, opener))
        token = self._ids.get(opener)
        if self.content_start:  # harmony: each message has a header
            final = f"{self.literal(self.content_start)} {self._tokens()}*"
            return f"{final} | {self.calls(tools)}"
        text = f"{self._tokens(token)}*" if token is not None else self.rule(r"/(.|\n)*/", is_terminal=True)
        begin = f"{text} <[{token}]>" if token is not None else self.rule(f"{text} {quote(opener)}", options="[lazy]")
        return f"({begin} {call})* {text}" if many else f"{begin} {call} | {text}"

    def text_without_reasoning(self) -> str:
        """Return an answer whose reasoning, which comes before it, must not begin again."""
        start = self._format.reasoning.start.strip()
        pieces = self._pieces(start)
        if isinstance(pieces[0], int):
            return f"<[^{pieces[0]}]>*" if not self.content_start else "<[*]>*"
        return self.rule(rf"/(?s:.*)/ & ~/\s*{_regex(start)}(?s:.*)/", is_terminal=True)

    def text_without_calls(self) -> str:
        opener = self._opener()
        token = self._ids.get(opener)
        if self.content_start:
            return f"{self.literal(self.content_start)} {self._tokens()}*"
        if token is not None:
            return f"{self._tokens(token)}*"
        if not opener:
            return "<[*]>*"
        free = rf"/(?s:.*)/ & ~/(?s:.*){_regex(opener)}(?s:.*)/"
        return self.rule(free, is_terminal=True)


def parameters_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments in the grammars' form."""
    style = {"x-guidance": {**JSON_STYLE, "lenient": not tool.strict}}
    return {"type": "object", **without_annotations(tool.parameters), **style}


def escape_slashes(expression: str) -> str:
    """Return an expression escaped for use between slashes, on one line."""
    parts: Iterable[str] = re.findall(r"\\.|.|\n", expression, re.DOTALL)
    escaped = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n"}
    return "".join(escaped.get(part, part) for part in parts)
