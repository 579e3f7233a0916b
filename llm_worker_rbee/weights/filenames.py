"""What file names say: the parts of a split set, and weights that are refused because loading them can run any code."""

from __future__ import annotations

import re
from pathlib import Path

# NAME-00001-of-00003.gguf
SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def ggufs_in(folder: Path) -> list[Path]:
    """The GGUF models of a folder: single files, and the first ones of split sets."""
    names = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    splits = {path: SPLIT_NAME.fullmatch(path.name) for path in names}
    return [path for path, split in splits.items() if split is None or int(split["part"]) == 1]


def split_set(path: Path) -> list[Path]:
    """The names of all files of the set that `path` is named after; itself alone where its name is no such one."""
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    stem, parts, suffix = name["stem"], name["parts"], name["suffix"]
    return [path.with_name(f"{stem}-{part:05d}-of-{parts}{suffix}") for part in range(1, int(parts) + 1)]
