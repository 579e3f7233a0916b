"""How many threads compute: the physical cores, as far as this process may use them, or what was asked for.

`LLM_WORKER_THREADS` says it where no option does. More threads than the cores that the process may run on, or than a
container's quota pays for, would only wait for each other: they are refused.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from .. import machine
from ..errors import InvalidRequestError

VARIABLE = "LLM_WORKER_THREADS"
NUMBA_VARIABLE = "NUMBA_NUM_THREADS"


class Limit(NamedTuple):
    """A number of threads, and where it comes from."""

    threads: int
    why: str


def limits() -> list[Limit]:
    """All that bounds the threads; the first is what they are bounded by by default alone."""
    usable = machine.usable_cores()
    physical = machine.usable_physical_cores() or usable
    found = [Limit(physical, f"{physical} physical cores" if physical > 1 else "1 physical core")]
    found.append(Limit(usable, f"{usable} cores that this process may run on"))
    quota = machine.cpu_quota()
    if quota is not None:
        found.append(Limit(max(1, math.ceil(quota)), f"a quota of {quota:g} cores"))
    given = os.environ.get(NUMBA_VARIABLE, "")
    if given.isdigit() and int(given):
        found.append(Limit(int(given), f"{NUMBA_VARIABLE}={given}"))
    return found


def choose(asked: int | None = None) -> int:
    """How many threads to use; more than can be used is refused with the reason."""
    return explain(asked).threads


def explain(asked: int | None = None) -> Limit:
    """The number of threads, and why it is this one."""
    known = limits()
    if asked is not None:
        return _allowed(asked, "threads", known)
    given = os.environ.get(VARIABLE)
    if given:
        if not (given.isascii() and given.isdigit() and len(given) < 10):
            raise InvalidRequestError(f"{VARIABLE} is {given!r}: give a whole number of 1 or more", "threads")
        return _allowed(int(given), VARIABLE, known)
    return min(known, key=lambda one: one.threads)


def _allowed(asked: int, name: str, known: list[Limit]) -> Limit:
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise InvalidRequestError(f"{name} is {asked!r}: it must be a whole number", "threads")
    most = min(known[1:], key=lambda one: one.threads)
    if not 1 <= asked <= most.threads:
        raise InvalidRequestError(f"{name} is {asked}: it must be 1 to {most.threads} ({most.why})", "threads")
    return Limit(asked, f"{name} is {asked}")
