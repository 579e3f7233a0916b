"""CPU-heavy request work runs off the event loop, within bounds; prompts that cannot fit are not tokenized."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest

from llm_worker_rbee.errors import QueueFullError, ShuttingDownError
from llm_worker_rbee.server import offload, schema
from llm_worker_rbee.server.dialects.openai_completions import CompletionPrinter
from llm_worker_rbee.server.offload import BoundedExecutor
from tests.helpers.server import CONTEXT, Server, until
from tests.server.conftest import Start

COMPLETIONS, CHATS, JOBS = "/v1/completions", "/v1/chat/completions", "/v1/jobs"


def sent(server: Server, path: str, body: Any) -> socket.socket:
    """Return the socket of a client that sent a request."""
    client, raw = socket.create_connection(("127.0.0.1", server.port)), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


def test_disconnected_request_is_not_tokenized(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large prompts: one is tokenized, the others are queued and counted; they disconnect and are never started."""
    server = start(max_queued_tokens=10_000_000)
    tokenizer, seen, may_go = server.llm.tokenizer, list[int](), threading.Event()
    encode = tokenizer.encode

    def slow(text: str, **more: Any) -> list[int]:
        seen.append(len(text))
        if len(text) > offload.LARGE_BYTES:
            may_go.wait()
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", slow)
    size = offload.LARGE_BYTES * 2
    bodies = [(COMPLETIONS, {"prompt": "x" * size}), ("/tokenize", {"text": "x" * size}),
              (JOBS, {"prompt": "x" * size, "max_tokens": 1})]  # fmt: skip
    first = sent(server, *bodies[0])
    until(lambda: seen == [size])
    others = [sent(server, *body) for body in bodies * 3]
    until(lambda: server.worker.offload._large._num_bytes > len(others) * size)
    assert server.http.get("/health").json()["waiting"] >= 1
    assert server.http.get("/v1/ready").json()["state"] == "busy"
    server.require_alive()  # small work has its own threads
    for client in (first, *others):
        client.close()
    until(lambda: server.worker.offload._large._num_bytes == 0)
    may_go.set()
    server.require_idle()
    assert seen.count(size) == 1


def test_bounded_executor_over_queue_limit_raises() -> None:
    """One piece alone may have any size; behind it the queue is full."""

    async def tried() -> None:
        line, may_go = BoundedExecutor("tested", 1), threading.Event()
        first = asyncio.ensure_future(line.run(offload.MAX_QUEUED_BYTES * 2, may_go.wait))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="bytes of other requests") as caught:
            await line.run(1, may_go.wait)
        admitted = asyncio.ensure_future(line.run(1, may_go.wait, is_admitted=True))
        assert 1 <= caught.value.retry_after <= 60
        may_go.set()
        assert await first
        assert await admitted
        assert await line.run(1, may_go.wait)
        line.close()
        with pytest.raises(ShuttingDownError):
            await line.run(1, may_go.wait)

    asyncio.run(tried())


def test_large_bodies_and_replies_run_off_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the threads of tokenizing and encoding; decoding and validation are in another process."""
    loop_thread, where = server._thread, dict[str, threading.Thread]()

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watcher(*given: Any, **more: Any) -> Any:
            where[name] = threading.current_thread()
            return real(*given, **more)

        monkeypatch.setattr(owner, name, watcher)

    tokenizer = server.llm.tokenizer
    owners = [(tokenizer, "piece"), (tokenizer, "decode"), (CompletionPrinter, "whole"), (schema, "decode_object")]
    for owner, name in owners:
        watched(owner, name)
    text = "a" * (offload.LARGE_BYTES + 1)
    cases: list[tuple[str, Any, set[str]]] = [
        ("/tokenize", {"text": text}, {"piece"}),
        ("/detokenize", {"tokens": [97] * (offload.LARGE_BYTES // 2)}, {"decode"}),
        (JOBS, {"prompt": text, "max_tokens": 1, "top_k": -2}, set()),
        (COMPLETIONS, {"prompt": [1] * 34_000, "max_tokens": 1, "echo": True}, {"whole", "decode"}),
    ]
    for path, body, more in cases:
        where.clear()
        server.post(path, body)
        assert where.keys() == more, path
        assert loop_thread not in where.values(), (path, where)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "x" * 2_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["#", "x" * 2_000_000]}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1] * (CONTEXT + 1)]}, "prompt"),
        (JOBS, {"prompt": "x" * 2_000_000, "max_tokens": 1}, None),
    ],
)
def test_prompt_over_context_is_not_tokenized(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], field: str | None
) -> None:
    """Decided by its bytes or its number of ids; the message has the figures."""

    def encode(text: str, *_: Any, **__: Any) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    tokenizer = server.llm.tokenizer
    whole = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: whole(text, **more) if text == "#" else encode(text))
    reply = server.post(path, body)
    error = reply.json() if field is None else reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    assert field is None or error["param"] == field
    assert str(CONTEXT) in error["message"]
    server.require_idle()


@pytest.mark.parametrize("letters", ["x y ", "xy", "é "])
def test_long_prompt_is_tokenized_up_to_the_context(
    server: Server, monkeypatch: pytest.MonkeyPatch, letters: str
) -> None:
    """Its bytes alone do not tell that it cannot fit; neither its tokens nor a part that is cut off anywhere change."""
    tokenizer, sizes = server.llm.tokenizer, list[int]()
    encode = tokenizer.encode

    def watched(text: str, **more: Any) -> list[int]:
        sizes.append(len(text))
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", watched)
    cached = vars(server.chat.encoder)
    monkeypatch.setitem(cached, "_max_token_bytes", 100)  # else its bytes are enough to refuse it
    text = letters * (20 * CONTEXT // len(letters))
    reply = server.post(COMPLETIONS, {"prompt": text})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    assert f"of {len(text)} characters" in reply.json()["error"]["message"]
    assert sum(sizes) < len(text) / 2
    sizes.clear()
    monkeypatch.setattr(offload, "LONG_TEXT_FACTOR", 0)  # what fits is tokenized in parts and then as a whole
    fits = letters * (CONTEXT // 2 // len(letters.encode()))
    monkeypatch.setattr(offload, "PART_CHARS", len(fits) // 3)
    assert server.post(COMPLETIONS, {"prompt": fits, "max_tokens": 1}).status_code == 200
    assert sizes[-1] == len(fits)
    assert len(sizes) >= 4
