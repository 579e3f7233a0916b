"""CUDA graphs of steps, by key. They are captured ahead of time (`capture`), or when a key occurs a second time
(`run`): the first run compiles and loads what it launches.

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

MAX_RESULT_ROWS = 256
MIN_SHARED_RESULT = 1 << 20  # bytes of a result that is worth a copy
_capture_lock = threading.Lock()  # PyTorch allows one capture at a time in a process, which may have several engines

Step = Callable[[], torch.Tensor | None]


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
    """Captured graphs; `nbytes` is their memory on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0  # by the driver's count: the pool, shared results, and the graphs themselves
        self.num_captures = 0
        self._graphs: dict[Hashable, tuple[Any, torch.Tensor | None]] = {}
        self._has_run: set[Hashable] = set()
        self._uncaptured: set[Hashable] = set()  # for lack of memory
        self._pool: Any = None
        self._stream: Any = None  # that captures
        self._results: torch.Tensor | None = None  # room for MAX_RESULT_ROWS

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drop all graphs: addresses have changed."""
        with _capture_lock:  # none is destroyed while another is captured
            self._graphs.clear()
        self.nbytes = 0
        self._has_run.clear()
        self._uncaptured.clear()
        self._results = None
        self._pool = None  # freed with its last graph

    def run(self, key: Hashable, step: Step) -> torch.Tensor | None:
        """Return the result of `step`: replayed, or run as it is the first time and captured the second time."""
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        if self.device.type == "cpu" or key not in self._has_run or key in self._uncaptured:
            self._has_run.add(key)
            return step()
        try:
            with self.counting_memory():
                return self.capture(key, step)
        except torch.OutOfMemoryError:
            self._uncaptured.add(key)
            return step()

    @contextmanager
    def counting_memory(self) -> Iterator[None]:
        """Add the memory of graphs captured inside to `nbytes`, by the driver's count."""
        if self.device.type == "cpu":
            yield
            return
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(self.device)
        yield
        after, _ = torch.cuda.mem_get_info(self.device)
        self.nbytes += max(0, before - after)

    def capture(self, key: Hashable, step: Step) -> torch.Tensor | None:
        """Capture a step whose kernels have been loaded, and run it: the driver allocates its part with the first run.

        Without `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time."""
        if self.device.type == "cpu":
            return step()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with _capture_lock, _without_gc(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = self._to_shared_buffer(step())
            finally:
                graph.capture_end()
        self._graphs[key] = graph, result
        self.num_captures += 1
        graph.replay()
        return result

    def time_replay(self, key: Hashable, count: int = 20) -> float | None:
        """Return the seconds of a replay; None if this graph is not captured."""
        if key not in self._graphs:
            return None
        graph, _ = self._graphs[key]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / count / 1e3

    def _to_shared_buffer(self, result: torch.Tensor | None) -> torch.Tensor | None:
        """Copy a large result (float32 logits) to the buffer that all graphs share: each would hold its own."""
        if result is None or result.nbytes <= MIN_SHARED_RESULT or len(result) > MAX_RESULT_ROWS:
            return result
        if self._results is None:
            self._results = torch.empty(MAX_RESULT_ROWS * result.shape[1], dtype=torch.float32, device=self.device)
        return self._results[: result.numel()].view(result.shape).copy_(result)
