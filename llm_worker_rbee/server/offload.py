"""Offload of CPU-heavy request work from the event loop: large JSON bodies, templates, tokenizing, large replies.

Small and large work have threads of their own, so small work never waits behind large work. Queued work is bounded by
its bytes; work whose awaiting task is cancelled before it starts is never done. `PromptEncoder` turns prompts and
messages into token ids; what can never fit the context it refuses before tokenizing, which takes seconds for a long
text.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from ..engine.request import check_prompt_fits
from ..errors import ContextLengthError, InvalidRequestError, QueueFullError, ShuttingDownError
from ..text_model import TextModel

T = TypeVar("T")
LARGE_BYTES = 64 << 10
MIN_COUNTED_BYTES = 4 << 10  # each piece of work counts as at least this
MAX_QUEUED_BYTES = 32 << 20  # of large and of small work each; one piece alone may be larger
EMA_WEIGHT = 0.3
MAX_RETRY_S = 60
BYTES_PER_TOKEN = 4  # an estimate


class BoundedExecutor:
    """A thread pool whose queue is bounded by bytes."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_bytes = 0
        self._seconds_per_byte = 0.0
        self._is_closed = False

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on `size` bytes; raise if the queue is full."""
        if self._is_closed:
            raise ShuttingDownError("the worker is shutting down")
        size = max(size, MIN_COUNTED_BYTES)
        if self._num_bytes and self._num_bytes + size > MAX_QUEUED_BYTES:
            retry = max(1, min(MAX_RETRY_S, math.ceil(self._num_bytes * self._seconds_per_byte)))
            raise QueueFullError(f"{self._num_bytes} bytes of other requests wait to be parsed or tokenized", retry)
        self._num_bytes += size
        try:
            seconds, result = await asyncio.get_running_loop().run_in_executor(self._threads, _timed, work)
        finally:
            self._num_bytes -= size
        self._seconds_per_byte += EMA_WEIGHT * (seconds / size - self._seconds_per_byte)
        return result

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class OffloadPool:
    """Two bounded executors: for small and for large work."""

    def __init__(self) -> None:
        self._small, self._large = BoundedExecutor("small", 2), BoundedExecutor("large", 1)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of work on `size` bytes."""
        return await (self._large if size > LARGE_BYTES else self._small).run(size, work)

    async def parse_body(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Return `parse(body)`; a small body is parsed in the event loop."""
        if len(body) <= LARGE_BYTES:
            return parse(body)
        return await self._large.run(len(body), lambda: parse(body))

    async def encode_reply(self, size: int, encode: Callable[[], bytes]) -> bytes:
        """Return a reply of about `size` bytes. It is never refused: its tokens are computed already."""
        if size <= LARGE_BYTES:
            return encode()
        return await asyncio.to_thread(encode)

    def close(self) -> None:
        """Take no new work; drop what is queued."""
        self._small.close()
        self._large.close()


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def num_bytes(value: Any) -> int:
    """Return the UTF-8 bytes of all text in a prompt or in messages."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(num_bytes, value))
    return sum(map(num_bytes, value.values())) if isinstance(value, dict) else 0


def estimate_tokens(prompt: Any, context: int) -> int:
    """Estimate the tokens of a text or of messages that fits the context; return the number of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return min(num_bytes(prompt) // BYTES_PER_TOKEN + 1, context)


def require_ids_fit(prompt: Any, context: int) -> None:
    """Raise if there are more token ids than the context, before each of them is validated."""
    if not isinstance(prompt, list) or not prompt:
        return
    for ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if isinstance(ids, list) and ids and not isinstance(ids[0], (str, list)):
            check_prompt_fits(len(ids), context, is_scored_only=True)


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, model: TextModel, offload: OffloadPool) -> None:
        self._model, self._offload = model, offload

    def check_texts(self, prompts: Sequence[str | list[int]]) -> None:
        """Raise for a text that can never fit the context, before it waits for a place in the queue."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._require_text_fits(num_bytes(prompt), "prompt")

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the ids of each prompt; given ids are checked against the vocabulary."""
        size = sum(num_bytes(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
        return await self._offload.run(size, lambda: [self._encode_one(prompt) for prompt in prompts])

    async def encode_chat(self, messages: list[Any]) -> list[int]:
        """Return the ids of a conversation, by the model's chat template."""
        return await self._offload.run(num_bytes(messages), lambda: self._encode_chat(messages))

    def _encode_one(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._model.tokenize(prompt)
        vocab_size = self._model.vocab_size
        if (largest := max(prompt)) >= vocab_size:
            raise InvalidRequestError(f"prompt: {largest} is not a token id (0..{vocab_size - 1})", "prompt")
        return list(prompt)

    def _encode_chat(self, messages: list[Any]) -> list[int]:
        if num_bytes(messages) > self._model.max_context:  # a template may drop messages: its output is what counts
            self._require_text_fits(num_bytes(self._model.apply_chat_template(messages)), "messages")
        return self._model.chat_template.encode(self._model.tokenizer, messages)

    def _require_text_fits(self, size: int, field: str) -> None:
        context = self._model.max_context
        if size > context and size > context * (longest := self._max_token_bytes):
            raise ContextLengthError(
                f"the prompt has {size} bytes, over the context: its {context} tokens have {longest} bytes each "
                f"at most, together {context * longest}",
                field,
            )

    @cached_property
    def _max_token_bytes(self) -> int:
        tokenizer = self._model.tokenizer
        return max(1, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))
