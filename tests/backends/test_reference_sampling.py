"""The choice of a token: Philox, every filter against transformers' warpers, greedy choice, penalties, bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation import logits_process as theirs

from llm_worker_rbee.backends import reference_sampling as sampling
from llm_worker_rbee.backends.ops import SampleRow
from llm_worker_rbee.backends.reference import ReferenceBackend

ops = ReferenceBackend()

Floats = NDArray[np.float32]
VOCAB = 500


def some_logits(seed: int = 0, rows: int = 1, vocab: int = VOCAB) -> Floats:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


# ---- the generator

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """The vectors that come with Random123."""
    c, k, e = (tuple(int(x, 16) for x in text.split()) for text in (counter, key, expected))
    assert sampling.philox4x32(c, k) == e  # type: ignore[arg-type]


def test_uniform_depends_on_every_argument() -> None:
    draws = np.array(
        [
            sampling.uniform(seed, choice, position)
            for seed in (0, 1, 2**64 - 1)
            for choice in range(4)
            for position in range(2000)
        ]
    )
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, 50, (0, 1))[0]
    assert ((counts - len(draws) / 50) ** 2 / (len(draws) / 50)).sum() < 90  # chi-square, 49 degrees: 1 in 3,000
    one = sampling.uniform(7, 0, 3)
    others = [
        sampling.uniform(*a) for a in ((8, 0, 3), (7, 1, 3), (7, 0, 4), (7 + (1 << 32), 0, 3), (7, 0, 3 + (1 << 32)))
    ]
    assert len({one, *others}) == 6


def test_uniform_stays_below_one() -> None:
    """53 bits: the largest of them is not rounded up."""
    assert ((0xFFFFFFFF << 21) | (0xFFFFFFFF >> 11)) * 2.0**-53 < 1.0


# ---- filters

FILTERS: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "top-k": [({"top_k": k}, theirs.TopKLogitsWarper(k)) for k in (1, 2, 40, VOCAB - 1)],
    "top-p": [({"top_p": p}, theirs.TopPLogitsWarper(p)) for p in (0.05, 0.3, 0.9, 0.999)],
    "min-p": [({"min_p": p}, theirs.MinPLogitsWarper(p)) for p in (0.01, 0.1, 0.5, 1.0)],
    "typical-p": [({"typical_p": p}, theirs.TypicalLogitsWarper(p)) for p in (0.05, 0.3, 0.9, 0.99)],
}
CASES = [(name, i) for name, cases in FILTERS.items() for i in range(len(cases))]


def kept_by_theirs(logits: Floats, *warpers: Any) -> NDArray[np.bool_]:
    scores = torch.from_numpy(logits).double()
    for warper in warpers:
        scores = warper(torch.zeros((len(logits), 1), dtype=torch.long), scores)
    return np.asarray(np.isfinite(scores.numpy()), np.bool_)


@pytest.mark.parametrize(("name", "case"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_filter_keeps_what_transformers_keeps(name: str, case: int, seed: int) -> None:
    options, warper = FILTERS[name][case]
    logits = some_logits(seed)
    ours = sampling.keep_mask(logits[0].astype(np.float64), SampleRow(**options))
    assert np.array_equal(ours, kept_by_theirs(logits, warper)[0])
    assert ours.any()


@pytest.mark.parametrize("seed", range(5))
def test_filters_apply_in_documented_order(seed: int) -> None:
    """Temperature, top-k, typical-p, top-p, min-p: each on what the one before left."""
    logits = some_logits(seed)
    row = SampleRow(temperature=1.7, top_k=60, typical_p=0.9, top_p=0.8, min_p=0.1)
    warpers = (
        theirs.TemperatureLogitsWarper(1.7),
        theirs.TopKLogitsWarper(60),
        theirs.TypicalLogitsWarper(0.9),
        theirs.TopPLogitsWarper(0.8),
        theirs.MinPLogitsWarper(0.1),
    )
    expected = kept_by_theirs(logits, *warpers)[0]
    assert np.array_equal(sampling.keep_mask(logits[0].astype(np.float64) / 1.7, row), expected)
    drawn = {sampling.sample_row(logits[0], replace(row, position=i)) for i in range(300)}
    assert drawn <= set(np.flatnonzero(expected).tolist())
    assert len(drawn) > 1


@pytest.mark.parametrize(
    "options", [{"top_p": 0.0}, {"typical_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}, {"top_k": 1, "top_p": 0.0}]
)
def test_filters_keep_at_least_one_token(options: dict[str, Any]) -> None:
    logits = some_logits(3)[0]
    assert sampling.keep_mask(logits.astype(np.float64), SampleRow(**options)).sum() == 1
    assert 0 <= sampling.sample_row(logits, SampleRow(**options)) < VOCAB


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-310])
def test_tiny_temperature_takes_largest(temperature: float) -> None:
    for seed in range(5):
        logits = some_logits(seed)[0]
        assert sampling.sample_row(logits, SampleRow(temperature=temperature, seed=seed)) == logits.argmax()


def test_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    assert sampling.keep_mask(some_logits()[0].astype(np.float64), SampleRow(top_k=10**9)).all()


# ---- greedy, penalties, bias


def test_greedy_takes_lowest_id_of_ties() -> None:
    logits = np.array([[0, 5, 1, 5, 5], [2, 2, 2, 2, 2]], np.float32)
    assert ops.sample(logits, [SampleRow(temperature=0)] * 2).tolist() == [1, 0]


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    logits, recent = some_logits(1), np.array([3, 7, 7, 20, 499])
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.from_numpy(recent)[None], torch.from_numpy(logits).double()
    )
    row = SampleRow(repetition_penalty=penalty, penalty_window=recent)
    assert np.allclose(sampling.penalize(logits[0].astype(np.float64), row), expected[0].numpy(), atol=1e-12)


def test_presence_and_frequency_count_output_ids() -> None:
    row = SampleRow(
        presence_penalty=0.5, frequency_penalty=0.25, output_ids=np.array([2, 4, 4, 4]), penalty_window=np.array([0, 1])
    )
    assert sampling.penalize(np.zeros(6), row).tolist() == [0, 0, -0.75, 0, -1.25, 0]


def test_logit_bias_precedes_repetition_penalty() -> None:
    row = SampleRow(logit_bias=((1, 3.0),), repetition_penalty=2.0, penalty_window=np.array([1]))
    assert sampling.penalize(np.array([0.0, -1.0]), row).tolist() == [0, 1.0]  # (-1 + 3) / 2


def test_greedy_with_penalties() -> None:
    logits = np.array([1.0, 5.0, 4.5, 0.0], np.float32)
    row: dict[str, Any] = {"temperature": 0.0}
    assert sampling.sample_row(logits, SampleRow(**row)) == 1
    assert sampling.sample_row(logits, SampleRow(**row, repetition_penalty=1.2, penalty_window=np.array([1]))) == 2
    assert sampling.sample_row(logits, SampleRow(**row, presence_penalty=0.6, output_ids=np.array([1]))) == 2
    assert sampling.sample_row(logits, SampleRow(**row, frequency_penalty=0.3, output_ids=np.array([1, 1]))) == 2
    assert sampling.sample_row(logits, SampleRow(**row, frequency_penalty=0.2, output_ids=np.array([1, 1]))) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_logit_bias_of_100_forces_and_forbids(temperature: float) -> None:
    logits = some_logits(4)[0]
    best = int(logits.argmax())
    for seed in range(20):
        assert (
            sampling.sample_row(logits, SampleRow(temperature=temperature, seed=seed, logit_bias=((17, 100.0),))) == 17
        )
        assert (
            sampling.sample_row(logits, SampleRow(temperature=temperature, seed=seed, logit_bias=((best, -100.0),)))
            != best
        )


def test_sample_does_not_change_logits() -> None:
    logits = some_logits(2, rows=2)
    before = logits.copy()
    ops.sample(logits, [SampleRow(logit_bias=((1, 50.0),), repetition_penalty=1.5, penalty_window=np.array([2]))] * 2)
    ops.logprobs(logits, np.array([1, 2]), 5)
    assert np.array_equal(logits, before)
