"""What an instruction set brings to products of many tokens (linear.py): its layouts, and the multiplication.

A product of few tokens unpacks packed weights in registers, once for each tile of tokens. From
`InstructionSet.unpack_min_tokens` on, 16 rows x some blocks of 32 columns are unpacked into a buffer, once for all
tokens of a piece: signed bytes (offset or table applied) and float32 scales and minima. Activations lie in panels: all
that a kernel reads of `panel_tokens` tokens in the order in which it reads it, written by the quantizer.

To add an instruction: a module with its `TileKernel`, a row in `dot_int8.TILE_KERNELS`, and `unpack_min_tokens` of its
instruction set. Results must have the bits of `packed.dot_rows`: for each scale of a block the exact integer
sum, times the scale of the activations (rounded), times that of the weights plus the total (one FMA), then the minimum
times the scaled sum of the activations (one FMA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...jit import types


class TileKernel(NamedTuple):
    """Layouts of unpacked weights and of panels, and the kernel that multiplies them."""

    panel_tokens: int
    panel_bytes: int  # of a block of all tokens of a panel
    # (builder, panel, index of the block's first byte, token of the panel, values, scale, scaled sum of 32, of 2 x 16):
    # emit the stores of one token's block; values are <32 x i8>, the last <2 x float>.
    emit_store_token: Callable[[Any, Any, Any, Any, Any, Any, Any, Any], None]
    # (builder, eight <64 x i8>: a quad of columns of 16 rows each) -> the 512 bytes of a block in the kernel's order.
    # None: as they are.
    emit_weight_order: Callable[[Any, list[Any]], list[Any]] | None
    # Template of a kernel with SCALES_PER_BLOCK (1 or 2) and HAS_MINIMUM: add 16 rows x one panel over some blocks.
    # (weights, their first byte, scales, minima, panels, first byte of the panel, blocks, totals, at, stride): scales
    # and minima are [block][SCALES_PER_BLOCK][16 rows], the total of row r of token t is at + t * stride + r.
    multiply: Callable[..., None]
    # Intrinsics before the first product of a task (of SCALES_PER_BLOCK) and after the last one. None: nothing to do.
    begin: Callable[..., None] | None = None
    end: Callable[..., None] | None = None


def block_signature(total: Any, scales_per_block: Any, has_minimum: Any, *operands: Any) -> Any:
    """Return the signature of an emitter that adds blocks to a tile of totals.

    Operands: weights or sums and an index, scales, minima and an index, a panel and an index; more are indices.
    """
    first, _, scales, minima, _, panel, _, *more = operands
    index = types.intp
    rest = first, index, scales, minima, index, panel, index, *[index] * len(more)
    return total(total, scales_per_block, has_minimum, *rest)
