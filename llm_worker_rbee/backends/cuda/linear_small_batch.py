"""x @ w.T of 1 to 4 tokens by GEMV: the tile of each matrix, and the launch with its epilogue.

RMSNorm is fused: the producer stores x * weight and partial sums of squares, the consumer multiplies by 1/rms in its
epilogue (gemv.py). Activations are int8 where the matrix is packed, else dense.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from .compact_kinds import CODEBOOKS, COMPACT_KINDS
from .device import is_interpreted, pdl_options
from .gemv import STORE, gemv_dense, gemv_packed
from .packed_weight import FP8, GemvActivations, Int8Activations, PackedWeight, WeightPart, kernel_outputs

# Packed, one token: (rows of a program, warps, rows loaded ahead, registers of a thread; 0: the compiler's choice)
ONE_TOKEN_TILES = {
    "qkv": (8, 8, 1, 0), "o": (32, 8, 4, 0), "gate_up": (64, 4, 2, 168), "down": (32, 8, 6, 0), "head": (16, 8, 2, 0),
}  # fmt: skip
ONE_TOKEN_TILES_BY_KIND = {
    ("down", "q6"): (32, 8, 3, 0), ("down", "q8"): (32, 8, 2, 0), ("gate_up", "q8"): (64, 4, 2, 0),
    ("down", "e4m3"): (32, 8, 2, 0), ("gate_up", "e4m3"): (64, 8, 2, 0),
    # of compact kinds what fits the registers (by the compiler's report for sm_90)
    **{("gate_up", kind): (64, 8, 2, 0) for kind in COMPACT_KINDS},
    **{("down", kind): (32, 8, 1 if row.codes in CODEBOOKS else 3, 0) for kind, row in COMPACT_KINDS.items()},
    ("down", "q3_k"): (32, 8, 2, 0),
}  # fmt: skip
MULTI_TOKEN_TILES = {"qkv": (8, 4), "o": (32, 8), "gate_up": (64, 8), "down": (32, 8), "head": (8, 4)}
# Dense: (rows of a program, warps, columns of a warp's iteration, iterations loaded ahead)
DENSE_TILES = {
    "qkv": (16, 4, 256, 2), "o": (32, 16, 256, 4), "gate_up": (64, 16, 256, 2), "down": (32, 16, 256, 4),
    "head": (16, 4, 256, 2),
}  # fmt: skip
MULTI_TOKEN_DENSE_TILE = (8, 8, 256, 4)
# e4m3, by tokens, as dense ones. For one token measured on an H200, for two and four what fits the registers (by the
# compiler's report for sm_90).
E4M3_TILES = {
    1: {"qkv": (8, 4, 512, 4), "o": (32, 16, 256, 8), "gate_up": (64, 16, 256, 8), "down": (32, 16, 256, 8),
        "head": (8, 8, 512, 8)},
    2: {"qkv": (8, 4, 256, 4), "o": (32, 16, 128, 8), "gate_up": (64, 16, 128, 4), "down": (32, 16, 128, 8),
        "head": (8, 4, 256, 4)},
    4: {"qkv": (8, 8, 256, 8), "o": (32, 16, 128, 4), "gate_up": (64, 16, 128, 2), "down": (32, 16, 128, 4),
        "head": (8, 8, 256, 8)},
}  # fmt: skip
# The interpreter is fastest with few and large programs; the sums have the same order.
INTERPRETER_TILES = {"qkv": (256, 256), "o": (32, 32), "gate_up": (64, 32), "down": (32, 32), "head": (256, 256)}


class Stream(NamedTuple):
    """What the epilogue RESIDUAL adds to and starts the next norm with."""

    residual: torch.Tensor
    norm: torch.Tensor
    squares: torch.Tensor  # written


def empty_gemv_activations(w: PackedWeight, tokens: int, device: torch.device) -> Int8Activations | torch.Tensor:
    """Allocate what a GEMV with `w` reads."""
    make = torch.zeros if is_interpreted() else torch.empty  # padding rows are not written
    if w.is_packed:
        return Int8Activations.allocate(tokens, w.columns, device, make)
    dtype = torch.float32 if w.dense_dtype == torch.float16 else w.dense_dtype  # x * weight may overflow float16
    return make((tokens, w.columns), dtype=dtype, device=device)


def packed_tile(name: str, tokens: int, kind: str) -> tuple[int, int, int, int]:
    """Return the tile of a packed product: rows, warps, rows loaded ahead, registers."""
    if tokens == 1 and not is_interpreted():
        return ONE_TOKEN_TILES_BY_KIND.get((name, kind), ONE_TOKEN_TILES[name])
    rows, warps = (INTERPRETER_TILES if is_interpreted() else MULTI_TOKEN_TILES)[name]
    return rows, warps, 1 if kind in COMPACT_KINDS else min(2, rows // warps), 0


def dense_tile(name: str, tokens: int, kind: str, epilogue: int) -> tuple[int, int, int, int]:
    """Return the tile of a dense or e4m3 product: rows, warps, columns of an iteration, iterations loaded ahead."""
    tile = DENSE_TILES[name] if tokens == 1 or epilogue != STORE else MULTI_TOKEN_DENSE_TILE
    tile = E4M3_TILES[tokens][name] if kind == FP8 else tile
    return (*INTERPRETER_TILES[name], *tile[2:]) if is_interpreted() else tile


def launch_gemv(
    name: str, x: GemvActivations, w: PackedWeight, out: Any, epilogue: int = STORE, *, stream: Stream | None = None,
    activation: str = "silu", bias: torch.Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Multiply 1, 2 or 4 tokens by a matrix with the tile `name`. STORE writes floats (tokens, rows), the other
    epilogues, for matrices of one part, activations: `stream` is for RESIDUAL, `activation` for GATED.
    A bias is for matrices of one part, too."""
    first = 0
    for part in w.parts:
        target = out.view(-1)[first:] if epilogue == STORE else out
        launch = _launch_packed if part.values is None else _launch_dense
        launch(name, x, part, target, epilogue, stream, w.rows if epilogue == STORE else 0, activation, bias, pdl)
        first += part.rows


def norm_parts(x: GemvActivations) -> tuple[int, int]:
    """Return how many partial sums of squares there are, and their room as a power of two."""
    count = 0 if x.squares is None else x.squares.shape[1]
    return count, next_power_of_2(max(count, 1))


def _launch_packed(
    name: str, x: GemvActivations, w: WeightPart, out: Any, epilogue: int, stream: Stream | None, stride: int,
    activation: str, bias: torch.Tensor | None, pdl: bool,
) -> None:  # fmt: skip
    values = x.values
    assert isinstance(values, Int8Activations)
    tokens, unused = len(values.scales), values.scales
    rows, warps, prefetch, registers = packed_tile(name, tokens, w.kind)
    residual, norm, squares = stream or (unused, unused, unused)
    to = kernel_outputs(out) if epilogue != STORE else (out, out, out)
    options = ({"maxnreg": registers} if registers else {}) | pdl_options(pdl)
    gemv_packed[(cdiv(w.rows, rows),)](
        values.codes, values.scales, values.sums, unused if x.squares is None else x.squares, x.eps, w.unit, w.low,
        w.high, w.scales, to[0], residual, norm, to[1], to[2], squares, w.rows, w.blocks, tokens, w.kind, rows, warps,
        prefetch, epilogue, *norm_parts(x), isinstance(out, Int8Activations), pdl, stride, activation, w.small, w.table,
        bias=bias, num_warps=warps, **options,
    )  # fmt: skip


def _launch_dense(
    name: str, x: GemvActivations, w: WeightPart, out: Any, epilogue: int, stream: Stream | None, stride: int,
    activation: str, bias: torch.Tensor | None, pdl: bool,
) -> None:  # fmt: skip
    values: Any = x.values
    tokens, columns = values.shape
    rows, warps, tile_k, prefetch = dense_tile(name, tokens, w.kind, epilogue)
    residual, norm, squares = stream or (values, values, values)
    gemv_dense[(cdiv(w.rows, rows),)](
        values, values if x.squares is None else x.squares, x.eps, w.values, out, residual, norm, squares, w.rows,
        columns, tokens, rows, warps, tile_k, prefetch, epilogue, *norm_parts(x), pdl, stride,
        w.scales if w.kind == FP8 else None, activation, bias, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip
