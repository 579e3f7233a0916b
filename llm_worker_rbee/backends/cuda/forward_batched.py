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

from ..ops import BlockParts, KVLayer, ModelParts
from .attention_decode import CosSin, launch_decode_attention, split_kv_config
from .attention_prefill import QUERY_TILE, SMALL_QUERY_TILE, prefill_attention, prefill_tile, rope_store_qkv
from .decode_small_batch import SmallBatchDecoder
from .device import is_interpreted, shared_memory_bytes
from .elementwise import add_rms_norm_rows, launch_embedding, swiglu_rows
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

    def __init__(self, model: ModelParts, device: torch.device, batch_invariant: bool = False) -> None:
        self.model, self.device, self.batch_invariant = model, device, batch_invariant
        first = model.blocks[0]
        self.width, self.heads, self.dim = model.norm.shape[0], first.n_heads, first.head_dim
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._heads: dict[int, SmallBatchDecoder] = {}
        self._ones = torch.ones(MAX_ONES, device=device)
        self.tile_queries = SMALL_QUERY_TILE if batch_invariant else QUERY_TILE
        self._counters: torch.Tensor | None = None
        self.pdl = False
        self.options: Any = {}

    def step(self, tokens: int, inputs: Mapping[str, torch.Tensor], decoding: int, num_logits: int | None,
             kv: Sequence[KVLayer], ropes: Sequence[CosSin], pdl: bool = False) -> torch.Tensor:  # fmt: skip
        """Return the logits of all tokens, or of the `num_logits` ones that inputs["logits_index"] names.

        `inputs` holds the arrays of decoder.py. Of the first `decoding` tokens those with a position >= 0 decode."""
        self.pdl, self.options = pdl, {"launch_pdl": True} if pdl else {}
        blocks = self.model.blocks
        residual = torch.empty(tokens, self.width, device=self.device)
        launch_embedding(
            self.model.embedding, self.model.embedding_scale, inputs["ids"], tokens, residual, residual, None, None,
            False,
        )  # fmt: skip
        delta = None
        for block, layer, rope in zip(blocks, kv, ropes, strict=True):
            x = self.add_norm(delta, residual, block.attention_norm, block.eps, block.qkv)
            qkv = self.product(x, block.qkv, tokens, QKV_SPLITS)
            x = self.attend(qkv, block, layer, rope, inputs, tokens, decoding)
            delta = self.product(x, block.output, tokens)
            x = self.add_norm(delta, residual, block.mlp_norm, block.eps, block.gate_up)
            x = self.swiglu(self.product(x, block.gate_up, tokens), block, tokens)
            delta = self.product(x, block.down, tokens)
        return self.compute_logits(delta, residual, tokens, inputs, num_logits)

    def compute_logits(
        self, delta: Any, residual: torch.Tensor, tokens: int, inputs: Mapping[str, torch.Tensor],
        num_logits: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply the output head to the tokens whose logits are requested."""
        model, eps = self.model, self.model.blocks[0].eps
        x = self.add_norm(delta, residual, model.norm, eps, model.head)
        if num_logits == 0:
            return torch.empty(0, model.head.rows, device=self.device)
        takes_gemv = model.head.is_packed or model.head.is_fp8
        if not self.batch_invariant and (num_logits == 1 or (num_logits in (2, 4) and takes_gemv)):
            if num_logits not in self._heads:
                self._heads[num_logits] = SmallBatchDecoder(model, num_logits, self.device)
            head = self._heads[num_logits]
            head.pdl = False
            head.embed(residual, 1.0, inputs["logits_index"], model.norm, model.head)
            return head.compute_logits()
        if num_logits is not None:
            residual, tokens = residual[inputs["logits_index"][:num_logits].long()], num_logits
            x = self.add_norm(None, residual, model.norm, eps, model.head)
        out = self.product(x, model.head, tokens, 1)[0].float()
        return torch.tanh(out / model.soft_cap) * model.soft_cap if model.soft_cap else out

    def stays_packed(self, w: PackedWeight, tokens: int) -> bool:
        """Return whether a matrix is multiplied as it is packed."""
        always = self.batch_invariant or w is self.model.head  # which would take a gigabyte dequantized
        return w.is_packed and (always or tokens <= MAX_GEMM_TOKENS)

    def add_norm(
        self, delta: Any, residual: torch.Tensor, norm: torch.Tensor, eps: float, following: PackedWeight
    ) -> Activations:
        """Add to the residual stream and return its norm as activations of the following product."""
        tokens, width = residual.shape
        x = self.empty_activations(following, tokens)
        size = max(16, triton.next_power_of_2(width // 32))
        add_rms_norm_rows[(tokens,)](
            residual if delta is None else delta, residual, norm, x.values, x.factors, tokens, eps, width, size,
            0 if delta is None else delta.shape[0], x.is_interleaved, self.pdl, num_warps=max(1, min(8, size // 8)),
            **self.options,
        )  # fmt: skip
        return x

    def swiglu(self, splits: torch.Tensor, block: BlockParts, tokens: int) -> Activations:
        """Return silu(gate) * up as activations of the down projection."""
        x = self.empty_activations(block.down, tokens)
        size = max(16, triton.next_power_of_2(block.down.columns // 32))
        swiglu_rows[(tokens,)](
            splits, x.values, x.factors, tokens, block.down.columns, size, splits.shape[0], x.is_interleaved, self.pdl,
            num_warps=max(1, min(16, size // 16)), **self.options,
        )  # fmt: skip
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
            weights = [w for b in self.model.blocks for w in (b.qkv, b.output, b.gate_up, b.down)]
            size = max(w.rows * w.columns for w in weights)
            size = max(min(size, SCRATCH_BYTES // dtype.itemsize), max(w.columns for w in weights))
            self._scratch[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return self._scratch[dtype]

    def attend(
        self, qkv: Any, block: BlockParts, kv: KVLayer, rope: CosSin, inputs: Mapping[str, torch.Tensor], tokens: int,
        decoding: int,
    ) -> Activations:  # fmt: skip
        """Attend for decode and prefill tokens; return activations of the output projection."""
        packed = self.stays_packed(block.output, tokens)
        dtype = torch.float16 if packed else block.output.dense_dtype
        f: Any = {"device": self.device}
        make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
        out = make(tokens, block.output.columns, dtype=dtype, **f)
        if decoding:
            config = split_kv_config(decoding, block.n_heads, block.n_kv_heads)
            shape = (decoding, self.heads, config.max_splits)
            scratch = (torch.empty(*shape, self.dim, **f), torch.empty(*shape, 2, **f), self._counters_for(decoding))
            launch_decode_attention(qkv, block, kv, rope, inputs["decode_positions"], inputs["tables"], inputs["width"],
                                    decoding, config, scratch, out, self.pdl)  # fmt: skip
        if inputs["tile_first"].numel():
            self._prefill(qkv, block, kv, rope, inputs, tokens, out)
        ones = self._ones if tokens <= MAX_ONES else torch.ones(tokens, **f)
        if not packed:
            return Activations(out, ones, False)
        blocks = block.output.columns // 32
        interleaved = torch.empty(tokens, padded_columns(block.output.columns), dtype=dtype, **f)
        interleave_activations[(triton.cdiv(tokens, 8), triton.cdiv(blocks, 16))](
            out, interleaved, tokens, blocks, 16, 8, self.pdl, num_warps=4, **self.options
        )
        return Activations(interleaved, ones, True)

    def _prefill(
        self, qkv: Any, block: BlockParts, kv: KVLayer, rope: CosSin, inputs: Mapping[str, torch.Tensor], tokens: int,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Rotate, store and attend for the tokens of prompts."""
        heads, kv_heads, dim, block_size = block.n_heads, block.n_kv_heads, block.head_dim, kv.k.shape[2]
        scale, window, cap = block.attention
        dtype = kv.k.dtype if kv.k.element_size() > 1 else torch.bfloat16
        q = torch.empty(tokens, heads, dim, dtype=dtype, device=self.device)
        each = gcd(heads, kv_heads, 8)  # heads of a program
        rope_store_qkv[((heads + 2 * kv_heads) // each, tokens)](
            qkv, rope.cos, rope.sin, inputs["positions"], inputs["slots"], q, kv.k, kv.v,
            heads, kv_heads, dim // 2, block_size, block.qkv_bias, block.q_norm, block.k_norm, block.eps,
            qkv.stride(0), qkv.shape[0], each, num_warps=max(1, each // 2),
        )  # fmt: skip
        keys, stages = prefill_tile(shared_memory_bytes(self.device), dim, q.element_size())
        prefill_attention[(inputs["tile_first"].numel(), heads)](
            q, kv.k, kv.v, inputs["tables"], 0, inputs["query_start"], inputs["context_len"], inputs["tile_request"],
            inputs["tile_first"], out, scale, heads, kv_heads, dim, block_size, self.tile_queries, keys, window, cap, 0,
            inputs["width"], num_warps=4, num_stages=stages,
        )  # fmt: skip

    def _counters_for(self, decoding: int) -> torch.Tensor:
        """Return zeros, which the kernel leaves as zeros."""
        if decoding > MAX_COUNTERS:  # in no graph: those hold the address of the shared ones
            return torch.zeros(decoding * self.heads, dtype=torch.int32, device=self.device)
        if self._counters is None:
            self._counters = torch.zeros(MAX_COUNTERS * self.heads, dtype=torch.int32, device=self.device)
        return self._counters
