"""LoRA adapters: `shrink` rows to the rank, `expand` to the rows of a product, to which they are added.

Tokens are grouped by adapter into tiles of TOKENS: a tile belongs to one adapter, so that a token's sums depend on no
other token. Tiles that a step has no use for have slot -1 and end at once. The columns have a fixed number of splits,
whose sums `expand` adds in their order. A record has, for each slot: the address of A and its ranks, then for each part
the address of B, its first rank and its ranks; ranks of a part are padded to RANKS.

    A   (ranks of all parts, columns)          B   (rows of the part, ranks of the part)
"""

from __future__ import annotations

from math import frexp
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton import cdiv

from ....weights.lora import LowRank
from ...ops import LoraSite, SitePairs
from ..device import upload
from ..packed_weight import Activations
from .gemm import GROUP_BLOCKS, interleaved_offset

TOKENS = 16  # of a tile
RANKS = 16  # of a program of `shrink`, and of a step of `expand`
ROWS = 128  # of a program of `expand`
COLUMNS = 128  # of a step of `shrink`
SPLIT_COLUMNS, MAX_SPLITS = 512, 8
RECORD, PART = 2, 3  # numbers of a record before its parts, and of a part


@triton.jit
def shrink_rows(
    x,
    x_factors,
    low,
    tile_slots,
    tile_tokens,
    scales,
    records,
    factors,
    tokens,
    columns,
    stride,
    max_rank,
    record_size,
    unit,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Multiply the tokens of a tile by some ranks over some columns: program (tile, ranks, split)."""
    tile, first, split = tl.program_id(0), tl.program_id(1) * RANKS, tl.program_id(2)
    slot = tl.load(tile_slots + tile)
    if slot < 0:
        return
    record = records + slot * record_size
    address = tl.load(record)
    if address == 0 or first >= tl.load(record + 1):
        return
    a = address.to(tl.pointer_type(tl.float16 if HALF else tl.float32))
    token = tl.load(tile_tokens + tile * TOKENS + tl.arange(0, TOKENS))
    rank = first + tl.arange(0, RANKS)
    steps = tl.cdiv(tl.cdiv(columns, COLUMNS), SPLITS)
    total = tl.zeros((TOKENS, RANKS), tl.float32)
    for step in range(steps):
        c = (split * steps + step) * COLUMNS + tl.arange(0, COLUMNS)
        if INTERLEAVED:
            at = interleaved_offset(
                token[:, None], (c // 32)[None, :], (c % 32)[None, :], tokens, stride // (32 * GROUP_BLOCKS)
            )
        else:
            at = token[:, None].to(tl.int64) * stride + c[None, :]
        held = (token >= 0)[:, None] & (c < columns)[None, :]
        rows = tl.load(x + at, mask=held, other=0.0).to(tl.float32)
        weights = tl.load(a + rank[None, :] * columns + c[:, None], mask=(c < columns)[:, None], other=0.0)
        total += tl.dot(rows, weights.to(tl.float32), input_precision="tf32")
    factor = tl.load(scales + token, mask=token >= 0, other=0.0) * tl.load(factors + slot) * unit
    if x_factors is not None:
        factor *= tl.load(x_factors + token, mask=token >= 0, other=0.0)
    to = (split * tokens + token[:, None]) * max_rank + rank[None, :]
    tl.store(low + to, total * factor[:, None], mask=(token >= 0)[:, None])


@triton.jit
def expand_rows(
    out,
    low,
    tile_slots,
    tile_tokens,
    records,
    blocks,
    tokens,
    rows,
    max_rank,
    record_size,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Add the products with some rows of a part to the tokens of a tile: program (tile, block of rows)."""
    tile, block = tl.program_id(0), blocks + tl.program_id(1) * 4
    slot = tl.load(tile_slots + tile)
    if slot < 0:
        return
    part = records + slot * record_size + 2 + 3 * tl.load(block)
    ranks = tl.load(part + 2).to(tl.int32)
    if ranks == 0:
        return
    b = tl.load(part).to(tl.pointer_type(tl.float16 if HALF else tl.float32))
    first = tl.load(part + 1).to(tl.int32)
    row, column, left = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    token = tl.load(tile_tokens + tile * TOKENS + tl.arange(0, TOKENS))
    r, n = tl.arange(0, RANKS), tl.arange(0, ROWS)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, ranks, RANKS):
        held = tl.zeros((TOKENS, RANKS), tl.float32)
        for split in tl.static_range(SPLITS):
            at = (split * tokens + token[:, None]) * max_rank + first + start + r[None, :]
            held += tl.load(low + at, mask=(token >= 0)[:, None], other=0.0)
        weights = tl.load(b + (row + n)[None, :] * ranks + start + r[:, None], mask=(n < left)[None, :], other=0.0)
        total += tl.dot(held, weights.to(tl.float32), input_precision="tf32")
    to = token[:, None].to(tl.int64) * rows + column + n[None, :]
    mask = (token >= 0)[:, None] & (n < left)[None, :]
    before = tl.load(out + to, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + to, (before + total).to(out.dtype.element_ty), mask=mask)


class PackedPairs(NamedTuple):
    """The pairs of an adapter for a site; of a dense product its record, the arrays at its addresses, and a factor."""

    pairs: SitePairs
    record: list[int]
    arrays: list[torch.Tensor]
    factor: float


def pack_pairs(site: LoraSite, pairs: SitePairs, device: torch.device) -> PackedPairs:
    """Copy the pairs of a dense product to the device: as float32 beside a float32 matrix, else as float16 times a
    power of two. All others are computed as the reference does."""
    if site.op != "linear":
        return PackedPairs(pairs, [], [], 1.0)
    held = [pair for pair in pairs[0] if pair is not None]
    tops = [max(float(np.abs(half).max()) for half in halves) for halves in zip(*map(_halves, held), strict=True)]
    shifts = [0, 0] if site.is_exact else [frexp(top)[1] for top in tops]
    arrays: list[torch.Tensor] = []

    def copy(values: NDArray[np.float32], shift: int) -> int:
        scaled = torch.from_numpy(np.ascontiguousarray(values) * np.float32(2.0**-shift))
        arrays.append(scaled.to(torch.float32 if site.is_exact else torch.float16).to(device))
        return arrays[-1].data_ptr()

    low = np.concatenate([np.pad(pair.a, ((0, -pair.rank % RANKS), (0, 0))) for pair in held])
    record, first = [copy(low, shifts[0]), len(low)], 0
    for pair in pairs[0]:
        high = None if pair is None else np.pad(pair.b, ((0, 0), (0, -pair.rank % RANKS)))
        record += [0, 0, 0] if high is None else [copy(high, shifts[1]), first, high.shape[1]]
        first += 0 if high is None else high.shape[1]
    return PackedPairs(pairs, record, arrays, 2.0 ** sum(shifts))


def _halves(pair: LowRank) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return pair.a, pair.b


class SiteTable(dict[int, Any]):
    """The pairs of a site by slot, as the reference reads them, and their records on the device, at an address that
    stays."""

    def __init__(self, site: LoraSite, num_slots: int, device: torch.device) -> None:
        super().__init__()
        self._held: dict[int, PackedPairs] = {}
        self.is_half = not site.is_exact
        self.max_rank = cdiv(site.max_rank, RANKS) * RANKS
        self.records = torch.zeros(num_slots, RECORD + PART * len(site.part_rows), dtype=torch.int64, device=device)
        self.factors = torch.zeros(num_slots, device=device)
        blocks, first = list[tuple[int, int, int, int]](), 0
        for part, rows in enumerate(site.part_rows):
            blocks += [(part, row, first + row, rows - row) for row in range(0, rows, ROWS)]
            first += rows
        self.blocks = torch.tensor(blocks, dtype=torch.int32, device=device)
        self.splits = min(MAX_SPLITS, cdiv(site.columns, SPLIT_COLUMNS))

    def place(self, slot: int, packed: PackedPairs | None) -> None:
        self.records[slot] = 0
        self.pop(slot, None)
        self._held.pop(slot, None)
        if packed is not None:
            self._held[slot], self[slot], self.factors[slot] = packed, packed.pairs, packed.factor
            if packed.record:
                self.records[slot] = upload(np.array(packed.record), self.records.device, torch.int64)


def max_tiles(tokens: int, num_slots: int) -> int:
    """Return how many tiles a step may have."""
    return int(cdiv(tokens, TOKENS)) + min(tokens, num_slots)


def group_tokens(slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slot of each tile, and its tokens, -1 where it has fewer."""
    tiles, tokens = [], []
    for slot in np.unique(slots[slots >= 0]):
        own = np.flatnonzero(slots == slot)
        whole = np.full(cdiv(len(own), TOKENS) * TOKENS, -1)
        whole[: len(own)] = own
        tiles += [slot] * (len(whole) // TOKENS)
        tokens.append(whole)
    return np.array(tiles, np.int64), np.concatenate(tokens) if tokens else np.empty(0, np.int64)


def launch_adapter(x: Activations, out: torch.Tensor, table: SiteTable, arrays: Any, columns: int) -> None:
    """Add the increments of adapters to the first split of a product, (splits, tokens, rows)."""
    tokens, rows = out.shape[1:]
    slots, own = arrays["lora_slots"], arrays["lora_tokens"]
    scales = arrays["lora_scales"].view(torch.float32)
    low = torch.empty(table.splits, tokens, table.max_rank, device=out.device)
    factors = None if x.factors is None or x.values.dtype not in (torch.float16, torch.float8_e4m3fn) else x.factors
    tiles, sizes = (slots, own), (table.max_rank, table.records.shape[1])
    width, unit = (columns, x.values.shape[1]), x.unit if x.is_interleaved else 1.0
    scaling, shape = (scales, table.records, table.factors), (TOKENS, RANKS, COLUMNS, table.splits, GROUP_BLOCKS)
    is_half, grid = table.is_half, (len(slots), table.max_rank // RANKS, table.splits)
    shrink_rows[grid](
        x.values, factors, low, *tiles, *scaling, tokens, *width, *sizes, unit, *shape, x.is_interleaved, is_half
    )
    counts, constants = (tokens, rows, *sizes), (TOKENS, RANKS, ROWS, table.splits, is_half)
    expand_rows[(len(slots), len(table.blocks))](out[0], low, *tiles, table.records, table.blocks, *counts, *constants)
