"""The engine's books alone, without a model: one step in which so many requests get a token each.

Contexts are of a few hundred tokens and grow with every step, so blocks fill up as often as they do in service; when
they have become long, all begin anew. `scheduler` is schedule and update, `scheduler_batch` has the arrays of the step
between them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from ...config import EngineConfig
from ...engine.model_runner import ModelRunner
from ...engine.request import Request, SamplingParams
from ...engine.scheduler import Scheduler
from ...engine.step import SamplerOutput
from ..roofline import Work
from ..timing import Function
from .cases import Case

SHORTEST, LONGEST = 200, 400  # tokens of a prompt
ANEW = 4096  # tokens after which all begin anew: far apart, so that beginning counts for nothing
BLOCK_SIZE, BUDGET = 16, 512


def cases() -> Iterator[Case]:
    """In the order in which they run."""
    yield from (_case("scheduler", requests, arrays=False) for requests in (1, 16, 64, 256))
    yield _case("scheduler_batch", 64, arrays=True)


def _case(family: str, requests: int, *, arrays: bool) -> Case:
    def make(_: Any) -> Function:
        books = Books(requests)
        return books.step_with_arrays if arrays else books.step

    touched = 64.0 * requests  # a line of the cache for each request, at least
    return Case(f"{family}/{requests}", make, Work(touched, requests), needs="scheduler")


class Books:
    """A scheduler whose requests have read their prompts."""

    def __init__(self, requests: int) -> None:
        self.count = requests
        blocks = requests * (-(-ANEW // BLOCK_SIZE) + 1)
        self._config = EngineConfig(
            max_context=ANEW, n_blocks=blocks, block_size=BLOCK_SIZE, max_batch=requests, max_step_tokens=BUDGET
        )
        self.begin()

    def begin(self) -> None:
        """Everybody reads a prompt of their own."""
        rng, config = random.Random(7), self._config
        self.scheduler = Scheduler(config)
        no_model, cache = cast(Any, None), cast(Any, SimpleNamespace(block_size=BLOCK_SIZE))
        self._runner = ModelRunner(no_model, cache, config.max_batch, config.max_context)
        for number in range(self.count):
            prompt = [rng.randrange(49152) for _ in range(rng.randint(SHORTEST, LONGEST))]
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            request = Request(prompt, params, ANEW - LONGEST, number, frozenset())
            request.arrival = number
            self.scheduler.add(request)
        self._tokens = [rng.randrange(49152) for _ in range(self.count)]
        spans = self.scheduler.schedule(self.count * LONGEST)
        self.scheduler.update(spans, SamplerOutput(self._tokens))

    def step(self) -> None:
        """One token more for each."""
        spans = self.scheduler.schedule(BUDGET)
        if self.scheduler.update(spans, SamplerOutput(self._tokens))[0].finish_reason:
            self.begin()

    def step_with_arrays(self) -> None:
        """The same, and the batch that a model would get."""
        spans = self.scheduler.schedule(BUDGET)
        self._runner.batch(spans)
        if self.scheduler.update(spans, SamplerOutput(self._tokens))[0].finish_reason:
            self.begin()
