"""Mixed load on a server for minutes: both dialects, streams and whole replies, visitors who leave, cancel, read late
or slowly, bodies that must be refused. Checked: no error that is the server's, everything ends, health is quick, memory
does not grow, and nothing is held at the end. Exit status 1 where a check fails; the last line is JSON.

    python benchmarks/soak.py --minutes 10

The server is started with a small KV cache (--kv-memory), which fills within the first minute: its pages are touched
when they are first used, and prefixes are kept in it, so that a large one would look like memory that grows for hours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from soak_clients import KINDS, OursError, Refused, Visitor

from llm_worker_rbee.bench.http_client import Address, Client, RequestFailedError
from llm_worker_rbee.bench.process_stats import memory_of
from llm_worker_rbee.bench.serving import allow_connections
from llm_worker_rbee.bench.serving.server_process import ServerMonitor, ServerProcess, parse_metrics
from llm_worker_rbee.errors import WorkerError

VISIT_LIMIT_S = 180.0
SETTLE_S = 20.0
WARM_UP_S = 60.0
LARGEST_GROWTH = 0.05
FAILURES_SHOWN = 10
NOTHING_LEFT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(slots=True)
class Soak:
    """A run under way."""

    address: Address
    pid: int | None
    options: argparse.Namespace
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)  # seconds of a visit
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds from the start, bytes
    left: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    async def run(self) -> None:
        """All visitors until the time is over, then a look at what is left."""
        start = time.monotonic()
        client = Client(self.address)
        watcher = asyncio.create_task(self._look(start))
        try:
            async with asyncio.TaskGroup() as visitors:
                for i in range(self.options.concurrency):
                    visitors.create_task(self._visit(client, i, start + 60 * self.options.minutes))
            self.seconds = time.monotonic() - start
            await self._settle(client)
        finally:
            watcher.cancel()
            client.close()

    async def _visit(self, client: Client, number: int, end: float) -> None:
        rng = random.Random(f"{self.options.seed}/{number}")
        visitor = Visitor(client, rng, self.options.longest_prompt, self.options.longest_answer, f"v{number}")
        kinds, weights = list(KINDS), [weight for _, weight in KINDS.values()]
        while time.monotonic() < end:
            kind = rng.choices(kinds, weights)[0]
            await self._once(kind, visitor)

    async def _once(self, kind: str, visitor: Visitor) -> None:
        self.done[kind] += 1
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.options.visit_limit):
                await KINDS[kind][0](visitor)
        except Refused:
            self.refused[kind] += 1
            await asyncio.sleep(0.2)
        except TimeoutError:
            self._fail(kind, f"no end within {self.options.visit_limit:g} s")
        except (OursError, RequestFailedError, OSError, ValueError, LookupError, TypeError) as error:
            self._fail(kind, f"{type(error).__name__}: {error}")
        finally:
            self.longest[kind] = max(self.longest.get(kind, 0.0), time.monotonic() - start)

    def _fail(self, kind: str, told: str) -> None:
        self.failed[kind] += 1
        if len(self.failures) < FAILURES_SHOWN:
            self.failures.append(f"{kind}: {told}")

    async def _look(self, start: float) -> None:
        while True:
            if self.pid is not None and (used := memory_of(self.pid).get("VmRSS")):
                self.memory.append((time.monotonic() - start, used))
            if len(self.memory) % 10 == 1 or self.pid is None:
                self._show(time.monotonic() - start)
            await asyncio.sleep(1.0)

    def _show(self, seconds: float) -> None:
        used = f"{self.memory[-1][1] / 1e6:.1f} MB" if self.memory else "memory unknown"
        counts = f"{self.done.total()} visits, {self.refused.total()} refused, {self.failed.total()} failed"
        print(f"{seconds:6.0f} s  {counts}, {used}", file=sys.stderr, flush=True)

    async def _settle(self, client: Client) -> None:
        """What is still held, once those who left have been noticed."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            try:
                async with client.request("GET", "/metrics") as response:
                    found = parse_metrics(await response.text(1 << 22))
            except RequestFailedError as error:
                return self._fail("looks around", f"GET /metrics afterwards: {error}")
            self.left = {name: found[name] for name in NOTHING_LEFT if name in found}
            if not any(self.left.values()):
                return None
            await asyncio.sleep(0.1)

    def growth(self) -> float | None:
        """The highest use after the first minute, or half of a shorter run, over the highest until then; less 1."""
        border = min(WARM_UP_S, self.seconds / 2)
        before = [used for moment, used in self.memory if moment <= border]
        after = [used for moment, used in self.memory if moment > border]
        return max(after) / max(before) - 1 if before and after else None


def checks(soak: Soak, health: dict[str, float]) -> dict[str, tuple[bool | None, str]]:
    """Each with its outcome (None: not judged) and its figures."""
    growth, limit = soak.growth(), soak.options.health_ms / 1000
    long_enough = soak.seconds >= 2 * WARM_UP_S
    slowest = health.get("health/p99")
    asked = soak.done.total() - soak.refused.total()
    return {
        "no error of the server's": (not soak.failed, f"{soak.failed.total()} of {soak.done.total()} visits"),
        "visitors were let in": (asked > soak.done.total() / 2, f"{soak.refused.total()} refused"),
        "nothing is left": (
            len(soak.left) == len(NOTHING_LEFT) and not any(soak.left.values()), str(soak.left)
        ),
        "always healthy": (health.get("health/failed") == 0, f"{health.get('health/failed')} replies were not"),
        "health is quick": (
            None if not limit or slowest is None else slowest < limit,
            ", ".join(f"{name.partition('/')[2]} {1000 * value:.2f} ms" for name, value in health.items()
                      if name != "health/failed"),
        ),
        "memory does not grow": (
            None if growth is None or not long_enough else growth < LARGEST_GROWTH,
            "unknown" if growth is None else f"{growth:+.2%} after the beginning",
        ),
    }  # fmt: skip


def report(soak: Soak, health: dict[str, float]) -> bool:
    """Table, failures, checks, JSON; whether all is well."""
    print(f"{'':20}{'VISITS':>8}{'REFUSED':>9}{'FAILED':>8}{'LONGEST':>10}")
    for kind in KINDS:
        counts = f"{soak.done[kind]:8}{soak.refused[kind]:9}{soak.failed[kind]:8}"
        print(f"{kind:20}{counts}{soak.longest.get(kind, 0.0):8.1f} s")
    for line in soak.failures:
        print(f"failed: {line}")
    found = checks(soak, health)
    print()
    for name, (outcome, told) in found.items():
        print(f"{ {True: 'ok', False: 'FAILED', None: 'not judged'}[outcome]:10}  {name}: {told}")
    memory = [used for _, used in soak.memory]
    told_json: dict[str, Any] = {
        "seconds": round(soak.seconds, 1), "visits": soak.done.total(), "refused": soak.refused.total(),
        "failed": soak.failed.total(), "checks": {name: outcome for name, (outcome, _) in found.items()},
        "growth": soak.growth(), "memory_median": statistics.median(memory) if memory else None, **health,
    }  # fmt: skip
    print(json.dumps(told_json))
    return all(outcome is not False for outcome, _ in found.values())


def soaked(url: str, pid: int | None, options: argparse.Namespace) -> bool:
    """The whole of it against a server that is there."""
    allow_connections(4 * options.concurrency)
    soak = Soak(Address.parse(url), pid, options)
    watch = ServerMonitor(soak.address.authority, pid)
    watch.open()
    try:
        watch.begin()
        asyncio.run(soak.run())
        watch.end()
    finally:
        watch.close()
    return report(soak, {r.name: r.estimate for r in watch.results() if r.name.startswith("health/")})


def main() -> int:
    """From the command line."""
    add = (parser := argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])).add_argument
    add("--minutes", type=float, default=10.0)
    add("--url", help="a server that runs already; otherwise one is started (its memory is then not known)")
    add("-m", "--model", help="the model of the server that is started")
    add("--kv-memory", default="64M", help="of that server: small, so that it is soon full")
    add("--job-ttl", default="5", help="of that server: seconds after which ended jobs are forgotten")
    add("--concurrency", type=int, default=24, help="visitors at once")
    add("--longest-prompt", type=int, default=400, help="in words")
    add("--longest-answer", type=int, default=96, help="in tokens")
    add("--health-ms", type=float, default=10.0, help="the limit of /health's 99th percentile; 0: only told")
    add("--visit-limit", type=float, default=VISIT_LIMIT_S, help="seconds in which every visit must end")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        if options.url is not None:
            return 0 if soaked(options.url, None, options) else 1
        args = ["--kv-memory", options.kv_memory, "--job-ttl", options.job_ttl]
        with ServerProcess([*args, *(("-m", options.model) if options.model else ())]) as server:
            good = soaked(server.url, server.pid, options)
            server.require_alive()
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
