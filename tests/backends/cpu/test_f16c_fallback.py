"""float16 where LLVM has no instruction for it: every float16, and floats near where they round, to the bit."""

from __future__ import annotations

import pytest

from llm_worker_rbee import machine
from tests.backends.test_isa import run

CODE = """
import numba, numpy as np
from llm_worker_rbee.backends import isa
from llm_worker_rbee.backends.cpu import simd_f32 as f

@numba.njit
def copy(x, y):
    for i in range(0, x.size, 16):
        f.store(y, i, f.load(x, i))

def same(found, wanted):
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(f"u{found.itemsize}"), wanted[numbers].view(f"u{found.itemsize}"))

every = np.arange(1 << 16, dtype=np.uint16)
wide = np.empty(every.size, np.float32)
copy(every, wide)
same(wide, every.view(np.float16).astype(np.float32))
finite = np.abs(wide[np.isfinite(wide)])
middle = (finite + np.append(finite[1:], np.float32(65536))) / np.float32(2)
near = [wide, middle, -middle, *(np.nextafter(middle, np.float32(end)) for end in (0, np.inf))]
x = np.concatenate([*near, np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)])
x = x[: x.size // 16 * 16]
narrow = np.empty(x.size, np.uint16)
copy(x, narrow)
with np.errstate(all="ignore"):
    same(narrow.view(np.float16), x.astype(np.float16))
print("f16c" in isa.llvm_features())
"""


@pytest.mark.skipif(not machine.is_x86(), reason="elsewhere LLVM has instructions for it")
def test_float16_conversions_without_f16c_are_exact() -> None:
    assert run(CODE, NUMBA_CPU_NAME="generic") == ["False"]
