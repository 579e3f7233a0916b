"""Whole steps through the decoder, under Triton's interpreter, against the unfused reference.

Errors are relative to the logits' deviation: 4e-2 where activations are int8 (few decoding tokens; that rounding alone
gives 2e-2 on such small models), 2e-2 where they are float16 or float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend, forward, packed_weight, precompile, step_inputs  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels.elementwise import launch_embedding  # noqa: E402
from llm_worker_rbee.backends.cuda.packed_weight import PackedWeight  # noqa: E402
from llm_worker_rbee.backends.ops import CAPTURING, StepLimits, pending_id  # noqa: E402
from llm_worker_rbee.models import Transformer  # noqa: E402
from llm_worker_rbee.weights import Tensor, open_checkpoint  # noqa: E402
from llm_worker_rbee.weights.quants import BLOCK_TYPES  # noqa: E402
from tests.helpers import cuda_models, model_zoo  # noqa: E402
from tests.helpers.random_planes import random_planes  # noqa: E402
from tests.helpers.synthetic import random_tensor  # noqa: E402

ops = CudaBackend()

INT8_ERROR, DENSE_ERROR = 4e-2, 2e-2
CASES = {
    "packed, grouped heads": (cuda_models.GROUPED._replace(layers=1), "Q4_0"),
    "mixed kinds": (cuda_models.PLAIN._replace(layers=1), "Q4_K_M"),
    "compact kinds": (cuda_models.PLAIN._replace(layers=1), "Q2_K"),
    "dense, bias, tied": (cuda_models.QWEN._replace(layers=1), "F16"),
    "window, cap, head norms": (
        cuda_models.GROUPED._replace(layers=1),
        "F16",
        {"window": 3, "cap": 2.0, "norms": True},
    ),
    "norms after, GELU": (
        cuda_models.GROUPED._replace(layers=2),
        "Q4_0",
        {"post": True, "norms": True, "activation": "gelu_tanh"},
    ),
    "norms after, GELU, dense": (
        cuda_models.GROUPED._replace(layers=2),
        "F16",
        {"post": True, "activation": "gelu_tanh"},
    ),
    "heads of 48": (
        cuda_models.GROUPED._replace(layers=1, width=192, head_dim=48),
        "Q4_0",
        {"bias": True, "norms": True},
    ),
    "heads of 96": (cuda_models.GROUPED._replace(layers=1, width=192, heads=2, head_dim=96), "Q4_0"),
    "heads of 80, part rotated, dense": (
        cuda_models.QWEN._replace(layers=1, width=160, heads=4, head_dim=80),
        "F16",
        {"norms": True, "rope_dim": 20},
    ),
    "part rotated": (cuda_models.GROUPED._replace(layers=1), "Q4_0", {"rope_dim": 24}),
}
FUSED_PARTS = {
    "gemma4-e": {"embed_inputs", "stream_norm", "per_layer_gate", "linear_add"},
    "gemma4-moe": {"parallel_experts"},
    "lfm2moe": {"short_conv", "experts_add_norm"},
}
# (requests, tokens of each, logits of all): prefill (padded to 16), decode of one and two, mixed
STEPS = (((0, 1), (3, 2), False), ((0,), (1,), False), ((0, 1), (1, 1), False), ((0, 1, 2), (1, 1, 2), True))


@pytest.mark.parametrize("case", CASES)
def test_steps_match_reference(case: str) -> None:
    shape, mix, *more = CASES[case]
    models = [
        cuda_models.with_features(model, **more[0]) if more else model
        for model in cuda_models.load_both(cuda_models.random_checkpoint(shape, mix), ops)
    ]
    assert models[0].fused is not None
    lines = models[0].fused.program("float32")
    layers = ["attention", "linear_add_norm", "gated_linear", "linear_add_norm"] * shape.layers
    assert [line.component for line in lines] == ["embed_norm", *layers, "logits"]
    assert all(line.runs for line in lines)
    check_steps(models, mix)


def test_layers_of_different_shapes_match_reference(tmp_path: Path) -> None:
    """Gemma 4: heads of two sizes, norms of values, scaled residual streams, keys as values."""
    variant = model_zoo.ZOO["gemma4"]
    settings = {**variant.settings, "num_hidden_layers": 2, "layer_types": variant.settings["layer_types"][:2]}
    folder = model_zoo.save_hf(model_zoo.make_hf(replace(variant, settings=settings)), tmp_path / "m")
    models = cuda_models.load_both(open_checkpoint(folder), ops)
    assert models[0].fused is not None
    check_steps(models, "F16")


@pytest.mark.parametrize("name", FUSED_PARTS)
def test_quantized_family_is_fused_and_matches_reference(name: str, tmp_path: Path) -> None:
    """Few tokens by GEMV; the router and the projection of per-layer embeddings are floats, as in real files."""
    variant = model_zoo.ZOO[name]
    kinds = {"lfm2moe": ["conv", "full_attention"], "gemma4-e": ["full_attention"] * 2}.get(name, ["full_attention"])
    changes: dict[str, Any] = {"layer_types": kinds, "num_hidden_layers": len(kinds), "global_head_dim": 32}
    changes |= {"num_kv_shared_layers": 1} if name == "gemma4-e" else {"head_dim": 32}
    variant = replace(variant, settings={**variant.settings, **changes})
    made = model_zoo.make_hf(variant)
    quantized = open_checkpoint(model_zoo.save_quantized(variant, made, tmp_path / "q.gguf", "Q8_0"))
    floats = open_checkpoint(model_zoo.save_gguf(variant, made, tmp_path / "m.gguf")).tensors
    kept = {name: floats[name] for name in floats if "ffn_gate_inp" in name or "model_proj" in name}
    models = cuda_models.load_both(replace(quantized, tensors={**quantized.tensors, **kept}), ops)
    steps = models[0].fused
    assert isinstance(steps, forward.CudaForward)
    assert FUSED_PARTS[name] <= {line.component for line in steps.program("float32")}
    assert forward.max_gemv_tokens(steps.fused, batch_invariant=False) == forward.SMALL_BATCH
    check_steps(models, "Q8_0")


def check_steps(models: Sequence[Transformer], mix: str) -> None:
    """Compare the logits of all STEPS on a backend and on the reference."""
    random = np.random.default_rng(1)
    pair = [cuda_models.Requests(model, 3, "float32") for model in models]
    for indices, counts, every in STEPS:
        ids = random.integers(0, 96, sum(counts))
        got, want = (
            model.forward(requests.step(indices, counts, ids, every), requests.cache)
            for model, requests in zip(models, pair, strict=True)
        )
        assert tuple(got.shape) == want.shape
        few = max(counts) == 1 and mix != "F16"
        assert cuda_models.relative_error(got.cpu(), want) < (INT8_ERROR if few else DENSE_ERROR), counts


def test_program_names_the_kernels_of_each_op_and_launches_none() -> None:
    model, _ = cuda_models.load_both(cuda_models.random_checkpoint(cuda_models.GROUPED._replace(layers=1), "Q4_0"), ops)
    assert model.fused is not None
    with precompile.count_compilations() as counted:
        runs = {line.ops: line.runs for line in model.fused.program("bfloat16")}
    assert counted.compiled == counted.loaded == []
    assert runs["embed + rms_norm"] == "1 token: embed_rows; 64: embed_rows, add_rms_norm_rows"
    few, many = runs["linear + split_heads + rope_store + attention"].split("; 64: ")
    assert few.startswith("1 token: gemv_packed, decode_attention")
    assert {"gemm_packed", "rope_store_qkv", "prefill_attention"} <= set(many.split(", "))
    assert runs["linear + gated"] == "1 token: gemv_packed; 64: gemm_packed, swiglu_rows"


def test_run_profiled_names_the_components_and_changes_no_bit() -> None:
    model, _ = cuda_models.load_both(cuda_models.random_checkpoint(cuda_models.GROUPED._replace(layers=1), "Q4_0"), ops)
    assert model.fused is not None
    found = []
    for indices, counts, every in STEPS[:2]:
        ids = np.random.default_rng(1).integers(0, 96, sum(counts))
        plain, profiled = (cuda_models.Requests(model, 3, "float32") for _ in range(2))
        want = model.forward(plain.step(indices, counts, ids, every), plain.cache)
        seen: list[tuple[str, float]] = []
        batch = profiled.step(indices, counts, ids, every)
        got = model.fused.run_profiled(
            batch,
            profiled.cache.layers,
            lambda labels, seconds, seen=seen: seen.extend(  # type: ignore[misc]
                (label.component, taken) for label, taken in zip(labels, seconds, strict=True)
            ),
        )
        assert torch.equal(got, want)
        assert all(taken > 0 for _, taken in seen)
        found.append([component for component, _ in seen])
    assert {"qkv", "rope_kv_write", "attention", "output", "norm", "gate_up", "activation", "down", "head"} <= set(
        found[0]
    )
    copies = ["copies"] if ops.torch_device.type == "cpu" else []  # which a trace of a GPU leaves out
    assert [component for component, _ in groupby(found[1])] == [
        *copies, "embedding_norm", "qkv", "rope_kv_attention", "output_norm", "gate_up_activation", "down_norm", "head",
    ]  # fmt: skip


def test_matrix_of_packed_and_dense_parts_is_fused() -> None:
    """The values of the KV cache in F16, the queries and keys in Q4_0; gate and up of two packed kinds."""
    shape = cuda_models.GROUPED._replace(layers=1)
    made = cuda_models.random_checkpoint(shape, "Q4_0")
    tensors = dict(made.tensors)
    for name, kind in (("blk.0.attn_v.weight", "F16"), ("blk.0.ffn_up.weight", "Q8_0")):
        tensors[name] = replace_tensor(tensors[name], kind)
    models = cuda_models.load_both(replace(made, tensors=tensors), ops)
    assert models[0].fused is not None
    check_steps(models, "Q4_0")


def replace_tensor(tensor: Tensor, kind: str) -> Tensor:
    return replace(random_tensor(BLOCK_TYPES[kind], tensor.shape, seed=11), name=tensor.name)


@pytest.mark.parametrize("counts", [(1, 1), (1, 3)])
def test_pending_ids_are_taken_from_the_device(counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the step in flight, in any order, give the same logits as ids from the host: decode and mixed."""
    monkeypatch.setattr(step_inputs, "DECODE_SIZES", (1,))
    monkeypatch.setattr(step_inputs, "STEP_MULTIPLE", 2)
    model, _ = cuda_models.load_both(cuda_models.random_checkpoint(cuda_models.GROUPED._replace(layers=1), "Q4_0"), ops)
    ids = np.array([8, 9, 10, 11][: sum(counts)])
    pending = torch.tensor([40, ids[-1], 41, 8], dtype=torch.int32, device=ops.torch_device)
    on_device = ids.copy()
    on_device[0], on_device[-1] = pending_id(3), pending_id(1)
    found = []
    for given in (ids, on_device):
        requests = cuda_models.Requests(model, 2, "float32")
        model.forward(requests.step((0, 1), (2, 1), np.array([5, 6, 7])), requests.cache)
        batch = replace(requests.step((0, 1), counts, given), pending=None if given is ids else pending)
        found.append(model.forward(batch, requests.cache).clone())
    assert torch.equal(*found)


def test_warm_up_writes_no_keys_and_changes_no_result() -> None:
    """All steps are padding: the KV cache stays as it is."""
    shape = cuda_models.GROUPED._replace(layers=1)
    model, _ = cuda_models.load_both(cuda_models.random_checkpoint(shape, "F16"), ops)
    steps = [((0, 1), (3, 2)), ((0,), (1,)), ((0, 1), (1, 2))]
    ids = np.random.default_rng(3).integers(0, 96, 12)

    def logits_of_steps(requests: cuda_models.Requests) -> list[Any]:
        batches = [requests.step(*step, ids[: sum(step[1])]) for step in steps]
        return [model.forward(batch, requests.cache).clone() for batch in batches]

    expected = logits_of_steps(cuda_models.Requests(model, 2, "float32"))
    requests, seen = cuda_models.Requests(model, 2, "float32"), []
    ops.warm_up(
        partial(model.forward, cache=requests.cache), model.fused, requests.cache.layers,
        StepLimits(max_batch=1, max_tokens=2, max_logits=1, max_context=32), lambda *report: seen.append(report),
    )  # fmt: skip
    assert seen[-1][0] == CAPTURING
    assert not any(array.any() for layer in requests.cache.layers for array in layer)
    for one, other in zip(logits_of_steps(requests), expected, strict=True):
        assert torch.equal(one, other)


def test_undecided_id_reads_first_embedding_row() -> None:
    """An undecided row is recomputed later; until then its id must not read outside the table."""
    where = ops.torch_device
    part = random_planes("q6", 5, 64, where)
    residual = torch.zeros(2, 64, device=where)
    ids = torch.tensor([-1, -2], dtype=torch.int32, device=where)
    launch_embedding(PackedWeight((part,)), 1.0, ids, residual)
    assert torch.allclose(residual, packed_weight.dequantize(part)[:1].expand(2, 64))
