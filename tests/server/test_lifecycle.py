"""How a worker tells of itself, and in what lines; addresses that never answer, keys, headers without end."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.server import lifecycle, logs
from llm_worker_rbee.server.keys import find_key, is_loopback
from llm_worker_rbee.server.run import Connection, bind, url_of

from .conftest import Start
from .running import LIMIT_S, Server, until


def test_a_callback_url_that_never_answers_holds_nothing_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "POST_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        server = start(callback_url=url, heartbeat_url=url)
        life = server.soon(lifecycle.announce(server.worker, "http://here", 1))
        silent.settimeout(LIMIT_S)
        accepted = [silent.accept()[0] for _ in range(2)]  # both go on though the first was not heard
        server.require_alive()
        assert not life.done()
        life.cancel()
        for one in accepted:
            one.close()


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://x", "http://", "http://a b", "http://x:99999", "http://x:0", "http://\u00e9"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="--callback-url"):
        lifecycle.checked_url(url, "--callback-url")


def test_addresses() -> None:
    assert lifecycle.checked_url(None, "--x") is None
    assert lifecycle.checked_url("https://[::1]:8/a?b=c", "--x") == "https://[::1]:8/a?b=c"
    assert url_of("::1", 8) == "http://[::1]:8"
    assert url_of("0.0.0.0", 8, "https") == f"https://{socket.gethostname()}:8"
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "localhost.evil.com", "10.0.0.1")] == [False] * 4
    with bind("127.0.0.1", 0) as sock, pytest.raises(InvalidRequestError, match="cannot listen"):
        bind("127.0.0.1", sock.getsockname()[1])


def test_the_key_comes_from_the_first_place_that_has_one(tmp_path: Path) -> None:
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


def line(formatter: logging.Formatter, message: str, **more: Any) -> str:
    return formatter.format(logging.LogRecord("x", logging.ERROR, "f", 1, message, (), more.pop("exc_info", None)))


def test_lines_carry_the_correlation_and_no_text_of_unforeseen_errors() -> None:
    try:
        raise ValueError("what somebody asked")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    mark = logs.correlation.set("c-1")
    try:
        told = json.loads(line(logs.JsonLines(), "it\nfailed\x1b", exc_info=info))
        pretty = line(logs.PrettyLines(), "it\nfailed\x1b", exc_info=info)
    finally:
        logs.correlation.reset(mark)
    assert (told["message"], told["level"], told["error"]) == ("it failed\ufffd", "error", "ValueError")
    assert told["correlation_id"] == "c-1"
    assert "test_lifecycle.py" in told["where"][-1]
    assert pretty.endswith("[c-1]")
    assert "\n" not in pretty
    assert "somebody" not in json.dumps(told) + pretty
    assert "correlation_id" not in json.loads(line(logs.JsonLines(), "alone"))


def test_each_request_is_one_line_with_its_own_correlation(
    server: Server,
) -> None:
    seen: list[tuple[str | None, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((logs.correlation.get(), record.figures))  # type: ignore[attr-defined]

    handler, level = Handler(), logs.log.level
    logs.log.addHandler(handler)
    logs.log.setLevel(logging.INFO)
    try:
        ids = [f"0000000{i}-0000-0000-0000-000000000000" for i in range(3)]
        for i, path in zip(ids, ("/v1/models", "/health", "/no%0Athing"), strict=True):
            assert server.http.get(path, headers={"x-correlation-id": i}).headers["x-correlation-id"] == i
        with server.http.stream("GET", "/v1/loading/progress", params={"key": "secret"}) as stream:
            stream.read()
    finally:
        logs.log.removeHandler(handler)
        logs.log.setLevel(level)
    assert [(i, figures["path"], figures["status"]) for i, figures in seen[:2]] == [
        (ids[0], "/v1/models", 200), (ids[2], "/no\\nthing", 404),
    ]  # fmt: skip
    assert "secret" not in str(seen)


def test_headers_without_end_are_cut(start: Start) -> None:
    server = start(http=Connection)
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        sent = 0
        try:
            while sent < 64 << 20:
                client.sendall(b"a" * 65536)
                sent += 65536
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert sent < 64 << 20
    server.require_alive()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:  # several requests on one connection
        for _ in range(3):
            body = json.dumps({"text": "x" * 200_000}).encode()
            head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert client.recv(12) == b"HTTP/1.1 200"
            _read_body(client)


def _read_body(client: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(rest) < length:
        rest += client.recv(1 << 20)


def test_a_worker_told_to_stop_while_it_loads_does_not_become_ready(load: Callable[..., LLM]) -> None:
    go_on = threading.Event()

    def slowly() -> LLM:
        assert go_on.wait(LIMIT_S)
        return load()

    with Server(slowly) as server:
        server.soon(server.worker.stop()).result(LIMIT_S)
        go_on.set()
        until(lambda: server.worker.is_loaded)
        assert server.http.get("/health").json()["status"] == "stopping"
        assert server.http.get("/v1/models").json()["error"]["code"] == "SHUTTING_DOWN"


def test_an_unforeseen_error_of_loading_is_a_failure_and_shows_no_path() -> None:
    def broken() -> LLM:
        raise OSError(5, "Input/output error", "/a/path")

    with Server(broken) as server:
        server.ready()
        assert server.http.get("/v1/ready").json() == {"ready": False, "state": "error"}
        assert server.http.get("/health").status_code == 503
        said = server.http.get("/v1/loading/progress").text + server.http.get("/v1/models").text
        assert "could not be loaded" in said
        assert "/a/path" not in said
