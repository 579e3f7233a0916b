"""Triton's interpreter, several times faster: what it does again for every value is done once, or not at all.

At each call of a function it searches all members of `triton.language` for its built-in functions; for each value it
makes the type, the shape and the table of NumPy's types; and it computes whether integers overflow, which it reports
only when debugging. An operator asks a dozen functions which types its operands take: here operands of one type of
numbers go to NumPy at once, and all others take Triton's way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from triton.runtime import interpreter

_make_patches = interpreter._patch_lang
_patched: set[str] = set()  # names of the modules whose functions are replaced while a kernel runs


@cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    is_builtin = interpreter.tl.core.is_builtin
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtin_names(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):  # not inside a function that was called by another: it is patched
            scope.set_attr(package, name, _replacement(package is interpreter.tl.tensor, name, member))


@cache
def _replacement(is_operator: bool, name: str, member: Any) -> Any:
    """Return a function that calls a built-in one without being told how: by the interpreter."""
    checks_semantic = getattr(member, "__code__", None) is _CHECKED_CODE
    function = member.__wrapped__ if checks_semantic else member
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    if is_operator and name in _OPERATORS:
        return _operator(*_OPERATORS[name], call)
    return call


_CHECKED_CODE = interpreter.tl.core.builtin(lambda: None).__code__
_SIGNED = {f"int{bits}": 2 ** (bits - 1) for bits in (8, 16, 32, 64)}
_INTEGERS = frozenset(_SIGNED) | {f"uint{bits}" for bits in (8, 16, 32, 64)}
_FLOATS = frozenset(("fp16", "fp32", "fp64"))
_NUMBERS = _INTEGERS | _FLOATS
_POINTER = "pointer"


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda own, other: function(other, own)


def _quotient(own: Any, other: Any) -> Any:
    return (own - np.fmod(own, other)) // other  # rounds towards zero


# NumPy's function of each operator, and the types of numbers for which it is Triton's own.
_OPERATORS: dict[str, tuple[Callable[..., Any], frozenset[str]]] = {
    "__add__": (np.add, _NUMBERS | {_POINTER}),
    "__radd__": (_swapped(np.add), _NUMBERS),
    "__sub__": (np.subtract, _NUMBERS),
    "__rsub__": (_swapped(np.subtract), _NUMBERS),
    "__mul__": (np.multiply, _NUMBERS),
    "__rmul__": (_swapped(np.multiply), _NUMBERS),
    "__truediv__": (np.divide, frozenset(("fp32",))),
    "__rtruediv__": (_swapped(np.divide), frozenset(("fp32",))),
    "__floordiv__": (_quotient, _INTEGERS),
    "__mod__": (np.fmod, _INTEGERS),
    "__and__": (np.bitwise_and, _INTEGERS | {"int1"}),
    "__or__": (np.bitwise_or, _INTEGERS | {"int1"}),
    "__xor__": (np.bitwise_xor, _INTEGERS | {"int1"}),
    "__lshift__": (np.left_shift, _INTEGERS),
    "__rshift__": (np.right_shift, _INTEGERS),
    "__lt__": (np.less, _NUMBERS),
    "__le__": (np.less_equal, _NUMBERS),
    "__gt__": (np.greater, _NUMBERS),
    "__ge__": (np.greater_equal, _NUMBERS),
    "__eq__": (np.equal, _NUMBERS),
    "__ne__": (np.not_equal, _NUMBERS),
}


def _operator(function: Callable[..., Any], types: frozenset[str], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator: NumPy's function for operands of one of these types, Triton's own way for all others.

    A number in a program takes the type of the values that it meets, where that type can hold it.
    """
    language, handle_of = interpreter.tl, interpreter.TensorHandle
    tensor, constexpr, block_type, int1 = language.tensor, language.constexpr, language.block_type, language.int1
    elements = [getattr(language, name.replace("fp", "float")) for name in types - {_POINTER}]
    numpy_types = {element.name: interpreter._get_np_dtype(element) for element in elements}
    compares = function(np.zeros(1, np.int32), np.ones(1, np.int32)).dtype == bool
    adds_to_pointers = _POINTER in types

    def apply(self: Any, other: Any) -> Any:
        element, handle = self.dtype, self.handle
        name, own, is_tensor = element.name, handle.data, type(other) is tensor
        if name in numpy_types:
            if is_tensor:
                if other.dtype.name != name:
                    return otherwise(self, other)
                data = function(own, other.handle.data)
            else:
                number = other.value if type(other) is constexpr else other
                if type(number) is int:
                    fits = -_SIGNED[name] <= number < _SIGNED[name] if name in _SIGNED else name in _FLOATS
                else:
                    fits = type(number) is float and name in _FLOATS
                if not fits:
                    return otherwise(self, other)
                data = function(own, np.array([number], numpy_types[name]))
            element = int1 if compares else element
        elif adds_to_pointers and is_tensor and element.is_ptr() and other.dtype.name in _SIGNED:
            size = max(1, handle.get_element_ty().primitive_bitwidth // 8)
            data = own + size * other.handle.data.astype(np.uint64)
        else:
            return otherwise(self, other)
        kind = self.type
        if is_tensor and other.type.is_block():
            if compares or not kind.is_block() or data.shape != own.shape:
                kind = block_type(element, list(data.shape))
        elif compares:
            kind = block_type(element, list(data.shape)) if kind.is_block() else element
        return tensor(handle_of(data, handle.dtype), kind)

    return apply


class _KernelScope:
    """The replaced functions of a kernel: at its end nothing is replaced."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        self._scope.restore()
        _patched.clear()


@cache
def _languages(function: Any) -> frozenset[str]:
    modules = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(module.__name__ for module in modules if module in (interpreter.tl, interpreter.tl.core))


def _patch_lang(function: Any) -> Any:
    """Replace the built-in functions when a kernel starts, and for a function that it calls if they are not yet."""
    used, is_kernel = _languages(function), not _patched
    if used and used <= _patched:
        return interpreter._LangPatchScope()
    scope = _make_patches(function)
    _patched.update(used)
    return _KernelScope(scope) if is_kernel else scope


def _cache_by_name(function: Any) -> Any:
    """Cache a function of a type by the name of the type, or of that of its elements: types are not hashable."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        name = kind.element_ty.name if kind.is_block() else kind.name
        if name not in known:
            known[name] = function(kind)
        return known[name]

    return find


def _make_tensor_faster(tensor: Any) -> None:
    """Keep what a tensor knows of its type with the type: shape, size and element type."""
    make = tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            make(self, handle, type)
            type._of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    tensor.__init__ = init


def _make_block_type_faster(block_type: Any) -> None:
    """Make one type of each shape and each type of numbers."""
    make = block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], Any] = {}

    def new(cls: Any, element: Any, shape: Any) -> Any:
        if cls is not block_type or element.is_ptr():
            return object.__new__(cls)
        key = element.name, tuple([getattr(size, "value", size) for size in shape])
        if key not in known:
            known[key] = object.__new__(cls)
        return known[key]

    def init(self: Any, element: Any, shape: Any) -> None:
        if "name" not in self.__dict__:  # set last
            make(self, element, shape)

    block_type.__new__, block_type.__init__ = new, init


def _make_broadcast_faster(semantic: Any) -> None:
    """Return operands of the same shape as they are."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() == other.is_block() and (not one.is_block() or one.shape.values == other.shape.values):
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_impl_value


def _make_unwrap_faster(core: Any) -> None:
    """Decide by its type, at once, that a value is a constant of a program or none."""
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = frozenset((int, bool, float, str, type(None), core.tensor, core.dtype))

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr


def _make_cast_faster(semantic: Any) -> None:
    """Return a tensor that has the type already as it is."""
    make = semantic.cast

    def cast(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        if value.dtype is kind and kind.name in _NUMBERS:
            return value
        return make(self, value, kind, rounding)

    semantic.cast = cast


def install() -> None:
    """Replace these functions; names are collected now, while nothing is patched."""
    language = interpreter.tl
    for package in (language, language.core, language.tensor, language.math, language.core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter._get_np_dtype = _cache_by_name(interpreter._get_np_dtype)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _make_tensor_faster(language.tensor)
    _make_block_type_faster(language.block_type)
    _make_unwrap_faster(language.core)
    _make_broadcast_faster(type(interpreter.interpreter_semantic))
    _make_cast_faster(type(interpreter.interpreter_semantic))
