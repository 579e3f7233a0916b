"""Clients that disconnect or do not read, in every state of a request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from llm_worker_rbee.token_engine.protocol import Abort
from llm_worker_rbee.token_engine.threaded import ThreadedEngine
from tests.helpers.server import CHAT, Server, ids, is_decoding, step_through, until
from tests.server.conftest import Start


@pytest.fixture
def gated(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, threading.Semaphore, list[int]]]:
    """A server whose steps wait for a permit, and the number of requests in each step."""
    server = start()
    may_step, steps = threading.Semaphore(0), list[int]()
    engine = server.llm.engine
    run = engine.runner.run

    def one_by_one(spans: Any) -> Any:
        steps.append(len(spans))
        may_step.acquire()
        return run(spans)

    step_through(one_by_one, engine, monkeypatch)
    yield server, may_step, steps
    may_step.release(1_000_000)
    server.require_idle()


Gated = tuple[Server, threading.Semaphore, list[int]]


def leaves(server: Server) -> Callable[[], None]:
    """Return a function that disconnects a client in mid-stream."""
    stream = server.http.stream("POST", "/execute", json={"prompt": "#", "max_tokens": 99, "job_id": "left"})
    stream.__enter__()
    return lambda: stream.__exit__(None, None, None)


def cancels(server: Server) -> Callable[[], None]:
    job = server.job(max_tokens=99)
    return lambda: server.http.delete(f"/v1/jobs/{job}").raise_for_status() and None


@pytest.mark.parametrize("begin", [cancels, leaves])
def test_disconnect_or_cancel_frees_blocks_within_one_step(
    gated: Gated, begin: Callable[[Server], Callable[[], None]]
) -> None:
    """Ended while a step runs: that step finishes, no other has the request, its blocks are free."""
    server, may_step, steps = gated
    end = begin(server)
    until(lambda: len(steps) == 1)
    may_step.release(2)
    until(lambda: len(steps) == 3)
    scheduler = server.llm.engine.scheduler
    assert len(scheduler.running) == 1
    end()
    until(lambda: _is_given_up(server))
    may_step.release()
    server.require_idle()
    assert steps == [1, 1, 1]
    assert scheduler.pool.num_free == scheduler.pool.n_blocks


def _is_given_up(server: Server) -> bool:
    """The engine's thread sees it before its next step."""
    engine = server.chat.engine
    assert isinstance(engine, ThreadedEngine)
    return any(isinstance(message, Abort) for message in list(engine._inbox))


LONG = 60_000  # max_tokens of a request that does not end during a test
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Client:
    """A client that sends a request and does not read by itself."""

    def __init__(self, server: Server, path: str, body: Any) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(20)
        self.socket.connect(("127.0.0.1", server.port))
        content = json.dumps(body).encode()
        lines = (
            f"POST {path} HTTP/1.1",
            "host: localhost",
            "content-type: application/json",
            f"content-length: {len(content)}",
        )
        self.socket.sendall("\r\n".join((*lines, "", "")).encode() + content)

    def leave(self) -> None:
        self.socket.close()


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
def test_disconnect_in_decode_frees_request(server: Server, path: str, more: dict[str, Any]) -> None:
    client = Client(server, path, {"max_tokens": LONG, **more})
    until(lambda: is_decoding(server))
    client.leave()
    server.require_idle()
    server.require_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_in_prefill_frees_request(start: Start, stream: bool) -> None:
    """The current step finishes; the rest of the prompt is not prefilled."""
    server = start({"max_step_tokens": 64})
    client = Client(server, COMPLETIONS, {"prompt": ids("x" * LONG), "max_tokens": 5, "stream": stream, "n": 2})
    scheduler = server.llm.engine.scheduler
    until(lambda: any(request.num_computed_tokens for request in list(scheduler.running)))
    requests = list(scheduler.running)
    client.leave()
    server.require_idle()
    assert all(request.num_computed_tokens < LONG for request in requests)
    server.require_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_while_queued_frees_request(start: Start, stream: bool) -> None:
    """It leaves the queue; running requests are not affected."""
    server = start({"max_batch": 1})
    running = server.job(max_tokens=LONG)
    until(lambda: is_decoding(server))
    client = Client(server, CHATS, {"messages": CHAT, "max_tokens": LONG, "n": 2, "stream": stream})
    until(lambda: len(server.llm.engine.scheduler.waiting) == 2)
    client.leave()
    until(lambda: not server.llm.engine.scheduler.waiting and server.chat.num_unstarted == 0)
    assert server.http.get(f"/v1/jobs/{running}").json()["state"] == "running"
    server.http.delete(f"/v1/jobs/{running}")
    server.require_idle()


def test_stream_unread_is_cut_off(start: Start) -> None:
    """Others are answered meanwhile; after the stall timeout it is ended and its blocks are free."""
    server = start(stall_timeout_s=0.5)
    body = {"messages": CHAT, "max_tokens": LONG, "stream": True, "logprobs": True, "top_logprobs": 20}
    client = Client(server, CHATS, body)
    until(lambda: is_decoding(server))
    (request,) = server.llm.engine.scheduler.running
    server.require_alive()
    server.require_idle()
    assert request.num_tokens < LONG
    client.leave()


def test_job_with_unread_stream_finishes(start: Start) -> None:
    """Its events are kept; only the reader is cut off."""
    server = start(stall_timeout_s=0.3)
    job = server.job(max_tokens=5_000)
    lazy = socket.create_connection(("127.0.0.1", server.port))
    lazy.sendall(f"GET /v1/jobs/{job}/stream HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    found = server.events(job)
    assert (found[-1]["type"], found[-1]["tokens_out"]) == ("end", 5_000)
    lazy.close()


def test_disconnects_of_200_clients_leave_server_idle(start: Start) -> None:
    """Each requests 4,000 tokens and disconnects after half a second; then a normal request is answered."""
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
