"""A weight on the device: parts of one kind each, stacked by rows. Neighbouring tensors of one kind are one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ...weights import Tensor
from .pack import pack, shape_of
from .planes import Part, values

__all__ = ["Matrix", "Part", "prepare"]


@dataclass(slots=True, eq=False)
class Matrix:
    """Rows of all parts, one after the other; all have the same columns."""

    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Values of a row."""
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        return sum(part.nbytes for part in self.parts)

    def rows_at(self, index: torch.Tensor) -> torch.Tensor:
        """Some rows as float32, (n, columns)."""
        (part,) = self.parts
        return values(part.take(index))


def prepare(tensors: Sequence[Tensor]) -> Matrix:
    """Pack tensors of a file once; they become one matrix, their rows one after the other."""
    return Matrix(tuple(pack(list(group)) for _, group in groupby(tensors, shape_of)))
