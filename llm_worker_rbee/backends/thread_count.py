"""How many CPU threads to use: the physical cores that this process may use, or what the caller requests.

`LLM_WORKER_THREADS` sets it where no option does. More threads than the cores that the process may run on, or than a
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


class ThreadLimit(NamedTuple):
    """A number of threads and its reason."""

    threads: int
    reason: str


def limits() -> list[ThreadLimit]:
    """Return all bounds of the number of threads; the first one bounds the default only."""
    usable = machine.usable_cores()
    physical = machine.usable_physical_cores() or usable
    found = [ThreadLimit(physical, f"{physical} physical cores" if physical > 1 else "1 physical core")]
    found.append(ThreadLimit(usable, f"{usable} cores that this process may run on"))
    quota = machine.cpu_quota()
    if quota is not None:
        found.append(ThreadLimit(max(1, math.ceil(quota)), f"a quota of {quota:g} cores"))
    pool = os.environ.get(NUMBA_VARIABLE, "")
    if pool.isdigit() and int(pool):
        found.append(ThreadLimit(int(pool), f"{NUMBA_VARIABLE}={pool}"))
    return found


def choose(requested: int | None = None) -> int:
    """Return how many threads to use; raise with the reason if more are requested than can be used."""
    return explain(requested).threads


def explain(requested: int | None = None) -> ThreadLimit:
    """Return the number of threads with its reason."""
    bounds = limits()
    if requested is not None:
        return _validate(requested, "threads", bounds)
    variable = os.environ.get(VARIABLE)
    if variable:
        if not (variable.isascii() and variable.isdigit() and len(variable) < 10):
            raise InvalidRequestError(f"{VARIABLE} is {variable!r}: give a whole number of 1 or more", "threads")
        return _validate(int(variable), VARIABLE, bounds)
    return min(bounds, key=lambda bound: bound.threads)


def _validate(requested: int, name: str, bounds: list[ThreadLimit]) -> ThreadLimit:
    if isinstance(requested, bool) or not isinstance(requested, int):
        raise InvalidRequestError(f"{name} is {requested!r}: it must be a whole number", "threads")
    highest = min(bounds[1:], key=lambda bound: bound.threads)
    if not 1 <= requested <= highest.threads:
        raise InvalidRequestError(
            f"{name} is {requested}: it must be 1 to {highest.threads} ({highest.reason})", "threads"
        )
    return ThreadLimit(requested, f"{name} is {requested}")
