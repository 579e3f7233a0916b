"""Selecting benchmarks, measuring them on one backend or on two in turn, and comparing results with the limit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, pstdev
from typing import Any

from llm_worker_rbee.backends import Backend, select_backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import DownloadError, InvalidRequestError
from llm_worker_rbee.progress import StepProgress

from .. import ROUNDS, statistics
from ..backends import measure_device
from ..baseline import Comparison, compare_results
from ..results import Recorder, Result, round_samples
from ..roofline import Limits, backend_threads, measure_limits
from .cases import Case
from .components import model_file_cases, scheduler_cases
from .kernels import kernel_cases
from .ops import op_cases
from .suite import suite_cases
from .timing import Measurement, TimingPlan, measure


def select(pattern: str | None) -> list[Case]:
    """Return the cases whose name matches the regular expression; raise if there is none."""
    try:
        expression = re.compile(pattern or "")
    except re.error as error:
        raise InvalidRequestError(f"--filter {pattern!r} is not a regular expression: {error}", "filter") from None
    all_cases = [*suite_cases(), *op_cases(), *scheduler_cases(), *model_file_cases(), *kernel_cases()]
    cases = [case for case in all_cases if expression.search(case.name)]
    if not cases:
        families = ", ".join(sorted({case.family for case in all_cases}))
        raise InvalidRequestError(f"--filter {pattern!r} matches no benchmark (there are {families})", "filter")
    return cases


def rename(selected: Sequence[Case], family: str) -> list[Case]:
    """Name the cases of one family after another, to compare with a baseline of that; raise if there are several."""
    families = sorted({case.family for case in selected})
    if len(families) > 1:
        raise InvalidRequestError(
            f"--as {family!r} renames one family, and --filter selects {', '.join(families)}", "as"
        )
    return [replace(case, name=f"{family}{case.name.removeprefix(case.family)}") for case in selected]


def run(
    recorder: Recorder,
    progress: StepProgress,
    selected: Sequence[Case],
    backends: Sequence[str],
    plan: TimingPlan,
    threads: int | None = None,
    rounds: int = ROUNDS,
    isa: str | None = None,
) -> None:
    """Measure each case on each backend, in several rounds over all cases; in a round the backends take turns.

    `isa` is the instruction set that was forced: results of the CPU's kernels are named by it.
    """
    tables = [select_backend("auto", name, None if name == "reference" else threads) for name in backends]
    selected = [case for case in selected if _can_run(case, tables, recorder)]
    total = rounds * len(selected)
    progress("measuring the machine's limits", 0, total)
    limits = {ops.name: _limits(ops) for ops in (ReferenceBackend(), *tables)}
    recorder.details["limits"] = max((limits[ops.name] for ops in tables), key=lambda item: item.operations).as_json()
    taken: dict[str, list[list[Measurement]]] = {case.name: [] for case in selected}  # rounds, then backends
    for index, case in enumerate([*selected] * rounds):

        def on_progress(part: float, index: int = index, name: str = case.name) -> None:
            progress(name, index + part, total)

        on_progress(0.0)
        used = [case.select_ops(ops) for ops in tables]
        try:
            functions = [case.prepare(ops) for ops in used]
        except DownloadError as error:
            recorder.details.setdefault("left_out", {})[case.name] = str(error)
            continue
        if not taken[case.name]:
            for function in functions:
                function()  # loads its code, which would count as the time of a call
        taken[case.name].append(measure(functions, plan, on_progress))
        kept = quietest_rounds(taken[case.name])
        sides = zip(used, _backend_labels(used, isa), zip(*taken[case.name], strict=True), strict=True)
        for ops, label, measured in sides:
            remarks = {"note": case.notes.get(ops.name), "original_s": case.original_s}
            recorder.add_result(make_result(case, label, measured, kept, limits[ops.name], remarks))


def _limits(ops: Backend) -> Limits:
    """Return the limits of a backend's device or threads."""
    measured = measure_device(ops)
    return measure_limits(backend_threads(ops)) if measured is None else Limits.of_device(*measured)


def _can_run(case: Case, tables: Sequence[Any], recorder: Recorder) -> bool:
    """Return whether all backends can run a case; one that they cannot is left out with the reason."""
    if case.backend is None or all(ops.name == case.backend for ops in tables):
        return True
    recorder.details.setdefault("left_out", {})[case.name] = f"only the backend {case.backend} has it"
    return False


def quietest_rounds(rounds: Sequence[Sequence[Measurement]]) -> list[int]:
    """Return the half of the rounds in which all backends together took least: the least disturbed."""
    spent = [sum(statistics.estimate(side.samples).value for side in sides) for sides in rounds]
    return sorted(sorted(range(len(rounds)), key=spent.__getitem__)[: -(-len(rounds) // 2)])


def _backend_labels(used: Sequence[Any], isa: str | None) -> list[str]:
    """Return the names of backends, `cpu:avx2` where the instruction set was forced.

    A backend that is measured against itself, as a test of the noise, is numbered.
    """
    names = [f"{ops.name}:{isa}" if isa and ops.name == "cpu" else str(ops.name) for ops in used]
    return names if len(set(names)) == len(names) else [f"{name}#{i + 1}" for i, name in enumerate(names)]


def make_result(
    case: Case,
    backend: str,
    rounds: Sequence[Measurement],
    kept: Sequence[int],
    limits: Limits,
    remarks: Mapping[str, Any],
) -> Result:
    """Return the samples of the rounds that are kept, with their statistics and the limit."""
    samples, work = [sample for i in kept for sample in rounds[i].samples], case.work
    if backend.startswith("reference"):
        work = work._replace(arithmetic="float32")
    limit_s = limits.min_seconds(work)
    set_aside = [sample for i, item in enumerate(rounds) if i not in kept for sample in item.samples]
    return Result.from_samples(
        case.name,
        "s",
        samples,
        backend=backend,
        iterations=rounds[0].iterations * rounds[0].calls_each,
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
        **{key: value for key, value in remarks.items() if value is not None},
    )


def compare_backends(results: Sequence[Result]) -> list[Comparison]:
    """Compare the second backend with the first where a benchmark ran on two."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    pairs = [both for both in by_name.values() if len(both) == 2]
    return [Comparison(first, second, compare_results(first, second, paired=True)) for first, second in pairs]
