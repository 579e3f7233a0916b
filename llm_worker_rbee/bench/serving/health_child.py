"""Asks a server for its health ten times a second until standard input ends, then prints what it saw as JSON.

A process of its own, of the standard library alone: within the client that puts the load on, a reply would wait for
that client. Printed are (moment on the monotonic clock, seconds) of each healthy reply, and how many were
something else.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

EVERY_S = 0.1
LIMIT_S = 10.0


def watch(host: str) -> tuple[list[tuple[float, float]], int]:
    """Until nobody listens any more."""
    link = http.client.HTTPConnection(host, timeout=LIMIT_S)
    found: list[tuple[float, float]] = []
    failed = 0
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        start = time.monotonic()
        try:
            link.request("GET", "/health")
            reply = link.getresponse()
            reply.read()
            is_healthy = reply.status == 200
        except (OSError, http.client.HTTPException):
            link.close()
            is_healthy = False
        if is_healthy:
            found.append((start, time.monotonic() - start))
        else:
            failed += 1
    return found, failed


if __name__ == "__main__":
    print("here", flush=True)
    seen, failures = watch(sys.argv[1])
    print(json.dumps({"seen": seen, "failed": failures}))
