"""Kernels made ready before they are needed: taken from the disk, or compiled by several processes at once.

Numba compiles one kernel at a time in a process, so helpers share the work: each has a part of the list, and then
walks backwards through the parts of the others; what is on the disk by then is left out. Without them it takes longer.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..config import KV_DEFAULT, ModelConfig
from ..weights import Checkpoint
from . import thread_count
from .ops import Progress

COMPILING = "compiling kernels, once"
FEW = 4  # kernels that are compiled sooner than a helper has started
MOST_HELPERS = 7
FOLDER_VARIABLE = "LLM_WORKER_KERNEL_CACHE"  # as in cpu/jit.py, which needs Numba


class Kernel(Protocol):
    """One function to be compiled."""

    name: str

    @property
    def loaded(self) -> bool:
        """Whether it can be called."""

    @property
    def kept(self) -> bool:
        """Whether it need not be compiled."""

    def load(self) -> None:
        """From the disk, or compiled and put there."""


class Needs(NamedTuple):
    """What decides which kernels a model needs."""

    kinds: frozenset[str]  # block types of its matrices
    group: int  # heads that share a KV head
    kv_type: str = KV_DEFAULT

    @staticmethod
    def of(checkpoint: Checkpoint, config: ModelConfig, kv_type: str = KV_DEFAULT) -> Needs:
        """Read from the directory of its tensors."""
        kinds = frozenset(t.kind.name for t in checkpoint.tensors.values() if len(t.shape) == 2)
        return Needs(kinds, max(1, config.n_heads // max(1, config.n_kv_heads)), kv_type)


def get_ready(wanted: Sequence[Kernel], folder: Path | None, progress: Progress | None = None) -> int:
    """Load all of these; how many had to be compiled. `folder` is where the disk keeps them."""
    missing = [kernel for kernel in wanted if not kernel.kept]
    tell = progress or (lambda what, done, total: None)
    own, *others = _orders(missing, 1 + min(thread_count.choose() - 1, MOST_HELPERS, len(missing) // FEW))
    with _helpers(others, folder):
        for kernel in own:
            tell(COMPILING, sum(one.kept for one in missing), len(missing))
            if not kernel.kept:
                kernel.load()
    if missing:
        tell(COMPILING, len(missing), len(missing))
    for kernel in wanted:
        kernel.load()
    return len(missing)


def _orders(missing: Sequence[Kernel], processes: int) -> list[list[Kernel]]:
    """In which order each process goes through the kernels, so that two seldom meet at one."""
    edges = [len(missing) * i // processes for i in range(processes + 1)]
    parts = [list(missing[start:stop]) for start, stop in pairwise(edges)]
    return [
        parts[i] + [kernel for j in range(1, processes) for kernel in reversed(parts[(i + j) % processes])]
        for i in range(processes)
    ]


@contextmanager
def _helpers(orders: Sequence[Sequence[Kernel]], folder: Path | None) -> Iterator[None]:
    """Other processes at the same work for as long as the block lasts."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        if folder is not None and sys.executable:
            with suppress(OSError):  # no process more may be started: it only takes longer
                for order in orders:
                    started.append(_helper([kernel.name for kernel in order], folder))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _helper(names: list[str], folder: Path) -> subprocess.Popen[bytes]:
    package = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import help_out; help_out()"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, FOLDER_VARIABLE: str(folder.parent)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(json.dumps(names).encode())
    except OSError:
        pass  # it could not even start
    return process


def help_out() -> None:
    """What a helper does: compile the kernels that standard input names, but for those that are there by then.

    It ends with who asked for it, also where that process was ended from outside.
    """
    catalog: Any = importlib.import_module(f"{__package__}.cpu.catalog")
    known = {kernel.name: kernel for kernel in catalog.every()}
    asked_by = os.getppid()
    for name in json.load(sys.stdin):
        if os.getppid() != asked_by:
            return
        if name in known and not known[name].kept:
            known[name].load()
