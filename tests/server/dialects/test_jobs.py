"""The job dialect: bodies, events, results, cancellation, expiry."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any
from uuid import UUID

import httpx
import pytest

from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.server.dialects import jobs
from tests.helpers.server import CHAT, SAID, Server, events, until
from tests.server.conftest import Start

JOBS, CHATS, COMPLETIONS = "/v1/jobs", "/v1/chat/completions", "/v1/completions"
# What a job's field is when it is not given (None: the model's default, or none), and the values at its ends: the last
# that is taken, the first that is not.
LIMITS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "max_tokens": (None, [1], [0]),
    "temperature": (None, [0, 2], [-0.001, 2.001]),
    "top_p": (None, [0, 1], [-0.001, 1.001]),
    "min_p": (None, [0, 1], [-0.001, 1.001]),
    "typical_p": (None, [0, 1], [-0.001, 1.001]),
    "repetition_penalty": (None, [0.001, 2], [0, 2.001]),
    "top_k": (None, [-1, 0], [-2]),
    "repeat_last_n": (None, [0], [-1]),
    "seed": (None, [-1, 0, 2**64 - 1], [-2, 2**64]),
    "stop": ((), [["x"] * 4, ["x" * 100], []], [["x"] * 5, ["x" * 101], [""]]),
    "priority": (0, [-5, 5], [0.5]),
    "timeout_ms": (None, [1], [0]),
    "stream": (True, [False], [0]),
    "operation": ("infer", ["infer"], ["train"]),
    "job_id": (None, ["aZ09_-", "a" * 64], ["", "a" * 65, "a.b"]),
}


@pytest.mark.parametrize("name", LIMITS)
def test_parse_job_defaults_and_bounds_match_contract(name: str) -> None:
    default, taken, refused = LIMITS[name]
    field = jobs.JOB[name]
    assert field.default == default
    assert [field.type.validate(name, value) for value in taken] == [None] * len(taken)
    assert all(field.type.validate(name, value) for value in refused)


def test_post_job_replies_with_stream_url(server: Server) -> None:
    reply = server.post("/v1/inference", {"prompt": "#", "max_tokens": 1, "job_id": "where-1"}).json()
    assert reply == {"job_id": "where-1", "sse_url": "/v1/jobs/where-1/stream"}
    assert server.http.get(reply["sse_url"]).headers["content-type"].startswith("text/event-stream")


def test_job_id_of_expired_job_can_be_reused(start: Start) -> None:
    server = start(job_ttl_s=0.0)
    server.job(job_id="again", max_tokens=1)
    until(lambda: server.http.get("/v1/jobs/again").status_code == 404)
    assert server.job(job_id="again", max_tokens=1) == "again"


def test_execute_with_stream_false_is_refused(server: Server) -> None:
    body = {"job_id": "whole-1", "prompt": "#", "max_tokens": 1, "stream": False}
    reply = server.post("/execute", body)
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (400, "stream")
    for path, fields in (("/v1/chat/completions", {"messages": CHAT}), (COMPLETIONS, {"prompt": "#"})):
        reply = server.post(path, {**fields, "stream_options": {"include_usage": True}})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options")
    reply = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")


def test_job_events_have_contract_order_and_fields(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """started, the others, one end, [DONE]; tokens are counted from 0 and join to the answer."""
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
    ("fields", "text", "reason", "stop"),
    [
        ({"prompt": ">", "max_tokens": 50}, SAID, "EOS", None),
        ({"prompt": ">", "max_tokens": 3}, SAID[:3], "MAX_TOKENS", None),
        ({"prompt": ">", "max_tokens": 50, "stop": ["zz", "o w"]}, "Hel", "STOP_SEQUENCE", "o w"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/inference"])
def test_post_job_without_stream_returns_whole_result(
    server: Server, path: str, fields: dict[str, Any], text: str, reason: str, stop: str | None
) -> None:
    result = server.post(path, {"temperature": 0, "seed": 11, "stream": False, "operation": "infer", **fields}).json()
    assert (result["text"], result["stop_reason"], result["seed"]) == (text, reason, 11)
    assert result.get("stop_sequence_matched") == stop
    assert result.keys() - {"stop_sequence_matched"} == {
        "job_id", "text", "tokens_out", "stop_reason", "decode_time_ms", "seed"
    }  # fmt: skip


def test_job_stream_readers_late_repeated_parallel_get_same_bytes(server: Server) -> None:
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


def test_job_reported_seed_repeats_answer(server: Server) -> None:
    first = server.post("/v1/jobs", {"prompt": "?", "max_tokens": 40, "stream": False}).json()
    again = server.post("/v1/jobs", {"prompt": "?", "max_tokens": 40, "stream": False, "seed": first["seed"]}).json()
    assert again["text"] == first["text"]


def test_job_id_in_use_is_409(server: Server) -> None:
    assert server.job(job_id="mine-1") == "mine-1"
    reply = server.post("/v1/jobs", {"prompt": "#", "max_tokens": 1, "job_id": "mine-1"})
    assert (reply.status_code, reply.json()["code"]) == (409, "CONFLICT")


@pytest.mark.parametrize("way", ["DELETE", "POST"])
def test_job_cancel_ends_stream_with_cancelled(server: Server, way: str) -> None:
    """202 while it runs and after its end; the stream ends with CANCELLED and the blocks are free."""
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
    unknown = cancel("no-such-job")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "NOT_FOUND")
    server.require_idle()


@pytest.mark.parametrize(
    "path", ["/v1/jobs/no-such-job", "/v1/jobs/no-such-job/stream", "/nothing", "/v1/models/other"]
)
def test_unknown_job_is_404(server: Server, path: str) -> None:
    reply = server.http.get(path)
    assert reply.status_code == 404
    body = reply.json()
    assert (body["error"] if "models" in path else body).keys() >= {"code", "message"}


def test_execute_disconnect_cancels_job(server: Server) -> None:
    fields = {"job_id": "run-1", "prompt": ">", "max_tokens": 20, "temperature": 0}
    found = events(server.post("/execute", fields).text)
    assert "".join(one.get("t", "") for one in found) == SAID
    assert found[-1]["type"] == "end"
    fields = {"job_id": "run-2", "prompt": "#", "max_tokens": 60_000}
    with server.http.stream("POST", "/execute", json=fields) as reply:
        next(reply.iter_bytes())
    assert server.events("run-2")[-1]["code"] == "CANCELLED"
    server.require_idle()


def test_job_timeout_ends_with_timeout_error(server: Server) -> None:
    last = server.events(server.job(max_tokens=60_000, timeout_ms=50))[-1]
    assert (last["type"], last["code"], last["retriable"]) == ("error", "TIMEOUT", True)
    fields = {"prompt": "#", "max_tokens": 60_000, "timeout_ms": 50, "stream": False}
    reply = server.post("/v1/jobs", fields)
    assert (reply.status_code, reply.json()["code"]) == (504, "TIMEOUT")
    server.require_idle()


def test_job_finished_expires_after_ttl(start: Start) -> None:
    server = start(job_ttl_s=0.0)
    job = server.job(max_tokens=2)
    until(lambda: server.http.get(f"/v1/jobs/{job}").status_code == 404)
    assert server.http.get(f"/v1/jobs/{job}/stream").json()["code"] == "NOT_FOUND"


def test_job_invalid_reports_all_issues_at_once(server: Server) -> None:
    """Each with its field; values are echoed, except prompts, messages and stop strings."""
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


LONG = 60_000


def test_finished_jobs_take_bounded_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped before their time; the last one is kept, however large."""
    monkeypatch.setattr(jobs, "MAX_FINISHED_BYTES", 20_000)
    server = start()
    ended = [
        server.post("/v1/jobs", {"prompt": "#", "max_tokens": 2, "stream": False}).json()["job_id"] for _ in "12345678"
    ]
    known = [server.http.get(f"/v1/jobs/{job}").status_code for job in ended]
    assert known == sorted(known, reverse=True)
    assert (known[0], known[-1]) == (404, 200)
    large = server.job(max_tokens=2_000)
    assert server.events(large)[-1]["tokens_out"] == 2_000
    assert server.events(large)[-1]["tokens_out"] == 2_000
    assert [server.http.get(f"/v1/jobs/{job}").status_code for job in ended] == [404] * 8
    server.require_alive()


def test_running_job_is_never_dropped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_FINISHED_BYTES", 0)
    server: Server = start(job_ttl_s=0.0)
    job = server.job(max_tokens=LONG)
    for _ in range(3):
        server.require_alive()
    assert server.http.get(f"/v1/jobs/{job}").json()["state"] in ("queued", "running")
    server.http.delete(f"/v1/jobs/{job}")
    server.require_idle()


def test_finished_job_keeps_nothing_of_its_request(start: Start) -> None:
    server = start()
    known = server.job(prompt="#" * 1_000, max_tokens=50)
    assert server.events(known)[-1]["type"] == "end"
    alive = [weakref.ref(one) for one in gc.get_objects() if type(one) is Request and one.num_prompt_tokens == 1_000]
    server.require_idle()

    def is_gone() -> bool:
        gc.collect()
        return not any(one() for one in alive)

    until(is_gone)
    assert server.events(known)[-1]["tokens_out"] == 50


@pytest.mark.parametrize("stop", [[], ["abababababX"], ["babX", "aX"]])
def test_token_events_count_held_back_tokens(server: Server, stop: list[str]) -> None:
    found = server.events(server.job(max_tokens=40, stop=stop))
    token_events = [one for one in found if one["type"] == "token"]
    at = 0
    for one in token_events:
        assert one["i"] == at
        at += one.get("n", 1)
    assert at == found[-1]["tokens_out"] == len("".join(one["t"] for one in token_events)) == 40  # a letter a token
    assert stop or not any("n" in one and one["n"] != len(one["t"]) for one in token_events)


def test_job_in_prefill_emits_metrics(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "METRICS_S", 0.05)
    server = start({"max_step_tokens": 16})
    found = server.events(server.job(prompt="#" * 20_000, max_tokens=2))
    token_events = [one["type"] for one in found]
    first = token_events.index("token")
    assert "metrics" in token_events[:first]
    assert next(one for one in found if one["type"] == "metrics")["ttft_ms"] is None
