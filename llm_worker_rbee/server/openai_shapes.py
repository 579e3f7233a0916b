"""Parts of replies as the official OpenAI client parses them: log-probabilities of both routes, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.request import TokenLogprob
from ..errors import ModelNotFoundError, WorkerError
from ..tokenizer import Tokenizer
from .answer import Piece


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As chat tells them."""

    def one(token: int, value: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": value, "bytes": list(raw)}

    return {"content": [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*top) for top in entry.top]} for entry in entries
    ], "refusal": None}  # fmt: skip


def text_logprobs(tokenizer: Tokenizer, piece: Piece, at: int = 0) -> dict[str, Any]:
    """As completions tell them; the first token of a prompt has none."""
    tokens = [tokenizer.piece(entry.token) for entry in piece.logprobs]
    values = [None if entry.logprob != entry.logprob else entry.logprob for entry in piece.logprobs]
    tops = [
        None if value is None else {tokenizer.piece(token): chance for token, chance in entry.top}
        for entry, value in zip(piece.logprobs, values, strict=True)
    ]
    offsets = []
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def error_body(error: WorkerError) -> dict[str, Any]:
    """As the official client reads it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}
