"""Log lines on standard error: pretty for people, JSON for machines.

Every line of a request carries its correlation id, a context variable that the task of a job inherits. Prompts and
answers are never logged: unexpected errors, whose messages may quote them, are logged with type and place only. A
thread writes the lines, so that an unread standard error blocks nothing; lines that do not fit are dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TextIO

import msgspec

from ..errors import InvalidRequestError, WorkerError

FORMAT_VARIABLE = "LLORCH_LOG_FORMAT"
FORMATS = ("pretty", "json")
POLLED_PATHS, EXPECTED_STATUSES = {"/health", "/metrics"}, (200, 503)  # polled often: logged only if unexpected
MAX_QUEUED_LINES = 10_000
WRITE_INTERVAL_S = 0.01
FLUSH_TIMEOUT_S = 1.0
LOGGERS = ("llm_worker_rbee", "uvicorn.error")
correlation_id: ContextVar[str | None] = ContextVar("correlation_id", default=None)
logger = logging.getLogger("llm_worker_rbee.server")


def set_up(environment: Mapping[str, str]) -> None:
    """Install the handler for the worker's lines and for the HTTP server's warnings."""
    kind = environment.get(FORMAT_VARIABLE) or FORMATS[0]
    if kind not in FORMATS:
        message = f"{FORMAT_VARIABLE} is {kind!r}: use one of {', '.join(FORMATS)}"
        raise InvalidRequestError(message, FORMAT_VARIABLE)
    handler = DroppingQueueHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else PrettyFormatter())
    for name in LOGGERS:
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).propagate = False
    logging.getLogger(LOGGERS[0]).setLevel(logging.INFO)
    logging.getLogger(LOGGERS[1]).setLevel(logging.WARNING)


class DroppingQueueHandler(logging.Handler):
    """Formats at once, writes in a thread, and drops lines that do not fit into its queue."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._has_lines = threading.Event()
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._writer.start()
        atexit.register(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if len(self._lines) >= MAX_QUEUED_LINES:
                self._num_dropped += 1
                return
            self._lines.append(self.format(record))
            if not self._has_lines.is_set():
                self._has_lines.set()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, for a bounded time."""
        end = time.monotonic() + FLUSH_TIMEOUT_S
        while (self._lines or self._has_lines.is_set()) and time.monotonic() < end:
            time.sleep(0.001)

    def _write_lines(self) -> None:
        """Write the lines of a moment together: waking up for each would cost the event loop more than the line."""
        while self._has_lines.wait():
            time.sleep(WRITE_INTERVAL_S)
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if self._num_dropped:
                num_dropped, self._num_dropped = self._num_dropped, 0
                lines.append(self.format(_dropped_record(num_dropped)))
            with suppress(OSError, ValueError):  # the stream is closed
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
            self._has_lines.clear()
            if self._lines:  # came before the event was cleared
                self._has_lines.set()


def _dropped_record(num_lines: int) -> logging.LogRecord:
    message = "%d lines were dropped: standard error was not read"
    return logging.LogRecord(logger.name, logging.WARNING, __file__, 0, message, (num_lines,), None)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": _one_line(record.getMessage()),
        }
        if (correlation := correlation_id.get()) is not None:
            line["correlation_id"] = correlation
        line |= getattr(record, "figures", {})
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line |= {"error": type(error).__name__, "where": _stack_places(error)}
        return msgspec.json.encode(line).decode()


class PrettyFormatter(logging.Formatter):
    """Time, level, message, figures."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time_of_day(int(record.created)), record.levelname.lower().ljust(7), _one_line(record.getMessage())]
        parts += [f"{name}={value}" for name, value in getattr(record, "figures", {}).items()]
        if record.exc_info and (error := record.exc_info[1]) is not None:
            parts += [type(error).__name__, "at", " < ".join(reversed(_stack_places(error)))]
        if (correlation := correlation_id.get()) is not None:
            parts.append(f"[{correlation}]")
        return " ".join(parts)


@lru_cache(1)
def _time_of_day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%H:%M:%S")


def flush() -> None:
    """Write what is queued."""
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        handler.flush()


def request_done(scope: Mapping[str, Any], status: int, seconds: float, reason: str | None = None) -> None:
    """Log a request that was answered, or whose client disconnected before (status 499); `reason` of a refusal."""
    is_expected = scope["path"] in POLLED_PATHS and status in EXPECTED_STATUSES
    if logger.isEnabledFor(logging.INFO) and not is_expected:
        figures = {
            "method": scope["method"],
            "path": scope["path"][:200].encode("unicode_escape").decode(),
            "status": status,
            "ms": round(1000 * seconds, 1),
        }
        figures |= {} if reason is None else {"reason": reason}
        record = logging.LogRecord(logger.name, logging.INFO, __file__, 0, "request", None, None)
        record.figures = figures
        logger.handle(record)  # without looking for the caller


def request_failed(error: BaseException) -> None:
    """Log an unexpected error."""
    logger.error("request failed", exc_info=error)


def _stack_places(error: BaseException) -> list[str]:
    """Return file, line and function of the last frames, innermost last; of the worker's own errors the message too."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    return [*places, str(error)] if isinstance(error, WorkerError) else places


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)
