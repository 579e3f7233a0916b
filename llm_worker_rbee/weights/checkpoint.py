"""An opened model file: named tensors over mapped bytes, and metadata.

Tensors are not copied or decoded. Names are GGUF names (`blk.0.attn_q.weight`) in every format; shapes are in NumPy
order, (rows, columns), where a row is contiguous and holds whole blocks.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError, UnsupportedModelError
from .quants import BLOCK_TYPES, BlockType, dequantize, find_nonfinite_block

EXPERT_WEIGHT = re.compile(r"\.ffn_\w+(_exps\.\w+|\.[0-9]+\.weight)$")  # stacked, or of one expert
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NO_BYTES = np.zeros(0, np.uint8)
MAX_VALUES = 1 << 59  # NumPy's byte counts have 63 bits, even if one dimension is 0


def count_values(shape: Sequence[int]) -> int | None:
    """Return the number of values of a shape, or None on overflow."""
    return None if math.prod(dim for dim in shape if dim) > MAX_VALUES else math.prod(shape)


def map_file(path: Path, min_bytes: int) -> mmap.mmap:
    """Map a file for reading; raise ModelFileError if it has fewer than `min_bytes` bytes."""
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
    """Drop the resident pages of mapped bytes; a later access reads the file again.

    Bytes that are not mapped, and pages shared with other tensors, are left alone.
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
    """One tensor of a file: block type, shape, and raw bytes as a read-only view."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # (nbytes,)
    pack_as: str = ""  # type a backend packs it into: "fp8", or "" for the file's own
    order: NDArray[np.intp] | None = None  # column i of the blocks is column order[i] of the matrix

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Return the raw bytes, one matrix row each: (rows, bytes)."""
        columns = self.shape[-1] if self.shape else 1
        return self.data.reshape(-1, self.kind.row_bytes(columns)) if self.nbytes else self.data.reshape(0, 0)

    def load(self) -> Tensor:
        """Return the tensor with its bytes."""
        return self

    def dequantize(self) -> NDArray[np.float32]:
        """Return all values as float32, in the tensor's shape."""
        values = dequantize(self.kind, self.data, self.shape)
        return values if self.order is None else values[..., np.argsort(self.order)]

    def find_nonfinite_scale(self) -> int | None:
        """Return the first block with a NaN or infinite scale, or None; reads only the bytes of scales."""
        return find_nonfinite_block(self.kind, self.data)

    def take_rows(self, index: NDArray[np.intp] | slice) -> Tensor:
        """Return some rows, still quantized (an index array copies, a slice does not)."""
        rows = self.rows[index]
        return replace(self, shape=(rows.shape[0], *self.shape[1:]), data=rows.reshape(-1))

    def split_columns(self) -> tuple[Tensor, Tensor]:
        """Return the left and the right half of a matrix, quantized as it is if they are whole blocks."""
        count, half = self.shape[0], self.shape[1] // 2
        if half % self.kind.block_size or self.order is not None:
            values = np.split(self.dequantize(), 2, axis=1)
            kind, parts = BLOCK_TYPES["F32"], [np.ascontiguousarray(part).view(np.uint8) for part in values]
        else:
            kind, parts = self.kind, np.split(self.rows, 2, axis=1)
        whole = replace(self, kind=kind, shape=(count, half), order=None)
        left, right = (replace(whole, data=part.reshape(-1)) for part in parts)
        return left, right

    def matrices(self) -> list[Tensor]:
        """Return the matrices of a stack of matrices, as views."""
        count, *shape = self.shape
        pieces = np.split(self.data, count) if count else []
        return [replace(self, name=f"{self.name}[{i}]", shape=tuple(shape), data=x) for i, x in enumerate(pieces)]


@dataclass(frozen=True, slots=True, eq=False)
class DeferredTensor(Tensor):
    """A tensor whose blocks are made of several tensors of the file; `data` is empty until `load` makes them."""

    sources: tuple[Tensor, ...] = ()
    make: Callable[[], NDArray[np.uint8]] = field(default=lambda: NO_BYTES)

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    def load(self) -> Tensor:
        tensor = Tensor(self.name, self.kind, self.shape, self.make(), self.pack_as, self.order)
        for source in self.sources:
            release_pages(source.data)
        return tensor

    def dequantize(self) -> NDArray[np.float32]:
        return self.load().dequantize()


def shared_order(tensors: Sequence[Tensor]) -> NDArray[np.intp] | None:
    """Return the order of columns of tensors that are multiplied by the same activations; raise if they differ."""
    first, orders = tensors[0], [None if tensor.order is None else tensor.order.tolist() for tensor in tensors]
    for other, order in zip(tensors, orders, strict=True):
        if order != orders[0]:
            raise UnsupportedModelError(
                f"tensors {first.name!r} and {other.name!r}: their columns are in different orders (desc_act), convert "
                "them to F16 or use --quantize"
            )
    return first.order


def refuse_order(tensors: Sequence[Tensor]) -> None:
    """Raise if the columns of a tensor have an order: experts would each need their own activations, and rows of an
    embedding are read as they are."""
    name = next((tensor.name for tensor in tensors if tensor.order is not None), None)
    if name is not None:
        raise UnsupportedModelError(
            f"tensor {name!r}: experts and embeddings with columns in the order of activations (desc_act) cannot be "
            "read, convert them to F16 or use --quantize"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model file or folder, opened."""

    path: Path
    format: str  # "gguf" or "safetensors"
    architecture: str | None  # general.architecture or model_type
    metadata: Mapping[str, Any]  # GGUF keys, or {"config": {...}, "generation_config": {...}}
    tensors: Mapping[str, Tensor]
    value_types: Mapping[str, str]  # metadata key -> its type in the file

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def expert_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of experts, of which a token uses a few."""
        return {name: tensor for name, tensor in self.tensors.items() if EXPERT_WEIGHT.search(name)}
