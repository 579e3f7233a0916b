"""How kernels are compiled: once, kept on disk, and never run stale.

Numba's disk cache sees neither an edit in another file nor a changed global. So its folder is keyed by everything that
the machine code depends on: all files of this folder, the instruction set, the processor, and the versions of Numba,
LLVM and Python. A kernel is a template: the names in capitals that it uses are set for each variant (`variant`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba as nb
from llvmlite import binding
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

from ...weights.quants import codebooks
from .. import host, isa
from . import disk

host.features()  # LLVM is told what the machine has before Numba makes its compiler
FOLDER = Path(__file__).parent


def fingerprint() -> str:
    """A hash of what the machine code depends on."""
    found = hashlib.sha256()
    others = (Path(str(module.__file__)) for module in (isa, host, codebooks))  # what kernels are made of, elsewhere
    for path in [*others, *sorted(FOLDER.glob("*.py"))]:
        found.update(path.name.encode() + path.read_bytes())
    versions = nb.__version__, llvmlite.__version__, sys.version_info[:2]  # what is kept is pickled
    about = (isa.current(), *versions, binding.get_host_cpu_name())
    found.update(repr(about).encode())
    return found.hexdigest()[:16]


@cache
def folder() -> Path | None:
    """Where the machine code of this very version is kept (disk.py); None: nowhere."""
    return disk.open_folder(fingerprint())


def _kept(dispatcher: Any) -> Any:
    dispatcher._cache = disk.Kept(dispatcher.py_func, folder)
    return dispatcher


_OPTIONS = {"nogil": True, "error_model": "numpy"}


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
        file = disk.Kept(self._function, folder).file(TASK, cpu_target.target_context.codegen())
        return file is not None and file.exists()

    def _prepared(self) -> Any:
        made = CFunc(self._function, (TASK.args, TASK.return_type), locals={}, options={"error_model": "numpy"})
        made._cache = disk.Kept(self._function, folder)
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
