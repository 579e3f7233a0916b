"""Memory by address, inside kernels: arrays without an owner, counters that several threads change, calls by address.

A task (program.py) is told addresses in a table of integers; here they become arrays. Nothing here checks a bound.

Memory by address, for the kernels that repack weights: bytes, words, float16 and float32, aligned or not.

Addresses and not arrays, because Numba counts references to arrays even in an inner loop: that took half of the time.
Whoever calls a kernel keeps the arrays alive. Integers are int64, a word one below 2**32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ... import machine
from .. import isa
from .simd import F16, F32, I8, I16, I32

isa.features()  # LLVM is told what the machine has before Numba makes its compiler
I64 = ir.IntType(64)
BOUND = 1 << 40  # the length that such an array claims
sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _pointer_to(kind: Any) -> Any:
    """The function that makes an address a pointer to this kind."""

    @intrinsic
    def at(_: Any, address: Any) -> Any:
        def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(kind)(types.int64), gen

    return at


def _array_of(kind: Any) -> Any:
    at = _pointer_to(kind)

    @nb.njit(inline="always")
    def array(address):
        return nb.carray(at(address), (BOUND,))

    return array


i8, u8, u16, i32, i64 = map(_array_of, (types.int8, types.uint8, types.uint16, types.int32, types.int64))
f32, f64 = map(_array_of, (types.float32, types.float64))


ints_at = _pointer_to(types.int64)
STACKED = 8192  # floats of scratch that a task takes from the stack


@intrinsic
def stacked(_: Any, count: Any) -> Any:
    """The address of `count` floats on the stack, which 64 divides; they are gone when the task returns.

    Memory of the heap costs 0.1 us, which is much for a piece of two.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    kind = ir.ArrayType(ir.FloatType(), int(count.literal_value))

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        with b.goto_entry_block():
            room = b.alloca(kind)
        room.align = 64
        return b.ptrtoint(room, I64)

    return types.int64(count), gen


@nb.njit(inline="always")
def scratch(count):
    """At least so many floats, from an address that 64 divides, for as long as the function runs that asks."""
    if count <= STACKED:
        return f32(stacked(STACKED))
    room = np.empty(count + 16, np.float32)
    return room[-(room.ctypes.data // 4) % 16 :]


def _place(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@intrinsic
def fetch_add(_: Any, address: Any, by: Any) -> Any:
    """Add to a shared counter; what it was before."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _place(b, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), gen


@intrinsic
def fetch(_: Any, address: Any) -> Any:
    """What a shared counter holds now; what was written before it was raised is seen afterwards."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(_place(b, args[0]), "acquire", 8)

    return types.int64(types.int64), gen


@intrinsic
def pause(_: Any) -> Any:
    """Tell the processor that this is a loop that waits."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        if machine.is_x86():
            b.call(b.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), [])
        elif machine.is_arm():
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = b.module.declare_intrinsic("llvm.aarch64.hint", (), kind)
            b.call(hint, [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), gen


@intrinsic
def call(_: Any, function: Any, args: Any, step: Any, piece: Any) -> Any:
    """Call a task by its address."""
    whole = types.int64

    def gen(context: Any, b: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        b.call(b.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(whole, whole, whole, whole), gen


@intrinsic
def prefetch(_: Any, array: Any, index: Any, size: Any) -> Any:
    """Ask for `size` bytes of an array of bytes or halves, from element `index` on, before they are needed."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    lines = max(1, int(size.literal_value) // 64)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        i8, i32 = ir.IntType(8), ir.IntType(32)
        data = b.bitcast(context.make_array(sig.args[0])(context, b, args[0]).data, i8.as_pointer())
        place = b.gep(data, [b.mul(args[1], ir.Constant(args[1].type, sig.args[0].dtype.bitwidth // 8))])
        kind = ir.FunctionType(ir.VoidType(), [place.type, i32, i32, i32])
        ask = b.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
        for line in range(lines):
            where = b.gep(place, [ir.Constant(args[1].type, 64 * line)])
            b.call(ask, [where, *(ir.Constant(i32, value) for value in (0, 3, 1))])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(array, types.intp, size), gen


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
