"""Sampling on the device against the reference sampler: the same token for every mix of settings and any logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference_sampling
from llm_worker_rbee.backends.cuda import device
from llm_worker_rbee.backends.cuda import sampling as fast
from llm_worker_rbee.backends.ops import SampleRow
from llm_worker_rbee.errors import InferenceError
from tests.backends.cpu.test_sampling import nasty, ordinary, penalties, settings

DEVICE = device.open_device(0)
Floats = NDArray[np.float32]
GREEDY = SampleRow(temperature=0.0)


def on_device(x: Floats) -> torch.Tensor:
    return torch.from_numpy(x.copy()).to(DEVICE)


@pytest.mark.parametrize("make", [ordinary, nasty])
@pytest.mark.parametrize("how", [settings, penalties])
def test_sample_matches_reference(make: Any, how: Any) -> None:
    rng = np.random.default_rng(3)
    for size in (1, 15, 200, 1025):
        rows = [how(rng, size) for _ in range(5)]
        x = np.stack([make(rng, size) for _ in rows])
        expected = [reference_sampling.sample_row(line, row) for line, row in zip(x, rows, strict=True)]
        assert fast.sample(on_device(x), rows).tolist() == expected, size


def test_sample_ordinary_logits_never_undecided() -> None:
    """On ordinary logits the kernels decide alone: a test of the fallback would prove nothing."""
    rng = np.random.default_rng(5)
    some: list[dict[str, Any]] = [
        {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.7}, {"top_k": 1}, {"top_p": 0.0},
        {"top_k": 2**32 + 1},
        {"top_k": 200, "typical_p": 0.95, "top_p": 0.95, "min_p": 0.01}, {"frequency_penalty": 0.5},
    ]  # fmt: skip
    rows = [SampleRow(**row, temperature=0.8, seed=i, position=2**33 + i) for i, row in enumerate(some)]
    rows[-1].output_ids = np.array([3, 3, 3, 7])
    x = np.stack([ordinary(rng, 5000) for _ in rows])
    expected = [reference_sampling.sample_row(line, row) for line, row in zip(x, rows, strict=True)]
    assert fast.sample_on_device(on_device(x), rows).tolist() == expected


def test_sample_in_slices_matches_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    rows = [SampleRow(temperature=float(i % 2), seed=i, logit_bias=((i, 9.0),)) for i in range(7)]
    x = np.stack([ordinary(rng, 300) for _ in rows])
    monkeypatch.setattr(fast, "SCRATCH_BYTES", 2 * 16 * 300)
    expected = [reference_sampling.sample_row(line, row) for line, row in zip(x, rows, strict=True)]
    assert fast.sample(on_device(x), rows).tolist() == expected


def test_argmax_lowest_id_among_equals() -> None:
    x = np.random.default_rng(7).integers(0, 4, (5, 3000)).astype(np.float32)
    x[3, 1:] = -np.inf
    wide = on_device(np.concatenate([x, x], axis=1))
    assert fast.sample(on_device(x), [GREEDY] * 5).tolist() == x.argmax(-1).tolist()
    assert fast.sample(wide[:, :3000], [GREEDY] * 5).tolist() == x.argmax(-1).tolist(), "rows that lie apart"
    assert fast.sample(wide.T.contiguous().T, [GREEDY] * 5).tolist() == x.argmax(-1).tolist()
    assert fast.sample(wide[:0], []).tolist() == []


@pytest.mark.parametrize("row", [GREEDY, SampleRow(top_p=0.9), SampleRow(logit_bias=((1, 2.0),))])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_sample_not_finite_row_raises(row: SampleRow, wrong: float) -> None:
    x = np.stack([ordinary(np.random.default_rng(9), 100) for _ in range(3)])
    x[1, 30] = wrong
    with pytest.raises(InferenceError, match="NaN or infinite"):
        fast.sample(on_device(x), [row] * 3)
    with pytest.raises(InferenceError, match="NaN or infinite"):
        fast.logprobs(on_device(x), np.zeros(3, np.int64), 2)


@pytest.mark.parametrize("k", [0, 1, 5, 40])
@pytest.mark.parametrize("size", [3, 64, 4099])
def test_logprobs_match_reference(k: int, size: int) -> None:
    rng = np.random.default_rng(11)
    x = np.stack([ordinary(rng, size), np.rint(ordinary(rng, size)), ordinary(rng, size)])
    x[2, 1:] = -np.inf
    chosen = rng.integers(0, size, 3)
    chosen[2] = 0
    found, expected = fast.logprobs(on_device(x), chosen, k), reference_sampling.logprobs(x, chosen, k)
    assert np.array_equal(found.top_ids, expected.top_ids)
    assert found.top.shape == expected.top.shape
    for ours, theirs in ((found.chosen, expected.chosen), (found.top, expected.top)):
        finite = np.isfinite(theirs)
        assert np.array_equal(finite, np.isfinite(ours))
        assert np.abs(ours[finite] - theirs[finite]).max(initial=0) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(device.is_interpreted(), reason="needs a GPU")
@pytest.mark.parametrize("size", [32_000, 128_256])
def test_sample_real_vocabularies(size: int) -> None:
    rng = np.random.default_rng(12)
    rows = [settings(rng, size) for _ in range(30)] + [penalties(rng, size) for _ in range(10)]
    x = np.stack([ordinary(rng, size) for _ in rows])
    expected = [reference_sampling.sample_row(line, row) for line, row in zip(x, rows, strict=True)]
    assert fast.sample(on_device(x), rows).tolist() == expected
    undecided = (fast.sample_on_device(on_device(x), rows) < 0).sum()
    assert undecided < 15  # temperature 1e6 and top-p close to 1 are close calls
