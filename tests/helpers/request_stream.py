"""Requests that arrive over time, by step number, so that a seed gives the same schedule on every machine: lengths of 1
to 300 tokens in and 1 to 40 out, and every sampling setting."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.sampling_params import FinishReason, SamplingParams

MAX_INPUT, MAX_OUTPUT = 300, 40
MAX_TOTAL = MAX_INPUT + MAX_OUTPUT
ABORTED_EVERY = 50  # one of so many requests is aborted while it runs
PAUSE = 1000  # steps: all requests before it have finished then
URGENT_EVERY = 12  # one of so many preempts others if there is no room
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.8},
    {"repetition_penalty": 1.2, "repeat_last_n": 64}, {"temperature": 0.0, "repetition_penalty": 1.1},
    {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -100.0}},
    {"logit_bias": {11: 2.0}}, {"temperature": 0.0, "logprobs": 0}, {"logprobs": 5}, {"logprobs": 20},
    {"temperature": 0.0, "prompt_logprobs": True, "logprobs": 1}, {"prompt_logprobs": True},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "repetition_penalty": 1.05,
     "presence_penalty": -0.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}, "logprobs": 3},
)  # fmt: skip


class Arrival(NamedTuple):
    """A request and the number of the step before which it is submitted."""

    step: int
    request: Request


def make_arrivals(count: int, vocab_size: int, seed: int = 0, mean_gap: float = 0.25) -> list[Arrival]:
    """Return requests with exponential gaps of `mean_gap` steps, and a pause in the middle.

    Every third prompt repeats a short pattern, every fifth begins as an earlier one does, and some requests are more
    urgent than the others.
    """
    rng, step, arrivals = np.random.default_rng(seed), 0.0, list[Arrival]()
    for i in range(count):
        step += rng.exponential(mean_gap) + (PAUSE if i == count // 2 else 0)
        length = 1 + int((MAX_INPUT - 1) * rng.random() ** 2)  # short ones are more common
        ids = rng.integers(0, vocab_size, length)
        prompt = (np.resize(ids[:7], length) if i % 3 == 0 else ids).tolist()
        if i % 5 == 4:
            prompt = (arrivals[i // 2].request.prompt + prompt)[:MAX_INPUT]
        params = SamplingParams(**SETTINGS[i % len(SETTINGS)], ignore_eos=i % 2 == 0).resolve()
        eos_ids = frozenset[int]() if params.ignore_eos else frozenset(range(5, 15))
        output, priority = int(rng.integers(1, MAX_OUTPUT + 1)), -1 if i % URGENT_EVERY == URGENT_EVERY - 1 else 0
        arrivals.append(Arrival(int(step), Request(prompt, params, output, i, eos_ids, priority=priority)))
    return arrivals


def serve(engine: Engine, arrivals: list[Arrival]) -> dict[FinishReason, int]:
    """Submit each request when it is due and step until all have finished, or were aborted; return how they ended."""
    ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "error": 0}
    waiting, step = arrivals[::-1], 0
    while waiting or engine.has_work:
        while waiting and waiting[-1].step <= step:
            engine.add(waiting.pop().request)
        for output in engine.step():
            if output.finish_reason is not None:
                ended[output.finish_reason] += 1
            if output.error is not None:
                raise output.error
            if output.request.arrival % ABORTED_EVERY == 1 and output.finish_reason is None:
                engine.abort(output.request)
        step += 1
    return ended
