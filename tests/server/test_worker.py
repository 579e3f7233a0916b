"""Loading, health, failures and drain of a worker."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.errors import ModelNotFoundError
from llm_worker_rbee.progress import OnStage, Stage
from llm_worker_rbee.sampling_params import NEUTRAL_SAMPLING, SamplingDefaults
from llm_worker_rbee.server.dialects import jobs
from llm_worker_rbee.tokenizer import Detokenizer
from tests.conftest import DEVICE
from tests.helpers.server import CHAT, LIMIT_S, Server, events, is_decoding, step_through, until
from tests.server.conftest import Start

LONG = 60_000  # max_tokens of a request that does not end during a test
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_step_failure_ends_its_batch_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end with INFERENCE_FAILED in their dialect, without internals; the next request is answered."""
    engine = server.llm.engine
    run, is_armed, has_broken = engine.runner.run, threading.Event(), threading.Event()

    def breaking(spans: Any) -> Any:
        if is_armed.is_set() and len(spans) == 4:
            is_armed.clear()
            has_broken.set()
            raise ValueError("/a/path of ours")
        return run(spans)

    step_through(breaking, engine, monkeypatch)
    is_armed.set()
    bodies: list[Callable[[], httpx.Response]] = [
        lambda: server.post("/v1/jobs", {"prompt": "#", "max_tokens": LONG, "stream": False}),
        lambda: server.post("/execute", {"prompt": "#", "max_tokens": LONG, "job_id": "breaks"}),
        lambda: server.post(CHATS, {"messages": CHAT, "max_tokens": LONG}),
        lambda: server.post(CHATS, {"messages": CHAT, "max_tokens": LONG, "stream": True}),
    ]
    with ThreadPoolExecutor(4) as pool:
        job, stream, chat, chunks = (task.result() for task in [pool.submit(one) for one in bodies])
    assert has_broken.is_set()
    assert (job.status_code, job.json()["code"]) == (500, "INFERENCE_FAILED")
    assert events(stream.text)[-1]["code"] == "INFERENCE_FAILED"
    assert (chat.status_code, chat.json()["error"]["code"]) == (500, "INFERENCE_FAILED")
    assert (chunks.status_code, events(chunks.text)[-1]["error"]["code"]) == (200, "INFERENCE_FAILED")
    assert not any("/a/path" in one.text or "Traceback" in one.text for one in (job, stream, chat, chunks))
    server.require_idle()
    server.require_alive()


NEUTRAL_FIELDS = {
    "temperature": 1, "top_k": -1, "top_p": 1, "min_p": 0, "typical_p": 1, "repetition_penalty": 1,
    "repeat_last_n": 128,
}  # fmt: skip


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, "/v1/jobs", "/execute"])
def test_fields_that_are_not_sent_have_the_defaults_of_the_model(
    start: Start, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A null equals an absent field; a value that is sent wins, also a neutral one. `/info` reports the defaults."""
    server = start()
    llm, seen = server.chat.loaded, []
    stated = {**NEUTRAL_SAMPLING, "temperature": 0.3, "top_k": 5, "repetition_penalty": 1.1}
    sources = dict.fromkeys(stated, "GGUF metadata")
    monkeypatch.setattr(llm, "sampling_defaults", SamplingDefaults(stated, sources, []))
    add = llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda request: (seen.append(request.params), add(request)))
    body = {"messages": CHAT} if path == CHATS else {"prompt": "#"}
    bodies: list[dict[str, Any]] = [{}, dict.fromkeys(NEUTRAL_FIELDS), NEUTRAL_FIELDS, {"temperature": 0}]
    for i, fields in enumerate(bodies):
        name = {"job_id": f"job-{i}"} if path == "/execute" else {}
        assert server.post(path, {**body, **fields, **name, "max_tokens": 1}).status_code == 200
    until(lambda: len(seen) == len(bodies))
    found = [{name: getattr(params, name) for name in NEUTRAL_SAMPLING} for params in seen]
    assert found == [stated, stated, NEUTRAL_SAMPLING, {**stated, "temperature": 0}]
    info = server.http.get("/info").json()["sampling_defaults"]
    assert info == {name: {"value": value, "source": "GGUF metadata"} for name, value in stated.items()}


def test_kv_cache_exhausted_preempts_and_finishes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten requests in blocks for four: some are preempted, all finish with the tokens that each gives alone."""
    server = start({"kv_memory": 1 << 15, "max_batch": 10})
    longest = server.llm.max_context // 4
    bodies = [{"prompt": f"{i}?", "max_tokens": longest, "seed": i, "stream": False} for i in range(10)]
    alone = [server.post("/v1/jobs", one).json()["text"] for one in bodies]
    engine, all_are_in = server.llm.engine, threading.Event()
    run = engine.runner.run
    step_through(lambda spans: all_are_in.wait() and run(spans), engine, monkeypatch)
    with ThreadPoolExecutor(10) as pool:
        together = [pool.submit(server.post, "/v1/jobs", one) for one in bodies]
        until(lambda: server.chat.num_open == 10)
        all_are_in.set()
        assert [one.result().json()["text"] for one in together] == alone
    assert server.llm.engine.scheduler.stats.num_preemptions > 0
    server.require_idle()


def test_model_file_deleted_after_loading_serves_on(model_file: Path, tmp_path: Path) -> None:
    """Truncated, then removed: it is not read after loading."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model_file.read_bytes())
    with Server(lambda: LLM(copy, device=DEVICE, kv_memory=1 << 20)) as server:
        server.ready()
        with copy.open("r+b") as file:
            file.truncate(0)
        server.require_alive()
        copy.unlink()
        server.require_alive()
        assert server.post(CHATS, {"messages": CHAT, "max_tokens": 2}).status_code == 200
        assert server.http.get("/info").status_code == 200


def test_system_clock_set_back_does_not_affect_timeouts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a day, while a request runs: deadlines, job expiry, health and uptime are not affected."""
    server, forgetful = start(stall_timeout_s=30.0), start(job_ttl_s=0.0)
    running = server.job(max_tokens=LONG, timeout_ms=60_000)
    until(lambda: is_decoding(server))
    uptime = server.http.get("/health").json()["uptime_s"]
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 86_400)
    assert server.events(server.job(max_tokens=LONG, timeout_ms=50))[-1]["code"] == "TIMEOUT"
    assert server.http.get(f"/v1/jobs/{running}").json()["state"] == "running"
    health = server.http.get("/health").json()
    assert (health["status"], health["uptime_s"] > uptime, health["last_step_age_s"] < 30) == ("healthy", True, True)
    ended = server.job(max_tokens=2)
    assert server.events(ended) == server.events(ended)
    forgotten = forgetful.job(max_tokens=1)
    until(lambda: forgetful.http.get(f"/v1/jobs/{forgotten}").status_code == 404)
    server.http.delete(f"/v1/jobs/{running}")
    server.require_idle()


def test_unexpected_error_reply_shows_no_internals(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug while detokenizing: an error in the shape of the dialect, and no hang."""

    def breaking(*_: Any) -> str:
        raise ValueError("/a/path of ours")

    monkeypatch.setattr(Detokenizer, "push", breaking)
    bodies = {"messages": CHAT, "max_tokens": 5, "n": 2}
    whole, chunks = (server.post(CHATS, {**bodies, "stream": stream}, timeout=10) for stream in (False, True))
    job = server.events(server.job())
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "INFERENCE_FAILED")
    assert "INFERENCE_FAILED" in chunks.text
    assert job[-1]["code"] == "INFERENCE_FAILED"
    assert "/a/path" not in whole.text + chunks.text + str(job)
    monkeypatch.undo()
    server.require_idle()
    server.require_alive()


def test_stop_lets_running_requests_finish(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """While draining new requests are refused, health is stopping, and running requests finish."""
    monkeypatch.setattr(jobs, "METRICS_S", 0.0)
    server = start(shutdown_timeout_s=20)
    job = server.job(max_tokens=1_500)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(server.events, job)
        whole = pool.submit(server.post, COMPLETIONS, {"prompt": "#", "max_tokens": 1_500, "logprobs": 1})
        until(lambda: server.chat.num_open == 2)
        stopped = server.soon(server.worker.stop())
        until(lambda: server.worker.state == "stopping")
        refused = [server.post(CHATS, {"messages": CHAT}), server.post("/v1/jobs", {"prompt": "#", "max_tokens": 1})]
        assert [one.status_code for one in refused] == [503, 503]
        assert [refused[0].json()["error"]["code"], refused[1].json()["code"]] == ["SHUTTING_DOWN"] * 2
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "stopping")
        last = reading.result()[-1]
        assert (last["type"], last["tokens_out"]) == ("end", 1_500)
        assert whole.result().json()["usage"]["completion_tokens"] == 1_500
        stopped.result(20)


def test_stop_after_timeout_ends_requests_with_error(start: Start) -> None:
    server = start(shutdown_timeout_s=0.2)
    with ThreadPoolExecutor(3) as pool:
        job = pool.submit(server.post, "/execute", {"prompt": "#", "max_tokens": LONG, "job_id": "late"})
        chat = pool.submit(server.post, CHATS, {"messages": CHAT, "max_tokens": LONG, "stream": True})
        whole = pool.submit(server.post, CHATS, {"messages": CHAT, "max_tokens": LONG})
        until(lambda: server.chat.num_open == 3 and server.chat.num_unstarted == 0)
        server.soon(server.worker.stop()).result(20)
        last = events(job.result().text)[-1]
        assert (last["type"], last["code"], last["retriable"]) == ("error", "SHUTTING_DOWN", True)
        assert events(chat.result().text)[-1]["error"]["code"] == "SHUTTING_DOWN"
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "SHUTTING_DOWN")


def test_stop_waits_for_requests_that_wait_for_a_load(start: Start) -> None:
    """Also where no model is busy."""
    server = start(shutdown_timeout_s=LIMIT_S)
    (member,) = server.worker.pool.members

    async def stop() -> bool:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.waiters.add(waiting)
        stopped = asyncio.ensure_future(server.worker.stop())
        await asyncio.sleep(0.1)
        was_done = stopped.done()
        member.waiters.remove(waiting)
        await stopped
        return was_done

    assert not server.soon(stop()).result(LIMIT_S)


def test_name_of_an_adapter_is_unknown_only_once_the_model_is_loaded(load: Callable[..., LLM], tmp_path: Path) -> None:
    """Until then it may be one: 503, so that a client or a batch tries again. One that is gone is never the base."""
    may_load = threading.Event()

    def slowly() -> LLM:
        assert may_load.wait(LIMIT_S)
        return load()

    with Server(slowly, lora_dir=tmp_path) as server:
        try:
            reply = server.post(COMPLETIONS, {"prompt": "#", "model": "mine"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "MODEL_LOADING")
        finally:
            may_load.set()
        assert server.ready().post(COMPLETIONS, {"prompt": "#", "model": "mine"}).status_code == 404
        with pytest.raises(ModelNotFoundError, match="'mine' any more"):
            server.chat.loras.uses_of("mine", None)
        assert [server.chat.loras.uses_of(name, None) for name in (None, "tiny", "tiny:latest")] == [[]] * 3


def test_stop_while_loading_never_becomes_ready(load: Callable[..., LLM]) -> None:
    go_on = threading.Event()

    def slowly() -> LLM:
        assert go_on.wait(LIMIT_S)
        return load()

    with Server(slowly) as server:
        server.soon(server.worker.stop()).result(LIMIT_S)
        go_on.set()
        until(lambda: server._loaded)
        assert server.http.get("/health").json()["status"] == "stopping"
        assert server.http.get("/v1/models").json()["error"]["code"] == "SHUTTING_DOWN"


def test_loading_failure_shows_no_path() -> None:
    def broken() -> LLM:
        raise OSError(5, "Input/output error", "/a/path")

    with Server(broken) as server:
        server.ready()
        assert server.http.get("/v1/ready").json() == {"ready": False, "state": "error"}
        assert server.http.get("/health").status_code == 503
        said = server.http.get("/v1/loading/progress").text + server.http.get("/v1/models").text
        assert "could not be loaded" in said
        assert "/a/path" not in said


PHASES = ["backend", "locate", "open", "tokenizer", "kernels", "weights"]


def test_loading_progress_is_streamed_to_early_and_late_clients(load: Callable[..., LLM]) -> None:
    """Each stage starts at 0 and ends with its seconds, in order; weights in bytes; then ready, then [DONE]."""
    is_half, go_on = threading.Event(), threading.Event()

    def slowly(on_stage: OnStage) -> LLM:
        def hold(stage: Stage) -> None:
            on_stage(stage)
            if stage.stage == "weights" and 0 < stage.done < (stage.total or 0):
                is_half.set()
                assert go_on.wait(LIMIT_S)

        return load(on_stage=hold)

    with Server(slowly, takes_on_stage=True) as server, ThreadPoolExecutor(1) as pool:
        early = pool.submit(httpx.get, f"{server.url}/v1/loading/progress", timeout=LIMIT_S)
        assert is_half.wait(LIMIT_S)
        with server.http.stream("GET", "/v1/loading/progress") as late:  # nothing is ready; all events so far are sent
            lines = late.iter_lines()
            half = next(line for line in lines if '"weights"' in line and '"done":0,' not in line)
            assert server.http.get("/v1/ready").json()["state"] == "loading"
            go_on.set()
            list(lines)
        texts = {early.result().text, server.http.get("/v1/loading/progress").text}
    assert len(texts) == 1
    found = events(texts.pop())
    assert json.loads(half[6:]) in found
    assert found[-1] == {"stage": "ready"}
    assert all(one.keys() == {"stage", "done", "total", "seconds"} for one in found[:-1])
    stages = [one["stage"] for one in found[:-1]]
    assert list(dict.fromkeys(stages)) == PHASES
    assert stages == sorted(stages, key=PHASES.index)
    for phase in PHASES:
        of_it = [one for one in found if one["stage"] == phase]
        assert of_it[0] == {"stage": phase, "done": 0, "total": of_it[0]["total"], "seconds": 0.0}
        assert of_it[-1]["done"] == of_it[-1]["total"] > 0
        assert of_it[-1]["seconds"] > 0
        assert [one["done"] for one in of_it] == sorted(one["done"] for one in of_it)
        assert len(of_it) <= 13
    weights = [one for one in found if one["stage"] == "weights"]
    assert {one["total"] for one in weights} == {server.llm.checkpoint.nbytes}
    assert len(weights) >= 4


def test_loading_progress_ends_with_stopping(load: Callable[..., LLM]) -> None:
    go_on = threading.Event()

    def slowly() -> LLM:
        assert go_on.wait(LIMIT_S)
        return load()

    with Server(slowly) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.get, f"{server.url}/v1/loading/progress", timeout=LIMIT_S)
        until(lambda: server.http.get("/health").json()["status"] == "loading")
        server.soon(server.worker.stop()).result(LIMIT_S)
        assert events(waiting.result().text) == [{"stage": "stopping"}]
        go_on.set()


def test_health_without_steps_is_stalled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Healthy while steps finish, stalled while one does not and there is work, healthy again afterwards."""
    server = start(stall_timeout_s=0.2)
    engine = server.llm.engine
    run, go_on = engine.runner.run, threading.Event()

    def held(spans: Any) -> Any:
        assert go_on.wait(LIMIT_S)
        return run(spans)

    step_through(held, engine, monkeypatch)
    assert server.http.get("/health").json()["status"] == "healthy"
    job = server.job(max_tokens=2)
    until(lambda: server.http.get("/health").json()["status"] == "stalled")
    found = server.http.get("/health")
    assert (found.status_code, found.json()["model"], found.json()["running"]) == (503, "tiny", 1)
    assert found.json()["last_step_age_s"] > 0.2
    assert server.http.get("/v1/ready").json() == {"ready": True, "state": "busy"}
    go_on.set()
    assert server.events(job)[-1]["type"] == "end"
    until(lambda: server.http.get("/health").json()["status"] == "healthy")
    found = server.http.get("/health")
    assert (found.status_code, found.json()["last_step_age_s"]) == (200, 0.0)
    assert found.json().keys() == {"status", "model", "uptime_s", "last_step_age_s", "running", "waiting", "pooling"}
    until(lambda: server.http.get("/v1/ready").json() == {"ready": True, "state": "idle"})


def test_health_after_device_failure_is_failed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step ends its requests only; a failed device makes the worker unhealthy until it is restarted."""
    server = start()
    engine = server.llm.engine
    lost: list[bool] = []

    def broken(_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    step_through(broken, engine, monkeypatch)
    monkeypatch.setattr(engine.model.ops, "has_failed", lambda: bool(lost))
    assert server.events(server.job(max_tokens=2))[-1]["type"] == "error"
    assert server.http.get("/health").json()["status"] == "healthy"
    lost.append(True)
    assert server.events(server.job(max_tokens=2))[-1]["type"] == "error"
    found = server.http.get("/health")
    assert (found.status_code, found.json()["status"]) == (503, "failed")
