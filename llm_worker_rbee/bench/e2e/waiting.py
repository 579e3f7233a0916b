"""Answers under way while a long prompt is read: how long each of their tokens takes, at a target for it and without.

A sample is the middle, the 95th percentile and the longest of the steps in which the prompt is read. The engine is kept
from one repetition to the next, so that it knows the machine's pace, and every prompt is drawn anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...config import ModelConfig
from ..drive import Drive
from .bench import Bench

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
        room = needs(model.config)
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
        return self.drive.while_reading(prompt, beside, needs(self.drive.engine.model.config) - BEGINNING)

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


def needs(config: ModelConfig) -> int:
    """Tokens of a sequence."""
    return min(CONTEXT, config.context_length)
