"""The convolution's kernel against the reference: any width, kernel and gates, and states that are written over."""

from __future__ import annotations

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import NO_TOKENS, Batch, StateLayer
from llm_worker_rbee.backends.reference import ReferenceBackend

cpu, reference = CpuBackend(), ReferenceBackend()


def make_batch(lengths: list[int], state_in: list[int], state_out: list[int]) -> Batch:
    starts = np.concatenate(([0], np.cumsum(lengths)))
    slots = {"state_in": np.array(state_in), "state_out": np.array(state_out)}
    return Batch(NO_TOKENS, NO_TOKENS, NO_TOKENS, starts, np.array(lengths), NO_TOKENS, NO_TOKENS, **slots)


@pytest.mark.parametrize(("channels", "kernel"), [(64, 3), (300, 4), (40, 2)])
@pytest.mark.parametrize(("activation", "gated"), [("", True), ("silu", False), ("", False)])
def test_convolution_equals_reference(
    channels: int, kernel: int, activation: str, gated: bool, rng: np.random.Generator
) -> None:
    """One request in its slot, one that begins and keeps two states, one that goes from a slot to another."""
    batch = make_batch([1, 8, 5], [2, -1, 0], [2, -1, -1, 1, -1, -1, -1, -1, 4, -1, -1, -1, -1, 5])
    x = rng.standard_normal((14, 3 * channels if gated else channels + 7)).astype(np.float32)
    weight = rng.standard_normal((channels, kernel)).astype(np.float32)
    state = StateLayer(rng.standard_normal((6, kernel - 1, channels)).astype(np.float32))
    there = StateLayer(state.conv.copy())
    found = cpu.causal_conv(x, weight, there, batch, activation, gated)
    expected = reference.causal_conv(x, weight, state, batch, activation, gated)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(there.conv, state.conv)


def test_a_token_has_the_same_bits_in_any_chunk(rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((11, 48)).astype(np.float32), rng.standard_normal((48, 4)).astype(np.float32)

    def run(*sizes: int) -> np.ndarray:
        state, found, at = cpu.empty_state(1, (3, 48)), [], 0
        for size in sizes:
            batch = make_batch([size], [0 if at else -1], [*[-1] * (size - 1), 0])
            found.append(cpu.causal_conv(x[at : at + size], weight, state, batch, "silu"))
            at += size
        return np.concatenate([*found, state.conv[0]])

    np.testing.assert_array_equal(run(11), run(1, 2, 5, 1, 2))
