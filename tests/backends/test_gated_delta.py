"""The gated delta rule: the reference against transformers, the CPU against the reference, chunks and slots."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import NO_TOKENS, Batch, GatedDeltaParams, GatedDeltaWeights, StateLayer

Floats = NDArray[np.float32]
SLOTS = 6
SMALL = GatedDeltaParams(2, 4, 32, 32, 1e-6)
SHAPES = [
    SMALL, SMALL._replace(is_tiled=True), GatedDeltaParams(1, 3, 24, 80, 1e-5), GatedDeltaParams(1, 2, 128, 128, 1e-6)
]  # fmt: skip


class Case(NamedTuple):
    qkv: Floats
    z: Floats
    gates: Floats
    params: GatedDeltaParams
    weights: GatedDeltaWeights


def make_case(params: GatedDeltaParams, tokens: int, seed: int = 1) -> Case:
    source, p = np.random.default_rng(seed), params

    def random(*shape: int) -> Floats:
        return source.standard_normal(shape).astype(np.float32)

    channels, values = 2 * p.k_heads * p.k_dim + p.v_heads * p.v_dim, p.v_heads * p.v_dim
    weights = GatedDeltaWeights(-np.exp(random(p.v_heads)), random(p.v_heads), random(p.v_dim))
    return Case(random(tokens, channels), random(tokens, 7 + values), 2 * random(tokens, 2 * p.v_heads), p, weights)


def make_batch(lengths: list[int], state_in: list[int], state_out: list[int]) -> Batch:
    start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    none = NO_TOKENS
    return Batch(none, none, none, start, none, none, none, state_in=np.array(state_in), state_out=np.array(state_out))


def last_of_each(lengths: list[int], slots: list[int]) -> list[int]:
    """Return `state_out` of requests that store their last state."""
    return [slot if i == length - 1 else -1 for length, slot in zip(lengths, slots, strict=True) for i in range(length)]


def random_states(p: GatedDeltaParams) -> StateLayer:
    shape = (SLOTS, p.v_heads, p.k_dim, p.v_dim)
    return StateLayer(np.zeros((SLOTS, 1, 1), np.float32), np.random.default_rng(9).standard_normal(shape, np.float32))


@pytest.mark.parametrize("params", SHAPES)
def test_reference_equals_transformers(params: GatedDeltaParams) -> None:
    case, p, state = make_case(params, 9), params, random_states(params)
    width, group = p.k_heads * p.k_dim, p.v_heads // p.k_heads
    parts = torch.split(torch.tensor(case.qkv)[None], [width, width, p.v_heads * p.v_dim], dim=-1)
    q, k, v = (part.view(1, 9, -1, dim) for part, dim in zip(parts, (p.k_dim, p.k_dim, p.v_dim), strict=True))
    q, k = (x.repeat(1, 1, group, 1) if p.is_tiled else x.repeat_interleave(group, 2) for x in (q, k))
    beta, alpha = torch.split(torch.tensor(case.gates)[None], p.v_heads, dim=-1)
    a, dt_bias, norm = map(torch.tensor, case.weights)
    g = a * torch.nn.functional.softplus(alpha + dt_bias)
    mixed, last = torch_recurrent_gated_delta_rule(
        q, k, v, g, beta.sigmoid(), torch.tensor(state.matrix[2:3]), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    normed = torch.nn.functional.rms_norm(mixed[0], (p.v_dim,), norm, p.eps).reshape(9, -1)
    expected = normed * torch.nn.functional.silu(torch.tensor(case.z[:, 7:]))
    batch = make_batch([9], [2], last_of_each([9], [4]))
    np.testing.assert_allclose(reference.gated_delta(*case, state, batch), expected, rtol=1e-3, atol=2e-4)
    np.testing.assert_allclose(state.matrix[4], last[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("params", SHAPES)
def test_cpu_is_near_the_reference_whoever_else_is_in_the_batch(params: GatedDeltaParams) -> None:
    """A request begins, one goes on in its slot, one in another, and one stores nothing."""
    lengths, state_in = [5, 1, 19, 2], [-1, 1, 5, 3]
    case, cpu = make_case(params, sum(lengths)), CpuBackend()
    batch = make_batch(lengths, state_in, last_of_each(lengths, [0, 1, 2, -1]))
    states = [random_states(params) for _ in range(3)]
    expected, found = reference.gated_delta(*case, states[0], batch), cpu.gated_delta(*case, states[1], batch)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(states[1].matrix, states[0].matrix, rtol=1e-4, atol=1e-5)
    for r, (first, end) in enumerate(pairwise(batch.query_start.tolist())):
        rows = slice(first, end)
        one = case._replace(qkv=case.qkv[rows], z=case.z[rows], gates=case.gates[rows])
        alone = make_batch([lengths[r]], [state_in[r]], batch.state_out[rows].tolist())
        np.testing.assert_array_equal(cpu.gated_delta(*one, states[2], alone), found[rows])
    np.testing.assert_array_equal(states[2].matrix, states[1].matrix)


def test_cpu_has_the_same_bits_however_a_prompt_is_cut_and_after_a_rollback() -> None:
    case, cpu, whole, cut = make_case(SMALL, 40), CpuBackend(), random_states(SMALL), random_states(SMALL)
    expected = cpu.gated_delta(*case, whole, make_batch([40], [-1], last_of_each([40], [3])))
    found, slot = [], -1
    for first, end in pairwise([0, 1, 17, 20, 40]):
        rows, length = slice(first, end), end - first
        part = case._replace(qkv=case.qkv[rows], z=case.z[rows], gates=case.gates[rows])
        if first == 17:  # drafts: each token has a slot, and the second is gone on from
            drafts = case._replace(qkv=case.qkv[17:22], z=case.z[17:22], gates=case.gates[17:22])
            batch = make_batch([5], [slot], [0, 1, 4, 2, 5])
            found.append(cpu.gated_delta(*drafts, cut, batch)[:3])
            slot = 4
            continue
        found.append(cpu.gated_delta(*part, cut, make_batch([length], [slot], last_of_each([length], [3]))))
        slot = 3
    np.testing.assert_array_equal(np.concatenate(found), expected)
    np.testing.assert_array_equal(cut.matrix[3], whole.matrix[3])


@pytest.mark.parametrize("width", [96, 1056])
def test_cpu_sigmoid_gate_is_near_the_reference(width: int) -> None:
    x, gate = np.random.default_rng(3).standard_normal((2, 5, width)).astype(np.float32) * 4
    np.testing.assert_allclose(
        CpuBackend().sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate), rtol=1e-5, atol=1e-6
    )
