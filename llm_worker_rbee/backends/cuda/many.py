"""A step of any number of tokens, those that answer first, then those that read prompts: products on tensor cores.

A matrix that is packed is multiplied as it is for up to FUSED tokens (activations spread, matmul.py); for more it is
written out as numbers once a step and the vendor's product reads it. Small kernels between join what a product was
split into, add to the stream, norm, and lay the activations out for the next product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..types import BlockParts, KVLayer, ModelParts
from . import device
from .elementwise import add_norm, gated
from .few import Few, Rope, decode, embed_rows, is_packed
from .matmul import dequantize, matmul, spread
from .prefill import prefill_attention, rope_store
from .products import FAST

FUSED = 192  # tokens up to which a packed matrix is not written out
QUERIES = 64  # of a program that reads
PROGRAMS = 264  # that a product should be cut into: two for each multiprocessor


class Tile(NamedTuple):
    """How a fused product is cut: rows, tokens and blocks of a program, warps, stages."""

    rows: int
    tokens: int
    blocks: int
    warps: int
    stages: int


def tile_for(tokens: int, is_fast: bool) -> Tile:
    """Measured for the kinds with a quick way to float16; the others go through shared memory."""
    if device.interpreting():
        return Tile(256, 16, 16, 4, 2)  # few and large programs
    if not is_fast:
        return Tile(64, 16 if tokens <= 16 else 64, 16, 4, 2)
    if tokens <= 16:
        return Tile(64, 16, 32, 4, 3)
    if tokens <= 32:
        return Tile(64, 32, 32, 4, 3)
    return Tile(128, 64, 32, 8, 2) if tokens <= 64 else Tile(128, 128, 16, 8, 3)


def split_for(rows: int, blocks: int, tokens: int, tile: Tile) -> int:
    """Parts of the columns, so that every multiprocessor has something to do."""
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(tokens, tile.tokens)
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS, programs)) if programs < PROGRAMS // 2 + 1 else 1
    return int(min(wanted, 8, max(1, triton.cdiv(blocks, tile.blocks))))


def numbers_type(matrix: Any) -> torch.dtype:
    """What a matrix is multiplied in by the vendor's product."""
    if not is_packed(matrix):
        kind: torch.dtype = matrix.parts[0].values.dtype
        return kind
    return torch.float32 if device.interpreting() else torch.bfloat16


class Activations(NamedTuple):
    """Of `tokens` tokens: rows of numbers, or spread float16 with a factor for each token."""

    values: torch.Tensor
    factors: torch.Tensor
    is_spread: bool


class Many:
    """Launches for one step. It holds a buffer for the largest matrix as numbers, which all steps share."""

    def __init__(self, model: ModelParts) -> None:
        self.model = model
        first = model.blocks[0]
        self.width, self.heads, self.dim = model.norm.shape[0], first.n_heads, first.head_dim
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._tail: dict[int, Few] = {}
        self._ones = torch.ones(FUSED, device=device.current())
        self._counters: torch.Tensor | None = None
        self.pdl = False
        self.options: Any = {}

    def step(self, tokens: int, at: Mapping[str, torch.Tensor], answering: int, wanted: int | None,
             kv: Sequence[KVLayer], ropes: Sequence[Rope], pdl: bool = False) -> torch.Tensor:  # fmt: skip
        """`at` holds the arrays of decoder.py: of the first `answering` tokens those answer that stand somewhere;
        logits of all tokens, or of the `wanted` ones that at["logits_index"] names."""
        self.pdl, self.options = pdl, {"launch_pdl": True} if pdl else {}
        blocks = self.model.blocks
        stream = torch.empty(tokens, self.width, device=device.current())
        embed_rows(
            self.model.embedding, self.model.embedding_scale, at["ids"], tokens, stream, stream, None, None, False
        )
        delta = None
        for block, layer, rope in zip(blocks, kv, ropes, strict=True):
            x = self.normed(delta, stream, block.attention_norm, block.eps, block.qkv)
            qkv = self.product(x, block.qkv, tokens, 2)
            mixed = self.attend(qkv, block, layer, rope, at, tokens, answering)
            x = self.normed(self.product(mixed, block.output, tokens), stream, block.mlp_norm, block.eps, block.gate_up)
            x = self.activated(self.product(x, block.gate_up, tokens), block, tokens)
            delta = self.product(x, block.down, tokens)
        return self.logits(delta, stream, tokens, at, wanted)

    def logits(self, delta: Any, stream: torch.Tensor, tokens: int, at: Any, wanted: int | None) -> torch.Tensor:
        """The head over the tokens whose logits are wanted."""
        model, eps = self.model, self.model.blocks[0].eps
        x = self.normed(delta, stream, model.norm, eps, model.head)
        if wanted == 0:
            return torch.empty(0, model.head.rows, device=device.current())
        if wanted == 1 or (wanted in (2, 4) and is_packed(model.head)):
            few = self._tail.get(wanted) or self._tail.setdefault(wanted, Few(model, wanted))
            few.pdl, few.options = False, {}
            few.begin(stream, 1.0, at["logits_index"], model.norm, model.head)
            return few.finish()
        if wanted is not None:
            stream, tokens = stream[at["logits_index"][:wanted].long()], wanted
            x = self.normed(None, stream, model.norm, eps, model.head)
        out = self.product(x, model.head, tokens, 1)[0].float()
        return torch.tanh(out / model.soft_cap) * model.soft_cap if model.soft_cap else out

    def is_fused(self, matrix: Any, tokens: int) -> bool:
        """Whether a matrix is multiplied as it is packed."""
        return tokens <= FUSED and is_packed(matrix)

    def normed(self, delta: Any, stream: torch.Tensor, norm: torch.Tensor, eps: float, then: Any) -> Activations:
        """The stream with what was computed, and its norm as the next product wants it."""
        tokens, width = stream.shape
        x = self.room(then, tokens)
        size = triton.next_power_of_2(width // 32)
        add_norm[(tokens,)](
            stream if delta is None else delta, stream, norm, x.values, x.factors, tokens, eps, width, size,
            0 if delta is None else delta.shape[0], x.is_spread, self.pdl, num_warps=max(1, min(8, size // 8)),
            **self.options,
        )  # fmt: skip
        return x

    def activated(self, parts: torch.Tensor, block: BlockParts, tokens: int) -> Activations:
        """The gate, as the next product wants it."""
        x = self.room(block.down, tokens)
        size = triton.next_power_of_2(block.down.columns // 32)
        gated[(tokens,)](
            parts, x.values, x.factors, tokens, block.down.columns, size, parts.shape[0],
            block.activation != "silu", x.is_spread, self.pdl,
            num_warps=max(1, min(16, size // 16)), **self.options,
        )  # fmt: skip
        return x

    def room(self, then: Any, tokens: int) -> Activations:
        """Room for what the next product reads."""
        fused = self.is_fused(then, tokens)
        f: Any = {"device": device.current()}
        kind = torch.float16 if fused else numbers_type(then)
        return Activations(torch.empty(tokens, then.columns, dtype=kind, **f), torch.empty(tokens, **f), fused)

    def product(self, x: Activations, w: Any, tokens: int, most: int = 8) -> torch.Tensor:
        """(parts, tokens, rows); their sum is the product."""
        if not x.is_spread:
            return torch.mm(x.values, self.as_numbers(w).T)[None]
        tile = tile_for(tokens, all(part.kind in FAST for part in w.parts))
        split = min(most, split_for(w.rows, w.columns // 32, tokens, tile))
        out = torch.empty(split, tokens, w.rows, device=device.current())
        first = 0
        for part in w.parts:
            matmul[(triton.cdiv(part.rows, tile.rows), triton.cdiv(tokens, tile.tokens), split)](
                x.values, x.factors, part.unit, part.low, part.high, part.scales, out.view(-1)[first:], tokens,
                part.rows,
                part.blocks, part.kind, tile.rows, tile.tokens, tile.blocks, tl.float16, split, part.kind in FAST,
                w.rows, self.pdl, num_warps=tile.warps, num_stages=tile.stages, **self.options,
            )  # fmt: skip
            first += part.rows
        return out

    def as_numbers(self, w: Any) -> torch.Tensor:
        """The matrix, written out if it is packed: it is gone when the next one is."""
        if not is_packed(w):
            numbers: torch.Tensor = w.parts[0].values
            return numbers
        kind = numbers_type(w)
        out = self.scratch(kind)[: w.rows * w.columns].view(w.rows, w.columns)
        first = 0
        for part in w.parts:
            dequantize[(triton.cdiv(part.rows, 8), triton.cdiv(part.blocks, 16))](
                part.unit,
                part.low,
                part.high,
                part.scales,
                out[first:],
                part.rows,
                part.blocks,
                part.kind,
                8,
                16,
                num_warps=4,
            )
            first += part.rows
        return out

    def scratch(self, kind: torch.dtype) -> torch.Tensor:
        """Room for the largest matrix as numbers."""
        if kind not in self._scratch:
            matrices = [self.model.head, *(w for b in self.model.blocks for w in (b.qkv, b.output, b.gate_up, b.down))]
            size = max(w.rows * w.columns for w in matrices)
            self._scratch[kind] = torch.empty(size, dtype=kind, device=device.current())
        return self._scratch[kind]

    def attend(
        self, qkv: Any, block: BlockParts, kv: KVLayer, rope: Rope, at: Any, tokens: int, answering: int
    ) -> Activations:
        """Attention of those that answer and of those that read, as the next product wants it."""
        fused = self.is_fused(block.output, tokens)
        kind = torch.float16 if fused else numbers_type(block.output)
        f: Any = {"device": device.current()}
        make = torch.zeros if device.interpreting() else torch.empty  # rows of nobody stay as they are
        mixed = make(tokens, block.output.columns, dtype=kind, **f)
        if answering:
            splits = self.splits(answering, block.n_kv_heads)
            rooms = (answering, self.heads, splits)
            scratch = (torch.empty(*rooms, self.dim, **f), torch.empty(*rooms, 2, **f), self.counters(answering))
            decode(qkv, block, kv, rope, at["standing"], at["tables"], at["width"], answering, splits, 4, scratch,
            mixed,
                   self.pdl, 8)  # fmt: skip
        if at["tile_first"].numel():
            self.read(qkv, block, kv, rope, at, tokens, mixed)
        ones = self._ones
        if not fused:
            return Activations(mixed, ones, False)
        out, blocks = torch.empty_like(mixed), block.output.columns // 32
        spread[(triton.cdiv(tokens, 8), triton.cdiv(blocks, 16))](
            mixed, out, tokens, blocks, 16, 8, self.pdl, num_warps=4, **self.options
        )
        return Activations(out, ones, True)

    def read(self, qkv: Any, block: BlockParts, kv: KVLayer, rope: Rope, at: Any, tokens: int, mixed: Any) -> None:
        """Rotate, store and attend for the tokens of prompts."""
        heads, kv_heads, dim, size = block.n_heads, block.n_kv_heads, block.head_dim, kv.k.shape[2]
        scale, window, cap = block.attention
        kind = kv.k.dtype if kv.k.element_size() > 1 else torch.bfloat16
        q = torch.empty(tokens, heads, dim, dtype=kind, device=device.current())
        rope_store[(heads + 2 * kv_heads, tokens)](
            qkv, rope.cos, rope.sin, at["positions"], at["slots"], q, kv.k, kv.v,
            heads, kv_heads, dim // 2, size, block.qkv_bias, block.q_norm, block.k_norm, block.eps,
            qkv.stride(0), qkv.shape[0], num_warps=1,
        )  # fmt: skip
        tiles = at["tile_first"].numel()
        prefill_attention[(tiles, heads)](
            q, kv.k, kv.v, at["tables"], 0, at["query_start"], at["context_len"], at["tile_request"],
            at["tile_first"], mixed, scale, heads, kv_heads, dim, size, QUERIES, 64, window, cap, 0, at["width"],
            num_warps=4, num_stages=2,
        )  # fmt: skip

    def splits(self, answering: int, kv_heads: int) -> int:
        """Into how many pieces a context is cut: fewer when there are many requests."""
        return int(max(1, min(16, triton.next_power_of_2(triton.cdiv(2048, answering * kv_heads)))))

    def counters(self, answering: int) -> torch.Tensor:
        """Zeros, which the kernel leaves as zeros."""
        if self._counters is None or self._counters.numel() < answering * self.heads:
            self._counters = torch.zeros(max(256, answering) * self.heads, dtype=torch.int32, device=device.current())
        return self._counters
