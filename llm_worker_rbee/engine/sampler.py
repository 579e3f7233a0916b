"""Logits -> tokens for all requests of a step: the sample row of each, penalties, log-probabilities, failures.

A draft is verified by sampling the token that follows it as if it had been accepted: draws are keyed by position, so
the tokens up to the first wrong draft are the tokens that plain decoding samples. A step that follows one in flight is
sampled before the host knows the token in between: a `pending_id` stands for it among the tokens that penalties cover.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..backends.ops import Array, Backend, Ints, Logprobs, SampleRow, TokenMask, pending_id
from ..errors import InferenceError, WorkerError
from ..sampling_params import SamplingParams, TokenLogprob
from .request import Request, SamplerOutput, ScheduledTokens

SEED_BITS = 53  # survives a JSON reader that keeps numbers as doubles
# What a row copies from the parameters as it is: the fields that both have, by the same name and type.
COPIED_PARAMS = tuple(
    name
    for name in SampleRow.__dataclass_fields__
    if name in SamplingParams.__dataclass_fields__ and name not in ("logit_bias", "seed")
)


def draw_seed() -> int:
    """Return a seed for a request without one; it is reported, so that the output can be reproduced."""
    return secrets.randbits(SEED_BITS)


def sample(
    ops: Backend, scheduled: Sequence[ScheduledTokens], logits: Array, tokens: list[int] | None = None
) -> SamplerOutput:
    """Sample the tokens of a step, unless it has sampled them; scored prompts get their log-probabilities."""
    if tokens is not None:
        for item in scheduled:
            if item.request.params.logprobs is not None:
                break
        else:
            return SamplerOutput(tokens)
    requests = [request for request, _, stop, _ in scheduled if stop >= len(request.ids)]
    failed: dict[Request, WorkerError] = {}
    if [request for request, _, _, _ in scheduled if request.prompt_logprobs and request.num_unscored_tokens]:
        logits = logits[_score_prompts(ops, scheduled, logits, failed)]
        requests = [request for request in requests if request not in failed]
    if not requests:
        return SamplerOutput([], failed=failed)
    try:
        if tokens is None:
            rows = [row for request in requests for row in masked_rows(request)]
            tokens = ops.sample(logits, rows).tolist()
    except InferenceError:
        return _sample_isolating_failures(ops, requests, logits, failed)
    sampled = SamplerOutput(tokens, failed=failed)
    if [request for request in requests if request.params.logprobs is not None]:
        _add_logprobs(ops, requests, logits, sampled)
    return sampled


def rows_before_logits(scheduled: Sequence[ScheduledTokens]) -> list[SampleRow]:
    """Return the rows that a step may sample itself: none while masks are filled, or where a prompt is scored."""
    rows: list[SampleRow] = []
    for request, _, stop, _ in scheduled:
        if request.constraint is not None or (request.prompt_logprobs and request.num_unscored_tokens):
            return []
        if stop >= len(request.ids):
            rows += sample_rows(request) if request.drafts else (next_row(request),)
    return rows


def masked_rows(request: Request) -> list[SampleRow]:
    """Return `sample_rows` with the filled masks of the request's grammar."""
    rows = sample_rows(request)
    if request.constraint is not None:
        for row, mask in zip(rows, request.constraint.masks, strict=True):
            row.mask = mask
    return rows


def sample_rows(request: Request) -> list[SampleRow]:
    """Return the sample rows of the next token and of the token after each draft."""
    row = next_row(request)
    if not request.drafts:
        return [row]
    rows = []
    for i in range(len(request.drafts) + 1):
        copy = replace(row)
        copy.packed = row.packed
        _update_row(copy, request, request.drafts[:i])
        rows.append(copy)
    return rows


def next_row(request: Request) -> SampleRow:
    """Return the sample row of the next token, after the token in flight if there is one; the next call changes it."""
    row = request.sample_row = request.sample_row or _new_row(request)
    _update_row(row, request, () if request.pending_row < 0 else (pending_id(request.pending_row),))
    return row


def _new_row(request: Request) -> SampleRow:
    p = request.params
    return SampleRow(
        **{name: getattr(p, name) for name in COPIED_PARAMS},
        logit_bias=tuple(p.logit_bias.items()),
        seed=request.seed,
        sample_index=request.sample_index,
    )


def _update_row(row: SampleRow, request: Request, following: Sequence[int]) -> None:
    """Set the position of the next token, which keys its draw, and the tokens that penalties look at.

    `following`: drafts, or a pending id, that come after the tokens of the request.
    """
    row.position = len(request.ids) + len(following)
    row.mask = None
    last_n = row.repetition_penalty != 1.0 and request.params.repeat_last_n
    counts_output = row.presence_penalty or row.frequency_penalty
    if not (last_n or counts_output):
        return
    history = request.history = request.history or TokenHistory()
    ids = history.extend(request.ids, following)
    if last_n:
        row.penalty_window = ids[-last_n:]
    if counts_output:
        row.output_ids = ids[request.num_prompt_tokens :]


class TokenHistory:
    """The tokens of a request as an array that grows with it: a step converts only the new ones."""

    def __init__(self) -> None:
        self._ids: Ints = np.empty(256, np.int64)
        self._known = 0

    def extend(self, ids: list[int], following: Sequence[int]) -> Ints:
        """Return the tokens and the following ones; the next call changes the array."""
        known, total = len(ids), len(ids) + len(following)
        if total > len(self._ids):
            self._ids, self._known = np.empty(2 * total, np.int64), 0
        for i in range(self._known, known):  # one, mostly
            self._ids[i] = ids[i]
        for i, token in enumerate(following, known):
            self._ids[i] = token
        self._known = known
        return self._ids[:total]


def _score_prompts(
    ops: Backend, scheduled: Sequence[ScheduledTokens], logits: Array, failed: dict[Request, WorkerError]
) -> Ints:
    """Extend `prompt_logprobs`; return the rows of the logits that are left, from which tokens are sampled."""
    at = 0
    rows_left: list[int] = []
    for request, _, stop, logits_from in scheduled:
        rows = stop - logits_from
        scored = max(0, min(stop, request.num_prompt_tokens - 1) - logits_from) if request.num_unscored_tokens else 0
        if scored:
            following = request.prompt[logits_from + 1 : logits_from + 1 + scored]
            assert request.prompt_logprobs is not None
            k = request.params.logprobs or 0
            try:
                request.prompt_logprobs += token_logprobs(ops, logits[at : at + scored], following, k)
            except InferenceError as error:
                failed[request] = error
        if request not in failed:
            rows_left += range(at + scored, at + rows)
        at += rows
    return np.array(rows_left, np.int64)


def _sample_isolating_failures(
    ops: Backend, requests: Sequence[Request], logits: Array, failed: dict[Request, WorkerError]
) -> SamplerOutput:
    """Sample request by request, because a row has no finite logit: only its request fails."""
    sampled, at = SamplerOutput([], failed=failed), 0
    for request in requests:
        rows = masked_rows(request)
        own = logits[at : at + len(rows)]
        at += len(rows)
        try:
            output = SamplerOutput(ops.sample(own, rows).tolist())
            if request.params.logprobs is not None:
                _add_logprobs(ops, [request], own, output)
        except InferenceError as error:
            sampled.failed[request] = error
            continue
        sampled.tokens += output.tokens
        sampled.logprobs |= output.logprobs
    return sampled


def _add_logprobs(ops: Backend, requests: Sequence[Request], logits: Array, sampled: SamplerOutput) -> None:
    at = 0
    for request in requests:
        count, k = 1 + len(request.drafts), request.params.logprobs
        if k is not None:
            part = slice(at, at + count)
            is_masked = request.constraint is not None and request.params.logprobs_mode == "masked"
            masks = request.constraint.masks if is_masked else None
            sampled.logprobs[request] = token_logprobs(ops, logits[part], sampled.tokens[part], k, masks)
        at += count


def token_logprobs(
    ops: Backend, logits: Array, tokens: Sequence[int], k: int, masks: Sequence[TokenMask | None] | None = None
) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens under their rows of raw logits, each with its row's k most probable ones.

    With masks they cover only allowed tokens.
    """
    return collect_logprobs(tokens, ops.logprobs(logits, np.array(tokens, np.int64), k, masks))


def collect_logprobs(tokens: Sequence[int], logprobs: Logprobs) -> list[TokenLogprob]:
    """Return the records of tokens with a backend's log-probabilities."""
    return [
        TokenLogprob(token, float(value), _possible(zip(ids.tolist(), map(float, values), strict=True)))
        for token, value, ids, values in zip(tokens, logprobs.chosen, logprobs.top_ids, logprobs.top, strict=True)
    ]


def _possible(top: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Leave out tokens of probability 0, which a mask does not allow."""
    return tuple(pair for pair in top if pair[1] > -math.inf)
