"""The gated delta rule: token by token, and the gate behind it.

A program of `delta_tokens` holds some columns of the state of one value head, and takes the tokens of one request
through it in their order: the bits of a token depend on no other request, and not on how a prompt is cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops import GatedDeltaParams, GatedDeltaWeights, StateLayer
from ..device import is_interpreted, pdl_options
from ..packed_weight import Activations, GemvActivations
from .causal_conv import MAX_REQUESTS, StateInputs
from .elementwise import num_blocks, store_row, targets
from .intrinsics import launch_next, wait_for_previous

COLUMNS = 8  # of a state, in a program of one warp
DELTA_WARPS = 1
SHORT_REQUEST = 32  # tokens up to which a request goes token by token beside chunks; more than a draft has


@triton.jit
def normalize(x):
    """Return a vector divided by its length."""
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def softplus(x):
    """Return ln(1 + e^x)."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def delta_tokens(
    qkv, gates, a, dt_bias, matrices, query_start, state_in, state_out, num_requests, out, qk_scale,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, IS_TILED: tl.constexpr,
    K_SIZE: tl.constexpr, COLUMNS: tl.constexpr, MAX_TOKENS: tl.constexpr = 0, PDL: tl.constexpr = False,
):  # fmt: skip
    """Take the tokens of some requests through COLUMNS columns of the state of a value head.

    Program (columns, value head, requests). qkv (tokens, channels), gates (tokens, 2 * V_HEADS): beta, then alpha. The
    state is stored where `state_out` says, if that is not negative. Requests of more than MAX_TOKENS are left out.
    out (tokens, V_HEADS, V_DIM)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    row = tl.arange(0, K_SIZE)
    in_row, in_column = row < K_DIM, column < V_DIM
    place = head * (K_DIM * V_DIM) + row[:, None] * V_DIM + column[None, :]
    k_head = head % K_HEADS if IS_TILED else head // (V_HEADS // K_HEADS)
    rate, bias = tl.load(a + head), tl.load(dt_bias + head)
    launch_next(PDL)
    wait_for_previous(PDL)
    size = V_HEADS * K_DIM * V_DIM
    for request in range(tl.program_id(2), tl.load(num_requests), tl.num_programs(2)):
        first, end = tl.load(query_start + request), tl.load(query_start + request + 1)
        slot = tl.load(state_in + request).to(tl.int64)
        count = end - first
        if MAX_TOKENS > 0:
            count = tl.where(count > MAX_TOKENS, 0, count)
        rows = tl.where(slot >= 0, tl.where(count > 0, K_DIM, 0), 0)
        held = (row < rows)[:, None] & in_column[None, :]
        state = tl.load(matrices + slot * size + place, mask=held, other=0.0)
        for i in range(count):
            t = first.to(tl.int64) + i
            at = qkv + t * (2 * K_HEADS * K_DIM + V_HEADS * V_DIM)
            q = normalize(tl.load(at + k_head * K_DIM + row, mask=in_row, other=0.0)) * qk_scale
            k = normalize(tl.load(at + (K_HEADS + k_head) * K_DIM + row, mask=in_row, other=0.0))
            v = tl.load(at + 2 * K_HEADS * K_DIM + head * V_DIM + column, mask=in_column, other=0.0)
            gate = gates + t * (2 * V_HEADS) + head
            state *= tl.exp(rate * softplus(tl.load(gate + V_HEADS).to(tl.float32) + bias))
            delta = (v - tl.sum(state * k[:, None], 0)) / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
            state += k[:, None] * delta[None, :]
            to = out + (t * V_HEADS + head) * V_DIM + column
            tl.store(to, tl.sum(state * q[:, None], 0), mask=in_column)
            written = tl.load(state_out + t).to(tl.int64)
            if written >= 0:
                tl.store(matrices + written * size + place, state, mask=in_row[:, None] & in_column[None, :])


@triton.jit(do_not_specialize=["tokens"])
def gate_rows(
    x, gate, out, factors, tokens, eps, gate_stride, gate_first,
    width: tl.constexpr, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr = 32, norm=None,
    PDL: tl.constexpr = False, out_scales=None, out_sums=None,
):  # fmt: skip
    """Store x times the sigmoid of a gate, if any, as activations; with `norm`, the norm of each head times silu(gate).

    x (tokens, width) of heads of DIM values. Token t has its gates at t * gate_stride + gate_first."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = n < width
    launch_next(PDL)
    wait_for_previous(PDL)
    y = tl.load(x + t * width + n, mask=mask, other=0.0).to(tl.float32)
    g = tl.zeros((SIZE, 32), tl.float32)
    if gate is not None:
        g = tl.load(gate + t * gate_stride + gate_first + n, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        heads = tl.reshape(y, (SIZE * 32 // DIM, DIM))
        heads = heads * tl.rsqrt(tl.sum(heads * heads, 1) / DIM + eps)[:, None]
        y = tl.reshape(heads, (SIZE, 32)) * tl.load(norm + n % DIM) * g
    if gate is not None:
        y = y / (1.0 + tl.exp(-g))
    store_row(y, t, tokens, out, factors, width, INTERLEAVED, out_scales, out_sums)


def has_kernels(params: GatedDeltaParams) -> bool:
    """Return whether a head is a power of two that blocks of 32 divide, or that divides one."""
    return params.v_dim & (params.v_dim - 1) == 0 and params.v_heads * params.v_dim % 32 == 0


def launch_delta(
    qkv: torch.Tensor, gates: torch.Tensor, params: GatedDeltaParams, weights: GatedDeltaWeights, state: StateLayer,
    slots: StateInputs, pdl: bool = False, *, only_short: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the result of the rule before its norm: (tokens, v_heads * v_dim); writes the states."""
    p = params
    out = torch.empty(len(qkv), p.v_heads * p.v_dim, device=qkv.device)
    columns = min(64 if is_interpreted() else COLUMNS, triton.next_power_of_2(p.v_dim))
    delta_tokens[(triton.cdiv(p.v_dim, columns), p.v_heads, min(len(slots.state_in), MAX_REQUESTS))](
        qkv, gates, weights.a, weights.dt_bias, state.matrix, *slots[:3], slots.num_requests, out, p.k_dim**-0.5,
        p.k_heads, p.v_heads, p.k_dim, p.v_dim, p.is_tiled, triton.next_power_of_2(p.k_dim), columns,
        SHORT_REQUEST if only_short else 0, pdl, num_warps=DELTA_WARPS, **pdl_options(pdl),
    )  # fmt: skip
    return out


def launch_gate(
    x: torch.Tensor, gate: torch.Tensor | None, out: Activations | GemvActivations, norm: torch.Tensor | None = None,
    eps: float = 0.0, pdl: bool = False,
) -> None:  # fmt: skip
    """Store x (tokens, width) times sigmoid(gate), with `norm` the norm of its heads times silu(gate), as activations.

    The gates of a token are the last `width` values of its row; without a gate x is stored as it is."""
    tokens, width = x.shape
    stride = width if gate is None else gate.shape[1]
    size, dim = num_blocks(width), 32 if norm is None else len(norm)
    values, factors, scales, sums, is_interleaved = targets(out)
    gate_rows[(tokens,)](
        x, gate, values, factors, tokens, eps, stride, stride - width, width, size, is_interleaved, dim,
        norm, pdl, scales, sums, num_warps=max(1, min(16, size // 16)), enable_fp_fusion=False, **pdl_options(pdl),
    )  # fmt: skip
