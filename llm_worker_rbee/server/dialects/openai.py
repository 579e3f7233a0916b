"""The OpenAI dialect: completions and chat, whole and streamed. A whole reply is a fold over the stream's pieces."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from ...engine.request import SamplingParams, TokenLogprob
from ...errors import ContextLengthError, InferenceError, WorkerError
from ...tokenizer import Tokenizer
from .. import log, schema
from ..answer import Answer, Piece
from ..prompt_encoder import estimate, require_short
from ..schema import FieldsError, Problem
from ..sse import DONE, event
from ..worker import Worker
from .openai_schema import CHAT, COMPLETION, error_body, params_of

TOKEN_BYTES = 16  # of a reply, about


async def whole(worker: Worker, asked: Asked) -> bytes:
    """One object with all answers, as JSON; a long one is made in a thread."""
    try:
        folded = await asyncio.gather(*(_folded(answer) for answer in asked.answers))
    finally:
        asked.close()  # one that fails ends the others
    size = TOKEN_BYTES * sum(len(p.tokens) for p in folded)
    if asked.values.get("echo"):
        size += TOKEN_BYTES * asked.values["n"] * sum(map(len, asked.prompts))
    size *= 1 + (asked.values.get("top_logprobs") or int(asked.values["logprobs"] or 0))
    return await worker.desk.made(size, lambda: msgspec.json.encode(_whole(worker, asked, folded)))


def _whole(worker: Worker, asked: Asked, folded: Sequence[Piece]) -> dict[str, Any]:
    choices = [_choice(worker.loaded.tokenizer, asked, i, piece) for i, piece in enumerate(folded)]
    kind = "chat.completion" if asked.is_chat else "text_completion"
    return {**_head(worker, asked, kind), "choices": choices, "usage": usage(asked), "seed": asked.seed}


async def stream(worker: Worker, asked: Asked) -> AsyncGenerator[bytes, None]:
    """The same as events."""
    tokenizer = worker.loaded.tokenizer
    head = _head(worker, asked, "chat.completion.chunk" if asked.is_chat else "text_completion")
    wants_usage = asked.values["stream_options"].get("include_usage", False)
    more: dict[str, Any] = {"usage": None} if wants_usage else {}
    told = _Told(tokenizer, asked)
    try:
        if asked.is_chat:
            for i in range(len(asked.answers)):
                first = {
                    "index": i,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                yield event({**head, "choices": [first], **more})
        async for i, piece in merged(asked.answers):
            for choice in told.choices(i, piece):
                yield event({**head, "choices": [choice], **more})
        if wants_usage:
            yield event({**head, "choices": [], "usage": usage(asked)})
    except WorkerError as error:
        yield event(error_body(error))
    except Exception as error:
        log.failed(error)
        yield event(error_body(InferenceError("something went wrong inside the worker")))
    finally:
        asked.close()
    yield DONE


class _Told:
    """Pieces -> the choices of chunks."""

    def __init__(self, tokenizer: Tokenizer, asked: Asked) -> None:
        self._tokenizer, self._asked = tokenizer, asked
        self._echoed = [not asked.values.get("echo") for _ in asked.answers]
        self._logprobs = [TextLogprobs(tokenizer) for _ in asked.answers]

    def choices(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        asked, made = self._asked, []
        if asked.is_chat:
            if piece.text or piece.logprobs:
                scores = chat_logprobs(self._tokenizer, piece.logprobs) if asked.values["logprobs"] else None
                made.append({"index": i, "delta": {"content": piece.text}, "logprobs": scores, "finish_reason": None})
            if piece.finish is not None:
                made.append({"index": i, "delta": {}, "logprobs": None, "finish_reason": piece.finish})
            return made
        if not self._echoed[i]:
            self._echoed[i] = True
            piece = _with_prompt(self._tokenizer, asked, i, piece)
        elif asked.values["max_tokens"] == 0:
            return []
        scores = None
        if asked.values["logprobs"] is not None:
            scores = self._logprobs[i].told(piece.logprobs)
        return [{"index": i, "text": piece.text, "logprobs": scores, "finish_reason": piece.finish}]


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all answers as they come; the first error ends all."""
    if len(answers) == 1:
        async for piece in answers[0].pieces():
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def pour(i: int, answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                queue.put_nowait((i, piece))
            queue.put_nowait((i, None))
        except Exception as error:  # whatever it is, somebody waits for the end
            queue.put_nowait((i, error))

    tasks = [asyncio.ensure_future(pour(i, answer)) for i, answer in enumerate(answers)]
    try:
        left = len(answers)
        while left:
            i, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield i, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _folded(answer: Answer) -> Piece:
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    last = Piece("", [], [])
    async for last in answer.pieces():
        texts.append(last.text)
        tokens += last.tokens
        logprobs += last.logprobs
    return Piece("".join(texts), tokens, logprobs, last.finish, last.stop)


def _choice(tokenizer: Tokenizer, asked: Asked, i: int, piece: Piece) -> dict[str, Any]:
    if asked.is_chat:
        scores = chat_logprobs(tokenizer, piece.logprobs) if asked.values["logprobs"] else None
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": i, "message": message, "logprobs": scores, "finish_reason": piece.finish}
    if asked.values["echo"]:
        piece = _with_prompt(tokenizer, asked, i, piece)
    scores = TextLogprobs(tokenizer).told(piece.logprobs) if asked.values["logprobs"] is not None else None
    return {"index": i, "text": piece.text, "logprobs": scores, "finish_reason": piece.finish}


def _with_prompt(tokenizer: Tokenizer, asked: Asked, i: int, piece: Piece) -> Piece:
    """The prompt before the answer; alone, where nothing else was asked for."""
    ids = asked.prompts[i // asked.values["n"]]
    scores = asked.answers[i].ticket.request.prompt_logprobs or []
    before = [TokenLogprob(ids[0], float("nan")) if one is None else one for one in scores]
    if asked.values["max_tokens"] == 0:
        return Piece(tokenizer.decode(ids), ids, before, "length")
    return Piece(
        tokenizer.decode(ids) + piece.text, ids + piece.tokens, before + piece.logprobs, piece.finish, piece.stop
    )


def usage(asked: Asked) -> dict[str, Any]:
    """Tokens read and made."""
    made = 0 if asked.values.get("max_tokens") == 0 else sum(answer.num_tokens for answer in asked.answers)
    read = sum(map(len, asked.prompts))
    cached = sum(max(0, a.ticket.request.num_cached_tokens) for a in asked.answers[:: asked.values["n"]])
    return {
        "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def _head(worker: Worker, asked: Asked, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if asked.is_chat else "cmpl"
    return {
        "id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": worker.settings.names[0],
        "system_fingerprint": None,
    }  # fmt: skip


class Asked(NamedTuple):
    """Answers on their way, and how they are told."""

    answers: list[Answer]
    prompts: list[list[int]]
    seed: int
    values: dict[str, Any]
    is_chat: bool

    def close(self) -> None:
        """Nobody wants more of them."""
        for answer in self.answers:
            answer.close()


class Read(NamedTuple):
    """A body that is sound."""

    values: dict[str, Any]
    params: SamplingParams


async def chat(worker: Worker, body: bytes, ignored: list[str] | None) -> Asked:
    """Take a conversation on."""
    values, params = await worker.desk.read(body, lambda body: _read_chat(body, ignored))
    worker.require_model(values["model"])
    messages, n = schema.conversation(values["messages"]), values["n"]
    with worker.held(n, n * estimate(messages)) as hold:
        ids = await worker.prompts.chat_ids(messages)
        hold.correct(n * len(ids))
        try:
            seed, answers = worker.answers(ids, params, n=n, priority=values["priority"], timeout_s=_seconds(values))
        except ContextLengthError as error:
            error.field = "messages" if error.field == "prompt" else error.field
            raise
    return Asked(answers, [ids], seed, values, True)


def _read_chat(body: bytes, ignored: list[str] | None) -> Read:
    values = schema.checked(schema.read_object(body), CHAT, ignored=ignored)
    longest = values["max_completion_tokens"] or values["max_tokens"]
    _require(values["max_tokens"] in (None, longest), "max_tokens", "conflict",
             "max_tokens and max_completion_tokens differ: give one of them")  # fmt: skip
    _require(values["top_logprobs"] is None or values["logprobs"], "top_logprobs", "conflict",
             "top_logprobs needs logprobs: true")  # fmt: skip
    _require_stream(values)
    scored = (values["top_logprobs"] or 0) if values["logprobs"] else None
    return Read(values, params_of(values, longest, scored))


async def completion(worker: Worker, body: bytes, ignored: list[str] | None) -> Asked:
    """Take prompts on, one or several: all of them or none."""
    context = worker.loaded.max_context if worker.is_loaded else None
    values, params = await worker.desk.read(body, lambda body: _read_completion(body, ignored, context))
    worker.require_model(values["model"])
    several, n = _several(values["prompt"]), values["n"]
    worker.admission.require_room(worker.llm.engine, len(several) * n)
    with worker.held(len(several) * n, n * sum(map(estimate, several))) as hold:
        prompts = await worker.prompts.ids(several)
        hold.correct(n * sum(map(len, prompts)))
        seed, answers = _begun(worker, prompts, values, params)
    return Asked(answers, prompts, seed, values, False)


def _read_completion(body: bytes, ignored: list[str] | None, context: int | None) -> Read:
    found = schema.read_object(body)
    if context is not None:
        require_short(found.get("prompt"), context)
    values = schema.checked(found, COMPLETION, ignored=ignored)
    _require(values["best_of"] in (None, values["n"]), "best_of", "unsupported",
             "best_of other than n is not supported by this worker")  # fmt: skip
    _require(values["max_tokens"] > 0 or values["echo"], "max_tokens", "range",
             "max_tokens is 0: only with echo, to score the prompt")  # fmt: skip
    _require_stream(values)
    scores = values["echo"] and values["logprobs"] is not None
    return Read(values, params_of(values, max(1, values["max_tokens"]), values["logprobs"], prompt_logprobs=scores))


def _begun(
    worker: Worker, prompts: list[list[int]], values: dict[str, Any], params: SamplingParams
) -> tuple[int, list[Answer]]:
    answers: list[Answer] = []
    seed = values["seed"]
    try:
        for ids in prompts:
            seed, some = worker.answers(
                ids, params, n=values["n"], priority=values["priority"], timeout_s=_seconds(values),
                is_scored_only=values["max_tokens"] == 0,
            )  # fmt: skip
            answers += some
    except WorkerError:
        for answer in answers:
            answer.close()
        raise
    return seed, answers


def _require_stream(values: dict[str, Any]) -> None:
    _require(values["stream"] or not values["stream_options"], "stream_options", "conflict",
             "stream_options needs stream: true")  # fmt: skip


def _require(holds: bool, field: str, constraint: str, message: str) -> None:
    if not holds:
        raise FieldsError([Problem(field, constraint, message)])


def _several(prompt: Any) -> list[Any]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return prompt
    return [prompt]


def _seconds(values: dict[str, Any]) -> float | None:
    return None if values["timeout_ms"] is None else values["timeout_ms"] / 1000


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
