"""NaN and Inf scales of every block type are found without decoding, exactly where decoding gives non-finite values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import Raw, write_gguf
from llm_worker_rbee.weights.quants import BLOCK_TYPES, NAN_SLAB_BLOCKS, SCALE_BITS, find_nonfinite_block

# Finite scales of these can be so large that products are not: the byte whose top exponent bit is cleared against it.
OVERFLOWING = {"Q8_K": 3, "F64": 7, "MXFP4": 0}
BAD_SCALES = [(kind, number) for kind, scales in SCALE_BITS.items() for number in range(len(scales))]


@pytest.mark.parametrize(("name", "number"), BAD_SCALES)
def test_find_nonfinite_block_agrees_with_decoding(tmp_path: Path, name: str, number: int) -> None:
    """Set the bits of one scale: the check finds that block, and only it decodes to NaN or Inf."""
    kind, blocks, bad = BLOCK_TYPES[name], 5, 3
    data = np.zeros((blocks, kind.block_bytes), np.uint8)
    if name == "MXFP4":
        data[:, 1:] = 0x77  # largest value: infinite times the scale 2^128
    path = tmp_path / "m.gguf"

    def find() -> tuple[int | None, list[bool]]:
        path.unlink(missing_ok=True)
        shape = (blocks, kind.block_size)
        tensor = open_checkpoint(write_gguf(path, {}, {"t": Raw(name, shape, data.reshape(-1))})).tensors["t"]
        return tensor.find_nonfinite_scale(), [bool(np.isfinite(row).all()) for row in tensor.dequantize()]

    assert find() == (None, [True] * blocks)
    for byte, mask in SCALE_BITS[name][number]:
        data[bad, byte] |= mask
    assert find() == (bad, [i != bad for i in range(blocks)])
    byte, mask = SCALE_BITS[name][number][-1]
    data[bad, byte] ^= 1 << (mask.bit_length() - 1)  # the largest finite exponents are valid
    assert find()[0] is None


def test_find_nonfinite_block_checks_every_float_scale() -> None:
    """A type without an entry decodes any bytes to finite values."""
    rng = np.random.default_rng(0)
    for name, kind in BLOCK_TYPES.items():
        if name in SCALE_BITS:
            continue
        blocks = rng.integers(0, 256, (20_000, kind.block_bytes), dtype=np.uint8)
        assert np.isfinite(kind.decode(blocks)).all(), name


def test_find_nonfinite_block_random_bytes_agrees_with_decoding(rng: np.random.Generator) -> None:
    for name in SCALE_BITS:
        kind = BLOCK_TYPES[name]
        data = rng.integers(0, 256, (64, kind.block_bytes), dtype=np.uint8)
        if name in OVERFLOWING:
            data[:, OVERFLOWING[name]] &= 0xBF
        finite = np.isfinite(kind.decode(data)).all(axis=1)
        assert [find_nonfinite_block(kind, row) is None for row in data] == finite.tolist(), name


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("name", ["F16", "BF16", "F32", "F64", "Q4_0"])
def test_find_nonfinite_block_in_a_later_slab(name: str, offset: int) -> None:
    kind, blocks = BLOCK_TYPES[name], NAN_SLAB_BLOCKS + 300
    data = np.zeros(offset + blocks * kind.block_bytes, np.uint8)[offset:]
    rows = data.reshape(blocks, kind.block_bytes)
    assert find_nonfinite_block(kind, data) is None
    for bad in (blocks - 1, NAN_SLAB_BLOCKS + 7, NAN_SLAB_BLOCKS, NAN_SLAB_BLOCKS - 1):  # the first of several is found
        for byte, mask in SCALE_BITS[name][0]:
            rows[bad, byte] = mask | 0x80  # minus infinity
        assert find_nonfinite_block(kind, data) == bad
