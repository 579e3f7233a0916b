"""Codes and scales of the block types with a codebook, IQ1 to IQ3, and of TQ1_0, whose trits share a byte.

One block of 256 columns of one row at a time: 64 words of four codes each, scales and minima as float32. A codebook is
words of codes too, one for each four columns. weights/quants/iq.py draws the layouts.
"""

from __future__ import annotations

import numpy as np

from .unpack_basic import ONES, spread
from .words import byte, half, half_of, inlined, put_single, put_word, short, word

IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, TQ1_0 = range(8)
RULES = {
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
