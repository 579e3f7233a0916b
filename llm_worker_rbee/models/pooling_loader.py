"""Build a pooling model from the tensors of a checkpoint, packed for one backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..backends.ops import Backend, PackedWeight, RopeTable
from ..config import ModelConfig, PoolingConfig
from ..errors import ModelFileError
from ..layers.block import Block, Norm
from ..layers.embeddings import Embeddings
from ..layers.encoder_block import EncoderBlock
from ..layers.layer_norm import LayerNorm
from ..layers.mlp import MLP
from ..layers.pooler import Dense, Pooler
from ..layers.swiglu import SwiGLU
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
    """The parts of a pooling model."""

    __slots__ = ()

    def pooling_model(self, pooling: PoolingConfig, kv_type: str) -> PoolingModel:
        c, family = self.config, self.config.family
        self.check_quantization()
        self.check_layer_count()
        embedding = self.matrix("token_embd.weight", c.vocab_size, c.d_model)
        refuse_order([embedding])
        release_pages(embedding.data)
        blocks: tuple[Block | EncoderBlock, ...]
        if family.stream_norms:
            blocks = self.blocks(self.ropes(), self.encoder_block)
        else:
            blocks = self.blocks(self.ropes(), self.block)
        norm: Norm | None = None if family.stream_norms else self.stream_norm(family.output_norm)
        pooler = self.pooler(pooling)
        embeddings = self.embeddings(self.pack([embedding]))
        self.used.add("output.weight")  # a head that nothing is predicted with
        self.refuse_unused_tensors()
        for tensor in self.checkpoint.tensors.values():
            release_pages(tensor.data)
        output_dim = pooler.layers[-1].linear.weight.rows if pooler.layers else c.d_model
        model = PoolingModel(
            config=c, pooling=pooling, ops=self.ops, embeddings=embeddings, blocks=blocks, norm=norm, pooler=pooler,
            output_dim=output_dim, workspace=Workspace(self.ops, c, kv_type),
        )  # fmt: skip
        return replace(model, fused=self.ops.fuse(model.graph))

    def embeddings(self, tokens: PackedWeight) -> Embeddings:
        """Return the tables with that of tokens, and the norm of their sum."""
        c = self.config
        tables = {"position_embd": c.context_length * c.family.learned_positions, "token_types": c.token_types}
        positions, types = (
            self.pack([self.matrix(f"{name}.weight", rows, c.d_model)]) if rows else None
            for name, rows in tables.items()
        )
        norm = self.layer_norm("token_embd_norm") if c.family.is_encoder else None
        return Embeddings(tokens, self.embedding_scale(), positions, types, norm)

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
        return Pooler(pooling.kind == "mean", self.classifier() if pooling.is_ranker else ())

    def classifier(self) -> tuple[Dense, ...]:
        """Return the head of a ranker: a dense layer with tanh, if it has one, and the projection to labels."""
        c, tensors = self.config, self.checkpoint.tensors
        output = tensors.get("cls.output.weight")
        if output is None or len(output.shape) != 2:
            raise ModelFileError("tensor 'cls.output.weight' is missing: a ranker needs it")
        dense = (Dense(self.linear(["cls"], [c.d_model], c.d_model), "tanh"),) if "cls.weight" in tensors else ()
        return *dense, Dense(self.linear(["cls.output"], [output.shape[0]], c.d_model))
