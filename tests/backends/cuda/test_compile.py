"""Every kernel compiles for a Hopper GPU on a machine without one, and the hot ones keep their shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PACKED = ("q4", "q4m", "q5", "q5m", "q6", "q8", "q8d", "q4mm")
GROUPS = {
    "matvec": [f"matvec {kind}" for kind in PACKED] + ["matvec residual", "matvec of four", "matvec of numbers"],
    "e4m3": [*(f"matvec of e4m3, {name}" for name in ("qkv", "gate_up", "down")), "add_norm e4m3", "round_rows"],
    "matmul": [f"matmul {kind}" for kind in PACKED] + ["matmul of numbers", "matmul of numbers, e4m3"],
    "tables": [f"{what} {kind}" for kind in PACKED for what in ("dequantize", "embed")] + ["embed numbers"],
    "attention": [
        "decode", "decode staged", "decode float8, all", "decode grouped", "decode grouped float8, all", "prefill",
        "prefill of 96, float8, window, cap", "prefill of 256", "rope_store", "rope_store, all", "rotate_store",
        "rotate_store float8",
    ],
    "small": ["matvec gates", "norm_rows", "gate_rows", "to_bytes", "spread", "add_norm", "gated"],
    "sampling": ["greedy", "score", "choose"],
}  # fmt: skip


def compile_all(names: list[str]) -> dict[str, Any]:
    """In a process where nothing is interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.cuda.compiling", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_smaller_tiles_fit_smaller_gpus() -> None:
    """Compute capability 8.9 has 99 KB of shared memory for a program."""
    found = compile_all(["small tiles"])
    assert len(found) == 9
    assert max(found.values()) <= 99 << 10, found


@pytest.mark.parametrize("group", GROUPS)
def test_every_kernel_compiles(group: str) -> None:
    found = compile_all(GROUPS[group])
    assert list(found) == GROUPS[group]
    for name, words in found.items():
        if "matvec of e4m3" in name:
            assert "f16x2.e4m3x2" in words, name
        elif name.startswith("matvec") and "numbers" not in name:
            assert {"dp4a", ".v4.b32"} <= set(words), name
        if name.startswith("matmul"):
            assert "wgmma.mma_async" in words, name
            if "numbers" not in name:
                assert "8 st.shared" in words, name  # for the results: unpacked weights stay in registers
        if name.startswith(("prefill", "decode grouped")):
            assert {"wgmma.mma_async", "mma.sync"} & set(words), name
        if name.startswith("decode"):
            assert ".v4.b32" in words, name
            assert ("cp.async.cg" in words) == (name in ("decode staged", "decode grouped")), name


def test_no_kernel_is_left_out() -> None:
    command = "from tests.backends.cuda.compiling import CASES; print(*CASES, sep='\\n')"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert set(done.stdout.split("\n")) - {""} == {name for names in GROUPS.values() for name in names}
