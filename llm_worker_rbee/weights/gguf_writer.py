"""GGUF writer for metadata and tensors that are already in their final type; it quantizes nothing.

The type of a metadata value follows from the Python value unless it is a `Typed("uint32", 7)`. A tensor is a NumPy
array (float32, float16, integers) or a `Raw` of bytes in some block type.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .gguf import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING
from .quants import BLOCK_TYPES

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


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorLike] | None = None,
    *,
    version: int = 3,
    alignment: int = DEFAULT_ALIGNMENT,
) -> Path:
    """Write one file; adds `general.alignment` if it is not the default."""
    if alignment != DEFAULT_ALIGNMENT:
        metadata = {**metadata, "general.alignment": Typed("uint32", alignment)}
    raws = {name: _raw(tensor) for name, tensor in (tensors or {}).items()}
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", version, len(raws), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(value))
        file.write(_directory(raws, alignment))
        for raw in raws.values():
            _pad(file, alignment)
            file.write(np.asarray(raw.data).data)
        if raws:
            _pad(file, alignment)
    return path


def _raw(tensor: TensorLike) -> Raw:
    if isinstance(tensor, Raw):
        return tensor._replace(data=np.frombuffer(tensor.data, np.uint8) if len(tensor.data) else NO_BYTES)
    array = np.ascontiguousarray(tensor).reshape(tensor.shape)
    return Raw(NUMPY_TYPES[array.dtype.name], array.shape, array.reshape(-1).view(np.uint8))


def _directory(raws: Mapping[str, Raw], alignment: int) -> bytes:
    out, offset = bytearray(), 0
    for name, raw in raws.items():
        out += _string(name) + struct.pack("<I", len(raw.shape))
        out += b"".join(struct.pack("<Q", dim) for dim in reversed(raw.shape))
        out += struct.pack("<IQ", BLOCK_TYPES[raw.kind].id, offset)
        offset += -(-len(raw.data) // alignment) * alignment
    return bytes(out)


def _pad(file: BinaryIO, alignment: int) -> None:
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
