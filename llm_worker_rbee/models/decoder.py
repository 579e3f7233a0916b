"""The decoder of all families: embedding, blocks, final norm, logits. It keeps no state between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..backends.graph import Graph, ProgramLine, collapse_repeats, record
from ..backends.ops import Array, Backend, Batch, FusedForward, LayerCache, PackedExperts, PackedWeight
from ..config import ModelConfig
from ..layers.attention import Attention
from ..layers.block import Block, PerLayerInputs
from ..layers.norm import RMSNorm
from .kv_cache import KVCache


class Adapters(Protocol):
    """The steps in which a token has a LoRA adapter (lora.py)."""

    fused: FusedForward | None

    def compute(self, ops: Backend, batch: Batch, kv: Sequence[LayerCache]) -> tuple[Array, Array]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Transformer:
    """A model whose weights are packed for one backend."""

    config: ModelConfig
    ops: Backend
    embedding: PackedWeight
    embedding_scale: float
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: PackedWeight
    per_layer_inputs: PerLayerInputs | None = None
    output_scale: float = 1.0  # of the residual stream after the last block
    keeps_hidden: bool = False  # a step can return hidden states, for multi-token prediction
    image_parts: int = 0  # widths of an encoded image's row: for the embedding, then for the first layers (deepstack)
    fused: FusedForward | None = None  # the backend's fused forward, if it has one
    fused_images: FusedForward | None = None  # of steps with tokens of images
    adapters: Adapters | None = None  # what LoRA adapters change, where there may be any

    @property
    def has_axes(self) -> bool:
        """Whether RoPE positions have several axes: only images need them."""
        return self.image_parts > 0 and bool(self.config.rope_sections)

    @property
    def sees_both_ways(self) -> bool:
        """Whether the tokens of an image see each other, so that no step may cut it."""
        return any(isinstance(block.attention, Attention) and block.attention.params.spans for block in self.blocks)

    @property
    def pads_images(self) -> bool:
        """Whether tokens of an image have the id of padding, for embeddings of each layer."""
        return self.per_layer_inputs is not None

    def fused_for(self, batch: Batch) -> FusedForward | None:
        """Return the fused forward of a step; None for one with both images and adapters, which runs op by op."""
        has_adapters = self.adapters is not None and batch.adapters.size > 0
        if batch.images is not None:
            return None if has_adapters else self.fused_images
        return self.adapters.fused if self.adapters is not None and has_adapters else self.fused

    def forward(self, batch: Batch, cache: KVCache) -> Array:
        """Compute one flat batch: write the KV cache, return the logits at `batch.logits_index`: (N, vocabulary)."""
        if (fused := self.fused_for(batch)) is not None:
            return fused(batch, cache.layers)
        return self.forward_unfused(batch, cache)

    def forward_unfused(self, batch: Batch, cache: KVCache) -> Array:
        """Compute the same op by op."""
        return self._compute_unfused(batch, cache)[0]

    def forward_hidden(self, batch: Batch, cache: KVCache) -> tuple[Array, Array]:
        """Compute the same step; return the logits and the hidden state of every token, after the final norm."""
        assert self.keeps_hidden
        if (fused := self.fused_for(batch)) is not None:
            return fused.with_hidden(batch, cache.layers)
        return self._compute_unfused(batch, cache)

    def _compute_unfused(self, batch: Batch, cache: KVCache) -> tuple[Array, Array]:
        computes = self.adapters if self.adapters is not None and batch.adapters.size else self
        return computes.compute(self.ops, batch, cache.layers)

    def compute(self, ops: Backend, batch: Batch, kv: Sequence[LayerCache]) -> tuple[Array, Array]:
        """Compute a step with these ops, the definition of the model: logits, and hidden states if they are kept."""
        x, residual = ops.embed(self.embedding, batch.ids, self.embedding_scale), None
        if batch.images is not None:
            x = ops.place_images(x, batch.images, batch.image_rows, 0)
        inputs = None if self.per_layer_inputs is None else self.per_layer_inputs(ops, x, batch.ids)
        for i, block in enumerate(self.blocks):
            x, residual = block(ops, x, residual, kv[self.config.kv_source(i)], batch, inputs)
            if batch.images is not None and i + 1 < self.image_parts:
                x = ops.place_images(x, batch.images, batch.image_rows, i + 1, adds=True)
        last = ops.take(x, batch.logits_index), ops.take(residual, batch.logits_index)
        normed, _ = self.norm.add_and_norm(ops, *last, self.output_scale)
        logits = ops.logits(normed, self.head, self.config.final_cap)
        return logits, self.norm.add_and_norm(ops, x, residual, self.output_scale)[0] if self.keeps_hidden else None

    def program(self, kv_type: str) -> list[tuple[int, list[ProgramLine]]]:
        """Return the program of a step: groups of lines, each with the number of times it repeats."""
        if self.fused is not None:
            return collapse_repeats(self.fused.program(kv_type))
        return collapse_repeats([ProgramLine(node.op, node.op, "a single op") for node in self.graph().nodes])

    def matrices(self) -> list[PackedWeight]:
        """Return the matrices that a step multiplies all tokens by, in their order; the last is the output head."""
        nodes = self.graph().nodes
        return [node["w"] for node in nodes if node.op == "linear"] + [self.head]

    def experts(self) -> list[PackedExperts]:
        """Return the matrices of experts, in their order."""
        return [node["w"] for node in self.graph().nodes if node.op == "grouped_linear"]

    def graph(self) -> Graph:
        """Return the ops of a step, for a fused forward."""
        return record(self.compute, len(self.blocks))

    def image_graph(self) -> Graph:
        """Return the ops of a step with tokens of images."""
        return record(self.compute, len(self.blocks), image_width=self.image_parts * self.config.d_model)
