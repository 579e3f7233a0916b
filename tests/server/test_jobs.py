"""The job dialect: events in order and fixed once they are made, cancelling, conflicts, all problems told at once."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

import httpx
import pytest

from llm_worker_rbee.server.dialects import jobs
from tests.server.conftest import Start
from tests.server.running import SAID, Server, events, until


def test_the_events_of_a_job(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """started, then all others, then one end, then [DONE]; the tokens are the answer, counted from 0."""
    monkeypatch.setattr(jobs, "METRICS_S", 0.0)
    job = server.job(prompt=">", max_tokens=50)
    assert UUID(job.removeprefix("job-")).version == 4
    found = server.events(job)
    kinds = [one["type"] for one in found]
    assert (kinds[0], kinds[-1]) == ("started", "end")
    assert set(kinds[1:-1]) == {"token", "metrics", "narration"}
    assert found[0].keys() == {"type", "job_id", "model", "started_at", "seed"}
    assert (found[0]["job_id"], found[0]["model"]) == (job, "tiny")
    tokens = [one for one in found if one["type"] == "token"]
    assert "".join(one["t"] for one in tokens) == SAID
    at = 0
    for one in tokens:
        assert one["i"] == at
        at += one.get("n", 1)
    assert at == len(SAID)
    metrics = next(one for one in found if one["type"] == "metrics")
    assert metrics.keys() == {"type", "tokens_per_sec", "ttft_ms", "kv_cache_usage", "vram_bytes"}
    assert (found[-1]["tokens_out"], found[-1]["stop_reason"]) == (len(SAID) + 1, "EOS")
    assert found[-1].keys() == {"type", "tokens_out", "decode_time_ms", "stop_reason"}


@pytest.mark.parametrize(
    ("asked", "text", "reason", "stop"),
    [
        ({"prompt": ">", "max_tokens": 50}, SAID, "EOS", None),
        ({"prompt": ">", "max_tokens": 3}, SAID[:3], "MAX_TOKENS", None),
        ({"prompt": ">", "max_tokens": 50, "stop": ["zz", "o w"]}, "Hel", "STOP_SEQUENCE", "o w"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/inference"])
def test_a_whole_result(
    server: Server, path: str, asked: dict[str, Any], text: str, reason: str, stop: str | None
) -> None:
    result = server.post(path, {"temperature": 0, "seed": 11, "stream": False, "operation": "infer", **asked}).json()
    assert (result["text"], result["stop_reason"], result["seed"]) == (text, reason, 11)
    assert result.get("stop_sequence_matched") == stop
    assert result.keys() - {"stop_sequence_matched"} == {
        "job_id", "text", "tokens_out", "stop_reason", "decode_time_ms", "seed"
    }  # fmt: skip


def test_readers_late_again_and_together_get_the_same_bytes(server: Server) -> None:
    job = server.job(prompt="?", max_tokens=300, temperature=1)
    found: list[bytes] = []

    def read() -> None:
        found.append(httpx.get(f"{server.url}/v1/jobs/{job}/stream", timeout=20).content)

    together = [threading.Thread(target=read) for _ in range(3)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    read()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert events(found[0].decode())[-1]["tokens_out"] == 300


def test_the_seed_that_was_drawn_repeats_the_answer(server: Server) -> None:
    first = server.post("/v1/jobs", {"prompt": "?", "max_tokens": 40, "stream": False}).json()
    again = server.post("/v1/jobs", {"prompt": "?", "max_tokens": 40, "stream": False, "seed": first["seed"]}).json()
    assert again["text"] == first["text"]


def test_a_name_that_is_taken_is_a_conflict(server: Server) -> None:
    assert server.job(job_id="mine-1") == "mine-1"
    reply = server.post("/v1/jobs", {"prompt": "#", "max_tokens": 1, "job_id": "mine-1"})
    assert (reply.status_code, reply.json()["code"]) == (409, "CONFLICT")


@pytest.mark.parametrize("way", ["DELETE", "POST"])
def test_cancelling(server: Server, way: str) -> None:
    """202 while it runs and after its end; the stream ends with CANCELLED, the blocks are free."""
    job = server.job(max_tokens=60_000)

    def cancel(name: str) -> httpx.Response:
        return server.http.delete(f"/v1/jobs/{name}") if way == "DELETE" else server.post("/cancel", {"job_id": name})

    until(lambda: server.http.get(f"/v1/jobs/{job}").json()["state"] == "running")
    assert cancel(job).status_code == 202
    last = server.events(job)[-1]
    assert (last["type"], last["code"], last["retriable"]) == ("error", "CANCELLED", False)
    assert cancel(job).status_code == 202
    state = server.http.get(f"/v1/jobs/{job}").json()
    assert state["state"] == "cancelled"
    assert 0 < state["tokens_out"] < 60_000
    done = server.job(max_tokens=2)
    before = server.events(done)
    assert cancel(done).status_code == 202
    assert server.events(done) == before
    assert server.http.get(f"/v1/jobs/{done}").json()["state"] == "done"
    unknown = cancel("nobody")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "NOT_FOUND")
    server.require_idle()


@pytest.mark.parametrize("path", ["/v1/jobs/nobody", "/v1/jobs/nobody/stream", "/nothing", "/v1/models/other"])
def test_what_is_not_there(server: Server, path: str) -> None:
    reply = server.http.get(path)
    assert reply.status_code == 404
    body = reply.json()
    assert (body["error"] if "models" in path else body).keys() >= {"code", "message"}


def test_execute_streams_and_a_client_that_leaves_cancels(server: Server) -> None:
    asked = {"job_id": "run-1", "prompt": ">", "max_tokens": 20, "temperature": 0}
    found = events(server.post("/execute", asked).text)
    assert "".join(one.get("t", "") for one in found) == SAID
    assert found[-1]["type"] == "end"
    asked = {"job_id": "run-2", "prompt": "#", "max_tokens": 60_000}
    with server.http.stream("POST", "/execute", json=asked) as reply:
        next(reply.iter_bytes())
    assert server.events("run-2")[-1]["code"] == "CANCELLED"
    server.require_idle()


def test_a_job_that_is_out_of_time(server: Server) -> None:
    last = server.events(server.job(max_tokens=60_000, timeout_ms=50))[-1]
    assert (last["type"], last["code"], last["retriable"]) == ("error", "TIMEOUT", True)
    asked = {"prompt": "#", "max_tokens": 60_000, "timeout_ms": 50, "stream": False}
    reply = server.post("/v1/jobs", asked)
    assert (reply.status_code, reply.json()["code"]) == (504, "TIMEOUT")
    server.require_idle()


def test_a_job_is_forgotten_some_time_after_its_end(start: Start) -> None:
    server = start(job_ttl_s=0.0)
    job = server.job(max_tokens=2)
    until(lambda: server.http.get(f"/v1/jobs/{job}").status_code == 404)
    assert server.http.get(f"/v1/jobs/{job}/stream").json()["code"] == "NOT_FOUND"


def test_all_problems_at_once(server: Server) -> None:
    """Each with its field; what was said is repeated, but never prompts, messages or stops."""
    secret = "a-secret"
    body = {
        "prompt": 5, "messages": [secret], "stop": [secret, ""], "max_tokens": 0, "temperature": "warm", "top_p": 1.5,
        "seed": 1 << 64, "job_id": "no spaces", "zap": secret, "operation": "delete", "stream": "yes",
    }  # fmt: skip
    reply = server.post("/execute", body)
    assert reply.status_code == 400
    assert secret not in reply.text
    assert reply.json().keys() == {"errors"}
    errors = {one["field"]: one for one in reply.json()["errors"]}
    assert errors.keys() == body.keys()
    assert all({"field", "constraint", "message"} <= one.keys() <= {"field", "constraint", "message", "value"}
               for one in errors.values())  # fmt: skip
    assert {name for name, one in errors.items() if "value" not in one} == {"prompt", "messages", "stop", "zap"}
    assert errors["max_tokens"] == {
        "field": "max_tokens", "constraint": "range", "message": "max_tokens is 0: it must be 1 or more", "value": 0,
    }  # fmt: skip
    assert (errors["temperature"]["constraint"], errors["zap"]["constraint"]) == ("type", "unknown")
    missing = {one["field"] for one in server.post("/execute", {}).json()["errors"]}
    assert missing == {"max_tokens", "prompt", "job_id"}
