"""Whole models: prefill and decode as llama-bench defines them, time to first token, memory, bytes read for a token.

ppN: N prompt tokens to the first sampled token; tgN: N steps of one token each from `depth` cached ones. Both in tokens
a second over all sequences of the batch. Unlike llama-bench, which leaves sampling out, every run samples greedily.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .. import machine
from ..backends import kernels, pick
from ..config import ModelConfig
from ..errors import ContextLengthError, InsufficientMemoryError, InvalidRequestError, human_bytes
from ..models import describe, load_model
from ..models.convert import quantize_checkpoint
from ..weights import Checkpoint, open_checkpoint
from . import environment, limits, memory, statistics, synthetic
from .drive import Drive
from .limits import Limits
from .results import Recorder, Result

Progress = Callable[[str, float, float], None]
WARM_UP_TOKENS = 8  # of a decode run


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every length at every depth with every batch."""

    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    depths: Sequence[int] = (0,)
    batches: Sequence[int] = (1,)
    repetitions: int = 5
    threads: int = 1
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    kv_type: str = "float32"
    quantize: str | None = None

    def cases(self) -> Iterator[Case]:
        """In the order of the table; a length of 0 leaves its part out."""
        kinds: tuple[tuple[Kind, Sequence[int]], ...] = (("pp", self.pp), ("tg", self.tg))
        for kind, lengths in kinds:
            for depth in dict.fromkeys(self.depths):
                for batch in dict.fromkeys(self.batches):
                    yield from (Case(kind, tokens, depth, batch) for tokens in dict.fromkeys(lengths) if tokens)


Kind = Literal["pp", "tg"]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure."""

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

    def seconds(self, drive: Drive, tokens: int | None = None) -> float:
        """Run it once, or a shorter run of the same kind."""
        drive.fill(self.depth, self.batch)
        act = drive.prefill if self.kind == "pp" else drive.decode
        start = time.perf_counter()
        act(self.depth, tokens or self.tokens, self.batch)
        return time.perf_counter() - start


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


@dataclass(slots=True)
class Bench:
    """A loaded model with its limits, and what was measured."""

    recorder: Recorder
    drive: Drive
    cost: Cost
    limits: Limits
    backend: str
    several_prompts: bool
    rates: dict[Case, list[float]] = field(default_factory=dict)

    def take(self, case: Case) -> None:
        """One sample of a case."""
        seconds = case.seconds(self.drive)
        self.rates.setdefault(case, []).append(case.tokens * case.batch / seconds)
        self.recorder.add(case.name, "tok/s", self.rates[case][-1], "higher", **self.fields(case))
        if case.kind == "pp" and case.batch == 1:
            name = f"ttft{case.tokens if self.several_prompts else ''}{case.suffix}"
            self.recorder.add(name, "s", seconds, backend=self.backend, prompt=case.tokens)

    def fields(self, case: Case) -> dict[str, Any]:
        """What stands beside a rate: how near it is to what the machine can do."""
        rate = statistics.estimate(self.rates[case]).value
        known: dict[str, Any] = {"backend": self.backend, "depth": case.depth, "batch": case.batch}
        if case.kind == "tg":
            read = self.cost.bytes_per_token(case)
            part = read * rate / self.limits.memory_bandwidth
            return {**known, "bytes_per_token": read, "bound_by": "memory", "percent_of_limit": 100 * part}
        operations = self.cost.operations(case) / (case.tokens * case.batch)
        part = operations * rate / self.limits.operations
        known["operations_per_token"] = operations
        return {**known, "bound_by": "arithmetic", "percent_of_limit": 100 * part}


def run(recorder: Recorder, progress: Progress, source: Path | synthetic.Spec, plan: Plan) -> None:
    """Load the model and measure every case, in turn by repetition."""
    cases = list(plan.cases())
    if not cases:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    _require_room(source, cases, plan.kv_type)
    progress("measuring the machine's limits", 0, 0)
    bounds = limits.measured(plan.threads)
    recorder.details["limits"] = bounds.as_json()
    recorder.details["peak_memory_is_of"] = "this run" if memory.reset_peak() else "the process"
    bench = _load(recorder, progress, source, plan, bounds)
    _count(bench, cases)
    total = len(cases) * (plan.repetitions + 1)
    for number, case in enumerate(cases):
        progress(f"{case.name}: warming up", number, total)
        case.seconds(bench.drive, min(case.tokens, WARM_UP_TOKENS) if case.kind == "tg" else None)
    for repetition in range(plan.repetitions):
        done = len(cases) * (repetition + 1)
        for number, case in enumerate(cases if repetition % 2 == 0 else reversed(cases)):
            progress(f"{case.name}: {repetition + 1} of {plan.repetitions}", done + number, total)
            bench.take(case)
        recorder.put(Result.exact("peak_memory", "B", memory.peak()))


def _load(recorder: Recorder, progress: Progress, source: Path | synthetic.Spec, plan: Plan, bounds: Limits) -> Bench:
    ops = pick(plan.device, plan.backend, None if plan.backend == "reference" else plan.threads)
    if isinstance(source, Path):
        checkpoint = open_checkpoint(source)
        recorder.model = environment.model_description(source, lambda what, *n: progress(what, n[0], n[1] or 0))
    else:
        checkpoint = synthetic.checkpoint(source, plan.seed, progress)
        recorder.model = {"name": str(source), "bytes": checkpoint.nbytes, "synthetic": True, "seed": plan.seed}
    if plan.quantize is not None:
        checkpoint = quantize_checkpoint(
            checkpoint, plan.quantize, progress=lambda what, *n: progress(what, n[0], n[1] or 0)
        )
        made = {"quantized": plan.quantize.upper(), "bytes": checkpoint.nbytes}
        recorder.model = {**(recorder.model or {}), **made}
    config = describe(checkpoint)
    needs = kernels.Needs.of(checkpoint, config, plan.kv_type)
    kernels.get_ready_for(ops, needs, lambda what, *n: progress(what, n[0], n[1] or 0))
    progress("preparing the weights", 0, 0)
    cases = list(plan.cases())
    capacity, batch = max(c.depth + c.tokens for c in cases), max(c.batch for c in cases)
    model = load_model(checkpoint, ops, config, capacity)
    drive = Drive(model, capacity, batch, plan.seed, plan.kv_type)
    backend = str(getattr(ops, "__name__", plan.backend)).rpartition(".")[2]
    several = len({case.tokens for case in cases if case.kind == "pp"}) > 1
    return Bench(recorder, drive, Cost.of(checkpoint, config, plan.kv_type), bounds, backend, several)


def _require_room(source: Path | synthetic.Spec, cases: Sequence[Case], kv_type: str) -> None:
    """Refuse what fits neither the context nor the memory, with the figures, before anything long is done."""
    if isinstance(source, Path):
        config, weights = describe(open_checkpoint(source)), 0  # a file is mapped: its pages need not all stay
    else:
        synthetic.require_memory(source)
        config, weights = describe(synthetic.without_weights(source)), source.nbytes
    longest = max(cases, key=lambda case: case.depth + case.tokens)
    capacity, batch = longest.depth + longest.tokens, max(case.batch for case in cases)
    if capacity > config.context_length:
        raise ContextLengthError(
            f"{longest.name} needs {capacity} tokens, the model's context has {config.context_length}: "
            f"use a smaller --{longest.kind} or --depth",
            longest.kind,
        )
    needed, (_, free) = config.kv_bytes(capacity * batch, kv_type), machine.memory()
    if free is not None and needed + weights > free:
        raise InsufficientMemoryError(
            f"the keys and values of {batch} x {capacity} tokens take {human_bytes(needed)}, and "
            f"{human_bytes(free)} are free for them and the model: use a smaller --batch or --depth"
        )


def _count(bench: Bench, cases: Sequence[Case]) -> None:
    """The exact figures: bytes that a token needs at each depth and batch, for the longest answer there."""
    for case in sorted((c for c in cases if c.kind == "tg"), key=lambda c: c.tokens):
        read = bench.cost.bytes_per_token(case)
        parts: dict[str, Any] = {"weights": bench.cost.weights, "tokens": case.tokens, "batch": case.batch}
        bench.recorder.put(Result.exact(f"bytes_per_token{case.suffix}", "B", read, **parts))
