"""The launches of one step, in the order of the fused ops: decoding tokens first, then prompt tokens (prefill).

Up to 4 decoding tokens take GEMV: five kernels per layer, whose epilogues do the rest, each launched before the
previous one has ended (PDL). More tokens take tensor cores, on GPUs of capability 9.0 seven kernels per layer, which
start early too; small ones between sum the splits of a product, add to the residual stream, norm, and lay the
activations out for the next product.

`mark` is called with the component that has just been launched, for profiles (profile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from ..ops import Batch, LayerCache, LoraSite
from .device import has_pdl, is_interpreted
from .experts import empty_expert_activations, expert_tile, grouped_gemm, grouped_gemv
from .kernels.attention_decode import launch_decode_attention, split_kv_config, split_kv_scratch
from .kernels.attention_prefill import QueryTiles, launch_prefill_attention, query_dtype, tile_programs
from .kernels.causal_conv import StateInputs, launch_conv
from .kernels.elementwise import WeightedExperts, launch_add_norm, launch_embedding, launch_gated, launch_head_norm
from .kernels.experts import launch_group, launch_route, launch_router, router_is_fused
from .kernels.gated_delta import has_chunks, launch_delta, launch_delta_chunks, launch_gate
from .kernels.gemv import GATED, RESIDUAL
from .kernels.lora import launch_adapter
from .kernels.rope import CosSin, launch_rope_store
from .linear import (
    GROUP_COLUMNS,
    MAX_SPLITS,
    BatchedLinear,
    Stream,
    empty_gemv_activations,
    gemm_dense_batch_invariant,
    launch_gemv,
    sum_splits,
)
from .lowering import (
    Attention,
    EmbedInputs,
    EmbedNorm,
    ExpertsAddNorm,
    FusedOp,
    GatedDelta,
    GatedLinear,
    LinearAdd,
    LinearAddNorm,
    Logits,
    Mixer,
    PerLayerGate,
    SharedExpert,
    ShortConv,
    StreamNorm,
)
from .packed_weight import Activations, GemvActivations, Int8Activations, PackedExperts, PackedWeight
from .step_inputs import DECODE_SIZES

MAX_COUNTERS = DECODE_SIZES[-1]  # decoding requests in a graph
QKV_SPLITS = 4

AnyActivations = Activations | GemvActivations
PRODUCTS = {"o": "output", "down": "down"}  # the component of a product that adds to the residual stream


class StepInputs(NamedTuple):
    """The sizes of a step, its arrays on the device (step_inputs.py), and its other inputs."""

    batch: Batch
    tokens: int
    decoding: int  # tokens at the front that decode, those with a position >= 0
    takes_gemv: bool
    tile_queries: int
    arrays: Mapping[str, torch.Tensor]
    kv: Sequence[LayerCache]
    ropes: Mapping[int, CosSin]  # by id of the RoPE table

    @property
    def tiles(self) -> QueryTiles:
        """The tiles of queries, and the arrays of their requests."""
        names = ("tables", "width", "query_start", "context_len", "num_tiles", "tile_request", "tile_first")
        programs = tile_programs(self.tokens, self.tile_queries)
        return QueryTiles(self.tile_queries, programs, *(self.arrays[name] for name in names))


class Launcher:
    """Launches the fused ops of a model. It holds the residual stream of the step in progress."""

    def __init__(
        self,
        ops: Sequence[FusedOp],
        device: torch.device,
        *,
        batch_invariant: bool,
        sites: Mapping[int, LoraSite] | None = None,
    ) -> None:
        """`sites`: of adapters, by the identities of weights."""
        *self.layers, head = ops
        self._sites = sites or {}
        last = self.layers[-1]
        assert isinstance(head, Logits)
        assert isinstance(last, LinearAddNorm | ExpertsAddNorm)
        self.head, self.last, self.device = head, last, device
        self._has_pdl = has_pdl(device)
        self._mixers = [op for op in self.layers if isinstance(op, Mixer)]
        self.linear = BatchedLinear(device, batch_invariant=batch_invariant)
        self._streams = torch.empty(0, len(last.norm), device=device)
        self._ones = torch.empty(0, device=device)  # factors of tokens
        self._counters: dict[int, torch.Tensor] = {}  # by heads
        self.step: Any = None
        self.residual: Any = None
        self.layer_inputs: Any = None  # (tokens, layers * dim)
        self.mark: Callable[[str], None] = lambda component: None
        self.pdl = False  # whether kernels start before the previous ones have ended

    def _starts_early(self, step: StepInputs) -> bool:
        """Return whether kernels of the layers start early: in batches of models with attention alone, not beside the
        products of cuBLAS."""
        starts = all(isinstance(op, Attention) for op in self._mixers)
        starts = starts and self.linear.stays_packed(self._mixers[0].qkv, step.tokens)
        return self._has_pdl and bool(step.takes_gemv or starts)

    def reserve(self, tokens: int) -> bool:
        """Make room for the residual stream of a step; return whether its address has changed."""
        if tokens <= len(self._streams):
            return False
        self._streams = torch.empty(tokens, self._streams.shape[1], device=self.device)
        self._ones = torch.ones(tokens, device=self.device)
        return True

    def run(self, step: StepInputs, ops: Iterable[FusedOp] | None = None) -> torch.Tensor:
        """Return the logits of all tokens."""
        return self.compute_logits(self.head, self.run_layers(step, ops))

    def run_layers(self, step: StepInputs, ops: Iterable[FusedOp] | None = None) -> AnyActivations:
        """Run all layers, or `ops`; return the activations of the output head. The residual stream stays as it is."""
        self.step, self.pdl = step, self._starts_early(step)
        self.mark("copies")
        x: Any = None
        name = ""
        for op in self.layers if ops is None else ops:
            match op:
                case EmbedNorm():
                    x = self.embed(op)
                case EmbedInputs():
                    self.embed_inputs(op)
                case StreamNorm():
                    x = self._norm(None, op.norm, op.eps, op.following)
                case Attention():
                    x, name = self.attend(op, x), "o"
                case GatedDelta():
                    x, name = self.mix(op, x), "o"
                case ShortConv():
                    x, name = self.convolve(op, x), "o"
                case GatedLinear():
                    x, name = self.gate(op, x), "down"
                case PerLayerGate():
                    x, name = self.gate_inputs(op, x), "down"
                case LinearAdd() | LinearAddNorm():
                    x = self.add_norm(name, op, x)
                case ExpertsAddNorm():
                    x = self.add_experts(op, x)
        self.layer_inputs = None
        activations: AnyActivations = x
        return activations

    def run_head(self, step: StepInputs) -> torch.Tensor:
        """Return the logits of a step whose layers have run: of the tokens in "logits_index", else of all. Its kernels
        are the same after layers of any size: none starts early."""
        self.step, self.residual, self.pdl = step, self._streams[: step.tokens], False
        x = self._norm(None, self.last.norm, self.last.eps, self.head.head, index=step.arrays.get("logits_index"))
        return self.compute_logits(self.head, x)

    def hidden_states(self, tokens: int) -> torch.Tensor:
        """Return the norm of the residual stream of a step that has run, in float32."""
        rows = torch.empty(tokens, self._streams.shape[1], device=self.device)
        norm, exact = (self.last.norm, self.last.eps), self.linear.batch_invariant
        launch_add_norm(None, self._streams[:tokens], *norm, Activations(rows), exact=exact)
        return rows

    def embed(self, op: EmbedNorm) -> AnyActivations:
        """Start the residual stream with rows of the table, and store the activations of the first product."""
        tokens, ids = self.step.tokens, self.step.arrays["ids"]
        self.residual = self._streams[:tokens]
        if not self.step.takes_gemv:
            launch_embedding(op.table, op.scale, ids, self.residual)
            self.mark("embedding")
            return self._norm(None, op.norm, op.eps, op.following)
        out, squares = empty_gemv_activations(op.following, tokens, self.device), self._squares()
        launch_embedding(op.table, op.scale, ids, self.residual, op.norm, out, squares, self.pdl)
        self.mark("embedding_norm")
        return GemvActivations(out, squares, op.eps)

    def embed_inputs(self, op: EmbedInputs) -> None:
        """Start the residual stream, and compute the inputs of all layers."""
        tokens, ids = self.step.tokens, self.step.arrays["ids"]
        self.residual = self._streams[:tokens]
        launch_embedding(op.table, op.scale, ids, self.residual)
        self.mark("embedding")
        rows = torch.empty(tokens, op.inputs_table.columns, device=self.device)
        launch_embedding(op.inputs_table, op.inputs_scale, ids, rows)
        projected = sum_splits(self._multiply("qkv", self._norm(None, None, 0.0, op.projection), op.projection))
        self.mark("per_layer_projection")
        runs, exact = projected.view(tokens, -1, len(op.norm)), self.linear.batch_invariant
        self.layer_inputs = launch_head_norm(runs, op.norm, op.eps, exact=exact, added=rows).view(rows.shape)
        self.mark("per_layer_inputs")

    def gate_inputs(self, op: PerLayerGate, x: AnyActivations) -> AnyActivations:
        """Return activation(gate) * inputs of the layer as activations of its projection."""
        gate = self._multiply("qkv", x, op.w)
        self.mark("gate_up")
        out = self._activations(op.following, self.step.tokens)
        launch_gated(gate, out, op.activation, self.pdl, self.layer_inputs, op.layer)
        self.mark("per_layer_gate")
        return out

    def gate(self, op: GatedLinear, x: AnyActivations) -> AnyActivations:
        """Return activation(gate) * up as activations of the down projection."""
        out = self._activations(op.following, self.step.tokens)
        if _has_epilogue(x, op.w, out):
            launch_gemv("gate_up", x, op.w, out.values, GATED, activation=op.activation, pdl=self.pdl)
            self.mark("gate_up_activation")
        elif (activations := self._multiply_gated(op, x, out)) is not None:
            self.mark("gate_up_activation")
            return activations
        else:
            gate_up = self._multiply("qkv", x, op.w)
            self.mark("gate_up")
            launch_gated(gate_up, out, op.activation, self.pdl)
            self.mark("activation")
        return out

    def _multiply_gated(self, op: GatedLinear, x: AnyActivations, out: AnyActivations) -> Activations | None:
        """Store activation(gate) * up in the product and return it, if that is possible."""
        if op.factor is None or not (isinstance(x, Activations) and isinstance(out, Activations)):
            return None
        if id(op.w) in self._sites:  # the increments come before the activation
            return None
        out = out._replace(factors=self._ones[: self.step.tokens], unit=op.factor)
        return out if self.linear.multiply_gated(x, op.w, op.activation, out, pdl=self.pdl) else None

    def add_norm(self, name: str, op: LinearAdd | LinearAddNorm, x: AnyActivations) -> AnyActivations:
        """Multiply, add to the residual stream, and return it or its norm as activations of the following product."""
        if isinstance(op, LinearAdd):
            delta = self._multiply(name, x, op.w)
            self.mark(PRODUCTS[name])
            return self._norm(delta, None, op.eps, op.following, post=op.post, bias=op.bias)
        out = self._activations(op.following, self.step.tokens)
        if op.post is None and op.scale == 1.0 and _has_epilogue(x, op.w, out):
            stream = Stream(self.residual, op.norm, self._squares())
            launch_gemv(name, x, op.w, out.values, RESIDUAL, stream=stream, bias=op.bias, pdl=self.pdl)
            self.mark(f"{PRODUCTS[name]}_norm")
            return GemvActivations(out.values, stream.squares, op.eps)
        delta = self._multiply(name, x, op.w)
        self.mark(PRODUCTS[name])
        options: dict[str, Any] = {"post": op.post, "bias": op.bias, "stream_scale": op.scale}
        return self._norm(delta, op.norm, op.eps, op.following, **options)

    def add_experts(self, op: ExpertsAddNorm, x: AnyActivations) -> AnyActivations:
        """Multiply each token by its experts, add their sum to the residual stream, and return its norm."""
        dense: torch.Tensor | None = None
        if op.parallel is not None:
            dense = sum_splits(self._multiply("down", x, op.parallel.down))
            self.mark("down")
            x = self._norm(None, op.input_norm, op.input_eps, op.w)
        logits = self._router_logits(op)
        experts, weights = launch_route(logits, op.params, op.selection_bias, op.expert_scales, pdl=self.pdl)
        self.mark("route")
        rows = self._few_slots(op, x, experts) if isinstance(x, GemvActivations) else self._slots(op, x, experts)
        shared = None if op.shared is None else self._shared_expert(op, op.shared)
        total = WeightedExperts(weights, op.params.k, *(shared or (dense, None)))
        if op.parallel is not None:
            total = total._replace(sum_norm=op.parallel.experts_norm, shared_norm=op.parallel.norm)
        options: dict[str, Any] = {"post": op.post, "experts": total, "stream_scale": op.scale}
        return self._norm(rows[None], op.norm, op.eps, op.following, **options)

    def _router_logits(self, op: ExpertsAddNorm) -> torch.Tensor:
        """Return (tokens, experts) from the float32 norm of the stream: a choice must not depend on rounding."""
        (router,) = op.router.parts
        exact = self.linear.batch_invariant
        if self.step.takes_gemv or (router_is_fused(self.step.tokens, router) and not exact):
            logits = launch_router(self.residual, op.router_norm, op.input_eps, router, op.router_bias, pdl=self.pdl)
            self.mark("router")
            return logits
        rows = torch.empty_like(self.residual)
        launch_add_norm(None, self.residual, op.router_norm, op.input_eps, Activations(rows), exact=exact)
        assert router.values is not None
        if exact:
            logits = sum_splits(gemm_dense_batch_invariant(rows, router))
            logits = logits if op.router_bias is None else logits + op.router_bias
        else:
            logits = torch.nn.functional.linear(rows, router.values.float(), op.router_bias)
        self.mark("router")
        return logits

    def _few_slots(self, op: ExpertsAddNorm, x: GemvActivations, experts: torch.Tensor) -> torch.Tensor:
        """Return the results of all slots, (slots, width), each multiplied for itself."""
        slots = experts.numel()
        make = torch.zeros if is_interpreted() else torch.empty
        gated = Int8Activations.allocate(slots, op.down.columns, self.device, make)
        grouped_gemv(x, op.w, experts, gated, op.params.k, activation=op.activation, bias=op.bias, pdl=self.pdl)
        self.mark("experts_gate_up")
        out = torch.empty(slots, op.down.rows, device=self.device)
        grouped_gemv(GemvActivations(gated), op.down, experts, out, 1, bias=op.down_bias, pdl=self.pdl)
        self.mark("experts_down")
        return out

    def _slots(self, op: ExpertsAddNorm, x: Activations, experts: torch.Tensor) -> torch.Tensor:
        """Return the same of more slots, grouped by expert."""
        slots = experts.numel()
        size = min(expert_tile(slots, w).tokens for w in (op.w, op.down))
        tiles = launch_group(experts, op.w.count, size)
        gate_up = grouped_gemm(x, op.w, tiles, slots, op.params.k, op.bias)
        self.mark("experts_gate_up")
        gated = empty_expert_activations(op.down, slots)
        launch_gated(gate_up[None], gated, op.activation, self.pdl)
        self.mark("activation")
        out = grouped_gemm(gated, op.down, tiles, slots, 1, op.down_bias)
        self.mark("experts_down")
        return out

    def _shared_expert(self, op: ExpertsAddNorm, shared: SharedExpert) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the result of the expert of all tokens, and the logits of its factor."""
        x = self._norm(None, op.input_norm, op.input_eps, shared.gate_up)
        out = self._activations(shared.down, self.step.tokens)
        launch_gated(self._multiply("qkv", x, shared.gate_up), out, op.activation, self.pdl)
        rows = sum_splits(self._multiply("down", out, shared.down))
        if shared.gate is not None:
            x = self._norm(None, op.input_norm, op.input_eps, shared.gate)
            gate = sum_splits(self._multiply("qkv", x, shared.gate))
        self.mark("shared_expert")
        return rows, None if shared.gate is None else gate

    def _norm(
        self,
        delta: torch.Tensor | None,
        norm: torch.Tensor | None,
        eps: float,
        following: PackedWeight,
        index: torch.Tensor | None = None,
        **options: Any,
    ) -> AnyActivations:
        """Add delta (splits, tokens, width) to the residual stream, and return its norm, or without one itself; with
        `index` of these tokens alone. `launch_add_norm` explains the options."""
        out = self._activations(following, len(self.residual if index is None else index))
        options |= {"index": index, "pdl": self.pdl, "exact": self.linear.batch_invariant}
        launch_add_norm(delta, self.residual, norm, eps, out, **options)
        self.mark("norm")
        return out

    def compute_logits(self, op: Logits, x: AnyActivations) -> torch.Tensor:
        """Apply the output head."""
        logits = sum_splits(self._multiply("head", x, op.head, 1))
        logits = torch.tanh(logits / op.soft_cap) * op.soft_cap if op.soft_cap else logits
        self.mark("head")
        return logits

    def _squares(self) -> torch.Tensor:
        tokens, width = self.residual.shape
        return torch.empty(tokens, width // 32, device=self.device)

    def _activations(self, w: PackedWeight, tokens: int) -> AnyActivations:
        """Allocate what the product with `w` reads. The output head takes GEMV for few tokens of any step."""
        is_head = w is self.head.head
        few = tokens == 1 or (tokens in (2, 4) and (w.is_packed or w.is_fp8))
        if self.step.takes_gemv or (is_head and few and not self.linear.batch_invariant):
            return GemvActivations(empty_gemv_activations(w, tokens, self.device))
        if isinstance(w, PackedExperts):
            return empty_expert_activations(w, tokens)
        return self.linear.empty_activations(w, tokens, is_head=is_head)

    def _multiply(self, name: str, x: AnyActivations, w: PackedWeight, max_splits: int = MAX_SPLITS) -> torch.Tensor:
        """Return (splits, tokens, rows), whose sum is the product."""
        if isinstance(x, Activations):
            out = self.linear.multiply(x, w, max_splits, self.pdl)
            if (site := self._sites.get(id(w))) is not None:
                launch_adapter(x, out, site.packed, self.step.arrays, w.columns)
                self.mark("adapters")
            return out
        out = torch.empty(1, x.tokens, w.rows, device=self.device)
        launch_gemv(name, x, w, out, pdl=self.pdl)
        return out

    def attend(self, op: Attention, x: AnyActivations) -> AnyActivations:
        """Attend for decode and prefill tokens; return activations of the output projection."""
        step, following = self.step, op.following
        qkv = self._multiply("qkv", x, op.qkv, QKV_SPLITS)
        self.mark("qkv")
        if op.gate is not None:
            return self._attend_gated(op, op.gate, x, qkv)
        if step.takes_gemv:
            out: Any = empty_gemv_activations(following, step.tokens, self.device)
            self._decode(qkv, op, out)
            return GemvActivations(out)
        if self._stores_interleaved(following):
            stored = self.linear.empty_activations(following, step.tokens)
            stored = stored._replace(factors=self._ones[: step.tokens])
            self._attend_rows(qkv, op, stored)
            return stored
        takes_rows = self.linear.takes_rows(following, step.tokens)
        make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
        dtype = following.dense_dtype if takes_rows else torch.float32
        out = make(step.tokens, following.columns, dtype=dtype, device=self.device)
        self._attend_rows(qkv, op, out)
        if takes_rows:
            return Activations(out, None, False)
        converted = self.linear.convert(out, following, pdl=self.pdl)
        self.mark("quantize")
        return converted

    def _stores_interleaved(self, w: PackedWeight) -> bool:
        """Return whether attention stores what the packed product with `w` reads: every row is a weighted mean of
        values, which fit float16."""
        return w.columns % GROUP_COLUMNS == 0 and self.linear.stays_packed(w, self.step.tokens)

    def _attend_rows(self, qkv: torch.Tensor, op: Attention, out: torch.Tensor | Activations) -> None:
        if self.step.decoding:
            self._decode(qkv, op, out)
        if "tile_first" in self.step.arrays:
            self._prefill(qkv, op, out)

    def _attend_gated(self, op: Attention, w: PackedWeight, x: AnyActivations, qkv: torch.Tensor) -> AnyActivations:
        """Attend, and multiply by the sigmoid of the gate."""
        make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
        rows = make(self.step.tokens, op.n_heads * op.head_dim, device=self.device)
        self._attend_rows(qkv, op, rows)
        gate = self._multiply("qkv", self._same_rows(x, w, op), w)
        self.mark("attention_gate")
        out = self._activations(op.following, self.step.tokens)
        launch_gate(rows, _one_split(gate), out, pdl=self.pdl)
        self.mark("gate")
        return out

    def mix(self, op: GatedDelta, x: AnyActivations) -> AnyActivations:
        """Apply the gated delta rule; return activations of the output projection."""
        step, arrays, state = self.step, self.step.arrays, self.step.kv[op.layer]
        projected = _one_split(self._multiply("qkv", x, op.qkv, QKV_SPLITS))
        gates = _one_split(self._multiply("qkv", self._same_rows(x, op.gate, op), op.gate))
        self.mark("delta_input")
        slots, one_token = StateInputs(*(arrays[name] for name in StateInputs._fields)), "tile_first" not in arrays
        qkv = launch_conv(projected, op.conv, state, slots, "silu", gated=False, one_token=one_token, pdl=self.pdl)
        self.mark("causal_conv")
        rule = qkv, gates, op.params, op.weights, state, slots
        if one_token or self.linear.batch_invariant or not has_chunks(op.params):
            mixed = launch_delta(*rule, self.pdl)
        else:
            chunks = arrays["tile_request"], arrays["tile_first"], arrays["num_tiles"]
            mixed = launch_delta_chunks(*rule, chunks)
        self.mark("gated_delta")
        out = self._activations(op.following, step.tokens)
        launch_gate(mixed, projected, out, op.weights.norm, op.params.eps, self.pdl)
        self.mark("gate")
        return out

    def convolve(self, op: ShortConv, x: AnyActivations) -> AnyActivations:
        """Apply the gated short convolution; return activations of the output projection."""
        step, arrays = self.step, self.step.arrays
        projected = _one_split(self._multiply("qkv", x, op.qkv, QKV_SPLITS))
        self.mark("conv_input")
        slots, one_token = StateInputs(*(arrays[name] for name in StateInputs._fields)), "tile_first" not in arrays
        rows = launch_conv(
            projected, op.conv, step.kv[op.layer], slots, op.activation, gated=True, one_token=one_token, pdl=self.pdl
        )
        out = self._activations(op.following, step.tokens)
        launch_gate(rows, None, out, pdl=self.pdl)
        self.mark("causal_conv")
        return out

    def _same_rows(self, x: AnyActivations, w: PackedWeight, op: Attention | GatedDelta) -> AnyActivations:
        """Return the rows that the first product of an op reads as activations of another."""
        first, tokens = op.qkv, self.step.tokens
        is_same = (w.is_packed, w.is_fp8, w.dense_dtype) == (first.is_packed, first.is_fp8, first.dense_dtype)
        if is_same and self.linear.stays_packed(w, tokens) == self.linear.stays_packed(first, tokens):
            return x
        assert op.input_norm is not None
        return self._norm(None, op.input_norm, op.input_eps, w)

    def _decode(self, qkv: torch.Tensor, op: Attention, out: Any) -> None:
        """Attend for decoding tokens by split-KV."""
        step, arrays = self.step, self.step.arrays
        kv = step.kv[op.layer]
        config = split_kv_config(step.decoding, op.n_heads, kv.k.shape[1])
        scratch = split_kv_scratch(step.decoding, op.n_heads, op.head_dim, config, self.device)
        scratch = *scratch, self._counters_for(step.decoding, op.n_heads)
        positions, tables, width = (arrays[name] for name in ("decode_positions", "tables", "width"))
        rope = step.ropes[id(op.rope)]
        launch_decode_attention(
            qkv, op, kv, rope, positions, tables, width, step.decoding, config, scratch, out, self.pdl,
            None if op.rope.axes is None else arrays["decode_turns"],
        )  # fmt: skip
        self.mark("rope_kv_attention")

    def _prefill(self, qkv: torch.Tensor, op: Attention, out: torch.Tensor | Activations) -> None:
        """Rotate, store and attend for the tokens of prompts."""
        arrays, kv, rope = self.step.arrays, self.step.kv[op.layer], self.step.ropes[id(op.rope)]
        q = torch.empty(self.step.tokens, op.n_heads, op.head_dim, dtype=query_dtype(kv.k.dtype), device=self.device)
        norms = op.bias, op.q_norm, op.k_norm, op.eps
        exact = self.linear.batch_invariant
        options: dict[str, Any] = {"exact": exact, "v_norm": op.v_norm, "pdl": self.pdl}
        turns = arrays["positions" if op.rope.axes is None else "turns"]
        launch_rope_store(qkv, kv, rope, turns, arrays["slots"], q, *norms, **options)
        self.mark("rope_kv_write")
        launch_prefill_attention(q, kv, self.step.tiles, op.params, out, op.sinks, self.pdl)
        self.mark("attention")

    def _counters_for(self, decoding: int, heads: int) -> torch.Tensor:
        """Return zeros, which the kernel leaves as zeros."""
        if decoding > MAX_COUNTERS:  # in no graph: those hold the address of the shared ones
            return torch.zeros(decoding * heads, dtype=torch.int32, device=self.device)
        if heads not in self._counters:
            self._counters[heads] = torch.zeros(MAX_COUNTERS * heads, dtype=torch.int32, device=self.device)
        return self._counters[heads]


def _one_split(splits: torch.Tensor) -> torch.Tensor:
    """Return the sum of (splits, tokens, rows); of one split, itself in its own type."""
    return splits[0] if len(splits) == 1 else sum_splits(splits)


def _has_epilogue(x: AnyActivations, w: PackedWeight, out: AnyActivations) -> TypeGuard[GemvActivations]:
    """Return whether the product is a GEMV that stores `out` itself: of one part, and a dense one stores no int8."""
    is_gemv = isinstance(x, GemvActivations) and isinstance(out, GemvActivations) and len(w.parts) == 1
    return is_gemv and (w.is_packed or isinstance(out.values, torch.Tensor))
