"""Claim 12: what the source tree can say about "90% reuse", "~200 lines removed" and "simpler architecture".

The words do not say what is counted, so nothing is judged: the tables compare lines, imports and tests of each folder
with the lines of the libraries that are used, and the one-file block with the same block in modules.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import sys
from pathlib import Path

import llm_worker_rbee

from . import numpy_model
from .harness import Finding, Harness, Table

PACKAGE = Path(llm_worker_rbee.__file__).parent
TESTS = PACKAGE.parent / "tests"
LIBRARIES = (
    "numpy", "numba", "llvmlite", "tokenizers", "safetensors", "jinja2", "starlette", "uvicorn", "uvloop", "httptools",
    "msgspec", "prometheus-client", "typer", "rich", "huggingface_hub",
)  # fmt: skip
CRATES = {
    "weights": "worker-gguf", "tokenizer": "worker-tokenizer", "models": "worker-models", "server": "worker-http",
    "backends": "worker-compute", "layers": "the worker's layers",
    "(modules)": "worker-common", "cli": "the worker's binary",
}  # fmt: skip
ONE_FILE = (numpy_model.run_block, numpy_model.normalize, numpy_model.fused_forward)
MODULES = ("layers", "models/kv_cache.py", "models/decoder.py")


def run_source_tree(runner: Harness) -> Finding:
    """Count; nothing is timed and nothing is judged."""
    folders, libraries = count_folders(), count_libraries()
    ours, theirs = sum(row[0] for row in folders.values()), sum(libraries.values())
    for name, value in (("ours", ours), ("libraries", theirs)):
        runner.record_exact("lines", name, value, "lines")
    table = [["folder", "lines", "imports from folders", "libraries imported", "tests", "the old worker's part"]]
    for name, (lines, inner, outer, tests) in folders.items():
        cells = [f"{lines:,}", str(inner), str(outer), str(tests) if TESTS.exists() else "-"]
        table.append([name, *cells, CRATES.get(name, "-")])
    installed = [["library", "lines of Python, as installed"]]
    installed += [[name, f"{lines:,}"] for name, lines in libraries.items()]
    one_file, modules = count_block()
    block = [["the same block", "lines"], ["one file", f"{one_file:,}"], ["modules", f"{modules:,}"]]
    summary = (
        f"{ours:,} lines of ours stand on {theirs:,} lines of Python of {len(libraries)} libraries; the same block has "
        f"{one_file} lines in one file and {modules} in modules; the words do not say what is counted"
    )
    captions = ("The libraries that are used, without their compiled parts", "One file against modules")
    tables = [Table(table), Table(installed, captions[0]), Table(block, captions[1])]
    return Finding("not judged", summary, tables)


def count_folders() -> dict[str, tuple[int, int, int, int]]:
    """Return (lines, folders imported from, libraries imported, tests) of each folder of the package."""
    found = {}
    for place in [*sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()), None]:
        files = sorted(PACKAGE.glob("*.py")) if place is None else sorted(place.rglob("*.py"))
        name = "(modules)" if place is None else place.name
        inner, outer = set[str](), set[str]()
        for file in files:
            for top, is_ours in _imports(file):
                (inner if is_ours else outer).add(top)
        tests = sorted(TESTS.glob("test_*.py")) if place is None else sorted((TESTS / name).rglob("test_*.py"))
        counted = sum(file.read_text(encoding="utf-8").count("\ndef test_") for file in tests)
        found[name] = sum(map(count_lines, files)), len(inner - {name}), len(outer), counted
    return found


def _imports(file: Path) -> list[tuple[str, bool]]:
    """Return (top-level name, whether it is ours) of a module's imports, without the standard library."""
    depth, found = len(file.relative_to(PACKAGE).parts), []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(((node.module or "").split(".")[0], False))
        elif isinstance(node, ast.ImportFrom) and node.level == depth:  # from the root of the package
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(name.split(".")[0], True) for name in names]
    return [one for one in found if one[1] or one[0] not in sys.stdlib_module_names]


def count_libraries() -> dict[str, int]:
    """Return the lines of Python of each library that is installed."""
    found = {}
    for name in LIBRARIES:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        paths = [Path(str(file.locate())) for file in files if file.suffix == ".py"]
        found[name] = sum(count_lines(path) for path in paths if path.exists())
    return found


def count_block() -> tuple[int, int]:
    """Return the lines of the block and its model as one NumPy function, and as modules."""
    one_file = sum(len(inspect.getsource(function).splitlines()) for function in ONE_FILE)
    places = [PACKAGE / name for name in MODULES]
    files = [file for place in places for file in ([place] if place.suffix else sorted(place.rglob("*.py")))]
    return one_file, sum(map(count_lines, files))


def count_lines(path: Path) -> int:
    """Return the lines of a file."""
    return path.read_bytes().count(b"\n")
