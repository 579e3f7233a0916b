"""Routing: the longest cached prefix, then the least load, and never far from balance."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llm_worker_rbee.engine.block_pool import BlockPool, extend_hashes
from llm_worker_rbee.token_engine.routing import IMBALANCE_FACTOR, Candidate, PrefixIndex, choose

candidates = st.lists(
    st.builds(Candidate, st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 50)), min_size=1, max_size=6
)


def test_longest_match_then_least_load_then_the_emptier_cache() -> None:
    assert choose([Candidate(16, 0), Candidate(32, 20), Candidate(0, 0)]) == 1
    assert choose([Candidate(32, 40), Candidate(32, 20)]) == 1
    assert choose([Candidate(0, 7, 10), Candidate(0, 7, 9)]) == 1
    assert choose([Candidate(0, 0), Candidate(0, 0)]) == 0


def test_hot_prefix_leaves_an_engine_that_is_too_far_behind() -> None:
    bound = IMBALANCE_FACTOR * 100
    assert choose([Candidate(100, 10 + bound), Candidate(0, 10)]) == 0
    assert choose([Candidate(100, 11 + bound), Candidate(0, 10)]) == 1


@given(candidates)
def test_choice_is_the_longest_match_within_the_bound(found: list[Candidate]) -> None:
    chosen = found[choose(found)]
    least = min(one.load for one in found)
    assert chosen.load - least <= IMBALANCE_FACTOR * chosen.num_matched_tokens
    rivals = [one for one in found if one.load - least <= IMBALANCE_FACTOR * one.num_matched_tokens]
    assert chosen.num_matched_tokens == max(one.num_matched_tokens for one in rivals)
    equal = [one for one in rivals if one.num_matched_tokens == chosen.num_matched_tokens]
    assert chosen.load == min(one.load for one in equal)


@given(candidates, st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_the_order(found: list[Candidate], generator: random.Random) -> None:
    shuffled = generator.sample(found, len(found))
    assert shuffled[choose(shuffled)] == found[choose(found)]


@given(st.integers(2, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_requests_of_one_prefix_stay_together_while_loads_are_balanced(
    num_engines: int, num_prefixes: int, generator: random.Random
) -> None:
    """Requests arrive and end at random: no engine is chosen that is further behind than the bound allows, and a prefix
    is computed a second time only where that bound was reached."""
    prefix_tokens, own_tokens = 160, 16
    engines = [PrefixIndex() for _ in range(num_engines)]
    loads, open_requests = [0] * num_engines, []
    computed: Counter[int] = Counter()
    for _ in range(60):
        if open_requests and generator.random() < 0.4:
            engine, prefix, load = open_requests.pop(generator.randrange(len(open_requests)))
            engines[engine].update([bytes([prefix, i]) for i in range(prefix_tokens // 16)], [])
            loads[engine] -= load
            continue
        prefix = generator.randrange(num_prefixes)
        hashes = [bytes([prefix, i]) for i in range(prefix_tokens // 16)]
        found = [Candidate(16 * one.match(hashes), load) for one, load in zip(engines, loads, strict=True)]
        engine = choose(found)
        if not found[engine].num_matched_tokens:
            hits = [one for one in found if one.num_matched_tokens]
            assert all(one.load - min(loads) > IMBALANCE_FACTOR * prefix_tokens for one in hits)
            computed[prefix] += 1
        load = prefix_tokens - found[engine].num_matched_tokens + own_tokens
        engines[engine].add_pending(hashes)
        loads[engine] += load
        open_requests.append((engine, prefix, load))
    assert max(computed.values(), default=0) <= num_engines


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "expect", "finish"]), st.integers(0, 4)), max_size=40))
def test_index_is_what_is_stored_or_pending(operations: list[tuple[str, int]]) -> None:
    index, stored, pending = PrefixIndex(), set[bytes](), list[int]()
    chain = [bytes([i]) for i in range(5)]
    for operation, number in operations:
        if operation == "store":
            index.update([chain[number]], [])
            stored.add(chain[number])
        elif operation == "remove":
            index.update([], [chain[number]])
            stored.discard(chain[number])
        elif operation == "expect":
            index.add_pending(chain[:number])
            pending.append(number)
        elif pending:
            index.remove_pending(chain[: pending.pop()])
        known = stored | {block for number in pending for block in chain[:number]}
        expected = next((i for i, block in enumerate(chain) if block not in known), len(chain))
        assert (index.match(chain), len(index)) == (expected, len(stored))
    index.clear()
    assert index.match(chain) == max(pending, default=0)


def test_index_follows_the_changes_of_a_block_pool() -> None:
    """Blocks are stored, found again, evicted, and stored again within one message."""
    pool, index = BlockPool(4, 2), PrefixIndex()
    pool.changes = {}
    generator = random.Random(1)
    for _ in range(200):
        hashes: list[bytes] = []
        ids = [generator.randrange(2) for _ in range(8)]
        extend_hashes(hashes, ids, 4, 2)
        shared = pool.match(hashes)
        blocks = pool.acquire(shared, 4 - len(shared))
        assert blocks is not None
        for block, block_hash in zip(blocks, hashes, strict=True):
            pool.publish(block, block_hash)
        pool.release(blocks)
        if generator.random() < 0.3:
            index.update([one for one, is_cached in pool.changes.items() if is_cached],
                         [one for one, is_cached in pool.changes.items() if not is_cached])  # fmt: skip
            pool.changes = {}
            assert set(index.hashes()) == set(pool.cached_hashes)
