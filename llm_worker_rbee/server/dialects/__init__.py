"""The dialects: each module here parses the bodies of one API into a `GenerateRequest` and prints its replies.

A module has `DIALECT`, and a place in the tuple here. Routes, error bodies, the description in `/openapi.json` and the
parsers of the process for large bodies follow from it. The parsers of bodies that belong to no dialect are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache, partial
from typing import Any

from ...errors import PayloadTooLargeError
from ...tokenizer.chat.events import ChatOptions
from ..bodies import Conversation, GenerateRequest, Messages, PackedIds, num_bytes
from ..dialect import Dialect, GenerateRoute, Parse
from ..schema import (
    Boolean,
    BoundedObject,
    Field,
    ParseOptions,
    Text,
    TokenIds,
    decode_object,
    validate_body,
)
from . import (
    anthropic,
    anthropic_batches,
    jobs,
    ollama,
    ollama_embed,
    ollama_models,
    openai,
    openai_batches,
    openai_completions,
    openai_lora,
    openai_models,
    openai_pooling,
    openai_responses,
)

DIALECTS: tuple[Dialect, ...] = (
    anthropic.DIALECT,
    anthropic_batches.DIALECT,
    jobs.DIALECT,
    ollama.DIALECT,
    ollama_embed.DIALECT,
    ollama_models.DIALECT,
    openai.DIALECT,
    openai_batches.DIALECT,
    openai_completions.DIALECT,
    openai_lora.DIALECT,
    openai_models.DIALECT,
    openai_pooling.DIALECT,
    openai_responses.DIALECT,
)
TOKENIZE = {
    "model": Field(Text()),
    "text": Field(Text(), required=True, is_secret=True),
    "add_special": Field(Boolean(), True),
    "parse_special": Field(Boolean(), False),
}
DETOKENIZE = {"model": Field(Text()), "tokens": Field(TokenIds(), required=True, is_secret=True)}
APPLY_TEMPLATE = {
    "model": Field(Text()),
    "messages": Field(Messages(("text",)), required=True, is_secret=True),
    "chat_template_kwargs": Field(BoundedObject(), {}),
}
MAX_TEXT_BYTES = 512 << 10  # of /tokenize and /apply-template: a text of this length takes about 0.5 s of a core


@lru_cache(256)
def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path, for the form of its errors: the one with the longest match."""
    return max(DIALECTS, key=lambda dialect: max(map(partial(_claimed_length, path), dialect.prefixes)))


def _claimed_length(path: str, prefix: str) -> int:
    path = path or "/"
    claims = path == prefix or path.startswith(prefix.rstrip("/") + "/")
    return len(prefix) if claims else -1


def generate_routes() -> Iterator[GenerateRoute]:
    """Yield the routes that the model answers."""
    for dialect in DIALECTS:
        yield from dialect.generate


def parse_tokenize(body: bytes, _: ParseOptions) -> dict[str, Any]:
    """Validate the body of `/tokenize`."""
    values = validate_body(decode_object(body), TOKENIZE)
    _require_short(num_bytes(values["text"]))
    return values


def parse_detokenize(body: bytes, _: ParseOptions) -> PackedIds:
    """Validate the body of `/detokenize`."""
    return PackedIds.pack(validate_body(decode_object(body), DETOKENIZE)["tokens"])


def parse_apply_template(body: bytes, _: ParseOptions) -> Conversation:
    """Validate the body of `/apply-template`."""
    values = validate_body(decode_object(body), APPLY_TEMPLATE)
    options = ChatOptions(template_kwargs=values["chat_template_kwargs"])
    conversation = Conversation.encode(values["messages"], options)
    _require_short(conversation.num_bytes)
    return conversation


def _require_short(size: int) -> None:
    """Raise for a text or messages whose tokenizing would keep the worker busy for long."""
    if size > MAX_TEXT_BYTES:
        raise PayloadTooLargeError(
            f"the text has {size} bytes: at most {MAX_TEXT_BYTES} are tokenized at a time; send it in parts, or use "
            "`llm-worker-rbee tokenize`"
        )


@cache
def body_parsers() -> dict[str, tuple[Parse, Any]]:
    """Return the parsers of all bodies with the type of the record of each, by name: a path, or a word."""
    parsers: dict[str, tuple[Parse, Any]] = {
        "tokenize": (parse_tokenize, dict[str, Any]),
        "detokenize": (parse_detokenize, PackedIds),
        "apply_template": (parse_apply_template, Conversation),
    }
    for dialect in DIALECTS:
        parsers |= {route.path: (route.parse, GenerateRequest) for route in dialect.generate} | dialect.parsers
    return parsers
