"""Narration events of jobs."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from llm_worker_rbee.server.dialects import jobs
from tests.helpers.server import Server, until
from tests.server.conftest import Start

CORRELATION = "12345678-1234-1234-1234-123456789abc"
LONG = 60_000


def narrated(found: list[Any]) -> list[tuple[str, str]]:
    return [(one["action"], one["human"]) for one in found if one["type"] == "narration"]


def test_narration_reports_queued_and_prefill(start: Start) -> None:
    """Between started and the first token, each with actor, target and correlation id."""
    server = start(worker_id="w-7")
    prompt = "#" * 100
    fields = {"prompt": prompt, "max_tokens": 3, "temperature": 0}
    for cached in (0, 96):
        job = server.post("/v1/jobs", fields, headers={"x-correlation-id": CORRELATION}).json()["job_id"]
        found = server.events(job)
        assert [one["type"] for one in found[:4]] == ["started", "narration", "narration", "token"]
        assert [one["action"] for one in found[1:3]] == ["queued", "reading"]
        assert found[1] == {
            "type": "narration", "actor": "w-7", "action": "queued", "target": job, "correlation_id": CORRELATION,
            "job_id": job, "human": "Accepted with a prompt of 100 tokens; no other requests are waiting.",
        }  # fmt: skip
        assert found[2].keys() == found[1].keys()
        assert (f"{cached} of them are in the cache" in found[2]["human"]) == bool(cached)
    other = server.events(server.job())
    correlation_ids = {one["correlation_id"] for one in other if one["type"] == "narration"}
    assert len(correlation_ids) == 1
    assert correlation_ids != {CORRELATION}  # its own, though it gave none


def test_narration_never_precedes_started_event(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poll may see a job in prefill whose task has not run yet."""
    run = jobs.Job.run

    async def late(self: jobs.Job) -> None:
        assert self.generation is not None
        while self.generation.request.num_cached_tokens < 0:
            await asyncio.sleep(0)
        self.poll()
        await run(self)

    monkeypatch.setattr(jobs.Job, "run", late)
    server = start()
    found = server.events(server.job(max_tokens=3))
    assert [one["type"] for one in found[:3]] == ["started", "narration", "narration"]


def test_narration_reports_preemption_and_resumption(start: Start) -> None:
    server = start({"max_batch": 1}, allow_priority=True)
    first = server.job(max_tokens=LONG)
    until(lambda: server.http.get(f"/v1/jobs/{first}").json()["state"] == "running")
    waiting = server.job(max_tokens=2)
    urgent = server.job(max_tokens=LONG, priority=-1)
    stream = server.llm.engine.scheduler
    until(lambda: [request.priority for request in stream.running] == [-1])
    with server.http.stream("GET", f"/v1/jobs/{first}/stream") as reply:
        lines = reply.iter_lines()
        while '"preempted"' not in next(lines):
            pass
        server.http.delete(f"/v1/jobs/{urgent}")
        while '"resumed"' not in next(lines):
            pass
        server.http.delete(f"/v1/jobs/{first}")
    actions = [action for action, _ in narrated(server.events(first))]
    assert actions == ["queued", "reading", "preempted", "resumed"]
    assert narrated(server.events(waiting))[0] == (
        "queued", "Accepted with a prompt of 1 tokens; no other requests are waiting.",
    )  # fmt: skip
    assert "1 other request is waiting" in narrated(server.events(urgent))[0][1]
    server.require_idle()


def test_narration_after_the_last_event_is_dropped(start: Start) -> None:
    """A narration that comes after cancellation does not follow [DONE]."""
    server = start()
    job_id = server.job(max_tokens=LONG)
    job = server.soon(_job_of(server, job_id)).result(20)
    server.http.delete(f"/v1/jobs/{job_id}")
    found = server.events(job_id)
    server.soon(_told(job)).result(20)
    assert job.narrator is None
    assert found == server.events(job_id)
    assert (found[-1]["type"], found[-1]["code"]) == ("error", "CANCELLED")


async def _job_of(server: Server, job_id: str) -> jobs.Job:
    """Return the job object of an id."""
    return next(one for one in gc.get_objects() if type(one) is jobs.Job and one.id == job_id)


async def _told(job: jobs.Job) -> None:
    job._emit({"type": "narration"})
