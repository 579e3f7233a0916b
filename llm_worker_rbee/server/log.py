"""Lines that tell what a server does: pretty for people, JSON for machines, on standard error.

Every line of a request carries its correlation id, which travels in a context variable, also into the task of a job.
What a request asked and what it was answered never gets here: messages of unforeseen errors, which may quote it, are
left out, their types and places are told. A thread of its own writes the lines: where nobody reads them, nothing waits;
what is too much is dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from ..errors import InvalidRequestError, WorkerError

VARIABLE = "LLORCH_LOG_FORMAT"
FORMATS = ("pretty", "json")
QUIET, EXPECTED = {"/health", "/metrics"}, (200, 503)  # asked every few seconds: told only where something is wrong
MOST_LINES = 10_000  # that wait to be written
FLUSH_S = 1.0  # for the last ones, at the end
LOGGERS = ("llm_worker_rbee", "uvicorn.error")
correlation: ContextVar[str | None] = ContextVar("correlation", default=None)
log = logging.getLogger("llm_worker_rbee.server")


def set_up(environment: Mapping[str, str]) -> None:
    """From now on our lines, and the warnings of the HTTP server, are written as the environment says."""
    kind = environment.get(VARIABLE) or FORMATS[0]
    if kind not in FORMATS:
        raise InvalidRequestError(f"{VARIABLE} is {kind!r}: use one of {', '.join(FORMATS)}", VARIABLE)
    handler = Handed(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else PrettyLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger(LOGGERS[0]).setLevel(logging.INFO)
    logging.getLogger(LOGGERS[1]).setLevel(logging.WARNING)


class Handed(logging.Handler):
    """Lines are made here and now, and written by and by."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(MOST_LINES)
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Into the queue, if there is room."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for the last line, but not for ever."""
        end = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.001)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if self._num_dropped:
                dropped, self._num_dropped = self._num_dropped, 0
                line = f"{line}\n{self.format(_dropped(dropped))}"
            with suppress(OSError, ValueError):  # nobody is there any more
                self._stream.write(line + "\n")
                self._stream.flush()
            self._lines.task_done()


def _dropped(lines: int) -> logging.LogRecord:
    told = "%d lines were dropped: nobody read standard error"
    return logging.LogRecord(log.name, logging.WARNING, __file__, 0, told, (lines,), None)


class JsonLines(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "message": _one_line(record.getMessage()),
        }  # fmt: skip
        if (known := correlation.get()) is not None:
            told["correlation_id"] = known
        told |= getattr(record, "figures", {})
        if (error := _error_of(record)) is not None:
            told |= {"error": type(error).__name__, "where": _where(error)}
        return msgspec.json.encode(told).decode()


class PrettyLines(logging.Formatter):
    """A time, a level, a message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        parts = [at, record.levelname.lower().ljust(7), _one_line(record.getMessage())]
        parts += [f"{name}={value}" for name, value in getattr(record, "figures", {}).items()]
        if (error := _error_of(record)) is not None:
            parts += [type(error).__name__, "at", " < ".join(reversed(_where(error)))]
        if (known := correlation.get()) is not None:
            parts.append(f"[{known}]")
        return " ".join(parts)


def flush() -> None:
    """What was told is written, if anybody reads it."""
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        handler.flush()


def done(scope: Mapping[str, Any], status: int, seconds: float) -> None:
    """A request was answered, or its client went away before (status 499)."""
    if log.isEnabledFor(logging.INFO) and (scope["path"] not in QUIET or status not in EXPECTED):
        figures = {"method": scope["method"], "path": scope["path"][:200].encode("unicode_escape").decode(),
                   "status": status, "ms": round(1000 * seconds, 1)}  # fmt: skip
        log.info("request", extra={"figures": figures})


def failed(error: BaseException) -> None:
    """Something that should not have happened."""
    log.error("request failed", exc_info=error)


def _error_of(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _where(error: BaseException) -> list[str]:
    """The innermost places last."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    return [*places, str(error)] if isinstance(error, WorkerError) else places


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
