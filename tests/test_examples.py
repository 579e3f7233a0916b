"""The programs in examples/, executed with the default model; the client against a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.helpers.process import spawn as spawn_process

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *args: str | Path) -> str:
    command = [sys.executable, EXAMPLES / name, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat.py", "Paris"),
        ("batch.py", "'The capital of France is' -> ' Paris"),
    ],
)
def test_example_with_default_model_prints_answers(default_model: Path, name: str, expected: str) -> None:
    assert expected in run_example(name, default_model)


def test_semantic_search_example_finds_lines_by_meaning(embedding_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("The cat sleeps on the mat.\nInterest rates rose again.\n\nA red car stands outside.\n")
    lines = run_example("semantic_search.py", file, "What do banks charge?", embedding_model).splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("Interest rates rose again.")


def test_asyncio_example_answers_while_its_event_loop_runs(default_model: Path) -> None:
    dots, *answers = run_example("asyncio_app.py", default_model).splitlines()
    assert len(dots) > 1
    assert set(dots) == {"."}
    assert [line.partition(" -> ")[0] for line in answers] == [
        "What is the capital of France?", "What is two plus two?", "Name a colour.",
    ]  # fmt: skip
    assert answers[0].endswith(" -> The capital of France is Paris.")
    assert all(line.partition(" -> ")[2] for line in answers)


def test_openai_client_example_streams_from_server(default_model: Path) -> None:
    command = [sys.executable, "-m", "llm_worker_rbee", "serve", "-m", default_model, "--port", "0"]
    with spawn_process(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split(",")[0]
        while "curl" not in server.stdout.readline():  # ready
            assert server.poll() is None
        try:
            assert run_example("openai_client.py", url).strip()
        finally:
            server.terminate()
    assert server.returncode == 0
