"""The command `bench micro`: the table, JSON, baselines and their exit status, Ctrl-C."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_worker_bench.commands.common import recording
from llm_worker_bench.commands.options import ResultFlags
from llm_worker_bench.results import Run
from llm_worker_rbee.backends import cpu_info

from .conftest import Terminal

FAST = ("--seconds", "0.01")


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "llm-worker-rbee" / "baselines"


def slowed(path: Path, factor: float) -> None:
    """The same run, as if it had taken so many times as long."""
    value = json.loads(path.read_text())
    for result in value["results"]:
        for key in ("estimate", "low", "high"):
            result[key] *= factor
        result["samples"] = [sample * factor for sample in result["samples"]]
    path.write_text(json.dumps(value))


def test_micro_prints_table(cli: Callable[..., Any]) -> None:
    done = cli("bench", "micro", "--filter", "rms_norm|causal_mask/8", "--backend", "reference", *FAST)
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.decode().splitlines()
    assert head.split() == ["BACKEND", "TIME", "95%", "INTERVAL", "OF", "LIMIT", "BOUND", "BY", "SAMPLES", "OUTLIERS"]
    assert [row.split()[0] for row in rows] == ["causal_mask/8", "rms_norm/1", "rms_norm/128"]
    assert all(" reference " in row for row in rows)


def test_micro_several_instruction_sets_are_measured_in_processes(cli: Callable[..., Any], tmp_path: Path) -> None:
    isas, saved = [cpu_info.available_isas()[0], "portable"], tmp_path / "run.json"
    args = ("--filter", "kernel/quantize/1$", "--rounds", "1", "--save", saved, *FAST)
    done = cli("bench", "micro", "--cpu-isa", ",".join(isas), *args)
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.decode().splitlines()
    assert head.split() == ["BACKEND", "TIME", "95%", "INTERVAL", "GMAC/S", "GB/S", "SAMPLES"]
    assert [row.split()[:2] for row in rows] == [["kernel/quantize/1", f"cpu:{isa}"] for isa in isas]
    assert Run.load(saved).settings["cpu_isa"] == ",".join(isas)
    done = cli("bench", "micro", "--cpu-isa", "portable,sparc", *args)
    assert done.returncode == 2
    assert b"'sparc' cannot run here" in done.stderr


def test_micro_json_is_one_object(cli: Callable[..., Any]) -> None:
    done = cli("bench", "micro", "--filter", "rms_norm/1$", "--json", *FAST)
    value = json.loads(done.stdout)
    (result,) = value["results"]
    assert (result["name"], result["unit"], result["backend"]) == ("rms_norm/1", "s", "cpu")
    assert result["low"] <= result["estimate"] <= result["high"]
    assert value["settings"]["filter"] == "rms_norm/1$"
    assert Run.from_json(value, "output").results[0].samples == tuple(result["samples"])


def test_micro_baseline_by_name_sets_exit_status(cli: Callable[..., Any], data_folder: Path) -> None:
    args = ("bench", "micro", "--filter", "sampling/greedy")
    assert cli(*args, "--save-baseline", "current", "--seconds", "0.05").returncode == 0
    saved = data_folder / "current.json"
    slowed(saved, 0.01)  # as if we had been a hundred times as fast: no noise makes as much
    done = cli(*args, "--baseline", "current", "--seconds", "0.05")
    assert done.returncode == 1
    assert b"regressed past 10%" in done.stdout
    loose = cli(*args, "--baseline", str(saved), "--threshold", "1000", "--seconds", "0.05")
    assert loose.returncode == 0
    assert b"regressed" in loose.stdout
    slowed(saved, 10000)
    better = cli(*args, "--baseline", "current", "--json", "--seconds", "0.05")
    assert better.returncode == 0
    value = json.loads(better.stdout)
    assert [c["verdict"] for c in value["comparison"]] == ["improved"]
    assert value["regressions"] == 0


def test_micro_missing_baseline_fails_before_measuring(cli: Callable[..., Any]) -> None:
    done = cli("bench", "micro", "--baseline", "nowhere")
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "error: there is no baseline 'nowhere' (baselines: none yet: --save-baseline NAME makes one)\n"
    )


def test_micro_baseline_of_other_machine_needs_force(cli: Callable[..., Any], data_folder: Path) -> None:
    args = ("bench", "micro", "--filter", "rms_norm/1$", *FAST)
    cli(*args, "--save-baseline", "theirs")
    path = data_folder / "theirs.json"
    value = json.loads(path.read_text())
    value["machine"] |= {"cpu": "Another 9000", "fingerprint": "0" * 12}
    path.write_text(json.dumps(value))
    refused = cli(*args, "--baseline", "theirs")
    assert refused.returncode == 1
    assert b"another machine" in refused.stderr
    assert b"'Another 9000' then" in refused.stderr
    assert refused.stdout == b""
    assert cli(*args, "--baseline", "theirs", "--force", "--threshold", "1e9").returncode == 0


def test_micro_ab_compares_two_backends(cli: Callable[..., Any]) -> None:
    args = ("bench", "micro", "--ab", "backend=reference,reference", "--filter", "rms_norm/1$", *FAST)
    done = cli(*args)
    assert done.returncode == 0
    assert b"reference#1" in done.stdout
    assert b"VERDICT" in done.stdout
    value = json.loads(cli(*args, "--json").stdout)
    assert [r["backend"] for r in value["results"]] == ["reference#1", "reference#2"]
    assert value["details"]["ab"][0]["verdict"] in ("improved", "regressed", "within noise")


def test_micro_cached_masks_are_compared_with_masks(cli: Callable[..., Any]) -> None:
    args = ("bench", "micro", "--backend", "reference", "--rounds", "2", *FAST)
    assert cli(*args, "--filter", "^causal_mask/8$", "--save-baseline", "masks").returncode == 0
    renamed = (*args, "--filter", "^causal_mask_cached/8$", "--as", "causal_mask", "--original")
    done = cli(*renamed, "--baseline", "masks", "--threshold", "100")
    assert done.returncode == 0, done.stderr
    head, row, *rest = done.stdout.decode().splitlines()
    assert head.endswith("ORIGINAL")
    assert row.startswith("causal_mask/8 ")
    assert row.endswith("9.10 us")
    assert any(line.startswith("causal_mask/8 [reference]") for line in rest)  # of the comparison


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("--filter", "rms_norm|swiglu", "--as", "x"), 1, "renames one family"),
        (("--filter", "nothing-like-it"), 1, "matches no benchmark"),
        (("--filter", "*"), 1, "not a regular expression"),
        (("--ab", "backend=reference"), 2, "backend=A,B"),
        (("--ab", "speed=a,b"), 2, "backend=A,B"),
        (("--backend", "magic"), 1, "unknown backend 'magic'"),
        (("--threshold", "-1"), 2, "--threshold"),
        (("--save-baseline", "../../up", "--filter", "rms_norm/1$"), 1, "cannot name a baseline"),
    ],
)
def test_micro_wrong_usage_is_an_error(
    cli: Callable[..., Any], args: tuple[str, ...], status: int, message: str
) -> None:
    done = cli("bench", "micro", *args, *FAST)
    assert done.returncode == status
    assert message in done.stderr.decode()
    assert len(done.stderr.decode().strip().splitlines()[-1:]) == 1


@pytest.mark.parametrize("place", ["", "file/run.json", "locked/new/run.json"])
def test_micro_unwritable_path_fails_before_measuring(cli: Callable[..., Any], tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir(mode=0o500)
    done = cli("bench", "micro", "--filter", "rms_norm/1$", "--save", str(tmp_path / place), *FAST)
    if place.startswith("locked") and os.access(tmp_path / "locked", os.W_OK):
        assert done.returncode == 0  # root may write anywhere
        return
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().startswith(f"error: cannot write {tmp_path / place}: ")


def test_recording_saves_the_run_if_printing_fails(tmp_path: Path) -> None:
    def show(run: Run) -> None:
        raise BrokenPipeError

    with (
        pytest.raises(BrokenPipeError),
        recording("micro", ResultFlags(save=tmp_path / "run.json"), show) as recorder,
    ):
        recorder.add_sample("rms_norm/1", "s", 1e-5)
    assert [result.name for result in Run.load(tmp_path / "run.json").results] == ["rms_norm/1"]


def test_micro_list_prints_names(cli: Callable[..., Any]) -> None:
    names = cli("bench", "micro", "--list", "--filter", "full_attention").stdout.decode().split()
    assert names == ["full_attention/1", "full_attention/8", "full_attention/32"]


def test_micro_ctrl_c_keeps_measured_results(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    args = ("--filter", "rms_norm|linear/Q6_K/1", "--seconds", "8", "--save", str(saved))
    running = terminal("bench", "micro", *args, XDG_DATA_HOME=str(tmp_path))
    running.wait_for("linear/Q6_K/1")
    running.send("\x03")
    status, seen = running.finish()
    assert status == 130
    assert b"rms_norm/128" in seen
    assert b"kept" in seen
    run = Run.load(saved)
    assert not run.complete
    assert {"rms_norm/1", "rms_norm/128"} <= {result.name for result in run.results}
    assert "linear/Q6_K/128" not in {result.name for result in run.results}
