"""Compile the CPU kernels ahead of time: a shared library for each instruction set, into the package.

    python tools/build_kernels.py                       all instruction sets of this kind of machine
    python tools/build_kernels.py avx2 avx512_vnni      some of them; host: the best of this machine
    python tools/build_kernels.py --machine aarch64     those of the other kind; CC is its compiler
    python tools/build_kernels.py --list                what there is, and what it is compiled for
    python tools/build_kernels.py --wheel dist          build them, a pure wheel, and a wheel with the libraries

Needs Numba, Linux, and a C compiler (CC, or cc). The machine need not have the instruction sets, but Arm's dot products
are compiled on Arm only. A kernel's LLVM code is that of Numba; it becomes position-independent code that calls nothing
of Python or Numba, only libc and libm. A library that is there is not built again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

ROOT = Path(__file__).parents[1]
MACHINES = "x86_64", "aarch64"
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
# Its tiles are written in assembly, for which llvmlite has no parser on another kind of machine.
NATIVE_ONLY = ("neon_dotprod",)
ASSEMBLER_OPTIONS = {"x86_64": [], "aarch64": ["-march=armv8.6-a"]}  # all instructions of all sets
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


def machine_of(isa: str) -> str:
    """Return the kind of machine that has an instruction set."""
    return "aarch64" if isa.startswith("neon") else "x86_64"


def _use_target(isa: str) -> None:
    """Let Numba and the worker see a machine that has the instruction set and nothing more."""
    from llvmlite import binding

    from llm_worker_rbee import machine

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(f"{machine_of(isa)}-unknown-linux-gnu")
    binding.get_process_triple = lambda: target.triple
    binding.Target.from_default_triple = lambda: target  # type: ignore[method-assign]
    machine.cpu_features = lambda: _features_of(isa)
    machine.request_amx = lambda: True
    machine.is_x86 = lambda: machine_of(isa) == "x86_64"
    machine.is_arm = lambda: machine_of(isa) == "aarch64"


def build(isa: str, part: int, parts: int, folder: str, pattern: str) -> None:
    """Compile the share of a process: an assembly file for each kernel. Runs in a process of its own.

    The C compiler assembles it: for another kind of machine LLVM has no assembler here, which inline assembly needs.
    """
    _use_target(isa)
    from llm_worker_rbee.backends import kernel_library
    from llm_worker_rbee.backends.cpu import jit, precompile

    kernels = [kernel for kernel in precompile.all_kernels() if re.search(pattern, kernel.name)]
    target = jit.binding.Target.from_default_triple().create_target_machine(
        cpu=TARGETS[isa], features=_llvm_features_of(isa), opt=3, reloc="pic", codemodel="default"
    )
    for kernel in precompile.split_work(kernels, parts)[part]:
        name, code = jit.compiler.compile_llvm(kernel.function, kernel.signature)
        symbol = kernel_library.symbol_of(kernel.name)
        module = jit.binding.parse_assembly(code)
        for function in module.functions:
            if function.name == name:
                function.name = symbol
            elif not function.is_declaration:
                function.linkage = "internal"
        for variable in module.global_variables:
            if not variable.is_declaration:
                variable.linkage = "internal"
        Path(folder, f"{symbol}.s").write_text(target.emit_assembly(module))
    if part == 0:
        Path(folder, "runtime.s").write_text(target.emit_assembly(jit.binding.parse_assembly(runtime_ir())))


def _features_of(isa: str) -> list[str]:
    from llm_worker_rbee.backends.cpu_info import INSTRUCTION_SETS

    return sorted(INSTRUCTION_SETS[isa].features | (set() if isa.startswith("neon") else {"f16c"}))


def _llvm_features_of(isa: str) -> str:
    from llm_worker_rbee.backends.cpu_info import LLVM_NAMES

    return ",".join(f"+{LLVM_NAMES.get(name, name)}" for name in _features_of(isa) if name != "asimd")


def _linker(isa: str) -> str:
    """Return the C compiler that links a library: the machine's own, or a cross compiler."""
    is_own = platform.machine() == machine_of(isa)
    return os.environ.get("CC") or ("cc" if is_own else f"{machine_of(isa)}-linux-gnu-gcc")


def link(isa: str, processes: int, parent: Path | None, pattern: str) -> Path:
    """Compile in several processes and link the library of an instruction set; return its path."""
    from llm_worker_rbee.backends import kernel_library

    out = (parent or kernel_library.FOLDER) / kernel_library.library_name(isa, machine_of(isa))
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "LLM_WORKER_PREBUILT": "0",
            "LLM_WORKER_CPU_ISA": isa,
            "NUMBA_CPU_NAME": TARGETS[isa],
            "NUMBA_CPU_FEATURES": _llvm_features_of(isa),
        }

        def run(part: int) -> None:
            command = [sys.executable, __file__, "--part", str(part), str(processes), folder, "--only", pattern, isa]
            subprocess.run(command, env=env, check=True)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(run, range(processes)))
        files = sorted(map(str, Path(folder).glob("*.s")))
        temporary = out.with_suffix(".tmp")
        options = [*ASSEMBLER_OPTIONS[machine_of(isa)], "-shared", "-Wl,--strip-all,--no-undefined"]
        subprocess.run([_linker(isa), *options, "-o", str(temporary), *files, "-lm"], check=True)
        temporary.replace(out)
    for stale in out.parent.glob(f"{isa}-{machine_of(isa)}-*.so"):  # of other sources
        if stale != out:
            stale.unlink()
    return out


def platform_tag(libraries: Sequence[Path], machine: str) -> str:
    """Return the platform of a wheel: the oldest glibc that has all symbols of the libraries."""
    versions = {int(number) for path in libraries for number in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
    return f"manylinux_2_{max(versions)}_{machine}"


def pack_wheel(pure: Path, libraries: Sequence[Path], machine: str) -> Path:
    """Write the wheel with libraries beside the pure one, with the same metadata; return its path."""
    tag = f"py3-none-{platform_tag(libraries, machine)}"
    packed = pure.with_name(pure.name.replace("py3-none-any", tag))
    rows: list[str] = []
    with ZipFile(pure) as source, ZipFile(packed, "w", ZIP_DEFLATED, compresslevel=9) as target:

        def add(name: str, data: bytes) -> None:
            target.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}\n")

        record = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        for name in source.namelist():
            data = source.read(name)
            if name.endswith(".dist-info/WHEEL"):
                data = data.replace(b"Tag: py3-none-any", f"Tag: {tag}".encode())
                data = data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
            if name != record:
                add(name, data)
        for path in libraries:
            add(f"llm_worker_rbee/backends/cpu/prebuilt/{path.name}", path.read_bytes())
        target.writestr(record, "".join(rows) + f"{record},,\n")
    return packed


def build_pure_wheel(folder: Path) -> Path:
    """Build the wheel without libraries; return its path."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return max(folder.glob("llm_worker_rbee-*-py3-none-any.whl"), key=lambda path: path.stat().st_mtime)


def parse_options() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("isa", nargs="*", help="instruction sets, or host (default: all of the machine)")
    parser.add_argument("--machine", choices=MACHINES, default=platform.machine(), help="(default: this one)")
    parser.add_argument("--list", action="store_true", help="show the instruction sets, and what they are compiled for")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: into the package)")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels whose names match, to try something")
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="write a pure wheel and one with the libraries")
    parser.add_argument("--pure", action="store_true", help="with --wheel: the pure one alone")
    parser.add_argument("--part", nargs=3, metavar=("PART", "PARTS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.isa == ["host"]:
        from llm_worker_rbee.backends import cpu_info

        options.isa = [isa for isa in cpu_info.available_isas() if isa in TARGETS][:1]
        if not options.isa:
            parser.error("this machine has no instruction set that libraries are for (--list)")
    unknown = set(options.isa) - TARGETS.keys()
    if unknown:
        parser.error(f"unknown instruction set {min(unknown)!r}: use some of {', '.join(TARGETS)}, or host")
    options.isa = options.isa or [isa for isa in TARGETS if machine_of(isa) == options.machine]
    for isa in [isa for isa in options.isa if isa in NATIVE_ONLY and machine_of(isa) != platform.machine()]:
        options.isa.remove(isa)
        print(f"{isa} is left out: it can be built on {machine_of(isa)} only", file=sys.stderr)
    if len({*map(machine_of, options.isa)}) > 1:
        parser.error("instruction sets of two kinds of machines: build them one after the other")
    return options


def main() -> None:
    """Build the libraries that are named."""
    sys.path.insert(0, str(ROOT))
    options = parse_options()
    if options.list:
        print("\n".join(f"{isa:14}{cpu}" for isa, cpu in TARGETS.items()))
        return
    if options.part:
        build(options.isa[0], int(options.part[0]), int(options.part[1]), options.part[2], options.only)
        return
    libraries = []
    for isa in [] if options.pure else options.isa:
        start = time.perf_counter()
        libraries.append(link(isa, options.jobs, options.out, options.only))
        print(f"{libraries[-1]}: {libraries[-1].stat().st_size / 1e6:.1f} MB, {time.perf_counter() - start:.0f} s")
    if options.wheel:
        wheels = [build_pure_wheel(options.wheel)]
        wheels += [pack_wheel(wheels[0], libraries, machine_of(options.isa[0]))] if libraries else []
        print(*(f"{path}: {path.stat().st_size / 1e6:.1f} MB" for path in wheels), sep="\n")


if __name__ == "__main__":
    main()
