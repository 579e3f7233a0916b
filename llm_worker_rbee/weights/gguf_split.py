"""Split sets: NAME-00001-of-00003.gguf and its sisters, which must agree about who they are.

The metadata that describes the model is in the first file; every file has `split.no` (from 0) and `split.count`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelFileError
from .checkpoint import Tensor
from .filenames import SPLIT_NAME, split_set


class GGUFPart(NamedTuple):
    """One file, parsed."""

    path: Path
    version: int
    metadata: dict[str, Any]
    value_types: dict[str, str]
    tensors: dict[str, Tensor]


def _split_int(part: GGUFPart, key: str) -> int:
    value = part.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFileError(f"{part.path.name}: metadata key {key!r} is missing or not an integer")
    return value


def further_splits(first: GGUFPart, read: Callable[[Path], GGUFPart]) -> list[GGUFPart]:
    """The other files of a set, in order; none where the first one says that it is alone."""
    if "split.count" not in first.metadata or (count := _split_int(first, "split.count")) <= 1:
        return []
    path = first.path
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        raise ModelFileError(
            f"{path.name} is one of {count} split files, but is not named like one (NAME-00001-of-{count:05d}.gguf)"
        )
    if int(name["parts"]) != count:
        raise ModelFileError(f"{path.name}: its name says {int(name['parts'])} files, its metadata {count}")
    names = split_set(path)
    if _split_int(first, "split.no") != 0 or int(name["part"]) != 1:
        raise ModelFileError(f"{path.name} is not the first of its split set: open {names[0].name}")
    parts = []
    for number, other in enumerate(names[1:], start=1):
        if not other.exists():
            raise ModelFileError(f"{other.name} is missing: the split set of {path.name} has {count} files")
        part = read(other)
        if _split_int(part, "split.no") != number or _split_int(part, "split.count") != count:
            raise ModelFileError(f"{other.name}: its 'split.no' or 'split.count' does not fit its place in the set")
        parts.append(part)
    return parts


def check_split_total(first: GGUFPart, found: int) -> None:
    """All tensors that the set was split from are there, and no more."""
    if "split.tensors.count" not in first.metadata:
        return
    expected = _split_int(first, "split.tensors.count")
    if expected != found:
        raise ModelFileError(
            f"{first.path.name}: the split set holds {found} tensors, 'split.tensors.count' is {expected}"
        )
