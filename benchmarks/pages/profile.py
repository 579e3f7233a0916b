"""docs/profile.md: where the time of a step goes on each machine and backend, from saved runs."""

from __future__ import annotations

from collections.abc import Mapping

from llm_worker_bench.profile import attention_pass, report
from llm_worker_bench.results import Run

from . import benchmarks

HEAD = """# Profile

Where the time of a prefill and of a decode step goes, by component, with the minimum bytes and operations of each, and
the share of its limit. `llm-worker-rbee profile` prints the same on your machine, and writes flame graphs whose frames
are the kernels. A step goes through the engine as a server's does. On the CPU every task is timed inside the parallel
region, from the end of the task before it to its own; on a GPU the timeline of the device is recorded while steps run
from CUDA graphs; the reference is timed op by op. The limit is the larger of two times: for the bytes at the measured
bandwidth, and for the operations at the measured rate of the product's arithmetic (int8 dot products, float32, float16
on tensor cores). Critical is over 10% of a step, moderate 5 to 10%, minor less.
"""


def markdown(runs: Mapping[str, Run]) -> str:
    """Return the page: the attention pass of the Rust worker first, then each run."""
    passes = {name: run for name, run in runs.items() if run.settings.get("attention_pass")}
    lines = [HEAD]
    if passes:
        lines += ["## The attention pass of the Rust worker", ""]
        lines += ["`profile --attention-pass`, compared with its own report on an unnamed CPU."]
    for run in passes.values():
        lines += ["", f"On {benchmarks.machine_name(run)}:", *report.attention_lines(run)]
    for run in (run for run in runs.values() if run not in passes.values()):
        lines += _section(run)
    return "\n".join(lines)


def _section(run: Run) -> list[str]:
    backend = " and ".join(attention_pass.backends(run))
    sizes = f"batch {batch}" if (batch := int(run.settings.get("batch", 1))) > 1 else "one request"
    title = f"## {(run.model or {}).get('name', 'a model')} on {backend}, {sizes}"
    facts = report.run_facts(run)
    lines = ["", title, "", f"{benchmarks.machine_name(run)}. Limits {facts.get('Limits', '-')}."]
    return [*lines, *report.phase_lines(run, heading="###")]
