"""x @ w.T on the device, for any number of tokens: which kernel, with which tiles, is a table.

Few tokens meet packed weights as bytes (matvec.py), some on the tensor cores (matmul.py), many after the matrix was
written out as bfloat16; numbers are the vendor's, e4m3 are fp8.py's. Rows of x are float32 and so are results. Bytes
lose about 5e-3 of a result's deviation; `fine` adds what they lost as further rows, which leaves less than 1e-4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from . import device, fp8
from .device import interpreting
from .gemm import dequantize, matmul, matmul_numbers
from .gemv import matvec
from .packed_weight import FP8, Bytes, Part
from .repack import Matrix
from .unfused_ops import as_bytes

AS_BYTES = 8  # the most rows that go as bytes
SCRATCH = 1 << 28  # bytes of a matrix that are written out at a time


def times(x: torch.Tensor, w: Matrix, *, fine: bool = False) -> torch.Tensor:
    """(T, columns) -> (T, rows) float32."""
    x = x.float().contiguous()
    if len(w.parts) == 1:
        return _times(x, w.parts[0], fine)
    return torch.cat([_times(x, part, fine) for part in w.parts], 1)


def _times(x: torch.Tensor, part: Part, fine: bool) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, part.rows)
    if part.kind == FP8:
        return fp8.times(x, part)
    if part.values is not None:
        return by_numbers(x, part.values)
    if len(x) * (1 + fine) <= AS_BYTES:
        return by_bytes(x, part, fine)
    return by_tensor_cores(x, part) if len(x) <= MOST_TOKENS else by_scratch(x, part)


def by_bytes(x: torch.Tensor, part: Part, fine: bool = False) -> torch.Tensor:
    """Up to 8 rows, half of that if `fine`; they are filled up to a power of two, so that few kernels are compiled."""
    tokens = len(x)
    rows = as_bytes(x, next_power_of_2(tokens * (1 + fine)), fine)
    out = x.new_empty(len(rows.d), part.rows)
    step = min(len(out), 2) if interpreting() else len(out)  # the interpreter takes long over what is unrolled
    for first in range(0, len(out), step):
        some = slice(first, first + step)
        _matvec(Bytes(rows.q[some], rows.d[some], rows.s[some]), part, out[some])
    return out[:tokens] + out[tokens : 2 * tokens] if fine else out[:tokens]


def _matvec(x: Bytes, part: Part, out: torch.Tensor) -> None:
    """The product alone: no norm before it, nothing after it. The bits do not depend on the tile."""
    batch = len(x.d)
    rows, warps = (8, 8) if batch == 1 else (8, 4)
    if interpreting():  # few programs
        rows = warps = min(256, next_power_of_2(part.rows))
    none = x.d
    matvec[(cdiv(part.rows, rows),)](
        x.q, x.d, x.s, none, 0.0, part.unit, part.low, part.high, part.scales, out, none, none, none, none, none,
        part.rows, part.blocks, B=batch, KIND=part.kind, ROWS=rows, WARPS=warps, AHEAD=rows // warps, EPILOGUE=0,
        PARTS=0, SIZE=1, BYTES=True, PDL=False, num_warps=8 if interpreting() else warps,
    )  # fmt: skip


def by_tensor_cores(x: torch.Tensor, part: Part) -> torch.Tensor:
    """Weights are unpacked in registers; the sums of several pieces of the columns are added afterwards."""
    out = product(*spread_halves(x), Matrix((part,)), len(x))
    return out[0] if len(out) == 1 else out.sum(0)


def in_fixed_order(x: torch.Tensor, w: Matrix) -> torch.Tensor:
    """The same for any number of tokens, each as if it were alone."""
    x = x.float().contiguous()
    if not len(x):
        return x.new_empty(0, w.rows)
    return torch.cat([_in_fixed_order(x, part) for part in w.parts], 1)


def _in_fixed_order(x: torch.Tensor, part: Part) -> torch.Tensor:
    factors = None
    if part.values is None:
        found = product(*spread_halves(x), Matrix((part,)), len(x), fixed=True)
    elif part.values.dtype == torch.float16:
        halves, factors = as_halves(x)
        found = numbers_product(halves, part)
    else:
        kind = torch.float32 if part.values.dtype == torch.float32 else torch.bfloat16
        found = numbers_product(x.to(kind), part)
    out = found[0]
    for more in found[1:]:
        out = out + more
    return out if factors is None else out * factors[:, None]


def by_scratch(x: torch.Tensor, part: Part) -> torch.Tensor:
    """Rows of the matrix as bfloat16, as many as the scratch holds, then the vendor's product."""
    out = x.new_empty(len(x), part.rows)
    dtype = torch.float32 if interpreting() else torch.bfloat16
    x = x.to(dtype)
    step = max(1, SCRATCH // (part.columns * dtype.itemsize))
    scratch = torch.empty(min(step, part.rows), part.columns, dtype=dtype, device=x.device)
    for start in range(0, part.rows, step):
        count = min(step, part.rows - start)
        written_out(part, start, scratch[:count])
        out[:, start : start + count] = vendor(x, scratch[:count])
    return out


def written_out(part: Part, start: int, out: torch.Tensor) -> None:
    """Rows from `start` on, as many as `out` has, as numbers of its type."""
    count = len(out)
    high = part.high[start:] if part.high.dim() > 1 else part.high
    rows, kb = (256, 32) if interpreting() else (8, 16)
    dequantize[(cdiv(count, rows), cdiv(part.blocks, kb))](
        part.unit, part.low[start:], high, part.scales[start:], out, count, part.blocks,
        KIND=part.kind, ROWS=rows, KB=kb,
    )  # fmt: skip


def by_numbers(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """x as numbers of the weights' type; float16 with a power of two for each row, so that nothing overflows."""
    if values.dtype == torch.float16:
        halves, factors = as_halves(x)
        return vendor(halves, values) * factors[:, None]
    return vendor(x.to(values.dtype), values)


def vendor(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T, sums and results in float32."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return x.float() @ w.float().T
    return torch.mm(x, w.T, out_dtype=torch.float32)


FIXED = 64  # tokens that parts are chosen for, whatever there are
HOPPER_SHARED = 200 << 10  # bytes, about
PROGRAMS = 264  # that run at a time: two for each multiprocessor
COUNTS = (1, 2, 3, 4, 6, 8)  # of parts
MOST_PARTS = 8
PART_COSTS = 0.05  # to write and to read again, in runs of all columns
GROUP = 16  # blocks that lie together: matmul.py
FACTOR_BITS = 10  # float16 activations are at most 2**10


class Tile(NamedTuple):
    """How a product is cut: rows and tokens of a program, warps, stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


USUAL = Tile(128, 64, 8, 3)
TILES = {16: Tile(64, 16, 4, 4), 32: Tile(64, 32, 4, 4), 64: USUAL}  # by the most tokens
MANY = Tile(128, 128, 8, 3)
SMALL = Tile(64, 64, 4, 2)  # of 33 and more where shared memory is less than a Hopper's
LARGE = {"q4": Tile(128, 256, 8, 3), "q4m": Tile(128, 256, 8, 3)}  # of more than 128; others lack the shared memory
MOST_TOKENS = 256  # for which this is faster than the vendor's product of a matrix written out


def tile_for(tokens: int, kind: str) -> Tile:
    """Fifth bits are taken two words at a time, which needs more shared memory a stage."""
    if device.interpreting():
        return Tile(256, min(64, max(16, next_power_of_2(tokens))), 4, 2)  # few and large programs
    if tokens > SMALL.tokens // 2 and device.shared_memory() < HOPPER_SHARED:
        return SMALL
    large = LARGE.get(kind, MANY) if tokens > MANY.tokens else MANY
    tile = next((tile for most, tile in TILES.items() if tokens <= most), large)
    return tile._replace(stages=tile.stages - 1) if kind in ("q5", "q5m") else tile


def parts_for(rows: int, columns: int, tokens: int, tile: Tile, most: int = MOST_PARTS) -> int:
    """Into how many parts the columns are cut: programs run PROGRAMS at a time, and nobody likes the last few."""
    programs = cdiv(rows, tile.rows) * cdiv(tokens, tile.tokens)
    most = min(most, max(1, columns // (32 * GROUP)))
    counts = [n for n in COUNTS if n <= most]
    best: int = min(counts, key=lambda n: cdiv(programs * n, PROGRAMS) / n + PART_COSTS * n)
    return best


def padded(columns: int) -> int:
    """Numbers of a token, spread."""
    return int(cdiv(columns, 32 * GROUP)) * 32 * GROUP


def product(x: torch.Tensor, factors: torch.Tensor, w: Any, tokens: int, most: int = MOST_PARTS, fixed: bool = False,
            pdl: bool = False) -> torch.Tensor:  # fmt: skip
    """(parts, tokens, rows) float32, whose sum is the product of spread activations with all parts of a matrix."""
    largest = max(w.parts, key=lambda part: part.rows)
    usual = FIXED if fixed else tokens
    count = parts_for(largest.rows, w.columns, usual, tile_for(usual, largest.kind), most)
    out = torch.empty(count, tokens, w.rows, device=x.device)
    first = 0
    for part in w.parts:
        _launch(x, factors, part, out.view(-1)[first:], tokens, count, w.rows, pdl)
        first += part.rows
    return out


def _launch(x: torch.Tensor, factors: torch.Tensor, part: Part, out: torch.Tensor, tokens: int, count: int,
            stride: int, pdl: bool) -> None:  # fmt: skip
    tile = tile_for(tokens, part.kind)
    matmul[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), count)](
        x, factors, part.unit, part.low, part.high, part.scales, out, tokens, part.rows, part.blocks,
        part.kind, tile.rows, tile.tokens, stride, pdl,
        num_warps=tile.warps, num_stages=tile.stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def numbers_product(x: torch.Tensor, part: Part, most: int = MOST_PARTS) -> torch.Tensor:
    """(parts, tokens, rows) of numbers of any kind, in a fixed order: slower than the vendor's for many tokens."""
    assert part.values is not None
    tokens, columns = x.shape
    tile = tile_for(tokens, part.kind)._replace(stages=3)
    count = parts_for(part.rows, columns, FIXED, tile_for(FIXED, part.kind), most)
    out = torch.empty(count, tokens, part.rows, device=x.device)
    values = part.values
    if device.interpreting():  # which multiplies bfloat16 wrongly
        x, values = x.float(), values.float()
    matmul_numbers[(cdiv(part.rows, tile.rows), cdiv(tokens, tile.tokens), count)](
        x, values, part.scales, out, tokens, part.rows, columns, tile.rows, tile.tokens,
        32 if x.dtype == torch.float32 else 64, part.kind == FP8, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def spread_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers, spread, and the power of two that each was divided by: the slow way."""
    halves, factors = as_halves(x)
    rows = torch.nn.functional.pad(halves, (0, padded(x.shape[1]) - x.shape[1]))
    shape = (len(x), -1, 4, 4, 2, 4, 2, 2)  # group, lane, n, last, word, r, p
    return rows.view(shape).permute(5, 0, 1, 3, 7, 4, 2, 6).contiguous(), factors


def as_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 rows and the power of two that each was divided by."""
    most = x.abs().amax(1).clamp_min(1e-30)
    factors = torch.exp2(torch.ceil(torch.log2(most)) - FACTOR_BITS)
    return (x / factors[:, None]).half(), factors
