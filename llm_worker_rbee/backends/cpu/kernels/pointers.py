"""Memory by address, inside kernels: arrays without an owner, scalars of any alignment, atomics, calls, prefetch.

A task of a program (../program.py) gets addresses in a table of integers, and the repacking kernels get addresses
because Numba counts references to arrays even in an inner loop, which took half of the time. The caller keeps the
memory alive; nothing here checks a bound. Integers are int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .... import machine
from ..jit import cgutils, intrinsic, ir, nb, types
from .simd import F16, F32, I8, I16, I32, element_pointer, emit_call, emits

I64 = ir.IntType(64)
ARRAY_LENGTH = 1 << 40  # the length that an array without an owner claims
MAX_STACK_FLOATS = 8192  # scratch that a task takes from the stack
sched_yield = types.ExternalFunction("sched_yield", types.int32())
lock_mutex, unlock_mutex, wake_all = (
    types.ExternalFunction(name, types.int32(types.int64))
    for name in ("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_broadcast")
)
wait_for = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(_: Any, address: Any) -> Any:
        def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(kind)(types.int64), gen

    return pointer


def _array_of(kind: Any) -> Any:
    """Return the intrinsic that makes an array of an address: many calls, so it must be typed and lowered fast."""
    made, size = types.Array(kind, 1, "C"), kind.bitwidth // 8

    @intrinsic
    def array(_: Any, address: Any) -> Any:
        def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            value = context.make_array(made)(context, b)  # no owner, no parent
            value.data = b.inttoptr(args[0], context.get_data_type(kind).as_pointer())
            value.nitems, value.itemsize = ir.Constant(I64, ARRAY_LENGTH), ir.Constant(I64, size)
            value.shape, value.strides = (cgutils.pack_array(b, [ir.Constant(I64, n)]) for n in (ARRAY_LENGTH, size))
            return value._getvalue()

        return made(types.int64), gen

    return array


# address -> array
i8, u8, u16, i32, i64 = map(_array_of, (types.int8, types.uint8, types.uint16, types.int32, types.int64))
f32, f64 = map(_array_of, (types.float32, types.float64))
int64_pointer = _pointer_to(types.int64)


def aligned(make: Callable[..., Any], shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Return np.empty or np.zeros aligned to 64 bytes: a vector that straddles two cache lines costs twice."""
    count = shape if isinstance(shape, int) else math.prod(shape)
    size = count * np.dtype(dtype).itemsize
    raw = make(size + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)


@emits(lambda count: types.int64(count), prefer_literal=True)
def stack_floats(b: Any, count: int) -> Any:
    """Return the address of `count` floats on the stack, aligned to 64 bytes, until the task returns.

    An allocation on the heap takes 0.1 us, which is much for a piece of 2 us.
    """
    with b.goto_entry_block():
        memory = b.alloca(ir.ArrayType(F32, count))
    memory.align = 64
    return b.ptrtoint(memory, I64)


@nb.njit(inline="always")
def scratch(count):
    """Return at least `count` floats, aligned to 64 bytes, until the calling function returns."""
    if count <= MAX_STACK_FLOATS:
        return f32(stack_floats(MAX_STACK_FLOATS))
    memory = np.empty(count + 16, np.float32)
    return memory[-(memory.ctypes.data // 4) % 16 :]


@emits(types.int64(types.int64, types.int64))
def atomic_add(b: Any, address: Any, by: Any) -> Any:
    """Add to a shared counter and return its value before."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), by, "acq_rel")


@emits(types.int64(types.int64))
def atomic_load(b: Any, address: Any) -> Any:
    """Return a shared counter; what was written before it was raised is seen afterwards."""
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "acquire", 8)


@emits(types.void(types.int64, types.int64))
def atomic_store(b: Any, address: Any, value: Any) -> None:
    """Set a shared counter; what was written before is seen by a thread that loads it."""
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "release", 8)


@emits(types.int64(types.int64, types.int64, types.int64))
def compare_and_swap(b: Any, address: Any, expected: Any, value: Any) -> Any:
    """Set a shared counter if it is `expected`; return its value before."""
    return b.extract_value(b.cmpxchg(b.inttoptr(address, I64.as_pointer()), expected, value, "acq_rel", "acquire"), 0)


@emits(types.void())
def full_fence(b: Any) -> None:
    """Let no later load overtake an earlier store."""
    b.fence("seq_cst")


@emits(types.void())
def cpu_pause(b: Any) -> None:
    """Tell the processor that this is a spin loop."""
    if machine.is_x86():
        emit_call(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif machine.is_arm():
        emit_call(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))


@emits(types.int64())
def read_ticks(b: Any) -> Any:
    """Return a counter that all cores share and that rises at a constant rate: on Arm the cycle counter is not for user
    programs, the timer is."""
    if machine.is_arm():
        return b.asm(ir.FunctionType(I64, []), "mrs $0, cntvct_el0", "=r", [], True)
    return emit_call(b, "llvm.readcyclecounter", I64)


@emits(types.void(types.int64, types.int64, types.int64, types.int64))
def call_task(b: Any, function: Any, args: Any, step: Any, piece: Any) -> None:
    """Call a task kernel by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [args, step, piece])


@emits(types.void(*[types.int64] * 7))
def call_loop(
    b: Any, function: Any, program: Any, length: Any, step: Any, counters: Any, thread: Any, threads: Any
) -> None:
    """Call the loop of a program by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 6)
    b.call(b.inttoptr(function, kind.as_pointer()), [program, length, step, counters, thread, threads])


def emit_prefetch(b: Any, place: Any) -> None:
    """Emit a prefetch of the cache line at a pointer."""
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    function = b.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
    b.call(function, [place, *(ir.Constant(I32, value) for value in (0, 3, 1))])  # to read, to keep, data


@emits(lambda array, index, size: types.void(array, types.intp, size), prefer_literal=True)
def prefetch(b: Any, array: Any, index: Any, size: int) -> None:
    """Prefetch `size` bytes of an array of bytes or halves, from element `index` on."""
    place = element_pointer(b, array, index, I8)
    for line in range(max(1, size // 64)):
        emit_prefetch(b, b.gep(place, [ir.Constant(index.type, 64 * line)]))


def _loader(kind: ir.Type, result: Any, convert: Any) -> Any:
    """Return the intrinsic that loads a scalar at an address, of any alignment, and converts it."""

    @emits(result(types.int64))
    def load(b: Any, address: Any) -> Any:
        value = b.load(b.inttoptr(address, kind.as_pointer()))
        value.align = 1
        return convert(b, value)

    return load


def _storer(source: Any, convert: Any) -> Any:
    """Return the intrinsic that converts a scalar and stores it at an address, of any alignment."""

    @emits(types.void(types.int64, source))
    def store(b: Any, address: Any, value: Any) -> None:
        stored = convert(b, value)
        b.store(stored, b.inttoptr(address, stored.type.as_pointer())).align = 1

    return store


load_u8, load_u16, load_u32 = (_loader(kind, types.int64, lambda b, x: b.zext(x, I64)) for kind in (I8, I16, I32))
load_i64 = _loader(I64, types.int64, lambda b, x: x)
load_f16 = _loader(F16, types.float32, lambda b, x: b.fpext(x, F32))
load_f32 = _loader(F32, types.float32, lambda b, x: x)
store_u8 = _storer(types.int64, lambda b, x: b.trunc(x, I8))
store_u16 = _storer(types.int64, lambda b, x: b.trunc(x, I16))
store_u32 = _storer(types.int64, lambda b, x: b.trunc(x, I32))
store_f16 = _storer(types.float32, lambda b, x: b.fptrunc(x, F16))
store_f32 = _storer(types.float32, lambda b, x: x)


@emits(types.float32(types.int64))
def f16_from_bits(b: Any, bits: Any) -> Any:
    """Return the float16 with these 16 bits, as a float."""
    return b.fpext(b.bitcast(b.trunc(bits, I16), F16), F32)
