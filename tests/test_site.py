"""The documents as a site: it builds without a warning, has every page, and needs no network to be read."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import llm_worker_rbee

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="this is not a checkout: there is no docs/")


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_has_every_page(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    pages = {page.replace("README.html", "index.html") for page in pages}
    wanted = pages | {"index.html", "python.html", "CONTRIBUTING.html", "SECURITY.html", "CHANGELOG.html"}
    assert wanted <= {path.relative_to(site).as_posix() for path in site.rglob("*.html")}


def test_links_of_the_root_pages_lead_into_the_site(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    links = set(re.findall(r'href="([^":#]+)"', start))
    assert {"architecture.html", "decisions/index.html", "CONTRIBUTING.html", "LICENSE"} <= links
    assert not [link for link in links if not (site / link).exists()]
    assert 'href="CONTRIBUTING.html"' in (site / "architecture.html").read_text(encoding="utf-8")


def test_python_page_shows_what_the_package_exports(site: Path) -> None:
    page = (site / "python.html").read_text(encoding="utf-8")
    headings = set(re.findall(r'<h[23] id="llm_worker_rbee\.([\w.]+)"', page))
    names = {name.rpartition(".")[2] for name in headings}
    assert set(llm_worker_rbee.__all__) - {"__version__"} <= names
    assert {"llm.LLM.generate", "llm.LLM.stream_chat"} <= headings
    assert "A loaded model and the engine that serves it." in page  # a docstring


def test_navigation_has_every_decision(hooks: Any) -> None:
    targets = {target for page in hooks.decision_pages() for target in page.values()}
    assert targets | {"decisions/README.md"} == {f"decisions/{path.name}" for path in (DOCS / "decisions").glob("*.md")}


def test_site_needs_no_network_to_be_read(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|img|iframe)[^>]+src="?(https?:[^">\s]+)|<link[^>]+href="?(https?:[^">\s]+)""")
    found = {path.name: loaded.findall(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert not {name: addresses for name, addresses in found.items() if addresses}


def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[gone](gone.md)\n", encoding="utf-8")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    validation = settings[settings.index("\nvalidation:") : settings.index("\nmarkdown_extensions:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nstrict: true\n{validation}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "gone.md" in done.stdout + done.stderr


def test_site_link(hooks: Any) -> None:
    assert hooks.site_link("docs/http.md", in_root=True) == "http.md"
    assert hooks.site_link("CHANGELOG.md", in_root=True) == "CHANGELOG.md"
    assert hooks.site_link("../README.md", in_root=False) == "index.md"
    assert hooks.site_link("../benchmarks.md", in_root=False) == "../benchmarks.md"  # of a page in decisions/
    assert hooks.site_link("https://example.org/", in_root=True) == "https://example.org/"
