"""The OpenAI dialect: completions and chat, whole and streamed. A whole reply is a fold over the stream's pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from ..engine.request import TokenLogprob
from ..errors import InferenceError, WorkerError
from ..tokenizer import Tokenizer
from . import logs
from .answer import Answer, Piece
from .openai_asked import Asked
from .openai_shapes import TextLogprobs, chat_logprobs, error_body
from .sse import DONE, event
from .worker import Worker

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
