"""The gated delta rule: token by token, over chunks of a prompt on tensor cores, and the gate behind it.

A program of `delta_tokens` holds some columns of the state of one value head, and takes the tokens of one request
through it in their order: the bits of a token depend on no other request, and not on how a prompt is cut.

Chunks follow Gated DeltaNet (arXiv:2412.06464). With G the running sum of log decays in a chunk, S the state before it,
and what token i adds to the state k_i d_i^T:

    (I + A) D = beta (V - e^G K S)      A_ij = beta_i e^(G_i - G_j) k_i.k_j for j < i
    out_i = e^G_i S^T q_i + sum over j <= i of e^(G_i - G_j) q_i.k_j d_j
    S' = e^G_C S + sum of e^(G_C - G_j) k_j d_j^T

`prepare_chunks` solves for all chunks at once: U = (I + A)^-1 beta V, W = (I + A)^-1 beta e^G K, so that D = U - W S;
`delta_chunks` goes through the chunks of a request. Sums depend on where chunks begin: the deterministic mode and short
requests go token by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...ops import GatedDeltaParams, GatedDeltaWeights, StateLayer
from ..device import is_interpreted, pdl_options
from ..packed_weight import Activations, GemvActivations
from .attention_prefill import QUERY_TILE, tile_programs
from .causal_conv import MAX_REQUESTS, StateInputs
from .elementwise import num_blocks, store_row, targets
from .intrinsics import launch_next, wait_for_previous

COLUMNS = 8  # of a state, in a program of `delta_tokens` with one warp
DELTA_WARPS = 1
SHORT_REQUEST = 32  # tokens up to which a request goes token by token beside chunks; more than a draft has
CHUNK = QUERY_TILE  # tokens: the chunks of a step are its tiles of queries
CHUNK_COLUMNS = 16  # of a state, in a program of `delta_chunks`
MIN_DIM = 16  # of a product on tensor cores


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
    qkv: torch.Tensor,
    gates: torch.Tensor,
    params: GatedDeltaParams,
    weights: GatedDeltaWeights,
    state: StateLayer,
    slots: StateInputs,
    pdl: bool = False,
    *,
    only_short: bool = False,
) -> torch.Tensor:
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
    x: torch.Tensor,
    gate: torch.Tensor | None,
    out: Activations | GemvActivations,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
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


@triton.jit
def normalized_rows(at, mask):
    """Load rows and divide each by its length."""
    x = tl.load(at, mask=mask, other=0.0)
    return x / tl.sqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def log_decays(gates, a, dt_bias, t, valid, head, V_HEADS: tl.constexpr):
    """Return the running sum of log decays of a chunk's tokens."""
    alpha = tl.load(gates + t * (2 * V_HEADS) + V_HEADS + head, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(a + head) * softplus(alpha + tl.load(dt_bias + head))
    return tl.cumsum(tl.where(valid, g, 0.0), 0)


@triton.jit
def inverse_of_unit_lower(lower, CHUNK: tl.constexpr):
    """Return (I + lower)^-1 of a strictly lower triangular matrix, row by row."""
    i = tl.arange(0, CHUNK)
    out = tl.zeros((CHUNK, CHUNK), tl.float32)
    for n in range(1, CHUNK):
        row = -tl.sum(tl.where((i == n)[:, None], lower, 0.0), 0)
        row += tl.sum(row[:, None] * out, 0)
        out = tl.where((i == n)[:, None], row[None, :], out)
    return out + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def prepare_chunks(
    qkv, gates, a, dt_bias, query_start, tile_request, tile_first, num_tiles, w, u, scores, qk_scale,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, IS_TILED: tl.constexpr,
    CHUNK: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Solve the chunks of long requests: program (chunks, value head).

    w (tokens, V_HEADS, K_DIM), u (tokens, V_HEADS, V_DIM), scores (tokens, V_HEADS, CHUNK): decayed q.k."""
    head, i = tl.program_id(1), tl.arange(0, CHUNK)
    k_head = head % K_HEADS if IS_TILED else head // (V_HEADS // K_HEADS)
    channels = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    k_column, v_column = tl.arange(0, K_DIM)[None, :], tl.arange(0, V_DIM)[None, :]
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        request = tl.load(tile_request + tile)
        start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
        if end - start > SHORT:
            t = (start + tl.load(tile_first + tile) + i).to(tl.int64)
            valid = t < end
            rows, mask = qkv + t[:, None] * channels, valid[:, None] & (k_column >= 0)
            k = normalized_rows(rows + (K_HEADS + k_head) * K_DIM + k_column, mask)
            q = normalized_rows(rows + k_head * K_DIM + k_column, mask) * qk_scale
            logits = tl.load(gates + t * (2 * V_HEADS) + head, mask=valid, other=0.0).to(tl.float32)
            beta = tl.where(valid, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
            g = log_decays(gates, a, dt_bias, t, valid, head, V_HEADS)
            seen = i[:, None] >= i[None, :]
            decay = tl.where(seen, tl.exp(tl.where(seen, g[:, None] - g[None, :], 0.0)), 0.0)
            lower = tl.where(i[:, None] > i[None, :], beta[:, None] * tl.dot(k, tl.trans(k)) * decay, 0.0)
            inverse = inverse_of_unit_lower(lower, CHUNK)
            place, kept = (t[:, None] * V_HEADS + head), valid[:, None] & (v_column >= 0)
            v = tl.load(rows + 2 * K_HEADS * K_DIM + head * V_DIM + v_column, mask=kept, other=0.0)
            tl.store(w + place * K_DIM + k_column, tl.dot(inverse, k * (beta * tl.exp(g))[:, None]), mask=mask)
            tl.store(u + place * V_DIM + v_column, tl.dot(inverse, v * beta[:, None]), mask=kept)
            tl.store(scores + place * CHUNK + i[None, :], tl.dot(q, tl.trans(k)) * decay, mask=valid[:, None] & seen)


@triton.jit
def delta_chunks(
    qkv, gates, a, dt_bias, w, u, scores, matrices, query_start, state_in, state_out, num_requests, out, qk_scale,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, IS_TILED: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Take long requests through COLUMNS columns of the state of a value head: program (columns, value head, requests).
    The state is stored behind the last token alone."""
    column, head, i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :], tl.program_id(1), tl.arange(0, CHUNK)
    k_head = head % K_HEADS if IS_TILED else head // (V_HEADS // K_HEADS)
    channels, size = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM, V_HEADS * K_DIM * V_DIM
    k_column, k_row = tl.arange(0, K_DIM)[None, :], tl.arange(0, K_DIM)[:, None]
    place = head * (K_DIM * V_DIM) + k_row * V_DIM + column
    for request in range(tl.program_id(2), tl.load(num_requests), tl.num_programs(2)):
        start, end = tl.load(query_start + request), tl.load(query_start + request + 1)
        if end - start > SHORT:
            slot, written = tl.load(state_in + request).to(tl.int64), tl.load(state_out + end - 1).to(tl.int64)
            held = (k_row < tl.where(slot >= 0, K_DIM, 0)) & (column >= 0)
            state = tl.load(matrices + slot * size + place, mask=held, other=0.0)
            for first in range(start, end, CHUNK):
                t = (first + i).to(tl.int64)
                valid = t < end
                rows, mask = qkv + t[:, None] * channels, valid[:, None] & (k_column >= 0)
                g = log_decays(gates, a, dt_bias, t, valid, head, V_HEADS)
                q = normalized_rows(rows + k_head * K_DIM + k_column, mask)
                made = tl.dot(q * (qk_scale * tl.exp(g))[:, None], state)
                at, kept = t[:, None] * V_HEADS + head, valid[:, None] & (column >= 0)
                delta = tl.load(u + at * V_DIM + column, mask=kept, other=0.0)
                delta -= tl.dot(tl.load(w + at * K_DIM + k_column, mask=mask, other=0.0), state)
                seen = valid[:, None] & (i[:, None] >= i[None, :])
                made = tl.dot(tl.load(scores + at * CHUNK + i[None, :], mask=seen, other=0.0), delta, made)
                tl.store(out + at * V_DIM + column, made, mask=kept)
                total = tl.min(g, 0)  # of the last token
                k = normalized_rows(rows + (K_HEADS + k_head) * K_DIM + k_column, mask) * tl.exp(total - g)[:, None]
                state = tl.dot(tl.trans(k), delta, state * tl.exp(total))
            if written >= 0:
                tl.store(matrices + written * size + place, state)


def has_chunks(params: GatedDeltaParams) -> bool:
    """Return whether heads have sizes that tensor cores take."""
    return all(dim >= MIN_DIM and dim & (dim - 1) == 0 for dim in (params.k_dim, params.v_dim))


def launch_delta_chunks(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    params: GatedDeltaParams,
    weights: GatedDeltaWeights,
    state: StateLayer,
    slots: StateInputs,
    tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the result of the rule before its norm; short requests go token by token.

    `tiles`: the request of each chunk, its first token, and the number of chunks."""
    p, tokens = params, len(qkv)
    out = launch_delta(qkv, gates, params, weights, state, slots, only_short=True)
    if tokens <= SHORT_REQUEST:
        return out
    sizes = p.k_dim, p.v_dim, CHUNK
    w, u, scores = (torch.empty(tokens, p.v_heads, size, device=qkv.device) for size in sizes)
    heads = p.k_heads, p.v_heads, p.k_dim, p.v_dim, p.is_tiled
    prepare_chunks[(tile_programs(tokens, CHUNK), p.v_heads)](
        qkv, gates, weights.a, weights.dt_bias, slots.query_start, *tiles, w, u, scores, p.k_dim**-0.5, *heads, CHUNK,
        SHORT_REQUEST, num_warps=8, num_stages=1,
    )  # fmt: skip
    columns = min(CHUNK_COLUMNS, p.v_dim)
    delta_chunks[(p.v_dim // columns, p.v_heads, min(len(slots.state_in), MAX_REQUESTS))](
        qkv, gates, weights.a, weights.dt_bias, w, u, scores, state.matrix, *slots[:3], slots.num_requests, out,
        p.k_dim**-0.5, *heads, CHUNK, columns, SHORT_REQUEST, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
