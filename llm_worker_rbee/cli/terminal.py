"""Terminals, pipes and text files for all commands: encodings, colour, one status line, columns, JSON, reading.

Escape codes go to a terminal only, colour not even there where NO_COLOR is set. What is read whole is bounded, so that
a wrong path (a disk image, /dev/zero) cannot fill the memory.
"""

import json
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

import typer

from ..errors import InvalidRequestError
from ..progress import cell as cell
from ..progress import supports_ansi as supports_ansi
from ..progress import visible as visible

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
MAX_TEXT_BYTES, MAX_TEMPLATE_BYTES = 64 << 20, 1 << 20
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


class OutputThread:
    """Runs calls that write to the terminal in a thread, in order: a terminal that takes nothing (Ctrl-S, a full pipe)
    blocks this thread only."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def call(self, write: Callable[[], object]) -> None:
        self._calls.put(write)

    def wait(self, timeout_s: float = 1.0) -> bool:
        """Wait for the calls so far; return whether they are done."""
        done = threading.Event()
        self.call(done.set)
        return done.wait(timeout_s)

    def _run(self) -> None:
        while True:
            with suppress(OSError, ValueError):  # the stream is closed
                self._calls.get()()


def program_lines(program: Sequence[tuple[int, Sequence[Sequence[str]]]]) -> list[str]:
    """Return the program of a step as a table; layers with the same ops are listed once."""
    rows: list[Sequence[str]] = [("PART", "OPS", "RUNS")]
    for repeats, lines in program:
        rows += [(f"{repeats} times:",)] if repeats > 1 else []
        rows += [(f"  {line[0]}" if repeats > 1 else line[0], *line[1:]) for line in lines]
    return columns(rows, indent="  ")


def columns(rows: Iterable[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> list[str]:
    """Return lines with aligned columns; `right` lists right-aligned columns."""
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


def decode(data: bytes, origin: str) -> str:
    """Decode UTF-8; raise an error with the place of the first wrong byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{origin} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02X}"
        ) from None


def argument_text(text: str, origin: str) -> str:
    """Check text from the command line, where Python hides bytes that are not UTF-8 in surrogates."""
    return decode(text.encode(errors="surrogateescape"), origin)


def read_file(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a text file, byte for byte."""
    try:
        with path.open("rb") as file:
            return decode(_read(file, str(path), max_bytes), str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InvalidRequestError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_stdin() -> str:
    """Return all of standard input, without the one newline that `echo` and editors put at the end."""
    return decode(_read(sys.stdin.buffer, "standard input", MAX_TEXT_BYTES), "standard input").removesuffix("\n")


def stdin_lines() -> Iterator[tuple[int, bytes]]:
    """Yield each line of standard input with its number, as soon as it is there."""
    return numbered_lines(sys.stdin.buffer)


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each line of a file with its number."""
    number = 0
    while line := file.readline(MAX_TEXT_BYTES + 1):
        number += 1
        yield number, _require_short(line, f"line {number}", MAX_TEXT_BYTES)


def _read(file: IO[bytes], origin: str, max_bytes: int) -> bytes:
    return _require_short(file.read(max_bytes + 1), origin, max_bytes)


def _require_short(data: bytes, origin: str, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise InvalidRequestError(f"{origin} is too long: at most {max_bytes >> 20} MiB are read")
    return data


def require_writable(out: Path, force: bool) -> None:
    """Raise an error if the file cannot be written, before anything is fetched or computed."""
    if out.is_dir():
        raise InvalidRequestError(f"{out} is a folder: give the name of a file", "out")
    if not out.parent.is_dir():
        raise InvalidRequestError(f"the folder {out.parent} does not exist: make it first", "out")
    if out.exists() and not force:
        raise InvalidRequestError(f"{out} exists: give another name, or --force to replace it", "out")


def read_template(path: Path) -> str:
    """Return a chat template; an empty one is an error, it does not stand for the model's own."""
    text = read_file(path, MAX_TEMPLATE_BYTES)
    if not text.strip():
        raise InvalidRequestError(
            f"the chat template {path} is empty: leave out --chat-template to use the model's own"
        )
    return text


def read_text(argument: str | None, file: Path | None, missing: str) -> str:
    """Return the text of a command: the argument, a file (`-` is standard input), or standard input."""
    if argument is not None and file is not None:
        raise typer.BadParameter("the text is given twice: as an argument and with --file")
    if file is not None and str(file) != "-":
        return read_file(file)
    if argument is not None and argument != "-":
        return argument_text(argument, "the text")
    if file is None and argument is None and sys.stdin.isatty():
        raise typer.BadParameter(missing)
    return read_stdin()
