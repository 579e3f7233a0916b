"""CUDA graphs of a decoder, one per batch size, captured when that size occurs a second time.

A graph holds addresses: call `clear` after moving a buffer that it reads. All share one memory pool, and large results
one buffer, since a result is valid until the next step only. Without a GPU steps run uncaptured.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

MAX_GRAPHS = 96  # beside those of plain batch sizes; rarer sizes run uncaptured
MAX_RESULT_ROWS = 256
MIN_SHARED_RESULT = 1 << 20  # bytes of a result that is worth a copy: many graphs would each hold their own
_capture_lock = threading.Lock()  # PyTorch allows one capture at a time in a process, which may have several engines


@contextmanager
def _without_gc() -> Iterator[None]:
    """Stop the garbage collector: it may not destroy an old graph while another is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaGraphs:
    """Captured graphs by size; `nbytes` is what they take on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0  # by the driver's count: the pool, shared results, and the graphs themselves
        self._graphs: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self._result_shapes: dict[Hashable, torch.Size] = {}  # of sizes that have run
        self._pool: Any = None
        self._results: torch.Tensor | None = None  # room for MAX_RESULT_ROWS

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drop all graphs: addresses have changed."""
        with _capture_lock:  # none is destroyed while another is captured
            self._graphs.clear()
        self.nbytes = 0
        self._result_shapes.clear()
        self._results = None
        self._pool = None  # freed with its last graph

    def run(self, size: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of `step`: run as it is the first time, which compiles it, captured the second time."""
        has_room = isinstance(size, int) or len(self._graphs) < MAX_GRAPHS
        is_known = size in self._graphs or (size in self._result_shapes and has_room)
        if self.device.type == "cpu" or not is_known:
            result = step()
            self._result_shapes[size] = result.shape
            return result
        if size not in self._graphs:
            return self._capture_and_replay(size, step)
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def time_replay(self, batch: int, count: int = 20) -> float | None:
        """Return the seconds of a replay of the decode graph for a batch; None if it is not captured."""
        size = min((size for size in self._graphs if isinstance(size, int) and size >= batch), default=None)
        if size is None:
            return None
        graph, _ = self._graphs[size]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / count / 1e3

    def _capture_and_replay(self, size: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Capture and run once; the driver allocates its part of the memory with the first run."""
        with _capture_lock:
            torch.cuda.empty_cache()  # as a capture does, but before memory is counted
            before, _ = torch.cuda.mem_get_info(self.device)
            graph, result = self._graphs[size] = self._capture(step, self._shared_result(self._result_shapes[size]))
            graph.replay()
            after, _ = torch.cuda.mem_get_info(self.device)
            self.nbytes += max(0, before - after)
        return result

    def _capture(self, step: Callable[[], torch.Tensor], out: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with _without_gc(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
            if out is not None:
                result = out.copy_(result)
        return graph, result

    def _shared_result(self, shape: torch.Size) -> torch.Tensor | None:
        """Return the buffer of a large result (float32 logits of any graph, the last one's only), if it is large."""
        if 4 * shape.numel() <= MIN_SHARED_RESULT or shape[0] > MAX_RESULT_ROWS:
            return None
        if self._results is None:
            size = MAX_RESULT_ROWS * shape[1:].numel()
            self._results = torch.empty(size, dtype=torch.float32, device=self.device)
        return self._results[: shape.numel()].view(shape)
