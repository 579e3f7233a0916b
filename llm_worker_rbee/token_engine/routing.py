"""Which of several engines gets a request: the longest cached prefix first, then the least load.

An engine's prefix cache is known by the chained hashes of its blocks: a hash stands for a whole prefix. The blocks of
open requests count before they are computed, so that requests with one prefix that arrive together meet in one engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ..config import EngineConfig
from ..engine.block_pool import ExtraKeys, extend_hashes

# An engine is chosen for its match while the tokens that it is behind the least loaded one are at most this many times
# those that it saves: one hot prefix cannot keep the others idle.
IMBALANCE_FACTOR = 2


MAX_HASHED_BLOCKS = 1024  # of a prompt: more would hold the event loop up, and tell little more


def prompt_hashes(prompt: list[int], config: EngineConfig, extra_keys: ExtraKeys = ()) -> list[bytes]:
    """Return the hashes of a prompt's blocks that a prefix cache may have: the last token is always computed."""
    hashes: list[bytes] = []
    if config.prefix_cache:
        num_blocks = min(MAX_HASHED_BLOCKS, (len(prompt) - 1) // config.block_size)
        extend_hashes(hashes, prompt, num_blocks, config.block_size, extra_keys)
    return hashes


class Candidate(NamedTuple):
    """An engine as routing sees it, for one request."""

    num_matched_tokens: int  # of the prompt, in its prefix cache
    load: int  # tokens of its open requests: of each prompt those that were not cached, and its output so far
    num_cached_blocks: int = 0


def choose(candidates: Sequence[Candidate]) -> int:
    """Return the index of the engine for a request; ties go to the emptier prefix cache, then to the first engine."""
    least = min(candidate.load for candidate in candidates)

    def rank(i: int) -> tuple[int, int, int, int]:
        matched, load, num_cached = candidates[i]
        is_balanced = load - least <= IMBALANCE_FACTOR * matched
        return (-matched if is_balanced else 1, load, num_cached, i)

    return min(range(len(candidates)), key=rank)


class PrefixIndex:
    """The hashes of blocks that one engine has in its prefix cache, and of blocks that its open requests will add."""

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}  # in the order in which they were stored
        self._pending: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._stored)

    def update(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Take in the changes that an engine reports."""
        for block_hash in removed:
            self._stored.pop(block_hash, None)
        self._stored.update(dict.fromkeys(stored))

    def hashes(self) -> Iterator[bytes]:
        """Yield all hashes, each after the hashes of the blocks before it."""
        return chain(self._pending, self._stored)

    def clear(self) -> None:
        """Forget what was stored: the engine is a new one."""
        self._stored.clear()

    def add_pending(self, hashes: Iterable[bytes]) -> None:
        """Count the blocks of a request that was submitted."""
        self._pending.update(hashes)

    def remove_pending(self, hashes: Iterable[bytes]) -> None:
        """Count the blocks of a request no more: it is finished, or has left the engine."""
        for block_hash in hashes:
            self._pending[block_hash] -= 1
            if not self._pending[block_hash]:
                del self._pending[block_hash]

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks the engine has or will have."""
        for i, block_hash in enumerate(hashes):
            if block_hash not in self._stored and block_hash not in self._pending:
                return i
        return len(hashes)
