"""The CUDA backend: Triton kernels on PyTorch tensors. `reference.py` defines what each op computes.

Weights are repacked when they are prepared (repack.py), activations are float32 on the device, keys and values
bfloat16, float16, float32 or float8 in (blocks, kv_heads, P, dim). Whole steps go through forward.py; unfused ops serve
comparison, and models that it does not take: in deterministic mode they have its bits. Their arrays of a step are
uploaded once and serve all layers: the arrays of a Batch never change. Under Triton's interpreter all of it runs on CPU
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from ... import machine
from ...config import KV_CUDA, KV_ON_CUDA
from ...errors import InvalidRequestError
from ...weights import Checkpoint, Tensor
from .. import ops, reference, select
from ..graph import Graph
from ..ops import Ints, KVLayer, LayerCache, StateLayer
from . import device, experts, precompile, sampling
from .device import upload
from .experts import pack_experts
from .forward import CapturedForward, make_forward
from .host_rows import PinnedRows
from .kernels.attention_prefill import (
    QUERY_TILE,
    SMALL_QUERY_TILE,
    QueryTiles,
    launch_prefill_attention,
    query_dtype,
    query_tiles,
)
from .kernels.causal_conv import StateInputs, launch_conv
from .kernels.elementwise import ACTIVATIONS, launch_add_norm, launch_embedding, launch_gated, launch_head_norm
from .kernels.encoder import Product, Results, launch_activation, launch_mean, launch_norm
from .kernels.experts import launch_route
from .kernels.gated_delta import has_kernels, launch_delta, launch_gate
from .kernels.rope import launch_rope_store, rope_tables
from .linear import BatchedLinear
from .packed_weight import E4M3, Activations, PackedExperts, PackedWeight, merge_parts
from .pooling import PoolingForward
from .repack import pack_weight
from .step_inputs import warm_up_batches

KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float8": E4M3}
MODULES = (experts,)  # whose functions compute the ops that have no method
MAX_HELD = 6  # arrays of a step on the device: of its tiles, of three RoPE tables at most, spans, images


class CudaBackend(ops.Backend):
    """Ops on one GPU; `deterministic` makes products and attention batch-invariant, which costs speed (docs/gpu.md)."""

    name = "cuda"
    kv_types: tuple[str, ...] = KV_ON_CUDA
    default_kv_type = KV_CUDA
    has_device_memory = True
    has_async_sampling = True

    def __init__(self, index: int | None = None, *, deterministic: bool = False) -> None:
        """Take GPU `index`, by default the one with most free memory."""
        self.torch_device = device.open_device(index)
        self.device = str(self.torch_device)
        if self.torch_device.type == "cuda":
            self.kernel_dir = precompile.open_cache(torch.cuda.get_device_capability(self.torch_device))
        if not device.has_fp8(self.torch_device):
            self.kv_types = tuple(kind for kind in KV_ON_CUDA if kind != "float8")
        self.deterministic = deterministic
        self.query_tile = SMALL_QUERY_TILE if deterministic else QUERY_TILE
        self._linear = BatchedLinear(self.torch_device, batch_invariant=deterministic)
        self._held: list[tuple[tuple[Any, ...], Any]] = []  # what was made from host arrays
        self._adapter_stream: torch.cuda.Stream | None = None

    def to_host(self, x: torch.Tensor) -> NDArray[np.float32]:
        return sampling.to_host(x.float())

    def synchronize(self) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def free_memory(self) -> int:
        """Return the free bytes, with what the allocator holds in reserve."""
        if self.torch_device.type == "cpu":
            return machine.memory()[1] or 0
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free + torch.cuda.memory_reserved(self.torch_device) - self.allocated_memory())

    def allocated_memory(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device)) if self.torch_device.type == "cuda" else 0

    def has_failed(self) -> bool:
        """Return whether the device cannot compute any more: an illegal access ends all that a process can do on it."""
        if self.torch_device.type == "cpu":
            return False
        try:
            torch.cuda.synchronize(self.torch_device)
        except Exception:  # any error means that no result will come
            return True
        return False

    start_compiler = staticmethod(precompile.start_compiler)
    sample_async = staticmethod(sampling.sample_async)
    sample = staticmethod(sampling.sample)
    logprobs = staticmethod(sampling.logprobs)

    def weight_bytes(self, checkpoint: Checkpoint, types: Mapping[str, str] | None = None) -> int:
        return select.packed_bytes(checkpoint, types)

    def require_fp8(self) -> None:
        device.require_fp8(self.torch_device)

    def prepare(self, tensors: Sequence[Tensor]) -> PackedWeight:
        with device.as_memory_error():
            return merge_parts(pack_weight(tensors, self.torch_device))

    def prepare_experts(self, experts: Sequence[Sequence[Tensor]]) -> PackedExperts:
        with device.as_memory_error():
            return pack_experts(experts, self.torch_device)

    def prepare_vector(self, values: NDArray[np.float32]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.torch_device)

    def pack_adapter(self, site: ops.LoraSite, pairs: ops.SitePairs) -> Any:
        device.activate(self.torch_device)  # in a thread that loads adapters
        if self._adapter_stream is None and self.torch_device.type == "cuda":
            self._adapter_stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        with device.as_memory_error(), device.copying_on(self._adapter_stream):
            return self._linear.pack_adapter(site, pairs)

    def place_adapter(self, site: ops.LoraSite, slot: int, packed: Any, num_slots: int) -> None:
        self._linear.place_adapter(site, slot, packed, num_slots)

    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "bfloat16") -> KVLayer:
        if kind not in KV_DTYPES:
            remedy = f"use one of {', '.join(KV_DTYPES)}"
            raise InvalidRequestError(f"kv_type {kind!r} is not for a GPU: {remedy}", "kv_type")
        shape = (blocks, kv_heads, block_size, head_dim)
        with device.as_memory_error():
            return KVLayer(*(torch.zeros(shape, dtype=KV_DTYPES[kind], device=self.torch_device) for _ in range(2)))

    def empty_state(
        self, slots: int, conv_shape: tuple[int, int], matrix_shape: tuple[int, int, int] | None = None
    ) -> StateLayer:
        shapes = (conv_shape,) if matrix_shape is None else (conv_shape, matrix_shape)
        with device.as_memory_error():
            return StateLayer(*(torch.zeros(slots, *shape, device=self.torch_device) for shape in shapes))

    def host_rows(self, arrays: Sequence[torch.Tensor], max_bytes: int) -> PinnedRows:
        return PinnedRows(arrays, max_bytes)

    @property
    def versions(self) -> Sequence[str]:
        name = "cpu" if self.torch_device.type == "cpu" else torch.cuda.get_device_name(self.torch_device)
        return name, torch.__version__, triton.__version__, str(self.deterministic)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the result of `make` for these host arrays: layers of a step share it."""
        held = self._held  # other threads have steps of their own
        for source, value in held:
            if len(source) == len(key) and all(a is b for a, b in zip(source, key, strict=True)):
                return value
        value = make()
        self._held = [(key, value), *held[: MAX_HELD - 1]]
        return value

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=self.torch_device)

    def compute(self, op: str, args: dict[str, Any]) -> Any:
        """Call the function of that name beside its kernels; an op without one is computed as the reference does."""
        function = next((vars(module)[op] for module in MODULES if op in vars(module)), None)
        return self._compute_on_host(op, args) if function is None else function(*args.values())

    def _compute_on_host(self, op: str, args: dict[str, Any]) -> Any:
        on_host = {k: arg.cpu().numpy() if isinstance(arg, torch.Tensor) else arg for k, arg in args.items()}
        result = getattr(reference, op)(**on_host)
        if isinstance(result, tuple):
            return tuple(torch.as_tensor(part, device=self.torch_device) for part in result)
        return torch.as_tensor(result, device=self.torch_device)

    def embed(self, table: PackedWeight, ids: Ints, scale: float = 1.0) -> torch.Tensor:
        device.activate(self.torch_device)  # the first op of a step
        out = self._empty(len(ids), table.columns)
        launch_embedding(table, scale, upload(ids, self.torch_device), out)
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dim() == 2:  # over all heads together
            return self.rms_norm(x.flatten(1), weight.flatten(), eps).view(x.shape)
        if x.dim() == 3:
            return launch_head_norm(x, weight, eps, exact=self.deterministic)
        out = self._empty(*x.shape)
        launch_add_norm(None, x.contiguous(), weight, eps, Activations(out), exact=self.deterministic)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, total, out = x.shape[-1], residual.clone(), self._empty(*x.shape)
        parts, stream, exact = x.reshape(1, -1, width), total.view(-1, width), self.deterministic
        launch_add_norm(parts, stream, weight, eps, Activations(out), exact=exact, stream_scale=scale)
        return out, total

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        out = self._empty(*x.shape)
        stream, rows = x.contiguous().view(-1, x.shape[-1]), out.view(-1, x.shape[-1])
        launch_norm(None, stream, weight, bias, eps, Results(None, rows), centered=True, exact=self.deterministic)
        return out

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = self._empty(*x.shape), self._empty(*x.shape)
        product, results = Product(x.contiguous()[None]), Results(None, out)
        stream, exact = residual.contiguous(), self.deterministic
        launch_norm(product, stream, weight, bias, eps, results, total, centered=True, exact=exact)
        return out, total

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        out = self._empty(*x.shape)
        launch_activation(Product(x.contiguous()[None]), Results(None, out), activation, gated=False)
        return out

    def mean_rows(self, x: torch.Tensor, batch: ops.Batch) -> torch.Tensor:
        return launch_mean(x.contiguous(), upload(batch.query_start, self.torch_device))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + x

    def linear(self, x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._linear(torch.as_tensor(x, device=self.torch_device), w)  # pixels are on the host
        return out if bias is None else out + bias

    split_heads = staticmethod(reference.split_heads)

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Ints,
        table: ops.RopeTable,
        kv: KVLayer,
        slot_mapping: Ints,
    ) -> torch.Tensor:
        """Return q in the attention kernel's dtype."""

        def upload_tokens() -> tuple[Any, ...]:
            rows = torch.arange(len(positions), dtype=torch.int32, device=self.torch_device)
            rope = rope_tables(table, upload(positions, self.torch_device))
            return rope, rows, upload(slot_mapping, self.torch_device)

        rope, rows, slots = self._once((positions, slot_mapping, table.inv_freq), upload_tokens)
        qkv = torch.cat((q, k, v), 1).view(1, len(q), -1)
        out = torch.empty(q.shape, dtype=query_dtype(kv.k.dtype), device=self.torch_device)
        launch_rope_store(qkv, kv, rope, rows, slots, out)
        return out

    def attention(
        self,
        q: torch.Tensor,
        kv: KVLayer,
        batch: ops.Batch,
        params: ops.AttentionParams,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Batch-invariant: the tile has a fixed number of queries, so a query's sums depend on its keys alone.
        is_small = self.deterministic or np.diff(batch.query_start).max() <= SMALL_QUERY_TILE
        queries = SMALL_QUERY_TILE if is_small else QUERY_TILE

        def upload_tiles() -> QueryTiles:
            table, tiles = batch.block_table, query_tiles(batch.query_start, queries)
            count = np.array([len(tiles[0])])
            arrays = (table, np.array(table.shape[1:]), batch.query_start, batch.context_len, count, *tiles)
            return QueryTiles(queries, len(tiles[0]), *(upload(array, self.torch_device) for array in arrays))

        out, spans = self._empty(len(q), q.shape[1] * q.shape[2]), None
        key = batch.query_start, batch.context_len, batch.block_table
        if params.spans and len(batch.spans):
            spans = self._once((batch.spans,), lambda: upload(batch.spans, self.torch_device))
        tiles = self._once(key, upload_tiles)
        launch_prefill_attention(q.contiguous(), kv, tiles, params, out, sinks, spans=spans)
        return out

    def merge(self, x: torch.Tensor, index: Ints, count: int) -> torch.Tensor:
        return self.take(x.reshape(-1, count * x.shape[1]), index)

    def pool(self, x: torch.Tensor, index: Ints, count: int) -> torch.Tensor:
        groups, total = self.take(x.reshape(-1, count, x.shape[1]), index), None
        for row in groups.unbind(1):  # in their order, as elsewhere
            total = row if total is None else total + row
        return cast(torch.Tensor, total) / count

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, y), 1)

    def clamp(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return x.clamp(low, high)

    def interpolate(self, table: torch.Tensor, places: Any) -> torch.Tensor:
        places = torch.as_tensor(places, dtype=torch.float32, device=self.torch_device)
        low, last = places.floor().long(), torch.tensor(table.shape[:2], device=self.torch_device) - 1
        (row, column), (below, right) = low.unbind(1), torch.minimum(low + 1, last).unbind(1)
        down, across = (places - low).split(1, 1)
        upper = table[row, column] * (1 - across) + table[row, right] * across
        lower = table[below, column] * (1 - across) + table[below, right] * across
        return cast(torch.Tensor, upper * (1 - down) + lower * down)

    def place_images(self, x: torch.Tensor, images: Any, rows: Ints, part: int, adds: bool = False) -> torch.Tensor:
        width, chosen = x.shape[1], np.flatnonzero(rows >= 0)
        on_device = self._once((images,), lambda: torch.as_tensor(images, device=self.torch_device))
        values = self.take(on_device[:, part * width : (part + 1) * width], rows[chosen])
        out, index = x.clone(), upload(chosen, self.torch_device, torch.int64)
        out[index] = out[index] + values if adds else values
        return out

    def gated_delta(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        gates: torch.Tensor,
        params: ops.GatedDeltaParams,
        weights: ops.GatedDeltaWeights,
        state: StateLayer,
        batch: ops.Batch,
    ) -> torch.Tensor:
        slots = self._state_inputs(batch)
        mixed = launch_delta(qkv.contiguous(), gates.contiguous(), params, weights, state, slots)
        if not has_kernels(params):
            heads = mixed.view(len(mixed), params.v_heads, params.v_dim)
            normed = launch_head_norm(heads, weights.norm, params.eps, exact=self.deterministic).view(mixed.shape)
            return normed * torch.nn.functional.silu(z[:, -mixed.shape[1] :])
        out = self._empty(*mixed.shape)
        launch_gate(mixed, z.contiguous(), Activations(out), weights.norm, params.eps)
        return out

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = self._empty(*x.shape)
        launch_gate(x.contiguous(), gate.contiguous(), Activations(out))
        return out

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        state: StateLayer,
        batch: ops.Batch,
        activation: str = "",
        gated: bool = False,
    ) -> torch.Tensor:
        slots, one_token = self._state_inputs(batch), len(batch.state_in) == len(batch.state_out)
        return launch_conv(x.contiguous(), weight, state, slots, activation, gated=gated, one_token=one_token)

    def _state_inputs(self, batch: ops.Batch) -> StateInputs:
        def upload_slots() -> StateInputs:
            requests = np.repeat(np.arange(len(batch.state_in)), np.diff(batch.query_start))
            count = np.array([len(batch.state_in)])
            arrays = batch.query_start, batch.state_in, batch.state_out, requests, count
            return StateInputs(*(upload(array, self.torch_device) for array in arrays))

        slots: StateInputs = self._once((batch, batch.state_out), upload_slots)
        return slots

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if activation not in ACTIVATIONS:  # no kernel has it
            return cast(torch.Tensor, self._compute_on_host("gated", {"gate_up": gate_up, "activation": activation}))
        out = self._empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        rows = gate_up.reshape(1, -1, gate_up.shape[-1])
        launch_gated(rows.contiguous(), Activations(out.view(rows.shape[1], -1)), activation)
        return out

    def per_layer_inputs(self, x: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        runs = x.view(len(x), -1, len(weight))
        return launch_head_norm(runs, weight, eps, exact=self.deterministic, added=tokens).view(x.shape)

    def per_layer_gate(self, x: torch.Tensor, inputs: torch.Tensor, layer: int, activation: str) -> torch.Tensor:
        dim = x.shape[1]
        return self.gated(torch.cat((x, inputs[:, layer * dim : (layer + 1) * dim]), 1), activation)

    def route(
        self,
        logits: torch.Tensor,
        params: ops.RouteParams,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return launch_route(logits.contiguous(), params, bias, scales)

    def take(self, x: torch.Tensor, index: Ints) -> torch.Tensor:
        return x[upload(index, self.torch_device, torch.int64)]

    def gather_rows(self, x: torch.Tensor, index: Ints) -> torch.Tensor:
        rows = self.take(x, index)
        if index.min(initial=0) >= 0:
            return rows
        return rows.masked_fill_(upload(index < 0, self.torch_device, torch.bool)[:, None], 0.0)

    def logits(self, x: torch.Tensor, head: PackedWeight, soft_cap: float = 0.0) -> torch.Tensor:
        raw = self._linear(x, head, is_head=True)
        return torch.tanh(raw / soft_cap) * soft_cap if soft_cap else raw

    def fuse(self, record: Callable[[], Graph]) -> ops.FusedForward | None:
        if self.torch_device.type == "cuda":
            torch.cuda.empty_cache()  # what packing needed: the KV cache takes the rest
        graph = record()
        if all(node.op != "logits" for node in graph.nodes) or any(node.op == "place_images" for node in graph.nodes):
            return PoolingForward(graph, self, self.torch_device, batch_invariant=self.deterministic)
        return make_forward(graph, self, self.torch_device, batch_invariant=self.deterministic)

    def warm_up(
        self,
        forward: ops.Forward,
        fused: ops.FusedForward | None,
        kv: Sequence[LayerCache],
        limits: ops.StepLimits,
        progress: ops.Progress,
    ) -> ops.WarmUp:
        def launch_all(*, every_size: bool) -> None:
            if isinstance(fused, CapturedForward):
                vocab_size = fused.launch_all(kv, limits, every_size=every_size)
            else:
                for batch in warm_up_batches(kv, limits):
                    vocab_size = int(forward(batch).shape[1])
            if vocab_size:
                sampling.warm_up(vocab_size, limits.max_logits, self.torch_device)

        with device.as_memory_error():
            with precompile.recording() as variants:
                launch_all(every_size=False)
            compiled = precompile.compile_variants(variants, progress)
            with precompile.count_compilations() as compilations:
                if not device.is_interpreted():
                    launch_all(every_size=True)
            if isinstance(fused, CapturedForward):
                fused.capture_all(kv, limits, progress)
        return ops.WarmUp(len(compilations.loaded), compiled)
