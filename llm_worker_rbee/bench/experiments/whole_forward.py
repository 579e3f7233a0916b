"""Claim 4: a whole forward pass of a real model, modules with a cache that grows against the one function.

The modules are layers/ and the decoder as they are, on ops that concatenate keys and values anew in every step and
add a mask that they write out. The other side is fused_block.forward. Both use float32 weights: with quantized ones the
reference backend would spend its time on decoding them, and the two sides would look more alike than they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...backends import reference
from ...backends.ops import AttentionParams, Batch, Ints, RopeTable
from ...engine.solo import Solo
from ...models import Transformer, load_model, read_model_config
from ...weights import open_checkpoint
from .. import statistics
from . import fused_block
from .harness import Finding, Floats, Lab, Name, Verdict, figure, in_times, same, times, vote_times

RULE = (
    "confirmed if the one function is at least 2 times as fast both in prefill and in decode, refuted if the interval "
    "of either lies below 2; both sides use float32 weights"
)
WANTED = 2.0
PROMPT, STEPS, TOLERANCE = 128, 4, 1e-3


@dataclass(slots=True)
class Grown:
    """Keys and values of one layer that are as long as what was seen: (S, kv_heads, head_dim)."""

    k: Floats
    v: Floats


def _empty(blocks: int, block_size: int, kv_heads: int, head_dim: int, kind: str = "float32") -> Grown:
    return Grown(*(np.empty((0, kv_heads, head_dim), np.float32) for _ in range(2)))


def _rope_grow(q: Floats, k: Floats, v: Floats, positions: Ints, table: RopeTable, kv: Grown, slots: Ints) -> Floats:
    kv.k = np.concatenate([kv.k, reference.rope(k, positions, table)])
    kv.v = np.concatenate([kv.v, v])
    return reference.rope(q, positions, table)


def _masked_attention(q: Floats, kv: Grown, batch: Batch, params: AttentionParams) -> Floats:
    length, kv_heads = kv.k.shape[:2]
    scores = reference.attention_scores(q.transpose(1, 0, 2), kv.k.transpose(1, 0, 2), params)
    seen = reference.causal_mask(batch.positions, np.arange(length))
    weights = reference.softmax(scores + np.where(seen, np.float32(0), np.float32(-np.inf)))
    mixed = weights.reshape(kv_heads, -1, length) @ kv.v.transpose(1, 0, 2)
    return mixed.reshape(q.shape[1], -1, q.shape[2]).transpose(1, 0, 2).reshape(q.shape[0], -1)


GROWING = fused_block.op_table(
    **fused_block.DENSE_OPS, empty_kv=_empty, rope_store=_rope_grow, attention=_masked_attention
)  # a cache without blocks: slots and block table are ignored


class Sides:
    """The two of them on one model, each at the end of the same prompt."""

    def __init__(self, model: Transformer, prompt: int, steps: int) -> None:
        fused_block.require_plain(model.config)
        rng = np.random.default_rng(4)
        self.ids = rng.integers(0, model.config.vocab_size, prompt + steps).tolist()
        self.prompt, self.steps = prompt, steps
        self.modules = Solo(replace(model, ops=GROWING), prompt + steps)
        self.model = model
        self.cos, self.sin = fused_block.angles(model.blocks[0].attention.rope, 0, prompt + steps)
        c = model.config
        self.rooms = [fused_block.Room.of(prompt + steps, c.n_kv_heads, c.head_dim) for _ in model.blocks]

    def grown(self, ids: list[int], start: int) -> Floats:
        """A step through the modules; what lies behind `start` is forgotten first."""
        for layer in self.modules.cache.layers:
            layer.k, layer.v = layer.k[:start], layer.v[:start]  # type: ignore[misc]
        batch = self.modules.batch(ids, start, all_logits=False)
        return np.asarray(self.modules.model.forward(batch, self.modules.cache), np.float32)

    def fused(self, ids: list[int], start: int) -> Floats:
        """A step through the one function."""
        return fused_block.forward(self.model, np.array(ids), self.cos, self.sin, self.rooms, start)

    def prefill(self, side: str) -> Floats:
        """The whole prompt."""
        step = self.grown if side == "modules" else self.fused
        return step(self.ids[: self.prompt], 0)

    def decode(self, side: str) -> Floats:
        """Tokens after the prompt, one by one; the last one's logits."""
        step = self.grown if side == "modules" else self.fused
        for at in range(self.prompt, self.prompt + self.steps):
            logits = step(self.ids[at : at + 1], at)
        return logits


def dense_model(lab: Lab) -> Transformer:
    """The model of the lab with float32 weights."""
    checkpoint = open_checkpoint(lab.model)
    return load_model(checkpoint, fused_block.DENSE, read_model_config(checkpoint))


def run(lab: Lab) -> Finding:
    """Prefill and decode."""
    model = dense_model(lab)
    steps = min(STEPS, model.config.context_length - 1)
    table = [["phase", "tokens before", "modules", "one function", "times as fast", "99% interval"]]
    votes: list[Name] = []
    told = []
    for prompt in lab.lengths((PROMPT,), (512,)):
        sides = Sides(model, min(prompt, model.config.context_length - steps), steps)
        for phase, each in (("prefill", 1), ("decode", steps)):
            work = getattr(sides, phase)
            same(work("modules"), work("fused"), TOLERANCE, f"logits of {phase}")
            raced = lab.race(f"{phase}{prompt}", {side: partial(work, side) for side in ("modules", "fused")})
            taken = {side: [sample / each for sample in samples] for side, samples in raced.items()}
            change = statistics.compare(taken["modules"], taken["fused"])
            votes.append(vote_times(change, WANTED))
            low, middle, high = times(change)
            table.append([f"{phase} of {prompt}" if each == 1 else "decode, a token", str(0 if each == 1 else prompt),
                          figure(taken["modules"]), figure(taken["fused"]), f"{middle:.2f}",
                          f"{low:.2f} to {high:.2f}"])  # fmt: skip
            told.append(f"{phase} {'of' if each == 1 else 'after'} {prompt} tokens {in_times(change)}")
    return Finding(Verdict.of(lab.claim, all_of(votes), "one function against modules: " + ", ".join(told)), table)


def all_of(votes: list[Name]) -> Name:
    """Every phase must reach it; one that certainly does not refutes."""
    return "refuted" if "refuted" in votes else "within noise" if "within noise" in votes else "confirmed"
