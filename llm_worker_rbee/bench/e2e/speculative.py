"""Decode with guesses beside decode without, on real text: random ids never repeat themselves.

A sample is what the first prompts of data/prompts.jsonl get, in groups of `batch`: tokens from when all of a group have
begun to when the first ends, over that time. Both sides answer the same, which is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ContextLengthError, InferenceError
from ...models import Transformer
from ...weights import Checkpoint
from ..engine_harness import Drive
from ..prompt_ids import prompts_of
from .throughput import Bench, Plan

FEWEST_PROMPTS = 8
WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Guessing:
    """One length with one batch, on two engines."""

    bench: Bench
    label: str
    tokens: int
    batch: int
    prompts: Sequence[list[int]]
    plain: Drive
    guessed: Drive
    steps: int = 0
    made: int = 0
    answers: list[list[int]] = field(default_factory=list)

    @staticmethod
    def of(bench: Bench, plan: Plan, tokens: int, batch: int, checkpoint: Checkpoint, drafts: Transformer | None
           ) -> Guessing:  # fmt: skip
        """With engines of their own."""
        label, model = plan.guesses, bench.drive.engine.model
        assert label is not None
        prompts = prompts_of(checkpoint, batch * -(-FEWEST_PROMPTS // batch))
        room, context = max(map(len, prompts)) + tokens, model.config.context_length
        if room > context:
            told = f"the prompts and tg{tokens} need {room} tokens, the model's context has {context}"
            raise ContextLengthError(f"{told}: use a smaller --tg", "tg")
        options: dict[str, Any] = {"speculative": plan.speculative, "draft_model": drafts}
        if plan.draft_tokens is not None:
            options["draft_tokens"] = plan.draft_tokens
        plain, guessed = (Drive(model, room, batch, 0, plan.kv_type, **more) for more in ({}, options))
        return Guessing(bench, label, tokens, batch, prompts, plain, guessed)

    @property
    def name(self) -> str:
        """As the result with guesses is called."""
        return self.name_of(self.label)

    def name_of(self, side: str) -> str:
        """`tg128@text` without guesses, `tg128@ngram@b4` with them."""
        return f"tg{self.tokens}@{side}" + (f"@b{self.batch}" if self.batch != 1 else "")

    def run(self, drive: Drive, tokens: int) -> float:
        """Tokens a second over all prompts."""
        groups = [self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch)]
        found = [drive.together(group, tokens) for group in groups]
        self.answers = [answer for one in found for answer in one.answers]
        self.steps, self.made = sum(one.steps for one in found), sum(one.tokens for one in found)
        return self.made / sum(one.seconds for one in found)

    def warm_up(self) -> None:
        """A short answer on both sides."""
        for drive in (self.plain, self.guessed):
            self.run(drive, min(self.tokens, WARM_UP_TOKENS))

    def take(self) -> None:
        """One sample of each side."""
        samples, names = self.bench.samples, (self.name_of("text"), self.name)
        samples.setdefault(names[0], []).append(self.run(self.plain, self.tokens))
        known, books = self.answers, self.guessed.engine.scheduler
        drafted, accepted = books.stats.num_drafted_tokens, books.stats.num_accepted_tokens
        samples.setdefault(names[1], []).append(self.run(self.guessed, self.tokens))
        if self.answers != known:
            raise InferenceError("with guesses the answers differ from those without")
        drafted, accepted = books.stats.num_drafted_tokens - drafted, books.stats.num_accepted_tokens - accepted
        self.bench.put(names[0], "tok/s", "higher", batch=self.batch)
        self.bench.put(
            names[1], "tok/s", "higher", batch=self.batch, drafted=drafted, accepted=accepted,
            acceptance=accepted / drafted if drafted else 0.0, tokens_per_step=self.made / self.steps / self.batch,
            times_plain=self.bench.ratio(names[1], names[0]),
        )  # fmt: skip
