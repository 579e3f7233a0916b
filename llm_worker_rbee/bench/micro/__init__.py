"""Micro-benchmarks: run the suite on one backend, or on two in turn; how far is each from the machine's limit?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from ...backends import select_backend
from ...errors import DownloadError, InvalidRequestError
from .. import roofline, statistics
from ..baseline import Comparison, change_of
from ..results import Recorder, Result, rounded
from ..roofline import Limits
from ..timing import Measured, Plan, measure
from .cases import Case, model_file_cases, op_cases, scheduler_cases

Steps = Callable[[str, float, float], None]
ROUNDS = 12  # over the whole suite: what disturbs the machine for some seconds then meets a part of them only


def select(pattern: str | None) -> list[Case]:
    """The benchmarks whose name holds the regular expression; one that matches nothing is a mistake."""
    try:
        wanted = re.compile(pattern or "")
    except re.error as error:
        raise InvalidRequestError(f"--filter {pattern!r} is not a regular expression: {error}", "filter") from None
    everything = [*op_cases(), *scheduler_cases(), *model_file_cases()]
    found = [case for case in everything if wanted.search(case.name)]
    if not found:
        families = sorted({case.name.split("/")[0] for case in everything})
        raise InvalidRequestError(
            f"--filter {pattern!r} matches no benchmark (there are {', '.join(families)})", "filter"
        )
    return found


def run(
    recorder: Recorder,
    steps: Steps,
    selected: Sequence[Case],
    backends: Sequence[str],
    plan: Plan,
    threads: int | None = None,
) -> None:
    """Measure each case on each backend, in several rounds over all cases; in a round the backends take turns."""
    tables = [select_backend("auto", name, None if name == "reference" else threads) for name in backends]
    steps("measuring the machine's limits", 0, ROUNDS * len(selected))
    bounds = roofline.measured(max(map(roofline.threads_of, tables)))
    recorder.details["limits"] = bounds.as_json()
    taken: dict[str, list[list[Measured]]] = {case.name: [] for case in selected}  # rounds, then sides
    for number, case in enumerate([*selected] * ROUNDS):

        def tick(part: float, number: int = number, name: str = case.name) -> None:
            steps(name, number + part, ROUNDS * len(selected))

        tick(0.0)
        used = [case.ops_for(ops) for ops in tables]
        try:
            functions = [case.make(ops) for ops in used]
        except DownloadError as error:
            recorder.details.setdefault("left_out", {})[case.name] = str(error)
            continue
        taken[case.name].append(measure(functions, plan, tick))
        for name, rounds in zip(_labels(used), zip(*taken[case.name], strict=True), strict=True):
            recorder.put(result_of(case, name, rounds, quietest(taken[case.name]), bounds))


def plan(seconds: float) -> Plan:
    """How each round measures a case, so that its rounds together take so long."""
    return Plan(seconds=seconds / ROUNDS, fewest=2, most=25, warm_up=min(0.02, seconds / 5))


def quietest(rounds: Sequence[Sequence[Measured]]) -> list[int]:
    """Half of the rounds, those in which the sides together took least: other programs were least in the way."""
    spent = [sum(statistics.estimate(side.samples).value for side in sides) for sides in rounds]
    return sorted(sorted(range(len(rounds)), key=spent.__getitem__)[: -(-len(rounds) // 2)])


def name_of(ops: Any) -> str:
    """What a backend is called."""
    return str(ops.name)


def _labels(used: Sequence[Any]) -> list[str]:
    """One backend against itself is a test of the noise: its sides are told apart."""
    names = [name_of(ops) for ops in used]
    if len(set(names)) == len(names):
        return names
    return [f"{name}#{i + 1}" for i, name in enumerate(names)]


def result_of(case: Case, backend: str, rounds: Sequence[Measured], kept: Sequence[int], bounds: Limits) -> Result:
    """The samples of the rounds that are kept, with everything one wants to know beside them."""
    samples, work = [sample for i in kept for sample in rounds[i].samples], case.work
    least = bounds.seconds(work)
    middle = statistics.estimate(samples).value
    set_aside = [sample for i, one in enumerate(rounds) if i not in kept for sample in one.samples]
    return Result.of(
        case.name,
        "s",
        samples,
        backend=backend,
        iterations=rounds[0].iterations,
        rounds=[len(rounds[i].samples) for i in kept],
        set_aside=rounded(set_aside),
        mean=fmean(samples),
        median=median(samples),
        sd=pstdev(samples),
        outliers=statistics.outliers(samples)._asdict(),
        bytes=work.bytes,
        operations=work.operations,
        limit_s=least,
        bound_by=bounds.bound_by(work),
        percent_of_limit=100 * least / middle,
    )


def pairs(results: Sequence[Result]) -> list[Comparison]:
    """Where a benchmark ran on two backends: the second compared with the first."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    twice = [both for both in by_name.values() if len(both) == 2]
    return [Comparison(first, second, change_of(first, second, paired=True)) for first, second in twice]
