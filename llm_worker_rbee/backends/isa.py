"""Which instruction set the kernels use: the best that this machine has, or the one that was asked for.

`LLM_WORKER_CPU_ISA` (the option `--cpu-isa` sets it) forces another, for tests; it must be one that can run here.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from ..errors import InvalidRequestError
from . import host

VARIABLE = "LLM_WORKER_CPU_ISA"


class InstructionSet(NamedTuple):
    """What a machine must have, and how its dot product wants eight-bit weights."""

    needs: frozenset[str]
    bias: int  # 128: as unsigned bytes; 0: signed
    tokens: int  # how many tokens a tile of the matrix product has: what the registers hold


def _set(bias: int, tokens: int, *needs: str) -> InstructionSet:
    return InstructionSet(frozenset(needs), bias, tokens)


# best first
TABLE: dict[str, InstructionSet] = {
    "avx512_vnni": _set(128, 16, "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    "avx_vnni": _set(128, 2, "avx2", "fma", "avx_vnni"),
    "avx2": _set(0, 2, "avx2", "fma"),
    "neon_dotprod": _set(0, 4, "asimd", "asimddp"),
    "neon": _set(0, 2, "asimd"),
    "portable": _set(0, 2),
}


def available() -> list[str]:
    """Those that this machine can run, and kernels can be compiled for, best first."""
    have = host.features()
    return [name for name, one in TABLE.items() if one.needs <= have]


def current() -> str:
    """The one in use."""
    asked = os.environ.get(VARIABLE)
    return _checked(asked) if asked else available()[0]


def force(name: str) -> None:
    """Use this one from now on; once the kernels are loaded, they are what they are."""
    _checked(name)
    if f"{__package__}.cpu.compile" in sys.modules and current() != name:
        told = f"instruction set {name!r}: the kernels are loaded with {current()!r} already, start a new process"
        raise InvalidRequestError(told, "cpu_isa")
    os.environ[VARIABLE] = name


def _checked(name: str) -> str:
    usable = available()
    if name not in usable:
        known = "not one that kernels can be compiled for here" if name in TABLE else "unknown"
        raise InvalidRequestError(f"instruction set {name!r} is {known}: use one of {', '.join(usable)}", "cpu_isa")
    return name
