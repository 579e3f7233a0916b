"""A loaded model with its limits, and what was measured of it: rates beside what the machine, the matrix products alone
and a single request give. Other things that can be measured of it are in sharing.py and guessing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...config import KV_AUTO, ModelConfig
from ...weights import Checkpoint
from .. import statistics
from ..engine_harness import Drive, Timed
from ..matmul_ceiling import products
from ..results import Better, Recorder, Result
from ..roofline import Limits

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
        self.recorder.add_result(
            Result.from_samples(name, unit, self.samples[name], better, backend=self.backend, **fields)
        )

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


Kind = Literal["pp", "tg"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every length at every depth with every batch, and what is asked for beside it."""

    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    depths: Sequence[int] = (0,)
    batches: Sequence[int] = (1,)
    prefix: int = 0  # tokens that a second prompt shares with a first one; 0: not measured
    targets_ms: Sequence[int] = ()  # for answers while a long prompt is read; 0: none
    speculative: str = "off"  # with guesses too: how they are made
    draft_tokens: int | None = None  # at most so many in a step; None: the engine's own
    draft_model: str | None = None  # the file of a model that guesses
    repetitions: int = 5
    threads: int = 1
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    kv_type: str = KV_AUTO
    quantize: str | None = None

    def cases(self) -> Iterator[Case]:
        """In the order of the table; a length of 0 leaves its part out. Several at once stand beside one."""
        beside = (1, *self.batches) if max(self.batches) > 1 else self.batches
        kinds: tuple[tuple[Kind, Sequence[int], Sequence[int]], ...] = (
            ("pp", self.pp, self.batches),
            ("tg", self.tg, beside),
        )
        for kind, lengths, batches in kinds:
            for depth in dict.fromkeys(self.depths):
                for batch in dict.fromkeys(batches):
                    yield from (Case(kind, tokens, depth, batch) for tokens in dict.fromkeys(lengths) if tokens)

    @property
    def guesses(self) -> str | None:
        """By whom: `ngram`, `draft` or nobody."""
        return "draft" if self.draft_model is not None else None if self.speculative == "off" else self.speculative


@dataclass(frozen=True, slots=True)
class Case:
    """One length at one depth with one batch."""

    kind: Kind
    tokens: int
    depth: int
    batch: int

    @property
    def name(self) -> str:
        """`pp512`, `tg128@d2048@b8`."""
        return f"{self.kind}{self.tokens}{self.suffix}"

    @property
    def suffix(self) -> str:
        """What is not as usual."""
        return (f"@d{self.depth}" if self.depth else "") + (f"@b{self.batch}" if self.batch != 1 else "")

    @property
    def needs(self) -> int:
        """Tokens of one sequence."""
        return self.depth + self.tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model must read and compute, counted from its tensors."""

    weights: int  # bytes that one decode step reads: all but the rows of the embedding that are not looked up
    matrices: int  # values of the layers' matrices
    head: int  # values of the output head
    config: ModelConfig
    kv_type: str = "float32"

    @staticmethod
    def of(checkpoint: Checkpoint, config: ModelConfig, kv_type: str = "float32") -> Cost:
        """A tied head is read whole; an embedding of its own is a lookup of one row."""
        tensors = checkpoint.tensors
        table = tensors["token_embd.weight"]
        head = tensors.get("output.weight", table)
        rest = [t for t in tensors.values() if t is not table and t is not head]
        row = table.nbytes // max(1, table.shape[0]) if head is not table else 0
        matrices = sum(t.size for t in rest if len(t.shape) == 2)
        return Cost(sum(t.nbytes for t in rest) + head.nbytes + row, matrices, head.size, config, kv_type)

    def bytes_per_token(self, case: Case) -> float:
        """Weights are read once for the whole batch, keys and values for each sequence; halfway through the answer."""
        return self.weights / case.batch + self.config.kv_bytes(case.depth + case.tokens // 2, self.kv_type)

    def operations(self, case: Case) -> float:
        """Of all tokens of a prefill: two for each value of a matrix; the head is needed once a sequence."""
        return 2.0 * case.batch * (self.matrices * case.tokens + self.head)
