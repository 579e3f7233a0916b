"""The command `bench compare`: table, exit status, JSON, and runs that are not alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llm_worker_bench.results import Result
from tests.helpers.bench_runs import micro, on_another_machine, run_of

from .conftest import Run


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    runs = {
        "before": micro(seed=1),
        "same": micro(seed=2),
        "slower": micro(seed=1, factor=1.3, commit="b" * 40, day=2),
        "elsewhere": on_another_machine(micro(seed=1), cpu="Other 9000"),
        "other kind": run_of("load", [Result.exact("import", "s", 1.0)]),
    }
    for name, run in runs.items():
        run.save(tmp_path / f"{name}.json")
    return {name: tmp_path / f"{name}.json" for name in runs}


def test_compare_regression_past_threshold_exits_1(cli: Run, files: dict[str, Path]) -> None:
    done = cli("bench", "compare", files["before"], files["slower"])
    assert done.returncode == 1
    out = done.stdout.decode()
    assert "rope_forward/128 [reference]" in out
    assert "regressed past 10%" in out
    assert "+30.0%" in out
    assert "0 improved, 15 regressed, 0 within noise" in out
    assert "commit" in out
    assert "bbbbbbbbbbbb" in out


def test_compare_below_threshold_or_improved_exits_0(cli: Run, files: dict[str, Path]) -> None:
    assert cli("bench", "compare", files["before"], files["slower"], "--threshold", "0.5").returncode == 0
    done = cli("bench", "compare", files["slower"], files["before"])
    assert done.returncode == 0
    assert "15 improved" in done.stdout.decode()


def test_compare_equal_runs_are_within_noise(cli: Run, files: dict[str, Path]) -> None:
    done = cli("bench", "compare", files["before"], files["before"], "--threshold", "0")
    assert done.returncode == 0
    assert "15 within noise" in done.stdout.decode()
    assert "same commit, model, machine, settings and versions" in done.stderr.decode()


def test_compare_json_is_one_object_with_changes(cli: Run, files: dict[str, Path]) -> None:
    done = cli("bench", "compare", files["before"], files["slower"], "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["kind"], found["threshold"], found["regressions"]) == ("micro", 0.1, 15)
    assert found["differs"] == [{"what": "commit", "before": "a" * 12, "after": "b" * 12}]
    assert found["before"]["commit"]["id"] == "a" * 40
    assert found["only_before"] == found["only_after"] == []
    assert len(found["results"]) == 15
    for one in found["results"]:
        assert {"name", "unit", "estimate", "low", "high", "verdict", "before", "after"} <= set(one)
        assert one["verdict"] == "regressed"
        assert one["estimate"] == pytest.approx(one["after"] / one["before"] - 1)
        assert one["low"] <= one["estimate"] <= one["high"]


def test_compare_accepts_baseline_names(cli: Run, files: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "data" / "llm-worker-rbee" / "baselines"
    folder.mkdir(parents=True)
    for name in ("before", "slower"):
        (folder / f"{name}.json").write_bytes(files[name].read_bytes())
    assert cli("bench", "compare", "before", "slower").returncode == 1
    done = cli("bench", "compare", "before", "missing")
    assert done.returncode == 1
    assert done.stderr.decode() == "error: there is no baseline 'missing' (baselines: before, slower)\n"


def test_compare_other_machine_needs_force(cli: Run, files: dict[str, Path]) -> None:
    done = cli("bench", "compare", files["elsewhere"], files["before"])
    assert done.returncode == 1
    assert "cpu 'Other 9000' then" in done.stderr.decode()
    assert done.stdout == b""
    forced = cli("bench", "compare", files["elsewhere"], files["before"], "--force")
    assert forced.returncode == 0
    assert "machine: cpu" in forced.stdout.decode()


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("{}", "its schema is None"), ("[]", "is not a JSON object")]
)
def test_compare_bad_file_is_one_error_line(
    cli: Run, files: dict[str, Path], tmp_path: Path, text: str, message: str
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    done = cli("bench", "compare", files["before"], bad)
    assert done.returncode == 1
    assert done.stderr.decode().count("\n") == 1
    assert f"{bad}" in done.stderr.decode()
    assert message in done.stderr.decode()


def test_compare_different_kinds_and_wrong_usage_fail(cli: Run, files: dict[str, Path]) -> None:
    done = cli("bench", "compare", files["before"], files["other kind"])
    assert (done.returncode, done.stderr) == (1, b"error: a run of `micro` cannot be compared with one of `load`\n")
    assert cli("bench", "compare", files["before"]).returncode == 2
    assert cli("bench", "compare", files["before"], files["same"], "--threshold", "-1").returncode == 2


def test_compare_lists_results_of_only_one_run(cli: Run, files: dict[str, Path], tmp_path: Path) -> None:
    run = micro(seed=1)
    shorter = tmp_path / "shorter.json"
    replace(run, results=run.results[:6]).save(shorter)
    done = cli("bench", "compare", files["before"], shorter)
    assert f"only in {files['before']}: linear/F16/1, linear/F16/128" in done.stderr.decode()
    assert "and 1 more" in done.stderr.decode()
    assert f"only in {shorter}" not in done.stderr.decode()


def test_compare_escapes_control_characters(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "evil.json"
    evil = Result.from_samples("\x1b[31mred\nline", "\x1b[0m", [1.0, 1.1, 1.2])
    run_of("micro", [evil, Result.exact("x", "s", 1.0)], {"name": "\x1b]0;title\x07"}).save(path)
    run_of("micro", [evil, Result.exact("\x1bnew", "s", 1.0)]).save(tmp_path / "other.json")
    done = cli("bench", "compare", path, tmp_path / "other.json")
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout + done.stderr
    assert "red␊line" in done.stdout.decode()
