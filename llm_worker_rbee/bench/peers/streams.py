"""Many streamed answers of one HTTP server at once, noted as they come and read afterwards.

On a small machine a client takes time from the server that it measures, so this one only keeps each piece of bytes with
its moment; HTTP chunks and events are taken apart when all is over.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ..serving.event_stream import EventParser
from ..serving.http_client import RequestFailedError

READ_AT_ONCE = 1 << 16


class StreamError(Exception):
    """An answer that did not come, or is not what was agreed; says why in one line."""


class Made(NamedTuple):
    """How many tokens an answer had at a moment."""

    moment: float
    tokens: int


@dataclass(slots=True)
class Stream:
    """The bytes of one answer."""

    moments: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)

    def add(self, piece: bytes) -> None:
        """One piece more."""
        self.moments.append(time.perf_counter())
        self.pieces.append(piece)

    def events(self) -> Iterator[tuple[float, Any]]:
        """The objects of its events, each with the moment when it was complete."""
        whole, ends = b"".join(self.pieces), list(accumulate(map(len, self.pieces)))
        head, blank, body = whole.partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode("latin-1")
        if not blank or " 200" not in status:
            raise StreamError(f"it answered {status[:80]!r}: {body[:200].decode(errors='replace')}")
        first = len(head) + len(blank)
        chunked = b"transfer-encoding: chunked" in head.lower()
        parser = EventParser()
        for end, data in _chunks(whole, first) if chunked else [(len(whole), whole[first:])]:
            for text in parser.feed(data):
                yield self.moments[min(bisect_left(ends, end), len(ends) - 1)], _object(text)


def _chunks(whole: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """HTTP chunks: where each one ends, and what it holds."""
    while True:
        line_end = whole.find(b"\r\n", at)
        size = int(whole[at:line_end].partition(b";")[0] or b"x", 16) if line_end >= 0 else -1
        start = line_end + 2
        if size < 0 or start + size > len(whole):
            raise StreamError("its answer broke off")
        if size == 0:
            return
        yield start + size, whole[start : start + size]
        at = start + size + 2


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise StreamError(f"an event of its answer is not JSON: {text[:200]!r}") from None


def ask(port: int, path: str, bodies: Sequence[bytes], timeout_s: float) -> list[Stream]:
    """Send all at once to a server on this machine; their answers, when the last has ended."""
    end, streams = time.monotonic() + timeout_s, [Stream() for _ in bodies]
    with selectors.DefaultSelector() as waiting:
        try:
            for body, stream in zip(bodies, streams, strict=True):
                link = socket.create_connection(("127.0.0.1", port), timeout_s)
                waiting.register(link, selectors.EVENT_READ, stream)
                link.sendall(_message(path, body))
            while waiting.get_map():
                left = end - time.monotonic()
                if left <= 0 or not (ready := waiting.select(left)):
                    raise StreamError(f"it did not answer within {timeout_s:g} s")
                for key, _ in ready:
                    _read(waiting, key)
        except OSError as error:
            raise StreamError(f"the connection broke: {error.strerror or error}") from None
        finally:
            for key in list(waiting.get_map().values()):
                _close(waiting, key)
    return streams


def _read(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    link: Any = key.fileobj
    piece = link.recv(READ_AT_ONCE)
    if piece:
        key.data.add(piece)
    else:
        _close(waiting, key)


def _close(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    link: Any = key.fileobj
    waiting.unregister(link)
    link.close()


def _message(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def counted(stream: Stream, key: str) -> list[Made]:
    """How the tokens of an answer grew; `key` is the count that each event tells."""
    try:
        found = [Made(moment, event[key]) for moment, event in stream.events() if event.get(key)]
    except (RequestFailedError, AttributeError, ValueError) as error:
        raise StreamError(f"its answer is not what it is known to be: {error}") from None
    if not found or not all(type(made.tokens) is int for made in found):
        raise StreamError(f"no event of its answer tells {key}")
    return found


def rate(answers: Sequence[Sequence[Made]]) -> float:
    """Tokens a second of all answers together, from when the last has begun to when the first is complete."""
    start = max(answer[0].moment for answer in answers)
    end = min(next(m.moment for m in answer if m.tokens == answer[-1].tokens) for answer in answers)
    if end <= start:
        raise StreamError("the first answer ended before the last began: ask for longer ones (--tg)")
    return sum(_at(answer, end) - _at(answer, start) for answer in answers) / (end - start)


def _at(answer: Sequence[Made], moment: float) -> int:
    return max((made.tokens for made in answer if made.moment <= moment), default=0)
