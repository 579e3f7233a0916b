"""Tokens per second of a whole model: the cases, what a token costs at least, and the measured rates.

A rate stands beside the roofline, beside the matrix products alone (CPU) or the time of the device alone (GPU), and
beside one sequence. Other scenarios are in latency.py and speculative.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...config import KV_AUTO, ModelConfig
from ...weights import Checkpoint
from .. import statistics
from ..engine_harness import EngineHarness, TimedRun
from ..results import Better, Recorder, Result
from ..roofline import Limits, matmul_ceiling

Kind = Literal["pp", "tg"]
WARM_UP_TOKENS = 8  # of a decode run


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every length at every depth with every batch size, and further scenarios."""

    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    depths: Sequence[int] = (0,)
    batches: Sequence[int] = (1,)
    prefix: int = 0  # tokens that a second prompt shares with a first one; 0: not measured
    targets_ms: Sequence[int] = ()  # ITL targets while a long prompt is prefilled; 0: no target
    speculative: str = "off"  # measure speculative decoding too, with this drafter
    draft_tokens: int | None = None  # at most so many a step; None: the engine's default
    draft_model: str | None = None  # path of a draft model
    repetitions: int = 5
    threads: int = 1
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    kv_type: str = KV_AUTO
    quantize: str | None = None
    pg: Sequence[int] = ()  # (prompt tokens, output tokens) of whole requests, all submitted at once
    deterministic: bool = False

    def cases(self) -> Iterator[Case]:
        """Yield the cases in the order of the table; a length of 0 is skipped. Batches stand beside one sequence."""
        decode_batches = (1, *self.batches) if max(self.batches) > 1 else self.batches
        kinds: tuple[tuple[Kind, Sequence[int], Sequence[int]], ...] = (
            ("pp", self.pp, self.batches),
            ("tg", self.tg, decode_batches),
        )
        for kind, lengths, batches in kinds:
            for depth in dict.fromkeys(self.depths):
                for batch in dict.fromkeys(batches):
                    yield from (Case(kind, tokens, depth, batch) for tokens in dict.fromkeys(lengths) if tokens)

    @property
    def drafter(self) -> str | None:
        """`ngram`, `draft` or None, as result names have it."""
        return "draft" if self.draft_model is not None else None if self.speculative == "off" else self.speculative


@dataclass(frozen=True, slots=True)
class Case:
    """One length at one depth with one batch size."""

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
        return (f"@d{self.depth}" if self.depth else "") + (f"@b{self.batch}" if self.batch != 1 else "")

    @property
    def context(self) -> int:
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
    def from_checkpoint(checkpoint: Checkpoint, config: ModelConfig, kv_type: str = "float32") -> Cost:
        """Count the tensors: a tied head is read whole, an embedding of its own is a lookup of one row."""
        tensors = checkpoint.tensors
        table = tensors["token_embd.weight"]
        head = tensors.get("output.weight", table)
        rest = [t for t in tensors.values() if t is not table and t is not head]
        row = table.nbytes // max(1, table.shape[0]) if head is not table else 0
        matrices = sum(t.size for t in rest if len(t.shape) == 2)
        return Cost(sum(t.nbytes for t in rest) + head.nbytes + row, matrices, head.size, config, kv_type)

    def bytes_per_token(self, case: Case) -> float:
        """Return the bytes read for a token halfway through the answer: weights once a batch, KV for each sequence."""
        return self.weights / case.batch + self.config.kv_bytes(case.depth + case.tokens // 2, self.kv_type)

    def operations(self, case: Case) -> float:
        """Return the operations of a prefill: two for each value of a matrix, the head once a sequence."""
        return 2.0 * case.batch * (self.matrices * case.tokens + self.head)


class Scenario(Protocol):
    """Something to measure, in turn with others."""

    @property
    def name(self) -> str:
        """Return what progress shows."""

    def warm_up(self) -> None:
        """Run once before all, not counted."""

    def add_sample(self) -> None:
        """Measure once more."""


@dataclass(slots=True)
class ModelBench:
    """A loaded model with its limits and the samples so far; shared by all scenarios."""

    recorder: Recorder
    harness: EngineHarness
    cost: Cost
    limits: Limits
    backend: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, unit: str, sample: float, better: Better = "lower", **fields: Any) -> None:
        """Add a sample and remake its result."""
        self.samples.setdefault(name, []).append(sample)
        self.put(name, unit, better, **fields)

    def put(self, name: str, unit: str, better: Better = "lower", **fields: Any) -> None:
        """Remake a result from its samples."""
        self.recorder.add_result(
            Result.from_samples(name, unit, self.samples[name], better, backend=self.backend, **fields)
        )

    def estimate(self, name: str) -> float | None:
        """Return the estimate of a result, if there is one yet."""
        return statistics.estimate(self.samples[name]).value if name in self.samples else None

    def ratio(self, name: str, other: str) -> float | None:
        """Return one result over another by repetition: a machine that changes its speed changes both."""
        pairs = zip(self.samples.get(name, ()), self.samples.get(other, ()), strict=False)
        ratios = [sample / beside for sample, beside in pairs]
        return statistics.estimate(ratios).value if ratios else None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second of one case."""

    bench: ModelBench
    case: Case
    several_prompts: bool
    products: Callable[[], object] | None = None  # all matrix products of a step, run after each of its steps

    @staticmethod
    def create(bench: ModelBench, case: Case, several_prompts: bool) -> Throughput:
        """Put decode steps of a batch beside their matrix products; a GPU's would not run alone between its steps."""
        model = bench.harness.engine.model
        is_batch = case.kind == "tg" and case.batch > 1 and not model.ops.has_device_memory
        return Throughput(bench, case, several_prompts, matmul_ceiling(model, case.batch) if is_batch else None)

    @property
    def name(self) -> str:
        return self.case.name

    def run(self, tokens: int | None = None, at_end: Callable[[], object] | None = None) -> TimedRun:
        """Run the case once, or a shorter one of its kind."""
        c, harness = self.case, self.bench.harness
        if c.kind == "pp":
            return harness.prefill(c.depth, tokens or c.tokens, c.batch)
        return harness.decode(c.depth, tokens or c.tokens, c.batch, self.products, at_end)

    def warm_up(self) -> None:
        """Run a short answer, or the whole prompt: its memory is touched then."""
        self.run(min(self.case.tokens, WARM_UP_TOKENS) if self.case.kind == "tg" else None)

    def add_sample(self) -> None:
        c, device_s = self.case, list[float]()
        graphs = getattr(self.bench.harness.engine.model.fused, "graphs", None)

        def time_device() -> None:
            seconds = None if graphs is None else graphs.time_replay(c.batch)
            device_s.extend(() if seconds is None else (seconds,))

        timed = self.run(at_end=time_device)
        self.bench.samples.setdefault(c.name, []).append(c.tokens * c.batch / timed.seconds)
        if self.products is not None:
            rate = c.tokens * c.batch / timed.between_s
            self.bench.add(f"products/{c.name}", "tok/s", rate, "higher", depth=c.depth, batch=c.batch)
        if device_s:
            host_s = timed.seconds / timed.steps - device_s[0]
            self.bench.add(f"device_step/{c.name}", "s", device_s[0], depth=c.depth, batch=c.batch)
            self.bench.add(f"host_step/{c.name}", "s", host_s, depth=c.depth, batch=c.batch)
        self.put()
        if c.kind == "pp" and c.batch == 1:
            name = f"ttft{c.tokens if self.several_prompts else ''}{c.suffix}"
            self.bench.add(name, "s", timed.seconds, prompt=c.tokens)

    def put(self) -> None:
        """Remake the result with what stands beside it by now."""
        self.bench.put(self.name, "tok/s", "higher", **self.fields())

    def fields(self) -> dict[str, Any]:
        """Return how near the rate is to the roofline."""
        c, bench, cost = self.case, self.bench, self.bench.cost
        rate = bench.estimate(c.name) or 0.0
        known: dict[str, Any] = {"depth": c.depth, "batch": c.batch}
        if c.kind == "tg":
            read = cost.bytes_per_token(c)
            part = read * rate / bench.limits.memory_bandwidth
            known |= {"bytes_per_token": read, "bound_by": "memory", "percent_of_limit": 100 * part}
            return known | self.comparisons()
        operations = cost.operations(c) / (c.tokens * c.batch)
        part = operations * rate / bench.limits.operations
        return known | {
            "operations_per_token": operations, "bound_by": "arithmetic", "percent_of_limit": 100 * part,
        }  # fmt: skip

    def comparisons(self) -> dict[str, float]:
        """Return, for a batch, its part of what the matrix products alone allow, and its multiple of one sequence."""
        c, bench = self.case, self.bench
        if c.batch == 1:
            return {}
        products_ratio = bench.ratio(c.name, f"products/{c.name}")
        single_ratio = bench.ratio(c.name, Case("tg", c.tokens, c.depth, 1).name)
        found = {} if products_ratio is None else {"percent_of_products": 100 * products_ratio}
        return found if single_ratio is None else found | {"times_one": single_ratio}


@dataclass(frozen=True, slots=True)
class WholeRequests:
    """Output tokens per second of `batch` requests that are submitted at once, prefill included."""

    bench: ModelBench
    prompt: int
    tokens: int
    batch: int

    @property
    def name(self) -> str:
        """`pp128+tg128@b256`."""
        return f"pp{self.prompt}+tg{self.tokens}" + (f"@b{self.batch}" if self.batch != 1 else "")

    def warm_up(self) -> None:
        self.bench.harness.complete(self.prompt, min(self.tokens, WARM_UP_TOKENS), self.batch)

    def add_sample(self) -> None:
        timed = self.bench.harness.complete(self.prompt, self.tokens, self.batch)
        rate = timed.tokens / timed.seconds
        self.bench.add(self.name, "tok/s", rate, "higher", batch=self.batch, prompt=self.prompt, seconds=timed.seconds)
