"""Families added from outside the package: a row of the table and an activation, or a block, and no line elsewhere.

One has another activation, norms after attention and MLP, biases on q, k and v, and RoPE over half of each head. The
other has blocks whose attention and MLP read the same residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.graph import op_names
from llm_worker_rbee.backends.ops import Array, Backend, Batch, KVLayer
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.config import AttentionSpec, Family, NormSpec
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.models import Transformer, families, load_model, read_model_config
from llm_worker_rbee.weights import Checkpoint, Tensor, open_checkpoint
from llm_worker_rbee.weights.gguf_writer import Raw, write_gguf
from tests.helpers.model_runs import step_logits
from tests.helpers.synthetic import Shape, Spec, checkpoint

FAMILY = Family(
    "madeup",
    gguf=("madeup",),
    hf=(),
    activation="squared_relu",
    attention=AttentionSpec(qkv_bias=True),
    norms=NormSpec(post=True),
)
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


@dataclass(frozen=True, slots=True, eq=False)
class ParallelBlock(Block):
    """Attention and MLP side by side: both are added to the residual stream that both have read."""

    def __call__(
        self, ops: Backend, x: Array, residual: Array | None, kv: KVLayer, batch: Batch, inputs: Array | None = None
    ) -> tuple[Array, Array]:
        if residual is None:
            x, residual = self.attention_norm(ops, x), x
        else:
            x, residual = self.attention_norm.add_and_norm(ops, x, residual)
        attended = self.attention(ops, x, kv, batch)
        _, total = self.mlp_norm.add_and_norm(ops, attended, residual)
        return self.mlp(ops, self.mlp_norm(ops, residual)), total


def with_parallel_blocks(model: Transformer) -> Transformer:
    """Return the model with the weights of its blocks in parallel ones, fused anew if its backend does so."""
    parts = [{field.name: getattr(block, field.name) for field in fields(Block)} for block in model.blocks]
    made = replace(model, blocks=tuple(ParallelBlock(**part) for part in parts), fused=None)
    return replace(made, fused=model.ops.fuse(made.graph))


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("mix", ["F32", "Q8_0"])
def test_parallel_attention_and_mlp_are_fused_on_cpu_with_the_bits_of_single_ops(mix: str) -> None:
    made = made_up_checkpoint(mix)
    sequential, exact = (load_model(made, ops, read_model_config(made)) for ops in (CpuBackend(), ReferenceBackend()))
    model = with_parallel_blocks(sequential)
    whole = step_logits(model, IDS, [len(IDS)], fused=True)
    np.testing.assert_array_equal(whole, step_logits(model, IDS, [len(IDS)], fused=False))
    np.testing.assert_array_equal(whole, step_logits(model, IDS, [1, 4, 1, 2], fused=True))
    expected = step_logits(with_parallel_blocks(exact), IDS, [len(IDS)], fused=False)
    assert np.abs(whole - expected).max() < (1e-3 if mix == "F32" else 5e-2) * np.abs(expected).max()
    assert np.abs(whole - step_logits(sequential, IDS, [len(IDS)], fused=True)).max() > 0.1 * np.abs(expected).max()


@pytest.mark.usefixtures("made_up")
def test_parallel_blocks_copy_the_residual_stream_only_where_it_is_read_again() -> None:
    made = made_up_checkpoint("Q8_0")
    sequential = load_model(made, CpuBackend(), read_model_config(made))
    copying, copies = "elementwise.quantize_rows, elementwise.norm", []
    for model in (sequential, with_parallel_blocks(sequential)):
        assert model.fused is not None
        copies.append(sum(line.runs == copying for line in model.fused.program("float32")))
    assert copies == [0, SHAPE.layers]


def test_register_family_with_a_known_name_raises() -> None:
    with pytest.raises(ValueError, match="'llama' already belongs to llama"):
        families.register_family(Family("other", gguf=("llama",), hf=()))


@pytest.mark.usefixtures("made_up")
def test_file_of_registered_family_can_be_written_and_read(tmp_path: Path) -> None:
    made = made_up_checkpoint("Q8_0")
    raws = {name: Raw(t.kind.name, t.shape, t.data) for name, t in made.tensors.items()}
    opened = open_checkpoint(write_gguf(tmp_path / "madeup.gguf", made.metadata, raws))
    assert families.detect_family(opened) is FAMILY
