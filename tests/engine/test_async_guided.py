"""Guided requests in steps that are launched ahead: the tokens of synchronous steps, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine import async_scheduling
from llm_worker_rbee.engine.async_scheduling import GAP_S, StepPipeline, forced_drafts_pay
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.mask_filler import MaskFiller
from llm_worker_rbee.engine.request import Request, StepOutput
from llm_worker_rbee.errors import GrammarDeadEndError, GrammarTooSlowError, InsufficientMemoryError
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.sampling_params import SamplingParams, StructuredOutputsParams
from llm_worker_rbee.structured_outputs import constraint
from llm_worker_rbee.structured_outputs.constraint import BUDGET_STEPS, MAX_STEP_S, SLOW_STEP_S, Constraint
from llm_worker_rbee.structured_outputs.grammar import GrammarCompiler
from llm_worker_rbee.text_model import open_tokenizer
from llm_worker_rbee.weights import open_checkpoint
from tests.conftest import DEVICE
from tests.engine.test_async_scheduling import (
    OTHER_SETTINGS,
    AsyncBackend,
    PendingTokens,
    SyncBackend,
    make_async,
    run,
)
from tests.helpers import engine_runs, tiny_models

SCHEMA = {
    "type": "object",
    "properties": {"temperature_celsius": {"type": "integer"}, "is_raining": {"type": "boolean"}},
    "required": ["temperature_celsius", "is_raining"],
    "additionalProperties": False,
}
GRAMMARS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex=r"[a-e]{2,9}-[0-9]+(, the [xyz]+)*"),
    StructuredOutputsParams(choice=["red", "green", "greenish blue"]),
    StructuredOutputsParams(grammar='start: "<<" /[^<>]{1,12}/ ">>"'),
]
END = frozenset({tiny_models.END})


@pytest.fixture(scope="module")
def model(tiny_file: Path) -> Transformer:
    return engine_runs.load(tiny_file)


@pytest.fixture(scope="module")
def compiler(tiny_file: Path) -> GrammarCompiler:
    return GrammarCompiler(lambda: open_tokenizer(open_checkpoint(tiny_file)), tiny_models.VOCAB)


@pytest.fixture(autouse=True)
def _without_forced_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps between steps so long that no draft makes up for one: times of steps on this machine decide nothing."""
    monkeypatch.setattr(async_scheduling, "GAP_S", 1e9)


def make_engine(model: Transformer, compiler: GrammarCompiler, **settings: Any) -> Engine:
    config = {"max_context": 112, "n_blocks": 64, "debug": True, "max_step_tokens": 32, **settings}
    engine = Engine(model, EngineConfig(**config))
    engine.grammar_compiler = compiler
    return engine


def guided(
    compiler: GrammarCompiler, grammar: StructuredOutputsParams | None, max_tokens: int = 40, seed: int = 0,
    prompt: list[int] | None = None, priority: int = 0, **settings: Any,
) -> Request:  # fmt: skip
    params = SamplingParams(structured_outputs=grammar, **settings).resolve()
    request = Request(prompt or [1, 2], params, max_tokens, seed, END, priority=priority)
    if grammar is not None:
        request.constraint = compiler.compile(grammar, sorted(END), max_tokens, close_on_length=params.close_on_length)
    return request


def make_mixed(compiler: GrammarCompiler, seed: int) -> list[Request]:
    """Requests of which most are guided; some settings change logits, or ask for log-probabilities."""
    draw = random.Random(seed)
    made = []
    for i in range(draw.randint(1, 6)):
        settings: dict[str, Any] = {"temperature": draw.choice([0.0, 0.9]), "close_on_length": draw.random() < 0.2}
        settings["logprobs_mode"] = draw.choice(["raw", "masked"])
        for name, value in OTHER_SETTINGS.items():
            if draw.random() < 0.2:
                settings[name] = draw.choice(value)
        grammar = draw.choice([None, *GRAMMARS])
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, 40))]
        length, priority = draw.randint(1, 40), draw.choice([0, 0, 1])
        made.append(guided(compiler, grammar, length, seed + i, prompt, priority, **settings))
    return made


@pytest.mark.parametrize("unsure", [0.0, 0.2])
@pytest.mark.parametrize("settings", [{}, {"max_batch": 3}, {"n_blocks": 7}])
def test_guided_steps_ahead_give_the_tokens_of_sync_steps(
    model: Transformer, compiler: GrammarCompiler, settings: dict[str, Any], unsure: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With requests that are not guided, aborts, preemption and undecided steps; forced tokens are no drafts."""
    monkeypatch.setattr(constraint, "SLOW_STEP_S", 1e9)  # a busy machine holds no request back
    device = AsyncBackend(model.ops, unsure)
    ahead = make_engine(make_async(model, device), compiler, **settings)
    plain = make_engine(replace(model, ops=SyncBackend(model.ops)), compiler, **settings)  # type: ignore[arg-type]

    def make(seed: int) -> list[Request]:
        return make_mixed(compiler, seed)

    for seed in range(12 if DEVICE == "cpu" else 4):
        assert run(ahead, seed, make) == run(plain, seed, make), seed
        for engine in (ahead, plain):
            assert engine.scheduler.pool.num_free == engine.config.n_blocks
    if DEVICE == "cpu":
        assert device.num_ahead > device.num_launched * (0.4 if unsure else 0.7)
    if not unsure:
        assert ahead.scheduler.stats.num_drafted_tokens == 0
    assert not ("n_blocks" in settings and DEVICE == "cpu") or ahead.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"max_batch": 3}, {"n_blocks": 7}, {"speculative": "ngram"}])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_slow_grammars_are_computed_beside_steps_and_change_no_answer(
    model: Transformer, compiler: GrammarCompiler, settings: dict[str, Any], interval: int, is_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every step of a grammar counts as slow, or every third."""
    ops = SyncBackend(model.ops)
    plain = make_engine(replace(model, ops=ops), compiler, **settings)  # type: ignore[arg-type]

    def answers(engine: Engine, seed: int) -> list[tuple[Any, ...]]:
        """Of a request that was aborted the last token may be held back, without a log-probability."""
        results = run(engine, seed, lambda seed: make_mixed(compiler, seed))
        return [result if result[-1] is not None else result[:1] for result in results]

    expected = [answers(plain, seed) for seed in range(6)]
    held: list[Request] = []
    advance = MaskFiller.advance

    def count(filler: MaskFiller, request: Request, outputs: list[StepOutput]) -> None:
        held.append(request)
        advance(filler, request, outputs)

    def end_step(constraint: Constraint) -> None:
        constraint._step_seconds.append(2 * SLOW_STEP_S if len(constraint._tokens) % interval == 0 else 0.0)

    monkeypatch.setattr(MaskFiller, "advance", count)
    monkeypatch.setattr(Constraint, "end_step", end_step)
    device = AsyncBackend(model.ops)
    engine = make_engine(make_async(model, device) if is_ahead else replace(model, ops=ops), compiler, **settings)  # type: ignore[arg-type]
    for seed in range(6):
        assert answers(engine, seed) == expected[seed], seed
        assert engine.scheduler.pool.num_free == engine.config.n_blocks
    assert len(held) > 20
    assert not engine.mask_filler.held


def test_grammar_that_is_too_slow_ends_alone(
    model: Transformer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens before it are delivered; one that is slow now and then goes on."""
    slow, sometimes = (guided(compiler, StructuredOutputsParams(regex="[a-z]{40}")) for _ in range(2))
    free = guided(compiler, None)

    def end_step(constraint: Constraint) -> None:
        is_slow = constraint is slow.constraint or len(constraint._tokens) % 2 == 0
        constraint._step_seconds.append(2 * MAX_STEP_S if is_slow else 0.0)

    monkeypatch.setattr(Constraint, "end_step", end_step)
    engine = make_engine(replace(model, ops=SyncBackend(model.ops)), compiler)  # type: ignore[arg-type]
    listener = engine_runs.run(engine, slow, sometimes, free)
    *before, last = listener.outputs[slow]
    assert isinstance(last.error, GrammarTooSlowError)
    assert (last.error.code, last.error.status) == ("GRAMMAR_TOO_SLOW", 422)
    assert BUDGET_STEPS - 2 <= len(before) <= BUDGET_STEPS
    assert listener.answer(sometimes).finish == "stop"
    assert listener.answer(free).finish in ("stop", "length")


@pytest.mark.parametrize("pays", [lambda n, *_: n >= 4, lambda n, *_: n > 0])
def test_forced_drafts_between_steps_ahead_change_no_answer(
    model: Transformer, compiler: GrammarCompiler, pays: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with forced tokens interrupt the pipeline where they pay, and it goes on behind them."""
    monkeypatch.setattr(async_scheduling, "forced_drafts_pay", pays)
    device = AsyncBackend(model.ops)
    ahead = make_engine(make_async(model, device), compiler)
    plain = make_engine(replace(model, ops=SyncBackend(model.ops)), compiler)  # type: ignore[arg-type]

    def make(seed: int) -> list[Request]:
        return make_mixed(compiler, seed)

    for seed in range(8 if DEVICE == "cpu" else 4):
        assert run(ahead, seed, make) == run(plain, seed, make), seed
    stats = ahead.scheduler.stats
    assert stats.num_accepted_tokens > (20 if DEVICE == "cpu" else 0)  # fewer answers there
    if DEVICE == "cpu":
        assert device.num_ahead > 50


def test_forced_drafts_pay_by_the_time_that_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_scheduling, "GAP_S", GAP_S)  # the real one
    assert not forced_drafts_pay(100, 1, None)
    assert not forced_drafts_pay(0, 1, 1.0)
    assert forced_drafts_pay(3, 1, GAP_S)
    assert not forced_drafts_pay(1, 1, GAP_S)
    assert not forced_drafts_pay(3, 64, 0.005)
    assert forced_drafts_pay(64 * 5, 64, 0.005)


def test_guided_step_is_sampled_behind_the_tokens_before_it(
    model: Transformer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward passes are launched ahead; sampling follows the result that its masks depend on."""
    events: list[str] = []

    def record(owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any) -> Any:
            events.append(event)
            return original(*args)

        monkeypatch.setattr(owner, name, wrapped)

    record(PendingTokens, "result", "result")
    record(AsyncBackend, "sample_async", "sample")
    record(StepPipeline, "_launch_forward", "forward")
    engine = make_engine(make_async(model, AsyncBackend(model.ops)), compiler)
    engine.add(guided(compiler, GRAMMARS[2], 10, temperature=0))
    engine.add(guided(compiler, None, 10, temperature=0))
    for _ in range(5):
        engine.step()
    assert events == ["forward", "sample", *["forward", "result", "sample"] * 5]


def test_abort_in_flight_leaves_the_other_requests_as_they_are(model: Transformer, compiler: GrammarCompiler) -> None:
    def answers(*, aborts: bool, ops: Any) -> list[int]:
        engine = make_engine(make_async(model, ops), compiler)
        kept, dropped = (guided(compiler, GRAMMARS[0], 60, seed) for seed in (1, 2))
        for request in (dropped, kept):
            engine.add(request)
        for _ in range(4):
            engine.step()
        if aborts:
            assert engine.abort(dropped)
        while engine.has_work:
            outputs = engine.step()
            assert not (aborts and any(output.request is dropped for output in outputs))
        assert engine.scheduler.pool.num_free == 64
        return kept.tokens

    assert answers(aborts=True, ops=AsyncBackend(model.ops)) == answers(aborts=False, ops=AsyncBackend(model.ops))


def test_complete_grammar_ends_without_its_step_ahead(model: Transformer, compiler: GrammarCompiler) -> None:
    """The forward pass that was launched for it is not sampled where no other request is in it."""
    device = AsyncBackend(model.ops)
    engine = make_engine(make_async(model, device), compiler)
    request = guided(compiler, StructuredOutputsParams(regex="[a-z]{4}"), 20)
    outputs = engine_runs.run(engine, request).outputs[request]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["stop"]
    assert len(request.tokens) == 4
    assert device.num_launched == 4


def test_dead_end_ends_one_request(
    model: Transformer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found when its token is collected, while the step behind it runs."""
    engine = make_engine(make_async(model, AsyncBackend(model.ops)), compiler)
    dead, other = (guided(compiler, GRAMMARS[2], 30, seed) for seed in (1, 2))
    consume = Constraint.consume

    def refuse_the_third(constraint: Constraint, token: int) -> bool:
        return not (constraint is dead.constraint and len(dead.tokens) == 3) and consume(constraint, token)

    monkeypatch.setattr(Constraint, "consume", refuse_the_third)
    listener = engine_runs.run(engine, dead, other)
    assert isinstance(listener.outputs[dead][-1].error, GrammarDeadEndError)
    assert len(listener.outputs[dead]) == 3
    assert listener.answer(other).finish in ("stop", "length")
    assert len(other.tokens) > 5


def test_failed_sampling_ends_the_requests_of_its_step(
    model: Transformer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was collected before is kept, and the engine goes on."""
    engine = make_engine(make_async(model, AsyncBackend(model.ops)), compiler)
    request = guided(compiler, GRAMMARS[0], 60)
    engine.add(request)
    for _ in range(3):
        engine.step()
    known = len(request.tokens)

    def broken(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(AsyncBackend, "sample_async", broken)
        outputs = engine.step()
    assert [output.finish_reason for output in outputs] == [None, "error"]
    assert isinstance(outputs[1].error, InsufficientMemoryError)
    assert len(request.tokens) == known + 1
    assert not engine.has_work
    other = guided(compiler, GRAMMARS[3], 30)
    engine_runs.run(engine, other)
    assert bytes(other.tokens).decode() in ("red", "green", "greenish blue")


def test_interrupt_while_masks_are_filled_loses_no_token(
    model: Transformer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_async(model, AsyncBackend(model.ops)), compiler)
    plain = make_engine(replace(model, ops=SyncBackend(model.ops)), compiler)  # type: ignore[arg-type]
    requests = [guided(compiler, GRAMMARS[2], 30, seed=3) for _ in range(2)]
    for one, request in zip((engine, plain), requests, strict=True):
        one.add(request)
    for _ in range(3):
        engine.step()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepPipeline, "_sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    for one in (engine, plain):
        while one.has_work:
            one.step()
    assert requests[0].tokens == requests[1].tokens
