"""The engine harness: its outputs are the model's, what a run needs cached is cached, and nothing else is found."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from llm_worker_bench.engine_harness import MAX_STARTING_STEPS, EngineHarness
from llm_worker_rbee import LLM
from llm_worker_rbee.engine import engine as serving
from llm_worker_rbee.engine.request import ScheduledTokens
from llm_worker_rbee.errors import InferenceError, InvalidRequestError
from tests.cli.conftest import write_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_model(tmp_path_factory.mktemp("harness") / "tiny.gguf"))


def answer(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    return llm.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True).tokens


def test_engine_harness_outputs_equal_llm_outputs(llm: LLM) -> None:
    harness = EngineHarness(llm.model, 64, batch=3, seed=7)
    prompts = [row.tolist() for row in harness.ids]
    assert len({tuple(p) for p in prompts}) == 3
    assert harness.time_first_tokens([p[:40] for p in prompts]).answers == [answer(llm, p[:40], 1) for p in prompts]
    for depth in (20, 32, 0, 20):
        made = harness.decode(depth, 9, 3)
        assert made.answers == [answer(llm, p[: max(1, depth)], 10)[1:] for p in prompts]
        assert (made.tokens, made.steps) == (27, 9)
    decode_prompts = harness.decode_prompts([p[:n] for p, n in zip(prompts, (5, 1, 17), strict=True)], 12)
    assert decode_prompts.answers == [answer(llm, p[:n], 12) for p, n in zip(prompts, (5, 1, 17), strict=True)]
    assert (decode_prompts.tokens, decode_prompts.steps) == (33, 11)  # all began in one step, and ended in one


def test_prefill_computes_exactly_its_tokens(llm: LLM) -> None:
    """Whatever ran before: depths that grow and shrink, other batches, answers over the cached blocks."""
    harness = EngineHarness(llm.model, 130, batch=3)
    for depth, tokens, batch in (
        (0, 40, 1),
        (96, 30, 3),
        (0, 130, 3),
        (96, 30, 3),
        (37, 5, 2),
        (112, 18, 1),
        (96, 1, 3),
    ):
        read = harness.prefill(depth, tokens, batch)
        assert (read.tokens, len(read.answers)) == (tokens * batch, batch)
        harness.decode(depth // 2, 3, batch)
        assert harness.prefill(depth, tokens, batch).tokens == tokens * batch
    first = EngineHarness(llm.model, 64, seed=1).prefill(16, 20, 1)
    assert EngineHarness(llm.model, 64, seed=1).prefill(16, 20, 1).answers == first.answers


def test_prefill_steps_hold_several_sequences(llm: LLM) -> None:
    assert EngineHarness(llm.model, 210, batch=3).prefill(0, 210, 3).steps == 2  # of at most 512 tokens


def test_decode_prompts_too_short_raises(llm: LLM) -> None:
    harness = EngineHarness(llm.model, 32, batch=2)
    with pytest.raises(InvalidRequestError, match=r"2 answers of 1 tokens ended before the last began.*--tg"):
        harness.decode_prompts([[1, 2], [3, 4]], 1)


def test_time_prefill_steps_of_bounded_steps(llm: LLM) -> None:
    harness = EngineHarness(llm.model, 64, batch=3, max_step_tokens=12)
    beside = [row[:5].tolist() for row in harness.ids[:2]]
    took = harness.time_prefill_steps(harness.ids[2, :60].tolist(), beside, 50)
    assert len(took) >= 5  # of at most 12 tokens
    assert min(took) > 0
    with pytest.raises(
        InvalidRequestError, match=r"answers of 3 tokens ended before a prompt of 50 was prefilled.*--target"
    ):
        harness.time_prefill_steps(harness.ids[2, 10:60].tolist(), beside, 3)


@pytest.mark.parametrize("depth", [0, 1, 30, 32, 33])
def test_time_steps_of_as_many_requests_as_the_token_budget(
    llm: LLM, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them begin in one step, however many tokens they have behind their last whole block."""
    monkeypatch.setitem(MAX_STARTING_STEPS, False, 0)
    harness = EngineHarness(llm.model, 48, batch=48, max_step_tokens=48)
    assert len(harness.time_steps(0, 0, 48, depth, 1, 3)) == 3


def test_speculative_outputs_are_equal_in_fewer_steps(llm: LLM) -> None:
    prompts = [row[:9].tolist() for row in EngineHarness(llm.model, 9, batch=2).ids]
    plain = EngineHarness(llm.model, 60, batch=2).decode_prompts(prompts, 40)
    for more in ({"speculative": "ngram"}, {"draft_model": llm.model, "draft_tokens": 3}):
        harness = EngineHarness(llm.model, 60, 2, **more)  # type: ignore[arg-type]
        speculative = harness.decode_prompts(prompts, 40)
        assert speculative.answers == plain.answers
        assert speculative.steps <= plain.steps
    assert harness.engine.scheduler.stats.num_accepted_tokens == harness.engine.scheduler.stats.num_drafted_tokens > 0
    assert speculative.steps < plain.steps / 2  # its own draft tokens are all accepted


def test_drafting_that_is_measured_is_not_paused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes 5 ms of each step and gives nothing; the clock shows 0.1 ms more each time it is read."""
    harness = EngineHarness(llm.model, 180, speculative="ngram")
    ticks, calls = count(), list[int]()
    clock = SimpleNamespace(perf_counter=lambda: 1e-4 * next(ticks) + 5e-3 * len(calls), monotonic=lambda: 0.0)
    monkeypatch.setattr(serving, "time", clock)
    drafter = SimpleNamespace(draft=lambda running, *_: calls.append(len(running)), needs_hidden=False)
    monkeypatch.setattr(harness.engine, "drafter", drafter)
    run = harness.decode_prompts([harness.ids[0, :9].tolist()], 150)
    assert len(calls) >= run.steps >= 148


def test_time_steps_are_of_the_composition(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timed step has whole new prompts and a token of each decoding request, and nothing else."""
    harness = EngineHarness(llm.model, 60, batch=7, max_step_tokens=100, target_itl_ms=1e9)
    scheduled: list[list[int]] = []
    schedule = harness.engine.scheduler.schedule

    def record(token_budget: int) -> list[ScheduledTokens]:
        step = schedule(token_budget)
        scheduled.append(sorted(one.stop - one.start for one in step))
        return step

    monkeypatch.setattr(harness.engine.scheduler, "schedule", record)
    assert len(harness.time_steps(3, 10, 0, 0, 1, 2)) == 2
    assert scheduled == [[10] * 3] * 3
    for depth in (0, 20):
        scheduled.clear()
        assert min(harness.time_steps(3, 10, 4, depth, 1, 2)) > 0
        assert scheduled[-3:] == [[1] * 4 + [10] * 3] * 3
        assert not harness.engine.has_work
    scheduled.clear()
    assert len(harness.time_steps(0, 0, 4, 20, 1, 2)) == 2
    assert scheduled[-3:] == [[1] * 4] * 3


def test_time_steps_that_are_divided_raise(llm: LLM) -> None:
    harness = EngineHarness(llm.model, 60, batch=3, max_step_tokens=30)
    with pytest.raises(InferenceError, match="the token budget is too small"):
        harness.time_steps(1, 50, 2, 5, 0, 1)


def test_time_burst_has_a_time_for_each_prompt(llm: LLM) -> None:
    harness = EngineHarness(llm.model, 20, batch=5, max_step_tokens=40)
    seconds = harness.time_burst(5, 20)
    assert len(seconds) == 5
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1]  # 100 tokens need several steps of 40
    assert not harness.engine.has_work
