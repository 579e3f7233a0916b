"""What is asked of a server, and when: prompts of seeded lengths or from a file, arrivals of a seeded process.

Request i is the same whatever was asked before it: its numbers come from (seed, i). Nothing is held for requests that
are not due yet. Length is counted in words, plain English ones, each a token or close to it in most vocabularies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile

import numpy as np

from ...errors import InvalidRequestError
from ..prompts import MOST_TOKENS, WORDS, Prompt, read_text

MOST_REQUESTS = 1_000_000
LENGTHS = re.compile(r"(\d{1,7})|(\d{1,7})-(\d{1,7})|normal:(\d{1,7}(?:\.\d{1,6})?),(\d{1,7}(?:\.\d{1,6})?)", re.ASCII)
ARRIVALS, CONTENT, PREFIX = 0, 1, 2  # streams of one seed


@dataclass(frozen=True, slots=True)
class Lengths:
    """`128`, `64-256` (each as likely as the other) or `normal:128,32` (mean and standard deviation; at least 1)."""

    text: str
    low: float
    high: float
    normal: bool = False

    @staticmethod
    def parse(text: str, option: str) -> Lengths:
        """One of the three forms."""
        found = LENGTHS.fullmatch(text)
        if found is None:
            raise InvalidRequestError(f"{option} is {text!r}: write N, LOW-HIGH or normal:MEAN,SD", option)
        if found[4]:
            made = Lengths(text, float(found[4]), float(found[5]), normal=True)
        else:
            made = Lengths(text, float(found[1] or found[2]), float(found[1] or found[3]))
        if not 1 <= made.low <= MOST_TOKENS or made.high > MOST_TOKENS or (made.high < made.low and not made.normal):
            raise InvalidRequestError(f"{option} is {text!r}: lengths go from 1 to {MOST_TOKENS}, upwards", option)
        return made

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        if self.normal:
            return int(min(max(1, round(rng.normal(self.low, self.high))), MOST_TOKENS))
        return int(rng.integers(int(self.low), int(self.high) + 1))


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be."""

    index: int
    arrival: float | None  # seconds after the start; None: as soon as there is room
    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a run, made one at a time."""

    requests: int
    input_len: Lengths
    output_len: Lengths
    rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0
    shared_prefix: int = 0
    prefix_groups: int = 1
    prompts: Sequence[Prompt] = ()

    def jobs(self) -> Iterator[Job]:
        """Each request in turn, with the time that it arrives."""
        arrivals = self._arrivals()
        for index in range(self.requests):
            yield self.job(index, next(arrivals))

    def job(self, index: int, arrival: float | None = None) -> Job:
        """The request of this number."""
        rng = np.random.default_rng((self.seed, CONTENT, index))
        words, most = self.input_len.draw(rng), self.output_len.draw(rng)
        if self.prompts:
            prompt = self.prompts[index % len(self.prompts)]
            return Job(index, arrival, prompt, prompt.max_tokens or most)
        return Job(index, arrival, Prompt(" ".join([*self._prefix(index), *_words(rng, words)])), most)

    def arrived(self, seconds: float) -> int:
        """How many arrive within the first so many seconds, at a rate that is not infinite."""
        due = takewhile(lambda arrival: arrival is not None and arrival < seconds, self._arrivals())
        return sum(1 for _ in islice(due, self.requests))

    def warm_up(self, count: int) -> list[Job]:
        """Requests like those of the run but none of them, so that no prefix of theirs is known afterwards."""
        return [self.job(MOST_REQUESTS + i) for i in range(count)]

    def _prefix(self, index: int) -> list[str]:
        if not self.shared_prefix:
            return []
        group = MOST_REQUESTS if index >= MOST_REQUESTS else index % self.prefix_groups
        return _words(np.random.default_rng((self.seed, PREFIX, group)), self.shared_prefix)

    def _arrivals(self) -> Iterator[float | None]:
        """Gaps from a gamma distribution of mean 1/rate: shape 1 is Poisson, below bursts, above a steady beat."""
        if math.isinf(self.rate):
            while True:
                yield None
        rng, now = np.random.default_rng((self.seed, ARRIVALS)), 0.0
        while True:
            yield now
            now += float(rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness)))


@cache
def vocabulary() -> tuple[str, ...]:
    """The words that prompts are made of."""
    return tuple(read_text(WORDS).split())


def _words(rng: np.random.Generator, count: int) -> list[str]:
    known = vocabulary()
    return [known[i] for i in rng.integers(0, len(known), count)]
