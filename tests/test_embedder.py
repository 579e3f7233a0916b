"""The offline API of pooling models, on small random ones and on the built-in model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llm_worker_rbee import LLM, Embedder, RankResult, Reranker
from llm_worker_rbee.embedder import similarity
from llm_worker_rbee.errors import (
    ContextLengthError,
    InferenceError,
    InvalidRequestError,
    ModelFileError,
    UnsupportedModelError,
)
from tests.helpers.tiny_encoders import MAX_LENGTH, PROMPTS, VOCAB, WIDTH, write_encoder
from tests.helpers.tiny_pooling import require_same

TEXTS = ["the cat sat on the mat", "a dog", "", "where is the blue bird ?", "who ran under a green rug .", "sky"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "tiny-bert")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return Embedder(folder, backend="reference")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    folder = write_encoder(tmp_path_factory.mktemp("reranker") / "tiny-reranker", is_reranker=True)
    return Reranker(folder, backend="reference")


def test_embed_gives_float32_rows_of_length_one(embedder: Embedder) -> None:
    rows = embedder.embed(TEXTS)
    assert rows.shape == (len(TEXTS), WIDTH)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)
    assert (embedder.dimension, embedder.max_length) == (WIDTH, MAX_LENGTH)
    assert (embedder.backend, embedder.device) == ("reference", "cpu")
    assert embedder.embed([]).shape == (0, WIDTH)


@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_rows_are_the_same_alone_and_in_any_batch(embedder: Embedder, folder: Path, budget: int) -> None:
    rows = Embedder(folder, backend="reference", max_step_tokens=budget).embed(TEXTS * 3)
    for i, row in enumerate(rows):
        require_same(row, embedder.embed(TEXTS[i % len(TEXTS)]))


def test_thousands_of_inputs_come_back_in_order(embedder: Embedder) -> None:
    first = VOCAB.index("a")
    ids = [[first + i % 26] * (1 + i % 7) for i in range(5_000)]
    rows = embedder.embed(ids)
    assert rows.shape == (5_000, WIDTH)
    require_same(rows[:182], rows[182:364])  # 26 tokens in 7 lengths
    distances = np.abs(rows[:182, None] - rows[None, :182]).max(axis=2) + np.eye(182)
    assert distances.min() > 1e-4
    require_same(rows[4_999], embedder.embed(ids[4_999]))


def test_embed_token_ids_as_texts(embedder: Embedder) -> None:
    ids = [embedder.tokenize(text) for text in TEXTS]
    assert ids[2] == [VOCAB.index("[CLS]"), VOCAB.index("[SEP]")]
    expected = embedder.embed(TEXTS)
    require_same(embedder.embed(ids), expected)
    require_same(embedder.embed(np.array(ids[0])), expected[0])
    require_same(embedder.embed([np.array(one) for one in ids]), expected)


def test_dimensions_are_cut_before_normalization(embedder: Embedder) -> None:
    whole = embedder.embed(TEXTS, normalize=False)
    assert not np.allclose(np.linalg.norm(whole, axis=1), 1)
    cut = embedder.embed(TEXTS, dimensions=16)
    np.testing.assert_allclose(cut, whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(embedder.embed(TEXTS, dimensions=16, normalize=False), whole[:, :16])


def test_long_text_is_refused_or_cut(embedder: Embedder, folder: Path) -> None:
    text = "the cat " * 100
    with pytest.raises(ContextLengthError, match=rf"input 1 has 202 tokens, the model takes {MAX_LENGTH}.*truncate"):
        embedder.embed(["sky", text])
    cut = embedder.embed(text, truncate=True)
    ids = embedder.tokenize("the cat " * 15)
    assert len(ids) == MAX_LENGTH
    np.testing.assert_array_equal(cut, embedder.embed(ids))
    short = Embedder(folder, backend="reference", max_length=8)
    assert short.max_length == 8
    with pytest.raises(ContextLengthError, match="the model takes 8"):
        short.embed("the cat " * 10)


def test_prompts_go_before_texts(tmp_path: Path, embedder: Embedder) -> None:
    prompted = Embedder(write_encoder(tmp_path / "prompted", has_prompts=True), backend="reference")
    assert prompted.prompts == PROMPTS
    plain = prompted.embed("passage : sky", prompt="")
    np.testing.assert_array_equal(prompted.embed("sky"), plain)  # the default prompt
    np.testing.assert_array_equal(prompted.embed("sky", prompt_name="document"), plain)
    np.testing.assert_array_equal(prompted.embed("sky", prompt="passage : "), plain)
    query = prompted.embed("sky", prompt_name="query")
    np.testing.assert_array_equal(query, prompted.embed(prompted.tokenize("sky", prompt_name="query")))
    assert not np.array_equal(query, plain)
    with pytest.raises(InvalidRequestError, match="'questions': the model has document, query"):
        prompted.embed("sky", prompt_name="questions")
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        embedder.embed("sky", prompt="a", prompt_name="query")
    with pytest.raises(InvalidRequestError, match="not before token ids"):
        embedder.embed([2, 3], prompt="a")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (5, {}, "texts must be text, token ids or a list of them, not int"),
        (b"sky", {}, "not bytes"),
        (["sky", 5], {}, "input 0 must be text, or as all others"),
        (["sky", None], {}, "input 0 must be text"),
        ([[2, 3], [2, "x"]], {}, "input 1 must be text"),
        ([[2, len(VOCAB)]], {}, "outside 0"),
        ([[2, 3], []], {}, "input 1 has no tokens"),
        ("sky", {"dimensions": 0}, f"the model gives 1 to {WIDTH}"),
        ("sky", {"dimensions": WIDTH + 1}, f"the model gives 1 to {WIDTH}"),
    ],
)
def test_invalid_input_is_named(embedder: Embedder, texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        embedder.embed(texts, **options)


def test_progress_is_called_or_printed(embedder: Embedder, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int, int]] = []
    embedder.embed(TEXTS, progress=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (len(TEXTS), len(TEXTS), sum(len(embedder.tokenize(text)) for text in TEXTS))
    embedder.embed(TEXTS, progress=True)
    assert f"{len(TEXTS)} of {len(TEXTS)} inputs" in capsys.readouterr().err
    embedder.embed(TEXTS)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("embeddings.LayerNorm.bias", np.nan, "tensor 'token_embd_norm.bias' holds NaN"),
        ("encoder.layer.0.output.dense.weight", np.nan, "tensor 'blk.0.ffn_down.weight' holds a NaN"),
        ("encoder.layer.1.output.LayerNorm.weight", 3e38, "damaged gave values that are not numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_nan_weights_and_rows_are_refused(tmp_path: Path, name: str, value: float, error: str) -> None:
    folder = write_encoder(tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors[name][:] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises((InferenceError, ModelFileError), match=error):
        Embedder(folder, backend="reference").embed("the cat")


def test_similarity_of_rows() -> None:
    a, b = np.array([[1.0, 0.0], [3.0, 4.0]]), np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 4.0]])
    np.testing.assert_allclose(similarity(a, b), [[1, 0, 0.6], [0.6, 0.8, 1]], rtol=1e-6)
    np.testing.assert_allclose(similarity(a, b, "dot"), [[2, 0, 3], [6, 4, 25]])
    np.testing.assert_allclose(similarity(a[1], b, "euclidean"), [-(17**0.5), -(18**0.5), 0], rtol=1e-6)
    np.testing.assert_allclose(similarity(a[1], b[0], "manhattan"), -5)
    with pytest.raises(InvalidRequestError, match="of 2 and of 3 values"):
        similarity(a, np.ones(3))


def test_rank_orders_documents_by_score(reranker: Reranker) -> None:
    found = reranker.rank("where is the bird", TEXTS)
    assert sorted(result.index for result in found) == list(range(len(TEXTS)))
    assert [result.score for result in found] == sorted((result.score for result in found), reverse=True)
    assert all(0 <= result.score <= 1 and result.document == TEXTS[result.index] for result in found)
    assert reranker.rank("where is the bird", TEXTS, top_n=2) == found[:2]
    assert reranker.rank("where is the bird", []) == []
    scores = reranker.score([("where is the bird", text) for text in TEXTS])
    assert [RankResult(i, float(scores[i]), TEXTS[i]) for i in (result.index for result in found)] == found


def test_score_of_pairs_with_several_queries(reranker: Reranker) -> None:
    pairs = [("sky", "blue"), ("sky", "a cat"), ("dog", "a cat")]
    expected = [reranker.rank(query, [document])[0].score for query, document in pairs]
    np.testing.assert_allclose(reranker.score(pairs), expected, rtol=1e-6)


def test_rank_refuses_or_cuts_long_documents(reranker: Reranker) -> None:
    with pytest.raises(ContextLengthError, match="documents 1 has 53 tokens"):
        reranker.rank("sky", ["blue", "the cat " * 24 + "sat"])
    (result,) = reranker.rank("sky", ["the cat " * 24], truncate=True)
    assert 0 <= result.score <= 1
    for arguments, name in (((5, []), "query"), (("sky", "blue"), "documents"), (("sky", ["a", 1]), "documents.1")):
        with pytest.raises(InvalidRequestError, match=name):
            reranker.rank(*arguments)
    with pytest.raises(InvalidRequestError, match="top_n is 0"):
        reranker.rank("sky", ["blue"], top_n=0)


def test_models_of_the_other_kind_are_refused_by_name(folder: Path, reranker: Reranker) -> None:
    with pytest.raises(InvalidRequestError, match="tiny-bert is an embedding model, not a reranker"):
        Reranker(folder, backend="reference")
    with pytest.raises(InvalidRequestError, match="tiny-reranker is a reranker"):
        Embedder(reranker.checkpoint.path, backend="reference")
    with pytest.raises(UnsupportedModelError, match=r"tiny-bert is an embedding model .* use `embed`"):
        LLM(folder, backend="reference")


def test_context_manager_drops_the_weights(folder: Path) -> None:
    with Embedder(folder, backend="reference") as embedder:
        assert embedder.embed("sky").shape == (WIDTH,)
    assert not hasattr(embedder, "model")
    with pytest.raises(InvalidRequestError, match="tiny-bert is closed: load it again"):
        embedder.embed("sky")


def test_threads_may_share_an_embedder(embedder: Embedder) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(embedder.embed, [TEXTS[:3], TEXTS[3:], TEXTS[1:2], TEXTS]))
    expected = embedder.embed(TEXTS)
    for rows, part in zip(found, (slice(3), slice(3, None), slice(1, 2), slice(None)), strict=True):
        require_same(rows, expected[part])
