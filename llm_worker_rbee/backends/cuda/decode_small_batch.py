"""A step of one to four tokens that answer: five kernels a layer, each of which starts before the one before has ended.

No kernel norms: who makes the stream leaves `stream * weight` and sums of squares, who reads multiplies by one number a
token (epilogue.py). Activations are bytes where the next matrix is packed, else numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..ops import BlockParts, KVLayer, ModelParts
from . import device, fp8
from .attention_decode import Cut, cut_for, decode_attention, decode_grouped, runs_of
from .elementwise import embed
from .gemv import GATED, RESIDUAL, STORE, matvec, matvec_numbers
from .packed_weight import FP8, Bytes

# (rows of a program, warps, rows ahead, registers of a thread; 0: as the compiler likes)
ONE = {
    "qkv": (8, 8, 1, 0),
    "o": (32, 8, 4, 0),
    "gate_up": (64, 4, 2, 168),
    "down": (32, 8, 6, 0),
    "head": (16, 8, 2, 0),
}
BY_KIND = {
    ("down", "q6"): (32, 8, 3, 0), ("down", "q8"): (32, 8, 2, 0), ("down", "q8d"): (32, 8, 2, 0),
    ("gate_up", "q8"): (64, 4, 2, 0), ("gate_up", "q8d"): (64, 4, 2, 0),
}  # fmt: skip
MORE = {"qkv": (8, 4), "o": (32, 8), "gate_up": (64, 8), "down": (32, 8), "head": (8, 4)}
# of numbers: rows of a program, warps, columns that a warp has at a time, turns ahead
NUMBERS = {
    "qkv": (16, 4, 256, 2), "o": (32, 16, 256, 4), "gate_up": (64, 16, 256, 2), "down": (32, 16, 256, 4),
    "head": (16, 4, 256, 2),
}  # fmt: skip
# The interpreter likes few and large programs; the sums come in the same order.
PLAIN = {"qkv": (256, 256), "o": (32, 32), "gate_up": (64, 32), "down": (32, 32), "head": (256, 256)}


class Rope(NamedTuple):
    """Cosines and sines, (positions, half)."""

    cos: torch.Tensor
    sin: torch.Tensor


def is_packed(matrix: Any) -> bool:
    """Whether a matrix is planes of codes (all of its parts), and not numbers."""
    return all(part.values is None for part in matrix.parts)


def activations(matrix: Any, tokens: int, columns: int) -> Bytes | torch.Tensor:
    """Room for what this matrix is multiplied by."""
    if is_packed(matrix):
        return Bytes.empty(tokens, columns, device.current())
    kind = numbers_type(matrix)
    kind = torch.float32 if kind == torch.float16 else kind  # the stream may not fit a float16
    return torch.zeros(tokens, columns, dtype=kind, device=device.current())


def numbers_type(matrix: Any) -> torch.dtype:
    """What a matrix is multiplied by where it is not packed, and by the vendor's product where it is."""
    if is_packed(matrix) or fp8.is_fp8(matrix):
        return torch.float32 if device.interpreting() else torch.bfloat16
    kind: torch.dtype = matrix.parts[0].values.dtype
    return kind


def addresses(x: Bytes | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, scales, sums) as kernels write them."""
    return (x.q.view(torch.int8), x.d, x.s) if isinstance(x, Bytes) else (x, x, x)


def tile_of(name: str, tokens: int, kind: str) -> tuple[int, int, int, int]:
    """The tile of a packed product."""
    if tokens == 1 and not device.interpreting():
        return BY_KIND.get((name, kind), ONE[name])
    rows, warps = (PLAIN if device.interpreting() else MORE)[name]
    return rows, warps, min(2, rows // warps), 0


class Few:
    """Launches for `tokens` tokens over buffers of its own."""

    def __init__(self, model: ModelParts, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        first = model.blocks[0]
        self.width, self.heads, self.dim = model.norm.shape[0], first.n_heads, first.head_dim
        self.pdl = device.current().type == "cuda"
        self.options: Any = {"launch_pdl": True} if self.pdl else {}
        f: Any = {"device": device.current(), "dtype": torch.float32}
        self.stream = torch.zeros(tokens, self.width, **f)
        self.squares = torch.zeros(tokens, self.width // 32, **f)
        self.qkv = torch.zeros(tokens, first.qkv.rows, **f)
        self.logits = torch.zeros(tokens, model.head.rows, **f)
        self.cut = cut_for(tokens, self.heads, first.n_kv_heads)
        self.partial = torch.zeros(tokens, self.heads, self.cut.splits, self.dim, **f)
        self.extremes = torch.zeros(tokens, self.heads, self.cut.splits, 2, **f)
        self.counters = torch.zeros(tokens, self.heads, dtype=torch.int32, device=device.current())
        self._rooms: dict[tuple[str, Any, int], Bytes | torch.Tensor] = {}

    def room(self, name: str, matrix: Any) -> Bytes | torch.Tensor:
        """The buffer between two products, in the form that the second one reads."""
        kind = "packed" if is_packed(matrix) else numbers_type(matrix)
        key = (name, kind, matrix.columns)
        if key not in self._rooms:
            self._rooms[key] = activations(matrix, self.tokens, matrix.columns)
        return self._rooms[key]

    def step(
        self, ids: Any, positions: Any, tables: Any, width: Any, kv: Sequence[KVLayer], ropes: Any
    ) -> torch.Tensor:
        """ids, positions (tokens), tables (tokens, width[0]) -> logits (tokens, vocabulary)."""
        blocks = self.model.blocks
        self.begin(self.model.embedding, self.model.embedding_scale, ids, blocks[0].attention_norm, blocks[0].qkv)
        for i, (block, layer) in enumerate(zip(blocks, kv, strict=True)):
            last = i + 1 == len(blocks)
            norm, then = (
                (self.model.norm, self.model.head) if last else (blocks[i + 1].attention_norm, blocks[i + 1].qkv)
            )
            self.product("qkv", self.room("stream", block.qkv), block.qkv, STORE, self.qkv, block.eps)
            self.attend(block, layer, ropes[i], positions, tables, width)
            self.product("o", self.room("mixed", block.output), block.output, RESIDUAL,
                         self.room("stream", block.gate_up), block.eps, block.mlp_norm)  # fmt: skip
            self.product("gate_up", self.room("stream", block.gate_up), block.gate_up, GATED,
                         self.room("hidden", block.down), block.eps)  # fmt: skip
            self.product("down", self.room("hidden", block.down), block.down, RESIDUAL,
                         self.room("stream", then), block.eps, norm)  # fmt: skip
        return self.finish()

    def finish(self) -> torch.Tensor:
        """The head, from the stream's activations."""
        head, eps = self.model.head, self.model.blocks[0].eps
        self.product("head", self.room("stream", head), head, STORE, self.logits, eps)
        cap = self.model.soft_cap
        return self.logits if not cap else torch.tanh(self.logits / cap) * cap

    def begin(self, table: Any, scale: float, ids: Any, norm: torch.Tensor, then: Any) -> None:
        """Rows of a table, into the stream and on to the first product."""
        out = self.room("stream", then)
        embed_rows(table, scale, ids, self.tokens, self.stream, norm, out, self.squares, self.pdl)

    def attend(self, block: BlockParts, kv: KVLayer, rope: Rope, positions: Any, tables: Any, width: Any) -> None:
        """Attention of all tokens over one layer's cache."""
        out = self.room("mixed", block.output)
        scratch = (self.partial, self.extremes, self.counters)
        decode(self.qkv[None], block, kv, rope, positions, tables, width, self.tokens, self.cut, scratch, out, self.pdl)

    def product(
        self, name: str, x: Any, w: Any, epilogue: int, out: Any, eps: float, norm: torch.Tensor | None = None
    ) -> None:
        """One matrix. STORE and GATED read the stream, so they finish its norm; RESIDUAL adds to it."""
        squares = None if epilogue == RESIDUAL else self.squares
        at = 0
        for part in w.parts:
            to = out.view(-1)[at:] if epilogue == STORE else out
            if part.values is not None:
                self.numbers(name, x, part, epilogue, to, eps, squares, norm, w.rows)
            else:
                self.packed(name, x, part, epilogue, to, eps, squares, norm, w.rows)
            at += part.rows

    def packed(
        self, name: str, x: Bytes, w: Any, epilogue: int, out: Any, eps: float, squares: Any, norm: Any, stride: int
    ) -> None:
        """A part of a matrix that is planes."""
        rows, warps, ahead, registers = tile_of(name, self.tokens, w.kind)
        options = dict(self.options, maxnreg=registers) if registers else self.options
        parts = 0 if squares is None else squares.shape[1]
        to = addresses(out) if epilogue != STORE else (out, out, out)
        z = self.squares
        matvec[(triton.cdiv(w.rows, rows),)](
            x.q, x.d, x.s, z if squares is None else squares, eps, w.unit, w.low, w.low if w.high is None else w.high,
            w.scales, to[0], self.stream, z if norm is None else norm, to[1], to[2], self.squares, w.rows, w.blocks,
            self.tokens, w.kind, rows, warps, ahead, epilogue, parts, triton.next_power_of_2(max(parts, 1)),
            isinstance(out, Bytes), self.pdl, stride if epilogue == STORE else 0, num_warps=warps, **options,
        )  # fmt: skip

    def numbers(
        self, name: str, x: Any, w: Any, epilogue: int, out: Any, eps: float, squares: Any, norm: Any, stride: int
    ) -> None:
        """A part that is numbers."""
        tile = NUMBERS[name] if self.tokens == 1 or epilogue != STORE else (8, 8, 256, 4)
        is_fp8 = w.kind == FP8
        rows, warps, wide, ahead = fp8.TILES[self.tokens][name] if is_fp8 else tile
        if device.interpreting():
            rows, warps = PLAIN[name]
        parts = 0 if squares is None else squares.shape[1]
        z = self.squares
        matvec_numbers[(triton.cdiv(w.rows, rows),)](
            x, z if squares is None else squares, eps, w.values, out, self.stream, z if norm is None else norm,
            self.squares, w.rows, w.values.shape[1], self.tokens, rows, warps, wide, ahead,
            epilogue, parts, triton.next_power_of_2(max(parts, 1)), self.pdl, stride if epilogue == STORE else 0,
            w.scales if is_fp8 else None, num_warps=warps, **self.options,
        )  # fmt: skip


def embed_rows(
    table: Any, scale: float, ids: Any, tokens: int, stream: Any, norm: Any, out: Any, squares: Any, pdl: bool
) -> None:
    """Rows of a Matrix or of a plain tensor of numbers; `out` None leaves just the stream."""
    part: Any = table if isinstance(table, torch.Tensor) else table.parts[0]
    width = stream.shape[1]
    kind = "numbers" if isinstance(table, torch.Tensor) else part.kind
    low = table if isinstance(table, torch.Tensor) else (part.values if kind == "numbers" else part.low)
    high, scales, unit = (low, low, 1.0) if kind == "numbers" else (part.high, part.scales, part.unit)
    to = (stream, stream, stream) if out is None else addresses(out)
    embed[(width // 32, tokens)](
        ids, low, low if high is None else high, scales, unit * scale, norm, stream, *to,
        stream if squares is None else squares, width, kind, None if out is None else isinstance(out, Bytes), pdl,
        num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def decode(
    qkv: Any, block: BlockParts, kv: KVLayer, rope: Rope, positions: Any, tables: Any, width: Any, tokens: int,
    cut: Cut, scratch: tuple[Any, Any, Any], out: Any, pdl: bool,
) -> None:  # fmt: skip
    """Attention of tokens that answer; qkv (parts, tokens, rows)."""
    scale, window, cap = block.attention
    size, item = kv.k.shape[2], kv.k.element_size()
    tensors = (
        qkv, rope.cos, rope.sin, kv.k, kv.v, tables, width, positions, *scratch, *addresses(out), scale, block.qkv_bias,
        block.q_norm, block.k_norm, block.eps, qkv.stride(0), block.n_heads, block.n_kv_heads, block.head_dim // 2,
        size,
    )  # fmt: skip
    if cut.dot and kv.k.dtype == torch.float32 and not device.interpreting():
        cut = cut._replace(rows=4, warps=1, stages=0, dot=False)  # the tensor cores would round what was not to be
    rest = (cut.splits, cut.least, window, cap, isinstance(out, Bytes), pdl, qkv.shape[0], cut.stages)
    options: Any = {"num_warps": cut.warps, **({"launch_pdl": True} if pdl else {})}
    grid = (cut.splits, block.n_kv_heads, tokens)
    if cut.dot:
        some = triton.next_power_of_2(block.n_heads // block.n_kv_heads)
        kind = tl.float32 if device.interpreting() else tl.float16 if kv.k.dtype == torch.float16 else tl.bfloat16
        decode_grouped[grid](*tensors, cut.rows, *rest, some, kind, **options)
    else:
        decode_attention[grid](*tensors, *runs_of(cut, block.head_dim, item, size), *rest, **options)
