"""The entries of a step: a table of integers that all tasks of a program see (program.py).

Counts come first, then addresses: of what the batch holds, and of the buffers that tasks hand on to each other.
"""

from __future__ import annotations

from enum import IntEnum, auto

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]


class Step(IntEnum):
    """Which entry is what."""

    TOKENS = 0
    WANTED = auto()  # tokens whose logits are wanted
    TILES = auto()  # pieces of attention: tiles of tokens
    SINGLES = auto()  # and tokens one by one
    BLOCK_SIZE = auto()
    TABLE_WIDTH = auto()  # blocks in a row of the block table
    REQUESTS = auto()
    VOCABULARY = auto()  # logits of a row, for sampling
    # addresses: the batch
    IDS = auto()
    POSITIONS = auto()
    SLOTS = auto()
    QUERY_START = auto()
    BLOCK_TABLE = auto()
    INDEX = auto()  # which tokens' logits are wanted
    KV = auto()  # for each layer: keys, values, their scales
    # addresses: buffers
    WORK = auto()  # which piece of attention is what
    ANGLES = auto()  # (T, pairs) cos of the first rotary table, then its sin, then those of a second table
    SIN = auto()
    SECOND_COS = auto()
    SECOND_SIN = auto()
    STREAM = auto()  # (T, width) the residual stream
    DELTA = auto()  # (T, width) what is to be added to it
    NORMED = auto()  # (T, width)
    ACTIVATIONS = auto()  # (T, columns) as bytes, and what goes with them: activations.py
    SCALE = auto()
    SUMS = auto()
    SUMS16 = auto()
    SCALED = auto()
    SCALED16 = auto()
    QKV = auto()  # (T, (heads + 2 kv_heads) * dim)
    QUERIES = auto()  # (T, heads, padded dim)
    MIXED = auto()  # (T, heads, padded dim)
    COMPACT = auto()  # (T, heads * dim), where heads are padded
    GATE_UP = auto()  # (T, 2 * d_ff)
    HIDDEN = auto()  # (T, d_ff)
    LOGITS = auto()  # (N, vocabulary)
    # addresses: how the token of each row is chosen (draws.py)
    CHOICES = auto()  # integers
    CHANCES = auto()  # floats
    END = auto()


def new_step() -> Table:
    """A table of zeros."""
    return np.zeros(Step.END, np.int64)
