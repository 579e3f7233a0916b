"""Whole models: prefill and decode as llama-bench defines them, time to first token, memory, bytes read for a token.

ppN: N prompt tokens to the first sampled token; tgN: N steps of one token each from `depth` cached ones. Both in tokens
a second over all sequences of the batch. Unlike llama-bench, which leaves sampling out, every run samples greedily, and
goes through the engine.
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
from ..engine_harness import Drive
from ..results import Recorder, Result
from ..roofline import Limits
from . import latency, speculative
from .throughput import Bench, Case, Cost, Item, Plan, Rate

Progress = Callable[[str, float, float], None]
Source = Path | synthetic.Spec


def run(recorder: Recorder, progress: Progress, source: Source, plan: Plan) -> None:
    """Load the model and measure everything, in turn by repetition."""
    cases = list(plan.cases())
    _check(source, plan, cases)
    on_cpu = plan.backend in ("auto", "cpu") and not plan.device.startswith("cuda")
    ops = select_backend(plan.device, plan.backend, plan.threads if on_cpu else None)
    plan = replace(plan, kv_type=resolve_kv_type(ops, plan.kv_type))
    _require_room(source, plan, cases)
    progress("measuring the machine's limits", 0, 0)
    bounds = roofline.measure_limits(plan.threads)
    recorder.details["limits"] = bounds.as_json()
    recorder.details["peak_memory_is_of"] = "this run" if process_stats.reset_peak() else "the process"
    bench, checkpoint = _load(recorder, progress, source, plan, ops, bounds)
    _count(bench, cases)
    items = list(_items(bench, plan, cases, checkpoint, progress))
    total = len(items) * (plan.repetitions + 1)
    for number, item in enumerate(items):
        progress(f"{item.name}: warming up", number, total)
        item.warm_up()
    for repetition in range(plan.repetitions):
        done = len(items) * (repetition + 1)
        for number, item in enumerate(items if repetition % 2 == 0 else reversed(items)):
            progress(f"{item.name}: {repetition + 1} of {plan.repetitions}", done + number, total)
            item.take()
        for item in items:  # what was measured after them stands beside them now
            if isinstance(item, Rate):
                item.put()
        recorder.add_result(Result.exact("peak_memory", "B", process_stats.peak()))


def _items(
    bench: Bench, plan: Plan, cases: Sequence[Case], checkpoint: Checkpoint, progress: Progress
) -> Iterator[Item]:
    """In the order of the table."""
    several = len({case.tokens for case in cases if case.kind == "pp"}) > 1
    yield from (Rate.of(bench, case, several) for case in cases)
    if plan.prefix:
        yield latency.Sharing.of(bench, plan.prefix, plan.kv_type)
    yield from (latency.Waiting.of(bench, target, plan.kv_type) for target in dict.fromkeys(plan.targets_ms))
    if plan.guesses is not None:
        drafts = None if plan.draft_model is None else _draft_model(Path(plan.draft_model), bench, plan, progress)
        for batch in dict.fromkeys(plan.batches):
            for tokens in dict.fromkeys(filter(None, plan.tg)):
                yield speculative.Guessing.of(bench, plan, tokens, batch, checkpoint, drafts)


def _draft_model(path: Path, bench: Bench, plan: Plan, progress: Progress) -> Transformer:
    checkpoint = open_checkpoint(path)
    return _prepared(checkpoint, read_model_config(checkpoint), bench.drive.engine.model.ops, plan, None, progress)


def _prepared(
    checkpoint: Checkpoint, config: ModelConfig, ops: Backend, plan: Plan, context: int | None, progress: Progress
) -> Transformer:
    ops.load_kernels(checkpoint, config, plan.kv_type, lambda what, *n: progress(what, n[0], n[1] or 0))
    progress("preparing the weights", 0, 0)
    return load_model(checkpoint, ops, config, context)


def _load(
    recorder: Recorder, progress: Progress, source: Source, plan: Plan, ops: Backend, bounds: Limits
) -> tuple[Bench, Checkpoint]:
    if isinstance(source, Path):
        checkpoint = open_checkpoint(source)
        recorder.model = environment.describe_model(source, lambda what, *n: progress(what, n[0], n[1] or 0))
    else:
        checkpoint = synthetic.checkpoint(source, plan.seed, progress)
        recorder.model = {"name": str(source), "bytes": checkpoint.nbytes, "synthetic": True, "seed": plan.seed}
    if is_fp8(plan.quantize):
        ops.require_fp8()
    if plan.quantize is not None:
        checkpoint = quantize_checkpoint(
            checkpoint, plan.quantize, progress=lambda what, *n: progress(what, n[0], n[1] or 0)
        )
        made = {"quantized": plan.quantize.upper(), "bytes": checkpoint.nbytes}
        recorder.model = {**(recorder.model or {}), **made}
    config, cases = read_model_config(checkpoint), list(plan.cases())
    capacity, batch = max((c.needs for c in cases), default=1), max((c.batch for c in cases), default=1)
    context = max(
        capacity,
        latency.shared_prompt_length(plan.prefix),
        latency.itl_context_length(config) if plan.targets_ms else 0,
    )
    model = _prepared(checkpoint, config, ops, plan, context, progress)
    drive = Drive(model, capacity, batch, plan.seed, plan.kv_type)
    backend = ops.name
    return Bench(recorder, drive, Cost.of(checkpoint, config, plan.kv_type), bounds, backend), checkpoint


def _check(source: Source, plan: Plan, cases: Sequence[Case]) -> None:
    """Refuse what cannot be measured."""
    if not cases and not plan.prefix and not plan.targets_ms:
        raise InvalidRequestError("nothing to measure: --pp and --tg are both 0", "pp")
    if plan.guesses is None:
        return
    if not isinstance(source, Path):
        raise InvalidRequestError("guesses are measured on real text: a synthetic model knows none", "speculative")
    if not all(tokens == 0 or tokens > 1 for tokens in plan.tg) or not any(plan.tg):
        raise InvalidRequestError("guesses are measured on answers of 2 tokens or more: use a longer --tg", "tg")


def _require_room(source: Source, plan: Plan, cases: Sequence[Case]) -> None:
    """Refuse what fits neither the context nor the memory, with the figures, before anything long is done."""
    if isinstance(source, Path):
        config, weights = read_model_config(open_checkpoint(source)), 0  # a file is mapped: its pages need not all stay
    else:
        synthetic.require_memory(source)
        config, weights = read_model_config(synthetic.without_weights(source)), source.nbytes
    asked = {case.name: (case.needs, f"a smaller --{case.kind} or --depth") for case in cases}
    if plan.prefix:
        asked["--prefix"] = latency.shared_prompt_length(plan.prefix), "a smaller one"
    if plan.targets_ms:
        asked["--target-itl-ms"] = latency.itl_context_length(config), "a model with a longer one"
    name, (capacity, remedy) = max(asked.items(), key=lambda one: one[1][0])
    if capacity > config.context_length:
        raise ContextLengthError(
            f"{name} needs {capacity} tokens, the model's context has {config.context_length}: use {remedy}",
            name.lstrip("-")[:2],
        )
    batch = max((*(case.batch for case in cases), latency.ANSWERING + 1 if plan.targets_ms else 1))
    needed, (_, free) = config.kv_bytes(capacity * batch, plan.kv_type), machine.memory()
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
        bench.recorder.add_result(Result.exact(f"bytes_per_token{case.suffix}", "B", read, **parts))
