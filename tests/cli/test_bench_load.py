"""`bench load` as a person or a program calls it."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Run


def test_load_prints_a_table_and_saves_the_run(cli: Run, tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    done = cli("bench", "load", tiny, "-r", "1", "--save", saved)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["COLD", "95%", "INTERVAL", "WARM", "95%", "INTERVAL"]
    firsts = [line.split("  ")[0] for line in lines[1:] if line]
    assert firsts[:4] == ["interpreter", "import", "backend", "locate"]
    assert firsts.index("kernels") + 1 == firsts.index("weights")
    memory = [f"memory, {when}" for when in ("import", "load", "peak", "serve_engine")]
    commands = ["COMMAND", "version", "help", "run help", "run first token", "serve ready"]
    assert firsts[firsts.index("total") + 1 :] == memory + commands
    run = json.loads(saved.read_text())
    assert run["kind"] == "load"
    assert {"import", "open/warm", "tokenizer/warm", "weights/warm", "first_token/warm", "total/warm"} <= {
        one["name"] for one in run["results"]
    }


def test_load_invalid_model_fails_in_one_line(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no model at all, but long enough to be looked at")
    done = cli("bench", "load", path, "-r", "1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(b"error: the worker does not start: model.gguf: not a GGUF file")
