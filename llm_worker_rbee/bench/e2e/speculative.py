"""Speculative decoding beside plain decoding, on real text: random ids never repeat themselves.

A sample is a run over the bundled prompts in groups of `batch`: tokens from when all of a group have begun to when the
first ends, over that time. Both sides must generate the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ContextLengthError, InferenceError
from ...models import Transformer
from ...weights import Checkpoint
from ..engine_harness import EngineHarness, encode_bundled_prompts
from .throughput import WARM_UP_TOKENS, ModelBench, Plan

MIN_PROMPTS = 8


@dataclass(slots=True)
class SpeculativeDecoding:
    """One length with one batch size, on two engines."""

    bench: ModelBench
    drafter: str
    tokens: int
    batch: int
    prompts: Sequence[list[int]]
    plain: EngineHarness
    speculative: EngineHarness
    steps: int = 0
    generated: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @staticmethod
    def create(
        bench: ModelBench, plan: Plan, tokens: int, batch: int, checkpoint: Checkpoint, draft_model: Transformer | None
    ) -> SpeculativeDecoding:
        """Make two engines that differ by the drafter alone."""
        model, drafter = bench.harness.engine.model, plan.drafter
        assert drafter is not None
        prompts = encode_bundled_prompts(checkpoint, batch * -(-MIN_PROMPTS // batch))
        needed, context = max(map(len, prompts)) + tokens, model.config.context_length
        if needed > context:
            raise ContextLengthError(
                f"the prompts and tg{tokens} need {needed} tokens, the model's context has {context}: "
                "use a smaller --tg",
                "tg",
            )
        options: dict[str, Any] = {"speculative": plan.speculative, "draft_model": draft_model}
        if plan.draft_tokens is not None:
            options["draft_tokens"] = plan.draft_tokens
        plain = EngineHarness(model, needed, batch, 0, plan.kv_type)
        speculative = EngineHarness(model, needed, batch, 0, plan.kv_type, **options)
        return SpeculativeDecoding(bench, drafter, tokens, batch, prompts, plain, speculative)

    @property
    def name(self) -> str:
        return self.result_name(self.drafter)

    def result_name(self, side: str) -> str:
        """`tg128@text` without a drafter, `tg128@ngram@b4` with one."""
        return f"tg{self.tokens}@{side}" + (f"@b{self.batch}" if self.batch != 1 else "")

    def run(self, harness: EngineHarness, tokens: int) -> float:
        """Return the tokens per second over all prompts."""
        groups = [self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch)]
        runs = [harness.decode_prompts(group, tokens) for group in groups]
        self.outputs = [output for one in runs for output in one.answers]
        self.steps, self.generated = sum(one.steps for one in runs), sum(one.tokens for one in runs)
        return self.generated / sum(one.seconds for one in runs)

    def warm_up(self) -> None:
        for harness in (self.plain, self.speculative):
            self.run(harness, min(self.tokens, WARM_UP_TOKENS))

    def add_sample(self) -> None:
        samples, names = self.bench.samples, (self.result_name("text"), self.name)
        samples.setdefault(names[0], []).append(self.run(self.plain, self.tokens))
        expected, counts = self.outputs, self.speculative.engine.scheduler.stats
        drafted, accepted = counts.num_drafted_tokens, counts.num_accepted_tokens
        samples.setdefault(names[1], []).append(self.run(self.speculative, self.tokens))
        if self.outputs != expected:
            raise InferenceError("speculative decoding changed an answer")
        drafted, accepted = counts.num_drafted_tokens - drafted, counts.num_accepted_tokens - accepted
        self.bench.put(names[0], "tok/s", "higher", batch=self.batch)
        self.bench.put(
            names[1], "tok/s", "higher", batch=self.batch, drafted=drafted, accepted=accepted,
            acceptance=accepted / drafted if drafted else 0.0,
            tokens_per_step=self.generated / self.steps / self.batch,
            times_plain=self.bench.ratio(names[1], names[0]),
        )  # fmt: skip
