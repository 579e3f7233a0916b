"""The arrows between rooms, read from the imports themselves: none may point back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "llm_worker_rbee"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each room, and the rooms it may import from.
FOUNDATION = {"config", "errors", "machine"}
DATA = FOUNDATION | {"weights", "tokenizer"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "machine": set(),
    "progress": {"errors"},
    "config": {"errors"},
    "weights": FOUNDATION,
    "tokenizer": FOUNDATION,
    "backends": DATA,
    "layers": DATA | {"backends"},
    "cache": DATA | {"backends"},
    "models": DATA | {"backends", "layers", "cache"},
    "engine": DATA | {"backends", "layers", "cache", "models"},
    "llm": DATA | {"backends", "layers", "cache", "models", "engine", "progress"},
    "server": DATA | {"backends", "layers", "cache", "models", "engine", "llm"},
    "bench": DATA | {"backends", "layers", "cache", "models", "engine", "llm", "progress"},
    "cli": DATA | {"backends", "layers", "cache", "models", "engine", "llm", "server", "bench", "progress"},
    "__init__": {"llm", "engine", "errors"},
    "__main__": {"cli", "errors"},
}
HEAVY = {"torch", "triton", "numba", "matplotlib", "scipy", "psutil", "huggingface_hub", "readline"}
SELDOM = {"rich"}  # needed only where something is drawn
NOT_IN_THE_CORE = {"torch", "triton", "transformers", "gguf", "sentencepiece", "safetensors", "pytest"}
LONGEST_FILE = 800
CUDA = PACKAGE / "backends" / "cuda"  # the extra: imported by name, where it is asked for


def room_of(path: Path) -> str:
    """The folder, or the file's name for one at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(dotted module, inside a function, line) of every import; relative ones made absolute."""
    package = ["llm_worker_rbee", *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        id(node)
        for f in ast.walk(tree)
        if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inner, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                yield f"{stem}.{alias.name}", id(node) in inner, node.lineno


def target_room(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "llm_worker_rbee" or len(parts) == 1:
        return None
    name = parts[1]
    return name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists() else None  # or the package's own name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_arrow_points_back(path: Path) -> None:
    room = room_of(path)
    assert room in ROOMS, f"{path.name} is in no room"
    for module, _, line in imports(path):
        target = target_room(module)
        assert target in (None, room) or target in ROOMS[room], f"{path.name}:{line}: {room} must not import {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stand_at_the_top_but_for_heavy_ones(path: Path) -> None:
    for module, inside, line in imports(path):
        top = module.split(".")[0]
        is_extra = path.parent == CUDA and top in ("torch", "triton")
        may_be = inside or is_extra or top not in NOT_IN_THE_CORE
        assert may_be, f"{path.name}:{line}: the core must import without {top}"
        if inside:
            lazy_by_design = room_of(path) in ("cli", "__init__", "__main__")
            allowed = lazy_by_design or top in HEAVY | SELDOM
            assert allowed, f"{path.name}:{line}: {module} is imported inside a function"


@pytest.mark.parametrize("heavy", sorted(HEAVY))
def test_what_is_heavy_is_imported_in_one_place(heavy: str) -> None:
    found = {path for path in FILES for module, _, _ in imports(path) if module.split(".")[0] == heavy}
    places = {path.parent if path.parent.name in ("cpu", "cuda") else path for path in found}  # kernels are one place
    assert len(places) <= 1, f"{heavy} is imported in {sorted(places)}"


def test_rooms_have_no_cycle() -> None:
    done: set[str] = set()
    for room, below in ROOMS.items():
        if not room.startswith("__"):
            assert below <= done, f"{room} may import {below - done}, which comes later"
            done.add(room)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= LONGEST_FILE, f"{path.name} has over {LONGEST_FILE} lines"
    assert not text or ast.get_docstring(ast.parse(text)), f"{path.name} does not say what it is"
    assert "utils" not in path.parts
