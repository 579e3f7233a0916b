"""Fused decode of 1 to 4 tokens: five kernels per layer on GEMV, each launched before the previous one has ended (PDL).

RMSNorm is fused: the producer stores x * weight and partial sums of squares, the consumer multiplies by 1/rms in its
epilogue (gemv.py). Activations are int8 where the next matrix is packed, else dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ..ops import BlockParts, KVLayer, ModelParts
from .attention_decode import CosSin, launch_decode_attention, split_kv_config
from .device import is_interpreted
from .elementwise import launch_embedding
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


class SmallBatchDecoder:
    """Launches for a fixed number of tokens, with its own buffers."""

    def __init__(self, model: ModelParts, tokens: int, device: torch.device) -> None:
        self.model, self.tokens, self.device = model, tokens, device
        first = model.blocks[0]
        self.width, self.heads, self.dim = model.norm.shape[0], first.n_heads, first.head_dim
        self.pdl = device.type == "cuda"
        f: Any = {"device": device, "dtype": torch.float32}
        self.residual = torch.zeros(tokens, self.width, **f)
        self.squares = torch.zeros(tokens, self.width // 32, **f)
        self.qkv = torch.zeros(tokens, first.qkv.rows, **f)
        self.logits = torch.zeros(tokens, model.head.rows, **f)
        self.config = split_kv_config(tokens, self.heads, first.n_kv_heads)
        self.partial = torch.zeros(tokens, self.heads, self.config.max_splits, self.dim, **f)
        self.stats = torch.zeros(tokens, self.heads, self.config.max_splits, 2, **f)
        self.counters = torch.zeros(tokens, self.heads, dtype=torch.int32, device=device)
        self._buffers: dict[tuple[str, Any, int], Int8Activations | torch.Tensor] = {}

    @property
    def _options(self) -> Any:
        return {"launch_pdl": True} if self.pdl else {}

    def step(
        self, ids: Any, positions: Any, block_tables: Any, table_width: Any, kv: Sequence[KVLayer],
        ropes: Sequence[CosSin],
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits (tokens, vocabulary) of ids, positions (tokens), block_tables (tokens, table_width[0])."""
        blocks = self.model.blocks
        self.embed(self.model.embedding, self.model.embedding_scale, ids, blocks[0].attention_norm, blocks[0].qkv)
        for i, (block, layer) in enumerate(zip(blocks, kv, strict=True)):
            is_last = i + 1 == len(blocks)
            norm, following = (
                (self.model.norm, self.model.head) if is_last else (blocks[i + 1].attention_norm, blocks[i + 1].qkv)
            )
            self._product("qkv", self._buffer("residual", block.qkv), block.qkv, STORE, self.qkv, block.eps)
            self._attend(block, layer, ropes[i], positions, block_tables, table_width)
            self._product("o", self._buffer("attention", block.output), block.output, RESIDUAL,
                          self._buffer("residual", block.gate_up), block.eps, block.mlp_norm)  # fmt: skip
            self._product("gate_up", self._buffer("residual", block.gate_up), block.gate_up, GATED,
                          self._buffer("hidden", block.down), block.eps)  # fmt: skip
            self._product("down", self._buffer("hidden", block.down), block.down, RESIDUAL,
                          self._buffer("residual", following), block.eps, norm)  # fmt: skip
        return self.compute_logits()

    def embed(self, table: Any, scale: float, ids: Any, norm: torch.Tensor, following: PackedWeight) -> None:
        """Start the residual stream with rows of a table, and store the activations of the first product."""
        out = self._buffer("residual", following)
        launch_embedding(table, scale, ids, self.tokens, self.residual, norm, out, self.squares, self.pdl)

    def compute_logits(self) -> torch.Tensor:
        """Apply the output head to the activations of the residual stream."""
        head, eps = self.model.head, self.model.blocks[0].eps
        self._product("head", self._buffer("residual", head), head, STORE, self.logits, eps)
        cap = self.model.soft_cap
        return self.logits if not cap else torch.tanh(self.logits / cap) * cap

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
        self, block: BlockParts, kv: KVLayer, rope: CosSin, positions: Any, block_tables: Any, table_width: Any
    ) -> None:
        out = self._buffer("attention", block.output)
        scratch = (self.partial, self.stats, self.counters)
        launch_decode_attention(self.qkv[None], block, kv, rope, positions, block_tables, table_width, self.tokens,
                                self.config, scratch, out, self.pdl)  # fmt: skip

    def _product(
        self, name: str, x: Any, w: PackedWeight, epilogue: int, out: Any, eps: float, norm: torch.Tensor | None = None
    ) -> None:
        """Launch the product with one matrix. STORE and GATED finish the norm of their input; RESIDUAL adds to the
        residual stream and starts the next norm."""
        squares = None if epilogue == RESIDUAL else self.squares
        first = 0
        for part in w.parts:
            target = out.view(-1)[first:] if epilogue == STORE else out
            launch = self._launch_packed if part.values is None else self._launch_dense
            launch(name, x, part, epilogue, target, eps, squares, norm, w.rows)
            first += part.rows

    def _launch_packed(
        self, name: str, x: Int8Activations, w: WeightPart, epilogue: int, out: Any, eps: float, squares: Any,
        norm: Any, stride: int,
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
            stride if epilogue == STORE else 0, num_warps=warps, **options,
        )  # fmt: skip

    def _launch_dense(
        self, name: str, x: Any, w: WeightPart, epilogue: int, out: Any, eps: float, squares: Any, norm: Any,
        stride: int,
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
            stride if epilogue == STORE else 0, w.scales if is_fp8 else None, num_warps=warps, **self._options,
        )  # fmt: skip
