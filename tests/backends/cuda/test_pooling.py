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
from llm_worker_rbee.backends.ops import AttentionParams, Backend, Batch, RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.embeddings import Embeddings
from llm_worker_rbee.layers.encoder_block import EncoderBlock
from llm_worker_rbee.layers.layer_norm import LayerNorm
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.mlp import MLP
from llm_worker_rbee.layers.pooler import Dense, Pooler
from llm_worker_rbee.layers.rms_norm import RMSNorm
from llm_worker_rbee.layers.rope import inverse_frequencies
from llm_worker_rbee.layers.swiglu import SwiGLU
from llm_worker_rbee.models.pooling import make_batch
from tests.helpers.layer_inputs import quantized
from tests.helpers.random_tensors import random_tensor, relative_error

WIDTH, HEADS, DIM, FF, VOCAB, EPS = 64, 2, 32, 96, 50, 1e-6
LENGTHS = (5, 1, 18)
INVARIANT, DEFAULT = CudaBackend(deterministic=True), CudaBackend()


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

    def __init__(self, ops: Backend, kind: str) -> None:
        self.ops, self.kind, self.rng = ops, kind, np.random.default_rng(5)

    def linear(self, rows: int, columns: int, *, bias: bool) -> Linear:
        values = self.rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        weight = self.ops.prepare([quantized(self.kind, values)])
        return Linear(weight, self.vector(rows) if bias else None)

    def vector(self, size: int, around: float = 0.0) -> Any:
        return self.ops.prepare_vector((self.rng.standard_normal(size) * 0.3 + around).astype(np.float32))

    def layer_norm(self, *, bias: bool = True) -> LayerNorm:
        return LayerNorm(self.vector(WIDTH, 1.0), self.vector(WIDTH) if bias else None, EPS)

    def rms_norm(self, size: int = WIDTH) -> RMSNorm:
        return RMSNorm(self.vector(size, 1.0), EPS)

    def attention(self, params: AttentionParams, *, bias: bool, norms: bool = False, still: bool = False) -> Attention:
        inv_freq = inverse_frequencies(1e4, DIM) * np.float32(not still)
        return Attention(
            self.linear(3 * HEADS * DIM, WIDTH, bias=bias), self.linear(WIDTH, HEADS * DIM, bias=bias), HEADS, HEADS,
            DIM, RopeTable(inv_freq, 1.0), params,
            *((self.rms_norm(DIM), self.rms_norm(DIM)) if norms else ()),
        )  # fmt: skip

    def embeddings(self, *, positions: bool, norm: LayerNorm | None) -> Embeddings:
        tables = [self.ops.prepare([random_tensor("F32", rows, WIDTH, self.rng)]) for rows in (VOCAB, 32, 2)]
        return Embeddings(tables[0], 1.0, *(tables[1:] if positions else (None, None)), norm)


def bert(ops: Backend, kind: str) -> Model:
    """Post-norm with biases, learned positions, GELU; a ranker's head on the first token."""
    make = Maker(ops, kind)
    params = AttentionParams(DIM**-0.5, causal=False)
    blocks = tuple(
        EncoderBlock(
            make.attention(params, bias=True, still=True), make.layer_norm(),
            MLP(make.linear(FF, WIDTH, bias=True), make.linear(WIDTH, FF, bias=True), "gelu"), make.layer_norm(),
        )
        for _ in range(2)
    )  # fmt: skip
    dense = (Dense(make.linear(WIDTH, WIDTH, bias=True), "tanh"), Dense(make.linear(3, WIDTH, bias=True)))
    return Model(make.embeddings(positions=True, norm=make.layer_norm()), blocks, None, Pooler(False, dense))


def modern(ops: Backend, kind: str) -> Model:
    """Pre-norm without biases, windows to both sides, RoPE, gated GELU; the mean."""
    make = Maker(ops, kind)
    blocks = tuple(
        Block(
            None if window else make.layer_norm(bias=False),
            make.attention(AttentionParams(DIM**-0.5, window, causal=False), bias=False), make.layer_norm(bias=False),
            SwiGLU(make.linear(2 * FF, WIDTH, bias=False), make.linear(WIDTH, FF, bias=False), "gelu"),
        )
        for window in (6, 0)
    )  # fmt: skip
    embeddings = make.embeddings(positions=False, norm=make.layer_norm(bias=False))
    return Model(embeddings, blocks, make.layer_norm(bias=False), Pooler(True))


def decoder(ops: Backend, kind: str) -> Model:
    """Norms before and after, of q and k too, causal; a dense layer after the mean."""
    make = Maker(ops, kind)
    block = Block(
        make.rms_norm(), make.attention(AttentionParams(DIM**-0.5), bias=True, norms=True), make.rms_norm(),
        SwiGLU(make.linear(2 * FF, WIDTH, bias=True), make.linear(WIDTH, FF, bias=False), "gelu_tanh"),
        make.rms_norm(), make.rms_norm(),
    )  # fmt: skip
    dense = (Dense(make.linear(WIDTH, WIDTH, bias=False)),)
    return Model(make.embeddings(positions=False, norm=None), (block,), make.rms_norm(), Pooler(True, dense))


MODELS = {"bert": bert, "modern": modern, "decoder": decoder}


def batch_of(lengths: tuple[int, ...], rng: np.random.Generator) -> Batch:
    sequences = [rng.integers(0, VOCAB, length) for length in lengths]
    return make_batch(sequences, [ids % 2 for ids in sequences], takes_first=True)


def run(model: Model, ops: Backend, batch: Batch, *, fused: bool) -> Any:
    kv = [ops.empty_kv(8, 16, HEADS, DIM, kind="float32")] * len(model.blocks)
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
        used |= {(line.component, line.ops) for line in forward.program("float32")}
    for rewrite in REWRITES:
        ops = {op.rstrip("?*") for op in rewrite.pattern.split() if not op.endswith("?")}
        assert any(into == rewrite.into and ops <= set(found.split(" + ")) for into, found in used), rewrite


def test_values_keep_the_forms_in_which_they_are_read() -> None:
    """Products of different types read one value: it is converted for the second."""
    make, other = Maker(DEFAULT, "F16"), Maker(DEFAULT, "Q8_0")
    model = bert(DEFAULT, "F16")
    block = replace(
        model.blocks[0], mlp=MLP(other.linear(FF, WIDTH, bias=True), make.linear(WIDTH, FF, bias=True), "relu")
    )
    mixed, batch = model._replace(blocks=(block,)), batch_of(LENGTHS, np.random.default_rng(1))
    found, wanted = (run(mixed, DEFAULT, batch, fused=fused) for fused in (True, False))
    assert relative_error(found, wanted) < 1e-3
