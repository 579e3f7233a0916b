"""A model run as users run it: sequences through engine, scheduler and greedy sampler.

Each sequence has random ids of its own, the same in every run. The depth of a run comes from the prefix cache; a
prefill rounds its depth down to whole blocks. The tokens after that depth are drawn anew each time, so that nothing
else is cached. Unlike llama-bench, every run samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from llm_worker_rbee.backends.ops import Ints
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request, StepOutput
from llm_worker_rbee.engine.speculative import DraftModel
from llm_worker_rbee.errors import InferenceError, InvalidRequestError
from llm_worker_rbee.llm import open_tokenizer
from llm_worker_rbee.load import LoadPhases
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.models.kv_cache import KVCache
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.token_engine.launch import warm_up
from llm_worker_rbee.weights import Checkpoint

from .workload import PROMPTS, read_prompts

MAX_STARTING_STEPS = {False: 256, True: 32}  # until all sequences of a batch have begun: on a CPU, on a GPU


class TimedRun(NamedTuple):
    """The output of a run, and its time."""

    seconds: float
    tokens: int  # generated, or prefilled, by all sequences together
    steps: int
    answers: list[list[int]]
    between_s: float = 0.0  # spent in `between`; not part of `seconds`
    device_s: float | None = None  # of one step, where the device can be timed alone


class EngineHarness:
    """Drive an engine with room for `batch` sequences of `capacity` tokens; `options` are fields of `EngineConfig`."""

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
        self._rng = np.random.default_rng(seed)
        self.ids: Ints = self._rng.integers(0, model.config.vocab_size, (batch, capacity))
        # tokens of the first sequence when the last begins, and those at both ends
        self._spare_tokens = 2 + min(batch, MAX_STARTING_STEPS[model.ops.has_device_memory])
        sequence_room, size = 1 + capacity + self._spare_tokens, KVCache.default_block_size
        blocks = batch * (1 + -(-sequence_room // size))
        config = EngineConfig(max_context=sequence_room, n_blocks=blocks, block_size=size, max_batch=batch, **options)
        drafter = None if draft_model is None else DraftModel(draft_model, config, model.config.vocab_size, kv_type)
        self.engine = Engine(model, config, kv_type, drafter)
        self.engine.draft_control.can_pause = False  # drafting itself is measured

    def warm_up(self) -> None:
        """Warm up as a server does before it is ready."""
        warm_up(self.engine, LoadPhases())

    def prefill(self, depth: int, tokens: int, batch: int, on_start: Callable[[], object] | None = None) -> TimedRun:
        """Prefill `tokens` of each sequence behind `depth` cached ones, up to the first output token."""
        cached = depth - depth % self.engine.config.block_size
        self._fill_cache(cached, batch)
        fresh = self._rng.integers(0, self.engine.model.config.vocab_size, (batch, tokens))
        prompts = np.concatenate([self.ids[:batch, :cached], fresh], axis=1).tolist()
        if on_start is not None:
            on_start()
        return self.time_first_tokens(prompts)

    def time_first_tokens(self, prompts: Sequence[list[int]]) -> TimedRun:
        """Time until each of these prompts has its first token."""
        requests = [_request(prompt, 1) for prompt in prompts]
        start, before = time.perf_counter(), self.engine.num_steps
        self._start(requests)
        seconds = time.perf_counter() - start
        read = sum(request.num_prompt_tokens - request.num_cached_tokens for request in requests)
        return TimedRun(seconds, read, self.engine.num_steps - before, [request.tokens for request in requests])

    def decode(
        self,
        depth: int,
        tokens: int,
        batch: int,
        between: Callable[[], object] | None = None,
        time_device: Callable[[], float | None] | None = None,
        on_start: Callable[[], object] | None = None,
    ) -> TimedRun:
        """Run `tokens` decode steps of each sequence behind `depth` tokens (at 0 one stands for the BOS token).

        `between` is called after each step and timed apart, so that it and the step meet the machine in the same state.
        `time_device` is called after the last step, while the requests are still running; `on_start` before the first.
        """
        self._fill_cache(depth - depth % self.engine.config.block_size, batch)
        requests = [_request(ids[: max(1, depth)].tolist(), tokens + self._spare_tokens) for ids in self.ids[:batch]]
        self._start(requests)
        before = [request.num_tokens for request in requests]
        seconds = between_s = 0.0
        if on_start is not None:
            on_start()
        start = time.perf_counter()
        while requests[0].num_tokens < before[0] + tokens:
            self._step()
            if between is not None:
                stepped = time.perf_counter()
                between()
                seconds, start = seconds + stepped - start, time.perf_counter()
                between_s += start - stepped
        seconds += 0.0 if between is not None else time.perf_counter() - start
        device_s = None if time_device is None else time_device()
        outputs = [request.ids[n : n + tokens] for request, n in zip(requests, before, strict=True)]
        self._abort(requests)
        assert all(len(output) == tokens for output in outputs), "a sequence was left out of a step"
        return TimedRun(seconds, tokens * batch, tokens, outputs, between_s, device_s)

    def decode_prompts(self, prompts: Sequence[list[int]], tokens: int) -> TimedRun:
        """Answer all prompts at once; count from the first token of the last to the end of the first."""
        requests = [_request(prompt, tokens) for prompt in prompts]
        self._start(requests)
        if any(len(request.tokens) >= tokens for request in requests):
            message = f"the first of {len(prompts)} answers of {tokens} tokens ended before the last began"
            raise InvalidRequestError(f"{message}: use a longer --tg", "tg")
        before, steps_before = sum(request.num_tokens for request in requests), self.engine.num_steps
        start = time.perf_counter()
        while self.engine.has_work and not any(output.finish_reason for output in self._step()):
            pass
        seconds, generated = time.perf_counter() - start, sum(request.num_tokens for request in requests) - before
        steps = self.engine.num_steps - steps_before
        while self.engine.has_work:
            self._step()
        return TimedRun(seconds, generated, steps, [request.tokens for request in requests])

    def complete(self, prompt_tokens: int, tokens: int, count: int) -> TimedRun:
        """Submit `count` requests with fresh prompts at once; time until the last has all its output tokens."""
        requests = self._fresh_requests(count, prompt_tokens, tokens)
        start, before = time.perf_counter(), self.engine.num_steps
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self._step()
        seconds = time.perf_counter() - start
        outputs = [request.tokens for request in requests]
        return TimedRun(seconds, sum(map(len, outputs)), self.engine.num_steps - before, outputs)

    def time_burst(self, count: int, prompt_tokens: int) -> list[float]:
        """Submit requests with fresh prompts at once; return the seconds to the first token of each."""
        requests = self._fresh_requests(count, prompt_tokens, self._spare_tokens)
        waiting, seconds = set(requests), []
        start = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        while waiting:
            outputs = self._step()
            now = time.perf_counter() - start
            begun = waiting & {output.request for output in outputs}
            seconds += [now] * len(begun)
            waiting -= begun
        self._abort(requests)
        return seconds

    def time_steps(
        self, prompts: int, prompt_tokens: int, decoding: int, depth: int, uncounted: int, count: int
    ) -> list[float]:
        """Return the seconds of `count` steps, after `uncounted` ones: each prefills whole prompts, fresh ones, and
        decodes a token of each of `decoding` requests that have `depth` tokens at first."""
        total = uncounted + count
        tokens = 2 * total + self._spare_tokens  # a decode step may come before each of the steps
        running = self._start_decoding(depth, decoding, tokens)
        seconds = [self._time_step(self._fresh_requests(prompts, prompt_tokens, 1), running) for _ in range(total)]
        self._abort(running)
        return seconds[uncounted:]

    def _time_step(self, prefilling: Sequence[Request], running: Sequence[Request]) -> float:
        """Submit prompts and time the step that computes them; raise unless one step has all of these requests."""
        for request in prefilling:
            self.engine.add(request)
        while True:
            lengths, steps = [request.num_tokens for request in running], self.engine.num_steps
            start = time.perf_counter()
            self._step()
            seconds = time.perf_counter() - start
            if not prefilling or any(request.is_finished for request in prefilling):
                break
            if any(request.num_computed_tokens for request in prefilling):
                raise InferenceError("a step was divided: the token budget is too small for its prompts")
            # this step had been launched before the prompts were submitted
        has_all = all(r.num_tokens == n + 1 for r, n in zip(running, lengths, strict=True))
        has_all = has_all and all(request.is_finished for request in prefilling)
        if not has_all or self.engine.num_steps != steps + 1:
            raise InferenceError("a step did not compute all of its requests")
        return seconds

    def time_prefill_steps(self, prompt: list[int], beside: Sequence[list[int]], tokens: int) -> list[float]:
        """Return the seconds of each step that prefills a prompt while others, of at most `tokens`, decode."""
        decoding, prefilling = [_request(ids, tokens) for ids in beside], _request(prompt, 1)
        self._start(decoding)
        self.engine.add(prefilling)
        seconds = []
        while prefilling.num_tokens == prefilling.num_prompt_tokens:
            start = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - start)
        self._abort(decoding)
        if any(len(request.tokens) >= tokens for request in decoding):
            message = f"answers of {tokens} tokens ended before a prompt of {len(prompt)} was prefilled"
            raise InvalidRequestError(f"{message}: use a larger --target-itl-ms", "target_itl_ms")
        return seconds

    def _fill_cache(self, depth: int, batch: int) -> None:
        """Put whole blocks of the first `batch` sequences into the prefix cache, as the most recently used ones."""
        if depth:
            self._start([_request(ids[: depth + 1].tolist(), 1) for ids in self.ids[:batch]])

    def _start_decoding(self, depth: int, batch: int, tokens: int) -> list[Request]:
        """Return requests of `depth` tokens (at 0 one stands for the BOS token) that have begun to decode.

        The step that starts them computes one token of each behind cached blocks: a budget of `batch` tokens is enough,
        and none is ahead of the others.
        """
        size = self.engine.config.block_size
        cached = max(0, depth - 1) // size * size
        self._fill_cache(cached, batch)
        requests = [_request(ids[: cached + 1].tolist(), depth - cached + tokens) for ids in self.ids[:batch]]
        self._start(requests)
        while any(request.num_tokens <= depth for request in requests):
            self._step()
        return requests

    def _start(self, requests: Sequence[Request]) -> None:
        """Submit all requests and step until each has its first token."""
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
            raise InferenceError("the engine is idle before all requests have finished")
        return outputs

    def _fresh_requests(self, count: int, prompt_tokens: int, tokens: int) -> list[Request]:
        """Return requests of random prompts that no other request has had."""
        prompts = self._rng.integers(0, self.engine.model.config.vocab_size, (count, prompt_tokens))
        return [_request(prompt, tokens) for prompt in prompts.tolist()]

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)


def _request(prompt: list[int], tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, ignore_eos=True).resolve()
    return Request(prompt, params, max_tokens=tokens, seed=0, eos_ids=frozenset())


def encode_bundled_prompts(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    """Return the ids of `count` bundled prompts, repeated if necessary: real text, unlike random ids."""
    tokenizer = open_tokenizer(checkpoint)
    return [tokenizer.encode(prompt.text or "") for prompt in islice(cycle(read_prompts(PROMPTS)), count)]
