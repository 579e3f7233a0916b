"""The minimum bytes and operations of the components of a step, counted from the model's graph and a batch.

Products read their weights as they are in the file, attention the keys and values that its queries may see; states are
read where a request starts from one, and written where they are kept. Activations are counted only where nothing else
is moved, since they stay in a cache; on a GPU not at all, since they may be of half the size and in its L2. So a limit
that follows is never too high.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from llm_worker_rbee.backends.graph import Graph, Node
from llm_worker_rbee.backends.ops import LOGITS, AttentionParams, Batch
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.models.kv_cache import KVCache
from llm_worker_rbee.weights import Checkpoint

from ..roofline import Limits, Work, product_arithmetic

FLOAT = 4  # bytes
# Components that one kernel computes together, and the parts that are counted.
FUSED = {
    "attention": ("scores", "softmax", "values"),
    "rope_kv_write": ("rope", "kv_write"),
    "rope_kv_attention": ("rope", "kv_write", "scores", "softmax", "values"),
    "embedding_norm": ("embedding", "norm"),
    "output_norm": ("output", "norm"),
    "gate_up_activation": ("gate_up", "activation"),
    "down_norm": ("down", "norm"),
}
# Components of products, by the op that reads their result, or by the one that made what they read.
BY_READER = {
    "split_heads": "qkv",
    "route": "router",
    "causal_conv": "conv_input",
    "gated_delta": "delta_input",
    "sigmoid_gate": "attention_gate",
    "per_layer_inputs": "per_layer_projection",
}
BY_PRODUCER = {
    "attention": "output",
    "gated_delta": "output",
    "sigmoid_gate": "output",
    "gated": "down",
    "causal_conv": "conv_output",
    "per_layer_gate": "down",
}
# operations for each value of the result; an exponential counts as one
NORM, ADD_NORM, GATED, ROPE, SOFTMAX = 4, 5, 4, 3, 4
DELTA_RULE = 7  # for each value of a state and token: decay, S^T k, the outer product, S^T q


# Products of a block, and the tensors that they are made of; others are counted as they are packed.
LAYERS = {
    "attention.qkv": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "attention.input": ("shortconv.in_proj",),
    "attention.output": ("attn_output", "shortconv.out_proj"),
    "mlp.gate_up": ("ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"),
    "mlp.down": ("ffn_down", "ffn_down_exps"),
    "mlp.router": ("ffn_gate_inp",),
    "mlp.shared.gate_up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "mlp.shared.down": ("ffn_down_shexp",),
    "mlp.shared_gate": ("ffn_gate_inp_shexp",),
}


class WeightInfo(NamedTuple):
    """A packed weight: its bytes in the file, its number of values, the arithmetic of its product."""

    bytes: int
    values: int
    arithmetic: str


def index_weights(model: Transformer, checkpoint: Checkpoint) -> dict[int, WeightInfo]:
    """Return the weights of a model, by the `id` of their packed form."""
    tensors = checkpoint.tensors
    table = tensors["token_embd.weight"]

    def info(weight: Any, *own: Any) -> dict[int, WeightInfo]:
        sizes = sum(t.nbytes for t in own), sum(t.size for t in own)
        return {id(weight): WeightInfo(*sizes, product_arithmetic(weight))}

    weights = info(model.embedding, table)
    for i, block in enumerate(model.blocks):
        for path, names in LAYERS.items():
            own = [tensors[key] for name in names if (key := f"blk.{i}.{name}.weight") in tensors]
            layer: Any = block
            for name in path.split("."):
                layer = getattr(layer, name, None)
            if layer is not None and sum(t.size for t in own) == packed_info(layer.weight).values:
                weights |= info(layer.weight, *own)
    return weights | info(model.head, tensors.get("output.weight") or table)


def packed_info(weight: Any) -> WeightInfo:
    """Return a weight as it is packed."""
    parts = getattr(weight, "parts", ()) or [part for matrix in weight.matrices for part in matrix.parts]
    count = getattr(weight, "count", len(getattr(weight, "matrices", [0])))
    size, values = sum(part.nbytes for part in parts), count * weight.rows * weight.columns
    return WeightInfo(size, values, product_arithmetic(weight))


class Pairs(NamedTuple):
    """The pairs that attention of one layer computes and reads."""

    pairs: int  # of a query and a key that it may see
    keys: int  # that some query may see


def attention_pairs(batch: Batch, params: AttentionParams) -> Pairs:
    """Count for all requests of a batch; a key is read once a request."""
    pairs = keys = 0
    for r, length in enumerate(batch.context_len.tolist()):
        start, end = int(batch.query_start[r]), int(batch.query_start[r + 1])
        window = params.window or length
        seen = [min(p + 1, window) for p in batch.positions[start:end].tolist()]
        pairs += sum(seen)
        keys += min(length, max(seen, default=0) + end - start - 1)
    return Pairs(pairs, keys)


class WorkCounter:
    """Counts the work of steps of one model."""

    def __init__(self, model: Transformer, checkpoint: Checkpoint, cache: KVCache) -> None:
        self._on_device = model.ops.has_device_memory
        self._float_arithmetic = "float16" if self._on_device else "float32"
        self._weights, self._graph = index_weights(model, checkpoint), model.graph()
        self._components, self._experts = linear_components(self._graph), model.config.experts
        self._resident = float(checkpoint.nbytes)  # each weight is read once a step, so none is in a cache by then
        tokens = cache.n_blocks * cache.block_size
        self._kv_bytes = [sum(array.nbytes for array in layer) / tokens for layer in cache.layers]  # of a token

    def count(self, batch: Batch) -> dict[str, Counter[Work]]:
        """Return the calls of each component in a step, by their work."""
        counts: dict[str, Counter[Work]] = {}
        pairs: dict[AttentionParams, Pairs] = {}
        for node in self._graph.nodes:
            if node.op == "attention" and node["params"] not in pairs:
                pairs[node["params"]] = attention_pairs(batch, node["params"])
            for component, work in self._of_node(node, batch, pairs):
                if self._on_device and work.resident is None:
                    continue
                counts.setdefault(component, Counter())[work] += 1
        logits = float(len(batch.logits_index) * self._graph.nodes[-1]["head"].rows)
        if not self._on_device:
            counts["sampling"] = Counter([Work(FLOAT * logits, logits)])
        return counts

    def _of_node(self, node: Node, batch: Batch, pairs: Mapping[AttentionParams, Pairs]) -> Iterator[tuple[str, Work]]:
        sizes: dict[Any, int] = {LOGITS: len(batch.logits_index)}

        def values(name: str) -> float:
            rows, *rest = node[name].shape
            return float(sizes.get(rows, len(batch.ids)) * prod(rest))

        match node.op:
            case "embed":
                weight = self._weights.get(id(node["table"])) or packed_info(node["table"])
                outputs = float(len(batch.ids) * node["table"].columns)
                yield "embedding", Work(weight.bytes * outputs / weight.values + FLOAT * outputs, outputs)
            case "rms_norm":
                component = "norm" if len(node["x"].shape) == 2 else "rope"  # of q and k
                yield component, Work(2 * FLOAT * values("x"), NORM * values("x"))
            case "add_rms_norm":
                yield "norm", Work(4 * FLOAT * values("x"), ADD_NORM * values("x"))
            case "linear":
                yield self._components[node], self._product(node["w"], values("x") / node["w"].columns)
            case "grouped_linear":
                yield self._components[node], self._grouped_product(node, len(batch.ids))
            case "rope_store":
                rotated = values("q") + values("k")
                yield "rope", Work(2 * FLOAT * rotated, ROPE * rotated)
                yield "kv_write", Work(2 * FLOAT * values("k") + self._kv_bytes[node["kv"]] * len(batch.ids))
            case "attention":
                _, heads, dim = node["q"].shape
                yield from self._attention(heads, dim, pairs[node["params"]], self._kv_bytes[node["kv"]])
            case "causal_conv":
                channels, kernel = node["weight"].shape
                state, outputs = channels * (kernel - 1), len(batch.ids) * channels
                yield "causal_conv", self._state_work(batch, state, 2.0 * kernel * outputs)
            case "gated_delta":
                params = node["params"]
                state = params.v_heads * params.k_dim * params.v_dim
                yield "gated_delta", self._state_work(batch, state, float(DELTA_RULE * len(batch.ids) * state))
            case "gated":
                yield "activation", Work(1.5 * FLOAT * values("gate_up"), GATED / 2 * values("gate_up"))
            case "logits":
                yield "head", self._product(node["head"], len(batch.logits_index))

    def _product(self, weight: Any, rows: float) -> Work:
        packed = self._weights.get(id(weight)) or packed_info(weight)
        return Work(packed.bytes, 2.0 * rows * packed.values, self._resident, packed.arithmetic)

    def _grouped_product(self, node: Node, tokens: int) -> Work:
        """Count the experts that are chosen: of several tokens, those that are expected."""
        packed, experts = self._weights.get(id(node["w"])) or packed_info(node["w"]), self._experts
        assert experts is not None
        operations = 2.0 * tokens * packed.values * experts.share()
        return Work(packed.bytes * experts.share(tokens), operations, self._resident, packed.arithmetic)

    def _state_work(self, batch: Batch, values: int, operations: float) -> Work:
        """Count the states of `values` each that requests start from, and the states that are written."""
        moved = int((batch.state_in >= 0).sum() + (batch.state_out >= 0).sum())
        return Work(float(FLOAT * values * moved), operations, self._resident, self._float_arithmetic)

    def _attention(self, heads: int, dim: int, pairs: Pairs, kv_bytes: float) -> Iterator[tuple[str, Work]]:
        """Every query meets its keys twice (scores, values), and half of what is read of the cache are keys."""
        operations = 2.0 * heads * dim * pairs.pairs
        half = kv_bytes * pairs.keys / 2
        yield "scores", Work(half, operations, self._resident, self._float_arithmetic)
        yield "softmax", Work(0.0, SOFTMAX * heads * pairs.pairs)
        yield "values", Work(half, operations, self._resident, self._float_arithmetic)


def linear_components(graph: Graph) -> dict[Node, str]:
    """Return the component of each product, from the op that it reads and the op that reads it."""
    readers = {value: node.op for node in graph.nodes for value in node.inputs}
    producers = {value: node.op for node in graph.nodes for value in node.outputs}
    names = {}
    for node in graph.nodes:
        producer = producers.get(node["x"], "") if node.op in ("linear", "grouped_linear") else ""
        if node.op == "linear":
            names[node] = BY_PRODUCER.get(producer, BY_READER.get(readers.get(node.output, ""), "gate_up"))
        elif node.op == "grouped_linear":
            names[node] = "experts_down" if producer == "gated" else "experts_gate_up"
    return names


def limit_of(component: str, counted: Mapping[str, Counter[Work]], limits: Limits) -> dict[str, Any]:
    """Return bytes, operations and least time of a component in one step; nothing where nothing is counted."""
    parts = [pair for name in FUSED.get(component, (component,)) for pair in counted.get(name, Counter()).items()]
    if not parts:
        return {}
    if component in FUSED:  # what one part writes for the next stays inside the kernel
        parts = [(work if work.resident is not None else work._replace(bytes=0.0), n) for work, n in parts]
    times = [(limits.times(work), n) for work, n in parts]
    memory_s, arithmetic_s = (sum(both[i] * n for both, n in times) for i in range(2))
    one_by_one = sum(max(both) * n for both, n in times)
    return {
        "bytes": sum(work.bytes * n for work, n in parts),
        "operations": sum(work.operations * n for work, n in parts),
        "limit_s": max(memory_s, arithmetic_s) if component in FUSED else one_by_one,
        "bound_by": "memory" if memory_s >= arithmetic_s else "arithmetic",
        "arithmetic": max(parts, key=lambda part: part[0].operations)[0].arithmetic,
    }
