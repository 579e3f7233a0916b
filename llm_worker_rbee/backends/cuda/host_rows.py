"""Copies between the KV cache on the GPU and rows of pinned host memory, on a stream of their own.

A kernel gathers the parts of a block, of all layers, into a row on the device, or scatters it; rows travel whole, by
DMA. Memory is pinned as rows are first used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from ..ops import HostRows
from .device import activate, upload
from .kernels.elementwise import copy_blocks

STAGING_BYTES = 32 << 20  # of rows on the device, for each direction; larger rows travel in parts
SLAB_BYTES = 256 << 20  # that are pinned at a time: PyTorch rounds up to a power of two
MIN_ROWS, MIN_BYTES = 64, 256 << 20  # at most, for blocks on their way to the disk, and from it
WORDS = 1024  # of a program's iteration


class PinnedRows(HostRows):
    """One thread may save while another loads."""

    def __init__(self, arrays: Sequence[torch.Tensor], max_bytes: int) -> None:
        self._arrays = [array.view(len(array), -1).view(torch.int32) for array in arrays]
        words = [array.shape[1] for array in self._arrays]
        self._device = self._arrays[0].device
        self._parts = [
            torch.tensor(numbers, dtype=torch.int64, device=self._device)
            for numbers in ([array.data_ptr() for array in self._arrays], words, [0, *accumulate(words[:-1])])
        ]
        self._row_words = sum(words)
        self.row_bytes = 4 * self._row_words
        least = max(2, min(MIN_ROWS, MIN_BYTES // self.row_bytes))
        self.num_rows = max(least, max_bytes // self.row_bytes)
        self._slab_rows = min(self.num_rows, max(1, SLAB_BYTES // self.row_bytes))
        self._slabs: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()  # of new slabs
        batch = min(self.num_rows, STAGING_BYTES // self.row_bytes)
        self._saved, self._loaded = torch.zeros(2, batch, self._row_words, dtype=torch.int32, device=self._device)
        is_gpu = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) if is_gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._row(0)
        if batch:  # compile both now, not beside a step: zeros replace zeros
            self._copy(self._saved, [0], to_blocks=False)
            self._copy(self._saved, [0], to_blocks=True)

    def views(self, row: int) -> list[memoryview]:
        return [self._row(row).numpy().data.cast("B")]

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        with self._on_stream(0) as stream:
            for batch in self._batches(len(blocks)):
                self._copy(self._saved, blocks[batch], to_blocks=False)
                for staged, row in zip(self._saved, rows[batch], strict=False):
                    self._row(row).copy_(staged, non_blocking=True)
            if not len(self._saved):
                for part, target in self._parts_of(blocks, rows):
                    target.copy_(part, non_blocking=True)
            if stream is not None:
                stream.synchronize()

    def load(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        with self._on_stream(1):
            for batch in self._batches(len(blocks)):
                for staged, row in zip(self._loaded, rows[batch], strict=False):
                    staged.copy_(self._row(row), non_blocking=True)
                self._copy(self._loaded, blocks[batch], to_blocks=True)
            if not len(self._loaded):
                for part, source in self._parts_of(blocks, rows):
                    part.copy_(source, non_blocking=True)

    def _batches(self, count: int) -> list[slice]:
        """Return the parts of a copy that have room in the staging memory at a time."""
        size = len(self._saved)
        return [slice(first, first + size) for first in range(0, count, size)] if size else []

    def _parts_of(self, blocks: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each part of blocks, and where it is in their rows."""
        for block, number in zip(blocks, rows, strict=True):
            parts = [array[block] for array in self._arrays]
            yield from zip(parts, torch.split(self._row(number), [len(part) for part in parts]), strict=True)

    def finish(self) -> None:
        if (stream := self._streams[1]) is not None:
            stream.synchronize()

    @contextmanager
    def _on_stream(self, i: int) -> Iterator[torch.cuda.Stream | None]:
        """Launch on a stream, after the steps that were launched before: they may still use the blocks."""
        activate(self._device)
        if (stream := self._streams[i]) is None:
            yield None
            return
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            yield stream

    def _copy(self, staged: torch.Tensor, blocks: Sequence[int], *, to_blocks: bool) -> None:
        index = upload(torch.tensor(blocks).numpy(), self._device)
        copy_blocks[(len(blocks), len(self._arrays))](*self._parts, index, staged, self._row_words, to_blocks, WORDS)

    def _row(self, row: int) -> torch.Tensor:
        """Return a row; pin the memory around it if it is the first there."""
        number, i = divmod(row, self._slab_rows)
        with self._lock:
            if number not in self._slabs:
                shape, pinned = (self._slab_rows, self._row_words), self._device.type == "cuda"
                self._slabs[number] = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
            return self._slabs[number][i]
