"""Claims 1 and 4: modules against one function with everything inlined, for a decoder block and for a whole model.

`DENSE` is the reference backend with float32 weights, so that a matrix product is one library call on both sides: with
quantized weights the reference would spend its time on dequantizing. `run_block` calls nothing but NumPy: q and k are
rotated together, the cache is contiguous and allocated once, temporaries are reused, and causality is the bound of a
loop over tiles of queries. In claim 4 the modules are layers/ and the decoder as they are, on ops that concatenate keys
and values anew in every step and add a materialised mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...backends import reference
from ...backends.ops import OPS, AttentionParams, Batch, Ints, KVLayer, RopeTable
from ...backends.reference import ReferenceBackend
from ...config import ModelConfig
from ...engine.model_runner import SingleSequence
from ...errors import UnsupportedModelError
from ...layers.attention import Attention
from ...layers.block import Block
from ...layers.linear import Linear
from ...layers.rms_norm import RMSNorm
from ...layers.swiglu import SwiGLU
from ...models import Transformer, load_model, read_model_config
from ...weights import Tensor, open_checkpoint
from .. import statistics
from ..micro import consecutive_batch, rope_table
from ..results import quantity
from . import harness
from .harness import Finding, Floats, Harness, KVBuffers, Shape, VerdictName, random_array

BLOCK_SIZE, BLOCK_TOLERANCE, LOGITS_TOLERANCE = 16, 1e-4, 1e-3
QUERY_TILE = 64  # queries that share one loop bound
FUTURE = np.triu(np.ones((QUERY_TILE, QUERY_TILE), np.bool_), 1)
MIN_SPEEDUP = 2.0
PROMPT_TOKENS, DECODE_STEPS = 128, 4


class DenseBackend(ReferenceBackend):
    """The reference backend on weights that are plain float32 arrays."""

    def prepare(self, tensors: Sequence[Tensor]) -> Any:
        return np.concatenate([tensor.dequantize() for tensor in tensors])

    def embed(self, table: Any, ids: Ints, scale: float = 1.0) -> Floats:
        return table[ids] * np.float32(scale)  # type: ignore[no-any-return]

    def linear(self, x: Floats, w: Any, bias: Floats | None = None) -> Floats:
        out: Floats = x @ w.T
        return out if bias is None else out + bias

    def logits(self, x: Floats, head: Any, soft_cap: float = 0.0) -> Floats:
        raw: Floats = x @ head.T
        return np.float32(soft_cap) * np.tanh(raw / np.float32(soft_cap)) if soft_cap else raw


class GrowingCacheBackend(DenseBackend):
    """The same with keys and values as long as the tokens seen, (S, kv_heads, head_dim): slots are ignored."""

    def empty_kv(self, blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> Any:
        empty = np.empty((0, kv_heads, head_dim), np.float32)
        return SimpleNamespace(k=empty, v=empty)

    def rope_store(
        self, q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: Any, slots: Ints
    ) -> Floats:
        kv.k = np.concatenate([kv.k, reference.rope(k, positions, table)])
        kv.v = np.concatenate([kv.v, v])
        return reference.rope(q, positions, table)

    def attention(self, q: Floats, kv: Any, batch: Batch, params: AttentionParams) -> Floats:
        mask = harness.additive_mask(len(kv.k), batch.positions)
        return harness.masked_attention(q, kv.k, kv.v, mask, params).reshape(q.shape[0], -1)


DENSE, GROWING = DenseBackend(), GrowingCacheBackend()


def normalize(x: Floats, norm: RMSNorm) -> Floats:
    """RMS norm with the weight applied in place."""
    x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(norm.eps))
    x *= norm.weight
    return x


def run_block(b: Block, stream: Floats, cos: Floats, sin: Floats, kv: KVBuffers, start: int) -> tuple[Floats, Floats]:
    """Run one block over the tokens from `start` on: (what it adds last, the residual stream before that addition)."""
    a, tokens, half = b.attention, stream.shape[0], cos.shape[-1]
    end, rotated, group = start + tokens, a.n_heads + a.n_kv_heads, a.n_heads // a.n_kv_heads

    x = normalize(stream, b.attention_norm)
    heads = (x @ a.qkv.weight.T).reshape(tokens, rotated + a.n_kv_heads, a.head_dim)
    low, high = heads[:, :rotated, :half], heads[:, :rotated, half:]
    low_sin = low * sin
    low *= cos
    low -= high * sin
    high *= cos
    high += low_sin
    kv.k[start:end], kv.v[start:end] = heads[:, a.n_heads : rotated], heads[:, rotated:]

    q = heads[:, : a.n_heads].transpose(1, 0, 2).reshape(a.n_kv_heads, group, tokens, a.head_dim)
    mixed = np.empty((tokens, a.n_kv_heads, group, a.head_dim), np.float32)
    for first in range(0, tokens, QUERY_TILE):
        n = min(QUERY_TILE, tokens - first)
        seen = start + first + n  # keys that the last query of the tile sees: later ones are never touched
        tile = q[:, :, first : first + n].reshape(a.n_kv_heads, group * n, a.head_dim)
        scores = tile @ kv.k[:seen].transpose(1, 2, 0)
        scores *= np.float32(a.params.scale)
        if n > 1:
            corner = scores.reshape(a.n_kv_heads, group, n, seen)[..., seen - n :]
            np.copyto(corner, np.float32(-np.inf), where=FUTURE[:n, :n])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out = scores @ kv.v[:seen].transpose(1, 0, 2)
        mixed[first : first + n] = out.reshape(a.n_kv_heads, group, n, a.head_dim).transpose(2, 0, 1, 3)
    stream = mixed.reshape(tokens, -1) @ a.output.weight.T + stream

    both = normalize(stream, b.mlp_norm) @ b.mlp.gate_up.weight.T
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += 1
    up /= gate
    return up @ b.mlp.down.weight.T, stream


def run_decoder_block(runner: Harness) -> Finding:
    """Time modules against one function, and the calls of the modules alone."""
    block = make_block(runner.shape)
    call_s = _call_cost(runner, block)
    table = [["tokens", "modules", "one function", "change", "99% interval", "calls alone"]]
    changes, shares = {}, []
    for length in runner.lengths((1, 8, 32), (128,)):
        sides = make_sides(block, random_array(np.random.default_rng(length), length, runner.shape.d_model))
        (added, stream), (fused_added, fused_stream) = sides["modules"](), sides["fused"]()
        harness.require_equal(added + stream, fused_added + fused_stream, BLOCK_TOLERANCE, f"block of {length} tokens")
        taken = runner.time_sides(length, sides)
        change = changes[length] = statistics.compare(taken["modules"], taken["fused"])
        shares.append(call_s / statistics.estimate(taken["modules"]).value)
        times = [harness.format_time(taken[side]) for side in ("modules", "fused")]
        table.append([str(length), *times, *harness.change_cells(change), f"{shares[-1]:.2%}"])
    summary = (
        f"one function against modules: {harness.format_by_length(changes)}; the calls of a block cost "
        f"{quantity(call_s, 's')}, {max(shares):.2%} of it at most"
    )
    return runner.finding(harness.majority([harness.vote_faster(c) for c in changes.values()]), summary, table)


def make_block(shape: Shape) -> Block:
    """Return a llama block with random float32 weights, as the dense op table takes them."""
    rng, width, inner = np.random.default_rng(1), shape.d_model, shape.n_heads * shape.head_dim

    def linear(rows: int, columns: int) -> Linear:
        return Linear(random_array(rng, rows, columns, scale=columns**-0.5))

    def norm() -> RMSNorm:
        return RMSNorm(np.abs(random_array(rng, width)) + np.float32(0.5), 1e-5)

    attention = Attention(
        qkv=linear(3 * inner, width), output=linear(width, inner),
        n_heads=shape.n_heads, n_kv_heads=shape.n_heads, head_dim=shape.head_dim,
        rope=rope_table(shape.head_dim), params=AttentionParams(shape.head_dim**-0.5),
    )  # fmt: skip
    return Block(norm(), attention, norm(), SwiGLU(linear(2 * shape.d_ff, width), linear(width, shape.d_ff)))


def make_sides(block: Block, x: Floats) -> dict[str, Any]:
    """Return both sides, each to (what the block adds, the stream): layers on a paged cache, and the one function."""
    a, length = block.attention, len(x)
    paged = DENSE.empty_kv(-(-length // BLOCK_SIZE), BLOCK_SIZE, a.n_kv_heads, a.head_dim)
    buffers, batch = KVBuffers.zeros(length, a.n_kv_heads, a.head_dim), consecutive_batch(length, length)
    return {
        "modules": lambda: block(DENSE, x, None, paged, batch),
        "fused": lambda: run_block(block, x, *harness.rope_tables(a.rope, 0, length), buffers, 0),
    }


def _call_cost(runner: Harness, block: Block) -> float:
    """Return the time of a block whose ops do nothing: the most that splitting it into modules can cost."""
    a = block.attention
    x = np.zeros((1, (a.n_heads + 2 * a.n_kv_heads) * a.head_dim), np.float32)
    ops, batch, kv = ReferenceBackend(), consecutive_batch(1, 1), KVLayer(x, x)
    for name in OPS:
        setattr(ops, name, (lambda *_: (x, x)) if name == "add_rms_norm" else lambda *_: x)
    taken = runner.time_sides("calls", {"modules": lambda: block(ops, x, None, kv, batch)})
    return statistics.estimate(taken["modules"]).value


def fused_forward(
    model: Transformer, ids: Ints, cos: Floats, sin: Floats, buffers: Sequence[KVBuffers], start: int
) -> Floats:
    """Return the logits after the last of these tokens: (1, vocabulary); cos and sin hold every position."""
    stream, end = model.embedding[ids], start + len(ids)
    for block, kv in zip(model.blocks, buffers, strict=True):
        added, stream = run_block(block, stream, cos[start:end], sin[start:end], kv, start)
        stream = stream + added
    return np.asarray(normalize(stream[-1:], model.norm) @ model.head.T, np.float32)


def require_plain_llama(config: ModelConfig) -> None:
    """Raise UnsupportedModelError if the model has what `fused_forward` leaves out."""
    family = config.family
    extras = {
        "biases": family.qkv_bias, "q/k norms": family.qk_norm, "post norms": family.post_norms,
        "a scaled embedding": family.scaled_embedding, "a window": any(config.windows),
        "soft caps": config.attention_cap or config.final_cap,
        "a partial rotation": config.rope_dim != config.head_dim,
        f"activation {config.activation}": config.activation != "silu",
    }  # fmt: skip
    if found := [name for name, present in extras.items() if present]:
        raise UnsupportedModelError(f"the experiment for claim 4 needs a plain llama: this model has {found[0]}")


class Sides:
    """Both sides on one model, each at the end of the same prompt."""

    def __init__(self, model: Transformer, prompt_tokens: int, steps: int) -> None:
        require_plain_llama(model.config)
        c, capacity = model.config, prompt_tokens + steps
        self.ids = np.random.default_rng(4).integers(0, c.vocab_size, capacity).tolist()
        self.prompt_tokens, self.steps = prompt_tokens, steps
        self.modules = SingleSequence(replace(model, ops=GROWING), capacity)
        self.model = model
        self.cos, self.sin = harness.rope_tables(model.blocks[0].attention.rope, 0, capacity)
        self.buffers = [KVBuffers.zeros(capacity, c.n_kv_heads, c.head_dim) for _ in model.blocks]

    def step(self, side: str, ids: list[int], start: int) -> Floats:
        """Compute these tokens; the modules' cache is cut back to `start` first."""
        if side == "fused":
            return fused_forward(self.model, np.array(ids), self.cos, self.sin, self.buffers, start)
        for layer in self.modules.cache.layers:
            layer.k, layer.v = layer.k[:start], layer.v[:start]  # type: ignore[misc]
        batch = self.modules.batch(ids, start, all_logits=False)
        return np.asarray(self.modules.model.forward(batch, self.modules.cache), np.float32)

    def prefill(self, side: str) -> Floats:
        return self.step(side, self.ids[: self.prompt_tokens], 0)

    def decode(self, side: str) -> Floats:
        """Return the logits of the last of the tokens after the prompt, computed one by one."""
        for at in range(self.prompt_tokens, self.prompt_tokens + self.steps):
            logits = self.step(side, self.ids[at : at + 1], at)
        return logits


def run_whole_model(runner: Harness) -> Finding:
    """Time prefill and decode on both sides."""
    checkpoint = open_checkpoint(runner.model)
    model = load_model(checkpoint, DENSE, read_model_config(checkpoint))
    steps = min(DECODE_STEPS, model.config.context_length - 1)
    table = [["phase", "tokens before", "modules", "one function", "times as fast", "99% interval"]]
    votes, summary = list[VerdictName](), []
    for prompt in runner.lengths((PROMPT_TOKENS,), (512,)):
        sides = Sides(model, min(prompt, model.config.context_length - steps), steps)
        for phase, per_call, names in (
            ("prefill", 1, (f"prefill of {prompt}", "0")),
            ("decode", steps, ("decode, a token", str(prompt))),
        ):
            compute = getattr(sides, phase)
            harness.require_equal(compute("modules"), compute("fused"), LOGITS_TOLERANCE, f"logits of {phase}")
            timed = {side: partial(compute, side) for side in ("modules", "fused")}
            sampled = runner.time_sides(f"{phase}{prompt}", timed)
            taken = {side: [sample / per_call for sample in samples] for side, samples in sampled.items()}
            change = statistics.compare(taken["modules"], taken["fused"])
            votes.append(harness.vote_speedup(change, MIN_SPEEDUP))
            table.append([*names, *map(harness.format_time, taken.values()), *harness.speedup_cells(change)])
            before = "of" if phase == "prefill" else "after"
            summary.append(f"{phase} {before} {prompt} tokens {harness.format_speedup(change)}")
    return runner.finding(harness.unanimous(votes), "one function against modules: " + ", ".join(summary), table)
