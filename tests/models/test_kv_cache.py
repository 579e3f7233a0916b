"""The paged cache: where a position lies, what it holds, what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_rbee.backends.ops import KV_TYPES
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.config import Family, ModelConfig
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError
from llm_worker_rbee.models.kv_cache import KVCache

ops = ReferenceBackend()

CONFIG = ModelConfig(
    Family("llama", (), ()),
    n_layers=3,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    head_dim=5,
    d_ff=8,
    vocab_size=9,
    context_length=64,
    norm_eps=1e-5,
    rope_dim=4,
    rope_base=1e4,
    attention_scale=1.0,
    windows=(0, 0, 0),
)


def test_kv_cache_shape_and_bytes() -> None:
    cache = KVCache(ops, CONFIG, n_blocks=7, block_size=4)
    assert len(cache.layers) == 3
    assert all(part.shape == (7, 4, 2, 5) for layer in cache.layers for part in layer)
    assert CONFIG.kv_bytes(7 * 4) == sum(part.nbytes for layer in cache.layers for part in layer)


def test_layers_of_different_shapes_and_layers_that_share_keys_and_values() -> None:
    config = replace(
        CONFIG,
        n_layers=5,
        windows=(4, 0, 4, 4, 0),
        window_head_dim=4,
        layer_kv_heads=(2, 1, 2, 2, 1),
        shared_kv_layers=2,
    )
    assert [config.kv_source(i) for i in range(5)] == [0, 1, 2, 2, 1]
    cache = KVCache(ops, config, n_blocks=3, block_size=4)
    assert [layer.k.shape[2:] for layer in cache.layers] == [(2, 4), (1, 5), (2, 4), (2, 4), (1, 5)]
    assert cache.layers[3] is cache.layers[2]
    assert cache.layers[4] is cache.layers[1]
    assert cache.nbytes == config.kv_bytes(3 * 4) == 2 * 3 * 4 * 4 * (2 * 4 + 1 * 5 + 2 * 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_kv_heads": (2, 2)}, "layer_kv_heads must be 3 numbers"),
        ({"layer_kv_heads": (2, 3, 2)}, "4 heads cannot share 3 KV heads evenly"),
        (
            {"windows": (0, 0, 4), "shared_kv_layers": 1},
            "layer 2 shares keys and values, and no earlier layer is like it",
        ),
        ({"windows": (4, 4, 4), "window_head_dim": 2}, "rope over 4 of 2 values a head with a window"),
    ],
)
def test_shapes_of_layers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_kv_bytes_of_each_type_are_exact(kv_type: str) -> None:
    cache = KVCache(ops, CONFIG, n_blocks=3, block_size=16, kv_type=kv_type)
    assert cache.nbytes == CONFIG.kv_bytes(3 * 16, kv_type)
    assert cache.nbytes == 3 * 3 * 16 * 2 * 2 * {"float32": 20, "float16": 10, "int8": 5 + 4}[kv_type]
    assert {part.dtype.name for layer in cache.layers for part in (layer.k, layer.v)} == {kv_type}


def test_unknown_kv_type_raises_with_name() -> None:
    with pytest.raises(InvalidRequestError, match="unknown KV type 'int4': use one of float32, float16, int8"):
        KVCache(ops, CONFIG, 2, kv_type="int4")


def test_kv_layers_share_no_memory() -> None:
    cache = KVCache(ops, CONFIG, 2)
    parts = [part for layer in cache.layers for part in layer]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(parts) for b in parts[:i])


def test_slots_follow_the_block_table() -> None:
    cache = KVCache(ops, CONFIG, 10, block_size=4)
    assert cache.slots(np.array([7, 0, 3]), np.array([0, 3, 4, 9])).tolist() == [28, 31, 0, 13]


def test_position_past_block_table_raises() -> None:
    with pytest.raises(IndexError):
        KVCache(ops, CONFIG, 10, block_size=4).slots(np.array([7]), np.array([4]))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_slots_of_requests_are_disjoint(block_size: int, lengths: list[int]) -> None:
    """Tables that share no block give slots that are all different and all inside the cache."""
    need = [-(-n // block_size) for n in lengths]
    blocks = np.random.default_rng(sum(lengths)).permutation(sum(need))
    cache = KVCache(ops, CONFIG, sum(need), block_size)
    tables = np.split(blocks, np.cumsum(need)[:-1])
    slots = np.concatenate([cache.slots(t, np.arange(n)) for t, n in zip(tables, lengths, strict=True)])
    assert len(np.unique(slots)) == sum(lengths)
    assert slots.min() >= 0
    assert slots.max() < cache.n_blocks * block_size
