"""x @ w.T on the device, for any number of tokens: which kernel, with which tiles, is a table.

Few tokens meet packed weights as bytes (matvec.py), some on the tensor cores (matmul.py), many after the matrix was
written out as bfloat16; numbers are the vendor's. Rows of x are float32 and so are results. Bytes lose about 5e-3 of a
result's deviation; `fine` adds what they lost as further rows, which leaves less than 1e-4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from triton import cdiv, next_power_of_2

from .device import interpreting
from .matmul import dequantize, matmul
from .matrix import Matrix
from .matvec import matvec
from .planes import Bytes, Part
from .single import as_bytes


class Crossover(NamedTuple):
    """The most tokens that go as bytes, and on the tensor cores straight from the planes."""

    as_bytes: int = 8
    packed: int = 200


CROSSOVERS = {kind: Crossover(packed=96) for kind in ("q5", "q5m", "q6")}  # these unpack through shared memory
FAST = ("q4", "q4m", "q8", "q8d", "q4mm")  # kinds whose nibbles become float16 two at a time
FACTOR_BITS = 10  # float16 activations are at most 2**10
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
    if part.values is not None:
        return by_numbers(x, part.values)
    crossover = CROSSOVERS.get(part.kind, Crossover())
    if len(x) * (1 + fine) <= crossover.as_bytes:
        return by_bytes(x, part, fine)
    return by_tensor_cores(x, part) if len(x) <= crossover.packed else by_scratch(x, part)


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
        PARTS=0, SIZE=1, BYTES=True, FETCH=False, PDL=False, num_warps=8 if interpreting() else warps,
    )  # fmt: skip


def by_tensor_cores(x: torch.Tensor, part: Part) -> torch.Tensor:
    """Weights are unpacked in registers; the sums of several pieces of the columns are added afterwards."""
    tokens = len(x)
    halves, factors = as_halves(x)
    spread = halves.view(tokens, part.blocks, 32).permute(2, 0, 1).contiguous()
    fast = part.kind in FAST
    bn, bm, kb = (128, 64, 32) if fast else (64, 64, 16)
    if interpreting():
        bn, bm, kb = min(256, next_power_of_2(max(part.rows, 16))), min(64, next_power_of_2(max(tokens, 16))), 16
    split = splits(cdiv(part.rows, bn) * cdiv(tokens, bm), cdiv(part.blocks, kb))
    out = x.new_empty(split, tokens, part.rows)
    matmul[(cdiv(part.rows, bn), cdiv(tokens, bm), split)](
        spread, factors, part.unit, part.low, part.high, part.scales, out, tokens, part.rows, part.blocks,
        KIND=part.kind, BN=bn, BM=bm, KB=kb, DTYPE=tl.float16, SPLIT=split, FAST=fast, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out[0] if split == 1 else out.sum(0)


def splits(programs: int, steps: int, wanted: int = 132) -> int:
    """Pieces of the columns, a power of two, so that all multiprocessors have work; each has two steps or more."""
    split = 1
    while programs * split < wanted and steps // (2 * split) >= 2 and split < 8:
        split *= 2
    return split


def as_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 rows and the power of two that each was divided by."""
    most = x.abs().amax(1).clamp_min(1e-30)
    factors = torch.exp2(torch.ceil(torch.log2(most)) - FACTOR_BITS)
    return (x / factors[:, None]).half(), factors


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
        out[:, start : start + count] = _vendor(x, scratch[:count])
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
        return _vendor(halves, values) * factors[:, None]
    return _vendor(x.to(values.dtype), values)


def _vendor(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T, sums and results in float32."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return x.float() @ w.float().T
    return torch.mm(x, w.T, out_dtype=torch.float32)
