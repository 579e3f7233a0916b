"""The one thread boundary: event loops submit and cancel, a thread steps, nothing is lost and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import count
from typing import Any, cast

import pytest

from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.errors import ContextLengthError, InferenceError, RequestCancelledError
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.token_engine.protocol import RequestState, Submit
from llm_worker_rbee.token_engine.threaded import ThreadedEngine
from tests.helpers import engine_runs
from tests.helpers.engine_runs import all_of

numbers = count()
PROMPTS = [[1, 2, 3], [4] * 40, [5, 6], [1, 2, 3, 4, 5, 6, 7] * 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return engine_runs.load(engine_runs.small_file(tmp_path_factory.mktemp("async") / "small.gguf", "F32"))


def engine_of(model: Transformer, **settings: Any) -> Engine:
    return Engine(model, EngineConfig(**{"max_context": 512, "n_blocks": 200, "debug": True, **settings}))


def request(prompt: list[int], max_tokens: int = 20) -> RequestState:
    params = SamplingParams(seed=1, ignore_eos=True).resolve()
    number = next(numbers)
    return RequestState(Submit(id=number, prompt=prompt, params=params, max_tokens=max_tokens, seed=1, eos_ids=[]))


def served(engine: Engine, **options: Any) -> ThreadedEngine:
    """An engine in a thread; what it says of its model is not read here."""
    return ThreadedEngine(lambda on_stage: (engine, cast(Any, None)), **options)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """With a bound on every wait: what hangs fails."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def plain(model: Transformer) -> list[list[int]]:
    params = SamplingParams(seed=1, ignore_eos=True).resolve()
    engine, requests = engine_of(model), [Request(prompt, params, 20, 1, frozenset()) for prompt in PROMPTS]
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    return [one.tokens for one in requests]


async def settled(engine: Engine) -> None:
    """Until the thread has taken in what was cancelled."""
    while engine.has_work:
        await asyncio.sleep(0.001)
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.config.n_blocks


def test_in_process_engine_many_streams_get_their_own_outputs(model: Transformer) -> None:
    async def main() -> None:
        async with served(engine_of(model)) as token_engine:
            for _ in range(2):  # it sleeps in between
                streams = [token_engine.submit(request(prompt)) for prompt in PROMPTS]
                assert await asyncio.gather(*map(all_of, streams)) == plain(model)
            await settled(token_engine.engine)

    run(main())


def test_submit_request_that_cannot_fit_ends_alone(model: Transformer) -> None:
    async def main() -> None:
        async with served(engine_of(model, n_blocks=4)) as token_engine:
            for length, max_tokens in ((500, 100), (60, 20)):
                with pytest.raises(ContextLengthError, match="longer than the context or the KV cache"):
                    await all_of(token_engine.submit(request([1] * length, max_tokens)))
            assert len(await all_of(token_engine.submit(request([1] * 60, 5)))) == 5

    run(main())


def test_abort_frees_blocks_and_raises_in_reader(model: Transformer) -> None:
    async def main() -> None:
        async with served(engine_of(model, max_batch=1)) as token_engine:
            running, waiting = (token_engine.submit(request(prompt, 400)) for prompt in ([1, 2], [3, 4]))
            first, *_ = await running.next_outputs()
            assert first.finish_reason is None
            waiting.abort()
            running.abort()
            running.abort()  # once more changes nothing
            for stream in (running, waiting):
                with pytest.raises(RequestCancelledError, match="cancelled"):
                    await all_of(stream)
            await settled(token_engine.engine)
            assert len(await all_of(token_engine.submit(request([1, 2], 5)))) == 5

    run(main())


def test_unread_stream_is_aborted_without_blocking_others(model: Transformer) -> None:
    async def main() -> None:
        async with served(engine_of(model), max_buffered_outputs=64) as token_engine:
            lazy = token_engine.submit(request([1, 2], 500))
            for prompt in range(3, 9):
                assert len(await all_of(token_engine.submit(request([prompt], 60)))) == 60
            with pytest.raises(RequestCancelledError, match="the output was not read: 64 tokens"):
                await all_of(lazy)
            await settled(token_engine.engine)

    run(main())


def test_stop_finishes_running_requests_with_error(model: Transformer) -> None:
    async def main() -> None:
        async with served(engine_of(model)) as token_engine:
            stream = token_engine.submit(request([1, 2], 400))
            await stream.next_outputs()
        with pytest.raises(RequestCancelledError, match="stopped"):
            await all_of(stream)
        with pytest.raises(RequestCancelledError, match="stopped"):
            token_engine.submit(request([1, 2]))

    run(main())


def test_scheduler_failure_finishes_all_requests_and_engine_recovers(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = engine_of(model)
        monkeypatch.setattr(engine.pipeline, "is_enabled", False)  # on a GPU a launched step calls no scheduler
        async with served(engine) as token_engine:
            stream = token_engine.submit(request([1, 2], 400))
            await stream.next_outputs()

            def broken(*_: Any) -> None:
                monkeypatch.undo()
                raise ZeroDivisionError("by accident")

            monkeypatch.setattr(token_engine.engine.scheduler, "schedule", broken)
            with pytest.raises(InferenceError, match="ZeroDivisionError"):
                await all_of(stream)
            assert await all_of(token_engine.submit(request(PROMPTS[0]))) == plain(model)[0]
            await settled(token_engine.engine)

    run(main())


def test_closed_event_loop_frees_its_requests(model: Transformer) -> None:
    engine = engine_of(model)

    async def leave() -> None:
        token_engine = served(engine)
        await token_engine.start(lambda stage: None)
        await token_engine.submit(request([1, 2], 400)).next_outputs()

    asyncio.run(leave())
    run(settled(engine))


def test_stop_leaves_no_request_in_engine(model: Transformer) -> None:
    async def main() -> None:
        engine = engine_of(model)
        async with served(engine) as first:
            stream = first.submit(request([1, 2], 400))
            await stream.next_outputs()
        await settled(engine)
        async with served(engine) as second:
            assert await all_of(second.submit(request(PROMPTS[0]))) == plain(model)[0]

    run(main())


def test_abort_before_the_first_step(model: Transformer) -> None:
    async def main() -> None:
        async with served(engine_of(model)) as token_engine:
            stream = token_engine.submit(request([1, 2], 400))
            stream.abort()
            with pytest.raises(RequestCancelledError, match="cancelled"):
                await all_of(stream)
            assert await all_of(token_engine.submit(request(PROMPTS[0]))) == plain(model)[0]
            await settled(token_engine.engine)

    run(main())


def test_request_that_breaks_scheduler_finishes_with_error(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens while it is taken on, its reader hears of it, and the next one is answered."""
    engine = engine_of(model)
    add = engine.add

    def breaking(one: Request) -> None:
        if one.num_prompt_tokens == 5:
            raise MemoryError
        add(one)

    monkeypatch.setattr(engine, "add", breaking)

    async def serve() -> None:
        async with served(engine) as token_engine:
            with pytest.raises(InferenceError, match="MemoryError"):
                await all_of(token_engine.submit(request([1] * 5)))
            assert len(await all_of(token_engine.submit(request([1] * 4)))) == 20
            assert token_engine.status() == "healthy"

    run(serve())
