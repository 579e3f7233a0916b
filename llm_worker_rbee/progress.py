"""Progress of many answers on standard error, and how a bar is drawn there: for the offline API and the command line.

A bar on a terminal that can draw one; elsewhere a few plain lines, where they are wanted. Nothing here starts a thread:
a bar is drawn again when something is reported, a few times a second at most, so the kernels lose no time to it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

DUMB = {"dumb", "unknown"}  # values of TERM that promise no escape codes
REDRAWN_AFTER_S = 0.2
PLAIN_STEPS = 4  # without a terminal: one line at each quarter


class Advance(Protocol):
    """Reports what has been made since the last call."""

    def __call__(self, *, requests: int = 0, tokens: int = 0) -> None: ...


def draws(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal that understands escape codes."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") not in DUMB


@contextmanager
def generating(requests: int, show: bool | None = None, *, tells_sum: bool = True) -> Iterator[Advance]:
    """Show how many of so many requests are answered, and how fast. None: on a terminal only; True: anywhere.

    Without `tells_sum` there is no plain line at the end: the caller has one.
    """
    if show is False or requests < 1 or (show is None and not draws(sys.stderr)):
        yield _silent
    elif not draws(sys.stderr):
        yield _plain_lines(requests, tells_sum)
    else:
        with _drawn(requests) as advance:
            yield advance


def bars(*columns: str | ProgressColumn, transient: bool = True, auto_refresh: bool = True) -> Progress:
    """A set of bars on standard error; nothing is drawn before it is started. Standard output stays what it is."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=transient, auto_refresh=auto_refresh, redirect_stdout=False)


class _Count:
    """What has been made, and how fast."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.requests = self.tokens = 0
        self.start = time.perf_counter()

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.start
        rate = self.tokens / seconds if seconds > 0 else 0.0
        return f"{self.tokens:,} tokens · {rate:,.1f} tokens/s"


def _silent(*, requests: int = 0, tokens: int = 0) -> None:
    """Nobody looks."""


def _plain_lines(total: int, tells_sum: bool) -> Advance:
    count, last = _Count(total), 0

    def advance(*, requests: int = 0, tokens: int = 0) -> None:
        nonlocal last
        count.add(requests, tokens)
        step = count.requests * PLAIN_STEPS // total
        if step > last and (tells_sum or count.requests < total):
            last = step
            print(f"{count.requests:,} of {total:,} answers · {count}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def _drawn(total: int) -> Iterator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = ("{task.description}", BarColumn(), MofNCompleteColumn())
    bar = bars(*columns, TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), transient=False, auto_refresh=False)
    count, drawn_at = _Count(total), time.perf_counter()
    task = bar.add_task("answering", total=total, rate="")

    def advance(*, requests: int = 0, tokens: int = 0) -> None:
        nonlocal drawn_at
        count.add(requests, tokens)
        now = time.perf_counter()
        if now - drawn_at >= REDRAWN_AFTER_S:
            drawn_at = now
            bar.update(task, completed=count.requests, rate=str(count), refresh=True)

    bar.start()
    try:
        yield advance
    finally:
        bar.update(task, completed=count.requests, rate=str(count))
        bar.stop()
