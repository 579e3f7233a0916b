"""64 LoRA adapters of the default model in one worker, each asked in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.hub import locate_model
from tests.helpers import lora_zoo
from tests.helpers.serve_process import ServeProcess

COUNT, RANK = 64, 16
OPTIONS: dict[str, Any] = {"prompt": "Once upon a time, in a small town", "temperature": 0, "max_tokens": 6}


def test_64_adapters_are_asked_in_turn(tmp_path: Path) -> None:
    """Each has its own answer again after all others were asked; they take no more memory than was planned, also with
    slots for eight."""
    names = [f"a{i}" for i in range(COUNT)]
    for seed, name in enumerate(names):
        lora_zoo.write_random_peft(locate_model(None), tmp_path / name, rank=RANK, seed=seed, size=3)
    answers: dict[str, list[str]] = {}
    for most in ("64", "8"):
        loras = [word for name in names for word in ("--lora", f"{name}={tmp_path / name}")]
        running = ServeProcess("--max-context", "512", *loras, "--max-loras", most, "--max-cpu-loras", "64").ready()
        try:
            answers[most] = [_text(running, name) for name in names]
            assert [_text(running, name) for name in names[::-1]] == answers[most][::-1]
            memory = running.http.get("/info").json()["memory"]
            assert 0 < memory["lora_bytes"] <= _planned_bytes(int(most))
        finally:
            running.close()
    assert answers["64"] == answers["8"]
    assert len(set(answers["64"])) > COUNT // 2, "the check would be vacuous"


def _text(running: ServeProcess, name: str) -> str:
    reply = running.http.post("/v1/completions", json={**OPTIONS, "model": name})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def _planned_bytes(count: int) -> int:
    """Return what the plan keeps free for adapters of the default model."""
    shapes = [t.shape for name, t in open_checkpoint(locate_model(None)).tensors.items() if name.startswith("blk.")]
    return count * RANK * sum(2 * sum(shape) for shape in shapes if len(shape) == 2)
