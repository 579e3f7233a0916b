"""All kernels there are, and those that one model needs: what can be compiled ahead of time (`../kernels.py`).

A module keeps its tasks and called kernels under names of their own, or in a tuple or a table; what depends on the
model (its block types, how many heads share a KV head) is made for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numba as nb

from ..ops import KV_TYPES
from . import program, repack, rope
from .attention import deal_for, singles_for, tiles_for
from .gguf_blocks import BOOK_RULES
from .jit import Called, Task
from .layouts import BY_TYPE, LAYOUTS, Layout
from .linear import task_for

MODULES = "program elementwise quantize_activations embedding attention rope linear sampling sampling_kernels"
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)  # heads that share a KV head in the models we know
Kernel = Task | Called


def every() -> list[Kernel]:
    """Every kernel, for any model of the groups we know."""
    of_heads = [kernel for kind in KV_TYPES for group in GROUPS for kernel in _of_heads(group, kind)]
    return _unique([*_always(), *_packing(LAYOUTS), *map(task_for, LAYOUTS), *of_heads])


def needed(kinds: Collection[str], group: int, kv_type: str = KV_TYPES[0]) -> list[Kernel]:
    """What a model with matrices of these block types needs, in which so many heads share a KV head."""
    layouts = list(dict.fromkeys(BY_TYPE[kind] for kind in sorted(kinds) if kind in BY_TYPE))
    of_heads = _of_heads(group, kv_type)
    return _unique([*_always(), *_packing(layouts, kinds), *map(task_for, layouts), *of_heads])


def _of_heads(group: int, kv_type: str) -> list[Kernel]:
    return [
        deal_for(group),
        rope.store_for(kv_type),
        tiles_for(kv_type),
        singles_for(group, kv_type),
    ]


def _always() -> list[Kernel]:
    whole = nb.int64
    return [
        Called(program.work, *[whole] * 6),
        Called(program.run_together, *[whole] * 5),
        *(kernel for name in MODULES.split() for value in _contents(name) for kernel in _kernels_in(value)),
    ]


def _contents(name: str) -> list[Any]:
    """Of a module of this folder; some share their name with an op, so they are asked for by their full name."""
    return list(vars(importlib.import_module(f"{__package__}.{name}")).values())


def _kernels_in(value: Any) -> Iterable[Kernel]:
    if isinstance(value, Kernel):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return [one for one in inner if isinstance(one, Kernel)]


def _packing(layouts: Iterable[Layout], kinds: Collection[str] = tuple(BY_TYPE)) -> list[Kernel]:
    """What repacks weights of these layouts."""
    whole, numbers = nb.int64, [layout for layout in layouts if layout.numbers]
    typeof: Any = nb.typeof
    types = (typeof(repack._source("Q4_0")), *[whole] * 5, typeof(repack._nowhere(BY_TYPE["Q4_0"])), whole)
    coded = [kind for kind in kinds if kind in BY_TYPE and not BY_TYPE[kind].numbers]
    made: list[Kernel] = [Called(repack.interleave, *[whole] * 8)] if numbers else []
    if any(kind not in BOOK_RULES for kind in coded):
        made.append(Called(repack.pack_basic, *types))
    if any(kind in BOOK_RULES for kind in coded):
        made.append(Called(repack.pack_book, *types))
    return made


def _unique(kernels: Iterable[Kernel]) -> list[Kernel]:
    return list({kernel.name: kernel for kernel in kernels}.values())
