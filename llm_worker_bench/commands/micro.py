"""`llm-worker-rbee bench micro`: ops and parts one by one, each against the limit of this machine."""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.cli.loading import set_up
from llm_worker_rbee.cli.terminal import note
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.progress import step_progress

from .. import micro as benchmark
from ..processes import describe_exit, package_environment
from ..results import Recorder, Result, Run
from . import common
from .options import MicroCommand


def micro(options: MicroCommand) -> None:
    """Measure the selected benchmarks, on one or two backends."""
    computing = options.computing
    isas = _parse_isas(computing.cpu_isa)
    used = set_up(replace(computing, cpu_isa=None) if len(isas) > 1 else computing)
    selected = benchmark.select(options.filter)
    if options.rename is not None:
        selected = benchmark.rename(selected, options.rename)
    if options.names:
        print("\n".join(case.name for case in selected))
        return
    if options.ab is not None and (computing.backend != "auto" or len(isas) > 1):
        raise typer.BadParameter("--ab names both backends: leave --backend and several --cpu-isa out")
    backends = [computing.backend] if options.ab is None else _parse_ab(options.ab)
    settings = {
        "filter": options.filter,
        "backends": backends,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "threads": used,
        "cpu_isa": computing.cpu_isa,
        "rename": options.rename,
    }
    show = partial(_show_micro, original=options.original)
    with common.recording("micro", options.results, show, **settings) as recorder:
        if len(isas) > 1:
            for isa in isas:
                _measure_isa(recorder, isa, options, used)
            return
        with step_progress() as progress:
            plan = benchmark.round_plan(options.seconds, options.rounds)
            threads, isa_or_none = computing.kernel_threads, isas[0] if isas else None
            benchmark.run(recorder, progress, selected, backends, plan, threads, options.rounds, isa_or_none)
        if options.ab is not None:
            recorder.details["ab"] = [c.as_json() for c in benchmark.compare_backends(recorder.results())]


def _parse_isas(text: str | None) -> list[str]:
    """Parse `avx2,portable` or `all`."""
    if text is None:
        return []
    usable = cpu_info.available_isas()
    names = usable if text == "all" else [name.strip() for name in text.split(",")]
    if len(names) > 1 and (wrong := [name for name in names if name not in usable]):
        raise typer.BadParameter(f"--cpu-isa {text}: {wrong[0]!r} cannot run here, use some of {', '.join(usable)}")
    return names


def _measure_isa(recorder: Recorder, isa: str, options: MicroCommand, threads: int) -> None:
    """Measure one instruction set in a process of its own, which shows its progress, and take its results over."""
    note(f"instruction set {isa}")
    with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as folder:
        saved = Path(folder) / "run.json"
        command = [
            sys.executable, "-m", "llm_worker_rbee", "bench", "micro", "--backend", "cpu", "--cpu-isa", isa,
            "--threads", str(threads), "--seconds", str(options.seconds), "--rounds", str(options.rounds),
            "--save", str(saved), *(["--filter", options.filter] if options.filter else []),
            *(["--as", options.rename] if options.rename else []),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env=package_environment())
        if done.returncode != 0:
            raise WorkerError(describe_exit(f"bench micro --cpu-isa {isa}", done.returncode, b""))
        run = Run.load(saved)
    recorder.details |= run.details
    for result in run.results:
        recorder.add_result(result)


def _parse_ab(ab: str) -> list[str]:
    key, equals, values = ab.partition("=")
    backends = values.split(",")
    if key != "backend" or not equals or len(backends) != 2 or not all(backends):
        raise typer.BadParameter(f"--ab {ab!r} is not of the form backend=A,B, such as backend=reference,cpu")
    return backends


def _show_micro(run: Run, *, original: bool = False) -> None:
    head = ["", "BACKEND", "TIME", "95% INTERVAL", "OF LIMIT", "BOUND BY", "SAMPLES", "OUTLIERS"]
    head += ["ORIGINAL"] if original else []
    others = [result for result in run.results if not result.name.startswith(benchmark.KERNEL)]
    kernels = [result for result in run.results if result.name.startswith(benchmark.KERNEL)]
    if others or not kernels:
        rows = [_micro_row(item) + ([_original(item)] if original else []) for item in others]
        common.print_table([head, *rows], right=[2, 4, 6, 8])
    if kernels:
        print("\n" if others else "", end="")
        names = list(dict.fromkeys(result.name for result in kernels))  # instruction sets stand below each other
        rows = list(map(_kernel_row, sorted(kernels, key=lambda result: names.index(result.name))))
        head = ["", "BACKEND", "TIME", "95% INTERVAL", "GMAC/S", "GB/S", "SAMPLES"]
        common.print_table([head, *rows], right=[2, 4, 5, 6])
    _note_left_out(run.details.get("left_out", {}))
    if len(run.settings["backends"]) == 2:
        common.show_changes(benchmark.compare_backends(run.results), float("inf"), ("A", "B"))


def _note_left_out(left_out: Mapping[str, str]) -> None:
    """Print why benchmarks were not measured: one line for each family and reason."""
    families = Counter((name.split("/")[0], reason) for name, reason in left_out.items())
    for name, reason in left_out.items():
        family = name.split("/")[0]
        if families[family, reason] == 1:
            note(f"left out {name}: {reason}")
        elif count := families.pop((family, reason), 0):
            note(f"left out {count} of {family}/: {reason}")


def _micro_row(result: Result) -> list[str]:
    fields = result.fields
    outliers = [f"{count} {name.replace('_', ' ')}" for name, count in fields["outliers"].items() if count]
    return [
        result.name,
        str(fields["backend"]),
        common.quantity(result.estimate, result.unit),
        common.interval(result),
        f"{fields['percent_of_limit']:.1f}%",
        str(fields["bound_by"]),
        f"{len(result.samples)} x {fields['iterations']}",
        ", ".join(outliers),
    ]


def _original(result: Result) -> str:
    seconds = result.fields.get("original_s")
    return "" if seconds is None else common.quantity(seconds, result.unit)


def _kernel_row(result: Result) -> list[str]:
    fields, seconds = result.fields, result.estimate
    macs = f"{fields['operations'] / 2e9 / seconds:.1f}" if fields["operations"] else ""
    return [
        result.name,
        str(fields["backend"]),
        common.quantity(seconds, result.unit),
        common.interval(result),
        macs,
        f"{fields['bytes'] / 1e9 / seconds:.2f}",
        f"{len(result.samples)} x {fields['iterations']}",
    ]
