"""How a product for few tokens goes on (EPILOGUE): stored; added to the residual stream, times the next norm's weight,
as bytes; gate and up rows together, activated, as bytes.

The norm itself is one number a token, so who reads the bytes multiplies by it at the end: `squares` holds the partial
sums of squares that the kernel before left, one a program. A program that hands on owns 32 results: one block of
activations.
"""

from __future__ import annotations

import triton
import triton.language as tl

STORE, RESIDUAL, GATED = 0, 1, 2


@triton.jit
def row_of(r: tl.constexpr, half_rows, EPILOGUE: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """The rows (warps, 1) that a program computes in its turn r; where gated, the second half are up rows."""
    warp = tl.arange(0, WARPS)
    if EPILOGUE == 2:
        HALF: tl.constexpr = ROWS // 2
        return tl.program_id(0) * HALF + (r * WARPS) % HALF + warp + ((r * WARPS) // HALF) * half_rows
    return tl.program_id(0) * ROWS + r * WARPS + warp


@triton.jit
def inverse_rms(squares, t, eps, width, PARTS: tl.constexpr, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """1 / sqrt(mean of squares + eps) from partial sums, (warps,): every warp adds them up for itself."""
    i = tl.arange(0, SIZE)[None, :] + tl.zeros((WARPS, SIZE), tl.int32)
    return tl.rsqrt(tl.sum(tl.load(squares + t * PARTS + i, mask=i < PARTS, other=0.0), 1) / width + eps)


@triton.jit
def side_by_side(ys, R: tl.constexpr, WARPS: tl.constexpr):
    """R tensors of (warps,) -> one of (R * warps,), the first tensor first: one warp can then reduce them."""
    if R == 1:
        out = ys[0]
    elif R == 2:
        out = tl.reshape(tl.permute(tl.join(ys[0], ys[1]), (1, 0)), (2 * WARPS,))
    elif R == 4:
        four = tl.join(tl.join(ys[0], ys[1]), tl.join(ys[2], ys[3]))
        out = tl.reshape(tl.permute(four, (2, 1, 0)), (4 * WARPS,))
    else:
        tl.static_assert(R == 8, "at most eight results a warp")
        low = tl.join(tl.join(ys[0], ys[1]), tl.join(ys[2], ys[3]))
        high = tl.join(tl.join(ys[4], ys[5]), tl.join(ys[6], ys[7]))
        out = tl.reshape(tl.permute(tl.join(low, high), (3, 2, 1, 0)), (8 * WARPS,))
    return out


@triton.jit
def write_block(y, t, block, out, out_d, out_s, blocks):
    """32 values as one block of bytes with its scale and sums."""
    c = tl.arange(0, 32)
    d = tl.max(tl.abs(y), 0) / 127.0
    q = tl.floor(y * tl.where(d > 0, 1.0 / d, 0.0) + 0.5)
    tl.store(out + ((t * 8 + c // 4) * blocks + block) * 4 + c % 4, q.to(tl.int8))
    tl.store(out_d + t * blocks + block, d)
    tl.store(out_s + (t * 2) * blocks + block, tl.sum(tl.where(c < 16, q, 0.0), 0) * d)
    tl.store(out_s + (t * 2 + 1) * blocks + block, tl.sum(tl.where(c < 16, 0.0, q), 0) * d)


@triton.jit
def hand_on(y, t, columns, out, out_d, out_s, BYTES: tl.constexpr):
    """32 values of a program, to the next product: as bytes or as they are."""
    if BYTES:
        write_block(y, t, tl.program_id(0), out, out_d, out_s, columns // 32)
    else:
        c = tl.program_id(0) * 32 + tl.arange(0, 32)
        tl.store(out + t * columns + c, y.to(out.dtype.element_ty))


@triton.jit
def finish(
    ys, t, rows, out, stream, norm, out_d, out_s, out_squares,
    R: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EPILOGUE: tl.constexpr, BYTES: tl.constexpr,
    STRIDE: tl.constexpr = 0,
):  # fmt: skip
    """What becomes of the results of a program for token t. Those that are stored go to a row of STRIDE numbers."""
    if EPILOGUE == 0:
        for r in tl.static_range(R):
            n = row_of(r, rows // 2, EPILOGUE, ROWS, WARPS)
            wide = STRIDE if STRIDE > 0 else rows
            tl.store(out + t * wide + n, ys[r].to(out.dtype.element_ty), mask=n < rows)
    elif EPILOGUE == 1:
        n = tl.program_id(0) * 32 + tl.arange(0, 32)
        y = side_by_side(ys, R, WARPS) + tl.load(stream + t * rows + n)
        tl.store(stream + t * rows + n, y)
        tl.store(out_squares + t * (rows // 32) + tl.program_id(0), tl.sum(y * y, 0))
        hand_on(y * tl.load(norm + n), t, rows, out, out_d, out_s, BYTES)
    else:
        hs = ()
        for r in tl.static_range(R // 2):
            hs = hs + (ys[r] / (1.0 + tl.exp(-ys[r])) * ys[R // 2 + r],)
        hand_on(side_by_side(hs, R // 2, WARPS), t, rows // 2, out, out_d, out_s, BYTES)
