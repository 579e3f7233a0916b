"""The kernels of ../repack.py: GGUF blocks -> codes in bit planes, scales and minima; floats -> 16 rows side by side.

Up to 256 columns of one row at a time; addresses, not arrays. Four codes of adjacent columns make a 32-bit word, and
all steps are on words. Where types without a codebook keep their bits is data, one row per type. IQ1 to IQ3 have a
codebook of words, one for each four columns; TQ1_0 has trits that share a byte. weights/quants draws the layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....weights.quants.codebooks import e4m3_halves, e8m0_halves
from ..jit import FLOAT32, INT, NativeKernel, inline, kernel
from .pointers import (
    f16_from_bits,
    f64,
    i64,
    load_f16,
    load_f32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    store_f16,
    store_f32,
    store_u8,
    store_u16,
    store_u32,
)

CODES_AT, D_AT, M_AT, SCRATCH = 0, 256, 320, 384  # byte offsets in a kernel's scratch memory, and its size
PLANES = SCALES = None  # set for each variant
ONES = 0x01010101  # ONES * mask has the mask in each byte of a word

# Type -> (first byte in the block, words per run, bits) of the field that becomes each plane. A run of words holds
# 8 / bits runs of words of codes, lowest bits first. Runs of 0 words: adjacent codes share a byte.
BIT_FIELDS = {
    "Q4_0": ((2, 4, 4),), "Q4_1": ((4, 4, 4),), "Q5_0": ((6, 4, 4), (2, 0, 1)), "Q5_1": ((8, 4, 4), (4, 0, 1)),
    "Q8_0": ((2, 8, 8),), "Q8_1": ((4, 8, 8),), "Q8_K": ((4, 64, 8),), "Q2_K": ((16, 8, 2),),
    "Q3_K": ((32, 8, 2), (0, 8, 1)), "Q4_K": ((16, 8, 4),), "Q5_K": ((48, 8, 4), (16, 8, 1)),
    "Q6_K": ((0, 16, 4), (128, 8, 2)), "IQ4_NL": ((2, 4, 4),), "IQ4_XS": ((8, 4, 4),), "MXFP4": ((1, 4, 4),),
    "NVFP4": ((4, 2, 4),), "TQ2_0": ((0, 8, 2),), "Q1_0": ((2, 0, 1),), "Q2_0": ((2, 0, 2),),
    "INT4": ((4, 4, 4),), "INT4_ZP": ((8, 4, 4),), "INT8": ((4, 8, 8),), "NVFP4_F32": ((8, 4, 4),),
}  # fmt: skip


class Source(NamedTuple):
    """A block type and the rows of a tensor; tables by address."""

    rule: int
    quads: int  # groups of four columns in a block of the file
    size: int  # bytes of that block
    fields: int  # rows of BIT_FIELDS, with their number of runs
    n_fields: int
    d_at: int
    m_at: int
    table: int  # scale of each byte, or the codebook
    row_bytes: int
    blocks: int  # blocks of 32 columns in a row
    d_factor: float
    m_factor: float


class Target(NamedTuple):
    """Where the kernels write, by address. Without addresses they only look for the largest scale."""

    columns_per_scale: int
    first: int  # bits of the first plane
    second: int  # bits of the second plane, or 0
    has_minimum: int
    flip: int  # XOR of four signed codes that adds the bias
    packed: int
    scales: int
    minima: int
    nibble_scales: int
    inverse: float  # 1 / unit


@inline
def _swap_fields(low, high, shift, mask):
    """Exchange the upper part of each field of the first word with the lower part of the second's."""
    turned = ((low >> shift) ^ high) & (ONES * mask)
    return low ^ (turned << shift), high ^ turned


@inline
def _unpack_runs(at, runs, words, bits, flip, to, stride):
    """Transpose runs of whole blocks: word 8b + quad of a run, at step k, is of block b + k * words / 8 of that run.

    Eight words are a square of fields, (quad, step); the lines of a plane are its transpose.
    """
    shift = (bits >> 1) - (bits >> 3)  # 8, 4, 2, 1 -> 3, 2, 1, 0
    far = words >> 3
    step = far * stride
    for _ in range(runs):
        for b in range(far):
            w0, w1, w2, w3, w4, w5, w6, w7 = (
                load_u32(at),
                load_u32(at + 4),
                load_u32(at + 8),
                load_u32(at + 12),
                load_u32(at + 16),
                load_u32(at + 20),
                load_u32(at + 24),
                load_u32(at + 28),
            )
            if bits < 8:
                w0, w4 = _swap_fields(w0, w4, 4, 15)
                w1, w5 = _swap_fields(w1, w5, 4, 15)
                w2, w6 = _swap_fields(w2, w6, 4, 15)
                w3, w7 = _swap_fields(w3, w7, 4, 15)
            if bits < 4:
                w0, w2 = _swap_fields(w0, w2, 2, 0x33)
                w1, w3 = _swap_fields(w1, w3, 2, 0x33)
                w4, w6 = _swap_fields(w4, w6, 2, 0x33)
                w5, w7 = _swap_fields(w5, w7, 2, 0x33)
            if bits < 2:
                w0, w1 = _swap_fields(w0, w1, 1, 0x55)
                w2, w3 = _swap_fields(w2, w3, 1, 0x55)
                w4, w5 = _swap_fields(w4, w5, 1, 0x55)
                w6, w7 = _swap_fields(w6, w7, 1, 0x55)
            for i, n_blocks in enumerate((w0, w1, w2, w3, w4, w5, w6, w7)):
                store_u32(to + b * stride + (i >> shift) * step + 64 * (i & (bits - 1)), n_blocks ^ flip)
            at += 32
        to += step << (3 - shift)


@inline
def _unpack_runs_of_4(at, blocks, to, stride):
    """Copy nibbles in runs of four words: they share bytes as in the planes."""
    for block in range(blocks):
        for line in range(4):
            store_u32(to + block * stride + 64 * line, load_u32(at + 16 * block + 4 * line))


@inline
def _unpack_runs_of_2(at, blocks, to, stride):
    """Rearrange nibbles in runs of two words."""
    for _ in range(blocks):
        for i in range(2):
            low, high = load_u32(at + 4 * i), load_u32(at + 8 + 4 * i)
            store_u32(to + 64 * i, (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4))
            store_u32(to + 64 * (i + 2), ((low >> 4) & 0x0F0F0F0F) | (high & 0xF0F0F0F0))
        at, to = at + 16, to + stride


@inline
def spread_bits(nibble):
    """Return four bits as one bit in each byte of a word."""
    return (nibble * 0x00204081) & ONES


@inline
def _unpack_adjacent_bits(at, blocks, to, stride):
    for block in range(blocks):
        bits, n_blocks = load_u32(at + 4 * block), 0
        for j in range(8):
            n_blocks |= spread_bits((bits >> (4 * j)) & 15) << j
        store_u32(to + block * stride, n_blocks)


@inline
def _unpack_adjacent_pairs(at, blocks, to, stride):
    for block in range(blocks):
        for line in range(2):
            n_blocks = 0
            for j in range(4):
                four = load_u8(at + 8 * block + line + 2 * j)
                n_blocks |= ((four | four << 6 | four << 12 | four << 18) & (3 * ONES)) << (2 * j)
            store_u32(to + block * stride + 64 * line, n_blocks)


@inline
def write_planes(source, flip, at, n_blocks, codes, to, stride):
    """Write all planes of one row of `n_blocks` blocks; packed block 0 is at `to`, the next `stride` bytes further."""
    blocks = source.quads >> 3  # packed blocks in a block of the file
    for i in range(source.n_fields):
        row = source.fields + 32 * i
        start, words, bits, runs = load_i64(row), load_i64(row + 8), load_i64(row + 16), load_i64(row + 24)
        for block in range(n_blocks):
            here, lines = at + block * source.size + start, to + block * blocks * stride
            if words == 4:
                _unpack_runs_of_4(here, blocks, lines, stride)
            elif words == 2:
                _unpack_runs_of_2(here, blocks, lines, stride)
            elif words == 0 and bits == 1:
                _unpack_adjacent_bits(here, blocks, lines, stride)
            elif words == 0:
                _unpack_adjacent_pairs(here, blocks, lines, stride)
            else:
                _unpack_runs(here, runs, words, bits, flip, lines, stride)
        to += 64 * bits


LOW_4_BITS, LOW_6_BITS = 0x0F0F0F0F, 0x3F3F3F3F
RULE_F16, RULE_F32, RULE_BYTES, RULE_K3, RULE_K4, RULE_K6, RULE_IQ4_XS = range(7)
SCALE_RULES = {
    "Q3_K": RULE_K3,
    "Q4_K": RULE_K4,
    "Q5_K": RULE_K4,
    "Q6_K": RULE_K6,
    "Q8_K": RULE_F32,
    "IQ4_XS": RULE_IQ4_XS,
    "MXFP4": RULE_BYTES,
    "NVFP4": RULE_BYTES,
    "INT4": RULE_F32,
    "INT4_ZP": RULE_F32,
    "INT8": RULE_F32,
    "NVFP4_F32": RULE_F32,
}

# Type -> (byte of the scale, factor, byte of the minimum, factor), both float16; other types: (0, 1, 0, 0).
F16_SCALES = {
    "Q4_1": (0, 1, 2, 1),
    "Q5_1": (0, 1, 2, 1),
    "Q2_K": (80, 1, 82, -1),
    "TQ1_0": (52, 1, 0, 0),
    "TQ2_0": (64, 1, 0, 0),
    "Q1_0": (0, 2, 0, -1),
}
# The same with small integers at their largest: the bound that the scan for the largest scale reads.
SCALE_BOUNDS = {
    "Q3_K": (108, 32, 0, 0),
    "Q4_K": (0, 63, 2, 63),
    "Q5_K": (0, 63, 2, 63),
    "Q6_K": (208, 128, 0, 0),
    "IQ4_XS": (0, 32, 0, 0),
}

# Type -> (scales per block, byte of the zero point), float32: the scales lead the block.
F32_SCALES = {"Q8_K": (1, 0), "INT4": (1, 0), "INT4_ZP": (1, 4), "INT8": (1, 0), "NVFP4_F32": (2, 0)}

# Type -> (scales per block, the scale of each byte): the scales lead the block.
BYTE_SCALES = {"MXFP4": (1, e8m0_halves), "NVFP4": (4, e4m3_halves)}


@inline
def _store_scaled(numbers, offset, factor, out):
    """Write (number - offset) * factor for four numbers, one in each byte of a word."""
    for i in range(4):
        store_f32(out + 4 * i, factor * np.float32(((numbers >> (8 * i)) & 255) - offset))


@inline
def _scales_k4(at, d, m):
    """Q4_K, Q5_K: eight scales and eight minima of 6 bits."""
    scale, minus = load_f16(at), -load_f16(at + 2)
    low_d, low_m, rest = load_u32(at + 4), load_u32(at + 8), load_u32(at + 12)
    _store_scaled(low_d & LOW_6_BITS, 0, scale, d)
    _store_scaled(low_m & LOW_6_BITS, 0, minus, m)
    _store_scaled((rest & LOW_4_BITS) | ((low_d >> 2) & 0x30303030), 0, scale, d + 16)
    _store_scaled(((rest >> 4) & LOW_4_BITS) | ((low_m >> 2) & 0x30303030), 0, minus, m + 16)


@inline
def _scales_k3(at, d):
    """Q3_K: sixteen scales of 6 bits, less 32."""
    scale, high = load_f16(at + 108), load_u32(at + 104)
    for i in range(4):
        low = (load_u32(at + 96 + 4 * (i & 1)) >> (4 * (i >> 1))) & LOW_4_BITS
        _store_scaled(low | (((high >> (2 * i)) & 0x03030303) << 4), 32, scale, d + 16 * i)


@inline
def _scales_k6(at, d):
    """Q6_K: sixteen signed bytes."""
    scale = load_f16(at + 208)
    for i in range(4):
        _store_scaled(load_u32(at + 192 + 4 * i) ^ 0x80808080, 128, scale, d + 16 * i)


@inline
def _scales_iq4_xs(at, d):
    """IQ4_XS: eight scales of 6 bits, less 32."""
    scale, high, low = load_f16(at), load_u16(at + 2), load_u32(at + 4)
    for i in range(8):
        six = ((low >> (4 * i)) & 15) | (((high >> (2 * i)) & 3) << 4)
        store_f32(d + 4 * i, scale * np.float32(six - 32))


@inline
def _read_f16_scales(source, at, n_blocks, d, m):
    """Read float16 scales, and minima if the type has them."""
    for block in range(n_blocks):
        here = at + block * source.size
        store_f32(d + 4 * block, source.d_factor * load_f16(here + source.d_at))
        if source.m_factor:
            store_f32(m + 4 * block, source.m_factor * load_f16(here + source.m_at))


@inline
def _read_byte_scales(source, at, n_blocks, d):
    """Read scales of one byte each at the head of a block."""
    for block in range(n_blocks):
        for i in range(source.d_at):
            value = load_f32(source.table + 4 * load_u8(at + block * source.size + i))
            store_f32(d + 4 * (block * source.d_at + i), value)


@inline
def _read_f32_scales(source, at, n_blocks, d, m):
    """Read float32 scales, and zero points if the type has them: the minimum is -scale * zero point."""
    for block in range(n_blocks):
        here = at + block * source.size
        for i in range(source.d_at):
            store_f32(d + 4 * (block * source.d_at + i), load_f32(here + 4 * i))
        if source.m_at:
            store_f32(m + 4 * block, -load_f32(here) * load_f32(here + source.m_at))


@inline
def read_scales(source, at, n_blocks, d, m):
    """Write the scales and minima of `n_blocks` blocks, by the rule of the type."""
    rule = source.rule
    if rule == RULE_F16:
        _read_f16_scales(source, at, n_blocks, d, m)
    elif rule == RULE_K4:
        _scales_k4(at, d, m)
    elif rule == RULE_K6:
        _scales_k6(at, d)
    elif rule == RULE_K3:
        _scales_k3(at, d)
    elif rule == RULE_IQ4_XS:
        _scales_iq4_xs(at, d)
    elif rule == RULE_BYTES:
        _read_byte_scales(source, at, n_blocks, d)
    else:
        _read_f32_scales(source, at, n_blocks, d, m)


IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, TQ1_0 = range(8)
CODEBOOK_RULES = {
    "IQ2_XXS": IQ2_XXS,
    "IQ2_XS": IQ2_XS,
    "IQ2_S": IQ2_S,
    "IQ3_XXS": IQ3_XXS,
    "IQ3_S": IQ3_S,
    "IQ1_S": IQ1_S,
    "IQ1_M": IQ1_M,
    "TQ1_0": TQ1_0,
}


@inline
def _complete_signs(seven):
    """Return seven sign bits with the eighth that makes their number even."""
    folded = seven ^ (seven >> 4)
    return seven | (((0x6996 >> (folded & 15)) & 1) << 7)


@inline
def _row_and_signs(rule, at, k):
    """IQ2, IQ1: return the codebook row of columns 8k .. 8k + 7 and their signs (IQ1_M: all or none)."""
    if rule == IQ2_XXS:
        group = at + 2 + 8 * (k >> 2)
        return load_u8(group + (k & 3)), _complete_signs((load_u32(group + 4) >> (7 * (k & 3))) & 127)
    if rule == IQ2_XS:
        code = load_u16(at + 2 + 2 * k)
        return code & 511, _complete_signs(code >> 9)
    if rule == IQ2_S:
        high = (load_u8(at + 66 + (k >> 2)) >> (2 * (k & 3))) & 3
        return load_u8(at + 2 + k) | high << 8, load_u8(at + 34 + k)
    if rule == IQ1_S:
        return load_u8(at + 2 + k) | ((load_u16(at + 34 + 2 * (k >> 2)) >> (3 * (k & 3))) & 7) << 8, 0
    nibble = (load_u8(at + 32 + (k >> 1)) >> (4 * (k & 1))) & 15  # IQ1_M
    return load_u8(at + k) | (nibble & 7) << 8, (nibble >> 3) * 255


@inline
def _rows_and_signs(rule, at, k):
    """IQ3: return the two codebook rows of columns 8k .. 8k + 7 and their signs."""
    first, second = load_u8(at + 2 + 2 * k), load_u8(at + 3 + 2 * k)
    if rule == IQ3_XXS:
        return first, second, _complete_signs((load_u32(at + 66 + 4 * (k >> 2)) >> (7 * (k & 3))) & 127)
    high = load_u8(at + 66 + (k >> 2)) >> (2 * (k & 3))
    return first | (high & 1) << 8, second | (high & 2) << 7, load_u8(at + 74 + k)


@inline
def _unpack_trits(at, words, trits, codes):
    """Write `trits` codes of each byte of `words` words: first all first codes, then all second ones, ..."""
    power = 1
    for n in range(trits):
        for i in range(words):
            code = 0
            for j in range(4):
                code |= ((((load_u8(at + 4 * i + j) * power) & 255) * 3) >> 8) << (8 * j)
            store_u32(codes + 4 * (n * words + i), code)
        power *= 3


@inline
def _codebook_codes(rule, book, at, codes):
    """Write the codes of one block."""
    if rule == TQ1_0:
        _unpack_trits(at, 8, 5, codes)
        _unpack_trits(at + 32, 4, 5, codes + 160)
        _unpack_trits(at + 48, 1, 4, codes + 240)
        return
    sign_bit = 2 if rule == IQ1_M else 3
    for k in range(32):
        if rule in (IQ3_XXS, IQ3_S):
            first, second, signs = _rows_and_signs(rule, at, k)
        else:
            row, signs = _row_and_signs(rule, at, k)
            first, second = 2 * row, 2 * row + 1
        store_u32(codes + 8 * k, load_u32(book + 4 * first) | spread_bits(signs & 15) << sign_bit)
        store_u32(codes + 8 * k + 4, load_u32(book + 4 * second) | spread_bits(signs >> 4) << sign_bit)


@inline
def _write_plane(codes, bits, place, lines):
    """Write the lines of one plane of one row of a packed block."""
    for line in range(bits):
        n_blocks = 0
        for j in range(8 // bits):
            n_blocks |= ((load_u32(codes + 4 * (line + bits * j)) >> place) & (ONES * ((1 << bits) - 1))) << (bits * j)
        store_u32(lines + 64 * line, n_blocks)


@inline
def write_codebook_planes(source, flip, at, n_blocks, codes, to, stride):
    """Write all planes of one row of one block; packed block 0 is at `to`, the next `stride` bytes further."""
    _codebook_codes(source.rule, source.table, at, codes)
    for block in range(8):
        here, lines = codes + 32 * block, to + stride * block
        if stride == 256:
            _write_plane(here, 4, 0, lines)
        else:
            _write_plane(here, 2, 0, lines)
        if stride == 192:
            _write_plane(here, 1, 2, lines + 128)


@inline
def _nibble_scales(at, count, d, factor):
    """Write the scales (nibble + 1/2) * factor."""
    for i in range(count):
        nibble = (load_u8(at + (i >> 1)) >> (4 * (i & 1))) & 15
        store_f32(d + 4 * i, factor * (np.float32(nibble) + np.float32(0.5)))


@inline
def _scales_iq1_s(at, d, m):
    """IQ1_S: the shift of a group of 32 is its minimum."""
    for i in range(8):
        bits = load_u16(at + 34 + 2 * i)
        scale = load_f16(at) * np.float32(2 * ((bits >> 12) & 7) + 1)
        store_f32(d + 4 * i, scale)
        store_f32(m + 4 * i, scale * np.float32(0.125 - 0.25 * (bits >> 15)))


@inline
def _scales_iq1_m(at, d):
    """IQ1_M: the float16 lies in the top nibbles of four words; the scale has the factor 1/8 of the table."""
    bits = 0
    for i in range(4):
        bits |= (load_u16(at + 48 + 2 * i) >> 12) << (4 * i)
    for i in range(16):
        three = (load_u16(at + 48 + 2 * (i >> 2)) >> (3 * (i & 3))) & 7
        store_f32(d + 4 * i, f16_from_bits(bits) * np.float32(0.125) * np.float32(2 * three + 1))


@inline
def read_codebook_scales(source, at, n_blocks, d, m):
    """Write the scales and minima of one block."""
    rule = source.rule
    if rule == IQ1_M:
        _scales_iq1_m(at, d)
    elif rule == IQ1_S:
        _scales_iq1_s(at, d, m)
    elif rule == TQ1_0:
        store_f32(d, load_f16(at + 52))
    elif rule in (IQ2_XS, IQ2_S):
        _nibble_scales(at + (66 if rule == IQ2_XS else 74), 16, d, load_f16(at) * np.float32(0.25))
    elif rule == IQ3_S:
        _nibble_scales(at + 106, 8, d, load_f16(at) * np.float32(2))
    else:
        stride, first = (8, 6) if rule == IQ2_XXS else (4, 66)
        factor = load_f16(at) * np.float32(0.25 if rule == IQ2_XXS else 0.5)
        for i in range(8):
            scale = np.float32(load_u32(at + first + stride * i) >> 28) + np.float32(0.5)
            store_f32(d + 4 * i, factor * scale)


@inline
def _max_magnitude(values, count, top):
    """Return the bits of the largest magnitude: bits of positive floats are in order, infinity and NaN on top."""
    for i in range(count):
        top = max(top, load_u32(values + 4 * i) & 0x7FFFFFFF)
    return top


@inline
def _store_rounded(values, count, inverse, out):
    """Write scales or minima of one row as float16."""
    for i in range(count):
        store_f16(out + 32 * i, load_f32(values + 4 * i) * inverse)


@kernel
def read_source(table):
    """Return the record in a table of eight bytes for each field."""
    n, x = i64(table), f64(table)
    factors = np.float32(x[10]), np.float32(x[11])
    return Source(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], factors[0], factors[1])


@kernel
def read_target(table):
    """Return the record in a table of eight bytes for each field."""
    n = i64(table)
    return Target(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], np.float32(f64(table)[9]))


def repack_groups(source_table, data, first, rows, start, stop, target_table, scratch):
    """Pack the rows of a tensor that lie in groups start .. stop - 1, or find their largest scale."""
    source, target = read_source(source_table), read_target(target_table)
    codes, d, m = scratch + CODES_AT, scratch + D_AT, scratch + M_AT
    top, n, columns, lines = 0, source.blocks, target.columns_per_scale, target.first + target.second
    for group in range(start, stop):
        low, high = max(first, 16 * group), min(first + rows, 16 * group + 16)
        for chunk in range(0, n, 8):
            blocks = min(8, n - chunk)
            count, n_blocks, begin = blocks * 32 // columns, blocks * 8 // source.quads, chunk * 8 // source.quads
            scale = (group * (n * 32 // columns) + chunk * 32 // columns) * 32
            line = 64 * lines * (group * n + chunk)
            for row in range(low, high):
                at, lane = data + (row - first) * source.row_bytes + begin * source.size, row & 15
                SCALES(source, at, n_blocks, d, m)
                if target.packed == 0:
                    top = _max_magnitude(d, count, top)
                    if target.has_minimum:
                        top = _max_magnitude(m, count, top)
                    continue
                PLANES(source, target.flip, at, n_blocks, codes, target.packed + line + 4 * lane, 64 * lines)
                _store_rounded(d, count, target.inverse, target.scales + scale + 2 * lane)
                if target.has_minimum:
                    _store_rounded(m, count, target.inverse, target.minima + scale + 2 * lane)
                if target.nibble_scales:
                    for i in range(16):
                        store_u8(target.nibble_scales + ((group * n + chunk) * 2 + i) * 16 + lane, load_u8(at + i))
    return top


def interleave_floats(data, size, first, rows, columns, out, start, stop):
    """Write floats of 2 or 4 bytes: 16 rows side by side, column after column."""
    for group in range(start, stop):
        low, high = max(first, 16 * group), min(first + rows, 16 * group + 16)
        for chunk in range(0, columns, 64):
            for row in range(low, high):
                at, to = data + (row - first) * columns * size, out + (group * columns * 16 + (row & 15)) * size
                if size == 4:
                    for column in range(chunk, min(chunk + 64, columns)):
                        store_u32(to + 64 * column, load_u32(at + 4 * column))
                else:
                    for column in range(chunk, min(chunk + 64, columns)):
                        store_u16(to + 32 * column, load_u16(at + 2 * column))
    return 0


def interleave_fp8(data, first, rows, columns, inverse, out, scales, start, stop):
    """Write numbers of a byte, 16 rows side by side, and the scale of each block of 32 columns as float16."""
    blocks = columns // 32
    for group in range(start, stop):
        low, high = max(first, 16 * group), min(first + rows, 16 * group + 16)
        for block in range(blocks):
            to = group * blocks + block
            for row in range(low, high):
                at, lane = data + ((row - first) * blocks + block) * 36, row & 15
                store_f16(scales + (to * 16 + lane) * 2, load_f32(at) * inverse)
                for column in range(32):
                    store_u8(out + (to * 32 + column) * 16 + lane, load_u8(at + 4 + column))
    return 0


REPACK_BASIC = NativeKernel(repack_groups, INT, *[INT] * 8, name="basic", PLANES=write_planes, SCALES=read_scales)
REPACK_CODEBOOK = NativeKernel(
    repack_groups, INT, *[INT] * 8, name="book", PLANES=write_codebook_planes, SCALES=read_codebook_scales
)
INTERLEAVE_FLOATS = NativeKernel(interleave_floats, INT, *[INT] * 8)
INTERLEAVE_FP8 = NativeKernel(interleave_fp8, INT, *[INT] * 4, FLOAT32, *[INT] * 4)
