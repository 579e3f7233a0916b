"""Fused forward of any number of tokens on tensor cores: decoding tokens first, then those of prompts (prefill).

A packed matrix is multiplied as it is for some hundred tokens (interleaved activations, gemm.py); for more it is
dequantized once per step for cuBLAS. Small kernels between sum the splits of a product, add to the residual stream,
norm, and lay the activations out for the next product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
import triton

from ..ops import KVLayer
from .attention_decode import CosSin, launch_decode_attention, split_kv_config, split_kv_scratch
from .attention_prefill import QUERY_TILE, prefill_attention, prefill_tile, rope_store_qkv
from .decode_small_batch import SmallBatchDecoder
from .device import is_interpreted, shared_memory_bytes
from .elementwise import IS_GELU, launch_add_norm, launch_embedding, launch_gated
from .fused_ops import Attention, EmbedNorm, FusedOp, GatedLinear, LinearAddNorm, Logits, layer_weights
from .gemm import interleave_activations
from .linear import (
    MAX_GEMM_TOKENS,
    MAX_SPLITS,
    SCRATCH_BYTES,
    cublas,
    dequantize_rows,
    gemm,
    matmul_fp8,
    padded_columns,
)
from .linear import gemm_dense_batch_invariant as gemm_dense
from .packed_weight import E4M3, PackedWeight

MAX_COUNTERS = 256  # decoding requests in a graph
MAX_ONES = 512  # tokens
QKV_SPLITS = 4


class Activations(NamedTuple):
    """Row-major values, or interleaved float16, with a factor per token."""

    values: torch.Tensor
    factors: torch.Tensor
    is_interleaved: bool


def apply_factors(splits: torch.Tensor, x: Activations) -> torch.Tensor:
    """Multiply (splits, tokens, rows) by the factors of float16 activations."""
    return splits * x.factors[: splits.shape[1], None] if x.values.dtype == torch.float16 else splits


class BatchedForward:
    """Launches for one step. It holds a buffer for the largest dequantized matrix, which all steps share."""

    def __init__(self, ops: Sequence[FusedOp], device: torch.device, batch_invariant: bool = False) -> None:
        self.ops, self.device, self.batch_invariant = ops, device, batch_invariant
        head = ops[-1]
        assert isinstance(head, Logits)
        self.head = head
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._heads: dict[int, SmallBatchDecoder] = {}
        self._ones = torch.ones(MAX_ONES, device=device)
        self._counters: dict[int, torch.Tensor] = {}  # by heads
        self.pdl = False
        self.options: Any = {}

    def step(self, tokens: int, inputs: Mapping[str, torch.Tensor], decoding: int, num_logits: int | None,
             kv: Sequence[KVLayer], ropes: Mapping[int, CosSin], pdl: bool = False,
             tile_queries: int = QUERY_TILE) -> torch.Tensor:  # fmt: skip
        """Return the logits of all tokens, or of the `num_logits` ones that inputs["logits_index"] names.

        `inputs` holds the arrays of decoder.py, whose tiles have `tile_queries` queries. Of the first `decoding`
        tokens those with a position >= 0 decode."""
        self.pdl, self.options = pdl, {"launch_pdl": True} if pdl else {}
        residual: Any = None
        x: Any = None
        for op in self.ops:
            match op:
                case EmbedNorm():
                    residual = torch.empty(tokens, len(op.norm.weight), device=self.device)
                    launch_embedding(op.table, op.scale, inputs["ids"], tokens, residual, residual, None, None, False)
                    x = self.add_norm(None, residual, op)
                case Attention():
                    qkv = self.product(x, op.qkv, tokens, QKV_SPLITS)
                    x = self.attend(qkv, op, kv[op.layer], ropes[id(op.rope)], inputs, tokens, decoding, tile_queries)
                case GatedLinear():
                    x = self.gate(self.product(x, op.w, tokens), op, tokens)
                case LinearAddNorm():
                    x = self.add_norm(self.product(x, op.w, tokens), residual, op)
                    last = op
        return self.compute_logits(x, residual, last, tokens, inputs, num_logits)

    def compute_logits(
        self, x: Activations, residual: torch.Tensor, last: LinearAddNorm, tokens: int,
        inputs: Mapping[str, torch.Tensor], num_logits: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply the output head to the tokens whose logits are requested."""
        head, soft_cap = self.head
        if num_logits == 0:
            return torch.empty(0, head.rows, device=self.device)
        if not self.batch_invariant and (num_logits == 1 or (num_logits in (2, 4) and (head.is_packed or head.is_fp8))):
            if num_logits not in self._heads:
                self._heads[num_logits] = SmallBatchDecoder(self.ops, num_logits, self.device)
            small = self._heads[num_logits]
            small.pdl = False
            small.embed(residual, 1.0, inputs["logits_index"], last.norm, head)
            return small.compute_logits()
        if num_logits is not None:
            residual, tokens = residual[inputs["logits_index"][:num_logits].long()], num_logits
            x = self.add_norm(None, residual, last)
        out = self.product(x, head, tokens, 1)[0].float()
        return torch.tanh(out / soft_cap) * soft_cap if soft_cap else out

    def stays_packed(self, w: PackedWeight, tokens: int) -> bool:
        """Return whether a matrix is multiplied as it is packed."""
        always = self.batch_invariant or w is self.head.head  # which would take a gigabyte dequantized
        return w.is_packed and (always or tokens <= MAX_GEMM_TOKENS)

    def add_norm(
        self, delta: torch.Tensor | None, residual: torch.Tensor, op: EmbedNorm | LinearAddNorm
    ) -> Activations:
        """Add to the residual stream and return its norm as activations of the following product."""
        x = self.empty_activations(op.following, len(residual))
        launch_add_norm(delta, residual, op, x.values, x.factors, self.pdl, x.is_interleaved)
        return x

    def gate(self, splits: torch.Tensor, op: GatedLinear, tokens: int) -> Activations:
        """Return activation(gate) * up as activations of the down projection."""
        x = self.empty_activations(op.following, tokens)
        is_gelu = IS_GELU[op.activation]
        launch_gated(splits, op.following.columns, x.values, x.factors, is_gelu, self.pdl, x.is_interleaved)
        return x

    def empty_activations(self, following: PackedWeight, tokens: int) -> Activations:
        """Allocate what the following product reads."""
        packed = self.stays_packed(following, tokens)
        as_e4m3 = following.takes_e4m3_activations and not self.batch_invariant
        dtype = torch.float16 if packed else E4M3 if as_e4m3 else following.dense_dtype
        columns = padded_columns(following.columns) if packed else following.columns
        values = torch.empty(tokens, columns, dtype=dtype, device=self.device)
        return Activations(values, torch.empty(tokens, device=self.device), packed)

    def product(self, x: Activations, w: PackedWeight, tokens: int, max_splits: int = MAX_SPLITS) -> torch.Tensor:
        """Return (splits, tokens, rows), whose sum is the product."""
        if self.batch_invariant and not x.is_interleaved:
            return apply_factors(gemm_dense(x.values, w.parts[0], max_splits), x)
        if w.is_fp8:
            return matmul_fp8(x.values, w.parts[0], x.factors, self.pdl)[None]
        if not x.is_interleaved:
            return self._product_cublas(x, w)
        return gemm(x.values, x.factors, w, tokens, max_splits, self.batch_invariant, self.pdl)

    def _product_cublas(self, x: Activations, w: PackedWeight) -> torch.Tensor:
        """Multiply by cuBLAS; a packed matrix is dequantized, as many rows at a time as the scratch holds."""
        if not w.is_packed:
            values = w.parts[0].values
            assert values is not None
            is_half = values.dtype == torch.float16
            return apply_factors(cublas(x.values, values)[None], x) if is_half else torch.mm(x.values, values.T)[None]
        scratch = self._scratch_for(w.dense_dtype)
        step = scratch.numel() // w.columns
        out = []
        for part in w.parts:
            for start in range(0, part.rows, step):
                rows = scratch[: min(step, part.rows - start) * w.columns].view(-1, w.columns)
                dequantize_rows(part, start, rows)
                out.append(torch.mm(x.values, rows.T))
        return (out[0] if len(out) == 1 else torch.cat(out, 1))[None]

    def _scratch_for(self, dtype: torch.dtype) -> torch.Tensor:
        """Return room for the largest dequantized matrix, at most SCRATCH_BYTES of it."""
        if dtype not in self._scratch:
            weights = layer_weights(self.ops)
            size = max(w.rows * w.columns for w in weights)
            size = max(min(size, SCRATCH_BYTES // dtype.itemsize), max(w.columns for w in weights))
            self._scratch[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return self._scratch[dtype]

    def attend(
        self, qkv: Any, op: Attention, kv: KVLayer, rope: CosSin, inputs: Mapping[str, torch.Tensor], tokens: int,
        decoding: int, tile_queries: int,
    ) -> Activations:  # fmt: skip
        """Attend for decode and prefill tokens; return activations of the output projection."""
        packed = self.stays_packed(op.following, tokens)
        dtype = torch.float16 if packed else op.following.dense_dtype
        f: Any = {"device": self.device}
        make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
        out = make(tokens, op.following.columns, dtype=dtype, **f)
        if decoding:
            config = split_kv_config(decoding, op.n_heads, op.n_kv_heads)
            scratch = split_kv_scratch(decoding, op.n_heads, op.head_dim, config, self.device)
            scratch = *scratch, self._counters_for(decoding, op.n_heads)
            launch_decode_attention(qkv, op, kv, rope, inputs["decode_positions"], inputs["tables"], inputs["width"],
                                    decoding, config, scratch, out, self.pdl)  # fmt: skip
        if inputs["tile_first"].numel():
            self._prefill(qkv, op, kv, rope, inputs, tokens, out, tile_queries)
        ones = self._ones if tokens <= MAX_ONES else torch.ones(tokens, **f)
        if not packed:
            return Activations(out, ones, False)
        blocks = op.following.columns // 32
        interleaved = torch.empty(tokens, padded_columns(op.following.columns), dtype=dtype, **f)
        interleave_activations[(triton.cdiv(tokens, 8), triton.cdiv(blocks, 16))](
            out, interleaved, tokens, blocks, 16, 8, self.pdl, num_warps=4, **self.options
        )
        return Activations(interleaved, ones, True)

    def _prefill(
        self, qkv: Any, op: Attention, kv: KVLayer, rope: CosSin, inputs: Mapping[str, torch.Tensor], tokens: int,
        out: torch.Tensor, tile_queries: int,
    ) -> None:  # fmt: skip
        """Rotate, store and attend for the tokens of prompts."""
        heads, kv_heads, dim, block_size = op.n_heads, op.n_kv_heads, op.head_dim, kv.k.shape[2]
        scale, window, cap = op.params
        dtype = kv.k.dtype if kv.k.element_size() > 1 else torch.bfloat16
        q = torch.empty(tokens, heads, dim, dtype=dtype, device=self.device)
        each = gcd(heads, kv_heads, 8)  # heads of a program
        rope_store_qkv[((heads + 2 * kv_heads) // each, tokens)](
            qkv, rope.cos, rope.sin, inputs["positions"], inputs["slots"], q, kv.k, kv.v, heads, kv_heads, dim,
            rope.cos.shape[1], block_size, op.bias, op.q_norm, op.k_norm, op.eps, qkv.stride(0), qkv.shape[0], each,
            num_warps=max(1, each // 2),
        )  # fmt: skip
        keys, stages = prefill_tile(shared_memory_bytes(self.device), dim, q.element_size())
        prefill_attention[(inputs["tile_first"].numel(), heads)](
            q, kv.k, kv.v, inputs["tables"], 0, inputs["query_start"], inputs["context_len"], inputs["tile_request"],
            inputs["tile_first"], out, scale, heads, kv_heads, dim, block_size, tile_queries, keys, window, cap,
            inputs["width"], num_warps=4, num_stages=stages,
        )  # fmt: skip

    def _counters_for(self, decoding: int, heads: int) -> torch.Tensor:
        """Return zeros, which the kernel leaves as zeros."""
        if decoding > MAX_COUNTERS:  # in no graph: those hold the address of the shared ones
            return torch.zeros(decoding * heads, dtype=torch.int32, device=self.device)
        if heads not in self._counters:
            self._counters[heads] = torch.zeros(MAX_COUNTERS * heads, dtype=torch.int32, device=self.device)
        return self._counters[heads]
