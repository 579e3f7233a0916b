"""The specification of sampling: one row of logits -> the next token, in NumPy. Every backend keeps this order:

1. `logit_bias` is added; 2. repetition penalty (each token among the last `repeat_last_n`, prompt included: a positive
logit is divided by it, a negative one multiplied), then presence and frequency penalties (over output tokens only);
3. temperature 0 takes the largest logit (the lowest id among equals) and ends here, otherwise logits are divided by the
temperature; 4. top-k, typical-p, top-p, min-p, each on the softmax of the remaining candidates; 5. one uniform
number from Philox4x32-10, keyed by (seed, sample index, position), selects from the cumulative sum in id order.
What the mask of a row does not allow counts as -inf throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InferenceError
from .ops import Ints, Logprobs, SampleRow, TokenMask

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
MASK = 0xFFFFFFFF
MAX_LOGIT = 1e300  # keeps a penalized logit finite


def sample_row(logits: Floats, row: SampleRow) -> int:
    """Return the next token of one request."""
    logits = apply_mask(logits, row.mask)
    require_finite(logits)
    adjusted = apply_mask(penalize(logits.astype(np.float64), row), row.mask)  # a penalized -inf is clipped
    if row.temperature == 0:
        return int(np.argmax(adjusted))
    with np.errstate(over="ignore"):  # a tiny temperature: all but the largest become -inf
        scaled = (adjusted - adjusted.max()) / row.temperature
    kept = np.flatnonzero(keep_mask(scaled, row))
    cumulative = np.cumsum(_softmax(scaled[kept]))
    point = uniform(row.seed, row.sample_index, row.position) * cumulative[-1]
    return int(kept[min(np.searchsorted(cumulative, point, side="right"), len(kept) - 1)])


def apply_mask(logits: NDArray[Any], mask: TokenMask | None) -> NDArray[Any]:
    """Return the logits of a row with -inf for tokens that the mask does not allow."""
    if mask is None:
        return logits
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little", count=logits.size)
    return np.where(bits, logits, logits.dtype.type(-np.inf))


def require_finite(logits: Floats) -> None:
    """Raise if a row has a NaN or an infinite maximum: no token can be sampled from it."""
    if logits.size and not np.isfinite(logits.max(axis=-1)).all():
        raise InferenceError(
            "the model computed NaN or infinite logits: its weights are damaged, or too large for float32"
        )


def penalize(logits: Doubles, row: SampleRow) -> Doubles:
    """Apply bias and penalties in place."""
    for token, bias in row.logit_bias:
        logits[token] += bias
    if row.repetition_penalty != 1.0 and row.penalty_window.size:
        seen = np.unique(row.penalty_window)
        values = logits[seen]
        with np.errstate(over="ignore"):  # a tiny penalty makes a seen token certain
            scaled = np.where(values > 0, values / row.repetition_penalty, values * row.repetition_penalty)
        logits[seen] = np.clip(scaled, -MAX_LOGIT, MAX_LOGIT)
    if (row.presence_penalty or row.frequency_penalty) and row.output_ids.size:
        seen, counts = np.unique(row.output_ids, return_counts=True)
        logits[seen] -= row.presence_penalty + row.frequency_penalty * counts
    return logits


def keep_mask(scaled: Doubles, row: SampleRow) -> NDArray[np.bool_]:
    """Return the mask of candidates after top-k, typical-p, top-p and min-p; at least one remains."""
    keep = np.isfinite(scaled)
    if not keep.any():
        keep[int(np.argmax(scaled))] = True
    if 0 < row.top_k < scaled.size:
        best = np.argsort(np.where(keep, -scaled, np.inf), kind="stable")[: row.top_k]
        keep &= _mask_of(best, scaled.size)
    if row.typical_p < 1.0:
        keep = _keep_until(scaled, keep, row.typical_p, by_surprise=True)
    if row.top_p < 1.0:
        keep = _keep_until(scaled, keep, row.top_p, by_surprise=False)
    if row.min_p > 0.0:
        probs = _masked_softmax(scaled, keep)
        keep &= probs >= row.min_p * probs.max()
    return keep


def _keep_until(scaled: Doubles, keep: NDArray[np.bool_], mass: float, *, by_surprise: bool) -> NDArray[np.bool_]:
    """Keep the fewest tokens whose probabilities add up to `mass`, likeliest first, or nearest to the entropy first."""
    probs = _masked_softmax(scaled, keep)
    if by_surprise:
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(probs)
            entropy = np.nansum(np.where(probs > 0, probs * surprise, 0.0))
            order = np.argsort(np.where(probs > 0, np.abs(surprise - entropy), np.inf), kind="stable")
    else:
        order = np.argsort(-probs, kind="stable")
    total = np.cumsum(probs[order])
    count = int(np.searchsorted(total, mass, side="left")) + 1
    return keep & _mask_of(order[:count], scaled.size)


def _mask_of(index: NDArray[np.intp], size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    mask[index] = True
    return mask


def _masked_softmax(scaled: Doubles, keep: NDArray[np.bool_]) -> Doubles:
    return _softmax(np.where(keep, scaled, -np.inf))


def _softmax(x: Doubles) -> Doubles:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum(), np.float64)


def logprobs(raw_logits: Floats, chosen: Ints, k: int, masks: Sequence[TokenMask | None] | None = None) -> Logprobs:
    """Return the log-softmax of raw logits at `chosen`, and the k likeliest of each row (ties: lowest id first).

    With masks it is over the tokens that they allow.
    """
    k = min(k, raw_logits.shape[-1])
    if masks is not None and len(raw_logits):
        raw_logits = np.stack([apply_mask(line, mask) for line, mask in zip(raw_logits, masks, strict=True)])
    require_finite(raw_logits)
    wide = raw_logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    top_ids = np.stack([_top(line, k) for line in wide]) if len(wide) else np.empty((0, k), np.int64)
    lines = np.arange(len(wide))
    return Logprobs(wide[lines, chosen].astype(np.float32), top_ids, wide[lines[:, None], top_ids].astype(np.float32))


def _top(line: Doubles, k: int) -> Ints:
    """Return the k largest, best first; only values not below the k-th are sorted."""
    if k == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(line, -k)[-k]
    candidates = np.flatnonzero(line >= threshold)
    return candidates[np.argsort(-line[candidates], kind="stable")][:k].astype(np.int64)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) that depends on its arguments only."""
    high, low, _, _ = philox4x32((position & MASK, sample_index & MASK, position >> 32, 0), (seed & MASK, seed >> 32))
    return ((high << 21) | (low >> 11)) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four 32-bit numbers for a counter and a key: Philox4x32, 10 rounds (Salmon et al., 2011)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3
