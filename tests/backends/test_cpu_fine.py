"""Products that are made finely: a token is two rows of bytes, whose results are added where they are made."""

from __future__ import annotations

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu.linear import TOGETHER, prepare
from llm_worker_rbee.bench.random_weights import random_tensor
from llm_worker_rbee.weights.quants import BLOCK_TYPES

COLUMNS = 288
ROWS = 40  # two groups of 16 and one that is short


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q5_0"])
def test_the_same_bits_alone_and_in_any_number_and_nearer_to_the_truth(name: str) -> None:
    weight = prepare([random_tensor(BLOCK_TYPES[name], (ROWS, COLUMNS), 3)])
    fine, most = weight.finely(), 2 * TOGETHER + 5  # three pieces of tokens, whose second rows lie far away
    x = np.random.default_rng(4).standard_normal((most, COLUMNS), np.float32)
    whole = fine.times(x)
    for count in (1, 2, 3, 5, 16, TOGETHER, TOGETHER + 1):
        np.testing.assert_array_equal(fine.times(x[-count:]), whole[-count:])
    truth = x.astype(np.float64) @ weight.rows_at(np.arange(ROWS)).astype(np.float64).T
    assert np.abs(whole - truth).max() < np.abs(weight.times(x) - truth).max() / 30
