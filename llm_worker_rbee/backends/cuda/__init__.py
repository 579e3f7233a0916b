"""The CUDA backend: Triton kernels on PyTorch tensors. `reference.py` defines what each op computes.

Weights are repacked when they are prepared (repack.py), activations are float32 on the device, keys and values
bfloat16, float16, float32 or float8. Whole steps go through decoder.py; unfused ops serve comparison, and the families
that it does not take. Under Triton's interpreter all of it runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import KV_CUDA
from ...weights import Checkpoint, Tensor
from .. import ops, select
from . import decoder, device, linear, sampling, unfused_ops
from .packed_weight import PackedWeight
from .repack import pack_weight


class CudaBackend(ops.Backend):
    """Ops on one GPU; `deterministic` makes products and attention batch-invariant, which costs speed (docs/gpu.md)."""

    name = "cuda"
    kv_types = ops.CUDA_KV_TYPES
    default_kv_type = KV_CUDA
    has_device_memory = True
    has_async_sampling = True

    def __init__(self, index: int | None = None, *, deterministic: bool = False) -> None:
        """Take GPU `index`, by default the one with most free memory."""
        self.torch_device = device.open_device(index)
        self.device = str(self.torch_device)
        self.deterministic = deterministic
        self._unfused = unfused_ops.UnfusedOps(self.torch_device)

    def free_memory(self) -> int:
        return device.free_bytes(self.torch_device)

    def allocated_memory(self) -> int:
        return device.allocated_bytes(self.torch_device)

    def peak_memory(self) -> dict[str, int]:
        return device.peak_bytes(self.torch_device)

    def measure_limits(self) -> tuple[int, float, float]:
        return device.measure_limits(self.torch_device)

    def has_failed(self) -> bool:
        return device.has_failed(self.torch_device)

    def weight_bytes(self, checkpoint: Checkpoint, types: Mapping[str, str] | None = None) -> int:
        return select.packed_bytes(checkpoint, types)

    def require_fp8(self) -> None:
        device.require_fp8(self.torch_device)

    def prepare(self, tensors: Sequence[Tensor]) -> PackedWeight:
        with device.as_memory_error():
            return pack_weight(tensors, self.torch_device)

    def prepare_vector(self, values: NDArray[np.float32]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.torch_device)

    def empty_kv(
        self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "bfloat16"
    ) -> ops.KVLayer:
        return unfused_ops.empty_kv(blocks, block_size, kv_heads, head_dim, kind, self.torch_device)

    def embed(self, table: PackedWeight, ids: ops.Ints, scale: float = 1.0) -> torch.Tensor:
        device.activate(self.torch_device)  # the first op of a step
        rows = table.dequantize_rows(device.upload(ids, self.torch_device, torch.int64))
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return unfused_ops.rms_norm(x, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return unfused_ops.rms_norm(x, weight, eps, residual)

    def linear(self, x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._linear(x, w)
        return out if bias is None else out + bias

    def _linear(self, x: torch.Tensor, w: PackedWeight, *, two_term: bool = False) -> torch.Tensor:
        return linear.linear_batch_invariant(x, w) if self.deterministic else linear.linear(x, w, two_term=two_term)

    def rope_store(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: ops.Ints, table: ops.RopeTable,
        kv: ops.KVLayer, slot_mapping: ops.Ints,
    ) -> torch.Tensor:  # fmt: skip
        return self._unfused.rope_store(q, k, v, positions, table, kv, slot_mapping)

    def attention(
        self, q: torch.Tensor, kv: ops.KVLayer, batch: ops.Batch, params: ops.AttentionParams
    ) -> torch.Tensor:
        return self._unfused.attention(q, kv, batch, params, batch_invariant=self.deterministic)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return unfused_ops.gated(gate_up, activation)

    def take(self, x: torch.Tensor, index: ops.Ints) -> torch.Tensor:
        return x[device.upload(index, self.torch_device, torch.int64)]

    def logits(self, x: torch.Tensor, head: PackedWeight, soft_cap: float = 0.0) -> torch.Tensor:
        raw = self._linear(x, head, two_term=True)
        return soft_cap * torch.tanh(raw / soft_cap) if soft_cap else raw

    def fuse(self, model: ops.ModelParts) -> ops.FusedForward | None:
        return decoder.fuse(model, self.torch_device, batch_invariant=self.deterministic)

    def sample_async(self, raw_logits: torch.Tensor, rows: Sequence[ops.SampleRow]) -> sampling.PendingSample:
        return sampling.sample_async(raw_logits, rows)

    def sample(self, raw_logits: torch.Tensor, rows: Sequence[ops.SampleRow]) -> ops.Ints:
        return sampling.sample(raw_logits, rows)

    def logprobs(self, raw_logits: torch.Tensor, chosen: ops.Ints, k: int) -> ops.Logprobs:
        return sampling.logprobs(raw_logits, chosen, k)
