"""Per-layer embeddings, scaled streams and layers without KV heads: the CPU's kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend

cpu, exact = CpuBackend(), ReferenceBackend()
random = np.random.default_rng(4)


def floats(*shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dim", [16, 20])
def test_per_layer_inputs_and_gate_match_reference_and_do_not_depend_on_the_batch(dim: int) -> None:
    x, tokens, weight, gate = floats(7, 3 * dim), floats(7, 3 * dim), floats(dim), floats(7, dim)
    inputs = cpu.per_layer_inputs(x, tokens, weight, 1e-5)
    np.testing.assert_allclose(inputs, exact.per_layer_inputs(x, tokens, weight, 1e-5), rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(inputs[2:3], cpu.per_layer_inputs(x[2:3], tokens[2:3], weight, 1e-5))
    gated = cpu.per_layer_gate(gate, inputs, 1, "gelu_tanh")
    np.testing.assert_allclose(gated, exact.per_layer_gate(gate, inputs, 1, "gelu_tanh"), rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(gated[2:3], cpu.per_layer_gate(gate[2:3], inputs[2:3], 1, "gelu_tanh"))


def test_add_rms_norm_scales_the_sum() -> None:
    x, residual, weight = floats(3, 40), floats(3, 40), floats(40)
    for ops in (cpu, exact):
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-5, 0.25)
        np.testing.assert_array_equal(total, (residual + x) * np.float32(0.25))
        np.testing.assert_allclose(normed, exact.rms_norm(total, weight, 1e-5), rtol=2e-5, atol=1e-5)


def test_layer_without_kv_heads_rotates_queries_and_writes_nothing() -> None:
    q, nothing = floats(5, 4, 16), np.empty((5, 0, 16), np.float32)
    table = RopeTable(np.float32(0.5) ** np.arange(8, dtype=np.float32), 1.0)
    turned = []
    for ops in (cpu, exact):
        kv = ops.empty_kv(1, 16, 2, 16)
        turned.append(ops.rope_store(q, nothing, nothing, np.arange(5), table, kv, np.arange(5)))
        assert not any(np.any(part) for part in kv)
    np.testing.assert_allclose(*turned, rtol=2e-5, atol=1e-5)
