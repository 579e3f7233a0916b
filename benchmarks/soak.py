"""Mixed load on a server for minutes: both dialects, streams and whole replies, clients that disconnect, cancel, read
late or slowly, invalid bodies. Checks: no fault of the server, every request ends, health is quick, memory does not
grow, nothing is held at the end. Exit status 1 if a check fails; the last line is JSON.

    python -m benchmarks.soak --minutes 10

The server is started with a small KV cache (--kv-memory), which fills within the first minute: pages are touched at
first use and prefixes stay cached, so that a large cache would look like memory that grows for hours.
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

from benchmarks.soak_clients import BEHAVIOURS, ServerFaultError, ServerFullError, SimulatedClient
from llm_worker_bench.http_client import Address, Client, RequestFailedError
from llm_worker_bench.processes import memory_of
from llm_worker_bench.server_process import ServerMonitor, parse_metrics, worker_server
from llm_worker_bench.serving import raise_file_limit
from llm_worker_rbee.errors import WorkerError

VISIT_TIMEOUT_S = 180.0
SETTLE_S = 20.0
WARM_UP_S = 60.0
MAX_GROWTH = 0.05
MAX_SHOWN_FAILURES = 10
ZERO_AT_END = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(slots=True)
class Soak:
    """The state of a run."""

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
        """Run all clients until the time is over, then check for leftovers."""
        start = time.monotonic()
        client = Client(self.address)
        watcher = asyncio.create_task(self._monitor(start))
        try:
            async with asyncio.TaskGroup() as clients:
                for i in range(self.options.concurrency):
                    clients.create_task(self._run_client(client, i, start + 60 * self.options.minutes))
            self.seconds = time.monotonic() - start
            await self._settle(client)
        finally:
            watcher.cancel()
            client.close()

    async def _run_client(self, client: Client, number: int, end: float) -> None:
        rng = random.Random(f"{self.options.seed}/{number}")
        simulated = SimulatedClient(client, rng, self.options.longest_prompt, self.options.longest_answer, f"v{number}")
        kinds, weights = list(BEHAVIOURS), [weight for _, weight in BEHAVIOURS.values()]
        while time.monotonic() < end:
            kind = rng.choices(kinds, weights)[0]
            await self._run_once(kind, simulated)

    async def _run_once(self, kind: str, simulated: SimulatedClient) -> None:
        self.done[kind] += 1
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.options.visit_limit):
                await BEHAVIOURS[kind][0](simulated)
        except ServerFullError:
            self.refused[kind] += 1
            await asyncio.sleep(0.2)
        except TimeoutError:
            self._fail(kind, f"no end within {self.options.visit_limit:g} s")
        except (ServerFaultError, RequestFailedError, OSError, ValueError, LookupError, TypeError) as error:
            self._fail(kind, f"{type(error).__name__}: {error}")
        finally:
            self.longest[kind] = max(self.longest.get(kind, 0.0), time.monotonic() - start)

    def _fail(self, kind: str, message: str) -> None:
        self.failed[kind] += 1
        if len(self.failures) < MAX_SHOWN_FAILURES:
            self.failures.append(f"{kind}: {message}")

    async def _monitor(self, start: float) -> None:
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
        """Wait until nothing is held; disconnects may take a moment to be noticed."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            try:
                async with client.request("GET", "/metrics") as response:
                    found = parse_metrics(await response.text(1 << 22))
            except RequestFailedError as error:
                return self._fail("looks around", f"GET /metrics afterwards: {error}")
            self.left = {name: found[name] for name in ZERO_AT_END if name in found}
            if not any(self.left.values()):
                return None
            await asyncio.sleep(0.1)

    def growth(self) -> float | None:
        """Return the relative growth of peak memory after the first minute, or after half of a shorter run."""
        border = min(WARM_UP_S, self.seconds / 2)
        before = [used for moment, used in self.memory if moment <= border]
        after = [used for moment, used in self.memory if moment > border]
        return max(after) / max(before) - 1 if before and after else None


def checks(soak: Soak, health: dict[str, float]) -> dict[str, tuple[bool | None, str]]:
    """Return each check with its outcome (None: not judged) and its figures."""
    growth, limit = soak.growth(), soak.options.health_ms / 1000
    long_enough = soak.seconds >= 2 * WARM_UP_S
    slowest = health.get("health/p99")
    num_admitted = soak.done.total() - soak.refused.total()
    return {
        "no error of the server's": (not soak.failed, f"{soak.failed.total()} of {soak.done.total()} visits"),
        "visitors were let in": (num_admitted > soak.done.total() / 2, f"{soak.refused.total()} refused"),
        "nothing is left": (
            len(soak.left) == len(ZERO_AT_END) and not any(soak.left.values()), str(soak.left)
        ),
        "always healthy": (health.get("health/failed") == 0, f"{health.get('health/failed')} replies were not"),
        "health is quick": (
            None if not limit or slowest is None else slowest < limit,
            ", ".join(f"{name.partition('/')[2]} {1000 * value:.2f} ms" for name, value in health.items()
                      if name != "health/failed"),
        ),
        "memory does not grow": (
            None if growth is None or not long_enough else growth < MAX_GROWTH,
            "unknown" if growth is None else f"{growth:+.2%} after the beginning",
        ),
    }  # fmt: skip


def report(soak: Soak, health: dict[str, float]) -> bool:
    """Print table, failures, checks and JSON; return whether no check failed."""
    print(f"{'':20}{'VISITS':>8}{'REFUSED':>9}{'FAILED':>8}{'LONGEST':>10}")
    for kind in BEHAVIOURS:
        counts = f"{soak.done[kind]:8}{soak.refused[kind]:9}{soak.failed[kind]:8}"
        print(f"{kind:20}{counts}{soak.longest.get(kind, 0.0):8.1f} s")
    for line in soak.failures:
        print(f"failed: {line}")
    found = checks(soak, health)
    print()
    for name, (outcome, figures) in found.items():
        print(f"{ {True: 'ok', False: 'FAILED', None: 'not judged'}[outcome]:10}  {name}: {figures}")
    memory = [used for _, used in soak.memory]
    summary: dict[str, Any] = {
        "seconds": round(soak.seconds, 1), "visits": soak.done.total(), "refused": soak.refused.total(),
        "failed": soak.failed.total(), "checks": {name: outcome for name, (outcome, _) in found.items()},
        "growth": soak.growth(), "memory_median": statistics.median(memory) if memory else None, **health,
    }  # fmt: skip
    print(json.dumps(summary))
    return all(outcome is not False for outcome, _ in found.values())


def run_soak(url: str, pid: int | None, options: argparse.Namespace) -> bool:
    """Run the soak against a running server; return whether no check failed."""
    raise_file_limit(4 * options.concurrency)
    soak = Soak(Address.parse(url), pid, options)
    monitor = ServerMonitor(soak.address.authority, pid)
    with monitor, monitor.observe():
        asyncio.run(soak.run())
    return report(soak, {r.name: r.estimate for r in monitor.results if r.name.startswith("health/")})


def main() -> int:
    """Run the command line."""
    add = (parser := argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])).add_argument
    add("--minutes", type=float, default=10.0)
    add("--url", help="a running server, whose memory is not measured; otherwise one is started")
    add("-m", "--model", help="model of the started server")
    add("--kv-memory", default="64M", help="KV cache of the started server: small, so that it is soon full")
    add("--job-ttl", default="5", help="seconds that the started server keeps finished jobs")
    add("--concurrency", type=int, default=24, help="clients at once")
    add("--longest-prompt", type=int, default=400, help="in words")
    add("--longest-answer", type=int, default=96, help="in tokens")
    add("--health-ms", type=float, default=10.0, help="limit of the 99th percentile of /health; 0: not judged")
    add("--visit-limit", type=float, default=VISIT_TIMEOUT_S, help="seconds within which every visit must end")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        if options.url is not None:
            return 0 if run_soak(options.url, None, options) else 1
        args = ["--allow-priority", "--kv-memory", options.kv_memory, "--job-ttl", options.job_ttl]
        with worker_server([*args, *(("-m", options.model) if options.model else ())]) as server:
            good = run_soak(server.url, server.pid, options)
            server.require_alive()
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
