"""Every op in plain NumPy float32: the specification. Fast backends are tested against this file.

Weights stay quantized, as views of the mapped file; `linear` dequantizes one slab of rows at a time. It
reads the mapping for its lifetime, so truncating the file is a bus error; the fast backends copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from ..weights import Tensor
from .ops import (
    SHAPES,
    AttentionParams,
    Backend,
    Batch,
    GatedDeltaParams,
    GatedDeltaWeights,
    Ints,
    KVLayer,
    LoraSite,
    RopeTable,
    RouteParams,
    SampleRow,
    StateLayer,
    rotated_values,
)
from .reference_sampling import logprobs, sample_row

Floats = NDArray[np.float32]
SLAB = 1 << 17  # values dequantized at a time: they stay in the second-level cache


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One or several quantized matrices, stacked by rows."""

    parts: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """One matrix of each expert, all of one shape."""

    matrices: tuple[Matrix, ...]

    @property
    def rows(self) -> int:
        return self.matrices[0].rows

    @property
    def columns(self) -> int:
        return self.matrices[0].columns


def prepare(tensors: Sequence[Tensor]) -> Matrix:
    """Pack a weight; several tensors are stacked by rows into one matrix."""
    return Matrix(tuple(tensors))


def prepare_experts(experts: Sequence[Sequence[Tensor]]) -> Experts:
    """Pack the weight of all experts; the tensors of each are stacked by rows."""
    return Experts(tuple(map(prepare, experts)))


def prepare_vector(values: Floats) -> Floats:
    """Copy a small float32 vector (a norm's weight, a bias) to the backend."""
    return np.ascontiguousarray(values, np.float32)


def empty_kv(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> KVLayer:
    """Allocate the KV cache of one layer: float32, float16, or int8 with a scale per position and head."""
    shape = (blocks, block_size, kv_heads, head_dim)
    k, v = np.zeros(shape, kind), np.zeros(shape, kind)
    return KVLayer(k, v, *(np.zeros(shape[:3], np.float32) for _ in range(2))) if kind == "int8" else KVLayer(k, v)


def empty_state(
    slots: int, conv_shape: tuple[int, int], matrix_shape: tuple[int, int, int] | None = None
) -> StateLayer:
    """Allocate the states of one layer, all zero."""
    shapes = (conv_shape,) if matrix_shape is None else (conv_shape, matrix_shape)
    return StateLayer(*(np.zeros((slots, *shape), np.float32) for shape in shapes))


def embed(table: Matrix, ids: Ints, scale: float = 1.0) -> Floats:
    """Return rows of the embedding table: (T,) -> (T, width)."""
    (part,) = table.parts
    rows = part.take_rows(ids).dequantize()
    return rows if scale == 1.0 else rows * np.float32(scale)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return x / sqrt(mean(x^2) + eps) * weight over the axes of the weight: the last one, or (heads, head_dim)."""
    axes = tuple(range(-weight.ndim, 0))
    mean = np.mean(np.square(x), axis=axes, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def add_rms_norm(x: Floats, residual: Floats, weight: Floats, eps: float, scale: float = 1.0) -> tuple[Floats, Floats]:
    """Add `x` to the residual stream and return (norm, sum), the sum being (residual + x) * scale."""
    total = residual + x
    if scale != 1.0:
        total *= np.float32(scale)
    return rms_norm(total, weight, eps), total


def layer_norm(x: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis."""
    centered = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    variance = np.mean(np.square(centered), axis=-1, keepdims=True, dtype=np.float32)
    normed = centered / np.sqrt(variance + np.float32(eps)) * weight
    return np.asarray(normed if bias is None else normed + bias, np.float32)


def add_layer_norm(
    x: Floats, residual: Floats, weight: Floats, bias: Floats | None, eps: float
) -> tuple[Floats, Floats]:
    """Add `x` to the residual stream and return (norm, sum)."""
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


def add(x: Floats, residual: Floats) -> Floats:
    """Add `x` to the residual stream."""
    return residual + x


def linear(x: Floats, w: Matrix, bias: Floats | None = None) -> Floats:
    """Return x @ w.T + bias: (T, columns) -> (T, rows)."""
    out = np.empty((x.shape[0], w.rows), np.float32)
    at = 0
    for part in w.parts:
        rows, columns = part.shape
        step = max(1, SLAB // columns)
        for start in range(0, rows, step):
            slab = part.take_rows(slice(start, start + step)).dequantize()  # (step, columns)
            out[:, at + start : at + start + slab.shape[0]] = x @ slab.T
        at += rows
    return out if bias is None else out + bias


def split_heads(qkv: Any, n_heads: int, n_kv_heads: int, head_dim: int) -> tuple[Any, Any, Any]:
    """Split (T, (heads + 2 kv_heads) * dim) into views: q (T, heads, dim), k and v (T, kv_heads, dim)."""
    heads = qkv.reshape(qkv.shape[0], n_heads + 2 * n_kv_heads, head_dim)
    first_v = n_heads + n_kv_heads
    return heads[:, :n_heads], heads[:, n_heads:first_v], heads[:, first_v:]


def rope(x: Floats, positions: Ints, table: RopeTable) -> Floats:
    """Rotate the first 2 * len(inv_freq) values of each head; value i pairs with value i + half."""
    half = table.inv_freq.shape[0]
    by_pair = positions[:, None] if table.axes is None else positions[:, table.axes]
    angle = by_pair.astype(np.float32) * table.inv_freq  # (T, half)
    cos, sin = (np.float32(table.scale) * f(angle)[:, None, :] for f in (np.cos, np.sin))
    low, high = x[..., :half], x[..., half : 2 * half]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), axis=-1)


def store(k: Floats, v: Floats, kv: KVLayer, slot_mapping: Ints) -> None:
    """Write keys and values, (T, kv_heads, head_dim), at their slots, rounded to the type of the cache."""
    for cache, scales, values in ((kv.k, kv.k_scales, k), (kv.v, kv.v_scales, v)):
        rows = cache.reshape(-1, *cache.shape[2:])
        if scales is not None:
            rows[slot_mapping], scales.reshape(-1, scales.shape[2])[slot_mapping] = quantize_int8(values)
            continue
        with np.errstate(over="ignore"):  # too large for float16: infinite, which the logits will show
            rows[slot_mapping] = values


def hadamard(x: Floats) -> Floats:
    """Rotate heads by a Hadamard matrix, which leaves the products of two rotated heads as they were.

    A few channels of keys may be far larger than the others and determine the scale of an int8 head; rotated, all
    values are of one size.
    """
    size, half = rotated_values(x.shape[-1]), 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((low + high, low - high), axis=-2).reshape(x.shape)
        half *= 2
    return x * np.float32(1 / math.sqrt(size))


def quantize_int8(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return int8 codes and scales over the last axis: x = code * scale, scale = max|x| / 127 (NaN in, NaN scale)."""
    scales = np.max(np.abs(x), axis=-1) / np.float32(127)
    with np.errstate(all="ignore"):
        steps = np.rint(x / scales[..., None])
    steps[~np.isfinite(steps)] = 0  # all zeros, or NaN: code * scale preserves which
    return np.clip(steps, -127, 127).astype(np.int8), scales


def rope_store(
    q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: KVLayer, slot_mapping: Ints
) -> Floats:
    """Rotate q and k by RoPE (and `hadamard`, if keys are int8), write k and v, return q: (T, heads, head_dim).

    Without heads of k and v nothing is written: the layer reads the keys and values of another one.
    """
    q, k = rope(q, positions, table), rope(k, positions, table)
    if table.temperature_beta:
        q = q * query_temperature(positions, table)[:, None, None]
    if kv.k_scales is not None:
        q, k = hadamard(q), hadamard(k)
    if k.shape[1]:
        store(k, v, kv, slot_mapping)
    return q


def query_temperature(positions: Ints, table: RopeTable) -> Floats:
    """Return the factor of queries by position: (T,)."""
    steps = np.log1p((positions // table.temperature_length).astype(np.float64))
    return (1 + table.temperature_beta * steps).astype(np.float32)


def causal_mask(queries: Ints, keys: Ints, window: int = 0) -> NDArray[np.bool_]:
    """Return which keys each query attends to: none after itself, none older than the window."""
    distance = queries[:, None] - keys[None, :]
    visible = distance >= 0
    return visible & (distance < window) if window else visible


def bidirectional_mask(queries: Ints, keys: Ints, window: int = 0) -> NDArray[np.bool_]:
    """Return which keys each query attends to: all, or those at a distance of at most half the window."""
    distance = np.abs(queries[:, None] - keys[None, :])
    return np.asarray(distance <= (window // 2 if window else len(keys)))


def span_mask(spans: Ints, queries: Ints, keys: Ints, params: AttentionParams) -> NDArray[np.bool_]:
    """Return which keys each query attends to: its span; a causal one also what lies before it, as far as the window.

    Keys of a causal query end where its span ends, or with itself; the window counts back from the query.
    """
    first, last = spans[:, :1], spans[:, 1:]
    if not params.causal:
        return np.asarray((keys >= first) & (keys < last))
    oldest = queries[:, None] - params.window if params.window else np.full_like(first, -1)
    return np.asarray((keys > oldest) & (keys < np.maximum(last, queries[:, None] + 1)))


def softmax(x: Floats, sinks: Floats | None = None) -> Floats:
    """Return the softmax over the last axis; a sink, (..., 1), is one more logit, of a value of zeros."""
    largest = np.max(x, axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    e = np.exp(x - largest)
    total = np.sum(e, axis=-1, keepdims=True)
    return np.asarray(e / (total if sinks is None else total + np.exp(sinks - largest)), np.float32)


def attention_scores(q: Floats, k: Floats, params: AttentionParams) -> Floats:
    """Return scaled (and capped) scores before the mask: q (heads, T, dim), k (kv_heads, S, dim) -> (heads, T, S)."""
    heads, tokens, dim = q.shape
    grouped = q.reshape(k.shape[0], -1, dim)  # query heads that share a KV head are adjacent
    scores = (grouped @ k.transpose(0, 2, 1)).reshape(heads, tokens, -1) * np.float32(params.scale)
    if params.soft_cap:
        scores = np.float32(params.soft_cap) * np.tanh(scores / np.float32(params.soft_cap))
    return scores


def attention(q: Floats, kv: KVLayer, batch: Batch, params: AttentionParams, sinks: Floats | None = None) -> Floats:
    """Attend each query to its own request's cached keys: (T, heads, head_dim) -> (T, heads * head_dim).

    `sinks`, (heads,), are logits that join the denominators of the softmax.
    """
    sink_logits = None if sinks is None else sinks[:, None, None]
    out = np.empty((q.shape[0], q.shape[1] * q.shape[2]), np.float32)
    for r, length in enumerate(batch.context_len.tolist()):
        span = slice(int(batch.query_start[r]), int(batch.query_start[r + 1]))
        pairs = ((kv.k, kv.k_scales), (kv.v, kv.v_scales))
        keys, values = (gather(cache, batch.block_table[r], length, scales) for cache, scales in pairs)
        scores = attention_scores(q[span].transpose(1, 0, 2), keys, params)
        queries, places = batch.positions[span], np.arange(length)
        if params.spans and len(batch.spans):
            mask = span_mask(batch.spans[span], queries, places, params)
        else:
            mask = (causal_mask if params.causal else bidirectional_mask)(queries, places, params.window)
        weights = softmax(np.where(mask, scores, np.float32(-np.inf)), sink_logits)
        mixed = weights.reshape(keys.shape[0], -1, length) @ values  # (kv_heads, group * T, dim)
        mixed = mixed.reshape(q.shape[1], -1, q.shape[2]).transpose(1, 0, 2)
        out[span] = mixed.reshape(mixed.shape[0], -1)
    return out


def gather(cache: Floats, blocks: Ints, length: int, scales: Floats | None = None) -> Floats:
    """Return the first `length` cached vectors of a request as float32: (kv_heads, length, head_dim)."""
    used = blocks[: -(-length // cache.shape[1])]
    rows = cache[used].reshape(-1, *cache.shape[2:])[:length].astype(np.float32, copy=False)
    if scales is not None:
        rows = rows * scales[used].reshape(-1, cache.shape[2], 1)[:length]
    return rows.transpose(1, 0, 2)


def causal_conv(
    x: Floats, weight: Floats, state: StateLayer, batch: Batch, activation: str = "", gated: bool = False
) -> Floats:
    """Convolve each channel over its request's own tokens: (T, channels), (channels, kernel) -> (T, channels).

    Token t gets act(sum over j of weight[:, j] * x[t - kernel + 1 + j]), in the order of j. Before the tokens of a step
    come the columns of the state. `gated`: x is (T, 3 * channels), parts b, c and v: c * conv(b * v).
    """
    kernel, out = weight.shape[1], np.empty((len(x), len(weight)), np.float32)
    before, after, inputs = None, None, x[:, : len(weight)]
    if gated:
        before, after, inputs = np.split(x, 3, axis=1)
        inputs = before * inputs
    for r, slot in enumerate(batch.state_in.tolist()):
        span = slice(int(batch.query_start[r]), int(batch.query_start[r + 1]))
        tail = state.conv[slot] if slot >= 0 else np.zeros((kernel - 1, len(weight)), np.float32)
        rows, count = np.concatenate((tail, inputs[span])), span.stop - span.start
        total = weight[:, 0] * rows[:count]
        for j in range(1, kernel):
            total = total + weight[:, j] * rows[j : j + count]
        out[span] = ACTIVATIONS[activation](total) if activation else total
        for t, written in enumerate(batch.state_out[span].tolist()):
            if written >= 0:
                state.conv[written] = rows[t + 1 : t + kernel]
    return out if after is None else out * after


def gated_delta(
    qkv: Floats,
    z: Floats,
    gates: Floats,
    params: GatedDeltaParams,
    weights: GatedDeltaWeights,
    state: StateLayer,
    batch: Batch,
) -> Floats:
    """Apply the gated delta rule to each request's own tokens, then a norm of each head times silu(z): (T, v_heads *
    v_dim).

    qkv (T, channels) holds q heads, k heads, v heads; z is the last part of rows (T, any + v_heads * v_dim); gates
    (T, 2 * v_heads) are logits of beta, then alpha. For each value head, with q and k normalized to length 1:

        S = exp(a * softplus(alpha + dt_bias)) * S
        S = S + k (sigmoid(beta) * (v - S^T k))^T
        out = S^T q / sqrt(k_dim)
    """
    p, tokens, width = params, len(qkv), params.k_heads * params.k_dim
    heads = np.arange(p.v_heads) % p.k_heads if p.is_tiled else np.arange(p.v_heads) // (p.v_heads // p.k_heads)
    q, k = (l2_norm(part.reshape(tokens, p.k_heads, p.k_dim))[:, heads] for part in np.split(qkv[:, : 2 * width], 2, 1))
    q, v = q * np.float32(p.k_dim**-0.5), qkv[:, 2 * width :].reshape(tokens, p.v_heads, p.v_dim)
    beta, alpha = sigmoid(gates[:, : p.v_heads]), gates[:, p.v_heads :]
    decay = np.exp(weights.a * np.logaddexp(np.float32(0), alpha + weights.dt_bias))
    out, states = np.empty_like(v), state.matrix
    assert states is not None
    for r, slot in enumerate(batch.state_in.tolist()):
        total = np.zeros((p.v_heads, p.k_dim, p.v_dim), np.float32) if slot < 0 else states[slot].copy()
        for t in range(int(batch.query_start[r]), int(batch.query_start[r + 1])):
            total *= decay[t, :, None, None]
            delta = (v[t] - np.einsum("hkv,hk->hv", total, k[t])) * beta[t, :, None]
            total += k[t, :, :, None] * delta[:, None]
            out[t] = np.einsum("hkv,hk->hv", total, q[t])
            if batch.state_out[t] >= 0:
                states[batch.state_out[t]] = total
    normed = rms_norm(out, weights.norm, p.eps).reshape(tokens, -1)
    return normed * silu(z[:, -normed.shape[1] :])


def l2_norm(x: Floats) -> Floats:
    """Return x divided by its length over the last axis."""
    return np.asarray(x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + np.float32(1e-6)), np.float32)


def sigmoid_gate(x: Floats, gate: Floats) -> Floats:
    """Return x * sigmoid(gate)."""
    return x * sigmoid(gate)


def activate(x: Floats, activation: str) -> Floats:
    """Return act(x), of an MLP without a gate."""
    return ACTIVATIONS[activation](x)


def gated(gate_up: Floats, activation: str) -> Floats:
    """Return act(gate) * up, the gate being the first half of each row: (..., 2 * d_ff) -> (..., d_ff).

    "swiglu_oai" clamps both, the gate from above alone, and adds 1 to up.
    """
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    if activation == "swiglu_oai":
        limit = np.float32(SWIGLU_OAI_LIMIT)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + np.float32(1)
    return ACTIVATIONS[activation](gate) * up


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def silu(x: Floats) -> Floats:
    """Return x * sigmoid(x)."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)), np.float32)


def gelu_tanh(x: Floats) -> Floats:
    """Return the tanh approximation of GELU."""
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)), np.float32)


def gelu(x: Floats) -> Floats:
    """Return x times the normal distribution function of x."""
    erf = np.fromiter(map(math.erf, (x * np.float32(0.5**0.5)).ravel().tolist()), np.float32, x.size)
    return np.asarray(np.float32(0.5) * x * (1 + erf.reshape(x.shape)), np.float32)


def relu(x: Floats) -> Floats:
    """Return max(x, 0)."""
    return np.maximum(x, np.float32(0))


def tanh(x: Floats) -> Floats:
    """Return tanh(x)."""
    return np.asarray(np.tanh(x), np.float32)


def swish_oai(x: Floats) -> Floats:
    """Return x * sigmoid(1.702 * x)."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(np.float32(-SWIGLU_OAI_ALPHA) * x)), np.float32)


ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "tanh": tanh,
    "swiglu_oai": swish_oai,
}


def per_layer_inputs(x: Floats, tokens: Floats, weight: Floats, eps: float) -> Floats:
    """Return the inputs of all layers from a token and its context: norm(x) + tokens, (T, layers * dim).

    Each run of `dim` values of x has a norm of its own, with the same weight.
    """
    return rms_norm(x.reshape(len(x), -1, len(weight)), weight, eps).reshape(x.shape) + tokens


def per_layer_gate(x: Floats, inputs: Floats, layer: int, activation: str) -> Floats:
    """Return act(x) times the inputs of a layer: (T, dim), of (T, layers * dim)."""
    dim = x.shape[1]
    return ACTIVATIONS[activation](x) * inputs[:, layer * dim : (layer + 1) * dim]


def route(
    logits: Floats, params: RouteParams, bias: Floats | None = None, scales: Floats | None = None
) -> tuple[Ints, Floats]:
    """Choose the experts of each token by score, and weigh them: (T, experts) -> two of (T, k).

    Best first, the lower number first of equal ones. The bias is added for the choice alone. The weight of an expert
    is multiplied by its own scale in the end.
    """
    scores = {"softmax": softmax, "sigmoid": sigmoid}[params.scoring](logits)
    ranked = scores if bias is None else scores + bias
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : params.k]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if params.renormalize:
        weights = weights / (np.sum(weights, axis=-1, keepdims=True) + np.float32(1e-20))
    weights = weights * np.float32(params.scale)
    return chosen, weights if scales is None else weights * scales[chosen]


def grouped_linear(x: Floats, w: Experts, experts: Ints, bias: Floats | None = None) -> Floats:
    """Multiply each token by the matrices of its experts: (T, columns) or (T, k, columns) -> (T, k, rows).

    The bias is (number of experts, rows).
    """
    rows = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*experts.shape, x.shape[-1]))
    out = np.empty((*experts.shape, w.rows), np.float32)
    for expert in np.unique(experts):
        chosen = experts == expert
        out[chosen] = linear(rows[chosen], w.matrices[expert])
    return out if bias is None else out + bias[experts]


def combine(x: Floats, weights: Floats, shared: Floats | None = None, shared_gate: Floats | None = None) -> Floats:
    """Return the weighted sum over a token's experts, in their order: (T, k, width), (T, k) -> (T, width).

    Then `shared` is added, (T, width), times the sigmoid of its gate, (T, 1), if there is one.
    """
    total = x[:, 0] * weights[:, :1]
    for i in range(1, x.shape[1]):
        total = total + x[:, i] * weights[:, i : i + 1]
    if shared is None:
        return total
    return total + (shared if shared_gate is None else shared * sigmoid(shared_gate))


def take(x: Floats, index: Ints) -> Floats:
    """Return rows of x."""
    return x[index]


def merge(x: Floats, index: Ints, count: int) -> Floats:
    """Return groups of `count` adjacent rows of x, each joined to one row, in the order of the index."""
    return x.reshape(-1, count * x.shape[1])[index]


def pool(x: Floats, index: Ints, count: int) -> Floats:
    """Return the means of groups of `count` adjacent rows of x, in the order of the index."""
    return np.asarray(x.reshape(-1, count, x.shape[1])[index].mean(axis=1, dtype=np.float32), np.float32)


def clamp(x: Floats, low: Floats, high: Floats) -> Floats:
    """Return x with each column between its lowest and its highest value."""
    return np.asarray(np.minimum(np.maximum(x, low), high), np.float32)


def join(x: Floats, y: Floats) -> Floats:
    """Return each row of x with the row of y behind it."""
    return np.concatenate((x, y), axis=1)


def interpolate(table: Floats, places: Floats) -> Floats:
    """Return the vectors at places of a table, (rows, columns, width), by bilinear interpolation."""
    low = np.floor(places)
    share = (places - low).astype(np.float32)
    (row, column), (next_row, next_column) = (
        np.minimum(low.astype(np.int64) + step, np.array(table.shape[:2]) - 1).T for step in (0, 1)
    )
    down, right = share[:, :1], share[:, 1:]
    above = table[row, column] * (1 - right) + table[row, next_column] * right
    below = table[next_row, column] * (1 - right) + table[next_row, next_column] * right
    return np.asarray(above * (1 - down) + below * down, np.float32)


def place_images(x: Floats, images: Floats, rows: Ints, part: int, adds: bool = False) -> Floats:
    """Put rows of images in the place of tokens, or add them; a part is as many columns of images as x has."""
    width, out, chosen = x.shape[1], x.copy(), rows >= 0
    values = images[rows[chosen], part * width : (part + 1) * width]
    out[chosen] = out[chosen] + values if adds else values
    return out


def mean_rows(x: Floats, batch: Batch) -> Floats:
    """Return the mean of each request's rows, added in their order: (T, width) -> (R, width)."""
    totals = np.add.reduceat(x, batch.query_start[:-1], axis=0)
    return np.asarray(totals / np.diff(batch.query_start)[:, None].astype(np.float32), np.float32)


def logits(x: Floats, head: Matrix, soft_cap: float = 0.0) -> Floats:
    """Apply the output head: (N, width) -> (N, vocabulary)."""
    raw = linear(x, head)
    return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw


def shrink(
    x: Floats, site: LoraSite, batch: Batch, index: Ints | None = None, experts: Ints | None = None, scale: float = 1.0
) -> Floats:
    """Multiply rows by the first halves of their adapters, part after part: (T, columns) -> (T, max_rank).

    `index` are the tokens of the rows, if the rows are not all tokens. Of an embedding x are token ids. With the
    experts of each token x is (T, columns) or (T, k, columns), and the result (T, k, max_rank).
    """
    low = np.zeros((*(x.shape[:1] if experts is None else experts.shape), site.max_rank), np.float32)
    for rows, parts, factors in _adapted_rows(site, batch, index, experts):
        at = 0
        for pair in filter(None, parts):
            inputs = x[rows[: x.ndim - 1]] if site.op != "embed" else None
            product = pair.a.T[x[rows]] if inputs is None else inputs @ pair.a.T
            low[(*rows, slice(at, at + pair.rank))] = product * (factors * np.float32(scale))[:, None]
            at += pair.rank
    return low


def expand(
    out: Floats, low: Floats, site: LoraSite, batch: Batch, index: Ints | None = None, experts: Ints | None = None
) -> Floats:
    """Add the products of those with the second halves to the rows: (T, rows), or (T, k, rows) of experts."""
    total = np.array(out, np.float32)
    for rows, parts, _ in _adapted_rows(site, batch, index, experts):
        at = first = 0
        for pair, count in zip(parts, site.part_rows, strict=True):
            if pair is not None:
                total[(*rows, slice(first, first + count))] += low[(*rows, slice(at, at + pair.rank))] @ pair.b.T
                at += pair.rank
            first += count
    return total


def _adapted_rows(site: LoraSite, batch: Batch, index: Ints | None, experts: Ints | None) -> Iterator[Any]:
    """Yield the indices of rows with one adapter and one expert, its pairs, and the factors of the rows."""
    slots, scales = batch.adapters, batch.adapter_scales
    if index is not None:
        slots, scales = slots[index], scales[index]
    for slot, experts_pairs in (site.packed or {}).items():
        for expert, parts in enumerate(experts_pairs):
            chosen = slots == slot
            rows = np.nonzero(chosen if experts is None else chosen[:, None] & (experts == expert))
            if len(rows[0]):
                yield rows, parts, scales[rows[0]]


def sample(raw_logits: Floats, rows: Sequence[SampleRow]) -> Ints:
    """Sample one token per row: (N, vocabulary) -> (N,)."""
    return np.array([sample_row(line, row) for line, row in zip(raw_logits, rows, strict=True)], np.int64)


class ReferenceBackend(Backend):
    """The functions of this module as an op table. It has no fused forward pass: op by op is the specification."""

    name = "reference"
    default_kv_type = "float32"

    def compute(self, op: str, args: dict[str, Any]) -> Any:
        return globals()[op](**args)

    prepare = staticmethod(prepare)
    prepare_experts = staticmethod(prepare_experts)
    prepare_vector = staticmethod(prepare_vector)
    empty_kv = staticmethod(empty_kv)
    empty_state = staticmethod(empty_state)
    sample = staticmethod(sample)
    logprobs = staticmethod(logprobs)

    # Parts of the ops above, which benchmarks measure one by one.
    rope = staticmethod(rope)
    store = staticmethod(store)
    gather = staticmethod(gather)
    attention_scores = staticmethod(attention_scores)
    causal_mask = staticmethod(causal_mask)
    softmax = staticmethod(softmax)

    def fuse(self, record: object) -> None:
        return None


for _op in SHAPES:  # methods, which a subclass may override
    setattr(ReferenceBackend, _op, staticmethod(globals()[_op]))
