"""Build a pooling model from the tensors of a checkpoint, packed for one backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..backends.ops import Backend, PackedWeight, RopeTable
from ..config import ModelConfig, PoolingConfig
from ..errors import ModelFileError
from ..layers.block import Block, Norm
from ..layers.encoder import Dense, Embeddings, EncoderBlock, Pooler
from ..layers.linear import Linear
from ..layers.mlp import MLP, SwiGLU
from ..layers.norm import LayerNorm
from ..weights import Checkpoint
from ..weights.checkpoint import refuse_order, release_pages
from .loader import ModelLoader
from .pooling import PoolingModel, Workspace


def load_pooling_model(
    checkpoint: Checkpoint,
    ops: Backend,
    config: ModelConfig,
    pooling: PoolingConfig,
    kv_type: str,
    advance: Callable[[int], None] = lambda packed_bytes: None,
) -> PoolingModel:
    """Build the model; `kv_type` is the type of its workspace, and `advance` receives the bytes packed so far."""
    return PoolingLoader(checkpoint, config, ops, config.context_length, advance).pooling_model(pooling, kv_type)


class PoolingLoader(ModelLoader):
    """Builds a pooling model from the tensors of a checkpoint."""

    __slots__ = ()

    def pooling_model(self, pooling: PoolingConfig, kv_type: str) -> PoolingModel:
        c, family = self.config, self.config.family
        self.check_quantization()
        self.check_layer_count()
        embedding = self.matrix("token_embd.weight", c.vocab_size, c.d_model)
        refuse_order([embedding])
        release_pages(embedding.data)
        blocks = self.blocks(self.ropes(), self.pooling_block)
        norm = None if family.norms.stream else self.final_norm()
        pooler = self.pooler(pooling)
        embeddings = self.embeddings(self.pack([embedding]))
        self.used.add("output.weight")  # a head that nothing is predicted with
        self.refuse_unused_tensors()
        for tensor in self.checkpoint.tensors.values():
            release_pages(tensor.data)
        output_dim = pooler.layers[-1].linear.weight.rows if pooler.layers else c.d_model
        model = PoolingModel(
            config=c,
            pooling=pooling,
            ops=self.ops,
            embeddings=embeddings,
            blocks=blocks,
            norm=norm,
            pooler=pooler,
            output_dim=output_dim,
            workspace=Workspace(self.ops, c, kv_type),
        )
        return replace(model, fused=self.ops.fuse(model.graph))

    def embeddings(self, tokens: PackedWeight) -> Embeddings:
        """Return the embedding tables (tokens, positions, token types) and the norm of their sum."""
        c = self.config
        tables = {"position_embd": c.context_length * c.family.learned_positions, "token_types": c.token_types}
        positions, types = (
            self.pack([self.matrix(f"{name}.weight", rows, c.d_model)]) if rows else None
            for name, rows in tables.items()
        )
        norm = self.layer_norm("token_embd_norm") if c.family.norms.layer else None
        return Embeddings(tokens, self.embedding_scale(), positions, types, norm)

    def final_norm(self) -> Norm:
        name = self.config.family.tensors.output_norm
        return self.layer_norm(name) if self.config.family.norms.layer else self.stream_norm(name)

    def pooling_block(self, i: int, rope: RopeTable) -> Block | EncoderBlock:
        family = self.config.family
        if family.norms.stream:
            return self.encoder_block(i, rope)
        return self.pre_norm_block(i, rope) if family.norms.layer else self.block(i, rope)

    def pre_norm_block(self, i: int, rope: RopeTable) -> Block:
        """Return a block with layer norms before attention and MLP; the first may have none: its input is normed."""
        prefix = f"blk.{i}."
        is_normed = i == 0 and f"{prefix}attn_norm.weight" not in self.checkpoint.tensors
        return Block(
            attention_norm=None if is_normed else self.layer_norm(prefix + "attn_norm"),
            attention=self.attention(i, prefix, rope),
            mlp_norm=self.layer_norm(prefix + "ffn_norm"),
            mlp=self.swiglu(prefix, "", self.config.d_ff_of(i)),
        )

    def encoder_block(self, i: int, rope: RopeTable) -> EncoderBlock:
        prefix = f"blk.{i}."
        return EncoderBlock(
            attention=self.attention(i, prefix, rope),
            attention_norm=self.layer_norm(prefix + "attn_output_norm"),
            mlp=self.encoder_mlp(i, prefix),
            mlp_norm=self.layer_norm(prefix + "layer_output_norm"),
        )

    def encoder_mlp(self, i: int, prefix: str) -> MLP | SwiGLU:
        c, d_ff = self.config, self.config.d_ff_of(i)
        if c.family.gated_mlp:
            return self.swiglu(prefix, "", d_ff)
        down = self.linear([prefix + "ffn_down"], [c.d_model], d_ff)
        return MLP(self.linear([prefix + "ffn_up"], [d_ff], c.d_model), down, c.activation)

    def layer_norm(self, name: str) -> LayerNorm:
        c = self.config
        bias = self.optional_vector(f"{name}.bias", c.d_model)
        return LayerNorm(
            self.ops.prepare_vector(self.vector(f"{name}.weight", c.d_model)),
            None if bias is None else self.ops.prepare_vector(bias),
            c.norm_eps,
        )

    def pooler(self, pooling: PoolingConfig) -> Pooler:
        if pooling.is_ranker:
            return Pooler(pooling.kind == "mean", self.classifier(pooling.label_tokens))
        width, layers = self.config.d_model, list[Dense]()
        for d in pooling.dense:
            if d.columns != width:
                raise ModelFileError(f"dense layer {d.name!r} takes {d.columns} values, and {width} come before it")
            layers.append(Dense(self.linear([d.name], [d.rows], d.columns), d.activation))
            width = d.rows
        return Pooler(pooling.kind == "mean", tuple(layers))

    def classifier(self, label_tokens: tuple[int, ...]) -> tuple[Dense, ...]:
        """Return the head of a ranker: a dense layer, if it has one, and the projection to labels."""
        c, tensors = self.config, self.checkpoint.tensors
        output = tensors.get("cls.output.weight")
        if output is None and label_tokens:
            return (Dense(self.rows_of_tokens(label_tokens)),)
        if output is None or len(output.shape) != 2:
            raise ModelFileError("tensor 'cls.output.weight' is missing: a reranker needs it")
        last = Dense(self.linear(["cls.output"], [output.shape[0]], c.d_model))
        if "cls.weight" not in tensors:
            return (last,)
        norm = self.layer_norm("cls.norm") if "cls.norm.weight" in tensors else None
        dense = self.linear(["cls"], [c.d_model], c.d_model)
        return Dense(dense, c.family.classifier_activation, norm), last

    def rows_of_tokens(self, tokens: tuple[int, ...]) -> Linear:
        """Return the rows of the output head for some tokens; it may be tied to the embedding."""
        c = self.config
        name = "output.weight" if "output.weight" in self.checkpoint.tensors else "token_embd.weight"
        if max(tokens) >= c.vocab_size:
            raise ModelFileError(f"tensor {name!r} has {c.vocab_size} rows: token {max(tokens)} is none of them")
        head = self.matrix(name, c.vocab_size, c.d_model)
        return Linear(self.pack([head.take_rows(np.array(tokens, np.intp))]))
