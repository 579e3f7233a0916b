"""The command `bench report`: the file it writes, and its errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.bench_runs import micro

from .conftest import Run, environment

needs_matplotlib = pytest.mark.skipif(
    subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; u.find_spec('matplotlib') or exit(1)"]
    ).returncode,
    reason="matplotlib (the extra `bench`) is not installed",
)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    micro().save(tmp_path / "micro.json")
    return tmp_path / "micro.json"


@needs_matplotlib
def test_report_writes_page_and_prints_size(cli: Run, saved: Path, tmp_path: Path) -> None:
    done = cli("bench", "report", saved, "-o", tmp_path / "new folder" / "page.html", "--title", "Ours & theirs")
    assert (done.returncode, done.stdout) == (0, b"")
    assert "page.html" in done.stderr.decode()
    assert re.search(r"\(\d+ kB\)$", done.stderr.decode().strip())
    text = (tmp_path / "new folder" / "page.html").read_text(encoding="utf-8")
    assert "<h1>Ours &amp; theirs</h1>" in text
    assert "rope_forward/128" in text
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["page.html"]


@needs_matplotlib
def test_report_accepts_baselines_and_several_files(cli: Run, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "data/llm-worker-rbee/baselines").mkdir(parents=True)
    micro(factor=0.5, commit="c" * 40, day=3).save(tmp_path / "data/llm-worker-rbee/baselines/faster.json")
    assert cli("bench", "report", saved, "faster").returncode == 0
    assert "micro.json compared with faster: 0 regressed, 15 improved" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("text", ["{", "{}", None])
def test_report_bad_file_is_named_and_nothing_written(cli: Run, saved: Path, tmp_path: Path, text: str | None) -> None:
    bad = tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    done = cli("bench", "report", saved, bad)
    assert done.returncode == 1
    assert str(bad) in done.stderr.decode()
    assert done.stderr.decode().count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_report_wrong_usage_is_an_error(cli: Run, saved: Path, tmp_path: Path) -> None:
    assert cli("bench", "report").returncode == 2
    done = cli("bench", "report", saved, "-o", tmp_path)
    assert done.returncode == 1
    assert "is a folder" in done.stderr.decode()


@needs_matplotlib
def test_report_unwritable_path_is_named(cli: Run, saved: Path) -> None:
    done = cli("bench", "report", saved, "-o", saved / "below.html")
    assert done.returncode == 1
    assert f"cannot write {saved}/below.html" in done.stderr.decode()


def test_report_without_matplotlib_names_the_remedy(saved: Path, tmp_path: Path) -> None:
    """As on the core install: the import fails."""
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from llm_worker_rbee.cli import run_command_line; sys.exit(run_command_line(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "bench", "report", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert "pip install 'llm-worker-rbee[bench]'" in done.stderr
    assert not (tmp_path / "report.html").exists()
