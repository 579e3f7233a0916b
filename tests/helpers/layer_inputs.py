"""Inputs for tests of single layers: weights from arrays, ragged batches over shuffled KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends.ops import Batch, Ints, PackedWeight
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.config import ModelConfig
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.models.families import BY_HF
from llm_worker_rbee.models.metadata import model_config_from_hf
from llm_worker_rbee.weights import Tensor
from llm_worker_rbee.weights.quants import BLOCK_TYPES

ops = ReferenceBackend()

Floats = NDArray[np.float32]
BLOCK_SIZE = 4


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def tensor(values: Floats) -> Tensor:
    data = np.ascontiguousarray(values, np.float32)
    return Tensor("w", BLOCK_TYPES["F32"], data.shape, data.reshape(-1).view(np.uint8))


def quantized(kind: str, values: Floats) -> Tensor:
    """Return values in a block type, quantized by the `gguf` package."""
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return Tensor("w", BLOCK_TYPES[kind], values.shape, np.ascontiguousarray(data).view(np.uint8).reshape(-1))


def pack_weights(*weights: Any) -> PackedWeight:
    """Pack torch linear layers (or arrays), stacked by rows."""
    arrays = [w.weight.detach().numpy() if hasattr(w, "weight") else w for w in weights]
    return ops.prepare([tensor(a) for a in arrays])


def linear(*weights: Any) -> Linear:
    """Return the same as a layer, with the biases of the torch layers."""
    biases = [w.bias.detach().numpy() for w in weights if getattr(w, "bias", None) is not None]
    return Linear(pack_weights(*weights), ops.prepare_vector(np.concatenate(biases)) if biases else None)


def hf_model_config(hf: Any) -> ModelConfig:
    return model_config_from_hf(hf.to_dict(), BY_HF[hf.model_type])


class BlockTables:
    """Block tables of several requests in a cache with spare blocks: shuffled, not contiguous."""

    def __init__(self, lengths: list[int], rng: np.random.Generator, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        need = [-(-length // block_size) for length in lengths]
        self.n_blocks = sum(need) + 3
        free = rng.permutation(self.n_blocks)
        self.table: Ints = np.zeros((len(lengths), max(need)), np.int64)
        for r, n in enumerate(need):
            self.table[r, :n], free = free[:n], free[n:]

    def slots(self, request: int, positions: Ints) -> Ints:
        blocks = self.table[request, positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size, np.int64)

    def batch(self, spans: list[tuple[int, int, int]]) -> Batch:
        """Return the batch of a step that computes tokens start..end of each (request, start, end)."""
        positions = [np.arange(start, end) for _, start, end in spans]
        return Batch(
            ids=np.zeros(sum(map(len, positions)), np.int64),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate([self.slots(r, p) for (r, _, _), p in zip(spans, positions, strict=True)]),
            query_start=np.cumsum([0, *map(len, positions)]),
            context_len=np.array([end for _, _, end in spans], np.int64),
            block_table=self.table[[r for r, _, _ in spans]],
            logits_index=np.empty(0, np.int64),
        )


def difference(a: Any, b: Any) -> Floats:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return np.asarray(np.abs(a - b), np.float32)


def assert_checkpoint(run: Callable[[], Floats], expected: Any, tolerance: float, mean: float | None = None) -> None:
    """Assert that a result is near the independent reference, finite, and bitwise equal when run again."""
    ours = run()
    assert ours.dtype == np.float32
    assert np.isfinite(ours).all()
    found = difference(ours, expected)
    assert found.max() < tolerance
    assert mean is None or found.mean() < mean
    for _ in range(2):
        assert run().tobytes() == ours.tobytes()


def assert_caught(wrong: Floats, expected: Any, tolerance: float) -> None:
    """Assert that a wrong computation fails the same check."""
    assert difference(wrong, expected).max() > tolerance
