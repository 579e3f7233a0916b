"""Every step within the limits has sizes that were warmed up, and room for what it is made of."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda.kernels.attention_prefill import tile_programs
from llm_worker_rbee.backends.cuda.step_inputs import (
    StepSizes,
    all_logits_sizes,
    all_sizes,
    decode_sizes,
    prefill_sizes,
    uncaptured_sizes,
)
from llm_worker_rbee.backends.ops import StepLimits

LIMITS = [
    StepLimits(1, 512, 1, 4096),
    StepLimits(64, 512, 512, 4096),
    StepLimits(100, 700, 512, 4096),
    StepLimits(256, 2048, 1024, 4096),
    StepLimits(1024, 8192, 1024, 131_072),
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_every_step_within_limits_is_warmed_up(limits: StepLimits, is_tiled: bool) -> None:
    """A captured step has its graph; an uncaptured one the tile, split and product choices of the largest."""
    ahead = set(all_sizes(limits, is_tiled=is_tiled))
    graphs = {sizes.graph for sizes in ahead if sizes.is_captured}
    rng = random.Random(3)
    for _ in range(3000):
        decoding = rng.randint(0, min(limits.max_batch, limits.max_tokens - 2))
        tokens = rng.randint(decoding + 1, limits.max_tokens)
        sizes = prefill_sizes(tokens, decoding, rng.randint(0, limits.max_logits), is_tiled=is_tiled)
        assert tokens <= sizes.tokens <= max(32, 1.5 * tokens)
        assert sizes.decoding == 0 if is_tiled else decoding <= sizes.decoding <= sizes.tokens
        assert sizes.num_logits in (0, *all_logits_sizes(limits))
        assert sizes.graph in graphs if sizes.is_captured else sizes.tokens > 1024
        requests = rng.randint(1, limits.max_batch)
        sizes = decode_sizes(requests, is_tiled=is_tiled)
        assert requests <= sizes.tokens <= max(8, 2 * requests)
        assert sizes.graph in graphs


@pytest.mark.parametrize("limits", LIMITS)
def test_every_uncaptured_size_is_launched(limits: StepLimits) -> None:
    """cuBLAS chooses kernels by size."""
    found = {sizes.tokens for sizes in (*all_sizes(limits, is_tiled=False), *uncaptured_sizes(limits, is_tiled=False))}
    assert found >= {prefill_sizes(tokens, 0, 0, is_tiled=False).tokens for tokens in range(1, limits.max_tokens + 1)}
    assert not any(sizes.is_captured for sizes in uncaptured_sizes(limits, is_tiled=False))


def test_largest_steps_are_captured_first() -> None:
    sizes = list(all_sizes(StepLimits(256, 8192, 256, 4096), is_tiled=False))
    prefill = [one.tokens for one in sizes if one.num_logits is not None]
    assert prefill == sorted(prefill, reverse=True)
    assert prefill[0] == 8192
    assert len(sizes) == len({one.graph for one in sizes}) < 80


def test_large_decode_steps_leave_the_head_out_of_the_graph() -> None:
    assert decode_sizes(256, is_tiled=False) == StepSizes(256, 256, False, None)
    assert decode_sizes(256, is_tiled=False).has_head
    assert not decode_sizes(257, is_tiled=False).has_head
    assert not decode_sizes(1025, is_tiled=False).is_captured


def test_tile_programs_cover_full_tiles_at_once() -> None:
    assert tile_programs(16, 64) == 16
    assert tile_programs(512, 64) == 8 + 32
    assert tile_programs(8192, 16) == 512 + 32
