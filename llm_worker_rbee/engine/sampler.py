"""Logits -> tokens for all requests of a step: which tokens count for penalties, which number each draw is keyed by.

A guess is verified by choosing the token that follows it as if it had been right: draws are keyed by position, so what
is chosen up to the first wrong guess is what plain decoding chooses.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..backends.ops import NO_TOKENS, Array, Backend, Ints, SampleRow
from ..errors import InferenceError, WorkerError
from .request import Request, SamplerOutput, ScheduledTokens, TokenLogprob

SEED_BITS = 53  # survives a JSON reader that keeps numbers as doubles


def draw_seed() -> int:
    """A seed for a request that brought none; it is reported, so that the answer can be had again."""
    return secrets.randbits(SEED_BITS)


def sample(ops: Backend, spans: Sequence[ScheduledTokens], logits: Array) -> SamplerOutput:
    """The tokens of a step. Spans of prompts that are scored get their log-probabilities on the way."""
    answering = [span.request for span in spans if span.stop >= len(span.request.ids)]
    failed: dict[Request, WorkerError] = {}
    if any(span.request.num_unscored_tokens for span in spans):
        logits = logits[_score_prompts(ops, spans, logits, failed)]
        answering = [request for request in answering if request not in failed]
    if not answering:
        return SamplerOutput([], failed=failed)
    rows = [row for request in answering for row in sample_rows(request)]
    try:
        sampled = SamplerOutput(ops.sample(logits, rows).tolist(), failed=failed)
    except InferenceError:
        return _sample_isolating_failures(ops, answering, logits, failed)
    if any(request.params.logprobs is not None for request in answering):
        _add_logprobs(ops, answering, logits, sampled)
    return sampled


def sample_rows(request: Request) -> list[SampleRow]:
    """How the next token is chosen, and the one after each guess."""
    row = request.sample_row = request.sample_row or _new_row(request)
    _update_penalties(row, request, request.ids)
    if not request.drafts:
        return [row]
    rows = [replace(row)]
    for i in range(1, len(request.drafts) + 1):
        rows.append(replace(row))
        _update_penalties(rows[-1], request, request.ids + request.drafts[:i])
    return rows


def _new_row(request: Request) -> SampleRow:
    p = request.params
    return SampleRow(
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        typical_p=p.typical_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        logit_bias=tuple(p.logit_bias.items()),
        seed=request.seed,
        sample_index=request.sample_index,
    )


def _update_penalties(row: SampleRow, request: Request, ids: list[int]) -> None:
    """A draw is keyed by the position of the token that it makes; penalties look at the tokens before it."""
    p = request.params
    row.position = len(ids)
    if p.repetition_penalty != 1.0 and p.repeat_last_n:
        row.penalty_window = np.array(ids[-p.repeat_last_n :], np.int64)
    if p.presence_penalty or p.frequency_penalty:
        made = ids[request.num_prompt_tokens :]
        row.output_ids = np.array(made, np.int64) if made else NO_TOKENS


def _score_prompts(
    ops: Backend, spans: Sequence[ScheduledTokens], logits: Array, failed: dict[Request, WorkerError]
) -> Ints:
    """Fill in `prompt_logprobs`; the rows of the logits that are left, from which tokens are chosen."""
    at = 0
    left: list[int] = []
    for request, _, stop, wanted_from in spans:
        rows = stop - wanted_from
        scored = max(0, min(stop, request.num_prompt_tokens - 1) - wanted_from) if request.num_unscored_tokens else 0
        if scored:
            following = request.prompt[wanted_from + 1 : wanted_from + 1 + scored]
            assert request.prompt_logprobs is not None
            k = request.params.logprobs or 0
            try:
                request.prompt_logprobs += token_logprobs(ops, logits[at : at + scored], following, k)
            except InferenceError as error:
                failed[request] = error
        if request not in failed:
            left += range(at + scored, at + rows)
        at += rows
    return np.array(left, np.int64)


def _sample_isolating_failures(
    ops: Backend, requests: Sequence[Request], logits: Array, failed: dict[Request, WorkerError]
) -> SamplerOutput:
    """Some row has nothing to choose from: find out whose, so that the others go on."""
    sampled, at = SamplerOutput([], failed=failed), 0
    for request in requests:
        rows = sample_rows(request)
        own = logits[at : at + len(rows)]
        at += len(rows)
        try:
            one = SamplerOutput(ops.sample(own, rows).tolist())
            if request.params.logprobs is not None:
                _add_logprobs(ops, [request], own, one)
        except InferenceError as error:
            sampled.failed[request] = error
            continue
        sampled.tokens += one.tokens
        sampled.logprobs |= one.logprobs
    return sampled


def _add_logprobs(ops: Backend, requests: Sequence[Request], logits: Array, sampled: SamplerOutput) -> None:
    at = 0
    for request in requests:
        count, k = 1 + len(request.drafts), request.params.logprobs
        if k is not None:
            part = slice(at, at + count)
            sampled.logprobs[request] = token_logprobs(ops, logits[part], sampled.tokens[part], k)
        at += count


def token_logprobs(ops: Backend, logits: Array, tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of the given tokens under their rows of raw logits, with the k likeliest beside each."""
    found = ops.logprobs(logits, np.array(tokens, np.int64), k)
    return [
        TokenLogprob(token, float(value), tuple(zip(ids.tolist(), map(float, values), strict=True)))
        for token, value, ids, values in zip(tokens, found.chosen, found.top_ids, found.top, strict=True)
    ]
