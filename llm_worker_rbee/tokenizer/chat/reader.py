"""Incremental reading of an answer: a buffer, and generators that yield where they need more of it.

A marker that is a token of its own stands in the buffer as a lone surrogate, which text never has, so text cannot be
taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

from .format import ChatFormat

FIRST_MARKER = 0xD800
MAX_DONE_CHARS = 4096
SURROGATES = re.compile("[\ud800-\udfff]")
SPACES = " \n\t\r"
Task = Generator[None, None, Any]


class MismatchError(Exception):
    """The text is not a well-formed call."""


class CutError(Exception):
    """The answer ended."""


def encode_markers(chat_format: ChatFormat, text: str) -> str:
    """Return a text with each marker that is a token as one lone surrogate."""
    for i, (name, _) in enumerate(chat_format.token_ids):
        text = text.replace(name, chr(FIRST_MARKER + i))
    return text


def overlap(text: str, start: int, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text that is the beginning of a marker."""
    longest = 0
    for mark in marks:
        tail = text[max(start, len(text) - len(mark) + 1) :]
        place = tail.find(mark[0])
        while place >= 0 and not mark.startswith(tail[place:]):
            place = tail.find(mark[0], place + 1)
        if place >= 0:
            longest = max(longest, len(tail) - place)
    return longest


class MarkerReader:
    """The buffer and its readers."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self._names = {chr(FIRST_MARKER + i): name for i, (name, _) in enumerate(chat_format.token_ids)}
        self._buffer, self._position = "", 0
        self._is_final = self._is_cut = False  # cut: the answer would have gone on

    def _mark_text(self, text: str) -> str:
        return encode_markers(self._format, text).strip()

    def _show(self, text: str) -> str:
        """Return text with the names of markers."""
        return SURROGATES.sub(lambda match: self._names.get(match[0], ""), text) if not text.isascii() else text

    def _trim(self) -> None:
        """Drop the consumed part of the buffer."""
        if self._position > MAX_DONE_CHARS:
            self._buffer, self._position = self._buffer[self._position :], 0

    def _wait(self) -> Task:
        if self._is_final:
            raise CutError
        yield

    def _peek(self) -> Generator[None, None, str]:
        while self._position >= len(self._buffer):
            yield from self._wait()
        return self._buffer[self._position]

    def _skip(self, chars: str = " \n\t\r") -> Task:
        while (yield from self._peek()) in chars:
            self._position += 1

    def _try(self, text: str) -> Generator[None, None, bool]:
        """Skip a text if it comes next."""
        while True:
            rest = self._buffer[self._position : self._position + len(text)]
            if rest == text:
                self._position += len(text)
                return True
            if not text.startswith(rest) or self._is_final:
                return False
            yield

    def _try_cut(self, text: str) -> Generator[None, None, bool]:
        """Skip a text if it comes next, also where the answer ends inside it."""
        if (yield from self._try(text)):
            return True
        is_cut = self._is_final and text.startswith(self._buffer[self._position :])
        self._position = len(self._buffer) if is_cut else self._position
        return is_cut

    def _try_end(self, text: str) -> Task:
        """Skip whitespace and an end marker, if they come next; the answer may end before."""
        start = self._position
        try:
            yield from self._skip()
            if not text or not (yield from self._try_cut(text)):
                self._position = start
        except CutError:
            self._position = start

    def _expect(self, text: str) -> Task:
        if text and not (yield from self._try(text)):
            if self._is_final and text.startswith(self._buffer[self._position :]):
                raise CutError
            raise MismatchError

    def _until(self, stops: Sequence[str], limit: int = 1 << 30) -> Generator[None, None, tuple[str, str]]:
        """Return the text before the first of some stops, and the stop."""
        pattern = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))))
        scanned = self._position
        while (match := pattern.search(self._buffer, max(self._position, scanned))) is None:
            if len(self._buffer) - self._position > limit:
                raise MismatchError
            scanned = len(self._buffer) - max(map(len, stops))
            yield from self._wait()
        text = self._buffer[self._position : match.start()]
        if len(text) > limit:
            raise MismatchError
        self._position = match.end()
        return text, match[0]

    def _stream(self, stops: Sequence[str], emit: Callable[[str], None], held: str = "") -> Generator[None, None, str]:
        """Emit text up to one of some stops, and return that. Characters of `held` before it are left out."""
        pattern = re.compile("|".join(map(re.escape, stops)))
        while (match := pattern.search(self._buffer, self._position)) is None:
            text = self._buffer[self._position : len(self._buffer) - self._num_held(stops)]
            text = text.rstrip(held) if held and not self._is_final else text
            emit(text)
            self._position += len(text)
            self._trim()
            yield from self._wait()
        text = self._buffer[self._position : match.start()]
        emit(text.rstrip(held) if held else text)
        self._position = match.end()
        return match[0]

    def _num_held(self, marks: Sequence[str]) -> int:
        """Return the length of the beginning of a marker at the end of the buffer, while it may become one."""
        return 0 if self._is_final and not self._is_cut else overlap(self._buffer, self._position, marks)
