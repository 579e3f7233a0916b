"""What is planned before a model is loaded: rows of memory and limits of a step, for the CPU and for made-up GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.config import (
    DEVICE_SPARE_BYTES,
    IMAGE_ROWS_BYTES,
    KV_CUDA,
    KV_ON_CUDA,
    MAX_BATCH,
    LoadOptions,
    SchedulerLimits,
)
from llm_worker_rbee.engine.memory_plan import (
    DEVICE_MEMORY_FRACTION,
    MemoryPlan,
    Placement,
    Workspace,
    device_weight_bytes,
    place_model,
    plan_member,
    plan_memory,
)
from llm_worker_rbee.errors import InsufficientMemoryError, InvalidRequestError
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.weights import Checkpoint, open_checkpoint


class Device:
    """What planning reads of a backend on a GPU."""

    has_device_memory, kv_types, default_kv_type, device = True, KV_ON_CUDA, KV_CUDA, "cuda:0"

    def __init__(self, free: int) -> None:
        self._free = free

    def free_memory(self) -> int:
        return self._free


@pytest.fixture(scope="module")
def checkpoint(default_model: Path) -> Checkpoint:
    return open_checkpoint(default_model, weights=False)


def options(**settings: Any) -> LoadOptions:
    return LoadOptions(device="cuda", **settings)


def place(checkpoint: Checkpoint, free: int, **settings: Any) -> Placement:
    device: Any = Device(free)
    return place_model(device, [checkpoint], options(**settings))


def test_limits_on_cpu_are_those_of_engine_config(checkpoint: Checkpoint) -> None:
    plan = plan_memory(None, [checkpoint], "float16", options(max_batch=None))
    assert plan.limits == (64, 512)
    assert plan_memory(None, [checkpoint], "float16", options(max_batch=7, max_step_tokens=9)).limits == (7, 9)


def test_rows_of_images_are_in_the_memory_of_the_host(checkpoint: Checkpoint) -> None:
    device: Any = Device(40 * 10**9)
    for backend, expected in ((None, 1000 + IMAGE_ROWS_BYTES), (device, 1000)):
        plan = plan_memory(backend, [checkpoint], "float16", options(tower_memory=1000))
        assert [row.bytes for row in plan.rows if row.owner == "vision tower"] == [expected]
        plan = plan_memory(backend, [checkpoint], "float16", options())
        assert all(row.owner != "vision tower" for row in plan.rows)


def test_limits_on_gpu_fill_its_memory(checkpoint: Checkpoint) -> None:
    free = 40 * 10**9
    placed = place(checkpoint, free)
    assert placed.limits == (MAX_BATCH, 8192)
    note = "up to 1,024 requests in a batch and 8,192 tokens in a step fit on cuda:0; max_batch and max_step_tokens set"
    assert [text.startswith(note) for text in placed.notes] == [True]
    workspace = Workspace(read_model_config(checkpoint)).bytes(placed.limits)
    reserved = device_weight_bytes([checkpoint], LoadOptions()) + workspace + DEVICE_SPARE_BYTES
    assert placed.capacity.max_batch == MAX_BATCH
    assert placed.capacity.bytes <= DEVICE_MEMORY_FRACTION * (free - reserved)
    assert placed.capacity.tokens_each > 512


def test_member_of_a_pool_on_a_gpu_is_planned_as_a_model_alone(checkpoint: Checkpoint) -> None:
    """With all of the memory; a smaller share gives smaller steps and a smaller cache, so that others fit beside it."""
    free = 40 * 10**9
    placed = place(checkpoint, free)
    alone = plan_member(checkpoint, options(), free, DEVICE_MEMORY_FRACTION, on_device=True)
    assert (alone.rows, alone.limits) == (placed.rows, placed.limits)
    share = plan_member(checkpoint, options(), free, 0.25, on_device=True)
    assert {row.memory for row in share.rows} == {"device"}
    assert 3 * sum(row.bytes for row in share.rows) < free
    assert share.limits.max_batch <= alone.limits.max_batch
    again = place(checkpoint, free - 2 * sum(row.bytes for row in share.rows), **_as_planned(share))
    assert (again.limits, again.capacity.bytes) == (share.limits, share.rows[-1].bytes)
    with pytest.raises(InsufficientMemoryError, match=r"weights .*runtime .*may take 500"):
        plan_member(checkpoint, options(), 500 * 10**6, 0.25, on_device=True)


def _as_planned(plan: MemoryPlan) -> dict[str, Any]:
    """Return the options with which a member is loaded beside others."""
    return {"kv_memory": plan.rows[-1].bytes, **plan.limits._asdict()}


def test_given_limits_override_chosen_ones(checkpoint: Checkpoint) -> None:
    placed = place(checkpoint, 24 * 10**9, max_batch=100, max_step_tokens=16_384)
    assert (placed.limits, placed.notes) == ((100, 16_384), [])
    assert place(checkpoint, 24 * 10**9, max_batch=100).limits == (100, 8192)
    assert place(checkpoint, 24 * 10**9, max_step_tokens=256).limits.max_step_tokens == 256


def test_arrays_of_largest_step_are_reserved(checkpoint: Checkpoint) -> None:
    """A GPU on which weights and a KV cache fit, but not such a step, is refused before anything is loaded."""
    limits = SchedulerLimits(MAX_BATCH, 65_536)
    free = device_weight_bytes([checkpoint], LoadOptions()) + DEVICE_SPARE_BYTES + 10**9
    assert Workspace(read_model_config(checkpoint)).bytes(limits) > 10**9
    with pytest.raises(InsufficientMemoryError):
        place(checkpoint, free, **limits._asdict())
    assert place(checkpoint, free, max_batch=64, max_step_tokens=512).capacity.tokens > 8192


def test_engines_that_share_a_gpu_have_a_part_each(checkpoint: Checkpoint) -> None:
    device: Any = Device(24 * 10**9)
    alone = place_model(device, [checkpoint], options(max_batch=64, max_step_tokens=512))
    shared = place_model(device, [checkpoint], replace(options(max_batch=64, max_step_tokens=512), num_sharing=8))
    workspace = Workspace(read_model_config(checkpoint)).bytes(SchedulerLimits())
    each = shared.capacity.bytes + device_weight_bytes([checkpoint], LoadOptions()) + workspace + DEVICE_SPARE_BYTES
    assert shared.capacity.bytes < alone.capacity.bytes
    assert 8 * each <= 24 * 10**9


@pytest.mark.parametrize(("name", "value"), [("max_batch", 0), ("max_batch", MAX_BATCH + 1), ("max_step_tokens", 0)])
def test_limits_out_of_range_raise(name: str, value: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is {value}: it must be a whole number, 1 or more"):
        options(**{name: value})
    assert getattr(options(**{name: None}), name) is None


def test_rows_account_for_all_memory_that_is_planned(checkpoint: Checkpoint) -> None:
    free = 24 * 10**9
    device: Any = Device(free)
    shared = replace(options(kv_memory=10**9), num_sharing=2, reserved_memory=3 * 10**9)
    rows = {row.owner: row for row in place_model(device, [checkpoint], shared).rows}
    assert list(rows) == ["weights", "runtime", "other models", "step", "KV cache"]
    assert {row.memory for row in rows.values()} == {"device"}
    assert rows["weights"].bytes == 2 * device_weight_bytes([checkpoint], LoadOptions())
    assert rows["runtime"].bytes == 2 * DEVICE_SPARE_BYTES
    assert rows["other models"].bytes == 3 * 10**9
    assert rows["KV cache"].bytes <= 10**9
    assert sum(row.bytes for row in rows.values()) < free
    assert all(row.reason for row in rows.values())
