"""`--deterministic`: the logits of a token are bitwise equal alone, in a batch, prefilled at once or in chunks, fused
and unfused; and as close to the reference as in the default mode."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.backends.cuda.lowering import REWRITES  # noqa: E402
from llm_worker_rbee.backends.graph import Rewrite  # noqa: E402
from llm_worker_rbee.models import Transformer, load_model, read_model_config  # noqa: E402
from llm_worker_rbee.models.convert import quantize_checkpoint  # noqa: E402
from llm_worker_rbee.weights import Checkpoint, open_checkpoint  # noqa: E402
from llm_worker_rbee.weights.quants import BLOCK_TYPES  # noqa: E402
from tests.helpers import cuda_models, model_zoo  # noqa: E402
from tests.helpers.synthetic import random_tensor  # noqa: E402

FAMILIES = ("mistral-window", "qwen2", "qwen3", "phi3-short", "gemma2", "gemma3", "gemma4", "gpt-oss")
INVARIANT, DEFAULT = CudaBackend(deterministic=True), CudaBackend()

CASES = {
    "packed": (cuda_models.GROUPED._replace(layers=1), "Q4_0"),
    "mixed kinds": (cuda_models.PLAIN._replace(layers=1), "Q4_K_M"),
    "dense": (cuda_models.QWEN._replace(layers=1), "F16"),
    "heads of 48": (cuda_models.GROUPED._replace(layers=1, width=192, head_dim=48), "Q4_0"),
}
Step = tuple[Sequence[int], Sequence[int]]  # requests, tokens of each
WAYS: dict[str, Sequence[Step]] = {
    "at once": (((0,), (4,)),),
    "in chunks": (((0,), (1,)), ((0,), (3,))),
    "in a batch": (((1, 0), (3, 2)), ((0, 1), (1, 1)), ((1, 0), (3, 1))),
}


# The same bits op by op: (shape, mix, features of families).
ONE_LAYER = cuda_models.GROUPED._replace(layers=1)
SINGLE_OP_CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "packed": (ONE_LAYER, "Q4_0", {}),
    "packed, many features": (
        ONE_LAYER, "Q4_0",
        {"post": True, "norms": True, "activation": "gelu_tanh", "scale": 11.3, "final_cap": 5.0},
    ),
    "mixed kinds, bias": (cuda_models.PLAIN._replace(layers=1), "Q4_K_M", {"bias": True}),
    "packed and dense parts": (ONE_LAYER, "Q4_0 with F16 values", {}),
    "float16, tied": (cuda_models.QWEN._replace(layers=1), "F16", {}),
    "float16, many features": (
        ONE_LAYER, "F16",
        {"post": True, "norms": True, "bias": True, "activation": "gelu_tanh", "window": 3, "cap": 2.0, "scale": 9.7},
    ),
    "bfloat16, part rotated": (ONE_LAYER, "BF16", {"norms": True, "rope_dim": 24}),
    "float32": (ONE_LAYER, "F32", {"post": True}),
    "fp8": (ONE_LAYER, "fp8", {"window": 3}),
    "linear attention": (None, "qwen3_5", {}),
    "short convolution": (None, "lfm2", {}),
    "per-layer embeddings, shared keys": (None, "gemma4-e", {}),
    "experts beside an MLP": (None, "gemma4-moe", {}),
    "experts": (ONE_LAYER, "Q4_0", {"post": True, "experts": {"shared": True, "gate": True}}),
    "heads of 48": (ONE_LAYER._replace(width=192, head_dim=48), "Q4_0", {"bias": True, "norms": True}),
}  # fmt: skip
# (requests, tokens of each, logits of all): prefill, decode of one and two, mixed
STEPS = (((0, 1), (3, 2), False), ((0,), (1,), False), ((0, 1), (1, 1), False), ((0, 1, 2), (1, 1, 2), True))
CASE_OF_REWRITE = {
    "embed_norm": "packed, many features", "attention": "float16, many features", "gated_linear": "fp8",
    "linear_add_norm": "packed, many features", "logits": "packed and dense parts", "experts_add_norm": "experts",
    "gated_attention": "linear attention", "gated_delta": "linear attention", "short_conv": "short convolution",
    **dict.fromkeys(
        ("embed_inputs", "stream_norm", "per_layer_gate", "linear_add"), "per-layer embeddings, shared keys"
    ),
    "parallel_experts": "experts beside an MLP",
}  # fmt: skip
LAYER_TYPES = {  # of small models
    "qwen3_5": ["linear_attention", "full_attention"], "lfm2": ["conv", "full_attention"],
    "gemma4-moe": ["full_attention"], "gemma4-e": ["full_attention", "full_attention"],
}  # fmt: skip


def checkpoint_of(shape: Any, mix: str) -> Checkpoint:
    if mix in model_zoo.ZOO:
        variant, kinds = model_zoo.ZOO[mix], LAYER_TYPES[mix]
        changes = {"layer_types": kinds, "num_hidden_layers": len(kinds)}
        changes |= {"num_kv_shared_layers": 1} if mix == "gemma4-e" else {}
        variant = replace(variant, settings={**variant.settings, **changes})
        path = Path(tempfile.mkdtemp()) / "m.gguf"
        return open_checkpoint(model_zoo.save_gguf(variant, model_zoo.make_hf(variant), path))
    if mix == "fp8":
        return quantize_checkpoint(cuda_models.random_checkpoint(shape, "BF16"), "fp8")
    if mix != "Q4_0 with F16 values":
        return cuda_models.random_checkpoint(shape, mix)
    made, name = cuda_models.random_checkpoint(shape, "Q4_0"), "blk.0.attn_v.weight"
    values = random_tensor(BLOCK_TYPES["F16"], made.tensors[name].shape, seed=11)
    return replace(made, tensors={**made.tensors, name: replace(values, name=name)})


@cache
def fused_model(case: str) -> Transformer:
    shape, mix, features = SINGLE_OP_CASES[case]
    made = checkpoint_of(shape, mix)
    model = load_model(made, INVARIANT, read_model_config(made))
    if not features:
        return model
    experts = features.get("experts")
    model = cuda_models.with_features(model, **{k: v for k, v in features.items() if k != "experts"})
    return cuda_models.with_experts(model, mix, **experts) if experts else model


@cache
def differing_steps(case: str) -> list[tuple[Any, ...]]:
    """Return the steps whose logits, fused and op by op, are not bitwise equal."""
    fused = fused_model(case)
    models = (fused, replace(fused, fused=None))
    random, pair = np.random.default_rng(1), [cuda_models.Requests(model, 3, "float32") for model in models]
    found = []
    for step in STEPS:
        indices, counts, every = step
        ids = random.integers(0, 96, sum(counts))
        batches = [requests.step(indices, counts, ids, every) for requests in pair]
        logits = [m.forward(batch, r.cache) for m, batch, r in zip(models, batches, pair, strict=True)]
        if not torch.equal(*logits):
            found.append(step)
    return found


@pytest.mark.parametrize("case", SINGLE_OP_CASES)
def test_fused_steps_have_the_bits_of_single_ops(case: str) -> None:
    assert fused_model(case).fused is not None
    assert differing_steps(case) == []


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.into)
def test_rewrite_with_all_its_ops_has_the_bits_of_single_ops(rewrite: Rewrite) -> None:
    case = CASE_OF_REWRITE[rewrite.into]
    fused = fused_model(case).fused
    assert fused is not None
    used = [line.ops for line in fused.program("float32") if line.component == rewrite.into]
    assert {op for ops in used for op in ops.split(" + ")} == {op.rstrip("?*") for op in rewrite.pattern.split()}
    assert differing_steps(case) == []


@pytest.mark.parametrize("name", ["llama-bias", *FAMILIES])
def test_every_family_is_fused_with_the_bits_of_single_ops(name: str, tmp_path: Path) -> None:
    """But for biases that no epilogue adds: such a model runs op by op, and matches the reference."""
    variant = model_zoo.ZOO[name]
    settings = {**variant.settings, "num_hidden_layers": 2}
    settings |= {"layer_types": settings["layer_types"][:2]} if "layer_types" in settings else {}
    made = open_checkpoint(model_zoo.save_hf(model_zoo.make_hf(replace(variant, settings=settings)), tmp_path / "m"))
    model, reference = cuda_models.load_both(made, INVARIANT)
    assert (model.fused is None) == (name == "llama-bias")
    twin = reference if model.fused is None else replace(model, fused=None)
    pair = [cuda_models.Requests(m, 2, "float32") for m in (model, twin)]
    for indices, counts in (((0, 1), (5, 3)), ((0,), (1,)), ((1, 0), (1, 2))):
        ids = np.random.default_rng(3).integers(0, model.config.vocab_size, sum(counts))
        found, wanted = (
            torch.as_tensor(m.forward(r.step(indices, counts, ids, logits_of_all=True), r.cache))
            for m, r in zip((model, twin), pair, strict=True)
        )
        if model.fused is None:
            assert cuda_models.relative_error(found, wanted.numpy()) < 1e-4
        else:
            assert torch.equal(found, wanted)


def logits_of_first(model: Transformer, steps: Sequence[Step]) -> Any:
    """Return the logits of all tokens of request 0."""
    ids = np.random.default_rng(5).integers(0, 96, (2, 40))
    requests, found = cuda_models.Requests(model, 2, "float32", blocks_each=10), []
    for indices, counts in steps:
        chosen = [ids[w, requests.done[w] : requests.done[w] + n] for w, n in zip(indices, counts, strict=True)]
        batch = requests.step(indices, counts, np.concatenate(chosen), logits_of_all=True)
        first = sum(counts[: list(indices).index(0)])
        logits = torch.as_tensor(model.forward(batch, requests.cache)).cpu()
        found.append(logits[first : first + counts[list(indices).index(0)]].clone())
    return torch.cat(found)


@pytest.mark.parametrize(("case", "is_fused"), [*((case, True) for case in CASES), ("packed", False)])
def test_logits_do_not_depend_on_batch(case: str, is_fused: bool) -> None:
    model, reference = cuda_models.load_both(cuda_models.random_checkpoint(*CASES[case]), INVARIANT)
    assert model.fused is not None
    model = model if is_fused else replace(model, fused=None)
    found = {way: logits_of_first(model, steps) for way, steps in WAYS.items()}
    for way, logits in found.items():
        assert torch.equal(logits, found["at once"]), way
    want = logits_of_first(reference, WAYS["at once"])
    assert cuda_models.relative_error(found["at once"], want.numpy()) < 2e-2


def test_deterministic_backend_differs_by_a_field_only() -> None:
    assert (INVARIANT.name, INVARIANT.device, INVARIANT.deterministic) == (DEFAULT.name, DEFAULT.device, True)
    assert not DEFAULT.deterministic


def test_two_backends_in_one_process_do_not_affect_each_other() -> None:
    """A deterministic backend and a default one, in turn: each gives what it gives alone, fused and unfused."""
    checkpoint = cuda_models.random_checkpoint(*CASES["packed"])
    steps = WAYS["in a batch"][:2]  # prefill and decode
    for is_fused in (True, False):
        models = []
        for backend in (CudaBackend(deterministic=True), CudaBackend()):
            model = load_model(checkpoint, backend, read_model_config(checkpoint))
            models.append(model if is_fused else replace(model, fused=None))
        alone = [logits_of_first(model, steps) for model in models]
        in_turn = [logits_of_first(model, steps) for model in reversed(models)]
        assert torch.equal(alone[0], in_turn[1])
        assert torch.equal(alone[1], in_turn[0])
        assert models[0].ops.deterministic
        assert not models[1].ops.deterministic
