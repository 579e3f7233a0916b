"""A model at work as its users have it: sequences through the engine, scheduler and sampler included, sampled greedily.

Each sequence has ids of its own, the same for every run. What is cached of them before a run is there through the
prefix cache, in whole blocks: the depth of a prefill is rounded down to them. What a prefill computes behind it is
drawn anew each time, so that nothing else is found. llama-bench leaves sampling out; here it is part of every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..backends.ops import Ints
from ..cache import KVCache
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.request import Request, SamplingParams, StepOutput
from ..engine.speculative import DraftModel
from ..errors import InferenceError, InvalidRequestError
from ..models import Transformer


class Timed(NamedTuple):
    """What a run made, and how long that took."""

    seconds: float
    tokens: int  # made or read in that time, by all sequences together
    steps: int
    answers: list[list[int]]
    between_s: float = 0.0  # of what was done between the steps; not in `seconds`


class Drive:
    """An engine with room for `batch` sequences of `capacity` tokens."""

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        batch: int = 1,
        seed: int = 0,
        kv_type: str = "float32",
        draft_model: Transformer | None = None,
        **options: Any,
    ) -> None:
        """`options` are further ones of the engine's."""
        self._rng = np.random.default_rng(seed)
        self.ids: Ints = self._rng.integers(0, model.config.vocab_size, (batch, capacity))
        self._ahead = 2 + batch  # tokens that some have made when the last begins, and those at the ends
        room, size = 1 + capacity + self._ahead, KVCache.default_block_size
        blocks = batch * (1 + -(-room // size))
        config = EngineConfig(max_context=room, n_blocks=blocks, block_size=size, max_batch=batch, **options)
        vocabulary = model.config.vocab_size
        drafter = None if draft_model is None else DraftModel(draft_model, config, vocabulary, kv_type)
        self.engine = Engine(model, config, kv_type, drafter)

    def prefill(self, depth: int, tokens: int, batch: int) -> Timed:
        """Read `tokens` of each sequence behind `depth` cached ones, up to the token that follows."""
        cached = depth - depth % self.engine.config.block_size
        self._fill(cached, batch)
        fresh = self._rng.integers(0, self.engine.model.config.vocab_size, (batch, tokens))
        prompts = np.concatenate([self.ids[:batch, :cached], fresh], axis=1).tolist()
        return self.first_tokens(prompts)

    def first_tokens(self, prompts: Sequence[list[int]]) -> Timed:
        """The time until each of these prompts has its first token."""
        requests = [_request(prompt, 1) for prompt in prompts]
        start, before = time.perf_counter(), self.engine.num_steps
        self._begin(requests)
        seconds = time.perf_counter() - start
        read = sum(request.num_prompt_tokens - request.num_cached_tokens for request in requests)
        return Timed(seconds, read, self.engine.num_steps - before, [request.tokens for request in requests])

    def decode(self, depth: int, tokens: int, batch: int, between: Callable[[], object] | None = None) -> Timed:
        """So many steps of one token for each sequence, behind `depth` tokens (one stands for the BOS token at 0).

        `between` is called after each step and timed by itself: what is to be compared with a step then meets the
        machine in the same moment.
        """
        self._fill(depth - depth % self.engine.config.block_size, batch)
        requests = [_request(ids[: max(1, depth)].tolist(), tokens + self._ahead) for ids in self.ids[:batch]]
        self._begin(requests)
        known = [request.num_tokens for request in requests]
        seconds = between_s = 0.0
        start = time.perf_counter()
        for _ in range(tokens):
            self._step()
            if between is not None:
                stepped = time.perf_counter()
                between()
                seconds, start = seconds + stepped - start, time.perf_counter()
                between_s += start - stepped
        seconds += 0.0 if between is not None else time.perf_counter() - start
        made = [request.ids[n:] for request, n in zip(requests, known, strict=True)]
        self._abort(requests)
        assert all(len(answer) == tokens for answer in made), "a sequence was left out of a step"
        return Timed(seconds, tokens * batch, tokens, made, between_s)

    def together(self, prompts: Sequence[list[int]], tokens: int) -> Timed:
        """Answers of `tokens` to all prompts at once: what is made from when all have begun to when the first ends."""
        requests = [_request(prompt, tokens) for prompt in prompts]
        self._begin(requests)
        if any(len(request.tokens) >= tokens for request in requests):
            told = f"the first of {len(prompts)} answers of {tokens} tokens ended before the last began"
            raise InvalidRequestError(f"{told}: ask for longer ones (--tg)", "tg")
        known, before = sum(request.num_tokens for request in requests), self.engine.num_steps
        start = time.perf_counter()
        while self.engine.has_work and not any(output.finish_reason for output in self._step()):
            pass
        seconds, made = time.perf_counter() - start, sum(request.num_tokens for request in requests) - known
        steps = self.engine.num_steps - before
        while self.engine.has_work:
            self._step()
        return Timed(seconds, made, steps, [request.tokens for request in requests])

    def while_reading(self, prompt: list[int], beside: Sequence[list[int]], tokens: int) -> list[float]:
        """Seconds of each step that reads a prompt while others, of `tokens` at most, are being answered."""
        answering, reading = [_request(ids, tokens) for ids in beside], _request(prompt, 1)
        self._begin(answering)
        self.engine.add(reading)
        took = []
        while reading.num_tokens == reading.num_prompt_tokens:
            start = time.perf_counter()
            self._step()
            took.append(time.perf_counter() - start)
        self._abort(answering)
        if any(len(request.tokens) >= tokens for request in answering):
            told = f"answers of {tokens} tokens ended before a prompt of {len(prompt)} was read"
            raise InvalidRequestError(f"{told}: use a longer target (--target-itl-ms)", "target_itl_ms")
        return took

    def _fill(self, depth: int, batch: int) -> None:
        """Bring whole blocks of the first `batch` sequences into the prefix cache; those there are made the newest."""
        if depth:
            self._begin([_request(ids[: depth + 1].tolist(), 1) for ids in self.ids[:batch]])

    def _begin(self, requests: Sequence[Request]) -> None:
        """Take all on, and go on until each has its first token."""
        for request in requests:
            self.engine.add(request)
        while any(request.num_tokens == request.num_prompt_tokens for request in requests):
            self._step()

    def _step(self) -> list[StepOutput]:
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        if not outputs and not self.engine.has_work:
            raise InferenceError("the engine has nothing left to do, and some answers are missing")
        return outputs

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)


def _request(prompt: list[int], tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return Request(prompt, params, max_tokens=tokens, seed=0, eos_ids=frozenset())
