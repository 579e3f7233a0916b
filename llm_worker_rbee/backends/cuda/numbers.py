"""Matrix-vector products with weights that are numbers, for few tokens: as matvec.py, without planes.

bfloat16, float16 and float32 as they are; e4m3 with a float32 scale for each row, which comes last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import finish, inverse_rms, row_of
from .intrinsics import start_next, wait_before


@triton.jit
def matvec_numbers(
    x, squares, eps, w, out, stream, norm, out_squares,
    rows, columns: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr,
    AHEAD: tl.constexpr, EPILOGUE: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
    STRIDE: tl.constexpr = 0, scales=None,
):  # fmt: skip
    """Weights (rows, columns), their scales (rows) where they have any, and activations that are numbers."""
    R: tl.constexpr = ROWS // WARPS
    SHAPE: tl.constexpr = (WARPS, WIDE)
    lane = tl.arange(0, WIDE)[None, :] + tl.zeros(SHAPE, tl.int32)
    start_next(PDL)
    held = ()
    for i in tl.static_range(AHEAD):
        for r in tl.static_range(R):
            n = tl.minimum(row_of(r, rows // 2, EPILOGUE, ROWS, WARPS), rows - 1)[:, None].to(tl.int64)
            c = i * WIDE + lane
            held = held + (tl.load(w + n * columns + c, mask=c < columns, other=0.0, eviction_policy="evict_first"),)
    factors = ()
    if scales is not None:
        for r in tl.static_range(R):
            factors = factors + (tl.load(scales + tl.minimum(row_of(r, rows // 2, EPILOGUE, ROWS, WARPS), rows - 1)),)
    wait_before(PDL)
    sums = ()
    for _ in tl.static_range(B * R):
        sums = sums + (tl.zeros(SHAPE, tl.float32),)
    for start in tl.static_range(0, columns, WIDE):
        ws = ()
        for r in tl.static_range(R):
            ws = ws + (held[r],)
        rest = ()
        for i in tl.static_range(R, AHEAD * R):
            rest = rest + (held[i],)
        if start + AHEAD * WIDE < columns:
            for r in tl.static_range(R):
                n = tl.minimum(row_of(r, rows // 2, EPILOGUE, ROWS, WARPS), rows - 1)[:, None].to(tl.int64)
                c = start + AHEAD * WIDE + lane
                more = tl.load(w + n * columns + c, mask=c < columns, other=0.0, eviction_policy="evict_first")
                rest = rest + (more,)
        else:
            for r in tl.static_range(R):
                rest = rest + (ws[r],)
        held = rest
        new = ()
        c = start + lane
        for t in tl.static_range(B):
            xt = tl.load(x + t * columns + c, mask=c < columns, other=0.0).to(tl.float32)
            for r in tl.static_range(R):
                new = new + (sums[t * R + r] + ws[r].to(tl.float32) * xt,)
        sums = new
    for t in tl.static_range(B):
        ys = ()
        for r in tl.static_range(R):
            y = tl.sum(sums[t * R + r], 1)
            ys = ys + (y if scales is None else y * factors[r],)
        if PARTS > 0:
            factor = inverse_rms(squares, t, eps, columns, PARTS, SIZE, WARPS)
            scaled = ()
            for r in tl.static_range(R):
                scaled = scaled + (ys[r] * factor,)
            ys = scaled
        finish(ys, t, rows, out, stream, norm, out, out, out_squares, R, ROWS, WARPS, EPILOGUE, False, STRIDE)


@triton.jit
def round_rows(x, out, scales, columns, SIZE: tl.constexpr, PDL: tl.constexpr = False):
    """A program a token: its numbers as e4m3, the largest of them 448, and the scale that brings them back."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, SIZE)
    start_next(PDL)
    wait_before(PDL)
    y = tl.load(x + t * columns + c, mask=c < columns, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-30) / 448.0
    tl.store(scales + t, scale)
    tl.store(out + t * columns + c, (y / scale).to(out.dtype.element_ty), mask=c < columns)
