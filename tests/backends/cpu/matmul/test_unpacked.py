"""Products of many tokens from unpacked weights: the bits of products of few tokens, which read packed ones."""

from __future__ import annotations

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu.kernels.matmul.linear import RUN_BLOCKS, TOKENS_PER_PIECE
from llm_worker_rbee.backends.cpu.linear import dequantize_rows, pack_weight
from llm_worker_rbee.backends.cpu.packed_weight import LAYOUT_BY_TYPE
from llm_worker_rbee.weights.quants import ALL_TYPES
from tests.helpers.synthetic import random_tensor

ROWS = 40  # two groups of 16 and one that is short
TYPES = {layout: name for name, layout in LAYOUT_BY_TYPE.items() if not layout.float_type}


def normal(tokens: int, columns: int) -> np.ndarray:
    return np.random.default_rng(columns).standard_normal((tokens, columns), np.float32)


@pytest.mark.parametrize("name", TYPES.values())
@pytest.mark.parametrize("two_term", [False, True])
def test_rows_have_the_same_bits_in_every_batch(name: str, two_term: bool) -> None:
    weight = pack_weight([random_tensor(ALL_TYPES[name], (ROWS, 768), 3)], 2)
    weight = weight.two_term() if two_term else weight
    x = normal(40, 768)
    whole = weight.matmul(x, 2)
    truth = x.astype(np.float64) @ dequantize_rows(weight.parts[0]).astype(np.float64).T
    assert np.abs(whole - truth).max() < 0.02 * np.abs(truth).max()
    for count in (1, 2, 3, 4, 7, 8, 9, 10, 11, 13, 16, 23, 39):
        np.testing.assert_array_equal(weight.matmul(x[-count:], 1), whole[-count:])


@pytest.mark.parametrize("columns", [32, 96, 32 * RUN_BLOCKS, 32 * (RUN_BLOCKS + 1)])
@pytest.mark.parametrize("rows", [1, 16, 17, 130])
def test_odd_sizes_and_several_runs_and_pieces(rows: int, columns: int) -> None:
    weight = pack_weight([random_tensor(ALL_TYPES["Q4_1"], (rows, columns), 5)], 2).two_term()
    x = normal(TOKENS_PER_PIECE + 2, columns)
    whole = weight.matmul(x, 2)
    for first, last in ((0, 1), (3, 9), (5, 6), (TOKENS_PER_PIECE - 9, TOKENS_PER_PIECE + 2)):
        np.testing.assert_array_equal(weight.matmul(x[first:last], 1), whole[first:last])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("tokens", [3, 12])
def test_activations_that_are_not_finite_or_huge(name: str, tokens: int) -> None:
    """A scale must stay finite when it is multiplied by simd.MAGIC: above 1.7e33 a row is NaN, as after infinity."""
    weight = pack_weight([random_tensor(ALL_TYPES[name], (ROWS, 256), 3)], 1)
    x = normal(tokens, 256)
    clean = weight.matmul(x, 1)
    with np.errstate(all="ignore"):
        for value in (np.nan, -np.nan, np.inf, -np.inf, 1e34, -3e38):
            bad = x.copy()
            bad[1, 77] = value
            found = weight.matmul(bad, 1)
            assert np.isnan(found[1]).all()
            np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(clean, 1, 0))
    for power in (100, -100):  # exact: scales and sums are multiplied by a power of two
        np.testing.assert_array_equal(weight.matmul(np.ldexp(x, power), 1), np.ldexp(clean, power))
    np.testing.assert_array_equal(weight.matmul(x * np.float32(0), 1), np.zeros_like(clean))
