"""Search the lines of a file by meaning: `python examples/semantic_search.py FILE QUERY [MODEL]`."""

import sys
from pathlib import Path

from llm_worker_rbee import Embedder

BEST = 3

file, query, *model = sys.argv[1:]
lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
embedder = Embedder(*model)  # without MODEL the built-in one
roles = {name: name for name in ("query", "document") if name in embedder.prompts}
scores = embedder.similarity(
    embedder.embed(query, prompt_name=roles.get("query"), truncate=True),
    embedder.embed(lines, prompt_name=roles.get("document"), truncate=True),
)
for i in scores.argsort()[::-1][:BEST]:
    print(f"{scores[i]:.3f}  {lines[i]}")
