"""Codes of every block type that stores them as plain bits, straight into the planes that layouts.py describes.

Where they lie in the file is data, one row a type. Four codes of neighbouring columns make a word, and all steps are on
words. Up to 256 columns of one row are done at a time. Their scales are in unpack_k.py, types with a codebook in
unpack_iq.py.

Scales and minima of every block type without a codebook, as float32: plain numbers, bytes, or small integers.

The K types and IQ4_XS have small integers in odd places, times one or two float16 a block: products are exact. Up to
256 columns of one row are done at a time. weights/quants/k.py and iq.py draw the layouts.

Codes and scales of the block types with a codebook, IQ1 to IQ3, and of TQ1_0, whose trits share a byte.

One block of 256 columns of one row at a time: 64 words of four codes each, scales and minima as float32. A codebook is
words of codes too, one for each four columns. weights/quants/iq.py draws the layouts.
"""

from __future__ import annotations

import numpy as np

from ...weights.quants.codebooks import e4m3_halves, e8m0_halves
from .pointers import byte, half, half_of, inlined, number, put_single, put_word, short, single, word

ONES = 0x01010101  # times a mask: that mask in each byte of a word

# Type -> (first byte in the block, words a run, bits) of the field that becomes each plane. A run of words holds
# 8 / bits runs of words of codes, the lowest bits first. Runs of 0 words: neighbouring codes share a byte.
FIELDS = {
    "Q4_0": ((2, 4, 4),),
    "Q4_1": ((4, 4, 4),),
    "Q5_0": ((6, 4, 4), (2, 0, 1)),
    "Q5_1": ((8, 4, 4), (4, 0, 1)),
    "Q8_0": ((2, 8, 8),),
    "Q8_1": ((4, 8, 8),),
    "Q8_K": ((4, 64, 8),),
    "Q2_K": ((16, 8, 2),),
    "Q3_K": ((32, 8, 2), (0, 8, 1)),
    "Q4_K": ((16, 8, 4),),
    "Q5_K": ((48, 8, 4), (16, 8, 1)),
    "Q6_K": ((0, 16, 4), (128, 8, 2)),
    "IQ4_NL": ((2, 4, 4),),
    "IQ4_XS": ((8, 4, 4),),
    "MXFP4": ((1, 4, 4),),
    "NVFP4": ((4, 2, 4),),
    "TQ2_0": ((0, 8, 2),),
    "Q1_0": ((2, 0, 1),),
    "Q2_0": ((2, 0, 2),),
}


@inlined
def _swap(low, high, shift, mask):
    """Exchange the upper part of each field of the first word with the lower part of the second's."""
    turned = ((low >> shift) ^ high) & (ONES * mask)
    return low ^ (turned << shift), high ^ turned


@inlined
def _runs(at, runs, words, bits, flip, to, apart):
    """Runs of whole blocks: word 8b + quad of a run, at step k, is of block b + k * words / 8 of that run.

    Eight words are a square of fields, (quad, step); the lines of a plane are the same square turned over.
    """
    shift = (bits >> 1) - (bits >> 3)  # 8, 4, 2, 1 -> 3, 2, 1, 0
    far = words >> 3
    step = far * apart
    for _ in range(runs):
        for b in range(far):
            w0, w1, w2, w3, w4, w5, w6, w7 = (
                word(at), word(at + 4), word(at + 8), word(at + 12),
                word(at + 16), word(at + 20), word(at + 24), word(at + 28),
            )  # fmt: skip
            if bits < 8:
                w0, w4 = _swap(w0, w4, 4, 15)
                w1, w5 = _swap(w1, w5, 4, 15)
                w2, w6 = _swap(w2, w6, 4, 15)
                w3, w7 = _swap(w3, w7, 4, 15)
            if bits < 4:
                w0, w2 = _swap(w0, w2, 2, 0x33)
                w1, w3 = _swap(w1, w3, 2, 0x33)
                w4, w6 = _swap(w4, w6, 2, 0x33)
                w5, w7 = _swap(w5, w7, 2, 0x33)
            if bits < 2:
                w0, w1 = _swap(w0, w1, 1, 0x55)
                w2, w3 = _swap(w2, w3, 1, 0x55)
                w4, w5 = _swap(w4, w5, 1, 0x55)
                w6, w7 = _swap(w6, w7, 1, 0x55)
            for i, held in enumerate((w0, w1, w2, w3, w4, w5, w6, w7)):
                put_word(to + b * apart + (i >> shift) * step + 64 * (i & (bits - 1)), held ^ flip)
            at += 32
        to += step << (3 - shift)


@inlined
def _half_runs(at, blocks, to, apart):
    """Nibbles in runs of four words: they share bytes as they are to."""
    for block in range(blocks):
        for line in range(4):
            put_word(to + block * apart + 64 * line, word(at + 16 * block + 4 * line))


@inlined
def _quarter_runs(at, blocks, to, apart):
    """Nibbles in runs of two words."""
    for _ in range(blocks):
        for i in range(2):
            low, high = word(at + 4 * i), word(at + 8 + 4 * i)
            put_word(to + 64 * i, (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4))
            put_word(to + 64 * (i + 2), ((low >> 4) & 0x0F0F0F0F) | (high & 0xF0F0F0F0))
        at, to = at + 16, to + apart


@inlined
def spread(nibble):
    """Four bits -> one in each byte of a word."""
    return (nibble * 0x00204081) & ONES


@inlined
def _neighbouring_bits(at, blocks, to, apart):
    for block in range(blocks):
        bits, held = word(at + 4 * block), 0
        for j in range(8):
            held |= spread((bits >> (4 * j)) & 15) << j
        put_word(to + block * apart, held)


@inlined
def _neighbouring_pairs(at, blocks, to, apart):
    for block in range(blocks):
        for line in range(2):
            held = 0
            for j in range(4):
                four = byte(at + 8 * block + line + 2 * j)
                held |= ((four | four << 6 | four << 12 | four << 18) & (3 * ONES)) << (2 * j)
            put_word(to + block * apart + 64 * line, held)


@inlined
def basic_planes(source, flip, at, held, codes, to, apart):
    """All planes for one row of `held` blocks of a file; our first block is at `to`, the next `apart` bytes further."""
    blocks = source.quads >> 3  # of ours, in one of the file
    for i in range(source.n_fields):
        row = source.fields + 32 * i
        start, words, bits, runs = number(row), number(row + 8), number(row + 16), number(row + 24)
        for block in range(held):
            here, lines = at + block * source.size + start, to + block * blocks * apart
            if words == 4:
                _half_runs(here, blocks, lines, apart)
            elif words == 2:
                _quarter_runs(here, blocks, lines, apart)
            elif words == 0 and bits == 1:
                _neighbouring_bits(here, blocks, lines, apart)
            elif words == 0:
                _neighbouring_pairs(here, blocks, lines, apart)
            else:
                _runs(here, runs, words, bits, flip, lines, apart)
        to += 64 * bits


FOURS, SIXES = 0x0F0F0F0F, 0x3F3F3F3F
HALVES_RULE, NUMBER, BYTES_RULE, K3, K4, K6, XS = range(7)
RULES = {
    "Q3_K": K3, "Q4_K": K4, "Q5_K": K4, "Q6_K": K6, "Q8_K": NUMBER, "IQ4_XS": XS,
    "MXFP4": BYTES_RULE, "NVFP4": BYTES_RULE,
}  # fmt: skip

# Type -> (byte of d, factor, byte of the minimum, factor), both float16.
HALVES = {
    "Q4_0": (0, 1, 0, 0),
    "Q4_1": (0, 1, 2, 1),
    "Q5_0": (0, 1, 0, 0),
    "Q5_1": (0, 1, 2, 1),
    "Q8_0": (0, 1, 0, 0),
    "Q8_1": (0, 1, 0, 0),
    "Q2_K": (80, 1, 82, -1),
    "IQ4_NL": (0, 1, 0, 0),
    "TQ1_0": (52, 1, 0, 0),
    "TQ2_0": (64, 1, 0, 0),
    "Q1_0": (0, 2, 0, -1),
    "Q2_0": (0, 1, 0, 0),
}


# The same with small integers at their largest: a bound, all that is read while the largest scale is looked for.
BOUNDS = {
    "Q3_K": (108, 32, 0, 0),
    "Q4_K": (0, 63, 2, 63),
    "Q5_K": (0, 63, 2, 63),
    "Q6_K": (208, 128, 0, 0),
    "IQ4_XS": (0, 32, 0, 0),
}

# Type -> (scales a block, the scale that each byte stands for): the scales lead the block.
BYTES = {"MXFP4": (1, e8m0_halves), "NVFP4": (4, e4m3_halves)}


@inlined
def _scaled(numbers, offset, factor, out):
    """Four numbers, one in each byte of a word: (number - offset) * factor."""
    for i in range(4):
        put_single(out + 4 * i, factor * np.float32(((numbers >> (8 * i)) & 255) - offset))


@inlined
def _scales_k4(at, d, m):
    """Q4_K, Q5_K: eight scales and eight minima of 6 bits."""
    scale, minus = half(at), -half(at + 2)
    low_d, low_m, rest = word(at + 4), word(at + 8), word(at + 12)
    _scaled(low_d & SIXES, 0, scale, d)
    _scaled(low_m & SIXES, 0, minus, m)
    _scaled((rest & FOURS) | ((low_d >> 2) & 0x30303030), 0, scale, d + 16)
    _scaled(((rest >> 4) & FOURS) | ((low_m >> 2) & 0x30303030), 0, minus, m + 16)


@inlined
def _scales_k3(at, d):
    """Q3_K: sixteen scales of 6 bits, less 32."""
    scale, high = half(at + 108), word(at + 104)
    for i in range(4):
        low = (word(at + 96 + 4 * (i & 1)) >> (4 * (i >> 1))) & FOURS
        _scaled(low | (((high >> (2 * i)) & 0x03030303) << 4), 32, scale, d + 16 * i)


@inlined
def _scales_k6(at, d):
    """Q6_K: sixteen signed bytes."""
    scale = half(at + 208)
    for i in range(4):
        _scaled(word(at + 192 + 4 * i) ^ 0x80808080, 128, scale, d + 16 * i)


@inlined
def _scales_xs(at, d):
    """IQ4_XS: eight scales of 6 bits, less 32."""
    scale, high, low = half(at), short(at + 2), word(at + 4)
    for i in range(8):
        six = ((low >> (4 * i)) & 15) | (((high >> (2 * i)) & 3) << 4)
        put_single(d + 4 * i, scale * np.float32(six - 32))


@inlined
def _halves(source, at, held, d, m):
    """Scales, and minima where there are such, that are float16."""
    for block in range(held):
        here = at + block * source.size
        put_single(d + 4 * block, source.d_factor * half(here + source.d_at))
        if source.m_factor:
            put_single(m + 4 * block, source.m_factor * half(here + source.m_at))


@inlined
def _bytes(source, at, held, d):
    """Scales that are a byte each, at the head of a block."""
    for block in range(held):
        for i in range(source.d_at):
            put_single(d + 4 * (block * source.d_at + i), single(source.table + 4 * byte(at + block * source.size + i)))


@inlined
def basic_scales(source, at, held, d, m):
    """The scales and minima of `held` blocks of a file, as the type's rule has them."""
    rule = source.rule
    if rule == HALVES_RULE:
        _halves(source, at, held, d, m)
    elif rule == K4:
        _scales_k4(at, d, m)
    elif rule == K6:
        _scales_k6(at, d)
    elif rule == K3:
        _scales_k3(at, d)
    elif rule == XS:
        _scales_xs(at, d)
    elif rule == BYTES_RULE:
        _bytes(source, at, held, d)
    else:
        put_single(d, single(at))


IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, TQ1_0 = range(8)
BOOK_RULES = {
    "IQ2_XXS": IQ2_XXS, "IQ2_XS": IQ2_XS, "IQ2_S": IQ2_S, "IQ3_XXS": IQ3_XXS, "IQ3_S": IQ3_S, "IQ1_S": IQ1_S,
    "IQ1_M": IQ1_M, "TQ1_0": TQ1_0,
}  # fmt: skip


@inlined
def _even(seven):
    """Seven signs, and the eighth that makes their number even."""
    folded = seven ^ (seven >> 4)
    return seven | (((0x6996 >> (folded & 15)) & 1) << 7)


@inlined
def _rows_of_eight(rule, at, k):
    """IQ2 and IQ1: the row of the codebook for columns 8k .., and the signs (IQ1_M: all up or all down)."""
    if rule == IQ2_XXS:
        group = at + 2 + 8 * (k >> 2)
        return byte(group + (k & 3)), _even((word(group + 4) >> (7 * (k & 3))) & 127)
    if rule == IQ2_XS:
        code = short(at + 2 + 2 * k)
        return code & 511, _even(code >> 9)
    if rule == IQ2_S:
        high = (byte(at + 66 + (k >> 2)) >> (2 * (k & 3))) & 3
        return byte(at + 2 + k) | high << 8, byte(at + 34 + k)
    if rule == IQ1_S:
        return byte(at + 2 + k) | ((short(at + 34 + 2 * (k >> 2)) >> (3 * (k & 3))) & 7) << 8, 0
    nibble = (byte(at + 32 + (k >> 1)) >> (4 * (k & 1))) & 15  # IQ1_M
    return byte(at + k) | (nibble & 7) << 8, (nibble >> 3) * 255


@inlined
def _rows_of_four(rule, at, k):
    """IQ3: the two rows of the codebook for columns 8k .., and their signs."""
    first, second = byte(at + 2 + 2 * k), byte(at + 3 + 2 * k)
    if rule == IQ3_XXS:
        return first, second, _even((word(at + 66 + 4 * (k >> 2)) >> (7 * (k & 3))) & 127)
    high = byte(at + 66 + (k >> 2)) >> (2 * (k & 3))
    return first | (high & 1) << 8, second | (high & 2) << 7, byte(at + 74 + k)


@inlined
def _trits(at, words, trits, codes):
    """`trits` codes of each byte of so many words: all first ones, then all second ones, and so on."""
    power = 1
    for n in range(trits):
        for i in range(words):
            code = 0
            for j in range(4):
                code |= ((((byte(at + 4 * i + j) * power) & 255) * 3) >> 8) << (8 * j)
            put_word(codes + 4 * (n * words + i), code)
        power *= 3


@inlined
def _book_codes(rule, book, at, codes):
    """The codes of one block."""
    if rule == TQ1_0:
        _trits(at, 8, 5, codes)
        _trits(at + 32, 4, 5, codes + 160)
        _trits(at + 48, 1, 4, codes + 240)
        return
    place = 2 if rule == IQ1_M else 3  # of the sign in the code
    for k in range(32):
        if rule in (IQ3_XXS, IQ3_S):
            first, second, signs = _rows_of_four(rule, at, k)
        else:
            row, signs = _rows_of_eight(rule, at, k)
            first, second = 2 * row, 2 * row + 1
        put_word(codes + 8 * k, word(book + 4 * first) | spread(signs & 15) << place)
        put_word(codes + 8 * k + 4, word(book + 4 * second) | spread(signs >> 4) << place)


@inlined
def _plane(codes, bits, place, lines):
    """The lines of one plane for one row of one block."""
    for line in range(bits):
        held = 0
        for j in range(8 // bits):
            held |= ((word(codes + 4 * (line + bits * j)) >> place) & (ONES * ((1 << bits) - 1))) << (bits * j)
        put_word(lines + 64 * line, held)


@inlined
def book_planes(source, flip, at, held, codes, to, apart):
    """All planes for one row of one block of a file; our first block is at `to`, the next `apart` bytes further."""
    _book_codes(source.rule, source.table, at, codes)
    for block in range(8):
        here, lines = codes + 32 * block, to + apart * block
        if apart == 256:
            _plane(here, 4, 0, lines)
        else:
            _plane(here, 2, 0, lines)
        if apart == 192:
            _plane(here, 1, 2, lines + 128)


@inlined
def _nibbles(at, count, d, factor):
    """Scales (s + 1/2) * factor."""
    for i in range(count):
        nibble = (byte(at + (i >> 1)) >> (4 * (i & 1))) & 15
        put_single(d + 4 * i, factor * (np.float32(nibble) + np.float32(0.5)))


@inlined
def _one_s(at, d, m):
    """IQ1_S: the shift of a group of 32 is its minimum."""
    for i in range(8):
        bits = short(at + 34 + 2 * i)
        scale = half(at) * np.float32(2 * ((bits >> 12) & 7) + 1)
        put_single(d + 4 * i, scale)
        put_single(m + 4 * i, scale * np.float32(0.125 - 0.25 * (bits >> 15)))


@inlined
def _one_m(at, d):
    """IQ1_M: the float16 lies in the top nibbles of four words; an eighth of the scale, as the table is eightfold."""
    bits = 0
    for i in range(4):
        bits |= (short(at + 48 + 2 * i) >> 12) << (4 * i)
    for i in range(16):
        three = (short(at + 48 + 2 * (i >> 2)) >> (3 * (i & 3))) & 7
        put_single(d + 4 * i, half_of(bits) * np.float32(0.125) * np.float32(2 * three + 1))


@inlined
def book_scales(source, at, held, d, m):
    """The scales and minima of one block."""
    rule = source.rule
    if rule == IQ1_M:
        _one_m(at, d)
    elif rule == IQ1_S:
        _one_s(at, d, m)
    elif rule == TQ1_0:
        put_single(d, half(at + 52))
    elif rule in (IQ2_XS, IQ2_S):
        _nibbles(at + (66 if rule == IQ2_XS else 74), 16, d, half(at) * np.float32(0.25))
    elif rule == IQ3_S:
        _nibbles(at + 106, 8, d, half(at) * np.float32(2))
    else:
        apart, first = (8, 6) if rule == IQ2_XXS else (4, 66)
        factor = half(at) * np.float32(0.25 if rule == IQ2_XXS else 0.5)
        for i in range(8):
            scale = np.float32(word(at + first + apart * i) >> 28) + np.float32(0.5)
            put_single(d + 4 * i, factor * scale)
