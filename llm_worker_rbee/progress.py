"""Progress on standard error: a bar on a terminal that can draw one, a few plain lines elsewhere.

`transfer_progress` counts bytes (or things), `step_progress` parts of a measurement, `request_progress` requests and
tokens. Text from outside is shown with its control characters replaced, so that it cannot steer the terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from .errors import human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

TransferProgress = Callable[[str, int, int | None], None]  # what, how much of it, of how much
StepProgress = Callable[[str, float, float], None]
NO_ANSI_TERMS = {"dumb", "unknown"}  # values of TERM that promise no escape codes
MIN_REDRAW_INTERVAL_S = 0.2
PLAIN_LINES = 4  # without a terminal: one line at each quarter
# C0 controls become their Unicode pictures; C1 controls and marks that change the direction of writing, which can make
# a line read as something else, the replacement character; tab and newline stay.
DIRECTION_MARKS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROL_PICTURES = (
    {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *DIRECTION_MARKS), 0xFFFD)
)
LINE_PICTURES = CONTROL_PICTURES | {ord("\t"): 0x2409, ord("\n"): 0x240A, 0x2028: 0xFFFD, 0x2029: 0xFFFD}


class Stage(NamedTuple):
    """The progress of one phase of loading a model."""

    stage: str
    done: int
    total: int | None
    seconds: float  # since the phase began
    detail: str | None = None  # what is being done, where that is more than the phase's name


OnStage = Callable[[Stage], None]


class Advance(Protocol):
    """Reports the requests and tokens since the last call."""

    def __call__(self, *, requests: int = 0, tokens: int = 0) -> None: ...


def supports_ansi(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal that understands escape codes."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in NO_ANSI_TERMS


def visible(text: str) -> str:
    """Return text of unknown origin with its control characters shown, not obeyed."""
    return text.translate(CONTROL_PICTURES)


def cell(text: str) -> str:
    """Return the same for one line, where a tab or a newline would break the columns."""
    return text.translate(LINE_PICTURES)


@contextmanager
def transfer_progress(*counted: str) -> Iterator[TransferProgress]:
    """Show downloads and the like for the duration of the block; nothing appears before the first report.

    Amounts are bytes, but for the reports that `counted` names, whose amounts are numbers of things.
    """
    if not supports_ansi(sys.stderr):
        yield _plain_transfer(counted)
        return
    bar: _Bar | None = None

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal bar
        if bar is None or bar.what != what:
            if bar is not None:
                bar.stop()
            bar = _Bar("count" if what in counted else "bytes")
        bar.show(what, done, total)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def step_progress() -> Iterator[StepProgress]:
    """Show how far a measurement is for the duration of the block."""
    if not supports_ansi(sys.stderr):
        yield _plain_steps()
        return
    bar = _Bar("time")
    try:
        yield bar.show
    finally:
        bar.stop()


@contextmanager
def request_progress(
    total: int, show: bool | None = None, *, last_line: bool = True, what: str = "answering", noun: str = "answers"
) -> Iterator[Advance]:
    """Show how many of `total` requests are finished, and how fast. None: on a terminal only; True: anywhere.

    Without `last_line` there is no plain line at the end: the caller prints one. No thread is started: the bar is drawn
    again on a report, a few times a second at most, so the kernels lose no time to it.
    """
    if show is False or total < 1 or (show is None and not supports_ansi(sys.stderr)):
        yield _ignore
        return
    if not supports_ansi(sys.stderr):
        yield _RequestCounter(total, last_line, None, what, noun).advance
        return
    bar = _Bar("requests", transient=False, auto_refresh=False)
    counter = _RequestCounter(total, last_line, bar, what, noun)
    try:
        yield counter.advance
    finally:
        bar.show(what, counter.requests, total, rate=str(counter))
        bar.stop()


class _Bar:
    """One bar on standard error, drawn from the first report on; standard output stays what it is."""

    def __init__(self, unit: str, *, transient: bool = True, auto_refresh: bool = True) -> None:
        self.what = ""
        self._bars = _new_bars(unit, transient, auto_refresh)
        self._task: Any = None

    def show(self, what: str, done: float, total: float | None, **fields: Any) -> None:
        from rich.markup import escape

        self.what, text = what, escape(cell(what))
        if self._task is None:
            self._task = self._bars.add_task(text, total=total, **fields)
            self._bars.start()
        self._bars.update(self._task, description=text, completed=done, total=total, refresh=bool(fields), **fields)

    def stop(self) -> None:
        self._bars.stop()


def _new_bars(unit: str, transient: bool, auto_refresh: bool) -> Progress:
    from rich import progress as rich
    from rich.console import Console

    columns: dict[str, tuple[Any, ...]] = {
        "bytes": (rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn()),
        "count": (rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn()),
        "time": (rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn()),
        "requests": (rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[rate]}"), rich.TimeElapsedColumn()),
    }
    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        *columns[unit],
        console=Console(stderr=True),
        transient=transient,
        auto_refresh=auto_refresh,
        redirect_stdout=False,
    )


def _plain_transfer(counted: Collection[str]) -> TransferProgress:
    last: tuple[str, int] = ("", 0)

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal last
        lines = 0 if what in counted else PLAIN_LINES  # things: one line that says how many
        now = (what, done * lines // total if total else 0)
        if now != last:
            last = now
            amount = f": {total} ..." if what in counted else f": {human_bytes(done)} of {human_bytes(total or 0)}"
            print(cell(what) + (amount if total else ""), file=sys.stderr, flush=True)

    return report


def _plain_steps() -> StepProgress:
    printed = 0.0

    def report(what: str, done: float, total: float) -> None:
        nonlocal printed
        part = done / total if total else 0.0
        printed = min(printed, part)  # smaller: the next step has begun
        if part >= printed + 1 / PLAIN_LINES:
            printed = part
            print(f"{part:.0%}: {cell(what)}", file=sys.stderr, flush=True)

    return report


def _ignore(*, requests: int = 0, tokens: int = 0) -> None:
    pass


class _RequestCounter:
    """Counts requests and tokens, and shows them as plain lines or on a bar."""

    def __init__(self, total: int, last_line: bool, bar: _Bar | None, what: str, noun: str) -> None:
        self.total, self.last_line, self.bar, self.what, self.noun = total, last_line, bar, what, noun
        self.requests = self.tokens = self.lines = 0
        self.start = self.drawn_at = time.perf_counter()

    def advance(self, *, requests: int = 0, tokens: int = 0) -> None:
        self.requests += requests
        self.tokens += tokens
        now, line = time.perf_counter(), self.requests * PLAIN_LINES // self.total
        if self.bar is not None:
            if now - self.drawn_at >= MIN_REDRAW_INTERVAL_S:
                self.drawn_at = now
                self.bar.show(self.what, self.requests, self.total, rate=str(self))
        elif line > self.lines and (self.last_line or self.requests < self.total):
            self.lines = line
            print(f"{self.requests:,} of {self.total:,} {self.noun} · {self}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.start
        rate = self.tokens / seconds if seconds > 0 else 0.0
        return f"{self.tokens:,} tokens · {rate:,.1f} tokens/s"
