"""Callback and heartbeat."""

from __future__ import annotations

import json
import logging
import socket
from datetime import datetime
from typing import Any

import msgspec
import pytest

from llm_worker_rbee import __version__
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.server import orchestrator
from llm_worker_rbee.server.dialects import jobs
from tests.conftest import DEVICE
from tests.helpers.server import CONTEXT, LIMIT_S, Server
from tests.server.conftest import Start


def test_callback_unanswered_blocks_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_messages_of_a_callback_that_does_not_answer_are_bounded(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    front = start(callback_url="http://127.0.0.1:9/").worker
    caplog.set_level(logging.WARNING, "llm_worker_rbee.server")
    for number in range(front.messages.maxsize + 3):
        front.report({"number": number})
    assert front.messages.qsize() == front.messages.maxsize
    assert front.messages.get_nowait()["number"] == 3
    assert [record.message for record in caplog.records if "oldest" in record.message] == [
        "the callback URL does not answer: its oldest messages are dropped"
    ]


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://x", "http://", "http://a b", "http://x:99999", "http://x:0", "http://\u00e9"]
)
def test_require_url_invalid_raises(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="--callback-url"):
        orchestrator.require_url(url, "--callback-url")


def test_info_and_messages_match_the_model(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device and memory too, where the backend reports them."""
    llm = server.llm
    info = server.http.get("/info").json()
    assert (info["model"], info["architecture"], info["backend"]) == ("tiny", "llama", DEVICE.partition(":")[0])
    assert info["device"].startswith(DEVICE)
    assert (info["quant"], info["context_length"]) == ("F32", CONTEXT)
    assert info["parameters"] * 4 == info["memory"]["weights_bytes"] == llm.checkpoint.nbytes
    assert info["memory"]["kv_cache_bytes"] == llm.capacity.bytes
    assert (info["memory"]["device_bytes"] > 0) == (DEVICE != "cpu")
    assert (info["memory"]["graph_bytes"] > 0) <= (DEVICE != "cpu")
    assert (info["memory"]["process_bytes"] or 1 << 30) > 1 << 24
    config = llm.engine.config
    assert info["limits"] == {
        "max_batch": config.max_batch, "max_step_tokens": config.max_step_tokens, "max_queue": 256,
        "max_queued_tokens": 262_144, "target_itl_ms": 100.0,
    }  # fmt: skip
    assert info["versions"]["worker"] == __version__
    more = set() if DEVICE == "cpu" else {"torch", "triton"}
    assert info["versions"].keys() == {"worker", "python", "numpy", "numba"} | more
    engine = server.chat.engine
    monkeypatch.setattr(engine, "info", msgspec.structs.replace(engine.info, device="cuda:3"))
    monkeypatch.setattr(llm.model.ops, "allocated_memory", lambda: 12_345)
    monkeypatch.setattr(llm.model.fused, "graph_bytes", 678)
    ready, beat = (
        orchestrator.ready_message(server.worker, "http://here"),
        orchestrator.heartbeat_message(server.worker, 1),
    )
    assert (ready["device"], ready["vram_bytes"], beat["worker"]["device"]) == ("cuda:3", 12_345, "cuda:3")
    monkeypatch.setattr(jobs, "METRICS_S", 0.0)
    metrics = [one for one in server.events(server.job()) if one["type"] == "metrics"]
    assert metrics[0]["vram_bytes"] == 12_345
    info = server.http.get("/info").json()
    assert (info["device"], info["memory"]["device_bytes"]) == ("cuda:3", 12_345)
    assert info["memory"]["graph_bytes"] == 678
    scraped = server.http.get("/metrics").text.splitlines()
    assert {"llm_worker_device_memory_bytes 12345.0", "llm_worker_device_graph_bytes 678.0"} <= set(scraped)


def test_heartbeat_repeats_after_failure_with_current_status(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed heartbeat is logged and followed by the next."""
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
