"""Blocks of requests: sharing, the order of eviction, reference counts."""

from __future__ import annotations

import pytest

from llm_worker_rbee.engine.block_pool import BlockPool, chained_hash, extend_hashes
from tests.helpers.engine_runs import clear_prefix_cache


def names(*blocks: str) -> list[bytes]:
    """A chain of hashes; each letter is a block's contents."""
    found: list[bytes] = []
    for text in blocks:
        found.append(chained_hash(found[-1] if found else b"", [ord(text)]))
    return found


def filled(pool: BlockPool, *blocks: str) -> list[int]:
    """Taken, computed and published."""
    owned = pool.acquire([], len(blocks))
    assert owned is not None
    for block, name in zip(owned, names(*blocks), strict=True):
        pool.publish(block, name)
    return owned


def test_chained_hash_depends_on_whole_prefix() -> None:
    assert names("a", "b")[1] != names("x", "b")[1]
    assert chained_hash(b"", [1, 2]) != chained_hash(b"", [2, 1])
    assert chained_hash(b"", [1, 0]) != chained_hash(b"", [1]) != chained_hash(b"", [0, 1])
    hashes: list[bytes] = []
    extend_hashes(hashes, range(10), 2, 4)
    assert hashes == [h := chained_hash(b"", [0, 1, 2, 3]), chained_hash(h, [4, 5, 6, 7])]
    known = list(hashes)
    extend_hashes(hashes, [9] * 12, 3, 4)
    assert hashes[:2] == known, "what is known is not computed again"


def test_extra_keys_part_prefixes_from_their_token_on() -> None:
    def chain(*extra_keys: tuple[int, bytes]) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, range(12), 3, 4, extra_keys)
        return hashes

    plain, salted, other = chain(), chain((0, b"salt")), chain((0, b"pepper"))
    assert len({*plain, *salted, *other}) == 9, "a salt counts from the first block on"
    image = chain((5, b"image"))
    assert image[0] == plain[0]
    assert {*image[1:]}.isdisjoint(plain)
    assert chain((0, b"ab"), (0, b"c")) != chain((0, b"a"), (0, b"bc"))


def test_match_returns_longest_cached_prefix() -> None:
    pool = BlockPool(8, 1)
    first = filled(pool, "a", "b", "c")
    assert pool.match(names("a", "b", "x", "c")) == first[:2]
    assert pool.match(names("b")) == []
    second = pool.acquire(first[:2], 2)
    assert second is not None
    assert second[:2] == first[:2]
    assert not set(second[2:]) & set(first)
    pool.check([first, second])
    pool.release(first)
    pool.check([second])
    assert pool.num_free == 8 - 4
    assert pool.match(names("a", "b", "c")) == first, "a free block keeps its contents"


def test_eviction_takes_least_recent_and_last_block_first() -> None:
    pool = BlockPool(6, 1)
    old, new = filled(pool, "a", "b"), filled(pool, "x", "y")
    pool.release(old)
    pool.release(new)
    assert pool.acquire([], 2) is not None  # those that hold nothing
    assert pool.num_evictions == 0
    left = [names("a", "b"), names("x", "y")]
    gone = []
    for _ in range(4):
        assert pool.allocate_one() is not None
        now = [len(pool.match(chain)) for chain in left]
        gone.append(now)
    assert gone == [[1, 2], [0, 2], [0, 1], [0, 0]]
    assert pool.allocate_one() is None
    assert pool.num_evictions == 4


def test_acquire_makes_block_recent() -> None:
    pool = BlockPool(4, 1)
    old, new = filled(pool, "a", "b"), filled(pool, "x", "y")
    pool.release(old)
    pool.release(new)
    again = pool.acquire(pool.match(names("a", "b")), 0)
    assert again == old
    pool.release(again)
    pool.acquire([], 2)
    assert len(pool.match(names("a", "b"))) == 2
    assert pool.match(names("x", "y")) == []


def test_uncached_blocks_are_allocated_first() -> None:
    pool = BlockPool(3, 1)
    kept, lost = filled(pool, "a"), pool.acquire([], 2)
    assert lost is not None
    pool.release(kept)
    pool.release(lost)
    assert sorted(pool.acquire([], 2) or []) == sorted(lost)
    assert pool.match(names("a")) == kept


def test_can_acquire_does_not_count_free_shared_blocks() -> None:
    """Two free blocks, both of them wanted as shared: nothing is left for a fresh one, and nothing changes."""
    pool = BlockPool(2, 1)
    owned = filled(pool, "a", "b")
    pool.release(owned)
    assert not pool.can_acquire(owned, 1)
    assert pool.acquire(owned, 1) is None
    pool.check([])
    assert pool.acquire(owned[:1], 1) is not None
    assert pool.match(names("a", "b")) == owned[:1]


def test_publish_same_contents_twice_keeps_one_block() -> None:
    pool = BlockPool(4, 1)
    first, second = filled(pool, "a"), filled(pool, "a")
    assert pool.match(names("a")) == first
    pool.release(second)
    pool.release(first)
    pool.check([])
    assert pool.num_free == 4
    assert clear_prefix_cache(pool) == 1
    assert pool.match(names("a")) == []
    assert pool.num_free == 4


def test_clear_cache_keeps_blocks_in_use() -> None:
    pool = BlockPool(4, 1)
    used, unused = filled(pool, "a"), filled(pool, "b")
    pool.release(unused)
    assert clear_prefix_cache(pool) == 1
    assert pool.match(names("a")) == used
    pool.check([used])


def test_match_without_prefix_cache_finds_nothing() -> None:
    pool = BlockPool(2, 1, caching=False)
    pool.release(filled(pool, "a"))
    assert pool.match(names("a")) == []
    pool.check([])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


def test_check_detects_inconsistent_state() -> None:
    """The state machine relies on it."""
    pool = BlockPool(4, 1)
    owned = filled(pool, "a", "b")
    for wrong in ([], [owned, owned], [owned[:1]], [[*owned, owned[0]]]):
        with pytest.raises(AssertionError):
            pool.check(wrong)
    pool._references[owned[0]] = 0
    with pytest.raises(AssertionError):
        pool.check([owned[1:]])  # neither free nor owned
