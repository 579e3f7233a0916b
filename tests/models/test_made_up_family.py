"""A family added from outside the package: a row of the table and an activation, and no line elsewhere.

It has another activation, norms after attention and MLP, biases on q, k and v, and RoPE over half of each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.graph import op_names
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.bench.synthetic import Shape, Spec, checkpoint
from llm_worker_rbee.config import Family
from llm_worker_rbee.models import families, load_model, read_model_config
from llm_worker_rbee.weights import Checkpoint, Tensor, open_checkpoint
from llm_worker_rbee.weights.gguf_writer import Raw, write_gguf
from tests.helpers.model_runs import step_logits

FAMILY = Family("madeup", gguf=("madeup",), hf=(), activation="squared_relu", post_norms=True, qkv_bias=True)
SHAPE = Shape(2, 128, 4, 2, 192, 96, 256, head_dim=32, architecture="madeup")
IDS = [5, 90, 17, 17, 3, 44, 0, 95]


def squared_relu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.square(np.maximum(x, np.float32(0)))


@pytest.fixture
def made_up() -> Iterator[None]:
    """Register the family, and forget it after the test."""
    families.register_family(FAMILY)
    reference.ACTIVATIONS["squared_relu"] = squared_relu
    yield
    del families.BY_GGUF["madeup"], reference.ACTIVATIONS["squared_relu"]


def made_up_checkpoint(mix: str) -> Checkpoint:
    made = checkpoint(Spec("made-up", SHAPE, mix, SHAPE.layers), seed=3)
    random, tensors = np.random.default_rng(3), dict(made.tensors)

    def add(name: str, size: int, low: float) -> None:
        values = random.uniform(low, 1.5, size).astype(np.float32)
        tensors[name] = Tensor(name, made.tensors["output_norm.weight"].kind, (size,), values.view(np.uint8))

    for i in range(SHAPE.layers):
        add(f"blk.{i}.post_attention_norm.weight", SHAPE.width, 0.5)
        add(f"blk.{i}.post_ffw_norm.weight", SHAPE.width, 0.5)
        for name, heads in (("q", SHAPE.heads), ("k", SHAPE.kv_heads), ("v", SHAPE.kv_heads)):
            add(f"blk.{i}.attn_{name}.bias", heads * SHAPE.head_dim, -1.5)
    return replace(made, tensors=tensors, metadata={**made.metadata, "madeup.rope.dimension_count": 16})


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("mix", ["F32", "Q8_0"])
def test_made_up_family_is_fused_on_cpu_with_the_bits_of_single_ops(mix: str) -> None:
    made = made_up_checkpoint(mix)
    model, exact = (load_model(made, ops, read_model_config(made)) for ops in (CpuBackend(), ReferenceBackend()))
    assert model.config.family is FAMILY
    assert model.fused is not None
    whole = step_logits(model, IDS, [len(IDS)], fused=True)
    np.testing.assert_array_equal(whole, step_logits(model, IDS, [len(IDS)], fused=False))
    np.testing.assert_array_equal(whole, step_logits(model, IDS, [1, 4, 1, 2], fused=True))
    expected = step_logits(exact, IDS, [len(IDS)], fused=False)
    assert np.abs(whole - expected).max() < (1e-3 if mix == "F32" else 5e-2) * np.abs(expected).max()


@pytest.mark.usefixtures("made_up")
def test_made_up_family_runs_its_activation_by_the_reference_and_all_else_fused() -> None:
    made = made_up_checkpoint("Q8_0")
    model = load_model(made, CpuBackend(), read_model_config(made))
    assert model.fused is not None
    lines = model.fused.program("float32")
    layer = [line.ops for line in lines[4:14]]
    assert layer == [
        "matmul + add_bias", "split_heads + rope_store", "attention", "quantize", "matmul",
        "rms_norm + add_rms_norm + quantize", "matmul", "gated", "quantize", "matmul",
    ]  # fmt: skip
    assert [line.runs for line in lines if line.ops == "gated"] == ["reference.gated, between two programs"] * 2
    assert sum(line.ops.startswith("rms_norm + ") for line in lines) == 5
    assert {op_names(node) for node in model.graph().nodes} >= {"gated", "rms_norm", "attention"}


def test_register_family_with_a_known_name_raises() -> None:
    with pytest.raises(ValueError, match="'llama' is already that of llama"):
        families.register_family(Family("other", gguf=("llama",), hf=()))


@pytest.mark.usefixtures("made_up")
def test_file_of_registered_family_can_be_written_and_read(tmp_path: Path) -> None:
    made = made_up_checkpoint("Q8_0")
    raws = {name: Raw(t.kind.name, t.shape, t.data) for name, t in made.tensors.items()}
    opened = open_checkpoint(write_gguf(tmp_path / "madeup.gguf", made.metadata, raws))
    assert families.detect_family(opened) is FAMILY
