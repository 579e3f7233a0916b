"""Compiling kernels with Numba: parts as LLVM code, kernels as machine code that is cached on disk (kernel_cache.py).

Importing this module also gives the compiler what LLVM wants and Numba lacks: float16 without F16C. jit.py imports it
where no kernels were compiled ahead of time, and nothing else imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
from llvmlite import binding, ir
from numba import _dynfunc, types  # type: ignore[attr-defined]
from numba.core import cgutils, codegen, compiler, compiler_machinery, typed_passes, untyped_passes
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.types.functions import BaseFunction
from numba.extending import intrinsic, models, register_model

from ... import machine
from .. import cpu_info
from .kernel_cache import KernelCache, cache_dir

__all__ = ["binding", "cache_dir", "cgutils", "intrinsic", "ir", "models", "nb", "register_model", "types"]

cpu_info.llvm_features()  # tells LLVM what the machine has before Numba makes its compiler
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


def _remember_scalar_calls(functions: Any = BaseFunction) -> None:
    """Find the types of an operator with scalars once. Numba tries its implementations at every call, arrays first."""
    resolve, signatures = functions.get_call_type, dict[Any, Any]()

    def get_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws or not all(isinstance(kind, (types.Number, types.Boolean)) for kind in args):
            return resolve(function, context, args, kws)
        key = function, args
        if key not in signatures:
            signatures[key] = resolve(function, context, args, kws)
        return signatures[key]

    functions.get_call_type = get_call_type


_remember_scalar_calls()


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


def compile_part(function: Callable[..., Any], *, optimized: bool) -> Any:
    """Return a function for kernels. A constant is an argument as any other, or each would be compiled for itself."""
    pipeline = _PartCompiler if optimized else _SimplePartCompiler
    part: Any = nb.njit(pipeline_class=pipeline, **_PART_OPTIONS)(function)
    template_for = part.get_call_template
    part.get_call_template = lambda args, kws: template_for(tuple(map(nb.types.unliteral, args)), kws)
    return part


def compile_for_python(function: Callable[..., Any]) -> Any:
    """Return a function that Python calls, compiled for the argument types that it meets."""
    dispatcher: Any = nb.njit(pipeline_class=_KernelCompiler, **_OPTIONS)(function)
    dispatcher._cache = KernelCache(function)
    return dispatcher


def compile_inline(function: Callable[..., Any]) -> Any:
    """Return a part that is inlined."""
    return nb.njit(pipeline_class=_PartCompiler, **_INLINE_OPTIONS)(function)


def compile_native(function: Callable[..., Any], signature: Any) -> Any:
    """Return a function with a C signature, from the cache or compiled; `address` leads to the machine code."""
    native: Any = CFunc(
        function, (signature.args, signature.return_type), {}, {"error_model": "numpy"}, pipeline_class=_KernelCompiler
    )
    native._cache = KernelCache(function)
    native.compile()
    return native


def compile_llvm(function: Callable[..., Any], signature: Any) -> tuple[str, str]:
    """Return the name of a function with a C signature, and its LLVM code, without making machine code."""
    native: Any = CFunc(
        function, (signature.args, signature.return_type), {}, {"error_model": "numpy"}, pipeline_class=_PartCompiler
    )
    native.compile()
    with global_compiler_lock:
        native._library._ensure_finalized()
    return native.native_name, native._library.get_llvm_str()


def is_cached(function: Callable[..., Any], signature: Any) -> bool:
    """Return whether the machine code is on disk."""
    file = KernelCache(function).entry(signature, cpu_target.target_context.codegen())
    return file is not None and file.exists()
