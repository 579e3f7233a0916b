"""Every op of the CUDA backend against the reference, over odd shapes; products of every kind by every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends import OPS, reference
from llm_worker_rbee.backends.cuda import CudaBackend, device, linear, packed_weight
from llm_worker_rbee.backends.cuda.kernels.compact_kinds import COMPACT_KINDS
from llm_worker_rbee.backends.cuda.linear import launch_gemv
from llm_worker_rbee.backends.ops import AttentionParams, RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.layers.rope import inverse_frequencies
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.helpers import int8_activations, torch_attention
from tests.helpers.layer_inputs import BlockTables, Floats, normal
from tests.helpers.random_planes import random_planes
from tests.helpers.random_tensors import random_tensor, relative_error

cuda = CudaBackend()
DEVICE = cuda.torch_device

PLANES = ["q4", "q4m", "q5", "q5m", "q6", "q8", "e4m3"]
KINDS = [*PLANES, *COMPACT_KINDS]
WAYS_OF_CODES = [*PLANES, "q2_k", "q3_k", "tq1_0", "iq4_xs", "iq2_xs", "iq3_s", "iq1_m"]


def block_count(kind: str, blocks: int) -> int:
    """Return a number of blocks near the given one that a kind can have: of some, several share a scale."""
    group = COMPACT_KINDS[kind].group if kind in COMPACT_KINDS else 1
    return -(-blocks // group) * group


def on_device(x: Floats) -> torch.Tensor:
    return torch.tensor(x, device=DEVICE)


def test_backend_has_every_op() -> None:
    assert all(callable(getattr(cuda, name)) for name in OPS)


@pytest.mark.parametrize(
    ("kind", "blocks", "tokens"),
    [*((kind, 18, 1) for kind in KINDS), *((kind, 136, 2) for kind in WAYS_OF_CODES)],
)
def test_gemv_matches_quantized_product(kind: str, blocks: int, tokens: int, rng: np.random.Generator) -> None:
    """The kernel is exact on its int8 input."""
    torch.manual_seed(1)
    columns = 32 * block_count(kind, blocks)
    part = random_planes(kind, 20, columns, DEVICE)
    x = on_device(normal(rng, tokens, columns))
    codes = int8_activations.quantize(x)
    values = packed_weight.dequantize(part).double()
    found = torch.empty(tokens, 20, device=DEVICE)
    launch_gemv("qkv", packed_weight.GemvActivations(codes), packed_weight.PackedWeight((part,)), found)
    assert relative_error(found, int8_activations.dequantize(codes).double() @ values.T) < 1e-5
    assert relative_error(found, x.double() @ values.T) < 2e-2


def multiply(x: torch.Tensor, part: packed_weight.WeightPart) -> torch.Tensor:
    return linear.BatchedLinear(DEVICE, batch_invariant=False)(x, packed_weight.PackedWeight((part,)))


@pytest.mark.parametrize("kind", KINDS)
def test_gemm_odd_shapes(kind: str, rng: np.random.Generator) -> None:
    """Rows, tokens and blocks that fill no tile; activations beyond the range of float16."""
    torch.manual_seed(2)
    columns = 32 * block_count(kind, 18)
    part = random_planes(kind, 45, columns, DEVICE)
    x = on_device(normal(rng, 18, columns, scale=1e6))
    assert relative_error(multiply(x, part), x @ packed_weight.dequantize(part).T) < 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_and_multiply_in_slices(
    kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix is dequantized in several slices."""
    monkeypatch.setattr(linear, "SCRATCH_BYTES", 4 * 32 * 18 * 20)
    monkeypatch.setattr(linear, "MAX_GEMM_TOKENS", 20)
    monkeypatch.setattr(linear, "MAX_GEMM_TOKENS_BY_KIND", {})
    torch.manual_seed(3)
    columns = 32 * block_count(kind, 18)
    part = random_planes(kind, 45, columns, DEVICE)
    x = on_device(normal(rng, 21, columns))
    assert relative_error(multiply(x, part), x @ packed_weight.dequantize(part).T) < (
        5e-4 if device.is_interpreted() else 5e-3
    )


@pytest.mark.parametrize("kind", ["q4", "q2_k", "iq4_xs", "iq2_xs", "tq1_0"])
def test_batch_invariant_product_has_the_bits_of_one_token(kind: str, rng: np.random.Generator) -> None:
    weight = packed_weight.PackedWeight((random_planes(kind, 33, 32 * 40, DEVICE),))
    x = on_device(normal(rng, 20, 32 * 40))
    multiply_invariant = linear.BatchedLinear(DEVICE, batch_invariant=True)
    found = multiply_invariant(x, weight)
    assert torch.equal(multiply_invariant(x[7:8], weight)[0], found[7])
    assert relative_error(found, x @ packed_weight.dequantize(weight.parts[0]).T) < 2e-3


def test_gemm_split_columns_are_summed(rng: np.random.Generator) -> None:
    shapes = ((4096, 512), (4096, 4096), (12288, 4096), (22016, 4096), (32000, 4096), (4096, 11008))
    count = [linear.num_splits(rows, columns, 64, linear.TILES_BY_TOKENS[64], DEVICE) for rows, columns in shapes]
    assert count == [1, 4, 2, 3, 1, 8]
    part = random_planes("q4", 33, 32 * 64, DEVICE)
    x = on_device(normal(rng, 9, 32 * 64))
    assert relative_error(multiply(x, part), x @ packed_weight.dequantize(part).T) < 2e-3


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("tokens", [1, 11])
def test_linear_dense_any_width(name: str, tokens: int, rng: np.random.Generator) -> None:
    weight, x = random_tensor(name, 13, 75, rng), normal(rng, tokens, 75, scale=1e5)
    wanted = reference.linear(x, reference.prepare([weight]))
    found = cuda.linear(on_device(x), cuda.prepare([weight]))
    assert relative_error(found, wanted) < {"F16": 1e-3, "BF16": 5e-3, "F32": 1e-5}[name]


@pytest.mark.parametrize("tokens", [0, 1, 3, 9, 230])
def test_linear_mixed_kinds_with_bias(tokens: int, rng: np.random.Generator) -> None:
    tensors = [random_tensor(name, 3 + i, 256, rng) for i, name in enumerate(("Q4_K", "Q6_K", "F32", "Q8_0"))]
    x, bias = normal(rng, tokens, 256), normal(rng, sum(t.shape[0] for t in tensors))
    wanted = reference.linear(x, reference.prepare(tensors), bias)
    found = cuda.linear(on_device(x), cuda.prepare(tensors), cuda.prepare_vector(bias))
    assert found.shape == wanted.shape
    assert not tokens or relative_error(found, wanted) < 2e-2


@pytest.mark.parametrize("name", [*(n for n in BLOCK_TYPES if n[0] != "I" or n[1] == "Q"), "FP8"])
def test_embed_every_type(name: str, rng: np.random.Generator) -> None:
    table, ids = random_tensor(name, 9, 256, rng), np.array([8, 0, 3, 3])
    wanted = reference.embed(reference.prepare([table]), ids, 16.0)
    found = cuda.embed(cuda.prepare([table]), ids, 16.0)
    np.testing.assert_allclose(found.cpu(), wanted, atol=2**-10 * abs(wanted).max())


def test_rms_norm_strided_heads(rng: np.random.Generator) -> None:
    """Rows that are a view of wider ones."""
    qkv, weight = normal(rng, 3, 5, 24), normal(rng, 24)
    found = cuda.rms_norm(on_device(qkv)[:, 2:4], cuda.prepare_vector(weight), 1e-6)
    np.testing.assert_allclose(found.cpu(), reference.rms_norm(qkv[:, 2:4], weight, 1e-6), rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 576), (3, 4, 24), (1, 33)])
def test_rms_norm_matches_reference(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x, more, weight = normal(rng, *shape), normal(rng, *shape), normal(rng, shape[-1])
    w = cuda.prepare_vector(weight)
    alone = cuda.rms_norm(on_device(x), w, 1e-5)
    np.testing.assert_allclose(alone.cpu(), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    found = cuda.add_rms_norm(on_device(x), on_device(more), w, 1e-5)
    for a, b in zip(found, reference.add_rms_norm(x, more, weight, 1e-5), strict=True):
        np.testing.assert_allclose(a.cpu(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # exp(-x) may be infinite: 1 / (1 + it) is 0
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_gated_matches_reference(activation: str, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 2 * 75, scale=4.0)
    np.testing.assert_allclose(cuda.gated(on_device(x), activation).cpu(), reference.gated(x, activation), atol=1e-5)


def cached(kv: Any, slots: np.ndarray) -> np.ndarray:
    """Return what a cache of either backend holds at these slots, (T, kv_heads, dim)."""
    if isinstance(kv, np.ndarray):
        return kv.reshape(-1, *kv.shape[2:])[slots].astype(np.float32)
    return kv.float().transpose(1, 2).flatten(0, 1)[torch.tensor(slots, device=kv.device)].cpu().numpy()


ERRORS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.5e-2, "float8": 0.12}


@pytest.mark.parametrize("way", [cuda, torch_attention], ids=["kernels", "plain"])
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "dim", "rotary", "window", "cap"),
    [
        ("float32", 4, 2, 16, 16, 0, 0.0),
        ("float32", 3, 1, 24, 12, 5, 2.5),
        ("float16", 1, 1, 96, 96, 7, 0.0),
        ("bfloat16", 2, 1, 64, 32, 0, 0.0),
        ("float8", 1, 1, 40, 40, 6, 3.0),
    ],
)
def test_rope_store_and_attention_match_reference(
    way: Any, kind: str, heads: int, kv_heads: int, dim: int, rotary: int, window: int, cap: float,
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three requests over shuffled blocks: a prompt, its next chunk beside other prompts, then one token each."""
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 60)  # few queries at a time
    temperature = 0.3 if kv_heads == 2 else 0.0
    pages, table = BlockTables([24, 9, 3], rng), RopeTable(inverse_frequencies(1e4, rotary), 1.25, temperature, 8)
    params = AttentionParams(dim**-0.5, window, cap)
    shape = (pages.n_blocks, pages.block_size, kv_heads, dim)
    caches = (reference.empty_kv(*shape), cuda.empty_kv(*shape, kind=kind))
    for spans in ([(0, 0, 19)], [(0, 19, 23), (1, 0, 8), (2, 0, 2)], [(2, 2, 3), (0, 23, 24), (1, 8, 9)]):
        batch = pages.batch(spans)
        q, k, v = (normal(rng, len(batch.positions), n, dim) for n in (heads, kv_heads, kv_heads))
        sinks, results = normal(rng, heads) if heads > 2 else None, []
        for ops, kv, bring in zip((ReferenceBackend(), way), caches, (np.asarray, on_device), strict=True):
            turned = ops.rope_store(bring(q), bring(k), bring(v), batch.positions, table, kv, batch.slot_mapping)
            attended = ops.attention(turned, kv, batch, params, None if sinks is None else bring(sinks))
            results.append((turned, attended, cached(kv.k, batch.slot_mapping)))
        exact = ERRORS["float32"] if device.is_interpreted() or way is torch_attention else ERRORS[kind]
        for found, wanted, error in zip(results[1], results[0], (exact, ERRORS[kind], ERRORS[kind]), strict=True):
            assert relative_error(found.float() if isinstance(found, torch.Tensor) else found, wanted) < error


def test_empty_kv_int8_raises() -> None:
    with pytest.raises(InvalidRequestError, match="'int8' is not for a GPU: use one of bfloat16, float16"):
        cuda.empty_kv(2, 16, 1, 64, kind="int8")


def test_rope_store_float8_saturates() -> None:
    kv = cuda.empty_kv(1, 4, 1, 8, kind="float8")
    x = torch.full((1, 1, 8), 1e6, device=DEVICE)
    cuda.rope_store(x, x, -x, np.array([0]), RopeTable(inverse_frequencies(1e4, 8), 1.0), kv, np.array([2]))
    np.testing.assert_array_equal(cached(kv.v, np.array([2])), np.full((1, 1, 8), -448.0))


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "BF16"])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_logits_precision(name: str, cap: float, rng: np.random.Generator) -> None:
    head, x = random_tensor(name, 37, 256, rng), normal(rng, 6, 256, scale=0.01)
    wanted = reference.logits(x[[4, 1]], reference.prepare([head]), cap)
    found = cuda.logits(cuda.take(on_device(x), np.array([4, 1])), cuda.prepare([head]), cap)
    assert relative_error(found, wanted) < (3e-3 if name == "BF16" else 1e-3)


def test_backend_device_memory_and_upload() -> None:
    assert str(DEVICE) == cuda.device
    assert cuda.free_memory() > 1 << 20
    assert cuda.allocated_memory() >= 0
    ints = device.upload(np.array([[1, 2], [3, 4]]), DEVICE)
    assert ints.dtype == torch.int32
    assert ints.tolist() == [[1, 2], [3, 4]]


@pytest.mark.gpu
@pytest.mark.skipif(device.is_interpreted(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_linear_real_shapes(kind: str, rng: np.random.Generator) -> None:
    """Every kernel at the sizes of models, on both sides of the switching points; fewer of the many compact kinds, as
    each size compiles its own."""
    torch.manual_seed(4)
    shapes = [(4096, 11008), (49152, 576)] if kind in PLANES else [(4096, 11008)]
    for rows, columns in shapes:
        weight = packed_weight.PackedWeight((random_planes(kind, rows, columns, DEVICE),))
        values = packed_weight.dequantize(weight.parts[0]).double()
        for tokens in (1, 4):
            codes = int8_activations.quantize(on_device(normal(rng, tokens, columns)))
            found = torch.empty(tokens, rows, device=DEVICE)
            launch_gemv("head", packed_weight.GemvActivations(codes), weight, found)
            assert relative_error(found, int8_activations.dequantize(codes).double() @ values.T) < 1e-4
        for tokens in (1, 4, 8, 9, 40, 100, 256, 257) if kind in PLANES else (9, 100, 257):
            x = on_device(normal(rng, tokens, columns))
            wanted = (x.double() @ values.T).float()
            assert relative_error(cuda.linear(x, weight), wanted) < 5e-3
            assert relative_error(cuda.logits(x, weight), wanted) < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(device.is_interpreted(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "dim", "window", "cap"),
    [("bfloat16", 32, 8, 128, 0, 0.0), ("float8", 32, 8, 128, 300, 0.0), ("float16", 8, 4, 256, 512, 50.0),
     ("float8", 32, 32, 96, 300, 0.0)],
)  # fmt: skip
def test_attention_real_shapes(
    kind: str, heads: int, kv_heads: int, dim: int, window: int, cap: float, rng: np.random.Generator
) -> None:
    """The kernel against plain torch on one cache: a long prompt, its end beside others, one token each."""
    pages, table = BlockTables([1500, 700, 40], rng, block_size=16), RopeTable(inverse_frequencies(1e4, dim), 1.0)
    params = AttentionParams(dim**-0.5, window, cap)
    kv = cuda.empty_kv(pages.n_blocks, 16, kv_heads, dim, kind=kind)
    for spans in (
        [(0, 0, 1000)],
        [(0, 1000, 1499), (1, 0, 699), (2, 0, 39)],
        [(0, 1499, 1500), (1, 699, 700), (2, 39, 40)],
    ):
        batch = pages.batch(spans)
        q, k, v = (on_device(normal(rng, len(batch.positions), n, dim)) for n in (heads, kv_heads, kv_heads))
        turned = cuda.rope_store(q, k, v, batch.positions, table, kv, batch.slot_mapping)
        found = cuda.attention(turned, kv, batch, params)
        assert relative_error(found, torch_attention.attention(turned.float(), kv, batch, params)) < 1e-2
