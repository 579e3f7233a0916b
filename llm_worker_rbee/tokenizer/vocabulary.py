"""The token list: text, type and raw bytes of every id; end-of-text tokens by name. Encoding is in `encoders`.

A token's bytes depend on the style of the vocabulary: "byte" tokens are written in the byte alphabet of GPT-2, "spm"
tokens are UTF-8 with U+2581 for a space and `<0xNN>` for a single byte. Special and user-defined tokens are verbatim.
"""

import logging
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Literal

from ..errors import InvalidRequestError, TokenizerError

_log = logging.getLogger("llm_worker_rbee")
Style = Literal["byte", "spm", "verbatim"]
SPACE = "\u2581"  # how SentencePiece writes a space


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


class Vocabulary:
    """Texts and types by id; bytes are computed on first use."""

    def __init__(self, texts: Sequence[str], token_types: Sequence[int], style: Style, *, id_limit: int = 0) -> None:
        self.texts, self.token_types, self.style = texts, token_types, style
        self.id_limit = max(id_limit, len(texts))  # ids from len(texts) up to here are padding: no text
        self.ids: dict[str, int] = {}
        for index, text in enumerate(texts):
            if text:
                self.ids.setdefault(text, index)
        self._bytes: dict[int, bytes] = {}
        check_special_lengths((i, texts[i]) for i, kind in enumerate(token_types) if kind in VERBATIM_TYPES)

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
        return {text: index for text, index in self.ids.items() if self.token_types[index] in SPECIAL_TYPES}

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
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def _compute_bytes(self, token_id: int) -> bytes:
        kind = self.kind(token_id)
        text = self.texts[token_id] if token_id < len(self.texts) else ""
        if kind in VERBATIM_TYPES or self.style == "verbatim":
            return text.encode()
        if kind == TokenType.BYTE:
            return bytes([self._byte_value(token_id, text)])
        if self.style == "spm":
            return text.replace(SPACE, " ").encode()
        try:
            return bytes([CHAR_TO_BYTE[char] for char in text])
        except KeyError:
            return text.encode()  # not in the byte alphabet: added as plain text

    def _byte_value(self, token_id: int, text: str) -> int:
        value = parse_byte_token(text)
        if value is None:
            raise TokenizerError(
                f"token {token_id} has type byte, but its text {preview(text)} is not of the form <0xNN>"
            )
        return value


# Tokens that end a text or a turn in published chat formats, for files that name only one of them: a model that ends
# its turn with another one would never stop.
END_TOKEN_NAMES = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",  # Llama 3
    "<|im_end|>", "<|endoftext|>",  # ChatML, GPT-2
    "<|end|>", "<|return|>", "<|call|>",  # Phi-3; harmony
    "<end_of_turn>", "<eos>",  # Gemma
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",  # DeepSeek
})  # fmt: skip
# Also HTML mark-up: it ends a text only if it is not a normal token and there is no <eos>.
_MARKUP = "</s>"


def find_end_ids(texts: Sequence[str], token_types: Sequence[int]) -> list[int]:
    """Return the ids of the tokens that end a text by their name."""
    found = {text: index for index, text in enumerate(texts) if text in END_TOKEN_NAMES or text == _MARKUP}
    if _MARKUP in found and (token_types[found[_MARKUP]] == TokenType.NORMAL or "<eos>" in found):
        del found[_MARKUP]
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)  # harmony: <|end|> ends a message, not the turn
    return sorted(found.values())
