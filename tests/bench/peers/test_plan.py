"""Rows and suites, the files that rows make, and about how long they take."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from llm_worker_bench.peers import plan as plans
from llm_worker_bench.peers.plan import Plan, Row, TimeLeft
from llm_worker_bench.roofline import Limits
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError
from llm_worker_rbee.weights import open_checkpoint
from tests.cli.conftest import write_model

from .test_programs import tiny as tiny

SMALL = "smollm2-135m:Q4_0:1"
LIMITS = Limits(2, ((1 << 30, 1e10),), 1e11)


def test_suite_cpu_has_small_and_large_files_a_long_prompt_and_many_requests() -> None:
    rows, coders = {row.name: row for row in plans.select_rows("cpu", None)}, ["coder-0.5b", "coder-1.5b"]
    assert list(rows) == ["default", "q4_0", "q8_0", "7b-q4_k_m", "7b-q4_0", "7b-q8_0", "long", "requests", *coders]
    tests = {name: list(plans.planned_tests(row)) for name, row in rows.items()}
    assert tests["q8_0"] == [("pp", 512, 1), ("tg", 128, 1)]
    assert tests["7b-q4_0"] == [("pp", 128, 1), ("tg", 32, 1)]
    assert (tests["long"], tests["requests"]) == ([("pp", 4096, 1)], [("tg", 128, 16)])
    assert tests["coder-1.5b"] == [("pp", 512, 1), ("pp", 4096, 1), ("tg", 128, 1), ("tg", 128, 8)]
    assert [row.name for row in plans.select_rows("cpu", "^7b|long")] == [*list(rows)[3:6], "long"]


@pytest.mark.parametrize(
    ("suite", "pattern", "message"),
    [
        ("gpu", None, "unknown suite 'gpu': use one of cpu"),
        ("cpu", "13b", r"--rows '13b' matches no row \(there are default, q4_0"),
        ("cpu", "[", "not a regular expression"),
    ],
)
def test_select_rows_without_match_raises(suite: str, pattern: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plans.select_rows(suite, pattern)


def test_files_of_real_models_are_found_or_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = plans.select_rows("cpu", "coder-0.5b")[0]
    monkeypatch.setenv("LLM_WORKER_REAL_MODELS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        ModelFileError, match=f"^{row.real} is not in {tmp_path}: `python -m tests.real.models` fetches"
    ):
        plans.make_file(row, tmp_path, lambda *_: None)
    assert plans.estimate_seconds(row, Plan(), LIMITS) > 0
    (tmp_path / row.real).symlink_to(tiny)
    assert plans.make_file(row, tmp_path, lambda *_: None) == tmp_path / row.real
    assert plans.size_of(row).bytes == plans.size_of(Row("tiny", model=tiny)).bytes


def test_make_file_converts_and_writes_once(tiny: Path, tmp_path: Path) -> None:
    rows = [Row("same", model=tiny), Row("q8_0", model=tiny, converted="Q8_0"), Row("s", synthetic=SMALL)]
    same, converted, made = (plans.make_file(row, tmp_path, lambda *_: None) for row in rows)
    assert same == tiny
    assert re.fullmatch(r"tiny-[0-9a-f]{8}-as-Q8_0\.gguf", converted.name)
    assert made.name == "smollm2-135m-Q4_0-1.gguf"
    assert open_checkpoint(converted).tensors["blk.0.attn_q.weight"].kind.name == "Q8_0"
    assert open_checkpoint(made).tensors["blk.0.attn_q.weight"].kind.name == "Q4_0"
    before = [path.stat().st_mtime_ns for path in (converted, made)]
    assert [plans.make_file(row, tmp_path, lambda *_: None) for row in rows[1:]] == [converted, made]
    assert [path.stat().st_mtime_ns for path in (converted, made)] == before


def test_make_file_keeps_files_of_one_name_apart(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_model(tmp_path / "other" / tiny.name, {"general.name": "another"})
    rows = [Row("q8_0", model=model, converted="Q8_0") for model in (tiny, other)]
    first, second = (plans.make_file(row, tmp_path, lambda *_: None) for row in rows)
    assert first != second
    assert open_checkpoint(second).metadata["general.name"] == "another"


def test_estimate_grows_with_lengths_repetitions_and_size(tiny: Path) -> None:
    plan, row = Plan(repetitions=3), Row("row", synthetic="llama2-7b:Q4_0:4")
    seconds = plans.estimate_seconds(row, plan, LIMITS)
    assert plans.estimate_seconds(row._replace(pp=(1024,)), plan, LIMITS) > seconds
    assert plans.estimate_seconds(row._replace(tg=(256,)), plan, LIMITS) > seconds
    assert plans.estimate_seconds(row._replace(batches=(1, 16)), plan, LIMITS) > seconds
    assert plans.estimate_seconds(row, replace(plan, repetitions=9), LIMITS) > seconds
    assert plans.estimate_seconds(Row("row", model=tiny), plan, LIMITS) < seconds
    default = Row("default")  # the list of rows needs no file
    assert 0 < plans.estimate_seconds(default, plan, LIMITS) < seconds
    converted = Row("row", model=tiny, converted="Q8_0")
    assert plans.size_of(converted) == plans.size_of(Row("row", model=tiny))


def test_time_left_follows_finished_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 120.0, 150.0])
    monkeypatch.setattr(plans.time, "monotonic", lambda: next(now))
    left = TimeLeft({"a": 10.0, "b": 15.0, "c": 30.0})
    assert left.finish("a") == 45.0 * 2  # twice as slow as was estimated
    assert left.finish("b") == 30.0 * 2
