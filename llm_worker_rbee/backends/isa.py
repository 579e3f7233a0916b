"""Which instruction set the kernels use: the best that this machine has, or the one that was asked for.

`LLM_WORKER_CPU_ISA` (the option `--cpu-isa` sets it) forces another, for tests; it must be one that can run here.

What LLVM takes this machine for. An instruction that it believes the machine lacks makes it end the process.

On x86 it asks the processor. On Arm it knows dot products by the processor's name alone, and not every name (a virtual
machine may hide it), so it is told. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES narrow its view. Numba is imported by name,
when asked: where it is missing there are no kernels, and what the machine has is what there is.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from typing import Any, NamedTuple

from .. import machine
from ..errors import InvalidRequestError

VARIABLE = "LLM_WORKER_CPU_ISA"


class InstructionSet(NamedTuple):
    """What a machine must have, and how its dot product wants eight-bit weights."""

    needs: frozenset[str]
    bias: int  # 128: as unsigned bytes; 0: signed
    tokens: int  # how many tokens a tile of the matrix product has: what the registers hold


def _set(bias: int, tokens: int, *needs: str) -> InstructionSet:
    return InstructionSet(frozenset(needs), bias, tokens)


# best first
TABLE: dict[str, InstructionSet] = {
    "avx512_vnni": _set(128, 16, "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    "avx_vnni": _set(128, 2, "avx2", "fma", "avx_vnni"),
    "avx2": _set(0, 2, "avx2", "fma"),
    "neon_dotprod": _set(0, 4, "asimd", "asimddp"),
    "neon": _set(0, 2, "asimd"),
    "portable": _set(0, 2),
}


def available() -> list[str]:
    """Those that this machine can run, and kernels can be compiled for, best first."""
    have = features()
    return [name for name, one in TABLE.items() if one.needs <= have]


def current() -> str:
    """The one in use."""
    asked = os.environ.get(VARIABLE)
    return _checked(asked) if asked else available()[0]


def force(name: str) -> None:
    """Use this one from now on; once the kernels are loaded, they are what they are."""
    _checked(name)
    if f"{__package__}.cpu.jit" in sys.modules and current() != name:
        told = f"instruction set {name!r}: the kernels are loaded with {current()!r} already, start a new process"
        raise InvalidRequestError(told, "cpu_isa")
    os.environ[VARIABLE] = name


def _checked(name: str) -> str:
    usable = available()
    if name not in usable:
        known = "not one that kernels can be compiled for here" if name in TABLE else "unknown"
        raise InvalidRequestError(f"instruction set {name!r} is {known}: use one of {', '.join(usable)}", "cpu_isa")
    return name


# as LLVM writes them, where that is not as /proc/cpuinfo does
LLVM_NAMES = {"avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni", "asimddp": "dotprod"}
MODULES = ("config", "codegen", "registry")  # of Numba
# A sum of products of bytes: LLVM uses `sdot` where it may, and other instructions where not.
PROBE = """
define i32 @probe(<16 x i8> %x, <16 x i8> %y) {
  %a = sext <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %c = mul <16 x i32> %a, %b
  %d = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %c)
  ret i32 %d
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


@cache
def features() -> frozenset[str]:
    """Those of `machine.cpu_features()` that kernels can be compiled for."""
    have = machine.cpu_features()
    config: Any
    try:
        config, codegen, registry = (importlib.import_module(f"numba.core.{name}") for name in MODULES)
    except Exception:  # a broken installation may fail in any way
        return frozenset(have)
    if "asimddp" in have and config.CPU_FEATURES is None:
        known = codegen.get_host_cpu_features()
        config.CPU_FEATURES = f"{known},+dotprod".lstrip(",")  # of no effect once somebody has compiled something
    return frozenset(name for name in have if _believed(name, registry.cpu_target.target_context.codegen()))


def _believed(name: str, compiler: Any) -> bool:
    told = compiler.magic_tuple()[2].split(",")
    if name == "asimd":  # every 64-bit Arm processor has it
        return "-neon" not in told
    if name == "asimddp":
        module = importlib.import_module("llvmlite.binding").parse_assembly(PROBE)
        return "sdot" in compiler._tm.emit_assembly(module)
    return f"+{LLVM_NAMES.get(name, name)}" in told
