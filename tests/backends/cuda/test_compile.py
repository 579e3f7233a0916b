"""Every kernel compiles for a Hopper GPU on a machine without one, and the hot ones keep their shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PACKED = ("q4", "q4m", "q5", "q5m", "q6", "q8", "q8d", "q4mm")
GROUPS = {
    "matvec": [f"matvec {kind}" for kind in PACKED] + ["matvec residual", "matvec of four", "matvec of numbers"],
    "matmul": [f"matmul {kind}" for kind in PACKED if kind not in ("q5", "q8")],
    "tables": [f"{what} {kind}" for kind in PACKED for what in ("dequantize", "embed")] + ["embed numbers"],
    "attention": [
        "decode", "decode float8, all", "prefill", "prefill of 96, float8, window, cap", "prefill of 256", "rope_store",
        "rope_store, all", "rotate_store", "rotate_store float8",
    ],
    "small": ["matvec gates", "norm_rows", "gate_rows", "to_bytes", "spread", "add_norm", "gated"],
    "sampling": ["greedy", "score", "choose"],
}  # fmt: skip
IN_REGISTERS = ("q4", "q4m", "q8d", "q4mm")  # unpacked weights go to the tensor cores without shared memory


def compile_all(names: list[str]) -> dict[str, list[str]]:
    """In a process where nothing is interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.cuda.compiling", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_every_kernel_compiles(group: str) -> None:
    found = compile_all(GROUPS[group])
    assert list(found) == GROUPS[group]
    for name, words in found.items():
        if name.startswith("matvec") and "numbers" not in name:
            assert {"dp4a", ".v4.b32"} <= set(words), name
        if name.startswith("matmul"):
            assert "wgmma.mma_async" in words, name
            assert ("st.shared" not in words) == (name.split()[1] in IN_REGISTERS), name
        if name.startswith("prefill"):
            assert {"wgmma.mma_async", "mma.sync"} & set(words), name


def test_no_kernel_is_left_out() -> None:
    command = "from tests.backends.cuda.compiling import CASES; print(*CASES, sep='\\n')"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert set(done.stdout.split("\n")) - {""} == {name for names in GROUPS.values() for name in names}
