"""How the next token is chosen on the device: the same tokens as `../sampling.py`, which says what is meant.

Logits stay where they are: only ids (and the k likeliest, where they are asked for) come to the host. A row whose
decision is too close for sums in another order (filters.py) is brought to the host, and the meaning is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import reference_sampling as meaning
from ..ops import Ints, Logprobs, SampleRow
from . import device
from .sampling_kernels import NOT_FINITE, choose, greedy, score

SCRATCH = 64 << 20  # bytes of chances at a time; rows beyond that wait for their turn
FEW = 32  # likeliest tokens that are found one after the other; more of them are sorted
SOME = 256  # listed tokens that a program takes at once
_wholes = attrgetter("top_k", "seed", "choice", "position")
_reals = attrgetter(
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)
WHOLE = 13  # integers of a row, as choosing.py reads them


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Ints:
    """One token for each row: (N, vocabulary) on the device -> (N,) on the host."""
    assert len(logits) == len(rows), "each row of logits has its settings"
    if not rows:
        return np.empty(0, np.int64)
    logits = _in_rows(logits)
    is_changed = [_is_changed(row) for row in rows]
    if any(is_changed) or any(row.temperature for row in rows):
        tokens = np.concatenate([_chosen(logits, rows, is_changed, part) for part in _parts(logits)])
    else:
        tokens = _greedy(logits)
    if tokens.min() < 0:
        _ask(logits, rows, tokens)
    return tokens


class Later:
    """Tokens that are on the device, on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self._is_here = tokens.device.type == "cpu"
        if not self._is_here:
            self._pinned = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._pinned.copy_(tokens, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def result(self) -> list[int] | None:
        """On the host; None where some choice is too close, or there is none: `sample` knows more."""
        if not self._is_here:
            self._arrival.synchronize()
        found: list[int] = (self.tokens if self._is_here else self._pinned).tolist()
        return None if min(found) < 0 else found


def sample_later(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Later:
    """The same without waiting; the tokens can be fed to the next step before anybody has seen them."""
    logits = _in_rows(logits)
    is_changed = [_is_changed(row) for row in rows]
    if any(is_changed) or any(row.temperature for row in rows):
        return Later(torch.cat([_choice(logits, rows, is_changed, part) for part in _parts(logits)]))
    return Later(_likeliest(logits))


def _ask(logits: torch.Tensor, rows: Sequence[SampleRow], tokens: Ints) -> None:
    """What the kernels left open."""
    for i in np.flatnonzero(tokens < 0).tolist():
        line = logits[i].cpu().numpy()
        if tokens[i] == NOT_FINITE:
            meaning.require_finite(line)
        tokens[i] = meaning.sample_row(line, rows[i])


def _greedy(logits: torch.Tensor) -> Ints:
    return to_host(_likeliest(logits)).astype(np.int64)


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    greedy[(len(logits),)](logits, logits.stride(0), out, logits.shape[1], BLOCK=_block(logits), num_warps=16)
    return out


def _parts(logits: torch.Tensor) -> list[slice]:
    """Rows whose chances fit into SCRATCH together."""
    most = max(1, SCRATCH // (16 * logits.shape[1]))
    return [slice(at, at + most) for at in range(0, len(logits), most)]


def _chosen(logits: torch.Tensor, rows: Sequence[SampleRow], is_changed: list[bool], part: slice) -> Ints:
    return to_host(_choice(logits, rows, is_changed, part)).astype(np.int64)


def _choice(logits: torch.Tensor, rows: Sequence[SampleRow], is_changed: list[bool], part: slice) -> torch.Tensor:
    """The kernels' choice, or what they say of a row."""
    logits, rows = logits[part], rows[part]
    count, vocabulary = logits.shape
    words = np.array([_wholes(row) for row in rows], np.uint64)
    np.minimum(words[:, 0], vocabulary, out=words[:, 0])
    whole = np.zeros((count, WHOLE), np.int32)
    whole[:, :8] = words.view(np.int32)
    real = np.array([_reals(row) for row in rows], np.float64)
    ids, biases = _listed(rows, is_changed[part], whole)
    sent = _sent(real, biases, whole, ids)
    block = _block(logits)
    scratch = torch.empty((count, 2, vocabulary), dtype=torch.float64, device=logits.device)
    few = torch.empty((count, 2, block), dtype=torch.float64, device=logits.device)
    out = torch.empty(count, dtype=torch.int32, device=logits.device)
    choose[(count,)](
        logits, logits.stride(0), sent[2], sent[0], sent[3], sent[1], scratch, few, out, vocabulary,
        BLOCK=block, SOME=SOME, num_warps=32, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _listed(
    rows: Sequence[SampleRow], is_changed: list[bool], whole: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The tokens that bias and penalties are about, those of all rows; where each row's are goes into `whole`."""
    lists: list[NDArray[Any]] = [np.zeros(1, np.int64)]
    biases, at = [0.0], 1
    for i in np.flatnonzero(is_changed).tolist():
        row = rows[i]
        bias: dict[int, float] = {}
        for token, value in row.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        recent = row.penalty_window if row.repetition_penalty != 1.0 else row.penalty_window[:0]
        made = row.output_ids if row.presence_penalty or row.frequency_penalty else row.output_ids[:0]
        second, third = at + len(bias), at + len(bias) + len(recent)
        whole[i, 8:] = at, second, third, third + len(made), len(biases)
        lists += [np.fromiter(bias, np.int64, len(bias)), recent, made]
        biases += bias.values()
        at = third + len(made)
    return np.concatenate(lists).astype(np.int32), np.array(biases)


def _sent(*arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Several arrays in one upload. Each begins at 16 bytes: a kernel is compiled anew for another alignment."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    starts = np.cumsum([0, *(-(-words.size // 4) * 4 for words in flat)]).tolist()
    block = np.zeros(starts[-1], np.int32)
    for start, words in zip(starts, flat, strict=False):
        block[start : start + words.size] = words
    there = device.upload(block)
    pieces = [there[start : start + words.size] for start, words in zip(starts, flat, strict=False)]
    return [
        piece.view(torch.float64) if array.dtype == np.float64 else piece
        for piece, array in zip(pieces, arrays, strict=True)
    ]


def _is_changed(row: SampleRow) -> bool:
    """Whether bias or penalties change a logit."""
    counted = (row.presence_penalty or row.frequency_penalty) and row.output_ids.size
    return bool(row.logit_bias or counted or (row.repetition_penalty != 1.0 and row.penalty_window.size))


def logprobs(logits: torch.Tensor, chosen: Ints, k: int) -> Logprobs:
    """Log-softmax of the raw logits: at the chosen tokens, and the k likeliest of each row (ties: lowest id first)."""
    rows, k = len(logits), min(k, logits.shape[-1])
    if not rows:
        return Logprobs(np.empty(0, np.float32), np.empty((0, k), np.int64), np.empty((0, k), np.float32))
    logits, few = _in_rows(logits), k if k <= FEW else 0
    out = torch.empty((rows, 1 + few), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((rows, few), dtype=torch.int32, device=logits.device)
    score[(rows,)](
        logits, logits.stride(0), device.upload(chosen), out, top_ids, logits.shape[1], few,
        BLOCK=_block(logits), num_warps=16,
    )  # fmt: skip
    found = to_host(out)
    if np.isnan(found[:, 0]).any():
        meaning.require_finite(np.full((1, 1), np.nan, np.float32))
    if few == k:
        return Logprobs(found[:, 0].copy(), to_host(top_ids).astype(np.int64), found[:, 1:].copy())
    return Logprobs(found[:, 0].copy(), *_sorted(logits, k))


def _sorted(logits: torch.Tensor, k: int) -> tuple[Ints, NDArray[np.float32]]:
    """Many of the likeliest, a row at a time: float64 of a whole prompt's logits would not fit."""
    ids, values = [], []
    for line in logits:
        wide = torch.log_softmax(line.double(), dim=-1)
        best, order = torch.sort(wide, descending=True, stable=True)
        ids.append(order[:k])
        values.append(best[:k].float())
    return to_host(torch.stack(ids)).astype(np.int64), to_host(torch.stack(values))


def to_host(x: torch.Tensor) -> NDArray[Any]:
    """A small tensor as a NumPy array: through pinned memory, which takes one wait."""
    if x.device.type == "cpu":
        return np.asarray(x.numpy())
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return np.asarray(pinned.numpy())


def _in_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _block(logits: torch.Tensor) -> int:
    return 4096 if logits.shape[1] >= 4096 else 1024
