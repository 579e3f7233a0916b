"""The bodies of all routes that may be large: `parse_*` validates one and returns a record.

A record passes between processes: a large body is parsed in another one (`body_process`). So what takes long to copy is
one piece of bytes or text: token ids are packed, messages are JSON for the chat template. This module is all that the
other process imports, so it imports little.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from ..engine.request import MAX_COUNT, SamplingParams, check_prompt_fits
from ..errors import InvalidRequestError, PayloadTooLargeError
from .schema import (
    APPLY_TEMPLATE,
    CANCEL,
    CHAT,
    CHUNK_ITEMS,
    COMPLETION,
    DETOKENIZE,
    JOB,
    JOB_SAMPLING,
    SAMPLING,
    TOKENIZE,
    ValidationError,
    ValidationIssue,
    decode_object,
    normalize_messages,
    validate_body,
)

MAX_TEXT_BYTES = 512 << 10  # of /tokenize and /apply-template: a text of this length takes about 0.5 s of a core
# Values that are used besides the prompts and the sampling parameters.
COMPLETION_VALUES = (
    "model", "stream", "stream_options", "n", "priority", "timeout_ms", "max_tokens", "logprobs", "top_logprobs",
    "echo",
)  # fmt: skip
JOB_VALUES = ("job_id", "model", "stream", "priority", "timeout_ms")


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

    @classmethod
    def encode(cls, messages: list[Any]) -> Conversation:
        return cls(msgspec.json.encode(normalize_messages(messages)), num_bytes(messages))


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


class CompletionRequest(msgspec.Struct, frozen=True):
    """A validated body of `/v1/chat/completions` or `/v1/completions`."""

    is_chat: bool
    prompts: list[Prompt]
    params: SamplingParams
    values: dict[str, Any]  # of COMPLETION_VALUES, those that the route has
    ignored: list[str]  # names of unknown fields


class JobRequest(msgspec.Struct, frozen=True):
    """A validated body of a job."""

    prompt: str | Conversation
    params: SamplingParams
    values: dict[str, Any]  # of JOB_VALUES


def num_bytes(value: Any) -> int:
    """Return the UTF-8 bytes of all text in a prompt or in messages."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(num_bytes, value))
    return sum(map(num_bytes, value.values())) if isinstance(value, dict) else 0


def parse_chat(body: bytes, options: ParseOptions) -> CompletionRequest:
    """Validate the body of `/v1/chat/completions`."""
    ignored: list[str] = []
    values = validate_body(decode_object(body), CHAT, ignored=ignored if options.ignores_unknown else None)
    max_tokens = values["max_completion_tokens"] or values["max_tokens"]
    _require(values["max_tokens"] in (None, max_tokens), "max_tokens", "conflict",
             "max_tokens and max_completion_tokens differ: give one of them")  # fmt: skip
    _require(values["top_logprobs"] is None or values["logprobs"], "top_logprobs", "conflict",
             "top_logprobs needs logprobs: true")  # fmt: skip
    _require_stream(values)
    logprobs = (values["top_logprobs"] or 0) if values["logprobs"] else None
    params = _sampling_params(values, options.limits, max_tokens, logprobs)
    return CompletionRequest(
        True, [Conversation.encode(values["messages"])], params, _select(values, COMPLETION_VALUES), ignored
    )


def parse_completion(body: bytes, options: ParseOptions) -> CompletionRequest:
    """Validate the body of `/v1/completions`."""
    fields = decode_object(body)
    if options.limits is not None:
        _require_ids_fit(fields.get("prompt"), options.limits.max_context)
    ignored: list[str] = []
    values = validate_body(fields, COMPLETION, ignored=ignored if options.ignores_unknown else None)
    _require(values["best_of"] in (None, values["n"]), "best_of", "unsupported",
             "best_of other than n is not supported by this worker")  # fmt: skip
    _require(values["max_tokens"] != 0 or values["echo"], "max_tokens", "range",
             "max_tokens is 0: only with echo, to score the prompt")  # fmt: skip
    _require_stream(values)
    prompt = values["prompt"]
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]
    scores_prompt = values["echo"] and values["logprobs"] is not None
    max_tokens = 1 if values["max_tokens"] == 0 else values["max_tokens"]
    params = _sampling_params(values, options.limits, max_tokens, values["logprobs"], prompt_logprobs=scores_prompt)
    packed: list[Prompt] = [prompt if isinstance(prompt, str) else PackedIds.pack(prompt) for prompt in prompts]
    return CompletionRequest(False, packed, params, _select(values, COMPLETION_VALUES), ignored)


def parse_job(body: bytes, options: ParseOptions) -> JobRequest:
    """Validate a job's body: either prompt or messages. With `is_stream` the job_id is required."""
    fields = decode_object(body)
    issues: list[ValidationIssue] = []
    try:
        values = validate_body(fields, JOB)
    except ValidationError as error:
        values, issues = {}, error.issues
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        issues.append(ValidationIssue("prompt", "required", "give either prompt or messages"))
    if options.is_stream and fields.get("job_id") is None:
        issues.append(ValidationIssue("job_id", "required", "job_id is required"))
    if options.is_stream and fields.get("stream") is False:
        message = "the reply of this route is a stream: POST /v1/jobs for a whole one"
        issues.append(ValidationIssue("stream", "unsupported", message))
    if issues:
        raise ValidationError(issues)
    prompt = Conversation.encode(values["messages"]) if values["prompt"] is None else values["prompt"]
    params = SamplingParams(**{name: values[name] for name in (*JOB_SAMPLING, "max_tokens", "stop")})
    return JobRequest(prompt, params, _select(values, JOB_VALUES))


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
    conversation = Conversation.encode(validate_body(decode_object(body), APPLY_TEMPLATE)["messages"])
    _require_short(conversation.num_bytes)
    return conversation


def parse_cancel(body: bytes, _: ParseOptions) -> dict[str, Any]:
    """Validate the body of `/cancel`."""
    return validate_body(decode_object(body), CANCEL)


PARSERS: dict[str, tuple[Callable[[bytes, ParseOptions], Any], Any]] = {  # by name, with the type of the record
    "chat": (parse_chat, CompletionRequest),
    "completion": (parse_completion, CompletionRequest),
    "job": (parse_job, JobRequest),
    "tokenize": (parse_tokenize, dict[str, Any]),
    "detokenize": (parse_detokenize, PackedIds),
    "apply_template": (parse_apply_template, Conversation),
    "cancel": (parse_cancel, dict[str, Any]),
}


def _sampling_params(
    values: dict[str, Any], limits: ModelLimits | None, max_tokens: int | None, logprobs: int | None, *,
    prompt_logprobs: bool = False,
) -> SamplingParams:  # fmt: skip
    """Return the sampling parameters of a validated body; raise for a bias of a token past the vocabulary."""
    same = {name: values[name] for name in (*SAMPLING, "stop", "ignore_eos")}
    bias = {int(token): float(amount) for token, amount in values["logit_bias"].items()}
    if limits is not None and (token := max(bias, default=0)) >= limits.vocab_size:
        message = f"logit_bias names token {token}, past the vocabulary of {limits.vocab_size}"
        raise InvalidRequestError(message, "logit_bias")
    return SamplingParams(
        **same, logit_bias=bias, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


def _select(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _require_ids_fit(prompt: Any, context: int) -> None:
    """Raise if there are more token ids than the context, before each of them is validated."""
    if not isinstance(prompt, list) or not prompt:
        return
    for ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if isinstance(ids, list) and ids and not isinstance(ids[0], (str, list)):
            check_prompt_fits(len(ids), context, is_scored_only=True)


def _require_short(size: int) -> None:
    """Raise for a text or messages whose tokenizing would keep the worker busy for long."""
    if size > MAX_TEXT_BYTES:
        raise PayloadTooLargeError(
            f"the text has {size} bytes: at most {MAX_TEXT_BYTES} are tokenized at a time; send it in parts, or use "
            "`llm-worker-rbee tokenize`"
        )


def _require_stream(values: dict[str, Any]) -> None:
    _require(values["stream"] or not values["stream_options"], "stream_options", "conflict",
             "stream_options needs stream: true")  # fmt: skip


def _require(holds: bool, field: str, constraint: str, message: str) -> None:
    if not holds:
        raise ValidationError([ValidationIssue(field, constraint, message)])
