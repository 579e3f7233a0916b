"""Where the time of prefill and decode goes, by component, and what each component could gain.

A prefill step is the whole prompt up to its first token, a decode step one token more, of one request alone, sampled
greedily. Op tables that pass calls on measure time (`TimedOps`) or count work (`CountedOps`), in separate passes so
that counting does not disturb the clock. The timer's own cost is measured and subtracted; what neither ops nor batch
account for is Python's. Time is that of the calling thread: a backend must have finished when its op returns.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from ...backends.ops import Array, Backend, Batch, FusedForward
from ...engine.model_runner import SingleSequence
from ...engine.request import Request, SamplingParams
from ...engine.sampler import sample_rows
from ...errors import ContextLengthError
from ...llm import LLM
from ...models import Transformer
from ...weights import Checkpoint
from .. import timing
from ..results import Recorder, Result, describe_model
from ..roofline import Limits, Work, backend_threads, measure_limits
from . import flame

Progress = Callable[[str, float, float], None]
Call = Callable[..., Any]
PHASES = ("prefill", "decode")
CRITICAL_SHARE, MODERATE_SHARE = 0.10, 0.05
SEED = 20240607
SETUP_OPS = {"prepare", "prepare_vector", "empty_kv"}  # not part of a step
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
    py_spy: flame.PySpy | None = None
    kv_type: str = "float32"  # `run` takes that of the model


class WeightInfo(NamedTuple):
    """A packed weight: its component, its bytes in the file, its number of values."""

    component: str
    bytes: int
    values: int


def index_weights(model: Transformer, checkpoint: Checkpoint) -> dict[int, WeightInfo]:
    """Return the weights of a model, by the `id` of their packed form."""
    tensors, found = checkpoint.tensors, {}
    table = tensors["token_embd.weight"]
    head = tensors.get("output.weight") or table
    for i, block in enumerate(model.blocks):
        for component, layer, names in LAYERS:
            own = [tensors[key] for name in names if (key := f"blk.{i}.{name}.weight") in tensors]
            weight = WeightInfo(component, sum(t.nbytes for t in own), sum(t.size for t in own))
            found[id(layer(block).weight)] = weight
    return {
        id(model.embedding): WeightInfo("embedding", table.nbytes, table.size),
        **found,
        id(model.head): WeightInfo("head", head.nbytes, head.size),
    }


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
        taken = {name: Spent(spent.seconds, spent.calls) for name, spent in self.components.items() if spent.calls}
        for spent in self.components.values():
            spent.seconds, spent.calls = 0.0, 0
        return taken


class _WrappedOps:
    """Passes ops on to a backend; an op is wrapped once, at its first use."""

    def __init__(self, ops: Backend, weights: Mapping[int, WeightInfo]) -> None:
        self._ops = ops
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if callable(value) and name not in SETUP_OPS:
            is_split = hasattr(self._ops, "rope") and hasattr(self._ops, "store")  # as the reference backend has them
            value = self._rope_store if name == "rope_store" and is_split else self._wrap(name, value)
        setattr(self, name, value)
        return value

    def _rope_store(self, q: Any, k: Any, v: Any, positions: Any, table: Any, kv: Any, slots: Any) -> Any:
        self.store(self.rope(k, positions, table), v, kv, slots)
        return self.rope(q, positions, table)

    def _wrap(self, name: str, function: Call) -> Call:
        raise NotImplementedError


class TimedOps(_WrappedOps):
    """An op table that adds the time of each call to a timer."""

    def __init__(self, ops: Backend, weights: Mapping[int, WeightInfo], timer: Timer) -> None:
        super().__init__(ops, weights)
        self._timer = timer

    def _wrap(self, name: str, function: Call) -> Call:
        if name != "linear":
            return self._timer.wrap(COMPONENTS.get(name, name), function)
        known = {key: self._timer.wrap(weight.component, function) for key, weight in self._weights.items()}
        other = self._timer.wrap("linear", function)
        return lambda x, w, bias=None: known.get(id(w), other)(x, w, bias)


class CountedOps(_WrappedOps):
    """An op table that counts the work of each component: what the result needs, not what the backend does for it."""

    def __init__(self, ops: Backend, weights: Mapping[int, WeightInfo], resident: float) -> None:
        super().__init__(ops, weights)
        self._resident = resident  # bytes of all weights: each is read once a step, so none is in a cache by then
        self._work: dict[str, Counter[Work]] = {}

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
        self.tg = settings.tg
        self.ops = model.ops
        self.sequence = SingleSequence(model, settings.pp + settings.tg + 1, settings.kv_type)
        if timer is not None:
            self.sequence.batch = timer.wrap("scheduling", self.sequence.batch)  # type: ignore[method-assign]
        self.request = Request(prompt, SamplingParams(temperature=0.0), settings.tg + 1, SEED, frozenset())

    def prefill(self) -> None:
        """Compute the prompt, up to the first token."""
        self._truncate_output(0)
        self.request.num_computed_tokens = 0
        for _, logits in self.sequence.catch_up(self.request):
            last = logits
        self._sample(last[-1:])

    def decode(self) -> None:
        """Compute one token; after the last one, start again at the first."""
        request = self.request
        if request.num_tokens - request.num_prompt_tokens > self.tg:
            self._truncate_output(1)
            request.num_computed_tokens = request.num_prompt_tokens
        self._sample(self.sequence.step(request, 1))

    def _sample(self, logits: Array) -> None:
        self.request.ids += self.ops.sample(logits, sample_rows(self.request)).tolist()

    def _truncate_output(self, kept: int) -> None:
        del self.request.ids[self.request.num_prompt_tokens + kept :]


def run(recorder: Recorder, progress: Progress, llm: LLM, settings: Settings, flames: dict[str, flame.Flame]) -> None:
    """Profile a loaded model; flame graphs are added to `flames` as they are recorded."""
    capacity = settings.pp + settings.tg + 1
    if capacity > llm.max_context:
        raise ContextLengthError(
            f"--pp {settings.pp} and --tg {settings.tg} need a context of {capacity}: the model has {llm.max_context}",
            "pp",
        )
    recorder.model = describe_model(llm.checkpoint.path, lambda what, done, all: progress(what, 0, 1))
    _Profiler(recorder, progress, llm, replace(settings, kv_type=llm.kv_type)).run(flames)


@dataclass(slots=True)
class _Profiler:
    recorder: Recorder
    progress: Progress
    llm: LLM
    settings: Settings
    limits: Limits = field(init=False)
    work: dict[str, dict[str, Counter[Work]]] = field(default_factory=dict)  # phase -> component -> calls by work
    spent: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    done: float = 0.0

    def run(self, flames: dict[str, flame.Flame]) -> None:
        self.report_progress("measuring what the machine can do", 0)
        self.limits = measure_limits(backend_threads(self.llm.model.ops))
        self.recorder.details["limits"] = self.limits.as_json()
        self.count_work()
        self.time_components()
        if self.settings.flame_seconds:
            self.record_flames(flames)

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
        model = replace(model, ops=cast(Backend, timed), fused=_profile_fused(model.fused, timer))
        workload = Workload(model, self.settings, timer)
        for number in range(1, self.settings.repetitions + 1):
            what = f"repetition {number} of {self.settings.repetitions}"
            self.add_repetition("prefill", 1, timing.seconds_per_call(workload.prefill, 1), timer.drain(), cost)
            self.report_progress(f"{what}: decode", 0.5)
            wall = 0.0
            for _ in range(tg):
                wall += timing.seconds_per_call(workload.decode, 1)
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

    def record_flames(self, flames: dict[str, flame.Flame]) -> None:
        """Sample the stack in passes of their own, without a timer."""
        workload = Workload(self.llm.model, self.settings)
        for phase, function in (("prefill", workload.prefill), ("decode", workload.decode)):
            self.report_progress(f"flame graph of {phase}", 0)
            workload.prefill()
            flames[phase] = flame.record(phase, function, self.settings.flame_seconds, self.settings.py_spy)
            self.report_progress(f"flame graph of {phase}")


def _profile_fused(fused: FusedForward | None, timer: Timer) -> FusedForward | None:
    return None if fused is None else cast(FusedForward, lambda batch, kv: fused.run_profiled(batch, kv, timer.wrap))


def timer_cost(rounds: int = 5, calls: int = 5000) -> float:
    """Return the seconds that a timer adds to a call: an empty function with it and without."""

    def nothing(*args: object) -> None:
        return None

    timed = Timer().wrap("nothing", nothing)
    with_timer, without = (
        min(timing.seconds_per_call(lambda f=f: f(1, 2, 3), calls) for _ in range(rounds))  # type: ignore[misc]
        for f in (timed, nothing)
    )
    return max(0.0, with_timer - without)
