"""Generated pages: equal to what the saved runs give, and marked when the code that they measure changes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pages import __main__ as pages
from benchmarks.pages import speed_chart as chart
from llm_worker_bench import provenance

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="this is not a checkout: there is no docs/")


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.path)
def test_page_is_what_saved_runs_and_code_give(page) -> None:
    """Fails when a page was edited by hand, a run was added, or measured code changed: then run `make pages`."""
    expected = pages.render(page, provenance.source_hashes())
    assert (ROOT / page.path).read_text(encoding="utf-8") == expected, f"{page.path}: write it with `make pages`"


@pytest.mark.parametrize("page", [p for p in pages.PAGES if p.path.endswith(".md")], ids=lambda p: p.path)
def test_page_names_commit_versions_and_command_of_its_runs(page) -> None:
    text = pages.render(page, provenance.source_hashes())
    runs = pages.load_runs(page.patterns)
    assert runs
    for name, run in runs.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| [{name}]")]
        assert pages.commit_id(run) in line
        assert run.versions["python"] in line
        assert "llm-worker-rbee " in line


def test_a_touched_kernel_makes_pages_differ(tmp_path: Path) -> None:
    """On a copy of the package and of the runs: pages that measure the kernels are others, and say so at once."""
    package, results = tmp_path / "llm_worker_rbee", tmp_path / "results"
    shutil.copytree(provenance.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = package / "backends" / "cpu" / "kernels" / "elementwise.py"
    before = {area: provenance.hash_area(area, package) for area in provenance.AREAS}
    kernel.write_text(kernel.read_text(encoding="utf-8") + "\nTOUCHED = True\n", encoding="utf-8")
    after = {area: provenance.hash_area(area, package) for area in provenance.AREAS}
    for name, run in pages.load_runs(("*/*.json.gz",)).items():
        replace(run, sources=before).save(results / name)
    marked = 0
    for page in pages.PAGES:
        fresh, touched = (pages.render(page, hashes, results) for hashes in (before, after))
        assert "changed since." not in fresh.splitlines()[0]
        on_cpu = any("cpu" in pages.areas(run) for run in pages.load_runs(page.patterns, results).values())
        if page.path.endswith(".md"):
            assert (touched != fresh) == on_cpu
            assert ("; cpu changed since." in touched.splitlines()[0]) == on_cpu
            marked += on_cpu
    assert marked >= 3


def test_a_stale_page_says_so_in_its_first_line() -> None:
    page = next(page for page in pages.PAGES if page.path == "docs/benchmarks.md")
    hashes = {**provenance.source_hashes(), "cpu": "another"}
    first = pages.render(page, hashes).splitlines()[0]
    assert first.startswith("> Measured at ")
    assert "cpu" in first
    fresh = dict.fromkeys(provenance.AREAS, "the same")
    runs = {name: replace(run, sources=fresh) for name, run in pages.load_runs(page.patterns).items()}
    assert pages.stale_line(runs, fresh) == ""


def test_data_in_the_chart_is_that_of_the_runs() -> None:
    (page,) = (page for page in pages.PAGES if page.path.endswith(".svg"))
    picture = (ROOT / page.path).read_text(encoding="utf-8")
    data = chart.chart_data(pages.load_runs(page.patterns))
    assert chart.embedded_data(picture) == json.loads(json.dumps(data))
    assert {"this_worker", "llama_cpp", "ratio", "date", "commit", "run"} <= set(data[0])
    other = picture.replace(f'"this_worker": {data[0]["this_worker"]}', '"this_worker": 1', 1)
    assert chart.embedded_data(other) != data


def test_runs_of_pages_name_no_place_of_a_machine() -> None:
    for name, run in pages.load_runs(("*/*.json.gz",)).items():
        text = json.dumps(run.as_json())
        assert "/tmp/" not in text, name
        assert "/home/" not in text, name
        assert "/work/" not in text, name


def test_saved_runs_stay_small() -> None:
    files = [path for path in (ROOT / "docs" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2 << 20


def test_check_names_the_file_and_the_remedy() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pages", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_evidence_lists_its_steps_and_what_is_left_out() -> None:
    command = [sys.executable, "-m", "benchmarks.evidence", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert {"micro-cpu", "experiments", "profile-cpu", "accuracy", "peers"} <= set(lines)
    assert lines["micro-cpu"].startswith("llm-worker-rbee bench micro")
    wrong = subprocess.run([*command, "--only", "nothing"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert wrong.returncode == 1
    assert "names no step" in wrong.stderr
