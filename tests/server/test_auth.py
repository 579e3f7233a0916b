"""Where the API key comes from and when one is required; the hosts of a worker without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.server.settings import ServerSettings, find_key
from tests.helpers.server import Server, connected, read_body
from tests.server.conftest import KEY, Start

pytestmark = pytest.mark.usefixtures("leaves_server_healthy")


@pytest.mark.parametrize("key", ["", "  "])
def test_settings_empty_api_key_raises(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        ServerSettings(model_ref="x", api_key=key)


def test_find_key_returns_first_source(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("one\n")
    both = {"LLM_WORKER_API_KEY": "one", "LLORCH_API_TOKEN": "one"}
    assert find_key(None, {}) is None
    for given, env, shell in ((file, both, "cat"), (None, both, "$LLM_"), (None, {"LLORCH_API_TOKEN": "one"}, "$LLO")):
        key = find_key(given, env)
        assert key is not None
        assert key.value == "one"
        assert shell in key.shell
    with pytest.raises(InvalidRequestError, match="hold different keys"):
        find_key(file, {"LLORCH_API_TOKEN": "two"})
    file.write_text("\n")
    with pytest.raises(InvalidRequestError, match="is empty"):
        find_key(file, both)


def get(server: Server, *lines: str, version: str = "1.1") -> tuple[int, Any]:
    """Return status and body of GET /v1/models with exactly these headers."""
    with connected(server) as client:
        client.sendall("\r\n".join([f"GET /v1/models HTTP/{version}", *lines, "", ""]).encode())
        status = int(client.recv(12)[-3:])
        return status, json.loads(read_body(client))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "localhost.",
        "localhost.:80",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.9.8.7",
        "[::1]:8080",
    ],
)
def test_host_loopback_names_are_accepted_without_key(server: Server, host: str) -> None:
    assert get(server, f"Host: {host}")[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]",
     "localhost:80:80", "localhost/", "user@localhost", "localhost..", "[localhost]", "2130706433", ""],
)  # fmt: skip
def test_host_of_another_name_is_403_without_key(server: Server, host: str) -> None:
    """A page whose name resolves to 127.0.0.1 sends that name."""
    status, body = get(server, f"Host: {host}")
    assert (status, body["error"]["code"]) == (403, "HOST_NOT_ALLOWED")
    assert "--allowed-host" in body["error"]["message"]


def test_host_missing_or_repeated_is_400(server: Server, locked: Server) -> None:
    for running in (server, locked):
        for lines in ((), ("Host: localhost", "Host: evil.example")):
            status, body = get(running, *lines)
            assert (status, body["error"]["param"]) == (400, "host")
    assert get(server, version="1.0")[0] == 200  # which has no Host, and is sent by no browser


def test_host_allowed_and_advertised_names_are_accepted(start: Start) -> None:
    server = start(allowed_hosts=("Worker.Example", "[fd00::1]"), advertise_url="http://proxy.example:9/x")
    for host in ("worker.example", "WORKER.example.:8080", "[FD00::1]:8080", "proxy.example", "localhost"):
        assert get(server, f"Host: {host}")[0] == 200, host
    assert get(server, "Host: evil.example")[0] == 403
    assert get(start(allowed_hosts=("*",)), "Host: evil.example")[0] == 200


def test_host_is_not_checked_with_key(locked: Server) -> None:
    assert get(locked, "Host: any.example", f"Authorization: Bearer {KEY}")[0] == 200
