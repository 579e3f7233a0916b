"""Long random walks through the grammars of every chat format and of JSON schemas, over real vocabularies.

    LLM_WORKER_WALKS=200 python -m pytest -rs -s tests/extra/test_grammar_walks.py

walks through so many schemas for each format, up to 2,000 tokens each: hours. The vocabularies are those of the default
model and of the GGUF files in the folder LLM_WORKER_WALK_FILES; files without weights are enough.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from llm_worker_rbee.structured_outputs.chat_grammar import answer_grammar
from llm_worker_rbee.tokenizer import ChatTemplate, Tokenizer, tokenizer_from_gguf
from llm_worker_rbee.tokenizer.chat.detection import detect_chat_format
from llm_worker_rbee.tokenizer.chat.events import ChatOptions
from llm_worker_rbee.tokenizer.chat.format import ChatFormat
from llm_worker_rbee.weights.gguf import open_gguf
from llm_worker_rbee.weights.hub import locate_model
from tests.helpers.chat_formats import ANSWERS, template_of, with_markers
from tests.helpers.grammar_walks import MODES, Walker, check_walks, random_schema

NUM_SCHEMAS = int(os.environ.get("LLM_WORKER_WALKS", "0"))
FOLDER = os.environ.get("LLM_WORKER_WALK_FILES")
FILES = ["default", *sorted(map(str, Path(FOLDER).glob("*.gguf")))] if FOLDER else ["default"]
MAX_STEPS = 2_000
pytestmark = [
    pytest.mark.skipif(not NUM_SCHEMAS, reason="walks of hours: LLM_WORKER_WALKS says how many schemas"),
    pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file).stem),
]


@cache
def tokenizers(file: str) -> dict[str, Tokenizer]:
    """Return the tokenizer of a file, and one with tokens for the markers of all formats."""
    metadata = open_gguf(locate_model(None) if file == "default" else Path(file)).metadata
    return {"file": tokenizer_from_gguf(metadata), "tokens": with_markers(metadata)}


@cache
def walker_of(file: str, markers: str) -> Walker:
    return Walker(tokenizers(file)[markers])


@pytest.mark.parametrize("markers", ["file", "tokens"])
@pytest.mark.parametrize("name", ["own", *ANSWERS])
def test_walks_through_calls(file: str, name: str, markers: str) -> None:
    walker = walker_of(file, markers)
    source = tokenizers(file)["file"].chat_template
    if name == "own" and source is None:
        pytest.skip("the file has no chat template")
    template = ChatTemplate(source or "", bos_token="", eos_token="") if name == "own" else template_of(name)
    chat_format = detect_chat_format(template, walker.tokenizer)
    seeds = [f"{name} {i}" for i in range(NUM_SCHEMAS)]
    print(name, markers, dict(check_walks(walker, chat_format, seeds, MAX_STEPS)))


def test_walks_through_schemas(file: str) -> None:
    """JSON as an answer is a value of the schema, if the walk comes to its end."""
    walker, counts = walker_of(file, "file"), Counter[str]()
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(random.Random(seed))
        grammar = answer_grammar(ChatFormat(), ChatOptions(), ("json", json.dumps(schema)))
        assert grammar is not None
        for drafting in MODES:
            walk = walker.walk(grammar, random.Random(seed), drafting, MAX_STEPS)
            assert not walk.error, (seed, drafting, walk.error, schema)
            counts += Counter(walks=1, steps=len(walk.tokens), complete=int(walk.is_complete))
            if walk.is_complete:
                json.loads(walker.tokenizer.decode(walk.tokens))
    print("schemas", dict(counts))
