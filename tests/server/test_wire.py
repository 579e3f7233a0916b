"""The wire itself: readers that stop, offers of other protocols, pages from elsewhere; and what is left of a job, how
its tokens are counted and where the tokens of a text stand."""

from __future__ import annotations

import gc
import json
import logging
import socket
import weakref
from contextlib import suppress
from typing import Any

import pytest

from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.server import log
from llm_worker_rbee.server.dialects import jobs
from tests.server.conftest import Start
from tests.server.running import LIMIT_S, Server, until

JSON = "content-type: application/json\r\n"
OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def connected(server: Server, received: int | None = None) -> socket.socket:
    client = socket.socket()
    if received is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    client.settimeout(LIMIT_S)
    client.connect(("127.0.0.1", server.port))
    return client


def replies(client: socket.socket) -> bytes:
    """Everything, to the end of the connection."""
    found = b""
    while more := client.recv(65536):
        found += more
    return found


def test_a_late_reader_that_never_reads_is_cut_though_the_job_has_ended(start: Start) -> None:
    server, often = start(stall_timeout_s=0.3), 100  # what systems keep for a connection is some megabytes
    job = server.job(max_tokens=4_000)
    whole = server.http.get(f"/v1/jobs/{job}/stream").content
    before = server.num_connections
    readers = [connected(server, 2048) for _ in range(3)]
    for reader in readers:
        reader.sendall(often * f"GET /v1/jobs/{job}/stream HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    until(lambda: server.num_connections == before + 3)
    until(lambda: server.num_connections == before)
    for reader in readers:
        with suppress(ConnectionResetError):
            assert len(replies(reader)) < often * len(whole)
        reader.close()
    assert server.http.get(f"/v1/jobs/{job}/stream").content == whole


def test_a_whole_reply_that_nobody_reads_is_cut(start: Start) -> None:
    server = start(stall_timeout_s=0.3)
    lazy = connected(server, 2048)
    body = json.dumps({"text": "x" * 1_000_000})
    lazy.sendall(f"POST /tokenize HTTP/1.1\r\nhost: x\r\n{JSON}content-length: {len(body)}\r\n\r\n{body}".encode())
    until(lambda: server.num_connections == 1)
    until(lambda: server.num_connections == 0)
    lazy.close()
    server.require_alive()


@pytest.mark.parametrize("cut", [None, 30, 75])
def test_an_offer_of_another_protocol_is_not_taken_and_nothing_is_lost(server: Server, cut: int | None) -> None:
    """As curl --http2 and Java send it. Cut within the header's name it is refused: what follows is never a request."""
    body = json.dumps({"prompt": ">", "max_tokens": 20, "temperature": 0, "stream": False})
    head = f"POST /v1/jobs HTTP/1.1\r\n{OFFER}host: x\r\n{JSON}content-length: {len(body)}\r\n\r\n"
    at = len(head) if cut is None else cut
    with connected(server) as client:
        client.sendall(head[:at].encode())
        if cut is not None:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall((head[at:] + body).encode())
        said = client.recv(65536)
        assert said.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
        if cut is None:
            assert b"Helo wrd" in said
    smuggled = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with connected(server) as client:
        client.sendall(f"POST /cancel HTTP/1.1\r\n{OFFER}host: x\r\n{JSON}content-length: {len(smuggled)}\r\n".encode())
        client.sendall(b"connection: close\r\n\r\n" + smuggled)
        assert replies(client).count(b"HTTP/1.1 ") == 1
    server.require_alive()


def test_a_body_without_a_content_type_is_refused(server: Server) -> None:
    """A page from elsewhere can send one without asking first."""
    body = json.dumps({"prompt": "#", "max_tokens": 1}).encode()
    reply = server.http.post("/v1/jobs", content=body, headers={"origin": "https://evil.example"})
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (400, "content-type")


def test_clients_in_a_browser_may_send_headers_of_their_own(start: Start) -> None:
    server = start(cors_origins=("https://mine.example",))
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    headers = {"origin": "https://mine.example", "access-control-request-method": "POST",
               "access-control-request-headers": asked}  # fmt: skip
    reply = server.http.options("/v1/chat/completions", headers=headers)
    assert (reply.status_code, reply.headers["access-control-allow-headers"]) == (200, asked)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error_of_ours(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(  # type: ignore[method-assign]
        (record.levelname, getattr(record, "figures", {}).get("status", 0))
    )
    monkeypatch.setattr(log, "logger", logging.Logger("of this test"))
    log.logger.addHandler(handler)
    server = start()
    with connected(server) as client:
        client.sendall(f"POST /v1/jobs HTTP/1.1\r\nhost: x\r\n{JSON}content-length: 100\r\n\r\n{{".encode())
        until(lambda: server.num_connections == 1)
    until(lambda: told and server.num_connections == 0)
    assert told == [("INFO", 499)]


def test_the_route_of_a_job_names_all_its_methods(server: Server) -> None:
    reply = server.http.put(f"/v1/jobs/{server.job()}")
    assert (reply.status_code, set(reply.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "DELETE"})


def test_nothing_of_the_request_is_kept_with_an_ended_job(start: Start) -> None:
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
def test_events_count_every_token_also_those_that_were_held_back(server: Server, stop: list[str]) -> None:
    found = server.events(server.job(max_tokens=40, stop=stop))
    told = [one for one in found if one["type"] == "token"]
    at = 0
    for one in told:
        assert one["i"] == at
        at += one.get("n", 1)
    assert at == found[-1]["tokens_out"] == len("".join(one["t"] for one in told)) == 40  # a letter a token
    assert stop or not any("n" in one and one["n"] != len(one["t"]) for one in told)


def test_a_job_that_only_reads_tells_its_metrics(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "METRICS_S", 0.05)
    server = start({"max_step_tokens": 16})
    found = server.events(server.job(prompt="#" * 20_000, max_tokens=2))
    told = [one["type"] for one in found]
    first = told.index("token")
    assert "metrics" in told[:first]
    assert next(one for one in found if one["type"] == "metrics")["ttft_ms"] is None


@pytest.mark.parametrize("is_stream", [False, True])
def test_offsets_point_at_tokens_also_after_a_character_of_several(server: Server, is_stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "é😀>", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    if is_stream:
        reply = server.post("/v1/completions", {**body, "stream": True}).text
        lines = [json.loads(line[6:]) for line in reply.split("\n\n") if line and "[DONE]" not in line]
        choices = [line["choices"][0] for line in lines]
    else:
        choices = server.post("/v1/completions", body).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens = [name for choice in choices for name in choice["logprobs"]["tokens"]]
    offsets = [at for choice in choices for at in choice["logprobs"]["text_offset"]]
    assert text == "é😀>Helo"
    assert tokens[:6] == [f"bytes:\\x{byte:02x}" for byte in "é😀".encode()]
    assert offsets[:7] == [0, 0, 1, 1, 1, 1, 2]
    for name, at in list(zip(tokens, offsets, strict=True))[6:]:
        assert text[at : at + len(name)] == name
