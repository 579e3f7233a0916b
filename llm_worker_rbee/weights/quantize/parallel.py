"""Quantize many tensors on all cores, in order, without holding a whole tensor as float32.

A job is split into pieces of rows; threads work on the next few pieces (NumPy releases the GIL) while the caller
receives finished ones in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import machine
from ...errors import ModelFileError
from ..checkpoint import Tensor
from ..quants import BlockType
from . import quantize

PIECE_VALUES = 1 << 19  # values
Progress = Callable[[str, int, int | None], None]  # activity, bytes written, total bytes


class TensorJob(NamedTuple):
    """One tensor to write: its source, type, row order, and an offset added to its values."""

    name: str
    source: Tensor
    kind: BlockType
    order: NDArray[np.intp] | None = None  # row i (of a vector: value i) is row order[i] of the source
    offset: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.kind.row_bytes(self.columns)

    @property
    def columns(self) -> int:
        """Values per row; a vector is a column, so that its values can be permuted."""
        shape = self.source.shape
        return shape[-1] if len(shape) > 1 or self.source.kind.block_size > 1 else 1

    @property
    def n_rows(self) -> int:
        return self.source.size // self.columns if self.columns else 0

    def encode_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes of rows start .. stop of the result."""
        source = self.source
        raw = source.data.reshape(self.n_rows, source.kind.row_bytes(self.columns))
        raw = raw[start:stop] if self.order is None else raw[self.order[start:stop]]
        if source.kind is self.kind and not self.offset:
            return raw.reshape(-1)
        values = source.kind.decode(np.ascontiguousarray(raw).reshape(-1, source.kind.block_bytes))
        if self.offset:
            values = values + np.float32(self.offset)
        try:
            return quantize(self.kind, values.reshape(-1, self.columns))
        except ModelFileError as error:
            raise ModelFileError(f"tensor {self.name!r}: {error}") from error


def default_threads() -> int:
    """Return the usable cores of this process, limited by a container's CPU quota."""
    quota = machine.cpu_quota()
    return machine.usable_cores() if quota is None else max(1, min(machine.usable_cores(), math.ceil(quota)))


def run_jobs(jobs: Sequence[TensorJob], threads: int | None = None) -> Iterator[tuple[TensorJob, NDArray[np.uint8]]]:
    """Yield the pieces of all jobs in order; a few are computed ahead."""
    count = threads or default_threads()
    pool, ahead = ThreadPoolExecutor(count, "quantize"), deque[tuple[TensorJob, Future[NDArray[np.uint8]]]]()
    try:
        for job, start, stop in _pieces(jobs):
            ahead.append((job, pool.submit(job.encode_rows, start, stop)))
            if len(ahead) > 2 * count:
                first, piece = ahead.popleft()
                yield first, piece.result()
        for first, piece in ahead:
            yield first, piece.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(jobs: Iterable[TensorJob]) -> Iterator[tuple[TensorJob, int, int]]:
    for job in jobs:
        step = max(1, PIECE_VALUES // max(job.columns, 1))
        for start in range(0, job.n_rows, step):
            yield job, start, min(start + step, job.n_rows)


def quantize_in_memory(
    jobs: Sequence[TensorJob], threads: int | None = None, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Run all jobs and return the resulting tensors."""
    made = {job.name: np.empty(job.nbytes, np.uint8) for job in jobs}
    filled, done, total = dict.fromkeys(made, 0), 0, sum(job.nbytes for job in jobs)
    for job, piece in run_jobs(jobs, threads):
        at = filled[job.name]
        made[job.name][at : at + piece.size] = piece
        filled[job.name] = at + piece.size
        done += piece.size
        if progress is not None:
            progress("quantizing", done, total)
    return {job.name: Tensor(job.name, job.kind, job.source.shape, made[job.name]) for job in jobs}
