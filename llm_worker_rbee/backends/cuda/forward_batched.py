"""A step of any number of tokens, those that answer first, then those that read prompts: products on tensor cores.

A matrix that is packed is multiplied as it is for some hundred tokens (activations spread, linear.py); for more
it is written out as numbers once a step and the vendor's product reads it. Small kernels between join what a product
was split into, add to the stream, norm, and lay the activations out for the next product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
import triton

from ..ops import BlockParts, KVLayer, ModelParts
from . import device, fp8, linear
from .attention_decode import cut_for, keys_for
from .attention_prefill import prefill_attention, rope_store
from .decode_small_batch import Few, Rope, decode, embed_rows, is_packed, numbers_type
from .elementwise import add_norm, gated
from .gemm import spread
from .linear import SCRATCH, vendor, written_out

MOST_COUNTED = 256  # requests that answer
MOST_ONES = 512  # tokens that are multiplied by nothing
QUERIES = 64  # of a program that reads
FIXED_QUERIES = 16  # of one where nobody is told from others


class Activations(NamedTuple):
    """Of `tokens` tokens: rows of numbers, or spread float16 with a factor for each token."""

    values: torch.Tensor
    factors: torch.Tensor
    is_spread: bool


def with_factors(found: torch.Tensor, x: Activations) -> torch.Tensor:
    """(parts, tokens, rows) of what was divided by factors, so that it fits a float16."""
    return found * x.factors[: found.shape[1], None] if x.values.dtype == torch.float16 else found


class Many:
    """Launches for one step. It holds a buffer for the largest matrix as numbers, which all steps share."""

    def __init__(self, model: ModelParts, fixed: bool = False) -> None:
        """`fixed`: the numbers of a token do not depend on the others in the step."""
        self.model, self.fixed = model, fixed
        first = model.blocks[0]
        self.width, self.heads, self.dim = model.norm.shape[0], first.n_heads, first.head_dim
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._tail: dict[int, Few] = {}
        self._ones = torch.ones(MOST_ONES, device=device.current())
        self.queries = FIXED_QUERIES if fixed else QUERIES
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
            qkv = self.product(x, block.qkv, tokens, 4)
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
        as_bytes = is_packed(model.head) or fp8.is_fp8(model.head)
        if not self.fixed and (wanted == 1 or (wanted in (2, 4) and as_bytes)):
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
        whole = self.fixed or matrix is self.model.head  # whose numbers would take a gigabyte
        return is_packed(matrix) and (whole or tokens <= linear.MOST_TOKENS)

    def normed(self, delta: Any, stream: torch.Tensor, norm: torch.Tensor, eps: float, then: Any) -> Activations:
        """The stream with what was computed, and its norm as the next product wants it."""
        tokens, width = stream.shape
        x = self.room(then, tokens)
        size = max(16, triton.next_power_of_2(width // 32))
        add_norm[(tokens,)](
            stream if delta is None else delta, stream, norm, x.values, x.factors, tokens, eps, width, size,
            0 if delta is None else delta.shape[0], x.is_spread, self.pdl, num_warps=max(1, min(8, size // 8)),
            **self.options,
        )  # fmt: skip
        return x

    def activated(self, parts: torch.Tensor, block: BlockParts, tokens: int) -> Activations:
        """The gate, as the next product wants it."""
        x = self.room(block.down, tokens)
        size = max(16, triton.next_power_of_2(block.down.columns // 32))
        gated[(tokens,)](
            parts, x.values, x.factors, tokens, block.down.columns, size, parts.shape[0],
            x.is_spread, self.pdl,
            num_warps=max(1, min(16, size // 16)), **self.options,
        )  # fmt: skip
        return x

    def room(self, then: Any, tokens: int) -> Activations:
        """Room for what the next product reads."""
        fused = self.is_fused(then, tokens)
        f: Any = {"device": device.current()}
        as_e4m3 = fp8.is_rounded_before(then) and not self.fixed
        kind = torch.float16 if fused else fp8.E4M3 if as_e4m3 else numbers_type(then)
        columns = linear.padded(then.columns) if fused else then.columns
        return Activations(torch.empty(tokens, columns, dtype=kind, **f), torch.empty(tokens, **f), fused)

    def product(self, x: Activations, w: Any, tokens: int, most: int = 8) -> torch.Tensor:
        """(parts, tokens, rows); their sum is the product."""
        if self.fixed and not x.is_spread:
            return with_factors(linear.numbers_product(x.values, w.parts[0], most), x)
        if fp8.is_fp8(w):
            return fp8.product(x.values, w.parts[0], x.factors, self.pdl)[None]
        if not x.is_spread:
            return self.by_vendor(x, w)
        return linear.product(x.values, x.factors, w, tokens, most, self.fixed, self.pdl)

    def by_vendor(self, x: Activations, w: Any) -> torch.Tensor:
        """The vendor's product; a packed matrix is written out before it, as many rows as the scratch holds."""
        if not is_packed(w):
            values = w.parts[0].values
            is_half = values.dtype == torch.float16
            return with_factors(vendor(x.values, values)[None], x) if is_half else torch.mm(x.values, values.T)[None]
        scratch = self.scratch(numbers_type(w))
        step = scratch.numel() // w.columns
        found = []
        for part in w.parts:
            for start in range(0, part.rows, step):
                rows = scratch[: min(step, part.rows - start) * w.columns].view(-1, w.columns)
                written_out(part, start, rows)
                found.append(torch.mm(x.values, rows.T))
        return (found[0] if len(found) == 1 else torch.cat(found, 1))[None]

    def scratch(self, kind: torch.dtype) -> torch.Tensor:
        """Room for the largest matrix as numbers, or for SCRATCH bytes of one."""
        if kind not in self._scratch:
            matrices = [w for b in self.model.blocks for w in (b.qkv, b.output, b.gate_up, b.down)]
            size = max(w.rows * w.columns for w in matrices)
            size = max(min(size, SCRATCH // kind.itemsize), max(w.columns for w in matrices))
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
            cut = cut_for(answering, block.n_heads, block.n_kv_heads)
            rooms = (answering, self.heads, cut.splits)
            scratch = (torch.empty(*rooms, self.dim, **f), torch.empty(*rooms, 2, **f), self.counters(answering))
            decode(qkv, block, kv, rope, at["standing"], at["tables"], at["width"], answering, cut, scratch, mixed,
                   self.pdl)  # fmt: skip
        if at["tile_first"].numel():
            self.read(qkv, block, kv, rope, at, tokens, mixed)
        ones = self._ones if tokens <= MOST_ONES else torch.ones(tokens, **f)
        if not fused:
            return Activations(mixed, ones, False)
        blocks = block.output.columns // 32
        out = torch.empty(tokens, linear.padded(block.output.columns), dtype=kind, **f)
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
        each = gcd(heads, kv_heads, 8)  # heads of a program
        rope_store[((heads + 2 * kv_heads) // each, tokens)](
            qkv, rope.cos, rope.sin, at["positions"], at["slots"], q, kv.k, kv.v,
            heads, kv_heads, dim // 2, size, block.qkv_bias, block.q_norm, block.k_norm, block.eps,
            qkv.stride(0), qkv.shape[0], each, num_warps=max(1, each // 2),
        )  # fmt: skip
        tiles, (keys, stages) = at["tile_first"].numel(), keys_for(dim, q.element_size())
        prefill_attention[(tiles, heads)](
            q, kv.k, kv.v, at["tables"], 0, at["query_start"], at["context_len"], at["tile_request"],
            at["tile_first"], mixed, scale, heads, kv_heads, dim, size, self.queries, keys, window, cap, 0, at["width"],
            num_warps=4, num_stages=stages,
        )  # fmt: skip

    def counters(self, answering: int) -> torch.Tensor:
        """Zeros, which the kernel leaves as zeros."""
        if answering > MOST_COUNTED:  # in no graph; those have addresses of the others
            return torch.zeros(answering * self.heads, dtype=torch.int32, device=device.current())
        if self._counters is None:
            self._counters = torch.zeros(MOST_COUNTED * self.heads, dtype=torch.int32, device=device.current())
        return self._counters
