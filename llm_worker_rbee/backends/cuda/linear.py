"""x @ w.T for any number of tokens: which kernel, with which tile and how many splits, is a table.

Few tokens are quantized to int8 (gemv.py), some go through the tensor cores with packed weights (gemm.py), many after
the matrix was dequantized to bfloat16; dense weights are cuBLAS's. x and results are float32. Int8 costs about 5e-3 of
a result's deviation; `two_term` adds the rounding errors as further rows, which leaves less than 1e-4. Batch-invariant
products have a fixed number of splits: then the order of a token's sums depends on no other token.

e4m3 weights (`--quantize fp8`) have a float32 scale per row. Few tokens keep their precision, and weights are converted
in registers (gemv.py). More are quantized too, with a scale per token: then the tensor cores multiply e4m3 by e4m3,
twice as fast as bfloat16. Where `torch._scaled_mm` does not take a shape, the weights become bfloat16, which holds them
exactly, for one product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from .device import HOPPER_SHARED_BYTES, is_interpreted, shared_memory_bytes
from .elementwise import quantize_int8
from .gemm import dequantize, gemm_dense, gemm_packed
from .gemv import gemv_dense, gemv_packed, quantize_rows_e4m3
from .packed_weight import E4M3, FP8, Int8Activations, PackedWeight, WeightPart, quantize_e4m3

MAX_INT8_ROWS = 8
MAX_E4M3_GEMV_TOKENS = 4
MAX_GEMM_TOKENS = 256  # up to which packed weights are faster than cuBLAS on a dequantized matrix
SCRATCH_BYTES = 1 << 28  # of a matrix that is dequantized at a time
INVARIANT_TOKENS = 64  # that splits are chosen for in batch-invariant mode
CONCURRENT_PROGRAMS = 264  # two for each multiprocessor
SPLIT_COUNTS = (1, 2, 3, 4, 6, 8)
MAX_SPLITS = 8
SPLIT_COST = 0.05  # of writing and reading partial sums, relative to a pass over all columns
GROUP_COLUMNS = 512  # 16 blocks are interleaved: gemm.py
FACTOR_BITS = 10  # float16 activations are at most 2**10


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


# e4m3, by tokens: (rows of a program, warps, columns of a warp's iteration, iterations loaded ahead). For one token
# measured on an H200, for two and four what fits the registers (by the compiler's report for sm_90).
E4M3_GEMV_TILES = {
    1: {"qkv": (8, 4, 512, 4), "o": (32, 16, 256, 8), "gate_up": (64, 16, 256, 8), "down": (32, 16, 256, 8),
        "head": (8, 8, 512, 8)},
    2: {"qkv": (8, 4, 256, 4), "o": (32, 16, 128, 8), "gate_up": (64, 16, 128, 4), "down": (32, 16, 128, 8),
        "head": (8, 4, 256, 4)},
    4: {"qkv": (8, 8, 256, 8), "o": (32, 16, 128, 4), "gate_up": (64, 16, 128, 2), "down": (32, 16, 128, 4),
        "head": (8, 8, 256, 8)},
}  # fmt: skip


def linear(x: torch.Tensor, w: PackedWeight, *, two_term: bool = False) -> torch.Tensor:
    """Return (T, columns) -> (T, rows) float32."""
    x = x.float().contiguous()
    if len(w.parts) == 1:
        return _linear_part(x, w.parts[0], two_term)
    return torch.cat([_linear_part(x, part, two_term) for part in w.parts], 1)


def _linear_part(x: torch.Tensor, part: WeightPart, two_term: bool) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, part.rows)
    if part.kind == FP8:
        return linear_fp8(x, part)
    if part.values is not None:
        return matmul_dense(x, part.values)
    if len(x) * (1 + two_term) <= MAX_INT8_ROWS:
        return gemv_int8(x, part, two_term)
    return gemm_tensor_cores(x, part) if len(x) <= MAX_GEMM_TOKENS else dequant_then_matmul(x, part)


def linear_batch_invariant(x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    """Return the same for any number of tokens, each as if it were alone."""
    x = x.float().contiguous()
    if not len(x):
        return x.new_empty(0, w.rows)
    return torch.cat([_linear_part_batch_invariant(x, part) for part in w.parts], 1)


def _linear_part_batch_invariant(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    factors = None
    if part.values is None:
        splits = gemm(*interleave_float16(x), PackedWeight((part,)), len(x), batch_invariant=True)
    elif part.values.dtype == torch.float16:
        halves, factors = to_float16(x)
        splits = gemm_dense_batch_invariant(halves, part)
    else:
        dtype = torch.float32 if part.values.dtype == torch.float32 else torch.bfloat16
        splits = gemm_dense_batch_invariant(x.to(dtype), part)
    out = splits[0]
    for split in splits[1:]:
        out = out + split
    return out if factors is None else out * factors[:, None]


def gemv_int8(x: torch.Tensor, part: WeightPart, two_term: bool = False) -> torch.Tensor:
    """Multiply up to 8 rows, half of that with `two_term`; padded to a power of two, so that few kernels compile."""
    tokens = len(x)
    rows = quantize_activations(x, next_power_of_2(tokens * (1 + two_term)), two_term)
    out = x.new_empty(len(rows.scales), part.rows)
    step = min(len(out), 2) if is_interpreted() else len(out)  # unrolled loops are slow under the interpreter
    for first in range(0, len(out), step):
        some = slice(first, first + step)
        _launch_gemv(Int8Activations(rows.codes[some], rows.scales[some], rows.sums[some]), part, out[some])
    return out[:tokens] + out[tokens : 2 * tokens] if two_term else out[:tokens]


def quantize_activations(x: torch.Tensor, rows: int, two_term: bool) -> Int8Activations:
    """Quantize x (T, columns) to int8, with the rounding errors as T further rows if `two_term`; pad with zeros."""
    blocks = x.shape[1] // 32
    make = torch.empty if rows == len(x) * (1 + two_term) else torch.zeros
    out = Int8Activations.allocate(rows, x.shape[1], x.device, make)
    tile = 64 if is_interpreted() else 8
    quantize_int8[(cdiv(blocks, tile), len(x))](
        x, out.codes.view(torch.int8), out.scales, out.sums, len(x), blocks, TILE_BLOCKS=tile, TWO_TERM=two_term,
        num_warps=2,
    )  # fmt: skip
    return out


def _launch_gemv(x: Int8Activations, part: WeightPart, out: torch.Tensor) -> None:
    """Launch the product without norm and epilogue. The bits do not depend on the tile."""
    batch = len(x.scales)
    rows, warps = (8, 8) if batch == 1 else (8, 4)
    if is_interpreted():  # few programs
        rows = warps = min(256, next_power_of_2(part.rows))
    none = x.scales
    gemv_packed[(cdiv(part.rows, rows),)](
        x.codes, x.scales, x.sums, none, 0.0, part.unit, part.low, part.high, part.scales, out, none, none, none, none,
        none, part.rows, part.blocks, B=batch, KIND=part.kind, ROWS=rows, WARPS=warps, PREFETCH=rows // warps,
        EPILOGUE=0, NORM_PARTS=0, NORM_SIZE=1, INT8=True, PDL=False, num_warps=8 if is_interpreted() else warps,
    )  # fmt: skip


def gemm_tensor_cores(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """Multiply by packed weights, dequantized in registers."""
    out = gemm(*interleave_float16(x), PackedWeight((part,)), len(x))
    return out[0] if len(out) == 1 else out.sum(0)


def dequant_then_matmul(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """Dequantize as many rows as the scratch holds to bfloat16 and multiply by cuBLAS."""
    out = x.new_empty(len(x), part.rows)
    dtype = torch.float32 if is_interpreted() else torch.bfloat16
    x = x.to(dtype)
    step = max(1, SCRATCH_BYTES // (part.columns * dtype.itemsize))
    scratch = torch.empty(min(step, part.rows), part.columns, dtype=dtype, device=x.device)
    for start in range(0, part.rows, step):
        count = min(step, part.rows - start)
        dequantize_rows(part, start, scratch[:count])
        out[:, start : start + count] = cublas(x, scratch[:count])
    return out


def dequantize_rows(part: WeightPart, start: int, out: torch.Tensor) -> None:
    """Write the rows from `start` on, as many as `out` has, in its dtype."""
    count = len(out)
    high = part.high[start:] if part.high.dim() > 1 else part.high
    rows, tile = (256, 32) if is_interpreted() else (8, 16)
    dequantize[(cdiv(count, rows), cdiv(part.blocks, tile))](
        part.unit, part.low[start:], high, part.scales[start:], out, count, part.blocks,
        KIND=part.kind, ROWS=rows, TILE_BLOCKS=tile,
    )  # fmt: skip


def matmul_dense(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply in the weights' dtype; float16 with a power of two per row, so that nothing overflows."""
    if values.dtype == torch.float16:
        halves, factors = to_float16(x)
        return cublas(halves, values) * factors[:, None]
    return cublas(x.to(values.dtype), values)


def cublas(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x @ w.T, sums and results in float32."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return x.float() @ w.float().T
    return torch.mm(x, w.T, out_dtype=torch.float32)


def gemm_tile(tokens: int, kind: str, device: torch.device) -> GemmTile:
    """Return the tile of a product; 5-bit kinds load two words at a time, which needs more shared memory per stage."""
    if is_interpreted():
        return GemmTile(256, min(64, max(16, next_power_of_2(tokens))), 4, 2)  # few and large programs
    if tokens > SMALL_SHARED_TILE.tokens // 2 and shared_memory_bytes(device) < HOPPER_SHARED_BYTES:
        return SMALL_SHARED_TILE
    large = LARGEST_TILES.get(kind, LARGE_TILE) if tokens > LARGE_TILE.tokens else LARGE_TILE
    tile = next((tile for limit, tile in TILES_BY_TOKENS.items() if tokens <= limit), large)
    return tile._replace(stages=tile.stages - 1) if kind in ("q5", "q5m") else tile


def num_splits(rows: int, columns: int, tokens: int, tile: GemmTile, max_splits: int = MAX_SPLITS) -> int:
    """Return into how many splits the columns are divided, so that the last wave of programs is nearly full."""
    programs = cdiv(rows, tile.rows) * cdiv(tokens, tile.tokens)
    max_splits = min(max_splits, max(1, columns // GROUP_COLUMNS))
    counts = [n for n in SPLIT_COUNTS if n <= max_splits]
    best: int = min(counts, key=lambda n: cdiv(programs * n, CONCURRENT_PROGRAMS) / n + SPLIT_COST * n)
    return best


def padded_columns(columns: int) -> int:
    """Return the values of a token in the interleaved layout."""
    return int(cdiv(columns, GROUP_COLUMNS)) * GROUP_COLUMNS


def gemm(x: torch.Tensor, factors: torch.Tensor, w: PackedWeight, tokens: int, max_splits: int = MAX_SPLITS,
         batch_invariant: bool = False, pdl: bool = False) -> torch.Tensor:  # fmt: skip
    """Multiply interleaved activations by all parts of a weight: (splits, tokens, rows) float32, to be summed."""
    largest = max(w.parts, key=lambda part: part.rows)
    count = INVARIANT_TOKENS if batch_invariant else tokens
    splits = num_splits(largest.rows, w.columns, count, gemm_tile(count, largest.kind, x.device), max_splits)
    out = torch.empty(splits, tokens, w.rows, device=x.device)
    options: Any = {"launch_pdl": True} if pdl else {}
    first = 0
    for part in w.parts:
        tile = gemm_tile(tokens, part.kind, x.device)
        gemm_packed[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), splits)](
            x, factors, part.unit, part.low, part.high, part.scales, out.view(-1)[first:], tokens, part.rows,
            part.blocks, part.kind, tile.rows, tile.tokens, w.rows, pdl,
            num_warps=tile.warps, num_stages=tile.stages, **options,
        )  # fmt: skip
        first += part.rows
    return out


def gemm_dense_batch_invariant(x: torch.Tensor, part: WeightPart, max_splits: int = MAX_SPLITS) -> torch.Tensor:
    """Multiply by dense or e4m3 weights in a fixed order: (splits, tokens, rows). Slower than cuBLAS."""
    assert part.values is not None
    tokens, columns = x.shape
    tile = gemm_tile(tokens, part.kind, x.device)._replace(stages=3)
    reference_tile = gemm_tile(INVARIANT_TOKENS, part.kind, x.device)
    splits = num_splits(part.rows, columns, INVARIANT_TOKENS, reference_tile, max_splits)
    out = torch.empty(splits, tokens, part.rows, device=x.device)
    values = part.values
    if is_interpreted():  # which multiplies bfloat16 wrongly
        x, values = x.float(), values.float()
    gemm_dense[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), splits)](
        x, values, part.scales, out, tokens, part.rows, columns, tile.rows, tile.tokens,
        32 if x.dtype == torch.float32 else 64, part.kind == FP8, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def interleave_float16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in the interleaved layout, and the power of two that each was divided by: the slow way."""
    halves, factors = to_float16(x)
    rows = torch.nn.functional.pad(halves, (0, padded_columns(x.shape[1]) - x.shape[1]))
    shape = (len(x), -1, 4, 4, 2, 4, 2, 2)  # group, lane, n, last, word, r, p
    return rows.view(shape).permute(5, 0, 1, 3, 7, 4, 2, 6).contiguous(), factors


def to_float16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float16 rows and the power of two that each was divided by."""
    largest = x.abs().amax(1).clamp_min(1e-30)
    factors = torch.exp2(torch.ceil(torch.log2(largest)) - FACTOR_BITS)
    return (x / factors[:, None]).half(), factors


def quantize_activations_e4m3(x: torch.Tensor, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantize_e4m3` does by one kernel. The interpreter rounds e4m3 wrongly (1.99 -> 1)."""
    if is_interpreted():
        return quantize_e4m3(x)
    tokens, columns = x.shape
    out = torch.empty(tokens, columns, dtype=E4M3, device=x.device)
    scales = torch.empty(tokens, device=x.device)
    size = next_power_of_2(columns)
    options: Any = {"launch_pdl": True} if pdl else {}
    quantize_rows_e4m3[(tokens,)](x, out, scales, columns, size, pdl, num_warps=max(1, min(16, size // 512)), **options)
    return out, scales


def matmul_fp8(
    x: torch.Tensor, part: WeightPart, factors: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """Multiply x (tokens, columns), of any float type or e4m3 with factors (tokens), by weights.T: (tokens, rows)."""
    assert part.values is not None
    if not part.fits_scaled_mm:
        return _matmul_bfloat16(x, part)
    if x.dtype == E4M3 and factors is not None:
        rows, scales = x, factors
    else:
        rows, scales = quantize_activations_e4m3(x.contiguous(), pdl)
    if is_interpreted():
        return (rows.float() * scales[:, None]) @ (part.values.float() * part.scales[:, None]).T
    return torch._scaled_mm(
        rows, part.values.T, scales[:, None], part.scales[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _matmul_bfloat16(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    assert part.values is not None
    if is_interpreted():
        return x.float() @ part.values.float().T * part.scales
    sums = torch.mm(x.bfloat16(), part.values.bfloat16().T, out_dtype=torch.float32)
    return sums * part.scales


def linear_fp8(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    """Multiply x (tokens, columns) float32 by weights.T for any number of tokens: (tokens, rows) float32."""
    return _gemv_fp8(x, part) if len(x) <= MAX_E4M3_GEMV_TOKENS else matmul_fp8(x, part).float()


def _gemv_fp8(x: torch.Tensor, part: WeightPart) -> torch.Tensor:
    tokens, out = len(x), x.new_empty(len(x), part.rows)
    size = next_power_of_2(tokens)  # fewer kernels to compile
    padded = torch.nn.functional.pad(x, (0, 0, 0, size - tokens)) if size > tokens else x
    sums = out if size == tokens else x.new_empty(size, part.rows)
    rows, warps, tile_k, prefetch = E4M3_GEMV_TILES[size]["qkv"]
    if is_interpreted():  # few programs
        rows = warps = min(256, next_power_of_2(part.rows))
    gemv_dense[(cdiv(part.rows, rows),)](
        padded, x, 0.0, part.values, sums, x, x, x, part.rows, part.columns, B=size, ROWS=rows, WARPS=warps,
        TILE_K=tile_k, PREFETCH=prefetch, EPILOGUE=0, NORM_PARTS=0, NORM_SIZE=1, PDL=False, scales=part.scales,
        num_warps=8 if is_interpreted() else warps,
    )  # fmt: skip
    return sums[:tokens]
