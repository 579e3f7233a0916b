"""Mixture of experts under Triton's interpreter: single ops and whole steps, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend, linear  # noqa: E402
from llm_worker_rbee.backends.cuda import experts as cuda_experts  # noqa: E402
from llm_worker_rbee.backends.cuda.device import HOPPER_SHARED_BYTES, has_wgmma  # noqa: E402
from llm_worker_rbee.backends.cuda.experts import expert_tile  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels.experts import launch_gather, launch_group, launch_router  # noqa: E402
from llm_worker_rbee.backends.cuda.linear import GemmTile  # noqa: E402
from llm_worker_rbee.backends.cuda.packed_weight import PackedExperts  # noqa: E402
from llm_worker_rbee.backends.ops import RouteParams  # noqa: E402
from llm_worker_rbee.backends.reference import ReferenceBackend  # noqa: E402
from tests.backends.cuda.test_forward import check_steps  # noqa: E402
from tests.helpers import cuda_models  # noqa: E402
from tests.helpers.random_planes import random_planes  # noqa: E402
from tests.helpers.random_tensors import random_tensor, relative_error  # noqa: E402

cuda, deterministic, reference = CudaBackend(), CudaBackend(deterministic=True), ReferenceBackend()


def upload(values: Any) -> Any:
    return torch.tensor(values, device=cuda.torch_device)


@pytest.mark.parametrize(
    "params",
    [RouteParams(3), RouteParams(2, renormalize=False, scale=2.5), RouteParams(4, "sigmoid"), RouteParams(1)],
)
@pytest.mark.parametrize("biased", [False, True])
def test_route_equals_reference(params: RouteParams, biased: bool, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((7, 6)).astype(np.float32)
    logits[3, 2:5] = logits[3, 2]  # equal ones: the lowest first
    bias = rng.standard_normal(6).astype(np.float32) if biased else None
    experts, weights = reference.route(logits, params, bias)
    found = cuda.route(upload(logits), params, None if bias is None else upload(bias))
    np.testing.assert_array_equal(found[0].cpu(), experts)
    np.testing.assert_allclose(found[1].cpu(), weights, rtol=1e-5)


@pytest.mark.parametrize("slots", [1, 40, 1500])
def test_tiles_hold_every_slot_once(slots: int, rng: np.random.Generator) -> None:
    experts = rng.choice([0, 2, 3, 3, 3], slots).astype(np.int32)  # 1 and 4 get none
    tiles = launch_group(upload(experts), 5, 16)
    listed = tiles.slots.view(-1, 16)[tiles.experts >= 0]
    of_tile = tiles.experts[tiles.experts >= 0]
    for expert, row in zip(of_tile.tolist(), listed.tolist(), strict=True):
        assert all(experts[slot] == expert for slot in row if slot >= 0)
    assert sorted(slot for row in listed.tolist() for slot in row if slot >= 0) == list(range(slots))


def test_gather_puts_activations_where_the_tiles_have_their_slots(rng: np.random.Generator) -> None:
    experts = rng.choice([0, 2, 3, 3, 3], (20, 2)).astype(np.int32)
    tiles = launch_group(upload(experts), 5, 16)
    for per_row, rows in ((2, 20), (1, 40)):
        x = upload(rng.standard_normal((4, rows, 96)).astype(np.float16))
        found = launch_gather(x.view(rows, 384), tiles, per_row).view(4, -1, 96)
        there = (tiles.experts >= 0).repeat_interleave(16) & (tiles.slots >= 0)
        assert int(there.sum()) == 40
        assert torch.equal(found[:, there], x[:, tiles.slots[there].long() // per_row])


@pytest.mark.gpu
@pytest.mark.skipif(not has_wgmma(cuda.torch_device), reason="needs a GPU of capability 9.0")
@pytest.mark.parametrize("kind", ["q4m", "q6", "q8", "mxfp4"])
def test_hopper_kernel_of_experts_matches_its_twin(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(cuda_experts, "MIN_GATHERED_COLUMNS", 0)
    where = cuda.torch_device
    w = PackedExperts((random_planes(kind, 6 * 200, 1440, where), random_planes(kind, 6 * 72, 1440, where)), 6)
    bias = torch.randn(6, 272, device=where)
    for tokens, k in ((3, 2), (40, 2), (100, 4), (700, 2)):
        x = torch.randn(tokens, 1440, device=where)
        experts = torch.randint(0, 5, (tokens, k), dtype=torch.int32, device=where)  # one has no slot
        found = cuda_experts.grouped_linear(x, w, experts, bias)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "has_wgmma", lambda device: False)
            wanted = cuda_experts.grouped_linear(x, w, experts, bias)
        assert torch.equal(found, wanted), (tokens, k)


@pytest.mark.parametrize(("slots", "tokens"), [(5, 16), (80, 32), (200, 64), (400, 128), (4000, 128)])
def test_tiles_of_a_gpu_follow_the_slots_of_an_expert(slots: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has one tile; a GPU chooses among several."""
    w = PackedExperts((random_planes("mxfp4", 4 * 64, 64, "cpu"),), 4)
    monkeypatch.setattr(cuda_experts, "is_interpreted", lambda: False)
    monkeypatch.setattr(cuda_experts, "shared_memory_bytes", lambda device: HOPPER_SHARED_BYTES)
    assert expert_tile(slots, w).tokens == tokens


@pytest.mark.parametrize(
    "kinds",
    [
        ("Q4_K", "Q4_K"),
        ("Q4_0", "Q8_0"),
        ("MXFP4", "MXFP4"),
        ("BF16",),
        ("F16",),
        ("F32",),
        ("FP8", "FP8"),
        ("INT4_ZP",),
    ],
)
@pytest.mark.parametrize("backend", [cuda, deterministic], ids=["usual", "deterministic"])
def test_grouped_linear_equals_reference(kinds: tuple[str, ...], backend: Any, rng: np.random.Generator) -> None:
    """Tensors of one or of several types, stacked; an expert without a token; rows of tokens and of slots."""
    stacked = [[random_tensor(kind, 64, 256, rng, 0.1) for kind in kinds] for _ in range(4)]
    experts = rng.choice(3, (19, 2)).astype(np.int32)
    bias = rng.standard_normal((4, 64 * len(kinds))).astype(np.float32)
    for shape in ((19, 256), (19, 2, 256)):
        x = rng.standard_normal(shape).astype(np.float32)
        wanted = reference.grouped_linear(x, reference.prepare_experts(stacked), experts, bias)
        weights = backend.prepare_experts(stacked)
        found = backend.grouped_linear(upload(x), weights, upload(experts), upload(bias))
        assert relative_error(found, wanted) < 2e-3


def test_tiles_with_few_slots_equal_those_with_many(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles of 64 slots one is full, the next has one slot, others up to 16 and more."""
    monkeypatch.setattr(cuda_experts, "expert_tile", lambda slots, w: GemmTile(64, 64, 4, 2))
    stacked = [[random_tensor("MXFP4", 32, 256, rng, 0.1)] for _ in range(4)]
    experts = np.repeat([0, 1, 2, 3], [65, 16, 17, 2]).astype(np.int32).reshape(50, 2)
    x, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((50, 256), (4, 32)))
    wanted = reference.grouped_linear(x, reference.prepare_experts(stacked), experts, bias)
    found = cuda.grouped_linear(upload(x), cuda.prepare_experts(stacked), upload(experts), upload(bias))
    assert relative_error(found, wanted) < 2e-3


def test_router_equals_norm_and_product(rng: np.random.Generator) -> None:
    residual, norm, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((7, 96), 96, 5))
    w = random_tensor("F32", 5, 96, rng, 0.1)
    wanted = reference.linear(reference.rms_norm(residual, norm, 1e-5), reference.prepare([w])) + bias
    (router,) = cuda.prepare([w]).parts
    found = launch_router(upload(residual), upload(norm), 1e-5, router, upload(bias), pdl=False)
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Q4_K", {"shared": False}),
        ("Q8_0", {"shared": True, "gate": True}),
        ("F16", {"shared": True}),
        ("Q4_K", {"oai": True}),
    ],
)
def test_steps_match_reference(kind: str, options: dict[str, Any]) -> None:
    dense = kind if kind == "F16" else "Q4_0"
    layers = 2 if kind == "Q4_K" and "oai" not in options else 1  # the interpreter is slow; errors of int8 grow
    made = cuda_models.random_checkpoint(cuda_models.PLAIN._replace(layers=layers), dense)
    models = [cuda_models.with_experts(model, kind, **options) for model in cuda_models.load_both(made, cuda)]
    assert models[0].fused is not None
    lines = [line.component for line in models[0].fused.program("float32")]
    assert lines == ["embed_norm", *["attention", "linear_add_norm", "experts_add_norm"] * layers, "logits"]
    check_steps(models, kind)
