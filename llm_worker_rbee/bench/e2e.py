"""Whole models: prefill and decode as llama-bench defines them, time to first token, memory, bytes read for a token.

ppN: N prompt tokens to the first sampled token; tgN: N steps of one token each from `depth` cached ones. Both in tokens
per second over all sequences of the batch. Unlike llama-bench, every run samples greedily and goes through the engine.
A rate stands beside the roofline, beside the matrix products alone (CPU) or the time of the device alone (GPU), and
beside one sequence. As a program it is the child process of `run_isolated`: MODEL and the plan as JSON; it prints one
JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import machine
from ..backends import resolve_kv_type, select_backend
from ..backends.ops import Backend
from ..config import KV_AUTO, ModelConfig
from ..errors import ContextLengthError, InferenceError, InsufficientMemoryError, InvalidRequestError, human_bytes
from ..models import Transformer, load_model, read_model_config
from ..models.convert import is_fp8, quantize_checkpoint
from ..progress import StepProgress
from ..weights import Checkpoint, open_checkpoint
from . import processes, statistics, synthetic
from .engine_harness import EngineHarness, TimedRun, encode_bundled_prompts
from .processes import ChildFailedError, ChildProcess, package_environment
from .results import Better, Recorder, Result, describe_model, replace_non_finite
from .roofline import Limits, matmul_ceiling, measure_limits

Source = Path | synthetic.Spec
Kind = Literal["pp", "tg"]
WARM_UP_TOKENS = 8  # of a decode run
PG_STEP_TOKENS = 4096  # token budget of a step where whole requests are measured on a GPU

TAIL_TOKENS = 4  # behind the shared prefix
DECODING_REQUESTS = 4  # beside a prefill
DECODING_PROMPT_TOKENS = 32
PREFILL_TOKENS = 2000  # or three quarters of a shorter context
MAX_ITL_CONTEXT = 2688
NO_TARGET_MS = 1e9
QUANTILES = {"median": 0.5, "p95": 0.95, "max": 1.0}
MIN_SPECULATIVE_PROMPTS = 8

COMPILED_LAYERS = 4  # some mixes give the first and the last layers other types than the middle ones
CHILD_TIMEOUT_S = 1800


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
        kinds: tuple[tuple[Kind, Sequence[int], Sequence[int]], ...]
        kinds = ("pp", self.pp, self.batches), ("tg", self.tg, decode_batches)
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
        return (f"@d{self.depth}" if self.depth else "") + _batch_suffix(self.batch)

    @property
    def context(self) -> int:
        """Tokens of one sequence."""
        return self.depth + self.tokens


def _batch_suffix(batch: int) -> str:
    return f"@b{batch}" if batch != 1 else ""


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


@dataclass(slots=True)
class ModelBench:
    """A loaded model with its limits and the samples so far; shared by all scenarios."""

    recorder: Recorder
    harness: EngineHarness
    cost: Cost
    limits: Limits
    backend: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def model(self) -> Transformer:
        return self.harness.engine.model

    def add(self, name: str, unit: str, sample: float, better: Better = "lower", **fields: Any) -> None:
        """Add a sample and remake its result."""
        self.samples.setdefault(name, []).append(sample)
        self.put(name, unit, better, **fields)

    def put(self, name: str, unit: str, better: Better = "lower", **fields: Any) -> None:
        """Remake a result from its samples."""
        result = Result.from_samples(name, unit, self.samples[name], better, backend=self.backend, **fields)
        self.recorder.add_result(result)

    def ratio(self, name: str, other: str) -> float | None:
        """Return one result over another by repetition: a machine that changes its speed changes both."""
        pairs = zip(self.samples.get(name, ()), self.samples.get(other, ()), strict=False)
        ratios = [sample / beside for sample, beside in pairs]
        return statistics.estimate(ratios).value if ratios else None


class Throughput:
    """Tokens per second of one case."""

    def __init__(self, bench: ModelBench, case: Case, several_prompts: bool) -> None:
        self.bench, self.case, self.name, self.several_prompts = bench, case, case.name, several_prompts
        # all matrix products of a step, run after each step of a batch; a GPU's would not run alone between its steps
        is_batch = case.kind == "tg" and case.batch > 1 and not bench.model.ops.has_device_memory
        self.products = matmul_ceiling(bench.model, case.batch) if is_batch else None

    def run(self, tokens: int | None = None, time_device: Callable[[], float | None] | None = None) -> TimedRun:
        """Run the case once, or a shorter one of its kind."""
        c, harness = self.case, self.bench.harness
        if c.kind == "pp":
            return harness.prefill(c.depth, tokens or c.tokens, c.batch)
        return harness.decode(c.depth, tokens or c.tokens, c.batch, self.products, time_device)

    def warm_up(self) -> None:
        """Run a short answer, or the whole prompt: its memory is touched then."""
        self.run(min(self.case.tokens, WARM_UP_TOKENS) if self.case.kind == "tg" else None)

    def add_sample(self) -> None:
        c, bench = self.case, self.bench
        graphs = getattr(bench.model.fused, "graphs", None)
        timed = self.run(time_device=None if graphs is None else partial(graphs.time_replay, c.batch))
        bench.samples.setdefault(c.name, []).append(c.tokens * c.batch / timed.seconds)
        sizes: dict[str, Any] = {"depth": c.depth, "batch": c.batch}
        if self.products is not None:
            bench.add(f"products/{c.name}", "tok/s", c.tokens * c.batch / timed.between_s, "higher", **sizes)
        if timed.device_s is not None:
            bench.add(f"device_step/{c.name}", "s", timed.device_s, **sizes)
            bench.add(f"host_step/{c.name}", "s", timed.seconds / timed.steps - timed.device_s, **sizes)
        self.put()
        if c.kind == "pp" and c.batch == 1:
            length = c.tokens if self.several_prompts else ""
            bench.add(f"ttft{length}{c.suffix}", "s", timed.seconds, prompt=c.tokens)

    def put(self) -> None:
        """Remake the result with what stands beside it by now: the roofline, products alone, one sequence."""
        c, bench, cost = self.case, self.bench, self.bench.cost
        rate = statistics.estimate(bench.samples[c.name]).value
        fields: dict[str, Any] = {"depth": c.depth, "batch": c.batch}
        if c.kind == "tg":
            fields["bytes_per_token"] = needed = cost.bytes_per_token(c)
            bound_by, limit = "memory", bench.limits.memory_bandwidth
        else:
            fields["operations_per_token"] = needed = cost.operations(c) / (c.tokens * c.batch)
            bound_by, limit = "arithmetic", bench.limits.operations
        fields |= {"bound_by": bound_by, "percent_of_limit": 100 * (needed * rate / limit)}
        if c.kind == "tg" and c.batch > 1:
            if (of_products := bench.ratio(c.name, f"products/{c.name}")) is not None:
                fields["percent_of_products"] = 100 * of_products
            if (times_one := bench.ratio(c.name, replace(c, batch=1).name)) is not None:
                fields["times_one"] = times_one
        bench.put(c.name, "tok/s", "higher", **fields)


class WholeRequests:
    """Output tokens per second of `batch` requests that are submitted at once, prefill included."""

    def __init__(self, bench: ModelBench, prompt: int, tokens: int, batch: int) -> None:
        self.bench, self.prompt, self.tokens, self.batch = bench, prompt, tokens, batch
        self.name = f"pp{prompt}+tg{tokens}{_batch_suffix(batch)}"

    def warm_up(self) -> None:
        self.bench.harness.complete(self.prompt, min(self.tokens, WARM_UP_TOKENS), self.batch)

    def add_sample(self) -> None:
        timed = self.bench.harness.complete(self.prompt, self.tokens, self.batch)
        rate = timed.tokens / timed.seconds
        self.bench.add(self.name, "tok/s", rate, "higher", batch=self.batch, prompt=self.prompt, seconds=timed.seconds)


class PrefixHit:
    """Time to first token of a first and of a second request with `prefix` tokens in common.

    Each repetition has a prefix of its own, so that the first request finds nothing cached and the second all whole
    blocks of it; a tail of a few tokens differs.
    """

    def __init__(self, bench: ModelBench, prefix: int, kv_type: str) -> None:
        self.bench, self.prefix, self.length = bench, prefix, prefix + TAIL_TOKENS
        self.name = f"shared prefix of {prefix}"
        self.harness = EngineHarness(bench.model, self.length, 1, 0, kv_type)
        self.rng = np.random.default_rng(11)

    def run(self) -> tuple[float, float]:
        """Return the seconds to the first token of both requests."""
        vocabulary, size = self.bench.model.config.vocab_size, self.harness.engine.config.block_size
        shared = self.rng.integers(0, vocabulary, self.prefix).tolist()
        tails = self.rng.permutation(vocabulary)[: 2 * TAIL_TOKENS].reshape(2, -1).tolist()
        first, second = (self.harness.time_first_tokens([shared + tail]) for tail in tails)
        assert (first.tokens, second.tokens) == (self.length, self.length - self.prefix // size * size)
        return first.seconds, second.seconds

    warm_up = run

    def add_sample(self) -> None:
        first, shared = f"ttft_first@p{self.prefix}", f"ttft_shared@p{self.prefix}"
        first_s, shared_s = self.run()
        self.bench.add(first, "s", first_s, prompt=self.length)
        self.bench.samples.setdefault(shared, []).append(shared_s)
        self.bench.put(shared, "s", prompt=self.length, times_shorter=self.bench.ratio(first, shared))


class ItlUnderPrefill:
    """Inter-token latency of running requests while a prompt is prefilled, at one target.

    A sample is the median, the 95th percentile and the longest of the steps that prefill the prompt. The engine is kept
    between repetitions, so that its token budget knows the machine's speed; every prompt is drawn anew.
    """

    def __init__(self, bench: ModelBench, target_ms: int, kv_type: str) -> None:
        self.bench, self.target_ms = bench, target_ms  # 0: none
        self.context, target = itl_context_length(bench.model.config), float(target_ms or NO_TARGET_MS)
        self.prompt = min(PREFILL_TOKENS, self.context * 3 // 4)
        self.name = f"prefill of {self.prompt}, " + (f"target {target_ms} ms" if target_ms else "no target")
        self.harness = EngineHarness(bench.model, self.context, DECODING_REQUESTS + 1, 0, kv_type, target_itl_ms=target)
        self.rng = np.random.default_rng(13)

    def run(self) -> list[float]:
        """Return the seconds of each step."""
        vocabulary, length = self.bench.model.config.vocab_size, min(DECODING_PROMPT_TOKENS, self.prompt)
        beside = self.rng.integers(0, vocabulary, (DECODING_REQUESTS, length)).tolist()
        prompt = self.rng.integers(0, vocabulary, self.prompt).tolist()
        return self.harness.time_prefill_steps(prompt, beside, self.context - DECODING_PROMPT_TOKENS)

    warm_up = run

    def add_sample(self) -> None:
        seconds = self.run()
        suffix = f"@t{self.target_ms}" if self.target_ms else "@none"
        for name, quantile in QUANTILES.items():
            self.bench.add(
                f"itl_{name}{suffix}", "s", float(np.quantile(seconds, quantile)), target_ms=self.target_ms or None,
                answering=DECODING_REQUESTS, prompt=self.prompt, steps=len(seconds),
            )  # fmt: skip
        self.bench.add(f"ttft{self.prompt}{suffix}", "s", sum(seconds), prompt=self.prompt)


def itl_context_length(config: ModelConfig) -> int:
    """Return the tokens of a sequence where ITL is measured during a prefill."""
    return min(MAX_ITL_CONTEXT, config.context_length)


class SpeculativeDecoding:
    """Speculative decoding beside plain decoding, on real text: random ids never repeat themselves.

    A sample is a run over the bundled prompts in groups of `batch`: tokens from when all of a group have begun to when
    the first ends, over that time. Both sides must generate the same tokens.
    """

    def __init__(
        self, bench: ModelBench, plan: Plan, tokens: int, batch: int, checkpoint: Checkpoint, draft: Transformer | None
    ) -> None:
        self.bench, self.tokens, self.batch = bench, tokens, batch
        self.plain_name, self.name = (f"tg{tokens}@{side}{_batch_suffix(batch)}" for side in ("text", plan.drafter))
        prompts = encode_bundled_prompts(checkpoint, batch * -(-MIN_SPECULATIVE_PROMPTS // batch))
        self.groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        needed, context = max(map(len, prompts)) + tokens, bench.model.config.context_length
        if needed > context:
            message = f"the prompts and tg{tokens} need {needed} tokens, the model's context has {context}"
            raise ContextLengthError(f"{message}: use a smaller --tg", "tg")
        drafting = {"speculative": plan.speculative, "draft_model": draft, "draft_tokens": plan.draft_tokens}
        options: dict[str, Any] = {name: value for name, value in drafting.items() if value is not None}
        self.plain = EngineHarness(bench.model, needed, batch, 0, plan.kv_type)
        self.speculative = EngineHarness(bench.model, needed, batch, 0, plan.kv_type, **options)

    def warm_up(self) -> None:
        for harness in (self.plain, self.speculative):
            self.run(harness, min(self.tokens, WARM_UP_TOKENS))

    def run(self, harness: EngineHarness, tokens: int) -> TimedRun:
        """Return the runs over all groups as one."""
        runs = [harness.decode_prompts(group, tokens) for group in self.groups]
        seconds, generated, steps = (sum(values) for values in zip(*(one[:3] for one in runs), strict=True))
        return TimedRun(seconds, int(generated), int(steps), [answer for one in runs for answer in one.answers])

    def add_sample(self) -> None:
        plain, counts = self.run(self.plain, self.tokens), self.speculative.engine.scheduler.stats
        drafted, accepted = counts.num_drafted_tokens, counts.num_accepted_tokens
        drafting = self.run(self.speculative, self.tokens)
        if drafting.answers != plain.answers:
            raise InferenceError("speculative decoding changed an answer")
        drafted, accepted = counts.num_drafted_tokens - drafted, counts.num_accepted_tokens - accepted
        self.bench.add(self.plain_name, "tok/s", plain.tokens / plain.seconds, "higher", batch=self.batch)
        self.bench.samples.setdefault(self.name, []).append(drafting.tokens / drafting.seconds)
        self.bench.put(
            self.name, "tok/s", "higher", batch=self.batch, drafted=drafted, accepted=accepted,
            acceptance=accepted / drafted if drafted else 0.0,
            tokens_per_step=drafting.tokens / drafting.steps / self.batch,
            times_plain=self.bench.ratio(self.name, self.plain_name),
        )  # fmt: skip


Scenario = Throughput | WholeRequests | PrefixHit | ItlUnderPrefill | SpeculativeDecoding  # measured in turn


def run(recorder: Recorder, progress: StepProgress, source: Source, plan: Plan) -> None:
    """Load the model and measure all scenarios, in turn by repetition."""
    cases = list(plan.cases())
    _require_measurable(source, plan, cases)
    on_cpu = plan.backend in ("auto", "cpu") and not plan.device.startswith("cuda")
    threads = plan.threads if on_cpu else None
    backend = select_backend(plan.device, plan.backend, threads, deterministic=plan.deterministic)
    plan = replace(plan, kv_type=resolve_kv_type(backend, plan.kv_type))
    _require_room(source, plan, cases, backend)
    progress("measuring the machine's limits", 0, 0)
    measured = backend.measure_limits()
    limits = measure_limits(plan.threads) if measured is None else Limits.of_device(*measured)
    recorder.details["limits"] = limits.as_json()
    recorder.details["peak_memory_is_of"] = "this run" if processes.reset_peak_memory() else "the process"
    checkpoint = _open(recorder, progress, source, plan, backend)
    config = read_model_config(checkpoint)
    capacity = max(sum(plan.pg), *(case.context for case in cases), 1)
    batch = max((case.batch for case in cases), default=max(plan.batches) if plan.pg else 1)
    context = max(capacity, plan.prefix + TAIL_TOKENS, itl_context_length(config) if plan.targets_ms else 0)
    model = _load_model(checkpoint, backend, plan, context, progress)
    options: dict[str, Any] = {"max_step_tokens": PG_STEP_TOKENS} if plan.pg and backend.has_device_memory else {}
    harness = EngineHarness(model, capacity, batch, plan.seed, plan.kv_type, **options)
    cost = Cost.from_checkpoint(checkpoint, config, plan.kv_type)
    bench = ModelBench(recorder, harness, cost, limits, backend.name)
    for case in sorted((c for c in cases if c.kind == "tg"), key=lambda c: c.tokens):  # the longest answer counts
        parts: dict[str, Any] = {"weights": cost.weights, "tokens": case.tokens, "batch": case.batch}
        recorder.add_result(Result.exact(f"bytes_per_token{case.suffix}", "B", cost.bytes_per_token(case), **parts))
    scenarios = list(_scenarios(bench, plan, cases, checkpoint, progress))
    total = len(scenarios) * (plan.repetitions + 1)
    for number, scenario in enumerate(scenarios):
        progress(f"{scenario.name}: warming up", number, total)
        scenario.warm_up()
    for repetition in range(plan.repetitions):
        done = len(scenarios) * (repetition + 1)
        for number, scenario in enumerate(scenarios if repetition % 2 == 0 else reversed(scenarios)):
            progress(f"{scenario.name}: {repetition + 1} of {plan.repetitions}", done + number, total)
            scenario.add_sample()
        for scenario in scenarios:  # now with the ratios to what was measured after them
            if isinstance(scenario, Throughput):
                scenario.put()
        recorder.add_result(Result.exact("peak_memory", "B", processes.peak_memory()))
        for name, size in backend.peak_memory().items():
            recorder.add_result(Result.exact(f"device_memory/{name}", "B", size))


def _require_measurable(source: Source, plan: Plan, cases: Sequence[Case]) -> None:
    if not cases and not plan.prefix and not plan.targets_ms and not plan.pg:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    if plan.drafter is None:
        return
    if not isinstance(source, Path):
        message = "speculative decoding is measured on real text: a synthetic model generates none"
        raise InvalidRequestError(message, "speculative")
    if 1 in plan.tg or not any(plan.tg):
        raise InvalidRequestError("speculative decoding needs 2 output tokens or more: use a longer --tg", "tg")


def _require_room(source: Source, plan: Plan, cases: Sequence[Case], backend: Backend) -> None:
    """Raise, before anything long is done, if a scenario fits neither the context nor the memory."""
    if isinstance(source, Path):
        config, weights = read_model_config(open_checkpoint(source)), 0  # a mapped file's pages need not all stay
    else:
        synthetic.require_memory(source)
        config, weights = read_model_config(synthetic.without_weights(source)), source.nbytes
    needs = {case.name: (case.context, f"a smaller --{case.kind} or --depth") for case in cases}
    if plan.pg:
        needs["--pg"] = sum(plan.pg), "smaller ones"
    if plan.prefix:
        needs["--prefix"] = plan.prefix + TAIL_TOKENS, "a smaller one"
    if plan.targets_ms:
        needs["--target-itl-ms"] = itl_context_length(config), "a model with a longer one"
    name, (capacity, remedy) = max(needs.items(), key=lambda one: one[1][0])
    if capacity > config.context_length:
        message = f"{name} needs {capacity} tokens, the model's context has {config.context_length}: use {remedy}"
        raise ContextLengthError(message, name.lstrip("-")[:2])
    batch = max((*(case.batch for case in cases), DECODING_REQUESTS + 1 if plan.targets_ms else 1))
    batch = max(batch, *plan.batches) if plan.pg else batch
    needed = config.kv_bytes(capacity * batch, plan.kv_type)
    free = backend.free_memory() if backend.has_device_memory else machine.memory()[1]
    if free is not None and needed + weights > free:
        raise InsufficientMemoryError(
            f"the keys and values of {batch} x {capacity} tokens take {human_bytes(needed)}, and "
            f"{human_bytes(free)} are free for them and the model: use a smaller --batch or --depth"
        )


def _as_transfer(progress: StepProgress) -> Callable[[str, int, int | None], None]:
    return lambda what, done, total: progress(what, done, total or 0)


def _open(recorder: Recorder, progress: StepProgress, source: Source, plan: Plan, backend: Backend) -> Checkpoint:
    quantize = plan.quantize
    if isinstance(source, Path):
        checkpoint = open_checkpoint(source)
        recorder.model = describe_model(source, progress)
    else:
        checkpoint = synthetic.checkpoint(source, plan.seed, progress)
        recorder.model = {"name": str(source), "bytes": checkpoint.nbytes, "synthetic": True, "seed": plan.seed}
        quantize = quantize or source.quantize
    if is_fp8(quantize):
        backend.require_fp8()
    if quantize is not None:
        checkpoint = quantize_checkpoint(checkpoint, quantize, progress=_as_transfer(progress))
        recorder.model |= {"quantized": quantize.upper(), "bytes": checkpoint.nbytes}
    return checkpoint


def _load_model(
    checkpoint: Checkpoint, backend: Backend, plan: Plan, context: int | None, progress: StepProgress
) -> Transformer:
    config = read_model_config(checkpoint)
    backend.load_kernels(checkpoint, config, plan.kv_type, _as_transfer(progress))
    progress("preparing the weights", 0, 0)
    return load_model(checkpoint, backend, config, context)


def _scenarios(
    bench: ModelBench, plan: Plan, cases: Sequence[Case], checkpoint: Checkpoint, progress: StepProgress
) -> Iterator[Scenario]:
    several_prompts = len({case.tokens for case in cases if case.kind == "pp"}) > 1
    batches = dict.fromkeys(plan.batches)
    yield from (Throughput(bench, case, several_prompts) for case in cases)
    if plan.pg:
        yield from (WholeRequests(bench, plan.pg[0], plan.pg[1], batch) for batch in batches)
    if plan.prefix:
        yield PrefixHit(bench, plan.prefix, plan.kv_type)
    yield from (ItlUnderPrefill(bench, target, plan.kv_type) for target in dict.fromkeys(plan.targets_ms))
    if plan.drafter is not None:
        opened = None if plan.draft_model is None else open_checkpoint(Path(plan.draft_model))
        draft = None if opened is None else _load_model(opened, bench.model.ops, plan, None, progress)
        for batch in batches:
            for tokens in dict.fromkeys(filter(None, plan.tg)):
                yield SpeculativeDecoding(bench, plan, tokens, batch, checkpoint, draft)


def run_isolated(recorder: Recorder, progress: StepProgress, models: Sequence[synthetic.Spec], plan: Plan) -> None:
    """Measure several synthetic models, each in a process of its own; results are named MODEL/NAME.

    A model that fails is named in `details`, and the others go on. On a GPU the kernels of all models are compiled
    first, at once and on a few layers, so that no timing includes compiling.
    """
    if plan.device.startswith("cuda") or plan.backend == "cuda":
        progress("compiling the kernels of all models", 0, len(models) + 1)
        small = [replace(model, layers=min(COMPILED_LAYERS, model.layers)) for model in models]
        with ThreadPoolExecutor(len(models)) as pool:
            list(pool.map(lambda model: _measure_in_child(model, replace(plan, repetitions=1)), small))
    recorder.model = {"name": ", ".join(map(str, models)), "bytes": sum(m.nbytes for m in models), "synthetic": True}
    for number, model in enumerate(models, 1):
        progress(str(model), number, len(models) + 1)
        output = _measure_in_child(model, plan)
        if "error" in output:
            recorder.details.setdefault("failed", {})[str(model)] = output["error"]
            continue
        recorder.details.setdefault("models", {})[str(model)] = {"model": output["model"], **output["details"]}
        for value in output["results"]:
            found = Result.from_json(value, str(model))
            recorder.add_result(replace(found, name=f"{model}/{found.name}"))


def _measure_in_child(model: synthetic.Spec, plan: Plan) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(model), json.dumps(asdict(plan))]
    child = ChildProcess(str(model), command, package_environment(), CHILD_TIMEOUT_S)
    try:
        return child.start("results")
    except ChildFailedError as error:
        return {"error": str(error)}
    finally:
        child.close()


def main() -> None:
    """Measure one model and print the results; whatever libraries print goes to standard error."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    recorder, plan = Recorder("e2e"), Plan(**json.loads(sys.argv[2]))
    run(recorder, lambda *_: None, synthetic.parse(sys.argv[1]), plan)
    results = [result.as_json() for result in recorder.results()]
    output = {"results": results, "model": recorder.model, "details": recorder.details}
    print(json.dumps(replace_non_finite(output)), file=reply, flush=True)


if __name__ == "__main__":
    main()
