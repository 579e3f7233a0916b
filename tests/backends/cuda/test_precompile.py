"""Variants are recorded, compiled in other processes, and found by a launch: for a Hopper GPU, without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.backends import ops
from llm_worker_rbee.backends.cuda import device, precompile

KERNELS = ["argmax_rows", "convert_rows"]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a mode of the helper in a child process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", "tests.helpers.cuda_precompile", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_recorded_variants_are_compiled_ahead_and_found_by_launches(tmp_path: Path) -> None:
    first = run(tmp_path, "compile")
    # One variant of each kernel for 1, 5 and 16 tokens; nothing is compiled or launched while recording.
    assert (first["recorded"], first["cached"], first["before"]) == (KERNELS, [], [])
    assert first["compiled"] == 2
    assert first["after"] == ["argmax_rows.cubin", "convert_rows.cubin"]
    assert first["reports"] == [[ops.COMPILING, done, 4] for done in range(5)]
    wrong, killed = first["warnings"]
    assert re.match(r"kernel argmax_rows was not compiled ahead of time: \w+Error: .*power of 2", wrong)
    assert killed == "kernel argmax_rows was not compiled ahead of time: its process was killed by SIGKILL"
    assert (first["again"], first["loaded"]) == (0, KERNELS)

    second = run(tmp_path, "look-up")  # a fresh process compiles nothing: the keys of launches are those of children
    assert (second["recorded"], second["loaded"], second["hits"]) == (0, KERNELS, [True, True])
    assert second["reasons"] == ["the compiler process was killed by SIGKILL"] * 2


def test_warm_up_records_the_variants_of_every_step(tmp_path: Path) -> None:
    """Random steps of any composition launch no variant that the warm-up has not launched."""
    found = run(tmp_path, "steps", "5")
    assert len(found) == 4
    for name, (count, new) in found.items():
        assert count >= 20, name
        assert new == [], name


@pytest.mark.gpu
@pytest.mark.skipif(device.is_interpreted(), reason="needs a GPU")
def test_warmup_command_compiles_once(tiny_file: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != precompile.TRITON_CACHE_VARIABLE}
    environment["LLM_WORKER_KERNEL_CACHE"] = str(tmp_path)
    command = [sys.executable, "-m", "llm_worker_rbee", "warmup", str(tiny_file), "--device", "cuda", "--json"]
    found = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    first, second = found
    assert first["compiled"] == first["kernels"] == second["kernels"] > 5
    assert second["compiled"] == 0
    assert Path(first["folder"]).parent == tmp_path
    assert len(list(Path(first["folder"]).glob("*/*.cubin"))) == first["kernels"]


def test_recording_under_the_interpreter_finds_nothing() -> None:
    with precompile.recording() as found:
        pass
    assert found == []
    assert precompile.compile_variants(found) == 0


def test_processes_are_limited_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile.machine, "usable_cores", lambda: 16)
    monkeypatch.setattr(precompile.machine, "cpu_quota", lambda: None)
    monkeypatch.setattr(precompile.machine, "memory", lambda: (64 << 30, 4 << 30))
    monkeypatch.setattr(precompile.machine, "memory_limit", lambda: (None, 0))
    assert [precompile._num_processes(count) for count in (1, 4, 100)] == [1, 4, 8]
    monkeypatch.setattr(precompile.machine, "cpu_quota", lambda: 3.5)
    assert precompile._num_processes(100) == 4
    monkeypatch.setattr(precompile.machine, "memory_limit", lambda: (8 << 30, 7 << 30))
    assert precompile._num_processes(100) == 2
    monkeypatch.setattr(precompile.machine, "memory_limit", lambda: (8 << 30, 8 << 30))
    assert precompile._num_processes(100) == 1


def test_fingerprint_names_sources_version_and_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.py").write_text("@triton.jit\ndef a(): pass\n")
    (tmp_path / "host.py").write_text("def a(): pass\n")
    monkeypatch.setattr(precompile, "SOURCES", tmp_path)
    first = precompile.fingerprint((9, 0))
    assert len(first) == 16
    (tmp_path / "host.py").write_text("def b(): pass\n")
    assert precompile.fingerprint((9, 0)) == first
    assert precompile.fingerprint((8, 9)) != first
    (tmp_path / "kernels.py").write_text("@triton.jit\ndef b(): pass\n")
    assert precompile.fingerprint((9, 0)) != first
