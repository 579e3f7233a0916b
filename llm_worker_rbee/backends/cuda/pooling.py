"""The fused forward of a pooling model: the recorded ops in their order, neighbours fused around each product.

A value is held in the forms in which it is read: as activations of a product, as float32 rows, or both. Ops of no
rewrite, of which there are few before the first layer and after the last, run as single ops. A step is neither padded
nor captured in a graph: its launches run ahead of the device, which the host waits for when it copies the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..graph import Graph, Node, ProgramLine, Rewrite, Value, apply_rewrites, op_names
from ..ops import Backend, Batch, LayerCache, Profiler, RopeTable
from . import encoder_kernels, profile
from .attention_prefill import (
    QUERY_TILE,
    SMALL_QUERY_TILE,
    QueryTiles,
    launch_prefill_attention,
    query_dtype,
    query_tiles,
)
from .device import activate, as_memory_error
from .elementwise import ACTIVATIONS
from .encoder_kernels import Product, Results, launch_activation, launch_norm
from .fused_ops import ATTENTION, Attention, attention_op, has_attention_kernels
from .linear import BatchedLinear
from .packed_weight import Activations, PackedWeight
from .rope import CosSin, launch_rope_store, rope_tables
from .step_inputs import InputStaging

NORMS = ("layer_norm", "rms_norm")
MIN_POSITIONS = 512  # of the first cos and sin tables


def _reads_rows(node: Node) -> bool:
    """The product reads its activations in the order in which they are made."""
    return node.fused[0]["w"].order is None


def _has_activation_kernel(node: Node) -> bool:
    last = node.fused[-1]
    known = ACTIVATIONS if last.op == "gated" else encoder_kernels.ACTIVATIONS
    return last["activation"] in known and _reads_rows(node)


def _has_norm_kernel(node: Node) -> bool:
    """The product, or its RMS norm, is what is added; norms are of whole rows."""
    linear, *posts, add = node.fused
    links = [linear.output, *(post.output for post in posts)]
    is_chain = [*(post["x"] for post in posts), add["x"]] == links
    return is_chain and all(norm["weight"].dim() == 1 for norm in (*posts, add)) and _reads_rows(node)


def _is_of_rows(node: Node) -> bool:
    (norm,) = node.fused
    return len(norm["x"].shape) == 2 and norm["weight"].dim() == 1


REWRITES = (
    Rewrite("attention", ATTENTION, lambda node: has_attention_kernels(node) and _reads_rows(node)),
    Rewrite("linear_activation", "linear activate", _has_activation_kernel),
    Rewrite("linear_activation", "linear gated", _has_activation_kernel),
    Rewrite("linear_add_norm", "linear rms_norm? add_layer_norm", _has_norm_kernel),
    Rewrite("linear_add_norm", "linear rms_norm? add_rms_norm", _has_norm_kernel),
    *(Rewrite("norm", name, _is_of_rows) for name in NORMS),
)
LAUNCHES = {
    "attention": "gemm, rope_store_qkv, prefill_attention",
    "linear_activation": "gemm, activate_rows",
    "linear_add_norm": "gemm, add_norm_rows",
    "norm": "add_norm_rows",
}


class Readers(NamedTuple):
    """Who reads a value: products, by the first matrix of each form, and others, which read float32 rows."""

    matrices: tuple[PackedWeight, ...]
    needs_rows: bool


class Held(NamedTuple):
    """A value of the step in progress."""

    rows: Any = None  # float32; of heads any type
    activations: Activations | None = None


class StepArrays(NamedTuple):
    """The arrays of a step on the device."""

    positions: torch.Tensor
    slots: torch.Tensor
    tiles: QueryTiles


class PoolingForward:
    """The fused forward of a pooling model on one device."""

    graph_bytes = 0

    def __init__(self, graph: Graph, ops: Backend, device: torch.device, linear: BatchedLinear) -> None:
        self.graph = apply_rewrites(graph, REWRITES)
        self.ops, self.device, self.linear = ops, device, linear
        self.mark: Callable[[str], None] = lambda component: None
        self._staging = InputStaging(device)
        self._readers = _find_readers(self.graph)
        self._attention = {
            node: attention_op(node.fused, self._following(node)) for node in self.graph.nodes if node.op == "attention"
        }
        self._ropes: dict[int, CosSin] = {}  # by id of the RoPE table
        self._num_positions = 0
        last = self.graph.last_uses()
        self._last_reads: dict[int, list[Value]] = defaultdict(list)
        for value, index in last.items():
            self._last_reads[index].append(value)

    def __call__(self, batch: Batch, kv: Sequence[LayerCache]) -> torch.Tensor:
        """Launch a step; return its rows, float32 on the device."""
        activate(self.device)
        with as_memory_error():
            return _Step(self, batch, kv).run()

    def with_hidden(self, batch: Batch, kv: Sequence[LayerCache]) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("a pooling model has no hidden states beside its rows")

    def program(self, kv_type: str) -> list[ProgramLine]:
        nodes = self.graph.nodes
        return [ProgramLine(node.op, op_names(node), LAUNCHES.get(node.op, "a single op")) for node in nodes]

    def run_profiled(self, batch: Batch, kv: Sequence[LayerCache], profiler: Profiler) -> torch.Tensor:
        activate(self.device)
        return profile.run(self, lambda: _Step(self, batch, kv).run(), profiler)

    def readers(self, value: Value) -> Readers:
        return self._readers[value]

    def attention_of(self, node: Node) -> Attention:
        return self._attention[node]

    def last_reads(self, index: int) -> Sequence[Value]:
        """Return the values that no node after this one reads."""
        return self._last_reads.get(index, ())

    def upload(self, batch: Batch) -> StepArrays:
        """Copy the arrays of a step to the device, and make RoPE tables for its positions."""
        self._reserve_positions(int(batch.context_len.max()))
        is_small = self.linear.batch_invariant or batch.context_len.max() <= SMALL_QUERY_TILE
        queries = SMALL_QUERY_TILE if is_small else QUERY_TILE
        requests, first = query_tiles(batch.query_start, queries)
        arrays = {
            "positions": batch.positions, "slots": batch.slot_mapping, "tables": batch.block_table,
            "width": np.array([batch.block_table.shape[1]]), "query_start": batch.query_start,
            "context_len": batch.context_len, "count": np.array([len(first)]), "request": requests, "first": first,
        }  # fmt: skip
        rooms = {name: (array.size, array, 0) for name, array in arrays.items()}
        found = self._staging.copy_to_device(batch, rooms, is_static=False)
        positions, slots, *of_tiles = found.values()
        return StepArrays(positions, slots, QueryTiles(queries, len(first), *of_tiles))

    def rope(self, table: RopeTable) -> CosSin:
        return self._ropes[id(table)]

    def _reserve_positions(self, count: int) -> None:
        if count > self._num_positions:
            self._num_positions = max(2 * self._num_positions, count, MIN_POSITIONS)
            positions = torch.arange(self._num_positions, device=self.device)
            tables = {id(op.rope): op.rope for op in self._attention.values()}
            self._ropes = {key: rope_tables(table, positions) for key, table in tables.items()}

    def _following(self, node: Node) -> PackedWeight | None:
        return next(iter(self._readers[node.output].matrices), None)


class _Step:
    """The values of a step in progress."""

    def __init__(self, forward: PoolingForward, batch: Batch, kv: Sequence[LayerCache]) -> None:
        self.forward, self.batch, self.kv = forward, batch, kv
        self.linear, self.exact = forward.linear, forward.linear.batch_invariant
        self.arrays = forward.upload(batch)
        self.held: dict[Value, Held] = {}

    def run(self) -> torch.Tensor:
        """Launch all ops; return the rows of the graph's output."""
        launches: Mapping[str, Callable[[Node], None]] = {
            "attention": self._attend, "linear_activation": self._activate, "linear_add_norm": self._add_norm,
            "norm": self._norm,
        }  # fmt: skip
        self.forward.mark("copies")
        for index, node in enumerate(self.forward.graph.nodes):
            launches.get(node.op if node.fused else "", self._single_op)(node)
            self.forward.mark(node.op)
            for value in self.forward.last_reads(index):
                self.held.pop(value, None)
        rows: torch.Tensor = self.held[self.forward.graph.output].rows
        return rows

    def _attend(self, node: Node) -> None:
        op, arrays = self.forward.attention_of(node), self.arrays
        product, kv = self._multiply(node.fused[0]), self.kv[op.layer]
        tokens = product.parts.shape[1]
        q = torch.empty(tokens, op.n_heads, op.head_dim, dtype=query_dtype(kv.k.dtype), device=self.forward.device)
        launch_rope_store(
            product.parts, kv, self.forward.rope(op.rope), arrays.positions, arrays.slots, q, op.bias, op.q_norm,
            op.k_norm, op.eps, exact=self.exact, v_norm=op.v_norm, factors=product.factors,
        )  # fmt: skip
        takes_rows = op.following is not None and self.linear.takes_rows(op.following, tokens)
        needs_rows = self.forward.readers(node.output).needs_rows
        dtype = op.following.dense_dtype if takes_rows and not needs_rows else torch.float32
        out = torch.empty(tokens, op.n_heads * op.head_dim, dtype=dtype, device=self.forward.device)
        launch_prefill_attention(q, kv, arrays.tiles, op.params, out, op.sinks)
        self.held[node.output] = Held(out) if needs_rows or not takes_rows else Held(None, Activations(out))

    def _activate(self, node: Node) -> None:
        last = node.fused[-1]
        product = self._multiply(node.fused[0])
        results = self._results(node.output, product.parts.shape[1])
        launch_activation(product, results, last["activation"], gated=last.op == "gated")
        self.held[node.output] = Held(results.rows, results.activations)

    def _add_norm(self, node: Node) -> None:
        linear, *posts, add = node.fused
        post = (posts[0]["weight"], posts[0]["eps"]) if posts else None
        self._store_norm(add, self._multiply(linear), add["residual"], post)

    def _norm(self, node: Node) -> None:
        (norm,) = node.fused
        self._store_norm(norm, None, norm["x"])

    def _store_norm(self, norm: Node, product: Product | None, stream: Value, post: Any = None) -> None:
        rows = self._rows(stream)
        results, total = self._results(norm.outputs[0], len(rows)), None
        if product is not None and self.forward.readers(norm.outputs[1]).needs_rows:
            total = torch.empty_like(rows)
            self.held[norm.outputs[1]] = Held(total)
        launch_norm(
            product, rows, norm["weight"], norm.args.get("bias"), norm["eps"], results, total,
            centered=norm.op.endswith("layer_norm"), exact=self.exact, post=post,
            stream_scale=norm.args.get("scale", 1.0),
        )  # fmt: skip
        self.held[norm.outputs[0]] = Held(results.rows, results.activations)

    def _results(self, value: Value, tokens: int) -> Results:
        """Allocate the forms in which a value is read."""
        readers, width = self.forward.readers(value), int(value.shape[-1])
        activations = self.linear.empty_activations(readers.matrices[0], tokens) if readers.matrices else None
        needs_rows = readers.needs_rows or activations is None
        rows = torch.empty(tokens, width, device=self.forward.device) if needs_rows else None
        return Results(activations, rows)

    def _multiply(self, linear: Node) -> Product:
        """Multiply by the matrix of a linear op; its bias is left to the kernel that reads the product."""
        value, w = linear["x"], linear["w"]
        held, matrices = self.held[value], self.forward.readers(value).matrices
        x = held.activations
        if x is None or _form(w) != _form(matrices[0]):
            x = self.linear.convert(held.rows, w)
        return Product(*self.linear.multiply_unscaled(x, w), linear["bias"])

    def _rows(self, value: Value) -> torch.Tensor:
        rows: torch.Tensor = self.held[value].rows
        return rows if rows.dtype == torch.float32 else rows.float()

    def _single_op(self, node: Node) -> None:
        args = {name: self._argument(name, value) for name, value in node.args.items()}
        found = getattr(self.forward.ops, node.op)(**args)
        outputs = (found,) if len(node.outputs) == 1 else found
        for value, rows in zip(node.outputs, outputs, strict=True):
            self.held[value] = Held(rows)

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, Value):
            return getattr(self.batch, value.name) if value.name else self.held[value].rows
        if isinstance(value, Batch):
            return self.batch
        return self.kv[value] if name in ("kv", "state") else value


def _form(w: PackedWeight) -> tuple[Any, ...]:
    """Return what determines the form of a matrix's activations."""
    return w.is_packed, w.is_fp8, w.dense_dtype, frozenset((part.kind, part.fits_scaled_mm) for part in w.parts)


def _find_readers(graph: Graph) -> dict[Value, Readers]:
    matrices: dict[Value, dict[Any, PackedWeight]] = defaultdict(dict)
    of_rows = {graph.output}
    for node in graph.nodes:
        first = node.fused[0] if node.fused and node.op != "norm" else None
        for part in node.fused or (node,):
            for name, value in part.args.items():
                if not isinstance(value, Value):
                    continue
                if part is first and name == "x":
                    matrices[value].setdefault(_form(part["w"]), part["w"])
                else:
                    of_rows.add(value)
    made = {value for node in graph.nodes for part in node.fused or (node,) for value in part.outputs}
    return {
        value: Readers(tuple(matrices[value].values()), value in of_rows or len(matrices[value]) > 1) for value in made
    }
