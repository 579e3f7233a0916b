"""The pool's state machine with scripted models: loads, unloads, deaths and requests in any order."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest

from llm_worker_rbee.engine.memory_plan import MemoryRow
from llm_worker_rbee.errors import (
    DeadlineError,
    InferenceError,
    InsufficientMemoryError,
    ModelFileError,
    QueueFullError,
    ShuttingDownError,
    WorkerError,
)
from llm_worker_rbee.progress import Stage
from llm_worker_rbee.server import model_pool
from llm_worker_rbee.server.model_pool import Member, ModelPool, ModelSource, Service

GB = 10**9


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


class Engine:
    """The engine of a scripted service."""

    has_failed = False

    def status(self) -> str:
        return "failed" if self.has_failed else "healthy"


class ScriptedService:
    """A model that is loaded: its requests end when a test says so."""

    context_length = 8

    def __init__(self, source: ScriptedSource) -> None:
        self.engine, self.source, self.num_open, self.is_closed = Engine(), source, 0, False

    async def close(self, error: WorkerError) -> None:
        assert self.num_open == 0 or self.source.may_be_busy, f"{self.source.names[0]} is unloaded while it is busy"
        await asyncio.sleep(0)
        self.is_closed, self.error = True, error
        self.source.live -= 1


class ScriptedSource(ModelSource):
    """A model of a size, whose load ends when its gate opens, or fails."""

    kind, may_be_busy = "chat", False

    def __init__(self, name: str, size: int) -> None:
        self.names, self.size, self.live = (name,), size, 0
        self.failure: WorkerError | None = None
        self.failures: list[WorkerError] = []  # of the next loads
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_opened = 0

    def plan(self) -> list[MemoryRow]:
        return [MemoryRow("weights", "host", self.size * GB, "")]

    async def load(self, on_stage: Callable[[Stage], None], on_idle: Callable[[], None], *, is_alone: bool) -> Service:
        self.live += 1
        assert self.live == 1, "two engines of one model"
        self.num_opened += 1
        try:
            on_stage(Stage("weights", 1, 2, 0.0))
            await self.gate.wait()
            if self.failures:
                raise self.failures.pop(0)
            if self.failure is not None:
                raise self.failure
        except BaseException:
            self.live -= 1
            raise
        return ScriptedService(self)


def make_pool(*sizes: int, limit: int = 10, **options: Any) -> tuple[ModelPool, list[Member], list[ScriptedSource]]:
    pool = ModelPool(**{"max_models": 3, "max_bytes": limit * GB, "load_timeout_s": 20.0, **options})
    sources = [ScriptedSource("abcdefgh"[i], size) for i, size in enumerate(sizes)]
    return pool, [pool.add(source) for source in sources], sources


async def settle() -> None:
    """Let every task run until it waits for something that only the test does; plans run in a thread."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def states(members: list[Member]) -> str:
    return " ".join(f"{member.name}:{member.state}" for member in members)


async def hold(pool: ModelPool, member: Member, end: asyncio.Event) -> None:
    async with pool.use(member):
        await end.wait()


@in_loop
async def test_idle_model_that_was_used_least_recently_leaves() -> None:
    pool, members, sources = make_pool(4, 4, 4)
    for member in (*members[:2], members[0]):
        await pool.load(member)
    await pool.load(members[2])
    assert states(members) == "a:loaded b:unloaded c:loaded"
    assert [source.num_opened for source in sources] == [1, 1, 1]
    assert pool.used_bytes == 8 * GB


@in_loop
async def test_number_of_models_is_limited_too() -> None:
    pool, members, _ = make_pool(1, 1, 1, max_models=2)
    for member in members:
        await pool.load(member)
    assert states(members) == "a:unloaded b:loaded c:loaded"


@in_loop
async def test_busy_model_stays_and_both_take_turns() -> None:
    """A model that waits for memory is not starved: the busy one takes no new request, and gets its turn again."""
    pool, members, sources = make_pool(6, 6)
    first_end, second_end, third_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    first = asyncio.ensure_future(hold(pool, members[0], first_end))
    await settle()
    second = asyncio.ensure_future(hold(pool, members[1], second_end))
    await settle()
    third = asyncio.ensure_future(hold(pool, members[0], third_end))
    await settle()
    assert states(members) == "a:loaded b:loading"
    assert members[1].waits_for_room
    assert members[0].num_users == 1  # the third request waits behind the second
    assert members[1].describe()["reason"] == "it waits for the memory of other models"
    first_end.set()
    await settle()
    assert states(members) == "a:loading b:loaded"
    second_end.set()
    await settle()
    assert states(members) == "a:loaded b:unloaded"
    third_end.set()
    await asyncio.gather(first, second, third)
    assert [source.num_opened for source in sources] == [2, 1]


@in_loop
async def test_long_answer_holds_up_its_own_model_for_a_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that waits gets the memory in a later turn, once no answer is computed."""
    monkeypatch.setattr(model_pool, "TURN_S", 0.2)
    pool, members, sources = make_pool(6, 6)
    long_end, other_end = asyncio.Event(), asyncio.Event()
    long = asyncio.ensure_future(hold(pool, members[0], long_end))
    await settle()
    other = asyncio.ensure_future(hold(pool, members[1], other_end))
    await settle()
    async with asyncio.timeout(10):
        await pool.load(members[0])  # beside the long answer
    assert states(members) == "a:loaded b:loading"
    long_end.set()
    while members[1].state != "loaded":
        await settle()
    other_end.set()
    await asyncio.gather(long, other)
    assert [source.num_opened for source in sources] == [1, 1]


@in_loop
async def test_load_whose_process_dies_is_tried_again_once() -> None:
    pool, members, sources = make_pool(4)
    sources[0].failures = [InferenceError("it was killed")]
    await pool.load(members[0])
    assert (states(members), sources[0].num_opened) == ("a:loaded", 2)
    await pool.unload(members[0])
    sources[0].failures = [InferenceError("it was killed"), InferenceError("again")]
    with pytest.raises(InferenceError, match="again"):
        await pool.load(members[0])
    assert (states(members), sources[0].live) == ("a:failed", 0)


@in_loop
async def test_model_that_never_fits_is_refused_at_once() -> None:
    pool, members, sources = make_pool(4, 11)
    await pool.load(members[0])
    with pytest.raises(InsufficientMemoryError, match=r"takes 11\.00 GB \(weights 11\.00 GB\), .*take 10\.00 GB"):
        await pool.load(members[1])
    assert states(members) == "a:loaded b:failed"
    assert sources[1].num_opened == 0


@in_loop
async def test_requests_that_wait_are_bounded_and_time_out() -> None:
    pool, members, _ = make_pool(6, 6, max_waiting=2, load_timeout_s=0.05)
    end = asyncio.Event()
    busy = asyncio.ensure_future(hold(pool, members[0], end))
    await settle()
    waiting = [asyncio.ensure_future(pool.load(members[1])) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="the queue is full"):
        await pool.load(members[1])
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, DeadlineError)
        assert "does not fit beside the models that answer requests ('a')" in str(error)
    await settle()
    assert states(members) == "a:loaded b:unloaded"  # its load was given up, and a serves again
    assert members[0].is_serving
    end.set()
    await busy


@in_loop
async def test_client_that_leaves_while_it_waits_gives_the_memory_back() -> None:
    pool, members, _ = make_pool(6, 6)
    end = asyncio.Event()
    busy = asyncio.ensure_future(hold(pool, members[0], end))
    await settle()
    waiting = asyncio.ensure_future(pool.load(members[1]))
    await settle()
    assert not members[0].is_serving
    waiting.cancel()
    await settle()
    assert members[0].is_serving
    end.set()
    await busy
    assert states(members) == "a:loaded b:unloaded"


@in_loop
async def test_failed_load_is_reported_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, members, sources = make_pool(4, 4)
    await pool.load(members[0])
    sources[1].failure = ModelFileError("b.gguf is cut off")
    for _ in range(2):  # the second gets the error of the first
        with pytest.raises(ModelFileError, match="cut off"):
            await pool.load(members[1])
    assert (sources[1].num_opened, members[1].describe()["reason"]) == (1, "b.gguf is cut off")
    assert states(members) == "a:loaded b:failed"
    monkeypatch.setattr(model_pool, "RETRY_FAILED_S", 0)
    sources[1].failure = None
    await pool.load(members[1])
    assert states(members) == "a:loaded b:loaded"


@in_loop
async def test_load_that_never_ends_is_given_up_and_others_go_on() -> None:
    pool, members, sources = make_pool(4, 4, load_timeout_s=0.05)
    sources[1].gate.clear()
    with pytest.raises((DeadlineError, InferenceError), match=r"was not loaded within 0\.05 s"):
        await pool.load(members[1])
    await pool.load(members[0])
    await settle()
    assert states(members) == "a:loaded b:failed"
    assert (sources[1].live, pool.used_bytes) == (0, 4 * GB)


@in_loop
async def test_engine_that_died_too_often_is_let_go_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "RETRY_FAILED_S", 0)
    pool, members, sources = make_pool(4, 4)
    for member in members:
        await pool.load(member)
    service = members[0].service
    assert isinstance(service, ScriptedService)
    service.engine.has_failed = True
    pool.notice_failures()
    await settle()
    assert states(members) == "a:failed b:loaded"
    assert pool.used_bytes == 4 * GB
    await pool.load(members[0])
    assert states(members) == "a:loaded b:loaded"
    assert sources[0].num_opened == 2


@in_loop
async def test_model_sleeps_after_its_time_and_wakes() -> None:
    pool, members, sources = make_pool(4, keep_alive_s=0.02)
    end = asyncio.Event()
    busy = asyncio.ensure_future(hold(pool, members[0], end))
    await settle()
    await asyncio.sleep(0.05)
    assert (members[0].state, members[0].expires_in_s) == ("loaded", 0.02)  # its time runs after the request
    end.set()
    await busy
    while members[0].state != "sleeping":
        await asyncio.sleep(0.005)
    assert pool.used_bytes == 0
    await pool.load(members[0])
    assert sources[0].num_opened == 2


@in_loop
async def test_keep_alive_of_a_request() -> None:
    pool, members, _ = make_pool(4)
    async with pool.use(members[0]):
        pool.set_keep_alive(members[0], 0)
        assert members[0].state == "loaded"
    await settle()
    assert members[0].state == "unloaded"
    async with pool.use(members[0]):
        pool.set_keep_alive(members[0], float("inf"))
    assert members[0].expires_in_s is None


@in_loop
async def test_unload_waits_for_running_requests_and_new_ones_load_it_again() -> None:
    pool, members, sources = make_pool(4)
    ends = asyncio.Event(), asyncio.Event()
    first = asyncio.ensure_future(hold(pool, members[0], ends[0]))
    await settle()
    unloading = asyncio.ensure_future(pool.unload(members[0]))
    await settle()
    second = asyncio.ensure_future(hold(pool, members[0], ends[1]))
    await settle()
    assert not unloading.done()
    assert (members[0].num_users, len(members[0].waiters)) == (1, 1)
    ends[0].set()
    await unloading
    ends[1].set()
    await asyncio.gather(first, second)
    assert (members[0].state, sources[0].num_opened) == ("loaded", 2)


@in_loop
async def test_unload_outlives_another_that_was_abandoned() -> None:
    pool, members, _ = make_pool(4)
    end = asyncio.Event()
    holding = asyncio.ensure_future(hold(pool, members[0], end))
    await settle()
    abandoned, unloading = (asyncio.ensure_future(pool.unload(members[0])) for _ in range(2))
    await settle()
    abandoned.cancel()
    await settle()
    end.set()
    await asyncio.wait_for(asyncio.gather(holding, unloading), 5)
    assert states(members) == "a:unloaded"


@in_loop
async def test_large_model_is_not_starved_by_small_ones() -> None:
    """The small ones fit together, and are always busy."""
    pool, members, sources = make_pool(8, 3, 3, 3, limit=10)
    is_over = False

    async def use_again(member: Member) -> None:
        while not is_over:
            async with pool.use(member):
                await asyncio.sleep(0.001)

    small = [asyncio.ensure_future(use_again(member)) for member in members[1:] for _ in range(2)]
    await settle()
    for _ in range(3):
        await asyncio.wait_for(pool.load(members[0]), 5)
        await settle()
    is_over = True
    await asyncio.gather(*small)
    assert sources[0].num_opened == 3
    assert max(source.num_opened for source in sources[1:]) < 20


@in_loop
async def test_background_loads_of_one_model_are_one() -> None:
    """An orchestrator may ask again and again; only requests fill the queue."""
    pool, members, _ = make_pool(6, 6, max_waiting=4)
    end = asyncio.Event()
    holding = asyncio.ensure_future(hold(pool, members[0], end))
    await settle()
    for _ in range(20):
        pool.start_load(members[1])
        await asyncio.sleep(0)
    assert pool.num_waiting == 1
    end.set()
    await holding
    await settle()
    assert states(members) == "a:unloaded b:loaded"


@in_loop
async def test_models_of_the_start_are_loaded_while_there_is_room() -> None:
    pool, members, _ = make_pool(11, 4, 7, 6)
    await pool.preload(members)
    assert states(members) == "a:failed b:loaded c:unloaded d:loaded"


@in_loop
async def test_all_sleep_and_wake() -> None:
    pool, members, sources = make_pool(4, 4, 4)
    for member in members[:2]:
        await pool.load(member)
    await pool.sleep()
    assert states(members) == "a:sleeping b:sleeping c:unloaded"
    await pool.wake()
    assert states(members) == "a:loaded b:loaded c:unloaded"
    assert [source.num_opened for source in sources] == [2, 2, 0]


@in_loop
async def test_stop_ends_everything() -> None:
    pool, members, sources = make_pool(4, 4, 4)
    await pool.load(members[0])
    sources[1].gate.clear()
    waiting = asyncio.ensure_future(pool.load(members[1]))
    await settle()
    await pool.stop(ShuttingDownError("the worker is shutting down"))
    with pytest.raises(ShuttingDownError):
        await waiting
    with pytest.raises(ShuttingDownError):
        await pool.load(members[2])
    assert [source.live for source in sources] == [0, 0, 0]
    assert pool.used_bytes == 0


@pytest.mark.parametrize("seed", range(12))
@in_loop
async def test_any_order_loses_nothing_and_stays_within_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests, loads, unloads, sleeps, failures and deaths: every request ends, no busy model is unloaded."""
    monkeypatch.setattr(model_pool, "RETRY_FAILED_S", 0)
    rng = random.Random(seed)
    sizes = [rng.randint(1, 7) for _ in range(6)] + [12]
    pool, members, sources = make_pool(*sizes, max_models=rng.randint(1, 4), keep_alive_s=rng.choice([None, 0.003]))
    ended: list[str] = []

    async def request(number: int) -> None:
        member = rng.choice(members)
        try:
            async with asyncio.timeout(rng.choice([0.001, 5.0])), pool.use(member) as service:
                assert isinstance(service, ScriptedService)
                assert not service.is_closed
                if rng.random() < 0.2:
                    pool.set_keep_alive(member, rng.choice([0, 0.002, float("inf")]))
                for _ in range(rng.randint(0, 4)):
                    await asyncio.sleep(rng.choice([0, 0.001]))
                    assert not service.is_closed or service.engine.has_failed
                    assert pool.used_bytes <= 10 * GB
                    assert len(pool.residents) <= pool.max_models
        except (WorkerError, TimeoutError) as error:
            ended.append(type(error).__name__)
        else:
            ended.append("served")

    async def disturb() -> None:
        for _ in range(60):
            member, source = rng.choice(list(zip(members, sources, strict=True)))
            source.failure = rng.choice([None, None, InferenceError("it failed")])
            action = rng.randint(0, 3)
            if action == 0:
                with suppress(WorkerError, TimeoutError):
                    async with asyncio.timeout(1):
                        await pool.unload(member, rng.choice(["sleeping", "unloaded"]))
            elif action == 1:
                pool.start_load(member)
            elif action == 2 and isinstance(member.service, ScriptedService):
                source.may_be_busy = member.service.engine.has_failed = True
            await asyncio.sleep(rng.choice([0, 0.002]))

    requests = [asyncio.ensure_future(request(i)) for i in range(150)]
    disturbance = asyncio.ensure_future(disturb())
    async with asyncio.timeout(60):
        await asyncio.gather(*requests, disturbance)
    for source in sources:
        source.failure = None
    await settle()
    async with asyncio.timeout(20):
        for member in members[:6]:
            await pool.load(member)
    assert len(ended) == 150
    assert "served" in ended
    assert pool.num_waiting == 0
    assert all(member.num_users == 0 for member in members)
    await pool.stop(ShuttingDownError("the end"))
    assert all(source.live == 0 for source in sources)


@in_loop
async def test_requests_that_a_stop_ends_get_its_error() -> None:
    """Those that run, as well as those that wait."""
    pool, members, sources = make_pool(4, 7)
    sources[0].may_be_busy = True
    await pool.load(members[0])
    service: Any = members[0].service
    service.num_open = 1
    waiting = asyncio.ensure_future(pool.load(members[1]))
    await settle()
    await pool.stop(ShuttingDownError("it ends"))
    assert isinstance(service.error, ShuttingDownError)
    with pytest.raises(ShuttingDownError, match="it ends"):
        await waiting
    with pytest.raises(ShuttingDownError, match="it ends"):
        await pool.load(members[0])


@in_loop
async def test_model_that_never_sleeps_has_no_timer() -> None:
    """An infinite time, as a negative one is read, is none."""
    pool, (member,), _ = make_pool(1, keep_alive_s=math.inf)
    await pool.load(member)
    assert (member.expires_in_s, member.timer) == (None, None)
    pool.set_keep_alive(member, 5.0)
    assert member.expires_in_s is not None
