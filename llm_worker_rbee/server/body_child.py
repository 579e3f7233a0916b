"""Parser of large bodies: a program that body_process.py runs as a child, since parsing holds the interpreter's lock.

For each request it reads a line, a `ParseRequest` as JSON, and the body; it writes a `REPLY_HEAD` and a record or a
`Refusal` as MessagePack. Its memory is limited by the size of the body. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import struct
import sys
from typing import Any

import msgspec

from .. import machine
from ..errors import (
    ContextLengthError,
    InferenceError,
    InvalidRequestError,
    PayloadTooLargeError,
    WorkerError,
    describe_failure,
)
from .bodies import ParseOptions
from .parsers import PARSERS
from .schema import MISSING, ValidationError, ValidationIssue

REPLY_HEAD = struct.Struct("<?I")  # whether it is a record; the bytes that follow
BASE_MEMORY, MEMORY_PER_BYTE = 512 << 20, 64  # of address space, in bytes: JSON takes up to 40 times its size
REFUSALS = {kind.__name__: kind for kind in (InvalidRequestError, ContextLengthError, PayloadTooLargeError)}


class ParseRequest(msgspec.Struct, frozen=True):
    """What is to be done with the `size` bytes that follow."""

    parser: str  # of `PARSERS`
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


def limit_memory(size: int) -> int:
    """Limit the address space for a body of `size` bytes; return the limit."""
    limit = BASE_MEMORY + MEMORY_PER_BYTE * size
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):  # a system without such limits
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return limit


def parse(request: ParseRequest, body: bytes) -> bytes:
    """Return the reply to a request."""
    limit = limit_memory(request.size)
    try:
        record = msgspec.msgpack.encode(PARSERS[request.parser][0](body, request.options))
        return REPLY_HEAD.pack(True, len(record)) + record
    except MemoryError:
        error: WorkerError = PayloadTooLargeError(f"the body takes more than {limit >> 20} MiB of memory when decoded")
    except WorkerError as refused:
        error = refused.with_traceback(None)
    except Exception as unexpected:
        error = InferenceError(describe_failure(unexpected))
    refusal = msgspec.msgpack.encode(Refusal.of(error))
    return REPLY_HEAD.pack(False, len(refusal)) + refusal


def main() -> None:
    """Reply to requests until end of file; the argument is the parent's process id."""
    machine.exit_with_parent(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # a service manager sends them to all
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # JSON has no cycles; looking for them takes most of the time of a nested body
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while line := requests.readline():
        request = msgspec.json.decode(line, type=ParseRequest)
        replies.write(parse(request, requests.read(request.size)))
        replies.flush()
        gc.collect()


if __name__ == "__main__":
    main()
