"""LoRA adapters: `shrink` to the rank, `expand` to the rows, for the tokens of a step that have an adapter.

Tokens are grouped by adapter; a unit is some tokens of one adapter. A sum has one order, whatever else is in the batch:
of `shrink` 16 lanes along the columns, of `expand` the ranks one after the other. So a token has the same bits alone
and beside others. Of experts each row is a unit (kernels/experts.py).

    record:  ranks, rounded up to whole quads, A, a factor (float64); then for each part: B, its first rank, its ranks
    A:       (ranks, columns), of all parts; of an embedding (tokens, ranks)
    B:       groups of 16 rows: (groups, ranks of the part, 16)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from math import frexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....weights.lora import LowRank
from ...ops import LoraSite
from ..jit import TaskKernel, kernel, variant
from . import simd as f
from .experts import GroupEntry
from .pointers import aligned, f32, f64, i64, stack_floats, u16
from .program import Task, pack_args, pack_floats

QUAD = 4  # ranks that `shrink` computes at once
UNIT_TOKENS = 64
GROUPS_IN_L1 = 16  # of `expand`
PIECES_PER_THREAD = 2  # of a unit
# Entries of the step about adapters: the rows that have one, grouped, and (slot, first, count) of units; of experts the
# slot of each token instead. FACTORS are of all rows, or tokens.
LoraEntry = IntEnum("LoraEntry", "ORDER FACTORS UNITS NUM_UNITS", start=0)
Record = IntEnum("Record", "RANKS A FACTOR PARTS", start=0)
PartRecord = IntEnum("PartRecord", "B FIRST RANKS", start=0)
# GROUPS is the first `LoraEntry`; of experts ROWS is the first `GroupEntry`, EXPERTS has the expert of each pair, and X
# is by tokens or BY_ROWS. VALUES are x or out, of so many COLUMNS.
LoraArg = IntEnum(
    "LoraArg",
    "GROUPS TABLE VALUES LOW STRIDE PIECES COLUMNS SCALE IS_TABLE ROWS EXPERTS COUNT K BY_ROWS NUM_PARTS PART_ROWS",
    start=0,
)
# set for each variant
ARRAY = AT = SHRINK = SHRINK_ONE = EXPAND = None


@kernel
def float_at(weights, i):
    """Return a weight."""
    return weights[i]


@kernel
def half_at(weights, i):
    """Return a weight of 16 bits."""
    return f.load_one_f16(weights, i, False)


def shrink_one(weights, row, columns, x, one, low, to):
    """Multiply a token by four ranks, as `shrink_pair` does."""
    w0 = row * columns
    w1, w2, w3 = w0 + columns, w0 + 2 * columns, w0 + 3 * columns
    whole, zero = columns - columns % 16, f.splat(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    for i in range(0, whole, 16):
        v = f.load(x, one + i)
        s0, s1 = f.fma(v, f.load(weights, w0 + i), s0), f.fma(v, f.load(weights, w1 + i), s1)
        s2, s3 = f.fma(v, f.load(weights, w2 + i), s2), f.fma(v, f.load(weights, w3 + i), s3)
    low[to + row], low[to + row + 1] = f.hsum(s0), f.hsum(s1)
    low[to + row + 2], low[to + row + 3] = f.hsum(s2), f.hsum(s3)
    for r in range(4):
        for i in range(whole, columns):
            low[to + row + r] += x[one + i] * AT(weights, w0 + r * columns + i)


def shrink_pair(weights, row, columns, x, one, two, low, to, then):
    """Multiply two tokens by four ranks."""
    w0 = row * columns
    w1, w2, w3 = w0 + columns, w0 + 2 * columns, w0 + 3 * columns
    whole, zero = columns - columns % 16, f.splat(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    r0, r1, r2, r3 = zero, zero, zero, zero
    for i in range(0, whole, 16):
        v, u = f.load(x, one + i), f.load(x, two + i)
        w = f.load(weights, w0 + i)
        s0, r0 = f.fma(v, w, s0), f.fma(u, w, r0)
        w = f.load(weights, w1 + i)
        s1, r1 = f.fma(v, w, s1), f.fma(u, w, r1)
        w = f.load(weights, w2 + i)
        s2, r2 = f.fma(v, w, s2), f.fma(u, w, r2)
        w = f.load(weights, w3 + i)
        s3, r3 = f.fma(v, w, s3), f.fma(u, w, r3)
    low[to + row], low[to + row + 1], low[to + row + 2], low[to + row + 3] = (
        f.hsum(s0),
        f.hsum(s1),
        f.hsum(s2),
        f.hsum(s3),
    )
    low[then + row], low[then + row + 1] = f.hsum(r0), f.hsum(r1)
    low[then + row + 2], low[then + row + 3] = f.hsum(r2), f.hsum(r3)
    for r in range(4):
        for i in range(whole, columns):
            w1 = AT(weights, w0 + r * columns + i)
            low[to + row + r] += x[one + i] * w1
            low[then + row + r] += x[two + i] * w1


def expand_group(weights, at, low, first, ranks, out, to, count):
    """Add the sum over the ranks to 16 rows, or to the first `count` of them."""
    total = f.splat(np.float32(0))
    for r in range(ranks):
        total = f.fma(f.splat(low[first + r]), f.load(weights, at + r * 16), total)
    if count >= 16:
        f.store(out, to, f.add(f.load(out, to), total))
    else:
        part = f32(stack_floats(16))
        f.store(part, 0, total)
        for i in range(count):
            out[to + i] += part[i]


@kernel
def find_unit(a, s, piece):
    """Return the record of a piece's adapter, or 0, and its first and last row, in the order of units or of experts."""
    table, entry, unit = i64(a[LoraArg.TABLE]), a[LoraArg.GROUPS], piece // a[LoraArg.PIECES]
    if a[LoraArg.ROWS] == 0:
        units = i64(s[entry + LoraEntry.UNITS] + 24 * unit)
        return table[units[0]], units[1], units[1] + units[2]
    pair = i64(s[a[LoraArg.ROWS] + GroupEntry.PAIRS])[unit]
    slot = i64(s[entry + LoraEntry.ORDER])[pair // a[LoraArg.K]] if pair >= 0 else -1
    if slot < 0:
        return 0, 0, 0
    return table[slot * a[LoraArg.COUNT] + i64(s[a[LoraArg.EXPERTS]])[pair]], unit, unit + 1


@kernel
def find_row(a, s, t):
    """Return the places of a row in the results, in x and in its factors."""
    if a[LoraArg.ROWS] == 0:
        row = i64(s[a[LoraArg.GROUPS] + LoraEntry.ORDER])[t]
        return row, row, row
    token = i64(s[a[LoraArg.ROWS] + GroupEntry.PAIRS])[t] // a[LoraArg.K]
    return t, t if a[LoraArg.BY_ROWS] else token, token


def shrink(args, step, piece):
    """Compute some ranks of a unit's tokens."""
    a, s = i64(args), i64(step)
    address, first, last = find_unit(a, s, piece)
    if address == 0:
        return
    record, share, pieces = i64(address), piece % a[LoraArg.PIECES], a[LoraArg.PIECES]
    factor = np.float32(f64(address)[Record.FACTOR] * f64(args)[LoraArg.SCALE])
    weights, low, stride = ARRAY(record[Record.A]), f32(s[a[LoraArg.LOW]]), a[LoraArg.STRIDE]
    factors, columns, ranks = f32(s[a[LoraArg.GROUPS] + LoraEntry.FACTORS]), a[LoraArg.COLUMNS], record[Record.RANKS]
    begin, end = share * (ranks // QUAD) // pieces * QUAD, (share + 1) * (ranks // QUAD) // pieces * QUAD
    for t in range(first, last, 2):
        row, source, token = find_row(a, s, t)
        other, second, beside = find_row(a, s, min(t + 1, last - 1))
        for r in range(begin, end, QUAD):
            if a[LoraArg.IS_TABLE]:
                ids = i64(s[a[LoraArg.VALUES]])
                for i in range(r, r + QUAD):
                    low[row * stride + i] = AT(weights, ids[source] * ranks + i)
                    low[other * stride + i] = AT(weights, ids[second] * ranks + i)
            elif other == row:
                x = f32(s[a[LoraArg.VALUES]])
                SHRINK_ONE(weights, r, columns, x, source * columns, low, row * stride)
            else:
                x = f32(s[a[LoraArg.VALUES]])
                SHRINK(weights, r, columns, x, source * columns, second * columns, low, row * stride, other * stride)
            for i in range(r, r + QUAD):
                low[row * stride + i] *= factor * factors[token]
                if other != row:
                    low[other * stride + i] *= factor * factors[beside]


def expand(args, step, piece):
    """Add the products with some rows to a unit's tokens."""
    a, s = i64(args), i64(step)
    address, first, last = find_unit(a, s, piece)
    if address == 0:
        return
    share, pieces, column = piece % a[LoraArg.PIECES], a[LoraArg.PIECES], 0
    low, out = f32(s[a[LoraArg.LOW]]), f32(s[a[LoraArg.VALUES]])
    for p in range(a[LoraArg.NUM_PARTS]):
        rows, part = a[LoraArg.PART_ROWS + p], i64(address + 8 * (Record.PARTS + 3 * p))
        ranks, count = part[PartRecord.RANKS], (rows + 15) // 16
        if ranks:
            begin, end = share * count // pieces, (share + 1) * count // pieces
            for block in range(begin, end, GROUPS_IN_L1):  # which all tokens meet in turn
                for t in range(first, last):
                    row, _, _ = find_row(a, s, t)
                    to, at = row * a[LoraArg.COLUMNS] + column, row * a[LoraArg.STRIDE] + part[PartRecord.FIRST]
                    for group in range(block, min(end, block + GROUPS_IN_L1)):
                        g = group * 16
                        EXPAND(ARRAY(part[PartRecord.B]), g * ranks, low, at, ranks, out, to + g, rows - g)
        column += rows


def _kernels(name: str, array: Any, at: Any) -> tuple[TaskKernel, TaskKernel]:
    """Return the kernels of weights of one type."""
    parts = {"SHRINK": shrink_pair, "SHRINK_ONE": shrink_one, "EXPAND": expand_group}
    values = {key: kernel(variant(part, name, AT=at)) for key, part in parts.items()} | {"ARRAY": array, "AT": at}
    return TaskKernel(shrink, name, **values), TaskKernel(expand, name, **values)


FLOAT_KERNELS, HALF_KERNELS = _kernels("F32", f32, float_at), _kernels("F16", u16, half_at)
# The records of one adapter for a site, of each expert or one, and the arrays that they point at.
PackedPairs = tuple[list[NDArray[np.int64] | None], list[NDArray[Any]]]


def pack_pairs(site: LoraSite, pairs: Sequence[Sequence[LowRank | None]]) -> PackedPairs:
    """Pack the pairs of a site: as float32 beside a float32 matrix, else as float16 times a power of two."""
    for compiled in FLOAT_KERNELS if site.is_exact else HALF_KERNELS:
        compiled.load()  # now, and not under a request
    arrays: list[NDArray[Any]] = []
    return [_pack_parts(site, parts, arrays) for parts in pairs], arrays


def _pack_parts(
    site: LoraSite, parts: Sequence[LowRank | None], arrays: list[NDArray[Any]]
) -> NDArray[np.int64] | None:
    held = [pair for pair in parts if pair is not None]
    if not held:
        return None
    low = np.concatenate([pair.a for pair in held])
    low = np.pad(low, ((0, -len(low) % QUAD), (0, 0)))
    # The largest values become 1/2 to 1: of float16 the error is a part in 2,048 of a value, as far as 2**-14.
    tops = [float(np.abs(low).max()), max(float(np.abs(pair.b).max()) for pair in held)]
    shifts = [0, 0] if site.is_exact else [frexp(top)[1] for top in tops]

    def place(values: NDArray[np.float32], shift: int) -> NDArray[Any]:
        placed: NDArray[Any] = aligned(np.empty, values.shape, np.float32 if site.is_exact else np.float16)
        np.multiply(values, np.float32(2.0**-shift), out=placed, casting="same_kind")
        arrays.append(placed)
        return placed

    start = pack_args(len(low), place(low.T if site.op == "embed" else low, shifts[0]), 0)
    record, first = [*pack_floats(start, Record.FACTOR, [2.0 ** sum(shifts)])], 0
    for pair in parts:
        if pair is None:
            record += [0, 0, 0]
            continue
        groups = np.pad(pair.b, ((0, -len(pair.b) % 16), (0, 0))).reshape(-1, 16, pair.rank)
        record += [*pack_args(place(groups.transpose(0, 2, 1), shifts[1]), first, pair.rank)]
        first += pair.rank
    return np.array(record, np.int64)


class SiteTable:
    """The records of a site, by slot and expert, at an address that stays."""

    def __init__(self, site: LoraSite, num_slots: int) -> None:
        self.addresses = np.zeros((num_slots, max(1, site.num_experts)), np.int64)
        self._held: dict[int, PackedPairs] = {}

    def place(self, slot: int, packed: PackedPairs | None) -> None:
        self.addresses[slot] = 0
        self._held.pop(slot, None)
        if packed is not None:
            self._held[slot] = packed
            self.addresses[slot] = [0 if record is None else record.ctypes.data for record in packed[0]]


def group_by_adapter(slots: NDArray[np.int64], scales: NDArray[np.float32]) -> list[NDArray[Any]]:
    """Return the rows that have an adapter, rows of one adapter together, the factors of all rows, and the units."""
    order = np.argsort(slots, kind="stable")
    order = np.ascontiguousarray(order[np.searchsorted(slots[order], 0) :], np.int64)
    own = slots[order]
    starts = np.flatnonzero(np.diff(own, prepend=-1))
    units = [
        (own[start], first, min(UNIT_TOKENS, end - first))
        for start, end in pairwise([*starts, len(own)])
        for first in range(start, end, UNIT_TOKENS)
    ]
    return [order, scales, np.array(units, np.int64).reshape(-1, 3)]


def lora_task(
    op: str, site: LoraSite, groups: int, values: int, low: int, threads: int, rows: tuple[int, ...], scale: float = 1.0
) -> Task:
    """Return the task of `shrink` or `expand`, which adds to what is there. `rows` of experts are the entries of their
    grouping and of the chosen experts, how many a token has, and whether x is by rows."""
    pieces, columns = 1 if rows else PIECES_PER_THREAD * threads, site.columns if op == "shrink" else site.rows
    grouping = (rows[0], rows[1], max(1, site.num_experts), *rows[2:]) if rows else (0,) * 5
    table = site.packed.addresses, values, low, site.max_rank, pieces, columns
    args = pack_args(groups, *table, 0, site.op == "embed", *grouping, len(site.part_rows), *site.part_rows)
    chosen = (FLOAT_KERNELS if site.is_exact else HALF_KERNELS)[op == "expand"]
    unit_slot = rows[0] + GroupEntry.ROWS if rows else groups + LoraEntry.NUM_UNITS
    return Task(chosen, pack_floats(args, LoraArg.SCALE, [scale]), pieces, unit_slot)
