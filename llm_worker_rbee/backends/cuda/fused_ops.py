"""The fused ops of a step: what decode_small_batch.py and forward_batched.py launch, in the order of the model's graph.

Each op knows the matrix that reads its result (`following`), so that it stores activations in the form which that
product takes. REWRITES fuse the recorded ops; a model in which an op is left over runs unfused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..graph import Graph, Node, ProgramLine, Rewrite, apply_rewrites, have_one_eps, op_names
from ..ops import AttentionParams, RopeTable
from .packed_weight import PackedWeight, merge_parts

REWRITES = (
    Rewrite("embed_norm", "embed* rms_norm"),
    Rewrite("attention", "linear split_heads rms_norm? rms_norm? rope_store attention", have_one_eps),
    Rewrite("gated_linear", "linear gated"),
    Rewrite("linear_add_norm", "linear rms_norm? take? take? add_rms_norm", have_one_eps),
    Rewrite("logits", "logits"),
)


LAUNCHES = {
    "embed_norm": "embed_rows",
    "attention": "1 to 4 tokens: gemv, decode_attention; more: gemm, decode_attention or rope_store, prefill_attention",
    "gated_linear": "1 to 4 tokens: gemv with its activation; more: gemm, swiglu_rows",
    "linear_add_norm": "1 to 4 tokens: gemv with residual add and norm; more: gemm, add_rms_norm_rows",
    "post_norm": "1 to 4 tokens: gemv, add_rms_norm_rows; more: gemm, add_rms_norm_rows",
    "logits": "1 to 4 tokens: gemv; more: gemm",
}


class Norm(NamedTuple):
    """RMSNorm."""

    weight: torch.Tensor
    eps: float


class EmbedNorm(NamedTuple):
    """Rows of the embedding start the residual stream; their norm is stored."""

    table: PackedWeight
    scale: float
    norm: Norm
    following: PackedWeight


class Attention(NamedTuple):
    """The QKV product, q and k norms, RoPE, the write to the KV cache, attention."""

    qkv: PackedWeight
    bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float  # of the two norms
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeTable
    params: AttentionParams
    layer: int  # of the KV cache
    following: PackedWeight


class GatedLinear(NamedTuple):
    """The product with gate and up, and activation(gate) * up."""

    w: PackedWeight
    activation: str
    following: PackedWeight


class LinearAddNorm(NamedTuple):
    """A product, in some families its norm, added to the residual stream, whose norm is stored."""

    w: PackedWeight
    post: Norm | None
    norm: Norm
    following: PackedWeight
    is_last: bool  # only the tokens whose logits are computed are normed


class Logits(NamedTuple):
    """The output head."""

    head: PackedWeight
    soft_cap: float


FusedOp = EmbedNorm | Attention | GatedLinear | LinearAddNorm | Logits


def fuse_graph(graph: Graph) -> tuple[FusedOp, ...] | None:
    """Return the fused ops of a step; None if an op is left that none of them covers.

    A matrix of packed and dense parts becomes dense: its product reads activations of one form."""
    fused = apply_rewrites(graph, REWRITES)
    if not all(node.fused for node in fused.nodes):
        return None
    readers = {value: node for node in fused.nodes for value in node.inputs}
    ops = [_MAKERS[node.op](node, _following(node, readers)) for node in fused.nodes]
    dense: dict[int, PackedWeight] = {}  # by id of what they replace

    def with_one_form(value: Any) -> Any:
        is_mixed = isinstance(value, PackedWeight) and len(value.parts) > 1 and not value.is_packed
        return dense.setdefault(id(value), merge_parts(value)) if is_mixed else value

    return tuple(type(op)(*map(with_one_form, op)) for op in ops)


def describe(graph: Graph) -> list[ProgramLine]:
    """Return what a step launches, for few tokens and for more."""
    lines = []
    for node in apply_rewrites(graph, REWRITES).nodes:
        has_post = node.op == "linear_add_norm" and node.part("rms_norm") is not None
        lines.append(ProgramLine(node.op, op_names(node), LAUNCHES["post_norm" if has_post else node.op]))
    return lines


def _following(node: Node, readers: dict[Any, Node]) -> Any:
    """Return the matrix of the op that reads the activations of this one: its first result that a product reads."""
    for value in (value for part in node.fused for value in part.outputs):
        reader = readers.get(value)
        for part in () if reader is None else reader.fused:
            if part.op in ("linear", "logits") and part["x"] is value:
                return part["head" if part.op == "logits" else "w"]
    return None


def _norm(node: Node) -> Norm:
    return Norm(node["weight"], node["eps"])


def _embed_norm(node: Node, following: PackedWeight) -> EmbedNorm:
    embed, norm = node.fused
    return EmbedNorm(embed["table"], embed["scale"], _norm(norm), following)


def _attention(node: Node, following: PackedWeight) -> Attention:
    linear, split, *norms, store, attention = node.fused
    q_norm, k_norm = (norm["weight"] for norm in norms) if norms else (None, None)
    return Attention(
        linear["w"], linear["bias"], q_norm, k_norm, norms[0]["eps"] if norms else 0.0, split["n_heads"],
        split["n_kv_heads"], split["head_dim"], store["table"], attention["params"], store["kv"], following,
    )  # fmt: skip


def _gated_linear(node: Node, following: PackedWeight) -> GatedLinear:
    linear, gated = node.fused
    return GatedLinear(linear["w"], gated["activation"], following)


def _linear_add_norm(node: Node, following: PackedWeight) -> LinearAddNorm:
    post, takes = node.part("rms_norm"), node.parts("take")
    w, norm = node.fused[0]["w"], _norm(node.fused[-1])
    return LinearAddNorm(w, None if post is None else _norm(post), norm, following, bool(takes))


def _logits(node: Node, _: object) -> Logits:
    return Logits(node.fused[0]["head"], node.fused[0]["soft_cap"])


_MAKERS: dict[str, Callable[[Node, Any], Any]] = {
    "embed_norm": _embed_norm, "attention": _attention, "gated_linear": _gated_linear,
    "linear_add_norm": _linear_add_norm, "logits": _logits,
}  # fmt: skip


def layer_weights(ops: Sequence[FusedOp]) -> list[PackedWeight]:
    """Return the matrices of all layers."""
    return [op.qkv if isinstance(op, Attention) else op.w for op in ops if not isinstance(op, EmbedNorm | Logits)]
