"""The built-in embedding model against transformers: tokens, float32, quantized weights, and the bits of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee import Embedder
from tests.conftest import DEVICE

TEXTS = [
    "", "a", "Hello, world!", "The quick brown fox jumps over the lazy dog.", "Where is the nearest train station?",
    "naïve café, Zürich, 東京タワー, привет мир, emoji 🎉🚀", "def f(x): return x**2 + 1", "\t tabs\nand lines \r\n",
    "antidisestablishmentarianism " * 3, "numbers 3.14159, 1,000,000 and 2^31-1",
    " ".join(f"word{i}" for i in range(60)), "A long sentence about the history of computing. " * 24,
]  # fmt: skip


@pytest.fixture(scope="module")
def oracle(embedding_model: Path) -> tuple[list[list[int]], Any]:
    """Return what transformers gives: the ids, and the embeddings of each text alone."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedding_model)
    model = transformers.AutoModel.from_pretrained(embedding_model, dtype=torch.float32).eval()
    ids = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in TEXTS]
    with torch.no_grad():
        hidden = [model(input_ids=torch.tensor([one])).last_hidden_state[0].mean(0).numpy() for one in ids]
    rows = np.stack(hidden)
    return ids, rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def embedder(embedding_model: Path) -> Embedder:
    return Embedder(embedding_model, device=DEVICE, deterministic=True)


def cosines(a: Any, b: Any) -> Any:
    return np.einsum("ij,ij->i", a.astype(np.float64), b.astype(np.float64))


def test_tokens_are_those_of_transformers(embedder: Embedder, oracle: tuple[list[list[int]], Any]) -> None:
    assert [list(ids) for ids in embedder.encode(TEXTS, truncate=True)] == oracle[0]


def test_names_of_special_tokens_are_text(embedder: Embedder) -> None:
    ids = embedder.tokenize("[SEP]")
    assert [embedder.text.tokenizer.piece(token).strip() for token in ids] == ["[CLS]", "[", "sep", "]", "[SEP]"]


def test_reference_is_transformers_in_float32(embedding_model: Path, oracle: tuple[list[list[int]], Any]) -> None:
    rows = Embedder(embedding_model, backend="reference").embed(TEXTS, truncate=True)
    np.testing.assert_allclose(rows, oracle[1], atol=2e-6)


def test_kernels_are_near_float32(embedder: Embedder, oracle: tuple[list[list[int]], Any]) -> None:
    rows = embedder.embed(TEXTS, truncate=True)
    assert cosines(rows, oracle[1]).min() > 0.9999
    for i, text in enumerate(TEXTS):
        np.testing.assert_array_equal(embedder.embed(text, truncate=True), rows[i])


def test_quantized_weights_are_near_float32(embedding_model: Path, oracle: tuple[list[list[int]], Any]) -> None:
    quantized = Embedder(embedding_model, device=DEVICE, deterministic=True, quantize="Q8_0")
    empty, *others = cosines(quantized.embed(TEXTS, truncate=True), oracle[1])
    assert min(others) > 0.999
    assert empty > 0.998  # two tokens: the rounding of their activations to int8 is not averaged out


def test_similar_texts_are_near(embedder: Embedder) -> None:
    cat, kitten, rates = embedder.embed(["A cat sits on the mat.", "The kitten is on the rug.", "Interest rates rose."])
    assert embedder.similarity(cat, kitten) > 0.5 > 0.2 > embedder.similarity(cat, rates)
