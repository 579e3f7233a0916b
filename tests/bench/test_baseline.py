"""Baselines by name and by path, runs of other machines, and what is compared with what."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from llm_worker_bench import baseline
from llm_worker_bench.baseline import (
    Difference,
    OtherMachineError,
    compare,
    compare_results,
    find_differences,
    find_machine_drift,
    names_not_compared,
    require_comparable,
)
from llm_worker_bench.results import Better, Result, ResultsError, Run
from llm_worker_rbee.errors import InvalidRequestError
from tests.helpers.bench_runs import LIMITS, micro, on_another_machine, run_of

DOCUMENTED = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def test_load_by_name_returns_saved_baseline(data_folder: Path) -> None:
    assert baseline.list_names() == []
    micro().save(path := baseline.path_for("first"))
    assert path == data_folder / "llm-worker-rbee" / "baselines" / "first.json"
    assert baseline.load("first").created == micro().created
    replace(micro(), kind="e2e").save(baseline.path_for("first"))
    assert baseline.load("first").kind == "e2e"
    micro().save(baseline.path_for("a.second-one_2"))
    assert baseline.list_names() == ["a.second-one_2", "first"]


def test_load_by_path_returns_the_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("run.json", "sub/run", "run"):
        micro().save(tmp_path / name)
        assert baseline.load(name).kind == baseline.load(str(tmp_path / name)).kind == "micro"


def test_load_gzip_path_returns_the_run(tmp_path: Path) -> None:
    micro().save(tmp_path / "run.json")
    packed = tmp_path / "run.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "run.json").read_bytes()))
    assert baseline.load(str(packed)) == baseline.load(str(tmp_path / "run.json"))
    packed.write_bytes(b"{}")
    with pytest.raises(ResultsError, match=r"run\.json\.gz is not a gzip file"):
        baseline.load(str(packed))


@pytest.mark.skipif(not DOCUMENTED.exists(), reason="this is not a checkout: there is no docs/results")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x86_64-16-h200/micro-cpu", "micro"), ("x86_64-16-h200/peers-cuda", "peers"),
        ("history/arm-kernels-before", "micro"), ("history/arm-peers-before", "peers"),
    ],
)  # fmt: skip
def test_load_documented_baseline_has_results_with_samples(name: str, kind: str) -> None:
    run = baseline.load(str(DOCUMENTED / f"{name}.json.gz"))
    assert run.kind == kind
    assert all(result.samples for result in run.results)


def test_load_unknown_name_raises_with_known_names() -> None:
    with pytest.raises(ResultsError, match=r"there is no baseline 'main' .*none yet: --save-baseline NAME"):
        baseline.load("main")
    micro().save(baseline.path_for("one"))
    micro().save(baseline.path_for("two"))
    with pytest.raises(ResultsError, match=r"there is no baseline 'main' \(baselines: one, two\)"):
        baseline.load("main")
    with pytest.raises(ResultsError, match=r"cannot read there\.json: No such file"):
        baseline.load("there.json")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "-x", "a b", "ä", "x" * 101, "a\0b", "a\n"])
def test_save_name_with_path_characters_raises(name: str, data_folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot name a baseline"):
        micro().save(baseline.path_for(name))
    assert not data_folder.exists()


def test_load_without_home_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ResultsError, match="set XDG_DATA_HOME"):
        baseline.baseline_dir()


def test_require_comparable_other_machine_names_differences() -> None:
    here = micro()
    there = on_another_machine(here, cpu="Other 9000", memory_gib=3)
    with pytest.raises(OtherMachineError, match="another machine") as error:
        require_comparable(there, here, force=False)
    message = str(error.value)
    assert "cpu 'Other 9000' then" in message
    assert "memory_gib 3 then" in message
    assert "cores" not in message
    assert "--force" in message
    require_comparable(there, here, force=True)
    require_comparable(here, micro(seed=5), force=False)


def test_require_comparable_ignores_accuracy() -> None:
    run = run_of("accuracy", [Result.exact("kl", "", 0.1)])
    require_comparable(on_another_machine(run, cpu="Other"), run, force=False)


def test_compare_different_kinds_raises() -> None:
    with pytest.raises(ResultsError, match="a run of `load` cannot be compared with one of `micro`"):
        compare(run_of("load", []), micro())


def test_compare_without_common_results_raises() -> None:
    one, other = (run_of("micro", [Result.exact(name, "s", 1.0)]) for name in ("a", "b"))
    with pytest.raises(ResultsError, match="no benchmark in common"):
        compare(one, other)


def timed(name: str, seconds: float, backend: str | None = None, unit: str = "s") -> Result:
    fields = {} if backend is None else {"backend": backend}
    return Result.from_samples(name, unit, [seconds * (1 + i / 1000) for i in range(10)], **fields)


def compared(before: Run, after: Run) -> list[tuple[str, str | None, str | None, str]]:
    return [
        (c.after.name, c.before.fields.get("backend"), c.after.fields.get("backend"), c.change.verdict)
        for c in compare(before, after)
    ]


def test_compare_matches_name_and_backend() -> None:
    before = run_of("micro", [timed("a", 1.0, "reference"), timed("a", 2.0, "cpu"), timed("gone", 1.0)])
    after = run_of("micro", [timed("new", 1.0), timed("a", 1.0, "cpu"), timed("a", 1.5, "reference")])
    assert compared(before, after) == [("a", "cpu", "cpu", "improved"), ("a", "reference", "reference", "regressed")]


def test_compare_unique_name_matches_across_backends() -> None:
    before = run_of("micro", [timed("a", 1.0, "reference"), timed("b", 1.0, "reference"), timed("b", 1.0, "cpu")])
    after = run_of("micro", [timed("a", 0.5, "cpu"), timed("b", 1.0, "cuda")])
    assert compared(before, after) == [("a", "reference", "cpu", "improved")]


def test_compare_other_unit_is_listed_as_not_compared() -> None:
    before = run_of("micro", [timed("a", 1.0), timed("b", 1.0), timed("gone", 1.0)])
    after = run_of("micro", [timed("a", 1.0), timed("b", 1.0, unit="tok/s")])
    changes = compare(before, after)
    assert [change.after.name for change in changes] == ["a"]
    assert names_not_compared(before, after, changes) == ["b (in s)", "gone"]
    assert names_not_compared(after, before, changes) == ["b (in tok/s)"]


@pytest.mark.parametrize(
    ("before", "after", "better", "change", "verdict"),
    [
        (100.0, 150.0, "lower", 0.5, "regressed"),
        (100.0, 150.0, "higher", 0.5, "improved"),
        (100.0, 101.0, "lower", 0.01, "within noise"),
        (0.0, 0.0, "lower", 0.0, "within noise"),
        (0.0, 3.0, "lower", math.inf, "regressed"),  # errors, where there were none
        (3.0, 0.0, "lower", -1.0, "improved"),
        (math.nan, 1.0, "lower", math.nan, "within noise"),
    ],
)
def test_compare_results_counts_are_compared_exactly(
    before: float, after: float, better: Better, change: float, verdict: str
) -> None:
    found = compare_results(Result.exact("x", "B", before, better), Result.exact("x", "B", after, better))
    assert found.change == pytest.approx(change, nan_ok=True)
    assert found.verdict == verdict


def test_compare_results_count_with_samples_is_within_noise() -> None:
    found = compare_results(Result.exact("x", "s", 1.0), timed("x", 2.0))
    assert found.verdict == "within noise"
    assert found.change == pytest.approx(1.0, abs=0.01)


def test_is_past_only_for_regressions() -> None:
    before = run_of("micro", [timed("slower", 1.0), timed("faster", 1.0), timed("same", 1.0)])
    after = run_of("micro", [timed("slower", 1.2), timed("faster", 0.5), timed("same", 1.001)])
    changes = compare(before, after)
    assert [c.is_past(0.1) for c in changes] == [True, False, False]
    assert [c.is_past(0.3) for c in changes] == [False, False, False]


def test_find_differences_lists_other_properties() -> None:
    run = micro(commit="a" * 40)
    assert find_differences(run, run) == []
    other = replace(
        run,
        commit={"id": "b" * 40, "dirty": True},
        model={"name": "m.gguf", "sha256": "c" * 64},
        machine={**run.machine, "cores": 99, "threads": {"OMP_NUM_THREADS": "7"}},
        settings={**run.settings, "backend": "cpu", "threads": 2},
        versions={**run.versions, "numpy": "0.1"},
        complete=False,
    )
    assert find_differences(run, other) == [
        Difference("commit", "a" * 12, "b" * 12 + " + changes"),
        Difference("model", "-", "m.gguf (cccccccccccc)"),
        Difference("machine: cores", str(run.machine["cores"]), "99"),
        Difference("machine: threads", json.dumps(run.machine["threads"]), '{"OMP_NUM_THREADS": "7"}'),
        Difference("setting: backend", "reference", "cpu"),
        Difference("version: numpy", run.versions["numpy"], "0.1"),
        Difference("complete", "yes", "no, broken off"),
        Difference("setting: threads", "-", "2"),
    ]


def latency(value: float, low: float, high: float) -> Result:
    return Result("ttft/p99", "s", value, low, high)


def test_compare_results_without_samples_uses_intervals() -> None:
    before = latency(1.0, 0.97, 1.03)
    clear, vague = (compare_results(before, latency(1.2, 1.2 - w, 1.2 + w)) for w in (0.04, 0.3))
    assert (clear.verdict, vague.verdict) == ("regressed", "within noise")
    assert (clear.low, clear.high) == pytest.approx((1.16 / 1.03 - 1, 1.24 / 0.97 - 1))
    assert vague.low < 0 < vague.high


def test_find_machine_drift_slower_machine_is_reported() -> None:
    before = micro()
    slower = replace(LIMITS, operations=LIMITS.operations * 0.7)
    after = replace(before, details={"limits": slower.as_json()})
    assert find_machine_drift(before, before) == []
    assert find_machine_drift(before, after) == [
        Difference("speed: arithmetic", "60.00 GFLOP/s", "42.00 GFLOP/s (-30%)")
    ]
    assert find_machine_drift(before, after) == find_differences(before, after)
    for broken in ({}, {"limits": []}, {"limits": {"bandwidth": [3], "operations_per_second": "fast"}}):
        assert find_machine_drift(before, replace(before, details=broken)) == []
