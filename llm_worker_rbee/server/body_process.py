"""The process that parses large bodies, as the server sees it: started with the first one, and again when it dies."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ..errors import InferenceError, ShuttingDownError, UnavailableError
from ..machine import describe_exit
from ..pipe_process import PipeProcess
from .bodies import ParseOptions
from .body_child import REPLY_HEAD, ParseRequest, Refusal
from .parsers import PARSERS

MAX_WAIT_S, MAX_WAIT_S_PER_BYTE = 20.0, 5e-6  # wall time: the machine may be busy
CLOSE_POLL_S = 0.01
ROOT = str(Path(__file__).parents[2])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from {__package__}.body_child import main; main()"
logger = logging.getLogger("llm_worker_rbee.server")


class BodyProcess:
    """Parses bodies in a child process, one at a time. Safe to use from several threads; `parse` blocks."""

    def __init__(self) -> None:
        self._process: PipeProcess | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if it was started."""
        return None if self._process is None else self._process.pid

    def parse(self, parser: str, body: bytes, options: ParseOptions) -> Any:
        """Return the record of a body, or raise the error that refuses it.

        A process that ends or does not answer is replaced once; the second time is an `UnavailableError`.
        """
        with self._lock:
            try:
                is_record, reply = self._request(parser, body, options)
            except OSError as error:
                logger.warning("the process that parses large bodies %s: parsing again", self._stop(error))
                try:
                    is_record, reply = self._request(parser, body, options)
                except OSError as again:
                    message = f"the process that parses large bodies {self._stop(again)}"
                    raise UnavailableError(message) from None
        if not is_record:
            refusal = msgspec.msgpack.decode(reply, type=Refusal)
            if refusal.kind == InferenceError.__name__:
                logger.error("the process that parses large bodies failed: %s", refusal.message)
            raise refusal.error()
        return msgspec.msgpack.decode(reply, type=PARSERS[parser][1])

    def _request(self, parser: str, body: bytes, options: ParseOptions) -> tuple[bool, bytearray]:
        if self._is_closed:
            raise ShuttingDownError("the worker is shutting down")
        if self._process is None:
            self._process = PipeProcess([sys.executable, "-P", "-c", PROGRAM, str(os.getpid())])
        deadline = time.monotonic() + MAX_WAIT_S + MAX_WAIT_S_PER_BYTE * len(body)
        self._process.write(msgspec.json.encode(ParseRequest(parser, len(body), options)) + b"\n", deadline)
        self._process.write(body, deadline)
        is_record, size = REPLY_HEAD.unpack(self._process.read(REPLY_HEAD.size, deadline))
        return is_record, self._process.read(size, deadline)

    def _stop(self, error: OSError) -> str:
        """End the process; return how it failed."""
        if self._process is None:
            return f"could not be started ({error.strerror})"
        process, self._process = self._process, None
        status = process.stop()
        if status is None:
            return "did not answer in time"
        return describe_exit(status)

    def close(self) -> None:
        """End the process, in whatever it is doing."""
        self._is_closed = True
        while not self._lock.acquire(timeout=CLOSE_POLL_S):  # a thread starts the process, or waits for its reply
            if (process := self._process) is not None:
                process.kill()
        if self._process is not None:
            self._process.stop()
            self._process = None
        self._lock.release()
