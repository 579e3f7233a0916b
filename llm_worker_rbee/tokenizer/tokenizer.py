"""The tokenizer of the worker, one class for every kind of vocabulary: token list, BOS and EOS, an encoder.

`Vocabulary` gives text, type and raw bytes of every id. The bytes depend on its style: "byte" tokens are written in the
byte alphabet of GPT-2, "spm" tokens are UTF-8 with U+2581 for a space and `<0xNN>` for a single byte, "wordpiece"
tokens are UTF-8 with "##" before tokens that continue a word. Special and user-defined tokens are verbatim. Decoding
joins the bytes of the tokens; invalid UTF-8 becomes U+FFFD. `Detokenizer` decodes token by token, up to stop strings.
Encoders are in `encoders`.
"""

import codecs
import logging
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import compress, islice
from typing import Any, Literal, Protocol

from ..errors import InvalidRequestError, TokenizerError

_log = logging.getLogger("llm_worker_rbee")
MARK = "\ufdd0"  # a Unicode noncharacter, reserved for internal use
Style = Literal["byte", "spm", "wordpiece", "verbatim"]
SPACE = "\u2581"  # how SentencePiece writes a space
CONTINUATION = "##"  # how WordPiece begins a token that is not the first of its word


class TokenType(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = frozenset({int(TokenType.CONTROL), int(TokenType.UNKNOWN)})
VERBATIM_TYPES = SPECIAL_TYPES | {int(TokenType.USER_DEFINED)}
# Limits of special tokens: the automaton that finds them takes about 75 bytes per character.
MAX_SPECIAL_LENGTH = 4096
MAX_SPECIAL_TOTAL = 2_000_000
CHUNK_IDS = 1 << 13  # ids that are decoded at a time


def _byte_alphabet() -> dict[int, str]:
    """Return the printable characters that stand for the 256 bytes in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(0x100 + len(alphabet) - len(printable))
    return alphabet


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
# For `str.translate`: each character to chr(its byte), and characters below 256 that stand for no byte to none.
_TO_LATIN_1 = dict.fromkeys(range(256), "\uffff") | {ord(char): byte for char, byte in CHAR_TO_BYTE.items()}


def parse_byte_token(text: str) -> int | None:
    """Return the byte of a token `<0xNN>`, or None."""
    digits = text[3:5]
    if len(text) != 6 or not text.startswith("<0x") or text[5] != ">":
        return None
    return int(digits, 16) if all(char in "0123456789abcdefABCDEF" for char in digits) else None


def preview(value: object) -> str:
    """Return a value of the file for a message: on one line, shortened."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_special_lengths(tokens: Iterable[tuple[object, str]]) -> None:
    """Raise if one of the special and user-defined tokens (id, text), or all together, are too long."""
    total = 0
    for token_id, text in tokens:
        total += len(text)
        if len(text) > MAX_SPECIAL_LENGTH:
            raise TokenizerError(
                f"token {preview(token_id)} is a special token of {len(text)} characters; at most {MAX_SPECIAL_LENGTH}"
            )
    if total > MAX_SPECIAL_TOTAL:
        raise TokenizerError(f"the special tokens have {total} characters together; at most {MAX_SPECIAL_TOTAL}")


def ids_of_types(token_types: Sequence[int], types: Collection[int]) -> list[int]:
    """Return the ids of the tokens of these types, in order."""
    return list(compress(range(len(token_types)), map(frozenset(types).__contains__, token_types)))


class Vocabulary:
    """Texts and types by id; bytes are computed on first use."""

    def __init__(self, texts: Sequence[str], token_types: Sequence[int], style: Style, *, id_limit: int = 0) -> None:
        self.texts, self.token_types, self.style = texts, token_types, style
        self.id_limit = max(id_limit, len(texts))  # ids from len(texts) up to here are padding: no text
        self.ids = dict(zip(texts, range(len(texts)), strict=True))
        if len(self.ids) < len(texts):  # of tokens with the same text the first one counts
            self.ids = {}
            for index, text in enumerate(texts):
                self.ids.setdefault(text, index)
        self.ids.pop("", None)
        self._bytes: dict[int, bytes] = {}
        check_special_lengths((i, texts[i]) for i in ids_of_types(token_types, VERBATIM_TYPES))

    def __len__(self) -> int:
        return len(self.texts)

    def pad_to(self, rows: int) -> None:
        """Make ids up to the rows of the embedding valid; only added tokens may lie beyond it."""
        beyond = self.token_types[rows:]
        if any(kind in (TokenType.NORMAL, TokenType.BYTE) for kind in beyond):
            raise TokenizerError(f"the tokenizer has {len(self)} tokens, the model's embedding {rows} rows")
        if beyond:
            _log.warning("the model's embedding has no row for the %d tokens from id %d on", len(beyond), rows)
        self.id_limit = rows

    def special_names(self) -> dict[str, int]:
        """Return names and ids of control and unknown tokens."""
        return self.ids_by_text(SPECIAL_TYPES)

    def ids_by_text(self, types: Collection[int]) -> dict[str, int]:
        """Return texts and ids of the tokens of these types; of tokens with the same text only the first counts."""
        texts = self.texts
        return {texts[i]: i for i in ids_of_types(self.token_types, types) if self.ids.get(texts[i]) == i}

    def kind(self, token_id: int) -> int:
        """Return the token's type; padding is UNUSED. Raises for an id outside the vocabulary."""
        if not 0 <= token_id < self.id_limit:
            raise InvalidRequestError(
                f"token id {token_id} is outside the vocabulary (0 to {self.id_limit - 1})", field="tokens"
            )
        return self.token_types[token_id] if token_id < len(self.texts) else TokenType.UNUSED

    def is_special(self, token_id: int) -> bool:
        """Return whether this is a control or unknown token."""
        return self.kind(token_id) in SPECIAL_TYPES

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of the token; for a special token its name."""
        value = self._bytes.get(token_id)
        if value is None:
            value = self._bytes[token_id] = self._compute_bytes(token_id)
        return value

    def max_token_bytes(self) -> int:
        """Return the bytes of the longest token; a character has 4 at most, so few tokens need a look."""
        if not self.texts:
            return 0
        lengths = list(map(len, self.texts))
        longest = len(self._compute_bytes(lengths.index(max(lengths))))
        for token_id, length in enumerate(lengths):
            if 4 * length > longest:
                longest = max(longest, len(self._compute_bytes(token_id)))
        return longest

    def _compute_bytes(self, token_id: int) -> bytes:
        kind = self.kind(token_id)
        text = self.texts[token_id] if token_id < len(self.texts) else ""
        if kind in VERBATIM_TYPES or self.style == "verbatim":
            return text.encode()
        if kind == TokenType.BYTE:
            value = parse_byte_token(text)
            if value is None:
                raise TokenizerError(f"token {token_id} has type byte, but its text {preview(text)} is not <0xNN>")
            return bytes([value])
        if self.style == "spm":
            return text.replace(SPACE, " ").encode()
        if self.style == "wordpiece":
            is_first = not text.startswith(CONTINUATION)
            return (f" {text}" if is_first else text.removeprefix(CONTINUATION)).encode()
        try:
            return text.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode()  # not in the byte alphabet: added as plain text


# Tokens that end a text or a turn in published chat formats, for files that name only one of them: a model that ends
# its turn with another one would never stop.
END_TOKEN_NAMES = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",  # Llama 3
    "<|im_end|>", "<|endoftext|>",  # ChatML, GPT-2
    "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",  # Phi-3; harmony; Solar
    "<end_of_turn>", "<eos>", "<turn|>", "<|tool_response>",  # Gemma
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",  # DeepSeek
})  # fmt: skip
# Also HTML mark-up: it ends a text only if it is not a normal token and there is no <eos>.
_MARKUP = "</s>"


def find_end_ids(texts: Sequence[str], token_types: Sequence[int]) -> list[int]:
    """Return the ids of the tokens that end a text by their name."""
    is_end = map((END_TOKEN_NAMES | {_MARKUP}).__contains__, texts)
    ids = {text: index for index, text in compress(enumerate(texts), is_end)}
    if _MARKUP in ids and (token_types[ids[_MARKUP]] == TokenType.NORMAL or "<eos>" in ids):
        del ids[_MARKUP]
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|flush|>", "<|calls|>"} <= ids.keys():
        ids.pop("<|end|>", None)  # of harmony and Solar: it ends a message, not the turn
    return sorted(ids.values())


class Encoder(Protocol):
    """Text to ids, without BOS and EOS."""

    def encode(self, text: str, parse_special: bool, mark: str = "") -> list[int]:
        """Return the ids of valid Unicode text; the character `mark` is removed after special tokens are split off."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, without control tokens from their text."""
        ...


@dataclass(frozen=True)
class BosEos:
    """The tokens that begin and end a text."""

    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()  # what encode puts before a text, usually the BOS
    suffix: tuple[int, ...] = ()


@dataclass(frozen=True)
class PairTemplate:
    """The tokens around the two texts of a cross-encoder, as (token id, token type), and the texts' types."""

    prefix: tuple[tuple[int, int], ...]
    middle: tuple[tuple[int, int], ...]
    suffix: tuple[tuple[int, int], ...]
    types: tuple[int, int] = (0, 0)

    @property
    def num_special(self) -> int:
        """Tokens of a pair that are not of its texts."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def join(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """Return ids and token types of a pair."""
        tokens = [*self.prefix, *((i, self.types[0]) for i in first), *self.middle]
        tokens += [*((i, self.types[1]) for i in second), *self.suffix]
        return [token_id for token_id, _ in tokens], [token_type for _, token_type in tokens]


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
        pair: PairTemplate | None = None,
        space_at_start: bool = False,  # encode adds a space that decode removes
        space_after_special: bool = False,  # also after a special token that is shown
        chat_template: str | None = None,
        decode_error: str | None = None,
    ) -> None:
        self.kind = kind
        self.vocab_size = len(vocabulary)
        self.bos_id, self.eos_id, self.eos_ids = ends.bos_id, ends.eos_id, ends.eos_ids
        self.add_bos = ends.bos_id is not None and ends.bos_id in ends.prefix
        self.add_eos = ends.eos_id is not None and ends.eos_id in ends.suffix
        self.chat_template = chat_template
        self.space_at_start, self.space_after_special = space_at_start, space_after_special
        self.decode_error = decode_error  # set if it can only encode
        self.whole_texts: dict[int, str] = {}  # of tokens that were decoded and have whole characters; special ones: ""
        self._vocabulary, self._encoder = vocabulary, encoder
        self._prefix, self._suffix = list(ends.prefix), list(ends.suffix)
        self.pair = pair

    def prepare(self) -> None:
        """Build the parts of the encoder that a long text needs."""
        if (prepare := getattr(self._encoder, "prepare", None)) is not None:
            prepare()

    def pad_to(self, vocab_size: int) -> None:
        """Extend the ids by padding, without text, to the rows of the model's embedding; raise if a token has none."""
        self._vocabulary.pad_to(vocab_size)

    def protect(self, text: str) -> str:
        """Break up the names of control tokens in a text with a mark that `encode(..., protected=True)` removes.

        So the text of a message stays text when the rendered prompt is parsed for control tokens. The renderer of chat
        templates does the same by `special_pattern`.
        """
        names = re.compile(self.special_pattern)
        return names.sub(lambda name: f"{name[0][0]}{MARK}{name[0][1:]}", text.replace(MARK, "\ufffd"))

    @cached_property
    def special_pattern(self) -> str:
        """A regular expression that matches the names of control tokens, the longest first."""
        names = [name for name in self._vocabulary.special_names() if len(name) > 1]
        return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)"

    @property
    def verbatim_ids(self) -> dict[str, int]:
        """Names and ids of the control and user-defined tokens, which stand for exactly their text."""
        return self._vocabulary.ids_by_text(VERBATIM_TYPES)

    @property
    def control_ids(self) -> list[int]:
        """The ids of control and unknown tokens, in order."""
        return ids_of_types(self._vocabulary.token_types, SPECIAL_TYPES)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, protected: bool = False
    ) -> list[int]:
        """Return the ids of a text.

        `add_special` adds BOS and EOS as the file says, never twice. `parse_special` recognises the names of control
        tokens in the text; otherwise they are plain text. `protected`: see `protect`.
        """
        _validate_text(text)
        ids = self._encoder.encode(text, parse_special, MARK if protected else "") if text else []
        return self._add_special(ids) if add_special else ids

    def _add_special(self, ids: list[int]) -> list[int]:
        before = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        after = [] if self._suffix and ids[-len(self._suffix) :] == self._suffix else self._suffix
        return [*before, *ids, *after]

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """The tokens that `encode` puts before and after a text."""
        return self._prefix, self._suffix

    @property
    def num_special(self) -> int:
        """Tokens that `encode` adds to a text."""
        return len(self._prefix) + len(self._suffix)

    def encode_batch(self, texts: Sequence[str], *, max_tokens: int | None = None) -> list[list[int]]:
        """Return the ids of many texts, each with BOS and EOS, which `max_tokens` keeps when it cuts the text.

        Names of control tokens are plain text.
        """
        room = None if max_tokens is None else _room(max_tokens, self.num_special)
        return [self._add_special(ids[:room]) for ids in self._encode_all(texts)]

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts alone; an empty one has none, whatever prefix the encoder adds."""
        for text in texts:
            _validate_text(text)
        rows = iter(self._encoder.encode_batch(list(filter(None, texts))))
        return [next(rows) if text else [] for text in texts]

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Return ids and token types of a pair; `max_tokens` cuts the second text. See `encode_pairs`."""
        return self.encode_pairs(first, [second], max_tokens=max_tokens)[0]

    def encode_pairs(
        self, first: str, seconds: Sequence[str], *, max_tokens: int | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Return ids and token types of pairs with the same first text, which is a query."""
        template = self._pair_template()
        query, *documents = self._encode_all([first, *seconds])
        room = None if max_tokens is None else _room(max_tokens, template.num_special) - len(query)
        if room is not None and room < 0:
            raise InvalidRequestError(
                f"the query has {len(query)} tokens; at most {room + len(query)} beside the special tokens: shorten it",
                field="query",
            )
        return [template.join(query, document[:room]) for document in documents]

    def _pair_template(self) -> PairTemplate:
        if self.pair is None:
            raise TokenizerError("the tokenizer has no template for pairs of texts: it is not of a cross-encoder")
        return self.pair

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD."""
        joiner = ByteJoiner(self, skip_special=skip_special, continuation=continuation)
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        texts = [utf8.decode(joiner.join(chunk)) for chunk in _validate_ids(ids)]
        return "".join(texts) + utf8.decode(b"", final=True)

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

    def max_token_bytes(self) -> int:
        """Return the bytes of the longest token."""
        return self._vocabulary.max_token_bytes()

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, or None."""
        return self._vocabulary.ids.get(text)


def _validate_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"text must be a string, not {type(text).__name__}", field="text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise InvalidRequestError(f"the text is not valid Unicode: {bad}", field="prompt") from None


def _room(max_tokens: int, num_special: int) -> int:
    """Return the number of text tokens that fit in addition to the special tokens."""
    if max_tokens < num_special:
        raise InvalidRequestError(
            f"max_tokens {max_tokens} has no room for the {num_special} special tokens", field="max_tokens"
        )
    return max_tokens - num_special


def _validate_ids(ids: object) -> Iterator[Sequence[int]]:
    """Yield ids as plain integers, a chunk at a time, so that other threads get the interpreter.

    NumPy's integers are accepted; text, bytes and booleans are not.
    """
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) != 1:
        raise InvalidRequestError(f"tokens must be a list of token ids, not {type(ids).__name__}", field="tokens")
    values = iter(ids)
    while chunk := tuple(islice(values, CHUNK_IDS)):
        yield chunk if set(map(type, chunk)) == {int} else [_validate_id(token_id) for token_id in chunk]


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
        self.drops_space = tokenizer.space_at_start and not continuation

    def push(self, token_id: int) -> bytes:
        """Return the bytes that this token adds to the text."""
        tokenizer = self._tokenizer
        if tokenizer.is_special(token_id):
            if self._skip_special:
                return b""
            self.drops_space = tokenizer.space_after_special
            return tokenizer.token_bytes(token_id)
        raw = tokenizer.token_bytes(token_id)
        if raw and self.drops_space:
            self.drops_space = False
            return raw.removeprefix(b" ")
        return raw

    def join(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that these tokens add to the text, as `push` does for each."""
        if self.drops_space or (self._tokenizer.space_after_special and not self._skip_special):
            return b"".join([self.push(token_id) for token_id in ids])
        added = {token_id: self.push(token_id) for token_id in dict.fromkeys(ids)}  # each depends on its id alone
        return b"".join([added[token_id] for token_id in ids])


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
        matches: list[tuple[int, int, str]] = []  # (start, -length, stop string)
        for stop in self._stops:
            for end, char in enumerate(new, start=len(self._held) + 1):
                if stop.feed(char):
                    matches.append((end - len(stop.text), -len(stop.text), stop.text))
                    break
        if matches:
            start, _, self.stop_matched = min(matches)
            self._held = ""
            return text[:start]
        shown = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]
