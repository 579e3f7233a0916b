"""Weights and activations in e4m3: packing, products, whole steps, and the option.

Under the interpreter activations are quantized in plain torch, so errors are those of the rounding itself; on a GPU the
kernels and `torch._scaled_mm` are compared with that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends import select
from llm_worker_rbee.backends.cuda import CudaBackend, device, packed_weight, repack
from llm_worker_rbee.backends.cuda.kernels import elementwise
from llm_worker_rbee.backends.cuda.linear import launch_gemv
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.llm import LLM
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.convert import quantize_checkpoint
from llm_worker_rbee.weights import Checkpoint, Tensor
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.helpers import cuda_models
from tests.helpers.random_tensors import random_tensor, relative_error
from tests.helpers.synthetic import Spec, write

cuda = CudaBackend()
DEVICE = cuda.torch_device

OPS: Any = cuda
SPEC = Spec("tiny", cuda_models.GROUPED._replace(vocabulary=259), "BF16", 2)
ON_GPU = pytest.mark.skipif(device.is_interpreted(), reason="needs a GPU")


def random_fp8_part(rows: int, columns: int, rng: np.random.Generator) -> packed_weight.WeightPart:
    (part,) = repack.pack_weight([replace(random_tensor("F32", rows, columns, rng), pack_as="fp8")], DEVICE).parts
    return part


def in_float32(checkpoint: Checkpoint) -> Transformer:
    """Load the reference on the weights rounded to e4m3."""

    def quantize_e4m3(t: Tensor) -> Tensor:
        values, scales = packed_weight.quantize_e4m3(torch.tensor(t.dequantize()))
        raw = (values.float() * scales[:, None]).numpy().reshape(-1).view(np.uint8)
        return Tensor(t.name, BLOCK_TYPES["F32"], t.shape, raw)

    tensors = {name: quantize_e4m3(t) if t.pack_as else t for name, t in checkpoint.tensors.items()}
    return load_model(replace(checkpoint, tensors=tensors), ReferenceBackend(), read_model_config(checkpoint))


def test_pack_fp8_joins_dense_types_in_one_part(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several slabs; a value is off by at most a sixteenth of itself, the largest of a row is exact."""
    monkeypatch.setattr(repack, "SLAB_CODES", 96 * 3)
    tensors = [replace(random_tensor(name, 4, 96, rng), pack_as="fp8") for name in ("F16", "BF16", "F32")]
    tensors[1].rows[2] = 0
    (part,) = repack.pack_weight(tensors, DEVICE).parts
    assert (part.kind, part.rows, part.columns, part.nbytes) == ("fp8", 12, 96, 12 * (96 + 4))
    wanted = np.concatenate([t.dequantize() for t in tensors])
    found = packed_weight.dequantize(part).cpu().numpy()
    largest = np.abs(wanted).max(1, keepdims=True)
    assert (np.abs(found - wanted) <= np.maximum(np.abs(wanted) / 16, largest * 2.0**-9 / 448 + 1e-30)).all()
    np.testing.assert_allclose(np.abs(found).max(1), largest[:, 0], rtol=1e-6)


@pytest.mark.parametrize("columns", [96, 1100])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_gemv_fp8_activations_are_not_quantized(tokens: int, columns: int, rng: np.random.Generator) -> None:
    part = random_fp8_part(40, columns, rng)
    x = torch.tensor(rng.standard_normal((tokens, columns)), dtype=torch.float32, device=DEVICE)
    found = torch.empty(tokens, 40, device=DEVICE)
    launch_gemv("qkv", packed_weight.GemvActivations(x), packed_weight.PackedWeight((part,)), found)
    assert relative_error(found, x.double().cpu() @ packed_weight.dequantize(part).double().cpu().T) < 1e-6


def test_linear_fp8_many_tokens_quantized_if_aligned(rng: np.random.Generator) -> None:
    """Rows of very different magnitude do not affect each other; zeros stay zeros."""
    x = torch.tensor(rng.standard_normal((9, 96)), dtype=torch.float32, device=DEVICE)
    x *= torch.logspace(-6, 6, 9, device=x.device)[:, None]
    x[4] = 0
    for rows, min_error, max_error in ((48, 5e-3, 4e-2), (40, 0.0, 4e-3)):  # 40 is no multiple of 16
        part = random_fp8_part(rows, 96, rng)
        found, wanted = (
            OPS.linear(x, packed_weight.PackedWeight((part,))).cpu(),
            (x.cpu() @ packed_weight.dequantize(part).cpu().T),
        )
        assert not found[4].any()
        errors = [relative_error(found[i], wanted[i]) for i in range(9) if i != 4]
        assert min_error <= min(errors), rows
        assert max(errors) < max_error, rows


def test_steps_match_reference_on_fp8_weights() -> None:
    """A first token alone has no quantized activations; later ones attend to keys and values of quantized ones."""
    marked = quantize_checkpoint(cuda_models.random_checkpoint(cuda_models.GROUPED._replace(layers=1), "BF16"), "fp8")
    models = load_model(marked, OPS, read_model_config(marked)), in_float32(marked)
    assert models[0].fused is not None
    assert [p.kind for p in models[0].head.parts + models[0].embedding.parts] == ["fp8", "dense"]
    random, pair = np.random.default_rng(1), [cuda_models.Requests(model, 3, "float32") for model in models]
    bounds = (1e-5 if device.is_interpreted() else 2e-2, 0.12, 0.12, 0.12)
    steps = (((2,), (1,)), ((0, 1), (3, 2)), ((0, 1), (1, 1)), ((0, 1, 2), (1, 1, 2)))
    for (indices, counts), bound in zip(steps, bounds, strict=True):
        ids = random.integers(0, 96, sum(counts))
        got, want = (
            model.forward(requests.step(indices, counts, ids), requests.cache)
            for model, requests in zip(models, pair, strict=True)
        )
        assert cuda_models.relative_error(got.cpu(), want) < bound, counts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(SPEC, tmp_path / "tiny.gguf")


@pytest.mark.skipif(not device.is_interpreted(), reason="needs the interpreter's device")
def test_quantize_fp8_option_packs_fp8(file: Path) -> None:
    llm = LLM(file, device="cuda", quantize="FP8", max_context=64)
    assert (llm.quant, llm.backend) == ("FP8", "cuda")
    assert llm.model.blocks[0].mlp.down.weight.parts[0].kind == "fp8"
    assert len(llm.generate([5, 6, 7], max_tokens=2, temperature=0, ignore_eos=True).tokens) == 2


def test_packed_bytes_of_fp8_matches_memory() -> None:
    marked = quantize_checkpoint(cuda_models.random_checkpoint(cuda_models.GROUPED, "BF16"), "fp8")
    model = load_model(marked, OPS, read_model_config(marked))
    matrices = [w for b in model.blocks for w in (b.attention.qkv, b.attention.output, b.mlp.gate_up, b.mlp.down)]
    held = sum(w.weight.nbytes for w in matrices) + model.head.nbytes + model.embedding.nbytes
    norms = sum(4 * t.size for t in marked.tensors.values() if len(t.shape) == 1)
    assert select.packed_bytes(marked) == pytest.approx(held + norms, rel=0.04)  # scales of rows: 4 bytes to 128


def test_quantize_fp8_refused_on_cpu_and_quantized_files() -> None:
    with pytest.raises(InvalidRequestError, match=r"quantize fp8 needs an NVIDIA GPU.*use device cuda, or quantize"):
        LLM("/no/such/file.gguf", device="cpu", quantize="fp8")
    with pytest.raises(InvalidRequestError, match=r"F32, F16, BF16, and tensor '\S+' is Q\d_0 already: leave quantize"):
        quantize_checkpoint(cuda_models.random_checkpoint(cuda_models.GROUPED, "Q4_0"), "fp8")


@pytest.mark.gpu
@ON_GPU
def test_convert_quantizes_as_torch(rng: np.random.Generator) -> None:
    x = torch.tensor(rng.standard_normal((7, 11008)), device=DEVICE).bfloat16()
    found = packed_weight.Activations(
        torch.empty(7, 11008, dtype=packed_weight.E4M3, device=DEVICE), x.new_empty(7).float()
    )
    elementwise.launch_convert(x, found)
    wanted, scales = packed_weight.quantize_e4m3(x)
    torch.testing.assert_close(found.factors, scales)
    assert (
        float((found.values.float() != wanted.float()).float().mean()) < 1e-4
    )  # ties, where a division differs by a bit


@pytest.mark.gpu
@ON_GPU
def test_add_norm_quantizes_as_torch(rng: np.random.Generator) -> None:
    residual = torch.tensor(rng.standard_normal((5, 4096)), dtype=torch.float32, device=DEVICE)
    values, factors = torch.empty(5, 4096, dtype=packed_weight.E4M3, device=DEVICE), torch.empty(5, device=DEVICE)
    norm = torch.ones(4096, device=DEVICE)
    elementwise.launch_add_norm(None, residual, norm, 1e-5, packed_weight.Activations(values, factors))
    wanted = residual * torch.rsqrt(residual.square().mean(1, keepdim=True) + 1e-5)
    assert relative_error(values.float() * factors[:, None], wanted) < 4e-2
    torch.testing.assert_close(factors, wanted.abs().amax(1) / 448)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 64, 300])
def test_linear_fp8_real_shapes_in_graph(tokens: int, rng: np.random.Generator) -> None:
    weight = packed_weight.PackedWeight((random_fp8_part(4096, 11008, rng),))
    x = torch.tensor(rng.standard_normal((tokens, 11008)), dtype=torch.float32, device=DEVICE)
    rows, scales = packed_weight.quantize_e4m3(x)
    alone = OPS.linear(x, weight)
    wanted = (rows.float() * scales[:, None]).double() @ packed_weight.dequantize(weight.parts[0]).double().T
    assert relative_error(alone, wanted) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = OPS.linear(x, weight)
    graph.replay()
    torch.testing.assert_close(found, alone)
