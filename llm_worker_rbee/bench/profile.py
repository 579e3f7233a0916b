"""Where the time of prefill and decode goes, by component, and what each component could gain.

A prefill step is the whole prompt up to its first token, a decode step one token more, of one request alone, sampled
greedily. Op tables that pass calls on measure time (`TimedOps`) or count work (`CountedOps`), in separate passes so
that counting does not disturb the clock. The timer's own cost is measured and subtracted; what neither ops nor batch
account for is Python's. Time is that of the calling thread: a backend must have finished when its op returns. The
report, as Markdown and as an HTML page, is made from the results alone, so it can be made again from run.json.
"""

from __future__ import annotations

import inspect
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from ..backends.ops import Array, Backend, Batch, FusedForward
from ..engine.model_runner import SingleSequence
from ..engine.request import Request, SamplingParams
from ..engine.sampler import sample_rows
from ..errors import ContextLengthError
from ..llm import LLM
from ..models import Transformer
from ..progress import StepProgress
from ..weights import Checkpoint
from .flame_graph import Flame, PySpy, record_flame, render_svg, speedscope
from .micro import seconds_per_call
from .report import html
from .results import Recorder, Result, ResultsError, Run, describe_model, quantity, spread
from .roofline import Limits, Work, backend_threads, measure_limits

Call = Callable[..., Any]
PHASES = {"prefill": "Prefill", "decode": "Decode"}
CRITICAL_SHARE, MODERATE_SHARE = 0.10, 0.05
SEED = 20240607
UNTIMED_OPS = {"prepare", "prepare_vector", "empty_kv", "split_heads"}  # not part of a step, or a view
# an op that is not here gets a line of its own, by its name; `linear` belongs to the component of its weight
COMPONENTS = {
    "embed": "embedding", "rms_norm": "norm", "add_rms_norm": "norm", "rope_store": "rope_kv_write", "rope": "rope",
    "store": "kv_write", "attention": "attention", "gated": "mlp", "take": "head", "logits": "head",
    "sample": "sampling", "logprobs": "sampling",
}  # fmt: skip
# operations for each value of the result; an exponential counts as one
OPERATIONS_PER_VALUE = {"rms_norm": 4, "add_rms_norm": 5, "gated": 4, "embed": 1, "rope": 3}
# (component, layer of the block, its tensors in the file)
LAYERS: tuple[tuple[str, Callable[[Any], Any], tuple[str, ...]], ...] = (
    ("qkv", lambda block: block.attention.qkv, ("attn_q", "attn_k", "attn_v", "attn_qkv")),
    ("output", lambda block: block.attention.output, ("attn_output",)),
    ("mlp", lambda block: block.mlp.gate_up, ("ffn_gate", "ffn_up")),
    ("mlp", lambda block: block.mlp.down, ("ffn_down",)),
)
LABELS = {
    "embedding": "embedding", "norm": "norm", "qkv": "QKV", "rope": "RoPE", "kv_write": "KV write",
    "rope_kv_write": "RoPE + KV write", "attention": "attention", "output": "output", "mlp": "MLP", "head": "head",
    "sampling": "sampling", "scheduling": "scheduling", "python": "Python overhead",
}  # in the order of a step  # fmt: skip
CLASSES = ("critical", "moderate", "minor")
COLUMNS = ("component", "share", "time a step", "interval", "calls", "time a call", "bytes", "least time", "% of limit",
           "class")  # fmt: skip
NUM_TOP = 5
TARGET_FRACTION = 0.5  # of the limit


def classify(share: float) -> str:
    """Return the class of a component; only critical ones are worth a change."""
    return "critical" if share > CRITICAL_SHARE else "moderate" if share >= MODERATE_SHARE else "minor"


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to run; a flame graph of 0 seconds is left out."""

    pp: int = 128
    tg: int = 16
    repetitions: int = 5
    flame_seconds: float = 3.0
    py_spy: PySpy | None = None
    kv_type: str = "float32"  # `run` takes that of the model


class WeightInfo(NamedTuple):
    """A packed weight: its component, its bytes in the file, its number of values."""

    component: str
    bytes: int
    values: int


def index_weights(model: Transformer, checkpoint: Checkpoint) -> dict[int, WeightInfo]:
    """Return the weights of a model, by the `id` of their packed form."""
    tensors = checkpoint.tensors
    table = tensors["token_embd.weight"]
    head = tensors.get("output.weight") or table
    found = {id(model.embedding): WeightInfo("embedding", table.nbytes, table.size)}
    for i, block in enumerate(model.blocks):
        for component, layer, names in LAYERS:
            own = [tensors[key] for name in names if (key := f"blk.{i}.{name}.weight") in tensors]
            found[id(layer(block).weight)] = WeightInfo(component, sum(t.nbytes for t in own), sum(t.size for t in own))
    return found | {id(model.head): WeightInfo("head", head.nbytes, head.size)}


@dataclass(slots=True)
class Spent:
    """Time and calls of one component."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class Timer:
    """Time by component."""

    components: dict[str, Spent] = field(default_factory=dict)

    def wrap(self, component: str, function: Call) -> Call:
        """Return the same function, with its time added to the component."""
        spent, clock = self.components.setdefault(component, Spent()), time.perf_counter

        def call(*args: Any, **more: Any) -> Any:
            start = clock()
            result = function(*args, **more)
            spent.seconds += clock() - start
            spent.calls += 1
            return result

        return call

    def drain(self) -> dict[str, Spent]:
        """Return the times since the last call, and reset them."""
        taken = {name: replace(spent) for name, spent in self.components.items() if spent.calls}
        for spent in self.components.values():
            spent.seconds, spent.calls = 0.0, 0
        return taken


@dataclass(eq=False)
class _WrappedOps:
    """Passes ops on to a backend; an op is wrapped once, at its first use."""

    _ops: Backend
    _weights: Mapping[int, WeightInfo]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if callable(value) and name not in UNTIMED_OPS:
            is_split = hasattr(self._ops, "rope") and hasattr(self._ops, "store")  # as the reference backend has them
            value = self._rope_store if name == "rope_store" and is_split else self._wrap(name, value)
        setattr(self, name, value)
        return value

    def _rope_store(self, q: Any, k: Any, v: Any, positions: Any, table: Any, kv: Any, slots: Any) -> Any:
        self.store(self.rope(k, positions, table), v, kv, slots)
        return self.rope(q, positions, table)

    def _wrap(self, name: str, function: Call) -> Call:
        raise NotImplementedError


@dataclass(eq=False)
class TimedOps(_WrappedOps):
    """An op table that adds the time of each call to a timer."""

    _timer: Timer

    def _wrap(self, name: str, function: Call) -> Call:
        if name != "linear":
            return self._timer.wrap(COMPONENTS.get(name, name), function)
        known = {key: self._timer.wrap(weight.component, function) for key, weight in self._weights.items()}
        other = self._timer.wrap("linear", function)
        return lambda x, w, bias=None: known.get(id(w), other)(x, w, bias)


@dataclass(eq=False)
class CountedOps(_WrappedOps):
    """An op table that counts the work of each component: what the result needs, not what the backend does for it."""

    _resident: float  # bytes of all weights: each is read once a step, so none is in a cache by then
    _work: dict[str, Counter[Work]] = field(default_factory=dict)

    def drain_work(self) -> dict[str, Counter[Work]]:
        """Return the calls by their work, of each component, since the last call."""
        taken, self._work = self._work, {}
        return taken

    def _wrap(self, name: str, function: Call) -> Call:
        def call(*args: Any, **more: Any) -> Any:
            result = function(*args, **more)
            given = tuple(inspect.signature(function).bind(*args, **more).args) if more else args
            component = COMPONENTS.get(name, name)
            if name == "linear" and id(given[1]) in self._weights:
                component = self._weights[id(given[1])].component
            self._work.setdefault(component, Counter())[self._count(name, given, result)] += 1
            return result

        return call

    def _count(self, name: str, args: tuple[Any, ...], result: Any) -> Work:
        if name in ("linear", "logits") and (weight := self._weights.get(id(args[1]))) is not None:
            moved = weight.bytes + _array_bytes((args[0], result))
            return Work(moved, 2.0 * args[0].shape[0] * weight.values, max(self._resident, moved))
        if name == "embed" and (weight := self._weights.get(id(args[0]))) is not None:
            values = math.prod(result.shape)
            return Work(weight.bytes * values / weight.values + _array_bytes((result,)), values)
        if name == "attention":
            return attention_work(args[0], args[1], args[2], args[3], result)
        if name == "rope_store":
            values = math.prod(args[0].shape) + math.prod(args[1].shape)
            return Work(2 * _array_bytes(args[:3]), OPERATIONS_PER_VALUE["rope"] * values)
        if name == "store":
            return Work(2 * _array_bytes(args[:2]))
        values = sum(math.prod(array.shape) for array in list(_arrays((result,)))[:1])
        return Work(_array_bytes((*args, result)), OPERATIONS_PER_VALUE.get(name, 0) * values)


def attention_work(q: Any, kv: Any, batch: Batch, params: Any, result: Any) -> Work:
    """Count attention: every query meets the keys it may see twice (scores, values); a key is read once a request."""
    pairs = keys = 0
    for r, length in enumerate(batch.context_len.tolist()):
        start, end = int(batch.query_start[r]), int(batch.query_start[r + 1])
        seen = [min(p + 1, params.window or length) for p in batch.positions[start:end].tolist()]
        pairs += sum(seen)
        keys += min(length, max(seen, default=0) + end - start - 1)
    heads, dim = q.shape[-2:]
    # The reference has positions before heads; where keys lie otherwise (five dimensions), values have them behind.
    slots = kv.v.shape[0] * kv.v.shape[1 if kv.k.ndim == 4 else 2]
    per_key = sum(cache.nbytes // slots for cache in kv)
    return Work(keys * per_key + _array_bytes((q, result)), 4.0 * heads * dim * pairs)


def _arrays(values: Iterable[Any]) -> Iterator[Any]:
    """Yield arrays among the values, also in a tuple of results; not those inside caches and packed weights."""
    for value in values:
        if type(value) is tuple:
            yield from _arrays(value)
        elif hasattr(value, "nbytes") and hasattr(value, "shape"):
            yield value


def _array_bytes(values: Iterable[Any]) -> float:
    return float(sum(array.nbytes for array in _arrays(values)))


class Workload:
    """A prompt and the tokens after it on one model, repeatable."""

    def __init__(self, model: Transformer, settings: Settings, timer: Timer | None = None) -> None:
        prompt = np.random.default_rng(SEED).integers(0, model.config.vocab_size, settings.pp).tolist()
        self.tg, self.ops = settings.tg, model.ops
        self.sequence = SingleSequence(model, settings.pp + settings.tg + 1, settings.kv_type)
        if timer is not None:
            self.sequence.batch = timer.wrap("scheduling", self.sequence.batch)  # type: ignore[method-assign]
        self.request = Request(prompt, SamplingParams(temperature=0.0).resolve(), settings.tg + 1, SEED, frozenset())

    def prefill(self) -> None:
        """Compute the prompt, up to the first token."""
        del self.request.ids[self.request.num_prompt_tokens :]
        self.request.num_computed_tokens = 0
        for _, logits in self.sequence.catch_up(self.request):
            last = logits
        self._sample(last[-1:])

    def decode(self) -> None:
        """Compute one token; after the last one, start again at the first."""
        request = self.request
        if request.num_tokens - request.num_prompt_tokens > self.tg:
            del request.ids[request.num_prompt_tokens + 1 :]
            request.num_computed_tokens = request.num_prompt_tokens
        self._sample(self.sequence.step(request, 1))

    def _sample(self, logits: Array) -> None:
        self.request.ids += self.ops.sample(logits, sample_rows(self.request)).tolist()


def run(recorder: Recorder, progress: StepProgress, llm: LLM, settings: Settings, flames: dict[str, Flame]) -> None:
    """Profile a loaded model; flame graphs are added to `flames` as they are recorded."""
    capacity = settings.pp + settings.tg + 1
    if capacity > llm.max_context:
        needed = f"--pp {settings.pp} and --tg {settings.tg} need a context of {capacity}"
        raise ContextLengthError(f"{needed}: the model has {llm.max_context}", "pp")
    recorder.model = describe_model(llm.checkpoint.path, lambda what, done, all: progress(what, 0, 1))
    profiler = _Profiler(recorder, progress, llm, replace(settings, kv_type=llm.kv_type))
    profiler.report_progress("measuring what the machine can do", 0)
    profiler.limits = measure_limits(backend_threads(llm.model.ops))
    recorder.details["limits"] = profiler.limits.as_json()
    profiler.count_work()
    profiler.time_components()
    if settings.flame_seconds:
        profiler.record_flames(flames)


@dataclass(slots=True)
class _Profiler:
    recorder: Recorder
    progress: StepProgress
    llm: LLM
    settings: Settings
    limits: Limits = field(init=False)
    work: dict[str, dict[str, Counter[Work]]] = field(default_factory=dict)  # phase -> component -> calls by work
    spent: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    done: float = 0.0

    def report_progress(self, what: str, more: float = 1.0) -> None:
        """Count one unit of progress: a repetition, or a pass of another kind."""
        self.done += more
        self.progress(what, self.done, self.settings.repetitions + 1 + 2 * bool(self.settings.flame_seconds))

    def count_work(self) -> None:
        """Warm up, and count what each component must move and compute in a step."""
        model, checkpoint = self.llm.model, self.llm.checkpoint
        ops = CountedOps(model.ops, index_weights(model, checkpoint), checkpoint.nbytes)
        workload = Workload(replace(model, ops=cast(Backend, ops), fused=None), self.settings)
        self.report_progress("counting the work", 0)
        workload.prefill()
        self.work["prefill"] = ops.drain_work()
        for _ in range(self.settings.tg):
            workload.decode()
            self.report_progress("counting the work", 1 / self.settings.tg)
        self.work["decode"] = ops.drain_work()

    def time_components(self) -> None:
        model, tg = self.llm.model, self.settings.tg
        timer, cost = Timer(), timer_cost()
        self.recorder.details["profiler"] = {"seconds_per_call": cost, "share": {}}
        timed = TimedOps(model.ops, index_weights(model, self.llm.checkpoint), timer)
        fused = model.fused and cast(FusedForward, partial(model.fused.run_profiled, profiler=timer.wrap))
        model = replace(model, ops=cast(Backend, timed), fused=fused)
        workload = Workload(model, self.settings, timer)
        for number in range(1, self.settings.repetitions + 1):
            what = f"repetition {number} of {self.settings.repetitions}"
            self.add_repetition("prefill", 1, seconds_per_call(workload.prefill, 1), timer.drain(), cost)
            self.report_progress(f"{what}: decode", 0.5)
            wall = 0.0
            for _ in range(tg):
                wall += seconds_per_call(workload.decode, 1)
                self.report_progress(f"{what}: decode", 0.5 / tg)
            self.add_repetition("decode", tg, wall, timer.drain(), cost)

    def add_repetition(self, phase: str, n_steps: int, wall: float, parts: Mapping[str, Spent], cost: float) -> None:
        """Add the seconds per step of each component, and update the results."""
        calls = sum(spent.calls for spent in parts.values())
        seconds = {name: spent.seconds for name, spent in parts.items()}
        whole = max(wall - calls * cost, sum(seconds.values()))
        seconds["python"] = whole - sum(seconds.values())
        spent = self.spent[phase]
        for name, taken in seconds.items():
            spent.setdefault(name, []).append(taken / n_steps)
        self.recorder.details["profiler"]["share"][phase] = calls * cost / wall
        total = sum(map(sum, spent.values()))
        tokens = self.settings.pp if phase == "prefill" else 1
        common: dict[str, Any] = {"backend": self.recorder.settings.get("backend"), "tokens": tokens}
        self.recorder.add_sample(f"{phase}/step", "s", whole / n_steps, **common)
        for name, samples in spent.items():
            share = sum(samples) / total
            n_calls = parts[name].calls / n_steps if name in parts else 0
            fields = {"share": share, "class": classify(share), "calls": n_calls, **self.limit_of(phase, name, n_steps)}
            result = Result.from_samples(f"{phase}/{name}", "s", samples, **common, **fields)
            if limit_s := fields.get("limit_s"):
                fields["percent_of_limit"] = 100 * limit_s / result.estimate if result.estimate else math.nan
            self.recorder.add_result(replace(result, fields={**common, **fields}))

    def limit_of(self, phase: str, name: str, n_steps: int) -> dict[str, Any]:
        """Return bytes, operations and least time of a component in one step."""
        counted = self.work[phase].get(name)
        if not counted:
            return {}
        by_memory = sum(self.limits.bound_by(work) == "memory" for work in counted.elements())
        return {
            "bytes": sum(work.bytes * n for work, n in counted.items()) / n_steps,
            "operations": sum(work.operations * n for work, n in counted.items()) / n_steps,
            "limit_s": sum(self.limits.min_seconds(work) * n for work, n in counted.items()) / n_steps,
            "bound_by": "memory" if 2 * by_memory >= counted.total() else "arithmetic",
        }

    def record_flames(self, flames: dict[str, Flame]) -> None:
        """Sample the stack in passes of their own, without a timer."""
        workload = Workload(self.llm.model, self.settings)
        for phase, function in (("prefill", workload.prefill), ("decode", workload.decode)):
            self.report_progress(f"flame graph of {phase}", 0)
            workload.prefill()
            flames[phase] = record_flame(function, self.settings.flame_seconds, self.settings.py_spy)
            self.report_progress(f"flame graph of {phase}")


def timer_cost(rounds: int = 5, calls: int = 5000) -> float:
    """Return the seconds that a timer adds to a call: an empty function with it and without."""

    def nothing(*args: object) -> None:
        return None

    timed = Timer().wrap("nothing", nothing)
    with_timer, without = (
        min(seconds_per_call(lambda f=f: f(1, 2, 3), calls) for _ in range(rounds))  # type: ignore[misc]
        for f in (timed, nothing)
    )
    return max(0.0, with_timer - without)


class Component(NamedTuple):
    """One component of a phase."""

    label: str
    seconds: float  # a step
    share: float
    rank: str  # its class
    result: Result

    def number(self, name: str) -> float:
        """Return a counted field, NaN if it has none."""
        return float(self.result.fields.get(name) or math.nan)

    def cells(self) -> list[str]:
        """Return the row under COLUMNS."""
        calls, limit_s = self.number("calls"), self.number("limit_s")
        return [
            self.label, f"{self.share:.1%}", quantity(self.seconds, "s"),
            spread((self.result.low, self.result.high), "s"), "-" if math.isnan(calls) else f"{calls:,.0f}",
            quantity(self.seconds / calls, "s"), quantity(self.number("bytes"), "B"), quantity(limit_s, "s"),
            "-" if math.isnan(limit_s) else f"{100 * limit_s / self.seconds:.1f}%", self.rank,
        ]  # fmt: skip


def components(run: Run, phase: str) -> list[Component]:
    """Return the components in the order of a step; unknown ops before Python overhead."""
    found = {r.name.partition("/")[2]: r for r in run.results if r.name.startswith(f"{phase}/") and "share" in r.fields}
    order = {name: i for i, name in enumerate(LABELS)}
    return [
        Component(LABELS.get(name, name), r.estimate, float(r.fields["share"]), str(r.fields["class"]), r)
        for name, r in sorted(found.items(), key=lambda item: order.get(item[0], order["python"] - 0.5))
    ]


def step_result(run: Run, phase: str) -> Result | None:
    """Return the result of the whole step."""
    return next((r for r in run.results if r.name == f"{phase}/step"), None)


def by_share(run: Run, phase: str) -> list[Component]:
    """Return the components, the largest share first."""
    return sorted(components(run, phase), key=lambda part: -part.share)


def targets(run: Run, phase: str) -> list[str]:
    """Return for each critical component its limit, and the step's time at half of that limit."""
    step = step_result(run, phase)
    critical = [part for part in by_share(run, phase) if part.rank == "critical"]
    found = [] if step is None else [_target(part, phase, step.estimate) for part in critical]
    return found or ["nothing is critical"]


def _target(part: Component, phase: str, step: float) -> str:
    head = f"{part.label} takes {part.share:.1%} of a {phase} step ({quantity(part.seconds, 's')})"
    limit_s, bound = part.number("limit_s"), part.result.fields.get("bound_by")
    if math.isnan(limit_s):
        best = f"without it the step would be {step / max(step - part.seconds, 1e-12):.2f} times as fast"
        return f"{head}. It has no floor that bytes or operations set: {best}, and no more."
    operations = f"{part.number('operations') / 1e6:,.0f} million operations"
    amount = operations if bound == "arithmetic" else f"{quantity(part.number('bytes'), 'B')} to move"
    part_of_limit = f"{100 * limit_s / part.seconds:.1f}% of its limit"
    head += f", at {part_of_limit} ({quantity(limit_s, 's')}: {amount}, bound by {bound})"
    if part.seconds <= limit_s / TARGET_FRACTION:
        return f"{head}. That is past half of the limit: there is little left to gain."
    after = step - part.seconds + limit_s / TARGET_FRACTION
    times = f"{quantity(after, 's')} instead of {quantity(step, 's')}: {step / after:.2f} times as fast"
    return f"{head}. At half the limit the step would take {times}."


def classes(run: Run, phase: str) -> list[str]:
    """Return a line for each class: its components with their shares, the largest first."""
    found = by_share(run, phase)
    names = {rank: [f"{part.label} {part.share:.1%}" for part in found if part.rank == rank] for rank in CLASSES}
    return [f"{rank}: {', '.join(shares) or 'none'}" for rank, shares in names.items()]


def _top_lines(run: Run, phase: str) -> list[str]:
    """Return `MLP: 60.2%, 114 ms` for each of the largest components."""
    top = by_share(run, phase)[:NUM_TOP]
    return [f"{part.label}: {part.share:.1%}, {quantity(part.seconds, 's')}" for part in top]


def step_line(run: Run, phase: str) -> str:
    """Return `128 tokens in 590 ms (580 to 600 ms): 217 tokens/s`."""
    step = step_result(run, phase)
    if step is None:
        return "not measured"
    tokens = int(step.fields.get("tokens", 1))
    took = f"{quantity(step.estimate, 's')} ({spread((step.low, step.high), 's')})"
    return f"{tokens:,} token{'s' * (tokens != 1)} in {took}: {tokens / step.estimate:,.1f} tokens/s"


def run_facts(run: Run) -> dict[str, str]:
    """Return what was measured, and where."""
    machine, commit = run.machine, run.commit
    found = {
        "Model": str((run.model or {}).get("name", "-")),
        "Settings": ", ".join(f"{key} {value}" for key, value in run.settings.items()),
        "Processor": f"{machine.get('cpu')}, {machine.get('cores')} cores, {' '.join(machine.get('features') or ())}",
        "System": f"{machine.get('system')}, {machine.get('memory_gib')} GiB of memory",
        "Versions": ", ".join(f"{name} {value}" for name, value in run.versions.items()),
        "Commit": "-" if commit is None else commit["id"][:12] + " with changes" * bool(commit.get("dirty")),
        "Date": run.created,
    }
    if limits := run.details.get("limits"):
        best, rate = limits["bandwidth"][-1]["bytes_per_second"], limits["operations_per_second"]
        rates = f"{quantity(best, 'B/s')} from memory, {quantity(rate, 'FLOP/s')} in float32"
        found["Limits"] = f"measured with {limits['threads']} thread(s): {rates}"
    return found


def remark(run: Run) -> str:
    """Return what the timer itself costs, and how the numbers are to be read."""
    profiler: Mapping[str, Any] = run.details.get("profiler") or {}
    shares = ", ".join(f"{share:.2%} of {phase}" for phase, share in (profiler.get("share") or {}).items())
    cost = quantity(float(profiler.get("seconds_per_call", math.nan)), "s")
    return (
        f"The timer costs {cost} a call ({shares}); that is subtracted. Python overhead is what remains of a step "
        "when all ops, the batch and the timer are subtracted. Bytes and operations are what an answer needs at "
        "least, not what the backend does for it; the limit is the larger of the two times they take at the measured "
        "rates."
    )


def markdown(run: Run) -> str:
    """Return the report as Markdown."""
    lines = [f"# Profile of {(run.model or {}).get('name', 'a model')}", ""]
    lines += [f"- {name}: {value}" for name, value in run_facts(run).items()]
    for phase, title in PHASES.items():
        if step_result(run, phase) is None:
            continue
        lines += ["", f"## {title}", "", step_line(run, phase), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * (len(COLUMNS) - 2) + " --- |"]
        lines += [f"| {' | '.join(part.cells())} |" for part in components(run, phase)]
        lines += ["", "Top five:", "", *(f"{i}. {line}" for i, line in enumerate(_top_lines(run, phase), 1))]
        lines += ["", "Classes:", "", *(f"- {line}" for line in classes(run, phase))]
        lines += ["", "Targets:", "", *(f"- {line}" for line in targets(run, phase))]
    lines += ["", remark(run), "", "Critical is over 10% of a step, moderate 5 to 10%, minor less.", ""]
    return "\n".join(lines)


def write_report(folder: Path, run: Run, flames: Mapping[str, Flame]) -> list[Path]:
    """Write all files of a profile; flame graphs that were not recorded are left out."""
    title = f"{(run.model or {}).get('name', 'model')}"
    texts = {"report.md": markdown(run), "report.html": render_page(run, flames)}
    for phase, flame in flames.items():
        texts[f"flame-{phase}.svg"] = render_svg(flame, f"{PHASES.get(phase, phase)} of {title}")
    if flames:
        texts["profile.speedscope.json"] = json.dumps(speedscope(flames, f"profile of {title}"), ensure_ascii=False)
    run.save(folder / "run.json")
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"cannot write {folder}: {error.strerror}") from None
    return [folder / name for name in ("run.json", *texts)]


def render_page(run: Run, flames: Mapping[str, Flame]) -> str:
    """Return the report as one HTML page that needs nothing else, with the flame graphs inline."""
    name = str((run.model or {}).get("name", "a model"))
    sections = [html.Section("Run", html.facts(run_facts(run)))]
    for phase, title in PHASES.items():
        if step_result(run, phase) is not None:
            sections.append(html.Section(title, _phase_section(run, phase)))
    for phase, flame in flames.items():
        title = PHASES.get(phase, phase)
        graph = html.Html(f'<div class="drawing wide">{render_svg(flame, f"{title} of {name}")}</div>')
        sections.append(html.Section(f"{title}: flame graph", graph))
    subtitle = "where the time of a step goes" + ("" if run.complete else " (broken off early)")
    return html.page(f"Profile of {name}", subtitle, sections, remark(run), has_script=bool(flames))


def _phase_section(run: Run, phase: str) -> html.Html:
    parts = components(run, phase)
    longest = max((part.share for part in parts), default=1.0) or 1.0
    rows: list[list[object]] = []
    for part in parts:
        label, share, *cells, rank = part.cells()
        rows.append([label, html.bar(part.share / longest, share, rank), *cells, html.badge(rank)])
    caption = "critical: over 10% of the step, moderate: 5 to 10%, minor: under 5%"
    table = html.table(caption, COLUMNS, rows, range(2, len(COLUMNS) - 1))
    top, ranks, aims = _top_lines(run, phase), classes(run, phase), targets(run, phase)
    return html.joined([
        html.soft(step_line(run, phase)), table, html.heading("Top five"), html.bullets(top, ordered=True),
        html.heading("Classes"), html.bullets(ranks), html.heading("Targets"), html.bullets(aims),
    ])  # fmt: skip
