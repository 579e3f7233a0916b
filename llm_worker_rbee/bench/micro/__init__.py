"""Micro-benchmarks: time the cases on one backend, or on two in turn, each beside the limit of the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from ...backends import select_backend
from ...errors import DownloadError, InvalidRequestError
from .. import roofline, statistics
from ..baseline import Comparison, compare_results
from ..results import Recorder, Result, round_samples
from ..roofline import Limits
from ..timing import Measurement, Plan, measure
from .cases import Case, model_file_cases, op_cases, scheduler_cases

Progress = Callable[[str, float, float], None]
ROUNDS = 12  # over all cases: a disturbance of some seconds then meets only a part of each case's samples


def select(pattern: str | None) -> list[Case]:
    """Return the cases whose name matches the regular expression; raise if there is none."""
    try:
        expression = re.compile(pattern or "")
    except re.error as error:
        raise InvalidRequestError(f"--filter {pattern!r} is not a regular expression: {error}", "filter") from None
    all_cases = [*op_cases(), *scheduler_cases(), *model_file_cases()]
    found = [case for case in all_cases if expression.search(case.name)]
    if not found:
        families = ", ".join(sorted({case.name.split("/")[0] for case in all_cases}))
        raise InvalidRequestError(f"--filter {pattern!r} matches no benchmark (there are {families})", "filter")
    return found


def run(
    recorder: Recorder,
    progress: Progress,
    selected: Sequence[Case],
    backends: Sequence[str],
    plan: Plan,
    threads: int | None = None,
) -> None:
    """Measure each case on each backend, in several rounds over all cases; in a round the backends take turns."""
    tables = [select_backend("auto", name, None if name == "reference" else threads) for name in backends]
    progress("measuring the machine's limits", 0, ROUNDS * len(selected))
    limits = roofline.measure_limits(max(map(roofline.backend_threads, tables)))
    recorder.details["limits"] = limits.as_json()
    taken: dict[str, list[list[Measurement]]] = {case.name: [] for case in selected}  # rounds, then backends
    for index, case in enumerate([*selected] * ROUNDS):

        def on_progress(part: float, index: int = index, name: str = case.name) -> None:
            progress(name, index + part, ROUNDS * len(selected))

        on_progress(0.0)
        used = [case.select_ops(ops) for ops in tables]
        try:
            functions = [case.make(ops) for ops in used]
        except DownloadError as error:
            recorder.details.setdefault("left_out", {})[case.name] = str(error)
            continue
        taken[case.name].append(measure(functions, plan, on_progress))
        kept = quietest_rounds(taken[case.name])
        for name, rounds in zip(_backend_labels(used), zip(*taken[case.name], strict=True), strict=True):
            recorder.add_result(make_result(case, name, rounds, kept, limits))


def round_plan(seconds: float) -> Plan:
    """Return the plan of one round, so that all rounds of a case together take so long."""
    return Plan(seconds=seconds / ROUNDS, min_samples=2, max_samples=25, warm_up_s=min(0.02, seconds / 5))


def quietest_rounds(rounds: Sequence[Sequence[Measurement]]) -> list[int]:
    """Return the half of the rounds in which all backends together took least: the least disturbed."""
    spent = [sum(statistics.estimate(side.samples).value for side in sides) for sides in rounds]
    return sorted(sorted(range(len(rounds)), key=spent.__getitem__)[: -(-len(rounds) // 2)])


def backend_name(ops: Any) -> str:
    """Return the name that results give a backend."""
    return str(ops.name)


def _backend_labels(used: Sequence[Any]) -> list[str]:
    """Return the names of backends; one that is measured against itself, as a test of the noise, is numbered."""
    names = [backend_name(ops) for ops in used]
    return names if len(set(names)) == len(names) else [f"{name}#{i + 1}" for i, name in enumerate(names)]


def make_result(case: Case, backend: str, rounds: Sequence[Measurement], kept: Sequence[int], limits: Limits) -> Result:
    """Return the samples of the rounds that are kept, with their statistics and the limit."""
    samples, work = [sample for i in kept for sample in rounds[i].samples], case.work
    limit_s = limits.min_seconds(work)
    set_aside = [sample for i, one in enumerate(rounds) if i not in kept for sample in one.samples]
    return Result.from_samples(
        case.name,
        "s",
        samples,
        backend=backend,
        iterations=rounds[0].iterations,
        rounds=[len(rounds[i].samples) for i in kept],
        set_aside=round_samples(set_aside),
        mean=fmean(samples),
        median=median(samples),
        sd=pstdev(samples),
        outliers=statistics.outliers(samples)._asdict(),
        bytes=work.bytes,
        operations=work.operations,
        limit_s=limit_s,
        bound_by=limits.bound_by(work),
        percent_of_limit=100 * limit_s / statistics.estimate(samples).value,
    )


def compare_backends(results: Sequence[Result]) -> list[Comparison]:
    """Compare the second backend with the first where a benchmark ran on two."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    pairs = [both for both in by_name.values() if len(both) == 2]
    return [Comparison(first, second, compare_results(first, second, paired=True)) for first, second in pairs]
