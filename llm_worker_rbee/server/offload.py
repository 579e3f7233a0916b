"""Offload of CPU-heavy request work from the event loop: large JSON bodies, templates, tokenizing, large replies.

Small and large work have threads of their own, so small work never waits behind large work, and so do checks of
grammars: a request without one never waits for them. Queued work is bounded by its bytes, checks by their number; work
whose awaiting task is cancelled before it starts is skipped, except checks. Parsing and rendering, which would hold the
interpreter's lock for long, run in other processes, for which a thread waits. `PromptEncoder` turns prompts and
messages into token ids; it refuses a text that can never fit the context before tokenizing all of it, which takes
seconds for a long text.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from ..errors import ContextLengthError, DeadlineError, InvalidRequestError, QueueFullError, ShuttingDownError
from ..images.decoder import DecodedImage
from ..sampling_params import StructuredOutputsParams
from ..text_model import EncodedPrompt, TextModel
from ..tokenizer.chat.events import Image
from ..tokenizer.tokenizer import MARK
from .bodies import Conversation, Prompt, grammar_size, num_bytes, prompt_size
from .body_process import BodyProcess
from .image_urls import fetch_image
from .schema import ParseOptions
from .settings import ServerSettings

T = TypeVar("T")
Parse = Callable[[bytes, ParseOptions], Any]
CheckGrammar = Callable[[StructuredOutputsParams], StructuredOutputsParams]
LARGE_BYTES = 64 << 10
MIN_COUNTED_BYTES = 4 << 10  # each piece of work counts as at least this
MAX_QUEUED_IMAGE_BYTES = 128 << 20
MAX_QUEUED_BYTES = 32 << 20  # of large and of small work each, unless given; one piece alone may be larger
EMA_WEIGHT = 0.3
MAX_RETRY_S = 60
# Checks of grammars: at once, so that streams keep half of the cores, and with those that wait.
NUM_CHECKS, MAX_QUEUED_CHECKS = max(1, (os.cpu_count() or 1) // 2), 32
QUEUED_CHECKS = f"{MAX_QUEUED_CHECKS} grammars of other requests wait to be checked"
NUM_DECODERS, NUM_FETCHES, IMAGE_BYTES = 2, 8, 1 << 20  # of images, each of which counts as at least so many bytes
MAX_DECODING_S = 30.0  # CPU time, for all images of a request
INLINE_BYTES = 256  # of texts that are tokenized in the event loop: about 0.2 ms
LONG_TEXT_FACTOR = 6  # characters for each token of the context: few texts that are longer fit
PART_CHARS = 64 << 10  # of a long text that are tokenized at a time


def run_in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run work in a thread that the end of the process does not wait for."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from now on it is not cancelled: the thread sets it in any case

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class BoundedExecutor:
    """A thread pool whose queue is bounded by bytes; `full` is the error beyond that."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_bytes: int = MAX_QUEUED_BYTES,
        full: str = "{} bytes of other requests wait to be parsed or tokenized",
    ) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self.max_bytes, self._full = max_bytes, full
        self._num_bytes = 0
        self._seconds_per_byte = 0.0
        self._is_closed = False

    async def run(self, size: int, work: Callable[[], T], *, is_admitted: bool = False) -> T:
        """Return the result of work on `size` bytes; raise if the queue is full, unless its request is admitted."""
        if self._is_closed:
            raise ShuttingDownError("the worker is shutting down")
        size = max(size, MIN_COUNTED_BYTES)
        if not is_admitted and self._num_bytes and self._num_bytes + size > self.max_bytes:
            retry = max(1, min(MAX_RETRY_S, math.ceil(self._num_bytes * self._seconds_per_byte)))
            raise QueueFullError(self._full.format(self._num_bytes), retry)
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
    """Bounded executors: for small and for large work, and for checks of grammars."""

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._small, self._large = BoundedExecutor("small", 2, max_bytes), BoundedExecutor("large", 1, max_bytes)
        self._images = BoundedExecutor(
            "image", NUM_DECODERS, MAX_QUEUED_IMAGE_BYTES, "{} bytes of images wait to be decoded"
        )
        self._fetches = BoundedExecutor(
            "fetch", NUM_FETCHES, MAX_QUEUED_IMAGE_BYTES, "images of other requests wait to be fetched"
        )
        self._checks = BoundedExecutor("check", NUM_CHECKS, MAX_QUEUED_CHECKS * MIN_COUNTED_BYTES, QUEUED_CHECKS)
        self.body_process = BodyProcess()
        self.parsers: dict[str, tuple[Parse, Any]] = {}  # `body_parsers`, set by the application

    def grow(self, max_bytes: int) -> None:
        """Let more bytes of large work wait."""
        self._large.max_bytes = max(self._large.max_bytes, max_bytes)

    async def run(self, size: int, work: Callable[[], T], *, is_admitted: bool = False) -> T:
        """Return the result of work on `size` bytes; never refuse work for a request with a place in a queue."""
        return await (self._large if size > LARGE_BYTES else self._small).run(size, work, is_admitted=is_admitted)

    async def check_grammar(self, work: Callable[[], T]) -> T:
        """Return the result of checks of grammars; raise if too many wait."""
        return await self._checks.run(0, work)

    async def decode_image(
        self, model: TextModel, image: Image, settings: ServerSettings, cpu_s: float
    ) -> DecodedImage:
        """Return the pixels of an image, which is fetched first if the request has a URL of it."""
        model.require_vision(image)
        if image.url:
            data = await self._fetches.run(IMAGE_BYTES, lambda: fetch_image(image, settings))
            image = replace(image, data=data)
        return await self._images.run(max(IMAGE_BYTES, len(image.data)), lambda: model.decode_image(image, cpu_s))

    async def parse(self, parser: str, body: bytes, options: ParseOptions) -> Any:
        """Return the record of a body; a small one is parsed in the event loop."""
        parse, record = self.parsers[parser]
        if len(body) <= LARGE_BYTES:
            return parse(body, options)
        return await self._large.run(len(body), lambda: self.body_process.parse(parser, body, options, record))

    async def encode_reply(self, size: int, encode: Callable[[], bytes]) -> bytes:
        """Return a reply of about `size` bytes. It is never refused: its tokens are computed already."""
        if size <= LARGE_BYTES:
            return encode()
        return await asyncio.to_thread(encode)

    def close(self) -> None:
        """Take no new work; drop what is queued."""
        for executor in (self._small, self._large, self._images, self._fetches, self._checks):
            executor.close()
        self.body_process.close()


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(self, model: TextModel, offload: OffloadPool, settings: ServerSettings | None = None) -> None:
        self._model, self._offload, self._settings = model, offload, settings or ServerSettings(model_ref="")
        self._checks: dict[StructuredOutputsParams, asyncio.Task[StructuredOutputsParams]] = {}  # that are under way

    def check_texts(self, prompts: Sequence[Prompt]) -> None:
        """Raise for a text that can never fit the context, before it waits for a place in the queue."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._require_bytes_fit(num_bytes(prompt), "prompt")

    async def encode(
        self,
        prompts: Sequence[Prompt],
        structured_outputs: StructuredOutputsParams | None = None,
        timeout_s: float | None = None,
    ) -> list[EncodedPrompt]:
        """Return each prompt encoded; token ids are checked against the vocabulary, and grammars in another process.

        A short text is tokenized in the event loop: passing it to a thread would take longer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._encode(prompts, structured_outputs)
        except TimeoutError:
            raise DeadlineError(f"the prompt was not encoded within {timeout_s:g} s (timeout_ms)") from None

    async def _encode(
        self, prompts: Sequence[Prompt], structured_outputs: StructuredOutputsParams | None
    ) -> list[EncodedPrompt]:
        size = sum(map(prompt_size, prompts)) + grammar_size(structured_outputs)
        resolved = self._model.resolve_objects(structured_outputs)
        structured_outputs = await self._check_grammar(resolved, self._model.grammar_checker.check)
        if isinstance(conversation := prompts[0], Conversation):
            return [await self._encode_chat(conversation, size, structured_outputs)]
        if size <= INLINE_BYTES:
            return [EncodedPrompt(self._encode_one(prompt), None, structured_outputs) for prompt in prompts]
        ids = await self._offload.run(size, lambda: [self._encode_one(prompt) for prompt in prompts])
        return [EncodedPrompt(prompt_ids, None, structured_outputs) for prompt_ids in ids]

    async def _check_grammar(
        self, params: StructuredOutputsParams | None, check: CheckGrammar
    ) -> StructuredOutputsParams | None:
        """Return a grammar in the engines' form; requests with the same grammar wait for one check."""
        if params is None:
            return None
        with suppress(InvalidRequestError):  # one that is known to be wrong: `check` knows why
            if (problem := self._model.grammar_checker.recall(params)) is not None:
                return problem
        if (task := self._checks.get(params)) is None:
            task = asyncio.ensure_future(self._offload.check_grammar(lambda: check(params)))
            self._checks[params] = task
            task.add_done_callback(lambda done: self._end_check(params, done))
        return await asyncio.shield(task)

    def _end_check(self, params: StructuredOutputsParams, task: asyncio.Task[StructuredOutputsParams]) -> None:
        del self._checks[params]
        if not task.cancelled():
            task.exception()  # the clients that wait for it may all have gone

    async def _encode_chat(
        self, conversation: Conversation, size: int, structured_outputs: StructuredOutputsParams | None
    ) -> EncodedPrompt:
        images = await self._decode_images(conversation.options.images)
        encoded = await self._offload.run(
            size, lambda: self.encode_conversation(conversation, structured_outputs, images)
        )
        if encoded.structured_outputs is structured_outputs:
            return encoded
        check = partial(self._model.check_answer_grammar, conversation.options, structured_outputs)
        return encoded._replace(structured_outputs=await self._check_grammar(encoded.structured_outputs, check))

    async def _decode_images(self, images: Sequence[Image]) -> list[DecodedImage]:
        """Return the pixels of the images of a request, one after the other: others get their turn between them."""
        if len(images) > self._settings.max_images:
            raise InvalidRequestError(
                f"the request has {len(images)} images: at most {self._settings.max_images} are accepted", "messages"
            )
        decoded, left = list[DecodedImage](), MAX_DECODING_S
        for image in images:
            if left <= 0:
                problem = f"{image.place}: the images before it took {MAX_DECODING_S:g} s to decode"
                raise InvalidRequestError(f"{problem}: send fewer or smaller ones", "messages")
            decoded.append(await self._offload.decode_image(self._model, image, self._settings, left))
            left -= decoded[-1].cpu_s
        return decoded

    def _encode_one(self, prompt: Prompt) -> list[int]:
        assert not isinstance(prompt, Conversation)
        if isinstance(prompt, str):
            self._require_tokens_fit(prompt, "prompt")
            return self._model.tokenize(prompt)
        vocab_size = self._model.vocab_size
        if (largest := prompt.max()) >= vocab_size:
            raise InvalidRequestError(f"prompt: {largest} is not a token id (0..{vocab_size - 1})", "prompt")
        return prompt.view().tolist()

    def encode_conversation(
        self,
        conversation: Conversation,
        structured_outputs: StructuredOutputsParams | None = None,
        images: Sequence[DecodedImage] = (),
    ) -> EncodedPrompt:
        """Return a conversation encoded; a template may drop messages, so only its output must fit."""
        model, options = self._model, conversation.options
        prompt = model.render_chat(conversation.messages, options)
        self._require_bytes_fit(num_bytes(prompt) - len(MARK.encode()) * prompt.count(MARK), "messages")
        self._require_tokens_fit(prompt, "messages")
        return model.encode_chat(prompt, options, structured_outputs, images)

    def _require_bytes_fit(self, size: int, field: str) -> None:
        context = self._model.max_context
        if size > context and size > context * (longest := self._max_token_bytes):
            raise ContextLengthError(
                f"the prompt has {size} bytes, over the context: its {context} tokens have {longest} bytes each "
                f"at most, together {context * longest}",
                field,
            )

    def _require_tokens_fit(self, text: str, field: str) -> None:
        """Raise for a long text as soon as its beginning has more tokens than the context.

        The parts end before a space, where tokens end in nearly all vocabularies. Otherwise a part has a few more
        tokens than the same text inside the whole: fewer than the bytes of the longest token.
        """
        context = self._model.max_context
        if len(text) <= PART_CHARS + LONG_TEXT_FACTOR * context:
            return
        num_tokens = start = 0
        while start < len(text):
            end = text.find(" ", start + PART_CHARS, start + 2 * PART_CHARS)
            end = start + PART_CHARS if end < 0 else end
            num_tokens += len(self._model.tokenize(text[start:end], add_special=False)) - self._max_token_bytes
            start = end
            if num_tokens > context:
                raise ContextLengthError(
                    f"the first {start} of {len(text)} characters of the prompt have more than {num_tokens} tokens, "
                    f"the context {context}: shorten the prompt, or allow a longer context (max_context)",
                    field,
                )

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(1, self._model.tokenizer.max_token_bytes())
