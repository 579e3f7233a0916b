"""Whole models: prefill and decode as llama-bench defines them, time to first token, memory, bytes read for a token.

ppN: N prompt tokens to the first sampled token; tgN: N steps of one token each from `depth` cached ones. Both in tokens
per second over all sequences of the batch. Unlike llama-bench, every run samples greedily and goes through the engine.
A rate is compared with the roofline, with the matrix products alone (CPU) or the device's time alone (GPU), and with
one sequence. As a program it is the child process of `run_isolated`: MODEL and the plan as JSON; it prints one JSON
object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llm_worker_rbee import machine
from llm_worker_rbee.backends import resolve_kv_type, select_backend
from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.config import KV_AUTO, ModelConfig
from llm_worker_rbee.engine.memory_plan import Workspace, choose_step_tokens
from llm_worker_rbee.errors import ContextLengthError, InsufficientMemoryError, InvalidRequestError, human_bytes
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.convert import is_fp8, quantize_checkpoint
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights import Checkpoint, open_checkpoint

from . import processes, statistics, synthetic
from .backends import peak_device_memory
from .engine_harness import EngineHarness, TimedRun
from .processes import ChildFailedError, ChildProcess, package_environment
from .results import Recorder, Result, describe_model, replace_non_finite
from .roofline import backend_limits, matmul_ceiling
from .scenarios import (
    COUNTED_STEPS,
    DECODING_REQUESTS,
    NO_TARGET_MS,
    TAIL_TOKENS,
    UNCOUNTED_STEPS,
    WARM_UP_TOKENS,
    Burst,
    Case,
    Composition,
    Cost,
    ItlUnderPrefill,
    Kind,
    ModelBench,
    PrefixHit,
    SpeculativeDecoding,
    StepTime,
    WholeRequests,
    itl_context_length,
)

Source = Path | synthetic.Spec
CHILD_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements: every length at every depth with every batch size, and further scenarios."""

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
    requests: int | None = None  # of them; None: as many as the batch
    steps: Sequence[str] = ()  # compositions of steps to time
    bursts: Sequence[str] = ()  # prompts that are submitted at once to an idle engine
    max_step_tokens: int | None = None  # token budget of a step; None: the default of the device
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Raise on steps and bursts that cannot be parsed."""
        for text in self.steps:
            Composition.parse(text, "--step")
        for text in self.bursts:
            if Composition.parse(text, "--burst").decoding:
                raise InvalidRequestError(f"--burst is {text!r}: write PROMPTSxTOKENS, as in 64x27", "--burst")

    def cases(self) -> Iterator[Case]:
        """Yield the cases in table order, without lengths of 0; batched decode adds one sequence to compare with."""
        decode_batches = (1, *self.batches) if max(self.batches) > 1 else self.batches
        kinds: tuple[tuple[Kind, Sequence[int], Sequence[int]], ...]
        kinds = ("pp", self.pp, self.batches), ("tg", self.tg, decode_batches)
        for kind, lengths, batches in kinds:
            for depth in dict.fromkeys(self.depths):
                for batch in dict.fromkeys(batches):
                    yield from (Case(kind, tokens, depth, batch) for tokens in dict.fromkeys(lengths) if tokens)

    @property
    def drafts(self) -> bool:
        """Whether speculative decoding is measured."""
        return self.draft_model is not None or self.speculative != "off"

    @property
    def compositions(self) -> list[Composition]:
        """The steps to time."""
        return [Composition.parse(text, "--step") for text in dict.fromkeys(self.steps)]

    @property
    def prompt_bursts(self) -> list[Composition]:
        """The bursts to time."""
        return [Composition.parse(text, "--burst") for text in dict.fromkeys(self.bursts)]

    def step_context(self) -> int:
        """Return the tokens of the longest sequence of the timed steps, including generated tokens."""
        generated = 2 * (UNCOUNTED_STEPS + COUNTED_STEPS)
        lengths = [max(item.length, (max(self.depths) + generated) * bool(item.decoding)) for item in self.compositions]
        return max(lengths, default=0)


class Throughput:
    """Tokens per second of one case."""

    def __init__(self, bench: ModelBench, case: Case, several_prompts: bool) -> None:
        self.bench, self.harness, self.case, self.name = bench, bench.harness, case, case.name
        self.several_prompts = several_prompts
        # all matrix products of a step, run after each step of a batch; a GPU's would not run alone between its steps
        is_batch = case.kind == "tg" and case.batch > 1 and not bench.model.ops.has_device_memory
        self.products = matmul_ceiling(bench.model, case.batch) if is_batch else None

    def run(self, tokens: int | None = None, time_device: Callable[[], float | None] | None = None) -> TimedRun:
        """Run the case once, or a shorter one of its kind."""
        c, harness = self.case, self.harness
        if c.kind == "pp":
            return harness.prefill(c.depth, tokens or c.tokens, c.batch)
        return harness.decode(c.depth, tokens or c.tokens, c.batch, self.products, time_device)

    def warm_up(self) -> None:
        """Run a short answer, or the whole prompt: its memory is touched then."""
        self.run(min(self.case.tokens, WARM_UP_TOKENS) if self.case.kind == "tg" else None)

    def add_sample(self) -> None:
        c, bench = self.case, self.bench
        time_graph = getattr(bench.model.fused, "time_decode_graph", None)
        timed = self.run(time_device=None if time_graph is None else partial(time_graph, c.batch))
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
        """Update the result with the comparisons known by now: the roofline, products alone, one sequence."""
        c, bench, cost = self.case, self.bench, self.bench.cost
        rate = statistics.estimate(bench.samples[c.name]).value
        fields: dict[str, Any] = {"depth": c.depth, "batch": c.batch}
        if c.kind == "tg":
            fields["bytes_per_token"] = needed = cost.bytes_per_token(c)
            bound_by, limit = "memory", bench.limits.memory_bandwidth
        else:
            fields["operations_per_token"] = needed = cost.operations(c) / (c.tokens * c.batch)
            bound_by, limit = "arithmetic", bench.limits.rate(bench.arithmetic)
        fields |= {"bound_by": bound_by, "percent_of_limit": 100 * (needed * rate / limit)}
        if c.kind == "tg" and c.batch > 1:
            if (of_products := bench.ratio(c.name, f"products/{c.name}")) is not None:
                fields["percent_of_products"] = 100 * of_products
            if (times_one := bench.ratio(c.name, replace(c, batch=1).name)) is not None:
                fields["times_one"] = times_one
        bench.put(c.name, "tok/s", "higher", **fields)


Scenario = Throughput | WholeRequests | StepTime | Burst | PrefixHit | ItlUnderPrefill | SpeculativeDecoding


def run(recorder: Recorder, progress: StepProgress, source: Source, plan: Plan) -> None:
    """Load the model and measure all scenarios."""
    cases = list(plan.cases())
    _require_measurable(source, plan, cases)
    on_cpu = plan.backend in ("auto", "cpu") and not plan.device.startswith("cuda")
    threads = plan.threads if on_cpu else None
    backend = select_backend(plan.device, plan.backend, threads, deterministic=plan.deterministic)
    plan = replace(plan, kv_type=resolve_kv_type(backend, plan.kv_type))
    _require_room(source, plan, cases, backend)
    progress("measuring the machine's limits", 0, 0)
    limits = backend_limits(backend)
    recorder.details["limits"] = limits.as_json()
    recorder.details["peak_memory_is_of"] = "this run" if processes.reset_peak_memory() else "the process"
    checkpoint = open_source(recorder, progress, source, plan, backend)
    config = read_model_config(checkpoint)
    context = max(need.context for need in _needs(plan, cases, config))
    model = load_source(checkpoint, backend, plan, context, progress)
    harness = _main_harness(model, plan, cases)
    cost = Cost.from_checkpoint(checkpoint, config, plan.kv_type)
    bench = ModelBench(recorder, harness, cost, limits, backend.name)
    for case in sorted((c for c in cases if c.kind == "tg"), key=lambda c: c.tokens):  # the longest answer counts
        parts: dict[str, Any] = {"weights": cost.weights, "tokens": case.tokens, "batch": case.batch}
        recorder.add_result(Result.exact(f"bytes_per_token{case.suffix}", "B", cost.bytes_per_token(case), **parts))
    _measure(bench, list(_scenarios(bench, plan, cases, checkpoint, progress)), plan.repetitions, progress)


def _main_harness(model: Transformer, plan: Plan, cases: Sequence[Case]) -> EngineHarness:
    """Return the engine of prefill, decode, whole requests and bursts."""
    bursts, options = plan.prompt_bursts, dict[str, Any]()
    capacity = max((sum(plan.pg), 1, *(case.context for case in cases), *(burst.length for burst in bursts)))
    batch = max((1, *(case.batch for case in cases), *(plan.batches if plan.pg else ()), *(b.prompts for b in bursts)))
    if plan.max_step_tokens is not None:
        options["max_step_tokens"] = plan.max_step_tokens
    elif model.ops.has_device_memory:
        options["max_step_tokens"] = choose_step_tokens(
            Workspace(model.config, batch_invariant=model.ops.deterministic), model.ops.free_memory() or 0
        )
    return EngineHarness(model, capacity, batch, plan.seed, plan.kv_type, **options)


def _measure(bench: ModelBench, scenarios: Sequence[Scenario], repetitions: int, progress: StepProgress) -> None:
    """Measure engine after engine, the scenarios of each in turn by repetition: CUDA graphs belong to one KV cache."""
    total, done = len(scenarios) * (repetitions + 1), 0
    for harness in dict.fromkeys(scenario.harness for scenario in scenarios):
        group = [scenario for scenario in scenarios if scenario.harness is harness]
        progress(f"{group[0].name}: warming up the engine", done, total)
        harness.warm_up()
        for number, scenario in enumerate(group):
            progress(f"{scenario.name}: warming up", done + number, total)
            scenario.warm_up()
        for repetition in range(repetitions):
            done += len(group)
            for number, scenario in enumerate(group if repetition % 2 == 0 else reversed(group)):
                progress(f"{scenario.name}: {repetition + 1} of {repetitions}", done + number, total)
                scenario.add_sample()
            for scenario in group:  # now with the ratios to what was measured after them
                if isinstance(scenario, Throughput):
                    scenario.put()
            bench.recorder.add_result(Result.exact("peak_memory", "B", processes.peak_memory()))
            for name, size in peak_device_memory(bench.model.ops).items():
                bench.recorder.add_result(Result.exact(f"device_memory/{name}", "B", size))
        done += len(group)


def _require_measurable(source: Source, plan: Plan, cases: Sequence[Case]) -> None:
    if not (cases or plan.prefix or plan.targets_ms or plan.pg or plan.compositions or plan.prompt_bursts):
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    if not plan.drafts:
        return
    if not isinstance(source, Path):
        message = "speculative decoding is measured on real text: a synthetic model generates none"
        raise InvalidRequestError(message, "speculative")
    if 1 in plan.tg or not any(plan.tg):
        raise InvalidRequestError("speculative decoding needs 2 output tokens or more: use a longer --tg", "tg")


class Need(NamedTuple):
    """The largest engine of one option: so many requests of so many tokens."""

    name: str
    batch: int
    context: int
    remedy: str = "a smaller one"


def _needs(plan: Plan, cases: Sequence[Case], config: ModelConfig) -> Iterator[Need]:
    yield Need("the model", 1, 1)
    yield from (Need(c.name, c.batch, c.context, f"a smaller --{c.kind} or --depth") for c in cases)
    if plan.pg:
        yield Need("--pg", max(plan.batches), sum(plan.pg), "smaller ones")
    if plan.steps:
        batch = max(item.requests for item in plan.compositions)
        yield Need("--step", batch, plan.step_context(), "shorter prompts or a smaller --depth")
    yield from (Need("--burst", burst.prompts, burst.length, "shorter prompts") for burst in plan.prompt_bursts)
    if plan.prefix:
        yield Need("--prefix", 1, plan.prefix + TAIL_TOKENS)
    if plan.targets_ms:
        context = itl_context_length(config)
        yield Need("--target-itl-ms", DECODING_REQUESTS + 1, context, "a model with a longer one")


def _require_room(source: Source, plan: Plan, cases: Sequence[Case], backend: Backend) -> None:
    """Raise, before anything long is done, if a scenario fits neither the context nor the memory."""
    if isinstance(source, Path):
        config, weights = read_model_config(open_checkpoint(source)), 0  # a mapped file's pages need not all stay
    else:
        synthetic.require_memory(source)
        config, weights = read_model_config(synthetic.without_weights(source)), source.nbytes
    needs = list(_needs(plan, cases, config))
    name, _, capacity, remedy = max(needs, key=lambda need: need.context)
    if capacity > config.context_length:
        message = f"{name} needs {capacity} tokens, the model's context has {config.context_length}: use {remedy}"
        raise ContextLengthError(message, name.lstrip("-")[:2])
    batch = max(need.batch for need in needs)
    needed = config.kv_bytes(capacity * batch, plan.kv_type)
    free = backend.free_memory() if backend.has_device_memory else machine.memory()[1]
    if free is not None and needed + weights > free:
        raise InsufficientMemoryError(
            f"the keys and values of {batch} x {capacity} tokens take {human_bytes(needed)}, and "
            f"{human_bytes(free)} are free for them and the model: use a smaller --batch or --depth"
        )


def _as_transfer(progress: StepProgress) -> Callable[[str, int, int | None], None]:
    return lambda what, done, total: progress(what, done, total or 0)


def open_source(recorder: Recorder, progress: StepProgress, source: Source, plan: Plan, backend: Backend) -> Checkpoint:
    """Open a model, or make a synthetic one, and record its description."""
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


def load_source(
    checkpoint: Checkpoint, backend: Backend, plan: Plan, context: int | None, progress: StepProgress
) -> Transformer:
    """Prepare the weights of an opened model for a backend."""
    config = read_model_config(checkpoint)
    backend.load_kernels(checkpoint, config, plan.kv_type, _as_transfer(progress))
    what, total = "preparing the weights", checkpoint.nbytes
    progress(what, 0, total)
    return load_model(checkpoint, backend, config, context, lambda done: progress(what, done, total))


def _scenarios(
    bench: ModelBench, plan: Plan, cases: Sequence[Case], checkpoint: Checkpoint, progress: StepProgress
) -> Iterator[Scenario]:
    several_prompts = len({case.tokens for case in cases if case.kind == "pp"}) > 1
    batches = dict.fromkeys(plan.batches)
    yield from (Throughput(bench, case, several_prompts) for case in cases)
    if plan.pg:
        yield from (WholeRequests(bench, plan.pg[0], plan.pg[1], batch, plan.requests or batch) for batch in batches)
    yield from (Burst(bench, burst) for burst in plan.prompt_bursts)
    if plan.steps:
        yield from _step_times(bench, plan)
    if plan.prefix:
        yield PrefixHit(bench, plan.prefix, plan.kv_type)
    yield from (ItlUnderPrefill(bench, target, plan.kv_type) for target in dict.fromkeys(plan.targets_ms))
    if plan.drafts:
        opened = None if plan.draft_model is None else open_checkpoint(Path(plan.draft_model))
        draft = None if opened is None else load_source(opened, bench.model.ops, plan, None, progress)
        options: dict[str, Any] = {"speculative": plan.speculative}
        if plan.draft_tokens is not None:
            options["draft_tokens"] = plan.draft_tokens
        for batch in batches:
            for tokens in dict.fromkeys(filter(None, plan.tg)):
                yield SpeculativeDecoding(bench, tokens, batch, checkpoint, plan.kv_type, draft, **options)


def _step_times(bench: ModelBench, plan: Plan) -> Iterator[StepTime]:
    """Yield the steps to time; their engine has room for each of them in one step, however long that takes."""
    steps = plan.compositions
    batch, step_tokens = max(item.requests for item in steps), max(item.step_tokens for item in steps)
    options: dict[str, Any] = {"max_step_tokens": step_tokens, "target_itl_ms": NO_TARGET_MS}
    harness = EngineHarness(bench.model, plan.step_context(), batch, plan.seed, plan.kv_type, **options)
    for step in steps:
        yield from (StepTime(bench, harness, step, d) for d in dict.fromkeys(plan.depths if step.decoding else (0,)))


def run_isolated(recorder: Recorder, progress: StepProgress, models: Sequence[synthetic.Spec], plan: Plan) -> None:
    """Measure several synthetic models, each in a process of its own; results are named MODEL/NAME.

    A model that fails is named in `details`, and the others go on.
    """
    recorder.model = {"name": ", ".join(map(str, models)), "bytes": sum(m.nbytes for m in models), "synthetic": True}
    for number, model in enumerate(models):
        progress(str(model), number, len(models))
        output = _measure_in_child(model, plan)
        if "error" in output:
            recorder.details.setdefault("failed", {})[str(model)] = output["error"]
            continue
        recorder.details.setdefault("models", {})[str(model)] = {"model": output["model"], **output["details"]}
        for value in output["results"]:
            result = Result.from_json(value, str(model))
            recorder.add_result(replace(result, name=f"{model}/{result.name}"))


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
