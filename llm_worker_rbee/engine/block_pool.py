"""The KV blocks: reference counts, and the prefix cache that finds full blocks by their contents.

A block is a number. A full, computed block is known by the hash of its tokens chained to the hash of the block before,
so a hash stands for a whole prefix. Free blocks keep their contents until they are needed: blocks that the prefix cache
cannot find go first, then the least recently used. No arrays here.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from .request import Request

DIGEST_BYTES = 16
ExtraKeys = Sequence[tuple[int, bytes]]  # position of a token; what else its keys and values depend on


def chained_hash(before: bytes, ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
    """Return the hash of a full block that follows `before`; the first block follows b"". Blocks with the same tokens
    and other `extra_keys` (an adapter, an image, a salt) are other blocks."""
    keys = b"".join(len(key).to_bytes(8, "little") + key for key in extra_keys)
    return blake2b(before + array("q", ids).tobytes() + keys, digest_size=DIGEST_BYTES).digest()


def extend_hashes(
    hashes: list[bytes], ids: Sequence[int], blocks: int, block_size: int, extra_keys: ExtraKeys = ()
) -> None:
    """Extend the chain to the first `blocks` blocks of `ids`; an extra key counts from the block of its token on."""
    for i in range(len(hashes), blocks):
        before, start, end = hashes[i - 1] if i else b"", i * block_size, (i + 1) * block_size
        keys = [key for position, key in extra_keys if start <= position < end]
        hashes.append(chained_hash(before, ids[start:end], keys))


class BlockPool:
    """Reference counts of `n_blocks` blocks of `block_size` tokens."""

    def __init__(self, n_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.caching = caching
        self.num_evictions = 0
        # Where someone reads and clears them: hashes that the prefix cache gained (True) or lost since then.
        self.changes: dict[bytes, bool] | None = None
        self.pinned: Counter[int] = Counter()  # blocks that are written to disk or read from it
        self._references = [0] * n_blocks
        self._hashes: list[bytes | None] = [None] * n_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))  # the first is allocated next

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, cached or not."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache can find."""
        return len(self._cached)

    @property
    def cached_hashes(self) -> list[bytes]:
        return list(self._cached)

    def is_cached(self, block_hash: bytes) -> bool:
        return block_hash in self._cached

    def can_acquire(self, shared: Sequence[int], fresh: int) -> bool:
        """Return whether `fresh` blocks are free beside the shared ones."""
        return fresh <= self.num_free_beside(shared)

    def num_free_beside(self, shared: Sequence[int]) -> int:
        """Return the number of free blocks, not counting the shared blocks that no request holds now."""
        return len(self._free) - sum(self._references[block] == 0 for block in shared)

    def acquire(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """Reference the shared blocks and allocate fresh ones after them; None if there are not enough."""
        if not self.can_acquire(shared, fresh):
            return None
        for block in shared:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return [*shared, *(self._allocate() for _ in range(fresh))]

    def allocate_one(self) -> int | None:
        """Return a fresh block, None if there is none."""
        return self._allocate() if self._free else None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. Of blocks that become free together the last is evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def touch(self, blocks: Sequence[int]) -> None:
        """Evict blocks of a prefix after all others, the last one first."""
        for block in reversed(blocks):
            if block in self._free:
                self._free.move_to_end(block)

    def pin(self, shared: Sequence[int], fresh: int = 0) -> list[int] | None:
        """Acquire blocks for the disk instead of a request."""
        blocks = self.acquire(shared, fresh)
        self.pinned.update(blocks or ())
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        """Release them."""
        self.pinned.subtract(blocks)
        self.release(blocks)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Enter a full, computed block into the prefix cache, unless another block has the same contents."""
        if self.caching and block_hash not in self._cached:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash
            if self.changes is not None:
                self.changes[block_hash] = True

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Remove blocks from the prefix cache; the blocks that no request holds are allocated next."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._evict(block)
                if block in self._free:
                    self._free.move_to_end(block, last=False)

    def _allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._hashes[block] is not None:
            self._evict(block)
        self._references[block] = 1
        return block

    def _evict(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._cached[block_hash]
        self._hashes[block] = None
        self.num_evictions += 1
        if self.changes is not None:
            self.changes[block_hash] = False

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that reference counts, free blocks and the prefix cache agree with the requests' block tables."""
        counted = [self.pinned[block] for block in range(self.n_blocks)]
        for blocks in block_tables:
            assert len(set(blocks)) == len(blocks), "a request has a block twice"
            for block in blocks:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from what requests hold"
        free = set(self._free)
        assert free == {block for block, count in enumerate(counted) if count == 0}, "free blocks are not those unused"
        hashed = {block: block_hash for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert hashed == {block: block_hash for block_hash, block in self._cached.items()}, "hashes and blocks disagree"
        assert self.caching or not hashed


class InFlightBlocks:
    """Prompt blocks that running requests are computing: a request that needs one should wait for it."""

    def __init__(self) -> None:
        self._by: dict[bytes, Request] = {}  # block hash -> the first request that computes it

    def begin(self, hashes: Sequence[bytes], request: Request) -> None:
        for block_hash in hashes:
            self._by.setdefault(block_hash, request)

    def end(self, hashes: Sequence[bytes], request: Request) -> None:
        """Remove blocks that are computed, or that the request will not compute."""
        for block_hash in hashes:
            if self._by.get(block_hash) is request:
                del self._by[block_hash]

    def is_worth_waiting(self, missing: bytes | None, request: Request) -> bool:
        """Return whether an equally urgent request computes the missing block."""
        by = None if missing is None else self._by.get(missing)
        return by is not None and by.priority <= request.priority

    def __bool__(self) -> bool:
        return bool(self._by)

    def check(self, running: Sequence[Request]) -> None:
        assert set(self._by.values()) <= set(running), "a request waits for a block that no request computes"
