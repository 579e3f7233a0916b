"""The op table on an NVIDIA GPU: Triton kernels on PyTorch tensors. `reference.py` says what each op means.

Weights are copied and repacked when they are prepared (planes.py), activations are float32 on the device, and keys and
values bfloat16, float16, float32 or float8 (paged.py). Whole steps go through decoder.py; op by op is for the families
that it does not know, and for comparing. Under Triton's interpreter all of it runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import KV_CUDA
from ...weights import Checkpoint, Tensor
from .. import cuda_probe
from ..ops import (
    CUDA_KV_TYPES,
    AttentionParams,
    Backend,
    Batch,
    FusedForward,
    Ints,
    KVLayer,
    Logprobs,
    ModelParts,
    RopeTable,
    SampleRow,
)
from . import decoder, device, linear, paged, repack, sampling, unfused_ops
from .forward_batched import FIXED_QUERIES


class CudaBackend(Backend):
    """Triton kernels on one GPU; `deterministic`: products and attention sum in an order that no batch changes."""

    name = "cuda"
    kv_types = CUDA_KV_TYPES
    default_kv_type = KV_CUDA
    has_device_memory = True
    has_async_sampling = True

    def __init__(self, index: int | None = None, *, deterministic: bool = False) -> None:
        device.use(device.require(index))
        self.device = str(device.current())
        self.deterministic = deterministic

    def free_memory(self) -> int:
        return device.free_bytes()

    def allocated_memory(self) -> int:
        return device.allocated_bytes()

    def has_failed(self) -> bool:
        return device.is_lost()

    def weight_bytes(self, checkpoint: Checkpoint, types: Mapping[str, str] | None = None) -> int:
        return cuda_probe.packed_bytes(checkpoint, types)

    def require_fp8(self) -> None:
        device.require_fp8()

    def prepare(self, tensors: Sequence[Tensor]) -> repack.Matrix:
        with device.memory_errors():
            return repack.prepare(tensors)

    def prepare_vector(self, values: NDArray[np.float32]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device.current())

    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "bfloat16") -> KVLayer:
        return paged.empty_kv(blocks, block_size, kv_heads, head_dim, kind)

    def embed(self, table: repack.Matrix, ids: Ints, scale: float = 1.0) -> torch.Tensor:
        device.activate()  # the first op of a step
        rows = table.rows_at(device.upload(ids, torch.int64))
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return unfused_ops.norm(x, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return unfused_ops.norm(x, weight, eps, residual)

    def linear(self, x: torch.Tensor, w: repack.Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = linear.in_fixed_order(x, w) if self.deterministic else linear.times(x, w)
        return out if bias is None else out + bias

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Ints,
        table: RopeTable,
        kv: KVLayer,
        slot_mapping: Ints,
    ) -> torch.Tensor:
        return unfused_ops.rope_store(q, k, v, positions, table, kv, slot_mapping)

    def attention(self, q: torch.Tensor, kv: KVLayer, batch: Batch, params: AttentionParams) -> torch.Tensor:
        if self.deterministic:
            return unfused_ops.attention(q, kv, batch, params, FIXED_QUERIES)
        return unfused_ops.attention(q, kv, batch, params)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return unfused_ops.gated(gate_up, activation)

    def take(self, x: torch.Tensor, index: Ints) -> torch.Tensor:
        return x[device.upload(index, torch.int64)]

    def logits(self, x: torch.Tensor, head: repack.Matrix, soft_cap: float = 0.0) -> torch.Tensor:
        raw = linear.in_fixed_order(x, head) if self.deterministic else linear.times(x, head, fine=True)
        return soft_cap * torch.tanh(raw / soft_cap) if soft_cap else raw

    def fuse(self, model: ModelParts) -> FusedForward | None:
        return decoder.fuse(model, fixed=self.deterministic)

    def sample_async(self, raw_logits: torch.Tensor, rows: Sequence[SampleRow]) -> sampling.Later:
        return sampling.sample_later(raw_logits, rows)

    def sample(self, raw_logits: torch.Tensor, rows: Sequence[SampleRow]) -> Ints:
        return sampling.sample(raw_logits, rows)

    def logprobs(self, raw_logits: torch.Tensor, chosen: Ints, k: int) -> Logprobs:
        return sampling.logprobs(raw_logits, chosen, k)
