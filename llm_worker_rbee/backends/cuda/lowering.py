"""The fused ops of a step, which launch.py launches in the order of the model's graph.

Each op knows the matrix that reads its result (`following`), so that it stores activations in the form which that
product takes. REWRITES fuse the recorded ops; a model in which an op is left over runs unfused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, inf, log2, sqrt
from typing import Any, NamedTuple

import torch

from ..graph import Graph, Node, Rewrite, Value, apply_rewrites, have_one_eps
from ..ops import AttentionParams, GatedDeltaParams, GatedDeltaWeights, LoraSite, RopeTable, RouteParams
from .kernels.elementwise import ACTIVATIONS
from .kernels.gated_delta import has_kernels
from .kernels.gemm import SCALE_LAYOUT
from .packed_weight import DENSE, PackedExperts, PackedWeight, row_squares

BOUND_SLACK = 1.05  # for the rounding of weights and activations
MAX_HALF_EXPONENT = 15  # 2**15 fits float16


def _has_blocks(node: Node) -> bool:
    embed, norm = node.fused
    return len(embed["table"].parts) == 1 and len(norm["weight"]) % 32 == 0


def _has_inputs_kernels(node: Node) -> bool:
    """The projection of the stream has no bias, and rows of both tables are whole blocks."""
    embed, tokens, linear, inputs = node.fused
    is_usual = linear["x"] is embed.output and linear["bias"] is None and inputs["tokens"] is tokens.output
    tables = embed["table"], tokens["table"]
    return is_usual and all(len(table.parts) == 1 and table.columns % 32 == 0 for table in tables)


def _has_layer_gate_kernel(node: Node) -> bool:
    linear, gate = node.fused
    is_usual = linear["bias"] is None and gate["x"] is linear.output and gate["activation"] in ACTIVATIONS
    return is_usual and linear["w"].rows % 32 == 0


def has_attention_kernels(node: Node) -> bool:
    """The KV cache is read in words of 32 bits; it is the one written, and norms are q's, then k's, or none, and
    one of v without a weight. A layer without KV heads may have a norm of q."""
    _, split, *norms, store, attention = node.fused[:-2] if node.op == "gated_attention" else node.fused
    q, k, v = split.outputs
    usual = ([], [q, k], [q, k, v]) if split["n_kv_heads"] else ([], [q])
    is_usual = [norm["x"] for norm in norms] in usual and attention["kv"] == store["kv"]
    is_usual &= all(bool((norm["weight"] == 1).all()) for norm in norms[2:])
    is_usual &= all(norm["weight"].dim() == 1 for norm in norms)  # of each head
    return is_usual and have_one_eps(node) and split["head_dim"] % 4 == 0


def _has_gated_words(node: Node) -> bool:
    """The gate has no bias and belongs to this attention; both read the same rows."""
    first, *_, attention, linear, gate = node.fused
    is_gate = gate["x"] is attention.output and linear["x"] is first["x"] and linear["bias"] is None
    return is_gate and has_attention_kernels(node)


def _has_delta_kernels(node: Node) -> bool:
    """The rule reads the convolution and both products, which have no bias and the same rows."""
    linear, gates, conv, delta = node.fused
    is_rule = conv["x"] is linear.output and not conv["gated"] and conv["activation"] == "silu"
    is_rule &= delta["z"] is linear.output and delta["gates"] is gates.output and delta["state"] == conv["state"]
    has_bias = linear["bias"] is not None or gates["bias"] is not None
    return is_rule and not has_bias and gates["x"] is linear["x"] and has_kernels(delta["params"])


def _has_conv_kernel(node: Node) -> bool:
    linear, conv = node.fused
    is_gated = conv["gated"] and conv["x"] is linear.output and conv["activation"] in ("", "silu")
    return is_gated and linear["bias"] is None and conv.output.shape[1] % 32 == 0


def _has_gate_kernel(node: Node) -> bool:
    linear, gated = node.fused
    return linear["bias"] is None and gated["activation"] in ACTIVATIONS and linear["w"].rows % 64 == 0


def _has_add_kernel(node: Node) -> bool:
    """The product is what is added: the residual stream is the other operand, and both are taken."""
    linear, *between, add = node.fused
    delta, takes = linear.output, [part for part in between if part.op == "take"]
    for part in between:
        if part["x"] is delta:
            delta = part.output
    return add["x"] is delta and len(takes) in (0, 2) and have_one_eps(node)


def _has_expert_kernels(node: Node) -> bool:
    """The router is dense, gate and up have one type, and no product of a shared or parallel expert has
    a bias."""
    router, gated, w = _router(node), node.parts("gated")[0], node.parts("grouped_linear")[0]["w"]
    is_dense = len(router["w"].parts) == 1 and router["w"].parts[0].kind == DENSE
    has_bias = any(part["bias"] is not None for part in node.parts("linear") if part is not router)
    is_gated = gated["activation"] in ACTIVATIONS and w.rows % 64 == 0 and len(w.parts) == 1
    return is_dense and not has_bias and is_gated and have_one_eps(node)


def _router(node: Node) -> Node:
    (route,) = node.parts("route")
    return next(part for part in node.parts("linear") if part.output is route["logits"])


def _has_parallel_kernels(node: Node) -> bool:
    """Router and experts read the residual stream by norms of their own; the norms of the MLP and of the experts are
    added, and the norm of that to the stream."""
    down, of_dense, of_router, of_experts, *_ = node.fused
    *_, of_sum, of_total = node.parts("rms_norm")
    (total,), (combine,), last = node.parts("add"), node.parts("combine"), node.fused[-1]
    taken = {part.output: part["x"] for part in node.parts("take")}
    delta, stream = (taken.get(last[name], last[name]) for name in ("x", "residual"))
    links = [
        (of_dense["x"], down.output),
        (of_router["x"], stream),
        (of_experts["x"], stream),
        (_router(node)["x"], of_router.output),
        (node.parts("grouped_linear")[0]["x"], of_experts.output),
        (combine["shared"], None),
        (of_sum["x"], combine.output),
        (total["x"], of_sum.output),
        (total["residual"], of_dense.output),
        (of_total["x"], total.output),
        (delta, of_total.output),
    ]
    return all(value is other for value, other in links) and _has_expert_kernels(node)


ATTENTION = "linear split_heads rms_norm? rms_norm? rms_norm? rope_store attention"
EXPERTS = "linear route grouped_linear gated grouped_linear linear? gated? linear? linear? combine"
PARALLEL = "rms_norm rms_norm rms_norm linear route grouped_linear gated grouped_linear combine rms_norm add rms_norm"
REWRITES = (
    Rewrite("parallel_experts", f"linear {PARALLEL} take? take? add_rms_norm", _has_parallel_kernels),
    Rewrite("experts_add_norm", f"{EXPERTS} rms_norm? take? take? add_rms_norm", _has_expert_kernels),
    Rewrite("embed_norm", "embed* rms_norm", _has_blocks),
    Rewrite("embed_inputs", "embed* embed linear per_layer_inputs", _has_inputs_kernels),
    Rewrite("stream_norm", "rms_norm"),
    Rewrite("per_layer_gate", "linear per_layer_gate", _has_layer_gate_kernel),
    Rewrite("gated_attention", f"{ATTENTION} linear sigmoid_gate", _has_gated_words),
    Rewrite("gated_delta", "linear linear causal_conv gated_delta", _has_delta_kernels),
    Rewrite("short_conv", "linear causal_conv", _has_conv_kernel),
    Rewrite("attention", ATTENTION, has_attention_kernels),
    Rewrite("gated_linear", "linear gated", _has_gate_kernel),
    Rewrite("linear_add_norm", "linear rms_norm? take? take? add_rms_norm", _has_add_kernel),
    Rewrite("linear_add", "linear rms_norm? add", _has_add_kernel),
    Rewrite("logits", "logits"),
)


class EmbedNorm(NamedTuple):
    """Rows of the embedding start the residual stream; their norm is stored."""

    table: PackedWeight
    scale: float
    norm: torch.Tensor
    eps: float
    following: PackedWeight


class EmbedInputs(NamedTuple):
    """Rows of the embedding start the residual stream; per-layer embeddings, with its projection, are the inputs of all
    layers."""

    table: PackedWeight
    scale: float
    inputs_table: PackedWeight
    inputs_scale: float
    projection: PackedWeight
    norm: torch.Tensor  # of the projection, for each layer
    eps: float


class StreamNorm(NamedTuple):
    """The norm of the residual stream."""

    norm: torch.Tensor
    eps: float
    following: PackedWeight


class Attention(NamedTuple):
    """The QKV product, q and k norms, RoPE, the write to the KV cache, attention. A layer without KV heads reads what
    another has written."""

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
    sinks: torch.Tensor | None
    gate: PackedWeight | None  # the result times the sigmoid of this product
    input_norm: torch.Tensor | None  # of the stream, which products read; where there is a gate
    input_eps: float
    following: PackedWeight
    v_norm: bool = False  # a norm of v without a weight


class GatedDelta(NamedTuple):
    """The products of linear attention, its convolution, the gated delta rule, and the gated norm."""

    qkv: PackedWeight  # with the rows of the output gate
    gate: PackedWeight  # beta and alpha
    conv: torch.Tensor
    params: GatedDeltaParams
    weights: GatedDeltaWeights
    layer: int  # of the states
    input_norm: torch.Tensor
    input_eps: float
    following: PackedWeight


class ShortConv(NamedTuple):
    """The product with b, c and v, and c * conv(b * v)."""

    qkv: PackedWeight  # rows of b, c and v
    conv: torch.Tensor
    activation: str
    layer: int  # of the states
    following: PackedWeight
    gate: PackedWeight | None = None


class GatedLinear(NamedTuple):
    """The product with gate and up, and activation(gate) * up."""

    w: PackedWeight
    activation: str
    following: PackedWeight
    factor: float | None = None  # power of two that brings every result within float16; None: unknown


class PerLayerGate(NamedTuple):
    """The product with a gate, and activation(gate) * inputs of the layer."""

    w: PackedWeight
    layer: int
    activation: str
    following: PackedWeight


class LinearAdd(NamedTuple):
    """A product, in some families its norm, added to the residual stream, which is stored as it is."""

    w: PackedWeight
    bias: torch.Tensor | None
    post: torch.Tensor | None  # weight of the norm of the product
    eps: float
    following: PackedWeight


class LinearAddNorm(NamedTuple):
    """A product, in some families its norm, added to the residual stream, whose norm is stored."""

    w: PackedWeight
    bias: torch.Tensor | None
    post: torch.Tensor | None  # weight of the norm of the product
    norm: torch.Tensor
    eps: float  # of both norms
    following: PackedWeight
    scale: float = 1.0  # of the stream once the product is added


class SharedExpert(NamedTuple):
    """The gated MLP that all tokens use, and the matrix of the logit whose sigmoid multiplies it."""

    gate_up: PackedWeight
    down: PackedWeight
    gate: PackedWeight | None


class ParallelMLP(NamedTuple):
    """The last product of an MLP parallel to the experts, its norm, and the norm of the experts' sum, both added."""

    down: PackedWeight
    norm: torch.Tensor
    experts_norm: torch.Tensor


class ExpertsAddNorm(NamedTuple):
    """A mixture of experts, in some families its norm, added to the residual stream, whose norm is stored."""

    router: PackedWeight
    router_bias: torch.Tensor | None
    params: RouteParams
    selection_bias: torch.Tensor | None
    expert_scales: torch.Tensor | None  # of the weights of experts
    w: PackedExperts  # gate and up
    bias: torch.Tensor | None
    activation: str
    down: PackedExperts
    down_bias: torch.Tensor | None
    shared: SharedExpert | None
    parallel: ParallelMLP | None
    router_norm: torch.Tensor  # of the stream, which the router reads
    input_norm: torch.Tensor  # likewise all other products
    input_eps: float
    post: torch.Tensor | None
    norm: torch.Tensor
    eps: float
    following: PackedWeight
    scale: float = 1.0  # of the stream once the experts are added


class Logits(NamedTuple):
    """The output head."""

    head: PackedWeight
    soft_cap: float


Mixer = Attention | GatedDelta | ShortConv  # the first op of a layer
Start = EmbedNorm | EmbedInputs | StreamNorm  # before the first layer
FusedOp = Start | Mixer | GatedLinear | PerLayerGate | LinearAdd | LinearAddNorm | ExpertsAddNorm | Logits


def fuse_graph(graph: Graph) -> tuple[Sequence[Node], tuple[FusedOp, ...]] | None:
    """Return the fused nodes and ops of a step; None if an op is left that none of them covers."""
    fused = apply_rewrites(graph, REWRITES)
    if not all(node.fused for node in fused.nodes) or any(map(_needs_order, graph.nodes)):
        return None
    readers = {value: node for node in reversed(fused.nodes) for value in node.inputs}  # the first of each
    norms = {node.outputs[0]: node for node in graph.nodes if node.op in ("rms_norm", "add_rms_norm")}
    ops = tuple(_fused_op(node, _following(node, readers), norms) for node in fused.nodes)
    return (fused.nodes, ops) if _is_chain(fused.nodes) else None


def without_adapters(graph: Graph) -> tuple[Graph, dict[int, LoraSite]] | None:
    """Return a graph without the ops of adapters, and their sites by the identities of weights; None if adapters change
    more than dense products: these run op by op."""
    sites: dict[int, LoraSite] = {}
    plain: dict[Any, Any] = {}
    products = {node.output: node for node in graph.nodes if node.op == "linear"}
    routers = {node["logits"] for node in graph.nodes if node.op == "route"}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "shrink":
            continue
        if node.op == "expand":
            if (product := products.get(node["out"])) is None or node.output in routers:
                return None
            sites[id(product["w"])] = node["site"]
            plain[node.output] = node["out"]
            continue
        args = {
            name: plain.get(value, value) if isinstance(value, Value) else value for name, value in node.args.items()
        }
        nodes.append(Node(node.op, args, node.outputs))
    hidden = None if graph.hidden is None else plain.get(graph.hidden, graph.hidden)
    return Graph(tuple(nodes), plain.get(graph.output, graph.output), hidden), sites


def without_hidden(graph: Graph) -> Graph | None:
    """Return a graph without the op of its hidden states, which the residual stream gives; None if others read them, or
    if hidden states come with the batch."""
    if any(value is graph.hidden or value.name == "hidden" for node in graph.nodes for value in node.inputs):
        return None
    nodes = tuple(node for node in graph.nodes if graph.hidden is None or graph.hidden not in node.outputs)
    return Graph(nodes, graph.output)


def _needs_order(node: Node) -> bool:
    """Return whether a product reads its activations in another order than they are made."""
    w = {"linear": "w", "logits": "head"}.get(node.op)
    return w is not None and node[w].order is not None


def _is_chain(nodes: Sequence[Node]) -> bool:
    """Return whether each op reads the result of the one before it, and the residual stream, if any: launches do."""
    outputs: set[Any] = set(nodes[0].inputs)
    stream = None
    for node in nodes:
        if not outputs & set(node.inputs) or (node.op == "stream_norm" and node.fused[0]["x"] is not stream):
            return False
        add = node.fused[-1]
        if add.op in ("add_rms_norm", "add"):
            taken = {take.output: take["x"] for take in node.parts("take")}
            if taken.get(add["residual"], add["residual"]) is not stream:
                return False
            stream = add.outputs[-1]
        if node.op in ("embed_norm", "embed_inputs"):
            stream = node.fused[0].output
        stores_stream = node.op in ("embed_inputs", "linear_add")
        outputs = {stream} if stores_stream else set(node.outputs) - {stream}
    return True


def distinct_layers(ops: Sequence[FusedOp]) -> list[FusedOp]:
    """Return a shorter program that launches every kernel of the layers: one layer of each kind, each after the
    embedding."""
    layers: dict[Any, list[FusedOp]] = {}
    starts = [i for i, op in enumerate(ops) if isinstance(op, Mixer)]
    *before, norm = ops[: starts[0]]
    assert isinstance(norm, EmbedNorm | StreamNorm)
    for first, end in zip(starts, [*starts[1:], len(ops) - 1], strict=True):
        layer = list(ops[first:end])
        layers.setdefault(tuple(map(_kernel_signature, layer)), layer)
    program: list[FusedOp] = []
    for layer in layers.values():
        assert isinstance(layer[0], Mixer)
        program += [*before, norm._replace(following=layer[0].qkv), *layer]
    return program


def _kernel_signature(value: Any) -> Any:
    """Return the properties that kernels are compiled for: shapes, types and flags, not values."""
    if isinstance(value, PackedWeight):
        return tuple((part.kind, part.rows, part.columns, _kernel_signature(part.values)) for part in value.parts)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, AttentionParams | GatedDeltaParams):
        return value
    if isinstance(value, RopeTable):
        return len(value.inv_freq), value.temperature_beta != 0
    if isinstance(value, tuple):
        return type(value), tuple(_kernel_signature(field) for field in value)
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value == 1.0  # a scale of 1 is left out of kernels
    return None if isinstance(value, int) else value


def with_gate_factors(ops: Sequence[FusedOp]) -> tuple[FusedOp, ...]:
    """Return ops whose gates know the factor that brings their results within float16.

    The norm n of a row has a length of sqrt(columns) at most, so that row w of a matrix gives at most sqrt(columns)
    times the length of w * weight of the norm; no activation is larger than its gate."""
    bounded = list(ops)
    for i, (before, op) in enumerate(pairwise(ops), 1):
        if isinstance(op, GatedLinear) and isinstance(before, StreamNorm | LinearAddNorm | ExpertsAddNorm):
            bounded[i] = op._replace(factor=_gate_factor(op, before.norm))
    return tuple(bounded)


def _gate_factor(op: GatedLinear, norm: torch.Tensor) -> float | None:
    part, *more = op.w.parts
    if more or part.kind not in SCALE_LAYOUT or op.activation == "swiglu_oai":  # which adds to what it multiplies
        return None
    gate, up = row_squares(part, norm).view(2, -1).amax(1).tolist()
    largest = sqrt(gate * up) * len(norm) * BOUND_SLACK
    return 2.0 ** (ceil(log2(largest)) - MAX_HALF_EXPONENT) if 0 < largest < inf else None


def _following(node: Node, readers: dict[Any, Node]) -> Any:
    """Return the matrix of the op that reads the activations of this one: its first result that a product reads."""
    for value in (value for part in node.fused for value in part.outputs):
        reader = readers.get(value)
        for part in () if reader is None else reader.fused:
            if part.op == "linear" and reader is not None and reader.op == "experts_add_norm":
                continue  # the experts determine the form of activations
            if part.op in ("linear", "logits", "grouped_linear") and part["x"] is value:
                return part["head" if part.op == "logits" else "w"]
    return None


def _fused_op(node: Node, following: Any, norms: Mapping[Any, Node]) -> FusedOp:
    first, last, between = node.fused[0], node.fused[-1], node.fused[1:-1]
    match node.op:
        case "embed_norm":
            return EmbedNorm(first["table"], first["scale"], last["weight"], last["eps"], following)
        case "embed_inputs":
            table, linear = between
            tables = first["table"], first["scale"], table["table"], table["scale"]
            return EmbedInputs(*tables, linear["w"], last["weight"], last["eps"])
        case "stream_norm":
            return StreamNorm(last["weight"], last["eps"], following)
        case "attention":
            return attention_op(node.fused, following)
        case "gated_attention":
            norm, gate = norms[first["x"]], node.fused[-2]["w"]
            op = attention_op(node.fused[:-2], following)
            return op._replace(gate=gate, input_norm=norm["weight"], input_eps=norm["eps"])
        case "gated_delta":
            norm, conv = norms[first["x"]], between[1]
            rule = last["params"], last["weights"], last["state"], norm["weight"], norm["eps"]
            return GatedDelta(first["w"], between[0]["w"], conv["weight"], *rule, following)
        case "short_conv":
            return ShortConv(first["w"], last["weight"], last["activation"], last["state"], following)
        case "gated_linear":
            return GatedLinear(first["w"], last["activation"], following)
        case "per_layer_gate":
            return PerLayerGate(first["w"], last["layer"], last["activation"], following)
        case "linear_add" | "linear_add_norm":
            return _linear_add(node, following)
        case "experts_add_norm":
            return _experts(node, following, norms[first["x"]])
        case "parallel_experts":
            return _parallel_experts(node, following)
        case _:
            return Logits(first["head"], first["soft_cap"])


def _linear_add(node: Node, following: Any) -> LinearAdd | LinearAddNorm:
    first, last, post = node.fused[0], node.fused[-1], node.part("rms_norm")
    weight = None if post is None else post["weight"]
    if last.op == "add":
        return LinearAdd(first["w"], first["bias"], weight, 0.0 if post is None else post["eps"], following)
    return LinearAddNorm(first["w"], first["bias"], weight, last["weight"], last["eps"], following, last["scale"])


def attention_op(parts: Sequence[Node], following: Any) -> Attention:
    """Return the fused op of the nodes from the QKV product to attention."""
    first, split, *of_heads, store, last = parts
    q_norm, k_norm, *_ = *(norm["weight"] for norm in of_heads), None, None
    return Attention(
        first["w"], first["bias"], q_norm, k_norm, of_heads[0]["eps"] if of_heads else 0.0, split["n_heads"],
        split["n_kv_heads"], split["head_dim"], store["table"], last["params"], store["kv"], last["sinks"],
        None, None, 0.0, following, len(of_heads) == 3,
    )  # fmt: skip


def _experts(node: Node, following: Any, norm: Node) -> ExpertsAddNorm:
    (route,), (gate_up, down), last = node.parts("route"), node.parts("grouped_linear"), node.fused[-1]
    router, post = _router(node), node.part("rms_norm")
    shared = [part["w"] for part in node.parts("linear") if part is not router]
    expert = SharedExpert(shared[0], shared[1], shared[2] if shared[2:] else None) if shared else None
    return ExpertsAddNorm(
        router["w"], router["bias"], route["params"], route["bias"], route["scales"], gate_up["w"], gate_up["bias"],
        node.parts("gated")[0]["activation"], down["w"], down["bias"], expert, None, norm["weight"], norm["weight"],
        norm["eps"], None if post is None else post["weight"], last["weight"], last["eps"], following, last["scale"],
    )  # fmt: skip


def _parallel_experts(node: Node, following: Any) -> ExpertsAddNorm:
    down, of_dense, of_router, of_experts, *parts = node.fused
    *_, of_sum, of_total = node.parts("rms_norm")
    op = _experts(Node(node.op, {}, node.outputs, tuple(parts)), following, of_experts)
    mlp = ParallelMLP(down["w"], of_dense["weight"], of_sum["weight"])
    return op._replace(parallel=mlp, router_norm=of_router["weight"], post=of_total["weight"])
