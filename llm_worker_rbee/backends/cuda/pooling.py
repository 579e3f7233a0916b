"""The fused forward of a pooling model, of a vision tower, and of a decoder's steps with images: the recorded ops in
their order, neighbours fused around each product.

A value is held in the forms in which it is read: as activations of a product, as float32 rows, or both. Ops of no
rewrite, of which there are few before the first layer and after the last, run as single ops. Small steps are padded and
replayed from CUDA graphs (forward.py); launches of larger ones run ahead of the device, which the host waits for when
it copies the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..graph import Graph, Node, Rewrite, Value, apply_rewrites
from ..ops import ROPE_AXES, Backend, Batch, LayerCache, StepLimits
from .device import is_interpreted
from .forward import CapturedForward
from .kernels import encoder as encoder_kernels
from .kernels.attention_prefill import launch_prefill_attention, query_dtype
from .kernels.elementwise import ACTIVATIONS
from .kernels.encoder import Product, Results, launch_activation, launch_norm
from .kernels.rope import CosSin, launch_rope_store, rope_tables
from .launch import StepInputs
from .linear import BatchedLinear, sum_splits
from .lowering import ATTENTION, Attention, attention_op, has_attention_kernels
from .packed_weight import Activations, PackedWeight
from .step_inputs import Arrays, StepSizes, pooling_sizes, warm_up_batches

NORMS = ("layer_norm", "rms_norm")
# Single ops that read the arrays of a step on the device and do not synchronize: they can be captured.
CAPTURED_OPS = {"embed", "add", "take", "mean_rows", "activate", *NORMS, "add_layer_norm", "add_rms_norm"}
ON_DEVICE = ("ids", "positions", "token_types", "logits_index", "query_start")  # arrays that these take from there


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


class Readers(NamedTuple):
    """Who reads a value: products, by the first matrix of each form, and others, which read float32 rows."""

    matrices: tuple[PackedWeight, ...]
    needs_rows: bool


class Held(NamedTuple):
    """A value of the step in progress."""

    rows: Any = None  # float32; of heads any type
    activations: Activations | None = None


class PoolingForward(CapturedForward):
    """The fused forward of a pooling model."""

    def __init__(self, graph: Graph, ops: Backend, device: torch.device, *, batch_invariant: bool) -> None:
        self.launcher = PoolingLauncher(apply_rewrites(graph, REWRITES), ops, device, batch_invariant=batch_invariant)
        super().__init__(ops, device, self.launcher.layers, self.launcher.attention.values())

    def with_hidden(self, batch: Batch, kv: Sequence[LayerCache]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self(batch, kv)
        assert self.launcher.hidden_rows is not None
        return rows, self.launcher.hidden_rows

    def launch_all(self, kv: Sequence[LayerCache], limits: StepLimits, *, every_size: bool = False) -> int:
        for batch, _ in self._warm_up_steps(kv, limits):
            self.launch(batch, kv)
        return 0

    def _warm_up_steps(self, kv: Sequence[LayerCache], limits: StepLimits) -> list[tuple[Batch, StepSizes]]:
        self._reserve_all(limits.max_tokens, kv, limits)  # a longer text would move the tables that graphs read
        batches = reversed(warm_up_batches(kv, limits))
        return [(batch, self._sizes(batch, is_captured=True)) for batch in batches]

    def _sizes(self, batch: Batch, *, is_captured: bool) -> StepSizes:
        is_captured &= self.launcher.is_captured
        return pooling_sizes(batch, batch_invariant=self.launcher.linear.batch_invariant, is_captured=is_captured)

    def _more_arrays(self, batch: Batch, sizes: StepSizes) -> Arrays | None:
        arrays = {
            "token_types": (sizes.tokens, batch.token_types, 0),
            "logits_index": (max(sizes.requests, len(batch.logits_index)), batch.logits_index, 0),
        }
        images = {"rope_positions": batch.rope_positions, "spans": batch.spans}
        return arrays | {name: (array.size, array, 0) for name, array in images.items() if array.size}

    def _launch(self, step: StepInputs, sizes: StepSizes, layers: Iterable[Any] | None = None) -> Any:
        return self.launcher.run(step, layers)


class PoolingLauncher:
    """Launches the ops of a pooling model. It holds the values of the step in progress."""

    def __init__(self, graph: Graph, ops: Backend, device: torch.device, *, batch_invariant: bool) -> None:
        self.layers, self.output, self.ops, self.device = graph.nodes, graph.output, ops, device
        self.hidden = graph.hidden
        self.hidden_rows: torch.Tensor | None = None
        self.linear, self.exact = BatchedLinear(device, batch_invariant=batch_invariant), batch_invariant
        self.mark: Callable[[str], None] = lambda component: None
        self._readers = _find_readers(graph)
        self.attention = {
            node: attention_op(node.fused, self._following(node))
            for node in self.layers
            if node.op == "attention" and node.fused
        }
        self.is_captured = all(node.fused or node.op in CAPTURED_OPS for node in self.layers)
        self._last_reads: dict[int, list[Value]] = defaultdict(list)
        for value, index in graph.last_uses().items():
            self._last_reads[index].append(value)
        self._launches: dict[str, Callable[[Node], None]] = {
            "attention": self._attend,
            "linear_activation": self._activate,
            "linear_add_norm": self._add_norm,
            "norm": self._norm,
            "linear": self._linear,
        }
        self.step: Any = None
        self.batch: Any = None  # whose arrays are on the device
        self.held: dict[Value, Held] = {}
        self._inputs = {value for node in graph.nodes for value in node.inputs if value.name == "hidden"}
        self._turned: dict[int, tuple[CosSin, torch.Tensor]] = {}  # by id of the RoPE table: the angles of the step

    def reserve(self, tokens: int) -> bool:
        """Make room for what steps share, which is nothing; return whether an address has changed."""
        return False

    def run(self, step: StepInputs, nodes: Iterable[Node] | None = None) -> torch.Tensor:
        """Launch all ops; return the rows of the graph's output."""
        on_device: Any = {name: step.arrays[name] for name in (ON_DEVICE if self.is_captured else ("ids",))}
        self.step, self.batch = step, replace(step.batch, **on_device)
        self._turned = {}
        for value in self._inputs:
            given = getattr(step.batch, value.name)
            self.held[value] = Held(torch.as_tensor(given, dtype=torch.float32, device=self.device))
        self.mark("copies")
        for index, node in enumerate(self.layers if nodes is None else nodes):
            self._launches.get(node.op if node.fused else "", self._single_op)(node)
            self.mark(node.op)
            for value in self._last_reads[index]:
                self.held.pop(value, None)
        self.step = self.batch = None  # not held: the cache of a larger step is another one
        self.hidden_rows = None if self.hidden is None else self._rows(self.hidden)
        rows: torch.Tensor = self.held[self.output].rows
        self.held.clear()
        return rows

    def _following(self, node: Node) -> PackedWeight | None:
        return next(iter(self._readers[node.output].matrices), None)

    def _attend(self, node: Node) -> None:
        op, step = self.attention[node], self.step
        product, kv = self._multiply(node.fused[0]), step.kv[op.layer]
        tokens = product.parts.shape[1]
        q = torch.empty(tokens, op.n_heads, op.head_dim, dtype=query_dtype(kv.k.dtype), device=self.device)
        launch_rope_store(
            product.parts, kv, *self._angles(op), step.arrays["slots"], q, op.bias,
            op.q_norm, op.k_norm, op.eps, exact=self.exact, v_norm=op.v_norm, factors=product.factors,
        )  # fmt: skip
        takes_rows = op.following is not None and self.linear.takes_rows(op.following, tokens)
        needs_rows = self._readers[node.output].needs_rows
        dtype = op.following.dense_dtype if takes_rows and not needs_rows else torch.float32
        make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
        out = make(tokens, op.n_heads * op.head_dim, dtype=dtype, device=self.device)
        spans = step.arrays.get("spans") if op.params.spans else None
        launch_prefill_attention(q, kv, step.tiles, op.params, out, op.sinks, spans=spans)
        self.held[node.output] = Held(out) if needs_rows or not takes_rows else Held(None, Activations(out))

    def _angles(self, op: Attention) -> tuple[CosSin, torch.Tensor]:
        """Return cosines and sines, and the rows of the tokens in them."""
        if op.rope.axes is None:
            return self.step.ropes[id(op.rope)], self.step.arrays["positions"]
        if id(op.rope) not in self._turned:
            places = self.step.arrays["rope_positions"].view(-1, ROPE_AXES)
            rows = torch.arange(len(places), dtype=torch.int32, device=self.device)
            self._turned[id(op.rope)] = rope_tables(op.rope, places), rows
        return self._turned[id(op.rope)]

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
        if product is not None and self._readers[norm.outputs[1]].needs_rows:
            total = torch.empty_like(rows)
            self.held[norm.outputs[1]] = Held(total)
        weights = norm["weight"], norm.args.get("bias"), norm["eps"]
        options: Any = {"centered": norm.op.endswith("layer_norm"), "stream_scale": norm.args.get("scale", 1.0)}
        launch_norm(product, rows, *weights, results, total, exact=self.exact, post=post, **options)
        self.held[norm.outputs[0]] = Held(results.rows, results.activations)

    def _results(self, value: Value, tokens: int) -> Results:
        """Allocate the forms in which a value is read."""
        readers, width = self._readers[value], int(value.shape[-1])
        activations = self.linear.empty_activations(readers.matrices[0], tokens) if readers.matrices else None
        needs_rows = readers.needs_rows or activations is None
        rows = torch.empty(tokens, width, device=self.device) if needs_rows else None
        return Results(activations, rows)

    def _multiply(self, linear: Node) -> Product:
        """Multiply by the matrix of a linear op; its bias is left to the kernel that reads the product."""
        value, w = linear["x"], linear["w"]
        held, matrices = self.held[value], self._readers[value].matrices
        x = held.activations
        if x is None or _form(w) != _form(matrices[0]):
            x = self.linear.convert(held.rows, w)
        return Product(*self.linear.multiply_unscaled(x, w), linear["bias"])

    def _rows(self, value: Value) -> torch.Tensor:
        rows: torch.Tensor = self.held[value].rows
        return rows if rows.dtype == torch.float32 else rows.float()

    def _single_op(self, node: Node) -> None:
        args = {name: self._argument(name, value) for name, value in node.args.items()}
        found = getattr(self.ops, node.op)(**args)
        outputs = (found,) if len(node.outputs) == 1 else found
        for value, rows in zip(node.outputs, outputs, strict=True):
            self.held[value] = Held(rows)

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, Value):
            return getattr(self.batch, value.name) if value not in self.held else self.held[value].rows
        if isinstance(value, Batch):
            return self.batch
        return self.step.kv[value] if name in ("kv", "state") else value


def _form(w: PackedWeight) -> tuple[Any, ...]:
    """Return the key that determines the form of a matrix's activations."""
    return w.is_packed, w.is_fp8, w.dense_dtype, frozenset((part.kind, part.fits_scaled_mm) for part in w.parts)


def _find_readers(graph: Graph) -> dict[Value, Readers]:
    matrices: dict[Value, dict[Any, PackedWeight]] = defaultdict(dict)
    of_rows = {value for value in (graph.output, graph.hidden) if value is not None}
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
    parts = [part for node in graph.nodes for part in node.fused or (node,)]
    made = {value for part in parts for value in (*part.outputs, *(v for v in part.inputs if v.name == "hidden"))}
    return {
        value: Readers(tuple(matrices[value].values()), value in of_rows or len(matrices[value]) > 1) for value in made
    }
