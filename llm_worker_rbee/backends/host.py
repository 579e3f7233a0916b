"""What LLVM takes this machine for. An instruction that it believes the machine lacks makes it end the process.

On x86 it asks the processor. On Arm it knows dot products by the processor's name alone, and not every name (a virtual
machine may hide it), so it is told. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES narrow its view. Numba is imported by name,
when asked: where it is missing there are no kernels, and what the machine has is what there is.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from .. import machine

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
