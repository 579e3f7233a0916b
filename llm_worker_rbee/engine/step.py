"""What goes into a step and what comes out: plain records between scheduler, runner and sampler. No arrays here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import WorkerError
from .request import Request, TokenLogprob


class ScheduledTokens(NamedTuple):
    """Neighbouring tokens of one request, computed in one step; logits are wanted from `logits_from` on."""

    request: Request
    start: int
    stop: int
    logits_from: int


@dataclass(slots=True)
class SamplerOutput:
    """What was chosen in a step: for each span that reaches the end of its request a token, and one for each guess."""

    tokens: list[int]
    logprobs: dict[Request, list[TokenLogprob]] = field(default_factory=dict)  # of those who asked, for each token
    failed: dict[Request, WorkerError] = field(default_factory=dict)  # they have no tokens


@dataclass(slots=True)
class SchedulerStats:
    """What happened since the engine began."""

    num_preemptions: int = 0
    num_queried_tokens: int = 0  # of prompts, looked up in the prefix cache
    num_hit_tokens: int = 0  # and found
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
