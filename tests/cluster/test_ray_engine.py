"""Answers through Ray are those of one process, also when engines die or are stopped in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from llm_worker_rbee import LLM
from llm_worker_rbee.cluster import ray_engine
from llm_worker_rbee.cluster.reports import EngineReport
from llm_worker_rbee.errors import InferenceError
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.token_engine.protocol import (
    EngineStats,
    RequestEvent,
    RequestState,
    RequestStream,
    StepResult,
    Submit,
)
from llm_worker_rbee.token_engine.wire import encode

from .conftest import LIMIT_S, NAME, Cluster, actor_ids, child_ids, kill, until
from .streams import bodies, read_all


def request_state(number: int, max_tokens: int = 4) -> RequestState:
    params = SamplingParams(temperature=0.0).resolve()
    return RequestState(
        Submit(id=number, prompt=[1, 2], params=params, max_tokens=max_tokens, seed=0, eos_ids=[])
    )  # fmt: skip


async def read_to_the_end(stream: RequestStream) -> None:
    while await stream.next_outputs():
        pass


def stream_all(cluster: Cluster, on_running: Callable[[], object] = lambda: None) -> list[str]:
    return asyncio.run(read_all(cluster.url, bodies(), on_running))


def test_answers_are_those_of_one_process(cluster: Cluster, texts: list[str]) -> None:
    assert stream_all(cluster) == texts
    until(lambda: all(report.stats.num_queried_tokens for report in cluster.reports().values()))  # both computed


def test_undisturbed_requests_are_submitted_once(cluster: Cluster) -> None:
    async def run() -> list[RequestState]:
        engine = ray_engine.RayEngine(cluster.handle)
        await engine.start(lambda stage: None)
        streams = [engine.submit(request_state(i, max_tokens=i)) for i in range(1, 33)]
        await asyncio.gather(*(read_to_the_end(stream) for stream in streams))
        await engine.stop(InferenceError("the test is over"))
        assert engine.num_restarts == 0
        return [stream.request for stream in streams]

    requests = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert [len(request.tokens) for request in requests] == list(range(1, 33))
    assert not any(request.num_restarts for request in requests)


@pytest.mark.parametrize("pids", [actor_ids, child_ids], ids=["actor", "child"])
def test_killed_engine_loses_no_stream(cluster: Cluster, texts: list[str], pids: Callable[[], list[int]]) -> None:
    before = pids()
    assert len(before) == 2

    def kill_one() -> None:
        kill(before[0])
        until(lambda: cluster.health()["status"] == "degraded")

    assert stream_all(cluster, kill_one) == texts
    cluster.until_healthy(2)
    after = until(lambda: len(found := pids()) == 2 and found)
    assert set(before) & set(after) == {before[1]}


def test_all_engines_killed_lose_no_stream(cluster: Cluster, texts: list[str]) -> None:
    def kill_all() -> None:
        for pid in actor_ids():
            kill(pid)
        until(lambda: cluster.health()["status"] == "loading")

    assert stream_all(cluster, kill_all) == texts
    cluster.until_healthy(2)


def test_disconnect_reaches_the_engine(cluster: Cluster) -> None:
    body = {**bodies(4000)[0], "stream": True}
    with cluster.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
        until(lambda: sum(report.load for report in cluster.reports().values()))
    until(lambda: not sum(report.load for report in cluster.reports().values()), 10)


def test_deadline_passes_while_no_engine_serves(cluster: Cluster) -> None:
    for pid in actor_ids():
        kill(pid)
    body = {"prompt": "Once", "max_tokens": 4, "timeout_ms": 500, "stream": False}
    reply = cluster.http.post("/v1/jobs", json=body)
    assert reply.status_code == 504, reply.text
    cluster.until_healthy(2)


class DyingEngines:
    """A deployment handle whose replicas admit each request and die."""

    num_calls = 0

    def options(self, **_: Any) -> DyingEngines:
        return self

    def remote(self, *_: Any) -> DyingEngines:
        self.num_calls += 1
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield encode(StepResult(events=[RequestEvent(1, "admitted")]))
        raise ActorDiedError

    def cancel(self) -> None: ...


def test_request_that_is_always_there_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "FIRST_BACKOFF_S", 0.0)
    engines = DyingEngines()

    async def generate() -> None:
        engine = ray_engine.RayEngine(engines)
        engine.info = llm.info
        await engine.submit(request_state(1)).next_outputs()

    with pytest.raises(InferenceError, match="5 engines in a row died while they ran this request"):
        asyncio.run(generate())
    assert engines.num_calls == ray_engine.MAX_DEATHS


def report(status: str = "healthy", num_steps: int = 0, num_restarts: int = 0) -> EngineReport:
    return EngineReport(
        status=status, device="cpu", block_size=16, num_restarts=num_restarts, num_requests=0, last_step_age_s=0.0,
        stats=EngineStats(num_free_blocks=1, num_blocks=2, num_steps=num_steps), load=0, hashes=b"",
    )  # fmt: skip


def engine_with(llm: LLM, **latest: EngineReport) -> ray_engine.RayEngine:
    engine = ray_engine.RayEngine(DyingEngines())
    engine.info = llm.info
    engine._take_reports(latest)
    return engine


@pytest.mark.parametrize(
    ("statuses", "together"),
    [
        ([], "loading"),
        (["healthy", "healthy"], "healthy"),
        (["healthy", "stalled"], "degraded"),
        (["healthy", "loading"], "degraded"),
        (["stalled", "stalled"], "stalled"),
        (["stalled", "loading"], "loading"),
        (["failed"], "loading"),
    ],
)
def test_status_of_all_replicas(llm: LLM, statuses: list[str], together: str) -> None:
    assert engine_with(llm, **{f"r{i}": report(status) for i, status in enumerate(statuses)}).status() == together


def test_replica_counts_once_however_often_its_report_is_missing(llm: LLM) -> None:
    a, b = report(num_steps=100, num_restarts=1), report(num_steps=20, num_restarts=2)
    engine = engine_with(llm, a=a, b=b)
    for latest in ({"a": a}, {"a": a, "b": b}, {}, {"b": b}, {"a": a}, {}):
        engine._take_reports(latest)
        stats = engine.stats()
        assert (stats.num_steps, engine.num_restarts) == (120, 3)
        assert stats.num_blocks == 2 * len(latest)  # a gauge
    engine._take_reports({"b": report(num_steps=25, num_restarts=2)})
    assert (engine.stats().num_steps, engine.num_restarts) == (125, 3)


@pytest.fixture
def spare(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster for a test that changes it."""
    yield cluster
    cluster.deploy(engines=2)


def test_redeployed_application_finishes_its_streams(spare: Cluster, texts: list[str]) -> None:
    """Ray replaces the front and the engines, one after the other."""
    before = actor_ids()
    assert stream_all(spare, lambda: spare.deploy(engines=2)) == texts
    assert not set(before) & set(actor_ids())


def test_deleted_application_finishes_its_streams(spare: Cluster, texts: list[str]) -> None:
    assert stream_all(spare, lambda: serve.delete(NAME)) == texts
    until(lambda: not actor_ids() and not child_ids())
