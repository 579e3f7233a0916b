"""The backends under test, and how a function on each is timed: on a device, calls end with a synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_worker_bench.micro import Function
from llm_worker_bench.roofline import library_threads
from llm_worker_rbee.backends import BACKENDS, Backend, select_backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.backends.select import has_driver, missing_packages
from llm_worker_rbee.errors import InvalidRequestError, MissingDependencyError

NAMES = tuple(name for name in BACKENDS if name != "auto")
DEVICE_CALLS = 20  # launched between two synchronisations: one alone would measure those


class Timed(NamedTuple):
    """A function that does the same thing `calls` times."""

    function: Function
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Target:
    """One backend."""

    ops: Backend

    @property
    def name(self) -> str:
        return self.ops.name

    @property
    def is_reference(self) -> bool:
        return self.ops.name == "reference"

    @property
    def label(self) -> str:
        """The name with what it computes on: `cpu (2 threads)`."""
        if self.ops.has_device_memory:
            return f"{self.name} ({self.ops.device})"
        threads = self.ops.threads or library_threads()
        return f"{self.name} ({threads} thread{'s' * (threads != 1)})"

    def timed(self, function: Function) -> Timed:
        """Return the function for `time_sides`: on a device several calls and a synchronisation."""
        if not self.ops.has_device_memory:
            return Timed(function)
        synchronize = self.ops.synchronize

        def call_and_wait() -> None:
            for _ in range(DEVICE_CALLS):
                function()
            synchronize()

        return Timed(call_and_wait, DEVICE_CALLS)

    def with_threads(self, threads: int) -> Target:
        """Return the same backend with so many threads, if it has threads of its own."""
        if self.ops.threads in (None, threads):
            return self
        return Target(select_backend("cpu", self.name, threads))

    def array(self, values: NDArray[Any]) -> Any:
        """Return float32 values as an array of the backend."""
        return self.ops.prepare_vector(np.asarray(values, np.float32))


def open_targets(names: Sequence[str]) -> tuple[tuple[Target, ...], dict[str, str]]:
    """Open backends, all if none is named; return them, and the reasons why others are left out."""
    for name in names:
        if name not in NAMES:
            raise InvalidRequestError(f"unknown backend {name!r}: use one of {', '.join(NAMES)}", "backends")
    targets, left_out = [], {}
    for name in NAMES:
        if names and name not in names:
            continue
        if name == "cuda" and not missing_packages() and not has_driver():  # importing PyTorch takes seconds
            left_out[name] = "there is no NVIDIA driver, or CUDA_VISIBLE_DEVICES hides the GPU"
            continue
        try:
            targets.append(Target(ReferenceBackend() if name == "reference" else select_backend("auto", name)))
        except MissingDependencyError as error:
            left_out[name] = str(error)
    if not targets:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise MissingDependencyError(f"no backend is there to test ({reasons})")
    return tuple(targets), left_out


def to_numpy(array: Any) -> NDArray[Any]:
    """Return an array of any backend on the host."""
    return array.float().cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)
