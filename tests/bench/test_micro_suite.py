"""The Rust worker's suite: names, shapes and work, the same results on every backend, notes and what it printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_worker_bench import micro
from llm_worker_bench.micro import Case, suite
from llm_worker_bench.results import Recorder
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.reference import ReferenceBackend

from .test_micro import QUICK

NAMES = {
    "rope_forward": (1, 8, 32, 128),
    "qkv_projection": (1, 8, 32, 128),
    "attention_scores": (1, 8, 32, 128),
    "causal_mask": (8, 32, 128, 512),
    "full_attention": (1, 8, 32),
    "causal_mask_cached": (8, 32, 128, 512),
}
SUITE = {case.name: case for case in micro.suite_cases()}


def test_suite_has_the_names_of_old_and_runs_first() -> None:
    wanted = [f"{family}/{size}" for family, sizes in NAMES.items() for size in sizes]
    assert list(SUITE) == wanted
    assert [case.name for case in micro.select(None)][: len(wanted)] == wanted


def test_suite_has_the_shapes_of_old() -> None:
    """float32, hidden 4096, 32 heads of 128; q and k are rotated; scores of shape (1, 32, S, S)."""
    families = ("rope_forward", "attention_scores", "causal_mask", "full_attention", "causal_mask_cached")
    made: dict[str, Any] = {name: SUITE[f"{name}/8"].make(ReferenceBackend())() for name in families}
    made |= {"q": made["rope_forward"][0], "k": made.pop("rope_forward")[1]}
    assert {name: (array.shape, array.dtype.name) for name, array in made.items()} == {
        "q": ((8, 32, 128), "float32"),
        "k": ((8, 32, 128), "float32"),
        "attention_scores": ((32, 8, 8), "float32"),
        "causal_mask": ((1, 32, 8, 8), "float32"),
        "causal_mask_cached": ((1, 32, 8, 8), "float32"),
        "full_attention": ((8, 4096), "float32"),
    }
    np.testing.assert_array_equal(made["causal_mask"], made["causal_mask_cached"])
    assert np.isneginf(made["causal_mask"][0, 0][np.triu_indices(8, 1)]).all()
    assert np.isfinite(made["causal_mask"][0, 0][np.tril_indices(8)]).all()


def test_suite_counts_the_least_bytes_and_operations() -> None:
    rope, qkv, scores = (SUITE[f"{name}/8"].work for name in ("rope_forward", "qkv_projection", "attention_scores"))
    assert rope.bytes == 4 * 2 * (2 * 8 * 32 * 128)  # q and k, read and written
    assert rope.operations == 3 * (2 * 8 * 32 * 128)  # two products and a sum for each value
    assert qkv.bytes == 4 * (3 * 4096 * 4096 + 8 * 4096 + 8 * 3 * 4096)
    assert qkv.operations == 2 * 8 * 3 * 4096 * 4096
    assert scores.operations == 2 * 32 * 8 * 8 * 128
    assert SUITE["full_attention/8"].work.operations == 2 * 2 * 32 * 128 * (8 * 9 // 2)
    assert SUITE["causal_mask/8"].work == SUITE["causal_mask_cached/8"].work


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("HEADS", 4), ("HEAD_DIM", 32), ("HIDDEN", 128)):
        monkeypatch.setattr(suite, name, value)
    suite._qkv_weight.cache_clear()
    yield
    suite._qkv_weight.cache_clear()


@pytest.mark.parametrize("case", SUITE.values(), ids=lambda c: c.name)
@pytest.mark.usefixtures("small")
def test_suite_on_the_cpu_equals_the_reference(case: Case) -> None:
    wanted, found = (case.make(ops)() for ops in (ReferenceBackend(), CpuBackend(2)))
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (wanted, found)), strict=True):
        b = b.reshape(4, -1, a.shape[-1])[:, : a.shape[1]] if case.family == "attention_scores" else b
        np.testing.assert_allclose(b, a, atol=1e-5)


def test_suite_results_have_notes_and_the_original_time() -> None:
    recorder = Recorder("micro")
    selected = micro.select("^(causal_mask_cached/8|rms_norm/1)$")
    micro.run(recorder, lambda *_: None, selected, ["reference", "cpu"], QUICK, rounds=1)
    fields = {result.key: result.fields for result in recorder.results()}
    assert fields["causal_mask_cached/8", "cpu"]["note"] == suite.NO_MASK
    assert "note" not in fields["causal_mask_cached/8", "reference"]
    assert fields["causal_mask_cached/8", "cpu"]["original_s"] == 9.1e-6
    assert not {"note", "original_s"} & set(fields["rms_norm/1", "cpu"])
