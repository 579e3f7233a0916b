"""What LLVM takes the machine for: no instruction set is offered that it would end the process over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from llvmlite import binding

from llm_worker_rbee import machine
from llm_worker_rbee.backends import isa

ROOT = Path(__file__).parents[2]
DOT = """
import numba, numpy as np
from llm_worker_rbee.backends import isa
from llm_worker_rbee.backends.cpu.dot_int8 import ISA, WEIGHT_BIAS, dot_block
from llm_worker_rbee.backends.cpu.packed_weight import LAYOUT_BY_TYPE, LAYOUTS
from llm_worker_rbee.backends.cpu.simd import add_scaled_dot, init_dot, load, store_tile, zero_floats

Q8_0 = LAYOUTS.index(LAYOUT_BY_TYPE["Q8_0"])

@numba.njit
def rows(weights, x, sums, one, scales, out):
    acc = dot_block(init_dot(1, sums, 0, 0, WEIGHT_BIAS), Q8_0, 2, weights, 0, x, 0, 0)
    total = add_scaled_dot(zero_floats(1), acc, one, 0, 0, load(scales, 0))
    store_tile(out, 0, 0, total, np.float32(1))

rng, out = np.random.default_rng(1), np.empty(16, np.float32)
w, x = rng.integers(-127, 128, (8, 16, 4)), rng.integers(-127, 128, (8, 4))
ones = np.ones(16, np.float16).view(np.uint16)
stored = (w + WEIGHT_BIAS).astype(np.uint8).reshape(-1)
rows(stored, x.astype(np.int8).reshape(-1), np.array([x.sum()], np.int32), np.ones(1, np.float32), ones, out)
assert (out == (w * x[:, None]).sum((0, 2))).all(), out
print(ISA, *isa.available())
"""


def run(code: str, **env: str) -> list[str]:
    """What it prints, in a process of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU") and key != isa.VARIABLE}
    given = {**kept, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.skipif(not (machine.is_x86() or machine.is_arm()), reason="the expectations are those of x86-64 and Arm")
@pytest.mark.parametrize(
    ("env", "x86", "arm"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, ["portable"], ["neon", "portable"]),
        ({"NUMBA_CPU_FEATURES": "+avx2,+fma,-neon", "NUMBA_CPU_NAME": "generic"}, ["avx2", "portable"], ["portable"]),
    ],
)
def test_available_follows_llvm_variables(env: dict[str, str], x86: list[str], arm: list[str]) -> None:
    usable = [name for name in (x86 if machine.is_x86() else arm) if name in isa.available()]
    assert run(DOT, **env) == [usable[0], *usable]


@pytest.mark.parametrize("name", isa.available())
def test_available_sets_compile_and_compute_dot_products(name: str) -> None:
    assert run(DOT, **{isa.VARIABLE: name}) == [name, *isa.available()]


@pytest.mark.parametrize(
    ("cpu", "features", "believed"),
    [
        ("neoverse-n1", "", True),
        ("generic", "", False),
        ("generic", "+dotprod", True),
        ("cortex-a72", "+neon", False),
    ],
)
def test_llvm_believes_in_dot_products_by_name_or_feature(cpu: str, features: str, believed: bool) -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    arm = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    compiler = SimpleNamespace(
        magic_tuple=lambda: ("", cpu, features), _tm=arm.create_target_machine(cpu=cpu, features=features)
    )
    assert isa._llvm_believes("asimddp", compiler) is believed
    assert isa._llvm_believes("asimd", compiler)


def test_llvm_features_are_set_before_the_compiler_is_made() -> None:
    """The machine's name may not tell it; whatever part of the kernels comes first, this comes before."""
    code = """
from llm_worker_rbee import machine
machine.cpu_features = lambda: ["asimd", "asimddp"]
import llm_worker_rbee.backends.cpu
from numba.core.registry import cpu_target
print(cpu_target.target_context.codegen().magic_tuple()[2])
"""
    assert "+dotprod" in run(code)[0].split(",")


def test_available_without_numba_follows_the_machine() -> None:
    code = """
import sys
sys.modules["numba"] = None
from llm_worker_rbee import machine
from llm_worker_rbee.backends import isa
machine.cpu_features = lambda: ["avx2", "fma"]
print(*isa.available())
"""
    assert run(code) == ["avx2", "portable"]
