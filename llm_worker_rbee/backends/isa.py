"""Which instruction set the kernels use: the best that this machine has, or the one that was asked for.

`LLM_WORKER_CPU_ISA` (the option `--cpu-isa` sets it) forces another, for tests; it must be one that can run here.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from .. import machine
from ..errors import InvalidRequestError

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
    "avx512_vnni": _set(128, 8, "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    "avx_vnni": _set(128, 2, "avx2", "fma", "avx_vnni"),
    "avx2": _set(0, 2, "avx2", "fma"),
    "neon_dotprod": _set(0, 2, "asimd", "asimddp"),
    "neon": _set(0, 2, "asimd"),
    "portable": _set(0, 2),
}


def available() -> list[str]:
    """Those that this machine can run, best first."""
    have = set(machine.cpu_features())
    return [name for name, one in TABLE.items() if one.needs <= have]


def current() -> str:
    """The one in use."""
    asked = os.environ.get(VARIABLE)
    usable = available()
    if not asked:
        return usable[0]
    if asked not in usable:
        known = "not one that this machine has" if asked in TABLE else "unknown"
        raise InvalidRequestError(f"instruction set {asked!r} is {known}: use one of {', '.join(usable)}", "cpu_isa")
    return asked
