"""`bench e2e` as a person or a program calls it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.process import spawn as spawn_process

from .conftest import Run, environment

SHORT = ("--pp", "8", "--tg", "3", "-r", "2")


def run_json(cli: Run, *args: str | Path) -> dict[str, Any]:
    done = cli("bench", "e2e", "--json", *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


def test_e2e_json_has_the_documented_names(cli: Run, tiny: Path) -> None:
    run = run_json(cli, tiny, *SHORT)
    found = {one["name"]: one for one in run["results"]}
    assert set(found) == {"pp8", "tg3", "ttft", "bytes_per_token", "peak_memory"}
    for one in found.values():
        assert {"name", "unit", "estimate", "low", "high"} <= set(one)
        assert one["low"] <= one["estimate"] <= one["high"]
    assert found["pp8"]["unit"] == found["tg3"]["unit"] == "tok/s"
    assert found["tg3"]["bytes_per_token"] == found["bytes_per_token"]["estimate"]
    assert run["kind"] == "e2e"
    assert run["settings"]["pp"] == [8]
    assert run["model"]["name"] == "tiny.gguf"
    assert run["details"]["limits"]["threads"] == run["settings"]["threads"]


def test_e2e_prints_a_table(cli: Run, tiny: Path) -> None:
    done = cli("bench", "e2e", tiny, "--pp", "4,8", "--tg", "2", "--depth", "0,16", "--batch", "1,2", "-r", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("tiny.gguf, ")
    assert lines[2].split() == ["RESULT", "95%", "INTERVAL", "OF", "LIMIT", "BOUND", "BY", "RUNS", "BESIDE"]
    names = [line.split()[0] for line in lines[3:] if line]
    assert names[:2] == ["pp4", "ttft4"]
    for name in ("pp8@d16@b2", "tg2@d16", "tg2@b2", "ttft8@d16"):
        assert name in names
    assert "tok/s" in done.stdout.decode()
    beside = next(line for line in lines if line.startswith("tg2@b2"))
    assert re.search(r"\d+% of the products alone, \d+\.\d\d x one sequence$", beside)
    assert b"llama-bench does not sample" in done.stderr


def test_e2e_speculative_and_prefix_rows(cli: Run, tiny: Path) -> None:
    options = ("--pp", "0", "--tg", "24", "-r", "1", "--prefix", "32", "--speculative", "ngram", "--draft-tokens", "2")
    done = cli("bench", "e2e", tiny, *options)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.decode().splitlines() if line}
    assert lines["ttft_shared@p32"].endswith(" x shorter")
    assert re.search(r" x plain decoding, \d+% of drafts accepted, \d\.\d\d tokens a step$", lines["tg24@ngram"])
    run = run_json(cli, tiny, "--pp", "0", "--tg", "4", "-r", "1", "--draft-model", tiny)
    assert "tg4@draft" in {one["name"] for one in run["results"]}
    assert run["settings"]["draft_model"] == str(tiny)


def test_e2e_synthetic_model(spawn: Run) -> None:
    done = spawn(
        "bench", "e2e", "--synthetic", "smollm2-135m:Q4_0:1", "--pp", "2", "--tg", "1", "-r", "1", "--threads", "1",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["model"]["name"] == "smollm2-135m:Q4_0:1"
    assert run["model"]["synthetic"] is True
    assert {"pp2", "tg1"} <= {one["name"] for one in run["results"]}


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("--pp", "0", "--tg", "0"), 1, b"error: nothing to measure: --pp and --tg are both 0"),
        (("--pp", "300"), 1, b"error: pp300 needs 300 tokens, the model's context has 256"),
        (("--pp", "8;9"), 2, b"error: --pp is '8;9': use whole numbers"),
        (("--batch", "0"), 2, b"error: --batch is '0': each must be 1 or more"),
        (("--synthetic", "llama2-7b:Q4_0"), 2, b"error: both a MODEL and --synthetic are given"),
        (("--backend", "none", *SHORT), 1, b"error: unknown backend 'none'"),
        (("-r", "0"), 2, b"error: "),
        (("--speculative", "luck"), 2, b"error: --speculative is 'luck': use one of off, ngram"),
        (("--speculative", "ngram", "--draft-model", "x.gguf"), 2, b"error: both --speculative and --draft-model"),
    ],
)
def test_e2e_invalid_options_fail(cli: Run, tiny: Path, args: tuple[str, ...], status: int, message: bytes) -> None:
    done = cli("bench", "e2e", tiny, *args)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith(message)
    assert done.stdout == b""


def test_e2e_compares_with_a_baseline(cli: Run, tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    assert cli("bench", "e2e", tiny, *SHORT, "--save", saved).returncode == 0
    done = cli("bench", "e2e", tiny, *SHORT, "--baseline", saved, "--threshold", "1000", "--json")
    assert done.returncode == 0
    names = {one["name"] for one in json.loads(done.stdout)["comparison"]}
    assert names == {"pp8", "tg3", "ttft", "bytes_per_token", "peak_memory"}


def test_e2e_ctrl_c_keeps_results(tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    command = [sys.executable, "-m", "llm_worker_rbee", "bench", "e2e", str(tiny), "--pp", "4", "--tg", "3"]
    process = spawn_process(
        [*command, "-r", "600", "--save", str(saved)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stderr is not None
    line = b""
    while not line.startswith(b"25%") or b" of 600" not in line:
        line = process.stderr.readline()
        assert line, "it ended by itself"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"what was measured until then is kept" in err
    assert b"pp4" in out
    run = json.loads(saved.read_text())
    assert run["complete"] is False
    assert len({one["name"]: one for one in run["results"]}["pp4"]["samples"]) > 1


def test_e2e_times_steps_and_bursts(cli: Run, tiny: Path) -> None:
    done = cli("bench", "e2e", tiny, "--pp", "0", "--tg", "0", "--step", "3x5+2", "--burst", "4x7", "-r", "1")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.decode().splitlines()[3:] if line]
    assert names[:4] == ["burst4x7/ttft_median", "burst4x7/ttft_p95", "burst4x7/ttft_max", "step3x5+2"]
    done = cli("bench", "e2e", tiny, "--step", "3x")
    assert done.returncode == 2
    assert b"--step is '3x': write PROMPTSxTOKENS" in b" ".join(done.stderr.split())
