"""The whole numbers of a step on their way to the device: one block of int32, one copy.

Every array begins at a multiple of four numbers, so that kernels are compiled once, for aligned pointers. The host's
side is page-locked and long: steps take the next piece of it in turn, and only when it begins anew does the host wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from . import device

LENGTH = 1 << 20  # numbers
STEP = 4  # numbers: 16 bytes


def aligned(count: int) -> int:
    """The place after an array of so many numbers."""
    return -(-count // STEP) * STEP


class Inputs:
    """Page-locked memory of the host."""

    def __init__(self) -> None:
        self._make(LENGTH)

    def _make(self, length: int) -> None:
        self._block = torch.empty(length, dtype=torch.int32, pin_memory=device.current().type == "cuda")
        self._numbers = self._block.numpy()
        self._at = 0

    def _piece(self, count: int) -> int:
        """The first of `count` numbers that nobody copies from."""
        if self._at + count > len(self._numbers):
            if device.current().type == "cuda":
                torch.cuda.current_stream().synchronize()
            if count > len(self._numbers):
                self._make(2 * count)
            self._at = 0
        start = self._at
        self._at += count
        return start

    def put(self, arrays: Mapping[str, tuple[int, NDArray[Any], int]], target: torch.Tensor | None = None) -> Any:
        """Copy arrays, each given as (room, its numbers, what fills the rest of the room), into `target` if there is
        one; views of it by name."""
        total = sum(aligned(room) for room, _, _ in arrays.values())
        first = at = self._piece(total)
        numbers = self._numbers
        for room, array, rest in arrays.values():
            end = at + array.size
            numbers[at:end] = array.reshape(-1)
            if array.size < room:
                numbers[end : at + room] = rest
            at += aligned(room)
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=device.current())
        target[:total].copy_(self._block[first:at], non_blocking=True)
        return views(arrays, target)


def views(arrays: Mapping[str, tuple[int, Any, int]], target: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same places in a block of the device."""
    found, at = {}, 0
    for name, (room, _, _) in arrays.items():
        found[name] = target[at : at + room]
        at += aligned(room)
    return found
