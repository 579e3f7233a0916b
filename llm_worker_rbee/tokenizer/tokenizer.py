"""The tokenizer of the worker: one class for every kind of vocabulary.

It combines an encoder (text to ids), a vocabulary (ids to bytes) and the BOS and EOS settings of the file. Decoding
joins the bytes of the tokens; invalid UTF-8 becomes U+FFFD.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import InvalidRequestError, TokenizerError
from .encoders import Encoder
from .vocabulary import Vocabulary, preview

MARK = "\ufdd0"  # a Unicode noncharacter, reserved for internal use


@dataclass(frozen=True)
class BosEos:
    """The tokens that begin and end a text."""

    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()  # what encode puts before a text, usually the BOS
    suffix: tuple[int, ...] = ()


@dataclass(frozen=True)
class LeadingSpace:
    """Where encode adds a space that decode removes: at the start, and after a shown special token."""

    at_start: bool = False
    after_special: bool = False


class Tokenizer:
    """Text to ids and back.

    `decode` inverts `encode`: it drops the space that a SentencePiece vocabulary puts before a text. Output tokens
    continue their prompt: with `continuation=True` the first space stays. See `is_continuation(prompt)`.
    """

    def __init__(
        self,
        *,
        kind: str,
        vocabulary: Vocabulary,
        encoder: Encoder,
        ends: BosEos,
        leading_space: LeadingSpace = LeadingSpace(),  # noqa: B008  (frozen)
        chat_template: str | None = None,
        decode_error: str | None = None,
    ) -> None:
        self.kind = kind
        self.vocab_size = len(vocabulary)
        self.bos_id, self.eos_id, self.eos_ids = ends.bos_id, ends.eos_id, ends.eos_ids
        self.add_bos = ends.bos_id is not None and ends.bos_id in ends.prefix
        self.add_eos = ends.eos_id is not None and ends.eos_id in ends.suffix
        self.chat_template = chat_template
        self.leading_space = leading_space
        self.decode_error = decode_error  # set if it can only encode
        self._vocabulary, self._encoder = vocabulary, encoder
        self._prefix, self._suffix = list(ends.prefix), list(ends.suffix)

    def pad_to(self, vocab_size: int) -> None:
        """Extend the ids to the rows of the model's embedding; those beyond the tokens are padding, without text.

        Raises if there are fewer rows than tokens: the model cannot look up such ids.
        """
        self._vocabulary.pad_to(vocab_size)

    def protect(self, text: str) -> str:
        """Break up the names of control tokens in a text with a mark that `encode(..., protected=True)` removes.

        So the text of a message stays text when the rendered prompt is parsed for control tokens.
        """
        return self._special_pattern.sub(lambda name: f"{name[0][0]}{MARK}{name[0][1:]}", text.replace(MARK, "\ufffd"))

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        names = [name for name in self._vocabulary.special_names() if len(name) > 1]
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, protected: bool = False
    ) -> list[int]:
        """Return the ids of a text.

        `add_special` adds BOS and EOS as the file says, never twice. `parse_special` recognises the names of control
        tokens in the text; otherwise they are plain text. `protected`: see `protect`.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"text must be a string, not {type(text).__name__}", field="text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: character {error.start} is the lone surrogate"
                f" U+{ord(text[error.start]):04X}",
                field="prompt",
            ) from None
        ids = self._encoder.encode(text, parse_special, MARK if protected else "") if text else []
        if not add_special:
            return ids
        before = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        after = [] if self._suffix and ids[-len(self._suffix) :] == self._suffix else self._suffix
        return [*before, *ids, *after]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD."""
        joiner = ByteJoiner(self, skip_special=skip_special, continuation=continuation)
        return b"".join([joiner.push(token_id) for token_id in _validate_ids(ids)]).decode(errors="replace")

    def is_continuation(self, prompt: Sequence[int]) -> bool:
        """Return whether output after this prompt keeps its first space: the prompt does not end in a special token."""
        return bool(prompt) and not self.is_special(prompt[-1])

    def piece(self, token_id: int) -> str:
        """Return the token's text; for a special token its name."""
        return self._vocabulary.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of a token; for a special token its name."""
        return self._vocabulary.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Return whether this is a control or unknown token, which is not part of the text."""
        return self._vocabulary.is_special(token_id)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, or None."""
        return self._vocabulary.ids.get(text)


def _validate_ids(ids: object) -> list[int]:
    """Return ids as plain integers; accepts NumPy's, rejects text, bytes and booleans."""
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) != 1:
        raise InvalidRequestError(f"tokens must be a list of token ids, not {type(ids).__name__}", field="tokens")
    return [_validate_id(token_id) for token_id in ids]


def _validate_id(token_id: Any) -> int:
    try:
        if not isinstance(token_id, bool):
            return operator.index(token_id)
    except TypeError:
        pass
    raise InvalidRequestError(f"tokens: {preview(token_id)} is not a token id", field="tokens")


class ByteJoiner:
    """Tokens to bytes, one by one; shared by `Tokenizer.decode` and `Detokenizer`."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, continuation: bool) -> None:
        if tokenizer.decode_error is not None:
            raise TokenizerError(tokenizer.decode_error)
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._drop_space = tokenizer.leading_space.at_start and not continuation

    def push(self, token_id: int) -> bytes:
        """Return the bytes that this token adds to the text."""
        tokenizer = self._tokenizer
        if tokenizer.is_special(token_id):
            if self._skip_special:
                return b""
            self._drop_space = tokenizer.leading_space.after_special
            return tokenizer.token_bytes(token_id)
        raw = tokenizer.token_bytes(token_id)
        if raw and self._drop_space:
            self._drop_space = False
            return raw.removeprefix(b" ")
        return raw
