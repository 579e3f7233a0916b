"""Compile the CPU kernels ahead of time: a shared library for each instruction set, into the package.

    python tools/build_kernels.py                       all instruction sets of this kind of machine
    python tools/build_kernels.py avx2 avx512_vnni      some of them
    python tools/build_kernels.py --list                what there is, and what it is compiled for

Needs Numba and a C compiler as the linker (CC, or cc). The machine need not have the instruction sets. A kernel's LLVM
code is that of Numba; it becomes position-independent code that calls nothing of Python or Numba, only libc and libm.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The processor that LLVM compiles for: one of the first that had the instruction set.
TARGETS = {
    "avx512_amx": "sapphirerapids",
    "avx512_vnni": "cascadelake",
    "avx512": "skylake-avx512",
    "avx_vnni": "alderlake",
    "avx2": "haswell",
    "neon_i8mm": "generic",
    "neon_dotprod": "generic",
    "neon": "generic",
}
# Arrays that a kernel makes: Numba's header before the data, from malloc. Without memory the process ends, so the code
# that would raise for Python is never reached: its functions and exceptions are names only.
UNREACHED = (
    "NRT_Free PyBytes_FromStringAndSize PyErr_Clear PyErr_SetNone PyErr_SetString PyErr_WriteUnraisable "
    "PyUnicode_FromString Py_DecRef numba_do_raise numba_gil_ensure numba_gil_release "
    "numba_runtime_build_excinfo_struct numba_unpickle"
)
EXCEPTIONS = "PyExc_RuntimeError PyExc_StopIteration PyExc_SystemError"
RUNTIME_IR = """
declare i8* @malloc(i64)
declare void @free(i8*)
declare void @abort() noreturn
declare double @nextafter(double, double)
declare float @nextafterf(float, float)

define hidden i8* @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %extended = zext i32 %align to i64
  %more = add i64 %extended, 64
  %total = add i64 %size, %more
  %memory = call i8* @malloc(i64 %total)
  %failed = icmp eq i8* %memory, null
  br i1 %failed, label %end, label %use
end:
  call void @abort()
  unreachable
use:
  %start = ptrtoint i8* %memory to i64
  %behind = add i64 %start, 48
  %less = sub i64 %extended, 1
  %raised = add i64 %behind, %less
  %inverse = xor i64 %less, -1
  %data = and i64 %raised, %inverse
  %header = bitcast i8* %memory to i64*
  store i64 1, i64* %header
  %destructor = getelementptr i64, i64* %header, i64 1
  store i64 0, i64* %destructor
  %information = getelementptr i64, i64* %header, i64 2
  store i64 0, i64* %information
  %place = getelementptr i64, i64* %header, i64 3
  store i64 %data, i64* %place
  %bytes = getelementptr i64, i64* %header, i64 4
  store i64 %size, i64* %bytes
  %allocator = getelementptr i64, i64* %header, i64 5
  store i64 0, i64* %allocator
  ret i8* %memory
}

define hidden void @NRT_MemInfo_call_dtor(i8* %memory) {
  call void @free(i8* %memory)
  ret void
}

define hidden double @numba_nextafter(double %x, double %y) {
  %result = call double @nextafter(double %x, double %y)
  ret double %result
}

define hidden float @numba_nextafterf(float %x, float %y) {
  %result = call float @nextafterf(float %x, float %y)
  ret float %result
}
"""


def runtime_ir() -> str:
    """Return what the kernels of a library call besides libc and libm."""
    ends = [f"define hidden void @{name}() {{\n  call void @abort()\n  unreachable\n}}" for name in UNREACHED.split()]
    return "\n".join([RUNTIME_IR, *ends, *(f"@{name} = hidden global i8* null" for name in EXCEPTIONS.split())])


def is_of_this_machine(isa: str) -> bool:
    """Return whether an instruction set is one of this kind of processor."""
    return isa.startswith("neon") == (os.uname().machine in ("aarch64", "arm64"))


def build(isa: str, part: int, parts: int, folder: str, pattern: str) -> None:
    """Compile the share of a process: an object file for each kernel. Runs in a process of its own."""
    from llm_worker_rbee import machine

    machine.cpu_features = lambda: _features_of(isa)
    machine.request_amx = lambda: True
    from llm_worker_rbee.backends import kernel_library
    from llm_worker_rbee.backends.cpu import jit, precompile

    kernels = [kernel for kernel in precompile.all_kernels() if re.search(pattern, kernel.name)]
    kernels = sorted(kernels, key=lambda kernel: kernel.name)[part::parts]
    target = _target_machine(jit.binding, isa)
    for kernel in kernels:
        symbol = kernel_library.symbol_of(kernel.name)
        native = jit.compiler.compile_native(kernel.function, kernel.signature)
        module = jit.binding.parse_assembly(native._library.get_llvm_str())
        for function in module.functions:
            if function.name == native.native_name:
                function.name = symbol
            elif not function.is_declaration:
                function.linkage = "internal"
        for variable in module.global_variables:
            if not variable.is_declaration:
                variable.linkage = "internal"
        Path(folder, f"{symbol}.o").write_bytes(target.emit_object(module))
    if part == 0:
        Path(folder, "runtime.o").write_bytes(target.emit_object(jit.binding.parse_assembly(runtime_ir())))


def _features_of(isa: str) -> list[str]:
    from llm_worker_rbee.backends.cpu_info import INSTRUCTION_SETS

    return sorted(INSTRUCTION_SETS[isa].features | (set() if isa.startswith("neon") else {"f16c"}))


def _llvm_features_of(isa: str) -> str:
    from llm_worker_rbee.backends.cpu_info import LLVM_NAMES

    return ",".join(f"+{LLVM_NAMES.get(name, name)}" for name in _features_of(isa) if name != "asimd")


def _target_machine(binding: object, isa: str) -> object:
    return binding.Target.from_default_triple().create_target_machine(  # type: ignore[attr-defined]
        cpu=TARGETS[isa], features=_llvm_features_of(isa), opt=3, reloc="pic", codemodel="default"
    )


def link(isa: str, processes: int, parent: Path | None, pattern: str) -> Path:
    """Compile in several processes and link the library of an instruction set; return its path."""
    from llm_worker_rbee.backends import kernel_library

    out = (parent or kernel_library.FOLDER) / kernel_library.library_name(isa)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LLM_WORKER_PREBUILT": "0",
            "LLM_WORKER_CPU_ISA": isa,
            "LLM_WORKER_KERNEL_CACHE": str(Path(folder, "cache")),
            "NUMBA_CPU_NAME": TARGETS[isa],
            "NUMBA_CPU_FEATURES": _llvm_features_of(isa),
        }

        def run(part: int) -> None:
            command = [sys.executable, __file__, "--part", str(part), str(processes), folder, "--only", pattern, isa]
            subprocess.run(command, env=env, check=True)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(run, range(processes)))
        objects = sorted(map(str, Path(folder).glob("*.o")))
        temporary = out.with_suffix(".tmp")
        linker = [
            os.environ.get("CC", "cc"),
            "-shared",
            "-Wl,--strip-all,--no-undefined",
            "-o",
            str(temporary),
            *objects,
            "-lm",
        ]
        subprocess.run(linker, check=True)
        temporary.replace(out)
    return out


def main() -> None:
    """Build the libraries that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("isa", nargs="*", help="instruction sets (default: all of this kind of machine)")
    parser.add_argument("--list", action="store_true", help="show the instruction sets, and what they are compiled for")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: into the package)")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels whose names match, to try something")
    parser.add_argument("--part", nargs=3, metavar=("PART", "PARTS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{isa:14}{cpu}" for isa, cpu in TARGETS.items()))
        return
    unknown = set(options.isa) - TARGETS.keys()
    if unknown:
        parser.error(f"unknown instruction set {min(unknown)!r}: use some of {', '.join(TARGETS)}")
    if options.part:
        build(options.isa[0], int(options.part[0]), int(options.part[1]), options.part[2], options.only)
        return
    sys.path.insert(0, str(ROOT))
    for isa in options.isa or filter(is_of_this_machine, TARGETS):
        start = time.perf_counter()
        path = link(isa, options.jobs, options.out, options.only)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
