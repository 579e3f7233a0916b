"""Real embedding models: nomic-embed-text finds the text that answers a question, served as clients ask for it, and its
fast backend gives the values of the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openai

from llm_worker_rbee import Embedder
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
