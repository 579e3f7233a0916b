"""Activations as int8: the nearest step of each block, and scales whose product with simd.MAGIC is exact."""

from __future__ import annotations

import numpy as np

from llm_worker_rbee.backends.cpu.kernels import quantize_activations
from llm_worker_rbee.backends.cpu.kernels.elementwise import quantize_task
from llm_worker_rbee.backends.cpu.kernels.program import Step
from llm_worker_rbee.backends.cpu.program import Program, new_step


def test_values_scales_and_sums_of_both_terms() -> None:
    tokens, columns = 5, 96
    x = np.random.default_rng(1).standard_normal((tokens, columns), np.float32)
    x[2, 32:64] = 0
    arrays = x, *quantize_activations.allocate(tokens, columns)
    step = new_step(Step.END + len(arrays))
    step[Step.TOKENS], step[Step.END :] = tokens, [array.ctypes.data for array in arrays]
    Program([quantize_task(Step.TOKENS, Step.END, Step.END + 1, columns, two_term=True)]).run(step, 1)
    blocks = 2 * tokens * columns // 32
    q, scale = arrays[1][: blocks * 32].reshape(blocks, 32).astype(np.float64), arrays[2][:blocks]
    sums, sums16, scaled, scaled16 = arrays[3][:blocks], arrays[4][: 2 * blocks], arrays[5][:blocks], arrays[6]
    assert not (scale.view(np.uint32) & 3).any()  # 22 bits
    np.testing.assert_array_equal(sums, q.sum(1))
    np.testing.assert_array_equal(sums16, q.reshape(-1, 16).sum(1))
    np.testing.assert_array_equal(scaled, sums.astype(np.float32) * scale)
    np.testing.assert_array_equal(scaled16[: 2 * blocks], sums16.astype(np.float32) * scale.repeat(2))
    first, second = np.split(q * scale[:, None], 2)
    wanted, steps = x.reshape(-1, 32), scale[: blocks // 2, None]
    assert (np.abs(first - wanted) <= 0.501 * steps).all()
    assert (np.abs(first + second - wanted) <= 0.51 * steps / 254).all()
