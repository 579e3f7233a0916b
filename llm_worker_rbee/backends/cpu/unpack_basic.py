"""Codes of every block type that stores them as plain bits, straight into the planes that layouts.py describes.

Where they lie in the file is data, one row a type. Four codes of neighbouring columns make a word, and all steps are on
words. Up to 256 columns of one row are done at a time. Their scales are in unpack_k.py, types with a codebook in
unpack_iq.py.
"""

from __future__ import annotations

from .words import byte, inlined, number, put_word, word

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
