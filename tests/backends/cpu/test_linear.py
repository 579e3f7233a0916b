"""Products that are made finely: a token is two rows of bytes, whose results are added where they are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu.elementwise import dequantize_rows
from llm_worker_rbee.backends.cpu.linear import TOKENS_PER_PIECE, pack_weight
from llm_worker_rbee.bench.synthetic import random_tensor
from llm_worker_rbee.weights.quants import BLOCK_TYPES

COLUMNS = 288
ROWS = 40  # two groups of 16 and one that is short


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q5_0"])
def test_two_term_matmul_has_batch_invariant_bits_and_smaller_error(name: str) -> None:
    weight = pack_weight([random_tensor(BLOCK_TYPES[name], (ROWS, COLUMNS), 3)], 2)
    two_term, tokens = weight.two_term(), 2 * TOKENS_PER_PIECE + 5  # three pieces
    x = np.random.default_rng(4).standard_normal((tokens, COLUMNS), np.float32)
    whole = two_term.matmul(x, 2)
    for count in (1, 2, 3, 5, 16, TOKENS_PER_PIECE, TOKENS_PER_PIECE + 1):
        np.testing.assert_array_equal(two_term.matmul(x[-count:], 2), whole[-count:])
    truth = x.astype(np.float64) @ dequantize_rows(weight.parts[0]).astype(np.float64).T
    assert np.abs(whole - truth).max() < np.abs(weight.matmul(x, 2) - truth).max() / 30


@pytest.mark.parametrize(("rows", "expected"), [(96, True), (144, True), (160, False), (288, False)])
def test_values_that_heads_share_have_two_terms(rows: int, expected: bool) -> None:
    tensor = replace(random_tensor(BLOCK_TYPES["Q4_0"], (rows, COLUMNS), 3), name="blk.0.attn_v.weight")
    assert pack_weight([tensor], 1).residual_activations == (expected,)
    assert pack_weight([replace(tensor, name="blk.0.attn_k.weight")], 1).residual_activations == (False,)
