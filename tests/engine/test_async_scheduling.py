"""Steps that begin before the tokens of the one before are known give what they give one by one. The CPU's backend is
lent the one op that a device has for it, so that schedules can be many; a GPU has its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends.ops import Batch, Ints, Logprobs, SampleRow
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine import engine as serving
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.model_runner import ModelRunner
from llm_worker_rbee.engine.request import Request, StepOutput
from llm_worker_rbee.engine.speculative import DraftModel
from llm_worker_rbee.engine.step_time import StepSize
from llm_worker_rbee.errors import InferenceError, InsufficientMemoryError
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.sampling_params import SamplingParams, TokenLogprob
from tests.conftest import DEVICE
from tests.helpers import engine_runs


class PendingTokens:
    """Tokens that are there when `result` is called; None where the device was undecided."""

    def __init__(self, tokens: Any, logprobs: dict[int, Logprobs], is_sure: bool, own: Any = None) -> None:
        self.tokens, self._logprobs = tokens, logprobs
        self._is_sure, self._own = is_sure, own

    def result(self) -> list[int] | None:
        if not self._is_sure:
            return None
        tokens: list[int] | None = self.tokens.tolist() if self._own is None else self._own.result()
        return tokens

    def logprobs(self) -> dict[int, Logprobs]:
        found: dict[int, Logprobs] = self._logprobs if self._own is None else self._own.logprobs()
        return found


class SyncBackend:
    """A backend without asynchronous sampling."""

    has_async_sampling = False

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class AsyncBackend:
    """A backend with asynchronous sampling; a share of its steps is undecided."""

    has_async_sampling = True

    def __init__(self, ops: Any, undecided: float = 0.0) -> None:
        self._ops, self._undecided = ops, undecided
        self._random = random.Random(5)
        self.num_launched = self.num_ahead = self.num_mixed_ahead = 0  # the latter two on a CPU

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample_async(self, logits: Any, rows: Sequence[SampleRow], pending: Any = None) -> PendingTokens:
        self.num_launched += 1
        is_decided = self._random.random() >= self._undecided
        if self._ops.has_async_sampling:
            own = self._ops.sample_async(logits, rows, pending)
            return PendingTokens(own.tokens, {}, is_decided, own)
        lists = ("penalty_window", "output_ids")
        rows = [replace(row, **{name: with_pending(getattr(row, name), pending) for name in lists}) for row in rows]
        try:
            tokens = self._ops.sample(logits, rows)
        except InferenceError:  # a row is not finite
            return PendingTokens(np.zeros(len(rows), np.int64), {}, False)
        wanted = [(i, row.logprobs) for i, row in enumerate(rows) if row.logprobs is not None]
        masks = [[row.mask] if row.logprobs_mode == "masked" else None for row in rows]
        found = {i: self._ops.logprobs(logits[i : i + 1], tokens[i : i + 1], k, masks[i]) for i, k in wanted}
        return PendingTokens(tokens, found, is_decided)


class PendingForward:
    """The fused forward of a CPU, with the tokens that a device would have in place of pending ids."""

    def __init__(self, fused: Any, device: AsyncBackend) -> None:
        self._fused, self._device = fused, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fused, name)

    def __call__(self, batch: Batch, kv: Any) -> Any:
        if batch.pending is not None:
            self._device.num_ahead += 1
            self._device.num_mixed_ahead += len(batch.ids) > len(batch.context_len)
        return self._fused(replace(batch, ids=with_pending(batch.ids, batch.pending), pending=None), kv)


def make_async(model: Transformer, device: AsyncBackend) -> Transformer:
    fused: Any = PendingForward(model.fused, device) if DEVICE == "cpu" else model.fused
    return replace(model, ops=device, fused=fused)  # type: ignore[arg-type]


def with_pending(ids: Ints, pending: Ints | None) -> Ints:
    """Return the ids with the tokens that pending ids stand for."""
    is_pending = ids < 0
    if not is_pending.any():
        return ids
    assert pending is not None
    ids = ids.copy()
    ids[is_pending] = pending[-1 - ids[is_pending]]
    return ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return engine_runs.load(engine_runs.small_file(tmp_path_factory.mktemp("ahead") / "small.gguf", "F32"))


OTHER_SETTINGS: dict[str, list[Any]] = {  # of the few that a request has, one of these
    "top_k": [1, 5], "min_p": [0.1], "typical_p": [0.7], "logit_bias": [{1: 2.0, 7: -100.0}, {3: 0.5}],
    "repetition_penalty": [1.2, 0.8], "repeat_last_n": [0, 1, 2, 5, 1000], "presence_penalty": [0.5],
    "frequency_penalty": [0.7, -0.3], "logprobs": [0, 1, 4], "prompt_logprobs": [False, False, True],
}  # fmt: skip


def make_requests(seed: int) -> list[Request]:
    draw = random.Random(seed)
    prefix = [draw.randrange(50) for _ in range(20)]
    made = []
    for i in range(draw.randint(1, 7)):
        prompt = prefix[: draw.choice([0, 17])] + [draw.randrange(50) for _ in range(draw.randint(1, 40))]
        settings: dict[str, Any] = {"temperature": draw.choice([0.0, 0.9]), "top_p": draw.choice([1.0, 0.8])}
        for name, value in OTHER_SETTINGS.items():
            if draw.random() < 0.2:
                settings[name] = draw.choice(value)
        params = SamplingParams(**settings).resolve()
        ends = frozenset(draw.sample(range(50), 3))
        made.append(Request(prompt, params, draw.randint(1, 40), seed + i, ends, priority=draw.choice([0, 0, 1])))
    return made


def run(engine: Engine, seed: int, make: Callable[[int], list[Request]] = make_requests) -> list[tuple[Any, ...]]:
    """Run all requests, which arrive and are aborted as the seed says; return tokens, log-probabilities and finish
    reason of each."""
    draw, waiting, results = random.Random(seed + 1), make(seed), []
    requests = list(waiting)
    leaves = {id(one): draw.randint(1, 30) for one in requests if draw.random() < 0.2}
    ended: dict[int, Any] = {}
    logprobs: dict[int, list[TokenLogprob | None]] = {id(one): [] for one in requests}
    while waiting or engine.has_work:
        while waiting and (draw.random() < 0.3 or not engine.has_work):
            engine.add(waiting.pop(0))
        outputs: list[StepOutput] = engine.step() if engine.has_work else []
        for output in outputs:
            ended[id(output.request)] = output.finish_reason
            logprobs[id(output.request)].append(output.logprob)
        for one in requests:  # by its number of tokens, which does not depend on timing
            if not one.is_finished and len(one.tokens) >= leaves.get(id(one), 1 << 30):
                engine.abort(one)
    for one in requests:
        left_at = leaves.get(id(one), 1 << 30)
        if len(one.tokens) >= left_at:  # a step with drafts gives more tokens
            one.ids, logprobs[id(one)] = one.ids[: one.num_prompt_tokens + left_at], logprobs[id(one)][:left_at]
            ended[id(one)] = None
        results.append((one.tokens, logprobs[id(one)], one.prompt_logprobs, ended.get(id(one))))
    return results


@pytest.mark.parametrize("unsure", [0.0, 0.2])
@pytest.mark.parametrize("settings", [{}, {"max_batch": 3}, {"n_blocks": 9}, {"prefix_cache": False}])
def test_async_scheduling_gives_the_tokens_of_sync_steps(
    model: Transformer, settings: dict[str, Any], unsure: float
) -> None:
    config = EngineConfig(**{"max_context": 112, "n_blocks": 64, "debug": True, "max_step_tokens": 32, **settings})
    device = AsyncBackend(model.ops, unsure)
    ahead, plain = (
        Engine(make_async(model, device), config),
        Engine(replace(model, ops=SyncBackend(model.ops)), config),
    )
    for seed in range(40 if DEVICE == "cpu" else 8):
        assert run(ahead, seed) == run(plain, seed), seed
        for engine in (ahead, plain):
            assert engine.scheduler.pool.num_free == config.n_blocks
    assert device.num_launched > (1000 if DEVICE == "cpu" else 20)
    if DEVICE == "cpu":  # most steps, of all kinds, are launched ahead of the tokens of the one before
        assert device.num_ahead > device.num_launched * (0.5 if unsure else 0.8)
        assert device.num_mixed_ahead > 50


@pytest.mark.parametrize("drafter", ["ngram", "draft model"])
@pytest.mark.parametrize("settings", [{}, {"max_batch": 3}, {"n_blocks": 9}])
def test_paused_and_resumed_drafting_gives_the_tokens_of_sync_steps(
    model: Transformer, settings: dict[str, Any], drafter: str
) -> None:
    """Steps are launched ahead while drafting is paused; the step in flight is collected before it is resumed."""
    config = EngineConfig(**{"max_context": 112, "n_blocks": 64, "debug": True, "max_step_tokens": 32, **settings})
    device = AsyncBackend(model.ops, 0.1)
    made = make_async(model, device)
    plain = Engine(replace(model, ops=SyncBackend(model.ops)), config)
    drafting = Engine(made, replace(config, speculative="ngram" if drafter == "ngram" else "off"))
    if drafter != "ngram":
        drafting.drafter = DraftModel(made, drafting.config, model.config.vocab_size)
    control = drafting.draft_control = engine_runs.AlternatingControl(3, 5, 1, 2, 7, 11)
    for seed in range(30 if DEVICE == "cpu" else 4):
        assert run(drafting, seed) == run(plain, seed), seed
        assert drafting.scheduler.pool.num_free == config.n_blocks
    assert control.num_switches > 10
    assert drafting.scheduler.stats.num_accepted_tokens > 0
    if DEVICE == "cpu":
        assert device.num_ahead > 100


def test_failed_device_step_finishes_only_its_requests(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    device = AsyncBackend(model.ops)
    engine = Engine(make_async(model, device), EngineConfig(max_context=112, n_blocks=64, debug=True))
    first = Request([1, 2], SamplingParams(temperature=0).resolve(), 30, 0, frozenset())
    engine.add(first)
    for _ in range(5):
        engine.step()

    def broken(_: PendingTokens) -> list[int]:
        raise ValueError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(PendingTokens, "result", broken)
        (output,) = engine.step()
    assert isinstance(output.error, InferenceError)
    second = Request([3], SamplingParams(temperature=0).resolve(), 5, 0, frozenset())
    engine.add(second)
    while engine.has_work:
        engine.step()
    assert len(second.tokens) == 5
    assert engine.scheduler.pool.num_free == 64


def test_next_step_is_launched_before_tokens_are_collected(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that arrive later, in chunks of steps of 32 tokens, stop it as little as requests that end."""
    device, launched = AsyncBackend(model.ops), list[int]()
    config = EngineConfig(max_context=112, n_blocks=64, max_step_tokens=32, debug=True)
    engine = Engine(make_async(model, device), config)
    requests = [
        Request([i, 2] * (1 + 20 * i), SamplingParams(temperature=0, logprobs=2).resolve(), 6 + 3 * i, 0, frozenset())
        for i in range(3)
    ]
    result = PendingTokens.result
    monkeypatch.setattr(PendingTokens, "result", lambda later: launched.append(device.num_launched) or result(later))
    step = 0
    while engine.has_work or requests:
        if requests and step % 3 == 0:
            engine.add(requests.pop(0))
        engine.step()
        step += 1
    assert launched == [*range(2, device.num_launched + 1), device.num_launched]
    assert device.num_launched == step


def test_failed_launch_keeps_the_tokens_in_flight(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that cannot be launched ends its requests; one that ends with the step before it has all its tokens."""
    engine = Engine(make_async(model, AsyncBackend(model.ops)), EngineConfig(max_context=112, n_blocks=64, debug=True))
    short, long = (Request([1, 2], SamplingParams(temperature=0).resolve(), n, 0, frozenset()) for n in (4, 30))
    for request in (short, long):
        engine.add(request)
    for _ in range(3):
        engine.step()

    def broken(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "batch", broken)
        outputs = {output.request: output for output in engine.step()}
    assert isinstance(outputs[long].error, InsufficientMemoryError)
    assert outputs[short].finish_reason == "length"
    assert len(short.tokens) == 4
    assert not engine.has_work
    assert engine.scheduler.pool.num_free == 64


def test_undecided_step_without_requests_is_no_failure(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of a step in flight are aborted before it turns out to be undecided."""
    engine = Engine(make_async(model, AsyncBackend(model.ops)), EngineConfig(max_context=112, n_blocks=64, debug=True))
    first, second = (Request([i, 2], SamplingParams(temperature=0).resolve(), 5, 0, frozenset()) for i in (1, 3))
    engine.add(first)
    engine.step()
    engine.abort(first)
    engine.add(second)
    runs: list[int] = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda scheduled: runs.append(len(scheduled)) or run(scheduled))
    with monkeypatch.context() as patch:
        patch.setattr(PendingTokens, "result", lambda _: None)
        assert engine.step() == []
    assert runs == []
    while engine.has_work:
        engine.step()
    assert len(second.tokens) == 5
    assert engine.scheduler.pool.num_free == 64


def test_interrupt_while_collecting_loses_no_token(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_context=112, n_blocks=64, debug=True)
    ahead = Engine(make_async(model, AsyncBackend(model.ops)), config)
    plain = Engine(replace(model, ops=SyncBackend(model.ops)), config)
    requests = [Request([1, 2], SamplingParams(temperature=0).resolve(), 12, 0, frozenset()) for _ in range(2)]
    for engine, request in zip((ahead, plain), requests, strict=True):
        engine.add(request)
        for _ in range(4):
            engine.step()

    def interrupted(_: PendingTokens) -> list[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PendingTokens, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ahead.step()
    for engine in (ahead, plain):
        while engine.has_work:
            engine.step()
    assert requests[0].tokens == requests[1].tokens
    assert ahead.scheduler.pool.num_free == 64


def test_async_scheduling_continues_with_waiting_requests(model: Transformer) -> None:
    """Requests that wait for a batch slot stop no step from being launched."""
    device = AsyncBackend(model.ops)
    engine = Engine(make_async(model, device), EngineConfig(max_context=112, n_blocks=64, max_batch=2, debug=True))
    requests = [Request([i + 1, 2], SamplingParams(temperature=0).resolve(), 20, 0, frozenset()) for i in range(6)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert all(len(request.tokens) == 20 for request in requests)
    assert device.num_launched > 3 * 15


def test_time_between_results_is_learnt(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight takes from one result to the next, unless the caller spent most of that time elsewhere."""
    engine = Engine(make_async(model, AsyncBackend(model.ops)), EngineConfig(max_context=112, n_blocks=64))
    engine.add(Request([1, 2], SamplingParams(temperature=0).resolve(), 60, 0, frozenset()))
    now = [0.0]
    monkeypatch.setattr(serving, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: 0.0))
    result = PendingTokens.result

    def arrive(later: PendingTokens) -> list[int] | None:
        now[0] += 0.005
        return result(later)

    monkeypatch.setattr(PendingTokens, "result", arrive)
    for _ in range(20):
        engine.step()
        now[0] += 0.001  # what the caller does with the tokens
    predicted = engine.step_time.predict(StepSize("decode", True, 1, 20))
    assert predicted == pytest.approx(0.006, rel=0.02)
    times = replace(engine.step_time.totals["decode"])
    assert times.num_steps > 10
    for _ in range(20):
        now[0] += 1.0  # a reader that is slow to ask for the next token
        engine.step()
    assert engine.step_time.totals["decode"] == times
