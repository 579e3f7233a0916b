"""llama-server as a peer: many requests at once, each in a slot of its own, over loopback.

It is started by us with as many slots as there are requests and ended by us; every wait is bounded. What it gets is the
ids themselves, and the cheapest greedy sampling that it has.
"""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import subprocess
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ..http_client import EventParser, RequestFailedError
from .process import PeerError, Task, ending

PAUSE_S = 0.05  # between two looks whether it has loaded the model
SLOT = 256  # the context of a slot is a multiple of this
END_S = 5


class LlamaServer:
    """The program, alive between runs."""

    name = "llama-server"

    def __init__(self, program: str, model: str, threads: int, slots: int, context: int, timeout_s: float) -> None:
        self.version = ""
        each = -(-context // SLOT) * SLOT
        self._command = [program, "-m", model, "-t", str(threads), "-ngl", "0", "-np", str(slots)]
        self._command += ["-c", str(slots * each), "--host", "127.0.0.1"]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def takes(self, test: Task) -> bool:
        """It is here for several at once."""
        return bool(test.prompts)

    def start(self) -> None:
        """Begin the process and wait until the model is loaded."""
        self._port = _free_port()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._said.close()
            raise PeerError(f"{self.name} cannot be started: {error.strerror}") from None
        end = time.monotonic() + self._timeout_s
        while self._get("/health") is None:
            if self._process.poll() is not None:
                raise PeerError(self._ending())
            if time.monotonic() > end:
                raise PeerError(f"{self.name} was not ready within {self._timeout_s:g} s")
            time.sleep(PAUSE_S)
        told = self._get("/props") or {}
        self.version = str(told.get("build_info") or "unknown build")

    def rate(self, test: Task) -> float:
        """All prompts at once; tokens a second while all of them are being answered."""
        common: dict[str, Any] = {
            "n_predict": test.tokens, "temperature": 0.0, "samplers": ["temperature"], "ignore_eos": True,
            "cache_prompt": False, "stream": True,
        }  # fmt: skip
        bodies = [json.dumps({"prompt": list(prompt), **common}).encode() for prompt in test.prompts]
        try:
            made = ask(self._port, "/completion", bodies, self._timeout_s)
            answers = [counted(stream, "tokens_predicted") for stream in made]
            for answer in answers:
                if answer[-1].tokens != test.tokens:
                    raise StreamError(f"it made {answer[-1].tokens} tokens where {test.tokens} were asked for")
            return rate(answers)
        except StreamError as error:
            assert self._process is not None
            ended = self._process.poll() is not None
            raise PeerError(self._ending() if ended else f"{self.name}: {error}") from None

    def close(self) -> None:
        """End the process; it has nothing to save."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()
        self._process = None

    def _get(self, path: str) -> dict[str, Any] | None:
        """The object at a path; None while there is none."""
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)
        try:
            link.request("GET", path)
            answer = link.getresponse()
            found = json.loads(answer.read())
            return found if answer.status == 200 and isinstance(found, dict) else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            link.close()

    def _ending(self) -> str:
        assert self._process is not None
        status = self._process.wait(self._timeout_s)
        self._said.seek(0)
        return ending(self.name, status, self._said.read())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
