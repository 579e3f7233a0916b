"""CUDA graphs of a decoder, one for each size of batch, captured when that size comes again.

A graph remembers addresses: whoever moves a buffer that it reads says `forget`. All share one pool of memory, and
large results one buffer, since a result is good until the next step only. Without a GPU the same calls run as they are.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import device

MOST = 96  # graphs that are kept, but for those of plain sizes; what is rarer runs as it is
ROWS = 256  # of the largest result
LARGE = 1 << 20  # bytes of a result that is worth a copy: many graphs would each hold their own
_one_at_a_time = threading.Lock()  # PyTorch's rule for captures in a process, which may have several engines


@contextmanager
def _nothing_dies() -> Iterator[None]:
    """Without the garbage collector: an old graph that it finds may not be destroyed while another is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Graphs:
    """What was captured, by size; `nbytes` is what it takes on the device."""

    def __init__(self) -> None:
        self.nbytes = 0  # by the driver's count: the pool, shared results, and the graphs themselves
        self._made: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self._seen: dict[Hashable, torch.Size] = {}  # sizes that have run, and the shape of what came out
        self._pool: Any = None
        self._results: torch.Tensor | None = None  # room for ROWS

    def __len__(self) -> int:
        return len(self._made)

    def forget(self) -> None:
        """Addresses have changed."""
        with _one_at_a_time:  # none is destroyed while another is captured
            self._made.clear()
        self.nbytes = 0
        self._seen.clear()
        self._results = None
        self._pool = None  # the old one may be given back with the last graph

    def run(self, size: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `step` gives. The first time it runs as it is, which compiles it; the second time it is captured."""
        is_known = size in self._made or (size in self._seen and (isinstance(size, int) or len(self._made) < MOST))
        if device.current().type == "cpu" or not is_known:
            result = step()
            self._seen[size] = result.shape
            return result
        if size not in self._made:
            return self._first_replay(size, step)
        graph, result = self._made[size]
        graph.replay()
        return result

    def time_replay(self, batch: int, count: int = 20) -> float | None:
        """Return the seconds of a replay of the decode graph for a batch; None if it is not captured."""
        size = min((size for size in self._made if isinstance(size, int) and size >= batch), default=None)
        if size is None:
            return None
        graph, _ = self._made[size]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / count / 1e3

    def _first_replay(self, size: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Capture and run; the driver takes its part of the memory with the first run."""
        with _one_at_a_time:
            torch.cuda.empty_cache()  # as a capture does, but before memory is counted
            before, _ = torch.cuda.mem_get_info(device.current())
            graph, result = self._made[size] = self._captured(step, self._shared(self._seen[size]))
            graph.replay()
            after, _ = torch.cuda.mem_get_info(device.current())
            self.nbytes += max(0, before - after)
        return result

    def _captured(self, step: Callable[[], torch.Tensor], out: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with _nothing_dies(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
            if out is not None:
                result = out.copy_(result)
        return graph, result

    def _shared(self, shape: torch.Size) -> torch.Tensor | None:
        """Where a large result goes: float32 logits of any graph, the last one's only."""
        if 4 * shape.numel() <= LARGE or shape[0] > ROWS:
            return None
        if self._results is None:
            self._results = torch.empty(ROWS * shape[1:].numel(), dtype=torch.float32, device=device.current())
        return self._results[: shape.numel()].view(shape)
