"""GGUF writer: `write_gguf` for tensors in their final type, `write_quantized_gguf` for tensors quantized on the way.

The type of a metadata value follows from the Python value unless it is a `Typed("uint32", 7)`. A tensor of `write_gguf`
is a NumPy array (float32, float16, integers) or a `Raw` of bytes in some block type. `write_quantized_gguf` writes
pieces of tensors as they are made; the file gets its name only when it is complete.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import WorkerError, human_bytes
from .gguf import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, VERSIONS
from .quantize import Progress, TensorJob, run_jobs
from .quants import BLOCK_TYPES

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
SPARE_BYTES = 1 << 20  # metadata, and other programs' writes meanwhile
TYPE_IDS = {name: i for i, (name, _) in SCALARS.items()}
NUMPY_TYPES = {f"float{n}": f"F{n}" for n in (16, 32, 64)} | {f"int{n}": f"I{n}" for n in (8, 16, 32, 64)}
NO_BYTES = np.zeros(0, np.uint8)


class Typed(NamedTuple):
    """A scalar, or a list of scalars, with an explicit metadata type."""

    type: str
    value: Any


class Raw(NamedTuple):
    """Bytes of a tensor in block type `kind`; `shape` in NumPy order."""

    kind: str
    shape: tuple[int, ...]
    data: NDArray[Any] | bytes


TensorLike = NDArray[Any] | Raw
Entry = tuple[str, tuple[int, ...], int, int]  # of the directory: name, shape, type id, bytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorLike] | None = None,
    *,
    version: int = VERSIONS[-1],
    alignment: int = DEFAULT_ALIGNMENT,
) -> Path:
    """Write one file, which replaces an existing one at the very end; adds an `alignment` that is not the default."""
    if alignment != DEFAULT_ALIGNMENT:
        metadata = {**metadata, "general.alignment": Typed("uint32", alignment)}
    raws = {name: _raw(tensor) for name, tensor in (tensors or {}).items()}
    entries = [(name, raw.shape, BLOCK_TYPES[raw.kind].id, len(raw.data)) for name, raw in raws.items()]
    with _replacing(path) as file:
        _write_header(file, metadata, entries, version, alignment)
        for raw in raws.values():
            _pad(file, alignment)
            file.write(np.asarray(raw.data).data)
        if raws:
            _pad(file, alignment)
    return path


def write_quantized_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    jobs: Sequence[TensorJob],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Quantize and write tensors; an existing file of this name is replaced at the very end."""
    total = sum(_align(job.nbytes) for job in jobs)
    with _explain_os_errors(path, total):
        if shutil.disk_usage(path.parent).free < total + SPARE_BYTES:
            raise _no_space_error(path, total)
        with _replacing(path) as file:
            entries = [(job.name, job.source.shape, job.kind.id, job.nbytes) for job in jobs]
            _write_header(file, metadata, entries, VERSIONS[-1], DEFAULT_ALIGNMENT)
            _write_jobs(file, jobs, total, threads, progress)
            file.flush()
            os.fsync(file.fileno())
    return path


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path` that replaces `path` once it is complete."""
    part = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_jobs(
    file: BinaryIO, jobs: Sequence[TensorJob], total: int, threads: int | None, progress: Progress | None
) -> None:
    _pad(file)
    start, before = file.tell(), None
    for job, piece in run_jobs(jobs, threads):
        if job is not before:
            _pad(file)
        file.write(piece.data)
        before = job
        if progress is not None:
            progress("converting", file.tell() - start, total)
    _pad(file)


@contextmanager
def _explain_os_errors(path: Path, total: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise _no_space_error(path, total) from error
        raise WorkerError(f"cannot write {path}: {error.strerror or error}") from error


def _no_space_error(path: Path, total: int) -> WorkerError:
    free = ""
    with suppress(OSError):
        free = f" and {human_bytes(shutil.disk_usage(path.parent).free)} are free"
    return WorkerError(f"no room in {path.parent}: {path.name} takes {human_bytes(total)}{free}: free some space first")


def _raw(tensor: TensorLike) -> Raw:
    if isinstance(tensor, Raw):
        return tensor._replace(data=np.frombuffer(tensor.data, np.uint8) if len(tensor.data) else NO_BYTES)
    array = np.ascontiguousarray(tensor).reshape(tensor.shape)
    return Raw(NUMPY_TYPES[array.dtype.name], array.shape, array.reshape(-1).view(np.uint8))


def _write_header(
    file: BinaryIO, metadata: Mapping[str, Any], entries: Sequence[Entry], version: int, alignment: int
) -> None:
    """Write everything before the tensors; their offsets follow from their sizes."""
    file.write(MAGIC + struct.pack("<IQQ", version, len(entries), len(metadata)))
    for key, value in metadata.items():
        file.write(_string(key) + _value(value))
    offset = 0
    for name, shape, type_id, nbytes in entries:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))  # fastest first
        file.write(_string(name) + dims + struct.pack("<IQ", type_id, offset))
        offset += _align(nbytes, alignment)


def _align(nbytes: int, alignment: int = DEFAULT_ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def _pad(file: BinaryIO, alignment: int = DEFAULT_ALIGNMENT) -> None:
    file.write(bytes(-file.tell() % alignment))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    kind, plain = (value.type, value.value) if isinstance(value, Typed) else (_type_of(value), value)
    if isinstance(plain, str):
        return struct.pack("<I", STRING) + _string(plain)
    if isinstance(plain, (np.ndarray, list, tuple)):
        return struct.pack("<I", ARRAY) + _array(kind, plain)
    return struct.pack("<I", TYPE_IDS[kind]) + struct.pack(SCALARS[TYPE_IDS[kind]][1], plain)


def _array(kind: str, items: NDArray[Any] | Sequence[Any]) -> bytes:
    count = struct.pack("<Q", len(items))
    if kind == "string":
        return struct.pack("<I", STRING) + count + b"".join(map(_string, items))
    if kind == "array":
        typed = (item if isinstance(item, Typed) else Typed(_type_of(item), item) for item in items)
        body = b"".join(_array(item.type, item.value) for item in typed)
        return struct.pack("<I", ARRAY) + count + body
    type_id = TYPE_IDS[kind]
    return struct.pack("<I", type_id) + count + np.asarray(items, SCALARS[type_id][1]).tobytes()


def _type_of(value: Any) -> str:
    """Return the default GGUF type of a Python value, or of the elements of an array."""
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype.name)
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (list, tuple, np.ndarray)):  # a Typed is a tuple too
            return "array"
        whole = bool(value) and all(type(item) is int for item in value)
        return _int_type(min(value), max(value)) if whole else _type_of(value[0] if value else 0)
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return _int_type(value, value)
    return {float: "float32", str: "string"}[type(value)]


def _int_type(min_value: int, max_value: int) -> str:
    if min_value < 0:
        return "int32" if min_value >= -(1 << 31) and max_value < 1 << 31 else "int64"
    return "uint32" if max_value < 1 << 32 else "uint64"
