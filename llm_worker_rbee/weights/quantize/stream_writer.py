"""Write quantized tensors to a GGUF file as they are made; the file gets its name only when it is complete.

`gguf_writer` writes the metadata; the directory is written here, before the tensors exist.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import WorkerError, human_bytes
from ..gguf import DEFAULT_ALIGNMENT, MAGIC
from ..gguf_writer import write_gguf
from .parallel import Progress, TensorJob, run_jobs

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
SPARE_BYTES = 1 << 20  # metadata, and other programs' writes meanwhile


def write_quantized_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    jobs: Sequence[TensorJob],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the file; an existing file of this name is replaced at the very end."""
    total = sum(_aligned(job.nbytes) for job in jobs)
    with _explain_os_errors(path, total):
        free = shutil.disk_usage(path.parent).free
        if free < total + SPARE_BYTES:
            raise _no_space_error(path, total, free)
        part = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
        try:
            write_gguf(part, metadata)
            with part.open("r+b") as file:
                _write_tensors(file, jobs, total, threads, progress)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _write_tensors(
    file: BinaryIO, jobs: Sequence[TensorJob], total: int, threads: int | None, progress: Progress | None
) -> None:
    file.seek(len(MAGIC) + 4)  # the tensor count, which write_gguf wrote as 0
    file.write(struct.pack("<Q", len(jobs)))
    file.seek(0, os.SEEK_END)
    file.write(_directory(jobs))
    _pad(file)
    start, before = file.tell(), None
    for job, piece in run_jobs(jobs, threads):
        if before is not None and job is not before:
            _pad(file)
        file.write(piece.data)
        before = job
        if progress is not None:
            progress("converting", file.tell() - start, total)
    _pad(file)


def _directory(jobs: Sequence[TensorJob]) -> bytes:
    out, offset = bytearray(), 0
    for job in jobs:
        name, dims = job.name.encode(), job.source.shape[::-1]  # fastest first
        out += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", job.kind.id, offset)
        offset += _aligned(job.nbytes)
    return bytes(out)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


@contextmanager
def _explain_os_errors(path: Path, total: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            free = None
            with suppress(OSError):
                free = shutil.disk_usage(path.parent).free
            raise _no_space_error(path, total, free) from error
        raise WorkerError(f"cannot write {path}: {error.strerror or error}") from error


def _no_space_error(path: Path, total: int, free: int | None) -> WorkerError:
    left = "" if free is None else f" and {human_bytes(free)} are free"
    return WorkerError(f"no room in {path.parent}: {path.name} takes {human_bytes(total)}{left}: free some space first")
