"""x @ w.T of any number of tokens on tensor cores: which kernel, with which tile and how many splits, is a table.

Some tokens are multiplied by packed weights as they are (gemm.py), many after the matrix was dequantized for cuBLAS;
dense weights are cuBLAS's. Batch-invariant products have a fixed number of splits: then the order of a token's sums
depends on no other token. linear_small_batch.py has products of few tokens.

e4m3 weights (`--quantize fp8`) have a float32 scale per row. Activations are quantized too, with a scale per token:
then the tensor cores multiply e4m3 by e4m3, twice as fast as bfloat16. Where `torch._scaled_mm` does not take a shape,
the weights become bfloat16, which holds them exactly, for one product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton import cdiv, next_power_of_2

from .compact_kinds import COMPACT_KINDS
from .device import HOPPER_SHARED_BYTES, is_interpreted, shared_memory_bytes
from .elementwise import launch_convert
from .gemm import gemm_dense, gemm_packed
from .packed_weight import E4M3, FP8, Activations, PackedWeight, WeightPart, dequantize_rows, quantize_e4m3

MAX_GEMM_TOKENS = 256  # up to which packed weights are faster than cuBLAS on a dequantized matrix
MAX_GEMM_TOKENS_BY_KIND = dict.fromkeys(COMPACT_KINDS, 128)  # which are decoded again for every 64; not measured
SCRATCH_BYTES = 1 << 28  # of a matrix that is dequantized at a time
INVARIANT_TOKENS = 64  # that splits are chosen for in batch-invariant mode
CONCURRENT_PROGRAMS = 264  # two for each multiprocessor
SPLIT_COUNTS = (1, 2, 3, 4, 6, 8)
MAX_SPLITS = 8
INVARIANT_SPLITS = 4  # at most, of every batch-invariant product
SPLIT_COST = 0.05  # of writing and reading partial sums, relative to a pass over all columns
GROUP_COLUMNS = 512  # 16 blocks are interleaved: gemm.py


class GemmTile(NamedTuple):
    """Rows and tokens of a program, warps, stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


# Measured on an H200 (docs/decisions.md).
DEFAULT_TILE = GemmTile(128, 64, 8, 3)
TILES_BY_TOKENS = {16: GemmTile(64, 16, 4, 4), 32: GemmTile(64, 32, 4, 4), 64: DEFAULT_TILE}
LARGE_TILE = GemmTile(128, 128, 8, 3)
LARGEST_TILES = {"q4": GemmTile(128, 256, 8, 3), "q4m": GemmTile(128, 256, 8, 3)}  # others lack the shared memory
SMALL_SHARED_TILE = GemmTile(64, 64, 4, 2)  # from 33 tokens where shared memory is less than on Hopper
# Compact kinds multiply four words of activations an iteration.
COMPACT_TILES_BY_TOKENS = {16: GemmTile(64, 16, 4, 3), 32: GemmTile(64, 32, 4, 3)}
COMPACT_TILE, SMALL_SHARED_COMPACT_TILE = GemmTile(128, 64, 8, 2), GemmTile(64, 32, 4, 2)


class BatchedLinear:
    """Products with one buffer for the largest dequantized matrix, which grows in the first step that needs it."""

    def __init__(self, device: torch.device, *, batch_invariant: bool) -> None:
        self.device, self.batch_invariant = device, batch_invariant
        self._scratch: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, w: PackedWeight, *, is_head: bool = False) -> torch.Tensor:
        """Return x (tokens, columns) @ w.T in float32."""
        return sum_splits(self.multiply(self.convert(x, w, is_head=is_head), w))

    def stays_packed(self, w: PackedWeight, tokens: int, *, is_head: bool = False) -> bool:
        """Return whether a matrix is multiplied as it is packed; the output head always, as results are float32."""
        if not w.is_packed or self.batch_invariant or is_head:
            return w.is_packed
        return tokens <= min(MAX_GEMM_TOKENS_BY_KIND.get(part.kind, MAX_GEMM_TOKENS) for part in w.parts)

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
        values = torch.empty(tokens, columns, dtype=dtype, device=self.device)
        return Activations(values, torch.empty(tokens, device=self.device), packed)

    def convert(self, x: torch.Tensor, w: PackedWeight, *, is_head: bool = False) -> Activations:
        """Return rows (tokens, columns) of any float type as activations for `w`."""
        out = self.empty_activations(w, len(x), is_head=is_head)
        launch_convert(x, out)
        return out

    def multiply(self, x: Activations, w: PackedWeight, max_splits: int = MAX_SPLITS) -> torch.Tensor:
        """Return (splits, tokens, rows), whose sum is the product."""
        tokens, part = len(x.values), w.parts[0]
        if not tokens:
            return torch.empty(1, 0, w.rows, device=self.device)
        if x.is_interleaved:
            return gemm(x, w, max_splits, batch_invariant=self.batch_invariant)
        if self.batch_invariant:
            return _apply_factors(gemm_dense_batch_invariant(x.values, part), x)
        if part.kind == FP8:
            return matmul_fp8(x, part)[None]
        if part.values is None:
            return self._dequantize_and_multiply(x.values, w)[None]
        return _apply_factors(_cublas(x.values, part.values)[None], x)

    def _dequantize_and_multiply(self, x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
        """Multiply by cuBLAS, as many dequantized rows at a time as the scratch holds."""
        # Of eight rows every plane begins at 16 bytes, so one variant of the kernel serves all slices.
        step = min(max(part.rows for part in w.parts), max(8, SCRATCH_BYTES // (w.columns * x.itemsize) // 8 * 8))
        if self._scratch is None or self._scratch.numel() < step * w.columns:
            self._scratch = torch.empty(step * w.columns, dtype=x.dtype, device=self.device)
        out = []
        for part in w.parts:
            for start in range(0, part.rows, step):
                rows = self._scratch[: min(step, part.rows - start) * w.columns].view(-1, w.columns)
                dequantize_rows(part, start, rows)
                out.append(_cublas(x, rows))
        return out[0] if len(out) == 1 else torch.cat(out, 1)


def sum_splits(splits: torch.Tensor) -> torch.Tensor:
    """Return the sum of (splits, tokens, rows) in float32, in the order of the kernels that read splits."""
    out = splits[0].float()
    for split in splits[1:]:
        out = out + split
    return out


def _apply_factors(splits: torch.Tensor, x: Activations) -> torch.Tensor:
    """Multiply (splits, tokens, rows) by the factors of float16 activations."""
    return splits if x.factors is None or x.values.dtype != torch.float16 else splits * x.factors[:, None]


def _cublas(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x @ w.T, sums in float32; of bfloat16 as bfloat16, of float16, whose range is small, as float32."""
    if x.device.type == "cpu":
        return x.float() @ w.float().T
    return torch.mm(x, w.T, out_dtype=torch.float32) if x.dtype == torch.float16 else torch.mm(x, w.T)


def gemm_tile(tokens: int, kind: str, device: torch.device) -> GemmTile:
    """Return the tile of a product; 5-bit kinds load two words at a time, which needs more shared memory per stage."""
    if is_interpreted():
        return GemmTile(256, min(64, max(16, next_power_of_2(tokens))), 4, 2)  # few and large programs
    if kind in COMPACT_KINDS:
        return _compact_tile(tokens, device)
    if tokens > SMALL_SHARED_TILE.tokens // 2 and shared_memory_bytes(device) < HOPPER_SHARED_BYTES:
        return SMALL_SHARED_TILE
    large = LARGEST_TILES.get(kind, LARGE_TILE) if tokens > LARGE_TILE.tokens else LARGE_TILE
    tile = next((tile for limit, tile in TILES_BY_TOKENS.items() if tokens <= limit), large)
    return tile._replace(stages=tile.stages - 1) if kind in ("q5", "q5m") else tile


def _compact_tile(tokens: int, device: torch.device) -> GemmTile:
    if tokens > SMALL_SHARED_COMPACT_TILE.tokens // 2 and shared_memory_bytes(device) < HOPPER_SHARED_BYTES:
        return SMALL_SHARED_COMPACT_TILE
    return next((tile for limit, tile in COMPACT_TILES_BY_TOKENS.items() if tokens <= limit), COMPACT_TILE)


def num_splits(rows: int, columns: int, tokens: int, tile: GemmTile, max_splits: int = MAX_SPLITS) -> int:
    """Return into how many splits the columns are divided, so that the last wave of programs is nearly full."""
    programs = cdiv(rows, tile.rows) * cdiv(tokens, tile.tokens)
    max_splits = min(max_splits, max(1, columns // GROUP_COLUMNS))
    counts = [n for n in SPLIT_COUNTS if n <= max_splits]
    best: int = min(counts, key=lambda n: cdiv(programs * n, CONCURRENT_PROGRAMS) / n + SPLIT_COST * n)
    return best


def invariant_splits(part: WeightPart, device: torch.device) -> int:
    """Return the splits of a batch-invariant product: a function of the matrix alone."""
    tile = gemm_tile(INVARIANT_TOKENS, part.kind, device)
    return num_splits(part.rows, part.columns, INVARIANT_TOKENS, tile, INVARIANT_SPLITS)


def gemm(x: Activations, w: PackedWeight, max_splits: int, *, batch_invariant: bool) -> torch.Tensor:
    """Multiply interleaved activations by all parts of a weight: (splits, tokens, rows) float32, to be summed."""
    tokens, device = len(x.values), x.values.device
    largest = max(w.parts, key=lambda part: part.rows)
    tile = gemm_tile(tokens, largest.kind, device)
    splits = num_splits(largest.rows, w.columns, tokens, tile, max_splits)
    if batch_invariant:
        splits = invariant_splits(largest, device)
    out = torch.empty(splits, tokens, w.rows, device=device)
    first = 0
    for part in w.parts:
        tile = gemm_tile(tokens, part.kind, device)
        gemm_packed[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), splits)](
            x.values, x.factors, part.unit, part.low, part.high, part.scales, out.view(-1)[first:], tokens, part.rows,
            w.rows, part.blocks, part.kind, tile.rows, tile.tokens, part.small, part.table, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        first += part.rows
    return out


def gemm_dense_batch_invariant(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """Multiply by dense or e4m3 weights in a fixed order: (splits, tokens, rows). Slower than cuBLAS."""
    assert part.values is not None
    tokens, columns = x.shape
    tile = gemm_tile(tokens, part.kind, x.device)._replace(stages=3)
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
