"""How attention of tokens that answer is cut into programs, by how many answer and how many heads share keys: a table.

Who changes it changes the order of sums, so the last bits, and nothing else.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from . import device

FEW, CROWD = 4, 128  # requests up to which latency counts, not the rate of reading
PROGRAMS = 2048  # that many requests should be cut into
MANY_SPLITS = 16
DOT = 4  # heads that share keys from which the tensor cores take them


class Cut(NamedTuple):
    """A tile is `rows` keys for each 16 bytes a lane reads at a time, or with `dot` so many keys; a chunk has `least`
    tiles or more, a request at most `splits` chunks; `stages` of tiles on their way in shared memory, 0: one in
    registers."""

    rows: int
    warps: int
    splits: int
    least: int
    stages: int
    dot: bool


ONE_HEAD = {"few": Cut(8, 2, 16, 1, 0, False), "many": Cut(4, 1, 0, 4, 0, False), "crowd": Cut(2, 1, 0, 8, 0, False)}
PAIRED = {"few": Cut(4, 1, 32, 1, 0, False), "many": Cut(4, 1, 0, 4, 0, False)}  # two or three heads that share keys
GROUPED = {"few": Cut(16, 1, 32, 1, 0, True), "many": Cut(32, 1, 0, 2, 3, True)}
LARGE = {"few": Cut(16, 1, 16, 1, 0, True), "many": GROUPED["many"]}  # groups of more than DOT
PLAIN = {"few": Cut(2, 1, 4, 1, 0, False), "many": Cut(8, 1, 2, 1, 2, True)}  # the interpreter: short tiles, both ways


def cut_for(requests: int, heads: int, kv_heads: int) -> Cut:
    """The cut for so many requests."""
    group, size = heads // kv_heads, "few" if requests <= FEW else "many"
    if device.interpreting():
        return PLAIN["few"] if group < DOT or requests <= FEW else PLAIN["many"]
    table = ONE_HEAD if group == 1 else PAIRED if group < DOT else GROUPED if group == DOT else LARGE
    cut = table.get("crowd", table["many"]) if requests >= CROWD else table[size]
    if cut.splits:
        return cut
    wanted = -(-PROGRAMS // (requests * kv_heads * (2 if cut.dot else 1)))  # who uses the tensor cores needs fewer
    return cut._replace(splits=min(MANY_SPLITS, 1 << (wanted - 1).bit_length()))


def keys_for(dim: int, item: int) -> tuple[int, int]:
    """(keys of a tile, stages) for tokens that read, of heads of `dim` numbers of `item` bytes; fewer where shared
    memory is less than a Hopper's and a key is long."""
    if device.shared_memory() >= 200 << 10 or dim * item <= 256:
        return 64, 2
    return (32, 1) if dim * item <= 512 else (16, 1)


def runs_of(cut: Cut, dim: int, item: int, size: int) -> tuple[int, int]:
    """(keys of a run, runs) of a tile: a run lies in one block of `size` keys of `dim` numbers of `item` bytes."""
    tile = cut.rows * cut.warps * max(1, 512 // (dim * item))
    rows = gcd(size, cut.rows)
    return rows, tile // rows
