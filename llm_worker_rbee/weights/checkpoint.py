"""What every model file becomes: named tensors over mapped bytes, and the metadata beside them.

No tensor is copied or decoded here. Names are GGUF's (`blk.0.attn_q.weight`) whatever the file was, and shapes are in
NumPy order: (rows, columns), where a row is contiguous and holds whole blocks.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError
from .quants import BlockType, dequantize
from .quants.nan_check import find_nonfinite_block

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_VALUES = 1 << 59  # NumPy counts bytes in 63 bits, also those of an array that is empty because one dimension is 0


def count_values(shape: Sequence[int]) -> int | None:
    """Values of a tensor of this shape, or None where the shape cannot be counted."""
    if math.prod(dim for dim in shape if dim) > MAX_VALUES:
        return None
    return math.prod(shape)


def map_file(path: Path, min_bytes: int) -> mmap.mmap:
    """Map a file for reading; one of fewer than `least` bytes is refused."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < min_bytes:
                problem = f"{size} bytes are too few for a model file" if size else "the file is empty"
                raise ModelFileError(f"{path.name}: {problem}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"cannot open {path}: {error.strerror}") from error


def release_pages(data: NDArray[np.uint8]) -> None:
    """Let the system take back the memory of mapped bytes: they are read from the file again if they are needed again.

    Bytes that are not mapped are left alone, and so are pages that they share with others.
    """
    base: Any = data
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of a file: its block type, its shape, and its raw bytes as a read-only view."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # (nbytes,)
    pack_as: str = ""  # what a backend makes of it: FP8, or as it is

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The raw bytes, one row of the matrix a line: (rows, bytes)."""
        columns = self.shape[-1] if self.shape else 1
        return self.data.reshape(-1, self.kind.row_bytes(columns)) if self.nbytes else self.data.reshape(0, 0)

    def dequantize(self) -> NDArray[np.float32]:
        """All values as float32, in the tensor's shape."""
        return dequantize(self.kind, self.data, self.shape)

    def find_nonfinite_scale(self) -> int | None:
        """The first block whose scale is NaN or infinite, or None; only the bytes of scales are read."""
        return find_nonfinite_block(self.kind, self.data)

    def take_rows(self, index: NDArray[np.intp] | slice) -> Tensor:
        """Some rows of the matrix, whole and still quantized (an index array copies them, a slice does not)."""
        rows = self.rows[index]
        return replace(self, shape=(rows.shape[0], *self.shape[1:]), data=rows.reshape(-1))


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model file or folder, opened."""

    path: Path
    format: str  # "gguf" or "safetensors"
    architecture: str | None  # as the file names it: general.architecture or model_type
    metadata: Mapping[str, Any]  # GGUF keys, or {"config": {...}, "generation_config": {...}}
    tensors: Mapping[str, Tensor]
    value_types: Mapping[str, str]  # metadata key -> its type in the file, for display

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())
