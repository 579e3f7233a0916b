"""Packed weights and int8 activations as torch tensors, and their dequantization: the slow twin of the kernels, except
of compact kinds.

kernels/gemv.py draws the planes. What a kind holds, and how many columns share a scale:

    q4, q5      codes less 8, 16; a float16                                32
    q4m, q5m    codes; a float16 scale and a float16 minimum               32
    q8          signed bytes; a float16                                    32
    q6          codes less 32; two float16                                 16
    mxfp4       floats of four bits (E2M1), doubled; a float16             32
    nvfp4       likewise; two float16                                      16
    q2_k, ..    kernels/compact_kinds.py                                   16 or more
    e4m3        bytes, read as 2**-8 times the number; a float16           32
    dense       float16, bfloat16 or float32
    fp8         e4m3 (`--quantize fp8`); a float32                         a row
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from triton import cdiv

from ...weights.quants import codebooks
from ..ops import StackedWeight
from .device import is_interpreted
from .kernels import gemm
from .kernels.compact_kinds import CODEBOOKS, COMPACT_KINDS
from .kernels.gemm import FLOAT4
from .kernels.gemv import PLANE_BLOCKS

PAIRED_SCALES = ("q4m", "q5m", "q6", "nvfp4")  # two float16 per block in `scales`
LOW_WORDS = {"q8": 8, "e4m3": 8}  # words of the first plane per block; 4 for all others
HIGH_WORDS = {"q6": 4, "q5": 2, "q5m": 2}  # half words of the second plane per block
CODE_OFFSETS = {"q4": 8, "q5": 16, "q6": 32}
DENSE, FP8 = "dense", "fp8"
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
SCALED_MM_ALIGNMENT = 16  # of rows and columns
SLICE_ROWS = 1024  # that are dequantized at a time


@dataclass(slots=True, eq=False)
class WeightPart:
    """Rows of one kind: planes, or dense values."""

    kind: str
    rows: int
    blocks: int  # of 32 columns; 0 where there are `values`
    low: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor
    unit: float = 1.0  # factor of every product
    values: torch.Tensor | None = None  # (rows, columns): kinds DENSE and FP8
    small: torch.Tensor | None = None  # of compact kinds
    table: torch.Tensor | None = None  # a codebook, shared by all matrices

    @staticmethod
    def from_values(kind: str, values: torch.Tensor, scales: torch.Tensor | None = None) -> WeightPart:
        """Make a part of dense values, of kind FP8 with a scale per row."""
        none = torch.empty(1, dtype=torch.int32, device=values.device)
        return WeightPart(kind, len(values), 0, none, none, none if scales is None else scales, 1.0, values)

    @property
    def columns(self) -> int:
        return self.blocks * 32 if self.values is None else int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        if self.values is not None:
            return int(self.values.nbytes + (self.scales.nbytes if self.kind == FP8 else 0))
        planes = (self.low, self.high, self.scales, self.small)
        held = [plane for plane in planes if plane is not None and plane.dim() > 1]
        return sum(int(plane.untyped_storage().nbytes()) for plane in held)

    @property
    def fits_scaled_mm(self) -> bool:
        """Whether `torch._scaled_mm` takes this shape."""
        return self.rows % SCALED_MM_ALIGNMENT == 0 and self.columns % SCALED_MM_ALIGNMENT == 0


@dataclass(slots=True, eq=False)
class PackedWeight(StackedWeight):
    """A matrix as parts of one kind each."""

    parts: tuple[WeightPart, ...]
    order: torch.Tensor | None = field(default=None, kw_only=True)  # of the columns of activations

    @property
    def is_packed(self) -> bool:
        """Whether all parts are planes of codes."""
        return all(part.values is None for part in self.parts)

    @property
    def is_fp8(self) -> bool:
        return all(part.kind == FP8 for part in self.parts)

    @property
    def dense_dtype(self) -> torch.dtype:
        """The dtype of activations for a dense product, with dequantized rows where the matrix is packed."""
        values = self.parts[0].values
        dtype = torch.bfloat16 if values is None or self.is_fp8 else values.dtype
        return torch.float32 if is_interpreted() and dtype == torch.bfloat16 else dtype  # it truncates bfloat16


@dataclass(slots=True, eq=False)
class PackedExperts(PackedWeight):
    """The same matrix of all experts: each part holds its rows of the first expert, then of the next."""

    count: int

    @property
    def rows(self) -> int:
        """Of one expert."""
        return sum(part.rows for part in self.parts) // self.count


def empty_planes(kind: str, rows: int, blocks: int, device: torch.device | str) -> WeightPart:
    """Allocate the planes of packed rows."""
    if kind in COMPACT_KINDS:
        return _empty_compact_planes(kind, rows, blocks, torch.device(device))

    def plane(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        whole = torch.empty(*shape, cdiv(blocks, PLANE_BLOCKS.value) * PLANE_BLOCKS.value, dtype=dtype, device=device)
        whole[..., blocks:] = 0
        return whole[..., :blocks]

    low = plane(torch.int32, rows, LOW_WORDS.get(kind, 4))
    high = plane(torch.int16, rows, HIGH_WORDS[kind]) if kind in HIGH_WORDS else plane(torch.int16)
    scales = plane(torch.int32 if kind in PAIRED_SCALES else torch.float16, rows)
    return WeightPart(kind, rows, blocks, low, high, scales)


def _empty_compact_planes(kind: str, rows: int, blocks: int, device: torch.device) -> WeightPart:
    layout = COMPACT_KINDS[kind]

    def plane(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    low = plane(torch.int32, rows, layout.words, blocks)
    high = plane(torch.int16, rows, blocks) if layout.high else plane(torch.int16, 1)
    scales = plane(torch.int32 if layout.has_pairs else torch.float16, rows, blocks // layout.group)
    small = plane(torch.int8 if layout.small == 8 else torch.int16, rows, blocks) if layout.small else None
    table = codebook(kind, device) if layout.codes in CODEBOOKS else None
    return WeightPart(kind, rows, blocks, low, high, scales, small=small, table=table)


@cache
def codebook(kind: str, device: torch.device) -> torch.Tensor:
    """Return the rows of a codebook as kernels read them: an int32 of four int8, or an int64 of eight."""
    rows = codebooks.grid("IQ1_S" if kind == "iq1_m" else kind.upper())
    if COMPACT_KINDS[kind].codes == "shifted rows":  # eighths, plus 128
        rows = rows * 8 + 128
    words = rows.astype(np.uint8).view(np.int64 if rows.shape[1] == 8 else np.int32)
    return torch.tensor(words[:, 0], device=device)


def _contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    # `contiguous` keeps odd strides of axes of length one, which `view` refuses.
    return x.clone(memory_format=torch.contiguous_format)


def unpack_codes(w: WeightPart) -> torch.Tensor:
    """Return (rows, blocks, 32) codes, less the kind's offset: int8; of e4m3 2**-8 times the number."""
    packed = _contiguous_copy(w.low.transpose(1, 2)).view(torch.uint8)  # (rows, blocks, 16 or 32)
    if w.kind == "e4m3":
        return packed.view(E4M3).float() * 2.0**-8
    if w.kind in LOW_WORDS:
        return packed.view(torch.int8)
    code = torch.cat((packed & 15, packed >> 4), -1)
    if w.kind in FLOAT4:
        return torch.tensor(codebooks.FP4_VALUES, dtype=torch.int8, device=code.device)[code.int()]
    if w.kind in HIGH_WORDS:
        shift, half, width = high_bit_layout(w.kind, packed.device)
        bits = (w.high.transpose(1, 2)[..., half] >> shift) & ((1 << width) - 1)
        code = code | (bits << 4).to(torch.uint8)
    return code.view(torch.int8) - CODE_OFFSETS.get(w.kind, 0)


def high_bit_layout(kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return, of the 32 columns, the shift of their high bits in a half word and its index; and how many bits."""
    c = torch.arange(32, device=device)
    shift, word = (c % 2) * 8 + (1 - c // 16) * 4 + c % 4 // 2 * 2, c % 16 // 4
    return (shift, word, 2) if kind == "q6" else (shift + word % 2, word // 2, 1)


def split_pairs(words: torch.Tensor) -> torch.Tensor:
    """Return the two float16 of each word, (rows, blocks) -> (rows, blocks, 2) float32."""
    return _contiguous_copy(words).view(torch.float16).view(*words.shape, 2).float()


def dequantize(w: WeightPart) -> torch.Tensor:
    """Return (rows, columns) float32."""
    if w.kind == FP8:
        assert w.values is not None
        return w.values.float() * w.scales[:, None]
    if w.values is not None:
        return w.values.float()
    if w.kind in COMPACT_KINDS:
        out = torch.empty(w.rows, w.columns, device=w.low.device)
        dequantize_rows(w, 0, out)
        return out * w.unit
    out = unpack_codes(w).float()
    if w.kind in ("q4m", "q5m"):
        pair = split_pairs(w.scales)
        out = out * pair[..., :1] + pair[..., 1:]
    elif w.kind in PAIRED_SCALES:
        out *= split_pairs(w.scales).repeat_interleave(16, -1)
    else:
        out *= w.scales.float()[..., None]
    return out.view(w.rows, w.blocks * 32) * w.unit


def row_squares(part: WeightPart, factors: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of the rows, whose columns are multiplied by factors; a slice of them at a time."""
    sums = []
    for first in range(0, part.rows, SLICE_ROWS):
        last = min(first + SLICE_ROWS, part.rows)
        high = part.high[first:last] if part.high.dim() > 1 else part.high
        planes = part.low[first:last], high, part.scales[first:last]
        rows = dequantize(WeightPart(part.kind, last - first, part.blocks, *planes, part.unit))
        sums.append((rows * factors).square().sum(1))
    return torch.cat(sums)


def dequantize_rows(part: WeightPart, start: int, out: torch.Tensor) -> None:
    """Write the rows from `start` on before the unit, as many as `out` has, in its dtype, by a kernel."""
    count = len(out)
    high = part.high[start:] if part.high.dim() > 1 else part.high
    small = None if part.small is None else part.small[start:]
    rows, tile = (256, 32) if is_interpreted() else (8, 16) if part.kind in COMPACT_KINDS else (2, 128)
    planes, grid = (part.low[start:], high, part.scales[start:]), (cdiv(count, rows), cdiv(part.blocks, tile))
    gemm.dequantize[grid](*planes, out, count, part.blocks, part.kind, rows, tile, small, part.table)


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, columns) as e4m3 and the scales (n) to multiply by; in plain torch."""
    values = x.float()
    scales = values.abs().amax(1).clamp_min(1e-30) / E4M3_MAX
    return (values / scales[:, None]).to(E4M3), scales


def merge_parts(w: PackedWeight) -> PackedWeight:
    """Return a weight whose product reads activations of one form: dense if some of its parts are."""
    if len(w.parts) == 1 or w.is_packed:
        return w
    dtypes = {part.values.dtype for part in w.parts if part.kind == DENSE and part.values is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    values = torch.cat([dequantize(part).to(dtype) for part in w.parts])
    return PackedWeight((WeightPart.from_values(DENSE, values),), order=w.order)


@dataclass(slots=True, eq=False)
class Int8Activations:
    """Quantized activations: code words (B, 8, blocks), scales (B, blocks), sums times scale (B, 2, blocks)."""

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def allocate(batch: int, columns: int, device: torch.device, make: Any = torch.zeros) -> Int8Activations:
        """Return room for `batch` rows by torch.zeros or torch.empty."""
        blocks, float32 = columns // 32, {"dtype": torch.float32, "device": device}
        codes = make((batch, 8, blocks), dtype=torch.int32, device=device)
        return Int8Activations(codes, make((batch, blocks), **float32), make((batch, 2, blocks), **float32))


class Activations(NamedTuple):
    """Rows for the tensor cores, or interleaved float16 (kernels/gemm.py); float16 and e4m3 are scaled by factors."""

    values: torch.Tensor
    factors: torch.Tensor | None = None  # (tokens,)
    is_interleaved: bool = False
    unit: float = 1.0  # factor of all rows; of interleaved ones alone


class GemvActivations(NamedTuple):
    """Activations of a GEMV, which multiplies by 1/rms if partial sums of squares are given."""

    values: Int8Activations | torch.Tensor
    squares: torch.Tensor | None = None  # (tokens, parts)
    eps: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.values.scales if isinstance(self.values, Int8Activations) else self.values)


def kernel_outputs(x: Int8Activations | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (values, scales, sums) as kernels store them."""
    return (x.codes.view(torch.int8), x.scales, x.sums) if isinstance(x, Int8Activations) else (x, x, x)
