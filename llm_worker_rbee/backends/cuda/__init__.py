"""The op table on an NVIDIA GPU: Triton kernels on PyTorch tensors. `reference.py` says what each op means.

Weights are copied and repacked when they are prepared (planes.py), activations are float32 on the device, and keys and
values bfloat16, float16, float32 or float8 (paged.py). Whole steps go through decoder.py; op by op is for the families
that it does not know, and for comparing. Under Triton's interpreter all of it runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...weights import Tensor
from ..ops import AttentionParams, Batch, Fused, Ints, KVLayer, Logprobs, ModelParts, RopeTable, SampleRow
from . import attention as _attention  # noqa: F401  loaded before the op of that name is defined, which then stays
from . import decoder, device, matrix, paged, products, sampling, single
from .device import free_bytes, is_lost, use

__all__ = ["DEVICE", "device_bytes", "free_bytes", "is_lost", "use"]

DEVICE: str  # the one in use: "cuda:0"; "cpu" under the interpreter


def __getattr__(name: str) -> Any:
    if name == "DEVICE":
        return str(device.current())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def device_bytes() -> int:
    """Memory of the device that our tensors take."""
    return device.allocated_bytes()


def prepare(tensors: Sequence[Tensor]) -> matrix.Matrix:
    """Repack a weight for the kernels; several tensors become one matrix, their rows one after the other."""
    with device.memory_errors():
        return matrix.prepare(tensors)


def prepare_vector(values: NDArray[np.float32]) -> torch.Tensor:
    """A small float32 vector on the device."""
    return torch.tensor(values, dtype=torch.float32, device=device.current())


def empty_kv(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "bfloat16") -> KVLayer:
    """Room for the keys and values of one layer: (blocks, kv_heads, P, head_dim)."""
    return paged.empty_kv(blocks, block_size, kv_heads, head_dim, kind)


def embed(table: matrix.Matrix, ids: Ints, scale: float = 1.0) -> torch.Tensor:
    """Rows of the embedding table: (T,) -> (T, width)."""
    device.activate()  # the first op of a step
    rows = table.rows_at(device.upload(ids, torch.int64))
    return rows if scale == 1.0 else rows * scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return single.norm(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream with `x` added, and its norm."""
    return single.norm(x, weight, eps, residual)


def linear(x: torch.Tensor, w: matrix.Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + bias: (T, columns) -> (T, rows)."""
    out = products.times(x, w)
    return out if bias is None else out + bias


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: Ints,
    table: RopeTable,
    kv: KVLayer,
    slot_mapping: Ints,
) -> torch.Tensor:
    """Rotate q and k, write k and v into the cache, give back q: (T, heads, head_dim)."""
    return single.rope_store(q, k, v, positions, table, kv, slot_mapping)


def attention(q: torch.Tensor, kv: KVLayer, batch: Batch, params: AttentionParams) -> torch.Tensor:
    """Each query over its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim)."""
    return single.attention(q, kv, batch, params)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, where the first half of each row is the gate: (T, 2 * d_ff) -> (T, d_ff)."""
    return single.gated(gate_up, activation)


def take(x: torch.Tensor, index: Ints) -> torch.Tensor:
    """Some rows of x."""
    return x[device.upload(index, torch.int64)]


def logits(x: torch.Tensor, head: matrix.Matrix, soft_cap: float = 0.0) -> torch.Tensor:
    """The output head: (N, width) -> (N, vocabulary)."""
    raw = products.times(x, head, fine=True)
    return soft_cap * torch.tanh(raw / soft_cap) if soft_cap else raw


def fuse(model: ModelParts) -> Fused | None:
    """A whole step in few kernels, where the decoder knows all that the family needs."""
    return decoder.fuse(model)


def sample_later(raw_logits: torch.Tensor, rows: Sequence[SampleRow]) -> sampling.Later:
    """The same, without waiting for it."""
    return sampling.sample_later(raw_logits, rows)


def sample(raw_logits: torch.Tensor, rows: Sequence[SampleRow]) -> Ints:
    """One token for each row: (N, vocabulary) -> (N,)."""
    return sampling.sample(raw_logits, rows)


def logprobs(raw_logits: torch.Tensor, chosen: Ints, k: int) -> Logprobs:
    """Log-probabilities of the chosen tokens and of the k likeliest, from the raw logits."""
    return sampling.logprobs(raw_logits, chosen, k)
