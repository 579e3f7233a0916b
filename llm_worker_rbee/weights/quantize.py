"""Quantize float32 values into GGML blocks, for the types that `convert` writes; many tensors at once, on all cores.

Encoders map (blocks, block_size) float32 to (blocks, block_bytes) uint8; layouts as in `quants.decoders`. Plain types
and Q4_0 .. Q8_0 follow the rule that defines them (the largest value sets the scale; codes are made with the float32
scale, before it is rounded to float16) and give the same bytes as ggml. K types search their scales, so their bytes
differ from ggml's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import machine
from ..errors import ModelFileError, UnsupportedModelError
from .checkpoint import Tensor
from .quants import BlockType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Progress = Callable[[str, int, int | None], None]  # activity, bytes written, total bytes

MIN_F16 = np.float32(2.0**-24)
MIN_NORMAL = np.float32(2.0**-126)  # smaller values have no float32 reciprocal, and are 0 in float16


def reciprocal(values: Floats) -> Floats:
    """Return 1 / values, and 0 where that is not finite."""
    return np.where(np.abs(values) < MIN_NORMAL, np.float32(0), np.float32(1) / values)


def round_to_f16(values: Floats) -> Floats:
    """Return the float32 that a float16 field is read back as; the smallest float16 instead of an underflow to 0."""
    half = values.astype(np.float16).astype(np.float32)
    return np.where((half == 0) & (values != 0), np.copysign(MIN_F16, values), half)


def f16_bytes(values: Floats) -> Bytes:
    """Return float16 fields: (blocks,) or (blocks, n) -> (blocks, 2n)."""
    return values.astype("<f2").reshape(len(values), -1).view(np.uint8)


def pack_bits(codes: Bytes, width: int, bits: int) -> Bytes:
    """Invert `quants.basic.unpack_bits`: each run of `width` bytes takes 8/bits runs of `width` codes."""
    blocks, count = codes.shape
    steps = 8 // bits
    runs = codes.reshape(blocks, count // (width * steps), steps, width)
    out = runs[:, :, 0].copy()
    for step in range(1, steps):  # NumPy's uint8 << has no SIMD loop
        out |= runs[:, :, step] * np.uint8(1 << (step * bits))
    return out.reshape(blocks, count // steps)


def f32(blocks: Floats) -> Bytes:
    """Return the float32 bytes."""
    return blocks.astype("<f4", copy=False).view(np.uint8)


def f16(blocks: Floats) -> Bytes:
    """Round to the nearest float16, ties to even."""
    return blocks.astype("<f2").view(np.uint8)


def bf16(blocks: Floats) -> Bytes:
    """Round to the upper half of the float32, nearest, ties to even."""
    wide = blocks.view(np.uint32)
    rounded = wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8)


def _signed_peak(blocks: Floats) -> Floats:
    """Return the value of largest magnitude, with its sign; the first of equals: (blocks, 1)."""
    return np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)


def _round_codes(scaled: Floats, offset: float, top: int) -> Bytes:
    """Return codes from 0 to `top`; halves round up."""
    scaled += np.float32(offset + 0.5)
    return np.minimum(scaled, np.float32(top)).astype(np.uint8)


def symmetric(blocks: Floats, bits: int) -> Bytes:
    """Q4_0, Q5_0: x = d * (q - half_range). The peak gets code 0: there is one more code below zero than above."""
    half_range = 1 << (bits - 1)
    d = _signed_peak(blocks) / np.float32(-half_range)
    codes = _round_codes(blocks * reciprocal(d), half_range, 2 * half_range - 1)
    return np.concatenate([f16_bytes(d), *_pack_codes(codes, bits)], axis=1)


def from_minimum(blocks: Floats, bits: int) -> Bytes:
    """Q4_1, Q5_1: x = d * q + m."""
    top = (1 << bits) - 1
    m = blocks.min(axis=1, keepdims=True)
    d = (blocks.max(axis=1, keepdims=True) - m) / np.float32(top)
    codes = _round_codes((blocks - m) * reciprocal(d), 0, top)
    return np.concatenate([f16_bytes(d), f16_bytes(m), *_pack_codes(codes, bits)], axis=1)


def _pack_codes(codes: Bytes, bits: int) -> tuple[Bytes, ...]:
    """Return 16 bytes of nibbles, after 4 bytes of fifth bits if there are any."""
    if bits == 4:
        return (pack_bits(codes, 16, 4),)
    high = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return high, pack_bits(codes & np.uint8(15), 16, 4)


def q8_0(blocks: Floats) -> Bytes:
    """x = d * q; halves round away from zero."""
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * reciprocal(d)
    scaled += np.copysign(np.float32(0.5), scaled)
    return np.concatenate([f16_bytes(d), scaled.astype(np.int8).view(np.uint8)], axis=1)


# Least-squares fit of a scale (and minimum) for each group of values. Given codes, the best scale follows from sums;
# given the scale, the best codes follow by rounding. Each start is a range a little wider or narrower than the group's
# own; one round of both from every start, and the best is kept. All weights count the same: no activations are known.
# Values are (group size, groups), one group per column: NumPy adds long rows at full speed and pays 7 ns per short one.

# Steps that the range of a group is divided into, beyond the number of codes. Of equal fits the first is kept: its
# scale is the likeliest to be a round number.
AFFINE_STARTS = (0.0, -1.0, -0.6, -0.3, 0.3, 0.6, 0.9, 1.3, 1.8)
LINEAR_STARTS = (0.0, -3.0, -2.25, -1.5, -1.0, -0.5, 0.75, 1.5, 2.25)
MIN_GAIN = np.float32(1 + 1e-6)  # more than the rounding error of float32 sums


class Sums(NamedTuple):
    """Sums over each group: codes, codes * values, codes squared."""

    q: Floats
    qx: Floats
    qq: Floats


def sums(q: Floats, x: Floats, spare: Floats) -> Sums:
    """Return the sums that least squares needs; overwrites `spare`."""
    return Sums(q.sum(0), np.multiply(q, x, out=spare).sum(0), np.multiply(q, q, out=spare).sum(0))


def affine_codes(x: Floats, scale: Floats, minimum: Floats, top: int, out: Floats) -> Floats:
    """Return the nearest codes of 0 .. top, where x = scale * code - minimum."""
    np.add(x, minimum, out=out)
    out *= reciprocal(scale)
    np.rint(out, out=out)
    return np.clip(out, 0, top, out=out)


def linear_codes(x: Floats, scale: Floats, half_range: int, out: Floats) -> Floats:
    """Return the nearest codes of -half_range .. half_range - 1, where x = scale * code."""
    np.multiply(x, reciprocal(scale), out=out)
    np.rint(out, out=out)
    return np.clip(out, -half_range, half_range - 1, out=out)


def fit_affine(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Return scale and minimum of each group, neither below 0: x = scale * code - minimum."""
    low, high = np.minimum(x.min(0), 0), x.max(0)
    q, spare = np.empty_like(x), np.empty_like(x)
    total = x.sum(0)
    best, scale, minimum = np.zeros_like(low), np.zeros_like(low), -low
    for start in AFFINE_STARTS:
        affine_codes(x, (high - low) * np.float32(1 / (top + start)), -low, top, q)
        totals = sums(q, x, spare)
        s, m = _affine_solution(totals, total, len(x))
        gain = s * totals.qx - m * total  # the part of the sum of squares that it explains
        better = (gain > best * MIN_GAIN) & (s > 0)
        best, scale, minimum = (np.where(better, *pair) for pair in ((gain, best), (s, scale), (m, minimum)))
    return scale, minimum


def _affine_solution(sums: Sums, total: Floats, count: int) -> tuple[Floats, Floats]:
    """Return the least-squares line through the codes; through 0 where its minimum would be negative."""
    over = reciprocal(count * sums.qq - sums.q * sums.q)
    minimum = (sums.q * sums.qx - sums.qq * total) * over
    through_zero = (over <= 0) | (minimum < 0)
    scale = np.where(through_zero, sums.qx * reciprocal(sums.qq), (count * sums.qx - sums.q * total) * over)
    return scale, np.where(through_zero, np.float32(0), minimum)


def fit_linear(x: Floats, half_range: int) -> Floats:
    """Return the scale of each group, of either sign: x = scale * code."""
    low, high = x.min(0), x.max(0)
    peak = np.where(-low > high, low, high)
    q, spare = np.empty_like(x), np.empty_like(x)
    best, scale = np.zeros_like(low), np.zeros_like(low, np.float32)
    for start in LINEAR_STARTS:
        linear_codes(x, peak * np.float32(-1 / (half_range + start)), half_range, q)
        totals = sums(q, x, spare)
        s = totals.qx * reciprocal(totals.qq)
        gain = s * totals.qx
        better = gain > best * MIN_GAIN
        best, scale = np.where(better, gain, best), np.where(better, s, scale)
    return scale


# K types: super-blocks of 256 values, groups with small integer scales, in three steps: the best scale of each group
# alone; these as integers times the float16 `d` (and `dmin`); then integers and d in turn by least squares, because the
# first rounding loses most of what the search gained. The best round of each super-block is kept. Values are
# (group size, blocks * groups), group scales (blocks, groups).

ROUNDS = 3  # including the first fit
SUPER_BLOCK = 256
MAX_6BIT = 63
MIN_DETERMINANT = np.float32(1e-6)  # as a fraction of a * c; below it the 2x2 system is singular


class Affine(NamedTuple):
    """x = d * scale * code - dmin * minimum."""

    d: Floats  # (blocks,)
    dmin: Floats  # (blocks,)
    scale: Floats  # (blocks, 8) whole numbers
    minimum: Floats  # (blocks, 8) whole numbers

    def group_scales(self) -> tuple[Floats, Floats]:
        """Return scale and minimum of every group, flat."""
        return (self.d[:, None] * self.scale).reshape(-1), (self.dmin[:, None] * self.minimum).reshape(-1)


class Linear(NamedTuple):
    """x = d * scale * code."""

    d: Floats  # (blocks,)
    scale: Floats  # (blocks, 16) whole numbers


def q4_k(blocks: Floats) -> Bytes:
    """d 2 | dmin 2 | scales and minima 12 | 128 bytes of nibbles."""
    fit, codes = _affine(blocks, 15)
    return np.concatenate([*_affine_head(fit), pack_bits(codes, 32, 4)], axis=1)


def q5_k(blocks: Floats) -> Bytes:
    """As Q4_K with 32 bytes of fifth bits before the nibbles."""
    fit, codes = _affine(blocks, 31)
    high = pack_bits(codes >> np.uint8(4), 32, 1)
    return np.concatenate([*_affine_head(fit), high, pack_bits(codes & np.uint8(15), 32, 4)], axis=1)


def q6_k(blocks: Floats) -> Bytes:
    """128 bytes of low nibbles | 64 bytes of 2 high bits | 16 int8 scales | d 2."""
    fit, codes = _linear(blocks, 32)
    low, high = pack_bits(codes & np.uint8(15), 64, 4), pack_bits(codes >> np.uint8(4), 32, 2)
    scales = fit.scale.astype(np.int8).view(np.uint8)
    return np.concatenate([low, high, scales, f16_bytes(fit.d)], axis=1)


def _columns(blocks: Floats, group: int) -> Floats:
    return np.ascontiguousarray(blocks.reshape(-1, group).T)


def _rows(codes: Floats, offset: int = 0) -> Bytes:
    """Transpose codes of (group size, groups) into bytes in the order of the values: (blocks, 256)."""
    whole = (codes + np.float32(offset)).astype(np.uint8)
    return np.ascontiguousarray(whole.T).reshape(-1, SUPER_BLOCK)


def _round_clip(values: Floats, unit: Floats, low: int, high: int) -> Floats:
    """Return values / unit, rounded and clipped."""
    whole: Floats = np.clip(np.rint(values * reciprocal(unit)[:, None]), low, high)
    return whole


def _squared_error(q: Floats, scale: Floats, minimum: Floats | None, x: Floats, blocks: int) -> Floats:
    """Return the sum of squared errors of each super-block; `q` is not changed."""
    error = q * scale
    if minimum is not None:
        error -= minimum
    error -= x
    error *= error
    total: Floats = error.sum(0).reshape(blocks, -1).sum(1)
    return total


def _affine(blocks: Floats, top: int) -> tuple[Affine, Bytes]:
    x, count = _columns(blocks, 32), len(blocks)
    q, spare = np.empty_like(x), np.empty_like(x)
    total = x.sum(0).reshape(count, 8)
    tried = best = _first_affine(*(part.reshape(count, 8) for part in fit_affine(x, top)))
    lowest = np.full(count, np.inf, np.float32)
    for turn in range(ROUNDS):
        if turn:
            codes = Sums(*(part.reshape(count, 8) for part in sums(q, x, spare)))
            tried = _next_affine(tried, codes, total)
        groups = tried.group_scales()
        error = _squared_error(affine_codes(x, *groups, top, q), *groups, x, count)
        better = error < lowest
        lowest = np.where(better, error, lowest)
        best = Affine(*(_select(better, new, old) for new, old in zip(tried, best, strict=True)))
    return best, _rows(affine_codes(x, *best.group_scales(), top, q))


def _select(better: NDArray[np.bool_], new: Floats, old: Floats) -> Floats:
    return np.where(better if new.ndim == 1 else better[:, None], new, old)


def _first_affine(scale: Floats, minimum: Floats) -> Affine:
    d, dmin = (round_to_f16(part.max(1) / np.float32(MAX_6BIT)) for part in (scale, minimum))
    return Affine(d, dmin, _round_clip(scale, d, 0, MAX_6BIT), _round_clip(minimum, dmin, 0, MAX_6BIT))


def _next_affine(now: Affine, codes: Sums, total: Floats) -> Affine:
    """Refit each group's minimum, then its scale, then d and dmin of the super-block, for these codes."""
    exact = (now.d[:, None] * now.scale * codes.q - total) / np.float32(32)
    minimum = _round_clip(exact, now.dmin, 0, MAX_6BIT)
    exact = (codes.qx + now.dmin[:, None] * minimum * codes.q) * reciprocal(codes.qq)
    scale = _round_clip(exact, now.d, 0, MAX_6BIT)
    # x = d * (scale * q) - dmin * minus over all groups: two unknowns
    a, b, c = (scale * scale * codes.qq).sum(1), (scale * minimum * codes.q).sum(1), 32 * (minimum * minimum).sum(1)
    u, v = (scale * codes.qx).sum(1), -(minimum * total).sum(1)
    determinant = a * c - b * b
    over = reciprocal(np.where(determinant > MIN_DETERMINANT * a * c, determinant, np.float32(0)))
    d = np.where(over > 0, (c * u + b * v) * over, u * reciprocal(a))
    dmin = np.where(over > 0, (a * v + b * u) * over, now.dmin)
    return Affine(round_to_f16(np.where(d > 0, d, now.d)), round_to_f16(np.maximum(dmin, 0)), scale, minimum)


def _affine_head(fit: Affine) -> tuple[Bytes, Bytes, Bytes]:
    """Return d, dmin, and eight 6-bit scales and minima in twelve bytes."""
    scale, minimum = fit.scale.astype(np.uint8), fit.minimum.astype(np.uint8)
    both = np.concatenate([scale[:, :4], minimum[:, :4]], axis=1)
    later = np.concatenate([scale[:, 4:], minimum[:, 4:]], axis=1)
    first = both | (later >> np.uint8(4)) * np.uint8(64)
    return (
        f16_bytes(fit.d),
        f16_bytes(fit.dmin),
        np.concatenate([first, pack_bits(later & np.uint8(15), 4, 4)], axis=1),
    )


def _linear(blocks: Floats, half_range: int) -> tuple[Linear, Bytes]:
    x, count = _columns(blocks, 16), len(blocks)
    q, spare = np.empty_like(x), np.empty_like(x)
    tried = best = _first_linear(fit_linear(x, half_range).reshape(count, 16))
    lowest = np.full(count, np.inf, np.float32)
    for turn in range(ROUNDS):
        if turn:
            codes = Sums(*(part.reshape(count, 16) for part in sums(q, x, spare)))
            scale = _round_clip(codes.qx * reciprocal(codes.qq), tried.d, -128, 127)
            d = (scale * codes.qx).sum(1) * reciprocal((scale * scale * codes.qq).sum(1))
            tried = Linear(round_to_f16(d), scale)
        groups = (tried.d[:, None] * tried.scale).reshape(-1)
        error = _squared_error(linear_codes(x, groups, half_range, q), groups, None, x, count)
        better = error < lowest
        lowest = np.where(better, error, lowest)
        best = Linear(*(_select(better, new, old) for new, old in zip(tried, best, strict=True)))
    linear_codes(x, (best.d[:, None] * best.scale).reshape(-1), half_range, q)
    return best, _rows(q, half_range)


def _first_linear(scale: Floats) -> Linear:
    """Map the scale of largest magnitude to -128: int8 has one more code below zero than above."""
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1, keepdims=True), axis=1)[:, 0]
    d = round_to_f16(peak / np.float32(-128))
    return Linear(d, _round_clip(scale, d, -128, 127))


ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q4_0": partial(symmetric, bits=4),
    "Q4_1": partial(from_minimum, bits=4),
    "Q5_0": partial(symmetric, bits=5),
    "Q5_1": partial(from_minimum, bits=5),
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
# The largest value that each type can hold; types that are not listed have float16 scales.
MAX_VALUE = {"F32": 3.4028235e38, "BF16": 3.3895314e38}
MAX_F16 = 65504.0
MIN_NORMAL_F16 = 2.0**-14
SLAB_VALUES = 1 << 18  # fits a cache, and large enough that threads seldom wait for the GIL


def quantize(kind: BlockType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return a matrix (rows, columns) as bytes of a block type: (nbytes,). Raises for NaN and values out of range."""
    if kind.name not in ENCODERS:
        raise UnsupportedModelError(f"{kind.name} can be read but not written: use one of {', '.join(ENCODERS)}")
    nbytes = values.size // max(values.shape[-1], 1) * kind.row_bytes(values.shape[-1])
    _check_range(kind, values)
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, kind.block_size)
    out = np.empty((nbytes // kind.block_bytes, kind.block_bytes), np.uint8)
    step = SLAB_VALUES // kind.block_size
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = ENCODERS[kind.name](blocks[start : start + step])
    return out.reshape(-1)


def _check_range(kind: BlockType, values: NDArray[np.float32]) -> None:
    high, low = (float(find(values)) if values.size else 0.0 for find in (np.max, np.min))
    limit = MAX_VALUE.get(kind.name, MAX_F16)
    if not (high <= limit and low >= -limit):  # NaN compares false, so it is rejected too
        raise ModelFileError(f"a value of {high if not high <= limit else low:g} does not fit into {kind.name}")


# Types of quantized safetensors whose codes a GGUF type holds, with float16 scales.
SAME_CODES = {"INT4": "Q4_0", "INT4_ZP": "Q4_1", "INT8": "Q8_0"}


def recode(source: BlockType, kind: BlockType, blocks: Bytes) -> Bytes | None:
    """Return blocks with the same codes, their scales rounded to float16; None where a type or a scale does not fit."""
    if SAME_CODES.get(source.name) != kind.name:
        return None
    count = 2 if source.name == "INT4_ZP" else 1
    numbers = np.ascontiguousarray(blocks[:, : 4 * count]).view("<f4").copy()
    if count == 2:
        numbers[:, 1] *= -numbers[:, 0]  # the minimum
    with np.errstate(over="ignore"):
        halves = numbers.astype("<f2")
    is_kept = (np.abs(numbers) >= MIN_NORMAL_F16) | (halves == numbers)
    if not (np.isfinite(halves) & is_kept).all():
        return None
    return np.concatenate([halves.view(np.uint8), blocks[:, 4 * count :]], axis=1)


PIECE_VALUES = 1 << 19  # a tensor is quantized in pieces of rows, so that it is never held as float32 as a whole


class TensorJob(NamedTuple):
    """One tensor to write: its source, type, row order, and an offset added to its values."""

    name: str
    source: Tensor
    kind: BlockType
    order: NDArray[np.intp] | None = None  # row i (of a vector: value i) is row order[i] of the source
    offset: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.kind.row_bytes(self.columns)

    @property
    def columns(self) -> int:
        """Values per row; a vector is a column, so that its values can be permuted."""
        shape = self.source.shape
        return shape[-1] if len(shape) > 1 or self.source.kind.block_size > 1 else 1

    @property
    def n_rows(self) -> int:
        return self.source.size // self.columns if self.columns else 0

    def encode_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows start .. stop of the result."""
        source = self.source
        raw = source.data.reshape(self.n_rows, source.kind.row_bytes(self.columns))
        raw = raw[start:stop] if self.order is None else raw[self.order[start:stop]]
        is_changed = self.offset or source.order is not None
        if source.kind is self.kind and not is_changed:
            return raw.reshape(-1)
        blocks = np.ascontiguousarray(raw).reshape(-1, source.kind.block_bytes)
        same_codes = None if is_changed else recode(source.kind, self.kind, blocks)
        if same_codes is not None:
            return same_codes.reshape(-1)
        values = source.kind.decode(blocks)
        if source.order is not None:
            values = values.reshape(-1, self.columns)[:, np.argsort(source.order)]
        if self.offset:
            values = values + np.float32(self.offset)
        try:
            return quantize(self.kind, values.reshape(-1, self.columns))
        except ModelFileError as error:
            raise ModelFileError(f"tensor {self.name!r}: {error}") from error


def default_threads() -> int:
    """Return the usable cores of this process, limited by a container's CPU quota."""
    quota = machine.cpu_quota()
    return machine.usable_cores() if quota is None else max(1, min(machine.usable_cores(), math.ceil(quota)))


def run_jobs(jobs: Sequence[TensorJob], threads: int | None = None) -> Iterator[tuple[TensorJob, NDArray[np.uint8]]]:
    """Yield the pieces of all jobs in order; a few are computed ahead."""
    count = threads or default_threads()
    pool, ahead = ThreadPoolExecutor(count, "quantize"), deque[tuple[TensorJob, Future[NDArray[np.uint8]]]]()
    try:
        for job, start, stop in _pieces(jobs):
            ahead.append((job, pool.submit(job.encode_rows, start, stop)))
            if len(ahead) > 2 * count:
                first, piece = ahead.popleft()
                yield first, piece.result()
        for first, piece in ahead:
            yield first, piece.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(jobs: Iterable[TensorJob]) -> Iterator[tuple[TensorJob, int, int]]:
    for listed in jobs:
        job = listed._replace(source=listed.source.load())
        step = max(1, PIECE_VALUES // max(job.columns, 1))
        for start in range(0, job.n_rows, step):
            yield job, start, min(start + step, job.n_rows)


def quantize_in_memory(
    jobs: Sequence[TensorJob], threads: int | None = None, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Run all jobs and return the resulting tensors."""
    arrays = {job.name: np.empty(job.nbytes, np.uint8) for job in jobs}
    filled, done, total = dict.fromkeys(arrays, 0), 0, sum(job.nbytes for job in jobs)
    for job, piece in run_jobs(jobs, threads):
        at = filled[job.name]
        arrays[job.name][at : at + piece.size] = piece
        filled[job.name] = at + piece.size
        done += piece.size
        if progress is not None:
            progress("quantizing", done, total)
    return {job.name: Tensor(job.name, job.kind, job.source.shape, arrays[job.name]) for job in jobs}
