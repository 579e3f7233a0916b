"""The engine without a model: the scheduler is real, the tokens are given; and a step that can be held, to see what a
cancelled request leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.dummy_model import DummyModel
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request, SamplerOutput, ScheduledTokens
from llm_worker_rbee.errors import InvalidRequestError, RequestCancelledError
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.token_engine.protocol import RequestState, Submit
from llm_worker_rbee.token_engine.threaded import ThreadedEngine
from tests.helpers import engine_runs
from tests.helpers.engine_runs import all_of

WORDS = [7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return engine_runs.load(engine_runs.small_file(tmp_path_factory.mktemp("null") / "small.gguf", "F32"))


def engine_of(model: Transformer, **settings: Any) -> Engine:
    engine = Engine(model, EngineConfig(**{"max_context": 256, "n_blocks": 64, "debug": True, **settings}))
    engine.replace_model(DummyModel(WORDS))
    return engine


def request(prompt: list[int], max_tokens: int, **params: Any) -> Request:
    return Request(prompt, SamplingParams(**params).resolve(), max_tokens, 1, frozenset())


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("settings", [{}, {"max_step_tokens": 16}, {"speculative": "ngram"}, {"prefix_cache": False}])
def test_dummy_model_gives_its_text_to_every_request(model: Transformer, settings: dict[str, Any]) -> None:
    engine = engine_of(model, **settings)
    requests = [request([1, 2, 3] * n, 1 + n) for n in range(1, 20)]
    for one in requests:
        engine.add(one)
    run(engine)
    assert [one.tokens for one in requests] == [(WORDS * 20)[: 1 + n] for n in range(1, 20)]
    assert engine.scheduler.pool.num_free == 64


def test_dummy_model_logprobs_are_zero(model: Transformer) -> None:
    engine = engine_of(model, max_step_tokens=16)
    one = request(list(range(40)), 4, logprobs=2, prompt_logprobs=True)
    engine.add(one)
    outputs = [output for _ in range(20) if engine.has_work for output in engine.step()]
    assert one.prompt_logprobs is not None
    assert [entry and (entry.token, entry.logprob) for entry in one.prompt_logprobs] == [
        None, *((token, 0.0) for token in range(1, 40))
    ]  # fmt: skip
    assert [output.logprob and output.logprob.top for output in outputs] == [((t, 0.0),) for t in [7, 8, 9, 7]]


def test_dummy_model_without_text_raises() -> None:
    with pytest.raises(InvalidRequestError, match="is empty"):
        DummyModel([])


class Held:
    """The null engine, a step of which waits until it is let go."""

    def __init__(self) -> None:
        self.null = DummyModel(WORDS)
        self.steps: list[dict[int, Request]] = []
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    async def next_step(self) -> None:
        """One has begun, and waits."""
        assert await asyncio.to_thread(self.began.acquire, True, 20)

    def __call__(self, spans: Sequence[ScheduledTokens]) -> SamplerOutput:
        self.steps.append({span.request.prompt[0]: span.request for span in spans})
        self.began.release()
        assert self.may_end.acquire(timeout=20)
        return self.null(spans)


def submitted(token: int, max_tokens: int) -> RequestState:
    """A request with a prompt of 50 such tokens."""
    params, prompt = SamplingParams().resolve(), [token] * 50
    return RequestState(Submit(id=token, prompt=prompt, params=params, max_tokens=max_tokens, seed=1, eos_ids=[]))


def test_abort_during_step_drops_request_before_next_step(model: Transformer) -> None:
    engine = engine_of(model)
    held = Held()
    engine.replace_model(held)

    async def cancel() -> None:
        async with ThreadedEngine(lambda on_stage: (engine, cast(Any, None))) as token_engine:
            kept, dropped = token_engine.submit(submitted(1, 20)), token_engine.submit(submitted(2, 200))
            await held.next_step()
            while len(held.steps) < 3 or 2 not in held.steps[-1]:
                held.may_end.release()
                await held.next_step()
            in_step, request = len(held.steps), held.steps[-1][2]
            dropped.abort()
            held.may_end.release()
            await held.next_step()
            assert held.steps[in_step].keys() == {1}
            assert (request.blocks, request.is_finished) == ([], True)
            assert engine.scheduler.pool.num_free == 64 - len(held.steps[in_step][1].blocks)
            held.may_end.release(30)
            assert len(await all_of(kept)) == 20
            with pytest.raises(RequestCancelledError):
                await all_of(dropped)

    asyncio.run(asyncio.wait_for(cancel(), 60))
