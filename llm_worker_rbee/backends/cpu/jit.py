"""How a kernel is declared: a template, compiled ahead of time (kernel_library.py) or when it is needed (compiler.py).

The names in capitals that a template uses are set for each variant (`variant`). Modules of kernels take the names of
Numba and LLVM from here: without the compiler they are `ABSENT`.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

from ...pipe_process import PipeProcess
from .. import cpu_info, kernel_library

library = kernel_library.open_library(cpu_info.current_isa())
# a process that has imported Numba compiles what the library lacks
compiler: Any = (
    kernel_library.ABSENT
    if library is not None and sys.modules.get("numba") is None
    else importlib.import_module(f"{__package__}.compiler")
)
nb, types, ir, cgutils, binding = compiler.nb, compiler.types, compiler.ir, compiler.cgutils, compiler.binding
intrinsic, models, register_model = compiler.intrinsic, compiler.models, compiler.register_model
INT, FLOAT32, VOID = ctypes.c_int64, ctypes.c_float, None  # types in the signatures of kernels
NUMBA_TYPES: dict[Any, Any] = {INT: nb.int64, FLOAT32: nb.float32, VOID: nb.void}


class KernelFunction:
    """A function that kernels call as a part of theirs, and Python as a kernel, compiled for the types it meets."""

    def __init__(self, function: Callable[..., Any], *, optimized: bool = True) -> None:
        self.py_func, self._optimized = function, optimized

    @cached_property
    def part(self) -> Any:
        """What kernels call."""
        return compiler.compile_part(self.py_func, optimized=self._optimized)

    @property
    def _numba_type_(self) -> Any:
        return self.part._numba_type_

    @cached_property
    def dispatcher(self) -> Any:
        """What Python calls."""
        if compiler is kernel_library.ABSENT:
            raise kernel_library.missing_kernel(self.py_func.__name__)
        return compiler.compile_for_python(self.py_func)

    def __call__(self, *args: Any) -> Any:
        return self.dispatcher(*args)


def inline(function: Callable[..., Any]) -> Any:
    """Return a part of kernels: what is constant at the call is constant inside, and loops are unrolled."""
    return compiler.compile_inline(function)


def kernel(function: Callable[..., Any]) -> KernelFunction:
    """Return a function that kernels and Python call, compiled for the argument types that it meets."""
    return KernelFunction(function)


def simple_kernel(function: Callable[..., Any]) -> KernelFunction:
    """Return the same, optimized only as a part of each kernel: faster to compile, for code without hot loops."""
    return KernelFunction(function, optimized=False)


def variant(template: Any, name: str, **values: Any) -> FunctionType:
    """Return the function with its capitals set; `name` tells its machine code from the code of other variants."""
    copy = FunctionType(template.__code__, {**template.__globals__, **values}, template.__name__)
    copy.__qualname__ = f"{template.__name__}[{name}]"
    copy.__module__ = template.__module__
    return copy


class NativeKernel:
    """A kernel with a C signature: kernels call it by its address, and Python with integers and floats.

    Python calls it without the interpreter's lock.
    """

    def __init__(self, template: Any, result: Any, *types: Any, name: str = "", **values: Any) -> None:
        self.name = f"{template.__module__.rsplit('.', 1)[-1]}.{template.__name__}" + (f"[{name}]" if name else "")
        self.function, self._types = variant(template, name, **values), (result, types)
        self._native: Any = None
        self._address = 0
        self.compiled_by: PipeProcess | None = None  # a process that may still compile it

    @property
    def signature(self) -> Any:
        """The types as the compiler has them."""
        result, types = self._types
        return NUMBA_TYPES[result](*(NUMBA_TYPES[kind] for kind in types))

    @property
    def is_cached(self) -> bool:
        """Whether it need not be compiled: its machine code is in memory, in a library or on disk."""
        return bool(self._find_address()) or compiler.is_cached(self.function, self.signature)

    @property
    def is_compiling(self) -> bool:
        """Whether another process compiles it, or has ended without: loading it now would take as long."""
        return self.compiled_by is not None and (self.compiled_by.poll() is None or not self.is_cached)

    def _find_address(self) -> int:
        """Return the address of its machine code; 0 if there is none in memory or in a library."""
        if not self._address and library is not None:
            self._address = kernel_library.find_address(library, self.name)
        return self._address

    def load(self) -> None:
        """Load the machine code, or compile and cache it."""
        if self._find_address():
            return
        if compiler is kernel_library.ABSENT:
            raise kernel_library.missing_kernel(self.name)
        self._native = compiler.compile_native(self.function, self.signature)
        self._address = int(self._native.address)

    @property
    def address(self) -> int:
        if not self._address:
            self.load()
        return self._address

    @cached_property
    def _call(self) -> Any:
        result, types = self._types
        return ctypes.CFUNCTYPE(result, *types)(self.address)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class TaskKernel(NativeKernel):
    """A kernel that a program calls (program.py)."""

    def __init__(self, template: Any, name: str = "", **values: Any) -> None:
        super().__init__(template, VOID, INT, INT, INT, name=name, **values)  # arguments, step, piece
