"""A loaded model with its limits, and what was measured of it: rates beside what the machine, the matrix products alone
and a single request give. Other things that can be measured of it are in sharing.py and guessing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .. import statistics
from ..drive import Drive, Timed
from ..products import products
from ..results import Better, Recorder, Result
from ..roofline import Limits
from .plan import Case, Cost

WARM_UP_TOKENS = 8  # of a decode run


class Item(Protocol):
    """Something to measure, in turn with others."""

    @property
    def name(self) -> str:
        """What people see while it runs."""

    def warm_up(self) -> None:
        """Once before all, not counted."""

    def take(self) -> None:
        """One sample more."""


@dataclass(slots=True)
class Bench:
    """What all items share."""

    recorder: Recorder
    drive: Drive
    cost: Cost
    limits: Limits
    backend: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, unit: str, sample: float, better: Better = "lower", **fields: Any) -> None:
        """One sample more of a result, with what stands beside it by now."""
        self.samples.setdefault(name, []).append(sample)
        self.put(name, unit, better, **fields)

    def put(self, name: str, unit: str, better: Better = "lower", **fields: Any) -> None:
        """The result anew from its samples."""
        self.recorder.put(Result.of(name, unit, self.samples[name], better, backend=self.backend, **fields))

    def middle(self, name: str) -> float | None:
        """The estimate of a result, if there is one yet."""
        return statistics.estimate(self.samples[name]).value if name in self.samples else None

    def ratio(self, name: str, other: str) -> float | None:
        """One result over another, repetition by repetition: a machine that changes its pace changes both."""
        both = zip(self.samples.get(name, ()), self.samples.get(other, ()), strict=False)
        found = [sample / beside for sample, beside in both]
        return statistics.estimate(found).value if found else None


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of one case."""

    bench: Bench
    case: Case
    several_prompts: bool
    products: Callable[[], object] | None = None  # all matrix products of a step, made after each of its steps

    @staticmethod
    def of(bench: Bench, case: Case, several_prompts: bool) -> Rate:
        """Steps of several sequences are held against their matrix products."""
        beside = products(bench.drive.engine.model, case.batch) if case.kind == "tg" and case.batch > 1 else None
        return Rate(bench, case, several_prompts, beside)

    @property
    def name(self) -> str:
        """That of the case."""
        return self.case.name

    def run(self, tokens: int | None = None) -> Timed:
        """One run, or a shorter one of the same kind."""
        c, drive = self.case, self.bench.drive
        if c.kind == "pp":
            return drive.prefill(c.depth, tokens or c.tokens, c.batch)
        return drive.decode(c.depth, tokens or c.tokens, c.batch, self.products)

    def warm_up(self) -> None:
        """A short answer, or the whole prompt: its memory is touched then."""
        self.run(min(self.case.tokens, WARM_UP_TOKENS) if self.case.kind == "tg" else None)

    def take(self) -> None:
        """One sample."""
        c, timed = self.case, self.run()
        seconds = timed.seconds
        self.bench.samples.setdefault(c.name, []).append(c.tokens * c.batch / seconds)
        if self.products is not None:
            rate = c.tokens * c.batch / timed.between_s
            self.bench.add(products_name(c), "tok/s", rate, "higher", depth=c.depth, batch=c.batch)
        self.put()
        if c.kind == "pp" and c.batch == 1:
            name = f"ttft{c.tokens if self.several_prompts else ''}{c.suffix}"
            self.bench.add(name, "s", seconds, prompt=c.tokens)

    def put(self) -> None:
        """The result, with what stands beside it by now."""
        self.bench.put(self.name, "tok/s", "higher", **self.fields())

    def fields(self) -> dict[str, Any]:
        """What stands beside a rate: how near it is to what the machine can do."""
        c, bench, cost = self.case, self.bench, self.bench.cost
        rate = bench.middle(c.name) or 0.0
        known: dict[str, Any] = {"depth": c.depth, "batch": c.batch}
        if c.kind == "tg":
            read = cost.bytes_per_token(c)
            part = read * rate / bench.limits.memory_bandwidth
            known |= {"bytes_per_token": read, "bound_by": "memory", "percent_of_limit": 100 * part}
            return known | self.beside()
        operations = cost.operations(c) / (c.tokens * c.batch)
        part = operations * rate / bench.limits.operations
        return known | {
            "operations_per_token": operations, "bound_by": "arithmetic", "percent_of_limit": 100 * part,
        }  # fmt: skip

    def beside(self) -> dict[str, float]:
        """Of several at once: the part of what the products alone allow, and how many times what one gets."""
        c, bench = self.case, self.bench
        if c.batch == 1:
            return {}
        alone = bench.ratio(c.name, products_name(c))
        one = bench.ratio(c.name, Case("tg", c.tokens, c.depth, 1).name)
        told = {} if alone is None else {"percent_of_products": 100 * alone}
        return told if one is None else told | {"times_one": one}


def products_name(case: Case) -> str:
    """`products/tg128@b16`."""
    return f"products/{case.name}"
