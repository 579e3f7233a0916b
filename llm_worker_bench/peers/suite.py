"""Measuring rows and peers in turn by repetition, and the table of the results.

A peer that is not installed is left out with the reason; one that fails is named and the others go on, and so do the
other rows. Ratios are computed for each repetition, since a machine that changes its speed changes both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError, WorkerError
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights import Checkpoint, open_checkpoint

from .. import statistics
from ..processes import busy_cores
from ..results import Recorder, Result, Run, describe_model, quantity, spread
from .find import context_of, find_peers, own_peers
from .plan import Plan, Row, make_file
from .programs import OURS, Peer, PeerError, Task


def run_rows(
    recorder: Recorder,
    progress: StepProgress,
    rows: Sequence[Row],
    folder: Path,
    plan: Plan,
    on_row: Callable[[Row], None] = lambda row: None,
) -> None:
    """Measure each row; with several, results are named `ROW TEST/PEER`, and a row that fails is named."""
    if len(rows) == 1:
        path = make_file(rows[0], folder, progress)
        run(recorder, progress, path, plan.for_row(rows[0]))
        return
    recorder.model = {"name": ", ".join(row.name for row in rows), "bytes": 0}
    for number, row in enumerate(rows):

        def show(what: str, done: float, total: float, number: int = number, name: str = row.name) -> None:
            progress(f"{name}: {what}", number + (done / total if total else 0.0), len(rows))

        try:
            path = make_file(row, folder, show)
            run(recorder, show, path, plan.for_row(row), row.name)
        except WorkerError as error:
            recorder.details.setdefault("failed", {})[row.name] = str(error)
        on_row(row)


def run(recorder: Recorder, progress: StepProgress, model: Path, plan: Plan, row: str = "") -> None:
    """Start all peers that are installed, then measure them in turn."""
    prefix = f"{row} " if row else ""
    checkpoint = open_checkpoint(model)
    tasks = _validated_tasks(checkpoint, plan)
    _describe(recorder, model, row, progress)
    busy = recorder.details.setdefault("busy_cores", {}).setdefault(row or model.name, [busy_cores()])
    left_out = dict[str, str]()
    peers = [*own_peers(model, plan, tasks), *find_peers(model, checkpoint, plan, tasks, left_out)]
    recorder.details.setdefault("left_out", {}).update({prefix + name: reason for name, reason in left_out.items()})
    samples, rounds = dict[Task, dict[Peer, list[float]]](), plan.repetitions + 1
    try:
        for number in range(rounds):
            turn = list(reversed(peers)) if number and number % 2 == 0 else list(peers)
            for place, peer in enumerate(turn):
                what = f"{number} of {plan.repetitions}" if number else "loading and warming up"
                progress(f"{peer.name}: {what}", number + place / len(turn), rounds)
                try:
                    _measure(recorder, peer, tasks, samples, prefix) if number else peer.warm_up(tasks)
                except PeerError as error:
                    peer.close()
                    if peer.name == OURS:  # there is nothing to compare with
                        raise
                    peers.remove(peer)
                    recorder.details.setdefault("failed", {})[prefix + peer.name] = str(error)
    finally:
        for peer in peers:
            peer.close()
        busy.append(busy_cores())


def _describe(recorder: Recorder, model: Path, row: str, progress: StepProgress) -> None:
    described = describe_model(model, progress)
    if not row:
        recorder.model = described
        return
    recorder.details.setdefault("models", {})[row] = described
    assert recorder.model is not None
    recorder.model["bytes"] += described["bytes"]


def _measure(
    recorder: Recorder, peer: Peer, tasks: Sequence[Task], samples: dict[Task, dict[Peer, list[float]]], prefix: str
) -> None:
    """Run each task once and make all its results anew: their ratios to this worker change with every sample."""
    for task in filter(peer.can_run, tasks):
        rate = peer.measure_rate(task)
        samples.setdefault(task, {}).setdefault(peer, []).append(rate)
        ours = next((rates for own, rates in samples[task].items() if own.name == OURS), [])
        for own, rates in samples[task].items():
            ratio = statistics.estimate([a / b for a, b in zip(ours, rates, strict=False)])
            value, low, high = ratio if ours else (None, None, None)
            recorder.details.setdefault("peers", {})[own.name] = {"version": own.version, "settings": own.settings}
            fields = {"peer": own.name, "version": own.version, "ours_over_peer": value, "ratio_interval": [low, high]}
            name = f"{prefix}{task.name}/{own.name}"
            recorder.add_result(Result.from_samples(name, "tok/s", rates, "higher", **fields))


def _validated_tasks(checkpoint: Checkpoint, plan: Plan) -> list[Task]:
    """Return the tasks; raise if there is none, or one exceeds the context."""
    tasks, context = plan.tasks(checkpoint), read_model_config(checkpoint).context_length
    if not tasks:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    longest = max(tasks, key=context_of)
    if context_of(longest) > context:
        needed = f"{longest.name} needs {context_of(longest)} tokens, the model's context has {context}"
        raise ContextLengthError(f"{needed}: use a smaller --{longest.kind}", longest.kind)
    return tasks


def compared(run: Run, row: str = "") -> Iterator[tuple[str, Result, Result]]:
    """Yield the name, this worker's result and a peer's, for each test; of one row, or of all."""
    own = {result.name.rpartition("/")[0]: result for result in run.results if result.fields["peer"] == OURS}
    for result in run.results:
        test = result.name.rpartition("/")[0]
        if result.fields["peer"] != OURS and test in own and test.startswith(f"{row} " if row else ""):
            yield test, own[test], result


def ratio_text(result: Result) -> str:
    """Return `2.65 (2.60 to 2.71)`."""
    low, high = result.fields["ratio_interval"]
    return f"{result.fields['ours_over_peer']:.2f} ({low:.2f} to {high:.2f})"


def markdown(run: Run) -> str:
    """Return the run as a table in Markdown, with machine, commit and load."""
    commit = str((run.commit or {}).get("id") or "none")[:7]
    threads = run.settings["threads"]
    head = [
        f"{run.machine['cpu']}, {run.machine['cores']} cores, {threads} threads, {run.created}, commit {commit}.",
        "",
        "| test | peer | this worker | peer | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = [
        f"| {test} | {theirs.fields['peer']}, {theirs.fields['version']} | {_value(ours)} | {_value(theirs)} "
        f"| {ratio_text(theirs)} |"
        for test, ours, theirs in compared(run)
    ]
    busy = [f"{name} {_cores(before)} and {_cores(after)}" for name, (before, after) in busy_rows(run)]
    load = f"Cores that were busy before and after each row: {'; '.join(busy)}." if busy else ""
    missing = [
        f"- {what.replace('_', ' ')}: {name}: {reason}"
        for what in ("left_out", "failed")
        for name, reason in run.details.get(what, {}).items()
    ]
    return "\n".join([*head, *rows, "", *missing, *[""] * bool(missing), load]).rstrip() + "\n"


def busy_rows(run: Run) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
    """Yield the busy cores before and after each finished row."""
    for name, values in run.details.get("busy_cores", {}).items():
        if len(values) == 2:
            yield name, (values[0], values[1])


def _cores(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _value(result: Result) -> str:
    return f"{quantity(result.estimate, result.unit)} ({spread((result.low, result.high), result.unit)})"
