"""Parser of large bodies: a program that body_process.py runs as a child, since parsing holds the interpreter's lock.

For each request it reads a line, a `ParseRequest` as JSON, and the body; it writes a `REPLY_HEAD` and a record or a
`Refusal` as MessagePack. Its memory is limited by the size of the body. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import sys

import msgspec

from .. import machine
from ..errors import InferenceError, PayloadTooLargeError, WorkerError, describe_failure
from .body_process import REPLY_HEAD, ParseRequest, Refusal
from .dialects import body_parsers

PARSERS = body_parsers()  # imported before memory is limited
BASE_MEMORY, MEMORY_PER_BYTE = 512 << 20, 64  # of address space, in bytes: JSON takes up to 40 times its size


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
