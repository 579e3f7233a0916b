"""Build the decoder from the tensors of a checkpoint, packed for one backend.

A missing, unused or misshapen tensor, or one with NaN or infinity, is an error that names it. Matrices stay quantized;
norms and biases become float32.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import machine
from ..backends.ops import (
    Array,
    AttentionParams,
    Backend,
    GatedDeltaParams,
    GatedDeltaWeights,
    PackedWeight,
    RopeTable,
    RouteParams,
)
from ..config import ExpertConfig, ModelConfig, RopeScaling
from ..errors import ModelFileError, UnsupportedModelError
from ..layers.attention import Attention, GatedDelta, ShortConv
from ..layers.block import Block, PerLayerGate, PerLayerInputs
from ..layers.linear import Linear
from ..layers.mlp import GroupedLinear, MoE, ParallelExperts, SwiGLU
from ..layers.norm import RMSNorm
from ..layers.rope import rope_table, section_axes, still_table
from ..weights import Checkpoint, Tensor
from ..weights.checkpoint import refuse_order, release_pages
from ..weights.encoder_names import is_training_head
from ..weights.safetensors import LISTED_ID
from .decoder import Transformer
from .layer_shapes import has_image_spans
from .mtp import MtpHead, head_config, require_head

_log = logging.getLogger("llm_worker_rbee")
# Tables in old exports, redundant with the metadata.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn_rot_embd.weight")
LAYER_NUMBER = re.compile(r"^(?:blk|model\.layers)\.([0-9]{1,6})\.")
AnyBlock = TypeVar("AnyBlock")
MAX_BLOCKS_AT_ONCE = 4  # each holds pages of the file


def load_model(
    checkpoint: Checkpoint,
    ops: Backend,
    config: ModelConfig,
    max_context: int | None = None,
    advance: Callable[[int], None] = lambda packed_bytes: None,
    image_parts: int = 0,
) -> Transformer:
    """Build the decoder for contexts of up to `max_context` tokens; `advance` receives the bytes packed so far, and
    `image_parts` is how many times its own width the rows of encoded images have (0: it takes text alone)."""
    loader = ModelLoader(checkpoint, config, ops, max_context or config.context_length, advance, image_parts)
    return loader.model()


def load_model_with_head(
    checkpoint: Checkpoint,
    ops: Backend,
    config: ModelConfig,
    max_context: int | None = None,
    advance: Callable[[int], None] = lambda packed_bytes: None,
    image_parts: int = 0,
) -> tuple[Transformer, MtpHead]:
    """Build the decoder, which keeps hidden states, and its head for multi-token prediction, to which the tokens of
    images are words."""
    require_head(checkpoint, config)
    loader = ModelLoader(checkpoint, config, ops, max_context or config.context_length, advance, image_parts)
    model = loader.model(keeps_hidden=True)
    return model, loader.mtp_head(model)


def rope_row_order(rows: int, head_dim: int, rope_dim: int) -> NDArray[np.intp]:
    """Return the order of q or k rows that turns RoPE pairs of neighbours into pairs (i, i + half) of each head."""
    heads = np.arange(rows).reshape(-1, head_dim)
    turned, rest = heads[:, :rope_dim], heads[:, rope_dim:]
    return np.concatenate([turned[:, 0::2], turned[:, 1::2], rest], axis=1).reshape(-1)


def split_groups(sizes: list[int], groups: int) -> list[NDArray[np.intp]]:
    """Return the rows of each part of a matrix whose rows are groups of parts of these sizes."""
    rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
    return [part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


@dataclass(slots=True)
class ModelLoader:
    """Builds a model from the tensors of a checkpoint."""

    checkpoint: Checkpoint
    config: ModelConfig
    ops: Backend
    max_context: int
    advance: Callable[[int], None]
    image_parts: int = 0
    used: set[str] = field(default_factory=set)
    packed_bytes: int = 0
    packed_lock: Lock = field(default_factory=Lock)

    def model(self, *, keeps_hidden: bool = False) -> Transformer:
        c = self.config
        self.check_quantization()
        self.check_layer_count()
        embedding = self.matrix("token_embd.weight", c.vocab_size, c.d_model)
        refuse_order([embedding])
        release_pages(embedding.data)  # checked now, packed last
        blocks = self.blocks(self.ropes(), self.block)
        table = self.pack([embedding])
        model = Transformer(
            config=c,
            ops=self.ops,
            embedding=table,
            embedding_scale=self.embedding_scale(),
            blocks=blocks,
            norm=self.stream_norm(c.family.tensors.output_norm, divisor=c.logit_scale),
            output_scale=self.layer_scale(c.n_layers - 1),
            head=self.head(table),
            per_layer_inputs=self.per_layer_inputs() if c.layer_input_dim else None,
            keeps_hidden=keeps_hidden,
            image_parts=self.image_parts,
        )
        self.refuse_unused_tensors()
        if (left_out := self.checkpoint.metadata.get("left_out")) and not self.image_parts:
            _log.warning("%s takes text alone: %s left out", self.checkpoint.path.name, ", ".join(left_out))
        for tensor in self.checkpoint.tensors.values():  # permuted rows were read here, not by the backend
            release_pages(tensor.data)
        of_images = self.ops.fuse(model.image_graph) if self.image_parts else None
        return replace(model, fused=self.ops.fuse(model.graph), fused_images=of_images)

    def mtp_head(self, model: Transformer) -> MtpHead:
        """Build the first block after the model's own; a matrix that the file has twice is packed once."""
        c, i = self.config, self.config.n_layers
        prefix = f"blk.{i}.nextn."
        kinds = (*c.layer_kinds, "attention") if c.layer_kinds else ()
        config = replace(c, n_layers=i + 1, windows=(*c.windows, 0), layer_kinds=kinds)
        loader = replace(self, config=config, image_parts=0)
        of_embedding, of_hidden = loader.matrix(prefix + "eh_proj.weight", c.d_model, 2 * c.d_model).split_columns()
        has_norm = prefix + "shared_head_norm.weight" in self.checkpoint.tensors
        head = MtpHead(
            config=head_config(c),
            ops=self.ops,
            embedding=loader.own_matrix(prefix + "embed_tokens.weight", "token_embd.weight", model.embedding),
            embedding_scale=model.embedding_scale,
            embedding_norm=loader.norm(prefix + "enorm.weight", c.d_model),
            hidden_norm=loader.norm(prefix + "hnorm.weight", c.d_model),
            embedding_projection=Linear(loader.pack([of_embedding])),
            hidden_projection=Linear(loader.pack([of_hidden])),
            block=loader.block(i, loader.ropes()[i]),
            norm=loader.norm(prefix + "shared_head_norm.weight", c.d_model) if has_norm else model.norm,
            head=loader.own_matrix(prefix + "shared_head_head.weight", "output.weight", model.head),
        )
        for tensor in self.checkpoint.tensors.values():
            release_pages(tensor.data)
        return replace(head, fused=self.ops.fuse(head.graph))

    def own_matrix(self, name: str, shared_name: str, shared: PackedWeight) -> PackedWeight:
        """Return the head's own matrix of the vocabulary, or the model's where the file has none or the same."""
        tensors = self.checkpoint.tensors
        if name not in tensors:
            return shared
        own = self.matrix(name, self.config.vocab_size, self.config.d_model)
        other = tensors.get(shared_name) or tensors["token_embd.weight"]
        is_same_form = own.kind is other.kind and own.order is None and other.order is None
        if is_same_form and np.array_equal(own.load().data, other.load().data):
            return shared
        return self.pack([own])

    def check_quantization(self) -> None:
        quantization = self.checkpoint.metadata.get("quantization")
        if quantization is None:
            return
        if quantization["problem"]:
            raise UnsupportedModelError(f"{self.checkpoint.path.name}: {quantization['problem']}")
        if unused := quantization["kv_scales"]:
            _log.warning("%d scales of a quantized KV cache are not used: kv_type chooses its type", unused)

    def check_layer_count(self) -> None:
        """Raise before anything is built for layers that the metadata claims and the file lacks."""
        family = self.config.family
        part = "norm" if family.norms.pre and not family.is_encoder else "output"
        last = f"blk.{self.config.n_layers - 1}.attn_{part}.weight"
        if last not in self.checkpoint.tensors:
            raise ModelFileError(f"tensor {last!r} is missing: the metadata says {self.config.n_layers} layers")

    def head(self, embedding: PackedWeight) -> PackedWeight:
        if "output.weight" in self.checkpoint.tensors:
            return self.pack([self.matrix("output.weight", self.config.vocab_size, self.config.d_model)])
        if self.checkpoint.format == "safetensors":
            settings = {**self.config.family.hf_defaults, **self.checkpoint.metadata["config"]}
            if not settings.get("tie_word_embeddings", False):
                missing = "tensor 'output.weight' (lm_head.weight) is missing"
                raise ModelFileError(f"{missing}, and config.json does not tie it to the embedding")
        return embedding  # tied

    def embedding_scale(self) -> float:
        """Return the factor of embeddings; the residual stream is kept divided by its scale (see `stream_norm`)."""
        c = self.config
        width = float(np.float32(c.d_model**0.5)) if c.family.scaled_embedding else 1.0
        return width * c.embedding_scale / c.residual_scale

    def layer_scale(self, i: int) -> float:
        """Return the factor of the residual stream after layer `i`, 1 where the file has none."""
        scale = self.optional_vector(f"blk.{i}.layer_output_scale.weight", 1)
        return 1.0 if scale is None else float(scale[0])

    def per_layer_inputs(self) -> PerLayerInputs:
        """Return the per-layer embeddings; constant factors are in the norm and in the scale of the table."""
        c, dim = self.config, self.config.layer_input_dim
        rows, half = c.n_layers * dim, np.float32(2**-0.5)
        weight = self.vector("per_layer_proj_norm.weight", dim) * half
        return PerLayerInputs(
            table=self.pack([self.matrix("per_layer_token_embd.weight", c.vocab_size, rows)]),
            scale=float(np.float32(dim**0.5) * half),
            projection=self.linear(["per_layer_model_proj"], [rows], c.d_model),
            norm=RMSNorm(self.ops.prepare_vector(weight), c.norm_eps * c.d_model),
        )

    def per_layer_gate(self, i: int, prefix: str) -> PerLayerGate:
        c, dim = self.config, self.config.layer_input_dim
        return PerLayerGate(
            gate=self.linear([prefix + "inp_gate"], [dim], c.d_model),
            projection=self.linear([prefix + "proj"], [c.d_model], dim),
            norm=self.norm(prefix + "post_norm.weight", c.d_model),
            layer=i,
            activation=c.activation,
        )

    def ropes(self) -> list[RopeTable]:
        """Return the RoPE table of each layer. Layers with full attention share a table, layers without RoPE another,
        and layers with a window a third where it differs."""
        config = replace(self.config, rope_scaling=self.rope_scaling())
        factors = self.optional_vector("rope_freqs.weight", config.rope_dim // 2)
        table = partial(rope_table, config, max_context=self.max_context, freq_factors=factors)
        full, still = table(local=False), still_table(config)
        if self.image_parts and config.rope_sections:
            spec = config.family.rope
            axes = section_axes(config.rope_sections, len(full.inv_freq), alternates=spec.alternates)
            full = full._replace(axes=axes)
        local = table(local=True) if config.rope_local_base or config.window_rope_dim else full
        chosen = [local if window else full for window in config.windows]
        return [still if i in config.nope_layers else rope for i, rope in enumerate(chosen)]

    def rope_scaling(self) -> RopeScaling:
        """Return the scaling of the metadata, or longrope if the file has its two factor tensors."""
        scaling = self.config.rope_scaling
        pairs = self.config.rope_dim // 2
        short, long = (self.optional_vector(f"rope_factors_{kind}.weight", pairs) for kind in ("short", "long"))
        if short is None and long is None:
            return scaling
        if short is None or long is None:
            absent = "short" if short is None else "long"
            raise ModelFileError(f"tensor 'rope_factors_{absent}.weight' is missing: both lists are needed")
        if scaling.original_context < 2:
            needed = "tensor 'rope_factors_long.weight' needs an original context length"
            raise ModelFileError(f"{needed}, which is {scaling.original_context}")
        return replace(scaling, kind="longrope", short_factors=tuple(short.tolist()), long_factors=tuple(long.tolist()))

    def blocks(self, ropes: list[RopeTable], block: Callable[[int, RopeTable], AnyBlock]) -> tuple[AnyBlock, ...]:
        """Build all blocks, several at once on the CPU: its kernels pack and read the file without the GIL."""
        is_alone = self.ops.has_device_memory or machine.is_behind_others()
        threads = 1 if is_alone else min(self.ops.threads or 1, MAX_BLOCKS_AT_ONCE)
        if threads == 1:
            return tuple(map(block, range(len(ropes)), ropes))
        with ThreadPoolExecutor(threads) as pool:
            return tuple(pool.map(block, range(len(ropes)), ropes))

    def block(self, i: int, rope: RopeTable) -> Block:
        c, prefix = self.config, f"blk.{i}."
        pre, post = c.family.norms.pre, c.family.norms.post
        return Block(
            attention_norm=self.stream_norm(prefix + "attn_norm") if pre else None,
            attention=self.mixer(i, prefix, rope),
            mlp_norm=self.stream_norm(prefix + self.mlp_norm_name()) if pre else None,
            mlp=self.mlp(i, prefix),
            post_attention_norm=self.norm(prefix + "post_attention_norm.weight", c.d_model) if post else None,
            post_mlp_norm=self.norm(prefix + "post_ffw_norm.weight", c.d_model) if post else None,
            experts=self.parallel_experts(prefix) if c.experts and c.experts.spec.parallel else None,
            per_layer_gate=self.per_layer_gate(i, prefix) if c.layer_input_dim else None,
            input_scale=self.layer_scale(i - 1) if i else 1.0,
        )

    def mlp_norm_name(self) -> str:
        return self.config.family.tensors.gguf_mlp_norm if self.checkpoint.format == "gguf" else "ffn_norm"

    def mixer(self, i: int, prefix: str, rope: RopeTable) -> Attention | ShortConv | GatedDelta:
        """Return the token mixer of layer `i`: attention, a short convolution or a gated delta rule."""
        c = self.config
        if c.layer_kind(i) == "short_conv":
            return self.short_conv(prefix + "shortconv.")
        if c.layer_kind(i) == "gated_delta":
            return self.gated_delta(prefix)
        return self.attention(i, prefix, rope)

    def short_conv(self, prefix: str) -> ShortConv:
        c = self.config
        return ShortConv(
            input=self.linear([prefix + "in_proj"], [3 * c.d_model], c.d_model),
            weight=self.conv_weight(prefix + "conv.weight", c.d_model, c.conv_kernel),
            output=self.linear([prefix + "out_proj"], [c.d_model], c.d_model),
        )

    def conv_weight(self, name: str, channels: int, kernel: int) -> Array:
        """Return the weight of a convolution of each channel for itself."""
        return self.ops.prepare_vector(self.matrix(name, channels, kernel).dequantize())

    def attention(self, i: int, prefix: str, rope: RopeTable) -> Attention:
        c, (kv_heads, dim) = self.config, self.config.kv_shape(i)
        kv_heads = kv_heads if c.kv_source(i) == i else 0
        is_left_out = f"{prefix}attn_q_norm.weight" not in self.checkpoint.tensors
        has_norms = c.family.attention.qk_norm and not (c.family.attention.qk_norm == "optional" and is_left_out)
        q_norm, k_norm = (
            self.head_norm(f"{prefix}attn_{x}_norm.weight", heads, dim) if has_norms and heads else None
            for x, heads in (("q", c.n_heads), ("k", kv_heads))
        )
        if c.family.attention.gated:
            qkv, gate = self.gated_qkv(prefix)
        else:
            keys_as_values = c.family.attention.keys_as_values and not c.windows[i]
            qkv, gate = self.qkv(prefix, c.n_heads * dim, kv_heads * dim, keys_as_values=keys_as_values), None
        has_spans = self.image_parts > 0 and has_image_spans(self.checkpoint, c, i)
        return Attention(
            qkv=qkv,
            output=self.linear([prefix + "attn_output"], [c.d_model], c.n_heads * dim),
            n_heads=c.n_heads,
            n_kv_heads=kv_heads,
            head_dim=dim,
            rope=rope,
            params=AttentionParams(c.attention_scale, c.windows[i], c.attention_cap, c.causal, has_spans),
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=self.unit_norm(dim) if c.family.attention.v_norm and kv_heads else None,
            sinks=self.sinks(prefix) if c.family.attention.sinks else None,
            gate=gate,
        )

    def gated_delta(self, prefix: str) -> GatedDelta:
        c, n = self.config, self.config.linear
        assert n is not None
        is_tiled = c.family.tensors.gguf_tiled_heads and self.checkpoint.format == "gguf"
        rate = self.vector(prefix + "ssm_a", n.v_heads)
        rate = rate if self.checkpoint.format == "gguf" else -np.exp(rate)  # transformers' is its logarithm
        vectors = rate, self.vector(prefix + "ssm_dt.bias", n.v_heads), self.vector(prefix + "ssm_norm.weight", n.v_dim)
        group, values = n.v_heads // n.k_heads, n.v_heads * n.v_dim
        names = {"attn_qkv": n.channels, "attn_gate": values}
        qkvz = self.by_key_head(prefix + "ssm_in", [n.k_dim, n.k_dim, group * n.v_dim, group * n.v_dim], names)
        gates = self.by_key_head(prefix + "ssm_ba", [group, group], dict.fromkeys(("ssm_beta", "ssm_alpha"), n.v_heads))
        return GatedDelta(
            qkvz=Linear(self.pack(qkvz)),
            gates=Linear(self.pack(gates)),
            conv=self.conv_weight(prefix + "ssm_conv1d.weight", n.channels, n.kernel),
            params=GatedDeltaParams(n.k_heads, n.v_heads, n.k_dim, n.v_dim, c.norm_eps, is_tiled),
            weights=GatedDeltaWeights(*map(self.ops.prepare_vector, vectors)),
            output=self.linear([prefix + "ssm_out"], [c.d_model], values),
        )

    def by_key_head(self, name: str, sizes: list[int], parts: dict[str, int]) -> list[Tensor]:
        """Return the rows of some parts: each a tensor, or all in one, key head by key head."""
        if f"{name}.weight" not in self.checkpoint.tensors:
            prefix = name[: name.rindex(".") + 1]
            return [self.matrix(f"{prefix}{part}.weight", rows, self.config.d_model) for part, rows in parts.items()]
        assert self.config.linear is not None
        return [self.matrix_of_groups(f"{name}.weight", sizes, self.config.linear.k_heads)]

    def matrix_of_groups(self, name: str, sizes: list[int], groups: int) -> Tensor:
        """Return a matrix whose rows are groups of parts of these sizes as one part after the other."""
        tensor = self.matrix(name, groups * sum(sizes), self.config.d_model)
        return tensor.take_rows(np.concatenate(split_groups(sizes, groups)))

    def gated_qkv(self, prefix: str) -> tuple[Linear, Linear]:
        """Return the projections to q, k and v, and to the gate; the file has the rows of q and gate in one matrix."""
        c = self.config
        rows, kv_rows = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        both = self.matrix_of_groups(prefix + "attn_q.weight", [c.head_dim, c.head_dim], c.n_heads)
        k, v = (self.matrix(f"{prefix}attn_{x}.weight", kv_rows, c.d_model) for x in "kv")
        return (
            Linear(self.pack([both.take_rows(slice(0, rows)), k, v])),
            Linear(self.pack([both.take_rows(slice(rows, None))])),
        )

    def sinks(self, prefix: str) -> Array:
        return self.ops.prepare_vector(self.vector(prefix + "attn_sinks.weight", self.config.n_heads))

    def qkv(self, prefix: str, q_rows: int, kv_rows: int, *, keys_as_values: bool) -> Linear:
        c, rows = self.config, [q_rows, kv_rows, kv_rows]
        is_fused = prefix + "attn_qkv.weight" in self.checkpoint.tensors
        if c.family.tensors.fused_qkv or (c.family.is_encoder and is_fused):
            return self.linear([prefix + "attn_qkv"], [sum(rows)], c.d_model)
        names = [prefix + f"attn_{x}" for x in "qkv"]
        if not kv_rows:
            return self.linear(names[:1], rows[:1], c.d_model)
        if keys_as_values and names[2] + ".weight" not in self.checkpoint.tensors:
            names[2] = names[1]
        if c.family.attention.qkv_bias:
            self.require_biases(names)
        if c.family.attention.output_bias:
            self.require_biases([prefix + "attn_output"])
        return self.linear(names, rows, c.d_model)

    def require_biases(self, names: list[str]) -> None:
        for name in names:
            self.tensor(name + ".bias")  # `linear` takes optional biases

    def mlp(self, i: int, prefix: str) -> SwiGLU | MoE:
        c, experts = self.config, self.config.experts
        if experts is None or i in experts.dense_layers or experts.spec.parallel:
            return self.swiglu(prefix, "", c.d_ff_of(i))
        return self.moe(prefix, experts)

    def parallel_experts(self, prefix: str) -> ParallelExperts:
        c, experts = self.config, self.config.experts
        assert experts is not None
        scale = self.vector(prefix + "ffn_gate_inp.scale", c.d_model) * np.float32(c.d_model**-0.5)
        return ParallelExperts(
            router_norm=RMSNorm(self.ops.prepare_vector(scale), c.norm_eps),
            norm=self.norm(prefix + "pre_ffw_norm_2.weight", c.d_model),
            moe=self.moe(prefix, experts),
            post_norm=self.norm(prefix + "post_ffw_norm_2.weight", c.d_model),
            mlp_post_norm=self.norm(prefix + "post_ffw_norm_1.weight", c.d_model),
        )

    def swiglu(self, prefix: str, suffix: str, d_ff: int) -> SwiGLU:
        c = self.config
        gate, up, down = (f"{prefix}ffn_{role}{suffix}" for role in ("gate", "up", "down"))
        names, rows = ([up], [2 * d_ff]) if c.family.tensors.fused_gate_up else ([gate, up], [d_ff, d_ff])
        last = self.linear([down], [c.d_model], d_ff)
        return SwiGLU(self.linear(names, rows, c.d_model), last, c.activation)

    def moe(self, prefix: str, e: ExpertConfig) -> MoE:
        c, bias = self.config, self.optional_vector(prefix + "exp_probs_b.bias", e.count)
        is_stacked = prefix + "ffn_gate_up_exps.weight" in self.checkpoint.tensors
        gate_up = [("gate_up", 2 * e.d_ff)] if is_stacked else [("gate", e.d_ff), ("up", e.d_ff)]
        scales = self.optional_vector(prefix + "ffn_down_exps.scale", e.count)
        shared_gate = self.shared_gate(prefix) if e.shared_d_ff and e.spec.shared_gate else None
        return MoE(
            router=self.linear([prefix + "ffn_gate_inp"], [e.count], c.d_model),
            params=RouteParams(e.used, e.spec.scoring, e.spec.renormalize, e.scale),
            gate_up=self.grouped_linear(prefix, e, gate_up, c.d_model),
            down=self.grouped_linear(prefix, e, [("down", c.d_model)], e.d_ff),
            activation=c.activation,
            selection_bias=None if bias is None else self.ops.prepare_vector(bias),
            shared=self.swiglu(prefix, "_shexp", e.shared_d_ff) if e.shared_d_ff else None,
            shared_gate=shared_gate,
            expert_scales=None if scales is None else self.ops.prepare_vector(scales),
        )

    def expert_matrices(self, prefix: str, role: str, e: ExpertConfig, rows: int, columns: int) -> list[Tensor]:
        """Return a matrix for each expert: views of a stacked tensor, or tensors of their own."""
        if f"{prefix}ffn_{role}.0.weight" in self.checkpoint.tensors:
            return [self.matrix(f"{prefix}ffn_{role}.{i}.weight", rows, columns) for i in range(e.count)]
        return self.matrix(f"{prefix}ffn_{role}_exps.weight", e.count, rows, columns).matrices()

    def grouped_linear(self, prefix: str, e: ExpertConfig, roles: list[tuple[str, int]], columns: int) -> GroupedLinear:
        """Stack the matrices of each expert by rows, with their biases."""
        matrices = [self.expert_matrices(prefix, role, e, rows, columns) for role, rows in roles]
        weight = self.ops.prepare_experts(list(zip(*matrices, strict=True)))
        self.count_packed([tensor for tensors in matrices for tensor in tensors])
        if not e.spec.bias:
            return GroupedLinear(weight)
        self.require_biases([prefix + "ffn_gate_inp"])
        biases = [self.vector(f"{prefix}ffn_{role}_exps.bias", e.count, rows) for role, rows in roles]
        return GroupedLinear(weight, self.ops.prepare_vector(np.concatenate(biases, axis=1)))

    def shared_gate(self, prefix: str) -> Linear:
        """Return the gate of the shared expert, which GGUF files hold as a vector."""
        name, width = prefix + "ffn_gate_inp_shexp.weight", self.config.d_model
        is_vector = self.tensor(name).shape == (width,)
        tensor = self.matrix(name, width) if is_vector else self.matrix(name, 1, width)
        return Linear(self.pack([replace(tensor, shape=(1, width))]))

    def linear(self, names: list[str], rows: list[int], columns: int) -> Linear:
        """Stack matrices by rows, with their biases if any has one."""
        named = list(zip(names, rows, strict=True))
        parts = [self.projection(name + ".weight", n, columns) for name, n in named]
        biases = [self.optional_vector(name + ".bias", n) for name, n in named]
        bias = None
        if any(b is not None for b in biases):
            filled = [np.zeros(n, np.float32) if b is None else b for b, n in zip(biases, rows, strict=True)]
            bias = self.ops.prepare_vector(np.concatenate(filled))
        return Linear(self.pack(parts), bias)

    def pack(self, parts: list[Tensor]) -> PackedWeight:
        weight = self.ops.prepare(parts)
        self.count_packed(parts)
        return weight

    def count_packed(self, parts: list[Tensor]) -> None:
        with self.packed_lock:
            self.packed_bytes += sum(part.nbytes for part in parts)
            self.advance(self.packed_bytes)

    def projection(self, name: str, rows: int, columns: int) -> Tensor:
        tensor, order = self.matrix(name, rows, columns), self.rope_order(name, rows)
        return tensor if order is None else tensor.take_rows(order)

    def rope_order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        is_interleaved = self.checkpoint.format in self.config.family.rope.interleaved
        if not is_interleaved or name.split(".")[-2] not in ("attn_q", "attn_k"):
            return None
        return rope_row_order(rows, self.config.head_dim, self.config.rope_dim)

    def unit_norm(self, width: int) -> RMSNorm:
        """Return a norm without a weight."""
        return RMSNorm(self.ops.prepare_vector(np.ones(width, np.float32)), self.config.norm_eps)

    def norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self.ops.prepare_vector(self.norm_weight(name, width)), self.config.norm_eps)

    def stream_norm(self, name: str, divisor: float = 1.0) -> RMSNorm:
        """Return a norm of the residual stream, which is kept divided by its scale: only eps of RMS norm depends on the
        scale."""
        c = self.config
        weight = self.norm_weight(f"{name}.weight", c.d_model)
        scaled = weight if divisor == 1.0 else weight / np.float32(divisor)
        return RMSNorm(self.ops.prepare_vector(scaled), c.norm_eps / c.residual_scale**2)

    def head_norm(self, name: str, heads: int, dim: int) -> RMSNorm:
        """Return a norm of q or k: of each head, or of all together."""
        c = self.config
        if c.family.attention.qk_norm != "wide":
            return self.norm(name, dim)
        weight = self.norm_weight(name, heads * dim).reshape(heads, dim)
        return RMSNorm(self.ops.prepare_vector(weight), c.norm_eps)

    def norm_weight(self, name: str, width: int) -> NDArray[np.float32]:
        weight = self.vector(name, width)
        is_less_one = self.config.family.tensors.norm_plus_one and self.checkpoint.format == "safetensors"
        return weight + np.float32(1) if is_less_one else weight

    def tensor(self, name: str, *shape: int) -> Tensor:
        if name not in self.checkpoint.tensors:
            raise ModelFileError(f"tensor {name!r} is missing: a {self.config.family.name} model needs it")
        self.used.add(name)
        tensor = self.checkpoint.tensors[name]
        if tensor.kind.id == LISTED_ID:
            raise UnsupportedModelError(f"tensor {name!r} has unsupported type {tensor.kind.name!r}")
        if shape and tensor.shape != shape:
            raise ModelFileError(f"tensor {name!r} has shape {tensor.shape}, the metadata says {shape}")
        return tensor.load()

    def matrix(self, name: str, *shape: int) -> Tensor:
        tensor = self.tensor(name, *shape)
        self.refuse_nonfinite(name, [tensor])
        return tensor

    def refuse_nonfinite(self, name: str, tensors: list[Tensor]) -> None:
        bad = next((bad for tensor in tensors if (bad := tensor.find_nonfinite_scale()) is not None), None)
        if bad is not None:
            raise ModelFileError(f"tensor {name!r} holds a NaN or infinite value in block {bad}: the file is damaged")

    def vector(self, name: str, *shape: int) -> NDArray[np.float32]:
        values = self.tensor(name, *shape).dequantize()
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {name!r} holds NaN or infinite values: the file is damaged")
        order = self.rope_order(name, shape[0])
        return values if order is None else values[order]

    def optional_vector(self, name: str, width: int) -> NDArray[np.float32] | None:
        return self.vector(name, width) if name in self.checkpoint.tensors else None

    def is_of_nextn_layer(self, name: str) -> bool:
        layer, first = LAYER_NUMBER.match(name), self.config.n_layers
        return (layer is not None and first <= int(layer[1]) < first + self.config.nextn_layers) or name.startswith(
            "mtp."
        )

    def is_of_shared_keys(self, name: str) -> bool:
        """Return whether a tensor projects keys or values of a layer that reads another layer's cache."""
        layer = LAYER_NUMBER.match(name)
        return (
            layer is not None
            and name[layer.end() :].startswith(("attn_k", "attn_v"))
            and (self.config.n_layers - self.config.shared_kv_layers <= int(layer[1]) < self.config.n_layers)
        )

    def is_of_training(self, name: str) -> bool:
        """Return whether a tensor is of an objective that an encoder was trained for."""
        return self.config.family.is_encoder and is_training_head(name)

    def refuse_unused_tensors(self) -> None:
        rest = [name for name in self.checkpoint.tensors if name not in self.used]
        unread = (self.is_of_nextn_layer, self.is_of_shared_keys, self.is_of_training)
        extra = [name for name in rest if not (name.endswith(IGNORED_SUFFIXES) or any(is_of(name) for is_of in unread))]
        if extra:
            others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            problem = f"is not part of a {self.config.family.name} model: the metadata and the tensors do not fit"
            raise ModelFileError(f"tensor {extra[0]!r}{others} {problem}")
