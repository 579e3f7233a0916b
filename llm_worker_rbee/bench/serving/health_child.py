"""Program that requests /health ten times a second until standard input ends, then prints what it saw as JSON.

A process of its own, because inside the load generator a reply would wait for the generator. It prints (monotonic time,
seconds) of each healthy reply and the number of other outcomes.
"""

from __future__ import annotations

import json
import select
import sys
import time

from ..http_client import BlockingClient

INTERVAL_S = 0.1


def monitor_health(authority: str) -> tuple[list[tuple[float, float]], int]:
    """Probe until standard input is readable or closed."""
    client = BlockingClient(authority)
    seen: list[tuple[float, float]] = []
    failed = 0
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        start = time.monotonic()
        if client.is_healthy():
            seen.append((start, time.monotonic() - start))
        else:
            failed += 1
    return seen, failed


if __name__ == "__main__":
    print("ready", flush=True)
    seen, failed = monitor_health(sys.argv[1])
    print(json.dumps({"seen": seen, "failed": failed}))
