"""GEMV: products of 1 to 8 tokens with packed or dense weights, and their epilogues. gemm.py has larger batches.

A warp owns a row, a lane four neighbouring blocks of 32 columns: tensors are (warps, 128). Planes are laid out so that
these are 16-byte loads, and no value changes lanes before the final sum:

    low     int32 (rows, 4, blocks)   word i of a block: columns 4i..4i+3 in the low nibbles, 16+4i.. in the high ones
    high    int16 (rows, 4 | 2, blocks)   half word i: two bits of each column of word i, at `high_bit_shift`; of
                                      5-bit kinds one bit, the bit of word 2i before the bit of word 2i+1
    bytes   int32 (rows, 8, blocks)   word q: columns 4q..4q+3
    scales  float16 (rows, blocks), or two of them in an int32 (scale, minimum; or the scales of 16 columns each)

Their rows have room for a multiple of PLANE_BLOCKS blocks (`plane_stride`).

compact_kinds.py has the planes of smaller kinds. Activations are int8 in the same order: (batch, 8, blocks) words, a
float32 scale per block, its sums times the scale.

RMSNorm is fused: the producer stores x * weight and partial sums of squares, one per program; the consumer multiplies
by 1/rms in its epilogue. A program that stores activations owns 32 results, one block.
"""

# Kernels add to tuples that are empty at first.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl

from ....config import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from .compact_kinds import (
    COMPACT,
    block_scales,
    code_words,
    group_scale,
    is_compact,
    kind_field,
    load_block,
    nibble_values,
    small_scales,
)
from .intrinsics import (
    dp4a,
    dp4a_us,
    e4m3_to_half,
    high_half,
    launch_next,
    low_half,
    signed_byte,
    spread_high_bits,
    wait_for_previous,
)

WARP_BLOCKS = tl.constexpr(128)
PLANE_BLOCKS = tl.constexpr(8)  # rows of words begin at a memory sector (32 bytes)


@triton.jit
def plane_stride(blocks):
    """Return how many blocks a row of a plane has room for: whole memory sectors."""
    return (blocks + PLANE_BLOCKS - 1) // PLANE_BLOCKS * PLANE_BLOCKS


@triton.jit
def is_held(b, blocks, KIND: tl.constexpr):
    """Return the mask of the blocks that a row has room for, whole lanes of it for wide loads; added ones are zeros."""
    return b < blocks if is_compact(COMPACT, KIND) else b < plane_stride(blocks)


@triton.jit
def load_planes(w, n, b, ok, blocks, PLANES: tl.constexpr):
    """Load the words of a plane for rows n and blocks b: a tuple of (warps, 128)."""
    out = ()
    stride = plane_stride(blocks)
    for i in tl.static_range(PLANES):
        at = w + n * (PLANES * stride) + i * stride + b
        out = out + (tl.load(at, mask=ok, other=0, eviction_policy="evict_first"),)
    return out


@triton.constexpr_function
def low_words(kind):
    """Return the number of words of a block in `low`."""
    return 8 if kind in ("q8", "e4m3") else 4


@triton.constexpr_function
def high_planes(kind):
    """Return the number of half words of a block in `high`."""
    return {"q6": 4, "q5": 2, "q5m": 2}.get(kind, 0)


@triton.jit
def load_packed(low, high, scales, small, n, b, ok, blocks, KIND: tl.constexpr):
    """Load (low words, high words, scales) of one row per warp, of compact kinds their blocks."""
    if is_compact(COMPACT, KIND):
        weights = load_block(low, high, small, scales, n, b, ok, blocks, KIND, "evict_first")
    else:
        lows = load_planes(low, n, b, ok, blocks, low_words(KIND))
        highs = load_planes(high, n, b, ok, blocks, high_planes(KIND))
        at = scales + n * plane_stride(blocks) + b
        weights = lows, highs, tl.load(at, mask=ok, other=0, eviction_policy="evict_first")
    return weights


@triton.jit
def expert_planes(low, high, scales, expert, rows, blocks, KIND: tl.constexpr):
    """Return the planes of one expert of a stack, each with `rows` rows; `small` begins at the last result."""
    if is_compact(COMPACT, KIND):
        first = expert.to(tl.int64) * rows * blocks  # in blocks
        low += first * kind_field(COMPACT, KIND, "words")
        scales += first // kind_field(COMPACT, KIND, "group")
        if kind_field(COMPACT, KIND, "high") > 0:
            high += first
    else:
        first = expert.to(tl.int64) * rows * plane_stride(blocks)
        low += first * low_words(KIND)
        high += first * high_planes(KIND)
        scales += first
    return low, high, scales, first


@triton.jit
def block_dots(lows, highs, x_words, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Return the integer dot products of the first and the last 16 columns of each block."""
    first = tl.zeros(SHAPE, tl.int32)
    last = tl.zeros(SHAPE, tl.int32)
    for i in tl.static_range(4):
        if KIND == "q8":
            first = dp4a(lows[i], x_words[i], first)
            last = dp4a(lows[4 + i], x_words[4 + i], last)
        elif KIND == "q6":
            fields = spread_high_bits(highs[i])
            a = (lows[i] & 0x0F0F0F0F) | (fields & 0x30303030)
            z = ((lows[i] >> 4) & 0x0F0F0F0F) | ((fields << 4) & 0x30303030)
            first = dp4a(a, x_words[i], first)
            last = dp4a(z, x_words[4 + i], last)
        elif KIND == "q5m" or KIND == "q5":
            fields = spread_high_bits(highs[i // 2]) >> (i % 2)
            a = (lows[i] & 0x0F0F0F0F) | (fields & 0x10101010)
            z = ((lows[i] >> 4) & 0x0F0F0F0F) | ((fields << 4) & 0x10101010)
            first = dp4a(a, x_words[i], first)
            last = dp4a(z, x_words[4 + i], last)
        elif KIND == "mxfp4" or KIND == "nvfp4":
            a, z = nibble_values(lows[i], "E2M1")
            first = dp4a(a, x_words[i], first)
            last = dp4a(z, x_words[4 + i], last)
        else:
            first = dp4a(lows[i] & 0x0F0F0F0F, x_words[i], first)
            last = dp4a_us(lows[i] & -0x0F0F0F10, x_words[4 + i], last)  # 16 times too large
    return first, last


@triton.jit
def compact_products(block, activations, table, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Return the addend of each block of a compact kind to its row: (warps, 128) float32."""
    x_words, x_scales, x_first, x_last = activations
    codes = code_words(block, table, KIND)
    first = tl.zeros(SHAPE, tl.int32)
    last = tl.zeros(SHAPE, tl.int32)
    for i in tl.static_range(4):
        first = dp4a(codes[i], x_words[i], first)
        last = dp4a(codes[4 + i], x_words[4 + i], last)
    s_first, s_last, m_first, m_last = block_scales(block, KIND)
    if kind_field(COMPACT, KIND, "has_small_scales"):  # below 2**24: exact
        a, z = small_scales(block, KIND)
        dots = (first + last) * a if kind_field(COMPACT, KIND, "has_one_scale") else first * a + last * z
        value = group_scale(block[3]) * (dots.to(tl.float32) * x_scales)
    elif kind_field(COMPACT, KIND, "has_one_scale"):
        value = s_first * ((first + last).to(tl.float32) * x_scales)
    else:
        value = (s_first * first.to(tl.float32) + s_last * last.to(tl.float32)) * x_scales
    if kind_field(COMPACT, KIND, "has_minima"):
        value += m_first * x_first + m_last * x_last
    return value


@triton.jit
def block_products(weights, activations, table, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Return the addend of each block of `load_packed` to its row: (warps, 128) float32."""
    if is_compact(COMPACT, KIND):
        value = compact_products(weights, activations, table, SHAPE, KIND)
    elif KIND == "e4m3":
        value = e4m3_products(weights, activations, SHAPE)
    else:
        value = plane_products(weights, activations, SHAPE, KIND)
    return value


@triton.jit
def e4m3_products(weights, activations, SHAPE: tl.constexpr):
    """Return the same for e4m3 numbers, which are multiplied as floats."""
    words, _, s = weights
    x_words, x_scales, _, _ = activations
    dots = tl.zeros(SHAPE, tl.float32)
    for i in tl.static_range(8):
        for c in tl.static_range(4):
            dots += e4m3_to_half(words[i] >> (8 * c)).to(tl.float32) * signed_byte(x_words[i], c).to(tl.float32)
    return s.to(tl.float32) * (dots * x_scales)


@triton.jit
def plane_products(weights, activations, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """Return the same for kinds that are not compact."""
    lows, highs, s = weights
    x_words, x_scales, x_first, x_last = activations
    first, last = block_dots(lows, highs, x_words, SHAPE, KIND)
    if KIND == "q4" or KIND == "q4m":
        dots = (first * 16 + last).to(tl.float32) * 0.0625
    else:
        dots = (first + last).to(tl.float32)
    if KIND == "q4" or KIND == "q5":
        value = s.to(tl.float32) * (dots * x_scales - (8.0 if KIND == "q4" else 16.0) * (x_first + x_last))
    elif KIND == "q8" or KIND == "mxfp4":
        value = s.to(tl.float32) * (dots * x_scales)
    elif KIND == "nvfp4":
        value = (low_half(s) * first.to(tl.float32) + high_half(s) * last.to(tl.float32)) * x_scales
    elif KIND == "q6":
        value = low_half(s) * (first.to(tl.float32) * x_scales - 32.0 * x_first)
        value += high_half(s) * (last.to(tl.float32) * x_scales - 32.0 * x_last)
    else:  # q4m, q5m
        value = low_half(s) * (dots * x_scales) + high_half(s) * (x_first + x_last)
    return value


@triton.constexpr_function
def needs_sums(compact, kind):
    """Return whether a kind has an offset or minima, which are multiplied by the sums of activations."""
    return compact[kind].has_minima if kind in compact else kind not in ("q8", "e4m3", "mxfp4", "nvfp4")


@triton.jit
def load_activations(x_codes, x_scales, x_sums, t, b, ok, blocks, KIND: tl.constexpr):
    """Load the int8 words of token t, their scales and the two sums of each block."""
    words = ()
    for i in tl.static_range(8):
        words = words + (tl.load(x_codes + (t * 8 + i) * blocks + b, mask=ok, other=0),)
    d = tl.load(x_scales + t * blocks + b, mask=ok, other=0.0)
    first, last = d, d
    if needs_sums(COMPACT, KIND):
        first = tl.load(x_sums + (t * 2) * blocks + b, mask=ok, other=0.0)
        last = tl.load(x_sums + (t * 2 + 1) * blocks + b, mask=ok, other=0.0)
    return words, d, first, last


@triton.jit
def load_row(
    low, high, scales, small, step: tl.constexpr, lane, rows, blocks: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EPILOGUE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load the weights of iteration `step`: rows change first, then blocks."""
    n = tl.minimum(program_rows(step % R, rows // 2, EPILOGUE, ROWS, WARPS), rows - 1)[:, None]
    b = (step // R) * WARP_BLOCKS + lane
    return load_packed(low, high, scales, small, n, b, is_held(b, blocks, KIND), blocks, KIND)


@triton.jit
def gemv_packed(
    x_codes, x_scales, x_sums, squares, eps, unit, low, high, scales, out, residual, norm, out_scales, out_sums,
    out_squares, rows, blocks: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr, PREFETCH: tl.constexpr, EPILOGUE: tl.constexpr, NORM_PARTS: tl.constexpr,
    NORM_SIZE: tl.constexpr, INT8: tl.constexpr, PDL: tl.constexpr, STRIDE: tl.constexpr = 0,
    ACTIVATION: tl.constexpr = "silu", small=None, table=None, experts=None, SLOTS: tl.constexpr = 1, bias=None,
):  # fmt: skip
    """Multiply by packed weights: ROWS rows per program, ROWS // WARPS per warp, PREFETCH of them loaded ahead. If
    NORM_PARTS > 0, results are divided by the RMS of the activations.

    With `experts`, B is 1 and the second axis of the grid is a slot: result s is of expert experts[s] of a stack and of
    activations s // SLOTS. `bias` has `rows` values, or STRIDE for each expert."""
    token, first = 0, 0
    if experts is not None:
        wait_for_previous(PDL)
        first = tl.program_id(1)
        token = first // SLOTS
        expert = tl.load(experts + first)
        low, high, scales, first_block = expert_planes(low, high, scales, expert, rows, blocks, KIND)
        if small is not None:
            small += first_block
        if bias is not None:
            bias += expert * STRIDE
    R: tl.constexpr = ROWS // WARPS
    SHAPE: tl.constexpr = (WARPS, WARP_BLOCKS)
    STEPS: tl.constexpr = R * ((blocks + WARP_BLOCKS - 1) // WARP_BLOCKS)
    lane = tl.arange(0, WARP_BLOCKS)[None, :] + tl.zeros(SHAPE, tl.int32)
    launch_next(PDL)
    held = ()  # weights are loaded before the activations are ready
    for step in tl.static_range(PREFETCH):
        if step < STEPS:
            more = load_row(low, high, scales, small, step, lane, rows, blocks, R, ROWS, WARPS, EPILOGUE, KIND)
            held = held + (more,)
    biases = load_biases(bias, rows, R, ROWS, WARPS, EPILOGUE)
    wait_for_previous(PDL)
    factors = ()
    if NORM_PARTS > 0:
        for t in tl.static_range(B):
            factors = factors + (inverse_rms(squares, token + t, eps, blocks * 32, NORM_PARTS, NORM_SIZE, WARPS),)
    sums = ()
    for _ in tl.static_range(B * R):
        sums = sums + (tl.zeros((WARPS, 32), tl.float32),)
    if B == 1:
        x = ()
        for step in tl.static_range(STEPS):
            b = (step // R) * WARP_BLOCKS + lane
            if step % R == 0:
                x = load_activations(x_codes, x_scales, x_sums, token, b, b < blocks, blocks, KIND)
            current, held = held[0], held[1:]
            if step + PREFETCH < STEPS:
                more = load_row(
                    low, high, scales, small, step + PREFETCH, lane, rows, blocks, R, ROWS, WARPS, EPILOGUE, KIND
                )
                held = held + (more,)
            value = block_products(current, x, table, SHAPE, KIND)
            total = sums[step % R] + tl.sum(tl.reshape(value, (WARPS, 32, 4)), 2)  # the lane's own four blocks
            sums = sums[: step % R] + (total,) + sums[step % R + 1 :]
    else:  # PREFETCH rows stay in registers while tokens are streamed
        tl.static_assert(R % PREFETCH == 0, "several tokens: PREFETCH divides the rows of a warp")
        for step in tl.static_range(0, STEPS, PREFETCH):
            b = (step // R) * WARP_BLOCKS + lane
            if step > 0:
                held = ()
                for k in tl.static_range(PREFETCH):
                    more = load_row(
                        low, high, scales, small, step + k, lane, rows, blocks, R, ROWS, WARPS, EPILOGUE, KIND
                    )
                    held = held + (more,)
            for t in range(B):  # not unrolled: all tokens would be loaded at once
                x = load_activations(x_codes, x_scales, x_sums, t, b, b < blocks, blocks, KIND)
                added = ()
                for k in tl.static_range(PREFETCH):
                    value = block_products(held[k], x, table, SHAPE, KIND)
                    added = added + (tl.sum(tl.reshape(value, (WARPS, 32, 4)), 2),)
                new = ()
                for u in tl.static_range(B):
                    for r in tl.static_range(R):
                        if r >= step % R and r < step % R + PREFETCH:
                            new = new + (sums[u * R + r] + tl.where(u == t, added[r - step % R], 0.0),)
                        else:
                            new = new + (sums[u * R + r],)
                sums = new
    for t in tl.static_range(B):
        ys = ()
        for r in tl.static_range(R):
            y = tl.sum(sums[t * R + r], 1) * unit
            if NORM_PARTS > 0:
                y = y * factors[t]
            ys = ys + (y if bias is None else y + biases[r],)
        apply_epilogue(
            ys, first + t, rows, out, residual, norm, out_scales, out_sums, out_squares, R, ROWS, WARPS, EPILOGUE, INT8,
            STRIDE, ACTIVATION,
        )  # fmt: skip


STORE, RESIDUAL, GATED = 0, 1, 2
OAI_ALPHA, OAI_LIMIT = tl.constexpr(SWIGLU_OAI_ALPHA), tl.constexpr(SWIGLU_OAI_LIMIT)


@triton.jit
def program_rows(r: tl.constexpr, half_rows, EPILOGUE: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return the rows (warps,) of the program's iteration r; for GATED the second half are up rows."""
    warp = tl.arange(0, WARPS)
    if EPILOGUE == 2:
        HALF: tl.constexpr = ROWS // 2
        return tl.program_id(0) * HALF + (r * WARPS) % HALF + warp + ((r * WARPS) // HALF) * half_rows
    return tl.program_id(0) * ROWS + r * WARPS + warp


@triton.jit
def load_biases(bias, rows, R: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EPILOGUE: tl.constexpr):
    """Load what is added to the results of the program's iterations, (warps,) each; nothing without a bias."""
    found = ()
    if bias is not None:
        for r in tl.static_range(R):
            n = program_rows(r, rows // 2, EPILOGUE, ROWS, WARPS)
            found = found + (tl.load(bias + n, mask=n < rows, other=0.0),)
    return found


@triton.jit
def inverse_rms(squares, t, eps, width, NORM_PARTS: tl.constexpr, NORM_SIZE: tl.constexpr, WARPS: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) from partial sums, (warps,): every warp adds all of them."""
    i = tl.arange(0, NORM_SIZE)[None, :] + tl.zeros((WARPS, NORM_SIZE), tl.int32)
    return tl.rsqrt(tl.sum(tl.load(squares + t * NORM_PARTS + i, mask=i < NORM_PARTS, other=0.0), 1) / width + eps)


@triton.jit
def concat_warps(ys, R: tl.constexpr, WARPS: tl.constexpr):
    """Concatenate R tensors of (warps,) into one of (R * warps,), which one warp can reduce."""
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
def store_int8_block(y, t, block, out, out_scales, out_sums, blocks):
    """Quantize 32 values to one int8 block with its scale and sums."""
    c = tl.arange(0, 32)
    d = tl.max(tl.abs(y), 0) / 127.0
    q = tl.floor(y * tl.where(d > 0, 1.0 / d, 0.0) + 0.5)
    tl.store(out + ((t * 8 + c // 4) * blocks + block) * 4 + c % 4, q.to(tl.int8))
    tl.store(out_scales + t * blocks + block, d)
    tl.store(out_sums + (t * 2) * blocks + block, tl.sum(tl.where(c < 16, q, 0.0), 0) * d)
    tl.store(out_sums + (t * 2 + 1) * blocks + block, tl.sum(tl.where(c < 16, 0.0, q), 0) * d)


@triton.jit
def store_int8_blocks(y, t, b, mask, out, out_scales, out_sums, blocks):
    """Quantize blocks b of token t, y (n, 32), with their scales and sums."""
    c = tl.arange(0, 32)[None, :]
    d = tl.max(tl.abs(y), 1) / 127.0
    q = tl.floor(y * (1.0 / tl.where(d > 0, d, 1.0))[:, None] + 0.5)
    at = ((t * 8 + c // 4) * blocks + b[:, None]) * 4 + c % 4
    tl.store(out + at, q.to(tl.int8), mask=mask[:, None])
    tl.store(out_scales + t * blocks + b, d, mask=mask)
    tl.store(out_sums + (t * 2) * blocks + b, tl.sum(tl.where(c < 16, q, 0.0), 1) * d, mask=mask)
    tl.store(out_sums + (t * 2 + 1) * blocks + b, tl.sum(tl.where(c < 16, 0.0, q), 1) * d, mask=mask)


@triton.jit
def store_activations(y, t, columns, out, out_scales, out_sums, INT8: tl.constexpr):
    """Store the 32 results of a program as activations of the next product: int8, or the dtype of `out`."""
    if INT8:
        store_int8_block(y, t, tl.program_id(0), out, out_scales, out_sums, columns // 32)
    else:
        c = tl.program_id(0) * 32 + tl.arange(0, 32)
        tl.store(out + t * columns + c, y.to(out.dtype.element_ty))


@triton.jit
def apply_gate(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up. GELU's tanh form is by 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u))."""
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    inner = gate
    if ACTIVATION == "gelu_tanh":
        inner = 2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    elif ACTIVATION == "swiglu_oai":
        gate = tl.where(gate > OAI_LIMIT, OAI_LIMIT, gate)  # NaN stays
        up = tl.where(tl.abs(up) > OAI_LIMIT, tl.where(up > 0, OAI_LIMIT, -OAI_LIMIT), up) + 1.0
        inner = OAI_ALPHA * gate
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def apply_epilogue(
    ys, t, rows, out, residual, norm, out_scales, out_sums, out_squares,
    R: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EPILOGUE: tl.constexpr, INT8: tl.constexpr,
    STRIDE: tl.constexpr = 0, ACTIVATION: tl.constexpr = "silu",
):  # fmt: skip
    """Store the results of a program for token t. STORE writes rows of STRIDE values."""
    if EPILOGUE == 0:
        for r in tl.static_range(R):
            n = program_rows(r, rows // 2, EPILOGUE, ROWS, WARPS)
            stride = STRIDE if STRIDE > 0 else rows
            tl.store(out + t * stride + n, ys[r].to(out.dtype.element_ty), mask=n < rows)
    elif EPILOGUE == 1:
        n = tl.program_id(0) * 32 + tl.arange(0, 32)
        y = concat_warps(ys, R, WARPS) + tl.load(residual + t * rows + n)
        tl.store(residual + t * rows + n, y)
        tl.store(out_squares + t * (rows // 32) + tl.program_id(0), tl.sum(y * y, 0))
        store_activations(y * tl.load(norm + n), t, rows, out, out_scales, out_sums, INT8)
    else:
        gated = ()
        for r in tl.static_range(R // 2):
            gated = gated + (apply_gate(ys[r], ys[R // 2 + r], ACTIVATION),)
        store_activations(concat_warps(gated, R // 2, WARPS), t, rows // 2, out, out_scales, out_sums, INT8)


@triton.jit
def gemv_dense(
    x, squares, eps, w, out, residual, norm, out_squares,
    rows, columns: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, TILE_K: tl.constexpr,
    PREFETCH: tl.constexpr, EPILOGUE: tl.constexpr, NORM_PARTS: tl.constexpr, NORM_SIZE: tl.constexpr,
    PDL: tl.constexpr, STRIDE: tl.constexpr = 0, scales=None, ACTIVATION: tl.constexpr = "silu",
    bias=None,
):  # fmt: skip
    """Multiply by dense weights (rows, columns): floats, or e4m3 with float32 scales (rows) applied last."""
    R: tl.constexpr = ROWS // WARPS
    SHAPE: tl.constexpr = (WARPS, TILE_K)
    lane = tl.arange(0, TILE_K)[None, :] + tl.zeros(SHAPE, tl.int32)
    launch_next(PDL)
    held = ()
    for i in tl.static_range(PREFETCH):
        for r in tl.static_range(R):
            n = tl.minimum(program_rows(r, rows // 2, EPILOGUE, ROWS, WARPS), rows - 1)[:, None].to(tl.int64)
            c = i * TILE_K + lane
            held = held + (tl.load(w + n * columns + c, mask=c < columns, other=0.0, eviction_policy="evict_first"),)
    factors = ()
    if scales is not None:
        for r in tl.static_range(R):
            factors = factors + (
                tl.load(scales + tl.minimum(program_rows(r, rows // 2, EPILOGUE, ROWS, WARPS), rows - 1)),
            )
    biases = load_biases(bias, rows, R, ROWS, WARPS, EPILOGUE)
    wait_for_previous(PDL)
    sums = ()
    for _ in tl.static_range(B * R):
        sums = sums + (tl.zeros(SHAPE, tl.float32),)
    for start in tl.static_range(0, columns, TILE_K):
        weights = ()
        for r in tl.static_range(R):
            weights = weights + (held[r],)
        rest = ()
        for i in tl.static_range(R, PREFETCH * R):
            rest = rest + (held[i],)
        if start + PREFETCH * TILE_K < columns:
            for r in tl.static_range(R):
                n = tl.minimum(program_rows(r, rows // 2, EPILOGUE, ROWS, WARPS), rows - 1)[:, None].to(tl.int64)
                c = start + PREFETCH * TILE_K + lane
                more = tl.load(w + n * columns + c, mask=c < columns, other=0.0, eviction_policy="evict_first")
                rest = rest + (more,)
        else:
            for r in tl.static_range(R):
                rest = rest + (weights[r],)
        held = rest
        new = ()
        c = start + lane
        for t in tl.static_range(B):
            xt = tl.load(x + t * columns + c, mask=c < columns, other=0.0).to(tl.float32)
            for r in tl.static_range(R):
                new = new + (sums[t * R + r] + weights[r].to(tl.float32) * xt,)
        sums = new
    for t in tl.static_range(B):
        ys = ()
        for r in tl.static_range(R):
            y = tl.sum(sums[t * R + r], 1)
            ys = ys + (y if scales is None else y * factors[r],)
        if NORM_PARTS > 0:
            factor = inverse_rms(squares, t, eps, columns, NORM_PARTS, NORM_SIZE, WARPS)
            scaled = ()
            for r in tl.static_range(R):
                scaled = scaled + (ys[r] * factor,)
            ys = scaled
        if bias is not None:
            added = ()
            for r in tl.static_range(R):
                added = added + (ys[r] + biases[r],)
            ys = added
        apply_epilogue(
            ys, t, rows, out, residual, norm, out, out, out_squares, R, ROWS, WARPS, EPILOGUE, False, STRIDE, ACTIVATION
        )
