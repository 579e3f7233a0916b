"""Sampling on the device: the same tokens as `../reference_sampling.py`.

Logits stay on the device: only ids (and the k likeliest, where requested) come to the host. An undecided row
(sampling_kernels.py) is copied to the host and sampled by the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import reference_sampling
from ..ops import Ints, Logprobs, SampleRow
from .device import upload
from .sampling_kernels import NUM_INTS, argmax_rows, logprob_rows, sample_rows

SCRATCH_BYTES = 64 << 20  # of float64 rows at a time
MAX_SCANNED = 32  # likeliest tokens that are found one by one; more of them are sorted
LIST_TILE = 256  # tokens of a bias or penalty list per iteration
_int_fields = attrgetter("top_k", "seed", "sample_index", "position")
_float_fields = attrgetter(
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Ints:
    """Return one token per row: (N, vocabulary) on the device -> (N,) on the host."""
    assert len(logits) == len(rows), "one SampleRow per row of logits"
    if not rows:
        return np.empty(0, np.int64)
    tokens = to_host(sample_on_device(logits, rows)).astype(np.int64)
    for i in np.flatnonzero(tokens < 0).tolist():  # undecided; or not finite, which the reference raises for
        tokens[i] = reference_sampling.sample_row(logits[i].cpu().numpy(), rows[i])
    return tokens


def sample_on_device(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Return the tokens on the device, without waiting for them; negative where a row is undecided or not finite."""
    logits = _row_major(logits)
    if not any(row.temperature or row.has_penalties for row in rows):
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        argmax_rows[(len(out),)](logits, logits.stride(0), out, logits.shape[1], _block_size(logits), num_warps=16)
        return out
    step = max(1, SCRATCH_BYTES // (16 * logits.shape[1]))
    slices = [slice(first, first + step) for first in range(0, len(logits), step)]
    return torch.cat([_sample_slice(logits[part], rows[part]) for part in slices])


class PendingSample:
    """Sampled tokens on the device, being copied to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self._is_on_host = tokens.device.type == "cpu"
        if not self._is_on_host:
            self._pinned = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._pinned.copy_(tokens, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def result(self) -> list[int] | None:
        """Wait for the tokens; None if a row is undecided or not finite: `sample` resolves it."""
        if not self._is_on_host:
            self._arrival.synchronize()
        found: list[int] = (self.tokens if self._is_on_host else self._pinned).tolist()
        return None if min(found) < 0 else found


def _sample_slice(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    count, vocabulary = logits.shape
    words = np.array([_int_fields(row) for row in rows], np.uint64)
    np.minimum(words[:, 0], vocabulary, out=words[:, 0])
    ints = np.zeros((count, NUM_INTS.value), np.int32)
    ints[:, :8] = words.view(np.int32)
    floats = np.array([_float_fields(row) for row in rows], np.float64)
    ids, biases = _token_lists(rows, ints)
    sent = _upload_together([floats, biases, ints, ids], logits.device)
    block = _block_size(logits)
    scratch = torch.empty((count, 2, vocabulary), dtype=torch.float64, device=logits.device)
    candidates = torch.empty((count, 2, block), dtype=torch.float64, device=logits.device)
    out = torch.empty(count, dtype=torch.int32, device=logits.device)
    sample_rows[(count,)](
        logits, logits.stride(0), sent[2], sent[0], sent[3], sent[1], scratch, candidates, out, vocabulary,
        BLOCK=block, LIST_TILE=LIST_TILE, num_warps=32, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _token_lists(rows: Sequence[SampleRow], ints: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return the tokens of all bias and penalty lists, and the biases; write the offsets of each row into `ints`."""
    lists: list[NDArray[Any]] = [np.zeros(1, np.int64)]
    biases, first = [0.0], 1
    for i, row in enumerate(rows):
        if not row.has_penalties:
            continue
        bias: dict[int, float] = {}
        for token, value in row.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        window = row.penalty_window if row.repetition_penalty != 1.0 else row.penalty_window[:0]
        output = row.output_ids if row.presence_penalty or row.frequency_penalty else row.output_ids[:0]
        second, third = first + len(bias), first + len(bias) + len(window)
        ints[i, 8:] = first, second, third, third + len(output), len(biases)
        lists += [np.fromiter(bias, np.int64, len(bias)), window, output]
        biases += bias.values()
        first = third + len(output)
    return np.concatenate(lists).astype(np.int32), np.array(biases)


def _upload_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Upload several arrays in one copy. Each begins at 16 bytes: another alignment would compile another kernel."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    starts = np.cumsum([0, *(-(-words.size // 4) * 4 for words in flat)]).tolist()
    block = np.zeros(starts[-1], np.int32)
    for start, words in zip(starts, flat, strict=False):
        block[start : start + words.size] = words
    uploaded = upload(block, device)
    pieces = [uploaded[start : start + words.size] for start, words in zip(starts, flat, strict=False)]
    return [
        piece.view(torch.float64) if array.dtype == np.float64 else piece
        for piece, array in zip(pieces, arrays, strict=True)
    ]


def logprobs(logits: torch.Tensor, chosen: Ints, k: int) -> Logprobs:
    """Return log-softmax of the raw logits: at the chosen tokens, and the k likeliest of each row, lowest id first."""
    rows, k = len(logits), min(k, logits.shape[-1])
    if not rows:
        return Logprobs(np.empty(0, np.float32), np.empty((0, k), np.int64), np.empty((0, k), np.float32))
    logits, scanned = _row_major(logits), k if k <= MAX_SCANNED else 0
    out = torch.empty((rows, 1 + scanned), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((rows, scanned), dtype=torch.int32, device=logits.device)
    logprob_rows[(rows,)](
        logits, logits.stride(0), upload(chosen, logits.device), out, top_ids, logits.shape[1], scanned,
        BLOCK=_block_size(logits), num_warps=16,
    )  # fmt: skip
    found = to_host(out)
    if np.isnan(found[:, 0]).any():
        reference_sampling.require_finite(np.full((1, 1), np.nan, np.float32))
    if scanned == k:
        return Logprobs(found[:, 0].copy(), to_host(top_ids).astype(np.int64), found[:, 1:].copy())
    return Logprobs(found[:, 0].copy(), *_sorted_logprobs(logits, k))


def _sorted_logprobs(logits: torch.Tensor, k: int) -> tuple[Ints, NDArray[np.float32]]:
    """Return the k likeliest, a row at a time: float64 logits of a whole prompt would not fit."""
    ids, values = [], []
    for line in logits:
        wide = torch.log_softmax(line.double(), dim=-1)
        best, order = torch.sort(wide, descending=True, stable=True)
        ids.append(order[:k])
        values.append(best[:k].float())
    return to_host(torch.stack(ids)).astype(np.int64), to_host(torch.stack(values))


def to_host(x: torch.Tensor) -> NDArray[Any]:
    """Copy a small tensor to the host through pinned memory, with one wait."""
    if x.device.type == "cpu":
        return np.asarray(x.numpy())
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return np.asarray(pinned.numpy())


def _row_major(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _block_size(logits: torch.Tensor) -> int:
    return 4096 if logits.shape[1] >= 4096 else 1024
