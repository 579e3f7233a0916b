"""Triton's interpreter, a third faster: what it looks up again at every call of a function is looked up once.

At each call it searches all members of `triton.language` for its built-in functions, and for each value it makes the
table of NumPy's types.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton.runtime import interpreter


@cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    is_builtin = interpreter.tl.core.is_builtin
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtin_names(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):  # not inside a function that was called by another: it is patched
            interpreter._patch_attr(package, name, member, builder, scope)


def _cache_by_name(function: Any) -> Any:
    """Cache a function of a type by the name of the type, or of that of its elements: types are not hashable."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        name = kind.element_ty.name if kind.is_block() else kind.name
        if name not in known:
            known[name] = function(kind)
        return known[name]

    return find


def install() -> None:
    """Replace the two functions; names are collected now, while nothing is patched."""
    language = interpreter.tl
    for package in (language, language.core, language.tensor, language.math, language.core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _cache_by_name(interpreter._get_np_dtype)
