"""Whole models with single ops, against the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.ops import Batch
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.kv_cache import KVCache
from llm_worker_rbee.weights import open_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("gguf")
from tests.helpers import model_zoo

cuda = CudaBackend()

BLOCK = 8


def logits(path: Path, ops: Any, ids: list[int], parts: list[int], max_context: int | None) -> np.ndarray:
    """Return the logits of every token, prefilled in chunks of these sizes, over blocks in reverse order."""
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, ops, read_model_config(checkpoint), max_context)
    n_blocks = -(-len(ids) // BLOCK)
    cache = KVCache(ops, model.config, n_blocks, BLOCK, "float32")
    table, found, at = np.arange(n_blocks)[::-1].copy(), [], 0
    for count in parts:
        places = np.arange(at, at + count)
        batch = Batch(
            ids=np.array(ids)[places],
            positions=places,
            slot_mapping=table[places // BLOCK] * BLOCK + places % BLOCK,
            query_start=np.array([0, count]),
            context_len=np.array([at + count]),
            block_table=table[None],
            logits_index=np.arange(count),
        )
        found.append(np.asarray(replace(model, fused=None).forward_unfused(batch, cache)))
        at += count
    return np.concatenate(found)


@pytest.mark.parametrize("name", ["phi3-short", "gemma2", "olmo2"])
def test_family_unfused_matches_reference(name: str, tmp_path: Path) -> None:
    variant = model_zoo.ZOO[name]
    made = model_zoo.make_hf(replace(variant, settings={**variant.settings, "num_hidden_layers": 2}))
    path = model_zoo.save_hf(made, tmp_path / "m")
    ids = model_zoo.prompt_ids(variant)[:18]
    wanted = logits(path, ReferenceBackend(), ids, [18], variant.max_context)
    found = logits(path, cuda, ids, [17, 1], variant.max_context)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_quantized_family_unfused_matches_reference(tmp_path: Path) -> None:
    """A tied, packed table; 17 tokens on the tensor cores, then one as int8."""
    variant = model_zoo.ZOO["gemma2"]
    model = model_zoo.make_hf(replace(variant, settings={**variant.settings, "num_hidden_layers": 1}))
    path = model_zoo.save_quantized(variant, model, tmp_path / "m.gguf", "Q8_0")
    ids = model_zoo.prompt_ids(variant)[:18]
    wanted, found = (logits(path, ops, ids, [17, 1], None) for ops in (ReferenceBackend(), cuda))
    difference = np.abs(found - wanted).max(1) / np.abs(wanted).max()
    assert difference[:17].max() < 1e-2
    assert difference[17] < 5e-2
