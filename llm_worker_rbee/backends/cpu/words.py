"""Memory by address, for the kernels that repack weights: bytes, words, float16 and float32, aligned or not.

Addresses and not arrays, because Numba counts references to arrays even in an inner loop: that took half of the time.
Whoever calls a kernel keeps the arrays alive. Integers are int64, a word one below 2**32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .. import host
from .vectors import F16, F32, I8, I16, I32

host.features()  # LLVM is told what the machine has before Numba makes its compiler
I64 = ir.IntType(64)
# Part of a kernel, never called from Python. What is constant at the call is constant inside, and loops are unrolled.
_OPTIONS: Any = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inlined: Callable[[Callable[..., Any]], Any] = nb.njit(nogil=True, error_model="numpy", **_OPTIONS)


def _get(b: Any, address: Any, kind: ir.Type) -> Any:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _put(b: Any, address: Any, value: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


@intrinsic
def byte(_: Any, address: Any) -> Any:
    """The byte there."""
    return types.int64(types.int64), lambda context, b, sig, args: b.zext(_get(b, args[0], I8), I64)


@intrinsic
def short(_: Any, address: Any) -> Any:
    """Two bytes, the first one lower."""
    return types.int64(types.int64), lambda context, b, sig, args: b.zext(_get(b, args[0], I16), I64)


@intrinsic
def word(_: Any, address: Any) -> Any:
    """Four bytes, the first one lowest."""
    return types.int64(types.int64), lambda context, b, sig, args: b.zext(_get(b, args[0], I32), I64)


@intrinsic
def number(_: Any, address: Any) -> Any:
    """An int64."""
    return types.int64(types.int64), lambda context, b, sig, args: _get(b, args[0], I64)


@intrinsic
def half(_: Any, address: Any) -> Any:
    """A float16."""
    return types.float32(types.int64), lambda context, b, sig, args: b.fpext(_get(b, args[0], F16), F32)


@intrinsic
def half_of(_: Any, bits: Any) -> Any:
    """The float16 that these 16 bits are."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.fpext(b.bitcast(b.trunc(args[0], I16), F16), F32)

    return types.float32(types.int64), gen


@intrinsic
def single(_: Any, address: Any) -> Any:
    """A float32."""
    return types.float32(types.int64), lambda context, b, sig, args: _get(b, args[0], F32)


@intrinsic
def put_byte(_: Any, address: Any, value: Any) -> Any:
    """Write a byte."""
    return types.void(types.int64, types.int64), lambda context, b, sig, args: _put(b, args[0], b.trunc(args[1], I8))


@intrinsic
def put_short(_: Any, address: Any, value: Any) -> Any:
    """Write two bytes."""
    return types.void(types.int64, types.int64), lambda context, b, sig, args: _put(b, args[0], b.trunc(args[1], I16))


@intrinsic
def put_word(_: Any, address: Any, value: Any) -> Any:
    """Write four bytes."""
    return types.void(types.int64, types.int64), lambda context, b, sig, args: _put(b, args[0], b.trunc(args[1], I32))


@intrinsic
def put_half(_: Any, address: Any, value: Any) -> Any:
    """Write a float32, rounded to float16."""
    return types.void(types.int64, types.float32), lambda context, b, sig, args: _put(
        b, args[0], b.fptrunc(args[1], F16)
    )


@intrinsic
def put_single(_: Any, address: Any, value: Any) -> Any:
    """Write a float32."""
    return types.void(types.int64, types.float32), lambda context, b, sig, args: _put(b, args[0], args[1])
