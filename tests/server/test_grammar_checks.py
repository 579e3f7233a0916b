"""Hostile grammars over HTTP: none ends the server, none holds up a request without one, and their queue is bounded."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_worker_rbee.server import offload
from llm_worker_rbee.structured_outputs.grammar_check import Verdict
from tests.helpers.server import Server, until
from tests.server.conftest import Start

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"'
LONG_CHAIN: dict[str, Any] = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)},
}
LONG_CHAIN["$defs"]["d3000"] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -1e31, "maximum": -1e30}},
}
SLOW = {"type": "object", "properties": {f"p{i}": {"type": "integer", "multipleOf": 99_990 + i} for i in range(50)}}
TOOL = {"type": "function", "name": "f", "strict": True, "parameters": LONG_CHAIN}
FORMAT = {"type": "json_schema", "schema": LONG_CHAIN}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": LONG_CHAIN}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {  # by the field that the error names
    "response_format": (CHATS, {"messages": [USER], "response_format": RESPONSE_FORMAT}),
    "grammar": (CHATS, {"messages": [USER], "grammar": CHAIN}),
    "structured_outputs": ("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": CHAIN}}),
    "output_config.format": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [USER], "output_config": {"format": FORMAT}},
    ),
    "format": ("/api/chat", {"messages": [USER], "format": LONG_CHAIN, "stream": False}),
    "text.format": ("/v1/responses", {"input": "a", "text": {"format": {**FORMAT, "name": "n"}}}),
    "tools[0].parameters (f)": ("/v1/responses", {"input": "a", "tools": [TOOL]}),
    "structured_outputs.json": (
        "/v1/jobs",
        {"prompt": "a", "max_tokens": 9, "structured_outputs": {"json": LONG_CHAIN}},
    ),
}


@pytest.mark.parametrize("field", BODIES)
def test_grammar_that_crashes_llguidance_is_400_in_every_dialect(server: Server, field: str) -> None:
    path, body = BODIES[field]
    for _ in range(2):  # checked, then remembered
        reply = server.post(path, {"model": "tiny", **body} if path.startswith(("/v1/m", "/api")) else body)
        assert reply.status_code == 400, reply.text
        assert field in reply.text
        assert not re.search(r"recursion|at \d+\(\d+\)|SIG|llguidance", reply.text), reply.text
    server.require_alive()


@pytest.mark.parametrize("path", [CHATS, "/v1/responses", "/api/chat", "/v1/messages"])
def test_tool_schema_that_is_nested_too_deeply_is_named(server: Server, path: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    tool: dict[str, Any] = {"name": "f", "parameters": schema}
    if path == "/v1/messages":
        tool = {"name": "f", "input_schema": schema}
    elif path != "/v1/responses":
        tool = {"type": "function", "function": tool}
    else:
        tool["type"] = "function"
    prompt = {"input": "a"} if path == "/v1/responses" else {"messages": [USER]}
    reply = server.post(path, {"model": "tiny", "max_tokens": 1, "tools": [tool], **prompt})
    assert reply.status_code == 400
    assert re.search(r"tools\[0\].* 60\d deep: at most 100000, 100 deep", reply.text), reply.text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex cannot be used"),
        ({"structured_outputs": {"regex": "\\"}}, "structured_outputs.regex ends in a backslash"),
        ({"grammar": "start: [", "text": {"format": {"type": "text"}}}, "grammar cannot be used"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}},
            "text.format cannot",
        ),
    ],
)
def test_responses_name_the_field_that_was_sent(server: Server, fields: dict[str, Any], field: str) -> None:
    reply = server.post("/v1/responses", {"input": "a", **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(field)


def hostile(number: int) -> dict[str, Any]:
    schema = {**SLOW, "title": f"number {number}"}
    return {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }


def test_chats_do_not_wait_for_slow_checks_whose_queue_is_bounded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks are stopped in the middle; beyond their bound there is 429, and a chat without a grammar is answered."""
    server = start()
    checker, may_go, checked = server.chat.loaded.grammar_checker, threading.Event(), list[bytes]()

    def wait(request: bytes) -> Verdict:
        checked.append(request)
        may_go.wait()
        return Verdict("", "it takes too long")

    monkeypatch.setattr(checker, "_try", wait)
    with ThreadPoolExecutor(offload.MAX_QUEUED_CHECKS + 4) as clients:
        replies = [clients.submit(server.post, CHATS, hostile(i)) for i in range(offload.MAX_QUEUED_CHECKS)]
        same = [clients.submit(server.post, CHATS, hostile(0)) for _ in range(3)]
        until(lambda: server.worker.offload._checks._num_bytes == offload.MAX_QUEUED_CHECKS * offload.MIN_COUNTED_BYTES)
        refused = server.post(CHATS, hostile(-1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "QUEUE_FULL")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.post(CHATS, {"messages": [USER], "max_tokens": 2}).status_code == 200
        tools = [{"type": "function", "function": {"name": "f", "parameters": SLOW}}]
        assert server.post(CHATS, {"messages": [USER], "max_tokens": 2, "tools": tools}).status_code == 200
        may_go.set()
        assert {reply.result().status_code for reply in (*replies, *same)} == {400}
    assert len(checked) == len(set(checked)) == offload.MAX_QUEUED_CHECKS  # the same grammar is checked once
    server.require_alive()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_killed_check_is_retried_then_503(start: Start) -> None:
    server = start()
    with ThreadPoolExecutor(1) as client:
        reply = client.submit(server.post, CHATS, hostile(77))
        while not reply.done():
            kill_checks()
        response: httpx.Response = reply.result()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SERVICE_UNAVAILABLE")
    server.require_alive()


def kill_checks() -> None:
    """Kill the processes of this one that check grammars."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_check = b"grammar_process" in (path / "cmdline").read_bytes()
            if is_check and f"PPid:\t{os.getpid()}\n" in (path / "status").read_text():
                os.kill(int(path.name), signal.SIGKILL)


def test_check_whose_clients_have_gone_leaves_nothing_behind(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    with pytest.raises(httpx.ReadTimeout):
        server.post(CHATS, hostile(5), timeout=0.2)
    until(lambda: not server.chat.encoder._checks)
    server.require_idle()
    gc.collect()  # a task whose exception is not retrieved is logged when it is collected
    assert not caplog.records
