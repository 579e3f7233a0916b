"""Triton's interpreter, several times faster: what it does again for every value is done once, or not at all.

At each call of a function it searches all members of `triton.language` for its built-in functions; for each value it
makes the type, the shape and the table of NumPy's types; and it computes whether integers overflow, which it reports
only when debugging.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

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
            interpreter._patch_attr(package, name, member, builder, scope)


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
    _make_broadcast_faster(type(interpreter.interpreter_semantic))
