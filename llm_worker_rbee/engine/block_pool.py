"""Who owns which block of the KV cache: reference counts, and full blocks that are found again by what they hold.

A block is a number. A full block whose keys and values are computed is known by the hash of its tokens chained to the
hash of the block before, so a hash stands for the whole beginning of a request. Blocks that nobody uses keep their
contents until they are needed: the least recently used goes first, those that nobody could find again before all
others. No arrays here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from .request import Request

DIGEST_BYTES = 16


def chained_hash(before: bytes, ids: Sequence[int]) -> bytes:
    """The hash of a full block that follows `before`; the first block follows b""."""
    return blake2b(before + array("q", ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def extend_hashes(hashes: list[bytes], ids: Sequence[int], blocks: int, block_size: int) -> None:
    """Make the chain as long as the first `blocks` blocks of `ids`."""
    for i in range(len(hashes), blocks):
        before = hashes[i - 1] if i else b""
        hashes.append(chained_hash(before, ids[i * block_size : (i + 1) * block_size]))


class BlockPool:
    """`n_blocks` blocks of `block_size` tokens."""

    def __init__(self, n_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.caching = caching
        self.num_evictions = 0
        self._references = [0] * n_blocks
        self._hashes: list[bytes | None] = [None] * n_blocks
        self._found: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))  # next to be taken first

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, whether or not they can be found again."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning that is here."""
        found: list[int] = []
        for known in hashes:
            block = self._found.get(known)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, known_as: bytes) -> bool:
        """Whether a block is here."""
        return known_as in self._found

    def can_acquire(self, shared: Sequence[int], fresh: int) -> bool:
        """Whether there are so many free blocks beside those shared ones that nobody uses now."""
        return fresh <= len(self._free) - sum(self._references[block] == 0 for block in shared)

    def acquire(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """One reference more to each shared block, and fresh ones behind them; None if there are not enough."""
        if not self.can_acquire(shared, fresh):
            return None
        for block in shared:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return [*shared, *(self._take() for _ in range(fresh))]

    def one_more(self) -> int | None:
        """A fresh block, if there is one."""
        return self._take() if self._free else None

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Of blocks that become free at once the last is forgotten first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, known_as: bytes) -> None:
        """A block is full and computed: others may find it, unless they find the same contents elsewhere."""
        if self.caching and known_as not in self._found:
            self._found[known_as] = block
            self._hashes[block] = known_as

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Something went wrong with a request that holds these: nobody else shall find them."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._evict(block)

    def forget(self) -> int:
        """Let go of all that is kept for later; how many blocks that were."""
        kept = [block for block in self._free if self._hashes[block] is not None]
        for block in kept:
            self._evict(block)
        return len(kept)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._hashes[block] is not None:
            self._evict(block)
        self._references[block] = 1
        return block

    def _evict(self, block: int) -> None:
        known_as = self._hashes[block]
        assert known_as is not None
        del self._found[known_as]
        self._hashes[block] = None
        self.num_evictions += 1

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """The books are right for these owners: no block lost, none owned that is free, every count true."""
        counted = [0] * self.n_blocks
        for blocks in owners:
            assert len(set(blocks)) == len(blocks), "a request has a block twice"
            for block in blocks:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from what requests hold"
        free = set(self._free)
        assert free == {block for block, count in enumerate(counted) if count == 0}, "free blocks are not those unused"
        known = {block: known_as for block, known_as in enumerate(self._hashes) if known_as is not None}
        assert known == {block: known_as for known_as, block in self._found.items()}, "hashes and blocks disagree"
        assert self.caching or not known


class InFlight:
    """Hash of a block -> who computes it; the first who began, if several do."""

    def __init__(self) -> None:
        self._by: dict[bytes, Request] = {}

    def begin(self, hashes: Sequence[bytes], request: Request) -> None:
        """It has been admitted and computes these."""
        for known_as in hashes:
            self._by.setdefault(known_as, request)

    def end(self, hashes: Sequence[bytes], request: Request) -> None:
        """They are computed, or it will not compute them."""
        for known_as in hashes:
            if self._by.get(known_as) is request:
                del self._by[known_as]

    def is_worth_waiting(self, missing: bytes | None, request: Request) -> bool:
        """Whether somebody as urgent computes what is missing."""
        by = None if missing is None else self._by.get(missing)
        return by is not None and by.priority <= request.priority

    def __bool__(self) -> bool:
        return bool(self._by)

    def check(self, running: Sequence[Request]) -> None:
        """Nobody waits for what nobody computes."""
        assert set(self._by.values()) <= set(running), "somebody waits for what nobody computes"
