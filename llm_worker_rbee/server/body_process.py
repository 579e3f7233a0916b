"""The process that parses large bodies, as the server sees it: started with the first one, and again when it dies."""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ..errors import (
    ContextLengthError,
    InferenceError,
    InvalidRequestError,
    PayloadTooLargeError,
    ShuttingDownError,
    UnavailableError,
    WorkerError,
)
from ..machine import describe_exit
from ..pipe_process import PipeProcess
from .schema import MISSING, ParseOptions, ValidationError, ValidationIssue

MAX_WAIT_S, MAX_WAIT_S_PER_BYTE = 20.0, 5e-6  # wall time: the machine may be busy
CLOSE_POLL_S = 0.01
ROOT = str(Path(__file__).parents[2])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from {__package__}.body_child import main; main()"
logger = logging.getLogger("llm_worker_rbee.server")
REPLY_HEAD = struct.Struct("<?I")  # whether it is a record; the bytes that follow
REFUSALS = {kind.__name__: kind for kind in (InvalidRequestError, ContextLengthError, PayloadTooLargeError)}


class ParseRequest(msgspec.Struct, frozen=True):
    """A request to parse the `size` bytes that follow."""

    parser: str  # of `body_parsers`
    size: int
    options: ParseOptions


class Refusal(msgspec.Struct, frozen=True):
    """The error of a body that was refused."""

    kind: str
    message: str
    field: str | None = None
    issues: list[list[Any]] = []  # field, constraint, message and, where there is one, value

    @classmethod
    def of(cls, error: WorkerError) -> Refusal:
        if isinstance(error, ValidationError):
            issues = [list(issue if issue.value is not MISSING else issue[:3]) for issue in error.issues]
            return cls(ValidationError.__name__, str(error), error.field, issues)
        return cls(type(error).__name__, str(error), getattr(error, "field", None))

    def error(self) -> WorkerError:
        """Return the error as it was raised."""
        if self.issues:
            return ValidationError([ValidationIssue(*issue) for issue in self.issues])
        if self.kind == InferenceError.__name__:  # its message is for the log
            return InferenceError("internal error of the worker")
        kind = REFUSALS[self.kind]
        return kind(self.message, self.field) if issubclass(kind, InvalidRequestError) else kind(self.message)


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

    def parse(self, parser: str, body: bytes, options: ParseOptions, record: Any) -> Any:
        """Return the record of a body, which has the type `record`, or raise the error that refuses it.

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
        return msgspec.msgpack.decode(reply, type=record)

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
        """End the process; return its failure."""
        if self._process is None:
            return f"could not be started ({error.strerror})"
        process, self._process = self._process, None
        status = process.stop()
        if status is None:
            return "did not answer in time"
        return describe_exit(status)

    def close(self) -> None:
        """End the process at once."""
        self._is_closed = True
        while not self._lock.acquire(timeout=CLOSE_POLL_S):  # a thread starts the process, or waits for its reply
            if (process := self._process) is not None:
                process.kill()
        if self._process is not None:
            self._process.stop()
            self._process = None
        self._lock.release()
