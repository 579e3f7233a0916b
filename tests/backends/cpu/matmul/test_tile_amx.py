"""Products with AMX, on any machine: its instructions are emulated in Python from their description."""

from __future__ import annotations

import ctypes
from typing import Any

import numba as nb
import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from llm_worker_rbee.backends.cpu.jit import variant
from llm_worker_rbee.backends.cpu.kernels.matmul import tile_amx

ROWS, TOKENS = 16, tile_amx.TOKENS


class TileRegisters:
    """Eight tile registers, and the five instructions that the kernel uses."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []  # (rows, bytes per row), while configured
        self.tiles: list[NDArray[np.uint8]] = []
        self.count: dict[str, int] = {}

    def ldtilecfg(self, address: int) -> None:
        config = np.frombuffer(ctypes.string_at(address, 64), np.uint8)
        assert config[0] == 1
        assert not config[1:16].any()
        widths, rows = config[16:48].view(np.uint16), config[48:]
        assert not widths[8:].any()
        assert not rows[8:].any()
        self.shapes = [(int(r), int(w)) for r, w in zip(rows[:8], widths[:8], strict=True)]
        assert all(0 < r <= 16 and 0 < w <= 64 for r, w in self.shapes)
        self.tiles = [np.full(shape, 0x55, np.uint8) for shape in self.shapes]

    def tilerelease(self) -> None:
        self.shapes, self.tiles = [], []

    def tilezero(self, tile: int) -> None:
        self.tiles[tile][:] = 0

    def tileloadd64(self, tile: int, address: int, stride: int) -> None:
        rows, width = self.shapes[tile]
        for row in range(rows):
            self.tiles[tile][row] = np.frombuffer(ctypes.string_at(address + row * stride, width), np.uint8)

    def tilestored64(self, tile: int, address: int, stride: int) -> None:
        for row, values in enumerate(self.tiles[tile]):
            ctypes.memmove(address + row * stride, values.tobytes(), values.size)

    def tdpbssd(self, target: int, one: int, two: int) -> None:
        x = self.tiles[one].view(np.int8).astype(np.int64)  # tokens x columns
        w = self.tiles[two].view(np.int8).astype(np.int64)  # quads x (rows, 4)
        assert x.shape[1] == 4 * w.shape[0]
        w = w.reshape(w.shape[0], -1, 4).transpose(0, 2, 1).reshape(x.shape[1], -1)
        self.tiles[target].view(np.int32)[:] += (x @ w).astype(np.int32)


@pytest.fixture
def registers(monkeypatch: pytest.MonkeyPatch) -> TileRegisters:
    """Emit calls of the emulated instructions in place of real ones."""
    made, kept = TileRegisters(), {}
    kinds = {
        "ldtilecfg": "p",
        "tilerelease": "",
        "tilezero": "i",
        "tileloadd64": "ipi",
        "tilestored64": "ipi",
        "tdpbssd": "iii",
    }

    def emit(b: Any, name: str, *args: Any) -> None:
        if name not in kept:
            kept[name] = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(kinds[name]))(getattr(made, name))
        wide = ir.IntType(64)
        values = [ir.Constant(wide, arg) if isinstance(arg, int) else arg for arg in args]
        values = [b.ptrtoint(value, wide) if isinstance(value.type, ir.PointerType) else value for value in values]
        address = ctypes.cast(kept[name], ctypes.c_void_p).value
        function = b.inttoptr(
            ir.Constant(wide, address), ir.FunctionType(ir.VoidType(), [wide] * len(values)).as_pointer()
        )
        b.call(function, values)

    monkeypatch.setattr(tile_amx, "_emit_tile", emit)
    return made


@pytest.mark.parametrize("blocks", [1, 4, 6])
@pytest.mark.parametrize(("scales_per_block", "has_minimum"), [(1, False), (1, True), (2, False), (2, True)])
def test_sums_of_a_tile(registers: TileRegisters, blocks: int, scales_per_block: int, has_minimum: bool) -> None:
    """The bits are those of exact integer sums, one rounded product and one FMA for each scale."""
    begin, end = tile_amx.begin, tile_amx.end
    values = {"SCALES_PER_BLOCK": scales_per_block, "HAS_MINIMUM": has_minimum}
    multiply = nb.njit(variant(tile_amx.multiply, "test", **values))

    @nb.njit
    def run(weights, scales, minima, panels, totals, count):  # type: ignore[no-untyped-def]
        begin(scales_per_block)
        multiply(weights, 0, scales, minima, panels, 0, count, totals, 16, 32)
        end()

    rng = np.random.default_rng(blocks)
    w = rng.integers(-128, 128, (ROWS, blocks, 8, 4)).astype(np.int8)
    x = rng.integers(-127, 128, (TOKENS, blocks, 32)).astype(np.int8)
    scales, minima = rng.standard_normal((2, blocks, scales_per_block, ROWS)).astype(np.float32)
    d, sums = rng.random((2, TOKENS, blocks)).astype(np.float32)
    sums16 = rng.random((TOKENS, blocks, 2)).astype(np.float32)
    panels = np.zeros((blocks, tile_amx.PANEL_BYTES), np.uint8)
    panels[:, :512] = x.transpose(1, 0, 2).reshape(blocks, -1).view(np.uint8)
    floats = panels[:, 512:].view(np.float32)
    floats[:, :16], floats[:, 16:32], floats[:, 32:] = d.T, sums.T, sums16.transpose(1, 2, 0).reshape(blocks, 32)
    start = rng.standard_normal((TOKENS + 1, 32)).astype(np.float32)
    totals = start.copy()
    packed = w.transpose(1, 2, 0, 3).reshape(-1).view(np.uint8).copy()
    run(packed, scales.reshape(-1), minima.reshape(-1), panels.reshape(-1), totals.reshape(-1), blocks)

    want = start[:TOKENS, 16:].copy()
    width = 32 // scales_per_block
    for b in range(blocks):
        for h in range(scales_per_block):
            of = slice(h * width, (h + 1) * width)
            dots = x[:, b, of].astype(np.int64) @ w[:, b].reshape(ROWS, 32)[:, of].T.astype(np.int64)
            scaled = dots.astype(np.float32) * d[:, b, None]
            want = (scaled.astype(np.float64) * scales[b, h] + want).astype(np.float32)
            if has_minimum:
                low = sums[:, b] if scales_per_block == 1 else sums16[:, b, h]
                want = (low[:, None].astype(np.float64) * minima[b, h] + want).astype(np.float32)
    assert np.array_equal(totals[:TOKENS, 16:], want)
    assert np.array_equal(totals[:, :16], start[:, :16])
    assert np.array_equal(totals[TOKENS], start[TOKENS])
    assert registers.shapes == []
