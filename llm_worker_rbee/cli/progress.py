"""Progress on standard error of what takes long (a pull, compiling kernels): a bar on a terminal that can draw one, a
few plain lines anywhere else.

Nothing appears until something is reported, so a model that is already here costs no line.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..backends.precompile import COMPILING
from ..errors import human_bytes
from ..progress import PLAIN_STEPS, bars, draws
from ..weights.hub.cache_dir import Progress
from .terminal import cell

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Give a `Progress` that draws on standard error for as long as the block lasts."""
    if not draws(sys.stderr):
        yield _plain_lines()
        return
    from rich.markup import escape

    shown: tuple[str, Any, Any] = ("", None, None)  # what, its bar, its number there

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal shown
        if what != shown[0]:
            if shown[1] is not None:
                shown[1].stop()
            drawn = _bars(counted=what == COMPILING)
            shown = (what, drawn, drawn.add_task(escape(cell(what)), total=total))
            drawn.start()
        shown[1].update(shown[2], completed=done, total=total)

    try:
        yield show
    finally:
        if shown[1] is not None:
            shown[1].stop()


def _bars(*, counted: bool) -> "Bars":
    """Things are counted, files are measured."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (MofNCompleteColumn(), TimeElapsedColumn()) if counted else (DownloadColumn(), TransferSpeedColumn())
    return bars(TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())


def _plain_lines() -> Progress:
    last: tuple[str, int] = ("", 0)

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal last
        steps = 0 if what == COMPILING else PLAIN_STEPS  # kernels: one line that says how many
        step = (what, done * steps // total if total else 0)
        if step != last:
            last = step
            print(f"{cell(what)}{_amount(what, done, total)}", file=sys.stderr, flush=True)

    return show


def _amount(what: str, done: int, total: int | None) -> str:
    if not total:
        return ""
    return f": {total} ..." if what == COMPILING else f": {human_bytes(done)} of {human_bytes(total)}"
