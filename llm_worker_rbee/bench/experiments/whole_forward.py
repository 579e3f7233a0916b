"""Claim 4: a whole forward pass of a real model, modules with a cache that grows against the one function.

The modules are layers/ and the decoder as they are, on ops that concatenate keys and values anew in every step and
add a materialised mask. The other side is `fused_forward`. Both use float32 weights: with quantized ones the
reference backend would spend its time on dequantizing, and the two sides would look more alike than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...backends import reference
from ...backends.ops import AttentionParams, Batch, Ints, RopeTable
from ...config import ModelConfig
from ...engine.model_runner import SingleSequence
from ...errors import UnsupportedModelError
from ...models import Transformer, load_model, read_model_config
from ...weights import open_checkpoint
from .. import statistics
from . import fused_block, harness
from .harness import Finding, Floats, Harness, KVBuffers, VerdictName

RULE = (
    "confirmed if the one function is at least 2 times as fast both in prefill and in decode, refuted if the interval "
    "of either lies below 2; both sides use float32 weights"
)
MIN_SPEEDUP = 2.0
PROMPT_TOKENS, DECODE_STEPS, TOLERANCE = 128, 4, 1e-3


@dataclass(slots=True)
class GrowingKV:
    """Keys and values of one layer, as long as the tokens seen: (S, kv_heads, head_dim)."""

    k: Floats
    v: Floats


def _empty(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> GrowingKV:
    return GrowingKV(*(np.empty((0, kv_heads, head_dim), np.float32) for _ in range(2)))


def _rope_append(
    q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: GrowingKV, slots: Ints
) -> Floats:
    kv.k = np.concatenate([kv.k, reference.rope(k, positions, table)])
    kv.v = np.concatenate([kv.v, v])
    return reference.rope(q, positions, table)


def _attention(q: Floats, kv: GrowingKV, batch: Batch, params: AttentionParams) -> Floats:
    mask = harness.additive_mask(len(kv.k), batch.positions)
    return harness.masked_attention(q, kv.k, kv.v, mask, params).reshape(q.shape[0], -1)


GROWING = fused_block.op_table(
    **fused_block.DENSE_OPS, empty_kv=_empty, rope_store=_rope_append, attention=_attention
)  # a cache without blocks: slots and block table are ignored


def fused_forward(
    model: Transformer, ids: Ints, cos: Floats, sin: Floats, buffers: Sequence[KVBuffers], start: int
) -> Floats:
    """Return the logits after the last of these tokens: (1, vocabulary); cos and sin hold every position."""
    stream, end = model.embedding[ids], start + len(ids)
    for block, kv in zip(model.blocks, buffers, strict=True):
        added, stream = fused_block.run_block(block, stream, cos[start:end], sin[start:end], kv, start)
        stream = stream + added
    return np.asarray(fused_block.normalize(stream[-1:], model.norm) @ model.head.T, np.float32)


def require_plain_llama(config: ModelConfig) -> None:
    """Raise UnsupportedModelError if the model has what `fused_forward` leaves out."""
    family = config.family
    extras = {
        "biases": family.qkv_bias,
        "q/k norms": family.qk_norm,
        "post norms": family.post_norms,
        "a scaled embedding": family.scaled_embedding,
        "a window": any(config.windows),
        "soft caps": config.attention_cap or config.final_cap,
        "a partial rotation": config.rope_dim != config.head_dim,
        f"activation {config.activation}": config.activation != "silu",
    }
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


def _load_dense_model(runner: Harness) -> Transformer:
    checkpoint = open_checkpoint(runner.model)
    return load_model(checkpoint, fused_block.DENSE, read_model_config(checkpoint))


def run(runner: Harness) -> Finding:
    """Time prefill and decode on both sides."""
    model = _load_dense_model(runner)
    steps = min(DECODE_STEPS, model.config.context_length - 1)
    table = [["phase", "tokens before", "modules", "one function", "times as fast", "99% interval"]]
    votes: list[VerdictName] = []
    summary = []
    for prompt in runner.lengths((PROMPT_TOKENS,), (512,)):
        sides = Sides(model, min(prompt, model.config.context_length - steps), steps)
        for phase, per_call, names in (
            ("prefill", 1, (f"prefill of {prompt}", "0")),
            ("decode", steps, ("decode, a token", str(prompt))),
        ):
            compute = getattr(sides, phase)
            harness.require_equal(compute("modules"), compute("fused"), TOLERANCE, f"logits of {phase}")
            timed = {side: partial(compute, side) for side in ("modules", "fused")}
            sampled = runner.time_sides(f"{phase}{prompt}", timed)
            taken = {side: [sample / per_call for sample in samples] for side, samples in sampled.items()}
            change = statistics.compare(taken["modules"], taken["fused"])
            votes.append(harness.vote_speedup(change, MIN_SPEEDUP))
            table.append([*names, *map(harness.format_time, taken.values()), *harness.speedup_cells(change)])
            before = "of" if phase == "prefill" else "after"
            summary.append(f"{phase} {before} {prompt} tokens {harness.format_speedup(change)}")
    return runner.finding(harness.unanimous(votes), "one function against modules: " + ", ".join(summary), table)
