"""The fused forward of pooling models on the CUDA backend: against the reference, and in deterministic mode with the
bits of single ops, alone and in a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.cuda.pooling import REWRITES, PoolingForward
from llm_worker_rbee.backends.graph import record
from llm_worker_rbee.backends.ops import CAPTURING, AttentionParams, Backend, Batch, RopeTable, StepLimits
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.encoder import Dense, Embeddings, EncoderBlock, Pooler
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.mlp import MLP, SwiGLU
from llm_worker_rbee.layers.norm import LayerNorm, RMSNorm
from llm_worker_rbee.layers.rope import inverse_frequencies
from llm_worker_rbee.models.pooling import make_batch
from tests.helpers.layer_inputs import quantized
from tests.helpers.random_tensors import random_tensor, relative_error

EPS = 1e-6
LENGTHS = (4, 1, 3)
INVARIANT, DEFAULT = CudaBackend(deterministic=True), CudaBackend()
DEVICE_IS_CPU = DEFAULT.torch_device.type == "cpu"


class Shape(NamedTuple):
    """Sizes of a model."""

    width: int
    heads: int
    d_ff: int
    vocab: int
    positions: int

    @property
    def dim(self) -> int:
        return self.width // self.heads


SMALL, BGE_LARGE = Shape(64, 2, 96, 50, 32), Shape(1024, 16, 4096, 1000, 512)


class Model(NamedTuple):
    """The parts of a small pooling model, without a file."""

    embeddings: Embeddings
    blocks: tuple[Any, ...]
    norm: Any
    pooler: Pooler

    def compute(self, ops: Backend, batch: Batch, kv: Any) -> tuple[Any, None]:
        x, residual = self.embeddings(ops, batch), None
        for block, layer in zip(self.blocks, kv, strict=True):
            x, residual = block(ops, x, residual, layer, batch)
        if residual is not None:
            x, _ = self.norm.add_and_norm(ops, x, residual)
        return self.pooler(ops, x if self.pooler.takes_mean else ops.take(x, batch.logits_index), batch), None


class Maker:
    """Makes the same random weights for any backend."""

    def __init__(self, ops: Backend, kind: str, shape: Shape = SMALL) -> None:
        self.ops, self.kind, self.shape, self.rng = ops, kind, shape, np.random.default_rng(5)

    def linear(self, rows: int, columns: int, *, bias: bool) -> Linear:
        values = self.rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        weight = self.ops.prepare([quantized(self.kind, values)])
        return Linear(weight, self.vector(rows) if bias else None)

    def vector(self, size: int, around: float = 0.0) -> Any:
        return self.ops.prepare_vector((self.rng.standard_normal(size) * 0.3 + around).astype(np.float32))

    def layer_norm(self, *, bias: bool = True) -> LayerNorm:
        width = self.shape.width
        return LayerNorm(self.vector(width, 1.0), self.vector(width) if bias else None, EPS)

    def rms_norm(self, size: int | None = None) -> RMSNorm:
        return RMSNorm(self.vector(size or self.shape.width, 1.0), EPS)

    def attention(self, params: AttentionParams, *, bias: bool, norms: bool = False, still: bool = False) -> Attention:
        width, heads, dim = self.shape.width, self.shape.heads, self.shape.dim
        inv_freq = inverse_frequencies(1e4, dim) * np.float32(not still)
        return Attention(
            self.linear(3 * width, width, bias=bias), self.linear(width, width, bias=bias), heads, heads, dim,
            RopeTable(inv_freq, 1.0), params, *((self.rms_norm(dim), self.rms_norm(dim)) if norms else ()),
        )  # fmt: skip

    def up(self, *, bias: bool, gated: bool = False) -> Linear:
        return self.linear(self.shape.d_ff * (1 + gated), self.shape.width, bias=bias)

    def down(self, *, bias: bool) -> Linear:
        return self.linear(self.shape.width, self.shape.d_ff, bias=bias)

    def params(self, window: int = 0, *, causal: bool = False) -> AttentionParams:
        return AttentionParams(self.shape.dim**-0.5, window, causal=causal)

    def embeddings(self, *, positions: bool, norm: LayerNorm | None) -> Embeddings:
        rows_of_tables, width = (self.shape.vocab, self.shape.positions, 2), self.shape.width
        tables = [self.ops.prepare([random_tensor("F32", rows, width, self.rng)]) for rows in rows_of_tables]
        return Embeddings(tables[0], 1.0, *(tables[1:] if positions else (None, None)), norm)


def bert(ops: Backend, kind: str, shape: Shape = SMALL) -> Model:
    """Post-norm with biases, learned positions, GELU; a ranker's head on the first token."""
    make, width = Maker(ops, kind, shape), shape.width
    blocks = tuple(
        EncoderBlock(
            make.attention(make.params(), bias=True, still=True), make.layer_norm(),
            MLP(make.up(bias=True), make.down(bias=True), "gelu"), make.layer_norm(),
        )
        for _ in range(2)
    )  # fmt: skip
    dense = (Dense(make.linear(width, width, bias=True), "tanh"), Dense(make.linear(16, width, bias=True)))
    return Model(make.embeddings(positions=True, norm=make.layer_norm()), blocks, None, Pooler(False, dense))


def modern(ops: Backend, kind: str) -> Model:
    """Pre-norm without biases, windows to both sides, RoPE, gated GELU; the mean."""
    make = Maker(ops, kind)
    blocks = tuple(
        Block(
            None if window else make.layer_norm(bias=False),
            make.attention(make.params(window), bias=False), make.layer_norm(bias=False),
            SwiGLU(make.up(bias=False, gated=True), make.down(bias=False), "gelu"),
        )
        for window in (2, 0)
    )  # fmt: skip
    embeddings = make.embeddings(positions=False, norm=make.layer_norm(bias=False))
    return Model(embeddings, blocks, make.layer_norm(bias=False), Pooler(True))


def decoder(ops: Backend, kind: str) -> Model:
    """Norms before and after, of q and k too, causal; a dense layer after the mean."""
    make = Maker(ops, kind)
    block = Block(
        make.rms_norm(), make.attention(make.params(causal=True), bias=True, norms=True), make.rms_norm(),
        SwiGLU(make.up(bias=True, gated=True), make.down(bias=False), "gelu_tanh"),
        make.rms_norm(), make.rms_norm(),
    )  # fmt: skip
    dense = (Dense(make.linear(SMALL.width, SMALL.width, bias=False)),)
    return Model(make.embeddings(positions=False, norm=None), (block,), make.rms_norm(), Pooler(True, dense))


MODELS = {"bert": bert, "modern": modern, "decoder": decoder}


def batch_of(lengths: tuple[int, ...], rng: np.random.Generator) -> Batch:
    sequences = [rng.integers(0, SMALL.vocab, length) for length in lengths]
    return make_batch(sequences, [ids % 2 for ids in sequences], takes_first=True)


def run(model: Model, ops: Backend, batch: Batch, *, fused: bool, kind: str = "float32") -> Any:
    attention = model.blocks[0].attention
    blocks = int(batch.block_table.max()) + 1
    kv = [ops.empty_kv(blocks, 16, attention.n_kv_heads, attention.head_dim, kind=kind)] * len(model.blocks)
    if not fused:
        return model.compute(ops, batch, kv)[0]
    forward = ops.fuse(lambda: record(model.compute, len(model.blocks)))
    assert isinstance(forward, PoolingForward)
    return forward(batch, kv)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_fused_forward_matches_reference(name: str, kind: str, rng: np.random.Generator) -> None:
    batch, reference = batch_of(LENGTHS, rng), ReferenceBackend()
    wanted = run(MODELS[name](reference, kind), reference, batch, fused=False)
    found = run(MODELS[name](DEFAULT, kind), DEFAULT, batch, fused=True)
    assert relative_error(found, wanted) < 3e-3


@pytest.mark.parametrize(("name", "kind"), [("bert", "F16"), ("bert", "Q8_0"), ("modern", "BF16"), ("decoder", "F16")])
def test_deterministic_forward_has_the_bits_of_single_ops_and_of_sequences_alone(
    name: str, kind: str, rng: np.random.Generator
) -> None:
    batch, model = batch_of(LENGTHS, rng), MODELS[name](INVARIANT, kind)
    found = run(model, INVARIANT, batch, fused=True)
    assert torch.equal(found, run(model, INVARIANT, batch, fused=False))
    ids = np.split(batch.ids, batch.query_start[1:-1])
    for row in (0, 2):
        alone = make_batch([ids[row]], [ids[row] % 2], takes_first=True)
        assert torch.equal(run(model, INVARIANT, alone, fused=True)[0], found[row])


def test_every_rewrite_is_used() -> None:
    used = set()
    for make in MODELS.values():
        model = make(DEFAULT, "F16")
        forward = DEFAULT.fuse(lambda model=model: record(model.compute, len(model.blocks)))
        assert forward is not None
        lines = forward.program("float32")
        used |= {(line.component, line.ops) for line in lines}
        assert {line.runs for line in lines if line.component == "attention"} == {
            "cublas, rope_store_qkv, prefill_attention"
        }
    for rewrite in REWRITES:
        ops = {op.rstrip("?*") for op in rewrite.pattern.split() if not op.endswith("?")}
        assert any(into == rewrite.into and ops <= set(found.split(" + ")) for into, found in used), rewrite


def test_warm_up_launches_steps_of_every_size() -> None:
    model, kv = bert(DEFAULT, "Q8_0"), [DEFAULT.empty_kv(4, 16, SMALL.heads, SMALL.dim, kind="float32")] * 2
    forward, said = DEFAULT.fuse(lambda: record(model.compute, len(model.blocks))), []
    assert isinstance(forward, PoolingForward)
    limits = StepLimits(max_batch=1, max_tokens=2 if DEVICE_IS_CPU else 40, max_logits=1, max_context=512)
    DEFAULT.warm_up(lambda batch: forward(batch, kv), forward, kv, limits, lambda *report: said.append(report))
    assert said[-1] == (CAPTURING, *((2, 2) if DEVICE_IS_CPU else (4, 4)))  # 1, 2; on a GPU 1, 16, 32 and 40 tokens
    if not DEVICE_IS_CPU:
        assert len(forward.graphs) == 3  # 40 tokens are padded to 48, 1 to 16
        batch = batch_of((9,), np.random.default_rng(1))
        assert torch.equal(forward(batch, kv), forward.launch(batch, kv))
        several = batch_of((9, 1, 7), np.random.default_rng(1))
        wanted = forward.launch(several, kv).clone()
        for _ in range(3):  # launched, captured, replayed
            assert relative_error(forward(several, kv), wanted) < 1e-3


def test_values_keep_the_forms_in_which_they_are_read() -> None:
    """Products of different types read one value: it is converted for the second."""
    make, other = Maker(DEFAULT, "F16"), Maker(DEFAULT, "Q8_0")
    model = bert(DEFAULT, "F16")
    block = replace(model.blocks[0], mlp=MLP(other.up(bias=True), make.down(bias=True), "relu"))
    mixed, batch = model._replace(blocks=(block,)), batch_of(LENGTHS, np.random.default_rng(1))
    found, wanted = (run(mixed, DEFAULT, batch, fused=fused) for fused in (True, False))
    assert relative_error(found, wanted) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE_IS_CPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("kind", "cosine"), [("F16", 0.9999), ("Q8_0", 0.999)])
def test_real_shape_on_a_gpu(kind: str, cosine: float, rng: np.random.Generator) -> None:
    """Two layers of bge-large: near the reference; in deterministic mode the bits of single ops and of texts alone."""
    batch, reference = batch_of((512, 77, 1, 300, 130), rng), ReferenceBackend()
    wanted = run(bert(reference, kind, BGE_LARGE), reference, batch, fused=False)
    found = run(bert(DEFAULT, kind, BGE_LARGE), DEFAULT, batch, fused=True, kind="float16").cpu().numpy()
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    assert (np.sum(found * wanted, 1) / lengths).min() > cosine
    model, ids = bert(INVARIANT, kind, BGE_LARGE), np.split(batch.ids, batch.query_start[1:-1])
    rows = run(model, INVARIANT, batch, fused=True, kind="float16")
    assert torch.equal(rows, run(model, INVARIANT, batch, fused=False, kind="float16"))
    for row in (0, 3):
        alone = make_batch([ids[row]], [ids[row] % 2], takes_first=True)
        assert torch.equal(run(model, INVARIANT, alone, fused=True, kind="float16")[0], rows[row])
