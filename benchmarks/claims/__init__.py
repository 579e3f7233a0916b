"""The claims about the worker that this one descends from, as experiments that anyone can repeat.

Each ends in a verdict, by a rule that is written next to the claim, and in a decision (decisions.py). A new experiment
is a function from a `Harness` to a `Finding` and a row of the table below. page.py writes docs/claims.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llm_worker_bench.results import describe_model
from llm_worker_rbee.errors import InvalidRequestError

from . import architecture, caches, components, harness, masks, optimised_ops, rope, source_tree
from .harness import Finding, Harness
from .page import markdown

__all__ = ["EXPERIMENTS", "NOT_TESTABLE", "Experiment", "markdown", "run", "select"]


class Experiment(NamedTuple):
    """A claim, the rule that judges it, and the function that measures it."""

    claim: str
    rule: str
    run: Callable[[Harness], Finding]


WEIGHTS = (
    "on the reference both sides have float32 weights and the same matrix library, on the kernels both have the file's "
    "own quantized types"
)
EXPERIMENTS = {
    "1": Experiment(
        "a split pipeline (QKV, RoPE and attention as separate modules) fights the framework: one integrated file is "
        "faster",
        "on each backend, for decode and for prefill, confirmed if the integrated block is faster outside the noise at "
        f"most lengths, refuted if the modules are; {WEIGHTS}",
        architecture.run_decoder_block,
    ),
    "2": Experiment(
        "the ready-made components cover 90% of the infrastructure",
        "confirmed if at least 90% of the parts do their job on a real file",
        components.run,
    ),
    "3": Experiment(
        "one cache object (KV + RoPE tables + masks) beats separate ones",
        "on each backend, for decode and for prefill, confirmed if the one object is faster outside the noise at most "
        "lengths, refuted if separate ones are; the memory held stands beside it",
        caches.run_unified_cache,
    ),
    "3a": Experiment(
        "caching causal masks by length pays",
        "on the reference, confirmed if at most lengths the cached mask saves over 10% of creating one and adding it "
        "to the scores, refuted if the interval shows that it saves less; on the kernels, which need no mask, refuted "
        "if attention without one is faster than with a cached one outside the noise",
        masks.run_causal_mask,
    ),
    "4": Experiment(
        "the rewrite gives 2 to 3 times the speed",
        "on each backend, confirmed if the integrated forward is at least 2 times as fast both in prefill and in "
        f"decode, refuted if the interval of either lies below 2; {WEIGHTS}",
        architecture.run_whole_model,
    ),
    "5": Experiment(
        "RoPE is 3 to 5 times faster in the optimised kernel",
        "q and k; on each backend, for decode and for prefill, confirmed if the optimised rotation is at least 3 times "
        "as fast as the formula at most lengths, refuted if the interval lies below 3 at most lengths; the formula "
        "is NumPy's with one thread, on a device PyTorch's; a kernel has all threads of its backend, and also writes "
        "keys and values into the cache",
        rope.run_rope,
    ),
    "6": Experiment(
        '"actual: 6-11% speedup", "impact: 6-11% performance improvement" (mask cache)',
        "both figures; confirmed only if the whole forward pass gains at least 6%",
        masks.run_mask_speedup,
    ),
    "7": Experiment(
        '"causal_mask time reduced by 50-80%" (their expectation before measuring)',
        "per length inside, above or below the range by the whole interval; refuted if below at most lengths, or at "
        "the longest where no side has most",
        masks.run_expected_reduction,
    ),
    "8": Experiment(
        '"improvement scales with sequence length"',
        "confirmed if the relative gain of claim 3a grows over most steps of the length, outside the intervals",
        masks.run_gain_over_length,
    ),
    "9": Experiment(
        '"QKV 61%: cannot optimise"; RoPE, scores, softmax "already optimised"',
        "refuted for a part that is over 10% faster on the kernels outside the noise at most steps, with as many "
        "threads as NumPy has and with all; ops as Python calls them; the reference multiplies by float32 weights",
        optimised_ops.run_optimised_ops,
    ),
    "10": Experiment(
        '"function call overhead: negligible"',
        "refuted where the calls of modules take over 5% of a step: on the reference calls of empty functions, on the "
        "kernels op calls with next to no work, since each of them enters compiled code or launches a kernel",
        architecture.run_call_cost,
    ),
    "11": Experiment(
        '"RoPE cache unification: no benefit", "KV cache already optimal"',
        "as claim 3, in NumPy: refuted for a part if the other way is faster outside the noise at most lengths",
        caches.run_caches_alone,
    ),
    "12": Experiment(
        '"90% reuse of the crates", "~200 lines removed", "simpler architecture"',
        "a table; no verdict where words do not say what is counted",
        source_tree.run_source_tree,
    ),
    "13": Experiment(
        "masks cached for all lengths cost little memory",
        "their bytes stand beside those of the KV cache; refuted if they are more",
        masks.run_mask_memory,
    ),
}
# What cannot be measured, and why.
NOT_TESTABLE = {
    '"7 to 9 hours of work"': "how long people work is no property of the software, and nothing here can repeat it",
    '"simpler architecture" (in claim 12)': "simple is not defined; lines, imports and tests are counted instead",
    '"~200 lines removed" (in claim 12)': "the lines were removed from a program in another language that is not here",
}


def select(only: Sequence[str]) -> list[str]:
    """Return the claims of `only` in the order of the table; all of them if it is empty."""
    selected = [one.strip().lower().removeprefix("claim").strip() for one in only]
    for one, given in zip(selected, only, strict=True):
        if one not in EXPERIMENTS:
            raise InvalidRequestError(f"there is no claim {given!r}: known are {', '.join(EXPERIMENTS)}", "only")
    return [claim for claim in EXPERIMENTS if not selected or claim in selected]


def run(runner: Harness, only: Sequence[str] = ()) -> None:
    """Run experiments; verdicts and tables are added to the recorder's details one by one."""
    claims, details = select(only), runner.recorder.details
    details.update(verdicts=[], tables={}, more_tables={}, claims={}, not_testable=NOT_TESTABLE)
    details["backends"] = {target.name: target.label for target in runner.targets}
    runner.recorder.model = describe_model(runner.model)
    harness.machine_seconds()  # warm up
    speeds = [("before the first claim", harness.machine_seconds())]
    for index, claim in enumerate(claims):
        experiment = EXPERIMENTS[claim]
        runner.claim, runner.position, runner.num_timed = claim, (index, len(claims)), 0
        runner.report_progress("preparing", 0)
        found = experiment.run(runner)
        speeds.append((f"after claim {claim}", harness.machine_seconds()))
        line = harness.verdict_line(claim, found.verdict, found.summary, found.backends)
        details["verdicts"].append({"claim": claim, "line": line, **found._asdict()})
        tables = details["verdicts"][-1].pop("tables")
        details["tables"][claim] = tables[0].rows
        details["more_tables"][claim] = [table._asdict() for table in tables[1:]]
        details["claims"][claim] = {"claim": experiment.claim, "rule": experiment.rule}
        details["drift"] = harness.find_drift(speeds)
    runner.progress("done", len(claims), len(claims))
