"""Sampling on the device: the same tokens as `../reference_sampling.py`.

Logits stay on the device: only ids and log-probabilities (where requested) come to the host, in one copy. An undecided
row (kernels/sampling.py) is copied to the host and sampled by the reference. `sample_async` waits for nothing: the
token that penalties and log-probabilities need may be on the device only. The fields of a row that never change are
packed once, when it is first sampled. Masks of allowed tokens are copied to the device as they are, one bit per token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import reference_sampling
from ..ops import NO_TOKENS, Ints, Logprobs, SampleRow, TokenMask, pending_id
from .device import num_multiprocessors, upload
from .kernels.sampling import NUM_INTS, argmax_rows, logprob_rows, sample_rows

MAX_SCANNED = 32  # likeliest tokens that are found one by one; more of them are sorted
LIST_TILE = 256  # tokens of a bias or penalty list per iteration
INTERPRETED_PROGRAMS = 4  # under the interpreter, which has no multiprocessors
ALIGNMENT = 4  # int32: 16 bytes. Another alignment would compile another kernel
Wanted = tuple[int, int, bool]  # log-probabilities: the row, how many of the likeliest, whether its mask applies
PACKED_ROW = struct.Struct("<7d4Q")  # `_constant_fields`, then the number of biases
FLOAT_FIELDS = "temperature top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty"
_constant_fields = attrgetter(*FLOAT_FIELDS.split(), "top_k", "seed", "sample_index")


def sample(raw_logits: torch.Tensor, rows: Sequence[SampleRow]) -> Ints:
    """Return one token per row: (N, vocabulary) on the device -> (N,) on the host."""
    assert len(raw_logits) == len(rows), "one SampleRow per row of logits"
    if not rows:
        return np.empty(0, np.int64)
    tokens = to_host(sample_on_device(raw_logits, rows)).astype(np.int64)
    for i in np.flatnonzero(tokens < 0).tolist():  # undecided; or not finite, which the reference raises for
        tokens[i] = reference_sampling.sample_row(raw_logits[i].cpu().numpy(), rows[i])
    return tokens


def sample_on_device(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    pending: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    masks: DeviceMasks | None = None,
) -> torch.Tensor:
    """Return the tokens on the device, without waiting for them; negative where a row is undecided or not finite.

    A negative id in the lists of a row, -1 - r, is `pending[r]`. `masks`: the rows' masks, if they are uploaded. The
    scratch is 16 bytes per token of the vocabulary for each multiprocessor, or row if there are fewer: 280 MB for 132
    of them and a vocabulary of 128k.
    """
    logits, device = _row_major(logits), logits.device
    count, vocabulary = logits.shape
    block = _block_size(logits)
    out = torch.empty(count, dtype=torch.int32, device=device) if out is None else out
    masks = masks or upload_masks([row.mask for row in rows], vocabulary, out)
    packed = _pack_rows(rows, vocabulary)
    if packed.is_greedy:
        argmax_rows[(count,)](logits, logits.stride(0), *masks, out, vocabulary, block, num_warps=16)
        return out
    floats, biases, ints, ids = _upload_together([packed.floats, packed.biases, packed.ints, packed.ids], device)
    programs = min(count, _num_programs(device))
    scratch = torch.empty((programs, 2, vocabulary), dtype=torch.float64, device=device)
    candidates = torch.empty((programs, 2, block), dtype=torch.float64, device=device)
    sample_rows[(programs,)](
        logits, logits.stride(0), ints, floats, ids, ids if pending is None else pending, biases, *masks, scratch,
        candidates, out, count, vocabulary, BLOCK=block, LIST_TILE=LIST_TILE, num_warps=32, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def sample_async(
    raw_logits: torch.Tensor, rows: Sequence[SampleRow], pending: torch.Tensor | None = None
) -> PendingSample:
    """Sample, and compute the log-probabilities that rows want, without waiting for either.

    The k likeliest are found one by one whatever k is: a request asks for at most 20.
    """
    vocabulary, device = raw_logits.shape[1], raw_logits.device
    requested = [
        (i, min(row.logprobs, vocabulary), row.logprobs_mode == "masked")
        for i, row in enumerate(rows)
        if row.logprobs is not None
    ]
    results = SampleResults.empty(len(rows), requested, device)
    masks = upload_masks([row.mask for row in rows], vocabulary, results.tokens)
    if rows:
        sample_on_device(raw_logits, rows, pending, results.tokens, masks)
    if requested:
        logits = _row_major(raw_logits)
        sent = upload(np.array(requested, np.int64), device)
        _launch_logprobs(logits, sent, results.tokens, masks, results.values, results.top_ids)
    return PendingSample(results, requested)


class DeviceMasks(NamedTuple):
    """The masks of the rows that have one, as the kernels read them."""

    places: torch.Tensor  # (rows,) where a row's mask is in `words`, -1: it has none
    words: torch.Tensor  # (masks, num_words)
    num_words: int  # of a mask; 0: there are none


def upload_masks(masks: Sequence[TokenMask | None], vocabulary: int, unused: torch.Tensor) -> DeviceMasks:
    """Copy the masks of rows to the device through page-locked memory, without waiting.

    `unused`: integers on that device, whose address kernels get where no row has a mask: they do not read it.
    """
    device, used = unused.device, [mask for mask in masks if mask is not None]
    if not used:
        return DeviceMasks(unused, unused, 0)
    num_words, first = -(-vocabulary // 32), _aligned(len(masks))
    staged = torch.empty(first + len(used) * num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    words = staged.numpy()
    has_mask = np.array([mask is not None for mask in masks])
    words[: len(masks)] = np.where(has_mask, np.cumsum(has_mask) - 1, -1)
    np.concatenate(used, out=words[first:])
    on_device = staged.to(device, non_blocking=True)
    return DeviceMasks(on_device[: len(masks)], on_device[first:], num_words)


def warm_up(vocab_size: int, max_batch: int, device: torch.device) -> None:
    """Run all that sampling launches once, with the scratch of a full batch.

    Filters, penalties and k are values, not variants: nothing is compiled later for this vocabulary.
    """
    logits = torch.zeros((min(max_batch, _num_programs(device)), vocab_size), device=device)
    every_filter = SampleRow(top_k=2, top_p=0.9, min_p=0.1, typical_p=0.9, repetition_penalty=1.1, logprobs=1)
    every_filter.penalty_window = np.array([pending_id(0)])
    greedy = sample_async(logits, [SampleRow(temperature=0.0)] * len(logits))
    every_filter.mask = np.full(-(-vocab_size // 32), -1, np.int32)
    sample_async(logits, [every_filter] * len(logits), greedy.tokens).result()
    # Not `logprobs`, which checks what its kernel stores: nothing, while variants are recorded.
    _sorted_logprobs(logits[np.zeros(1, np.int64)], MAX_SCANNED + 1, [every_filter.mask])


class SampleResults(NamedTuple):
    """What a step samples, as parts of one array of int32: one copy brings all of it to the host."""

    words: torch.Tensor
    tokens: torch.Tensor  # (rows,)
    values: torch.Tensor  # (wanted, 1 + k) float32: log-probabilities of the token and of the k likeliest
    top_ids: torch.Tensor  # (wanted, k)

    @classmethod
    def empty(cls, rows: int, requested: Sequence[Wanted], device: torch.device) -> SampleResults:
        """Allocate room for the tokens, and the log-probabilities that are wanted."""
        k = max((k for _, k, _ in requested), default=0)
        end = _aligned(_aligned(rows) + len(requested) * (1 + k)) + len(requested) * k
        return cls.split(torch.empty(end, dtype=torch.int32, device=device), rows, len(requested), k)

    @classmethod
    def split(cls, words: torch.Tensor, rows: int, count: int, k: int) -> SampleResults:
        first = _aligned(rows)
        second = _aligned(first + count * (1 + k))
        values = words[first : first + count * (1 + k)].view(torch.float32).view(count, 1 + k)
        return cls(words, words[:rows], values, words[second : second + count * k].view(count, k))

    def start_copy(self) -> SampleResults:
        """Return the results in page-locked host memory, which an asynchronous copy fills."""
        words = torch.empty(self.words.shape, dtype=torch.int32, pin_memory=True)
        words.copy_(self.words, non_blocking=True)
        return self.split(words, len(self.tokens), *self.top_ids.shape)


class PendingSample:
    """Sampled tokens on the device, being copied to the host with their log-probabilities."""

    def __init__(self, results: SampleResults, requested: Sequence[Wanted]) -> None:
        self.tokens = results.tokens
        self._wanted, self._arrival, self._on_host = requested, None, results
        if results.words.device.type != "cpu":
            self._on_host = results.start_copy()
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def result(self) -> list[int] | None:
        """Wait for the tokens; None if a row is undecided or not finite: `sample` resolves it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        ids: list[int] = self._on_host.tokens.tolist()
        return None if min(ids, default=0) < 0 else ids

    def logprobs(self) -> dict[int, Logprobs]:
        values, top_ids = self._on_host.values.numpy(), self._on_host.top_ids.numpy().astype(np.int64)
        return {
            row: Logprobs(values[i : i + 1, 0], top_ids[i : i + 1, :k], values[i : i + 1, 1 : 1 + k])
            for i, (row, k, _) in enumerate(self._wanted)
        }


class PackedRows(NamedTuple):
    """The parameters of all rows as the arrays that `sample_rows` reads."""

    ints: NDArray[np.int32]  # (rows, NUM_INTS)
    floats: NDArray[np.float64]  # (rows, NUM_FLOATS)
    ids: NDArray[np.int32]  # of all bias and penalty lists
    biases: NDArray[np.float64]
    is_greedy: bool  # every token is the one with the largest logit


class PackedRow(NamedTuple):
    """The fields of a row that never change; a `SampleRow` keeps it."""

    words: bytes  # PACKED_ROW
    bias_ids: Ints
    biases: NDArray[np.float64]


def _pack_row(row: SampleRow) -> PackedRow:
    bias: dict[int, float] = {}
    for token, value in row.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    words = PACKED_ROW.pack(*_constant_fields(row), len(bias))
    packed = PackedRow(words, np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float64))
    row.packed = packed
    return packed


def _pack_rows(rows: Sequence[SampleRow], vocabulary: int) -> PackedRows:
    """Pack the parameters of rows; work in Python only where a row is new or has lists."""
    words = b"".join([(row.packed or _pack_row(row)).words for row in rows])
    table = np.frombuffer(words, np.uint64).reshape(len(rows), -1)
    floats = table[:, :7].copy().view(np.float64)
    numbers = np.empty((len(rows), 4), np.uint64)
    numbers[:, :3], numbers[:, 3] = table[:, 7:10], [row.position for row in rows]
    np.minimum(numbers[:, 0], vocabulary, out=numbers[:, 0])
    ints = np.zeros((len(rows), NUM_INTS.value), np.int32)
    ints[:, :8] = numbers.view(np.int32)
    has_lists = (floats[:, 4] != 1.0) | floats[:, 5:].any(axis=1) | (table[:, 10] != 0)
    ids, biases = _join_lists(rows, np.flatnonzero(has_lists).tolist(), ints)
    return PackedRows(ints, floats, ids, biases, not (floats[:, 0].any() or len(ids) > 1))


def _join_lists(
    rows: Sequence[SampleRow], listed: Sequence[int], ints: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return the tokens of all bias and penalty lists, and the biases; write the offsets of each row into `ints`."""
    if not listed:
        return np.zeros(1, np.int32), np.zeros(1)
    lists: list[NDArray[Any]] = [np.zeros(1, np.int64)]
    biases: list[NDArray[np.float64]] = [np.zeros(1)]
    for i in listed:
        row = rows[i]
        packed: PackedRow = row.packed
        lists.append(packed.bias_ids)
        lists.append(row.penalty_window if row.repetition_penalty != 1.0 else NO_TOKENS)
        lists.append(row.output_ids if row.presence_penalty or row.frequency_penalty else NO_TOKENS)
        biases.append(packed.biases)
    ends = np.cumsum([len(values) for values in lists])
    ints[listed, 8], ints[listed, 9:12] = ends[:-1:3], ends[1:].reshape(-1, 3)
    ints[listed, 12] = np.cumsum([len(values) for values in biases])[:-1]
    return np.concatenate(lists).astype(np.int32), np.concatenate(biases)


def _upload_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Upload several arrays in one copy. Each begins at 16 bytes."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    starts = np.cumsum([0, *(_aligned(words.size) for words in flat)]).tolist()
    block = np.zeros(starts[-1], np.int32)
    for start, words in zip(starts, flat, strict=False):
        block[start : start + words.size] = words
    uploaded = upload(block, device)
    pieces = [uploaded[start : start + words.size] for start, words in zip(starts, flat, strict=False)]
    return [
        piece.view(torch.float64) if array.dtype == np.float64 else piece
        for piece, array in zip(pieces, arrays, strict=True)
    ]


def logprobs(
    raw_logits: torch.Tensor, chosen: Ints, k: int, masks: Sequence[TokenMask | None] | None = None
) -> Logprobs:
    """Return log-softmax of the raw logits: at the chosen tokens, and the k likeliest of each row, lowest id first.

    Of a row with a mask it is the log-softmax over the tokens that the mask allows."""
    rows, k = len(raw_logits), min(k, raw_logits.shape[-1])
    if not rows:
        return Logprobs(np.empty(0, np.float32), np.empty((0, k), np.int64), np.empty((0, k), np.float32))
    logits, scanned = _row_major(raw_logits), k if k <= MAX_SCANNED else 0
    out = torch.empty((rows, 1 + scanned), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((rows, scanned), dtype=torch.int32, device=logits.device)
    requested = np.stack((np.arange(rows), np.full(rows, scanned), np.ones(rows)), axis=1)
    sent = upload_masks(() if masks is None else masks, logits.shape[1], top_ids)
    _launch_logprobs(logits, upload(requested, logits.device), upload(chosen, logits.device), sent, out, top_ids)
    values = to_host(out)
    if np.isnan(values[:, 0]).any():
        reference_sampling.require_finite(np.full((1, 1), np.nan, np.float32))
    if scanned == k:
        return Logprobs(values[:, 0].copy(), to_host(top_ids).astype(np.int64), values[:, 1:].copy())
    return Logprobs(values[:, 0].copy(), *_sorted_logprobs(logits, k, [None] * rows if masks is None else masks))


def _launch_logprobs(
    logits: torch.Tensor,
    requested: torch.Tensor,
    chosen: torch.Tensor,
    masks: DeviceMasks,
    out: torch.Tensor,
    top_ids: torch.Tensor,
) -> None:
    sizes = logits.shape[1], top_ids.shape[1], _block_size(logits)
    logprob_rows[(len(out),)](logits, logits.stride(0), requested, chosen, *masks, out, top_ids, *sizes, num_warps=16)


def _sorted_logprobs(
    logits: torch.Tensor, k: int, masks: Sequence[TokenMask | None]
) -> tuple[Ints, NDArray[np.float32]]:
    """Return the k likeliest, a row at a time: float64 logits of a whole prompt would not fit."""
    ids, values = [], []
    for line, mask in zip(logits, masks, strict=True):
        wide = line.double()
        if mask is not None:
            forbidden = np.isneginf(reference_sampling.apply_mask(np.zeros(len(line)), mask))
            wide.masked_fill_(upload(forbidden, line.device, torch.bool), -torch.inf)
        wide = torch.log_softmax(wide, dim=-1)
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
    """Return the logits with their rows in one piece, the first at 16 bytes."""
    is_ready = logits.stride(-1) == 1 and logits.data_ptr() % (4 * ALIGNMENT) == 0
    return logits if is_ready else logits.clone(memory_format=torch.contiguous_format)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _block_size(logits: torch.Tensor) -> int:
    return 4096 if logits.shape[1] >= 4096 else 1024


def _num_programs(device: torch.device) -> int:
    """Return the number of multiprocessors: each runs one program of the sampling kernel."""
    if device.type == "cpu":
        return INTERPRETED_PROGRAMS
    return num_multiprocessors(device)
