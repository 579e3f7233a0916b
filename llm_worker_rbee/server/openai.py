"""The OpenAI dialect: completions and chat, whole and streamed. A whole reply is a fold over the stream's pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from ..engine.request import TokenLogprob
from ..errors import ContextLengthError, InferenceError, InvalidRequestError, WorkerError
from ..tokenizer import Tokenizer
from . import fields, logs
from .answer import Answer, Piece
from .fields import FieldsError, Problem
from .openai_fields import CHAT, COMPLETION, params_of
from .openai_shapes import chat_logprobs, error_body, text_logprobs
from .sse import DONE, event
from .worker import Worker


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


async def chat(worker: Worker, body: bytes, ignored: list[str] | None) -> Asked:
    """Take a conversation on."""
    values = fields.checked(fields.read_object(body), CHAT, ignored=ignored)
    worker.require_model(values["model"])
    longest = values["max_completion_tokens"] or values["max_tokens"]
    _require(values["max_tokens"] in (None, longest), "max_tokens", "conflict",
             "max_tokens and max_completion_tokens differ: give one of them")  # fmt: skip
    _require(values["top_logprobs"] is None or values["logprobs"], "top_logprobs", "conflict",
             "top_logprobs needs logprobs: true")  # fmt: skip
    _require_stream(values)
    scored = (values["top_logprobs"] or 0) if values["logprobs"] else None
    ids = await asyncio.to_thread(worker.llm.tokenize_chat, fields.conversation(values["messages"]))
    params = params_of(values, longest, scored)
    try:
        seed, answers = worker.answers(
            ids, params, n=values["n"], priority=values["priority"], timeout_s=_seconds(values)
        )
    except ContextLengthError as error:
        error.field = "messages" if error.field == "prompt" else error.field
        raise
    return Asked(answers, [ids], seed, values, True)


async def completion(worker: Worker, body: bytes, ignored: list[str] | None) -> Asked:
    """Take prompts on, one or several."""
    values = fields.checked(fields.read_object(body), COMPLETION, ignored=ignored)
    worker.require_model(values["model"])
    _require(values["best_of"] in (None, values["n"]), "best_of", "unsupported",
             "best_of other than n is not supported by this worker")  # fmt: skip
    _require(values["max_tokens"] > 0 or values["echo"], "max_tokens", "range",
             "max_tokens is 0: only with echo, to score the prompt")  # fmt: skip
    _require_stream(values)
    several = _several(values["prompt"])
    worker.require_room(len(several) * values["n"])
    prompts = [await _ids(worker, one) for one in several]
    scores = values["echo"] and values["logprobs"] is not None
    params = params_of(values, max(1, values["max_tokens"]), values["logprobs"], prompt_logprobs=scores)
    answers: list[Answer] = []
    seed = values["seed"]
    try:
        for ids in prompts:
            seed, some = worker.answers(
                ids, params, n=values["n"], priority=values["priority"], timeout_s=_seconds(values)
            )
            answers += some
    except WorkerError:
        for answer in answers:
            answer.close()
        raise
    return Asked(answers, prompts, seed, values, False)


def _require_stream(values: dict[str, Any]) -> None:
    _require(values["stream"] or not values["stream_options"], "stream_options", "conflict",
             "stream_options needs stream: true")  # fmt: skip


def _require(holds: bool, field: str, constraint: str, message: str) -> None:
    if not holds:
        raise FieldsError([Problem(field, constraint, message)])


async def whole(worker: Worker, asked: Asked) -> dict[str, Any]:
    """One object with all answers."""
    try:
        folded = await asyncio.gather(*(_folded(answer) for answer in asked.answers))
    finally:
        asked.close()  # one that fails ends the others
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
        logs.failed(error)
        yield event(error_body(InferenceError("something went wrong inside the worker")))
    finally:
        asked.close()
    yield DONE


class _Told:
    """Pieces -> the choices of chunks."""

    def __init__(self, tokenizer: Tokenizer, asked: Asked) -> None:
        self._tokenizer, self._asked = tokenizer, asked
        self._echoed = [not asked.values.get("echo") for _ in asked.answers]
        self._offsets = [0] * len(asked.answers)

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
            scores = text_logprobs(self._tokenizer, piece, self._offsets[i])
            self._offsets[i] += sum(map(len, scores["tokens"]))
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
    scores = text_logprobs(tokenizer, piece) if asked.values["logprobs"] is not None else None
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


def _several(prompt: Any) -> list[Any]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return prompt
    return [prompt]


async def _ids(worker: Worker, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return await asyncio.to_thread(worker.llm.tokenize, prompt)
    size = worker.llm.config.vocab_size
    if (largest := max(prompt)) >= size:
        raise InvalidRequestError(f"prompt: {largest} is not a token id (0..{size - 1})", "prompt")
    return list(prompt)


def _seconds(values: dict[str, Any]) -> float | None:
    return None if values["timeout_ms"] is None else values["timeout_ms"] / 1000
