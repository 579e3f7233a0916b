"""Which instruction set the kernels use: the best that this machine and LLVM have, or the requested one.

`LLM_WORKER_CPU_ISA` (set by `--cpu-isa`) forces another one, for tests; this machine must be able to run it. LLVM ends
the process over an instruction that it believes the machine lacks, so its view is what counts. On x86 it asks the
processor. On Arm it knows dot products by the processor's name only, which a virtual machine may hide, so it is set.
NUMBA_CPU_NAME and NUMBA_CPU_FEATURES narrow its view. Numba is imported by name, inside: without it the machine's own
features are the answer.
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
# LLVM's names of features, where /proc/cpuinfo has others
LLVM_NAMES = {"avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni", "asimddp": "dotprod"}
# A sum of products of bytes: LLVM emits `sdot` if it believes in it.
DOT_PRODUCT_IR = """
define i32 @probe(<16 x i8> %x, <16 x i8> %y) {
  %a = sext <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %c = mul <16 x i32> %a, %b
  %d = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %c)
  ret i32 %d
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


class InstructionSet(NamedTuple):
    """Required features, and what its dot product and its registers want."""

    features: frozenset[str]
    weight_bias: int  # added to int8 weights: 128 for unsigned bytes, 0 for signed ones
    tile_tokens: int  # tokens of a tile of the matrix product: what the registers hold


def _isa(weight_bias: int, tile_tokens: int, *features: str) -> InstructionSet:
    return InstructionSet(frozenset(features), weight_bias, tile_tokens)


# best first
INSTRUCTION_SETS: dict[str, InstructionSet] = {
    "avx512_vnni": _isa(128, 16, "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    "avx_vnni": _isa(128, 2, "avx2", "fma", "avx_vnni"),
    "avx2": _isa(0, 2, "avx2", "fma"),
    "neon_dotprod": _isa(0, 4, "asimd", "asimddp"),
    "neon": _isa(0, 2, "asimd"),
    "portable": _isa(0, 2),
}


def available() -> list[str]:
    """Return the instruction sets that this machine can run and LLVM can compile for, best first."""
    have = llvm_features()
    return [name for name, isa in INSTRUCTION_SETS.items() if isa.features <= have]


def current() -> str:
    """Return the instruction set in use."""
    requested = os.environ.get(VARIABLE)
    return _validate(requested) if requested else available()[0]


def force(name: str) -> None:
    """Use this instruction set from now on; raise if the kernels are loaded with another one."""
    _validate(name)
    if f"{__package__}.cpu.jit" in sys.modules and current() != name:
        message = f"instruction set {name!r}: the kernels are loaded with {current()!r} already, start a new process"
        raise InvalidRequestError(message, "cpu_isa")
    os.environ[VARIABLE] = name


def _validate(name: str) -> str:
    usable = available()
    if name not in usable:
        problem = "not one that kernels can be compiled for here" if name in INSTRUCTION_SETS else "unknown"
        raise InvalidRequestError(f"instruction set {name!r} is {problem}: use one of {', '.join(usable)}", "cpu_isa")
    return name


@cache
def llvm_features() -> frozenset[str]:
    """Return those of `machine.cpu_features()` that LLVM compiles for; must run before Numba makes its compiler."""
    have = machine.cpu_features()
    config: Any
    try:
        config, codegen, registry = (
            importlib.import_module(f"numba.core.{name}") for name in ("config", "codegen", "registry")
        )
    except Exception:  # a broken installation may fail in any way
        return frozenset(have)
    if "asimddp" in have and config.CPU_FEATURES is None:
        known = codegen.get_host_cpu_features()
        config.CPU_FEATURES = f"{known},+dotprod".lstrip(",")  # no effect once something has been compiled
    return frozenset(name for name in have if _llvm_believes(name, registry.cpu_target.target_context.codegen()))


def _llvm_believes(name: str, compiler: Any) -> bool:
    features = compiler.magic_tuple()[2].split(",")
    if name == "asimd":  # every 64-bit Arm processor has it
        return "-neon" not in features
    if name == "asimddp":
        module = importlib.import_module("llvmlite.binding").parse_assembly(DOT_PRODUCT_IR)
        return "sdot" in compiler._tm.emit_assembly(module)
    return f"+{LLVM_NAMES.get(name, name)}" in features
