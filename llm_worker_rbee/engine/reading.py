"""How prompts share a step: who reads how much of its own. No arrays here."""

from __future__ import annotations

from collections.abc import Iterator

from .request import Request
from .step import ScheduledTokens

MAX_SCORED_TOKENS = 64  # tokens a step of prompts whose log-probabilities are wanted: bounds the memory of the logits


def split_prefill_budget(readers: Iterator[Request], budget: int) -> list[tuple[Request, int]]:
    """Who reads how many tokens: each at most half of what is left, so that a short prompt does not wait for a long one
    before it; what nobody wants goes to the first."""
    counts: list[tuple[Request, int]] = []
    scored = MAX_SCORED_TOKENS
    while budget > 0 and (request := next(readers, None)) is not None:
        count = min(len(request.ids) - request.num_computed_tokens, max(budget // 2, 1))
        if request.num_unscored_tokens:
            count = min(count, scored)
            scored -= count
        if count:
            counts.append((request, count))
            budget -= count
    for i, (request, count) in enumerate(counts):
        more = min(budget, len(request.ids) - request.num_computed_tokens - count)
        if request.num_unscored_tokens:
            more = min(more, scored)
            scored -= more
        counts[i] = request, count + more
        budget -= more
    return counts


def next_chunk(request: Request, count: int) -> ScheduledTokens:
    """The next tokens of a request; logits where it catches up, and where its prompt is scored."""
    start, known = request.num_computed_tokens, len(request.ids)
    stop = start + count
    wanted = known - 1 if stop >= known else stop
    if request.num_unscored_tokens:
        assert request.prompt_logprobs is not None
        wanted = min(wanted, max(start, len(request.prompt_logprobs) - 1))
    return ScheduledTokens(request, start, stop, wanted)
