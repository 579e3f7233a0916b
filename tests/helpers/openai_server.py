"""A small OpenAI-shaped server on a loopback port, in a thread: it streams, and misbehaves on demand.

Each request takes the next of `modes` (the last one stays). `hold` makes answers wait until so many requests are there.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

WORDS = ["Ein", " Stück", " Käse", " 🧀"]
Headers = dict[str, str]


class Server:
    """`requests` are those received; `most` is how many it had at once."""

    def __init__(self, modes: Sequence[str] = ("ok",), key: str | None = None, hold: int = 0) -> None:
        self.modes, self.key, self.hold = list(modes), key, hold
        self.requests: list[tuple[str, Headers, dict[str, Any]]] = []
        self.connections = self.now = self.most = 0
        self.url = ""

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        self.full, self.stop = asyncio.Event(), stop
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self.one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        path = head[0].split()[1]
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return self.sized(writer, "401 Unauthorized", {"error": {"message": "wrong key"}})
        if path == "/v1/models":
            return self.sized(writer, "200 OK", {"object": "list", "data": [{"id": "small"}, {"id": "large"}]})
        self.requests.append((path, headers, body))
        mode = self.modes.pop(0) if len(self.modes) > 1 else self.modes[0]
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self.answer(mode, body, path, writer)
        finally:
            self.now -= 1

    def sized(self, writer: asyncio.StreamWriter, status: str, body: dict[str, Any]) -> bool:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return True

    async def answer(self, mode: str, body: dict[str, Any], path: str, writer: asyncio.StreamWriter) -> bool:
        if self.hold and self.now >= self.hold:
            self.full.set()
        if self.hold:
            await self.full.wait()
        if mode == "hang":
            await self.stop.wait()
            return False
        if mode == "busy":
            return self.sized(writer, "503 Service Unavailable", {"error": {"message": "try later"}})
        if mode == "json":
            return self.sized(writer, "200 OK", {"choices": []})
        if mode == "drop":
            return False
        events = list(self.events(mode, body, path))
        if mode == "sized":  # all at once, with its length
            return self.all_at_once(writer, events)
        return await self.chunked(writer, mode, events)

    def all_at_once(self, writer: asyncio.StreamWriter, events: list[bytes]) -> bool:
        data = b"".join(events)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return True

    async def chunked(self, writer: asyncio.StreamWriter, mode: str, events: list[bytes]) -> bool:
        kind = "text/event-stream; charset=utf-8"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        size = 3 if mode == "cut" else 1 << 20  # "cut": inside characters and line ends
        for event in events:
            for i in range(0, len(event), size):
                part = event[i : i + size]
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0)
        if mode in ("broken", "endless"):
            await (self.stop.wait() if mode == "endless" else asyncio.sleep(0))
            return False
        writer.write(b"0\r\n\r\n")
        return True

    def events(self, mode: str, body: dict[str, Any], path: str) -> Iterator[bytes]:
        def event(**fields: Any) -> bytes:
            text = json.dumps({"id": "x", **fields}, ensure_ascii=False, indent=1 if mode == "cut" else None)
            end = "\r\n" if mode == "cut" else "\n"
            return "".join(f"data: {line}{end}" for line in text.split("\n")).encode() + end.encode()

        def choice(text: str | None, reason: str | None = None) -> dict[str, Any]:
            if path.endswith("/chat/completions"):
                return {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": reason}
            return {"index": 0, "text": text or "", "finish_reason": reason}

        yield b": a comment\n\n"
        if path.endswith("/chat/completions"):
            yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        count = min(int(body["max_tokens"]), len(WORDS))
        for word in WORDS[:count]:
            yield event(choices=[choice(word)])
        if mode == "error":
            yield event(error={"message": "out of memory", "code": 500})
        if mode == "garbage":
            yield b"data: {oops\n\n"
        if mode not in ("unfinished", "endless", "broken"):
            yield event(choices=[choice(None, "length")])
            if body.get("stream_options", {}).get("include_usage") and mode != "silent":
                yield event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2 * count})
            yield b"data: [DONE]\n\n"


@contextmanager
def serving(*modes: str, key: str | None = None, hold: int = 0) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    made = Server(modes or ("ok",), key, hold)
    ready = threading.Event()
    held: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def work() -> None:
        async def main() -> None:
            stop = asyncio.Event()
            held.append((asyncio.get_running_loop(), stop))
            await made.serve(ready, stop)

        asyncio.run(main())

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(30)
    try:
        yield made
    finally:
        loop, stop = held[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
