"""The command `bench experiments`; the experiments themselves are tested in tests/bench."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Run


def test_experiments_print_one_line_verdict_and_write_page(cli: Run, tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "claims.md"
    done = cli("bench", "experiments", "--only", "2", "-m", tiny, "--claims", page)
    assert done.returncode == 0
    verdict, decision = done.stdout.decode().splitlines()[-2:]
    assert decision.startswith("decision on claim 2: modify, because ")
    assert verdict.startswith("claim 2: refuted - 3 of 4 parts do their job on a real file (75%): GGUF loads: yes, ")
    assert f"`{verdict}`" in page.read_text()
    assert f"wrote {page}" in done.stderr.decode()


def test_experiments_name_backends_and_what_is_left_out(cli: Run, tiny: Path) -> None:
    done = cli("bench", "experiments", "--only", "13", "--backends", "reference,cuda", "-m", tiny)
    assert done.returncode == 0
    assert "left out cuda: " in done.stderr.decode()
    assert "the machine" in done.stderr.decode()
    assert "masks of all lengths" in done.stdout.decode()


def test_experiments_json_holds_verdicts_and_results(cli: Run, tiny: Path) -> None:
    done = cli("bench", "experiments", "--only", "2", "-m", tiny, "--json")
    value = json.loads(done.stdout)
    assert (done.returncode, value["kind"]) == (0, "experiments")
    assert [one["verdict"] for one in value["details"]["verdicts"]] == ["refuted"]
    assert "claim2/covered" in {result["name"] for result in value["results"]}


def test_experiments_wrong_usage_is_an_error(cli: Run, tiny: Path, tmp_path: Path) -> None:
    done = cli("bench", "experiments", "--only", "14")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "there is no claim '14': known are 1, 2, 3, 3a, 4, 5" in done.stderr.decode()
    done = cli("bench", "experiments", "--backends", "reference,gpu")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "unknown backend 'gpu': use one of reference, cpu, cuda" in done.stderr.decode()
    (tmp_path / "file").write_text("")
    done = cli("bench", "experiments", "--only", "2", "-m", tiny, "--claims", tmp_path / "file" / "claims.md")
    assert (done.returncode, done.stdout) == (1, b"")  # before anything is measured
    assert f"{tmp_path / 'file'} is not a folder" in done.stderr.decode()
