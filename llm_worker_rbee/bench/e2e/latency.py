"""A prompt that begins as an earlier one: how much sooner its first token comes.

Each repetition has a prefix of its own, so that the first request never finds anything and the second one always the
whole blocks of it; a tail of a few tokens differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...config import ModelConfig
from ..engine_harness import Drive
from .throughput import Bench

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
        return Sharing(bench, prefix, Drive(bench.drive.engine.model, shared_prompt_length(prefix), 1, 0, kv_type))

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
        assert (first.tokens, second.tokens) == (
            shared_prompt_length(self.prefix),
            shared_prompt_length(self.prefix) - self.prefix // size * size,
        )
        return first.seconds, second.seconds

    def warm_up(self) -> None:
        """Once."""
        self.run()

    def take(self) -> None:
        """One sample of each."""
        names = f"ttft_first@p{self.prefix}", f"ttft_shared@p{self.prefix}"
        for name, seconds in zip(names, self.run(), strict=True):
            self.bench.samples.setdefault(name, []).append(seconds)
        self.bench.put(names[0], "s", prompt=shared_prompt_length(self.prefix))
        self.bench.put(names[1], "s", prompt=shared_prompt_length(self.prefix), times_shorter=self.bench.ratio(*names))


def shared_prompt_length(prefix: int) -> int:
    """Tokens of a prompt."""
    return prefix + TAIL


ANSWERING = 4
BEGINNING = 32  # tokens that each of them was asked with
PROMPT = 2000  # tokens that are read meanwhile, or three quarters of a shorter context
CONTEXT = 2688
NO_TARGET_MS = 1e9
STATISTICS = {"median": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Waiting:
    """One target."""

    bench: Bench
    target_ms: int  # 0: none
    drive: Drive
    prompt: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(13))

    @staticmethod
    def of(bench: Bench, target_ms: int, kv_type: str) -> Waiting:
        """With an engine of its own."""
        model = bench.drive.engine.model
        room = itl_context_length(model.config)
        drive = Drive(model, room, ANSWERING + 1, 0, kv_type, target_itl_ms=float(target_ms or NO_TARGET_MS))
        return Waiting(bench, target_ms, drive, min(PROMPT, room * 3 // 4))

    @property
    def name(self) -> str:
        """What people see while it runs."""
        return f"a prompt of {self.prompt} read, " + (f"target {self.target_ms} ms" if self.target_ms else "no target")

    def run(self) -> list[float]:
        """Seconds of each step."""
        vocabulary = self.drive.engine.model.config.vocab_size
        beside = self.rng.integers(0, vocabulary, (ANSWERING, min(BEGINNING, self.prompt))).tolist()
        prompt = self.rng.integers(0, vocabulary, self.prompt).tolist()
        return self.drive.while_reading(prompt, beside, itl_context_length(self.drive.engine.model.config) - BEGINNING)

    def warm_up(self) -> None:
        """Once."""
        self.run()

    def take(self) -> None:
        """One sample of each figure."""
        took = self.run()
        suffix = f"@t{self.target_ms}" if self.target_ms else "@none"
        for which, part in STATISTICS.items():
            self.bench.add(
                f"itl_{which}{suffix}", "s", float(np.quantile(took, part)), target_ms=self.target_ms or None,
                answering=ANSWERING, prompt=self.prompt, steps=len(took),
            )  # fmt: skip
        self.bench.add(f"ttft{self.prompt}{suffix}", "s", sum(took), prompt=self.prompt)


def itl_context_length(config: ModelConfig) -> int:
    """Tokens of a sequence."""
    return min(CONTEXT, config.context_length)
