"""Bounds-checked GGUF reader over mmap: metadata, tensor directory, split sets. It copies and decodes no tensor.

Every count, length and offset is checked against the file size before use; an error names the key or tensor.

    magic "GGUF" | version u32 | n_tensors u64 | n_metadata u64
    metadata:  key (u64 length + bytes) | type u32 | value          (array: type u32 | count u64 | values)
    directory: name | n_dims u32 | dims u64 x n_dims, fastest first | type u32 | offset u64
    padding to general.alignment | tensor data
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ModelFileError, UnsupportedModelError
from .checkpoint import Checkpoint, Tensor, count_values, map_file
from .quants import BY_ID, REMOVED_TYPES

PROJECTOR = "mmproj"  # in the names of files that hold no model, but the vision tower of one
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 63
MAX_ARRAY_DEPTH = 4
CUT_OFF = "the file is cut off or damaged"
MAX_ENTRIES = 1 << 17  # tensors, keys, nested arrays: each takes far more memory here than in the file
MAX_SHOWN_CHARS = 80  # characters of a key in a message: a damaged key may be megabytes long

# NAME-00001-of-00003.gguf
SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)

STRING, ARRAY = 8, 9
SCALARS = {  # type id -> (name, struct format); NumPy understands the same formats
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<?"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
TYPE_NAMES = {i: name for i, (name, _) in SCALARS.items()} | {STRING: "string", ARRAY: "array"}

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_scalars = {i: struct.Struct(fmt) for i, (_, fmt) in SCALARS.items()}


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or a whole split set by its first file."""
    first = read_gguf_file(path)
    tensors = dict(first.tensors)
    for part in read_split_parts(first):
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{part.path.name}: tensor {name!r} is in two files of the split set")
            tensors[name] = tensor
    if "split.tensors.count" in first.metadata and (count := _split_int(first, "split.tensors.count")) != len(tensors):
        raise ModelFileError(
            f"{path.name}: the split set holds {len(tensors)} tensors, 'split.tensors.count' is {count}"
        )
    architecture = first.metadata.get("general.architecture")
    if architecture is not None and not isinstance(architecture, str):
        raise ModelFileError(f"{path.name}: metadata key 'general.architecture' is not a string")
    return Checkpoint(path, "gguf", architecture, first.metadata, tensors, first.value_types)


def read_gguf_file(path: Path) -> GGUFFile:
    """Parse header, metadata and directory of one file."""
    reader = _Reader(path)
    version, n_tensors, n_metadata = reader.read_header()
    metadata, value_types = reader.read_metadata(n_metadata)
    tensors = reader.read_directory(n_tensors, _alignment(path, metadata, value_types))
    return GGUFFile(path, version, metadata, value_types, tensors)


class _Reader:
    """A cursor over the mapped file; every read is bounds-checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = map_file(path, 1)
        self.size = len(self.map)
        self.at = 0

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path.name}: {message}")

    def consume(self, n: int, what: str) -> int:
        """Advance by `n` bytes and return their start."""
        start = self.at
        if n > self.size - start:
            raise self.error(f"{what} needs {n} bytes at offset {start}, the file ends at {self.size}: {CUT_OFF}")
        self.at = start + n
        return start

    def read_u32(self, what: str) -> int:
        return int(_u32(self.map, self.consume(4, what))[0])

    def read_u64(self, what: str) -> int:
        return int(_u64(self.map, self.consume(8, what))[0])

    def read_text(self, what: str) -> str:
        length = self.read_u64(f"the length of {what}")
        start = self.consume(length, what)
        try:
            return self.map[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not valid UTF-8") from error

    def read_header(self) -> tuple[int, int, int]:
        magic = bytes(self.map[:4])
        if magic != MAGIC:
            raise self.error(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        self.at = 4
        version = self.read_u32("the version")
        if version not in VERSIONS:
            if version and version & 0xFFFF == 0:
                raise UnsupportedModelError(f"{self.path.name}: big-endian GGUF files are not supported")
            versions = " and ".join(map(str, VERSIONS))
            raise UnsupportedModelError(f"{self.path.name}: GGUF version {version} is not supported ({versions} are)")
        n_tensors, n_metadata = self.read_u64("the tensor count"), self.read_u64("the metadata count")
        for what, count, min_bytes in (("tensor", n_tensors, 24), ("metadata", n_metadata, 14)):
            if count * min_bytes > self.size:
                raise self.error(f"{what} count {count} cannot fit in a file of {self.size} bytes: {CUT_OFF}")
            if count > MAX_ENTRIES:
                raise self.error(f"{what} count {count} is over the limit of {MAX_ENTRIES}")
        return version, n_tensors, n_metadata

    def read_metadata(self, count: int) -> tuple[dict[str, Any], dict[str, str]]:
        values: dict[str, Any] = {}
        types: dict[str, str] = {}
        for i in range(count):
            key = self.read_text(f"metadata key number {i}")
            if not key:
                raise self.error(f"metadata key number {i} is empty")
            label = repr(key if len(key) <= MAX_SHOWN_CHARS else key[:MAX_SHOWN_CHARS] + "...")
            if key in values:
                raise self.error(f"metadata key {label} appears twice")
            kind = self.read_u32(f"the type of metadata key {label}")
            values[key], types[key] = self.read_value(kind, label, 0)
        return values, types

    def read_value(self, kind: int, label: str, depth: int) -> tuple[Any, str]:
        what = f"the value of metadata key {label}"
        if kind in _scalars:
            form = _scalars[kind]
            return form.unpack_from(self.map, self.consume(form.size, what))[0], TYPE_NAMES[kind]
        if kind == STRING:
            return self.read_text(what), "string"
        if kind == ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise self.error(f"metadata key {label}: arrays are nested more than {MAX_ARRAY_DEPTH} deep")
            element = self.read_u32(f"the element type of metadata key {label}")
            return self.read_array(element, label, depth)
        raise self.error(f"metadata key {label} has unknown value type {kind}")

    def read_array(self, kind: int, label: str, depth: int) -> tuple[Any, str]:
        count = self.read_u64(f"the length of metadata key {label}")
        what = f"the array of metadata key {label} ({count} elements)"
        if kind in _scalars:
            name, form = SCALARS[kind]
            start = self.consume(count * _scalars[kind].size, what)
            return np.frombuffer(self.map, form, count, start).copy(), f"array of {name}"
        if kind == STRING:
            return self.read_strings(count, label, what), "array of string"
        if kind == ARRAY:
            if count * 12 > self.size - self.at:
                raise self.error(f"{what} is longer than the rest of the file: {CUT_OFF}")
            if count > MAX_ENTRIES:
                raise self.error(f"{what} holds more than {MAX_ENTRIES} arrays")
            return [self.read_value(ARRAY, label, depth + 1)[0] for _ in range(count)], "array of array"
        raise self.error(f"metadata key {label} is an array of unknown value type {kind}")

    def read_strings(self, count: int, label: str, what: str) -> list[str]:
        """Read an array of strings: the hot loop of opening a file (often 2 x 50,000), so it bypasses read_text()."""
        if count * 8 > self.size - self.at:
            raise self.error(f"{what} is longer than the rest of the file: {CUT_OFF}")
        view, size, at = self.map, self.size, self.at
        out: list[str] = []
        try:
            for _ in range(count):
                end = at + 8 + _u64(view, at)[0]
                if end > size:
                    raise self.error(f"string {len(out)} of metadata key {label} runs past the end: {CUT_OFF}")
                out.append(view[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as error:
            raise self.error(f"string {len(out)} of metadata key {label} is not valid UTF-8") from error
        except struct.error as error:
            raise self.error(f"string {len(out)} of metadata key {label} runs past the end: {CUT_OFF}") from error
        self.at = at
        return out

    def read_directory(self, count: int, alignment: int) -> dict[str, Tensor]:
        entries: dict[str, _Entry] = {}
        for i in range(count):
            entry = self.read_entry(i)
            if entry.name in entries:
                raise self.error(f"tensor {entry.name!r} appears twice")
            entries[entry.name] = entry
        base = -(-self.at // alignment) * alignment
        self.check_extents(list(entries.values()), base, alignment)
        return {e.name: self.make_tensor(e, base) for e in entries.values()}

    def read_entry(self, number: int) -> _Entry:
        name = self.read_text(f"the name of tensor number {number}")
        if not name or len(name.encode()) > MAX_NAME_BYTES:
            shown = name[:40] + ("..." if len(name) > 40 else "")
            raise self.error(
                f"tensor number {number} has a name of {len(name.encode())} bytes ({shown!r}): "
                f"1 to {MAX_NAME_BYTES} are allowed"
            )
        n_dims = self.read_u32(f"the dimension count of tensor {name!r}")
        if n_dims > MAX_DIMS:
            raise self.error(f"tensor {name!r} has {n_dims} dimensions: at most {MAX_DIMS} are allowed")
        dims = [self.read_u64(f"a dimension of tensor {name!r}") for _ in range(n_dims)]
        type_id = self.read_u32(f"the type of tensor {name!r}")
        offset = self.read_u64(f"the offset of tensor {name!r}")
        return _Entry(name, tuple(reversed(dims)), type_id, offset, self.byte_size(name, dims, type_id))

    def byte_size(self, name: str, dims: list[int], type_id: int) -> int:
        kind = BY_ID.get(type_id)
        if kind is None:
            label = f"removed type {REMOVED_TYPES[type_id]}" if type_id in REMOVED_TYPES else f"unknown type {type_id}"
            raise UnsupportedModelError(f"{self.path.name}: tensor {name!r} has {label}")
        count = count_values(dims)
        if count is None:
            raise self.error(f"tensor {name!r}: dimensions {dims} overflow")
        columns = dims[0] if dims else 1
        if columns % kind.block_size:
            raise self.error(
                f"tensor {name!r}: rows of {columns} values are not whole blocks of {kind.name} "
                f"({kind.block_size} values)"
            )
        return count // kind.block_size * kind.block_bytes

    def check_extents(self, entries: list[_Entry], base: int, alignment: int) -> None:
        room, needed = max(self.size - base, 0), base + max((e.offset + e.nbytes for e in entries), default=0)
        end, before = 0, ""
        for e in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
            if e.offset % alignment:
                raise self.error(f"tensor {e.name!r}: offset {e.offset} is not a multiple of {alignment}")
            if e.offset > room and e.nbytes == 0:
                raise self.error(f"tensor {e.name!r}: offset {e.offset} is past the end of the file")
            if e.offset + e.nbytes > room:
                raise self.error(
                    f"tensor {e.name!r} needs bytes {e.offset} to {e.offset + e.nbytes} of the data, the file "
                    f"has {room}: {CUT_OFF}, {needed - self.size} of {needed} bytes are missing; fetch or copy it again"
                )
            if e.nbytes and e.offset < end:
                raise self.error(f"tensors {before!r} and {e.name!r} overlap")
            if e.nbytes:
                end, before = e.offset + e.nbytes, e.name

    def make_tensor(self, e: _Entry, base: int) -> Tensor:
        data = np.frombuffer(self.map, np.uint8, e.nbytes, base + e.offset if e.nbytes else 0)
        return Tensor(e.name, BY_ID[e.type_id], e.shape, data)


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int


def _alignment(path: Path, metadata: dict[str, Any], types: dict[str, str]) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    value = metadata[key]
    if types[key] != "uint32":
        raise ModelFileError(f"{path.name}: metadata key {key!r} is of type {types[key]}, not uint32")
    if value == 0 or value & (value - 1):
        raise ModelFileError(f"{path.name}: metadata key {key!r} is {value}, not a power of two")
    return int(value)


class GGUFFile(NamedTuple):
    """One parsed file."""

    path: Path
    version: int
    metadata: dict[str, Any]
    value_types: dict[str, str]
    tensors: dict[str, Tensor]


def _split_int(part: GGUFFile, key: str) -> int:
    value = part.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFileError(f"{part.path.name}: metadata key {key!r} is missing or not an integer")
    return value


def read_split_parts(first: GGUFFile) -> list[GGUFFile]:
    """Read the other files of a split set, in order."""
    if "split.count" not in first.metadata or (count := _split_int(first, "split.count")) <= 1:
        return []
    path = first.path
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        raise ModelFileError(
            f"{path.name} is part of a split set of {count} files, but is not named NAME-00001-of-{count:05d}.gguf"
        )
    if int(name["parts"]) != count:
        raise ModelFileError(f"{path.name}: its name says {int(name['parts'])} files, its 'split.count' {count}")
    names = split_set_paths(path)
    if _split_int(first, "split.no") != 0 or int(name["part"]) != 1:
        raise ModelFileError(f"{path.name} is not the first of its split set: open {names[0].name}")
    parts = []
    for number, other in enumerate(names[1:], start=1):
        if not other.exists():
            raise ModelFileError(f"{other.name} is missing: the split set of {path.name} has {count} files")
        part = read_gguf_file(other)
        if _split_int(part, "split.no") != number or _split_int(part, "split.count") != count:
            raise ModelFileError(f"{other.name}: its 'split.no' or 'split.count' does not fit its place in the set")
        parts.append(part)
    return parts


def list_gguf_models(folder: Path) -> list[Path]:
    """Return the GGUF models of a folder: single files, and first files of split sets. Projectors are none."""
    files = (path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    names = sorted(path for path in files if PROJECTOR not in path.name.lower())
    splits = {path: SPLIT_NAME.fullmatch(path.name) for path in names}
    return [path for path, split in splits.items() if split is None or int(split["part"]) == 1]


def split_set_paths(path: Path) -> list[Path]:
    """Return the paths of all files of the split set of `path`; `path` alone if it is not named as part of one."""
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    stem, parts, suffix = name["stem"], name["parts"], name["suffix"]
    return [path.with_name(f"{stem}-{part:05d}-of-{parts}{suffix}") for part in range(1, int(parts) + 1)]
