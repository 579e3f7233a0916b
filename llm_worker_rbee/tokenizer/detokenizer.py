"""Incremental detokenizer: ids to text deltas with whole characters, and stop strings across token boundaries.

The deltas of all pushes and of `finish`, joined, are `tokenizer.decode(ids, continuation=...)` up to the first stop
string. A push takes time linear in its own text: each stop string has a Knuth-Morris-Pratt automaton, and the text held
back is the longest prefix of a stop string that the text ends with.
"""

import codecs
from collections.abc import Sequence

from ..errors import InvalidRequestError
from .tokenizer import ByteJoiner, Tokenizer


class StopString:
    """One stop string, and the length of its prefix that the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._failure = [0] * len(text)  # longest proper border of text[:i + 1]
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._failure[length - 1]
            length += text[index] == text[length]
            self._failure[index] = length

    def feed(self, char: str) -> bool:
        """Advance by one character; return True when the stop string is complete."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._failure[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


class Detokenizer:
    """Text deltas of the tokens that follow a prompt.

    When stop strings are complete, the one that begins first is `stop_matched`; it and the text after it are never
    returned. With `continuation=False` the ids start a new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special: bool = True, continuation: bool = True
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidRequestError("stop must be a list of non-empty strings", field="stop")
        self.stop_matched: str | None = None
        self._joiner = ByteJoiner(tokenizer, skip_special=skip_special, continuation=continuation)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [StopString(text) for text in stop]
        self._held = ""
        self._texts = tokenizer.whole_texts if skip_special else {}
        self._is_between_chars = False  # and nothing else depends on the tokens before: see `push`

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is final now.

        Between two characters, without stop strings, a token that has whole characters always adds the same text.
        """
        if self._is_between_chars and (text := self._texts.get(token_id)) is not None:
            return text
        if self.stop_matched is not None:
            return ""
        raw = self._joiner.push(token_id)
        text = self._utf8.decode(raw)
        was_between_chars = self._is_between_chars
        self._is_between_chars = not (self._stops or self._utf8.getstate()[0] or self._joiner.drops_space)
        if was_between_chars and self._is_between_chars:
            self._texts[token_id] = text
        return self._release(text)

    def finish(self) -> str:
        """End the text; return the part that was held back."""
        if self.stop_matched is not None:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if self.stop_matched is None:
            text, self._held = text + self._held, ""
        return text

    def flush(self) -> str:
        """Return the text held back; more follows after a token that has no text. No stop string spans that token."""
        text = self.finish()
        self._utf8.reset()
        for stop in self._stops:
            stop.matched = 0
        return text

    def _release(self, new: str) -> str:
        if not self._stops:
            return new
        text = self._held + new
        found: list[tuple[int, int, str]] = []  # (start, -length, stop string)
        for stop in self._stops:
            for end, char in enumerate(new, start=len(self._held) + 1):
                if stop.feed(char):
                    found.append((end - len(stop.text), -len(stop.text), stop.text))
                    break
        if found:
            start, _, self.stop_matched = min(found)
            self._held = ""
            return text[:start]
        shown = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]
