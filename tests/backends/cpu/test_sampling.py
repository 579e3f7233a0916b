"""Sampling on the CPU against the reference sampler: the same token for every mix of settings, on any logits."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends import reference_sampling
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.cpu import sampling as fast
from llm_worker_rbee.backends.cpu.kernels import sampling as sampling_kernels
from llm_worker_rbee.backends.ops import SampleRow
from llm_worker_rbee.errors import InferenceError
from llm_worker_rbee.pipe_process import PipeProcess

cpu = CpuBackend()

Floats = NDArray[np.float32]
SIZES = (1, 2, 15, 63, 64, 65, 200, 1000, 4099)


def draw(x: Floats, row: SampleRow) -> int:
    """Return the token of the kernels alone, which may be UNDECIDED."""
    return int(fast.sample_with_kernels(x[None], [row], 1)[0])


def settings(rng: np.random.Generator, size: int) -> SampleRow:
    """Each filter is there in about half of the rows."""

    def some(value: float, none: float) -> float:
        return value if rng.random() < 0.5 else none

    return SampleRow(
        temperature=float(
            rng.choice([0.0, 1e-12, 1e-3, 0.2, 0.8, 1.0, 3.0, 1e6], p=[0.1, 0.05, 0.05, 0.2, 0.2, 0.2, 0.15, 0.05])
        ),
        top_k=int(some(float(rng.choice([1, 2, 7, 40, size, size + 1, max(1, size - 1)])), 0.0)),
        top_p=some(float(rng.choice([0.0, 0.1, 0.5, 0.9, 0.999, 0.999999999999])), 1.0),
        min_p=some(float(rng.choice([1e-30, 0.01, 0.2, 1.0])), 0.0),
        typical_p=some(float(rng.choice([0.0, 0.2, 0.7, 0.95])), 1.0),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        sample_index=int(rng.integers(0, 5)),
        position=int(rng.integers(0, 2**40)),
    )


def penalties(rng: np.random.Generator, size: int) -> SampleRow:
    """The same, with what changes logits; few tokens, so that some come twice."""
    few = min(size, 12)
    return replace(
        settings(rng, size),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.5])),
        presence_penalty=float(rng.choice([0.0, 1.5])),
        frequency_penalty=float(rng.choice([0.0, -0.7])),
        penalty_window=rng.integers(0, few, rng.integers(0, 9)),
        output_ids=rng.integers(0, few, rng.integers(0, 9)),
        logit_bias=tuple((int(t), float(rng.choice([-100, 3.5]))) for t in rng.integers(0, size, rng.integers(0, 3))),
    )


def ordinary(rng: np.random.Generator, size: int) -> Floats:
    x = rng.standard_normal(size) * rng.choice([0.5, 3.0])
    x[rng.integers(0, size, 1 + size // 50)] += 8 * rng.random(1 + size // 50)
    return x.astype(np.float32)


def nasty(rng: np.random.Generator, size: int) -> Floats:
    """Ties, whole numbers, the ends of float32, nothing but one, infinite ones below."""
    x = ordinary(rng, size)
    kind = rng.integers(0, 7)
    if kind == 0:
        x[:] = x[0]
    elif kind == 1:
        x = np.rint(x)
    elif kind == 2:
        x *= np.float32(1e37)
    elif kind == 3:
        x[rng.random(size) < 0.8] = -np.inf
        x[rng.integers(0, size)] = 1
    elif kind == 4:
        x = np.float32(1e30) - np.rint(x) * np.float32(1e23)
        x[: size // 2] = 1e-5
    elif kind == 5:
        x = np.full(size, -3e38, np.float32)
        x[-1] = 3e38
    else:
        x = np.float32(7) + np.rint(x) * np.float32(2**-20)
    return x.astype(np.float32)


@pytest.mark.parametrize("kind", [ordinary, nasty])
def test_sample_of_every_mix_of_settings_equals_reference(kind: object) -> None:
    rng = np.random.default_rng(3)
    make = ordinary if kind is ordinary else nasty
    for i in range(2500):
        size = SIZES[i % len(SIZES)]
        x, row = make(rng, size), settings(rng, size)
        assert cpu.sample(x[None], [row])[0] == reference_sampling.sample_row(x, row), (i, size, row)


def test_sample_with_bias_and_penalties_equals_reference() -> None:
    rng = np.random.default_rng(4)
    for i in range(600):
        size = SIZES[1 + i % (len(SIZES) - 1)]
        row, x = penalties(rng, size), ordinary(rng, size)
        before = x.copy()
        assert cpu.sample(x[None], [row])[0] == reference_sampling.sample_row(x, row), (i, size, row)
        assert np.array_equal(x, before)


@pytest.mark.parametrize("count", [1, 2])
def test_sample_of_a_batch_equals_reference_with_any_threads(count: int) -> None:
    """Any mix of rows, with any number of threads: the kernels' own draws, and those that they leave to the meaning."""
    rng, backend = np.random.default_rng(8), CpuBackend(count)
    for i in range(60):
        size, rows = SIZES[i % len(SIZES)], int(rng.integers(0, 20))
        x = np.empty((rows, size), np.float32)
        wanted = []
        for line in x:
            line[:] = (ordinary, nasty)[rng.integers(2)](rng, size)
            wanted.append((settings, penalties)[rng.integers(2)](rng, size))
        expected = [reference_sampling.sample_row(line, row) for line, row in zip(x, wanted, strict=True)]
        assert backend.sample(x, wanted).tolist() == expected, (i, size, wanted)
        assert backend.sample(np.asfortranarray(x), wanted).tolist() == expected


def some_mask(rng: np.random.Generator, size: int) -> NDArray[np.int32]:
    """Nothing but one token, a few, whole words cleared, most, all; bits past the end are any."""
    allowed = rng.random(-(-size // 32) * 32) < rng.choice([0.0, 0.01, 0.3, 0.98, 1.0])
    allowed[: rng.integers(0, size)] &= rng.random() < 0.5
    allowed[rng.integers(0, size)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


@pytest.mark.parametrize("threads", [1, 2])
def test_masked_sample_equals_reference(threads: int) -> None:
    """Alone and in a batch, for every mix of settings; a NaN among tokens that are not allowed does not matter."""
    rng, backend = np.random.default_rng(11), CpuBackend(threads)
    for i in range(700):
        size, count = SIZES[i % len(SIZES)], int(rng.choice([1, 1, 6]))
        x = np.stack([(ordinary, nasty)[rng.integers(2)](rng, size) for _ in range(count)])
        rows = [(settings, penalties if size > 1 else settings)[rng.integers(2)](rng, size) for _ in range(count)]
        for line, row in zip(x, rows, strict=True):
            if rng.random() < 0.9:
                row.mask = some_mask(rng, size)
                is_allowed = reference_sampling.apply_mask(np.zeros(size), row.mask) == 0
                if not np.isfinite(line[is_allowed].max()):
                    line[:] = ordinary(rng, size)
                line[~is_allowed] = rng.choice([np.nan, 3e38, -1.0])
        expected = [reference_sampling.sample_row(line, row) for line, row in zip(x, rows, strict=True)]
        assert backend.sample(x, rows).tolist() == expected, (i, size, rows)
        for line, row, token in zip(x, rows, expected, strict=True):
            assert reference_sampling.apply_mask(line, row.mask)[token] > -np.inf


def test_masked_sample_is_seldom_undecided() -> None:
    rng, decided = np.random.default_rng(12), 0
    for _ in range(200):
        x, row = ordinary(rng, 3000), settings(rng, 3000)
        row.mask, row.temperature = some_mask(rng, 3000), 0.8
        token = draw(x, row)
        decided += token >= 0
        assert token < 0 or token == reference_sampling.sample_row(x, row)
    assert decided > 150


def test_masked_logprobs_equal_reference() -> None:
    rng = np.random.default_rng(13)
    for i in range(200):
        size, k = SIZES[i % len(SIZES)], int(rng.integers(0, 21))
        x = np.stack([ordinary(rng, size) for _ in range(3)])
        masks = [some_mask(rng, size), None, some_mask(rng, size)]
        chosen = np.array([reference_sampling.apply_mask(a, m).argmax() for a, m in zip(x, masks, strict=True)])
        found, wanted = cpu.logprobs(x, chosen, k, masks), reference_sampling.logprobs(x, chosen, k, masks)
        is_real = wanted.top > -np.inf
        assert np.array_equal(is_real, found.top > -np.inf)
        assert np.array_equal(found.top_ids[is_real], wanted.top_ids[is_real])
        np.testing.assert_allclose(found.top[is_real], wanted.top[is_real], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.chosen, wanted.chosen, rtol=1e-6, atol=1e-6)


def test_rows_whose_kernel_is_being_compiled_are_left_to_the_reference() -> None:
    x, greedy = ordinary(np.random.default_rng(21), 4099), SampleRow(temperature=0)
    rows = [SampleRow(seed=5, top_p=0.9), SampleRow(temperature=0, logit_bias=((3, 99.0),))]
    expected = [reference_sampling.sample_row(x, row) for row in rows]
    helper = PipeProcess([sys.executable, "-c", "input()"])
    try:
        for kernel in (sampling_kernels.DRAWN, sampling_kernels.PENALIZED, sampling_kernels.LOGPROBS):
            kernel.compiled_by = helper
        fast.SAMPLE.args[:] = 0
        assert [draw(x, row) for row in rows] == [sampling_kernels.UNDECIDED] * 2
        assert [cpu.sample(x[None], [row])[0] for row in rows] == expected
        assert draw(x, greedy) == x.argmax()
        result, wanted = (f(x[None], np.array([7]), 3) for f in (cpu.logprobs, reference_sampling.logprobs))
        assert all(map(np.array_equal, result, wanted))
    finally:
        helper.kill()
        helper.stop()
    assert [draw(x, row) for row in rows] == expected


def test_mask_without_an_allowed_token_raises() -> None:
    x, mask = ordinary(np.random.default_rng(14), 100), np.zeros(4, np.int32)
    rows = (SampleRow(temperature=0, mask=mask), SampleRow(mask=mask), SampleRow(logit_bias=((1, 9.0),), mask=mask))
    for row in rows:
        with pytest.raises(InferenceError):
            cpu.sample(x[None], [row])


def test_sample_of_a_batch_with_nan_row_raises() -> None:
    x = np.stack([ordinary(np.random.default_rng(9), 100) for _ in range(6)])
    x[4, 30] = np.nan
    for row in (SampleRow(temperature=0), SampleRow(top_p=0.9), SampleRow(logit_bias=((1, 2.0),))):
        with pytest.raises(InferenceError, match="NaN or infinite"):
            cpu.sample(x, [row] * 6)


@pytest.mark.parametrize("row", [{"top_p": 0.95}, {"typical_p": 0.9}, {"typical_p": 0.9, "top_p": 0.5, "min_p": 0.1}])
def test_draw_of_flat_logits_with_many_candidates_equals_reference(row: dict[str, float]) -> None:
    """So many that they are put into buckets first; the kernels still do not ask."""
    rng = np.random.default_rng(10)
    for i in range(10):
        x = (rng.standard_normal(20_000) * rng.choice([0.1, 1.0])).astype(np.float32)
        one = SampleRow(**row, seed=i)  # type: ignore[arg-type]
        assert draw(x, one) == reference_sampling.sample_row(x, one)


def test_draw_of_ordinary_logits_is_seldom_undecided() -> None:
    """On ordinary logits nearly every draw is the kernels' own: a test of the fall-back alone would prove nothing."""
    rng, undecided, drawn = np.random.default_rng(5), 0, 0
    for _ in range(400):
        x, row = ordinary(rng, 3000), settings(rng, 3000)
        if 0.1 < row.temperature < 10 and row.top_p < 0.9999:
            token, drawn = draw(x, row), drawn + 1
            undecided += token < 0
            assert token < 0 or token == reference_sampling.sample_row(x, row)
    assert drawn > 100
    assert undecided <= 0.02 * drawn


def test_sample_frequencies_follow_probabilities() -> None:
    x = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    tokens = [int(cpu.sample(x, [SampleRow(seed=9, position=i)])[0]) for i in range(4000)]
    found = np.bincount(tokens, minlength=4) / 4000
    assert np.abs(found - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


def test_uniform_equals_reference() -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        seed = int(rng.integers(0, 2**64, dtype=np.uint64))
        choice, position = int(rng.integers(0, 2**40)), int(rng.integers(0, 2**62))
        assert sampling_kernels.uniform(np.uint64(seed), choice, position) == reference_sampling.uniform(
            seed, choice, position
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("at", [0, 70, 99])
def test_sample_of_non_finite_logits_raises(bad: float | str, at: int) -> None:
    x = ordinary(np.random.default_rng(7), 100)[None]
    x[0, at if isinstance(bad, float) else slice(None)] = bad if isinstance(bad, float) else -np.inf
    for row in (SampleRow(temperature=0), SampleRow(), SampleRow(top_k=5), SampleRow(logit_bias=((1, 2.0),))):
        with pytest.raises(InferenceError, match="NaN or infinite"):
            cpu.sample(x, [row])
    with pytest.raises(InferenceError, match="NaN or infinite"):
        cpu.logprobs(x, np.array([0]), 3)


@pytest.mark.parametrize("size", SIZES)
def test_logprobs_agree_with_reference(size: int) -> None:
    rng = np.random.default_rng(size)
    x = np.stack([ordinary(rng, size), np.rint(ordinary(rng, size)), nasty(rng, size)])
    chosen = rng.integers(0, size, 3)
    for k in (0, 1, 5, size):
        if k > 300:
            continue
        with np.errstate(over="ignore"):
            found, wanted = cpu.logprobs(x, chosen, k), reference_sampling.logprobs(x, chosen, k)
        np.testing.assert_allclose(found.chosen, wanted.chosen, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found.top_ids, wanted.top_ids)
        np.testing.assert_allclose(found.top, wanted.top, rtol=1e-6, atol=1e-6)
    assert cpu.logprobs(x[:0], chosen[:0], 2).top.shape == (0, min(2, size))
