"""The OpenAI dialect: `start` admits a body and starts its generations, and the `Reply` makes chunks or one object of
their deltas. A whole reply is a fold over the same deltas that a stream sends.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from ...engine.request import TokenLogprob, check_prompt_fits, fit_max_tokens
from ...errors import ContextLengthError, InferenceError, ModelNotFoundError, WorkerError
from ...generation import Generation, TextDelta
from ...tokenizer import Tokenizer
from .. import log
from ..bodies import CompletionRequest
from ..offload import estimate_tokens
from ..sse import DONE, EventSource, encode_event, encode_json
from ..worker import Worker

TOKEN_BYTES = 16  # of a reply, an estimate


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error in the shape that the official client parses."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, ModelNotFoundError) else error.code
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}


async def start_chat(worker: Worker, body: bytes) -> Reply:
    """Start the reply to a conversation."""
    return await _start(worker, await worker.parse("chat", body))


async def start_completion(worker: Worker, body: bytes) -> Reply:
    """Start the reply to one prompt or several: all of them or none."""
    return await _start(worker, await worker.parse("completion", body))


async def _start(worker: Worker, request: CompletionRequest) -> Reply:
    values, n = request.values, request.values["n"]
    worker.require_model(values["model"])
    context = worker.model.max_context
    if not request.is_chat:
        worker.require_capacity(len(request.prompts) * n)
        worker.encoder.check_texts(request.prompts)
    num_tokens = n * sum(estimate_tokens(prompt, context) for prompt in request.prompts)
    with worker.reserve(len(request.prompts) * n, num_tokens) as reservation:
        prompts = await worker.encoder.encode(request.prompts)
        generations: list[Generation] = []
        timeout_s = None if values["timeout_ms"] is None else values["timeout_ms"] / 1000
        try:
            for ids in prompts:
                check_prompt_fits(len(ids), context, is_scored_only=values["max_tokens"] == 0)
            reservation.set_actual(n * sum(map(len, prompts)))
            for ids in prompts:
                max_tokens = fit_max_tokens(len(ids), request.params.max_tokens, worker.engine.info.engine)
                params = request.params.with_max_tokens(max_tokens)
                generations += worker.start_generations(
                    ids, params, n=n, priority=values["priority"], timeout_s=timeout_s,
                    is_scored_only=values["max_tokens"] == 0,
                )  # fmt: skip
        except WorkerError as error:
            for generation in generations:
                generation.close()
            if request.is_chat and isinstance(error, ContextLengthError) and error.field == "prompt":
                error.field = "messages"
            raise
    return Reply(worker, request, prompts, generations)


class Reply(EventSource):
    """The generations of one request, and the chunks or the object made of them."""

    def __init__(
        self, worker: Worker, request: CompletionRequest, prompts: list[list[int]], generations: list[Generation]
    ) -> None:
        self.generations = generations
        self.streams: bool = request.values["stream"]
        self.ignored = request.ignored
        self._worker, self._values, self._is_chat = worker, request.values, request.is_chat
        self._prompts = prompts
        self._tokenizer = worker.loaded.tokenizer
        self._is_scored_only = request.values["max_tokens"] == 0
        self._has_echoed = [not request.values.get("echo") for _ in generations]
        self._text_logprobs = [TextLogprobs(self._tokenizer) for _ in generations]
        self._events = b""  # not taken
        self._open: dict[int, Generation] = {}  # not finished, by their indices
        self._templates: dict[int, tuple[bytes, bytes] | None] = {}

    @property
    def max_tokens(self) -> int:
        """How many tokens each choice may have; of several prompts the smallest number."""
        return min(generation.request.submitted.max_tokens for generation in self.generations)

    def close(self) -> None:
        """Release all generations."""
        for generation in self.generations:
            generation.close()

    def start(self, on_ready: Callable[[], None]) -> None:
        """Stream the chunks as server-sent events; an error is the last event before [DONE]."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._chunk_head = self._head(kind)
        self._includes_usage = self._values["stream_options"].get("include_usage", False)
        if self._is_chat:
            first = {"role": "assistant", "content": ""}
            for i in range(len(self.generations)):
                self._events += self._encode_chunk(
                    {"index": i, "delta": first, "logprobs": None, "finish_reason": None}
                )
        self._open = dict(enumerate(self.generations))
        for i, generation in self._open.items():
            self._templates[i] = self._chunk_template(i)
            generation.notify(on_ready)
        if self._events:
            on_ready()

    def take(self) -> bytes:
        events, self._events = self._events, b""
        try:
            for i, generation in list(self._open.items()):
                if (delta := generation.take()) is not None:
                    events += self._encode_delta(i, delta)
                    if delta.finish_reason is not None:
                        del self._open[i]
                        generation.close()
            if not self._open:
                if self._includes_usage:
                    events += encode_event({**self._chunk_head, "choices": [], "usage": self._usage()})
                events += self._finish()
        except WorkerError as error:
            events += encode_event(error_body(error)) + self._finish()
        except Exception as error:
            log.request_failed(error)
            events += encode_event(error_body(InferenceError("internal error of the worker"))) + self._finish()
        return events

    def _finish(self) -> bytes:
        self.is_finished = True
        self.close()
        return DONE

    def _encode_delta(self, i: int, delta: TextDelta) -> bytes:
        """Return the chunks of a delta. Most differ from each other by their text alone."""
        if delta.finish_reason is None and not delta.logprobs and (template := self._templates[i]) is not None:
            if not delta.text and self._is_chat:
                return b""
            before, after = template
            return before + encode_json(delta.text) + after
        return b"".join([self._encode_chunk(choice) for choice in self._chunk_choices(i, delta)])

    def _encode_chunk(self, choice: dict[str, Any]) -> bytes:
        tail: dict[str, Any] = {"usage": None} if self._includes_usage else {}
        return encode_event({**self._chunk_head, "choices": [choice], **tail})

    def _chunk_template(self, i: int) -> tuple[bytes, bytes] | None:
        """Return what precedes and follows the text in most chunks of a choice; None where chunks differ in more."""
        if self._values["logprobs"] or not self._has_echoed[i] or self._is_scored_only:
            return None
        if self._values["logprobs"] is not None and not self._is_chat:
            return None
        key = b'"content":' if self._is_chat else b'"text":'
        (choice,) = self._chunk_choices(i, TextDelta("-", [], []))
        before, _, after = self._encode_chunk(choice).rpartition(key + b'"-"')  # no string holds it: quotes are escaped
        return before + key, after

    def _chunk_choices(self, i: int, delta: TextDelta) -> list[dict[str, Any]]:
        if self._is_chat:
            choices: list[dict[str, Any]] = []
            if delta.text or delta.logprobs:
                logprobs = self._chat_logprobs(delta)
                choices.append(
                    {"index": i, "delta": {"content": delta.text}, "logprobs": logprobs, "finish_reason": None}
                )
            if delta.finish_reason is not None:
                choices.append({"index": i, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason})
            return choices
        if not self._has_echoed[i]:
            self._has_echoed[i] = True
            delta = self._with_prompt(i, delta)
        elif self._is_scored_only:
            return []
        return [self._text_choice(i, delta)]

    async def complete(self) -> bytes:
        """Return one object with all choices, as JSON; a large one is encoded in a thread."""
        try:
            folds = [_fold(generation) for generation in self.generations]
            deltas = [await folds[0]] if len(folds) == 1 else await asyncio.gather(*folds)
        finally:
            self.close()  # one that fails ends the others
        size = TOKEN_BYTES * sum(len(delta.tokens) for delta in deltas)
        if self._values.get("echo"):
            size += TOKEN_BYTES * self._values["n"] * sum(map(len, self._prompts))
        size *= 1 + (self._values.get("top_logprobs") or int(self._values["logprobs"] or 0))
        return await self._worker.offload.encode_reply(size, lambda: msgspec.json.encode(self._object(deltas)))

    def _object(self, deltas: Sequence[TextDelta]) -> dict[str, Any]:
        choices = [self._choice(i, delta) for i, delta in enumerate(deltas)]
        head = self._head("chat.completion" if self._is_chat else "text_completion")
        return {**head, "choices": choices, "usage": self._usage(), "seed": self.generations[-1].request.submitted.seed}

    def _choice(self, i: int, delta: TextDelta) -> dict[str, Any]:
        if self._is_chat:
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            logprobs = self._chat_logprobs(delta)
            return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return self._text_choice(i, self._with_prompt(i, delta) if self._values["echo"] else delta)

    def _text_choice(self, i: int, delta: TextDelta) -> dict[str, Any]:
        logprobs = None
        if self._values["logprobs"] is not None:
            logprobs = self._text_logprobs[i].encode(delta.logprobs)
        return {"index": i, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _chat_logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, delta.logprobs) if self._values["logprobs"] else None

    def _with_prompt(self, i: int, delta: TextDelta) -> TextDelta:
        """Return the delta with the prompt before it; the prompt alone where it is only scored."""
        ids = self._prompts[i // self._values["n"]]
        scores = self.generations[i].request.prompt_logprobs or []
        logprobs = [TokenLogprob(ids[0], float("nan")) if score is None else score for score in scores]
        text = self._tokenizer.decode(ids)
        if self._is_scored_only:
            return TextDelta(text, ids, logprobs, "length")
        return delta._replace(text=text + delta.text, tokens=ids + delta.tokens, logprobs=logprobs + delta.logprobs)

    def _usage(self) -> dict[str, Any]:
        output = 0 if self._is_scored_only else sum(generation.num_tokens for generation in self.generations)
        prompt = sum(map(len, self._prompts))
        first_choices = self.generations[:: self._values["n"]]
        cached = sum(max(0, generation.request.num_cached_tokens) for generation in first_choices)
        return {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        return {
            "id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()),
            "model": self._worker.names[0], "system_fingerprint": None,
        }  # fmt: skip


async def _fold(generation: Generation) -> TextDelta:
    """Return all deltas of a generation as one; they are taken as they come, and only the last one is waited for."""
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    ended: asyncio.Future[TextDelta] = asyncio.get_running_loop().create_future()

    def on_outputs() -> None:
        if ended.done():
            return
        try:
            delta = generation.take()
        except Exception as error:
            ended.set_exception(error)
            return
        if delta is not None:
            texts.append(delta.text)
            tokens.extend(delta.tokens)
            logprobs.extend(delta.logprobs)
            if delta.finish_reason is not None:
                ended.set_result(delta)

    generation.notify(on_outputs)
    last = await ended
    return TextDelta("".join(texts), tokens, logprobs, last.finish_reason, last.stop_sequence)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the shape of chat completions."""

    def encode(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    return {"content": [
        {**encode(entry.token, entry.logprob), "top_logprobs": [encode(*top) for top in entry.top]} for entry in entries
    ], "refusal": None}  # fmt: skip


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
