"""x @ w.T on the device, for any number of tokens: which kernel, with which tiles, is a table.

Few tokens meet packed weights as bytes (matvec.py), some on the tensor cores (matmul.py), many after the matrix was
written out as bfloat16; numbers are the vendor's, e4m3 are fp8.py's. Rows of x are float32 and so are results. Bytes
lose about 5e-3 of a result's deviation; `fine` adds what they lost as further rows, which leaves less than 1e-4.
"""

from __future__ import annotations

import torch
from triton import cdiv, next_power_of_2

from . import fp8, tensor_cores
from .device import interpreting
from .matmul import dequantize
from .matrix import Matrix
from .matvec import matvec
from .planes import FP8, Bytes, Part
from .single import as_bytes

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
    return by_tensor_cores(x, part) if len(x) <= tensor_cores.MOST_TOKENS else by_scratch(x, part)


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
    out = tensor_cores.product(*tensor_cores.spread_halves(x), Matrix((part,)), len(x))
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
        found = tensor_cores.product(*tensor_cores.spread_halves(x), Matrix((part,)), len(x), fixed=True)
    elif part.values.dtype == torch.float16:
        halves, factors = tensor_cores.as_halves(x)
        found = tensor_cores.numbers_product(halves, part)
    else:
        kind = torch.float32 if part.values.dtype == torch.float32 else torch.bfloat16
        found = tensor_cores.numbers_product(x.to(kind), part)
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
        halves, factors = tensor_cores.as_halves(x)
        return vendor(halves, values) * factors[:, None]
    return vendor(x.to(values.dtype), values)


def vendor(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T, sums and results in float32."""
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return x.float() @ w.float().T
    return torch.mm(x, w.T, out_dtype=torch.float32)
