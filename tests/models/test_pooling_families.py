"""Embedding models and rerankers of each family against transformers: from folders, and from GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError
from tests.helpers import pooling_zoo

TOLERANCE = 1e-4
MIN_COSINE = 0.99999
Made = tuple[pooling_zoo.Variant, Any, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a member of the zoo by name: (variant, transformers model, folder), made once."""
    cache: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in cache:
            variant = pooling_zoo.POOLING_ZOO[name]
            model = pooling_zoo.make_hf(variant)
            cache[name] = variant, model, pooling_zoo.save_folder(variant, model, tmp_path_factory.mktemp(name) / name)
        return cache[name]

    return make


def assert_close(ours: pooling_zoo.Floats, expected: pooling_zoo.Floats) -> None:
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() < TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if ours.shape[1] > 2:
        cosines = (ours * expected).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() > MIN_COSINE


@pytest.mark.parametrize("name", pooling_zoo.POOLING_ZOO)
def test_folder_equals_transformers(name: str, made: Callable[[str], Made]) -> None:
    variant, model, folder = made(name)
    rows = pooling_zoo.sequences()
    ours = pooling_zoo.load(folder)
    assert_close(ours.run(rows), pooling_zoo.expected_rows(variant, model, rows))
    assert ours.pooling.is_ranker == (name in pooling_zoo.RERANKERS)
    assert ours.pooling.normalize == (name in pooling_zoo.EMBEDDERS and variant.normalizes)


@pytest.mark.parametrize("name", [n for n in pooling_zoo.POOLING_ZOO if n not in pooling_zoo.NO_GGUF_KEY])
def test_gguf_equals_transformers(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    variant, model, folder = made(name)
    rows = pooling_zoo.sequences()
    ours = pooling_zoo.load(pooling_zoo.save_gguf(variant, folder, tmp_path / "made.gguf"))
    assert_close(ours.run(rows), pooling_zoo.expected_rows(variant, model, rows))


@pytest.mark.parametrize("name", pooling_zoo.POOLING_ZOO)
def test_kernels_equal_transformers_with_the_same_bits_in_every_batch(name: str, made: Callable[[str], Made]) -> None:
    variant, model, folder = made(name)
    rows = pooling_zoo.sequences()
    ours = pooling_zoo.load(folder, "cpu")
    together = ours.run(rows)
    assert_close(together, pooling_zoo.expected_rows(variant, model, rows))
    assert (together == np.concatenate([ours.run([ids]) for ids in rows])).all()
    assert (together == ours.run(rows[::-1])[::-1]).all()


def test_token_types_of_a_pair(made: Callable[[str], Made]) -> None:
    variant, model, folder = made("bert-rank")
    rows = pooling_zoo.sequences((9, 30))
    types = [(np.arange(len(ids)) >= 4).astype(np.int64) for ids in rows]
    expected = pooling_zoo.expected_rows(variant, model, rows, types)
    assert np.abs(expected - pooling_zoo.expected_rows(variant, model, rows)).max() > 0.01
    assert_close(pooling_zoo.load(folder).run(rows, types), expected)


def test_rows_that_tables_lack_are_refused(made: Callable[[str], Made]) -> None:
    *_, folder = made("xlm-roberta-rank")
    ours = pooling_zoo.load(folder)
    with pytest.raises(ContextLengthError, match="has 41 tokens, the model takes 40"):
        ours.run(pooling_zoo.sequences((3, 41)))
    with pytest.raises(InvalidRequestError, match="of segment 1, the model has 1"):
        ours.run(pooling_zoo.sequences((2,)), [np.array([0, 1])])
