"""The JIT cache: reused by the next process, never stale after an edit, never used when damaged; parts; and float16."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba as nb
import numpy as np
import pytest

from llm_worker_rbee import machine
from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.backends.cpu import compiler, jit, kernel_cache
from llm_worker_rbee.backends.cpu.kernels.pointers import f64, i64
from llm_worker_rbee.backends.kernel_folder import CACHE_VARIABLE
from llm_worker_rbee.backends.kernel_library import PREBUILT_VARIABLE
from tests.backends.test_cpu_info import run

PACKAGE = Path(__file__).parents[3] / "llm_worker_rbee"
RUN = """
import ctypes, os, resource
import numpy as np
from llm_worker_rbee.backends.cpu.kernels import simd as f
from llm_worker_rbee.backends.cpu.jit import TaskKernel
from llm_worker_rbee.backends.cpu.kernels.pointers import f32

def ratio(args, step, piece):
    x = f32(args)
    f.store(x, 0, f.div(f.load(x, 0), f.load(x, 16)))

if "LARGEST" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LARGEST"]),) * 2)
x, tasks = np.repeat(np.float32([48, 2]), 16), [TaskKernel(ratio, name) for name in "abc"]
kept = [task.is_cached for task in tasks]
for task in tasks:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(task.address)(x.ctypes.data, 0, 0)
print(x[0], all(kept) if any(kept) in (False, all(kept)) else "some")
"""
F16_CONVERSIONS = """
import numba, numpy as np
from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.backends.cpu import jit
from llm_worker_rbee.backends.cpu.kernels import simd as f

@numba.njit
def copy(x, y):
    for i in range(0, x.size, 16):
        f.store(y, i, f.load(x, i))

def same(found, wanted):
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(f"u{found.itemsize}"), wanted[numbers].view(f"u{found.itemsize}"))

every = np.arange(1 << 16, dtype=np.uint16)
wide = np.empty(every.size, np.float32)
copy(every, wide)
same(wide, every.view(np.float16).astype(np.float32))
finite = np.abs(wide[np.isfinite(wide)])
middle = (finite + np.append(finite[1:], np.float32(65536))) / np.float32(2)
near = [wide, middle, -middle, *(np.nextafter(middle, np.float32(end)) for end in (0, np.inf))]
x = np.concatenate([*near, np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)])
x = x[: x.size // 16 * 16]
narrow = np.empty(x.size, np.uint16)
copy(x, narrow)
with np.errstate(all="ignore"):
    same(narrow.view(np.float16), x.astype(np.float16))
print("f16c" in cpu_info.llvm_features())
"""
RIGHT, WRONG = 6.0, 54.0
SCALE: Any = None  # set for each variant
PLUS_ONE: Any = None
DOUBLED: Any = None


def plus_one(x):
    return x + SCALE


def doubled(x):
    """Call another part for whatever type it gets."""
    return PLUS_ONE(x) * 2


def double_both(args, step, piece):
    """Call it for two types, and for a constant, which is none of its own."""
    f64(args)[0], i64(args)[1] = DOUBLED(f64(args)[0]), DOUBLED(i64(args)[1]) + DOUBLED(7)


def call(task: jit.TaskKernel, values: Any) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(task.address)(values.ctypes.data, 0, 0)


def start(
    cache: Path | str, root: Path = PACKAGE.parent, program: tuple[str, ...] = ("-c", RUN), **env: str
) -> subprocess.Popen[str]:
    """Run three small kernels in a process of its own."""
    given = {
        "PYTHONPATH": str(root),
        CACHE_VARIABLE: str(cache),
        PREBUILT_VARIABLE: "0",
        "LLM_WORKER_THREADS": "1",
        **env,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *program], env={**os.environ, **given}, cwd=root, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def end(process: subprocess.Popen[str], warning: str = "") -> tuple[float, bool]:
    """Return (its result, whether the kernels were cached); standard error has one line, or none."""
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert [warning in line for line in errors.splitlines()] == [True] * bool(warning), errors
    value, kept = out.split()
    return float(value), kept == "True"


@pytest.mark.parametrize("make", [jit.kernel, jit.simple_kernel])
def test_kernel_function_is_called_by_python_and_by_kernels(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function is compiled for the types it meets: for Python as a kernel, for kernels as a part, at any depth."""
    # of an earlier run the parts would not be compiled again
    monkeypatch.setattr(kernel_cache, "cache_dir", lambda: tmp_path)
    name = make.__name__
    inner = make(jit.variant(plus_one, name, SCALE=1))
    outer = make(jit.variant(doubled, name, PLUS_ONE=inner))
    assert (outer(3), outer(1.25), type(outer(3))) == (8, 4.5, int)
    values = np.array([1.25, 0.0])
    values.view(np.int64)[1] = 3
    call(jit.TaskKernel(double_both, name, DOUBLED=outer), values)
    assert (values[0], values.view(np.int64)[1]) == (4.5, 8 + 16)
    for part in (inner.part, outer.part):
        assert set(part.overloads) == {(nb.int64,), (nb.float64,)}
        for compiled in part.overloads.values():
            library, symbol = compiled.library, compiled.fndesc.llvm_func_name
            assert isinstance(library, compiler.PartLibrary)
            assert library.optimized == (make is jit.kernel)
            assert not library.get_function(symbol).is_declaration
            assert library.get_pointer_to_function(symbol) == 0  # LLVM code only
            assert not library.codegen._engine.is_symbol_defined(symbol)
    assert set(outer.dispatcher.overloads) == {(nb.int64,), (nb.float64,)}
    assert not inner.dispatcher.overloads  # Python did not call it


def test_jit_cache_is_reused_and_never_stale(tmp_path: Path) -> None:
    root, cache = tmp_path / "code", tmp_path / "cache"
    shutil.copytree(PACKAGE, root / "llm_worker_rbee", ignore=shutil.ignore_patterns("__pycache__"))
    assert end(start(cache, root)) == (RIGHT, False)
    assert end(start(cache, root)) == (RIGHT, True)
    edited = root / "llm_worker_rbee" / "backends" / "cpu" / "kernels" / "simd.py"  # not the kernel's own file
    text = edited.read_text()
    assert "lambda b, x, y: b.fdiv(x, y)" in text
    edited.write_text(text.replace("lambda b, x, y: b.fdiv(x, y)", "lambda b, x, y: b.fadd(x, y)"))
    os.utime(edited, (1e9, 1e9))  # Python tells bytecode of two edits of one length apart by whole seconds
    assert end(start(cache, root)) == (WRONG, False)
    edited.write_text(text)
    assert end(start(cache, root)) == (RIGHT, True)
    assert end(start(cache, root, **{cpu_info.ISA_VARIABLE: "portable"})) == (RIGHT, False)


def test_kernel_outside_the_package_is_never_stale(tmp_path: Path) -> None:
    """Its own file has another function that it uses: the bytecode of the kernel itself is the same."""
    file, helper = tmp_path / "kernels.py", "from llm_worker_rbee.backends.cpu.jit import inline\n"
    for operation, expected in (("f.div", RIGHT), ("f.add", WRONG), ("f.div", RIGHT)):
        divide = f"{helper}@inline\ndef divide(x, y):\n    return {operation}(x, y)\n"
        text = RUN.replace("def ratio", f"{divide}\ndef ratio").replace("f.store(x, 0, f.div(", "f.store(x, 0, divide(")
        file.write_text(text)
        assert end(start(tmp_path / "cache", program=(str(file),)))[0] == expected


def test_jit_cache_survives_concurrent_writers_and_damage(tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    assert [end(process)[0] for process in both] == [RIGHT] * 2
    (folder,) = tmp_path.iterdir()
    files = sorted(folder.iterdir())
    assert len(files) == 3
    whole = {file: file.read_bytes() for file in files}
    damages = (lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-100] + os.urandom(100))
    for (file, data), damage in zip(whole.items(), damages, strict=True):
        file.write_bytes(damage(data))
    assert end(start(tmp_path)) == (RIGHT, True)
    for file in files:
        data = file.read_bytes()
        assert hashlib.sha256(data[kernel_cache.DIGEST_BYTES :]).digest() == data[: kernel_cache.DIGEST_BYTES]


def test_jit_cache_unwritable_or_full_only_warns(tmp_path: Path) -> None:
    blocked, passing, small = tmp_path / "file", tmp_path / "tmp", tmp_path / "small"
    blocked.write_text("not a folder")
    passing.mkdir()
    one = start(blocked, TMPDIR=str(passing))
    two = start(small, LARGEST="1000", TMPDIR=str(passing))
    for process, place in ((one, blocked), (two, small)):
        value, kept = end(process, warning=f"kernels cannot be kept in {place}")
        assert (value, kept) == (RIGHT, False)
    assert not list(passing.iterdir())
    assert not [file for folder in small.iterdir() for file in folder.iterdir()]


@pytest.mark.skipif(not machine.is_x86(), reason="elsewhere LLVM has instructions for it")
def test_float16_conversions_without_f16c_are_exact() -> None:
    """Every float16, and floats near where they round, to the bit."""
    assert run(F16_CONVERSIONS, NUMBA_CPU_NAME="generic") == ["False"]
