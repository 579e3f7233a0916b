"""Weights and activations in e4m3: what is packed, the products, whole steps, and the option that asks for it.

Under the interpreter activations are rounded in plain torch, so errors are those of the rounding itself; on a GPU the
kernels and the vendor's product are held against that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends import cuda_probe
from llm_worker_rbee.backends.cuda import CudaBackend, device, elementwise, fp8, linear, packed_weight, repack
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.bench.synthetic import Spec, write
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.llm import LLM
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.convert import quantize_checkpoint
from llm_worker_rbee.weights import Checkpoint, Tensor
from llm_worker_rbee.weights.quants import BLOCK_TYPES
from tests.backends.cuda import tiny
from tests.backends.cuda.making import random_tensor, relative

cuda = CudaBackend()

OPS: Any = cuda
SPEC = Spec("tiny", tiny.GROUPED._replace(vocabulary=259), "BF16", 2)
ON_GPU = pytest.mark.skipif(device.interpreting(), reason="needs a GPU")


def random_part(rows: int, columns: int, rng: np.random.Generator) -> packed_weight.Part:
    (part,) = repack.prepare([replace(random_tensor("F32", rows, columns, rng), pack_as="fp8")]).parts
    return part


def in_float32(checkpoint: Checkpoint) -> Transformer:
    """The reference on the weights that e4m3 leaves of a marked model."""

    def rounded(t: Tensor) -> Tensor:
        values, scales = fp8.rounded(torch.tensor(t.dequantize()))
        raw = (values.float() * scales[:, None]).numpy().reshape(-1).view(np.uint8)
        return Tensor(t.name, BLOCK_TYPES["F32"], t.shape, raw)

    tensors = {name: rounded(t) if t.pack_as else t for name, t in checkpoint.tensors.items()}
    return load_model(replace(checkpoint, tensors=tensors), ReferenceBackend(), read_model_config(checkpoint))


def test_numbers_of_several_types_become_one_part(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several slabs; a value is off by at most a sixteenth of itself, the largest of a row by nothing."""
    monkeypatch.setattr(repack, "SLAB", 96 * 3)
    tensors = [replace(random_tensor(name, 4, 96, rng), pack_as="fp8") for name in ("F16", "BF16", "F32")]
    tensors[1].rows[2] = 0
    (part,) = repack.prepare(tensors).parts
    assert (part.kind, part.rows, part.columns, part.nbytes) == ("fp8", 12, 96, 12 * (96 + 4))
    wanted = np.concatenate([t.dequantize() for t in tensors])
    found = packed_weight.values(part).cpu().numpy()
    largest = np.abs(wanted).max(1, keepdims=True)
    assert (np.abs(found - wanted) <= np.maximum(np.abs(wanted) / 16, largest * 2.0**-9 / 448 + 1e-30)).all()
    np.testing.assert_allclose(np.abs(found).max(1), largest[:, 0], rtol=1e-6)
    index = torch.tensor([7, 1], device=part.scales.device)
    np.testing.assert_array_equal(packed_weight.values(part.take(index)).cpu(), found[[7, 1]])


@pytest.mark.parametrize("columns", [96, 1100])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_few_tokens_meet_weights_as_they_are(tokens: int, columns: int, rng: np.random.Generator) -> None:
    part = random_part(40, columns, rng)
    x = torch.tensor(rng.standard_normal((tokens, columns)), dtype=torch.float32, device=device.current())
    found = linear.times(x, repack.Matrix((part,)))
    assert relative(found, x.double().cpu() @ packed_weight.values(part).double().cpu().T) < 1e-6


def test_more_tokens_are_rounded_where_the_shape_allows(rng: np.random.Generator) -> None:
    """Rows of very different size do not disturb each other; one of zeros stays that."""
    x = torch.tensor(rng.standard_normal((9, 96)), dtype=torch.float32, device=device.current())
    x *= torch.logspace(-6, 6, 9, device=x.device)[:, None]
    x[4] = 0
    for rows, least, most in ((48, 5e-3, 4e-2), (40, 0.0, 4e-3)):  # 40 is no multiple of 16
        part = random_part(rows, 96, rng)
        found, wanted = linear.times(x, repack.Matrix((part,))).cpu(), (x.cpu() @ packed_weight.values(part).cpu().T)
        assert not found[4].any()
        errors = [relative(found[i], wanted[i]) for i in range(9) if i != 4]
        assert least <= min(errors), rows
        assert max(errors) < most, rows


def test_steps_agree_with_the_reference_on_rounded_weights() -> None:
    """A first token alone meets no rounded activation; later ones meet keys and values of those that were rounded."""
    marked = quantize_checkpoint(tiny.tiny(tiny.GROUPED._replace(layers=1), "BF16"), "fp8")
    models = load_model(marked, OPS, read_model_config(marked)), in_float32(marked)
    assert models[0].fused is not None
    assert [p.kind for p in models[0].head.parts + models[0].embedding.parts] == ["fp8", "numbers"]
    random, pair = np.random.default_rng(1), [tiny.Requests(model, 3, "float32") for model in models]
    bounds = (1e-5 if device.interpreting() else 2e-2, 0.12, 0.12, 0.12)
    steps = (((2,), (1,)), ((0, 1), (3, 2)), ((0, 1), (1, 1)), ((0, 1, 2), (1, 1, 2)))
    for (who, counts), bound in zip(steps, bounds, strict=True):
        ids = random.integers(0, 96, sum(counts))
        got, want = (
            model.forward(requests.step(who, counts, ids), requests.cache)
            for model, requests in zip(models, pair, strict=True)
        )
        assert tiny.relative(got.cpu(), want) < bound, counts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(SPEC, tmp_path / "tiny.gguf")


@pytest.mark.skipif(not device.interpreting(), reason="asks for the interpreter's device")
def test_the_option(file: Path) -> None:
    llm = LLM(file, device="cuda", quantize="FP8", max_context=64)
    assert (llm.quant, llm.backend) == ("FP8", "cuda")
    assert llm.model.blocks[0].mlp.down.weight.parts[0].kind == "fp8"
    assert len(llm.generate([5, 6, 7], max_tokens=2, temperature=0, ignore_eos=True).tokens) == 2


def test_the_memory_that_is_planned() -> None:
    marked = quantize_checkpoint(tiny.tiny(tiny.GROUPED, "BF16"), "fp8")
    model = load_model(marked, OPS, read_model_config(marked))
    matrices = [w for b in model.blocks for w in (b.attention.qkv, b.attention.output, b.mlp.gate_up, b.mlp.down)]
    held = sum(w.weight.nbytes for w in matrices) + model.head.nbytes + model.embedding.nbytes
    norms = sum(4 * t.size for t in marked.tensors.values() if len(t.shape) == 1)
    assert cuda_probe.packed_bytes(marked) == pytest.approx(held + norms, rel=0.04)  # scales of rows: 4 bytes to 128


def test_it_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(InvalidRequestError, match=r"quantize fp8 is for an NVIDIA GPU.*use device cuda, or quantize"):
        LLM("/no/such/file.gguf", device="cpu", quantize="fp8")
    with pytest.raises(InvalidRequestError, match=r"F32, F16, BF16, and tensor '\S+' is Q\d_0 already: leave quantize"):
        quantize_checkpoint(tiny.tiny(tiny.GROUPED, "Q4_0"), "fp8")


@pytest.mark.gpu
@ON_GPU
def test_the_kernel_rounds_as_torch_does(rng: np.random.Generator) -> None:
    x = torch.tensor(rng.standard_normal((7, 11008)), device=device.current()).bfloat16()
    (found, scales), (wanted, its) = fp8.rounded_rows(x), fp8.rounded(x)
    torch.testing.assert_close(scales, its)
    assert float((found.float() != wanted.float()).float().mean()) < 1e-4  # ties, where a division differs by a bit


@pytest.mark.gpu
@ON_GPU
def test_the_norm_rounds_as_the_kernel_does(rng: np.random.Generator) -> None:
    stream = torch.tensor(rng.standard_normal((5, 4096)), dtype=torch.float32, device=device.current())
    out, factors = torch.empty(5, 4096, dtype=fp8.E4M3, device=stream.device), torch.empty(5, device=stream.device)
    norm = torch.ones(4096, device=stream.device)
    elementwise.add_norm[(5,)](stream, stream, norm, out, factors, 5, 1e-5, 4096, 128, 0, False, num_warps=8)
    wanted = stream * torch.rsqrt(stream.square().mean(1, keepdim=True) + 1e-5)
    assert relative(out.float() * factors[:, None], wanted) < 4e-2
    torch.testing.assert_close(factors, wanted.abs().amax(1) / 448)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 64, 300])
def test_products_of_real_shapes_from_a_graph(tokens: int, rng: np.random.Generator) -> None:
    part = random_part(4096, 11008, rng)
    x = torch.tensor(rng.standard_normal((tokens, 11008)), dtype=torch.float32, device=device.current())
    rows, scales = fp8.rounded(x)
    seen = x if tokens <= fp8.FEW else rows.float() * scales[:, None]
    alone = fp8.times(x, part)
    assert relative(alone, seen.double() @ packed_weight.values(part).double().T) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fp8.times(x, part)
    graph.replay()
    torch.testing.assert_close(found, alone)
