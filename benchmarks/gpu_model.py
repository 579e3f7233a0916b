"""Models of random weights of a real shape on a GPU, and what they and real files should compute: for gpu.py, and for
tests/backends/cuda. Weights are made on the device in the layouts that a file would be packed into.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.cuda.fp8 import quantize_e4m3
from llm_worker_rbee.backends.cuda.packed_weight import DENSE, FP8, PackedWeight, WeightPart, dequantize
from llm_worker_rbee.backends.cuda.packed_weight import random_part as random_planes
from llm_worker_rbee.backends.cuda.repack import REPACK_RULES
from llm_worker_rbee.backends.ops import AttentionParams, Batch
from llm_worker_rbee.bench.synthetic import Plan, Spec, parse, plans, without_weights
from llm_worker_rbee.cache import KVCache
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.rms_norm import RMSNorm
from llm_worker_rbee.layers.rope import rope_table
from llm_worker_rbee.layers.swiglu import SwiGLU
from llm_worker_rbee.llm import LLM, Completion
from llm_worker_rbee.models import Transformer, read_model_config

OPS = CudaBackend(0)
PROMPTS = Path(__file__).parent.parent / "llm_worker_rbee" / "bench" / "data" / "prompts.jsonl"
ANSWER, TOP, ASKED = 24, 5, 20  # tokens; likeliest that are compared; of ours, so that those are among them


def random_part(kind: str, rows: int, columns: int) -> WeightPart:
    """Rows of a kind, of the size 1 / sqrt(columns)."""
    where, std = OPS.torch_device, columns**-0.5
    if kind not in (DENSE, FP8):
        return random_planes(kind, rows, columns, where, std)
    numbers = torch.empty(rows, columns, dtype=torch.bfloat16, device=where).normal_(0, std)
    if kind == FP8:
        return WeightPart.from_values(FP8, *quantize_e4m3(numbers))
    return WeightPart.from_values(DENSE, numbers)


def random_matrix(tensors: list[Plan], in_fp8: bool = False) -> PackedWeight:
    """Tensors stacked by rows, as a file's would be; `--quantize fp8` leaves the embedding as it is."""

    def kind_of(plan: Plan) -> str:
        if in_fp8 and plan.name != "token_embd.weight":
            return FP8
        rule = REPACK_RULES.get(plan.kind.name)
        return DENSE if rule is None else rule.kind

    groups = [(kind, list(group)) for kind, group in groupby(tensors, kind_of)]
    return PackedWeight(
        tuple(random_part(kind, sum(p.shape[0] for p in group), group[0].shape[1]) for kind, group in groups)
    )


def model_of(shape: str, mix: str, layers: int) -> Transformer:
    """Random weights of this shape; the mix FP8 is BF16 with `--quantize fp8`."""
    in_fp8 = mix.lower() == FP8
    return random_model(parse(f"{shape}:{'BF16' if in_fp8 else mix}:{layers}"), in_fp8)


def random_model(spec: Spec, in_fp8: bool = False) -> Transformer:
    """The decoder of a shape and a mix, on the device."""
    torch.manual_seed(1)
    config, by_name = read_model_config(without_weights(spec)), {plan.name: plan for plan in plans(spec)}

    def matrix(*names: str) -> PackedWeight:
        return random_matrix([by_name[f"{name}.weight"] for name in names], in_fp8)

    def norm() -> RMSNorm:
        return RMSNorm(torch.rand(config.d_model, device=OPS.torch_device) + 0.5, config.norm_eps)

    rope = rope_table(config, local=False, max_context=config.context_length)

    def block(i: int) -> Block:
        p = f"blk.{i}."
        attention = Attention(
            Linear(matrix(p + "attn_q", p + "attn_k", p + "attn_v")), Linear(matrix(p + "attn_output")), config.n_heads,
            config.n_kv_heads, config.head_dim, rope, AttentionParams(config.attention_scale, 0, config.attention_cap),
        )  # fmt: skip
        mlp = SwiGLU(Linear(matrix(p + "ffn_gate", p + "ffn_up")), Linear(matrix(p + "ffn_down")), config.activation)
        return Block(norm(), attention, norm(), mlp)

    table = matrix("token_embd")
    blocks = tuple(block(i) for i in range(spec.layers))
    head = matrix("output") if "output.weight" in by_name else table
    model = Transformer(config, OPS, table, 1.0, blocks, norm(), head)
    return replace(model, fused=OPS.fuse(model.parts()))


# Checks


def exact_logits(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens of one request in float32 torch, from the weights' values."""

    def times(x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
        return torch.cat([x @ dequantize(part).T for part in w.parts], -1)

    def normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        found: torch.Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
        return found

    c, n = model.config, len(ids)
    rope = model.blocks[0].attention.rope
    angles = torch.arange(n, device=ids.device)[:, None] * torch.tensor(rope.inv_freq, device=ids.device)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    x = model.embedding.rows_at(ids)
    for block in model.blocks:
        a = block.attention
        q, k, v = a.split(times(normed(x, block.attention_norm), a.qkv.weight))
        q, k, v = (t.transpose(0, 1) for t in (turned(q), turned(k), v))
        k, v = (t.repeat_interleave(c.n_heads // c.n_kv_heads, 0) for t in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.attention_scale)
        x = x + times(mixed.transpose(0, 1).reshape(n, -1), a.output.weight)
        gate, up = times(normed(x, block.mlp_norm), block.mlp.gate_up.weight).chunk(2, -1)
        x = x + times(torch.nn.functional.silu(gate) * up, block.mlp.down.weight)
    logits: torch.Tensor = times(normed(x, model.norm), model.head)
    return logits


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The error as a part of the deviation."""
    return float((got.float() - want).square().mean().sqrt() / want.std())


def one_request(ids: np.ndarray, start: int, blocks: np.ndarray, all_logits: bool, copies: int = 1) -> Batch:
    """Tokens of the same request, `copies` times with tables of their own."""
    n, p = len(ids), 16
    positions = np.tile(np.arange(start, start + n), copies)
    tables = blocks.reshape(copies, -1)[:, : -(-(start + n) // p)]
    owners = np.repeat(np.arange(copies), n)
    query = np.arange(copies + 1) * n
    return Batch(
        ids=np.tile(ids, copies), positions=positions, slot_mapping=tables[owners, positions // p] * p + positions % p,
        query_start=query, context_len=np.full(copies, start + n), block_table=tables,
        logits_index=np.arange(n * copies) if all_logits else query[1:] - 1,
    )  # fmt: skip


def model_errors(mix: str, shape: str, sizes: tuple[int, ...], kv_type: str = "bfloat16") -> dict[str, float]:
    """Two layers of a real shape: prompts short and long, then one token for several batch sizes."""
    model = model_of(shape, mix, 2)
    rng = np.random.default_rng(5)
    ids = rng.integers(0, model.config.vocab_size, 321)
    want = exact_logits(model, torch.tensor(ids, device=OPS.torch_device))
    errors: dict[str, float] = {}
    most = max(sizes)
    cache = KVCache(OPS, model.config, most * 21, 16, kv_type)
    blocks = rng.permutation(most * 21)
    for length in (100, 320):
        got = model.forward(one_request(ids[:length], 0, blocks[:21], True), cache)
        errors[f"prompt {length}"] = error_of(got, want[:length])
    for size in sizes:
        for copy in range(size):  # each has its own keys and values
            own = blocks.reshape(most, 21)[copy]
            model.forward(one_request(ids[:320], 0, own, False), cache)
        got = model.forward(one_request(ids[320:], 320, blocks[: size * 21], False, size), cache)
        errors[f"batch {size}"] = error_of(got, want[320:].expand(size, -1))
    return {name: float(f"{error:.1e}") for name, error in errors.items()}


# Real files


def file_figures(path: str) -> dict[str, Any]:
    """Greedy answers of a real model against the reference's."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    start = time.perf_counter()
    ours = LLM(path, device="cuda")
    ours.generate("Hello", max_tokens=2, temperature=0)
    ready = time.perf_counter() - start
    got = [ours.generate(p, max_tokens=ANSWER, temperature=0, logprobs=ASKED) for p in prompts]
    start = time.perf_counter()
    made = ours.generate(prompts[0], max_tokens=256, temperature=0, ignore_eos=True)
    speed = len(made.tokens) / (time.perf_counter() - start)
    reference = LLM(path, device="cpu", backend="reference")
    want = reference.generate(prompts, max_tokens=ANSWER, temperature=0, logprobs=ASKED)  # together: it is slow
    return {"file: start to second token, s": round(ready, 2), "file: tokens/s, batch 1": round(speed),
            **compared(got, want)}  # fmt: skip


def compared(got: list[Completion], want: list[Completion]) -> dict[str, Any]:
    """How many answers are the same; how far log-probabilities are from the reference's at the first token, and where
    answers part; by how much the reference prefers its own token there."""
    same = [_shared(g.tokens, w.tokens) for g, w in zip(got, want, strict=True)]
    parted = [i for i, n in enumerate(same) if n < max(len(got[i].tokens), len(want[i].tokens))]
    pairs = [(got[i], want[i], n) for i, n in enumerate(same)]
    there = [pairs[i] for i in parted if same[i] < min(len(got[i].tokens), len(want[i].tokens))]
    gaps = [_top(w, n)[w.tokens[n]] - _top(w, n).get(g.tokens[n], -np.inf) for g, w, n in there]
    return {
        f"file: same greedy answers of up to {ANSWER} tokens": f"{len(same) - len(parted)} of {len(same)}",
        "file: tokens that are the same, where answers part": [same[i] for i in parted],
        "file: same first token": f"{sum(g.tokens[:1] == w.tokens[:1] for g, w, _ in pairs)} of {len(pairs)}",
        f"file: mean |difference of log-probability|, top {TOP} of the first token": _mean_gap(
            [(g, w, 0) for g, w, _ in pairs]
        ),
        f"file: the same where answers part, top {TOP} there": _mean_gap(there),
        "file: log-probability by which the reference prefers its own there": [round(float(gap), 4) for gap in gaps],
    }


def _shared(a: list[int], b: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _top(answer: Completion, place: int) -> dict[int, float]:
    assert answer.logprobs is not None
    return dict(answer.logprobs[place].top)


def _mean_gap(places: list[tuple[Completion, Completion, int]]) -> float | None:
    """Over the reference's likeliest; one that is not among ours counts as our least likely."""
    found: list[float] = []
    for got, want, place in places:
        ours = _top(got, place)
        best = list(_top(want, place).items())[:TOP]
        found += [abs(ours.get(token, min(ours.values())) - value) for token, value in best]
    return round(float(np.mean(found)), 5) if found else None
