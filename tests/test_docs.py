"""Documents: the size of the front page, links that resolve, modules that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import programs
from llm_worker_rbee.cli import COMMANDS, load_command
from llm_worker_rbee.server.openapi import all_operations
from tests.helpers.tiny_encoders import write_encoder

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llm_worker_rbee"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]*)(#d\d+)?(?:#[^)]*)?\)")
MODULE = re.compile(r"`((?:[\w]+/)+[\w]+\.(?:py|html))\b[^`]*`")  # `engine/scheduler.py`
NAMED_MODULES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/engine.md", "docs/gpu.md")

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="this is not a checkout: there is no docs/")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_readme_fits_its_limits() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page: Path) -> None:
    for target, decision in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), f"{relative(page)} links to {target}"
            assert f'<a id="{decision[1:]}"' in path.read_text(encoding="utf-8") if decision else True, decision


@pytest.mark.parametrize("name", NAMED_MODULES)
def test_named_modules_exist(name: str) -> None:
    for module in MODULE.findall((ROOT / name).read_text(encoding="utf-8")):
        places = (ROOT, PACKAGE, PACKAGE / "engine", PACKAGE / "backends")
        assert any((place / module).exists() for place in places), f"{name} names {module}"


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    index = pages.pop("README.md")
    listed = re.findall(r"^- \[(\d+)\]\((\w+\.md)#d\1\) (.+)$", index, re.MULTILINE)
    written = [
        (number, name, title)
        for name, text in pages.items()
        for number, title in re.findall(
            r'^<a id="d(\d+)"></a>\n\n## \1\. (.+)\n\n\*\d{4}-\d\d-\d\d', text, re.MULTILINE
        )
    ]
    assert sorted(listed) == sorted(written)
    assert len({number for number, _, _ in listed}) == len(listed) > 100
    assert sum(text.count('<a id="d') for text in pages.values()) == len(listed)


def test_page_of_programs_is_what_its_tool_writes() -> None:
    """The first model of the page, which is quickly made."""
    page = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    assert page.startswith(programs.HEAD)
    assert "\n".join(programs.section(next(iter(programs.MODELS)))) in page
    assert all(f"## {name}\n" in page for name in programs.MODELS)


def _readme_commands() -> list[str]:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    found = (re.match(r"(?:printf '[^']*' \| )?(llm-worker-rbee [^#]*)", line) for line in lines)
    return [line[1].strip() for line in found if line is not None]


@pytest.mark.parametrize("command", _readme_commands())
def test_readme_command_has_the_options_it_shows(command: str) -> None:
    words = shlex.split(command)[1:]
    name = words[: 2 if words[0] == "bench" else 1]
    done = subprocess.run(
        [sys.executable, "-m", "llm_worker_rbee", *name, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    for option in (word for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", done.stdout), f"{command}: no option {option}"


def test_page_of_embeddings_shows_commands_and_python_that_work(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
    for line in re.findall(r"^llm-worker-rbee ([^#\n]+)", page, re.MULTILINE):
        name, *words = shlex.split(line)
        known = {option for param in load_command(name).params for option in param.opts}
        assert {word for word in words if word.startswith("-")} <= known, line
    embedder, reranker = (write_encoder(tmp_path / name, is_reranker=name == "r") for name in ("e", "r"))
    (code,) = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    code = code.replace("Embedder()", f"Embedder({str(embedder)!r}, backend='reference')")
    code = code.replace('"bge-reranker-v2-m3.gguf"', f"{str(reranker)!r}, backend='reference'")
    names: dict[str, Any] = {}
    exec(code.replace("top_n=2", "top_n=2, truncate=True"), names)
    assert names["rows"].shape == (3, names["embedder"].dimension)
    assert 0 <= names["best"] < 3


def test_page_for_users_of_other_servers_names_what_exists() -> None:
    """The last column of its tables: commands, options of `serve`, routes of the OpenAPI document."""
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(?! ---| what ).*\| ([^|]+) \|$", text, re.MULTILINE)
    options = {option for param in load_command("serve").params for option in param.opts}
    named = {word for row in rows for word in re.findall(r"`(--[\w-]+)", row)}
    assert len(named) > 25
    assert named <= options
    commands = {
        word for row in rows[: rows.index("`--host`, `--port` (8080)")] for word in re.findall(r"`([a-z]+)", row)
    }
    assert commands <= {name.split()[0] for name in COMMANDS} | {"run"}
    routes = {word for row in rows for word in re.findall(r"`(/[\w/-]+)`", row)}
    assert len(routes) > 25
    assert routes <= {path for _, path, _ in all_operations(has_pool=True)}


def test_page_of_the_engine_shows_its_code() -> None:
    text = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    code = [line.strip() for line in (PACKAGE / "engine" / "engine.py").read_text(encoding="utf-8").splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(lines) == 13
    assert [line for line in lines if line not in code] == []
