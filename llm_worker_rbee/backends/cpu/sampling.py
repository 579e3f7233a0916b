"""How the next token is chosen, fast: the same tokens as `../sampling.py`, which says what they are and in which order.

Kernels find the candidates (candidates.py), filter them and draw (filters.py). They add up chances in another order
than the meaning does, so the last digits differ: where a decision is so close that it might come out otherwise they
say UNSURE, and the meaning itself is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from .. import sampling as meaning
from ..types import Ints, Logprobs, SampleRow
from .candidates import NARROW, NOT_FINITE, WIDE, greedy, log_chances
from .compile import Called
from .filters import finish, uniform

Floats = NDArray[np.float32]


def sample(logits: Floats, rows: Sequence[SampleRow]) -> Ints:
    """One token for each row: (N, vocabulary) -> (N,)."""
    return np.array([sample_row(line, row) for line, row in zip(logits, rows, strict=True)], np.int64)


def sample_row(logits: Floats, row: SampleRow) -> int:
    """The next token of one request."""
    changed = _is_changed(row)
    if changed:
        meaning.require_finite(logits)
        adjusted = meaning.penalize(logits.astype(np.float64), row)
        token = int(adjusted.argmax()) if row.temperature == 0 else _drawn(WIDE, adjusted, row)
    else:
        x = np.ascontiguousarray(logits)
        token = greedy(x) if row.temperature == 0 else _drawn(NARROW, x, row)
    if token == NOT_FINITE:
        meaning.require_finite(logits)
    return token if token >= 0 else meaning.sample_row(logits, row)


def _drawn(find: Any, x: NDArray[Any], row: SampleRow) -> int:
    ids, s = np.empty(x.size, np.int64), np.empty(x.size)
    heat, mass, typical, least = map(float, (row.temperature, row.top_p, row.typical_p, row.min_p))
    point = uniform(np.uint64(row.seed), row.choice, row.position)
    token, count, total, center, reach = find(x, heat, row.top_k, mass, least, typical, point, ids, s)
    if count <= 0:
        return int(token)
    return int(finish(ids[:count], s[:count], total, center, reach, mass, least, typical, point))


def _is_changed(row: SampleRow) -> bool:
    """Whether bias or penalties change a logit."""
    counted = (row.presence_penalty or row.frequency_penalty) and row.generated.size
    return bool(row.bias or counted or (row.repetition_penalty != 1.0 and row.recent.size))


def logprobs(logits: Floats, chosen: Ints, k: int) -> Logprobs:
    """Log-softmax of the raw logits: at the chosen tokens, and the k likeliest of each row (ties: lowest id first)."""
    rows, k = len(logits), min(k, logits.shape[-1])
    found = np.empty(rows, np.float32)
    top_ids, top = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    logits = np.ascontiguousarray(logits)
    for i, token in enumerate(chosen.tolist()):
        found[i] = log_chances(logits[i], token, k, top_ids[i], top[i])
        if found[i] != found[i]:
            meaning.require_finite(logits[i])
    return Logprobs(found, top_ids, top)


_NARROWS, _WIDES, _IDS = nb.float32[::1], nb.float64[::1], nb.int64[::1]
_ONE, _WHOLE = nb.float64, nb.int64
CALLED = (
    Called(greedy, _NARROWS),
    Called(uniform, nb.uint64, _WHOLE, _WHOLE),
    *(Called(find, x, _ONE, _WHOLE, *[_ONE] * 4, _IDS, _WIDES) for find, x in ((NARROW, _NARROWS), (WIDE, _WIDES))),
    Called(finish, _IDS, _WIDES, *[_ONE] * 7),
    Called(log_chances, _NARROWS, _WHOLE, _WHOLE, _IDS, _NARROWS),
)
