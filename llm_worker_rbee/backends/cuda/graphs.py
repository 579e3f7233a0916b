"""CUDA graphs of a decoder, one for each size of batch, captured when that size comes again.

A graph remembers addresses: whoever moves a buffer that it reads says `forget`. Without a GPU the same calls run as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from . import device

MOST = 96  # graphs that are kept; what is rarer runs as it is


class Graphs:
    """What was captured, by size."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None

    def forget(self) -> None:
        """Addresses have changed."""
        self._made.clear()
        self._seen.clear()
        self._pool = None  # the old one may be given back with the last graph

    def run(self, size: Hashable, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `step` gives. The first time it runs as it is, which compiles it; the second time it is captured."""
        if (
            device.current().type == "cpu"
            or size not in self._seen
            or (size not in self._made and len(self._made) >= MOST)
        ):
            self._seen.add(size)
            return step()
        if size not in self._made:
            self._made[size] = self._captured(step)
        graph, result = self._made[size]
        graph.replay()
        return result

    def _captured(self, step: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return graph, result
