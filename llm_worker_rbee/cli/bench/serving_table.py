"""What `bench serving` prints for people."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..terminal import cell, columns, note, style
from .common import quantity

if TYPE_CHECKING:
    from ...bench.results import Result, Run

ENOUGH_FOR_P99 = 300  # so many hold a value above the true one, in 19 cases of 20
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2e": "whole answer",
    "queue_delay": "wait before sending",
    "ttft_from_arrival": "first token, from arrival",
    "e2e_from_arrival": "whole answer, from arrival",
}
WATCHED = {
    "event_throughput": "events",
    "server_processor": "server's processor time",
    "client_processor": "client's processor time",
    "server_peak_memory": "server's memory, at most",
    "health/median": "/health, median",
    "health/p99": "/health, P99",
    "health/max": "/health, slowest",
    "health/failed": "/health, not healthy",
    "server/requests": "requests, as it counts",
    "server/preemptions": "preempted",
    "server/running": "still running",
    "server/kv_cache_in_use": "KV cache still in use",
}


def show(run: "Run") -> None:
    """Counts, latencies, and what was seen of the server."""
    found = {result.name: result for result in run.results}
    _show_counts(run, found)
    head = ["", "MEAN", "MEDIAN", "P95", "P99", "95% INTERVAL OF P95"]
    rows = [[title, *_latency(found, name)] for name, title in TITLES.items() if f"{name}/mean" in found]
    if rows:
        lines = columns([head, *rows], right=[1, 2, 3, 4])
        print("\n" + style(lines[0], "bold"))
        print("\n".join(lines[1:]))
    if rows and found["completed"].estimate < ENOUGH_FOR_P99:
        note(f"P99 of fewer than {ENOUGH_FOR_P99} requests says little more than their largest does")
    _show_watched(found)
    if run.details.get("counted_by") in ("chunks", "both"):
        note("the server did not count all tokens: pieces of text were counted, and words of the prompt")


def _show_counts(run: "Run", found: dict[str, "Result"]) -> None:
    print(style(f"{cell(str(run.settings['url']))}: {cell(str((run.model or {}).get('name')))}\n", "dim"))
    rows = []
    for name, title in (
        ("request_throughput", "requests"),
        ("output_throughput", "output tokens"),
        ("total_token_throughput", "tokens in and out"),
    ):
        if name in found:
            rows.append([title, quantity(found[name].estimate, found[name].unit), _interval(found[name])])
    if "completed" in found:
        rows.append(["completed", f"{found['completed'].estimate:,.0f}", f"in {run.details['duration_s']:.2f} s"])
    print("\n".join(columns(rows, right=[1])))
    if "unsent" in found and found["unsent"].estimate:
        text = f"unsent     {found['unsent'].estimate:,.0f} had arrived, but found no room: see --concurrency"
        print(style(text, "yellow"))
    for kind, count in (found["errors"].fields["by_kind"] if "errors" in found else {}).items():
        told = "; ".join(run.details["errors"].get(kind, ()))
        print(style(f"failed     {count:,} {cell(kind)}: {cell(told)}", "red"))


def _latency(found: dict[str, "Result"], name: str) -> list[str]:
    shown = [quantity(found[f"{name}/{which}"].estimate, "s") for which in ("mean", "median", "p95", "p99")]
    return [*shown, _interval(found[f"{name}/p95"])]


def _interval(result: "Result") -> str:
    return f"{quantity(result.low, result.unit)} .. {quantity(result.high, result.unit)}"


def _show_watched(found: dict[str, "Result"]) -> None:
    """What was seen of the server from outside, where it was looked at."""
    if any(name.startswith(("health/", "server")) for name in found):
        print("\n" + "\n".join(columns(list(_watched(found)), right=[1])))


def _watched(found: dict[str, "Result"]) -> Iterator[list[str]]:
    over = found["itl/p99"].fields.get("over_median") if "itl/p99" in found else None
    if over is not None:
        yield ["gap, P99 over median", f"{over:.2f} x", ""]
    for name, title in WATCHED.items():
        if name in found:
            share = found[name].fields.get("of_a_core")
            more = "" if share is None else f"{share:.0%} of a core"
            yield [title, quantity(found[name].estimate, found[name].unit), more]
