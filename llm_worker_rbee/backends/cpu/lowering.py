"""From the graph of a step to the tasks of a program: expansions, rewrites, and the tasks of every op.

    recorded         expanded                  fused by a rewrite
    embed                                      embed
    rms_norm, add_   quantize                  norm: [norm of the delta,] residual add, norm, activation quantization
    add                                        add: [norm of the delta,] residual add, activation quantization
    linear           [take_columns,] quantize, matmul, add_bias   linear
    rope_store       rope_angles (once)        rope_kv_write: split, [q, k and v norms,] rotation, write to the KV cache
    attention        split_work (once)         attention: prefill tiles, decode tiles, activation quantization
    gated                                      gated: activation(gate) * up, activation quantization
    causal_conv                                causal_conv: its gates, convolution, states, activation quantization
    layer_norm, add_ quantize                  layer_norm: residual add, norm, activation quantization
    activate                                   activate: activation, activation quantization
    mean_rows, take                            means of each request's rows, rows of some tokens
    merge, pool, join, clamp, interpolate, place_images   what models that see images have
    logits           quantize, matmul, soft_cap
    shrink, expand   shrink, expand (kernels/lora.py); expand adds in place
    route                                      route
    grouped_linear   group, gather (once for each choice of experts), quantize, grouped_matmul
    combine                                    combine

What lies between grouped products is kept by rows that are grouped by expert (kernels/experts.py). An op without tasks
here runs as the reference computes it, between two programs. Fused and single ops share their kernels, so the bits are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..graph import Graph, Node, Rewrite, Value, apply_rewrites, have_one_eps
from ..ops import ARRAYS, LOGITS, REQUESTS, TOKENS, Shape
from .experts import grouped_tasks
from .kernels import elementwise, encoder, experts, gated_delta, lora, per_layer_inputs, quantize_activations
from .kernels.attention import (
    NUMBERS_PER_TILE,
    WorkEntry,
    attention_tasks,
    can_quantize_output,
    partial_bytes,
    split_work_task,
)
from .kernels.causal_conv import causal_conv_task
from .kernels.elementwise import ACTIVATIONS, embed_task, head_norms_task
from .kernels.experts import GroupEntry
from .kernels.kv_layout import padded_dim
from .kernels.per_layer_inputs import gate_task, inputs_task
from .kernels.program import Step, Task
from .kernels.rope import angles_task, rope_store_task, temperature_of
from .linear import linear_tasks

WORK_NUMBERS = ((0, np.int64),) * (len(WorkEntry) - 1)  # entries for numbers, without an array
EXPERTS = "experts"
COUNTS: dict[Any, Step] = {TOKENS: Step.TOKENS, LOGITS: Step.NUM_LOGITS, REQUESTS: Step.REQUESTS}
FLOAT_INPUTS = ("hidden", "places", "images")  # arrays of a batch that a step copies to buffers
TOKEN_ARRAYS = {"ids": Step.TOKEN_IDS, "positions": Step.POSITIONS, "token_types": Step.TOKEN_TYPES}


def _is_of_rows(node: Node) -> bool:
    return len(node.fused[0]["x"].shape) == 2 and have_one_eps(node)


def _norms_the_delta(node: Node) -> bool:
    norm, (add,) = node.part("rms_norm"), node.parts("add")
    return _is_of_rows(node) and (norm is None or add["x"] is norm.output)


REWRITES = (
    Rewrite("norm", "rms_norm? take? take? add_rms_norm* quantize?", _is_of_rows),
    Rewrite("add", "rms_norm? add* quantize?", _norms_the_delta),
    Rewrite("norm", "rms_norm* quantize?", _is_of_rows),
    Rewrite("layer_norm", "add_layer_norm* quantize?"),
    Rewrite("layer_norm", "layer_norm* quantize?", _is_of_rows),
    Rewrite("activate", "activate* quantize"),
    Rewrite("rope_kv_write", "split_heads rms_norm? rms_norm? rms_norm? rope_store", have_one_eps),
    Rewrite("attention", "attention* quantize", lambda node: can_quantize_output(node.fused[0]["q"].shape[2])),
    Rewrite("gated_delta", "gated_delta* quantize", lambda node: gated_delta.can_quantize(node.fused[0]["params"])),
    Rewrite("sigmoid_gate", "sigmoid_gate* quantize"),
    Rewrite("gated", "gated* quantize", lambda node: node.fused[0]["activation"] in ACTIVATIONS),
    Rewrite(
        "per_layer_gate",
        "per_layer_gate* quantize",
        lambda node: node.fused[0]["activation"] in per_layer_inputs.ACTIVATIONS,
    ),
    Rewrite("causal_conv", "causal_conv* quantize", lambda node: node.fused[0].output.shape[1] % 32 == 0),
    Rewrite("linear", "matmul add_bias?"),
)


class _Expander:
    """Splits recorded ops into this backend's ops: a product quantizes its input, once for each input."""

    def __init__(self, graph: Graph) -> None:
        self.first: list[Node] = []  # what runs once, before the layers
        self.nodes: list[Node] = []
        self._shared: dict[Any, Value] = {}
        self._replaced: dict[Value, Value] = {}
        self._kv_heads: dict[int, int] = {}  # by layer of the cache
        self._groups: dict[Value, Value] = {}  # how values by rows are grouped
        self._grouped_inputs = {node["x"]: node for node in graph.nodes if node.op == "grouped_linear"}
        self._readers = {value: node.op for node in graph.nodes for value in node.inputs}
        self._producers = {value: node.op for node in graph.nodes for value in node.outputs}
        self._expanded = {node["out"]: node.output for node in graph.nodes if node.op == "expand"}
        self._readers = {
            value: self._readers.get(self._expanded.get(value, value), op) for value, op in self._readers.items()
        }
        for node in graph.nodes:
            self._expand(node)
        hidden = None if graph.hidden is None else self._new(graph.hidden)
        self.graph = Graph((*self.first, *self.nodes), self._new(graph.output), hidden)

    def _new(self, value: Any) -> Any:
        return self._replaced.get(value, value) if isinstance(value, Value) else value

    def _expand(self, node: Node) -> None:
        args = {name: self._new(value) for name, value in node.args.items()}
        if node.op == "linear":
            if node["x"] in self._grouped_inputs:  # of a router: the quantization follows the norm
                self._quantize(args["x"], self._grouped_inputs[node["x"]]["w"])
            self._replaced[node.output] = self._linear(node, args)
        elif node.op == "grouped_linear":
            self._replaced[node.output] = self._grouped_linear(args)
        elif node.op == "logits":
            self._replaced[node.output] = self._product(args["x"], args["head"].two_term(), "head")
        else:
            if node.op == "rope_store":
                table = args["table"]
                if args["k"].shape[1]:
                    self._kv_heads[args["kv"]] = args["k"].shape[1]
                args["angles"] = self._once(self.first, "rope_angles", id(table), (TOKENS,), table=table)
            elif node.op == "attention":
                heads, kv_heads = args["q"].shape[1], self._kv_heads[args["kv"]]
                args["n_kv_heads"] = kv_heads
                geometry = {"n_heads": heads, "n_kv_heads": kv_heads}
                args["work"] = self._once(self.first, "split_work", (heads, kv_heads), (TOKENS,), **geometry)
            elif node.op == "combine":
                args["groups"] = self._groups[args["x"]]
            outputs = node.outputs
            if node.op in ("shrink", "expand") and node["experts"] is not None:
                outputs = (self._adapter_rows(node, args),)
            if node.op == "gated" and args["gate_up"] in self._groups:
                args["groups"], by_pairs = self._groups[args["gate_up"]], node.output
                outputs = (Value((TOKENS, args["gate_up"].shape[1], by_pairs.shape[2])),)
                self._replaced[by_pairs], self._groups[outputs[0]] = outputs[0], args["groups"]
            self.nodes.append(Node(node.op, args, outputs))

    def _adapter_rows(self, node: Node, args: dict[str, Any]) -> Value:
        """Return the result of an adapter of experts by rows, as they are grouped."""
        chosen = args["experts"]
        k = chosen.shape[1]
        args["groups"] = groups = self._once(
            self.nodes, "group", chosen, (TOKENS,), experts=chosen, k=k, count=args["site"].num_experts
        )
        args["by_rows"] = args[ARRAYS[node.op][0]] in self._groups
        out = Value((TOKENS, experts.rows_per_token(k), node.output.shape[2]))
        self._replaced[node.output], self._groups[out] = out, groups
        return out

    def _grouped_linear(self, args: dict[str, Any]) -> Value:
        """Group the pairs and copy activations once for each choice of experts; the result is by rows."""
        x, w, chosen = args["x"], args["w"], args["experts"]
        k = chosen.shape[1]
        groups = self._once(self.nodes, "group", chosen, (TOKENS,), experts=chosen, k=k, count=w.count)
        inputs: dict[str, Value | None] = {"floats": None, "quantized": None, "floats_out": None, "quantized_out": None}
        if x in self._groups:
            inputs["floats_out"] = x if w.needs_floats else None
            inputs["quantized_out"] = self._quantize(x, w)
        else:
            inputs["floats"], inputs["quantized"] = x if w.needs_floats else None, self._quantize(x, w)
            for name in ("floats", "quantized"):
                if (source := inputs[name]) is not None:
                    fields = {"source": source, "groups": groups, "k": k, "is_float": name == "floats"}
                    inputs[f"{name}_out"] = self._once(self.nodes, "gather", (source, groups), source.shape, **fields)
        shape = (TOKENS, experts.rows_per_token(k), w.rows)
        out = self._emit(self.nodes, "grouped_matmul", shape, w=w, groups=groups, k=k, bias=args["bias"], **inputs)
        self._groups[out] = groups
        return out

    def _quantize(self, x: Value, w: Any, two_term: bool = False) -> Value | None:
        if not w.needs_int8:
            return None
        fields = {"groups": self._groups[x]} if x in self._groups else {}
        return self._once(self.nodes, "quantize", (x, two_term), x.shape, x=x, two_term=two_term, **fields)

    def _linear(self, node: Node, args: dict[str, Any]) -> Value:
        by_reader = {
            "split_heads": "qkv",
            "route": "router",
            "causal_conv": "conv_input",
            "gated_delta": "delta_input",
            "sigmoid_gate": "attention_gate",
            "per_layer_inputs": "per_layer_projection",
        }
        component = by_reader.get(self._readers.get(node.output, ""), "gate_up")
        by_producer = {
            "attention": "output",
            "gated": "down",
            "causal_conv": "conv_output",
            "gated_delta": "output",
            "sigmoid_gate": "output",
            "per_layer_gate": "down",
            "activate": "down",
        }
        component = by_producer.get(self._producers.get(node["x"], ""), component)
        out = self._product(args["x"], args["w"], component)
        return out if args["bias"] is None else self._emit(self.nodes, "add_bias", out.shape, x=out, bias=args["bias"])

    def _product(self, x: Value, w: Any, component: str) -> Value:
        if w.order is not None:
            x = self._once(self.nodes, "take_columns", (x, w.order.tobytes()), x.shape, x=x, order=w.order)
        quantized = self._quantize(x, w, any(w.residual_activations))
        floats, shape = x if w.needs_floats else None, (x.shape[0], w.rows)
        return self._emit(self.nodes, "matmul", shape, x=floats, quantized=quantized, w=w, component=component)

    def _emit(self, nodes: list[Node], op: str, shape: Shape, **args: Any) -> Value:
        nodes.append(Node(op, args, (Value(shape),)))
        return nodes[-1].output

    def _once(self, nodes: list[Node], op: str, key: Any, shape: Shape, **args: Any) -> Value:
        if (op, key) not in self._shared:
            self._shared[op, key] = self._emit(nodes, op, shape, **args)
        return self._shared[op, key]


def fuse(graph: Graph) -> Graph:
    """Return this backend's program for a recorded graph."""
    return apply_rewrites(_Expander(graph).graph, REWRITES)


Layout = tuple[tuple[int, Any], ...]  # (elements per row, type) of the arrays of a buffer, at adjacent entries


class Buffers:
    """Places of values in the step table; a place is reused after the last read of its value."""

    def __init__(self) -> None:
        self.layouts: dict[int, Layout] = {}  # by first entry
        self.end: int = Step.END
        self._free: dict[Layout, list[int]] = {}

    def allocate(self, layout: Layout) -> int:
        """Return the first entry of a buffer."""
        if free := self._free.get(layout):
            return free.pop()
        entry = self.end
        self.layouts[entry] = layout
        self.end += len(layout)
        return entry

    def release(self, entry: int) -> None:
        self._free.setdefault(self.layouts[entry], []).append(entry)


class HostCall(NamedTuple):
    """An op that Python runs between two programs."""

    node: Node
    inputs: dict[str, int]  # entries
    outputs: tuple[int, ...]


class Lowered(NamedTuple):
    """The tasks or host call of one node."""

    component: str  # of the model, for profiles
    node: Node
    work: list[Task] | HostCall

    @property
    def runs(self) -> str:
        """Return the names of its kernels."""
        if isinstance(self.work, HostCall):
            return f"reference.{self.node.op}, between two programs"
        return ", ".join(task.kernel.name for task in self.work)


class Lowering:
    """The tasks of a fused graph for a cache of one KV type, and the buffers that they use."""

    def __init__(self, graph: Graph, kv_type: str, threads: int, arguments: Iterable[Value] = ()) -> None:
        """Lower all ops; `arguments` are placed first, one entry after the other."""
        self.kv_type, self.threads = kv_type, threads
        self.buffers = Buffers()
        self.entries: dict[Value, int] = {graph.output: Step.LOGITS}
        self.parts: list[Lowered] = []
        self._held: list[NDArray[np.float32]] = []  # arrays that tasks read
        self._geometries: set[tuple[int, int, int]] = set()  # heads, KV heads and their size, of attention
        self.adapters: dict[Any, int] = {}  # the first `LoraEntry` for tokens, rows of logits, and tokens of experts
        self.last_uses, self.index = graph.last_uses(), 0
        for value in arguments:
            self._new(value)
        values = {value.name: value for node in graph.nodes for value in node.inputs}
        self.inputs = {name: self._new(values[name]) for name in FLOAT_INPUTS if name in values}  # entries
        if graph.nodes[-1].op == "expand":  # adds to the logits, in place
            self.entries[graph.nodes[-1]["out"]] = Step.LOGITS
        for self.index, node in enumerate(graph.nodes):
            lower = self._BY_OP.get(node.op)
            component, tasks = lower(self, node) if lower else ("host", self._host(node))
            self.parts.append(Lowered(component, node, tasks))
            inner = (value for part in node.fused for value in part.outputs)
            for value in dict.fromkeys((*node.inputs, *node.outputs, *inner)):
                if self.last_uses.get(value, -1) <= self.index and value in self.entries:
                    self._release(value)
        self.hidden_out = 0 if graph.hidden is None else self.entries[graph.hidden]

    def partial_bytes(self, positions: int) -> int:
        """Return the bytes that attention needs at `Step.PARTIALS` for block tables of so many positions."""
        return max((partial_bytes(*shape, self.threads, positions) for shape in self._geometries), default=0)

    def _release(self, value: Value) -> None:
        entry = self.entries.pop(value)
        if entry >= Step.END and entry not in self.entries.values():
            self.buffers.release(entry)

    def _new(self, value: Value, *layout: tuple[int, Any]) -> int:
        """Place a value: floats of its shape, if no layout is given."""
        if value not in self.entries:
            self.entries[value] = self.buffers.allocate(layout or ((_width(value), np.float32),))
        return self.entries[value]

    def _overwrite(self, value: Value, result: Value, tasks: list[Task]) -> int:
        """Place a result that is computed in place: over the value, or over a copy if the value is read again."""
        if self.last_uses[value] <= self.index:
            self.entries[result] = self.entries[value]
        else:
            count, width = COUNTS[value.shape[0]], _width(value)
            places = self.entries[value], self._new(result, (width, np.float32))
            tasks.append(elementwise.copy_task(count, *places, 1, width, width))
        return self.entries[result]

    def _activations(self, node: Node | None) -> int:
        """Place the quantized activations of a `quantize` op, if there is one; return their entry or 0."""
        if node is None:
            return 0
        return self._new_activations(node.output, _width(node["x"]) * (2 if node["two_term"] else 1))

    def _new_activations(self, value: Value, width: int) -> int:
        blocks = -(-width // 32)
        return self._new(value, *((count * blocks, dtype) for count, dtype in quantize_activations.BUFFERS))

    def _rope_angles(self, node: Node) -> tuple[str, list[Task]]:
        pairs = len(node["table"].inv_freq)
        entry = self._new(node.output, (pairs, np.float32), (pairs, np.float32))
        task = angles_task if node["table"].axes is None else encoder.axes_angles_task
        return "rope_angles", [task(node["table"], entry)]

    def _split_work(self, node: Node) -> tuple[str, list[Task]]:
        work = self._new(node.output, (node["n_heads"] * NUMBERS_PER_TILE, np.int64), *WORK_NUMBERS)
        return "attention_split", [split_work_task(node["n_heads"], node["n_kv_heads"], self.threads, work)]

    def _embed(self, node: Node) -> tuple[str, list[Task]]:
        (table,) = node["table"].parts
        return "embedding", [embed_task(table, node["scale"], self._new(node.output), TOKEN_ARRAYS[node["ids"].name])]

    def _norm(self, node: Node) -> tuple[str, list[Task]]:
        """Lower the norm with the norm of the delta and the residual add, both of which are done in place."""
        add, takes, quantize = node.part("add_rms_norm"), node.parts("take"), node.part("quantize")
        norms, tasks = node.parts("rms_norm"), list[Task]()
        main = add or norms[0]
        post = norms[0] if add and norms else None
        normed = main.outputs[0]
        source = takes[1]["x"] if takes else main["residual" if add else "x"]
        delta = (post or (takes[0] if takes else main))["x"] if add else source
        inputs = self.entries[delta], self.entries[source]
        if add and not takes:  # rows that are taken are copied by the kernel
            changed = self._overwrite(delta, post.output, tasks) if post else inputs[0]
            inputs = changed, self._overwrite(source, add.outputs[1], tasks)
        count, activations = COUNTS[normed.shape[0]], self._activations(quantize)
        floats = self._new(normed) if normed in node.outputs else 0
        outputs = floats, activations, Step.LOGITS_INDEX if takes else 0
        weights = main["weight"], 0 if post is None else post["weight"]
        two_term = quantize is not None and quantize["two_term"]
        tasks.append(
            elementwise.norm_task(
                count,
                *inputs,
                outputs,
                weights,
                len(main["weight"]),
                main["eps"],
                add_delta=add is not None,
                two_term=two_term,
                scale=add["scale"] if add else 1.0,
            )
        )
        return "norm", tasks

    def _layer_norm(self, node: Node) -> tuple[str, list[Task]]:
        """Lower the norm with the residual add, which is done in place."""
        add, quantize, tasks = node.part("add_layer_norm"), node.part("quantize"), list[Task]()
        main = add or node.fused[0]
        delta = self.entries[add["x"]] if add else 0
        source = self._overwrite(add["residual"], add.outputs[1], tasks) if add else self.entries[main["x"]]
        normed, activations = main.outputs[0], self._activations(quantize)
        outputs = self._new(normed) if normed in node.outputs else 0, activations
        two_term, weights = quantize is not None and quantize["two_term"], (main["weight"], main["bias"])
        count = COUNTS[normed.shape[0]]
        tasks.append(encoder.layer_norm_task(count, delta, source, outputs, weights, main["eps"], two_term=two_term))
        return "norm", tasks

    def _activate(self, node: Node) -> tuple[str, list[Task]]:
        (activate,), activations = node.parts("activate"), self._activations(node.part("quantize"))
        out = activate.output
        floats, count = self._new(out) if out in node.outputs else 0, COUNTS[out.shape[0]]
        places = self.entries[activate["x"]], floats, activations
        return "activation", [encoder.activate_task(count, *places, _width(out), activate["activation"])]

    def _mean_rows(self, node: Node) -> tuple[str, list[Task]]:
        places = self.entries[node["x"]], self._new(node.output)
        return "pooling", [encoder.mean_rows_task(*places, _width(node.output))]

    def _take(self, node: Node) -> tuple[str, list[Task]]:
        places = self.entries[node["x"]], self._new(node.output)
        return "pooling", [encoder.take_rows_task(*places, _width(node.output))]

    def _merge(self, node: Node) -> tuple[str, list[Task]]:
        places, task = (self.entries[node["x"]], self._new(node.output)), encoder.MERGE_TASKS[node.op]
        return "merger", [task(*places, _width(node["x"]), node["count"])]

    def _join(self, node: Node) -> tuple[str, list[Task]]:
        x, y = node["x"], node["y"]
        places = self.entries[x], self.entries[y], self._new(node.output)
        return "merger", [encoder.join_task(COUNTS[x.shape[0]], *places, (_width(x), _width(y)))]

    def _clamp(self, node: Node) -> tuple[str, list[Task]]:
        places = self.entries[node["x"]], self._new(node.output)
        return "clamp", [encoder.clamp_task(COUNTS[node.output.shape[0]], *places, node["low"], node["high"])]

    def _interpolate(self, node: Node) -> tuple[str, list[Task]]:
        places = self.entries[node["places"]], self._new(node.output)
        return "embedding", [encoder.interpolate_task(node["table"], *places)]

    def _place_images(self, node: Node) -> tuple[str, list[Task]]:
        tasks, x, images = list[Task](), node["x"], node["images"]
        entry = self._overwrite(x, node.output, tasks)
        widths = _width(x), _width(images)
        tasks.append(encoder.place_task(entry, self.entries[images], *widths, node["part"], adds=node["adds"]))
        return "images", tasks

    def _add(self, node: Node) -> tuple[str, list[Task]]:
        """Lower the residual add with the norm of the delta, both of which are done in place."""
        (add,), post, quantize = node.parts("add"), node.part("rms_norm"), node.part("quantize")
        tasks, delta = list[Task](), (post or add)["x"]
        changed = self._overwrite(delta, post.output, tasks) if post else self.entries[delta]
        stream = self._overwrite(add["residual"], add.output, tasks)
        activations, two_term = self._activations(quantize), quantize is not None and quantize["two_term"]
        weight, eps = (post["weight"], post["eps"]) if post else (0, 0.0)
        count, width = COUNTS[add.output.shape[0]], _width(add.output)
        tasks.append(elementwise.add_task(count, changed, stream, activations, weight, width, eps, two_term=two_term))
        return "add", tasks

    def _rope_kv_write(self, node: Node) -> tuple[str, list[Task]]:
        """Lower the q, k and v norms, which are done in place, the rotation and the write."""
        (split,), norms, (store,) = node.parts("split_heads"), node.parts("rms_norm"), node.parts("rope_store")
        heads, kv_heads, dim = split["n_heads"], split["n_kv_heads"], split["head_dim"]
        qkv, tasks = self.entries[split["qkv"]], list[Task]()
        if norms:
            qkv, weights = self._overwrite(split["qkv"], norms[0].output, tasks), {n["x"]: n["weight"] for n in norms}
            norm_weights = [weights.get(value) for value in split.outputs]
            tasks.append(head_norms_task(qkv, (heads, kv_heads), dim, norm_weights, norms[0]["eps"]))
        queries = self._new(store.output, (heads * padded_dim(dim), np.float32))
        pairs, angles = len(store["table"].inv_freq), self.entries[store["angles"]]
        tasks.append(rope_store_task(store["kv"], angles, pairs, heads, kv_heads, dim, self.kv_type, qkv, queries,
                                     temperature_of(store["table"])))  # fmt: skip
        return "rope_kv_write", tasks

    def _attention(self, node: Node) -> tuple[str, list[Task]]:
        (attention,), quantize = node.parts("attention"), node.part("quantize")
        _, heads, dim = attention["q"].shape
        self._geometries.add((heads, attention["n_kv_heads"], dim))
        padded, activations = padded_dim(dim), self._activations(quantize)
        out = attention.outputs[0]
        whole = self._new(out) if padded == dim else self.buffers.allocate(((heads * padded, np.float32),))
        places = self.entries[attention["q"]], whole, self.entries[attention["work"]]
        tasks = attention_tasks(
            attention["kv"],
            heads,
            attention["n_kv_heads"],
            dim,
            attention["params"],
            self.kv_type,
            *places,
            activations,
            attention["sinks"],
        )
        if padded != dim:
            tasks.append(elementwise.copy_task(Step.TOKENS, whole, self._new(out), heads, dim, padded))
            self.buffers.release(whole)
        return "attention", tasks

    def _quantize(self, node: Node) -> tuple[str, list[Task]]:
        x, width = node["x"], _width(node["x"])
        count: int = COUNTS[x.shape[0]]
        if (groups := node.args.get("groups")) is not None:
            count, width = self.entries[groups] + GroupEntry.ROWS, x.shape[-1]
        entries = self.entries[x], self._activations(node)
        return "quantize", [elementwise.quantize_task(count, *entries, width, two_term=node["two_term"])]

    def _take_columns(self, node: Node) -> tuple[str, list[Task]]:
        entries = self.entries[node["x"]], self._new(node.output)
        return "gather", [elementwise.take_columns_task(COUNTS[node["x"].shape[0]], *entries, node["order"])]

    def _gated(self, node: Node) -> Any:
        (gate,) = node.parts("gated")
        if gate["activation"] not in ACTIVATIONS:
            return "host", self._host(node)
        source, out = self.entries[gate["gate_up"]], gate.outputs[0]
        activations = self._activations(node.part("quantize"))
        floats = self._new(out) if out in node.outputs else 0
        counts = tuple[int, ...]()
        if (groups := gate.args.get("groups")) is not None:
            counts = tuple(self.entries[groups] + number for number in (GroupEntry.ROWS, GroupEntry.PANEL_ROWS))
        half = cast(int, out.shape[-1])
        return "activation", [elementwise.gated_task(source, floats, activations, half, gate["activation"], *counts)]

    def _gated_delta(self, node: Node) -> Any:
        (delta,) = node.parts("gated_delta")
        if not gated_delta.has_kernel(delta["params"]):
            return "host", self._host(node)
        entries = [self.entries[delta[name]] for name in ("qkv", "z", "gates")]
        outputs = self._new(delta.output), self._activations(node.part("quantize"))
        task = gated_delta.gated_delta_task(
            delta["state"], entries, _width(delta["z"]), outputs, delta["params"], delta["weights"]
        )
        return "gated_delta", [task]

    def _sigmoid_gate(self, node: Node) -> tuple[str, list[Task]]:
        (gate,) = node.parts("sigmoid_gate")
        out, x, by = gate.output, self.entries[gate["x"]], self.entries[gate["gate"]]
        activations = self._activations(node.part("quantize"))
        floats = self._new(out) if out in node.outputs else 0
        return "gate", [elementwise.sigmoid_gate_task(x, by, floats, activations, _width(out))]

    def _per_layer_inputs(self, node: Node) -> tuple[str, list[Task]]:
        places = self.entries[node["x"]], self.entries[node["tokens"]], self._new(node.output)
        runs = _width(node["x"]) // len(node["weight"])
        return "per_layer_inputs", [inputs_task(*places, runs, node["weight"], node["eps"])]

    def _per_layer_gate(self, node: Node) -> Any:
        (gate,), quantize = node.parts("per_layer_gate"), node.part("quantize")
        if gate["activation"] not in per_layer_inputs.ACTIVATIONS:
            return "host", self._host(node)
        out, activations = gate.outputs[0], self._activations(quantize)
        floats = self._new(out) if out in node.outputs else 0
        places = self.entries[gate["x"]], self.entries[gate["inputs"]], floats, activations
        two_term, widths = quantize is not None and quantize["two_term"], (_width(out), _width(gate["inputs"]))
        task = gate_task(places, *widths, gate["layer"], gate["activation"], two_term=two_term)
        return "per_layer_gate", [task]

    def _causal_conv(self, node: Node) -> tuple[str, list[Task]]:
        (conv,) = node.parts("causal_conv")
        activations, out = self._activations(node.part("quantize")), conv.output
        floats = self._new(out) if out in node.outputs else 0
        weight = np.ascontiguousarray(conv["weight"].T)
        self._held.append(weight)
        places = conv["state"], (self.entries[conv["x"]], _width(conv["x"])), floats, activations
        return "causal_conv", [causal_conv_task(*places, weight, conv["activation"], gated=conv["gated"])]

    def _linear(self, node: Node) -> tuple[str, list[Task]]:
        (product,), bias = node.parts("matmul"), node.part("add_bias")
        count, w = COUNTS[product.output.shape[0]], product["w"]
        floats, quantized = (0 if product[name] is None else self.entries[product[name]] for name in ("x", "quantized"))
        out = self._new(node.output)
        added = 0 if bias is None else bias["bias"]
        return product["component"], linear_tasks(w, count, floats, quantized, out, self.threads, added)

    def _route(self, node: Node) -> tuple[str, list[Task]]:
        params, logits, vectors = node["params"], node["logits"], (node["bias"], node["scales"])
        chosen, weights = node.outputs
        places = self.entries[logits], self._new(chosen, (params.k, np.int64)), self._new(weights)
        return "route", [experts.route_task(*places, logits.shape[1], params, *vectors)]

    def _group(self, node: Node) -> tuple[str, list[Task]]:
        groups = self._new(node.output, *experts.group_layout(node["k"]))
        return "route", [experts.group_task(self.entries[node["experts"]], groups, node["count"], node["k"])]

    def _gather(self, node: Node) -> tuple[str, list[Task]]:
        """Lower the copy of activations, of floats or quantized, by rows."""
        source, k = node["source"], node["k"]
        width, rows = _width(source), experts.rows_per_token(k)
        if node["is_float"]:
            pairs = (self.entries[source], self._new(node.output, (rows * width, np.float32))), (0, 0)
        else:
            pairs = (0, 0), (self.entries[source], self._new_activations(node.output, rows * width))
        return "gather", [experts.gather_task(self.entries[node["groups"]], k, width, *pairs)]

    def _grouped_matmul(self, node: Node) -> tuple[str, list[Task]]:
        names = ("floats", "floats_out"), ("quantized", "quantized_out")
        floats, quantized = ((self._entry(node[of_tokens]), self._entry(node[of_rows])) for of_tokens, of_rows in names)
        bias, out = 0 if node["bias"] is None else node["bias"], self._new(node.output)
        tasks = grouped_tasks(
            node["w"], self.entries[node["groups"]], node["k"], floats, quantized, out, bias, self.threads
        )
        return "experts_gate_up" if node["floats"] or node["quantized"] else "experts_down", tasks

    def _entry(self, value: Value | None) -> int:
        return 0 if value is None else self.entries[value]

    def _combine(self, node: Node) -> tuple[str, list[Task]]:
        x, weights, out = node["x"], node["weights"], node.output
        shared, places = node["shared"], self.entries[node["groups"]] + GroupEntry.PLACES
        inputs = self.entries[x], self.entries[weights], places, (self._entry(shared), self._entry(node["shared_gate"]))
        return "combine", [experts.combine_task(*inputs, self._new(out), _width(out), weights.shape[1])]

    def _adapter_entries(self, kind: Any) -> int:
        if kind not in self.adapters:
            self.adapters[kind] = self.buffers.allocate(((0, np.int64),) * len(lora.LoraEntry))
        return self.adapters[kind]

    def _adapt(self, node: Node) -> tuple[str, list[Task]]:
        """Lower `shrink`, or `expand`, which adds in place."""
        site, rows, values, tasks = node["site"], self._rows_of_experts(node), node.args.get("x"), list[Task]()
        groups = self._adapter_entries(EXPERTS if rows else node.output.shape[0])
        if node.op == "expand":
            places = self._overwrite(node["out"], node.output, tasks), self.entries[node["low"]]
        else:
            places = TOKEN_ARRAYS["ids"] if site.op == "embed" else self._entry(values), self._new(node.output)
        scale = node.args.get("scale", 1.0)
        return "adapters", [*tasks, lora.lora_task(node.op, site, groups, *places, self.threads, rows, scale)]

    def _rows_of_experts(self, node: Node) -> tuple[int, ...]:
        if (chosen := node["experts"]) is None:
            return ()
        return self.entries[node["groups"]], self.entries[chosen], chosen.shape[1], node["by_rows"]

    def _host(self, node: Node) -> HostCall:
        inputs = {name: self.entries[value] for name, value in node.args.items() if isinstance(value, Value)}
        return HostCall(node, inputs, tuple(self._new(value) for value in node.outputs))

    _BY_OP: ClassVar[dict[str, Callable[[Lowering, Node], Any]]] = {
        "rope_angles": _rope_angles, "split_work": _split_work, "embed": _embed, "norm": _norm,
        "layer_norm": _layer_norm, "activate": _activate, "mean_rows": _mean_rows, "take": _take, "add": _add,
        "merge": _merge, "pool": _merge, "join": _join, "clamp": _clamp,
        "interpolate": _interpolate, "place_images": _place_images,
        "rope_kv_write": _rope_kv_write, "attention": _attention, "quantize": _quantize,
        "take_columns": _take_columns, "gated": _gated, "gated_delta": _gated_delta, "sigmoid_gate": _sigmoid_gate,
        "per_layer_inputs": _per_layer_inputs, "per_layer_gate": _per_layer_gate, "causal_conv": _causal_conv,
        "linear": _linear, "route": _route, "group": _group, "gather": _gather, "grouped_matmul": _grouped_matmul,
        "combine": _combine, "shrink": _adapt, "expand": _adapt,
    }  # fmt: skip


def _width(value: Value) -> int:
    return prod(cast(tuple[int, ...], value.shape[1:]))
