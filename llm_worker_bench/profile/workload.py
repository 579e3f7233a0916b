"""What a profile runs: prefill and decode of a model through the engine, or a prompt from text to text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from llm_worker_rbee.backends import resolve_kv_type, select_backend
from llm_worker_rbee.config import KV_AUTO
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError
from llm_worker_rbee.llm import LLM
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights import Checkpoint

from .. import e2e, synthetic
from ..backends import kernel_trace
from ..engine_harness import EngineHarness
from ..flame_graph import PySpy
from ..results import Recorder

PHASES = {"prefill": "Prefill", "decode": "Decode"}
SEED = 20240607


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to run; a phase of 0 tokens and a flame graph of 0 seconds are left out."""

    pp: int = 128
    tg: int = 16
    repetitions: int = 5
    flame_seconds: float = 3.0
    py_spy: PySpy | None = None
    batch: int = 1  # requests at once
    depth: int = 0  # tokens in the KV cache before the prompt
    prompt: str | None = None  # in place of `pp` random tokens

    @property
    def phases(self) -> list[str]:
        return [phase for phase, tokens in zip(PHASES, (self.pp, self.tg), strict=True) if tokens]


class Loading(NamedTuple):
    """Where a model is computed, and how."""

    device: str = "auto"
    backend: str = "auto"
    threads: int | None = None
    kv_type: str = KV_AUTO
    quantize: str | None = None


class Subject(NamedTuple):
    """A loaded model; `llm` where it has a tokenizer."""

    model: Transformer
    checkpoint: Checkpoint
    kv_type: str
    llm: LLM | None = None


def load_synthetic(recorder: Recorder, progress: StepProgress, spec: synthetic.Spec, loading: Loading) -> Subject:
    """Make a model of random weights, and prepare it for a backend."""
    backend = select_backend(loading.device, loading.backend, loading.threads)
    kv_type = resolve_kv_type(backend, loading.kv_type)
    plan = e2e.Plan(kv_type=kv_type, quantize=loading.quantize)
    checkpoint = e2e.open_source(recorder, progress, spec, plan, backend)
    return Subject(e2e.load_source(checkpoint, backend, plan, None, progress), checkpoint, kv_type)


class PhaseRun(NamedTuple):
    """One run of a phase: the steps are those that a profile divides by."""

    seconds: float
    steps: int


class Workload(Protocol):
    """Runs a phase; `on_start` is called when its timed part begins."""

    engine: Engine
    rest: str  # the component of what happens outside of the engine's steps
    setup: ClassVar[dict[str, tuple[str, ...]]]  # functions before the timed part of each phase
    tokens: dict[str, int]  # of a step of each phase

    def run(self, phase: str, on_start: Callable[[], object]) -> PhaseRun: ...


class RandomTokens:
    """Prompts of random tokens, all at once, and steps of one token for each."""

    rest = "host"
    setup: ClassVar[dict[str, tuple[str, ...]]] = {
        "prefill": ("EngineHarness._fill_cache",),
        "decode": ("EngineHarness._fill_cache", "EngineHarness._start"),
    }

    def __init__(self, subject: Subject, settings: Settings) -> None:
        s, model = settings, subject.model
        capacity = s.depth + s.pp + s.tg + 1
        if capacity > model.config.context_length:
            needed = " and ".join(f"--{name} {n}" for name, n in (("depth", s.depth), ("pp", s.pp), ("tg", s.tg)) if n)
            context = f"a context of {capacity}: the model has {model.config.context_length}"
            raise ContextLengthError(f"{needed} need {context}", "pp")
        self._settings = s
        self._harness = EngineHarness(model, capacity, s.batch, SEED, subject.kv_type)
        self.engine = self._harness.engine
        self.tokens = {"prefill": s.pp * s.batch, "decode": s.batch}
        if kernel_trace(model.ops) is not None:  # a GPU: capture graphs, as a server does
            self._harness.warm_up()

    def run(self, phase: str, on_start: Callable[[], object]) -> PhaseRun:
        s = self._settings
        if phase == "prefill":
            return PhaseRun(self._harness.prefill(s.depth, s.pp, s.batch, on_start).seconds, 1)
        timed = self._harness.decode(s.depth + s.pp, s.tg, s.batch, on_start=on_start)
        return PhaseRun(timed.seconds, timed.steps)


class TextPrompt:
    """A prompt from text to text, as `LLM.stream` computes it: prefill ends with the first token."""

    rest = "text"
    setup: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, subject: Subject, settings: Settings) -> None:
        if subject.llm is None:
            raise InvalidRequestError("--prompt needs a tokenizer, which a synthetic model has not", "prompt")
        assert settings.prompt is not None
        self._llm, self._prompt, self._tg = subject.llm, settings.prompt, settings.tg
        self.engine = subject.llm.engine
        self.engine.scheduler.pool.caching = False  # the same prompt is computed each time
        self.tokens = {"prefill": len(subject.llm.tokenize(settings.prompt)), "decode": 1}

    def run(self, phase: str, on_start: Callable[[], object]) -> PhaseRun:
        if phase == "prefill":
            on_start()
        start = time.perf_counter()
        stream = self._llm.stream(self._prompt, temperature=0.0, max_tokens=self._tg + 1, ignore_eos=True)
        next(stream)
        if phase == "decode":
            on_start()
            start = time.perf_counter()
            for _ in stream:
                pass
        seconds = time.perf_counter() - start
        stream.close()
        return PhaseRun(seconds, self._tg if phase == "decode" else 1)


def make_workload(subject: Subject, settings: Settings) -> Workload:
    """Return random tokens, or the prompt of the settings."""
    return RandomTokens(subject, settings) if settings.prompt is None else TextPrompt(subject, settings)
