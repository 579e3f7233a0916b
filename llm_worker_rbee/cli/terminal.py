"""Terminals and pipes for all commands: encodings, colour, one status line, columns, JSON.

Escape codes go to a terminal only, colour not even there where NO_COLOR is set.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from ..progress import cell as cell
from ..progress import supports_ansi as supports_ansi
from ..progress import visible as visible

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
COLOURS = {"red", "green", "yellow", "cyan"}


def set_up_streams() -> None:
    """Use UTF-8 whatever the locale, and raise no exception for a character that cannot be written."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as in `>&-`
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
        else:
            stream.reconfigure(encoding="utf-8", errors="replace")


def disable_colour_in_pipes() -> None:
    """Keep typer from colouring its help in a pipe because of an environment variable of some build service."""
    if not sys.stdout.isatty() and "FORCE_COLOR" not in os.environ:
        os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")


def set_up_logging() -> None:
    """Print warnings of the package as plain lines on standard error."""
    logger = logging.getLogger("llm_worker_rbee")
    if not any(isinstance(handler, _LineHandler) for handler in logger.handlers):
        logger.addHandler(_LineHandler())
        logger.propagate = False


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {one_line(record.getMessage())}", file=sys.stderr, flush=True)


def discard_output() -> None:
    """Send what is still buffered to the null device: the reader is gone, or nothing can be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__) if _is_closed(sys.__stderr__) else (sys.__stdout__,):
        if stream is not None:
            os.dup2(null, stream.fileno())


def _is_closed(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        return True
    return False


def one_line(text: str) -> str:
    """Return a message on one line, without control characters."""
    return " ".join(visible(text).split())


def style(text: str, *names: str, stream: TextIO | None = None) -> str:
    """Return text in the given styles where the stream is a terminal that has them."""
    if not supports_ansi(stream or sys.stdout):
        return text
    codes = [STYLES[name] for name in names if name not in COLOURS or not os.environ.get("NO_COLOR")]
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes else text


def note(text: str) -> None:
    """Print a remark on standard error, dimmed."""
    print(style(text, "dim", stream=sys.stderr), file=sys.stderr, flush=True)


class Status:
    """A transient line on standard error; nothing where it could not be cleared."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, text: str) -> None:
        if supports_ansi(sys.stderr):
            print(f"\r\x1b[K{style(text, 'dim', stream=sys.stderr)}", end="", file=sys.stderr, flush=True)
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


def columns(rows: Iterable[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> list[str]:
    """Return lines with aligned columns; those of `right` are right-aligned."""
    table = [list(row) for row in rows]
    widths = [
        max((len(row[i]) for row in table if i < len(row)), default=0) for i in range(max(map(len, table), default=0))
    ]
    lines = []
    for row in table:
        cells = [text.rjust(widths[i]) if i in right else text.ljust(widths[i]) for i, text in enumerate(row)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def print_json(value: Any) -> None:
    """Print one JSON object on one line; a number that JSON does not have becomes null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def count(number: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`."""
    return f"{number:,} {noun}" + "s" * (number != 1)
