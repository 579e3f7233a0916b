"""x @ w.T of any number of tokens on tensor cores: which kernel, with which tile and how many splits, is a table.

Some tokens are multiplied by packed weights as they are (kernels/gemm.py), many after the matrix was dequantized for
cuBLAS; dense weights are cuBLAS's. Batch-invariant products have a fixed number of splits: then the order of a token's
sums depends on no other token.

e4m3 weights (`--quantize fp8`) have a float32 scale per row. Activations are quantized too, with a scale per token:
then the tensor cores multiply e4m3 by e4m3, twice as fast as bfloat16. Where `torch._scaled_mm` does not take a shape,
the weights become bfloat16, which holds them exactly, for one product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from ..ops import LoraSite, SitePairs
from .device import (
    HOPPER_SHARED_BYTES,
    has_wgmma,
    is_interpreted,
    num_multiprocessors,
    pdl_options,
    shared_memory_bytes,
)
from .kernels.compact_kinds import CODEBOOKS, COMPACT_KINDS
from .kernels.elementwise import launch_convert
from .kernels.gemm import SCALE_LAYOUT, gemm_dense, gemm_packed
from .kernels.gemm_hopper import launch_gemm
from .kernels.gemv import STORE, gemv_dense, gemv_packed
from .kernels.lora import PackedPairs, SiteTable, pack_pairs
from .packed_weight import (
    E4M3,
    FP8,
    HIGH_WORDS,
    LOW_WORDS,
    Activations,
    GemvActivations,
    Int8Activations,
    PackedWeight,
    WeightPart,
    dequantize_rows,
    kernel_outputs,
    quantize_e4m3,
)

# Tokens up to which packed weights are faster than cuBLAS on a dequantized matrix (docs/decisions/gpu.md#d124).
MAX_GEMM_TOKENS, MAX_HOPPER_TOKENS = 256, 512
MAX_GEMM_TOKENS_BY_KIND = dict.fromkeys(COMPACT_KINDS, 128)  # which are decoded again for every 64; not measured
SCRATCH_BYTES = 1 << 28  # of a matrix that is dequantized at a time
INVARIANT_TOKENS = 64  # that splits are chosen for in batch-invariant mode
SPLIT_COUNTS = (1, 2, 3, 4, 6, 8)
MAX_SPLITS = 8
MAX_LARGE_SPLITS = 2  # of more tokens than LARGE_TILE has: partial sums grow with them
INVARIANT_SPLITS = 4  # at most, of every batch-invariant product: the same for one token and for many
SPLIT_COST = 200.0  # of writing and reading partial sums, in columns
GROUP_COLUMNS = 512  # 16 blocks are interleaved: kernels/gemm.py


class GemmTile(NamedTuple):
    """Rows and tokens of a program, warps, stages; programs on a multiprocessor at a time."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int = 2


# Measured on an H200 (docs/decisions/gpu.md#d077).
TILES_BY_TOKENS = {16: GemmTile(64, 16, 4, 4, 3), 32: GemmTile(64, 32, 4, 4, 3), 64: GemmTile(128, 64, 8, 3)}
INVARIANT_TILE = GemmTile(64, 64, 4, 3, 3)  # in the place of the last: it needs fewer splits
LARGE_TILE = GemmTile(128, 128, 8, 3, 1)
MANY_ROWS = 8192  # from which a matrix has tiles of its own; of more than 128 tokens only 4-bit kinds: shared memory
LARGE_TILE_OF_MANY_ROWS, LARGEST_TILE = GemmTile(64, 128, 4, 2, 3), GemmTile(128, 256, 8, 3, 1)
SMALL_SHARED_TILE = GemmTile(64, 64, 4, 2)  # from 33 tokens where shared memory is less than on Hopper
# Of kernels/gemm_hopper.py, for kinds that are not compact: measured on an H200 (docs/decisions/gpu.md#d121).
HOPPER_TILES_BY_TOKENS = {
    8: GemmTile(64, 8, 4, 2, 3),
    16: GemmTile(64, 16, 4, 2, 3),
    32: GemmTile(64, 32, 4, 4, 4),
    64: GemmTile(64, 64, 4, 3, 3),
}
HOPPER_LARGE_TILE = GemmTile(64, 128, 4, 3, 2)
HOPPER_WIDE_TILE = GemmTile(128, 128, 8, 3, 1)  # of kinds of which the shared memory does not hold two of the last
# Compact kinds multiply four words of activations an iteration.
COMPACT_TILES_BY_TOKENS = {16: GemmTile(64, 16, 4, 3), 32: GemmTile(64, 32, 4, 3)}
COMPACT_TILE, SMALL_SHARED_COMPACT_TILE = GemmTile(128, 64, 8, 2), GemmTile(64, 32, 4, 2)
COMPACT_TILES_BY_KIND = dict.fromkeys(("iq2_xxs", "iq3_xxs"), GemmTile(64, 64, 4, 2))  # more does not fit


class BatchedLinear:
    """Products with one buffer for the largest dequantized matrix, which grows in the first step that needs it."""

    def __init__(self, device: torch.device, *, batch_invariant: bool) -> None:
        self.device, self.batch_invariant = device, batch_invariant
        self._scratch: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []  # smaller ones: graphs hold their addresses

    def __call__(self, x: torch.Tensor, w: PackedWeight, *, is_head: bool = False) -> torch.Tensor:
        """Return x (tokens, columns) @ w.T in float32."""
        x = x if w.order is None else x[:, w.order]
        return sum_splits(self.multiply(self.convert(x, w, is_head=is_head), w))

    def pack_adapter(self, site: LoraSite, pairs: SitePairs) -> PackedPairs:
        """Copy an adapter's pairs for a site to the device."""
        return pack_pairs(site, pairs, self.device)

    def place_adapter(self, site: LoraSite, slot: int, packed: PackedPairs | None, num_slots: int) -> None:
        """Let a slot of a site hold them."""
        site.packed = SiteTable(site, num_slots, self.device) if site.packed is None else site.packed
        site.packed.place(slot, packed)

    def stays_packed(self, w: PackedWeight, tokens: int, *, is_head: bool = False) -> bool:
        """Return whether a matrix is multiplied as it is packed; the output head always, as results are float32."""
        if not w.is_packed or self.batch_invariant or is_head:
            return w.is_packed
        return tokens <= min(self._max_gemm_tokens(part.kind) for part in w.parts)

    def _max_gemm_tokens(self, kind: str) -> int:
        if takes_hopper_kernel(kind, self.device):
            return MAX_HOPPER_TOKENS
        return MAX_GEMM_TOKENS_BY_KIND.get(kind, MAX_GEMM_TOKENS)

    def takes_rows(self, w: PackedWeight, tokens: int) -> bool:
        """Return whether activations are plain rows of `w.dense_dtype`, without factors."""
        if self.batch_invariant and w.dense_dtype == torch.float16:
            return False
        return not (self.stays_packed(w, tokens) or self._takes_e4m3(w))

    def _takes_e4m3(self, w: PackedWeight) -> bool:
        return w.is_fp8 and w.parts[0].fits_scaled_mm and not self.batch_invariant and not is_interpreted()

    def empty_activations(self, w: PackedWeight, tokens: int, *, is_head: bool = False) -> Activations:
        """Allocate what the product with `w` reads."""
        packed = self.stays_packed(w, tokens, is_head=is_head)
        dtype = torch.float16 if packed else E4M3 if self._takes_e4m3(w) else w.dense_dtype
        columns = cdiv(w.columns, GROUP_COLUMNS) * GROUP_COLUMNS if packed else w.columns
        room = tokens + (LARGE_TILE.tokens // 4 if packed else 0)  # whole tiles of tokens (gemm_hopper.view_tiles)
        values = torch.empty(room, columns, dtype=dtype, device=self.device)[:tokens]
        return Activations(values, torch.empty(tokens, device=self.device), packed)

    def convert(self, x: torch.Tensor, w: PackedWeight, *, is_head: bool = False, pdl: bool = False) -> Activations:
        """Return rows (tokens, columns) of any float type as activations for `w`."""
        out = self.empty_activations(w, len(x), is_head=is_head)
        launch_convert(x, out, pdl)
        return out

    def multiply(
        self, x: Activations, w: PackedWeight, max_splits: int = MAX_SPLITS, pdl: bool = False
    ) -> torch.Tensor:
        """Return (splits, tokens, rows), whose sum is the product."""
        splits, factors = self.multiply_unscaled(x, w, max_splits, pdl)
        return splits if factors is None else splits * factors[:, None]

    def multiply_gated(
        self, x: Activations, w: PackedWeight, activation: str, out: Activations, *, pdl: bool = False
    ) -> bool:
        """Store activation(gate) * up in units of `out`, in the product with gate and up; return whether that was
        possible: by one kernel, without splits."""
        (part, *more), tokens, device = w.parts, len(x.values), x.values.device
        if more or not (x.is_interleaved and out.is_interleaved and tokens and takes_hopper_kernel(part.kind, device)):
            return False
        tile = _part_tile(part, tokens, device, batch_invariant=self.batch_invariant)
        splits = num_splits(part.rows, part.columns, tokens, tile, device)
        if (invariant_splits(part, device) if self.batch_invariant else splits) > 1:
            return False
        starts_next = _starts_next(pdl, is_late=self.batch_invariant)
        launch_gemm(x, part, out.values, 0, 1, tile[:4], starts_next=starts_next, gate=(activation, 1 / out.unit))
        return True

    def multiply_unscaled(
        self, x: Activations, w: PackedWeight, max_splits: int = MAX_SPLITS, pdl: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same, and the factors (tokens) by which it is still to be multiplied, if any."""
        tokens, part = len(x.values), w.parts[0]
        if not tokens:
            return torch.empty(1, 0, w.rows, device=self.device), None
        if x.is_interleaved:
            return gemm(x, w, max_splits, batch_invariant=self.batch_invariant, pdl=pdl), None
        factors = x.factors if x.values.dtype == torch.float16 else None
        if self.batch_invariant:
            return gemm_dense_batch_invariant(x.values, part), factors
        if part.kind == FP8:
            return matmul_fp8(x, part)[None], None
        if part.values is None:
            return self._dequantize_and_multiply(x.values, w)[None], None
        return _cublas(x.values, part.values)[None], factors

    def _dequantize_and_multiply(self, x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
        """Multiply by cuBLAS, as many dequantized rows at a time as the scratch holds."""
        # Of eight rows every plane begins at 16 bytes, so one variant of the kernel serves all slices.
        step = min(max(part.rows for part in w.parts), max(8, SCRATCH_BYTES // (w.columns * x.itemsize) // 8 * 8))
        if self._scratch is None or self._scratch.numel() < step * w.columns:
            if self._scratch is not None:
                self._outgrown.append(self._scratch)
            self._scratch = torch.empty(step * w.columns, dtype=x.dtype, device=self.device)
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        out, first = torch.empty(len(x), w.rows, dtype=dtype, device=self.device), 0
        for part in w.parts:
            for start in range(0, part.rows, step):
                rows = self._scratch[: min(step, part.rows - start) * w.columns].view(-1, w.columns)
                dequantize_rows(part, start, rows)
                _cublas(x, rows, part.unit, out[:, first : first + len(rows)])
                first += len(rows)
        return out


def sum_splits(splits: torch.Tensor) -> torch.Tensor:
    """Return the sum of (splits, tokens, rows) in float32, in the order of the kernels that read splits."""
    out = splits[0].float()
    for split in splits[1:]:
        out = out + split
    return out


def _cublas(x: torch.Tensor, w: torch.Tensor, factor: float = 1.0, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ w.T * factor, sums in float32; of bfloat16 as bfloat16, of float16, whose range is small, as float32.
    With `out`, which may be columns of a larger matrix, stored there."""
    if out is not None and x.is_cuda and x.dtype == out.dtype:
        return torch.addmm(out, x, w.T, beta=0, alpha=factor, out=out)
    if x.device.type == "cpu":
        product = x.float() @ w.float().T
    else:
        product = torch.mm(x, w.T, out_dtype=torch.float32) if x.dtype == torch.float16 else torch.mm(x, w.T)
    return product if out is None else out.copy_(product * factor)


def gemm_tile(tokens: int, kind: str, rows: int, device: torch.device) -> GemmTile:
    """Return the tile of a product; 5-bit kinds load two words at a time, which needs more shared memory per stage."""
    if is_interpreted():
        return GemmTile(256, min(64, max(16, next_power_of_2(tokens))), 4, 2)  # few and large programs
    if kind in COMPACT_KINDS:
        return _compact_tile(tokens, kind, device)
    if takes_hopper_kernel(kind, device):
        return hopper_tile(tokens, kind)
    if tokens > SMALL_SHARED_TILE.tokens // 2 and shared_memory_bytes(device) < HOPPER_SHARED_BYTES:
        return SMALL_SHARED_TILE
    tile = next((tile for limit, tile in TILES_BY_TOKENS.items() if tokens <= limit), LARGE_TILE)
    if tile is LARGE_TILE and rows >= MANY_ROWS:
        if tokens <= LARGE_TILE.tokens:
            tile = LARGE_TILE_OF_MANY_ROWS
        elif kind in ("q4", "q4m"):
            tile = LARGEST_TILE
    return tile._replace(stages=max(2, tile.stages - 1)) if kind in ("q5", "q5m") else tile


def hopper_tile(tokens: int, kind: str) -> GemmTile:
    """Return the tile of kernels/gemm_hopper.py."""
    is_wide = kind in HIGH_WORDS or kind in LOW_WORDS
    large = HOPPER_WIDE_TILE if is_wide else HOPPER_LARGE_TILE
    return next((tile for limit, tile in HOPPER_TILES_BY_TOKENS.items() if tokens <= limit), large)


def takes_hopper_kernel(kind: str, device: torch.device) -> bool:
    """Return whether kernels/gemm_hopper.py multiplies by matrices of a kind."""
    return kind in SCALE_LAYOUT and has_wgmma(device)


def _compact_tile(tokens: int, kind: str, device: torch.device) -> GemmTile:
    if tokens > SMALL_SHARED_COMPACT_TILE.tokens // 2 and shared_memory_bytes(device) < HOPPER_SHARED_BYTES:
        return SMALL_SHARED_COMPACT_TILE
    large = COMPACT_TILES_BY_KIND.get(kind, COMPACT_TILE)
    return next((tile for limit, tile in COMPACT_TILES_BY_TOKENS.items() if tokens <= limit), large)


def num_splits(
    rows: int, columns: int, tokens: int, tile: GemmTile, device: torch.device, max_splits: int = MAX_SPLITS
) -> int:
    """Return into how many splits the columns are divided, so that the last wave of programs is nearly full."""
    programs = cdiv(rows, tile.rows) * cdiv(tokens, tile.tokens)
    max_splits = min(max_splits, max(1, columns // GROUP_COLUMNS))
    if tokens > LARGE_TILE.tokens:
        max_splits = min(max_splits, MAX_LARGE_SPLITS if tokens <= MAX_GEMM_TOKENS else 1)
    counts, at_a_time = [n for n in SPLIT_COUNTS if n <= max_splits], num_multiprocessors(device) * tile.programs
    best: int = min(counts, key=lambda n: cdiv(programs * n, at_a_time) * columns / n + SPLIT_COST * n)
    return best


def _part_tile(part: WeightPart, tokens: int, device: torch.device, *, batch_invariant: bool) -> GemmTile:
    tile = gemm_tile(tokens, part.kind, part.rows, device)
    if batch_invariant and tile[:3] == TILES_BY_TOKENS[64][:3] and part.kind not in COMPACT_KINDS:
        return INVARIANT_TILE._replace(stages=tile.stages)
    return tile


def invariant_splits(part: WeightPart, device: torch.device, max_splits: int = MAX_SPLITS) -> int:
    """Return the splits of a batch-invariant product: a function of the matrix alone."""
    tile = _part_tile(part, INVARIANT_TOKENS, device, batch_invariant=True)
    return num_splits(part.rows, part.columns, INVARIANT_TOKENS, tile, device, min(max_splits, INVARIANT_SPLITS))


def _starts_next(pdl: bool, *, is_late: bool) -> str:
    """Return when a product lets the next kernel start: late before prefill attention, which it would slow."""
    return ("late" if is_late else "early") if pdl else ""


def gemm(x: Activations, w: PackedWeight, max_splits: int, *, batch_invariant: bool, pdl: bool = False) -> torch.Tensor:
    """Multiply interleaved activations by all parts of a weight: (splits, tokens, rows) float32, to be summed."""
    tokens, device = len(x.values), x.values.device
    largest = max(w.parts, key=lambda part: part.rows)
    tile = _part_tile(largest, tokens, device, batch_invariant=batch_invariant)
    rows = w.rows if takes_hopper_kernel(largest.kind, device) else largest.rows  # of kernels that run together
    splits = num_splits(rows, w.columns, tokens, tile, device, max_splits)
    if batch_invariant:
        splits = invariant_splits(largest, device, max_splits)
    out = torch.empty(splits, tokens, w.rows, device=device)
    first = 0
    for part in w.parts:
        tile = _part_tile(part, tokens, device, batch_invariant=batch_invariant)
        if takes_hopper_kernel(part.kind, device):
            is_first, is_last = part is w.parts[0], part is w.parts[-1]
            starts_next = _starts_next(pdl, is_late=batch_invariant and is_last)
            launch_gemm(
                x, part, out.view(-1)[first:], w.rows, splits, tile[:4], starts_next=starts_next, waits_first=is_first
            )
        else:
            gemm_packed[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), splits)](
                x.values,
                x.factors,
                part.unit * x.unit,
                part.low,
                part.high,
                part.scales,
                out.view(-1)[first:],
                tokens,
                part.rows,
                w.rows,
                part.blocks,
                part.kind,
                tile.rows,
                tile.tokens,
                part.small,
                part.table,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        first += part.rows
    return out


def gemm_dense_batch_invariant(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """Multiply by dense or e4m3 weights in a fixed order: (splits, tokens, rows). Slower than cuBLAS."""
    assert part.values is not None
    tokens, columns = x.shape
    tile = gemm_tile(tokens, part.kind, part.rows, x.device)._replace(stages=3)
    splits = invariant_splits(part, x.device)
    out = torch.empty(splits, tokens, part.rows, device=x.device)
    values = part.values
    if is_interpreted():  # which multiplies bfloat16 wrongly
        x, values = x.float(), values.float()
    gemm_dense[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), splits)](
        x, values, part.scales, out, tokens, part.rows, columns, tile.rows, tile.tokens,
        32 if x.dtype == torch.float32 else 64, part.kind == FP8, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def matmul_fp8(x: Activations, part: WeightPart) -> torch.Tensor:
    """Multiply e4m3 activations, or bfloat16 where the matrix does not fit `torch._scaled_mm`, by e4m3 weights."""
    assert part.values is not None
    if is_interpreted():
        rows = x.values
        if part.fits_scaled_mm:
            codes, scales = quantize_e4m3(rows)
            rows = codes.float() * scales[:, None]
        return rows @ (part.values.float() * part.scales[:, None]).T
    if not part.fits_scaled_mm:
        return torch.mm(x.values, part.values.bfloat16().T, out_dtype=torch.float32) * part.scales
    assert x.factors is not None
    return torch._scaled_mm(
        x.values, part.values.T, x.factors[:, None], part.scales[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )


# Packed, one token: (rows of a program, warps, rows loaded ahead, registers of a thread; 0: the compiler's choice)
ONE_TOKEN_TILES = {
    "qkv": (8, 8, 1, 0),
    "o": (32, 8, 4, 0),
    "gate_up": (64, 4, 2, 168),
    "down": (32, 8, 6, 0),
    "head": (16, 8, 2, 0),
}
ONE_TOKEN_TILES_BY_KIND = {
    ("down", "q6"): (32, 8, 3, 0),
    ("down", "q8"): (32, 8, 2, 0),
    ("gate_up", "q8"): (64, 4, 2, 0),
    ("down", "e4m3"): (32, 8, 2, 0),
    ("gate_up", "e4m3"): (64, 8, 2, 0),
    # of compact kinds what fits the registers (by the compiler's report for sm_90)
    **{("gate_up", kind): (64, 8, 2, 0) for kind in COMPACT_KINDS},
    **{("down", kind): (32, 8, 1 if row.codes in CODEBOOKS else 3, 0) for kind, row in COMPACT_KINDS.items()},
    ("down", "q3_k"): (32, 8, 2, 0),
}
MULTI_TOKEN_TILES = {"qkv": (8, 4), "o": (32, 8), "gate_up": (64, 8), "down": (32, 8), "head": (8, 4)}
# Dense: (rows of a program, warps, columns of a warp's iteration, iterations loaded ahead)
DENSE_TILES = {
    "qkv": (16, 4, 256, 2),
    "o": (32, 16, 256, 4),
    "gate_up": (64, 16, 256, 2),
    "down": (32, 16, 256, 4),
    "head": (16, 4, 256, 2),
}
MULTI_TOKEN_DENSE_TILE = (8, 8, 256, 4)
# e4m3, by tokens, as dense ones. For one token measured on an H200, for two and four what fits the registers (by the
# compiler's report for sm_90).
E4M3_TILES = {
    1: {"qkv": (8, 4, 512, 4), "o": (32, 16, 256, 8), "gate_up": (64, 16, 256, 8), "down": (32, 16, 256, 8),
        "head": (8, 8, 512, 8)},
    2: {"qkv": (8, 4, 256, 4), "o": (32, 16, 128, 8), "gate_up": (64, 16, 128, 4), "down": (32, 16, 128, 8),
        "head": (8, 4, 256, 4)},
    4: {"qkv": (8, 8, 256, 8), "o": (32, 16, 128, 4), "gate_up": (64, 16, 128, 2), "down": (32, 16, 128, 4),
        "head": (8, 8, 256, 8)},
}  # fmt: skip
# The interpreter is fastest with few and large programs; the sums have the same order.
INTERPRETER_TILES = {"qkv": (256, 256), "o": (32, 32), "gate_up": (64, 32), "down": (32, 32), "head": (256, 256)}


class Stream(NamedTuple):
    """What the epilogue RESIDUAL adds to and starts the next norm with."""

    residual: torch.Tensor
    norm: torch.Tensor
    squares: torch.Tensor  # written


def empty_gemv_activations(w: PackedWeight, tokens: int, device: torch.device) -> Int8Activations | torch.Tensor:
    """Allocate what a GEMV with `w` reads."""
    make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
    if w.is_packed:
        return Int8Activations.allocate(tokens, w.columns, device, make)
    dtype = torch.float32 if w.dense_dtype == torch.float16 else w.dense_dtype  # x * weight may overflow float16
    return make((tokens, w.columns), dtype=dtype, device=device)


def packed_tile(name: str, tokens: int, kind: str) -> tuple[int, int, int, int]:
    """Return the tile of a packed product: rows, warps, rows loaded ahead, registers."""
    if tokens == 1 and not is_interpreted():
        return ONE_TOKEN_TILES_BY_KIND.get((name, kind), ONE_TOKEN_TILES[name])
    rows, warps = (INTERPRETER_TILES if is_interpreted() else MULTI_TOKEN_TILES)[name]
    return rows, warps, 1 if kind in COMPACT_KINDS else min(2, rows // warps), 0


def dense_tile(name: str, tokens: int, kind: str, epilogue: int) -> tuple[int, int, int, int]:
    """Return the tile of a dense or e4m3 product: rows, warps, columns of an iteration, iterations loaded ahead."""
    tile = DENSE_TILES[name] if tokens == 1 or epilogue != STORE else MULTI_TOKEN_DENSE_TILE
    tile = E4M3_TILES[tokens][name] if kind == FP8 else tile
    return (*INTERPRETER_TILES[name], *tile[2:]) if is_interpreted() else tile


def launch_gemv(
    name: str,
    x: GemvActivations,
    w: PackedWeight,
    out: Any,
    epilogue: int = STORE,
    *,
    stream: Stream | None = None,
    activation: str = "silu",
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Multiply 1, 2 or 4 tokens by a matrix with the tile `name`. STORE writes floats (tokens, rows), the other
    epilogues, for matrices of one part, activations: `stream` is for RESIDUAL, `activation` for GATED.
    A bias is for matrices of one part, too."""
    values: Any = x.values
    unused = values.scales if isinstance(values, Int8Activations) else values
    tokens, first, stride = len(unused), 0, w.rows if epilogue == STORE else 0
    residual, norm, squares = stream or (unused, unused, unused)
    squares_of_x = unused if x.squares is None else x.squares
    for part in w.parts:
        to = out.view(-1)[first:] if epilogue == STORE else out
        first += part.rows
        if part.values is None:
            rows, warps, prefetch, registers = packed_tile(name, tokens, part.kind)
            codes, scales, sums = kernel_outputs(to)
            options = ({"maxnreg": registers} if registers else {}) | pdl_options(pdl)
            gemv_packed[(cdiv(part.rows, rows),)](
                values.codes, values.scales, values.sums, squares_of_x, x.eps, part.unit, part.low, part.high,
                part.scales, codes, residual, norm, scales, sums, squares, part.rows, part.blocks, tokens, part.kind,
                rows, warps, prefetch, epilogue, *norm_parts(x), isinstance(to, Int8Activations), pdl, stride,
                activation, part.small, part.table, bias=bias, num_warps=warps, **options,
            )  # fmt: skip
        else:
            rows, warps, tile_k, prefetch = dense_tile(name, tokens, part.kind, epilogue)
            gemv_dense[(cdiv(part.rows, rows),)](
                values, squares_of_x, x.eps, part.values, to, residual, norm, squares, part.rows, values.shape[1],
                tokens, rows, warps, tile_k, prefetch, epilogue, *norm_parts(x), pdl, stride,
                part.scales if part.kind == FP8 else None, activation, bias, num_warps=warps, **pdl_options(pdl),
            )  # fmt: skip


def norm_parts(x: GemvActivations) -> tuple[int, int]:
    """Return how many partial sums of squares there are, and their room as a power of two."""
    count = 0 if x.squares is None else x.squares.shape[1]
    return count, next_power_of_2(max(count, 1))
