"""Parts of replies as the official OpenAI client parses them: log-probabilities of both routes, errors."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ..engine.request import TokenLogprob
from ..errors import ModelNotFoundError, WorkerError
from ..tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As chat tells them."""

    def one(token: int, value: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": value, "bytes": list(raw)}

    return {"content": [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*top) for top in entry.top]} for entry in entries
    ], "refusal": None}  # fmt: skip


class TextLogprobs:
    """As completions tell them, piece by piece: each token with its place in the text so far.

    A token that is a part of a character has no text of its own: its name is `bytes:` and its bytes in hexadecimal, and
    the text grows with the one that completes the character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def told(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next ones; the first token of a prompt has no probability."""
        names, offsets, values, tops = [], [], [], []
        for entry in entries:
            value = None if entry.logprob != entry.logprob else entry.logprob
            names.append(self._name(entry.token))
            offsets.append(self._at)
            values.append(value)
            tops.append(None if value is None else {self._name(token): chance for token, chance in entry.top})
            if not self._tokenizer.is_special(entry.token):
                self._at += len(self._utf8.decode(self._tokenizer.token_bytes(entry.token)))
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def error_body(error: WorkerError) -> dict[str, Any]:
    """As the official client reads it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}
