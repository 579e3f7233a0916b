"""OpenAI's text completions: `/v1/completions`. A prompt may be echoed, and scored."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ...engine.request import check_prompt_fits
from ...sampling_params import MAX_LOGPROBS, TokenLogprob
from ...tokenizer import Tokenizer
from ..bodies import GenerateRequest, PackedIds, Prompt
from ..dialect import Answer, Dialect, GenerateRoute, Operation, ReplyState, TextDelta
from ..json_schema import COUNT, TEXT, Schema, array_schema, reply_schema, with_field, with_values
from ..schema import (
    MAX_CHOICES,
    Boolean,
    Field,
    FieldType,
    MaxTokens,
    ParseOptions,
    Text,
    TokenIds,
    ValidationIssue,
    are_token_ids,
    decode_object,
    integer,
    require,
    table_schema,
    unsupported,
    validate_known,
)
from ..settings import ServerSettings
from ..sse import encode_json
from .openai import (
    COMMON,
    FINISH,
    LOGPROBS,
    SCHEMAS,
    STREAM_CONFLICT,
    STREAM_OPTIONS,
    ChunkPrinter,
    completion,
    completion_schema,
    error_body,
    head,
    shared_fields,
)


class Prompts(FieldType):
    """A string, strings, token ids, or lists of token ids."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, str):
            return Text(1).validate(name, value)
        if isinstance(value, list) and value:
            if all(isinstance(prompt, str) for prompt in value):
                return next((issue for prompt in value if (issue := Text(1).validate(name, prompt))), None)
            lists = value if all(isinstance(prompt, list) for prompt in value) else [value]
            if all(ids and are_token_ids(ids) for ids in lists):
                return None
        message = f"{name} must be a string, strings, token ids, or lists of token ids, not empty and not mixed"
        return ValidationIssue(name, "type", message)

    def json_schema(self) -> Schema:
        ids: Schema = {**TokenIds().json_schema(), "minItems": 1}
        text = Text(1).json_schema()
        return {"anyOf": [text, array_schema(text, 1), ids, array_schema(ids, 1)]}

    def coerce(self, value: Any) -> Any:
        if isinstance(value, str) or isinstance(value[0], str):
            return value
        return [self.coerce(ids) for ids in value] if isinstance(value[0], list) else [int(token) for token in value]


COMPLETION: dict[str, Field] = {
    **COMMON,
    "prompt": Field(Prompts(), required=True, is_secret=True),
    "max_tokens": Field(MaxTokens(0), 16),
    "echo": Field(Boolean(), False),
    "logprobs": Field(integer(0, MAX_LOGPROBS)),
    "best_of": Field(integer(1, MAX_CHOICES)),
    "suffix": unsupported(""),
    "parallel_tool_calls": Field(Boolean()),  # without effect
}


def parse_completion(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate the body of `/v1/completions`."""
    fields = decode_object(body)
    if options.limits is not None:
        _require_ids_fit(fields.get("prompt"), options.limits.max_context)
    values, ignored = validate_known(fields, COMPLETION, options)
    require(
        values["best_of"] in (None, values["n"]),
        "best_of",
        "unsupported",
        "best_of other than n is not supported by this worker",
    )
    require(
        values["max_tokens"] != 0 or values["echo"],
        "max_tokens",
        "range",
        "max_tokens is 0: only with echo, to score the prompt",
    )
    require(values["stream"] or not values["stream_options"], *STREAM_CONFLICT)
    prompt = values["prompt"]
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]
    is_scored_only = values["max_tokens"] == 0
    shared = shared_fields(
        values,
        options.limits,
        1 if is_scored_only else values["max_tokens"],
        logprobs=values["logprobs"],
        prompt_logprobs=values["echo"] and values["logprobs"] is not None,
    )
    shared["values"] = {"echo": values["echo"], **shared["values"]}
    packed: list[Prompt] = [prompt if isinstance(prompt, str) else PackedIds.pack(prompt) for prompt in prompts]
    return GenerateRequest(**shared, prompts=packed, is_scored_only=is_scored_only, ignored=ignored)


def _require_ids_fit(prompt: Any, context: int) -> None:
    """Raise if there are more token ids than the context, before each of them is validated."""
    if not isinstance(prompt, list) or not prompt:
        return
    for ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if isinstance(ids, list) and ids and not isinstance(ids[0], (str, list)):
            check_prompt_fits(len(ids), context, is_scored_only=True)


class CompletionPrinter(ChunkPrinter):
    """Chunks of text completions, or one object."""

    def __init__(self, reply: ReplyState) -> None:
        super().__init__(reply, head(reply, "text_completion", "cmpl"))
        count = len(reply.generations)
        self._echoes, self._has_echoed = reply.request.values["echo"], [False] * count
        self._has_logprobs = reply.request.params.logprobs is not None
        self._text_logprobs = [TextLogprobs(reply.tokenizer) for _ in range(count)]
        self._templates: list[tuple[bytes, bytes]] = []

    def begin(self) -> bytes:
        for i in range(len(self.reply.generations)):
            choice = {"index": i, "text": "-", "logprobs": None, "finish_reason": None}
            before, _, after = self._chunk(choice).rpartition(b'"text":"-"')  # no string holds it: quotes are escaped
            self._templates.append((before + b'"text":', after))
        return b""

    def print_delta(self, index: int, delta: TextDelta) -> bytes:
        if self._echoes and not self._has_echoed[index]:
            self._has_echoed[index] = True
            logprobs, text = self._prompt(index)
            if self.reply.request.is_scored_only:
                return self._chunk(self._choice(index, text, logprobs, "length"))
            return self._chunk(self._choice(index, text + delta.text, logprobs + delta.logprobs, delta.finish_reason))
        if self.reply.request.is_scored_only:
            return b""
        if delta.finish_reason is None and not (self._has_logprobs or self._has_continuous_usage):
            before, after = self._templates[index]
            return before + encode_json(delta.text) + after
        return self._chunk(self._choice(index, delta.text, delta.logprobs, delta.finish_reason))

    def _choice(self, i: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None) -> dict[str, Any]:
        encoded = self._text_logprobs[i].encode(logprobs) if self._has_logprobs else None
        return {"index": i, "text": text, "logprobs": encoded, "finish_reason": finish_reason}

    def _prompt(self, i: int) -> tuple[list[TokenLogprob], str]:
        """Return log-probabilities and text of the prompt of a choice."""
        ids = self.reply.prompts[i // self.reply.request.n]
        scores = self.reply.generations[i].request.prompt_logprobs or []
        logprobs = [TokenLogprob(ids[0], float("nan")) if score is None else score for score in scores]
        return logprobs, self.reply.tokenizer.decode(ids)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(answers):
            text, logprobs, reason = answer.fold.content, answer.logprobs, answer.finish_reason
            if self._echoes:
                scores, prompt = self._prompt(i)
                only = self.reply.request.is_scored_only
                text, logprobs = (prompt, scores) if only else (prompt + text, scores + logprobs)
                reason = "length" if only else reason
            choices.append(self._choice(i, text, logprobs, reason))
        return completion(self.reply, "text_completion", "cmpl", choices)


class TextLogprobs:
    """Log-probabilities in the shape of text completions, delta by delta: each token with its offset in the text.

    A token that is a part of a character has no text: its name is `bytes:` and its bytes in hexadecimal, and the offset
    advances with the token that completes the character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def encode(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the next entries; the first token of a prompt has no log-probability."""
        names, offsets, values, tops = [], [], [], []
        for entry in entries:
            value = None if entry.logprob != entry.logprob else entry.logprob
            names.append(self._name(entry.token))
            offsets.append(self._offset)
            values.append(value)
            tops.append(None if value is None else {self._name(token): logprob for token, logprob in entry.top})
            if not self._tokenizer.is_special(entry.token):
                self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(entry.token)))
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    choice = reply_schema(index=COUNT, text=TEXT, logprobs=LOGPROBS, finish_reason=FINISH)
    return {
        **SCHEMAS,
        "CompletionRequest": {
            **table_schema(COMPLETION, settings.schema_names, is_open=settings.ignore_unknown_fields),
            "anyOf": [with_values(max_tokens={"not": {"const": 0}}), with_field("echo", const=True)],
            "allOf": [STREAM_OPTIONS],
        },
        "Completion": completion_schema(choice),
    }


OPERATION = Operation(summary="Complete prompts", request="CompletionRequest", reply="Completion", event="Completion")
DIALECT = Dialect(
    prefixes=("/v1/completions",),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OpenAIError",
    generate=(GenerateRoute("/v1/completions", parse_completion, CompletionPrinter, OPERATION),),
)
