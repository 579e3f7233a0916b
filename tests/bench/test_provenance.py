"""Hashes of the source: which edits change them, and what a page says then."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from llm_worker_bench import provenance
from llm_worker_bench.provenance import AREAS, PACKAGE, changed_areas, hash_area, significant_lines, stale_line

MODULE = '''"""A module."""

import os  # one

# A comment line.
class A:
    """A class
    of two lines.
    """

    text = """
# not a comment: part of a string
"""

    def f(self):
        """A method."""
        return os.name
'''


def test_significant_lines() -> None:
    assert list(significant_lines(MODULE)) == [
        "import os  # one", "class A:", '    text = """', "# not a comment: part of a string", '"""',
        "    def f(self):", "        return os.name",
    ]  # fmt: skip


def lines_by_parser(source: str) -> list[str]:
    """Return the same by Python's parser."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                skipped.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = [(number, line.rstrip()) for number, line in enumerate(source.splitlines(), 1)]
    return [line for n, line in lines if n not in skipped and line and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("area", AREAS)
def test_significant_lines_of_the_package_are_those_of_the_parser(area: str) -> None:
    for place in AREAS[area]:
        path = PACKAGE / place
        for file in [path] if path.suffix == ".py" else path.rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            assert list(significant_lines(source)) == lines_by_parser(source), file


def test_a_touched_kernel_changes_its_area_alone(tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = {area: hash_area(area, package) for area in AREAS}
    assert before == {area: hash_area(area) for area in AREAS}
    kernel = package / "backends" / "cpu" / "kernels" / "elementwise.py"
    source = kernel.read_text(encoding="utf-8")
    kernel.write_text("# a comment\n\n" + source, encoding="utf-8")
    assert hash_area("cpu", package) == before["cpu"]
    kernel.write_text(source.replace("return ", "return 0 + ", 1), encoding="utf-8")
    after = {area: hash_area(area, package) for area in AREAS}
    assert changed_areas(before, after, AREAS) == ["cpu"]
    (package / "layers" / "more.py").write_text("x = 1\n", encoding="utf-8")  # a new file counts
    assert changed_areas(before, {area: hash_area(area, package) for area in AREAS}, AREAS) == ["cpu", "layers"]


def test_an_area_without_a_recorded_hash_counts_as_changed() -> None:
    assert changed_areas({}, {"cpu": "1"}, ["cpu"]) == ["cpu"]


def test_stale_line_names_commits_and_areas() -> None:
    assert stale_line([("aaa", []), ("bbb", [])]) == ""
    changes = [("aaa", ["cpu"]), ("bbb", ["cuda"]), ("aaa", ["cpu", "engine"])]
    assert stale_line(changes) == "Measured at aaa; cpu, engine changed since. Measured at bbb; cuda changed since."


def test_no_hashes_without_source_files(tmp_path: Path) -> None:
    assert provenance.source_hashes(tmp_path) == {}
