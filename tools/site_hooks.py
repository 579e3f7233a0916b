"""Pages of the site outside docs/ (mkdocs.yml): those in the repository's root, the Python API, the decisions' list.

The documents are written for a reader of the repository: their links between docs/ and the root are changed here. The
start page is README.md. The page of the API names what the package exports; its text comes from the docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}}
ROOT_FILES = ("LICENSE", "NOTICE")
LINK = re.compile(r"(\]\()([^)#\s]+)")
AREA = re.compile(r"## \[(.+)\]\((\S+\.md)\)")
API = """# Python

```python
from llm_worker_rbee import LLM, SamplingParams

llm = LLM("smollm2")
print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text)
```
"""
API_NAMES = (
    "llm.LLM",
    "llm.Stream",
    "sampling_params.SamplingParams",
    "generation.Completion",
    "generation.Chunk",
    "sampling_params.StructuredOutputsParams",
    "tokenizer.chat.events.Tool",
    "tokenizer.chat.events.ToolCall",
)
API_NAMES += ("embedder.Embedder", "embedder.Reranker", "embedder.RankResult", "generation.Timings", "errors")
STYLE = """.md-grid { max-width: 74rem; }
.md-typeset table:not([class]) { font-size: 0.7rem; }
.md-typeset .doc-heading code { font-size: inherit; }
"""


def site_link(target: str, *, in_root: bool) -> str:
    """Return a link of a page of the root, or of docs/, as a link of the site."""
    if in_root:
        return ROOT_PAGES.get(target, target.removeprefix("docs/"))
    above = target.removeprefix("../")
    return ROOT_PAGES.get(above, above) if (target.startswith("../") and (ROOT / above).exists()) else target


def decision_pages() -> list[dict[str, Any]]:
    """Return the pages of docs/decisions/README.md by area, for the navigation."""
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    return [{area: f"decisions/{page}"} for area, page in AREA.findall(index)]


def api_page() -> str:
    """Return the page of the Python API, for mkdocstrings to fill in."""
    return API + "".join(f"\n::: llm_worker_rbee.{name}\n" for name in API_NAMES)


def on_config(config: Any) -> Any:
    """Put the pages of decisions under their index."""
    config.nav = [
        {"Decisions": ["decisions/README.md", *decision_pages()]} if "Decisions" in entry else entry
        for entry in config.nav
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    texts = {to: (ROOT / name).read_text(encoding="utf-8") for name, to in ROOT_PAGES.items()}
    texts |= {name: (ROOT / name).read_text(encoding="utf-8") for name in ROOT_FILES}
    for path, text in {**texts, "python.md": api_page(), "stylesheets/site.css": STYLE}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links between docs/ and the root; a page alone under its tab needs no list of pages."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    in_root = page.file.src_uri in ROOT_PAGES.values()
    return LINK.sub(lambda link: link[1] + site_link(link[2], in_root=in_root), markdown)
