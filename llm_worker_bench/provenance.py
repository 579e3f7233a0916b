"""The code that a saved run measured: a hash for each area of the source, and the areas changed since.

A hash covers the lines that can change behaviour: comment lines, docstrings and blank lines do not count, so editing
them does not make a measurement stale. A package without its source files has no hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import llm_worker_rbee

QUOTES = '"' * 3
PACKAGE = Path(llm_worker_rbee.__file__).parent
POOLING = ("embedder.py", "load_pooling.py")
# area -> its files and folders in the package
AREAS: Mapping[str, tuple[str, ...]] = {
    "reference": ("backends/reference.py", "backends/reference_sampling.py"),
    "cpu": ("backends/cpu", "backends/cpu_info.py"),
    "cuda": ("backends/cuda",),
    "layers": ("backends/ops.py", "backends/graph.py", "layers", "models"),
    "engine": ("engine", "token_engine", "llm.py", "load.py", "sampling_params.py", "text_model.py", *POOLING),
    "server": ("server",),
}


def significant_lines(source: str) -> Iterator[str]:
    """Yield the lines of a module that are not blank, a comment or part of a docstring.

    Quotes are counted instead of parsing the module, which would take a second for the whole package: a triple quote
    at the beginning of a statement starts a docstring.
    """
    string = docstring = False  # inside a string of triple quotes, and whether that is a docstring
    for line in source.splitlines():
        text = line.strip()
        began_in_docstring = docstring
        if not string:
            docstring = text.startswith(QUOTES)
        is_docstring = docstring or began_in_docstring
        if text.count(QUOTES) % 2:
            string = not string
        docstring = docstring and string
        if text and not is_docstring and (string or not text.startswith("#")):
            yield line.rstrip()


def hash_area(area: str, package: Path = PACKAGE) -> str:
    """Return a short hash over the names and significant lines of an area's Python files."""
    digest = hashlib.sha256()
    for place in AREAS[area]:
        path = package / place
        for file in [path] if path.suffix == ".py" else sorted(path.rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + b"\n")
            digest.update("\n".join(significant_lines(file.read_text(encoding="utf-8"))).encode() + b"\n")
    return digest.hexdigest()[:12]


@cache
def source_hashes(package: Path = PACKAGE) -> dict[str, str]:
    """Return the hash of each area, none where the source files are not there."""
    return {area: hash_area(area, package) for area in AREAS if all((package / file).exists() for file in AREAS[area])}


def changed_areas(measured: Mapping[str, str], now: Mapping[str, str], areas: Iterable[str]) -> list[str]:
    """Return the areas whose code has changed since; an area without a recorded hash counts as changed."""
    return [area for area in areas if measured.get(area) != now.get(area)]


def stale_line(changes: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return `Measured at 04ac773; cpu, engine changed since.` for each commit with changes, in one line."""
    merged: dict[str, list[str]] = {}
    for commit, areas in changes:
        listed = merged.setdefault(commit, [])
        listed += [area for area in areas if area not in listed]
    return " ".join(f"Measured at {at}; {', '.join(areas)} changed since." for at, areas in merged.items() if areas)
