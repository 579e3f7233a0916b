"""What fits: bytes that are really taken, figures that hold, refusals with both figures."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.ops import KV_TYPES
from llm_worker_rbee.config import DEVICE_SPARE_BYTES, Family, ModelConfig, SchedulerLimits, parse_size
from llm_worker_rbee.engine.memory_plan import (
    DEVICE_MEMORY_FRACTION,
    HOST_MEMORY_FRACTION,
    MIN_CONTEXT,
    MemoryPlan,
    block_bytes,
    free_memory,
    plan_kv_cache,
)
from llm_worker_rbee.errors import InsufficientMemoryError, InvalidRequestError
from llm_worker_rbee.models.kv_cache import KVCache
from tests.helpers.server import SAID, write_model

SMALL = ModelConfig(
    Family("llama", (), ()),
    n_layers=3,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    head_dim=5,  # no backend likes it
    d_ff=8,
    vocab_size=9,
    context_length=1000,
    norm_eps=1e-5,
    rope_dim=4,
    rope_base=1e4,
    attention_scale=1.0,
    windows=(0, 0, 0),
)
SMOL = replace(SMALL, n_layers=30, n_kv_heads=3, n_heads=9, head_dim=64, rope_dim=64, context_length=8192)
BLOCK = block_bytes(SMALL, "float32")


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("head_dim", [5, 16, 80])
def test_planned_bytes_equal_allocated_bytes(kv_type: str, head_dim: int) -> None:
    config = replace(SMALL, head_dim=head_dim)
    capacity = plan_kv_cache(config, kv_type, max_batch=2, available=None)
    taken = KVCache(select_backend("cpu", "cpu"), config, capacity.n_blocks, capacity.block_size, kv_type).nbytes
    assert taken == capacity.bytes
    assert (
        KVCache(select_backend("cpu", "reference"), config, capacity.n_blocks, kv_type=kv_type).nbytes <= capacity.bytes
    )


@settings(deadline=None)
@given(
    available=st.integers(0, 400 * BLOCK),
    kv_memory=st.none() | st.integers(1, 500 * BLOCK),
    max_context=st.none() | st.integers(1, 1000),
    max_batch=st.integers(1, 100),
    drafting=st.booleans(),
)
def test_plan_kv_cache_invariants_hold(
    available: int, kv_memory: int | None, max_context: int | None, max_batch: int, drafting: bool
) -> None:
    draft = replace(SMALL, n_layers=1) if drafting else None
    options: dict[str, Any] = {"kv_memory": kv_memory, "max_context": max_context, "draft_config": draft}
    try:
        made = plan_kv_cache(SMALL, max_batch=max_batch, available=available, **options)
    except InsufficientMemoryError:
        block = BLOCK + (0 if draft is None else block_bytes(draft, "float32"))
        least = max_context or MIN_CONTEXT
        allowed = int(available * HOST_MEMORY_FRACTION) if kv_memory is None else kv_memory
        assert allowed // block * 16 < least or (kv_memory or 0) > available
        return
    assert made.bytes <= (available * HOST_MEMORY_FRACTION if kv_memory is None else min(kv_memory, available))
    assert made.max_context == max_context or made.max_context == min(1000, made.tokens)
    assert made.is_context_reduced == (max_context is None and made.max_context < 1000)
    whole = -(-made.max_context // made.block_size)
    assert made.contexts * whole <= made.n_blocks < (made.contexts + 1) * whole
    if kv_memory is None:
        assert made.contexts <= max_batch, "more than all requests could ever use"
    assert 1 <= made.requests <= max_batch
    assert made.requests * -(-made.tokens_each // made.block_size) <= made.n_blocks
    for figure in (made.tokens, made.contexts, made.max_context):
        assert f"{figure:,}" in str(made)


def test_budget_str_names_contexts_and_requests() -> None:
    whole = 8192 // 16 * block_bytes(SMOL, "float32")
    assert str(plan_kv_cache(SMOL, kv_memory=12 * whole + 5, max_batch=64, available=None)) == (
        "KV cache 4.53 GB (float32): 98,304 tokens = 12 contexts of 8,192, or 64 requests of 1,536 each"
    )
    assert str(plan_kv_cache(SMOL, "int8", max_context=2048, max_batch=2, available=10**10)) == (
        "KV cache 50.1 MB (int8): 4,096 tokens = 2 contexts of 2,048, a whole one for each request"
    )
    assert str(plan_kv_cache(SMOL, kv_memory=10**8, max_batch=64, available=10**10)) == (
        "KV cache 99.5 MB (float32): 2,160 tokens = 1 context of 2,160 (not 8,192), or 64 requests of 32 each"
    )


def test_plan_kv_cache_unknown_memory_gives_one_context() -> None:
    made = plan_kv_cache(SMOL, max_batch=64, available=None)
    assert (made.contexts, made.is_context_reduced) == (1, False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv_memory": 2 * 10**9, "available": 10**9}, ("2.00 GB", "1.00 GB")),
        ({"kv_memory": 10**6}, ("128 tokens take 5.9 MB", "kv_memory is 1.0 MB")),
        ({"available": 10**7}, ("128 tokens take 5.9 MB", "10.0 MB of memory are free", "40%")),
        ({"available": 10**8, "max_context": 2000}, ("2,000 tokens take 92.2 MB", "100.0 MB", "40%", "max_context or")),
        ({"kv_memory": 10**8, "max_context": 3000}, ("3,000 tokens take 138.6 MB", "kv_memory is 100.0 MB")),
        ({"available": 0}, ("128 tokens take 5.9 MB", "0.0 kB of memory are free")),
    ],
)
def test_plan_kv_cache_too_large_raises_with_both_sizes(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        plan_kv_cache(SMOL, max_batch=64, **{"available": 10**10, **options})
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_context", 0), ("max_context", 8193), ("max_context", True), ("max_batch", 0), ("max_batch", 10**9),
     ("kv_memory", 0), ("kv_memory", -1), ("kv_memory", 1.5), ("kv_memory", True)],
)  # fmt: skip
def test_plan_kv_cache_invalid_values_raise(field: str, value: Any) -> None:
    options: dict[str, Any] = {"max_batch": 4, "available": 10**10, field: value}
    with pytest.raises(InvalidRequestError) as caught:
        plan_kv_cache(SMOL, **options)
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


def test_parse_size_units() -> None:
    sizes = {
        "512M": 512 * 10**6, "512m": 512 * 10**6, "2G": 2 * 10**9, "2GB": 2 * 10**9, "2GiB": 2 << 30, "2gi": 2 << 30,
        "1.5 GB": 1_500_000_000, "0.5KiB": 512, " 1T ": 10**12, "4096": 4096, "4096B": 4096,
    }  # fmt: skip
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "1e9", "2GG", "2 G B", "inf", "nan", "1_000", "٣G", "1i", "1iB", "0", "0.1", "9" * 30]
)
def test_parse_size_invalid_text_raises(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="kv_memory"):
        parse_size(text)


def test_available_memory_respects_cgroup_limit() -> None:
    free = free_memory()
    assert free is None or free > 0
    plan = MemoryPlan("host", free, HOST_MEMORY_FRACTION, SchedulerLimits())
    plan.add("weights", 1 << 60, "more than there is")
    assert plan.available in (0, None)


LIMITED = """
import resource, sys
limit = 2 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from llm_worker_rbee import LLM, SamplingParams, machine
from llm_worker_rbee.engine.memory_plan import free_memory
used = limit - machine.address_space_left()
assert used > 10 << 20, used  # what is mapped counts
assert free_memory() <= limit - used
llm = LLM(sys.argv[1], backend="reference", max_batch=1024)
assert llm.info.kv_cache_bytes < limit
print(llm.generate(">", SamplingParams(max_tokens=8, temperature=0)).text)
"""


def test_kv_cache_follows_the_limit_of_address_space(tmp_path: Path) -> None:
    """As set by `ulimit -v`: the cache is smaller, and the model answers."""
    model = write_model(tmp_path / "tiny.gguf")
    line = [sys.executable, "-c", LIMITED, str(model)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert (done.stdout, done.returncode) == (f"{SAID}\n", 0), done.stderr


def test_available_memory_of_device_backend_is_device_memory() -> None:
    class Device:
        """What planning reads of a backend on a GPU."""

        free_memory = staticmethod(lambda: 10 * 10**9)

    device: Any = Device()
    plan = MemoryPlan("device", free_memory(device), DEVICE_MEMORY_FRACTION, SchedulerLimits())
    plan.add("weights", 6 * 10**9, "packed")
    plan.add("runtime", DEVICE_SPARE_BYTES, "kernels")
    left = plan.available
    assert left == 4 * 10**9 - DEVICE_SPARE_BYTES
    plan.add("step", 3 * 10**9, "arrays")
    assert plan.available == 0
    made = plan_kv_cache(
        replace(SMOL, context_length=1 << 20),
        "bfloat16",
        max_batch=64,
        available=left,
        memory_fraction=DEVICE_MEMORY_FRACTION,
    )
    assert 0.9 * left < made.bytes <= DEVICE_MEMORY_FRACTION * left
    with pytest.raises(InsufficientMemoryError, match="the KV cache takes 95%"):
        plan_kv_cache(SMOL, "float8", max_batch=64, available=0, memory_fraction=DEVICE_MEMORY_FRACTION)


LFM2 = replace(SMALL, layer_kinds=("short_conv", "attention", "short_conv"), conv_kernel=3)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_planned_bytes_of_states_equal_allocated_bytes(kv_type: str) -> None:
    made = plan_kv_cache(LFM2, kv_type, max_batch=2, available=None)
    sizes = made.n_blocks, made.block_size, kv_type, made.n_slots
    assert KVCache(select_backend("cpu", "cpu"), LFM2, *sizes).nbytes == made.bytes
    assert made.slot_bytes == LFM2.state_bytes == 2 * 2 * 16 * 4
    assert block_bytes(LFM2, kv_type) * 3 == block_bytes(SMALL, kv_type)
    assert f"{made.n_slots:,} states of 0.3 kB each" in str(made)


@settings(deadline=None)
@given(kv_memory=st.integers(1, 500 * BLOCK), max_batch=st.integers(1, 100), drafts=st.integers(0, 8))
def test_states_take_part_of_the_memory(kv_memory: int, max_batch: int, drafts: int) -> None:
    """Those of running requests at most half; where they are few, fewer requests run."""
    wide = replace(LFM2, d_model=4096)
    least = 3 * wide.state_bytes + MIN_CONTEXT // 16 * block_bytes(wide, "float32")
    options: dict[str, Any] = {"kv_memory": kv_memory, "max_batch": max_batch, "draft_tokens": drafts}
    if kv_memory < least:
        with pytest.raises(InsufficientMemoryError, match="beside states of"):
            plan_kv_cache(wide, available=None, **options)
        return
    made = plan_kv_cache(wide, available=None, **options)
    assert made.bytes == made.n_slots * made.slot_bytes + made.n_blocks * block_bytes(wide, "float32") <= kv_memory
    assert made.requests <= made.n_slots // 3
    assert made.n_slots * made.slot_bytes <= max(0.625 * kv_memory, 3 * made.slot_bytes)
