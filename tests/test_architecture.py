"""The structure of the packages, read from their files: import directions, cycles, sizes, where imports may stand.

The tables at the top are the rules; budgets.py has the budgets of lines and files.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.budgets import COUNTS, FOLDERS, LOG

ROOT = Path(__file__).parent.parent
PACKAGE, BENCH = ROOT / "llm_worker_rbee", ROOT / "llm_worker_bench"
WORKER_FILES, BENCH_FILES = (sorted(folder.rglob("*.py")) for folder in (PACKAGE, BENCH))
FILES = [*WORKER_FILES, *BENCH_FILES]

# Each folder or top-level module, and what it may import from; a row may name only rows above it.
BASE = {"config", "errors", "machine", "pipe_process", "sampling_params"}
DATA = BASE | {"weights", "tokenizer"}
MODEL = DATA | {"backends", "images", "layers", "models"}
GRAMMARS = {"structured_outputs"}
ENGINE = MODEL | GRAMMARS | {"engine", "load", "load_pooling", "progress", "text_model", "token_engine"}
OFFLINE = ENGINE | {"embedder", "generation", "llm"}
IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "machine": set(),
    "pipe_process": set(),
    "progress": {"errors"},
    "config": {"errors"},
    "sampling_params": {"errors"},
    "images": {"errors", "pipe_process"},
    "weights": BASE,
    "tokenizer": BASE,
    "backends": DATA,
    "layers": DATA | {"backends"},
    "models": DATA | {"backends", "images", "layers"},
    "structured_outputs": DATA | {"backends"},
    "engine": MODEL | GRAMMARS,
    "text_model": DATA | GRAMMARS | {"images"},
    "load": MODEL | GRAMMARS | {"engine", "progress", "text_model"},
    "load_pooling": MODEL | {"engine", "load", "progress", "text_model"},
    "token_engine": ENGINE - {"token_engine"},
    "generation": ENGINE,
    "llm": ENGINE | {"generation"},
    "embedder": ENGINE,
    "server": OFFLINE,
    "cluster": OFFLINE | {"server"},
    "cli": OFFLINE | {"server"},
    "__init__": {"embedder", "llm", "generation", "errors", "sampling_params", "tokenizer"},
    "__main__": {"cli", "errors", "token_engine"},
    "llm_worker_bench": OFFLINE | {"cli"},  # it never imports the server, and the worker never imports it
}

KERNELS_IMPORT = {"cpu": ("jit", "packed_weight"), "cuda": ("device", "packed_weight")}  # of the folder above kernels/

# Optional or heavy packages may be imported inside a function, and each in one place only.
HEAVY = {"torch", "triton", "numba", "matplotlib", "scipy", "psutil", "huggingface_hub", "readline", "llguidance"}
LAZY = HEAVY | {"rich", "llvmlite"}
NOT_IN_CORE = {"torch", "triton", "transformers", "gguf", "sentencepiece", "safetensors", "pytest"}
LAZY_MODULES = {
    "cli/__init__.py": "the command table imports a command's options when it is named, its body when it is called",
    "__init__.py": "the API is imported on first use",
    "__main__.py": "errors of importing the commands are reported in one line",
    "llm_worker_bench/roofline.py": "kernels of the CPU backend, which need Numba",
    "llm_worker_bench/backends/__init__.py": "Numba or PyTorch, by the backend",
}
SECOND_PLACES: dict[str, dict[str, str]] = {  # beside the one place of a heavy package
    "llguidance": {"structured_outputs/grammar_process.py": "a program of its own that imports nothing of the package"},
    "numba": {"llm_worker_bench/backends/cpu_peak.py": "loops that measure the machine"},
    "torch": {"llm_worker_bench/backends/cuda_parts.py": "parts of ops, measured alone"},
    "triton": {"llm_worker_bench/backends/cuda_parts.py": "parts of ops, measured alone"},
}

MAX_FOLDER_FILES = 33
MAX_FILE_LINES = 800
LISTED_FILE_LINES = 600  # longer files are named here
LONG_FILES = {
    "backends/ops.py",  # the op table
    "backends/reference.py",  # the definition of every op
    "backends/cpu/lowering.py",  # one table of ops, what they expand to, and their tasks
    "backends/cuda/kernels/attention_decode.py",  # one kernel by grid, split and head groups, with its launch
    "cli/commands.py",  # the options of each command
    "server/dialects/openai_responses.py",  # the largest table of fields
}
MAX_FUNCTION_LINES = 60
# Kernels.
LONG_FUNCTIONS = {
    "backends/cuda/kernels/attention_decode.py:decode_attention",
    "backends/cuda/kernels/attention_decode.py:decode_attention_gqa",
    "backends/cuda/kernels/gemm_hopper.py:gemm_hopper",
    "backends/cuda/kernels/gemv.py:gemv_dense",
    "backends/cuda/kernels/gemv.py:gemv_packed",
}
MIN_MODULE_LINES = 80  # a shorter module with a single client is part of that client, unless there is a reason
SMALL_MODULES = {
    "llm_worker_bench/provenance.py": "what the pages of the repository are tested against",
    "backends/cpu/kernels/per_layer_inputs.py": "compiled for models with per-layer embeddings alone",
    "cluster/router.py": "Ray copies its module into each process",
    "engine/dummy_model.py": "replaces the model for `serve --engine null`",
}
# Tests of the benchmarks that stand with the tests of the hardware or the files that they need.
TESTS_OF_BENCHMARKS = {
    "backends/cuda/test_experiments.py",
    "backends/cuda/test_gpu.py",
    "backends/cuda/test_op_parts.py",
    "real/models.py",
}


def relative(path: Path) -> str:
    """Return the path of a file in the worker's package, or in the repository."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.is_relative_to(PACKAGE) else BENCH.name


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


CUDA_FILES = {*(PACKAGE / "backends" / "cuda").rglob("*.py"), BENCH / "backends" / "cuda_parts.py"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[tuple[str, bool, int], ...]:
    """Return (dotted name, inside a function, line) of every import, relative ones made absolute."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    package = list(path.relative_to(ROOT).parts[:-1])
    tree = tree_of(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in inner, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                yield f"{stem}.{alias.name}", id(node) in inner, node.lineno


def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, type-only imports included."""
    found = set()
    for name, _, _ in imports(path):
        for candidate in (name, name.rpartition(".")[0]):
            if candidate in MODULES:
                found.add(candidate)
                break
    return found - {module_of(path)}


def line_count(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in IMPORTS, f"{relative(path)} is in no row of IMPORTS"
    for name, _, line in imports(path):
        parts = name.split(".")
        target = parts[1] if parts[0] == PACKAGE.name and len(parts) > 1 else parts[0]
        if target in IMPORTS and (parts[0] == PACKAGE.name or target == BENCH.name):
            assert target == room or target in IMPORTS[room], (
                f"{relative(path)}:{line}: {room} must not import {target}"
            )


def test_dialects_import_only_their_own_family() -> None:
    """What dialects share is in `server/`; `openai_completions` may import `openai`, and `anthropic` may not."""
    folder = "llm_worker_rbee.server.dialects."
    for path in (PACKAGE / "server" / "dialects").glob("[!_]*.py"):
        for name in imported_modules(path):
            if name.startswith(folder):
                other = name.removeprefix(folder)
                assert other.split("_")[0] == path.stem.split("_")[0], f"{relative(path)} must not import {other}"


@pytest.mark.parametrize("backend", KERNELS_IMPORT)
def test_kernels_import_little_of_the_folder_above(backend: str) -> None:
    """Host code imports kernels: what these import of it is how they are compiled, and layouts."""
    folder = f"llm_worker_rbee.backends.{backend}"
    for path in (PACKAGE / "backends" / backend / "kernels").rglob("*.py"):
        above = {name for name in imported_modules(path) if name.rpartition(".")[0] == folder}
        assert above <= {f"{folder}.{name}" for name in KERNELS_IMPORT[backend]}, f"{relative(path)} imports {above}"


def test_tests_of_the_worker_use_the_benchmarks_through_helpers() -> None:
    tests = ROOT / "tests"
    for path in tests.rglob("*.py"):
        place = path.relative_to(tests).as_posix()
        if place.startswith(("bench/", "benchmarks/")) or BENCH.name not in path.read_text(encoding="utf-8"):
            continue
        names = [name for name, _, _ in imports(path) if name.startswith(BENCH.name)]
        assert not names or place.startswith(("cli/", "helpers/")) or place in TESTS_OF_BENCHMARKS, place
        assert place == "helpers/synthetic.py" or not any(".synthetic" in name for name in names), place


def test_import_table_has_no_cycle() -> None:
    done: set[str] = set()
    for room, below in IMPORTS.items():
        if not room.startswith("__"):
            assert below <= done, f"{room} may import {below - done}, which comes later"
            done.add(room)


def test_modules_have_no_import_cycle() -> None:
    """Cycles between modules, with imports for type checking; a package's `__init__` counts as its own module."""
    graph = {name: imported_modules(path) for name, path in MODULES.items()}
    state: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        stack.append(name)
        for other in sorted(graph[name]):
            assert state.get(other) != 1, "import cycle: " + " -> ".join([*stack[stack.index(other) :], other])
            if other not in state:
                visit(other)
        stack.pop()
        state[name] = 2

    for name in graph:
        if name not in state:
            visit(name)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_stand_at_the_top_except_optional_packages(path: Path) -> None:
    for name, is_inner, line in imports(path):
        top = name.split(".")[0]
        is_extra = path in CUDA_FILES and top in ("torch", "triton")
        assert is_inner or is_extra or top not in NOT_IN_CORE, f"{relative(path)}:{line}: the core has no {top}"
        if is_inner:
            is_lazy = top in LAZY or relative(path) in LAZY_MODULES
            assert is_lazy, f"{relative(path)}:{line}: {name} is imported inside a function"


@pytest.mark.parametrize("package", sorted(HEAVY))
def test_heavy_package_is_imported_in_one_place(package: str) -> None:
    found = {path for path in FILES for name, _, _ in imports(path) if name.split(".")[0] == package}
    found = {path for path in found if relative(path) not in SECOND_PLACES.get(package, {})}
    backends = (PACKAGE / "backends" / "cpu", PACKAGE / "backends" / "cuda")
    places = {next((folder for folder in backends if folder in path.parents), path) for path in found}
    assert len(places) <= 1, f"{package} is imported in {sorted(map(str, places))}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_has_a_docstring_and_is_not_too_long(path: Path) -> None:
    lines = line_count(path)
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines: at most {MAX_FILE_LINES}"
    is_listed = relative(path) in LONG_FILES
    assert (lines > LISTED_FILE_LINES) == is_listed, f"{relative(path)} has {lines} lines: see LONG_FILES"
    assert not path.read_text() or ast.get_docstring(tree_of(path)), f"{relative(path)} has no docstring"
    assert "utils" not in path.parts


def test_functions_are_at_most_60_lines() -> None:
    found = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                    found.add(f"{relative(path)}:{node.name}")
    assert found == LONG_FUNCTIONS, "functions over 60 lines, and LONG_FUNCTIONS, differ"


def test_small_module_with_one_client_has_a_reason() -> None:
    clients: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name in imported_modules(path):
            clients[name].add(module_of(path))
    found = {
        relative(path)
        for name, path in MODULES.items()
        if line_count(path) < MIN_MODULE_LINES and len(clients[name]) == 1 and path.name != "__init__.py"
        if room_of(path) != "layers"
    }
    assert found == set(SMALL_MODULES), "small modules with one client, and SMALL_MODULES, differ"


def folder_of(path: Path) -> str:
    """Return the row of the budgets that counts a file: the longest one that contains it."""
    parent = path.parent.relative_to(ROOT).as_posix()
    return max((row for row in FOLDERS if parent == row or parent.startswith(f"{row}/")), key=len)


@cache
def measured() -> dict[str, int]:
    """Return the value of each budget but for the files of a chat, which another test counts."""
    values: dict[str, int] = defaultdict(int)
    for path in [*FILES, *(ROOT / "benchmarks").rglob("*.py")]:
        folder = folder_of(path)
        values[f"lines of {folder}"] += line_count(path)
        values[f"files of {folder}"] += 1
    values["lines of the worker"] = sum(map(line_count, WORKER_FILES))
    values["files of the worker"] = len(WORKER_FILES)
    values["largest number of imported modules"] = max(len(imported_modules(path)) for path in WORKER_FILES)
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    modules = [module for row in overrides for module in row["module"]]
    values["modules exempt from strict types"] = sum((ROOT / module.split(".")[0]).exists() for module in modules)
    values["fmt: skip"] = sum(path.read_text(encoding="utf-8").count("# fmt: skip") for path in FILES)
    return dict(values)


BUDGETS = {
    **{f"lines of {folder}": lines for folder, (lines, _) in FOLDERS.items()},
    **{f"files of {folder}": files for folder, (_, files) in FOLDERS.items()},
    **COUNTS,
}


@pytest.mark.parametrize("name", [name for name in BUDGETS if name != "files of a streamed chat"])
def test_value_is_within_its_budget_and_the_budget_near_it(name: str) -> None:
    budget, value = BUDGETS[name].now, measured()[name]
    assert value <= budget, f"{name}: {value}, the budget is {budget}"
    slack = 40 if name.startswith("lines") else 2
    assert budget - value <= max(slack, 0.03 * value), f"{name}: {value}: lower the budget of {budget} in budgets.py"


@pytest.mark.parametrize("name", BUDGETS)
def test_budget_rises_only_by_what_the_log_has(name: str) -> None:
    raised = sum(entry.amount for entry in LOG if entry.budget == name)
    assert BUDGETS[name].now <= BUDGETS[name].start + raised, f"{name}: write to LOG why it rises"


def test_log_names_budgets_and_reasons() -> None:
    assert all(entry.budget in BUDGETS and entry.amount > 0 and entry.reason for entry in LOG)


def test_folders_are_not_crowded() -> None:
    counts: dict[Path, int] = defaultdict(int)
    for path in FILES:
        counts[path.parent] += 1
    crowded = {str(folder): count for folder, count in counts.items() if count > MAX_FOLDER_FILES}
    assert not crowded, f"folders with over {MAX_FOLDER_FILES} files: {crowded}"


# Words that the field does not use for these things; docs/glossary.md has the term for each.
BANNED_NAMES = {"told", "asked", "books", "chances", "soften", "meaning", "nobody", "whoever", "everybody", "company"}


def test_names_follow_the_glossary() -> None:
    found = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            names = []
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, ast.Name):
                names = [node.id]
            elif isinstance(node, ast.arg):
                names = [node.arg]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            for name in names:
                if BANNED_NAMES & set(name.lower().strip("_").split("_")):
                    found.add(f"{relative(path)}:{node.lineno}: {name}")
    assert not found, "\n".join(sorted(found))


# A local or an argument is named by the thing: `rows`, `schema`. The list of files only shrinks.
BANNED_LOCALS = {"found", "made", "one", "given", "wanted"}
FILES_WITH_BANNED_LOCALS = {
    "backends/cuda/pooling.py",
    "llm_worker_bench/flame_graph.py",
    "llm_worker_bench/http_client.py",
    "server/pooling.py",
    "token_engine/engine_loop.py",
    "token_engine/protocol.py",
}


def test_locals_are_named_by_the_thing() -> None:
    files = set()
    for path in FILES:
        nodes = list(ast.walk(tree_of(path)))
        lines = [line for node in nodes if isinstance(node, ast.ClassDef) for line in node.body]
        fields = {id(line.target) for line in lines if isinstance(line, ast.AnnAssign)}
        for node in nodes:
            is_local = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields
            name = node.id if is_local else node.arg if isinstance(node, ast.arg) else ""
            if name in BANNED_LOCALS and "kernels" not in path.parts:
                files.add(relative(path))
    assert files <= FILES_WITH_BANNED_LOCALS, f"rename them: {sorted(files - FILES_WITH_BANNED_LOCALS)}"
    assert files == FILES_WITH_BANNED_LOCALS, f"take off the list: {sorted(FILES_WITH_BANNED_LOCALS - files)}"
