"""Where the time of prefill and decode goes, by component, and what each component could gain.

A prefill step is the whole prompt up to its first token, a decode step one token more, of one request alone, sampled
greedily. The stopwatch's own cost is measured and taken off; what neither ops nor batch account for is Python's. Flame
graphs come from passes of their own, without the stopwatch.
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
from ...engine.request import Request, SamplingParams
from ...engine.sampler import sample_rows
from ...engine.solo import Solo
from ...errors import ContextLengthError
from ...llm import LLM
from ...models import Transformer
from ...weights import Checkpoint
from .. import environment, timing
from ..results import Recorder, Result
from ..roofline import Limits, Work, backend_threads, measure_limits
from . import flame

Steps = Callable[[str, float, float], None]
PHASES = ("prefill", "decode")
CRITICAL, MODERATE = 0.10, 0.05  # shares above these
FLAME_S = 3.0
SEED = 20240607


def class_of(share: float) -> str:
    """Only critical parts are worth a change."""
    return "critical" if share > CRITICAL else "moderate" if share >= MODERATE else "minor"


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to run; a flame graph of 0 seconds is left out."""

    pp: int = 128
    tg: int = 16
    repetitions: int = 5
    flame_seconds: float = FLAME_S
    py_spy: flame.PySpy | None = None
    kv_type: str = "float32"  # `run` takes the one of the model


class Workload:
    """A prompt and the tokens after it on one model; afterwards the same again."""

    def __init__(self, model: Transformer, settings: Settings, watch: Stopwatch | None = None) -> None:
        rng = np.random.default_rng(SEED)
        prompt = rng.integers(0, model.config.vocab_size, settings.pp).tolist()
        self.tg = settings.tg
        self.ops = model.ops
        self.solo = Solo(model, settings.pp + settings.tg + 1, settings.kv_type)
        if watch is not None:
            self.solo.batch = watch.timed("scheduling", self.solo.batch)  # type: ignore[method-assign]
        self.request = Request(prompt, SamplingParams(temperature=0.0), settings.tg + 1, SEED, frozenset())

    def prefill(self) -> None:
        """The prompt, up to the first token."""
        self._forget(0)
        self.request.num_computed_tokens = 0
        for _, logits in self.solo.catch_up(self.request):
            last = logits
        self._sample(last[-1:])

    def decode(self) -> None:
        """One token more; at the end of the room, back to the first one."""
        request = self.request
        if request.num_tokens - request.num_prompt_tokens > self.tg:
            self._forget(1)
            request.num_computed_tokens = request.num_prompt_tokens
        self._sample(self.solo.step(request, 1))

    def _sample(self, logits: Array) -> None:
        self.request.ids += self.ops.sample(logits, sample_rows(self.request)).tolist()

    def _forget(self, kept: int) -> None:
        """Of the answer all but its first tokens."""
        del self.request.ids[self.request.num_prompt_tokens + kept :]


def run(recorder: Recorder, steps: Steps, llm: LLM, settings: Settings, flames: dict[str, flame.Flame]) -> None:
    """Profile a loaded model; flame graphs are put into `flames` as they are done."""
    if settings.pp + settings.tg + 1 > llm.max_context:
        raise ContextLengthError(
            f"--pp {settings.pp} and --tg {settings.tg} need a context of {settings.pp + settings.tg + 1}: "
            f"the model has {llm.max_context}",
            "pp",
        )
    recorder.model = environment.describe_model(llm.checkpoint.path, lambda what, done, all: steps(what, 0, 1))
    _Profile(recorder, steps, llm, replace(settings, kv_type=llm.kv_type)).run(flames)


@dataclass(slots=True)
class _Profile:
    recorder: Recorder
    steps: Steps
    llm: LLM
    settings: Settings
    limits: Limits = field(init=False)
    work: dict[str, dict[str, Counter[Work]]] = field(default_factory=dict)  # phase -> component -> calls by work
    spent: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    done: float = 0.0

    def run(self, flames: dict[str, flame.Flame]) -> None:
        self.tell("measuring what the machine can do", 0)
        self.limits = measure_limits(backend_threads(self.llm.model.ops))
        self.recorder.details["limits"] = self.limits.as_json()
        self.count()
        self.time()
        if self.settings.flame_seconds:
            self.draw(flames)

    def tell(self, what: str, more: float = 1.0) -> None:
        """Count one unit of progress: a repetition, or a pass of another kind."""
        self.done += more
        self.steps(what, self.done, self.settings.repetitions + 1 + 2 * bool(self.settings.flame_seconds))

    def count(self) -> None:
        """Warm up, and count what each component must move and compute in a step."""
        model, checkpoint = self.llm.model, self.llm.checkpoint
        ops = CountedOps(model.ops, weights_of(model, checkpoint), checkpoint.nbytes)
        workload = Workload(replace(model, ops=cast(Backend, ops), fused=None), self.settings)
        self.tell("counting the work", 0)
        workload.prefill()
        self.work["prefill"] = ops.take_work()
        for _ in range(self.settings.tg):
            workload.decode()
            self.tell("counting the work", 1 / self.settings.tg)
        self.work["decode"] = ops.take_work()

    def time(self) -> None:
        """The repetitions."""
        watch, cost = Stopwatch(), stopwatch_cost()
        self.recorder.details["profiler"] = {"seconds_per_call": cost, "share": {}}
        timed = TimedOps(self.llm.model.ops, weights_of(self.llm.model, self.llm.checkpoint), watch)
        model = replace(self.llm.model, ops=cast(Backend, timed), fused=_in_parts(self.llm.model.fused, watch))
        workload = Workload(model, self.settings, watch)
        tg = self.settings.tg
        for number in range(1, self.settings.repetitions + 1):
            what = f"repetition {number} of {self.settings.repetitions}"
            self.note("prefill", 1, _wall(workload.prefill), watch.take(), cost)
            self.tell(f"{what}: decode", 0.5)
            wall = 0.0
            for _ in range(tg):
                wall += _wall(workload.decode)
                self.tell(f"{what}: decode", 0.5 / tg)
            self.note("decode", tg, wall, watch.take(), cost)

    def note(self, phase: str, n_steps: int, wall: float, parts: Mapping[str, Spent], cost: float) -> None:
        """One repetition of a phase: seconds a step of each component."""
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
            fields = {"share": share, "class": class_of(share), "calls": n_calls, **self.needs(phase, name, n_steps)}
            made = Result.from_samples(f"{phase}/{name}", "s", samples, **common, **fields)
            if least := fields.get("limit_s"):
                fields["percent_of_limit"] = 100 * least / made.estimate if made.estimate else math.nan
            self.recorder.add_result(replace(made, fields={**common, **fields}))

    def needs(self, phase: str, name: str, n_steps: int) -> dict[str, Any]:
        """Bytes, operations and least time of a component in one step."""
        counted = self.work[phase].get(name)
        if not counted:
            return {}
        whole = Work(
            sum(work.bytes * n for work, n in counted.items()) / n_steps,
            sum(work.operations * n for work, n in counted.items()) / n_steps,
        )
        least = sum(self.limits.min_seconds(work) * n for work, n in counted.items()) / n_steps
        by_memory = sum(self.limits.bound_by(work) == "memory" for work in counted.elements())
        bound = "memory" if 2 * by_memory >= counted.total() else "arithmetic"
        return {"bytes": whole.bytes, "operations": whole.operations, "limit_s": least, "bound_by": bound}

    def draw(self, flames: dict[str, flame.Flame]) -> None:
        """Sample the stack in passes of their own, on the plain op table."""
        workload = Workload(self.llm.model, self.settings)
        for phase, function in (("prefill", workload.prefill), ("decode", workload.decode)):
            self.tell(f"flame graph of {phase}", 0)
            workload.prefill()
            flames[phase] = flame.record(phase, function, self.settings.flame_seconds, self.settings.py_spy)
            self.tell(f"flame graph of {phase}")


def _wall(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _in_parts(fused: FusedForward | None, watch: Stopwatch) -> FusedForward | None:
    """A backend's own way through the model, with each of its parts on the clock."""
    return None if fused is None else cast(FusedForward, lambda batch, kv: fused.run_profiled(batch, kv, watch.timed))


def stopwatch_cost(rounds: int = 5, calls: int = 5000) -> float:
    """Seconds that the stopwatch adds to a call: a function that does nothing, with it and without."""

    def nothing(*args: object) -> None:
        return None

    timed = Stopwatch().timed("nothing", nothing)
    with_it, without = (
        min(timing.seconds_per_call(lambda f=f: f(1, 2, 3), calls) for _ in range(rounds))  # type: ignore[misc]
        for f in (timed, nothing)
    )
    return max(0.0, with_it - without)


Call = Callable[..., Any]
SETUP = {"prepare", "prepare_vector", "empty_kv"}  # not part of a step
COMPONENT_OF = {
    "embed": "embedding",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "rope_store": "rope_kv_write",
    "attention": "attention",
    "gated": "mlp",
    "take": "head",
    "logits": "head",
    "sample": "sampling",
    "logprobs": "sampling",
}
# operations for each value of the answer; an exponential counts as one
PER_VALUE = {"rms_norm": 4, "add_rms_norm": 5, "gated": 4, "embed": 1, "rope": 3}
# (component, layer's part, its tensors in the file)
PARTS: tuple[tuple[str, Callable[[Any], Any], tuple[str, ...]], ...] = (
    ("qkv", lambda block: block.attention.qkv, ("attn_q", "attn_k", "attn_v", "attn_qkv")),
    ("output", lambda block: block.attention.output, ("attn_output",)),
    ("mlp", lambda block: block.mlp.gate_up, ("ffn_gate", "ffn_up")),
    ("mlp", lambda block: block.mlp.down, ("ffn_down",)),
)


class Weight(NamedTuple):
    """A packed weight: whose it is, what it takes in the file, how many values it has."""

    component: str
    bytes: int
    values: int


def weights_of(model: Transformer, checkpoint: Checkpoint) -> dict[int, Weight]:
    """The weights of a model, by the identity of their handles."""
    tensors, found = checkpoint.tensors, {}
    for i, block in enumerate(model.blocks):
        for component, part, names in PARTS:
            own = [tensors[key] for name in names if (key := f"blk.{i}.{name}.weight") in tensors]
            weight = Weight(component, sum(t.nbytes for t in own), sum(t.size for t in own))
            found[id(part(block).weight)] = weight
    head = tensors.get("output.weight") or tensors["token_embd.weight"]
    table = tensors["token_embd.weight"]
    return {
        id(model.embedding): Weight("embedding", table.nbytes, table.size),
        **found,
        id(model.head): Weight("head", head.nbytes, head.size),
    }


def is_split(ops: Backend) -> bool:
    """Whether a backend has the rotation and the write into the cache as functions of their own."""
    return hasattr(ops, "rope") and hasattr(ops, "store")


@dataclass(slots=True)
class Spent:
    """What one component has taken until now."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class Stopwatch:
    """Time by component."""

    parts: dict[str, Spent] = field(default_factory=dict)

    def timed(self, component: str, function: Call) -> Call:
        """The same function, on the clock."""
        spent, clock = self.parts.setdefault(component, Spent()), time.perf_counter

        def call(*args: Any, **more: Any) -> Any:
            start = clock()
            result = function(*args, **more)
            spent.seconds += clock() - start
            spent.calls += 1
            return result

        return call

    def take(self) -> dict[str, Spent]:
        """What was noted since the last time; the clocks start at zero again."""
        taken = {name: Spent(spent.seconds, spent.calls) for name, spent in self.parts.items() if spent.calls}
        for spent in self.parts.values():
            spent.seconds, spent.calls = 0.0, 0
        return taken


class _Passing:
    """Passes ops on; a wrapped op is made once, when it is first asked for."""

    def __init__(self, ops: Backend, weights: Mapping[int, Weight]) -> None:
        self._ops = ops
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if callable(value) and name not in SETUP:
            value = self._rope_store if name == "rope_store" and is_split(self._ops) else self._wrapped(name, value)
        setattr(self, name, value)
        return value

    def _rope_store(self, q: Any, k: Any, v: Any, positions: Any, table: Any, kv: Any, slots: Any) -> Any:
        """What `rope_store` means, in two parts."""
        self.store(self.rope(k, positions, table), v, kv, slots)
        return self.rope(q, positions, table)

    def _wrapped(self, name: str, function: Call) -> Call:
        raise NotImplementedError


PARTED = {**COMPONENT_OF, "rope": "rope", "store": "kv_write"}


class TimedOps(_Passing):
    """An op table on a stopwatch."""

    def __init__(self, ops: Backend, weights: Mapping[int, Weight], watch: Stopwatch) -> None:
        super().__init__(ops, weights)
        self._watch = watch

    def _wrapped(self, name: str, function: Call) -> Call:
        if name != "linear":
            return self._watch.timed(PARTED.get(name, name), function)
        known = {key: self._watch.timed(weight.component, function) for key, weight in self._weights.items()}
        other = self._watch.timed("linear", function)
        return lambda x, w, bias=None: known.get(id(w), other)(x, w, bias)


class CountedOps(_Passing):
    """An op table that adds up the work of each component: what the answer needs, not what the backend does for it."""

    def __init__(self, ops: Backend, weights: Mapping[int, Weight], resident: float) -> None:
        super().__init__(ops, weights)
        self._resident = resident  # bytes of all weights: each is read once a step, so none is in a cache by then
        self._work: dict[str, Counter[Work]] = {}

    def take_work(self) -> dict[str, Counter[Work]]:
        """Calls by their work, of each component, since the last time."""
        taken, self._work = self._work, {}
        return taken

    def _wrapped(self, name: str, function: Call) -> Call:
        def call(*args: Any, **more: Any) -> Any:
            result = function(*args, **more)
            given = _positional(function, args, more)
            component = PARTED.get(name, name)
            if name == "linear" and id(given[1]) in self._weights:
                component = self._weights[id(given[1])].component
            self._work.setdefault(component, Counter())[self._count(name, given, result)] += 1
            return result

        return call

    def _count(self, name: str, args: tuple[Any, ...], result: Any) -> Work:
        if name in ("linear", "logits") and (weight := self._weights.get(id(args[1]))) is not None:
            moved = weight.bytes + _touched((args[0], result))
            return Work(moved, 2.0 * args[0].shape[0] * weight.values, max(self._resident, moved))
        if name == "embed" and (weight := self._weights.get(id(args[0]))) is not None:
            values = math.prod(result.shape)
            return Work(weight.bytes * values / weight.values + _touched((result,)), values)
        if name == "attention":
            return attention_work(args[0], args[1], args[2], args[3], result)
        if name == "rope_store":
            q, k, v = args[:3]
            return Work(2 * _touched((q, k, v)), PER_VALUE["rope"] * (math.prod(q.shape) + math.prod(k.shape)))
        if name == "store":
            return Work(2 * _touched(args[:2]))
        values = sum(math.prod(array.shape) for array in list(_arrays((result,)))[:1])
        return Work(_touched((*args, result)), PER_VALUE.get(name, 0) * values)


def attention_work(q: Any, kv: Any, batch: Batch, params: Any, result: Any) -> Work:
    """Every query meets the keys that it may see, twice (scores, mix); a key is read once for its request."""
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
    return Work(keys * per_key + _touched((q, result)), 4.0 * heads * dim * pairs)


def _positional(function: Call, args: tuple[Any, ...], more: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(inspect.signature(function).bind(*args, **more).args) if more else args


def _arrays(values: Iterable[Any]) -> Iterator[Any]:
    """Arrays among the values, also in a tuple of results; caches and packed weights are not looked into."""
    for value in values:
        if type(value) is tuple:
            yield from _arrays(value)
        elif hasattr(value, "nbytes") and hasattr(value, "shape"):
            yield value


def _touched(values: Iterable[Any]) -> float:
    return float(sum(array.nbytes for array in _arrays(values)))
