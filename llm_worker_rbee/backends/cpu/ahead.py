"""Keys and values asked for before they are needed: a token alone waits for memory, not for arithmetic.

What kv.py's loads of the same names would take is brought nearer; nothing is read.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vectors import I8, I32, LANES, address


def _ask(context: Any, b: Any, kind: Any, array: Any, index: Any) -> None:
    """Ask for the line of the cache that holds an element, before it is needed."""
    place = address(context, b, kind, array, index, I8)
    function = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    ask = b.module.declare_intrinsic("llvm.prefetch", (place.type,), function)
    b.call(ask, [place, *(ir.Constant(I32, value) for value in (0, 3, 1))])  # to read, to keep, data


@intrinsic
def ask_lines(_: Any, array: Any, lines: Any, length: Any, offset: Any) -> Any:
    """Ask for what `at_lines` would load."""

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for i in range(len(lines)):
            index = b.add(b.mul(b.extract_value(args[1], i), args[2]), args[3])
            _ask(context, b, sig.args[0], args[0], index)
        return context.get_dummy_value()

    return types.void(array, lines, types.intp, types.intp), gen


@intrinsic
def ask_neighbours(_: Any, array: Any, index: Any, vectors: Any) -> Any:
    """Ask for what `neighbours` would load."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    count = int(vectors.literal_value)

    def gen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        for i in range(0, count * LANES, 64 * 8 // sig.args[0].dtype.bitwidth):
            _ask(context, b, sig.args[0], args[0], b.add(args[1], ir.Constant(args[1].type, i)))
        return context.get_dummy_value()

    return types.void(array, types.intp, vectors), gen
