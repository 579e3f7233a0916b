"""CPU kernels that were compiled ahead of time: a shared library for each instruction set, inside the package.

`tools/build_kernels.py` makes them. The name of a library has a hash of the sources of the kernels, so an edited kernel
never meets an old library. With a library nothing is compiled and Numba is not imported: what the modules of kernels
take from it at import time is then `ABSENT`. LLM_WORKER_PREBUILT=0 compiles instead. The libraries of a wheel are those
of Linux; everywhere else, and for other processors, the extra `compile` brings Numba.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import MissingDependencyError
from ..weights.quants import codebooks

PREBUILT_VARIABLE = "LLM_WORKER_PREBUILT"
CPU = Path(__file__).parent / "cpu"
FOLDER = CPU / "prebuilt"


class Absent:
    """Stands for the compiler where it is not needed: every use of it at import time gives itself."""

    def __init__(self, *_: object) -> None: ...

    def __call__(self, *_: object, **__: object) -> Absent:
        return self

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: object) -> Absent:
        return self

    def __floordiv__(self, _: object) -> Absent:
        return self

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (Absent,)


ABSENT: Any = Absent()


@cache
def sources_digest() -> str:
    """Return a hash of the sources that machine code depends on, whatever compiles them."""
    digest = hashlib.sha256()
    files = [Path(str(codebooks.__file__)), CPU.parent / "cpu_info.py", CPU / "packed_weight.py", CPU / "jit.py"]
    for path in [*files, *sorted((CPU / "kernels").rglob("*.py"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def library_name(isa: str, machine: str = platform.machine()) -> str:
    """Return the name of the library of an instruction set for the sources as they are."""
    return f"{isa}-{machine}-{sources_digest()}.so"


@cache
def prebuilt_isas() -> frozenset[str]:
    """Return the instruction sets that have a library for these sources."""
    if os.environ.get(PREBUILT_VARIABLE) == "0" or not FOLDER.is_dir():
        return frozenset()
    end = library_name("")
    return frozenset(path.name.removesuffix(end) for path in FOLDER.glob(f"*{end}"))


def open_library(isa: str) -> ctypes.CDLL | None:
    """Return the library of an instruction set, or None if kernels are compiled."""
    return ctypes.CDLL(str(FOLDER / library_name(isa))) if isa in prebuilt_isas() else None


def symbol_of(kernel: str) -> str:
    """Return the name of a kernel in a library."""
    digest = hashlib.sha256(kernel.encode()).hexdigest()[:8]
    return f"kernel_{re.sub('[^a-z0-9]+', '_', kernel.lower())[:60]}_{digest}"


def find_address(library: ctypes.CDLL, kernel: str) -> int:
    """Return the address of a kernel in a library, or 0."""
    function = getattr(library, symbol_of(kernel), None)
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0) if function else 0


def missing_kernel(kernel: str) -> MissingDependencyError:
    """Return the error for a kernel that is in no library, where there is no compiler."""
    return MissingDependencyError(
        f"the compiled kernels of this installation lack {kernel}: pip install 'llm-worker-rbee[compile]', and set "
        f"{PREBUILT_VARIABLE}=0 to compile it here"
    )
