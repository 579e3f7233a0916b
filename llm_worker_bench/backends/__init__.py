"""Functions over a backend for measuring, beyond its op table.

A module for a backend is imported when such a backend is measured: kernels of the CPU need Numba, of a GPU PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends.ops import Array, AttentionParams, Backend, Batch, Ints, KVLayer, RopeTable
from llm_worker_rbee.backends.reference import attention_scores, causal_mask, rope

Floats = NDArray[np.float32]


class OpParts(Protocol):
    """Parts of ops that a step fuses with others, or does not need: prepared one by one.

    Each method returns a function that computes its part and returns it. Heads are (T, heads, dim).
    """

    def rope(self, q: Array, k: Array, positions: Ints, table: RopeTable) -> Callable[[], Sequence[Array]]:
        """Rotate q and k."""

    def attention_scores(self, q: Array, k: Array, scale: float) -> Callable[[], Array]:
        """Multiply each query with all keys: (heads, T, S)."""

    def causal_mask(self, scores: Array, *, cached: bool) -> Callable[[], Array]:
        """Make the causal mask, unless it is cached, and apply it to scores (1, heads, S, S)."""


class ReferenceParts:
    """Parts of the reference's ops."""

    def rope(self, q: Floats, k: Floats, positions: Ints, table: RopeTable) -> Callable[[], tuple[Floats, Floats]]:
        return lambda: (rope(q, positions, table), rope(k, positions, table))

    def attention_scores(self, q: Floats, k: Floats, scale: float) -> Callable[[], Floats]:
        queries, keys = (np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (q, k))
        return partial(attention_scores, queries, keys, AttentionParams(scale))

    def causal_mask(self, scores: Floats, *, cached: bool) -> Callable[[], Floats]:
        positions, hidden = np.arange(scores.shape[-1]), np.float32(-np.inf)
        masks = {len(positions): causal_mask(positions, positions)}
        if cached:
            return lambda: np.where(masks[len(positions)], scores, hidden)
        return lambda: np.where(causal_mask(positions, positions), scores, hidden)


def op_parts(ops: Backend) -> OpParts:
    """Return the parts of a backend's ops."""
    if ops.name == "cpu":
        from .cpu_parts import CpuParts

        assert ops.threads is not None
        return CpuParts(ops.threads)
    return _cuda_parts().CudaParts() if ops.name == "cuda" else ReferenceParts()


def prepare_attention(ops: Any, q: Array, kv: KVLayer, batch: Batch, params: AttentionParams) -> Callable[[], Array]:
    """Return a function that attends with these arguments again and again."""
    attend: Callable[[], Array]
    attend = (ops.prepare_attention if ops.name == "cpu" else partial(partial, ops.attention))(q, kv, batch, params)
    return attend


def prepare_calls(ops: Any, function: Callable[[], object], count: int) -> Callable[[], object]:
    """Return a function that calls another so many times and waits for the results; a GPU replays a graph."""
    if ops.name == "cuda":
        replay: Callable[[], object] = _cuda_parts().prepare_calls(function, count, ops.torch_device)
        return replay

    def call() -> None:
        for _ in range(count):
            function()

    return call


def measure_device(ops: Any) -> tuple[int, float, float, dict[str, float]] | None:
    """Measure a backend's device: bytes read, their rate per second, operations per second in float16, and in the
    other types of its products by name; None: it is the host."""
    if not on_gpu(ops):
        return None
    limits: tuple[int, float, float, dict[str, float]] = _cuda_parts().measure_limits(ops.torch_device)
    return limits


def peak_device_memory(ops: Any) -> dict[str, int]:
    """Return the largest bytes so far of tensors (`tensors`) and of the process (`process`) on the device."""
    return _cuda_parts().peak_memory(ops.torch_device) if on_gpu(ops) else {}


def on_gpu(ops: Any) -> bool:
    """Return whether a backend computes on a GPU; the CUDA backend may be interpreted on the host."""
    return bool(ops.name == "cuda" and ops.torch_device.type == "cuda")


def kernel_trace(ops: Any) -> Any:
    """Return an `ops.KernelTrace` of the device; None where results are ready when an op returns."""
    return _cuda_parts().CudaTrace() if on_gpu(ops) else None


def _cuda_parts() -> Any:
    from . import cuda_parts

    return cuda_parts
