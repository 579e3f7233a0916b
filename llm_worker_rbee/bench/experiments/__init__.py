"""The claims about the worker that this one descends from, as experiments that anyone can run again.

Each ends in a verdict: confirmed, refuted or within noise, by a rule that is written beside the claim. A new experiment
is a function from a `Lab` to a `Finding` and a line in the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import InvalidRequestError
from .. import environment
from . import causal_mask, components, fused_block, rope, unified_cache, whole_forward
from .harness import Finding, Lab, Verdict

__all__ = ["EXPERIMENTS", "Experiment", "Finding", "Lab", "Verdict", "choose", "run"]


class Experiment(NamedTuple):
    """A claim, what would confirm it, and the function that finds out."""

    claim: str
    rule: str
    run: Callable[[Lab], Finding]


EXPERIMENTS = {
    "1": Experiment(
        "a split pipeline (QKV, RoPE and attention as separate modules) fights the framework: one integrated file is "
        "faster",
        fused_block.RULE,
        fused_block.run,
    ),
    "2": Experiment("the ready-made components cover 90% of the infrastructure", components.RULE, components.run),
    "3": Experiment(
        "one cache object (KV + RoPE tables + masks) beats separate ones", unified_cache.RULE, unified_cache.run
    ),
    "3a": Experiment("caching causal masks by length pays", causal_mask.RULE, causal_mask.run),
    "4": Experiment("the rewrite gives 2 to 3 times the speed", whole_forward.RULE, whole_forward.run),
    "5": Experiment("RoPE is 3 to 5 times faster in the optimised kernel", rope.RULE, rope.run),
}


def choose(only: Sequence[str]) -> list[str]:
    """The claims asked for, in the order of the table; all of them where none is named."""
    wanted = [one.strip().lower().removeprefix("claim").strip() for one in only]
    for one, given in zip(wanted, only, strict=True):
        if one not in EXPERIMENTS:
            raise InvalidRequestError(f"there is no claim {given!r}: known are {', '.join(EXPERIMENTS)}", "only")
    return [claim for claim in EXPERIMENTS if not wanted or claim in wanted]


def run(lab: Lab, only: Sequence[str] = ()) -> None:
    """Run experiments; verdicts and tables are put into the recorder's details one by one."""
    claims, details = choose(only), lab.recorder.details
    details.update(verdicts=[], tables={}, claims={})
    lab.recorder.model = environment.model_description(lab.model)
    for number, claim in enumerate(claims):
        experiment = EXPERIMENTS[claim]
        lab.claim, lab.place, lab.races = claim, (number, len(claims)), 0
        lab.tell("preparing", 0)
        found = experiment.run(lab)
        details["verdicts"].append(found.verdict._asdict())
        details["tables"][claim] = found.table
        details["claims"][claim] = {"claim": experiment.claim, "rule": experiment.rule}
    lab.steps("done", len(claims), len(claims))
