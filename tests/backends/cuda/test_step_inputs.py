"""The arrays of a step: what a graph reads has the same place in every step of its sizes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda.step_inputs import (  # noqa: E402
    ALIGNMENT,
    InputStaging,
    StepSizes,
    decode_sizes,
    prefill_sizes,
    step_arrays,
    total_size,
)
from llm_worker_rbee.backends.ops import Batch  # noqa: E402

HEAD_INPUT = "logits_index"  # read outside of graphs


def make_batch(counts: list[int], blocks: int, num_logits: int) -> Batch:
    """Requests with so many tokens each, from position 5 on, in tables of `blocks` blocks of 16."""
    counted = np.array(counts)
    starts = np.concatenate(([0], np.cumsum(counted)))
    total = int(starts[-1])
    positions = np.concatenate([5 + np.arange(count) for count in counts])
    return Batch(
        ids=np.arange(total), positions=positions, slot_mapping=100 + np.arange(total), query_start=starts,
        context_len=5 + counted, block_table=np.arange(len(counts) * blocks).reshape(len(counts), blocks),
        logits_index=np.arange(total)[-num_logits:] if num_logits else np.empty(0, np.int64),
    )  # fmt: skip


def stage(staging: InputStaging, batch: Batch, sizes: StepSizes) -> dict[str, torch.Tensor]:
    arrays = step_arrays(batch, sizes)
    staging.reserve_static(total_size(arrays))
    return staging.copy_to_device(batch, arrays, is_static=True)


def places(views: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: view.storage_offset() for name, view in views.items() if name != HEAD_INPUT}


def test_graph_inputs_have_one_place_for_any_logits_and_tables() -> None:
    staging = InputStaging(torch.device("cpu"))
    staging.reserve_static(1 << 14)
    steps = [([1, 1, 20], 3, 0), ([1, 1, 20], 3, 3), ([1, 19, 1, 3], 7, 4), ([1] * 9 + [8], 2, 17)]
    found = []
    for counts, blocks, num_logits in steps:
        decoding = next(i for i, count in enumerate(counts) if count > 1)
        sizes = prefill_sizes(30, decoding, num_logits, is_tiled=False)
        views = stage(staging, make_batch(counts, blocks, num_logits), sizes)
        found.append((sizes.graph, places(views)))
        assert len(views[HEAD_INPUT]) == sizes.num_logits
    assert len({graph for graph, _ in found}) == 1
    assert all(place == found[0][1] for _, place in found)
    assert all(offset % ALIGNMENT == 0 for offset in found[0][1].values())


def test_decode_inputs_are_padded_with_positions_that_write_nothing() -> None:
    staging = InputStaging(torch.device("cpu"))
    sizes = decode_sizes(3, is_tiled=False)
    views = stage(staging, make_batch([1, 1, 1], 2, 3), sizes)
    assert views["decode_positions"].tolist() == [5, 5, 5, -1]
    assert views["tables"].tolist() == list(range(6))
    assert views["width"].tolist() == [2]


def test_prefill_inputs_leave_decoding_slots_to_their_own_kernel() -> None:
    staging = InputStaging(torch.device("cpu"))
    sizes = prefill_sizes(70, 1, 1, is_tiled=False)
    views = stage(staging, make_batch([1, 66], 5, 1), sizes)
    assert views["slots"].tolist()[:3] == [-1, 101, 102]
    assert set(views["slots"].tolist()[67:]) == {-1}
    assert views["num_tiles"].tolist() == [2]
    assert (views["tile_request"].tolist()[:2], views["tile_first"].tolist()[:2]) == ([1, 1], [0, 64])
