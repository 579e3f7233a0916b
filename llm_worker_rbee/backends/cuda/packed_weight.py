"""Packed matrices as torch tensors, and their values as floats: the slow twin of the kernels.

matvec.py draws the planes. What a kind holds, and how many columns share a scale:

    q4, q5      codes less 8, 16; a float16                                32
    q4m, q5m    codes; a float16 scale and a float16 minimum               32
    q8          signed bytes; a float16                                    32
    q6          codes less 32; two float16                                 16
    q8d         signed bytes; two float16                                  16
    q4mm        codes; two float16, and two minima in place of high bits   16
    numbers     float16, bfloat16 or float32 as they are
    fp8         e4m3 numbers (`--quantize fp8`); a float32                 a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAIRS = ("q4m", "q5m", "q6", "q8d", "q4mm")  # kinds with two float16 a block in `scales`
LOW = {"q8": 8, "q8d": 8}  # words of the first plane a block; 4 for all others
HIGH = {"q6": 4, "q5": 2, "q5m": 2, "q4mm": 1}  # half words of the second plane a block, of q4mm a word
WITH_HIGH_BITS = ("q5", "q5m", "q6")
OFFSET = {"q4": 8, "q5": 16, "q6": 32}
NUMBERS, FP8 = "numbers", "fp8"


@dataclass(slots=True, eq=False)
class Part:
    """Rows of one kind: planes, or numbers as they are or in e4m3."""

    kind: str
    rows: int
    blocks: int  # of 32 columns; where there are `values` 0
    low: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor
    unit: float = 1.0  # what every product is multiplied by
    values: torch.Tensor | None = None  # (rows, columns): kinds "numbers" and "fp8"

    @property
    def columns(self) -> int:
        """Values of a row."""
        return self.blocks * 32 if self.values is None else int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        """Memory on the device."""
        if self.values is not None:
            return int(self.values.nbytes + (self.scales.nbytes if self.kind == FP8 else 0))
        return int(self.low.nbytes + (self.high.nbytes if self.kind in HIGH else 0) + self.scales.nbytes)

    def take(self, index: torch.Tensor) -> Part:
        """Some rows, still packed."""
        high = self.high[index] if self.kind in HIGH else self.high
        low = self.low[index] if self.values is None else self.low
        scales = self.scales if self.kind == NUMBERS else self.scales[index]
        numbers = None if self.values is None else self.values[index]
        return Part(self.kind, len(index), self.blocks, low, high, scales, self.unit, numbers)


def empty_planes(kind: str, rows: int, blocks: int, device: torch.device | str) -> Part:
    """Room for packed rows."""
    low = torch.empty(rows, LOW.get(kind, 4), blocks, dtype=torch.int32, device=device)
    narrow = torch.int16 if kind in WITH_HIGH_BITS else torch.int32
    high = torch.empty((rows, HIGH[kind], blocks) if kind in HIGH else (1,), dtype=narrow, device=device)
    scales = torch.empty(rows, blocks, dtype=torch.int32 if kind in PAIRS else torch.float16, device=device)
    return Part(kind, rows, blocks, low, high, scales)


def random_planes(kind: str, rows: int, columns: int, device: torch.device | str = "cuda", std: float = 0.02) -> Part:
    """Random codes; scales such that values have about this deviation."""
    part = empty_planes(kind, rows, columns // 32, device)
    part.low.random_(-(2**31), 2**31 - 1)
    part.high.random_(torch.iinfo(part.high.dtype).min, torch.iinfo(part.high.dtype).max)
    spread = {"q4": 4.6, "q4m": 4.6, "q4mm": 4.6, "q5": 9.2, "q5m": 9.2, "q6": 18.5, "q8": 74.0, "q8d": 74.0}[kind]
    s = (0.5 + torch.rand(rows, columns // 32, 2, device=device)) * std / spread
    if kind in ("q4m", "q5m"):
        s[..., 1] *= -7.5
    if kind == "q4mm":
        part.high[:] = (-7.5 * s).half().view(torch.int32).transpose(1, 2)
    part.scales = s.half().view(torch.int32)[..., 0] if kind in PAIRS else s[..., 0].half()
    return part


def _own(x: torch.Tensor) -> torch.Tensor:
    """Memory of its own, in order: `contiguous` leaves odd strides of axes of one alone, `view` does not like them."""
    return x.clone(memory_format=torch.contiguous_format)


def codes(w: Part) -> torch.Tensor:
    """(rows, blocks, 32) codes, less the kind's offset: int8."""
    packed = _own(w.low.transpose(1, 2)).view(torch.uint8)  # (rows, blocks, 16 or 32)
    if w.kind in LOW:
        return packed.view(torch.int8)
    code = torch.cat((packed & 15, packed >> 4), -1)
    if w.kind in WITH_HIGH_BITS:
        place, half, width = high_places(w.kind, packed.device)
        bits = (w.high.transpose(1, 2)[..., half] >> place) & ((1 << width) - 1)
        code = code | (bits << 4).to(torch.uint8)
    return code.view(torch.int8) - OFFSET.get(w.kind, 0)


def high_places(kind: str, where: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of the 32 columns: the place of their high bits in the half word, and which one that is; how many bits."""
    c = torch.arange(32, device=where)
    place, word = (c % 2) * 8 + (1 - c // 16) * 4 + c % 4 // 2 * 2, c % 16 // 4
    return (place, word, 2) if kind == "q6" else (place + word % 2, word // 2, 1)


def pairs(words: torch.Tensor) -> torch.Tensor:
    """(rows, blocks) words -> the two float16 of each, (rows, blocks, 2) float32."""
    return _own(words).view(torch.float16).view(*words.shape, 2).float()


def values(w: Part) -> torch.Tensor:
    """(rows, columns) float32."""
    if w.kind == FP8:
        assert w.values is not None
        return w.values.float() * w.scales[:, None]
    if w.values is not None:
        return w.values.float()
    out = codes(w).float()
    if w.kind in ("q4m", "q5m"):
        pair = pairs(w.scales)
        out = out * pair[..., :1] + pair[..., 1:]
    elif w.kind in PAIRS:
        out *= pairs(w.scales).repeat_interleave(16, -1)
        if w.kind == "q4mm":
            out += pairs(w.high[:, 0]).repeat_interleave(16, -1)
    else:
        out *= w.scales.float()[..., None]
    return out.view(w.rows, w.blocks * 32) * w.unit


@dataclass(slots=True, eq=False)
class Bytes:
    """Activations as bytes: words (B, 8, blocks), scales (B, blocks), sums (B, 2, blocks)."""

    q: torch.Tensor
    d: torch.Tensor
    s: torch.Tensor

    @staticmethod
    def empty(batch: int, columns: int, device: torch.device | str = "cuda") -> Bytes:
        """Room for them."""
        blocks = columns // 32
        return Bytes(
            torch.zeros(batch, 8, blocks, dtype=torch.int32, device=device),
            torch.zeros(batch, blocks, device=device),
            torch.zeros(batch, 2, blocks, device=device),
        )

    @staticmethod
    def of(x: torch.Tensor) -> Bytes:
        """x (B, columns), each block of 32 rounded to steps of its largest value / 127."""
        b = x.reshape(x.shape[0], -1, 32)
        d = b.abs().amax(-1) / 127
        q = torch.floor(b * torch.where(d > 0, 1 / d, 0)[..., None] + 0.5)
        words = q.to(torch.int8).view(torch.int32)  # (B, blocks, 8)
        sums = q.view(*q.shape[:2], 2, 16).sum(-1) * d[..., None]
        return Bytes(words.transpose(1, 2).contiguous(), d, sums.transpose(1, 2).contiguous())

    def values(self) -> torch.Tensor:
        """What is left of x."""
        q = _own(self.q.transpose(1, 2)).view(torch.int8).float()
        return (q.view(*self.d.shape, 32) * self.d[..., None]).view(self.d.shape[0], -1)
