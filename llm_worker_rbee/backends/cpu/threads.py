"""How many threads the kernels use, which library runs them, and who may start them when.

Of Numba's threading layers `omp` starts a region in 2 us where `workqueue` takes 34, so it comes first; `workqueue`,
which needs nothing, ends the process when two Python threads start kernels at once, so they go through a lock. GNU's
OpenMP does not survive a fork: in such a child a launch is an error of ours, where Numba would end the process.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba
from numba.np.ufunc import parallel as numba_parallel

from ...errors import InferenceError, MissingDependencyError
from .. import thread_count

LAYERS = ["omp", "tbb", "workqueue"]  # best first
FORKED = (
    "the kernels cannot run in a process that was forked after they had been used: "
    "start processes with multiprocessing's 'spawn' method, or load the model in the child"
)

_numba: Any = numba
_parallel: Any = numba_parallel

# Threads that spin for long between regions starve a machine that has something else to do; libgomp reads this once.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    _numba.config.THREADING_LAYER_PRIORITY = LAYERS

_count = 0  # of this process; 0: not chosen yet
_of_thread = threading.local()  # what Numba was told in each Python thread: it remembers that by thread
_lock = threading.Lock()
_gate: AbstractContextManager[object] | None = None  # None: the layer is not known yet
_forked = False


def use(asked: int | None = None) -> int:
    """Let the kernels of this process use so many threads; None leaves what was chosen, or takes the default."""
    global _count
    if asked is not None or not _count:
        _count = min(thread_count.choose(asked), int(_numba.config.NUMBA_NUM_THREADS))
    return _count


def count() -> int:
    """Threads of the kernels of this process."""
    return _count or use()


def layer() -> str:
    """The threading layer in use; it is loaded now if it was not."""
    try:
        _parallel._launch_threads()
    except (ValueError, ImportError, OSError) as error:
        told = " ".join(str(error).split())
        raise MissingDependencyError(f"Numba finds no threading layer ({told}): unset NUMBA_THREADING_LAYER") from None
    return str(_numba.threading_layer())


def launching() -> AbstractContextManager[object]:
    """To be held while a kernel that starts threads runs: `with launching(): kernel(...)`."""
    if _forked:
        raise InferenceError(FORKED)
    wanted = _count or use()
    if getattr(_of_thread, "count", 0) != wanted:
        layer()
        _numba.set_num_threads(wanted)
        _of_thread.count = wanted
    return _gate or _choose_gate()


def _choose_gate() -> AbstractContextManager[object]:
    global _gate
    _gate = _lock if layer() == "workqueue" else nullcontext()
    return _gate


def _after_fork() -> None:
    """In the child: a lock that some thread of the parent held would never open."""
    global _lock, _gate, _forked
    _lock, _gate = threading.Lock(), None
    _forked = _forked or (_parallel._is_initialized and _numba.threading_layer() == "omp")


os.register_at_fork(after_in_child=_after_fork)
