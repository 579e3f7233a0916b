"""Requests -> rows for the sampling op: which tokens count for penalties, which number each draw is keyed by."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from ..backends.types import Array, Ops, SampleRow
from .request import Request, TokenLogprob

SEED_BITS = 53  # survives a JSON reader that keeps numbers as doubles


def draw_seed() -> int:
    """A seed for a request that brought none; it is reported, so that the answer can be had again."""
    return secrets.randbits(SEED_BITS)


def sample(ops: Ops, logits: Array, requests: Sequence[Request]) -> list[int]:
    """The next token of each request: (N, vocabulary) -> N ids."""
    return [int(token) for token in ops.sample(logits, [sample_row(request) for request in requests])]


def sample_row(request: Request) -> SampleRow:
    """What the op needs of a request; a draw is keyed by the position of the token that it makes."""
    p = request.params
    recent: list[int] = []
    if p.repetition_penalty != 1.0 and p.repeat_last_n:
        recent = (request.prompt + request.tokens)[-p.repeat_last_n :]
    counts = request.tokens if p.presence_penalty or p.frequency_penalty else []
    return SampleRow(
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        typical_p=p.typical_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        recent=np.array(recent, np.int64),
        generated=np.array(counts, np.int64),
        bias=tuple(p.logit_bias.items()),
        seed=request.seed,
        choice=request.choice,
        position=request.num_tokens,
    )


def token_logprobs(ops: Ops, logits: Array, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of the given tokens under their rows of raw logits, with the k likeliest beside each."""
    found = ops.logprobs(logits, np.array(tokens, np.int64), k)
    return [
        TokenLogprob(token, float(value), tuple(zip(ids.tolist(), map(float, values), strict=True)))
        for token, value, ids, values in zip(tokens, found.chosen, found.top_ids, found.top, strict=True)
    ]
