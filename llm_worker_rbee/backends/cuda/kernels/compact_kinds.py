"""Kinds of one to five bits per weight: their planes, and how kernels read a block of 32 columns.

Each is a row of COMPACT_KINDS and packs the quantization type of its name. Planes are (rows, words of a block, blocks),
as gemv.py draws them; a block has up to four:

    low      int32 words: fields of 1, 2 or 4 bits; or bytes of codebook indices, then a word of signs (fields of 1 bit)
    high     int16: the upper bits of IQ1_M's indices, with a shift each; two bytes of TQ1_0
    small    int8 or int16: the block's own integer scales, and upper bits of indices; the last byte of TQ1_0
    scales   float16, or two of them in an int32 (of 16 columns each; or scale and minimum), for `group` blocks

Of columns 4 q + k, fields of w bits are at bit 8 k + w (q mod 8/w) of word q div 8/w: a shift and a mask make word q of
the codes, a byte per column, as activations have them. A weight is (code - offset) * scale, or code * scale + minimum.
"""

# Kernels add to tuples that are empty at first.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....weights.quants.codebooks import FP4_VALUES, IQ4_VALUES
from .intrinsics import high_half, lookup_nibbles, low_half

MAX_SMALL_SCALE = 32


class CompactKind(NamedTuple):
    """Planes of a block of 32 columns, and how its codes and scales are made of them."""

    codes: str  # see `code_words`
    words: int  # of `low`
    high: int = 0  # bits, 0 or 16
    small: int = 0  # bits, 0, 8 or 16
    scales: str = "one"  # see `block_scales`
    group: int = 1  # blocks that share an entry of `scales`
    offset: float = 0.0  # of the codes
    index_bits: int = 8  # those above the eighth are in `small`, from its eighth bit on

    @property
    def has_pairs(self) -> bool:
        """Whether an entry of `scales` is two float16."""
        return self.scales in ("two", "nibbles and minima")

    @property
    def has_minima(self) -> bool:
        """Whether `block_scales` returns minima: an offset is one too."""
        return self.offset != 0 or self.scales == "nibbles and minima"

    @property
    def has_one_scale(self) -> bool:
        """Whether all columns of a block have the same scale."""
        return self.scales in ("one", "byte", "three bits")

    @property
    def has_small_scales(self) -> bool:
        """Whether the scale of a group is multiplied by integers of a block, of up to MAX_SMALL_SCALE."""
        return self.scales not in ("one", "two")

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return self.words + (self.high + self.small + (32 if self.has_pairs else 16) / self.group) / 32


COMPACT_KINDS = {
    "q1_0": CompactKind("1 bit", 1, group=4, offset=0.5),
    "q2_0": CompactKind("2 bits", 2, offset=1),
    "tq1_0": CompactKind("trits", 1, high=16, small=8, group=8, offset=1),
    "tq2_0": CompactKind("2 bits", 2, group=8, offset=1),
    "q2_k": CompactKind("2 bits", 2, small=16, scales="nibbles and minima", group=8),
    "q3_k": CompactKind("3 bits", 3, small=16, scales="two bytes", group=8, offset=4),
    "iq4_nl": CompactKind("IQ4", 4),
    "iq4_xs": CompactKind("IQ4", 4, small=8, scales="byte", group=8),
    "iq2_xxs": CompactKind("rows of 8", 2, small=8, scales="byte", group=8),
    "iq2_xs": CompactKind("rows of 8", 2, small=16, scales="two nibbles", group=8, index_bits=9),
    "iq2_s": CompactKind("rows of 8", 2, small=16, scales="two nibbles", group=8, index_bits=10),
    "iq3_xxs": CompactKind("rows of 4", 3, small=8, scales="byte", group=8),
    "iq3_s": CompactKind("rows of 4", 3, small=16, scales="two nibbles", group=8, index_bits=9),
    "iq1_s": CompactKind("shifted rows", 1, small=16, scales="three bits", group=8),
    "iq1_m": CompactKind("shifted rows", 1, high=16, small=8, scales="twice three bits", group=8),
}
CODEBOOKS = {"rows of 8", "rows of 4", "shifted rows"}  # codes that `table` is for
COMPACT = tl.constexpr(COMPACT_KINDS)  # as kernels read it


def table_words(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return sixteen int8 as four int32, the first in the low byte."""
    raw = bytes(value & 255 for value in values)
    return tuple(int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, 16, 4))


NIBBLE_TABLES = tl.constexpr({"E2M1": table_words(FP4_VALUES), "IQ4": table_words(IQ4_VALUES)})


@triton.constexpr_function
def is_compact(kinds, kind):
    """Return whether a kind is described here."""
    return kind in kinds


@triton.constexpr_function
def kind_field(kinds, kind, name):
    """Return a field of a kind's row."""
    return getattr(kinds[kind], name)


@triton.constexpr_function
def nibble_table(tables, codes, i):
    """Return word i of a table of sixteen int8."""
    return tables[codes][i]


@triton.jit
def load_block(low, high, small, scales, n, b, ok, blocks, KIND: tl.constexpr, POLICY: tl.constexpr):
    """Load (low words, high, small, scale) of blocks b of rows n where `ok`; what a kind lacks is its first word."""
    WORDS: tl.constexpr = kind_field(COMPACT, KIND, "words")
    GROUP: tl.constexpr = kind_field(COMPACT, KIND, "group")
    words = ()
    for i in tl.static_range(WORDS):
        words = words + (tl.load(low + (n * WORDS + i) * blocks + b, mask=ok, other=0, eviction_policy=POLICY),)
    h = words[0]
    s = words[0]
    if kind_field(COMPACT, KIND, "high") > 0:
        h = tl.load(high + n * blocks + b, mask=ok, other=0, eviction_policy=POLICY)
    if kind_field(COMPACT, KIND, "small") > 0:
        s = tl.load(small + n * blocks + b, mask=ok, other=0, eviction_policy=POLICY)
    d = tl.load(scales + n * (blocks // GROUP) + b // GROUP, mask=ok, other=0, eviction_policy=POLICY)
    return words, h, s, d


@triton.jit
def field_word(words, q: tl.constexpr, WIDTH: tl.constexpr):
    """Return fields 4 q .. 4 q + 3 of WIDTH bits, a byte each."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    return (words[q // PER_BYTE] >> (WIDTH * (q % PER_BYTE))) & (0x01010101 * ((1 << WIDTH) - 1))


@triton.jit
def trit_word(word, i: tl.constexpr):
    """Return digit i in base 3 of four bytes, each a fraction of 256 (weights/quants/decoders.py)."""
    POWER: tl.constexpr = 3**i
    even = ((word & 0x00FF00FF) * POWER & 0x00FF00FF) * 3
    odd = (((word >> 8) & 0x00FF00FF) * POWER & 0x00FF00FF) * 3
    return ((even >> 8) & 0x00030003) | (odd & 0x03000300)


@triton.jit
def apply_signs(word, signs, q: tl.constexpr):
    """Negate the bytes of code word q, none of them zero, whose sign is set."""
    minus = (signs >> q) & 0x01010101
    return (word ^ (minus * 255)) + minus


@triton.jit
def nibble_values(word, TABLE: tl.constexpr):
    """Look up eight nibbles in a table of int8: the bytes of the low nibbles, then of the high ones."""
    return lookup_nibbles(
        word,
        nibble_table(NIBBLE_TABLES, TABLE, 0),
        nibble_table(NIBBLE_TABLES, TABLE, 1),
        nibble_table(NIBBLE_TABLES, TABLE, 2),
        nibble_table(NIBBLE_TABLES, TABLE, 3),
    )


@triton.jit
def code_words(block, table, KIND: tl.constexpr):
    """Return the codes of a block: eight words of four signed bytes, columns 4 q .. 4 q + 3 in word q."""
    CODES: tl.constexpr = kind_field(COMPACT, KIND, "codes")
    words, high, small, _ = block
    out = ()
    if CODES == "1 bit" or CODES == "2 bits" or CODES == "3 bits":
        WIDTH: tl.constexpr = 1 if CODES == "1 bit" else 2
        for q in tl.static_range(8):
            word = field_word(words, q, WIDTH)
            if CODES == "3 bits":
                word = word | (field_word(words[2:], q, 1) << 2)
            out = out + (word,)
    elif CODES == "IQ4":
        for i in tl.static_range(4):
            out = out + nibble_values(words[i], "IQ4")
    elif CODES == "trits":  # four bytes of five, then three bytes of four, the last of which complete the words
        for i in tl.static_range(5):
            out = out + (trit_word(words[0], i),)
        rest = (high.to(tl.int32) & 0xFFFF) | ((small.to(tl.int32) & 0xFF) << 16)
        last = trit_word(rest, 3)
        for i in tl.static_range(3):
            out = out + (trit_word(rest, i) | ((last >> (8 * i)) << 24),)
    elif CODES == "shifted rows":
        out = shifted_rows(words[0], high, small, table, kind_field(COMPACT, KIND, "high") > 0)
    else:
        out = signed_rows(words, small, table, CODES == "rows of 8", kind_field(COMPACT, KIND, "index_bits") - 8)
    return out


@triton.jit
def signed_rows(words, small, table, EIGHT: tl.constexpr, UPPER_BITS: tl.constexpr):
    """Return eight code words of a codebook of rows of eight (int64) or four (int32) columns; the signs come last."""
    out = ()
    signs = words[1 if EIGHT else 2]
    upper = small.to(tl.int32) >> 8
    for i in tl.static_range(4 if EIGHT else 8):
        index = (words[i // 4] >> (8 * (i % 4))) & 255
        if UPPER_BITS > 0:
            index = index | (((upper >> (UPPER_BITS * i)) & ((1 << UPPER_BITS) - 1)) << 8)
        row = tl.load(table + index)
        if EIGHT:
            out = out + (apply_signs(row.to(tl.int32), signs, 2 * i),)
            out = out + (apply_signs((row >> 32).to(tl.int32), signs, 2 * i + 1),)
        else:
            out = out + (apply_signs(row, signs, i),)
    return out


@triton.jit
def shifted_rows(indices, high, small, table, BY_ROW: tl.constexpr):
    """Return eight code words of IQ1: eighths, of rows that are shifted by one up or down, each (BY_ROW) or all.

    high (BY_ROW): four nibbles, a shift above three bits of an index. Else small: four times three bits, the scale's
    three, the shift."""
    out = ()
    upper = (high if BY_ROW else small).to(tl.int32)
    STEP: tl.constexpr = 4 if BY_ROW else 3
    for i in tl.static_range(4):
        index = ((indices >> (8 * i)) & 255) | (((upper >> (STEP * i)) & 7) << 8)
        is_down = (upper >> (4 * i + 3 if BY_ROW else 15)) & 1
        shift = 0x01010101 - is_down * 0x02020202
        row = tl.load(table + index)  # bytes plus 128
        out = out + ((row.to(tl.int32) + shift) ^ -0x7F7F7F80, ((row >> 32).to(tl.int32) + shift) ^ -0x7F7F7F80)
    return out


@triton.jit
def small_scales(block, KIND: tl.constexpr):
    """Return the integers that the scale of a group is multiplied by, of the first and of the last 16 columns."""
    SCALES: tl.constexpr = kind_field(COMPACT, KIND, "scales")
    k = block[2].to(tl.int32)
    if SCALES == "byte":
        first, last = k, k
    elif SCALES == "two bytes":
        first, last = (k << 24) >> 24, k >> 8
    elif SCALES == "nibbles and minima":  # a byte per 16 columns: the minimum in the upper nibble
        first, last = k & 15, (k >> 8) & 15
    elif SCALES == "two nibbles":  # odd numbers, as all below
        first, last = (k & 15) * 2 + 1, ((k >> 4) & 15) * 2 + 1
    elif SCALES == "three bits":
        first, last = ((k >> 12) & 7) * 2 + 1, ((k >> 12) & 7) * 2 + 1
    else:
        tl.static_assert(SCALES == "twice three bits", "unknown scales")
        first, last = (k & 7) * 2 + 1, ((k >> 3) & 7) * 2 + 1
    return first, last


@triton.jit
def block_scales(block, KIND: tl.constexpr):
    """Return scale and scale, minimum and minimum of the first and the last 16 columns: float32."""
    SCALES: tl.constexpr = kind_field(COMPACT, KIND, "scales")
    k, d = block[2].to(tl.int32), block[3]
    if SCALES == "two":
        first, last = low_half(d), high_half(d)
    elif SCALES == "one":
        first, last = d.to(tl.float32), d.to(tl.float32)
    else:
        a, z = small_scales(block, KIND)
        scale = group_scale(d)
        first, last = scale * a.to(tl.float32), scale * z.to(tl.float32)
    if SCALES == "nibbles and minima":
        minima = high_half(d) * ((k >> 4) & 15).to(tl.float32), high_half(d) * ((k >> 12) & 15).to(tl.float32)
    else:
        OFFSET: tl.constexpr = kind_field(COMPACT, KIND, "offset")
        minima = -OFFSET * first, -OFFSET * last
    return first, last, minima[0], minima[1]


@triton.jit
def group_scale(d):
    """Return the scale of a group, which has a minimum beside it if it is of 32 bits."""
    return low_half(d) if d.dtype == tl.int32 else d.to(tl.float32)


@triton.jit
def block_values(block, table, KIND: tl.constexpr):
    """Return the weights of (rows, blocks) blocks before the unit: (rows, blocks, 32) float32."""
    w = code_words(block, table, KIND)
    joined = tl.join(
        tl.join(tl.join(w[0], w[4]), tl.join(w[2], w[6])), tl.join(tl.join(w[1], w[5]), tl.join(w[3], w[7]))
    )
    N: tl.constexpr = w[0].shape[0]
    B: tl.constexpr = w[0].shape[1]
    words = tl.reshape(joined, (N, B, 8, 1))
    codes = tl.reshape((words << (24 - 8 * tl.arange(0, 4)[None, None, None, :])) >> 24, (N, B, 32)).to(tl.float32)
    first, last, first_minimum, last_minimum = block_scales(block, KIND)
    is_first = tl.arange(0, 32)[None, None, :] < 16
    value = codes * tl.where(is_first, first[:, :, None], last[:, :, None])
    if kind_field(COMPACT, KIND, "has_minima"):
        value += tl.where(is_first, first_minimum[:, :, None], last_minimum[:, :, None])
    return value
