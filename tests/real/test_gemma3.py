"""Gemma 3 270M, real weights: greedy tokens equal those of llama.cpp on the same file.

Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms: whoever sets
LLM_WORKER_GEMMA=1 accepts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.tokenizer import tokenizer_from_gguf
from llm_worker_rbee.weights import open_checkpoint

# Prompts, their ids, and 12 greedy tokens as llama-server gives them.
GREEDY = {
    "The capital of France is": (
        [2, 818, 5279, 529, 7001, 563],
        [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 5279],
    ),
    "def fibonacci(n):": (
        [2, 2063, 10779, 78113, 236769, 236749, 1473],
        [107, 140, 584, 538, 1251, 236743, 236771, 236787, 107, 144, 2060, 236743],
    ),
}


@pytest.fixture(scope="module")
def model(real_model: Callable[[str], Path]) -> Path:
    return real_model("gemma-3-270m")


def test_greedy_tokens_equal_those_of_llama_cpp(model: Path) -> None:
    llm = LLM(str(model), max_context=256)
    for prompt, (ids, expected) in GREEDY.items():
        assert llm.tokenizer.encode(prompt) == ids
        assert llm.generate(prompt, temperature=0.0, max_tokens=len(expected)).tokens == expected


def test_large_vocabulary_merges_short_texts_as_the_library_does(model: Path) -> None:
    start = time.process_time()
    tokenizer = tokenizer_from_gguf(open_checkpoint(model).metadata)
    print(f"{tokenizer.vocab_size} tokens opened in {time.process_time() - start:.2f} s")
    texts = [
        *GREEDY,
        "Ein Beispiel: 你好, мир! 😀\n\n\t  x = [1, 23, 456];",
        "supercalifragilisticexpialidocious " * 20,
    ]
    direct = [tokenizer.encode(text) for text in texts]
    tokenizer.prepare()
    assert direct == [tokenizer.encode(text) for text in texts]
