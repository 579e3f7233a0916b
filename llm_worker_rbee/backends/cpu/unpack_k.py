"""Scales and minima of every block type without a codebook, as float32: plain numbers, bytes, or small integers.

The K types and IQ4_XS have small integers in odd places, times one or two float16 a block: products are exact. Up to
256 columns of one row are done at a time. weights/quants/k.py and iq.py draw the layouts.
"""

from __future__ import annotations

import numpy as np

from ...weights.quants.codebooks import e4m3_halves, e8m0_halves
from .words import byte, half, inlined, put_single, short, single, word

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
