"""LoRA adapters on the CUDA backend: fused and op by op against the reference; in deterministic mode a token has the
same bits alone, in chunks, and beside other adapters. On a GPU also from graphs, and with a real model's answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee import LLM  # noqa: E402
from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels.lora import TOKENS, group_tokens, max_tiles  # noqa: E402
from llm_worker_rbee.backends.ops import Backend, Batch  # noqa: E402
from llm_worker_rbee.backends.reference import ReferenceBackend  # noqa: E402
from llm_worker_rbee.llm import together  # noqa: E402
from llm_worker_rbee.models import Transformer, load_model, read_model_config  # noqa: E402
from llm_worker_rbee.models.kv_cache import KVCache  # noqa: E402
from llm_worker_rbee.models.lora import ModelAdapters  # noqa: E402
from llm_worker_rbee.token_engine.launch import warm_up  # noqa: E402
from llm_worker_rbee.weights import open_checkpoint  # noqa: E402
from llm_worker_rbee.weights.hub import locate_model  # noqa: E402
from llm_worker_rbee.weights.lora import read_adapter  # noqa: E402
from tests.helpers import lora_zoo, model_zoo  # noqa: E402

SMALL = replace(model_zoo.ZOO["qwen2"], settings={**model_zoo.ZOO["qwen2"].settings, "num_hidden_layers": 1})
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
TOLERANCE = {"F32": 1e-4, "Q8_0": 0.05}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a small model in two types, and three adapters of other ranks."""
    folder = tmp_path_factory.mktemp("lora")
    model = model_zoo.make_hf(SMALL)
    made = {"F32": model_zoo.save_gguf(SMALL, model, folder / "f32.gguf")}
    made["Q8_0"] = model_zoo.save_quantized(SMALL, model, folder / "q8.gguf", "Q8_0")
    for rank, roles in ((3, ()), (20, ("attn_q", "ffn_down")), (16, ("attn_k", "attn_v", "ffn_up"))):
        made[f"rank {rank}"] = lora_zoo.write_random_peft(
            made["F32"], folder / str(rank), rank=rank, seed=rank, size=8, roles=roles
        )
    return made


def load(files: dict[str, Path], kind: str, ops: Backend) -> Transformer:
    checkpoint = open_checkpoint(files[kind])
    model = load_model(checkpoint, ops, read_model_config(checkpoint), 128)
    slots = ModelAdapters(model, checkpoint, 32, 4)
    for slot, name in enumerate(name for name in files if name.startswith("rank")):
        slots.place(slot, slots.pack(read_adapter(files[name])))
    return replace(model, adapters=slots)


def run(model: Transformer, requests: list[tuple[list[int], int, float]]) -> list[np.ndarray[Any, Any]]:
    """Return the logits of all tokens of requests in one step: ids, slot and scale of each."""
    counts = [len(ids) for ids, _, _ in requests]
    blocks = [-(-count // 16) for count in counts]
    cache = KVCache(model.ops, model.config, sum(blocks), 16, "float32")
    table, first = np.zeros((len(requests), max(blocks)), np.int64), 0
    for row, count in zip(table, blocks, strict=True):
        row[:count] = np.arange(first, first + count)
        first += count
    positions = np.concatenate([np.arange(count) for count in counts])
    owners = np.repeat(np.arange(len(requests)), counts)
    batch = Batch(
        ids=np.concatenate([np.array(ids, np.int64) for ids, _, _ in requests]),
        positions=positions,
        slot_mapping=table[owners, positions // 16] * 16 + positions % 16,
        query_start=np.concatenate([[0], np.cumsum(counts)]),
        context_len=np.array(counts),
        block_table=table,
        logits_index=np.arange(sum(counts)),
        adapters=np.repeat([slot for _, slot, _ in requests], counts),
        adapter_scales=np.repeat(np.array([scale for *_, scale in requests], np.float32), counts),
    )
    logits = model.ops.to_host(model.forward(batch, cache))[: sum(counts)]
    return np.split(logits, np.cumsum(counts)[:-1])


REQUESTS: list[tuple[list[int], int, float]] = [
    (list(range(3, 20)), 0, 1.0),
    ([5, 9], 1, 0.5),
    (list(range(40, 60)), -1, 1.0),
    ([7] * 3, 2, -1.0),
    ([1], 0, 2.0),
]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_mixed_step_equals_the_reference(files: dict[str, Path], kind: str) -> None:
    expected = run(load(files, kind, ReferenceBackend()), REQUESTS)
    model = load(files, kind, CudaBackend())
    assert model.adapters is not None
    assert model.adapters.fused is not None
    for ours, theirs in zip(run(model, REQUESTS), expected, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE[kind]
    model.adapters.fused = None
    for ours, theirs in zip(run(model, REQUESTS), expected, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE[kind]


@pytest.mark.gpu
@needs_gpu  # NumPy's products depend on the place of a row in its tile
def test_same_bits_alone_and_beside_other_adapters(files: dict[str, Path]) -> None:
    model = load(files, "Q8_0", CudaBackend(deterministic=True))
    together = run(model, REQUESTS)
    for request, expected in zip(REQUESTS, together, strict=True):
        (alone,) = run(model, [request])
        np.testing.assert_array_equal(alone, expected)
    for ours, expected in zip(run(model, REQUESTS[::-1]), together[::-1], strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_step_without_adapters_runs_the_model_as_it_was(files: dict[str, Path]) -> None:
    ops = CudaBackend(deterministic=True)
    model = load(files, "Q8_0", ops)
    plain = replace(model, adapters=None)
    request = [(REQUESTS[2][0], -1, 1.0)]
    np.testing.assert_array_equal(run(model, request)[0], run(plain, request)[0])


def test_tile_belongs_to_one_adapter() -> None:
    slots = np.array([2, -1, 0, 2, 0, 0, -1] + [2] * 20)
    tiles, tokens = group_tokens(slots)
    assert list(tiles) == [0, 2, 2]
    grouped = tokens.reshape(-1, TOKENS)
    assert list(grouped[0]) == [2, 4, 5] + [-1] * 13
    for slot, own in zip(tiles, grouped, strict=True):
        assert {slots[token] for token in own if token >= 0} == {slot}
    assert sorted(token for token in tokens if token >= 0) == list(np.flatnonzero(slots >= 0))
    assert len(tiles) <= max_tiles(len(slots), 3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_engine_on_a_gpu_answers_as_on_the_cpu(deterministic: bool, tmp_path: Path) -> None:
    """Steps from graphs, and batches of mixed adapters; in deterministic mode every bit is as alone."""
    path = locate_model(None)
    folders = {
        f"a{i}": lora_zoo.write_random_peft(path, tmp_path / str(i), rank=8 + i, seed=i, size=2) for i in range(3)
    }
    prompts = [(f"Story {i}: once upon a time there was", None if i % 4 == 3 else f"a{i % 3}") for i in range(12)]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    gpu = LLM(loras=folders, max_context=512, deterministic=deterministic, device="cuda")
    warm_up(gpu.engine, gpu.loading)
    cpu = LLM(loras=folders, max_context=512, device="cpu")
    for lora in (None, "a0", "a1", {"a0": 0.5, "a2": 0.5}):
        ours, theirs = (llm.generate(prompts[0][0], lora=lora, **options) for llm in (gpu, cpu))
        pairs = zip(ours.logprobs or (), theirs.logprobs or (), strict=True)
        same = [abs(a.logprob - b.logprob) for a, b in takewhile(lambda pair: pair[0].token == pair[1].token, pairs)]
        assert same  # int8 activations on the CPU: the distance grows with the tokens that are read back
        assert same[0] < 0.1
        assert max(same) < 0.5
    alone = [gpu.generate(prompt, lora=lora, **options) for prompt, lora in prompts]
    streams = [gpu.stream(prompt, lora=lora, **options) for prompt, lora in prompts]
    for _ in together(streams):
        pass
    if deterministic:
        for one, stream in zip(alone, streams, strict=True):
            assert [(e.token, e.logprob) for e in one.logprobs or ()] == [
                (e.token, e.logprob) for e in stream.so_far().logprobs or ()
            ]
