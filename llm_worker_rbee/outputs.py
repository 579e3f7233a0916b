"""What the offline API returns: chunks of a completion as they are generated, and whole completions. Plain records."""

from __future__ import annotations

from dataclasses import dataclass

from .engine.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one completion went, in seconds from its start, waiting included."""

    time_to_first_token: float
    total: float
    tokens: int  # sampled, the end-of-text id included

    @property
    def tokens_per_second(self) -> float:
        """The rate after the first token; 0 where there was no second one."""
        rest = self.total - self.time_to_first_token
        return (self.tokens - 1) / rest if self.tokens > 1 and rest > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one token added; `text` may be empty while a character or a stop string is incomplete."""

    text: str
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one request."""

    prompt_tokens: list[int]
    tokens: list[int]  # without the end-of-text id
    text: str
    # "stop": an end-of-text id or a stop string; "length": max_tokens or the context; None: not finished
    finish_reason: FinishReason | None
    stop_sequence: str | None  # the stop string that was found
    seed: int
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # as long as prompt_tokens, the first None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
