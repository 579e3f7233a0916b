"""Incremental parser of an answer: text and marker tokens in, events out.

One generator per answer reads a buffer and yields where it needs more text. Text that turns out not to be a call stays
content, unchanged; an event is emitted as soon as no later text can change it. Whitespace that a template prints around
reasoning and calls is removed, so that a message renders back to the tokens that it came from.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import suppress

from .calls import MAX_NAME_CHARS, CallReader
from .events import ChatEvent, ContentDelta, ReasoningDelta, Tool, ToolCallDelta
from .format import ChatFormat
from .reader import FIRST_MARKER, SURROGATES, CutError, MismatchError, Task, encode_markers


class ChatParser(CallReader):
    """The events of one answer. Calls are parsed where tools are given and `parse_tools` is set.

    With `parse_json_calls` an answer that is nothing but a JSON object with a tool's name and arguments is a call too.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        tools: Sequence[Tool] = (),
        prompt_tail: str = "",
        parse_tools: bool = True,
        parse_json_calls: bool = False,
    ) -> None:
        super().__init__(chat_format, tools)
        self._chars = {token: chr(FIRST_MARKER + i) for i, (_, token) in enumerate(chat_format.token_ids)}
        self.marker_ids = frozenset(self._chars)
        self.is_reasoning = chat_format.is_reasoning_open(prompt_tail)
        self._parses_tools = parse_tools and bool(tools) and self._style != "none"
        self._parses_json_calls = self._parses_tools and parse_json_calls
        self._has_content = False
        self._trims_start = False  # of content, after reasoning
        self._stray_ends: list[str] = []  # markers that end a malformed call: left out of the content after it
        self._task = self._run_harmony(prompt_tail) if self._style == "harmony" else self._run()
        self._advance()

    def push(self, text: str) -> list[ChatEvent]:
        """Parse text that became final; return the events that it completes."""
        if not text.isascii():
            text = SURROGATES.sub("\ufffd", text)
        self._buffer += text
        return self._advance()

    def push_marker(self, token: int) -> list[ChatEvent]:
        """Parse a token of `marker_ids`."""
        self._buffer += self._chars[token]
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[ChatEvent]:
        """End the answer; return the events of the text held back. If it `is_cut`, drop a call that just begins."""
        self._is_final, self._is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[ChatEvent]:
        with suppress(StopIteration, CutError):
            next(self._task)
        events, self._events = self._events, []
        return _merge(events)

    # ------------------------------------------------------------------ content and reasoning

    def _emit_content(self, text: str) -> None:
        """Emit content; whitespace at its end waits for the next text."""
        if self._trims_start:
            text = text.lstrip("\n")
            self._trims_start = not text
        if not text:
            return
        shown = text.rstrip() if self._parses_tools else text
        if self._after_call and not self._has_text(shown):
            self._space += text
            return
        if shown:
            self._emit(ContentDelta, self._space + shown)
            self._space, self._has_content, self._after_call = "", True, False
        self._space += text[len(shown) :]

    @staticmethod
    def _has_text(text: str) -> bool:
        return bool(text) and not text.isspace()

    def _run(self) -> Task:
        reasoning = self._mark_text(self._format.reasoning.start)
        dropped = [self._mark_text(text) for text in (self._format.content_start, self._format.content_end) if text]
        calls = self._openers() if self._parses_tools else []
        openers = [text for text in (reasoning if self._format.has_reasoning else "", *dropped, *calls) if text]
        is_bare = self._parses_tools and self._is_bare()
        if self.is_reasoning:
            yield from self._skip_reasoning_start()
            yield from self._run_reasoning()
        while True:
            if self._parses_json_calls and not (self._has_content or self._num_calls):
                yield from self._attempt_whole_call()
            if is_bare and not self._has_content and (yield from self._bare_start()):
                yield from self._attempt(self._buffer[self._position])
                continue
            opener = yield from self._read_content([*openers, *self._stray_ends], is_bare)
            if opener is None:
                return
            if opener == reasoning:
                self._position += len(opener)
                self._space = ""
                yield from self._skip_reasoning_start()
                yield from self._run_reasoning()
            elif opener in dropped:
                self._position += len(opener)
            elif opener in self._stray_ends and opener not in calls:
                self._position += len(opener)
                self._stray_ends.remove(opener)
            elif opener:
                yield from self._attempt(opener)

    def _read_content(self, openers: Sequence[str], is_bare: bool) -> Generator[None, None, str | None]:
        """Emit content up to a marker that begins another part, and return it; None at the answer's end."""
        pattern = re.compile("|".join(map(re.escape, sorted(openers, key=len, reverse=True))) or r"(?!)")
        while True:
            match = pattern.search(self._buffer, self._position)
            if match is not None:
                self._emit_content(self._buffer[self._position : match.start()])
                self._position = match.start()
                return match[0]
            keep = self._num_held(openers)
            stop = len(self._buffer) - keep
            if stop > self._position:
                self._emit_content(self._buffer[self._position : stop])
                self._position = stop
            if self._is_final:
                if self._space and not self._after_call and not keep:
                    self._events.append(ContentDelta(self._space))
                return None
            if is_bare and self._after_call:
                return ""
            self._trim()
            yield

    def _skip_reasoning_start(self) -> Task:
        self.is_reasoning = True
        yield from self._skip_lines()

    def _skip_lines(self) -> Task:
        with suppress(CutError):
            yield from self._skip("\n")

    def _run_reasoning(self) -> Task:
        end = self._mark_text(self._format.reasoning.end)
        yield from self._stream((end,), lambda text: self._emit(ReasoningDelta, text), held="\n")
        self.is_reasoning = False
        self._trims_start = not self._has_content

    # ------------------------------------------------------------------ calls

    def _bare_start(self) -> Generator[None, None, bool]:
        start = self._position
        try:
            yield from self._skip()
        except CutError:
            self._position = start
            return False
        if self._buffer[self._position] == ("[" if self._style == "pythonic" else "{"):
            return True
        self._position = start
        return False

    def _attempt_whole_call(self) -> Task:
        start = self._position
        try:
            yield from self._whole_call()
        except (MismatchError, CutError):
            self._position = start

    def _attempt(self, opener: str) -> Task:
        """Parse calls; other text becomes content."""
        self._mark = self._position
        self._stray_ends = []
        try:
            yield from self._run_calls()
        except (MismatchError, CutError) as error:
            if self._is_call_open:  # its name was given already: the rest of a malformed call is content
                if isinstance(error, MismatchError):
                    self._end()
                    self._stray_ends = self._end_marks()
                    return
                self._is_call_open = False
                self._flush_content(self._is_cut)
                raise
            self._position = self._mark
            if self._is_cut or isinstance(error, CutError):
                self._flush_content(self._is_cut and (self._after_call or self._begins_call(opener)))
                raise CutError from None
            if self._buffer.startswith(opener, self._position):
                self._emit_content(opener)
                self._position += len(opener)

    def _begins_call(self, opener: str) -> bool:
        """Return whether a call begins next; a call without a marker names a tool."""
        tools, text = self._format.tools, "".join(self._buffer[self._position :].split())
        heads = ["".join(f"{tools.section_start}{tools.call_start}{name}".split()) for name in self._tools]
        return opener in self._openers() or any(head.startswith(text) or text.startswith(head) for head in heads)

    def _flush_content(self, is_call: bool = False) -> None:
        """Emit the rest of an answer that ended before its call was recognised; drop it if it `is_call`."""
        rest = self._buffer[self._position :]
        self._position = len(self._buffer)
        if not is_call and (rest.strip() or not self._after_call):
            text = self._space + rest
            if self._trims_start:
                text = text.lstrip("\n")
            self._emit(ContentDelta, text)

    # ------------------------------------------------------------------ harmony

    def _run_harmony(self, prompt_tail: str) -> Task:
        """Channels: a header up to <|message|>, a body up to <|end|>, <|call|> or <|return|>."""
        mark = {
            name: encode_markers(self._format, f"<|{name}|>")
            for name in ("start", "end", "message", "channel", "constrain", "return", "call")
        }
        ends = [mark["end"], mark["call"], mark["return"], mark["start"]]
        tail = prompt_tail.rstrip()
        header = tail.rpartition("<|start|>")[2] if tail.endswith("<|message|>") else None
        while True:
            if header is None:
                header = yield from self._harmony_header(mark)
                if header is None:
                    yield from self._harmony_body("final", ends)
                    continue
            recipient = re.search(r"to=(?:functions\.)?([^\s<\ud800-\udfff]+)", header)
            channel = re.search(r"(?:^|" + re.escape(mark["channel"]) + r"|<\|channel\|>)\s*(\w+)", header)
            name = recipient[1] if recipient is not None and self._parses_tools else ""
            if not name or not (yield from self._harmony_call(name, ends)):
                yield from self._harmony_body(channel[1] if channel and not name else "final", ends)
            header = None

    def _harmony_header(self, mark: dict[str, str]) -> Generator[None, None, str | None]:
        """Return the header of the next message; None where the text is content without one."""
        yield from self._try(mark["start"])
        start = self._position
        while mark["message"] not in self._buffer[start:]:
            text = self._buffer[start:]
            headers = (mark["start"], "assistant", " to=", "to=", mark["channel"], "commentary", mark["constrain"])
            is_header = any(text.startswith(head) or head.startswith(text) for head in headers)
            if not is_header or self._is_final or len(text) > 2 * MAX_NAME_CHARS:
                self._position = start
                if self._is_final and (not text or (self._is_cut and is_header)):
                    raise CutError
                return None
            yield
        header, _ = yield from self._until([mark["message"]])
        return header

    def _harmony_call(self, name: str, ends: list[str]) -> Generator[None, None, bool]:
        """Read the arguments of a call; False where text follows that is none of them."""
        start = self._position
        try:
            yield from self._skip()
            if (yield from self._harmony_end(ends)):
                self._begin(name)
                self._give("{}")
                self._end()
                return True
            yield from self._give_object(name, ends=ends)
        except MismatchError:
            if self._is_call_open:
                self._end()
            else:
                self._position = start
            return False
        except CutError:
            if not self._is_call_open:
                self._begin(name)
            raise
        self._end()  # <|call|> may end the answer
        yield from self._skip()
        return (yield from self._harmony_end(ends))

    def _harmony_end(self, ends: list[str]) -> Generator[None, None, bool]:
        """Skip the end of a message, if it comes next; the start of another message ends it too."""
        for end in ends:
            start = self._position
            if (yield from self._try(end)):
                self._position = start if end == ends[-1] else self._position
                return True
        return False

    def _harmony_body(self, channel: str, ends: list[str]) -> Task:
        self.is_reasoning = channel == "analysis"
        kind = ReasoningDelta if self.is_reasoning else ContentDelta
        stop = yield from self._stream(ends, lambda text: self._emit(kind, text))
        self._position -= len(stop) if stop == ends[-1] else 0
        self.is_reasoning = False

    def _emit(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if text:
            self._events.append(kind(self._show(text)))


def _merge(events: list[ChatEvent]) -> list[ChatEvent]:
    """Join neighbours of the same kind."""
    merged: list[ChatEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.index == event.index:
            merged[-1] = ToolCallDelta(event.index, last.arguments + event.arguments)
        elif isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            merged[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + event.text)
        else:
            merged.append(event)
    return merged
