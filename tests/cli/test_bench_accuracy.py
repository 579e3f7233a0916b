"""`bench accuracy`: the whole command line on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Run


def test_accuracy_reference_against_itself_is_exact(cli: Run, tiny: Path) -> None:
    done = cli("bench", "accuracy", tiny, "--tokens", "100", "--json", "--backend", "reference")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.decode().splitlines()
    run = json.loads(line)
    by_name = {result["name"]: result for result in run["results"]}
    exact = {"ppl_ratio": 1.0, "kl": 0.0, "top1": 1.0, "mean_abs_dlogprob": 0.0}
    assert {name: by_name[name]["estimate"] for name in exact} == exact
    assert {by_name[name]["backend"] for name in by_name} == {"reference"}
    assert by_name["kl"]["count"] == 99
    assert by_name["mean_abs_dlogprob"]["count"] == 20
    assert run["kind"] == "accuracy"
    assert run["settings"]["against"] == "reference"
    assert (run["model"]["name"], len(run["model"]["sha256"])) == ("tiny.gguf", 64)


def test_accuracy_prints_a_table_of_own_prompts_and_text(cli: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("he said\nshe said\n")
    (tmp_path / "t.txt").write_text("some text of one's own\n")
    done = cli("bench", "accuracy", tiny, "--prompts", tmp_path / "p.txt", "--text", tmp_path / "t.txt")
    assert done.returncode == 0, done.stderr
    rows = dict(line.rsplit("  ", 1) for line in done.stdout.decode().splitlines() if "  " in line and "%" in line)
    assert {key.strip() for key in rows} >= {"same likeliest token, in the text", "same likeliest token, after prompts"}
    assert "truth: the reference backend" in done.stdout.decode()


def test_accuracy_compares_with_a_baseline_of_any_machine(cli: Run, tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    assert cli("bench", "accuracy", tiny, "--tokens", "50", "--save", saved).returncode == 0
    run = json.loads(saved.read_text())
    run["machine"] |= {"fingerprint": "another", "cpu": "another"}
    for result in run["results"]:
        if result["name"] == "ppl":
            result["estimate"], result["low"], result["high"] = 1.5, 1.4, 1.6
    saved.write_text(json.dumps(run))
    done = cli("bench", "accuracy", tiny, "--tokens", "50", "--baseline", saved, "--json")
    verdicts = {change["name"]: change["verdict"] for change in json.loads(done.stdout)["comparison"]}
    assert verdicts == {name: "regressed" if name == "ppl" else "within noise" for name in verdicts}
    assert len(verdicts) == 8
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--against", "another"], 2, "reference, transformers"),
        (["--tokens", "1"], 2, "--tokens"),
        (["--prompts", "/nonexistent"], 1, "cannot read /nonexistent"),
        (["--backend", "nothing"], 1, "unknown backend"),
        (["--llama-cpp-python", "/nonexistent/python"], 1, "cannot run '/nonexistent/python'"),
        (["--against", "transformers", "--peer-python", "/nonexistent/python"], 1, "cannot run"),
    ],
)
def test_accuracy_invalid_options_fail_in_one_line(
    cli: Run, tiny: Path, args: list[str], status: int, message: str
) -> None:
    done = cli("bench", "accuracy", tiny, *args)
    assert (done.returncode, done.stdout) == (status, b"")
    assert message in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
