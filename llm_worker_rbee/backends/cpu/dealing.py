"""Which rows of a step attention works on together: a tile of neighbouring tokens, or some heads of a token alone."""

from __future__ import annotations

from .attention import TILE
from .compile import kernel


@kernel
def deal(query_start, heads, part, work):
    """(first token, tokens, request, head) of each piece to work[4 * i ...], at most tokens * heads; (tiles, others).

    Full tiles of each request, the longest first, then the last tokens of each, `part` heads together. Pieces that read
    the same keys follow each other.
    """
    n = 0
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        for head in range(heads):
            for token in range(last - (last - first) % TILE - TILE, first - 1, -TILE):
                work[4 * n], work[4 * n + 1], work[4 * n + 2], work[4 * n + 3] = token, TILE, r, head
                n += 1
    tiles = n
    for r in range(query_start.shape[0] - 1):
        first, last = query_start[r], query_start[r + 1]
        for head in range(0, heads, part):
            for token in range(last - (last - first) % TILE, last):
                work[4 * n], work[4 * n + 1], work[4 * n + 2], work[4 * n + 3] = token, 1, r, head
                n += 1
    return tiles, n - tiles
