"""The records that request bodies become, and what the parsers of all dialects share.

A record passes between processes: a large body is parsed in another one (`body_process`). So what takes long to copy is
one piece of bytes or text: token ids are packed, messages are JSON for the chat template. That process imports this
module and the dialects only, so they import little.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import InvalidRequestError, PayloadTooLargeError
from ..sampling_params import MAX_COUNT, SamplingParams, StructuredOutputsParams
from ..tokenizer.chat.events import ChatOptions
from .messages import APPLY_TEMPLATE, normalize_messages
from .schema import (
    CHUNK_ITEMS,
    DETOKENIZE,
    SAMPLING,
    TOKENIZE,
    Field,
    ValidationError,
    ValidationIssue,
    decode_object,
    validate_body,
)

BYTES_PER_TOKEN = 4  # an estimate
NOT_IN_HEADERS = re.compile(r"[^!-~]")
MAX_TEXT_BYTES = 512 << 10  # of /tokenize and /apply-template: a text of this length takes about 0.5 s of a core


class PackedIds(msgspec.Struct, frozen=True, tag=True):
    """Token ids as the bytes of 64-bit integers."""

    data: bytes

    @classmethod
    def pack(cls, ids: list[int]) -> PackedIds:
        try:
            return cls(array("q", ids).tobytes())
        except OverflowError:  # past any vocabulary in any case
            return cls(array("q", [min(token, MAX_COUNT) for token in ids]).tobytes())

    def __len__(self) -> int:
        return len(self.data) // 8

    def view(self) -> memoryview[int]:
        return memoryview(self.data).cast("q")

    def max(self) -> int:
        """Return the largest id, 0 of none; a chunk at a time, so that other threads get the interpreter."""
        ids = self.view()
        return max((max(ids[at : at + CHUNK_ITEMS]) for at in range(0, len(ids), CHUNK_ITEMS)), default=0)


class Conversation(msgspec.Struct, frozen=True, tag=True):
    """Validated messages as JSON, with the roles that chat templates know, and the UTF-8 bytes of their text."""

    messages: bytes
    num_bytes: int
    options: ChatOptions = ChatOptions()

    @classmethod
    def encode(cls, messages: list[Any], options: ChatOptions | None = None) -> Conversation:
        options = options or ChatOptions()
        size = num_bytes(messages) + sum(num_bytes([tool.description, tool.parameters]) for tool in options.tools)
        try:
            msgspec.msgpack.encode(options)  # as it passes between processes: a small body is refused alike
        except OverflowError:
            raise InvalidRequestError("an integer in tools or variables has more than 64 bits", "tools") from None
        return cls(msgspec.json.encode(normalize_messages(messages)), size, options)


Prompt = str | PackedIds | Conversation


class ModelLimits(msgspec.Struct, frozen=True):
    """What a body is checked against besides its schema."""

    max_context: int
    vocab_size: int


class ParseOptions(msgspec.Struct, frozen=True):
    """How a body is parsed."""

    limits: ModelLimits | None = None  # None while the model is loading
    ignores_unknown: bool = False  # unknown fields are listed in the record instead of refused
    is_stream: bool = False  # of a job: the reply is its stream


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What every dialect's body becomes: prompts, or one conversation, and how they are answered."""

    prompts: list[Prompt]
    params: SamplingParams
    model: str | None = None
    n: int = 1
    stream: bool = False
    priority: int = 0
    timeout_ms: int | None = None
    is_scored_only: bool = False  # the prompt's log-probabilities are all that is wanted
    structured_outputs_field: str = "structured_outputs"  # what the body calls it, for errors
    messages_field: str = "messages"  # likewise
    tool_places: list[str] = []  # of the schemas of the tools, likewise
    values: dict[str, Any] = {}  # what the dialect needs for its reply
    ignored: list[str] = []  # names of unknown fields
    skipped: list[str] = []  # types of tools that this worker does not have

    @property
    def chat(self) -> ChatOptions | None:
        """The options of a chat; None where prompts are completed."""
        first = self.prompts[0]
        return first.options if isinstance(first, Conversation) else None

    def notice_headers(self) -> dict[str, str]:
        """Return headers of the reply that name what was ignored or skipped."""
        return header_lists({"x-ignored-fields": self.ignored, "x-skipped-tools": self.skipped})


def header_lists(named: Mapping[str, list[str]]) -> dict[str, str]:
    """Return headers that list values, those without any left out."""
    return {name: NOT_IN_HEADERS.sub("?", ",".join(values))[:1_000] for name, values in named.items() if values}


def num_bytes(value: Any) -> int:
    """Return the UTF-8 bytes of all text in a prompt or in messages."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(num_bytes, value))
    return sum(map(num_bytes, value.values())) if isinstance(value, dict) else 0


def estimate_tokens(prompt: Prompt, context: int) -> int:
    """Estimate the tokens of a text or of messages that fits the context; return the number of token ids."""
    return len(prompt) if isinstance(prompt, PackedIds) else min(prompt_size(prompt) // BYTES_PER_TOKEN + 1, context)


def prompt_size(prompt: Prompt) -> int:
    """Return the bytes of a text or of messages, or the number of token ids."""
    if isinstance(prompt, PackedIds):
        return len(prompt)
    return prompt.num_bytes if isinstance(prompt, Conversation) else num_bytes(prompt)


def grammar_size(params: StructuredOutputsParams | None) -> int:
    """Return the characters of a schema, an expression, a grammar or choices."""
    if params is None or params.json_object:
        return 0
    return sum(map(len, params.choice)) if params.choice is not None else len(getattr(params, params.kind))


def validate_known(
    body: bytes | dict[str, Any], table: Mapping[str, Field], options: ParseOptions
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a body, and the names of unknown fields where they are ignored."""
    ignored: list[str] = []
    fields = decode_object(body) if isinstance(body, bytes) else body
    return validate_body(fields, table, ignored=ignored if options.ignores_unknown else None), ignored


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


def sampling_params(
    values: Mapping[str, Any], limits: ModelLimits | None, max_tokens: int | None, **more: Any
) -> SamplingParams:
    """Return the sampling parameters of a validated body; raise for a bias of a token past the vocabulary."""
    same = {name: values[name] for name in (*SAMPLING, "stop", "ignore_eos") if name in values}
    bias = {int(token): float(amount) for token, amount in values.get("logit_bias", {}).items()}
    if limits is not None and (token := max(bias, default=0)) >= limits.vocab_size:
        message = f"logit_bias names token {token}, past the vocabulary of {limits.vocab_size}"
        raise InvalidRequestError(message, "logit_bias")
    return SamplingParams(**same, logit_bias=bias, max_tokens=max_tokens, **more)


def require(holds: bool, field: str, constraint: str, message: str) -> None:
    """Raise unless a condition holds."""
    if not holds:
        raise ValidationError([ValidationIssue(field, constraint, message)])


def _require_short(size: int) -> None:
    """Raise for a text or messages whose tokenizing would keep the worker busy for long."""
    if size > MAX_TEXT_BYTES:
        raise PayloadTooLargeError(
            f"the text has {size} bytes: at most {MAX_TEXT_BYTES} are tokenized at a time; send it in parts, or use "
            "`llm-worker-rbee tokenize`"
        )
