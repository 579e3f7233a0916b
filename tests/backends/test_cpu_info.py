"""Instruction sets: none is offered that LLVM would end the process over. Threads: defaults, limits and variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from llvmlite import binding

from llm_worker_rbee import machine
from llm_worker_rbee.backends import cpu_info, kernel_library
from llm_worker_rbee.errors import InvalidRequestError

ROOT = Path(__file__).parents[2]
DOT = """
import numba, numpy as np
from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.backends.cpu.kernels.dot_int8 import ISA, WEIGHT_BIAS, dot_block
from llm_worker_rbee.backends.cpu.packed_weight import LAYOUT_BY_TYPE, LAYOUTS
from llm_worker_rbee.backends.cpu.kernels.simd import add_scaled_dot, finish_dot, init_dot, load
from llm_worker_rbee.backends.cpu.kernels.simd import store_tile, zero_floats

Q8_0 = LAYOUTS.index(LAYOUT_BY_TYPE["Q8_0"])
MAGIC_SUMS = cpu_info.INSTRUCTION_SETS[ISA].magic_sums

@numba.njit
def rows(weights, x, sums, one, scales, out):
    acc = dot_block(init_dot(1, MAGIC_SUMS, sums, 0, 0, WEIGHT_BIAS), Q8_0, 2, weights, 0, x, 0, 0)
    dot = finish_dot(acc, MAGIC_SUMS, sums, 0, 0, WEIGHT_BIAS)
    total = add_scaled_dot(zero_floats(1), dot, one, 0, 0, load(scales, 0))
    store_tile(out, 0, 0, total, np.float32(1))

rng, out = np.random.default_rng(1), np.empty(16, np.float32)
w, x = rng.integers(-127, 128, (8, 16, 4)), rng.integers(-127, 128, (8, 4))
ones = np.ones(16, np.float16).view(np.uint16)
stored = (w + WEIGHT_BIAS).astype(np.uint8).reshape(-1)
rows(stored, x.astype(np.int8).reshape(-1), np.array([x.sum()], np.int32), np.ones(1, np.float32), ones, out)
assert (out == (w * x[:, None]).sum((0, 2))).all(), out
print(ISA, *cpu_info.available_isas())
"""


def run(code: str, **env: str) -> list[str]:
    """Return the words that `code` prints in a process of its own, which compiles its kernels."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("NUMBA_CPU") and key != cpu_info.ISA_VARIABLE
    }
    given = {**kept, "PYTHONPATH": str(ROOT), kernel_library.PREBUILT_VARIABLE: "0", **env}
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
    usable = [name for name in (x86 if machine.is_x86() else arm) if name in cpu_info.available_isas()]
    assert run(DOT, **env) == [usable[0], *usable]


@pytest.mark.parametrize("name", cpu_info.available_isas())
def test_available_sets_compile_and_compute_dot_products(name: str) -> None:
    assert run(DOT, **{cpu_info.ISA_VARIABLE: name}) == [name, *cpu_info.available_isas()]


@pytest.mark.parametrize(
    ("cpu", "features", "expected"),
    [
        ("neoverse-n1", "", True),
        ("generic", "", False),
        ("generic", "+dotprod", True),
        ("cortex-a72", "+neon", False),
    ],
)
def test_llvm_compiles_dot_products_by_name_or_feature(cpu: str, features: str, expected: bool) -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    arm = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    compiler = SimpleNamespace(
        magic_tuple=lambda: ("", cpu, features), _tm=arm.create_target_machine(cpu=cpu, features=features)
    )
    assert cpu_info._llvm_compiles("asimddp", compiler) is expected
    assert cpu_info._llvm_compiles("asimd", compiler)


@pytest.mark.parametrize(
    ("features", "flags"),
    [(["asimd", "asimddp"], ["+dotprod"]), (["asimd", "asimddp", "i8mm", "bf16", "sve"], ["+dotprod", "+i8mm"])],
)
def test_llvm_features_are_set_before_the_compiler_is_made(features: list[str], flags: list[str]) -> None:
    """The processor's name may hide features; flags are set whatever part of the kernels is imported first."""
    code = f"""
from llm_worker_rbee import machine
machine.cpu_features = lambda: {features}
import llm_worker_rbee.backends.cpu
from numba.core.registry import cpu_target
print(cpu_target.target_context.codegen().magic_tuple()[2])
"""
    assert [flag for flag in run(code)[0].split(",") if flag in ("+dotprod", "+i8mm", "+bf16", "+sve2")] == flags


@pytest.mark.skipif(not machine.is_arm(), reason="compiles for this machine with another feature")
def test_products_of_many_tokens_use_matrix_instructions_where_they_are() -> None:
    """Compiled only: the test machine need not have the feature (tests/backends/cpu/test_emulated_arm.py runs it)."""
    code = """
from llm_worker_rbee import machine
machine.cpu_features = lambda: ["asimd", "asimddp", "i8mm"]
from numba import float32, int64, njit, uint8
from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.backends.cpu.jit import variant
from llm_worker_rbee.backends.cpu.kernels.dot_int8 import ISA, TILE_KERNELS
multiply = njit(variant(TILE_KERNELS[ISA].multiply, "test", SCALES_PER_BLOCK=1, HAS_MINIMUM=False))
weights, floats = uint8[::1], float32[::1]
multiply.compile((weights, int64, floats, floats, weights, int64, int64, floats, int64, int64))
(text,) = multiply.inspect_asm().values()
print(*cpu_info.available_isas(), "smmla" in text, "sdot" in text)
"""
    assert run(code) == ["neon_i8mm", "neon_dotprod", "neon", "portable", "True", "False"]


@pytest.mark.parametrize("granted", [True, False])
def test_amx_is_used_only_where_the_system_grants_it(monkeypatch: pytest.MonkeyPatch, granted: bool) -> None:
    features = [*cpu_info.AVX512_VNNI, "amx_tile", "amx_int8", "amx_bf16"]
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    monkeypatch.setattr(machine, "request_amx", lambda: granted)
    monkeypatch.setattr(cpu_info, "_llvm_compiles", lambda *_: True)
    monkeypatch.setattr(cpu_info, "machine_features", cpu_info.machine_features.__wrapped__)
    monkeypatch.setattr(cpu_info, "prebuilt_isas", lambda: ())
    have = cpu_info.llvm_features.__wrapped__()
    assert have == frozenset(features if granted else cpu_info.AVX512_VNNI)
    monkeypatch.setattr(cpu_info, "llvm_features", lambda: have)
    assert cpu_info.available_isas()[0] == ("avx512_amx" if granted else "avx512_vnni")


def test_amx_is_not_granted_where_the_processor_lacks_it() -> None:
    """A system that knows no AMX answers, and nothing ends the process; one that shows it may refuse it."""
    granted = machine.request_amx()
    assert isinstance(granted, bool)
    assert "amx_tile" in machine.cpu_features() or not granted


def test_available_without_numba_follows_the_machine() -> None:
    code = """
import sys
sys.modules["numba"] = None
from llm_worker_rbee import machine
from llm_worker_rbee.backends import cpu_info
machine.cpu_features = lambda: ["avx2", "fma"]
print(*cpu_info.available_isas())
"""
    assert run(code) == ["avx2", "portable"]


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return a machine of 8 physical cores of two threads each, without environment variables."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 16)
    monkeypatch.setattr(machine, "usable_physical_cores", lambda: 8)
    monkeypatch.setattr(machine, "usable_performance_cores", lambda: None)
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    monkeypatch.delenv(cpu_info.THREADS_VARIABLE, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("usable", "physical", "quota", "expected"),
    [
        (16, 8, None, 8),
        (4, 2, None, 2),
        (3, None, None, 3),
        (16, 8, 2.0, 2),
        (16, 8, 1.5, 2),
        (16, 8, 2.4, 2),
        (16, 8, 0.1, 1),
    ],
)
def test_thread_count_defaults_to_usable_physical_cores(
    eight_cores: pytest.MonkeyPatch, usable: int, physical: int | None, quota: float | None, expected: int
) -> None:
    eight_cores.setattr(machine, "usable_cores", lambda: usable)
    eight_cores.setattr(machine, "usable_physical_cores", lambda: physical)
    eight_cores.setattr(machine, "cpu_quota", lambda: quota)
    assert cpu_info.choose_thread_count() == expected


def test_thread_count_reasons_name_what_was_left_out(eight_cores: pytest.MonkeyPatch) -> None:
    assert cpu_info.explain_thread_count() == (8, "8 physical cores of 16 logical ones")
    eight_cores.setattr(machine, "usable_performance_cores", lambda: 3)
    assert cpu_info.explain_thread_count() == (3, "3 performance cores of 8 physical cores")
    assert cpu_info.choose_thread_count(8) == 8  # the slow ones may be requested
    eight_cores.setattr(machine, "cpu_quota", lambda: 1.0)
    assert cpu_info.explain_thread_count() == (1, "a quota of 1 core")
    eight_cores.setattr(machine, "cpu_quota", lambda: None)
    eight_cores.setattr(machine, "usable_cores", lambda: 1)
    eight_cores.setattr(machine, "usable_physical_cores", lambda: 1)
    eight_cores.setattr(machine, "usable_performance_cores", lambda: None)
    assert cpu_info.explain_thread_count() == (1, "1 physical core")


def test_thread_count_honours_option_and_variable_within_limits(eight_cores: pytest.MonkeyPatch) -> None:
    assert cpu_info.choose_thread_count(16) == 16  # logical cores may be requested
    with pytest.raises(InvalidRequestError, match=r"^threads is 17: it must be 1 to 16 \(16 cores that"):
        cpu_info.choose_thread_count(17)
    eight_cores.setenv(cpu_info.THREADS_VARIABLE, "5")
    assert (cpu_info.choose_thread_count(), cpu_info.choose_thread_count(3)) == (5, 3)
    eight_cores.setenv(cpu_info.THREADS_VARIABLE, "many")
    with pytest.raises(InvalidRequestError, match=r"^LLM_WORKER_THREADS is 'many'"):
        cpu_info.choose_thread_count()
    eight_cores.setenv(cpu_info.THREADS_VARIABLE, "0")
    with pytest.raises(InvalidRequestError, match=r"^LLM_WORKER_THREADS is 0: it must be 1 to 16"):
        cpu_info.choose_thread_count()
    eight_cores.setattr(machine, "cpu_quota", lambda: 2.5)
    with pytest.raises(InvalidRequestError, match=r"it must be 1 to 3 \(a quota of 2.5 cores\)"):
        cpu_info.choose_thread_count(4)
    assert cpu_info.explain_thread_count(1).reason == "threads is 1"


def test_usable_physical_cores_follow_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0,4\n", 1: "1,5\n", 4: "0,4\n", 5: "1,5\n", 2: "2,6\n"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    monkeypatch.setattr(machine, "_read", lambda path: siblings[int(str(path).split("/cpu")[2].split("/")[0])])
    assert machine.usable_physical_cores() == 2
