"""Latencies of requests that meet others: TTFT after a prefix hit, and ITL while a long prompt is prefilled.

Prefix hit: each repetition has a prefix of its own, so that the first request finds nothing cached and the second all
whole blocks of it; a tail of a few tokens differs. ITL: a sample is the median, the 95th percentile and the longest of
the steps that prefill the prompt. The engine is kept between repetitions, so that its token budget knows the machine's
speed; every prompt is drawn anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...config import ModelConfig
from ..engine_harness import EngineHarness
from .throughput import ModelBench

TAIL_TOKENS = 4  # behind the shared prefix
DECODING_REQUESTS = 4
DECODING_PROMPT_TOKENS = 32
PREFILL_TOKENS = 2000  # or three quarters of a shorter context
MAX_CONTEXT = 2688
NO_TARGET_MS = 1e9
QUANTILES = {"median": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Time to first token of a first and of a second request with `prefix` tokens in common."""

    bench: ModelBench
    prefix: int
    harness: EngineHarness
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(11))

    @staticmethod
    def create(bench: ModelBench, prefix: int, kv_type: str) -> PrefixHit:
        """Make an engine for one request at a time."""
        harness = EngineHarness(bench.harness.engine.model, shared_prompt_length(prefix), 1, 0, kv_type)
        return PrefixHit(bench, prefix, harness)

    @property
    def name(self) -> str:
        return f"shared prefix of {self.prefix}"

    def run(self) -> tuple[float, float]:
        """Return the seconds to the first token of both requests."""
        vocabulary, length = self.harness.engine.model.config.vocab_size, shared_prompt_length(self.prefix)
        shared = self.rng.integers(0, vocabulary, self.prefix).tolist()
        tails = self.rng.permutation(vocabulary)[: 2 * TAIL_TOKENS].reshape(2, -1).tolist()
        first, second = (self.harness.time_first_tokens([shared + tail]) for tail in tails)
        size = self.harness.engine.config.block_size
        assert (first.tokens, second.tokens) == (length, length - self.prefix // size * size)
        return first.seconds, second.seconds

    def warm_up(self) -> None:
        self.run()

    def add_sample(self) -> None:
        names = f"ttft_first@p{self.prefix}", f"ttft_shared@p{self.prefix}"
        for name, seconds in zip(names, self.run(), strict=True):
            self.bench.samples.setdefault(name, []).append(seconds)
        length = shared_prompt_length(self.prefix)
        self.bench.put(names[0], "s", prompt=length)
        self.bench.put(names[1], "s", prompt=length, times_shorter=self.bench.ratio(*names))


def shared_prompt_length(prefix: int) -> int:
    """Return the tokens of a prompt with a shared prefix."""
    return prefix + TAIL_TOKENS


@dataclass(frozen=True, slots=True)
class ItlUnderPrefill:
    """Inter-token latency of running requests while a prompt is prefilled, at one target."""

    bench: ModelBench
    target_ms: int  # 0: none
    harness: EngineHarness
    prompt: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(13))

    @staticmethod
    def create(bench: ModelBench, target_ms: int, kv_type: str) -> ItlUnderPrefill:
        """Make an engine with this target."""
        model = bench.harness.engine.model
        context, target = itl_context_length(model.config), float(target_ms or NO_TARGET_MS)
        harness = EngineHarness(model, context, DECODING_REQUESTS + 1, 0, kv_type, target_itl_ms=target)
        return ItlUnderPrefill(bench, target_ms, harness, min(PREFILL_TOKENS, context * 3 // 4))

    @property
    def name(self) -> str:
        return f"prefill of {self.prompt}, " + (f"target {self.target_ms} ms" if self.target_ms else "no target")

    def run(self) -> list[float]:
        """Return the seconds of each step."""
        config = self.harness.engine.model.config
        length = min(DECODING_PROMPT_TOKENS, self.prompt)
        beside = self.rng.integers(0, config.vocab_size, (DECODING_REQUESTS, length)).tolist()
        prompt = self.rng.integers(0, config.vocab_size, self.prompt).tolist()
        return self.harness.time_prefill_steps(prompt, beside, itl_context_length(config) - DECODING_PROMPT_TOKENS)

    def warm_up(self) -> None:
        self.run()

    def add_sample(self) -> None:
        seconds = self.run()
        suffix = f"@t{self.target_ms}" if self.target_ms else "@none"
        for name, quantile in QUANTILES.items():
            self.bench.add(
                f"itl_{name}{suffix}", "s", float(np.quantile(seconds, quantile)), target_ms=self.target_ms or None,
                answering=DECODING_REQUESTS, prompt=self.prompt, steps=len(seconds),
            )  # fmt: skip
        self.bench.add(f"ttft{self.prompt}{suffix}", "s", sum(seconds), prompt=self.prompt)


def itl_context_length(config: ModelConfig) -> int:
    """Return the tokens of a sequence."""
    return min(MAX_CONTEXT, config.context_length)
