"""Files that are not run here: they parse, say so, and name what exists."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import SLOW_FILES, TESTS

ROOT = Path(__file__).parents[1]
SUBJECTS = ROOT / "tools" / "commit_subject.py"
YAML_FILES = [ROOT / ".pre-commit-config.yaml", ROOT / "compose.yaml", *sorted((ROOT / ".github").rglob("*.yml"))]
NOT_RUN = [
    *sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    *(ROOT / n for n in ("Dockerfile", "Dockerfile.cuda", "compose.yaml")),
]


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_file_parses_to_mapping(path: Path) -> None:
    assert isinstance(load_yaml(path), dict)


@pytest.mark.parametrize("path", NOT_RUN, ids=lambda path: path.name)
def test_file_that_was_not_run_says_so(path: Path) -> None:
    assert "Not run:" in path.read_text(encoding="utf-8")


def test_workflow_matrix_covers_supported_pythons_and_processors() -> None:
    matrix = load_yaml(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert any(name.endswith("-arm") for name in matrix["os"])


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfile_copies_existing_files(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*)$", text, flags=re.M):
        assert all((ROOT / source).exists() for source in line.split()[:-1])


def test_issue_templates_ask_for_machine_report() -> None:
    for name, command in (("bug", "doctor --json"), ("performance", "bench peers --json"), ("model", "inspect MODEL")):
        assert command in (ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8")


def test_slow_files_exist() -> None:
    assert not [name for name in SLOW_FILES if not (TESTS / name).is_file()]


def test_commit_subject_that_breaks_the_rules_is_refused(tmp_path: Path) -> None:
    for subject, fault in (
        ("Name the same roles alike", ""),
        ("Merge branch 'x' into y", ""),
        ("The roles have names", "begin with a verb"),
        ("name the roles", "begin with a verb"),
        ("Name the roles.", "full stop"),
        ("Name " + "x" * 68, "73 characters"),
    ):
        message = tmp_path / "message"
        message.write_text(f"{subject}\n\nWhy.\n")
        done = subprocess.run([sys.executable, SUBJECTS, message], capture_output=True, text=True)
        assert (done.returncode, fault in done.stderr) == (1 if fault else 0, True), done.stderr


def test_commits_since_the_rule_have_such_subjects() -> None:
    def git(*args: str) -> list[str]:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
        return done.stdout.splitlines() if done.returncode == 0 else []

    added = git("log", "--diff-filter=A", "--format=%H", "--", "tools/commit_subject.py")
    if not added:
        pytest.skip("there is no history")
    find_fault = runpy.run_path(str(SUBJECTS))["find_fault"]
    subjects = git("log", "--no-merges", "--format=%s", f"{added[-1]}..HEAD")
    faults = {subject: find_fault(subject) for subject in subjects if not subject.startswith(("fixup! ", "squash! "))}
    assert {subject: fault for subject, fault in faults.items() if fault is not None} == {}
