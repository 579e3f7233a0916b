"""API key, body and header limits, correlation ids, and error bodies by dialect."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from typing import Any
from uuid import UUID

import httpx
import pytest

from tests.helpers.server import CHAT, Server
from tests.server.conftest import KEY

pytestmark = pytest.mark.usefixtures("leaves_server_healthy")

JOB, EXECUTE, COMPLETIONS, CHATS = "/v1/jobs", "/execute", "/v1/completions", "/v1/chat/completions"
SOUND: dict[str, dict[str, Any]] = {
    JOB: {"prompt": "#", "max_tokens": 2},
    EXECUTE: {"prompt": "#", "max_tokens": 2, "job_id": "bad-1"},
    COMPLETIONS: {"prompt": "#", "max_tokens": 2},
    CHATS: {"messages": CHAT, "max_tokens": 2},
}
ALL, OPENAI = tuple(SOUND), (COMPLETIONS, CHATS)


def changed(path: str, **fields: Any) -> bytes:
    return json.dumps({**SOUND[path], **fields}).encode()


@pytest.mark.parametrize("path", [*ALL, "/tokenize"])
@pytest.mark.parametrize("is_counted", [True, False], ids=["with its length", "in pieces"])
def test_body_over_limit_is_413(locked: Server, path: str, is_counted: bool) -> None:
    body = changed(COMPLETIONS, prompt="x" * 200_000)
    pieces = body if is_counted else iter([body[:90_000], body[90_000:]])
    reply = locked.http.post(path, content=pieces, headers={"content-type": "application/json"})
    error = reply.json()
    assert (reply.status_code, error.get("error", error)["code"]) == (413, "PAYLOAD_TOO_LARGE")
    locked.require_alive()


def test_header_of_megabytes_is_431(locked: Server) -> None:
    """Refused, or the connection is closed; the worker goes on."""
    with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as sent:
        try:
            sent.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"x" * (8 << 20) + b"\r\n\r\n")
            found = sent.recv(1000)
        except ConnectionError:
            found = b""
    assert not found or found.split()[1] in (b"400", b"413", b"431")
    locked.require_alive()


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "MISSING_API_KEY"),
        ({"authorization": "Bearer wrong"}, "INVALID_API_KEY"),
        ({"authorization": "Bearer"}, "INVALID_API_KEY"),
        ({"authorization": "Bearer "}, "INVALID_API_KEY"),
        ({"authorization": f"Basic {KEY}"}, "INVALID_API_KEY"),
        ({"authorization": KEY}, "INVALID_API_KEY"),
        ({"authorization": f"Bearer {KEY}x"}, "INVALID_API_KEY"),
        ({"authorization": "Bearer \xff\xfe"}, "INVALID_API_KEY"),
    ],
)
@pytest.mark.parametrize("path", [CHATS, JOB, "/v1/models", "/metrics", "/info", "/nothing", "/v1/jobs/x/stream"])
def test_api_key_missing_or_wrong_is_401(locked: Server, path: str, headers: dict[str, str], code: str) -> None:
    """Also on unknown routes, and with the right key in the query."""
    asking = HTTPConnection("127.0.0.1", locked.port, timeout=10)
    asking.request("POST" if path in ALL else "GET", f"{path}?api_key={KEY}&key={KEY}", headers=headers)
    reply = asking.getresponse()
    said = reply.read()
    asking.close()
    error = json.loads(said)
    assert (reply.status, error.get("error", error)["code"]) == (401, code)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert KEY.encode() not in said


def test_public_paths_need_no_api_key(locked: Server) -> None:
    assert httpx.get(f"{locked.url}/health").json()["status"] == "healthy"
    assert httpx.get(locked.url).headers["content-type"].startswith("text/html")


def test_every_reply_has_correlation_id(locked: Server) -> None:
    """The client's if it is a UUID, otherwise a new one; on errors too."""
    given = "123e4567-e89b-42d3-a456-426614174000"
    for path in ("/health", "/nothing", "/v1/jobs/x/stream"):
        assert locked.http.get(path, headers={"x-correlation-id": given}).headers["x-correlation-id"] == given
        made = [locked.http.get(path, headers={"x-correlation-id": "x"}).headers["x-correlation-id"] for _ in range(2)]
        assert len({UUID(one) for one in made}) == 2
