"""Real embedding models: nomic-embed-text finds the text that answers a question, served as clients ask for it, and its
fast backend gives the values of the reference; MiniLM gives those of sentence-transformers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openai
import pytest

from llm_worker_rbee import Embedder
from llm_worker_rbee.weights.hub import DEFAULT_EMBEDDING_MODEL, locate_model
from tests.helpers.serve_process import ServeProcess, until

DOCUMENTS = (
    "The Eiffel Tower is in Paris and was finished in 1889.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "A stack is a data structure in which the last element that was added is the first to be removed.",
    "Sourdough bread rises by wild yeast and lactic acid bacteria.",
)
QUESTIONS = (
    "Where is the Eiffel Tower?",
    "How do plants make food from sunlight?",
    "Which data structure is last in, first out?",
    "What makes sourdough rise?",
)


def test_nomic_finds_the_answers(real_model: Callable[[str], Path], default_model: Path) -> None:
    """Over HTTP, beside a chat model, by OpenAI's client; with the prefixes that the model was trained with."""
    path = real_model("nomic-embed-text-v1.5")
    server = ServeProcess("--model", default_model, "--embedding-model", path)
    try:
        server.ready()
        until(lambda: server.http.get("/health").json()["status"] == "healthy")  # it loads behind the chat model
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3)
        (model,) = [model.id for model in client.models.list() if getattr(model, "kind", "") == "embedding"]
        texts = [f"search_query: {text}" for text in QUESTIONS] + [f"search_document: {text}" for text in DOCUMENTS]
        reply = client.embeddings.create(model=model, input=texts)
        rows = np.array([entry.embedding for entry in reply.data])
    finally:
        server.close()
    assert rows.shape == (8, 768)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-4)
    assert (rows[:4] @ rows[4:].T).argmax(axis=1).tolist() == [0, 1, 2, 3]


def test_fast_backend_gives_the_values_of_the_reference(real_model: Callable[[str], Path]) -> None:
    path = real_model("nomic-embed-text-v1.5")
    fast, reference = (Embedder(path, backend=name).embed(list(DOCUMENTS)) for name in ("cpu", "reference"))
    similarity = (np.asarray(fast) * np.asarray(reference)).sum(axis=1)
    print(f"cosine similarity: {similarity.min():.6f} at least")
    assert similarity.min() > 0.9995


def test_minilm_gives_the_values_of_sentence_transformers() -> None:
    python = Path(os.environ.get("LLM_WORKER_CLIENTS", "")).absolute() / "sentence_transformers" / "bin" / "python"
    if not python.exists():
        pytest.skip("sentence-transformers is not installed: make test-real does it")
    path, texts = locate_model(DEFAULT_EMBEDDING_MODEL), [*DOCUMENTS, *QUESTIONS, "", "x", "word " * 400]
    session = Path(__file__).parent / "clients" / "sentence_transformers_session.py"
    given = json.dumps(texts)
    done = subprocess.run([python, session, path], input=given, capture_output=True, text=True, timeout=300, check=True)
    truth = np.array(json.loads(done.stdout))
    for quantize, least in ((None, 0.99999), ("Q8_0", 0.998)):
        rows = np.asarray(Embedder(path, quantize=quantize).embed(texts, truncate=True))
        similarity = (rows * truth).sum(axis=1)
        print(f"{quantize or 'F32'}: cosine similarity {similarity.min():.6f} at least")
        assert similarity.min() > least
