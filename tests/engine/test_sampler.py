"""Requests -> rows for the sampling op, the draws they get, and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends import reference_sampling
from llm_worker_rbee.backends.ops import SampleRow, pending_id
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.engine.sampler import COPIED_PARAMS, draw_seed, next_row, sample_rows, token_logprobs
from llm_worker_rbee.sampling_params import SamplingParams
from tests.backends.test_reference_sampling import some_logits

ops = ReferenceBackend()

# ---- requests -> rows


def request(prompt: list[int], tokens: list[int] = [], **options: Any) -> Request:  # noqa: B006  (copied)
    made = Request(list(prompt), SamplingParams(**options).resolve(), 99, options.get("seed", 0), frozenset())
    made.ids += tokens
    return made


def sample_row(of: Request) -> SampleRow:
    (row,) = sample_rows(of)
    return row


def sample(logits: np.ndarray, of: Request) -> int:
    return int(ops.sample(logits, sample_rows(of))[0])


@pytest.mark.parametrize(
    ("last_n", "expected"), [(0, []), (1, [9]), (3, [3, 8, 9]), (5, [1, 2, 3, 8, 9]), (64, [1, 2, 3, 8, 9])]
)
def test_penalty_window_covers_prompt_and_output(last_n: int, expected: list[int]) -> None:
    row = sample_row(request([1, 2, 3], [8, 9], repetition_penalty=1.3, repeat_last_n=last_n))
    assert row.penalty_window.tolist() == expected


def test_repeat_last_n_zero_disables_penalty() -> None:
    logits = np.array([[1.0, 5.0, 4.9]], np.float32)
    options: dict[str, Any] = {"temperature": 0, "repetition_penalty": 2.0}
    assert sample(logits, request([1], **options)) == 2
    assert sample(logits, request([1], **options, repeat_last_n=0)) == 1
    assert sample(logits, request([1, 0], **options, repeat_last_n=1)) == 1


def test_presence_and_frequency_count_output_only() -> None:
    row = sample_row(request([1, 2, 3], [8, 9, 8], presence_penalty=1.0))
    assert row.output_ids.tolist() == [8, 9, 8]


def test_sample_rows_copy_every_parameter() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.6,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    row = sample_row(request([1], [2], **options, seed=5, logit_bias={4: 1.5}))
    assert {name: getattr(row, name) for name in options} == options
    assert (row.seed, row.sample_index, row.position, row.logit_bias) == (5, 0, 2, ((4, 1.5),))


def test_draft_row_equals_row_after_accepting() -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.3, "repeat_last_n": 3, "frequency_penalty": 0.5, "seed": 8}
    drafting = request([1, 2], [7], **options)
    drafting.drafts = [9, 7]
    said = [sample_row(request([1, 2], [7, 9, 7][:n], **options)) for n in (1, 2, 3)]
    for row, plain in zip(sample_rows(drafting), said, strict=True):
        assert as_dict(row) == as_dict(plain)
    drafting.drafts = []
    assert as_dict(sample_row(drafting)) == as_dict(said[0]), "drafts leave nothing behind"


def test_penalty_lists_follow_a_long_request() -> None:
    """Longer than the array that it begins with, with drafts and tokens in flight in between, which leave no trace."""
    rng = np.random.default_rng(3)
    options: dict[str, Any] = {"repetition_penalty": 1.3, "repeat_last_n": 40, "frequency_penalty": 0.5}
    of = request(rng.integers(0, 90, 200).tolist(), **options)
    for _ in range(500):
        of.drafts = rng.integers(0, 90, rng.integers(0, 4)).tolist()
        for i, row in enumerate(sample_rows(of)):
            said = of.ids + of.drafts[:i]
            assert (row.penalty_window.tolist(), row.output_ids.tolist()) == (said[-40:], said[200:])
            assert row.position == len(said)
        of.drafts = []
        of.pending_row = int(rng.integers(-1, 5))
        row = next_row(of)
        said = of.ids + [pending_id(of.pending_row)] * (of.pending_row >= 0)
        assert (row.penalty_window.tolist(), row.output_ids.tolist()) == (said[-40:], said[200:])
        assert row.position == len(said)
        of.pending_row = -1
        of.ids.append(int(rng.integers(0, 90)))


def as_dict(row: SampleRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


# ---- draws


def test_sample_frequencies_follow_probabilities() -> None:
    """20,000 seeded draws under filters and temperature: chi-square against the softmax of what is kept."""
    logits = some_logits(6, vocab=40)
    row: dict[str, Any] = {"temperature": 1.3, "top_k": 30, "top_p": 0.95}
    keep = reference_sampling.keep_mask(logits[0].astype(np.float64) / 1.3, SampleRow(**row))
    probabilities = torch.softmax(torch.from_numpy(np.where(keep, logits[0] / 1.3, -np.inf)).double(), -1).numpy()
    draws = ops.sample(np.repeat(logits, 20_000, 0), [SampleRow(**row, seed=99, position=i) for i in range(20_000)])
    counts, expected = np.bincount(draws, minlength=40), probabilities * 20_000
    assert not counts[~keep].any()
    assert expected[keep].min() > 20
    degrees = int(keep.sum()) - 1
    chi2 = float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5
    flat = np.full(40, 20_000 / 40)
    assert ((counts - flat) ** 2 / flat).sum() > 10_000, "the test would see a wrong distribution"


def test_sample_is_independent_of_batch() -> None:
    logits = some_logits(8, rows=12)
    rows = [SampleRow(temperature=1.0, seed=i % 3, sample_index=i % 2, position=i, top_p=0.9) for i in range(12)]
    together = ops.sample(logits, rows)
    assert together.tolist() == [int(ops.sample(logits[i : i + 1], rows[i : i + 1])[0]) for i in range(12)]
    order = np.random.default_rng(0).permutation(12)
    assert np.array_equal(ops.sample(logits[order], [rows[i] for i in order]), together[order])


def test_seed_sample_index_and_position_key_the_draw() -> None:
    flat = np.zeros((1, 100_000), np.float32)

    def draw(**key: int) -> list[int]:
        return [int(ops.sample(flat, [SampleRow(**{"seed": 1, "position": i, **key})])[0]) for i in range(3)]  # type: ignore[arg-type]

    assert draw() == draw()
    assert draw() != draw(seed=2)
    assert draw() != draw(sample_index=1)
    assert len(set(draw())) == 3


def test_draw_position_counts_prompt_and_output() -> None:
    """A request that continues its own answer as a longer prompt draws the same tokens."""
    flat = np.zeros((1, 100_000), np.float32)
    assert sample(flat, request([1, 2], [3], seed=4)) == sample(flat, request([1, 2, 3], seed=4))


def test_draw_seed_is_valid_seed() -> None:
    seeds = [draw_seed() for _ in range(50)]
    assert len(set(seeds)) == 50
    for seed in seeds:
        SamplingParams(seed=seed)
        assert float(seed) == seed < 2**53, "a JSON reader would change it"


# ---- log-probabilities


def test_token_logprobs_are_log_softmax_of_raw_logits() -> None:
    logits, chosen = some_logits(9, rows=4), [0, 17, 499, 17]
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    found = token_logprobs(ops, logits, chosen, 7)
    for i, entry in enumerate(found):
        assert entry.token == chosen[i]
        assert entry.logprob == pytest.approx(float(expected[i, chosen[i]]), abs=1e-6)
        values, ids = expected[i].topk(7)
        assert [t for t, _ in entry.top] == ids.tolist()
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-6)
        assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)


def test_token_logprobs_with_ties_and_small_vocabularies() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 3.0, 0.0]], np.float32)
    assert [t for t, _ in token_logprobs(ops, logits, [0], 2)[0].top] == [1, 2]
    assert [t for t, _ in token_logprobs(ops, logits, [0], 20)[0].top] == [1, 2, 3, 0, 4]
    assert token_logprobs(ops, logits, [0], 0)[0].top == ()
    assert token_logprobs(ops, logits[:0], [], 3) == []


def test_token_logprobs_of_distant_logits_are_finite() -> None:
    logits = np.array([[1e4, -1e4, 0.0]], np.float32)
    entry = token_logprobs(ops, logits, [1], 1)[0]
    assert entry.logprob == pytest.approx(-2e4)
    assert entry.top == ((0, 0.0),)


def test_sample_row_defaults_equal_neutral_sampling_params() -> None:
    params, row = SamplingParams().resolve(), SampleRow()
    assert {name: getattr(row, name) for name in COPIED_PARAMS} == {n: getattr(params, n) for n in COPIED_PARAMS}
