"""How kernels are compiled: once, kept on disk, and never run stale.

Numba's disk cache sees neither an edit in another file nor a changed global. So its folder is keyed by everything that
the machine code depends on: all files of this folder, the instruction set, the processor, and the versions of Numba,
LLVM and Python. A kernel is a template: the names in capitals that it uses are set for each variant (`variant`).

Machine code on disk: one file for each kernel, in a folder that is keyed by all that the code depends on.

A file is a SHA-256 and the pickled code; it is written beside its name and moved there, so processes that compile at
once never see half a file, and one that is damaged is compiled anew. Numba's own cache has an index for several
signatures, which two processes can spoil for each other, and believes what it reads. A folder that cannot be written,
or a full disk, costs time, not the answer.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba as nb
from llvmlite import binding
from numba.core import compiler, serialize
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import nrt

from ...weights.quants import codebooks
from .. import isa

isa.features()  # LLVM is told what the machine has before Numba makes its compiler
FOLDER = Path(__file__).parent


def fingerprint() -> str:
    """A hash of what the machine code depends on."""
    found = hashlib.sha256()
    others = (Path(str(module.__file__)) for module in (isa, codebooks))  # what kernels are made of, elsewhere
    for path in [*others, *sorted(FOLDER.glob("*.py"))]:
        found.update(path.name.encode() + path.read_bytes())
    versions = nb.__version__, llvmlite.__version__, sys.version_info[:2]  # what is kept is pickled
    about = (isa.current(), *versions, binding.get_host_cpu_name())
    found.update(repr(about).encode())
    return found.hexdigest()[:16]


@cache
def folder() -> Path | None:
    """Where the machine code of this very version is kept (py); None: nowhere."""
    return open_folder(fingerprint())


def _kept(dispatcher: Any) -> Any:
    dispatcher._cache = Kept(dispatcher.py_func, folder)
    return dispatcher


_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Any:
    """A function that kernels and Python call; compiled for the arguments that it meets."""
    return _kept(nb.njit(**_OPTIONS)(function))


def parallel(function: Callable[..., Any]) -> Any:
    """The same, with loops over `prange` that several threads share."""
    return _kept(nb.njit(parallel=True, **_OPTIONS)(function))


TASK = nb.void(nb.int64, nb.int64, nb.int64)


def variant(template: Any, name: str, **values: Any) -> FunctionType:
    """The function with its capitals set; `name` tells its machine code from that of other variants."""
    made = FunctionType(template.__code__, {**template.__globals__, **values}, template.__name__)
    made.__qualname__ = f"{template.__name__}[{name}]"
    made.__module__ = template.__module__
    return made


class Task:
    """A kernel that a program calls by its address (program.py): (arguments, step, piece), all of them integers."""

    def __init__(self, template: Any, name: str = "", **values: Any) -> None:
        self.name = f"{template.__module__.rsplit('.', 1)[-1]}.{template.__name__}" + (f"[{name}]" if name else "")
        self._function = variant(template, name, **values)
        self._made: Any = None

    @property
    def loaded(self) -> bool:
        """Whether its machine code is in memory."""
        return self._made is not None

    def load(self) -> None:
        """Take the machine code from the disk, or compile it and keep it there."""
        if self._made is None:
            self._made = self._prepared()

    @property
    def kept(self) -> bool:
        """Whether it need not be compiled: its machine code is on the disk, or in memory."""
        if self.loaded:
            return True
        file = Kept(self._function, folder).file(TASK, cpu_target.target_context.codegen())
        return file is not None and file.exists()

    def _prepared(self) -> Any:
        made: Any = CFunc(self._function, (TASK.args, TASK.return_type), locals={}, options={"error_model": "numpy"})
        made._cache = Kept(self._function, folder)
        made.compile()
        return made

    @property
    def address(self) -> int:
        """Where the machine code is."""
        self.load()
        return int(self._made.address)


class Called:
    """A kernel that Python calls with arguments of these types: what `Task` is for programs."""

    def __init__(self, dispatcher: Any, *types: Any) -> None:
        function = dispatcher.py_func
        self.name = f"{function.__module__.rsplit('.', 1)[-1]}.{function.__qualname__}{types}"
        self._dispatcher, self._types = dispatcher, types

    @property
    def loaded(self) -> bool:
        """Whether its machine code is in memory."""
        return self._types in self._dispatcher.overloads

    @property
    def kept(self) -> bool:
        """Whether it need not be compiled: its machine code is on the disk, or in memory."""
        file = self._dispatcher._cache.file(self._types, cpu_target.target_context.codegen())
        return self.loaded or (file is not None and file.exists())

    def load(self) -> None:
        """Take the machine code from the disk, or compile it and keep it there."""
        self._dispatcher.compile(self._types)


VARIABLE = "LLM_WORKER_KERNEL_CACHE"
FOLDERS_KEPT = 4  # the newest stay however old they are
UNUSED_DAYS = 30
DIGEST = 32  # bytes before the code
_rebuild: Any = compiler.CompileResult._rebuild
_dumps: Any = serialize.dumps
logger = logging.getLogger(__name__)


def place() -> Path | None:
    """The folder of all kernels: what the variable names, or a part of the user's cache; None without a home."""
    given, home = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given).absolute()
    try:
        base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "llm-worker-rbee" / "kernels"


def open_folder(fingerprint: str) -> Path | None:
    """Where the code of this fingerprint is kept; for this process alone, or nowhere, where that cannot be written.

    A folder that was filled beforehand, for an image say, is good enough if it can be read.
    """
    above = place()
    try:
        if above is None:
            raise OSError("there is no home folder")
        folder = above / fingerprint
        if folder.is_dir() and not os.access(folder, os.W_OK) and any(folder.iterdir()):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        os.utime(folder)  # when it was last used
        _remove_old(above)
        return folder
    except OSError as error:
        logger.warning(
            "compiled kernels cannot be kept in %s (%s), so each start compiles them: set %s to a folder that can be "
            "written to", above, error.strerror or error, VARIABLE,
        )  # fmt: skip
        return _passing_folder(fingerprint)


def _passing_folder(fingerprint: str) -> Path | None:
    """A folder that ends with this process."""
    try:
        above = Path(tempfile.mkdtemp(prefix="llm-worker-rbee-kernels-"))
        folder = above / fingerprint
        folder.mkdir()
    except OSError:
        return None
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a forked child
            shutil.rmtree(above, ignore_errors=True)

    atexit.register(remove)
    return folder


def _remove_old(above: Path) -> None:
    """Code of earlier versions: what nobody has used for long, but for the newest few."""
    with suppress(OSError):
        ours = [folder for folder in above.iterdir() if re.fullmatch("[0-9a-f]{16}", folder.name)]
        used = {folder: folder.stat().st_mtime for folder in ours}
        for folder in sorted(used, key=lambda one: used[one])[:-FOLDERS_KEPT]:
            if used[folder] < time.time() - UNUSED_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


@cache
def _tell_once(folder: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so the next start compiles them again: free some space, or set "
        "%s to another folder", folder, reason, VARIABLE,
    )  # fmt: skip


class Kept:
    """The machine code of one function, as Numba asks for it and gives it: a cache of its dispatcher."""

    def __init__(self, function: Any, folder: Callable[[], Path | None]) -> None:
        """`folder` is asked for when it is needed: importing kernels changes nothing on the disk."""
        self.function = function
        self.folder = folder

    @property
    def cache_path(self) -> str:
        """Numba's interface: the folder."""
        return str(self.folder())

    def file(self, signature: Any, codegen: Any) -> Path | None:
        """Where the code for this signature is kept."""
        folder = self.folder()
        if folder is None:
            return None
        name = f"{self.function.__module__.rpartition('.')[2]}.{self.function.__qualname__}"
        key = (name, str(signature), codegen.magic_tuple(), self.function.__code__.co_code)
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return folder / f"{re.sub('[^A-Za-z0-9._-]+', '-', name)[:80]}-{digest}"

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The code, ready to run, or None where it must be compiled.

        Numba would load all that it can compile first (a quarter of a second, more where SciPy is installed); code that
        is there needs its memory manager alone.
        """
        nrt.rtsys.initialize(context)
        file = self.file(signature, context.codegen())
        try:
            data = b"" if file is None else file.read_bytes()
        except OSError:
            return None
        if len(data) <= DIGEST or hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            return None
        return _rebuild(context, *pickle.loads(data[DIGEST:]))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep what was compiled; a disk that is full is no reason to fail."""
        file = self.file(signature, compiled.codegen)
        if file is None or compiled.lifted or compiled.library.has_dynamic_globals:
            return
        code = _dumps(compiled._reduce())
        try:
            _write(file, hashlib.sha256(code).digest() + code)
        except OSError as error:
            _tell_once(file.parent, error.strerror or str(error))

    def enable(self) -> None:
        """Numba's interface: nothing to do."""

    def disable(self) -> None:
        """Numba's interface: nothing to do."""

    def flush(self) -> None:
        """Numba's interface: nothing to do."""


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_bytes(data)
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
