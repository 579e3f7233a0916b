"""`warmup`, and what a command shows while kernels are compiled: in a folder in which some of them are missing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from llm_worker_rbee.backends.kernel_library import PREBUILT_VARIABLE

from .conftest import Run

MISSING = re.compile(
    r"(elementwise\.(norm|gated|quantize_rows|add_bias|head_norms)--|rope\.rope_angles-|attention\.split_work-"
    r"|program\.worker_loop-)"
)


def kernels_in(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if not file.name.startswith(".")}


def test_warmup_compiles_kernels_once(spawn: Run, tiny: Path, tmp_path: Path) -> None:
    compiles = {PREBUILT_VARIABLE: "0"}
    spawn("warmup", tiny, env=compiles)
    there = json.loads(spawn("warmup", tiny, "--json", env=compiles).stdout)
    assert there["compiled"] == 0
    folder = tmp_path / "kernels" / Path(there["folder"]).name
    shutil.copytree(there["folder"], folder)
    missing = [file for file in folder.iterdir() if MISSING.match(file.name)]
    for file in missing:
        file.unlink()
    env = {"LLM_WORKER_KERNEL_CACHE": str(folder.parent), **compiles}
    first = spawn("warmup", tiny, "--json", env=env)
    assert first.returncode == 0, first.stderr
    message = json.loads(first.stdout)
    assert (message["kernels"], message["folder"]) == (there["kernels"], str(folder))
    assert 6 <= message["compiled"] <= len(missing)  # a few belong to other models
    assert first.stderr.decode() == f"compiling kernels, once: {message['compiled']} ...\n"
    kept = kernels_in(folder)
    second = spawn("warmup", tiny, env=env)
    assert (second.returncode, second.stdout.decode()) == (0, f"{folder}\n")
    assert second.stderr.decode().startswith(f"nothing to compile: {message['kernels']} kernels for ")
    answer = spawn("run", "hello", "-m", tiny, "-n", "4", "--quiet", env=env)
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert kernels_in(folder) == kept  # all that an answer needs was there


def test_warmup_usage_errors(cli: Run, tiny: Path) -> None:
    both = cli("warmup", tiny, "--all")
    assert (both.returncode, both.stdout) == (2, b"")
    assert b"both a MODEL and --all are given" in both.stderr
    unknown = cli("warmup", "--cpu-isa", "z80")
    assert unknown.returncode == 2
    assert b"instruction set 'z80' is unknown: use one of " in unknown.stderr


def test_warmup_options_of_the_other_device_are_errors(cli: Run, tiny: Path) -> None:
    batches = cli("warmup", tiny, "--max-batch", "4")
    assert (batches.returncode, batches.stdout) == (2, b"")
    assert b"options of memory, batches and types are for a GPU: on a CPU use --all" in batches.stderr
    threads = cli("warmup", tiny, "--device", "cuda", "--threads", "2")
    assert threads.returncode == 2
    assert b"--threads is for the CPU" in threads.stderr


def test_warmup_without_a_gpu_names_what_is_missing(spawn: Run, tiny: Path) -> None:
    done = spawn("warmup", tiny, "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"device 'cuda'" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_warmup_unusable_cache_folder_is_an_error(spawn: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "kernels")
    done = spawn("warmup", tiny, env={"LLM_WORKER_KERNEL_CACHE": folder, PREBUILT_VARIABLE: "0"})
    assert done.returncode == 1
    assert b"kernels cannot be kept" in done.stderr
    assert b"LLM_WORKER_KERNEL_CACHE" in done.stderr
