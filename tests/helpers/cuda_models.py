"""Tiny models for the fused decoder: the same random weights on a backend and on the reference, and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends.ops import AttentionParams, Batch, RopeTable, RouteParams
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.mlp import GroupedLinear, MoE, SwiGLU
from llm_worker_rbee.layers.norm import RMSNorm
from llm_worker_rbee.layers.rope import inverse_frequencies
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.kv_cache import KVCache
from llm_worker_rbee.weights import Checkpoint, Tensor
from tests.helpers.random_tensors import random_tensor
from tests.helpers.synthetic import Shape, Spec, checkpoint

GROUPED = Shape(2, 128, 4, 2, 192, 96, 256, head_dim=32)  # two heads share a KV head
PLAIN = Shape(2, 256, 4, 4, 256, 96, 256, head_dim=64)  # wide enough for super-blocks
QWEN = Shape(2, 96, 3, 1, 96, 96, 256, head_dim=32, tied=True, architecture="qwen2")
P = 4


def random_checkpoint(shape: Shape, mix: str) -> Checkpoint:
    """Make random weights; norms and biases are random too."""
    made = checkpoint(Spec("tiny", shape, mix, shape.layers), seed=7)
    random = np.random.default_rng(7)
    tensors = dict(made.tensors)
    for name, t in made.tensors.items():
        if len(t.shape) == 1:
            values = random.uniform(0.5, 1.5, t.shape) if "norm" in name else random.normal(0, 0.5, t.shape)
            tensors[name] = Tensor(t.name, t.kind, t.shape, values.astype(np.float32).view(np.uint8))
    return replace(made, tensors=tensors)


def load_both(made: Checkpoint, ops: Any) -> tuple[Transformer, Transformer]:
    """Load a model on a backend and on the reference."""
    return tuple(load_model(made, o, read_model_config(made)) for o in (ops, ReferenceBackend()))  # type: ignore[return-value]


def with_features(
    model: Transformer, window: int = 0, cap: float = 0.0, norms: bool = False, bias: bool = False, post: bool = False,
    activation: str = "silu", rope_dim: int = 0, scale: float = 1.0, final_cap: float = 0.0,
) -> Transformer:  # fmt: skip
    """Return the model with features of some families: windows, capped scores, norms of heads and after the attention
    and the MLP, biases, other activations, RoPE over a part of the head, a scaled embedding, capped logits; fused if it
    was."""
    random, c, ops = np.random.default_rng(9), model.config, model.ops
    part = RopeTable(inverse_frequencies(1e4, rope_dim), 1.0) if rope_dim else None

    def vector(size: int, low: float) -> Any:
        return ops.prepare_vector(random.uniform(low, 1.5, size).astype(np.float32))

    def changed(block: Block) -> Block:
        a = block.attention
        heads = [RMSNorm(vector(c.head_dim, 0.5), c.norm_eps) if norms else None for _ in range(2)]
        added = vector((c.n_heads + 2 * c.n_kv_heads) * c.head_dim, -1.5) if bias else a.qkv.bias
        more: dict[str, Any] = {"q_norm": heads[0], "k_norm": heads[1], "rope": part or a.rope}
        more["params"] = AttentionParams(a.params.scale, window, cap)
        after = [RMSNorm(vector(c.d_model, 0.5), c.norm_eps) if post else None for _ in range(2)]
        made = replace(block, attention=replace(a, qkv=Linear(a.qkv.weight, added), **more))
        made = replace(made, post_attention_norm=after[0], post_mlp_norm=after[1])
        return replace(made, mlp=replace(block.mlp, activation=activation))

    config = replace(c, final_cap=final_cap)
    made = replace(model, config=config, embedding_scale=scale, blocks=tuple(map(changed, model.blocks)), fused=None)
    return made if model.fused is None else replace(made, fused=ops.fuse(made.graph))


def with_experts(
    model: Transformer, kind: str, *, shared: bool = False, gate: bool = False, oai: bool = False
) -> Transformer:
    """Return the model with random experts in the place of its MLPs; fused if it was. `oai`: with the biases, the
    activation and the sinks of gpt-oss."""
    random, c, ops = np.random.default_rng(3), model.config, model.ops

    def matrix(rows: int, columns: int, name: str = kind) -> Any:
        return random_tensor(name, rows, columns, random, 0.02)

    def bias(*shape: int) -> Any:
        return ops.prepare_vector(random.standard_normal(shape).astype(np.float32)) if oai else None

    def experts(blocks: int, rows: int, columns: int) -> GroupedLinear:
        made = ops.prepare_experts([[matrix(rows, columns) for _ in range(blocks)] for _ in range(5)])
        return GroupedLinear(made, bias(5, blocks * rows))

    def mlp() -> MoE:
        router = Linear(ops.prepare([matrix(5, c.d_model, "F32")]), bias(5))
        more = SwiGLU(
            Linear(ops.prepare([matrix(2 * c.d_ff, c.d_model)])), Linear(ops.prepare([matrix(c.d_model, c.d_ff)]))
        )
        of_shared = Linear(ops.prepare([matrix(1, c.d_model, "F32")]))
        return MoE(
            router, RouteParams(3), experts(2, c.d_ff, c.d_model), experts(1, c.d_model, c.d_ff),
            activation="swiglu_oai" if oai else "silu", shared=more if shared else None,
            shared_gate=of_shared if gate else None,
        )  # fmt: skip

    def block(before: Block) -> Block:
        assert isinstance(before.attention, Attention)
        output = replace(before.attention.output, bias=bias(c.d_model))
        return replace(before, attention=replace(before.attention, sinks=bias(c.n_heads), output=output), mlp=mlp())

    made = replace(model, blocks=tuple(map(block, model.blocks)), fused=None)
    return made if model.fused is None else replace(made, fused=ops.fuse(made.graph))


class Requests:
    """Requests with their block tables in a shuffled cache; `step` makes the batch of a step."""

    def __init__(self, model: Transformer, n: int, kv_type: str, blocks_each: int = 8, size: int = P) -> None:
        self.size = size
        self.cache = KVCache(model.ops, model.config, n * blocks_each + 1, size, kv_type, n_slots=n)
        order = np.random.default_rng(3).permutation(n * blocks_each) + 1
        self.tables = order.reshape(n, blocks_each)
        self.done = np.zeros(n, np.int64)

    def step(
        self, requests: Sequence[int], counts: Sequence[int], ids: NDArray[np.int64], logits_of_all: bool = False
    ) -> Batch:
        """Schedule the next counts[i] tokens of requests[i]."""
        starts, chosen = self.done[list(requests)], np.array(counts)
        stops = starts + chosen
        query_start = np.concatenate(([0], np.cumsum(chosen)))
        owners = np.repeat(np.arange(len(requests)), chosen)
        positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
        size = self.size
        tables = self.tables[list(requests)][:, : -(-int(stops.max()) // size)]
        self.done[list(requests)] = stops
        states = {}
        if self.cache.n_slots:  # each request has the slot of its number
            states["state_in"] = np.where(starts > 0, requests, -1)
            states["state_out"] = np.full(len(ids), -1)
            states["state_out"][query_start[1:] - 1] = requests
        return Batch(
            ids=ids, positions=positions, slot_mapping=tables[owners, positions // size] * size + positions % size,
            query_start=query_start, context_len=stops, block_table=tables,
            logits_index=np.arange(len(ids)) if logits_of_all else query_start[1:] - 1, **states,
        )  # fmt: skip


def relative_error(got: Any, want: NDArray[np.float32]) -> float:
    """Return the RMS error of logits relative to their deviation."""
    return float(np.sqrt(np.mean((np.asarray(got, np.float32) - want) ** 2)) / want.std())
