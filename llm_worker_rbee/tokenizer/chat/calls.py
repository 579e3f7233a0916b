"""Tool calls in an answer: their formats, read incrementally.

A call begins (its name is given) as soon as the text has the form of one; arguments are emitted as JSON once no later
text can change them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Literal

from .events import ChatEvent, Tool, ToolCallDelta, ToolCallEnd, ToolCallStart, new_call_id
from .format import GEMMA_QUOTE, ID, KEY, ChatFormat
from .reader import SURROGATES, CutError, MarkerReader, MismatchError, Task, encode_markers
from .values import (
    JsonStream,
    escape,
    fits,
    gemma_to_json,
    load_json,
    python_to_json,
    read_object,
    schema_types,
    value_to_json,
    without_nulls,
)

MAX_NAME_CHARS = 256
_NAME_KEYS, _ARGUMENT_KEYS = {"name", "tool_name"}, {"arguments", "parameters"}


class CallReader(MarkerReader):
    """Reads calls and adds their events."""

    def __init__(self, chat_format: ChatFormat, tools: Sequence[Tool]) -> None:
        super().__init__(chat_format)
        self._style = chat_format.tools.kind
        self._tools = {tool.name: tool for tool in tools}
        self._events: list[ChatEvent] = []
        self._num_calls = 0
        self._is_call_open = self._after_call = False
        self._space = ""  # at the end of the content so far: held back, left out before a call
        self._mark = 0  # all of the buffer before it is done

    def _openers(self) -> list[str]:
        """Return the markers that begin a call or a list of calls."""
        tools = self._format.tools
        first = tools.section_start.rstrip("[ \n") if tools.section_start.strip() != "[" else ""
        head = tools.call_start.partition(ID)[0]
        if self._style == "json":
            head = head[: head.rindex("{")] if "{" in head else head
        openers = [self._mark_text(text) for text in (first, head, *tools.other_starts)]
        if SURROGATES.search(openers[0]) and not SURROGATES.search(openers[1]):
            del openers[1]  # text alone never begins a call where a token does
        return list(dict.fromkeys(text for text in openers if text))

    def _is_bare(self) -> bool:
        """Whether calls have no marker before them: then they are recognised at the start of an answer only."""
        return self._style in ("json", "pythonic") and set(self._openers()) <= set(
            map(self._mark_text, self._format.tools.other_starts)
        )

    def _begin(self, name: str, call_id: str = "") -> None:
        name = self._show(name)
        self._events.append(ToolCallStart(self._num_calls, call_id or new_call_id(), name))
        self._num_calls += 1
        self._is_call_open = True
        self._space = ""

    def _give(self, arguments: str) -> None:
        if arguments:
            self._events.append(ToolCallDelta(self._num_calls - 1, self._show(arguments)))

    def _end(self) -> None:
        self._events.append(ToolCallEnd(self._num_calls - 1))
        self._is_call_open = False
        self._after_call = True

    def _end_marks(self) -> list[str]:
        """Return the markers that end a call or a list of calls."""
        tools = self._format.tools
        texts = (tools.call_end[tools.call_end.rfind("}") + 1 :], tools.section_end.lstrip("] \n"))
        return [mark for text in texts if (mark := self._mark_text(text))]

    def _run_calls(self) -> Task:
        """Read a list of calls, or one call where there is no list."""
        tools = self._format.tools
        section = self._mark_text(tools.section_start.rstrip("[ \n"))
        end = self._mark_text(tools.section_end.lstrip("] \n"))
        for marker in map(self._mark_text, tools.other_starts):
            if (yield from self._try(marker)):
                yield from self._skip()
        has_section = bool(section) and (yield from self._try(section))
        yield from self._skip(" \n\t\r" + ("[" if "[" in tools.section_start else ""))
        parse = {
            "json": self._json_call,
            "tag_json": self._tag_call,
            "tag_arguments": self._tagged_call,
            "pythonic": self._pythonic_call,
            "gemma": self._gemma_call,
        }[self._style]
        is_list = has_section or "[" in tools.section_start
        while True:
            yield from parse()
            if end and not section:
                yield from self._try_end(end)
            self._mark = self._position
            if not is_list or (yield from self._ends_list(end)):
                self._mark = self._position
                return

    def _ends_list(self, end: str) -> Generator[None, None, bool]:
        """Skip the separator of two calls of a list, or the end of the list."""
        start = self._position
        try:
            yield from self._skip(" \n\t\r,")
            is_done = yield from self._try("]")
            if is_done or (end and (yield from self._try_cut(end))):
                if is_done and end:
                    yield from self._try_end(end)
                return True
            return False
        except CutError:
            self._position = len(self._buffer) if self._is_cut else start
            return True

    # json: {"name": ..., "arguments": {...}}

    def _json_call(self) -> Task:
        tools = self._format.tools
        head = tools.call_start.partition(ID)[0]
        yield from self._expect_loose(head[: head.rindex("{")] if "{" in head else "")
        yield from self._json_object()
        yield from self._try_end(self._mark_text(tools.call_end[tools.call_end.rfind("}") + 1 :]))
        self._end()

    def _expect_loose(self, text: str) -> Task:
        yield from self._skip()
        yield from self._expect(self._mark_text(text))
        yield from self._skip()

    def _json_object(self) -> Task:
        tools = self._format.tools
        name, call_id, arguments = "", "", ""
        yield from self._expect("{")
        while True:
            yield from self._skip(" \n\t\r,")
            if (yield from self._try("}")):
                break
            key = yield from self._json_string()
            yield from self._skip()
            yield from self._expect(":")
            yield from self._skip()
            if key == "function" and (yield from self._peek()) == "{":
                yield from self._json_object()
                name = "function"
            elif key == tools.name_key or (tools.name_key and key in _NAME_KEYS) or key == "function":
                name = yield from self._json_string()
            elif not tools.name_key or key == tools.arguments_key or key in _ARGUMENT_KEYS:
                if self._is_call_open and tools.name_key:  # a key that is there twice
                    yield from self._json_value()
                    continue
                if self._is_call_open:
                    self._end()
                    self._mark = self._position
                name = name if tools.name_key else key
                arguments = yield from self._arguments(name, call_id)
            elif key == tools.id_key or "id" in key:
                call_id = (yield from self._json_value()).strip('"')
            else:
                yield from self._json_value()
        if not self._is_call_open:
            if not name or not self._is_known(name):
                raise MismatchError
            self._begin(name, call_id)
            self._give(arguments or "{}")

    def _is_known(self, name: str) -> bool:
        """An object without any marker around it is a call only if it names a tool."""
        return not self._is_bare() or name in self._tools

    def _arguments(self, name: str, call_id: str) -> Generator[None, None, str]:
        """Read the arguments. Emit them at once if the name is known; otherwise return them."""
        first = yield from self._peek()
        if first == "{":
            if name and self._is_known(name):
                yield from self._give_object(name, call_id)
                return ""
            arguments = read_object((yield from self._json_value()))
            if not arguments:
                raise MismatchError
            return arguments
        if first == '"':
            text: str = yield from self._json_string()
            if not isinstance(load_json(text), dict):
                raise MismatchError
        else:
            text = yield from self._json_value()
            if text != "null":
                raise MismatchError
            text = "{}"
        if name and self._is_known(name):
            self._begin(name, call_id)
            self._give(text)
            return ""
        return text

    def _json_string(self) -> Generator[None, None, str]:
        if (yield from self._peek()) != '"':
            raise MismatchError
        value = load_json((yield from self._json_value()))
        if not isinstance(value, str):
            raise MismatchError
        return value

    def _json_value(self) -> Generator[None, None, str]:
        """Read one value by its brackets and quotes."""
        start, depth, in_string = self._position, 0, False
        while True:
            char = yield from self._peek()
            if not in_string and not depth and char in ",}] \n\t\r":
                break
            if not in_string and char in self._names:
                raise MismatchError
            self._position += 1
            if in_string and char == "\\":
                yield from self._peek()
                self._position += 1
            elif char == '"':
                in_string = not in_string
            elif not in_string:
                depth += (char in "{[") - (char in "}]")
            if not depth and not in_string and char in '"}]':
                break
        return self._buffer[start : self._position]

    def _give_object(self, name: str, call_id: str = "", ends: Sequence[str] = ()) -> Task:
        """Read an object as arguments; the call begins with the first valid one, and is closed after the last."""
        stream = JsonStream()
        while not stream.is_done:
            place = min((place for end in ends if (place := self._buffer.find(end, self._position)) >= 0), default=-1)
            keep = self._num_held(ends) if place < 0 else 0
            stop = place if place >= 0 else len(self._buffer) - keep
            text, self._position = stream.read(self._buffer, self._position, stop)
            if text and not self._is_call_open:
                self._begin(name, call_id)
            self._give(text)
            if stream.is_bad or (place >= 0 and not stream.is_done):
                self._position -= stream.num_held
                if self._is_call_open:
                    self._give(stream.close())
                raise MismatchError
            if stream.is_done:
                return
            if self._is_final:
                if not self._is_call_open:
                    self._begin(name, call_id)
                self._give(stream.rest())
            if self._is_call_open and not stream.num_held:
                self._trim()
            yield from self._wait()

    def _whole_call(self) -> Task:
        """Read an answer that is nothing but a call as JSON, bare or in a code block, valid by the tool's schema."""
        yield from self._skip()
        has_fence = yield from self._try("```")
        if has_fence:
            yield from self._try("json")
        elif self._is_bare():  # such calls are its format
            raise MismatchError
        for text in ("{", '"name"', ":"):
            yield from self._expect_loose(text)
        for name in self._tools:
            if (yield from self._try(json.dumps(name, ensure_ascii=False))):
                break
        else:
            raise MismatchError
        yield from self._expect_loose(",")
        if not (yield from self._try('"arguments"')):
            yield from self._expect('"parameters"')
        yield from self._expect_loose(":")
        arguments = yield from self._whole_object()
        parameters = self._tools[name].parameters
        if not fits(load_json(arguments), parameters, parameters):
            values = without_nulls(load_json(arguments), parameters)
            if not fits(values, parameters, parameters):
                raise MismatchError
            arguments = json.dumps(values, ensure_ascii=False)
        yield from self._skip()
        yield from self._expect("}")
        yield from self._try_end("```" if has_fence else "")
        with suppress(CutError):
            yield from self._skip()
            raise MismatchError  # more than a call
        self._begin(name)
        self._give(arguments)
        self._end()

    def _whole_object(self) -> Generator[None, None, str]:
        stream, read = JsonStream(), ""
        while not stream.is_done:
            text, self._position = stream.read(self._buffer, self._position)
            read += text
            if stream.is_bad:
                raise MismatchError
            if not stream.is_done:
                yield from self._wait()
        return read

    # tag: MARKER name MARKER {...} MARKER

    def _tag_call(self) -> Task:
        tools = self._format.tools
        before, has_id, after = tools.call_start.partition(ID)
        yield from self._expect_loose(before)
        call_id = (yield from self._until([self._mark_text(after)], MAX_NAME_CHARS))[0].strip() if has_id else ""
        first, has_id, second = tools.name_suffix.partition(ID)
        stops = [text for text in (self._mark_text(first), self._mark_text(second)) if text] or ["\n"]
        name, stop = yield from self._until(stops, MAX_NAME_CHARS)
        if has_id and stop == stops[0]:
            call_id = (yield from self._until(stops[1:], MAX_NAME_CHARS))[0].strip()
        name = name.strip()
        if tools.name_is_id:
            call_id, name = name, re.sub(r"^functions\.|:\d+$", "", name)
        yield from self._skip()
        if not name or any(char in name for char in "\n{") or (yield from self._peek()) != "{":
            raise MismatchError
        yield from self._give_object(name, call_id)
        yield from self._try_end(self._mark_text(tools.call_end))
        self._end()

    # tagged: <function=name><parameter=key>value</parameter></function>

    def _tagged_call(self) -> Task:
        tools = self._format.tools
        yield from self._expect_loose(tools.call_start)
        start, end = self._mark_text(tools.argument_start), self._mark_text(tools.call_end)
        stops = [self._mark_text(tools.name_suffix)] if tools.name_suffix.strip() else [start, end]
        name, stop = yield from self._until(stops, MAX_NAME_CHARS)
        if stop in (start, end):
            self._position -= len(stop)
        name = name.strip()
        yield from self._skip()
        has_argument = yield from self._starts(start)
        is_empty = not has_argument and (yield from self._starts(end))
        rest = self._buffer[self._position :]
        is_cut = self._is_final and end.startswith(rest) and not start.startswith(rest)
        if not name or "\n" in name or not (has_argument or is_empty or is_cut):
            raise MismatchError
        self._begin(name)
        self._give("{")
        count = 0
        while has_argument:
            try:
                yield from self._tagged_argument(name, is_first=count == 0)
            except MismatchError:
                self._give("}")
                raise
            count += 1
            yield from self._skip()
            has_argument = yield from self._starts(start)
        self._give("}")
        yield from self._try_end(end)
        self._end()

    def _starts(self, text: str) -> Generator[None, None, bool]:
        position = self._position
        matches = yield from self._try(text)
        if self._is_cut and not matches and text.startswith(self._buffer[position:]):
            raise CutError
        self._position = position
        return matches

    def _tagged_argument(self, name: str, *, is_first: bool) -> Task:
        tools = self._format.tools
        yield from self._expect(self._mark_text(tools.argument_start))
        suffixes = [
            encode_markers(self._format, text).rstrip()
            for text in (tools.argument_name_suffix, tools.argument_name_suffix_json)
        ]
        key, stop = yield from self._until(suffixes, MAX_NAME_CHARS)
        key = key.strip()
        kind: Literal["string", "json", "any"] = self._argument_kind(name, key)
        if suffixes[0] != suffixes[1]:
            kind = "string" if stop == suffixes[0] else "json"
        gap = tools.argument_name_suffix[len(tools.argument_name_suffix.rstrip()) :]
        if gap:
            yield from self._try(gap)
        end = encode_markers(self._format, tools.argument_end.replace(KEY, key))
        held = end[: len(end) - len(end.lstrip())]
        self._give(("" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if kind == "string":
            self._give('"')
            stops = (held + end.strip(), end.strip())  # without the whitespace that the format puts before its end
            yield from self._stream(stops, lambda text: self._give(escape(self._show(text))))
            self._give('"')
            return
        try:
            value, _ = yield from self._until([end.strip()])
        except CutError:
            self._give('"' + escape(self._show(self._buffer[self._position :])))
            self._position = len(self._buffer)
            raise
        value = self._show(value.removesuffix(held) if held else value)
        self._give(value_to_json(value, kind))

    def _argument_kind(self, name: str, key: str) -> Literal["string", "json", "any"]:
        """Return how to read the value of an argument, by the tool's schema; a string by default."""
        tool = self._tools.get(self._show(name))
        properties = tool.parameters.get("properties") if tool is not None else None
        schema = properties.get(self._show(key)) if isinstance(properties, dict) else None
        types = schema_types(schema, tool.parameters if tool is not None else {})
        if not types or types == {"string"}:
            return "string"
        return "any" if "string" in types else "json"

    # pythonic: name(key=value, ...), and gemma: call:name{key:value,...}

    def _pythonic_call(self) -> Task:
        yield from self._skip()
        name, _ = yield from self._until(["("], MAX_NAME_CHARS)
        if not re.fullmatch(r"[\w.\-]+", name.strip()) or not self._is_known(name.strip()):
            raise MismatchError
        yield from self._items(name.strip(), "=", ")", "'\"", python_to_json)
        self._end()

    def _gemma_call(self) -> Task:
        tools = self._format.tools
        yield from self._expect_loose(tools.call_start)
        name, _ = yield from self._until(["{"], MAX_NAME_CHARS)
        if not name.strip() or "\n" in name:
            raise MismatchError
        quote = encode_markers(self._format, GEMMA_QUOTE)
        yield from self._items(name.strip(), ":", "}", quote, lambda text: gemma_to_json(text, quote))
        yield from self._try_end(self._mark_text(tools.call_end[1:]))
        self._end()

    def _items(self, name: str, equals: str, close: str, quotes: str, convert: Callable[[str], str]) -> Task:
        """Read `key EQUALS value` up to the closing bracket; each argument is given once it is complete."""
        count = 0
        while True:
            yield from self._skip(" \n\t\r,")
            if (yield from self._try(close)):
                break
            key = yield from self._item_key(equals)
            if not count:
                self._begin(name)
            self._give(("{" if not count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            start = self._position
            try:
                value = yield from self._raw_value(close, quotes)
            except CutError:
                self._give('"' + escape(self._show(self._buffer[start:])))
                raise
            self._give(convert(value))
            count += 1
        if not count:
            self._begin(name)
        self._give("}" if count else "{}")

    def _item_key(self, equals: str) -> Generator[None, None, str]:
        start = self._position
        try:
            text, _ = yield from self._until([equals], MAX_NAME_CHARS)
            key = self._show(text).strip(" \"'")
            if not key or any(char in "()[]{},\"'\n" for char in key):
                raise MismatchError
        except MismatchError:
            self._position = start
            if self._is_call_open:
                self._give("}")
            raise
        return key

    def _raw_value(self, close: str, quotes: str) -> Generator[None, None, str]:
        """Read a value up to a comma or bracket outside its own brackets and quotes."""
        marks = [quotes] if len(quotes) > 2 else list(quotes)
        start = self._position
        depth = 0
        quote = ""
        while True:
            if self._position >= len(self._buffer):
                yield from self._wait()
                continue
            char = self._buffer[self._position]
            opened = next((mark for mark in marks if mark[0] == char), "")
            if quote and char == "\\" and len(marks) > 1:
                while self._position + 1 >= len(self._buffer):
                    yield from self._wait()
                self._position += 1
            elif opened and (not quote or quote == opened):
                if (yield from self._try(opened)):
                    quote = "" if quote else opened
                    continue
            elif not quote and char in "([{":
                depth += 1
            elif not quote and char in ")]}" and depth:
                depth -= 1
            elif not quote and not depth and char in ("," + close):
                return self._buffer[start : self._position]
            self._position += 1
