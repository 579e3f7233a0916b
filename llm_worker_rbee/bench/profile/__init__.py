"""Where the time of prefill and decode goes, by component, and what each component could gain.

A prefill step is the whole prompt up to its first token, a decode step one token more, of one request alone, sampled
greedily. The stopwatch's own cost is measured and taken off; what neither ops nor batch account for is Python's. Flame
graphs come from passes of their own, without the stopwatch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from ...backends.ops import Array, Fused, Ops
from ...engine.request import Request, SamplingParams
from ...engine.sampler import sample_rows
from ...engine.solo import Solo
from ...errors import ContextLengthError
from ...llm import LLM
from ...models import Transformer
from .. import environment, timing
from ..results import Recorder, Result
from ..roofline import Limits, Work, measured, threads_of
from . import flame
from .ops import CountedOps, Spent, Stopwatch, TimedOps, weights_of

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
    recorder.model = environment.model_description(llm.checkpoint.path, lambda what, done, all: steps(what, 0, 1))
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
        self.limits = measured(threads_of(self.llm.model.ops))
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
        workload = Workload(replace(model, ops=cast(Ops, ops), fused=None), self.settings)
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
        model = replace(self.llm.model, ops=cast(Ops, timed), fused=_in_parts(self.llm.model.fused, watch))
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
        self.recorder.add(f"{phase}/step", "s", whole / n_steps, **common)
        for name, samples in spent.items():
            share = sum(samples) / total
            n_calls = parts[name].calls / n_steps if name in parts else 0
            fields = {"share": share, "class": class_of(share), "calls": n_calls, **self.needs(phase, name, n_steps)}
            made = Result.of(f"{phase}/{name}", "s", samples, **common, **fields)
            if least := fields.get("limit_s"):
                fields["percent_of_limit"] = 100 * least / made.estimate if made.estimate else math.nan
            self.recorder.put(replace(made, fields={**common, **fields}))

    def needs(self, phase: str, name: str, n_steps: int) -> dict[str, Any]:
        """Bytes, operations and least time of a component in one step."""
        counted = self.work[phase].get(name)
        if not counted:
            return {}
        whole = Work(
            sum(work.bytes * n for work, n in counted.items()) / n_steps,
            sum(work.operations * n for work, n in counted.items()) / n_steps,
        )
        least = sum(self.limits.seconds(work) * n for work, n in counted.items()) / n_steps
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


def _in_parts(fused: Fused | None, watch: Stopwatch) -> Fused | None:
    """A backend's own way through the model, with each of its parts on the clock."""
    return None if fused is None else cast(Fused, lambda batch, kv: fused.in_parts(batch, kv, watch.timed))


def stopwatch_cost(rounds: int = 5, calls: int = 5000) -> float:
    """Seconds that the stopwatch adds to a call: a function that does nothing, with it and without."""

    def nothing(*args: object) -> None:
        return None

    timed = Stopwatch().timed("nothing", nothing)
    with_it, without = (
        min(timing.sample(lambda f=f: f(1, 2, 3), calls) for _ in range(rounds))  # type: ignore[misc]
        for f in (timed, nothing)
    )
    return max(0.0, with_it - without)
