"""Micro-benchmarks: run the suite on one backend, or on two in turn; how far is each from the machine's limit?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median, pstdev
from typing import Any

from ...backends import pick
from ...errors import DownloadError, InvalidRequestError
from ...llm import open_tokenizer
from ...weights import open_checkpoint
from ...weights.hub import locate
from .. import limits, statistics
from ..baseline import Comparison, change_of
from ..limits import Limits, Work
from ..prompts import TEXT, read_text
from ..results import Recorder, Result
from ..timing import Function, Measured, Plan, measure
from .suite import Case, cases

Steps = Callable[[str, float, float], None]
ENCODED_CHARACTERS = 4096


def select(pattern: str | None) -> list[Case]:
    """The benchmarks whose name holds the regular expression; one that matches nothing is a mistake."""
    try:
        wanted = re.compile(pattern or "")
    except re.error as error:
        raise InvalidRequestError(f"--filter {pattern!r} is not a regular expression: {error}", "filter") from None
    everything = [*cases(), *file_cases()]
    found = [case for case in everything if wanted.search(case.name)]
    if not found:
        families = sorted({case.name.split("/")[0] for case in everything})
        raise InvalidRequestError(
            f"--filter {pattern!r} matches no benchmark (there are {', '.join(families)})", "filter"
        )
    return found


def run(recorder: Recorder, steps: Steps, selected: Sequence[Case], backends: Sequence[str], plan: Plan) -> None:
    """Measure each case on each backend; on several, their samples are taken in turn."""
    tables = [pick("auto", name) for name in backends]
    steps("measuring the machine's limits", 0, len(selected))
    bounds = limits.measured(limits.library_threads())
    recorder.details["limits"] = bounds.as_json()
    for number, case in enumerate(selected):

        def tick(part: float, number: int = number, name: str = case.name) -> None:
            steps(name, number + part, len(selected))

        tick(0.0)
        used = [case.ops_for(ops) for ops in tables]
        try:
            functions = [case.make(ops) for ops in used]
        except DownloadError as error:
            recorder.details.setdefault("left_out", {})[case.name] = str(error)
            continue
        for name, taken in zip(_labels(used), measure(functions, plan, tick), strict=True):
            recorder.put(result_of(case, name, taken, bounds))


def name_of(ops: Any) -> str:
    """What a backend is called."""
    return str(ops.__name__).rpartition(".")[2]


def _labels(used: Sequence[Any]) -> list[str]:
    """One backend against itself is a test of the noise: its sides are told apart."""
    names = [name_of(ops) for ops in used]
    if len(set(names)) == len(names):
        return names
    return [f"{name}#{i + 1}" for i, name in enumerate(names)]


def result_of(case: Case, backend: str, taken: Measured, bounds: Limits) -> Result:
    """The samples, with everything one wants to know beside them."""
    samples, work = taken.samples, case.work
    least = bounds.seconds(work)
    middle = statistics.estimate(samples).value
    return Result.of(
        case.name,
        "s",
        samples,
        backend=backend,
        iterations=taken.iterations,
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


def file_cases() -> Iterator[Case]:
    """Benchmarks on the built-in model, which is fetched if it is not here."""
    size = float(ENCODED_CHARACTERS)
    yield Case("tokenizer/encode", _encode, Work(size), needs="tokenizer")
    yield Case("tokenizer/decode", _decode, Work(size), needs="tokenizer")
    yield Case("gguf_open", _gguf_open, Work(2e6), needs="tokenizer")  # about 2 MB of metadata in the built-in model


def _encode(_: Any) -> Function:
    tokenizer, text = open_tokenizer(open_checkpoint(locate(None))), read_text(TEXT)[:ENCODED_CHARACTERS]
    return lambda: tokenizer.encode(text)


def _decode(_: Any) -> Function:
    tokenizer = open_tokenizer(open_checkpoint(locate(None)))
    ids = tokenizer.encode(read_text(TEXT)[:ENCODED_CHARACTERS])
    return lambda: tokenizer.decode(ids)


def _gguf_open(_: Any) -> Function:
    path = locate(None)
    return lambda: open_checkpoint(path)


def pairs(results: Sequence[Result]) -> list[Comparison]:
    """Where a benchmark ran on two backends: the second compared with the first."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    twice = [both for both in by_name.values() if len(both) == 2]
    return [Comparison(first, second, change_of(first, second)) for first, second in twice]
