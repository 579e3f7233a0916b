"""Server-sent events: bytes -> the data of each event, however the network has cut them.

Lines end with CR, LF or both; an event's data lines are joined by newlines. Comments and other fields say nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .http_client import RequestFailedError

LONGEST_EVENT = 4 << 20
LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(slots=True)
class EventParser:
    """One stream; what is not complete yet waits for its rest.

    Most servers end their lines with LF alone: until a CR is seen, whole events are cut out at once.
    """

    _rest: bytes = b""
    _data: list[str] = field(default_factory=list)
    _has_cr: bool = False
    _after_cr: bool = False
    _size: int = 0

    def feed(self, part: bytes) -> Iterator[str]:
        """The events that are complete with this part."""
        self._has_cr = self._has_cr or b"\r" in part
        if self._has_cr:
            yield from self._feed_lines(part)
        else:
            *events, self._rest = (self._rest + part).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: ") and b"\n" not in event:
                    yield event[6:].decode(errors="replace")
                else:
                    yield from self._take([*event.split(b"\n"), b""])
        if self._size + len(self._rest) > LONGEST_EVENT:
            raise RequestFailedError("protocol", f"an event is longer than {LONGEST_EVENT >> 20} MiB")

    def finish(self) -> Iterator[str]:
        """What the end of the stream completes: some servers leave out the last blank line."""
        return self.feed(b"\n\n")

    def _feed_lines(self, part: bytes) -> Iterator[str]:
        if self._after_cr and part.startswith(b"\n"):  # the other half of a CRLF
            part = part[1:]
        self._after_cr = part.endswith(b"\r")
        *lines, self._rest = LINE_END.split(self._rest + part)
        yield from self._take(lines)

    def _take(self, lines: list[bytes]) -> Iterator[str]:
        """Lines of events; an empty one ends an event."""
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode(errors="replace"))
                self._size += len(value)
            elif not line and self._data:
                yield "\n".join(self._data)
                self._data, self._size = [], 0
