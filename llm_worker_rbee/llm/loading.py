"""The phases of loading a model: how long each took, and a hook that hears of each while it lasts.

What is told of a phase: its beginning (done 0), how far it is in bytes or things (about ten times, more often only
where it takes long), its end with its seconds. `detail` says what is being done where that is more than the phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..weights.hub import Progress

PARTS = 10  # of a phase, each of which is told
TOLD_AFTER_S = 2.0  # or after so long


class Stage(NamedTuple):
    """Where loading stands."""

    stage: str
    done: int
    total: int | None
    seconds: float  # since this phase began
    detail: str | None = None


OnStage = Callable[[Stage], None]


class Phases:
    """One load."""

    def __init__(self, on_stage: OnStage | None = None, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}  # of each phase that has ended
        self._tell = on_stage or (lambda stage: None)
        self._progress = progress
        self._stage = Stage("", 0, None, 0.0)  # what was told last
        self._began = self._told_at = 0.0

    @contextmanager
    def timed(self, name: str, total: int | None = None) -> Iterator[None]:
        """A phase, of so many bytes or things if that is known."""
        self._began = time.perf_counter()
        self._say(Stage(name, 0, total, 0.0))
        yield
        seconds = time.perf_counter() - self._began
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        whole = total or 1
        self._say(Stage(name, whole, whole, seconds))

    def advance(self, done: int, detail: str | None = None, total: int | None = None) -> None:
        """The present phase has come so far; of a part of it with a name of its own, `total` is that part's."""
        last, now = self._stage, time.perf_counter()
        total = last.total if total is None else total
        is_part = total is not None and (done - last.done) * PARTS >= total
        if detail != last.detail or is_part or now - self._told_at >= TOLD_AFTER_S:
            self._say(Stage(last.stage, done, total, now - self._began, detail))

    def progress(self, what: str, done: int, total: int | None) -> None:
        """What takes long within a phase, for who draws bars and for who hears of phases."""
        if self._progress is not None:
            self._progress(what, done, total)
        self.advance(done, what, total)

    def _say(self, stage: Stage) -> None:
        self._stage, self._told_at = stage, time.perf_counter()
        self._tell(stage)
