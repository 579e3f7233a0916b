"""The worker behind the routes: loading, ready, stopping; who may come in; health as forward progress.

The port is bound before the model is here. The model loads in a thread of its own, each phase of it is told; then an
`AsyncEngine` serves it. Everything here runs in the event loop but the loading itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from ..engine.async_engine import AsyncEngine
from ..engine.request import Request, SamplingParams, token_limit
from ..engine.sampler import draw_seed
from ..errors import (
    InferenceError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    ShuttingDownError,
    WorkerError,
)
from ..llm import LLM
from ..load import OnStage, Stage
from ..tokenizer import Detokenizer
from .admission import Admission, Hold
from .answer import Answer
from .config import Settings
from .metrics import Observed
from .offload import Desk
from .prompt_encoder import Prompts

State = Literal["loading", "ready", "stopping", "failed"]
LOADING_RETRY_S = 2


class Worker:
    """One model on the wire."""

    def __init__(self, settings: Settings, load: Callable[[OnStage], LLM]) -> None:
        self.settings = settings
        self.state: State = "loading"
        self.started_at, self._began = time.time(), time.monotonic()  # a date; a clock that is never set back
        self.loading: list[dict[str, Any]] = []  # the events of /v1/loading/progress
        self.news = asyncio.Event()  # something was added to them
        self.failure: WorkerError | None = None
        self.num_open = self.num_unstarted = 0  # answers that are not read to their end; those without a token
        self.admission, self.desk = Admission(settings), Desk()
        self.observed = Observed()
        self._load = load
        self._llm: LLM | None = None
        self._prompts: Prompts | None = None
        self._engine: AsyncEngine | None = None

    async def start(self) -> None:
        """Load the model, then serve it; a failure is kept for who asks."""
        loop = asyncio.get_running_loop()

        def on_stage(stage: Stage) -> None:
            told = {"stage": stage.stage, "done": stage.done, "total": stage.total, "seconds": round(stage.seconds, 6)}
            loop.call_soon_threadsafe(self._tell, told | ({} if stage.detail is None else {"detail": stage.detail}))

        try:
            self._llm = await asyncio.to_thread(self._load, on_stage)
        except Exception as error:
            self.failure = error if isinstance(error, WorkerError) else InferenceError(_unforeseen(error))
            self.state = "failed"
            self._tell({"stage": "failed", "message": "the model could not be loaded"})
            raise self.failure from error
        if self.state != "loading":  # told to stop meanwhile
            return
        self._engine = AsyncEngine(self._llm.engine)
        self._engine.start()
        self.state = "ready"
        self._tell({"stage": "ready"})

    async def stop(self) -> None:
        """No new requests; running ones may finish within the time there is, then they end with an error."""
        was_loading, self.state = self.state == "loading", "stopping"
        if was_loading:  # who waits for the model need not wait any more
            self._tell({"stage": "stopping"})
        end = time.monotonic() + self.settings.shutdown_timeout_s
        while self.num_open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._engine is not None:
            await self._engine.stop(ShuttingDownError("the worker is shutting down"))
        self.desk.close()

    def _tell(self, event: dict[str, Any]) -> None:
        self.loading.append(event)
        news, self.news = self.news, asyncio.Event()
        news.set()

    @property
    def llm(self) -> LLM:
        """The model, once it is here; before and after, an error that says when to come again."""
        if self.state == "stopping":
            raise ShuttingDownError("the worker is shutting down")
        if self.failure is not None:
            raise InferenceError("the model could not be loaded")
        if self._llm is None or self.state != "ready":
            raise ModelLoadingError("the model is loading", LOADING_RETRY_S)
        return self._llm

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way."""
        return self.num_open > 0 or self.admission.load.waiting > 0

    @property
    def is_loaded(self) -> bool:
        """Whether there is a model."""
        return self._llm is not None

    @property
    def loaded(self) -> LLM:
        """The same for those who are in already, also while the worker is stopping."""
        assert self._llm is not None
        return self._llm

    def require_model(self, name: str | None) -> None:
        """It is the one that is served, or none is named."""
        if name is not None and name not in self.settings.names:
            told = f"the model {name[:100]!r} is not served here: leave model out, or see the list of models"
            raise ModelNotFoundError(told)

    @property
    def prompts(self) -> Prompts:
        """What makes ids of what is asked."""
        if self._prompts is None:
            self._prompts = Prompts(self.llm, self.desk)
        return self._prompts

    def held(self, requests: int, tokens: int) -> AbstractContextManager[Hold]:
        """Places for requests that are being tokenized to about so many tokens; refused where there are none."""
        return self.admission.held(self.llm.engine, requests, tokens)

    def answers(
        self, ids: list[int], params: SamplingParams, *, n: int = 1, priority: int = 0, timeout_s: float | None = None,
        is_scored_only: bool = False,
    ) -> tuple[int, list[Answer]]:  # fmt: skip
        """Take on `n` answers to one prompt, for which places are held; the seed that they share, and they themselves.
        Where the prompt is only scored, the one token that comes of it is nobody's."""
        llm = self.llm
        limit = token_limit(len(ids), 0 if is_scored_only else params.max_tokens, llm.max_context)
        if (token := max(params.logit_bias, default=0)) >= llm.config.vocab_size:
            told = f"logit_bias names token {token}, past the vocabulary of {llm.config.vocab_size}"
            raise InvalidRequestError(told, "logit_bias")
        seed = draw_seed() if params.seed is None else params.seed
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return seed, [
            self._begin(Request(ids, params, limit, seed, llm.tokenizer.eos_ids, choice, priority, deadline))
            for choice in range(n)
        ]

    def _begin(self, request: Request) -> Answer:
        llm = self.llm
        assert self._engine is not None
        ticket = self._engine.submit(request)
        self.admission.began(request)
        self.num_unstarted += 1
        self.num_open += 1
        has_started = has_ended = False
        began = time.perf_counter()

        def on_outputs(seconds: float, count: int) -> None:
            if has_started:
                self.observed.outputs(seconds, count)
                self.admission.spoke(seconds, count)
            else:
                self.observed.first(seconds, count, request.first_scheduled_time - began)

        def on_first() -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                self.num_unstarted -= 1

        def on_end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self.num_open -= 1
                self.admission.ended(request)
                self.observed.whole.observe(time.perf_counter() - began)

        decoder = Detokenizer(
            llm.tokenizer, tuple(request.params.stop), continuation=llm.tokenizer.is_continuation(request.prompt)
        )
        return Answer(ticket, decoder, on_outputs, on_first, on_end)

    def health(self) -> dict[str, Any]:
        """Truthful, from what is known: about forward progress, not about a process being there."""
        status, age = {"loading": "loading", "stopping": "stopping", "failed": "failed"}.get(self.state, "healthy"), 0.0
        if self._engine is not None:
            age = time.monotonic() - self._engine.last_step_at if self._engine.engine.has_work else 0.0
            if status == "healthy" and self._engine.engine.is_lost:
                status = "failed"
            if status == "healthy" and (age > self.settings.stall_timeout_s or not self._engine.is_alive):
                status = "stalled"
        load = self.admission.load
        return {
            "status": status,
            "model": self.settings.names[0],
            "uptime_s": round(time.monotonic() - self._began, 3),
            "last_step_age_s": round(age, 3),
            "running": load.running,
            "waiting": load.waiting,
        }


def _unforeseen(error: Exception) -> str:
    return f"the model could not be loaded: {type(error).__name__}: {error}"
