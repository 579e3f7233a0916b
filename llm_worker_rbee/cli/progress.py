"""Progress of a pull, shown on standard error: a bar on a terminal that can draw one, a few plain lines anywhere else.

Nothing appears until something is reported, so a model that is already here costs no line.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import human_bytes
from ..weights.hub.store import Progress
from .terminal import cell, draws

PLAIN_STEPS = 4  # without a terminal: one line at each quarter


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Give a `Progress` that draws on standard error for as long as the block lasts."""
    if not draws(sys.stderr):
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            bars.start()
            for earlier in tasks.values():
                bars.update(earlier, visible=False)
            tasks[what] = bars.add_task(escape(cell(what)), total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield show
    finally:
        bars.stop()


def _plain_lines() -> Progress:
    last: tuple[str, int] = ("", 0)

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal last
        step = (what, done * PLAIN_STEPS // total if total else 0)
        if step != last:
            last = step
            amount = f": {human_bytes(done)} of {human_bytes(total)}" if total else ""
            print(f"{cell(what)}{amount}", file=sys.stderr, flush=True)

    return show
