"""On a real GPU: the decoder at real shapes against float32 torch, from graphs and from single launches, bit for bit
where that is promised."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]
SHAPES = {"llama2-7b": ("Q4_0", "Q4_K_M", "Q8_0", "BF16"), "llama3-8b": ("Q4_K_M",), "smollm2-135m": ("Q4_0",)}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    folder = str(Path(__file__).parents[3] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("gpu_model")
    sys.path.remove(folder)


@pytest.mark.parametrize(("shape", "mix"), [(s, m) for s, mixes in SHAPES.items() for m in mixes])
def test_logits_of_two_layers(gpu: Any, shape: str, mix: str) -> None:
    assert max(gpu.model_errors(mix, shape, (1, 4, 24, 64)).values()) < 3e-2


def test_a_row_does_not_depend_on_its_batch_while_it_is_small(gpu: Any) -> None:
    model = gpu.random_model(gpu.parse("llama2-7b:Q4_0:2"))
    cache = gpu.KVCache(gpu.OPS, model.config, 64, 16, "bfloat16")
    tables, ids = np.arange(64).reshape(4, 16), np.array([11, 12, 13, 14])
    rows = {}
    for size in (1, 2, 3, 4, 4, 4):  # the last two run from a graph
        batch = gpu.one_request(ids[:1], 0, tables[:size, :1].copy(), False, size)
        object.__setattr__(batch, "ids", ids[:size])
        rows.setdefault(size, []).append(model.forward(batch, cache).clone())
    for found in rows.values():
        for one in found:
            assert torch.equal(one[0], rows[1][0][0])
