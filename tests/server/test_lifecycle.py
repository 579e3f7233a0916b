"""How a worker tells of itself, and in what lines; addresses that never answer, keys, headers without end."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_worker_rbee import LLM, __version__
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.load import OnStage, Stage
from llm_worker_rbee.server import app, log, orchestrator, serve
from llm_worker_rbee.server.app import resident_bytes
from llm_worker_rbee.server.auth import find_key, is_loopback
from llm_worker_rbee.server.dialects import jobs
from llm_worker_rbee.server.middleware import MAX_HEADER_BYTES
from llm_worker_rbee.server.serve import base_url, bind
from llm_worker_rbee.tokenizer import Detokenizer
from tests.conftest import DEVICE

from .conftest import Start
from .running import CONTEXT, LIMIT_S, Server, events, step_through, until


def test_a_callback_url_that_never_answers_holds_nothing_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator, "POST_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        server = start(callback_url=url, heartbeat_url=url)
        life = server.soon(orchestrator.announce(server.worker, "http://here", 1))
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
        orchestrator.require_url(url, "--callback-url")


def test_addresses() -> None:
    assert orchestrator.require_url(None, "--x") is None
    assert orchestrator.require_url("https://[::1]:8/a?b=c", "--x") == "https://[::1]:8/a?b=c"
    assert base_url("::1", 8) == "http://[::1]:8"
    assert base_url("0.0.0.0", 8, "https") == f"https://{socket.gethostname()}:8"
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
    mark = log.correlation_id.set("c-1")
    try:
        told = json.loads(line(log.JsonFormatter(), "it\nfailed\x1b", exc_info=info))
        pretty = line(log.PrettyFormatter(), "it\nfailed\x1b", exc_info=info)
    finally:
        log.correlation_id.reset(mark)
    assert (told["message"], told["level"], told["error"]) == ("it failed\ufffd", "error", "ValueError")
    assert told["correlation_id"] == "c-1"
    assert "test_lifecycle.py" in told["where"][-1]
    assert pretty.endswith("[c-1]")
    assert "\n" not in pretty
    assert "somebody" not in json.dumps(told) + pretty
    assert "correlation_id" not in json.loads(line(log.JsonFormatter(), "alone"))


def test_each_request_is_one_line_with_its_own_correlation(
    server: Server,
) -> None:
    seen: list[tuple[str | None, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((log.correlation_id.get(), record.figures))  # type: ignore[attr-defined]

    handler, level = Handler(), log.logger.level
    log.logger.addHandler(handler)
    log.logger.setLevel(logging.INFO)
    try:
        ids = [f"0000000{i}-0000-0000-0000-000000000000" for i in range(3)]
        for i, path in zip(ids, ("/v1/models", "/health", "/no%0Athing"), strict=True):
            assert server.http.get(path, headers={"x-correlation-id": i}).headers["x-correlation-id"] == i
        with server.http.stream("GET", "/v1/loading/progress", params={"key": "secret"}) as stream:
            stream.read()
    finally:
        log.logger.removeHandler(handler)
        log.logger.setLevel(level)
    assert [(i, figures["path"], figures["status"]) for i, figures in seen[:2]] == [
        (ids[0], "/v1/models", 200), (ids[2], "/no\\nthing", 404),
    ]  # fmt: skip
    assert "secret" not in str(seen)


def test_a_job_that_breaks_is_a_line_with_the_correlation_of_who_brought_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is computed in a task of its own, after that request was answered."""

    def breaking(*_: Any) -> str:
        raise ValueError("what somebody asked")

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(log.JsonFormatter().format(record))  # type: ignore[method-assign]
    monkeypatch.setattr(Detokenizer, "push", breaking)
    log.logger.addHandler(handler)
    try:
        mark = "00000009-0000-0000-0000-000000000000"
        body = {"prompt": "#", "max_tokens": 3}
        job = server.post("/v1/jobs", body, headers={"x-correlation-id": mark}).json()["job_id"]
        assert server.events(job)[-1]["code"] == "INFERENCE_FAILED"
    finally:
        log.logger.removeHandler(handler)
    failed = [json.loads(line) for line in lines if "failed" in line]
    assert [(one["correlation_id"], one["error"]) for one in failed] == [(mark, "ValueError")]
    assert "somebody" not in str(lines)


def test_headers_have_one_limit_however_they_come(start: Start) -> None:
    """64 KiB: past it 431 with a code, also while they are still coming; without an end they are cut. Memory stays."""
    server = start()

    def answered(*parts: bytes) -> tuple[bytes, bytes]:
        with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
            for part in parts:
                client.sendall(part)
            return client.recv(12)[-3:], _read_body(client)

    begin, end = b"GET /info HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: ", b"\r\n\r\n"
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


def test_several_requests_on_one_connection_are_counted_each(start: Start) -> None:
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
        for _ in range(3):
            body = json.dumps({"text": "x" * 200_000}).encode()
            head = "POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert client.recv(12) == b"HTTP/1.1 200"
            _read_body(client)


def _read_body(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(rest) < length:
        rest += client.recv(1 << 20)
    return rest


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


PHASES = ["backend", "locate", "open", "tokenizer", "kernels", "weights"]


def test_phases_are_told_while_they_last_to_who_comes_early_and_late(load: Callable[..., LLM]) -> None:
    """Each begins at 0 and ends with its seconds, in order; weights are counted in bytes; then ready, then [DONE]."""
    is_half, go_on = threading.Event(), threading.Event()

    def slowly(on_stage: OnStage) -> LLM:
        def hold(stage: Stage) -> None:
            on_stage(stage)
            if stage.stage == "weights" and 0 < stage.done < (stage.total or 0):
                is_half.set()
                assert go_on.wait(LIMIT_S)

        return load(on_stage=hold)

    with Server(slowly, hears_stages=True) as server, ThreadPoolExecutor(1) as pool:
        early = pool.submit(httpx.get, f"{server.url}/v1/loading/progress", timeout=LIMIT_S)
        assert is_half.wait(LIMIT_S)
        with server.http.stream("GET", "/v1/loading/progress") as late:  # nothing is ready, and all so far is told
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
    assert {one["total"] for one in weights} == {server.worker.loaded.checkpoint.nbytes}
    assert len(weights) >= 4


def test_who_waits_for_the_model_hears_that_the_worker_is_stopping(load: Callable[..., LLM]) -> None:
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


def test_info_and_what_an_orchestrator_is_told_are_the_models_own(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the device and its memory, where the backend names them."""
    llm = server.worker.loaded
    told = server.http.get("/info").json()
    assert (told["model"], told["architecture"], told["backend"]) == ("tiny", "llama", DEVICE.partition(":")[0])
    assert told["device"].startswith(DEVICE)
    assert (told["quant"], told["context_length"]) == ("F32", CONTEXT)
    assert told["parameters"] * 4 == told["memory"]["weights_bytes"] == llm.checkpoint.nbytes
    assert told["memory"]["kv_cache_bytes"] == llm.capacity.bytes
    assert (told["memory"]["device_bytes"] > 0) == (DEVICE != "cpu")
    assert (told["memory"]["graph_bytes"] > 0) <= (DEVICE != "cpu")
    assert (told["memory"]["process_bytes"] or 1 << 30) > 1 << 24
    assert told["versions"]["worker"] == __version__
    more = set() if DEVICE == "cpu" else {"torch", "triton"}
    assert told["versions"].keys() == {"worker", "python", "numpy", "numba"} | more
    monkeypatch.setattr(llm.model.ops, "device", "cuda:3")
    monkeypatch.setattr(llm.model.ops, "allocated_memory", lambda: 12_345)
    monkeypatch.setattr(type(llm), "graph_bytes", 678)
    ready, beat = (
        orchestrator.ready_message(server.worker, "http://here"),
        orchestrator.heartbeat_message(server.worker, 1),
    )
    assert (ready["device"], ready["vram_bytes"], beat["worker"]["device"]) == ("cuda:3", 12_345, "cuda:3")
    monkeypatch.setattr(jobs, "METRICS_S", 0.0)
    metrics = [one for one in server.events(server.job()) if one["type"] == "metrics"]
    assert metrics[0]["vram_bytes"] == 12_345
    told = server.http.get("/info").json()
    assert (told["device"], told["memory"]["device_bytes"]) == ("cuda:3", 12_345)
    assert told["memory"]["graph_bytes"] == 678
    scraped = server.http.get("/metrics").text.splitlines()
    assert {"llm_worker_device_memory_bytes 12345.0", "llm_worker_device_graph_bytes 678.0"} <= set(scraped)


def test_a_heartbeat_comes_again_and_tells_what_changed(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not heard is a line in the log, and followed by the next all the same."""
    monkeypatch.setattr(orchestrator, "HEARTBEAT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        server = start(heartbeat_url=f"http://127.0.0.1:{listener.getsockname()[1]}/beat", worker_id="w-1")
        life = server.soon(orchestrator.announce(server.worker, "http://here", 7))
        heard = [_heard(listener, status) for status in (b"500 No", b"204 Yes")]
        server.soon(server.worker.stop()).result(LIMIT_S)
        while (last := _heard(listener, b"204 Yes"))["worker"]["status"] != "stopping":
            heard.append(last)
        life.cancel()
    assert any("heartbeat failed (HTTPError" in record.getMessage() for record in caplog.records)
    assert all(one["worker"]["status"] == "healthy" for one in heard)
    times = [datetime.fromisoformat(one["timestamp"]) for one in [*heard, last]]
    assert times == sorted(times)
    assert len(set(times)) > 1


def _heard(listener: socket.socket, status: bytes) -> Any:
    with listener.accept()[0] as client:
        data = b""
        while not data.endswith(b"}"):
            data += client.recv(65536)
        client.sendall(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    return json.loads(data.partition(b"\r\n\r\n")[2])


def test_health_is_about_forward_progress(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Healthy while steps end, stalled while one does not though there is work, healthy again afterwards."""
    server = start(stall_timeout_s=0.2)
    engine = server.worker.loaded.engine
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
    assert found.json().keys() == {"status", "model", "uptime_s", "last_step_age_s", "running", "waiting"}
    until(lambda: server.http.get("/v1/ready").json() == {"ready": True, "state": "idle"})


def test_a_worker_whose_device_is_lost_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails is one request's; a device that computes no more is everybody's, until the worker is started
    again."""
    server = start()
    engine = server.worker.loaded.engine
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


def test_a_client_that_does_not_say_what_it_wants_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, or a head without an end, or a second one; others know nothing of it."""
    monkeypatch.setattr(serve, "HEAD_TIMEOUT_S", 0.2)
    server = start()
    whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    for begun, answers in ((b"", 0), (b"GET /health HTTP/1.1\r\nhost:", 0), (whole + b"GET /he", 1)):
        with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
            client.sendall(begun)
            said = b""
            while more := client.recv(65536):
                said += more
            assert said.count(b"HTTP/1.1 200") == answers
    server.require_alive()


def test_a_body_that_does_not_come_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.2)
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
        head = b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        client.sendall(head + b'{"prompt":')
        assert client.recv(12) == b"HTTP/1.1 504"
        assert json.loads(_read_body(client))["code"] == "TIMEOUT"
    server.require_alive()
