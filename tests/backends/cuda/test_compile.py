"""Every kernel compiles for a Hopper GPU on a machine without one, and the hot ones keep their instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PACKED = ("q4", "q4m", "q5", "q5m", "q6", "q8", "e4m3")
COMPACT = ("q2_k", "q3_k", "tq1_0", "iq4_xs", "iq2_s", "iq3_s", "iq1_m")
COMPACT_GEMM = ("q3_k", "iq4_xs", "iq2_s")
STAGED = ("decode staged", "decode gqa", "decode gqa dim 96", "decode gqa turns")
GROUPS = {
    "gemv": [f"gemv {kind}" for kind in PACKED] + ["gemv residual", "gemv 4 tokens", "gemv dense", "gemv experts"],
    "compact": [f"gemv {kind}" for kind in COMPACT] + [f"gemm {kind}" for kind in COMPACT_GEMM],
    "e4m3": [
        *(f"gemv e4m3 {name}" for name in ("qkv", "gate_up", "down")), "add_rms_norm_rows e4m3", "convert_rows e4m3",
    ],
    "gemm": [f"gemm {kind}" for kind in PACKED] + ["gemm experts", "gemm dense", "gemm dense e4m3"],
    "hopper": [
        *(f"gemm hopper q4m {tokens}{gate}" for tokens in (8, 16, 32, 64, 128) for gate in ("", " silu")),
        *(f"gemm hopper {kind} {tokens}" for kind in ("q5m", "q6", "q8") for tokens in (16, 128)),
        "gemm hopper q6 128 gelu", "gemm hopper q8 64 gelu_tanh",
        "gemm hopper experts",
    ],
    "dequantize": [
        *(f"{name} {kind}" for kind in PACKED + COMPACT_GEMM for name in ("dequantize", "embed")), "embed dense",
    ],
    "attention": [
        "decode", "decode staged", "decode float8 all", "decode dim 96", "decode dim 80 part", "decode gqa",
        "decode gqa float8 all", "decode gqa dim 96", "decode gqa part", "decode gqa shared", "prefill",
        "prefill dim 96 float8 window cap", "prefill dim 256", "prefill both directions",
        "prefill window to both sides", "prefill spans", "prefill spans both directions", "decode turns",
        "decode gqa turns", "score_tile", "rope_store_qkv", "rope_store_qkv all",
        "rope_store_qkv dim 96 part",
    ],
    "elementwise": [
        "gemv gated", "rms_norm_rows", "convert_rows", "add_rms_norm_rows", "add_rms_norm_rows experts",
        "swiglu_rows", "swiglu_rows inputs", "fill_pending_ids", "add_norm_rows", "add_norm_rows all", "activate_rows",
        "mean_of_rows",
    ],
    "states": ["conv_tokens", "conv_states", "delta_tokens", "gate_rows", "prepare_chunks", "delta_chunks"],
    "sampling": ["argmax_rows", "logprob_rows", "sample_rows"],
}  # fmt: skip


def compile_all(names: list[str]) -> dict[str, Any]:
    """Compile in a child process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.cuda_kernels", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_small_tiles_fit_shared_memory_of_ada() -> None:
    """Compute capability 8.9 has 99 KB of shared memory for a program."""
    found = compile_all(["small tiles"])
    assert len(found) == 10
    assert max(found.values()) <= 99 << 10, found


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Return the instructions of all kernels by name; one process imports PyTorch and Triton once."""
    names = [name for group in GROUPS.values() for name in group]
    found = compile_all(names)
    assert list(found) == names
    return found


@pytest.mark.timeout(1000)  # without a cache of Triton the first of them compiles for minutes
@pytest.mark.parametrize("group", GROUPS)
def test_kernel_compiles_with_expected_instructions(group: str, compiled: dict[str, Any]) -> None:
    for name in GROUPS[group]:
        words = compiled[name]
        if name.startswith("gemv e4m3 "):
            assert "f16x2.e4m3x2" in words, name
        elif name.startswith("gemv") and "dense" not in name and name != "gemv e4m3":
            assert {"dp4a", ".v4.b32"} <= set(words), name
        if group == "compact":
            assert "0 bytes of stack" in words, name
        if name.startswith("gemm"):
            assert "wgmma.mma_async" in words, name
            if group == "hopper":
                assert {"not serialized", "0 bytes of stack", "0 st.shared"} <= set(words), name
            elif "dense" not in name:
                stores = 12 if "experts" in name else 8  # for the results, also of a tile with few slots: no weight
                assert f"{stores} st.shared" in words, name
        if name.startswith(("prefill", "decode gqa")) or name.endswith("_chunks"):
            assert {"wgmma.mma_async", "mma.sync"} & set(words), name
        if name.startswith("decode"):
            assert ".v4.b32" in words, name
            assert ("cp.async.cg" in words) == (name in STAGED), name


def test_groups_cover_every_kernel_case() -> None:
    command = "from tests.helpers.cuda_kernels import CASES; print(*CASES, sep='\\n')"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert set(done.stdout.split("\n")) - {""} == {name for names in GROUPS.values() for name in names}
