"""The fused forward of a pooling model: the recorded ops in their order, neighbours fused around each product.

A value is held in the forms in which it is read: as activations of a product, as float32 rows, or both. Ops of no
rewrite, of which there are few before the first layer and after the last, run as single ops. Small steps are padded to
one of few sizes and replayed from CUDA graphs; launches of larger ones run ahead of the device, which the host waits
for when it copies the result.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..graph import Graph, Node, ProgramLine, Rewrite, Value, apply_rewrites, op_names
from ..ops import CAPTURING, Backend, Batch, LayerCache, Profiler, Progress, RopeTable, first_kv
from . import profile
from .cuda_graphs import CudaGraphs
from .device import activate, as_memory_error, is_interpreted
from .kernels import encoder as encoder_kernels
from .kernels.attention_prefill import (
    QUERY_TILE,
    SMALL_QUERY_TILE,
    QueryTiles,
    launch_prefill_attention,
    query_dtype,
    query_tiles,
    tile_programs,
)
from .kernels.elementwise import ACTIVATIONS
from .kernels.encoder import Product, Results, launch_activation, launch_norm
from .kernels.rope import CosSin, launch_rope_store, rope_tables
from .linear import BatchedLinear, sum_splits
from .lowering import ATTENTION, Attention, attention_op, has_attention_kernels
from .packed_weight import Activations, PackedWeight
from .step_inputs import STEP_SIZES, InputStaging, padded, total_size

NORMS = ("layer_norm", "rms_norm")
MIN_POSITIONS = 512  # of the first cos and sin tables
STATIC_INTS = 1 << 15  # room for the arrays of a graph, whose requests have blocks of 16 tokens
FEW_REQUESTS = 16  # the requests of a graph are 1, these, or as many as it has tokens
# Single ops that read the arrays of a step on the device and do not synchronize: they can be captured.
CAPTURED_OPS = {"embed", "add", "take", "mean_rows", "activate", *NORMS, "add_layer_norm", "add_rms_norm"}


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
    Rewrite("linear", "linear", _reads_rows),
    *(Rewrite("norm", name, _is_of_rows) for name in NORMS),
)
LAUNCHES = {
    "attention": "gemm, rope_store_qkv, prefill_attention",
    "linear_activation": "gemm, activate_rows",
    "linear_add_norm": "gemm, add_norm_rows",
    "linear": "gemm",
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
    """The arrays of a step on the device, padded; `on_device` are those that single ops take from there."""

    positions: torch.Tensor
    slots: torch.Tensor
    tiles: QueryTiles
    on_device: Mapping[str, torch.Tensor]


class StepSize(NamedTuple):
    """What the arrays of a step have room for: the key of its graph."""

    tokens: int
    requests: int
    tile_queries: int


class PoolingForward:
    """The fused forward of a pooling model on one device."""

    def __init__(self, graph: Graph, ops: Backend, device: torch.device, *, batch_invariant: bool) -> None:
        self.graph = apply_rewrites(graph, REWRITES)
        self.ops, self.device = ops, device
        self.linear = BatchedLinear(device, batch_invariant=batch_invariant)
        self.graphs = CudaGraphs(device)
        self.mark: Callable[[str], None] = lambda component: None
        self._staging = InputStaging(device)
        self._staging.reserve_static(STATIC_INTS)
        self._readers = _find_readers(self.graph)
        self._attention = {
            node: attention_op(node.fused, self._following(node)) for node in self.graph.nodes if node.op == "attention"
        }
        self._ropes: dict[int, CosSin] = {}  # by id of the RoPE table
        self._num_positions = 0
        self._graph_workspace: weakref.ref[Any] | None = None  # the keys that graphs write to
        self.is_captured = all(node.fused or node.op in CAPTURED_OPS for node in self.graph.nodes)
        self._last_reads: dict[int, list[Value]] = defaultdict(list)
        for value, index in self.graph.last_uses().items():
            self._last_reads[index].append(value)

    def __call__(self, batch: Batch, kv: Sequence[LayerCache]) -> torch.Tensor:
        """Launch a step; return its rows, float32 on the device, valid until the next step."""
        activate(self.device)
        with as_memory_error():
            return self._step(batch, kv)

    def with_hidden(self, batch: Batch, kv: Sequence[LayerCache]) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("a pooling model has no hidden states beside its rows")

    @property
    def graph_bytes(self) -> int:
        return self.graphs.nbytes

    def program(self, kv_type: str) -> list[ProgramLine]:
        nodes = self.graph.nodes
        return [ProgramLine(node.op, op_names(node), LAUNCHES.get(node.op, "a single op")) for node in nodes]

    def run_profiled(self, batch: Batch, kv: Sequence[LayerCache], profiler: Profiler) -> torch.Tensor:
        activate(self.device)
        return profile.run(self, lambda: self.launch(batch, kv), profiler)

    def launch(self, batch: Batch, kv: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step launch by launch, without a graph."""
        activate(self.device)
        return self._prepare(batch, kv, captured=False)[1].run()

    def capture_all(self, batches: Sequence[Batch], kv: Sequence[LayerCache], progress: Progress) -> None:
        """Capture the graphs of these steps, the largest of which is the last; their kernels have been launched."""
        found = [batch for batch in batches if self.is_captured and len(batch.ids) <= STEP_SIZES[-1]]
        with self.graphs.counting_memory():
            for count, batch in enumerate(reversed(found)):
                progress(CAPTURING, count, len(found))
                size, step = self._prepare(batch, kv, captured=True)
                self.graphs.capture(size, step.run)
        progress(CAPTURING, len(found), len(found))

    def _step(self, batch: Batch, kv: Sequence[LayerCache]) -> torch.Tensor:
        captured = self.is_captured and len(batch.ids) <= STEP_SIZES[-1]
        size, step = self._prepare(batch, kv, captured=captured)
        rows = self.graphs.run(size, step.run) if captured else step.run()
        assert rows is not None
        return rows[: len(batch.context_len)]

    def _prepare(self, batch: Batch, kv: Sequence[LayerCache], *, captured: bool) -> tuple[StepSize, _Step]:
        """Return a step whose arrays are on the device; those of a graph are padded."""
        tokens, requests = len(batch.ids), len(batch.context_len)
        longest = int(batch.context_len.max())
        queries = SMALL_QUERY_TILE if self.linear.batch_invariant or longest <= SMALL_QUERY_TILE else QUERY_TILE
        if captured:
            tokens = padded(tokens, STEP_SIZES, STEP_SIZES[-1])
            requests = next(count for count in (1, FEW_REQUESTS, tokens) if count >= requests)
        size = StepSize(tokens, requests, queries)
        self.reserve(longest, kv)
        return size, _Step(self, batch, self._upload(batch, size, is_captured=captured), kv)

    def readers(self, value: Value) -> Readers:
        return self._readers[value]

    def attention_of(self, node: Node) -> Attention:
        return self._attention[node]

    def last_reads(self, index: int) -> Sequence[Value]:
        """Return the values that no node after this one reads."""
        return self._last_reads.get(index, ())

    def _upload(self, batch: Batch, size: StepSize, *, is_captured: bool) -> StepArrays:
        """Copy the arrays of a step to the device, of a graph to the addresses that it holds: block tables, of any
        size, are the last."""
        tokens, requests, queries = size
        of_tiles, first = query_tiles(batch.query_start, queries)
        most = tokens if is_captured else len(first)  # tiles
        table = batch.block_table
        arrays = {
            "ids": (tokens, batch.ids, 0),
            "token_types": (tokens, batch.token_types, 0),
            "logits_index": (requests, batch.logits_index, 0),
            "positions": (tokens, batch.positions, 0),
            "slots": (tokens, batch.slot_mapping, -1),
            "width": (1, np.array(table.shape[1]), 0),
            "query_start": (requests + 1, batch.query_start, len(batch.ids)),
            "context_len": (requests, batch.context_len, 0),
            "count": (1, np.array(len(first)), 0),
            "request": (most, of_tiles, 0),
            "first": (most, first, 0),
            "tables": (table.size, table, 0),
        }
        if is_captured and self._staging.reserve_static(total_size(arrays)):
            self.graphs.clear()
        found = self._staging.copy_to_device(batch, arrays, is_static=is_captured)
        of_requests = (found[name] for name in ("width", "query_start", "context_len", "count", "request", "first"))
        programs = tile_programs(tokens, queries) if is_captured else len(first)
        tiles = QueryTiles(queries, programs, found["tables"], *of_requests)
        names = ("ids", "positions", "token_types", "logits_index", "query_start")
        return StepArrays(found["positions"], found["slots"], tiles, {name: found[name] for name in names})

    def rope(self, table: RopeTable) -> CosSin:
        return self._ropes[id(table)]

    def reserve(self, positions: int, kv: Sequence[LayerCache]) -> None:
        """Make RoPE tables for so many positions; drop graphs if something that they read has moved."""
        keys = first_kv(kv).k
        has_moved = self._graph_workspace is None or self._graph_workspace() is not keys
        if positions > self._num_positions:
            self._num_positions = max(2 * self._num_positions, positions, MIN_POSITIONS)
            indices = torch.arange(self._num_positions, device=self.device)
            tables = {id(op.rope): op.rope for op in self._attention.values()}
            self._ropes = {key: rope_tables(table, indices) for key, table in tables.items()}
            has_moved = True
        if has_moved:
            self._graph_workspace = weakref.ref(keys)
            self.graphs.clear()

    def _following(self, node: Node) -> PackedWeight | None:
        return next(iter(self._readers[node.output].matrices), None)


class _Step:
    """The values of a step in progress."""

    def __init__(self, forward: PoolingForward, batch: Batch, arrays: StepArrays, kv: Sequence[LayerCache]) -> None:
        self.forward, self.arrays, self.kv = forward, arrays, kv
        self.linear, self.exact = forward.linear, forward.linear.batch_invariant
        on_device: Any = arrays.on_device if forward.is_captured else {}
        self.batch = replace(batch, **on_device)
        self.held: dict[Value, Held] = {}

    def run(self) -> torch.Tensor:
        """Launch all ops; return the rows of the graph's output."""
        launches: Mapping[str, Callable[[Node], None]] = {
            "attention": self._attend,
            "linear_activation": self._activate,
            "linear_add_norm": self._add_norm,
            "norm": self._norm,
            "linear": self._linear,
        }
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
        make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
        out = make(tokens, op.n_heads * op.head_dim, dtype=dtype, device=self.forward.device)
        launch_prefill_attention(q, kv, arrays.tiles, op.params, out, op.sinks)
        self.held[node.output] = Held(out) if needs_rows or not takes_rows else Held(None, Activations(out))

    def _linear(self, node: Node) -> None:
        product = self._multiply(node.fused[0])
        rows = sum_splits(product.parts)
        rows = rows if product.factors is None else rows * product.factors[:, None]
        self.held[node.output] = Held(rows if product.bias is None else rows + product.bias)

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
            product,
            rows,
            norm["weight"],
            norm.args.get("bias"),
            norm["eps"],
            results,
            total,
            centered=norm.op.endswith("layer_norm"),
            exact=self.exact,
            post=post,
            stream_scale=norm.args.get("scale", 1.0),
        )
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
