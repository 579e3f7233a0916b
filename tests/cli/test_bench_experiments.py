"""The command `bench experiments`; the experiments themselves are tested in tests/bench."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Run


def test_experiments_print_one_line_verdict_and_write_page(cli: Run, tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "claims.md"
    done = cli("bench", "experiments", "--only", "2", "-m", tiny, "--claims", page)
    assert done.returncode == 0
    verdict = done.stdout.decode().splitlines()[-1]
    assert verdict.startswith("claim 2: refuted - 3 of 4 parts do their job on a real file (75%): GGUF loads: yes, ")
    assert f"`{verdict}`" in page.read_text()
    assert f"wrote {page}" in done.stderr.decode()


def test_experiments_json_holds_verdicts_and_results(cli: Run, tiny: Path) -> None:
    done = cli("bench", "experiments", "--only", "2", "-m", tiny, "--json")
    value = json.loads(done.stdout)
    assert (done.returncode, value["kind"]) == (0, "experiments")
    assert [one["verdict"] for one in value["details"]["verdicts"]] == ["refuted"]
    assert "claim2/covered" in {result["name"] for result in value["results"]}


def test_experiments_wrong_usage_is_an_error(cli: Run, tiny: Path, tmp_path: Path) -> None:
    done = cli("bench", "experiments", "--only", "9")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "there is no claim '9': known are 1, 2, 3, 3a, 4, 5" in done.stderr.decode()
    (tmp_path / "file").write_text("")
    done = cli("bench", "experiments", "--only", "2", "-m", tiny, "--claims", tmp_path / "file" / "claims.md")
    assert (done.returncode, done.stdout) == (1, b"")  # before anything is measured
    assert f"{tmp_path / 'file'} is not a folder" in done.stderr.decode()
