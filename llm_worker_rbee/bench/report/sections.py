"""How each kind of run is shown: functions from a run to HTML, and the table that says which of them a kind gets.

A view gives nothing where a run has nothing for it: a kind of run that nobody foresaw is shown as far as it can be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from .. import statistics
from ..format import digits, percent, quantity, spread
from ..results import Result, Run
from . import result_names
from .html import Html, Table, badge, bar, folded, heading, html, joined, notice, soft, table
from .plot_views import LATENCIES, categories, distributions, latencies, lengths, roofline
from .plots import Plots
from .result_names import family, measurable, number

View = Callable[[Run, Plots], Html]
OURS = "llm-worker-rbee"
FIGURE = re.compile(r"[+-]?\d|-$")


def results_table(run: Run, _: Plots) -> Html:
    """Every result with its interval, and how near the machine's limit it is."""
    return table(table_of(run, run.results, f"{len(run.results)} results; intervals are 95% bootstrap intervals"))


def table_of(run: Run, results: Sequence[Result], caption: str) -> Table:
    """The columns that these results need."""
    backends = result_names.several_backends(results)
    limits = any(number(r, "percent_of_limit") is not None for r in results)
    sampled = any(r.samples for r in results)
    head = ["", "estimate", "interval"] + ["% of limit", "bound by"] * limits + ["samples", "outliers"] * sampled
    rows: list[list[object]] = []
    for r in results:
        row: list[object] = [result_names.label(r, backends=backends), readable(r.estimate, r.unit), interval(r)]
        row += [of_limit(r), str(r.fields.get("bound_by") or "")] if limits else []
        row += [str(len(r.samples) or ""), outliers(r)] if sampled else []
        rows.append(row)
    sizes = [len(list(group)) for _, group in groupby(results, lambda r: family(r.name))]
    starts = [sum(sizes[:i]) for i in range(1, len(sizes)) if max(sizes[i - 1 : i + 1]) > 1]  # of more than one row
    return Table(caption, head, rows, (1, 2, *((5,) if limits else (3,))) if sampled else (1, 2), frozenset(starts))


def readable(value: float, unit: str) -> str:
    """A figure on a page, where there is a letter for micro."""
    return quantity(value, unit).replace(" us", " µs")


def interval(result: Result) -> str:
    """The two ends; nothing for a figure without spread."""
    if result.low == result.high or not np.isfinite([result.low, result.high]).all():
        return ""
    return spread((result.low, result.high), result.unit).replace(" us", " µs")


def of_limit(result: Result) -> Html | str:
    """A bar that is full at the limit."""
    share = number(result, "percent_of_limit")
    return "" if share is None else bar(share / 100, percent(share))


def outliers(result: Result) -> str:
    """`2 high, 1 low` of the samples."""
    if len(result.samples) < statistics.FEWEST:
        return ""
    found = statistics.outliers(result.samples)
    low, high = found.low_mild + found.low_severe, found.high_mild + found.high_severe
    return ", ".join(f"{count} {side}" for count, side in ((high, "high"), (low, "low")) if count)


def pivot(run: Run, plots: Plots) -> Html:
    """`row/column` names as tables of rows and columns, one for each unit; what has no column stands before them."""
    loose = [r for r in run.results if "/" not in r.name]
    parts = [table(table_of(run, loose, "figures of the whole run"))] if loose else []
    for unit in dict.fromkeys(r.unit for r in run.results if "/" in r.name):
        pairs = {_split(r.name): r for r in run.results if "/" in r.name and r.unit == unit}
        rows, columns = (list(dict.fromkeys(pair[i] for pair in pairs)) for i in (0, 1))
        cells = [[LATENCIES.get(row, row), *(_cell(pairs.get((row, c))) for c in columns)] for row in rows]
        parts.append(table(Table("by part", ["", *columns], cells, range(1, len(columns) + 1))))
    return joined([*parts, others(run, plots)])


def _split(name: str) -> tuple[str, str]:
    row, _, column = name.rpartition("/")
    return row, column


def _cell(result: Result | None) -> str:
    return "" if result is None else readable(result.estimate, result.unit)


def peers(run: Run, _: Plots) -> Html:
    """Ours beside the others, test by test."""
    tests: dict[str, dict[str, Result]] = {}
    for r in run.results:
        test, slash, peer = r.name.partition("/")
        tests.setdefault(test, {})[str(r.fields.get("peer") or peer) if slash else OURS] = r
    rows: list[list[object]] = []
    starts = set()
    for test, by_peer in tests.items():
        starts.add(len(rows))
        ours = by_peer.get(OURS)
        best = max((r.estimate for r in by_peer.values() if measurable(r)), default=1.0)
        for peer, r in by_peer.items():
            ratio = ours.estimate / r.estimate if ours is not None and r.estimate else float("nan")
            speed = (
                bar(r.estimate / best, readable(r.estimate, r.unit)) if measurable(r) else readable(r.estimate, r.unit)
            )
            told = "" if ours is r or ratio != ratio else f"{digits(ratio)}×"
            rows.append([f"{test} · {peer}", speed, interval(r), told, str(r.fields.get("version") or "")])
    head = ["", "result", "interval", f"{OURS} / this", "version"]
    return table(Table("the same file, lengths and machine, in one run", head, rows, (2, 3), frozenset(starts - {0})))


def verdicts(run: Run, _: Plots) -> Html:
    """One line for each claim."""
    found = run.details.get("verdicts")
    lines = []
    for one in found if isinstance(found, list) else ():
        value: dict[str, Any] = one if isinstance(one, dict) else {"line": one}
        told = html(value.get("line") or value.get("claim") or "")
        lines.append(f"<li>{badge(str(value.get('verdict') or 'told'))} {told}</li>")
    return Html(f'<ul class="verdicts">{"".join(lines)}</ul>') if lines else Html()


def claims(run: Run, _: Plots) -> Html:
    """What was measured for each claim, and the rule that its verdict follows."""
    tables, told = run.details.get("tables"), run.details.get("claims")
    made = []
    for name, rows in tables.items() if isinstance(tables, dict) else ():
        whole = isinstance(rows, list) and len(rows) > 1 and all(isinstance(row, list) for row in rows)
        if not whole or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            continue
        known = told.get(name) if isinstance(told, dict) else None
        text, rule = (str(known.get(key) or "") for key in ("claim", "rule")) if isinstance(known, dict) else ("", "")
        numbers = [i for i in range(1, len(rows[0])) if all(FIGURE.match(str(row[i])) for row in rows[1:])]
        made += [heading(f"Claim {name}: {text}"), soft(rule) if rule else ""]
        made.append(table(Table(f"what was measured for claim {name}", rows[0], rows[1:], numbers)))
    return joined(made)


def sides(run: Run, _: Plots) -> Html:
    """Two backends whose samples were taken in turn."""
    found = run.details.get("ab")
    rows: list[list[object]] = []
    for one in found if isinstance(found, list) else ():
        if isinstance(one, dict) and all(type(one.get(key)) in (int, float) for key in ("before", "after", "change")):
            unit, ends = str(one.get("unit") or ""), [one.get(key) for key in ("low", "high")]
            spread = f"{ends[0]:+.1%} to {ends[1]:+.1%}" if all(type(end) in (int, float) for end in ends) else ""
            values = [readable(one[key], unit) for key in ("before", "after")]
            rows.append([one.get("name"), *values, f"{one['change']:+.1%}", spread, badge(str(one.get("verdict")))])
    if not rows:
        return Html()
    backends = " and ".join(map(str, listed)) if isinstance(listed := run.settings.get("backends"), list) else "A and B"
    head = ["", "first", "second", "change", "99% interval", "verdict"]
    return joined(
        [heading(f"{backends}, in turn"), table(Table("the second against the first", head, rows, (1, 2, 3, 4)))]
    )


def shares(run: Run, _: Plots) -> Html:
    """Where the time of a step goes, the largest part first."""
    phases: dict[str, list[Result]] = {}
    for r in run.results:
        if number(r, "share") is not None:
            phases.setdefault(family(r.name), []).append(r)
    made = []
    for phase, results in phases.items():
        rows: list[list[object]] = []
        for r in sorted(results, key=lambda r: -(number(r, "share") or 0)):
            share, rank = number(r, "share") or 0.0, str(r.fields.get("class") or "")
            name = r.name.removeprefix(f"{phase}/")
            rows.append(
                [
                    name,
                    bar(share, f"{share:.1%}", rank),
                    badge(rank) if rank else "",
                    readable(r.estimate, r.unit),
                    of_limit(r),
                ]
            )
        made += [
            heading(phase),
            table(Table(f"{phase}: time of a step", ["", "share", "class", "time", "% of limit"], rows, (3,))),
        ]
    return joined(made)


def missing(run: Run) -> Html:
    """What could not be measured, or not wholly, and why."""
    told = [str(run.details["warning"])] if run.details.get("warning") else []
    for key, words in {"left_out": "left out", "failed": "failed"}.items():
        found = run.details.get(key)
        told += [f"{words}: {name}: {why}" for name, why in found.items()] if isinstance(found, dict) else []
    return joined(map(notice, told))


def others(run: Run, plots: Plots) -> Html:
    """All results, folded: what a view above shows differently."""
    return folded("All results with their intervals", results_table(run, plots))


VIEWS: dict[str, Sequence[View]] = {
    "micro": (sides, results_table, roofline, lengths, categories, distributions),
    "e2e": (results_table, lengths, distributions),
    "load": (pivot, distributions),
    "serving": (pivot, latencies),
    "peers": (peers, lengths, distributions),
    "accuracy": (results_table,),
    "profile": (shares, others, roofline),
    "experiments": (verdicts, claims, others, lengths, distributions),
}
PLAIN: Sequence[View] = (results_table, lengths, categories, distributions)


def show(run: Run, plots: Plots) -> Html:
    """All that there is to see of a run."""
    shown = [view(run, plots) for view in VIEWS.get(run.kind, PLAIN)]
    return joined([part for part in (missing(run), *shown) if part])
