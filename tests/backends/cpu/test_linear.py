"""Products that are made finely: a token is two rows of bytes, whose results are added where they are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llm_worker_rbee.backends.cpu.linear import TOKENS_PER_PIECE, dequantize_rows, pack_weight
from llm_worker_rbee.weights.quants import ALL_TYPES
from tests.helpers.synthetic import random_tensor

COLUMNS = 288
ROWS = 40  # two groups of 16 and one that is short


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q5_0"])
def test_two_term_matmul_has_batch_invariant_bits_and_smaller_error(name: str) -> None:
    weight = pack_weight([random_tensor(ALL_TYPES[name], (ROWS, COLUMNS), 3)], 2)
    two_term, tokens = weight.two_term(), 2 * TOKENS_PER_PIECE + 5  # three pieces
    x = np.random.default_rng(4).standard_normal((tokens, COLUMNS), np.float32)
    whole = two_term.matmul(x, 2)
    for count in (1, 2, 3, 5, 16, TOKENS_PER_PIECE, TOKENS_PER_PIECE + 1):
        np.testing.assert_array_equal(two_term.matmul(x[-count:], 2), whole[-count:])
    truth = x.astype(np.float64) @ dequantize_rows(weight.parts[0]).astype(np.float64).T
    assert np.abs(whole - truth).max() < np.abs(weight.matmul(x, 2) - truth).max() / 30


# The queries of some models are wider than the residual stream (Qwen3-0.6B), of others narrower (Gemma 2 9B).
@pytest.mark.parametrize("query_rows", [192, 288, 576])
@pytest.mark.parametrize("heads_per_kv_head", [1, 2, 3])
def test_values_that_heads_share_have_two_terms(query_rows: int, heads_per_kv_head: int) -> None:
    rows = {"q": query_rows, "k": query_rows // heads_per_kv_head, "v": query_rows // heads_per_kv_head}
    made = {name: random_tensor(ALL_TYPES["Q4_0"], (count, COLUMNS), 3) for name, count in rows.items()}
    stack = [replace(tensor, name=f"blk.0.attn_{name}.weight") for name, tensor in made.items()]
    expected = (False,) if heads_per_kv_head == 1 else (False, True)
    assert pack_weight(stack, 1).residual_activations == expected
