"""One answer as it is made: ids from the engine become text, stop strings end it, the clock is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..engine.request import FinishReason, StepOutput, Request, SamplingParams, TokenLogprob, token_limit
from ..errors import InvalidRequestError, WorkerError
from ..tokenizer import StreamDecoder
from .answers import Chunk, Completion, Timings
from .driver import Box

if TYPE_CHECKING:
    from . import LLM


class Stream:
    """Iterate for chunks, or call `completion()` for the whole. It is computed together with all others of its model
    from the first chunk on; one that is closed, or that nobody holds any more, ends."""

    def __init__(
        self,
        llm: LLM,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int,
        choice: int = 0,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        limit = token_limit(len(prompt), params.max_tokens, llm.max_context)
        _require_known(params, llm.config.vocab_size)
        self.seed = seed
        self.prompt_tokens = prompt
        self.params = params
        self.timeout = timeout
        self._driver = llm.driver
        self._request = Request(prompt, params, limit, seed, llm.tokenizer.eos_ids, choice, priority)
        continuation = llm.tokenizer.continues(prompt)
        self._decoder = StreamDecoder(llm.tokenizer, tuple(params.stop), continuation=continuation)
        self._box: Box | None = None
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None
        self._texts: list[str] = []
        self._began = self._first_token_s = self._elapsed_s = 0.0
        self._sampled = 0
        self._is_closed = False
        self.error: WorkerError | None = None  # that ended it

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self.has_ended:
            raise StopIteration
        self.wait()
        return self._taken(*self.start().popleft())

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):  # it was made to its end
            self.close()

    def start(self) -> Box:
        """Begin to be computed, in the steps that anybody makes."""
        if self._box is None:
            self._began = time.perf_counter()
            if self.timeout is not None:
                self._request.deadline = time.monotonic() + self.timeout
            self._box = self._driver.add(self._request)
        return self._box

    def wait(self) -> None:
        """Step until something has been made for it."""
        if not self.has_ended:
            self._driver.wait_for(self.start())

    def take_ready(self) -> int:
        """Take what has been made for it, without a step; how many tokens that were. An error is kept for later."""
        count = 0
        while self._box and not self.has_ended:
            try:
                self._taken(*self._box.popleft())
            except WorkerError:
                break
            count += 1
        return count

    def raise_error(self) -> None:
        """Raise the error that ended it, if one did."""
        if self.error is not None:
            raise self.error

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._finish_reason is not None or self._is_closed

    def close(self) -> None:
        """End it where it is; what it holds of the model is free for others."""
        if not self._is_closed and self._box is not None and self._finish_reason is None:
            self._driver.drop(self._request)
        self._is_closed = True

    def completion(self) -> Completion:
        """Run to the end and fold the chunks; after an iteration that was broken off, the rest is made now."""
        for _ in self:
            pass
        return self.so_far()

    def so_far(self) -> Completion:
        """What has been made until now, as a completion."""
        request = self._request
        return Completion(
            prompt_tokens=self.prompt_tokens,
            tokens=request.tokens[: self._sampled],
            text="".join(self._texts),
            finish_reason=self._finish_reason,
            stop_sequence=self._decoder.stop_matched,
            seed=self.seed,
            timings=Timings(self._first_token_s, self._elapsed_s, self._sampled),
            logprobs=list(self._logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=None if request.num_unscored_tokens else request.prompt_logprobs,
            cached_tokens=max(0, request.num_cached_tokens),
        )

    def _taken(self, at: float, output: StepOutput) -> Chunk:
        """What one token shows; an error ends the stream and is the caller's."""
        self._elapsed_s = at - self._began
        if output.error is not None:
            self._finish_reason, self.error = "error", output.error
            raise output.error
        self._first_token_s = self._first_token_s or self._elapsed_s
        self._sampled += 1
        reason = output.finish_reason
        ended_by_token = reason == "stop"
        if output.logprob is not None:
            self._logprobs.append(output.logprob)
        text = "" if ended_by_token else self._decoder.push(output.token)
        if self._decoder.stop_matched is not None:
            if reason is None:
                self._driver.drop(self._request)
            reason = "stop"
        if reason is not None:
            text += self._decoder.finish()
            self._finish_reason = reason
        self._texts.append(text)
        return Chunk(text, None if ended_by_token else output.token, output.logprob, reason)


def together(streams: Sequence[Stream], on_tokens: Callable[[int], None] = lambda _: None) -> Iterator[Stream]:
    """Compute streams of one model in the same steps; gives each as it ends, also one that ended with an error."""
    left = list(streams)
    try:
        for stream in streams:
            stream.start()
        while left:
            left[0].wait()
            on_tokens(sum(stream.take_ready() for stream in left))
            ended = [stream for stream in left if stream.has_ended]
            left = [stream for stream in left if not stream.has_ended]
            yield from ended
    finally:
        for stream in streams:
            stream.close()


def _require_known(params: SamplingParams, vocab_size: int) -> None:
    for token in params.logit_bias:
        if token >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias names token {token}, past the vocabulary of {vocab_size}", "logit_bias"
            )
