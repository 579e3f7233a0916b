"""The process that parses large bodies, since parsing holds the interpreter's lock: started with the first one, and
again when it dies.

For each request it reads a line, a `ParseRequest` as JSON, and the body; it writes a `REPLY_HEAD` and a record or a
`Refusal` as MessagePack. Its memory is limited by the size of the body.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
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
    describe_failure,
)
from ..pipe_process import PipeProcess, ProgramError, package_command
from .schema import MISSING, ParseOptions, ValidationError, ValidationIssue

MAX_WAIT_S, MAX_WAIT_S_PER_BYTE = 20.0, 5e-6  # wall time: the machine may be busy
CLOSE_POLL_S = 0.01
PROGRAM = f"from {__package__} import body_process, dialects; body_process.serve(dialects.body_parsers())"
BASE_MEMORY, MEMORY_PER_BYTE = 512 << 20, 64  # of address space, in bytes: JSON takes up to 40 times its size
Parsers = Mapping[str, tuple[Callable[[bytes, ParseOptions], Any], Any]]  # `dialects.body_parsers`
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
        """Of the process, while it runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def parse(self, parser: str, body: bytes, options: ParseOptions, record: Any) -> Any:
        """Return the record of a body, which has the type `record`, or raise the error that refuses it.

        A process that ends or does not answer is replaced once; the second time is an `UnavailableError`.
        """
        with self._lock:
            try:
                is_record, reply = self._request(parser, body, options)
            except ProgramError as error:
                logger.warning("the process that parses large bodies %s: parsing again", error)
                try:
                    is_record, reply = self._request(parser, body, options)
                except ProgramError as again:
                    raise UnavailableError(f"the process that parses large bodies {again}") from None
        if not is_record:
            refusal = msgspec.msgpack.decode(reply, type=Refusal)
            if refusal.kind == InferenceError.__name__:
                logger.error("the process that parses large bodies failed: %s", refusal.message)
            raise refusal.error()
        return msgspec.msgpack.decode(reply, type=record)

    def _request(self, parser: str, body: bytes, options: ParseOptions) -> tuple[bool, bytearray]:
        if self._is_closed:
            raise ShuttingDownError("the worker is shutting down")
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = PipeProcess(package_command(PROGRAM))

        def read(deadline: float) -> tuple[bool, bytearray]:
            is_record, size = REPLY_HEAD.unpack(process.read(REPLY_HEAD.size, deadline))
            return is_record, process.read(size, deadline)

        head = msgspec.json.encode(ParseRequest(parser, len(body), options)) + b"\n"
        return process.ask([head, body], read, MAX_WAIT_S + MAX_WAIT_S_PER_BYTE * len(body))

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


def limit_memory(size: int) -> int:
    """Limit the address space for a body of `size` bytes; return the limit."""
    limit = BASE_MEMORY + MEMORY_PER_BYTE * size
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):  # a system without such limits
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return limit


def reply_to(request: ParseRequest, body: bytes, parsers: Parsers) -> bytes:
    """Return the reply to a request."""
    limit = limit_memory(request.size)
    try:
        record = msgspec.msgpack.encode(parsers[request.parser][0](body, request.options))
        return REPLY_HEAD.pack(True, len(record)) + record
    except MemoryError:
        error: WorkerError = PayloadTooLargeError(f"the body takes more than {limit >> 20} MiB of memory when decoded")
    except WorkerError as refused:
        error = refused.with_traceback(None)
    except Exception as unexpected:
        error = InferenceError(describe_failure(unexpected))
    refusal = msgspec.msgpack.encode(Refusal.of(error))
    return REPLY_HEAD.pack(False, len(refusal)) + refusal


def serve(parsers: Parsers) -> None:
    """Reply to requests until end of file: what the process runs."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # a service manager sends them to all
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # JSON has no cycles; looking for them takes most of the time of a nested body
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while line := requests.readline():
        request = msgspec.json.decode(line, type=ParseRequest)
        replies.write(reply_to(request, requests.read(request.size), parsers))
        replies.flush()
        gc.collect()
