"""Kernels compiled ahead of time: a library is built, opened in a process without Numba, and computes the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm_worker_rbee.backends import cpu_info, kernel_library

ROOT = Path(__file__).parents[3]
KERNELS = r"^(program\.|elementwise\.(norm|gated)|rope\.rope_angles)"
COMPUTE = """
import hashlib, sys
import numpy as np
from pathlib import Path
from llm_worker_rbee.backends import kernel_library
if sys.argv[1]:
    sys.modules["numba"] = sys.modules["llvmlite"] = None
    kernel_library.FOLDER = Path(sys.argv[1])
from llm_worker_rbee.backends import select_backend
ops = select_backend("cpu", threads=2)
rng = np.random.default_rng(3)
x, weight = rng.standard_normal((33, 200), np.float32), rng.standard_normal(200, np.float32)
results = ops.rms_norm(x, weight, 1e-5), ops.gated(x, "silu"), *ops.add_rms_norm(x, x, weight, 1e-5)
print(ops.name, hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest())
if sys.argv[1]:
    from llm_worker_rbee.backends.cpu.kernels.causal_conv import CAUSAL_CONV
    try:
        CAUSAL_CONV.load()
    except Exception as error:
        print(type(error).__name__, error)
"""


def compute(folder: Path | str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COMPUTE, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler to link with")
    if cpu_info.current_isa() == "portable":
        pytest.skip("libraries are for processors with vector instructions")
    out = tmp_path_factory.mktemp("libraries")
    tool = [sys.executable, ROOT / "tools" / "build_kernels.py", cpu_info.current_isa()]
    done = subprocess.run([*tool, "--out", out, "--only", KERNELS, "--jobs", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_library_computes_the_bits_of_compiled_kernels_without_numba(folder: Path) -> None:
    (file,) = folder.iterdir()
    assert file.name == kernel_library.library_name(cpu_info.current_isa())
    there, refusal = compute(folder)
    assert [there] == compute("")
    assert there.startswith("cpu ")
    assert refusal.startswith("MissingDependencyError the compiled kernels of this installation lack causal_conv.")
    assert "LLM_WORKER_PREBUILT=0" in refusal


def test_library_exports_its_kernels_only(folder: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm to list symbols")
    (file,) = folder.iterdir()
    done = subprocess.run(["nm", "-D", file], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {row[-1].rpartition("_")[0].split("_")[1] for row in rows if row[-2] == "T"} == {
        "program",
        "elementwise",
        "rope",
    }
    undefined = {row[-1].partition("@")[0] for row in rows if row[-2] == "U"}
    assert not {name for name in undefined if name.startswith(("Py", "NRT_", "numba_"))}


def test_library_of_other_sources_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_library.prebuilt_isas.cache_clear()
    monkeypatch.setattr(kernel_library, "FOLDER", folder)
    assert kernel_library.prebuilt_isas() == {cpu_info.current_isa()}
    kernel_library.prebuilt_isas.cache_clear()
    monkeypatch.setattr(kernel_library, "sources_digest", lambda: "0" * 16)
    assert kernel_library.prebuilt_isas() == set()
    kernel_library.prebuilt_isas.cache_clear()


def test_build_names_unknown_instruction_sets_and_lists_the_known() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "build_kernels.py")]
    done = subprocess.run([*tool, "avx3"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown instruction set 'avx3': use some of avx512_amx, " in done.stderr
    done = subprocess.run([*tool, "--list"], capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} == cpu_info.INSTRUCTION_SETS.keys() - {"portable"}
