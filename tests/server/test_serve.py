"""The HTTP connection: addresses, timeouts, header limits, upgrades, clients that do not read."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress

import pytest

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.machine import resident_bytes
from llm_worker_rbee.server import orchestrator, serve
from llm_worker_rbee.server.middleware import MAX_HEADER_BYTES, is_loopback
from llm_worker_rbee.server.middleware import UUID as UUID_FORM
from llm_worker_rbee.server.serve import base_url, bind
from tests.helpers.server import LIMIT_S, Server, connected, is_decoding, read_body, until
from tests.server.conftest import KEY, Start

pytestmark = pytest.mark.usefixtures("leaves_server_healthy")


def test_connection_malformed_http_does_not_stop_server(locked: Server) -> None:
    for said in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                 b"POST /v1/jobs HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
                 b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as sent:
            sent.sendall(said)
            sent.shutdown(socket.SHUT_WR)
            found = sent.recv(1000)
        assert not found or found.split()[1][:1] == b"4", said
    locked.require_alive()


def test_urls_and_loopback_addresses() -> None:
    assert orchestrator.require_url(None, "--x") is None
    assert orchestrator.require_url("https://[::1]:8/a?b=c", "--x") == "https://[::1]:8/a?b=c"
    assert base_url("::1", 8) == "http://[::1]:8"
    assert base_url("0.0.0.0", 8, "https") == f"https://{socket.gethostname()}:8"
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "localhost.evil.com", "10.0.0.1")] == [False] * 4
    with bind("127.0.0.1", 0) as sock, pytest.raises(InvalidRequestError, match="cannot listen"):
        bind("127.0.0.1", sock.getsockname()[1])


def test_connection_headers_over_limit_are_431(start: Start) -> None:
    """Past 64 KiB 431 with a code, also while they arrive; endless ones are cut off. Memory does not grow."""
    server = start()

    def answered(*parts: bytes) -> tuple[bytes, bytes]:
        with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
            for part in parts:
                client.sendall(part)
            return client.recv(12)[-3:], read_body(client)

    begin, end = b"GET /info HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-long: ", b"\r\n\r\n"
    assert answered(begin, b"a" * (MAX_HEADER_BYTES - 100), end)[0] == b"200"
    for parts in ((b"a" * MAX_HEADER_BYTES, end), (b"a" * (4 << 20),)):  # whole, and one that goes on
        status, body = answered(begin, *parts)
        assert status == b"431"
        assert json.loads(body) == {
            "code": "PAYLOAD_TOO_LARGE", "message": "the headers are longer than the limit of 65536 bytes",
            "retriable": False,
        }  # fmt: skip
    before = resident_bytes()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
        client.sendall(begin)
        sent = 0
        try:
            while sent < 256 << 20:
                client.sendall(b"a" * 65536)
                sent += 65536
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent < 256 << 20
    if before is not None:
        assert (resident_bytes() or 0) - before < 8 << 20
    server.require_alive()


def test_connection_header_limit_applies_to_each_request(start: Start) -> None:
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
        for _ in range(3):
            body = json.dumps({"text": "x" * 200_000}).encode()
            head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert client.recv(12) == b"HTTP/1.1 200"
            read_body(client)


def test_connection_without_headers_is_closed_after_timeout(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bytes, incomplete headers, or an incomplete second request; others are not affected."""
    monkeypatch.setattr(serve, "HEAD_TIMEOUT_S", 0.2)
    server = start()
    whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for begun, answers in ((b"", 0), (b"GET /health HTTP/1.1\r\nhost:", 0), (whole + b"GET /he", 1)):
        with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
            client.sendall(begun)
            said = b""
            while more := client.recv(65536):
                said += more
            assert said.count(b"HTTP/1.1 200") == answers
    server.require_alive()


JSON = "content-type: application/json\r\n"
OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


def replies(client: socket.socket) -> bytes:
    """Return everything up to the end of the connection."""
    found = b""
    while more := client.recv(65536):
        found += more
    return found


def test_connection_unread_finished_job_is_cut_off(start: Start) -> None:
    server = start(stall_timeout_s=0.3)
    job = server.job(max_tokens=4_000)
    whole = server.http.get(f"/v1/jobs/{job}/stream").content
    often = (16 << 20) // len(whole)  # systems keep some megabytes for a connection; fast answers have fewer events
    before = server.num_connections
    readers = [connected(server, 2048) for _ in range(3)]
    for reader in readers:
        reader.sendall(often * f"GET /v1/jobs/{job}/stream HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    until(lambda: server.num_connections == before + 3)
    until(lambda: server.num_connections == before)
    for reader in readers:
        with suppress(ConnectionResetError):
            assert len(replies(reader)) < often * len(whole)
        reader.close()
    assert server.http.get(f"/v1/jobs/{job}/stream").content == whole


def test_connection_unread_whole_reply_is_cut_off(start: Start) -> None:
    server = start(stall_timeout_s=0.3)
    lazy = connected(server, 2048)
    body = json.dumps({"text": "x" * 500_000})
    lazy.sendall(
        f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    until(lambda: server.num_connections == 1)
    until(lambda: server.num_connections == 0)
    lazy.close()
    server.require_alive()


@pytest.mark.parametrize("cut", [None, 30, 75])
def test_connection_upgrade_offer_is_ignored(server: Server, cut: int | None) -> None:
    """As curl --http2 and Java send it. Split within its name it is refused: what follows is never a request."""
    body = json.dumps({"prompt": ">", "max_tokens": 20, "temperature": 0, "stream": False})
    head = f"POST /v1/jobs HTTP/1.1\r\n{OFFER}host: localhost\r\n{JSON}content-length: {len(body)}\r\n\r\n"
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
    smuggled = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(server) as client:
        client.sendall(
            f"POST /cancel HTTP/1.1\r\n{OFFER}host: localhost\r\n{JSON}content-length: {len(smuggled)}\r\n".encode()
        )
        client.sendall(b"connection: close\r\n\r\n" + smuggled)
        assert replies(client).count(b"HTTP/1.1 ") == 1
    server.require_alive()


def sent_and_ended(server: Server, path: str, **fields: object) -> socket.socket:
    """Return a client that sent a request and ended its side."""
    body, client = json.dumps(fields), connected(server)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body.encode())
    client.shutdown(socket.SHUT_WR)
    return client


def test_connection_ended_on_one_side_is_answered(server: Server) -> None:
    """The final status follows any 100 Continue; the connection ends with the reply."""
    job = {"prompt": "#", "max_tokens": 2_000, "temperature": 0}
    with sent_and_ended(server, "/v1/jobs", **job, stream=False) as client:
        head, _, body = replies(client).replace(serve.CONTINUE, b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["tokens_out"] == 2_000
    with sent_and_ended(server, "/execute", **job, job_id="half") as client:
        found = replies(client).replace(serve.CONTINUE, b"")
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    two = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2
    with connected(server) as client:
        client.sendall(two)
        client.shutdown(socket.SHUT_WR)
        assert replies(client).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(("path", "fields"), [("/v1/jobs", {"stream": False}), ("/execute", {})])
def test_connection_closed_after_its_side_ended_is_cancelled(
    start: Start, path: str, fields: dict[str, object]
) -> None:
    server = start()
    with sent_and_ended(server, path, job_id="gone", prompt="#", max_tokens=60_000, **fields):
        until(lambda: is_decoding(server))
    server.require_idle()
    assert server.http.get("/v1/jobs/gone").json()["state"] == "cancelled"


def test_connection_ended_within_a_request_is_closed(server: Server) -> None:
    for part in (
        b"GET /health HT",
        f"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 9\r\n\r\n{{".encode(),
    ):
        with connected(server) as client:
            client.sendall(part)
            client.shutdown(socket.SHUT_WR)
            assert replies(client) == b""


def test_connection_idle_is_closed_after_timeout(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.KEEP_ALIVE_S == 75  # as the documentation says
    monkeypatch.setattr(serve, "KEEP_ALIVE_S", 0.2)
    with connected(start()) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert replies(client).count(b"HTTP/1.1 200 OK") == 1


def test_connection_http_1_0_stream_is_not_chunked(server: Server) -> None:
    """HTTP/1.0 has no chunks: the connection ends the reply."""
    job = server.job(max_tokens=30)
    expected = server.http.get(f"/v1/jobs/{job}/stream").content
    for path, body in ((f"/v1/jobs/{job}/stream", expected), ("/v1/models", server.http.get("/v1/models").content)):
        with connected(server) as client:
            client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            client.shutdown(socket.SHUT_WR)  # as `nc -N` does
            head, _, found = replies(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in head.lower()
        assert (b"content-length" in head.lower()) == (path == "/v1/models")
        assert found == body


def chunked(path: str, headers: str, trailers: str, body: dict[str, object] | None = None) -> bytes:
    """Return a request in chunks that ends with trailer fields."""
    data = json.dumps(body or {"text": "abc"})
    head = f"POST {path} HTTP/1.1\r\n{JSON}{headers}transfer-encoding: chunked\r\n\r\n"
    return f"{head}{len(data):x}\r\n{data}\r\n0\r\n{trailers}\r\n".encode()


def exchange(server: Server, *parts: bytes) -> tuple[bytes, bytes]:
    """Return head and body of what a server says to these bytes, each part sent by itself."""
    with connected(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.sendall(part)
        head, _, body = replies(client).partition(b"\r\n\r\n")
    return head, body


HOST = "host: localhost\r\n"
UUID = "123e4567-e89b-42d3-a456-426614174000"


@pytest.mark.parametrize(
    ("headers", "trailers", "status"),
    [
        (HOST, f"authorization: Bearer {KEY}\r\n", b"401"),
        (HOST, f"X-API-Key: {KEY}\r\n", b"401"),
        ("", f"Host: localhost\r\nauthorization: Bearer {KEY}\r\n", b"400"),
        (f"{HOST}x-api-key: {KEY}\r\n", "Host: other.example\r\n", b"200"),
        (f"{HOST}x-api-key: {KEY}\r\n", f"x-correlation-id: {UUID}\r\n", b"200"),
        (f"{HOST}x-api-key: {KEY}\r\n", "content-type: text/plain\r\ncontent-encoding: gzip\r\n", b"200"),
        (f"{HOST}x-api-key: {KEY}\r\n", "content-length: 3\r\n", b"400"),
        (f"{HOST}x-api-key: {KEY}\r\n", "transfer-encoding: gzip\r\n", b"400"),
    ],
    ids=["authorization", "x-api-key", "host", "second-host", "id", "content-type", "length", "encoding"],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_connection_trailer_fields_are_no_headers(
    locked: Server, headers: str, trailers: str, status: bytes, is_split: bool
) -> None:
    """RFC 9110, 6.5.1: whatever comes after the body. What would change the length of the body is refused."""
    request = chunked("/tokenize", headers, trailers)
    at = request.index(b"0\r\n" + trailers.encode()) + 3 if is_split else len(request)
    with connected(locked) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(request[:at])
        client.sendall(request[at:])
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        found = replies(client)
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", found)
    assert statuses == ([status] if status == b"400" and HOST in headers else [status, b"200"])
    assert UUID.encode() not in found


def test_connection_endless_trailer_is_cut_off(start: Start) -> None:
    server = start()
    request = chunked("/tokenize", HOST, "x-long: ")[:-2]
    with connected(server) as client:
        client.sendall(request)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(b"a" * (256 << 20))
    head, _ = exchange(server, request, b"a" * (1 << 20))
    assert head.startswith(b"HTTP/1.1 431 ")
    server.require_alive()


FRAMING = [
    (b"\x16\x03\x01\x02\x00", "valid HTTP: Invalid method"),
    (b"GET / HTTP/9.9\r\n\r\n", "valid HTTP: Invalid HTTP version"),
    (b"CONNECT nowhere:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", "valid HTTP: its target is no path"),
    (f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}content-length: -5\r\n\r\n".encode(), "Content-Length"),
    (f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}content-length: 5\r\ncontent-length: 6\r\n\r\n".encode(),
     "Content-Length"),
    (f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}{JSON}transfer-encoding: chunked\r\n\r\nzz\r\n".encode(),
     "chunk size"),
    (b"GET /info HTTP/1.1\r\nhost: localhost\r\nhost: other\r\nconnection: close\r\n\r\n", "2 Host headers"),
    (b"GET /info HTTP/1.1\r\nconnection: close\r\n\r\n", "0 Host headers"),
    (b"GET /info HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
     "the headers are longer"),
]  # fmt: skip


@pytest.mark.parametrize(("request_bytes", "reason"), FRAMING, ids=map(str, range(len(FRAMING))))
def test_connection_framing_errors_are_logged_with_a_reason(
    server: Server, request_bytes: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        head, body = exchange(server, request_bytes)
    assert head.split()[1] in (b"400", b"431")
    assert reason in str(json.loads(body))
    correlation_id = head.lower().partition(b"x-correlation-id: ")[2].split(b"\r\n")[0].decode()
    lines = [(record.getMessage(), getattr(record, "figures", {})) for record in caplog.records]
    assert [one for one in lines if reason in str(one)], lines
    assert UUID_FORM.fullmatch(correlation_id)
    assert correlation_id in str(lines) or lines[0][0] == "request"  # whose id is a context variable
    assert "Invalid HTTP request received." not in caplog.text  # of the HTTP server, without a reason


def test_connection_bad_request_after_a_good_one_does_not_break_its_reply(server: Server) -> None:
    body = json.dumps({"prompt": "#", "max_tokens": 500, "temperature": 0, "stream": False})
    good = f"POST /v1/jobs HTTP/1.1\r\n{HOST}{JSON}content-length: {len(body)}\r\n\r\n{body}".encode()
    head, found = exchange(server, good + b"garbage\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(found)["tokens_out"] == 500
