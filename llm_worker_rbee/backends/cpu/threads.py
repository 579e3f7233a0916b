"""Which threading layer runs the kernels, and how many of its threads a launch uses.

How many threads a backend uses is its own field; a launch masks Numba's pool to that number. Process-wide by nature are
Numba's pool and layer, its mask per Python thread, the launch lock of `workqueue` and the state after a fork.

Of Numba's layers `omp` starts a region in 2 us where `workqueue` takes 34, so it comes first; `workqueue`, which needs
nothing, ends the process when two Python threads start kernels at once, so launches go through a lock. GNU's OpenMP
does not survive a fork: in such a child a launch raises, where Numba would end the process.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba
from numba.np.ufunc import parallel as numba_parallel

from ...errors import InferenceError, MissingDependencyError
from .. import cpu_info

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

_mask = threading.local()  # `threads`: what Numba's mask of this Python thread is
_launch_lock = threading.Lock()
_guard: AbstractContextManager[object] | None = None  # what a launch holds; None: the layer is not known yet
_forked = False


def choose_threads(requested: int | None = None) -> int:
    """Return how many threads a backend uses: `requested`, or the default, at most Numba's pool; raise if too many."""
    return min(cpu_info.choose_thread_count(requested), int(_numba.config.NUMBA_NUM_THREADS))


def threading_layer() -> str:
    """Return the threading layer in use, loading it if needed."""
    try:
        _parallel._launch_threads()
    except (ValueError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise MissingDependencyError(
            f"Numba finds no threading layer ({reason}): unset NUMBA_THREADING_LAYER"
        ) from None
    return str(_numba.threading_layer())


def require_not_forked() -> None:
    """Raise in a child that was forked after kernels had been used."""
    if _forked:
        raise InferenceError(FORKED)


def launch(threads: int) -> AbstractContextManager[object]:
    """Mask Numba's pool to `threads` and return what to hold while a kernel runs: `with launch(n): kernel(...)`."""
    require_not_forked()
    if getattr(_mask, "threads", 0) != threads:
        threading_layer()
        _numba.set_num_threads(threads)
        _mask.threads = threads
    return _guard or _choose_guard()


def _choose_guard() -> AbstractContextManager[object]:
    global _guard
    _guard = _launch_lock if threading_layer() == "workqueue" else nullcontext()
    return _guard


def _after_fork() -> None:
    """In the child, replace the lock: a thread of the parent may have held it."""
    global _launch_lock, _guard, _forked
    _launch_lock, _guard = threading.Lock(), None
    _forked = _forked or (_parallel._is_initialized and _numba.threading_layer() == "omp")


os.register_at_fork(after_in_child=_after_fork)
