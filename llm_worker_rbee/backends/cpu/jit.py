"""How kernels are compiled: once, and cached on disk (kernel_cache.py).

A kernel is a template: the names in capitals that it uses are set for each variant (`variant`). Importing this module
also gives the compiler what LLVM wants and Numba lacks: float16 without F16C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

import numba as nb
from llvmlite import binding
from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core import codegen, compiler, compiler_machinery, typed_passes, untyped_passes
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

from ... import machine
from .. import cpu_info
from .kernel_cache import KernelCache

cpu_info.llvm_features()  # tells LLVM what the machine has before Numba makes its compiler
INT, FLOAT32, VOID = nb.int64, nb.float32, nb.void  # types in the signatures of kernels
C_TYPES: dict[Any, Any] = {INT: ctypes.c_int64, FLOAT32: ctypes.c_float, VOID: None}
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}
_PART_OPTIONS: Any = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_INLINE_OPTIONS: Any = {**_PART_OPTIONS, "forceinline": True}

# float16 conversions for x86 processors without F16C: LLVM calls two library functions there that Numba does not have.
# Slow (one call per number), exact to the bit.
# Extend: the bits of a float16, shifted into a float32, are 2**112 too small, subnormal or not; infinity and NaN apart.
# Truncate: drop bits with a carry that rounds to even; below 2**-14 adding 0.5 leaves the rounded fraction.
F16_CONVERSIONS_IR = """
define float @__extendhfsf2(half %x) {
  %short = bitcast half %x to i16
  %bits = zext i16 %short to i32
  %size = and i32 %bits, 32767
  %upper = xor i32 %bits, %size
  %sign = shl i32 %upper, 16
  %placed = shl i32 %size, 13
  %small = bitcast i32 %placed to float
  %value = fmul float %small, 0x46F0000000000000
  %finite = bitcast float %value to i32
  %special = or i32 %placed, 2139095040
  %is_special = icmp uge i32 %size, 31744
  %chosen = select i1 %is_special, i32 %special, i32 %finite
  %signed = or i32 %chosen, %sign
  %result = bitcast i32 %signed to float
  ret float %result
}

define half @__truncsfhf2(float %x) {
  %bits = bitcast float %x to i32
  %size = and i32 %bits, 2147483647
  %upper = xor i32 %bits, %size
  %sign = lshr i32 %upper, 16
  %last = lshr i32 %size, 13
  %odd = and i32 %last, 1
  %moved = add i32 %size, -939520001
  %carried = add i32 %moved, %odd
  %normal = lshr i32 %carried, 13
  %positive = bitcast i32 %size to float
  %shifted = fadd float %positive, 0.5
  %fraction = bitcast float %shifted to i32
  %subnormal = sub i32 %fraction, 1056964608
  %is_subnormal = icmp ult i32 %size, 947912704
  %finite = select i1 %is_subnormal, i32 %subnormal, i32 %normal
  %is_nan = icmp ugt i32 %size, 2139095040
  %special = select i1 %is_nan, i32 32256, i32 31744
  %is_special = icmp uge i32 %size, 1199570944
  %chosen = select i1 %is_special, i32 %special, i32 %finite
  %signed = or i32 %chosen, %sign
  %short = trunc i32 %signed to i16
  %result = bitcast i16 %short to half
  ret half %result
}
"""


def install_f16_conversions() -> None:
    """Add the conversions to Numba's execution engine, where every kernel finds them, if this processor needs them."""
    if machine.is_x86() and "f16c" not in cpu_info.llvm_features():
        compiler_of_cpu: Any = cpu_target.target_context.codegen()
        module = binding.parse_assembly(F16_CONVERSIONS_IR)
        empty = compiler_of_cpu._llvm_module
        module.triple, module.data_layout = empty.triple, empty.data_layout
        compiler_of_cpu._engine.add_module(module)
        compiler_of_cpu._engine.finalize_object()


install_f16_conversions()


class PartLibrary(codegen.JITCodeLibrary):
    """LLVM code of a function that only kernels call: optimized, but machine code only as a part of each of them.

    Numba's own library makes machine code of every function with all that it calls, n times of what is n calls deep.
    """

    optimized = True  # before it is a part of a kernel and optimized again: inner loops of products need both

    def _optimize_final_module(self) -> None:
        if self.optimized:
            super()._optimize_final_module()  # type: ignore[no-untyped-call]

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # there is no machine code


@compiler_machinery.register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(typed_passes.NativeLowering):
    """Lower a part to LLVM code and register it for its callers, without a function for Python."""

    _name = "part_lowering"
    optimized = True

    def run_pass(self, state: Any) -> bool:
        name = state.func_id.func_qualname
        state.flags.no_compile = True
        state.library = PartLibrary(state.targetctx.codegen(), name)  # type: ignore[no-untyped-call]
        state.library.optimized = self.optimized
        super().run_pass(state)  # type: ignore[no-untyped-call]
        lowered = state["cr"]
        entry = _dynfunc.make_function(lowered.fndesc.lookup_module(), name, "", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


@compiler_machinery.register_pass(mutates_CFG=True, analysis_only=False)
class _SimplePartLowering(_PartLowering):
    _name = "simple_part_lowering"
    optimized = False


# Passes of Numba that change nothing in kernels: these have no closures, context managers, loops over tuples of several
# types, arguments of exceptions or expressions of whole arrays to fuse, and their type annotations are not printed.
_UNNEEDED_PASSES = (
    untyped_passes.InlineClosureLikes,
    untyped_passes.MakeFunctionToJitFunction,
    untyped_passes.WithLifting,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.LiteralUnroll,
    untyped_passes.RewriteDynamicRaises,
    typed_passes.NopythonRewrites,
    typed_passes.AnnotateTypes,
    typed_passes.DumpParforDiagnostics,
)


class _PartCompiler(compiler.Compiler):
    lowering: Any = _PartLowering

    def define_pipelines(self) -> Any:
        manager: Any = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [
            (self.lowering if item is typed_passes.NativeLowering else item, why)
            for item, why in manager.passes
            if item not in _UNNEEDED_PASSES
        ]
        manager.finalize()
        return [manager]


class _SimplePartCompiler(_PartCompiler):
    lowering = _SimplePartLowering


class _KernelCompiler(_PartCompiler):
    lowering = typed_passes.NativeLowering


class KernelFunction:
    """A function that kernels call as a part of theirs, and Python as a kernel, compiled for the types it meets."""

    def __init__(self, function: Callable[..., Any], part_compiler: type[_PartCompiler] = _PartCompiler) -> None:
        self.py_func, self._part_compiler = function, part_compiler

    @cached_property
    def part(self) -> Any:
        """What kernels call; a constant argument is an argument as any other, or each would be compiled for itself."""
        jitted: Any = nb.njit(pipeline_class=self._part_compiler, **_PART_OPTIONS)(self.py_func)
        template_for = jitted.get_call_template
        jitted.get_call_template = lambda args, kws: template_for(tuple(map(nb.types.unliteral, args)), kws)
        return jitted

    @property
    def _numba_type_(self) -> Any:
        return self.part._numba_type_

    @cached_property
    def dispatcher(self) -> Any:
        """What Python calls."""
        jitted: Any = nb.njit(pipeline_class=_KernelCompiler, **_OPTIONS)(self.py_func)
        jitted._cache = KernelCache(self.py_func)
        return jitted

    def __call__(self, *args: Any) -> Any:
        return self.dispatcher(*args)


def inline(function: Callable[..., Any]) -> Any:
    """Return a part of kernels: what is constant at the call is constant inside, and loops are unrolled."""
    return nb.njit(pipeline_class=_PartCompiler, **_INLINE_OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> KernelFunction:
    """Return a function that kernels and Python call, compiled for the argument types that it meets."""
    return KernelFunction(function)


def simple_kernel(function: Callable[..., Any]) -> KernelFunction:
    """Return the same, optimized only as a part of each kernel: faster to compile, for code without hot loops."""
    return KernelFunction(function, _SimplePartCompiler)


def variant(template: Any, name: str, **values: Any) -> FunctionType:
    """Return the function with its capitals set; `name` tells its machine code from that of other variants."""
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
        self.signature = result(*types)
        self._function = variant(template, name, **values)
        self._compiled: Any = None

    @property
    def is_cached(self) -> bool:
        """Whether it need not be compiled: its machine code is on disk or in memory."""
        if self._compiled is not None:
            return True
        file = KernelCache(self._function).entry(self.signature, cpu_target.target_context.codegen())
        return file is not None and file.exists()

    def load(self) -> None:
        """Load the machine code from disk, or compile and cache it."""
        if self._compiled is None:
            signature = self.signature.args, self.signature.return_type
            options = {"error_model": "numpy"}
            compiled: Any = CFunc(self._function, signature, {}, options, pipeline_class=_KernelCompiler)
            compiled._cache = KernelCache(self._function)
            compiled.compile()
            self._compiled = compiled

    @property
    def address(self) -> int:
        self.load()
        return int(self._compiled.address)

    @cached_property
    def _call(self) -> Any:
        result, *types = (C_TYPES[kind] for kind in (self.signature.return_type, *self.signature.args))
        return ctypes.CFUNCTYPE(result, *types)(self.address)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class TaskKernel(NativeKernel):
    """A kernel that a program calls (program.py)."""

    def __init__(self, template: Any, name: str = "", **values: Any) -> None:
        super().__init__(template, VOID, INT, INT, INT, name=name, **values)  # arguments, step, piece
