"""Machine code of kernels on disk, never run stale.

Numba's disk cache sees neither an edit in another file nor a changed global. So the folder is keyed by everything that
the machine code depends on: all files of this folder, the instruction set, the processor, and the versions of Numba,
LLVM and Python.

One file per kernel: a SHA-256 and the pickled code, written elsewhere and moved there, so processes that compile
at once never see half a file, and a damaged one is compiled anew. (Numba's own cache has an index that two processes
can spoil for each other, and trusts what it reads.) A folder that cannot be written, or a full disk, costs time only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba as nb
from llvmlite import binding
from numba.core import compiler, serialize
from numba.core.runtime import nrt

from ...weights.quants import codebooks
from .. import cpu_info
from ..kernel_folder import CACHE_VARIABLE, open_cache_dir

SOURCES = Path(__file__).parent
DIGEST_BYTES = 32  # before the code
_dumps: Any = serialize.dumps
logger = logging.getLogger(__name__)


def fingerprint() -> str:
    """Return a hash of everything that the machine code depends on."""
    digest = hashlib.sha256()
    others = (Path(str(module.__file__)) for module in (cpu_info, codebooks))  # sources of kernels outside this folder
    for path in [*others, *sorted(SOURCES.rglob("*.py"))]:
        digest.update(path.name.encode() + path.read_bytes())
    versions = nb.__version__, llvmlite.__version__, sys.version_info[:2]  # the code is pickled
    digest.update(repr((cpu_info.current_isa(), *versions, binding.get_host_cpu_name())).encode())
    return digest.hexdigest()[:16]


@cache
def _digest_outside(filename: str) -> str:
    """Return a hash of a kernel's source file, nothing for the files that the fingerprint has."""
    path = Path(filename)
    is_inside = path.is_relative_to(SOURCES) or not path.is_file()
    return "" if is_inside else hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def cache_dir() -> Path | None:
    """Return the folder of this version's machine code; None: nothing can be cached."""
    return open_cache_dir(fingerprint())


@cache
def _warn_once(folder: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so the next start compiles them again: free some space, or set "
        "%s to another folder",
        folder,
        reason,
        CACHE_VARIABLE,
    )


class KernelCache:
    """The cached machine code of one function: Numba's interface of a dispatcher's cache.

    The folder is opened when it is needed: importing kernels changes nothing on disk.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    @property
    def cache_path(self) -> str:
        return str(cache_dir())

    def entry(self, signature: Any, codegen: Any) -> Path | None:
        """Return the file of this signature's code."""
        folder = cache_dir()
        if folder is None:
            return None
        name = f"{self.function.__module__.rpartition('.')[2]}.{self.function.__qualname__}"
        code = self.function.__code__
        key = (name, str(signature), codegen.magic_tuple(), code.co_code, _digest_outside(code.co_filename))
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return folder / f"{re.sub('[^A-Za-z0-9._-]+', '-', name)[:80]}-{digest}"

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the code, ready to run, or None if it must be compiled.

        Numba would first load everything it can compile (a quarter of a second, more with SciPy installed); cached code
        needs its memory manager only.
        """
        nrt.rtsys.initialize(context)
        file = self.entry(signature, context.codegen())
        try:
            data = b"" if file is None else file.read_bytes()
        except OSError:
            return None
        if len(data) <= DIGEST_BYTES or hashlib.sha256(data[DIGEST_BYTES:]).digest() != data[:DIGEST_BYTES]:
            return None
        return CachedKernel(*pickle.loads(data[DIGEST_BYTES:])).load(context)

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Write compiled code; a full disk only warns."""
        file = self.entry(signature, compiled.codegen)
        if file is None or compiled.lifted or compiled.library.has_dynamic_globals:
            return
        code = _dumps(tuple(CachedKernel.of(compiled)))
        try:
            _write(file, hashlib.sha256(code).digest() + code)
        except OSError as error:
            _warn_once(file.parent, error.strerror or str(error))

    def enable(self) -> None: ...
    def disable(self) -> None: ...
    def flush(self) -> None: ...


class CachedKernel(NamedTuple):
    """The stored form of a compiled kernel: Numba's own description without LLVM code, which only its callers need."""

    name: str  # of its library
    symbols: frozenset[str]  # the functions that its machine code defines
    machine_code: bytes
    description: Any
    environment: Any
    signature: Any
    on_load: Any  # functions to call before
    environments: Any  # of functions inside it that use Python objects

    @classmethod
    def of(cls, compiled: Any) -> CachedKernel:
        """Describe the result of compiling a kernel."""
        library, description, environment, signature, *_, on_load, environments = compiled._reduce()
        name, _, (machine_code, _) = library
        named = description.llvm_func_name, description.llvm_cpython_wrapper_name, description.llvm_cfunc_wrapper_name
        symbols = frozenset(filter(compiled.codegen._engine.is_symbol_defined, named))
        used = tuple(item for item in environments if item.consts)  # to restore one imports the module of its function
        return cls(name, symbols, machine_code, description, environment, signature, on_load, used)

    def load(self, context: Any) -> Any:
        """Return that result again, its machine code in memory."""
        for function in self.on_load:
            function()
        library = context.codegen().create_library(self.name)
        library.enable_object_caching()
        library._set_compiled_object(self.machine_code)
        library._finalize_final_module()
        library.codegen._engine._defined_symbols |= self.symbols
        entry_point = context.get_executable(library, self.description, self.environment)
        for environment in self.environments:
            library.codegen.set_env(environment.env_name, environment)
        compile_result: Any = compiler.compile_result
        result: Any = compile_result(
            target_context=context,
            typing_context=context.typing_context,
            library=library,
            entry_point=entry_point,
            environment=self.environment,
            fndesc=self.description,
            signature=self.signature,
            objectmode=False,
            lifted=(),
            reload_init=self.on_load,
            referenced_envs=self.environments,
        )
        return result


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_bytes(data)
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
