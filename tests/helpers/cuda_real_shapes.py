"""Models of random weights of a real shape on a GPU, made on the device in packed layouts, and their exact logits.

For tests on a GPU: importing it takes the first GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from llm_worker_rbee.backends.cuda import CudaBackend
from llm_worker_rbee.backends.cuda.packed_weight import DENSE, FP8, PackedWeight, WeightPart, dequantize, quantize_e4m3
from llm_worker_rbee.backends.cuda.unpack_blocks import REPACK_RULES
from llm_worker_rbee.backends.ops import AttentionParams, Batch
from llm_worker_rbee.layers.attention import Attention
from llm_worker_rbee.layers.block import Block
from llm_worker_rbee.layers.linear import Linear
from llm_worker_rbee.layers.mlp import SwiGLU
from llm_worker_rbee.layers.norm import RMSNorm
from llm_worker_rbee.layers.rope import rope_table
from llm_worker_rbee.models import Transformer, read_model_config
from llm_worker_rbee.models.kv_cache import KVCache
from tests.helpers.random_planes import random_planes
from tests.helpers.synthetic import Plan, Spec, parse, plans, without_weights

OPS = CudaBackend(0)


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
        return DENSE if rule is None else rule[0]

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
    return replace(model, fused=OPS.fuse(model.graph))


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

    x = dequantize(model.embedding.parts[0])[ids]
    for block in model.blocks:
        a = block.attention
        qkv = times(normed(x, block.attention_norm), a.qkv.weight)
        q, k, v = OPS.split_heads(qkv, a.n_heads, a.n_kv_heads, a.head_dim)
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
