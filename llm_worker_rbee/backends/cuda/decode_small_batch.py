"""Fused decode of 1 to 4 tokens: five kernels per layer on GEMV, each launched before the previous one has ended (PDL).

RMSNorm is fused: the producer stores x * weight and partial sums of squares, the consumer multiplies by 1/rms in its
epilogue (gemv.py). Activations are int8 where the next matrix is packed, else dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from ..ops import KVLayer
from .attention_decode import CosSin, launch_decode_attention, split_kv_config, split_kv_scratch
from .device import is_interpreted
from .elementwise import IS_GELU, launch_add_norm, launch_embedding, launch_gated
from .fused_ops import Attention, EmbedNorm, FusedOp, GatedLinear, LinearAddNorm, Logits, Norm
from .gemv import GATED, RESIDUAL, STORE, gemv_dense, gemv_packed
from .linear import E4M3_GEMV_TILES
from .packed_weight import FP8, Int8Activations, PackedWeight, WeightPart, kernel_outputs

# Packed, one token: (rows of a program, warps, rows loaded ahead, registers of a thread; 0: the compiler's choice)
ONE_TOKEN_TILES = {
    "qkv": (8, 8, 1, 0), "o": (32, 8, 4, 0), "gate_up": (64, 4, 2, 168), "down": (32, 8, 6, 0), "head": (16, 8, 2, 0),
}  # fmt: skip
ONE_TOKEN_TILES_BY_KIND = {
    ("down", "q6"): (32, 8, 3, 0), ("down", "q8"): (32, 8, 2, 0), ("down", "q8d"): (32, 8, 2, 0),
    ("gate_up", "q8"): (64, 4, 2, 0), ("gate_up", "q8d"): (64, 4, 2, 0),
}  # fmt: skip
MULTI_TOKEN_TILES = {"qkv": (8, 4), "o": (32, 8), "gate_up": (64, 8), "down": (32, 8), "head": (8, 4)}
# Dense: (rows of a program, warps, columns of a warp's iteration, iterations loaded ahead)
DENSE_TILES = {
    "qkv": (16, 4, 256, 2), "o": (32, 16, 256, 4), "gate_up": (64, 16, 256, 2), "down": (32, 16, 256, 4),
    "head": (16, 4, 256, 2),
}  # fmt: skip
MULTI_TOKEN_DENSE_TILE = (8, 8, 256, 4)
# The interpreter is fastest with few and large programs; the sums have the same order.
INTERPRETER_TILES = {"qkv": (256, 256), "o": (32, 32), "gate_up": (64, 32), "down": (32, 32), "head": (256, 256)}


def packed_tile(name: str, tokens: int, kind: str) -> tuple[int, int, int, int]:
    """Return the tile of a packed product: rows, warps, rows loaded ahead, registers."""
    if tokens == 1 and not is_interpreted():
        return ONE_TOKEN_TILES_BY_KIND.get((name, kind), ONE_TOKEN_TILES[name])
    rows, warps = (INTERPRETER_TILES if is_interpreted() else MULTI_TOKEN_TILES)[name]
    return rows, warps, min(2, rows // warps), 0


class _AttentionBuffers:
    """What the splits of decode attention hand to each other, for one geometry of heads."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
        self.config = split_kv_config(tokens, heads, kv_heads)
        counters = torch.zeros(tokens, heads, dtype=torch.int32, device=device)
        self.scratch = *split_kv_scratch(tokens, heads, dim, self.config, device), counters


class SmallBatchDecoder:
    """Launches for a fixed number of tokens, with its own buffers."""

    def __init__(self, ops: Sequence[FusedOp], tokens: int, device: torch.device) -> None:
        self.ops, self.tokens, self.device = ops, tokens, device
        first, head = ops[0], ops[-1]
        assert isinstance(first, EmbedNorm)
        assert isinstance(head, Logits)
        self.width = len(first.norm.weight)
        self.pdl = device.type == "cuda"
        f: Any = {"device": device, "dtype": torch.float32}
        self.residual = torch.zeros(tokens, self.width, **f)
        self.delta = torch.zeros(1, tokens, self.width, **f)
        self.squares = torch.zeros(tokens, self.width // 32, **f)
        self.logits = torch.zeros(tokens, head.head.rows, **f)
        self._pending: Norm | None = None  # the norm that the next product finishes
        self._attention: dict[tuple[int, int, int], _AttentionBuffers] = {}
        self._products: dict[int, torch.Tensor] = {}  # results that a kernel after the product reads, by rows
        self._buffers: dict[tuple[str, Any, int], Int8Activations | torch.Tensor] = {}

    @property
    def _options(self) -> Any:
        return {"launch_pdl": True} if self.pdl else {}

    def step(
        self, ids: Any, positions: Any, block_tables: Any, table_width: Any, kv: Sequence[KVLayer],
        ropes: Mapping[int, CosSin],
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits (tokens, vocabulary) of ids, positions (tokens), block_tables (tokens, table_width[0])."""
        source = ""
        for op in self.ops:
            match op:
                case EmbedNorm():
                    self.embed(op.table, op.scale, ids, op.norm, op.following)
                case Attention():
                    self._attend(op, kv[op.layer], ropes[id(op.rope)], positions, block_tables, table_width)
                    source = "attention"
                case LinearAddNorm():
                    self._add_norm("o" if source == "attention" else "down", op, source)
                case GatedLinear():
                    self._gate(op)
                    source = "hidden"
        return self.compute_logits()

    def embed(self, table: Any, scale: float, ids: Any, norm: Norm, following: PackedWeight) -> None:
        """Start the residual stream with rows of a table, and store the activations of the first product."""
        out = self._buffer("residual", following)
        launch_embedding(table, scale, ids, self.tokens, self.residual, norm.weight, out, self.squares, self.pdl)
        self._pending = norm

    def compute_logits(self) -> torch.Tensor:
        """Apply the output head to the activations of the residual stream."""
        op = self.ops[-1]
        assert isinstance(op, Logits)
        self._product("head", self._buffer("residual", op.head), op.head, STORE, self.logits)
        return self.logits if not op.soft_cap else torch.tanh(self.logits / op.soft_cap) * op.soft_cap

    def _add_norm(self, name: str, op: LinearAddNorm, source: str) -> None:
        """Multiply, add to the residual stream, and norm it: in the product's epilogue where nothing comes between."""
        x, out = self._buffer(source, op.w), self._buffer("residual", op.following)
        if op.post is None and len(op.w.parts) == 1:
            self._product(name, x, op.w, RESIDUAL, out, op.norm.weight)
            self._pending = op.norm
            return
        self._product(name, x, op.w, STORE, self.delta[0], has_norm=False)
        launch_add_norm(self.delta, self.residual, op, out, None, self.pdl)
        self._pending = None

    def _gate(self, op: GatedLinear) -> None:
        x, out, is_gelu = self._buffer("residual", op.w), self._buffer("hidden", op.following), IS_GELU[op.activation]
        if len(op.w.parts) == 1:
            self._product("gate_up", x, op.w, GATED, out, is_gelu=is_gelu)
            return
        both = self._result(op.w.rows)  # gate and up are of different kinds
        self._product("qkv", x, op.w, STORE, both)
        launch_gated(both[None], op.following.columns, out, None, is_gelu, self.pdl)

    def _result(self, rows: int) -> torch.Tensor:
        if rows not in self._products:
            self._products[rows] = torch.zeros(self.tokens, rows, device=self.device)
        return self._products[rows]

    def _buffer(self, name: str, w: PackedWeight) -> Int8Activations | torch.Tensor:
        """Return the buffer between two products, in the form that the second one, `w`, reads."""
        key = (name, "packed" if w.is_packed else w.dense_dtype, w.columns)
        if key not in self._buffers:
            self._buffers[key] = self._activations(w)
        return self._buffers[key]

    def _activations(self, w: PackedWeight) -> Int8Activations | torch.Tensor:
        if w.is_packed:
            return Int8Activations.allocate(self.tokens, w.columns, self.device)
        dtype = torch.float32 if w.dense_dtype == torch.float16 else w.dense_dtype  # x * weight may overflow float16
        return torch.zeros(self.tokens, w.columns, dtype=dtype, device=self.device)

    def _attend(
        self, op: Attention, kv: KVLayer, rope: CosSin, positions: Any, block_tables: Any, table_width: Any
    ) -> None:
        qkv = self._result(op.qkv.rows)
        self._product("qkv", self._buffer("residual", op.qkv), op.qkv, STORE, qkv)
        geometry = op.n_heads, op.n_kv_heads, op.head_dim
        if geometry not in self._attention:
            self._attention[geometry] = _AttentionBuffers(self.tokens, *geometry, self.device)
        buffers = self._attention[geometry]
        launch_decode_attention(qkv[None], op, kv, rope, positions, block_tables, table_width, self.tokens,
                                buffers.config, buffers.scratch, self._buffer("attention", op.following),
                                self.pdl)  # fmt: skip

    def _product(
        self, name: str, x: Any, w: PackedWeight, epilogue: int, out: Any, norm: torch.Tensor | None = None, *,
        has_norm: bool = True, is_gelu: bool = False,
    ) -> None:  # fmt: skip
        """Launch the product with one matrix. RESIDUAL adds to the residual stream and starts the next norm; the others
        finish the norm of their input, if it is still to be (`has_norm`: the input is the residual stream's)."""
        pending = None if epilogue == RESIDUAL or not has_norm else self._pending
        squares, eps = (None, 0.0) if pending is None else (self.squares, pending.eps)
        first = 0
        for part in w.parts:
            target = out.view(-1)[first:] if epilogue == STORE else out
            launch = self._launch_packed if part.values is None else self._launch_dense
            launch(name, x, part, epilogue, target, eps, squares, norm, w.rows, is_gelu)
            first += part.rows

    def _launch_packed(
        self, name: str, x: Int8Activations, w: WeightPart, epilogue: int, out: Any, eps: float, squares: Any,
        norm: Any, stride: int, is_gelu: bool,
    ) -> None:  # fmt: skip
        rows, warps, prefetch, registers = packed_tile(name, self.tokens, w.kind)
        options = dict(self._options, maxnreg=registers) if registers else self._options
        norm_parts = 0 if squares is None else squares.shape[1]
        to = kernel_outputs(out) if epilogue != STORE else (out, out, out)
        unused = self.squares
        gemv_packed[(triton.cdiv(w.rows, rows),)](
            x.codes, x.scales, x.sums, unused if squares is None else squares, eps, w.unit, w.low, w.high, w.scales,
            to[0], self.residual, unused if norm is None else norm, to[1], to[2], self.squares, w.rows, w.blocks,
            self.tokens, w.kind, rows, warps, prefetch, epilogue, norm_parts,
            triton.next_power_of_2(max(norm_parts, 1)), isinstance(out, Int8Activations), self.pdl,
            stride if epilogue == STORE else 0, is_gelu, num_warps=warps, **options,
        )  # fmt: skip

    def _launch_dense(
        self, name: str, x: Any, w: WeightPart, epilogue: int, out: Any, eps: float, squares: Any, norm: Any,
        stride: int, is_gelu: bool,
    ) -> None:  # fmt: skip
        assert w.values is not None
        is_fp8 = w.kind == FP8
        tile = DENSE_TILES[name] if self.tokens == 1 or epilogue != STORE else MULTI_TOKEN_DENSE_TILE
        rows, warps, tile_k, prefetch = E4M3_GEMV_TILES[self.tokens][name] if is_fp8 else tile
        if is_interpreted():
            rows, warps = INTERPRETER_TILES[name]
        norm_parts = 0 if squares is None else squares.shape[1]
        unused = self.squares
        gemv_dense[(triton.cdiv(w.rows, rows),)](
            x, unused if squares is None else squares, eps, w.values, out, self.residual,
            unused if norm is None else norm, self.squares, w.rows, w.values.shape[1], self.tokens, rows, warps, tile_k,
            prefetch, epilogue, norm_parts, triton.next_power_of_2(max(norm_parts, 1)), self.pdl,
            stride if epilogue == STORE else 0, w.scales if is_fp8 else None, is_gelu, num_warps=warps, **self._options,
        )  # fmt: skip
