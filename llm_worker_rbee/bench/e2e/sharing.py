"""A prompt that begins as an earlier one: how much sooner its first token comes.

Each repetition has a prefix of its own, so that the first request never finds anything and the second one always the
whole blocks of it; a tail of a few tokens differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..drive import Drive
from .bench import Bench

TAIL = 4  # tokens behind the prefix


@dataclass(frozen=True, slots=True)
class Sharing:
    """Time to first token of a first and of a second request with `prefix` tokens in common."""

    bench: Bench
    prefix: int
    drive: Drive
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(11))

    @staticmethod
    def of(bench: Bench, prefix: int, kv_type: str) -> Sharing:
        """With an engine of its own, for one request at a time."""
        return Sharing(bench, prefix, Drive(bench.drive.engine.model, needs(prefix), 1, 0, kv_type))

    @property
    def name(self) -> str:
        """What people see while it runs."""
        return f"shared prefix of {self.prefix}"

    def run(self) -> tuple[float, float]:
        """Seconds to the first token of both."""
        vocabulary = self.drive.engine.model.config.vocab_size
        shared = self.rng.integers(0, vocabulary, self.prefix).tolist()
        tails = self.rng.permutation(vocabulary)[: 2 * TAIL].reshape(2, -1).tolist()
        first, second = (self.drive.first_tokens([shared + tail]) for tail in tails)
        size = self.drive.engine.config.block_size
        assert (first.tokens, second.tokens) == (needs(self.prefix), needs(self.prefix) - self.prefix // size * size)
        return first.seconds, second.seconds

    def warm_up(self) -> None:
        """Once."""
        self.run()

    def take(self) -> None:
        """One sample of each."""
        names = f"ttft_first@p{self.prefix}", f"ttft_shared@p{self.prefix}"
        for name, seconds in zip(names, self.run(), strict=True):
            self.bench.samples.setdefault(name, []).append(seconds)
        self.bench.put(names[0], "s", prompt=needs(self.prefix))
        self.bench.put(names[1], "s", prompt=needs(self.prefix), times_shorter=self.bench.ratio(*names))


def needs(prefix: int) -> int:
    """Tokens of a prompt."""
    return prefix + TAIL
