"""The instruction set of CPU kernels (this machine's best, or the requested one) and the number of threads.

`LLM_WORKER_CPU_ISA` (set by `--cpu-isa`) forces another one, for tests; this machine must be able to run it. LLVM ends
the process over an instruction that is not among the machine's features as it detected them, so those count. On x86 it
reads them from the processor. On Arm it derives dot products and i8mm from the processor's name, which a virtual
machine may hide, so they are set. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES narrow them. Numba is imported by name, inside:
where the package has compiled kernels (kernel_library.py) it is not needed.

Threads are as many as the physical cores that this process may use, of the fast kind where there are two, and no more
than a container's quota, rounded; `LLM_WORKER_THREADS` sets another number where no option does. More than the cores
that it may run on, or than the quota, are refused: they would only wait for each other.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from functools import cache
from typing import Any, NamedTuple

from .. import machine
from ..errors import InvalidRequestError
from . import kernel_library

ISA_VARIABLE = "LLM_WORKER_CPU_ISA"
THREADS_VARIABLE = "LLM_WORKER_THREADS"
# LLVM's names of features, where /proc/cpuinfo has others
LLVM_NAMES = {
    "avx512_vnni": "avx512vnni",
    "avx_vnni": "avxvnni",
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "asimddp": "dotprod",
}
SET_FOR_LLVM = ("asimddp", "i8mm")  # LLVM knows them by the processor's name only
# A sum of products of bytes: LLVM emits `sdot` if the feature is on.
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
    """Required features, and the parameters of kernels that its dot product and its registers decide."""

    features: frozenset[str]
    weight_bias: int  # added to int8 weights: 128 for unsigned bytes, 0 for signed ones
    tile_tokens: int  # tokens of a tile of the matrix product: what the registers hold
    unpack_min_tokens: int = 0  # from how many tokens on weights are unpacked first (matmul/linear.py); 0: never
    # how far ahead weights are prefetched, of layouts without and with a minimum; 0: not at all
    prefetch_bytes: tuple[int, int] = (4096, 4096)
    attention_tile: tuple[int, int] = (2, 1)  # rows x vectors of 16 floats of prefill attention: what registers hold
    fma_by_lane: bool = False  # multiplies a vector by one lane of another: no broadcast is needed
    lane_activations: bool = False  # the dot product reads its activations from any lane of a register
    shift_insert: bool = False  # one instruction joins two bit planes (`sli`, `sri`)
    magic_sums: bool = False  # integer sums begin at the bits of a float (simd.MAGIC): conversions are slow


def _isa(weight_bias: int, tile_tokens: int, *features: str, **options: Any) -> InstructionSet:
    return InstructionSet(frozenset(features), weight_bias, tile_tokens, **options)


NEON: Any = {
    "prefetch_bytes": (0, 1024),
    "attention_tile": (4, 1),
    "fma_by_lane": True,
    "shift_insert": True,
    "magic_sums": True,
}
NEON_DOTPROD = _isa(0, 4, "asimd", "asimddp", unpack_min_tokens=8, lane_activations=True, **NEON)
AVX512 = "avx512f", "avx512bw", "avx512vl"
AVX512_VNNI = *AVX512, "avx512_vnni"
# best first
INSTRUCTION_SETS: dict[str, InstructionSet] = {
    "avx512_amx": _isa(128, 16, *AVX512_VNNI, "amx_tile", "amx_int8", unpack_min_tokens=16, attention_tile=(6, 4)),
    "avx512_vnni": _isa(128, 16, *AVX512_VNNI, attention_tile=(6, 4)),
    "avx512": _isa(0, 4, *AVX512, attention_tile=(6, 4)),
    "avx_vnni": _isa(128, 2, "avx2", "fma", "avx_vnni", attention_tile=(6, 1)),
    "avx2": _isa(0, 2, "avx2", "fma", attention_tile=(6, 1)),
    "neon_i8mm": NEON_DOTPROD._replace(features=NEON_DOTPROD.features | {"i8mm"}),
    "neon_dotprod": NEON_DOTPROD,
    "neon": _isa(0, 2, "asimd", **NEON),
    "portable": _isa(0, 2),
}


def available_isas() -> list[str]:
    """Return the instruction sets that this machine can run and whose kernels are or can be compiled, best first."""
    prebuilt = prebuilt_isas()
    have = llvm_features() if has_compiler() or not prebuilt else frozenset()
    return [name for name, isa in INSTRUCTION_SETS.items() if name in prebuilt or isa.features <= have]


@cache
def prebuilt_isas() -> tuple[str, ...]:
    """Return the instruction sets with compiled kernels in the package that this machine can run, best first."""
    have, needed = machine_features(), {"f16c"} if machine.is_x86() else set()  # which every processor with AVX2 has
    names = kernel_library.prebuilt_isas()
    return tuple(name for name, isa in INSTRUCTION_SETS.items() if name in names and (isa.features | needed) <= have)


def has_compiler() -> bool:
    """Return whether Numba is installed."""
    return all(importlib.util.find_spec(name) for name in ("numba", "llvmlite"))


def current_isa() -> str:
    """Return the instruction set in use: the requested one, or the best; one with compiled kernels if there is one."""
    requested, prebuilt = os.environ.get(ISA_VARIABLE), prebuilt_isas()
    if requested:
        return requested if requested in prebuilt else _validate_isa(requested)
    return prebuilt[0] if prebuilt else available_isas()[0]


def force_isa(name: str) -> None:
    """Use this instruction set from now on; raise if the kernels are loaded with another one."""
    _validate_isa(name)
    if f"{__package__}.cpu.jit" in sys.modules and current_isa() != name:
        problem = f"the kernels are loaded with {current_isa()!r} already, start a new process"
        raise InvalidRequestError(f"instruction set {name!r}: {problem}", "cpu_isa")
    os.environ[ISA_VARIABLE] = name


def _validate_isa(name: str) -> str:
    usable = available_isas()
    if name not in usable:
        problem = "not one that kernels can be compiled for here" if name in INSTRUCTION_SETS else "unknown"
        raise InvalidRequestError(f"instruction set {name!r} is {problem}: use one of {', '.join(usable)}", "cpu_isa")
    return name


@cache
def machine_features() -> frozenset[str]:
    """Return the `machine.cpu_features()` that the system grants."""
    have = machine.cpu_features()
    if "amx_int8" in have and not machine.request_amx():  # its instructions would end the process
        have = [name for name in have if not name.startswith("amx_")]
    return frozenset(have)


@cache
def llvm_features() -> frozenset[str]:
    """Return the `machine_features()` for which LLVM compiles; must run before Numba makes its compiler."""
    have = machine_features()
    config: Any
    try:
        config, codegen, registry = (
            importlib.import_module(f"numba.core.{name}") for name in ("config", "codegen", "registry")
        )
    except Exception:  # a broken installation may fail in any way
        return have
    features = [f"+{LLVM_NAMES.get(name, name)}" for name in SET_FOR_LLVM if name in have]
    if features and config.CPU_FEATURES is None:
        host = codegen.get_host_cpu_features()
        config.CPU_FEATURES = ",".join(filter(None, [host, *features]))  # no effect once something has been compiled
    return frozenset(name for name in have if _llvm_compiles(name, registry.cpu_target.target_context.codegen()))


def _llvm_compiles(name: str, compiler: Any) -> bool:
    features = compiler.magic_tuple()[2].split(",")
    if name == "asimd":  # every 64-bit Arm processor has it
        return "-neon" not in features
    if name == "asimddp":
        module = importlib.import_module("llvmlite.binding").parse_assembly(DOT_PRODUCT_IR)
        return "sdot" in compiler._tm.emit_assembly(module)
    return f"+{LLVM_NAMES.get(name, name)}" in features


class ThreadLimit(NamedTuple):
    """A number of threads and its reason."""

    threads: int
    reason: str


def _default_limits() -> list[ThreadLimit]:
    """Return the limits of the default, which a requested number does not have."""
    usable = machine.usable_cores()
    physical, fast = machine.usable_physical_cores() or usable, machine.usable_performance_cores()
    limits = [ThreadLimit(physical, _count(physical, "physical core") + _of(physical, usable, "logical one"))]
    if fast is not None:
        limits.append(ThreadLimit(fast, _count(fast, "performance core") + _of(fast, physical, "physical core")))
    quota = machine.cpu_quota()
    if quota is not None:  # half of a core's time is worth a thread
        limits.append(ThreadLimit(max(1, math.floor(quota + 0.5)), _quota_text(quota)))
    return limits


def _quota_text(quota: float) -> str:
    return f"a quota of {quota:g} {'core' if quota == 1 else 'cores'}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _of(number: int, all_of_them: int, what: str) -> str:
    return f" of {_count(all_of_them, what)}" if all_of_them > number else ""


def _request_limits() -> list[ThreadLimit]:
    """Return the bounds of a requested number, and of the default."""
    usable = machine.usable_cores()
    limits = [ThreadLimit(usable, f"{usable} cores that this process may run on")]
    quota = machine.cpu_quota()
    if quota is not None:
        limits.append(ThreadLimit(max(1, math.ceil(quota)), _quota_text(quota)))
    return limits


def choose_thread_count(requested: int | None = None) -> int:
    """Return the number of threads; raise with the reason if more are requested than can be used."""
    return explain_thread_count(requested).threads


def explain_thread_count(requested: int | None = None) -> ThreadLimit:
    """Return the number of threads with its reason."""
    limits = _request_limits()
    if requested is not None:
        return _validate_thread_count(requested, "threads", limits)
    variable = os.environ.get(THREADS_VARIABLE)
    if variable:
        if not (variable.isascii() and variable.isdigit() and len(variable) < 10):
            problem = f"{THREADS_VARIABLE} is {variable!r}: give a whole number of 1 or more"
            raise InvalidRequestError(problem, "threads")
        return _validate_thread_count(int(variable), THREADS_VARIABLE, limits)
    return min(_default_limits() + limits, key=lambda limit: limit.threads)


def share_cores(num_sharing: int) -> None:
    """Let the number of threads in this process be its share of the cores, unless the environment sets it."""
    if num_sharing > 1 and not os.environ.get(THREADS_VARIABLE):
        os.environ[THREADS_VARIABLE] = str(max(1, choose_thread_count() // num_sharing))


def _validate_thread_count(requested: int, name: str, limits: list[ThreadLimit]) -> ThreadLimit:
    if isinstance(requested, bool) or not isinstance(requested, int):
        raise InvalidRequestError(f"{name} is {requested!r}: it must be a whole number", "threads")
    highest = min(limits, key=lambda limit: limit.threads)
    if not 1 <= requested <= highest.threads:
        bounds_text = f"1 to {highest.threads}" if highest.threads > 1 else "1"
        raise InvalidRequestError(f"{name} is {requested}: it must be {bounds_text} ({highest.reason})", "threads")
    return ThreadLimit(requested, f"{name} is {requested}")
