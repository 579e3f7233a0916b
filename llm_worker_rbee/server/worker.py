"""The worker behind the routes: loads the model, starts generations, reports health, drains.

The port is bound before the model is loaded, in a thread; then an `AsyncEngine` serves it. Everything else here runs in
the event loop. Which requests may enter is decided in `admission`; what replies look like, in `openai` and `jobs`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from ..config import ServerSettings
from ..engine.async_engine import AsyncEngine
from ..engine.request import SamplingParams
from ..errors import InferenceError, ModelLoadingError, ModelNotFoundError, ShuttingDownError, WorkerError
from ..generation import Generation, GenerationListener, make_generations
from ..llm import LLM
from ..load import OnStage, Stage
from .admission import Admission, Reservation
from .metrics import LatencyHistograms
from .offload import OffloadPool, PromptEncoder

State = Literal["loading", "ready", "stopping", "failed"]
LOADING_RETRY_S = 2


class Worker(GenerationListener):
    """One model on the wire."""

    def __init__(self, settings: ServerSettings, load: Callable[[OnStage], LLM]) -> None:
        self.settings, self.names = settings, settings.names
        self.state: State = "loading"
        self.started_at = time.time()  # a date; uptime comes from the monotonic clock
        self._start_clock = time.monotonic()
        self.loading_events: list[dict[str, Any]] = []  # of /v1/loading/progress
        self.loading_changed = asyncio.Event()  # replaced with each event
        self.failure: WorkerError | None = None
        self._open: set[Generation] = set()  # not read to their end
        self._unstarted: set[Generation] = set()  # of these, without a token
        self.admission, self.offload = Admission(settings), OffloadPool()
        self.latencies = LatencyHistograms()
        self._load = load
        self._llm: LLM | None = None
        self.encoder: PromptEncoder  # once the model is loaded
        self._engine: AsyncEngine | None = None

    async def start(self) -> None:
        """Load the model, then serve it; a failure is kept and raised."""
        loop = asyncio.get_running_loop()

        def on_stage(stage: Stage) -> None:
            event = {"stage": stage.stage, "done": stage.done, "total": stage.total, "seconds": round(stage.seconds, 6)}
            event |= {} if stage.detail is None else {"detail": stage.detail}
            loop.call_soon_threadsafe(self._publish, event)

        try:
            self._llm = await asyncio.to_thread(self._load, on_stage)
        except Exception as error:
            message = f"the model could not be loaded: {type(error).__name__}: {error}"
            self.failure = error if isinstance(error, WorkerError) else InferenceError(message)
            self.state = "failed"
            self._publish({"stage": "failed", "message": "the model could not be loaded"})
            raise self.failure from error
        if self.state != "loading":  # stopped meanwhile
            return
        self.encoder = PromptEncoder(self._llm, self.offload)
        self._engine = AsyncEngine(self._llm.engine)
        self._engine.start()
        self.state = "ready"
        self._publish({"stage": "ready"})

    async def stop(self) -> None:
        """Take no new requests, let running ones finish within the shutdown timeout, end the others with an error."""
        was_loading, self.state = self.state == "loading", "stopping"
        if was_loading:
            self._publish({"stage": "stopping"})
        end = time.monotonic() + self.settings.shutdown_timeout_s
        while self.num_open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._engine is not None:
            await self._engine.stop(ShuttingDownError("the worker is shutting down"))
        self.offload.close()

    def _publish(self, event: dict[str, Any]) -> None:
        self.loading_events.append(event)
        changed, self.loading_changed = self.loading_changed, asyncio.Event()
        changed.set()

    @property
    def llm(self) -> LLM:
        """The model; raises while it loads, after it failed and while the worker stops."""
        if self.state == "stopping":
            raise ShuttingDownError("the worker is shutting down")
        if self.failure is not None:
            raise InferenceError("the model could not be loaded")
        if self._llm is None or self.state != "ready":
            raise ModelLoadingError("the model is loading", LOADING_RETRY_S)
        return self._llm

    @property
    def is_loaded(self) -> bool:
        return self._llm is not None

    @property
    def loaded(self) -> LLM:
        """The model for requests that were admitted, also while the worker stops."""
        assert self._llm is not None
        return self._llm

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_unstarted(self) -> int:
        return len(self._unstarted)

    @property
    def is_busy(self) -> bool:
        return self.num_open > 0 or self.admission.load.waiting > 0

    def require_model(self, name: str | None) -> None:
        """Raise unless this is the served model's name, or none."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(
                f"the model {name[:100]!r} is not served here: leave model out, or see the list of models"
            )

    def reserve(self, num_requests: int, num_tokens: int) -> AbstractContextManager[Reservation]:
        """Reserve places for requests that are being tokenized, with an estimate of their tokens; raise if full."""
        return self.admission.reserve(self.llm.engine, num_requests, num_tokens)

    def start_generations(
        self, ids: list[int], params: SamplingParams, *, n: int = 1, priority: int = 0, timeout_s: float | None = None,
        is_scored_only: bool = False,
    ) -> list[Generation]:  # fmt: skip
        """Start `n` generations of one prompt, within a reservation; they share one seed."""
        llm = self.llm
        assert self._engine is not None
        generations = make_generations(
            llm.tokenizer, llm.engine.config, llm.config.vocab_size, ids,
            params.resolve(llm.sampling_defaults.values), n=n, priority=priority, timeout_s=timeout_s,
            is_scored_only=is_scored_only, listener=self,
        )  # fmt: skip
        for generation in generations:
            generation.submit(self._engine)
            self.admission.add(generation.request)
            self._open.add(generation)
            self._unstarted.add(generation)
        return generations

    def on_first_outputs(self, generation: Generation, seconds: float, count: int) -> None:
        self._unstarted.discard(generation)
        queue_s = generation.request.first_scheduled_time - generation.started_at
        self.latencies.observe_first(seconds, count, queue_s)

    def on_outputs(self, generation: Generation, seconds: float, count: int) -> None:
        self.latencies.observe_outputs(seconds, count)
        self.admission.observe_itl(seconds, count)

    def on_close(self, generation: Generation) -> None:
        self._unstarted.discard(generation)
        self._open.discard(generation)
        self.admission.remove(generation.request)
        self.latencies.e2e.observe(time.perf_counter() - generation.started_at)

    def health(self) -> dict[str, Any]:
        """Return the health from cached state: forward progress, not that the process exists."""
        status, age = {"ready": "healthy"}.get(self.state, self.state), 0.0
        if self._engine is not None:
            age = time.monotonic() - self._engine.last_step_at if self._engine.engine.has_work else 0.0
            if status == "healthy" and self._engine.engine.device_failed:
                status = "failed"
            if status == "healthy" and (age > self.settings.stall_timeout_s or not self._engine.is_alive):
                status = "stalled"
        load = self.admission.load
        return {
            "status": status, "model": self.names[0],
            "uptime_s": round(time.monotonic() - self._start_clock, 3), "last_step_age_s": round(age, 3),
            "running": load.running, "waiting": load.waiting,
        }  # fmt: skip
