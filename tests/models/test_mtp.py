"""Heads for multi-token prediction: their logits against torch, from both forms of files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.models import MtpHead, Transformer, load_model_with_head, read_model_config
from llm_worker_rbee.models.convert import convert
from llm_worker_rbee.models.kv_cache import KVCache
from llm_worker_rbee.models.mtp import has_head
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.helpers import mtp_models, random_tensors
from tests.helpers.mtp_models import Floats

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def made() -> Callable[[str], mtp_models.MtpModel]:
    cache: dict[str, mtp_models.MtpModel] = {}

    def make(name: str) -> mtp_models.MtpModel:
        if name not in cache:
            cache[name] = mtp_models.make(name)
        return cache[name]

    return make


def computed(model: Transformer, head: MtpHead, ids: list[int], chunks: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return the logits of a model and of its head at all tokens, in chunks."""
    sequence, start = SingleSequence(model, len(ids)), 0
    cache = KVCache(head.ops, head.config, sequence.cache.n_blocks)
    before, logits, drafted = np.zeros((1, model.config.d_model), np.float32), list[Floats](), list[Floats]()
    for count in chunks:
        batch = sequence.batch(ids[start : start + count], start, all_logits=True)
        made, hidden = model.forward_hidden(batch, sequence.cache)
        rows = np.concatenate([before, hidden[:-1]])
        drafts, _ = head.forward(replace(batch, hidden=rows), cache)
        logits.append(made)
        drafted.append(drafts)
        before, start = hidden[-1:], start + count
    return np.concatenate(logits), np.concatenate(drafted)


def backends() -> dict[str, Callable[[], Backend]]:
    return {"reference": lambda: select_backend(backend="reference"), "cpu": lambda: select_backend("cpu")}


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
@pytest.mark.parametrize("name", mtp_models.VARIANTS)
def test_logits_of_the_head_equal_torch(
    name: str, form: str, backend: str, made: Callable[[str], mtp_models.MtpModel], tmp_path: Path
) -> None:
    model, ids = made(name), np.random.default_rng(1).integers(3, 160, 21).tolist()
    path = model.save_gguf(tmp_path / "m.gguf") if form == "gguf" else model.save_hf(tmp_path / "hf")
    logits, drafted = computed(*mtp_models.load(path, backends()[backend]()), ids, (8, 1, 12))
    expected_logits, expected_drafts = model.expected(ids)
    assert np.abs(expected_logits - expected_drafts).max() > 1, "the check would be vacuous"
    assert np.abs(logits - expected_logits).max() < TOLERANCE
    assert np.abs(drafted - expected_drafts).max() < TOLERANCE


def test_model_with_a_head_has_the_bits_of_the_model_alone(
    made: Callable[[str], mtp_models.MtpModel], tmp_path: Path
) -> None:
    model, head = mtp_models.load(made("qwen3_5").save_gguf(tmp_path / "m.gguf"), select_backend("cpu"))
    batch = SingleSequence(model, 16).batch([5, 9, 11, 40], 0, all_logits=True)
    caches = [SingleSequence(model, 16).cache for _ in range(2)]
    logits, hidden = model.forward_hidden(batch, caches[0])
    assert np.array_equal(logits, model.forward(batch, caches[1]))
    one = replace(batch, hidden=hidden)
    fused, unfused = (KVCache(head.ops, head.config, 1) for _ in range(2))
    for fast, slow in zip(head.forward(one, fused), head.compute(head.ops, one, unfused.layers), strict=True):
        assert np.array_equal(fast, slow)


def test_matrices_of_the_vocabulary_that_the_head_has_for_itself_are_used(
    made: Callable[[str], mtp_models.MtpModel], tmp_path: Path
) -> None:
    """A copy of the model's own is packed once."""
    model, ids = made("glm4moe"), [4, 8, 15, 16, 23, 42]
    table = model.hf.model.embed_tokens.weight.detach().numpy()
    own = {"embed_tokens": table, "shared_head_head": 2 * model.hf.lm_head.weight.detach().numpy()}
    path = replace(model, weights={**model.weights, **own}).save_gguf(tmp_path / "m.gguf")
    target, head = mtp_models.load(path, select_backend(backend="reference"))
    assert head.embedding is target.embedding
    assert head.head is not target.head
    _, drafted = computed(target, head, ids, (6,))
    assert np.abs(drafted - 2 * model.expected(ids)[1]).max() < 2 * TOLERANCE


def test_file_without_a_head_is_refused_with_the_remedy(
    made: Callable[[str], mtp_models.MtpModel], tmp_path: Path
) -> None:
    """The key alone is not enough: some files leave the tensors out."""
    path = replace(made("qwen3_5"), weights={}).save_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    assert (config.nextn_layers, has_head(checkpoint, config)) == (1, False)
    with pytest.raises(InvalidRequestError, match=r"no head for multi-token prediction.*speculative ngram"):
        load_model_with_head(checkpoint, select_backend(backend="reference"), config)
    converted = open_checkpoint(convert(checkpoint, tmp_path / "c.gguf", "Q8_0").path)
    assert not has_head(converted, read_model_config(converted))


@pytest.mark.parametrize(
    ("kind", "columns", "expected"), [("Q8_0", 128, "Q8_0"), ("Q4_K", 512, "Q4_K"), ("Q4_K", 256, "F32")]
)
def test_halves_of_a_matrix_stay_quantized_where_they_are_whole_blocks(kind: str, columns: int, expected: str) -> None:
    tensor = random_tensors.random_tensor(kind, 3, columns, np.random.default_rng(0))
    left, right = tensor.split_columns()
    assert {left.kind, right.kind} == {BLOCK_TYPES[expected]}
    assert np.array_equal(np.concatenate([left.dequantize(), right.dequantize()], 1), tensor.dequantize())
