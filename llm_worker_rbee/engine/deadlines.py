"""Who runs out of time next. No arrays here."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .request import Request


class Deadlines:
    """Requests that must end by some time. Those that ended in time are forgotten now and then, not at once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, others: int) -> None:
        """One more, beside so many other requests; each look through all of them takes as long as there are."""
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, request.arrival, request))
            if len(self._heap) > 2 * others + 64:
                self._heap = [one for one in self._heap if not one[2].is_finished]
                heapify(self._heap)

    def over(self, now: float) -> list[Request]:
        """Those whose time is over, ended or not; they are not told of again."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heappop(self._heap)[2])
        return found
