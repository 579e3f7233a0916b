"""What happens to a job, in words for a person: waiting, its prompt being read, sent back to wait, going on.

The engine's books are looked at, with every piece of an answer and a few times a second besides; nothing is asked of
the engine for it. An event carries the correlation id of the request that brought the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.request import Request
from . import logs

WATCH_S = 0.1  # between two looks


class Narrator:
    """Tells of one job; made where its request is at hand."""

    def __init__(self, actor: str, job_id: str, request: Request, put: Callable[[dict[str, Any]], None]) -> None:
        self._request, self._put = request, put
        self._actor, self._job_id, self._correlation = actor, job_id, logs.correlation.get()
        self._has_begun = self._is_away = False
        self._num_preemptions = 0

    def queued(self, others: int) -> None:
        """It was taken on, and so many others wait for their first token."""
        before = "nobody else waits" if not others else f"{others} other{'s' * (others > 1)} waiting too"
        self._say("queued", f"Taken on with a prompt of {self._request.num_prompt_tokens} tokens; {before}.")

    def look(self) -> None:
        """Tell what has changed since the last look. The engine's thread goes on meanwhile: the order matters here."""
        request = self._request
        if not self._has_begun:
            if request.num_cached_tokens < 0:
                return
            self._has_begun = True
            found = f"; {request.num_cached_tokens} of them are in the cache" if request.num_cached_tokens else ""
            self._say("reading", f"Reading the prompt of {request.num_prompt_tokens} tokens{found}.")
        if request.num_preemptions > self._num_preemptions:
            self._num_preemptions, self._is_away = request.num_preemptions, True
            self._say(*PREEMPTED)
        if self._is_away and request.batch_slot >= 0:
            self._is_away = False
            self._say("resumed", "It goes on.")

    def _say(self, action: str, human: str) -> None:
        told = {"type": "narration", "actor": self._actor, "action": action, "target": self._job_id, "human": human}
        marks = {"correlation_id": self._correlation} if self._correlation is not None else {}
        self._put({**told, **marks, "job_id": self._job_id})


PREEMPTED = ("preempted", "It gave its memory to others; it waits, and will go on where it was.")
