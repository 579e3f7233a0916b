"""Whole models: prefill and decode as llama-bench defines them, time to first token, memory, bytes read for a token.

ppN: N prompt tokens to the first sampled token; tgN: N steps of one token each from `depth` cached ones. Both in tokens
per second over all sequences of the batch. Unlike llama-bench, every run samples greedily and goes through the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import machine
from ...backends import resolve_kv_type, select_backend
from ...backends.ops import Backend
from ...config import ModelConfig
from ...errors import ContextLengthError, InsufficientMemoryError, InvalidRequestError, human_bytes
from ...models import Transformer, load_model, read_model_config
from ...models.convert import is_fp8, quantize_checkpoint
from ...weights import Checkpoint, open_checkpoint
from .. import environment, process_stats, roofline, synthetic
from ..engine_harness import EngineHarness
from ..results import Recorder, Result
from . import latency
from .latency import ItlUnderPrefill, PrefixHit
from .speculative import SpeculativeDecoding
from .throughput import Case, Cost, ModelBench, Plan, Scenario, Throughput, WholeRequests

Progress = Callable[[str, float, float], None]
Source = Path | synthetic.Spec
PG_STEP_TOKENS = 4096  # token budget of a step where whole requests are measured on a GPU


def run(recorder: Recorder, progress: Progress, source: Source, plan: Plan) -> None:
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
    limits = roofline.measure_limits(plan.threads) if measured is None else roofline.Limits.of_device(*measured)
    recorder.details["limits"] = limits.as_json()
    recorder.details["peak_memory_is_of"] = "this run" if process_stats.reset_peak_memory() else "the process"
    checkpoint = _open(recorder, progress, source, plan, backend)
    bench = _load(recorder, progress, checkpoint, plan, backend, limits)
    _record_costs(bench, cases)
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
        recorder.add_result(Result.exact("peak_memory", "B", process_stats.peak_memory()))
        for name, size in backend.peak_memory().items():
            recorder.add_result(Result.exact(f"device_memory/{name}", "B", size))


def _scenarios(
    bench: ModelBench, plan: Plan, cases: Sequence[Case], checkpoint: Checkpoint, progress: Progress
) -> Iterator[Scenario]:
    """Yield the scenarios in the order of the table."""
    several_prompts = len({case.tokens for case in cases if case.kind == "pp"}) > 1
    yield from (Throughput.create(bench, case, several_prompts) for case in cases)
    if plan.pg:
        yield from (WholeRequests(bench, plan.pg[0], plan.pg[1], batch) for batch in dict.fromkeys(plan.batches))
    if plan.prefix:
        yield PrefixHit.create(bench, plan.prefix, plan.kv_type)
    yield from (ItlUnderPrefill.create(bench, target, plan.kv_type) for target in dict.fromkeys(plan.targets_ms))
    if plan.drafter is not None:
        draft_model = None if plan.draft_model is None else _load_draft_model(bench, plan, progress)
        for batch in dict.fromkeys(plan.batches):
            for tokens in dict.fromkeys(filter(None, plan.tg)):
                yield SpeculativeDecoding.create(bench, plan, tokens, batch, checkpoint, draft_model)


def _load_draft_model(bench: ModelBench, plan: Plan, progress: Progress) -> Transformer:
    assert plan.draft_model is not None
    checkpoint = open_checkpoint(Path(plan.draft_model))
    backend = bench.harness.engine.model.ops
    return _load_model(checkpoint, read_model_config(checkpoint), backend, plan, None, progress)


def _load_model(
    checkpoint: Checkpoint, config: ModelConfig, backend: Backend, plan: Plan, context: int | None, progress: Progress
) -> Transformer:
    backend.load_kernels(checkpoint, config, plan.kv_type, lambda what, *n: progress(what, n[0], n[1] or 0))
    progress("preparing the weights", 0, 0)
    return load_model(checkpoint, backend, config, context)


def _open(recorder: Recorder, progress: Progress, source: Source, plan: Plan, backend: Backend) -> Checkpoint:
    quantize = plan.quantize
    if isinstance(source, Path):
        checkpoint = open_checkpoint(source)
        recorder.model = environment.describe_model(source, lambda what, *n: progress(what, n[0], n[1] or 0))
    else:
        checkpoint = synthetic.checkpoint(source, plan.seed, progress)
        recorder.model = {"name": str(source), "bytes": checkpoint.nbytes, "synthetic": True, "seed": plan.seed}
        quantize = quantize or source.quantize
    if is_fp8(quantize):
        backend.require_fp8()
    if quantize is not None:
        checkpoint = quantize_checkpoint(
            checkpoint, quantize, progress=lambda what, *n: progress(what, n[0], n[1] or 0)
        )
        recorder.model |= {"quantized": quantize.upper(), "bytes": checkpoint.nbytes}
    return checkpoint


def _load(
    recorder: Recorder, progress: Progress, checkpoint: Checkpoint, plan: Plan, backend: Backend,
    limits: roofline.Limits,
) -> ModelBench:  # fmt: skip
    config, cases = read_model_config(checkpoint), list(plan.cases())
    capacity = max(sum(plan.pg), *(case.context for case in cases), 1)
    batch = max((case.batch for case in cases), default=max(plan.batches) if plan.pg else 1)
    needed = capacity, latency.shared_prompt_length(plan.prefix)
    context = max(*needed, latency.itl_context_length(config) if plan.targets_ms else 0)
    model = _load_model(checkpoint, config, backend, plan, context, progress)
    options: dict[str, Any] = {"max_step_tokens": PG_STEP_TOKENS} if plan.pg and backend.has_device_memory else {}
    harness = EngineHarness(model, capacity, batch, plan.seed, plan.kv_type, **options)
    cost = Cost.from_checkpoint(checkpoint, config, plan.kv_type)
    return ModelBench(recorder, harness, cost, limits, backend.name)


def _require_measurable(source: Source, plan: Plan, cases: Sequence[Case]) -> None:
    """Raise if there is nothing to measure, or speculative decoding has no text."""
    if not cases and not plan.prefix and not plan.targets_ms and not plan.pg:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    if plan.drafter is None:
        return
    if not isinstance(source, Path):
        raise InvalidRequestError(
            "speculative decoding is measured on real text: a synthetic model generates none", "speculative"
        )
    if not all(tokens == 0 or tokens > 1 for tokens in plan.tg) or not any(plan.tg):
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
        needs["--prefix"] = latency.shared_prompt_length(plan.prefix), "a smaller one"
    if plan.targets_ms:
        needs["--target-itl-ms"] = latency.itl_context_length(config), "a model with a longer one"
    name, (capacity, remedy) = max(needs.items(), key=lambda one: one[1][0])
    if capacity > config.context_length:
        raise ContextLengthError(
            f"{name} needs {capacity} tokens, the model's context has {config.context_length}: use {remedy}",
            name.lstrip("-")[:2],
        )
    batch = max((*(case.batch for case in cases), latency.DECODING_REQUESTS + 1 if plan.targets_ms else 1))
    batch = max(batch, *plan.batches) if plan.pg else batch
    needed = config.kv_bytes(capacity * batch, plan.kv_type)
    free = backend.free_memory() if backend.has_device_memory else machine.memory()[1]
    if free is not None and needed + weights > free:
        raise InsufficientMemoryError(
            f"the keys and values of {batch} x {capacity} tokens take {human_bytes(needed)}, and "
            f"{human_bytes(free)} are free for them and the model: use a smaller --batch or --depth"
        )


def _record_costs(bench: ModelBench, cases: Sequence[Case]) -> None:
    """Record the bytes that a token needs at each depth and batch size, for the longest answer there."""
    for case in sorted((c for c in cases if c.kind == "tg"), key=lambda c: c.tokens):
        read = bench.cost.bytes_per_token(case)
        parts: dict[str, Any] = {"weights": bench.cost.weights, "tokens": case.tokens, "batch": case.batch}
        bench.recorder.add_result(Result.exact(f"bytes_per_token{case.suffix}", "B", read, **parts))
