"""Compiling before use: `recording` collects the kernel variants that steps launch, `compile_variants` compiles them.

Triton compiles a variant of a kernel (types and alignment of arguments, constants, options) when it is first launched,
one at a time. Here several processes compile into Triton's cache on disk, under the key that a launch looks up, and the
next launch loads the machine code. The compiler process is spawned, imports the kernels once, and forks a process for
each variant; none of them uses the GPU. What they cannot compile is left to the first launch.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import pickle
import re
import select
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NoReturn, cast

import triton
from torch.overrides import TorchFunctionMode
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia_driver
from triton.compiler import ASTSource, get_cache_key, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import KernelInterface

from ... import machine
from ...pipe_process import READ_BYTES, PipeProcess, ProgramError, describe_exit, package_command
from .. import kernel_folder
from ..ops import COMPILING, Progress
from .device import is_interpreted

SOURCES = Path(__file__).parent / "kernels"
TRITON_CACHE_VARIABLE = "TRITON_CACHE_DIR"
BYTES_PER_PROCESS = 512 << 20  # of memory that compiling a variant may take
MAX_COMPILE_S = 1e6  # of one kernel: without a bound
MAX_IDLE_S = 600.0  # that a compiler process which was started early waits for work
MAX_NAME_CHARS = 150  # of a kernel in the cache: Triton cuts longer names
MAX_ERROR_CHARS = 1000  # a report is shorter than what a pipe takes at once
# These take longest to compile; they come first, so that no process is left with one of them at the end.
SLOW_KERNELS = (
    "gemv_dense gemv_packed sample_rows decode_attention_gqa prefill_attention decode_attention gemm_hopper gemm_packed"
)
CUBLAS_PRODUCTS = {"mm", "addmm", "matmul", "__matmul__", "linear", "_scaled_mm"}  # names of PyTorch's functions
COMPILER = f"from {__name__} import run_compiler; run_compiler()"
logger = logging.getLogger(__name__)
_recording_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """All that the machine code of a kernel is made from; it can be sent to another process."""

    module: str
    name: str
    signature: dict[str, str]  # type of each parameter
    constants: dict[tuple[int, ...], Any]  # by index of the parameter
    attributes: dict[tuple[int, ...], Any]  # what is known of a value: divisibility
    options: dict[str, Any]
    target: tuple[str, int, int]  # fields of GPUTarget

    @property
    def source(self) -> Any:
        kernel = getattr(importlib.import_module(self.module), self.name)
        source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        return source(kernel, self.signature, self.constants, self.attributes)

    def compile(self) -> Any:
        """Return the compiled kernel, from the cache or compiled into it."""
        return triton.compile(self.source, target=GPUTarget(*self.target), options=self.options)

    @property
    def is_cached(self) -> bool:
        """Whether Triton's cache on disk has the machine code, under the key that a launch looks up."""
        source, backend = self.source, make_backend(GPUTarget(*self.target))
        options = backend.parse_options(self.options)
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return manager.get_group(f"{source.name[:MAX_NAME_CHARS]}.json") is not None


@contextmanager
def recording() -> Iterator[list[KernelVariant]]:
    """Launch nothing in this thread, and collect the variants that would have to be compiled.

    Variants in the cache on disk are loaded. PyTorch's own operations run as usual, on memory that no kernel has
    written. Under the interpreter, where nothing is compiled, kernels run and the list stays empty.
    """
    variants: list[KernelVariant] = []
    if is_interpreted():
        yield variants
        return
    thread, keys = threading.get_ident(), set[tuple[str, str]]()

    def record(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        if (fn.name, key) not in keys:
            variant = _variant_of(fn, compile)
            if variant.is_cached:
                return False
            keys.add((fn.name, key))
            variants.append(variant)
        return True  # neither compiled nor launched

    with _replaced_launches(lambda kernel, grid: partial(kernel.run, grid=grid, warmup=True)):
        hook = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = record
        try:
            yield variants
        finally:
            triton.knobs.runtime.jit_cache_hook = hook


@contextmanager
def _replaced_launches(bind: Callable[[Any, Any], Callable[..., Any]]) -> Iterator[None]:
    """Let this thread call `bind(kernel, grid)` in the place of every `kernel[grid]`."""
    thread, interface = threading.get_ident(), cast(Any, KernelInterface)
    with _recording_lock:
        usual = interface.__getitem__
        interface.__getitem__ = lambda *launch: (bind if threading.get_ident() == thread else usual)(*launch)
        try:
            yield
        finally:
            interface.__getitem__ = usual


class _NotingProducts(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in CUBLAS_PRODUCTS:
            self._note("cublas")
        return function(*args, **(kwargs or {}))


@contextmanager
def noting_launches(note: Callable[[str], None]) -> Iterator[None]:
    """Launch nothing in this thread, and call `note` with the name of each kernel, "cublas" for a product of PyTorch,
    which does run."""
    with _replaced_launches(lambda kernel, grid: lambda *_, **__: note(kernel.__name__)), _NotingProducts(note):
        yield


def _variant_of(fn: Any, compile: dict[str, Any]) -> KernelVariant:
    """Return the variant that Triton's hook describes: its options are written as JSON only."""
    options = {name: _as_tuple(value) for name, value in json.loads(compile["specialization_data"])["options"].items()}
    target = fn.jit_function.device_caches[compile["device"]][2]
    code = compile["signature"], compile["constants"], compile["configs"][0], options
    return KernelVariant(fn.module, fn.name, *code, (target.backend, target.arch, target.warp_size))


def _as_tuple(value: Any) -> Any:
    """Convert lists from JSON back to tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def compile_variants(variants: Sequence[KernelVariant], progress: Progress | None = None) -> int:
    """Compile into the cache on disk, in several processes; return how many were compiled.

    The others are named in the log. A launch compiles them in this process, and raises if that fails too.
    """
    if not variants:
        stop_compiler()
        return 0
    report = progress or (lambda what, done, total: None)
    report(COMPILING, 0, len(variants))
    ordered = sorted(variants, key=lambda item: _cost_rank(item.name))
    failed, finished = 0, 0
    try:
        compiler = _take_compiler()
    except OSError as error:  # no more processes may be started
        logger.warning("kernels are compiled one at a time: no process can be started (%s)", error.strerror or error)
        return 0
    with closing(compiler):
        for variant, reason in compiler.compile(ordered, _num_processes(len(ordered))):
            finished += 1
            if reason is not None:
                failed += 1
                logger.warning("kernel %s was not compiled ahead of time: %s", variant.name, reason)
            report(COMPILING, finished, len(variants))
    return finished - failed


def _cost_rank(name: str) -> int:
    names = SLOW_KERNELS.split()
    return names.index(name) if name in names else len(names)


def _num_processes(count: int) -> int:
    """Return how many variants are compiled at a time: by cores and memory that this process may use."""
    cores = min(machine.usable_cores(), ceil(machine.cpu_quota() or machine.usable_cores()))
    available = machine.memory()[1]
    limit, used = machine.memory_limit()
    free = min(
        [size for size in (available, None if limit is None else limit - used) if size is not None], default=None
    )
    by_memory = cores if free is None else free // BYTES_PER_PROCESS
    return max(1, min(count, cores, by_memory))


class CompilerProcess:
    """A process that imports the kernels and waits for variants to compile. It ends with this one."""

    def __init__(self) -> None:
        environment = {TRITON_CACHE_VARIABLE: triton.knobs.cache.dir, "CUDA_VISIBLE_DEVICES": ""}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = PipeProcess(package_command(COMPILER), environment, self._errors)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def compile(self, variants: Sequence[KernelVariant], processes: int) -> Iterator[tuple[KernelVariant, str | None]]:
        """Yield each variant when it is compiled, or with the reason why it is not. Only once."""
        waiting, request = dict(enumerate(variants)), [pickle.dumps((processes, list(variants)))]
        try:
            while waiting:
                line = self._process.ask(request, lambda end: self._process.read_line(end, READ_BYTES), MAX_COMPILE_S)
                index, error = json.loads(line)
                yield waiting.pop(index), error
                request = []
        except ProgramError as error:
            reason = f"the compiler process {error}{self._last_error()}"
            yield from ((variant, reason) for variant in waiting.values())

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def close(self) -> None:
        """End it with all that it has started."""
        self._process.kill()
        self._process.stop()
        self._errors.close()


_compiler_lock = threading.Lock()
_early_compiler: CompilerProcess | None = None


def start_compiler() -> None:
    """Start the compiler process early, where nothing is compiled yet: it imports while weights are loaded."""
    global _early_compiler
    is_new = not any(Path(triton.knobs.cache.dir).glob("*/*.cubin"))
    with _compiler_lock, suppress(OSError):
        if is_new and not is_interpreted() and _early_compiler is None:
            _early_compiler = CompilerProcess()


def stop_compiler() -> None:
    """End the compiler process that was started early, if it was not used."""
    global _early_compiler
    with _compiler_lock:
        compiler, _early_compiler = _early_compiler, None
    if compiler is not None:
        compiler.close()


def _take_compiler() -> CompilerProcess:
    """Return the compiler process that was started early, if it still runs, or a new one."""
    global _early_compiler
    with _compiler_lock:
        compiler = _early_compiler
        if compiler is not None and compiler.is_alive:
            _early_compiler = None
            return compiler
    stop_compiler()
    return CompilerProcess()


def run_compiler() -> None:
    """Compile the variants that standard input gives, each in a forked process: what `CompilerProcess` runs."""
    reports = os.dup(1)  # tools that a compilation starts do not inherit it
    os.dup2(2, 1)
    triton_key()  # a hash of the whole compiler, which forked processes share
    hash_kernels()
    if not select.select([sys.stdin], [], [], MAX_IDLE_S)[0]:
        return
    processes, variants = pickle.load(sys.stdin.buffer)
    waiting, running = deque(enumerate(variants)), dict[int, int]()
    while waiting or running:
        while waiting and len(running) < processes:
            index, variant = waiting.popleft()
            pid = os.fork()
            if pid == 0:
                _compile_and_exit(variant, index, reports)
            running[pid] = index
        pid, status = os.wait()
        index, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code <= 0:
            _report(reports, index, None if code == 0 else f"its process {describe_exit(code)}")


def _report(reports: int, index: int, error: str | None) -> None:
    os.write(reports, json.dumps((index, error)).encode() + b"\n")


def _compile_and_exit(variant: KernelVariant, index: int, reports: int) -> NoReturn:
    """Compile in a forked process, which ends here."""
    try:
        machine.exit_with_parent(os.getppid())
        _build_launcher(variant.compile())
    except BaseException as error:
        reason = error
        while reason.__cause__ is not None:  # Triton's own error quotes the source
            reason = reason.__cause__
        _report(reports, index, f"{type(reason).__name__}: {reason}"[:MAX_ERROR_CHARS])
        os._exit(1)
    os._exit(0)


def _build_launcher(compiled: Any) -> None:
    """Compile the C module through which Triton up to 3.6 launches kernels of this signature; newer ones have none."""
    if hasattr(nvidia_driver, "make_launcher"):
        with suppress(Exception):  # the first launch does it then
            nvidia_driver.CudaLauncher(compiled.src, compiled.metadata)


@dataclass(slots=True)
class Compilations:
    """Names of the kernels that were compiled, or found in the cache on disk, and of those loaded onto the device."""

    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Collect what is compiled or loaded in this process, by any thread: nothing, once a model is warmed up."""
    counts, runtime = Compilations(), triton.knobs.runtime
    hook = runtime.jit_post_compile_hook

    def on_compiled(**description: Any) -> Any:
        counts.compiled.append(description["fn"].name)
        return None if hook is None else hook(**description)

    def on_load(module: Any, function: Any, name: str, *_: Any) -> None:
        counts.loaded.append(name)

    runtime.jit_post_compile_hook = on_compiled
    runtime.kernel_load_start_hook.add(on_load)
    try:
        yield counts
    finally:
        runtime.jit_post_compile_hook = hook
        runtime.kernel_load_start_hook.remove(on_load)


def open_cache(capability: tuple[int, int]) -> Path | None:
    """Let Triton keep machine code in the folder of this version of the kernels; return it, None if it is temporary.

    The folder is named by the kernels' sources, Triton's version and the GPU's compute capability. A folder that
    TRITON_CACHE_DIR names is used as it is."""
    triton.knobs.compilation.store_binary_only = True  # the other stages would be read by each start
    hash_kernels()
    named = os.environ.get(TRITON_CACHE_VARIABLE)
    if named:
        return Path(named)
    folder = kernel_folder.open_cache_dir(fingerprint(capability), must_grow=True)
    if folder is None:
        return None
    triton.knobs.cache.dir = str(folder)
    return folder if folder.parent == kernel_folder.cache_root() else None


def fingerprint(capability: tuple[int, int]) -> str:
    """Return a hash of what the machine code depends on."""
    digest = hashlib.sha256(repr((triton.__version__, capability)).encode())
    for path in _kernel_sources():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _kernel_sources() -> list[Path]:
    return [path for path in sorted(SOURCES.glob("*.py")) if re.search(rb"@(triton|gluon)\.jit", path.read_bytes())]


def hash_kernels() -> None:
    """Let Triton hash all functions of kernels in one order. Up to version 3.6 a hash depends on which ones it calls
    were hashed before, and processes that hash in another order would not find each other's machine code."""
    for path in _kernel_sources():
        module = importlib.import_module(f"{__package__}.kernels.{path.stem}")
        for _, function in sorted(vars(module).items()):
            if isinstance(function, triton.JITFunction):
                function.cache_key  # noqa: B018
