"""The small routes between text and tokens: a body in, a reply out, all of it away from the event loop."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import InvalidRequestError
from . import fields
from .kinds import MANY
from .small_fields import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE
from .worker import Worker


def tokenized(worker: Worker, body: bytes) -> bytes:
    """Text -> ids."""
    values = fields.checked(fields.read_object(body), TOKENIZE)
    llm = worker.llm
    ids = llm.tokenize(values["text"], add_special=values["add_special"], parse_special=values["parse_special"])
    pieces = {token: llm.tokenizer.piece(token) for token in set(ids)}
    return b'{"tokens":' + _listed(ids) + b',"pieces":' + _listed([pieces[token] for token in ids]) + b"}"


def _listed(values: list[Any]) -> bytes:
    """A list as JSON, a part at a time, so that other threads can breathe where it is long."""
    parts = (values[at : at + MANY] for at in range(0, len(values), MANY))
    return b"[" + b",".join([msgspec.json.encode(part)[1:-1] for part in parts]) + b"]"


def detokenized(worker: Worker, body: bytes) -> bytes:
    """Ids -> text."""
    ids = fields.checked(fields.read_object(body), DETOKENIZE)["tokens"]
    llm, size = worker.llm, worker.llm.config.vocab_size
    if (largest := max(ids, default=0)) >= size:
        raise InvalidRequestError(f"tokens: {str(largest)[:20]} is not a token id (0..{size - 1})", "tokens")
    return msgspec.json.encode({"text": llm.detokenize(ids)})


def template_applied(worker: Worker, body: bytes) -> bytes:
    """Messages -> the prompt that the template makes of them."""
    values = fields.checked(fields.read_object(body), APPLY_TEMPLATE)
    llm, messages = worker.llm, fields.conversation(values["messages"])
    return msgspec.json.encode({"prompt": llm.apply_chat_template(messages), "tokens": llm.tokenize_chat(messages)})
