"""The job dialect: a job's events are fixed when they are made, so late, repeated and several readers get the same.

Order: started, then token, metrics and narration in any number, then exactly one of end or error, then [DONE].
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from ...engine.request import resolve_max_tokens
from ...errors import ConflictError, InferenceError, NotFoundError, RequestCancelledError, WorkerError
from ...generation import Generation
from ...token_engine.protocol import RequestState
from .. import log
from ..bodies import JobRequest
from ..offload import estimate_tokens
from ..sse import DONE, encode_event
from ..worker import Worker

METRICS_S = 1.0  # between two metrics events
POLL_S = 0.1  # between two looks at running jobs
MAX_FINISHED_BYTES = 256 << 20  # of finished jobs: past it the oldest are dropped before their time
JOB_BYTES, EVENT_BYTES = 4096, 64  # overhead, an estimate
STOP_REASONS = {"length": "MAX_TOKENS", "stop": "EOS"}


class Narrator:
    """Describes the progress of one job for people: queued, prefill, preempted, engine restarted, resumed.

    It reads the state of the request with every delta and every `POLL_S`. Events carry the correlation id of the
    request that created the job.
    """

    def __init__(self, actor: str, job_id: str, request: RequestState, emit: Callable[[dict[str, Any]], None]) -> None:
        self._request, self._emit = request, emit
        self._actor, self._job_id, self._correlation_id = actor, job_id, log.correlation_id.get()
        self._has_started = self._is_preempted = False
        self._num_preemptions = self._num_restarts = 0

    def queued(self, num_others: int) -> None:
        """Report that the job was accepted while `num_others` wait for their first token."""
        others = f"{num_others or 'no'} other request{'s are' if num_others != 1 else ' is'} waiting"
        self._narrate("queued", f"Accepted with a prompt of {self._request.num_prompt_tokens} tokens; {others}.")

    def poll(self) -> None:
        """Report what changed since the last call."""
        request = self._request
        if not self._has_started:
            if not request.was_admitted:
                return
            self._has_started = True
            cached = f"; {request.num_cached_tokens} of them are in the cache" if request.num_cached_tokens else ""
            self._narrate("reading", f"Prefill of a prompt of {request.num_prompt_tokens} tokens{cached}.")
        if request.num_preemptions > self._num_preemptions:
            self._num_preemptions, self._is_preempted = request.num_preemptions, True
            self._narrate("preempted", "Preempted: its memory went to other requests; it waits and will be resumed.")
        if request.num_restarts > self._num_restarts:
            self._num_restarts, self._is_preempted = request.num_restarts, True
            self._narrate("restarted", "The engine is restarted; the job goes on where it was.")
        if self._is_preempted and request.is_running:
            self._is_preempted = False
            self._narrate("resumed", "Resumed.")

    def _narrate(self, action: str, human: str) -> None:
        event = {"type": "narration", "actor": self._actor, "action": action, "target": self._job_id, "human": human}
        if self._correlation_id is not None:
            event["correlation_id"] = self._correlation_id
        self._emit({**event, "job_id": self._job_id})


class Job:
    """A generation and its events."""

    def __init__(self, job_id: str, generation: Generation, worker: Worker) -> None:
        self.id = job_id
        self.generation: Generation | None = generation  # until its end
        self.narrator: Narrator | None = Narrator(worker.settings.worker_id, job_id, generation.request, self._emit)
        self.num_tokens, self.decode_ms = 0, 0.0
        self.events: list[bytes] = []
        self.error: WorkerError | None = None
        self.finished_at: float | None = None  # on the monotonic clock
        self._seed = generation.request.submitted.seed
        self._worker = worker
        self._num_others = worker.num_unstarted - 1
        self._texts: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._changed = asyncio.Event()
        self._next_metrics_at = time.monotonic() + METRICS_S
        self._num_sent = self._num_held_back = 0  # tokens in token events; tokens whose text is not visible yet

    async def run(self) -> None:
        """Make the events, to the last."""
        generation, narrator = self.generation, self.narrator
        assert generation is not None
        assert narrator is not None
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        model = self._worker.names[0]
        self._emit({"type": "started", "job_id": self.id, "model": model, "started_at": started_at, "seed": self._seed})
        narrator.queued(self._num_others)
        try:
            async for delta in generation.deltas():
                self.num_tokens, self.decode_ms = generation.num_tokens, generation.decode_ms
                narrator.poll()
                self._texts.append(delta.text)
                self._num_held_back += len(delta.tokens)
                if delta.text:
                    self._emit_token(delta.text)
                self._emit_metrics(generation)
                if delta.finish_reason is not None:
                    self._stop_reason = STOP_REASONS[delta.finish_reason]
                    if delta.stop_sequence is not None:
                        self._stop_reason, self._stop_sequence = "STOP_SEQUENCE", delta.stop_sequence
            self._emit(self._end_event())
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            log.request_failed(error)
            self._fail(InferenceError(f"the job failed ({type(error).__name__})"))
        finally:
            self.finished_at, self.generation, self.narrator = time.monotonic(), None, None  # frees the request
            self._texts = ["".join(self._texts)]
            self._append(DONE)

    @property
    def nbytes(self) -> int:
        """An estimate of the memory that the job takes after its end."""
        return JOB_BYTES + sum(len(event) + EVENT_BYTES for event in self.events) + sum(map(len, self._texts))

    def _emit(self, event: dict[str, Any]) -> None:
        self._append(encode_event(event))

    def _append(self, event: bytes) -> None:
        """Add an event, unless the last one was added."""
        if self.events and self.events[-1] is DONE:
            return
        self.events.append(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _emit_token(self, text: str) -> None:
        """Emit all tokens since the last token event, those whose text was held back included."""
        event: dict[str, Any] = {"type": "token", "t": text, "i": self._num_sent}
        if self._num_held_back != 1:
            event["n"] = self._num_held_back
        self._num_sent, self._num_held_back = self._num_sent + self._num_held_back, 0
        self._emit(event)

    def _end_event(self) -> dict[str, Any]:
        event: dict[str, Any] = {
            "type": "end", "tokens_out": self.num_tokens, "decode_time_ms": round(self.decode_ms, 3),
            "stop_reason": self._stop_reason,
        }  # fmt: skip
        return event if self._stop_sequence is None else {**event, "stop_sequence_matched": self._stop_sequence}

    def _fail(self, error: WorkerError) -> None:
        self.error = error.with_traceback(None)  # a traceback would keep the request alive
        self._emit({"type": "error", "code": error.code, "message": str(error), "retriable": error.retriable})

    def _emit_metrics(self, generation: Generation) -> None:
        now = time.monotonic()
        if now < self._next_metrics_at:
            return
        self._next_metrics_at = now + METRICS_S
        seconds, stats = self.decode_ms / 1000, self._worker.engine.stats()
        rate = (self.num_tokens - 1) / seconds if seconds > 0 else 0.0
        first = generation.first_token_at
        ttft = round(1000 * (first - generation.started_at), 3) if first else None
        self._emit({
            "type": "metrics", "tokens_per_sec": round(rate, 2), "ttft_ms": ttft,
            "kv_cache_usage": round(stats.kv_cache_usage, 4), "vram_bytes": stats.device_bytes,
        })  # fmt: skip

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Yield all events from the first to the last; those that exist already come as one chunk."""
        position = 0
        while True:
            if position == len(self.events):
                if self.finished_at is not None and self.events and self.events[-1] is DONE:
                    return
                await self._changed.wait()
            else:
                chunk, position = b"".join(self.events[position:]), len(self.events)
                yield chunk

    def poll(self) -> None:
        """Emit what changed between two tokens; nothing before the started event."""
        if self.events and self.narrator is not None and self.generation is not None:
            self.narrator.poll()
            if self.generation.request.was_admitted:
                self._emit_metrics(self.generation)

    def cancel(self) -> None:
        """End the job within a step; a finished one stays as it is."""
        if self.generation is not None:
            self.generation.abort()

    def result(self) -> dict[str, Any]:
        """Return the whole result; raise the error that ended the job."""
        if self.error is not None:
            raise self.error
        end = self._end_event()
        del end["type"]
        return {"job_id": self.id, "text": "".join(self._texts), **end, "seed": self._seed}

    def state(self) -> dict[str, Any]:
        """Return state and counts."""
        state = "failed" if self.error is not None else "done" if self.finished_at is not None else "running"
        if state == "running" and not self.num_tokens:
            state = "queued"
        if isinstance(self.error, RequestCancelledError):
            state = "cancelled"
        return {"job_id": self.id, "state": state, "tokens_out": self.num_tokens, "events": len(self.events)}


class Jobs:
    """All known jobs: until some time after their end, or until finished ones take too much memory."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._jobs: dict[str, Job] = {}
        self._running: dict[asyncio.Task[None], Job] = {}
        self._finished: deque[tuple[Job, int]] = deque()  # by their end, with the memory of each
        self._finished_bytes = 0
        self._polling: asyncio.Task[None] | None = None

    async def start_job(self, request: JobRequest) -> Job:
        """Start a job from a validated body."""
        worker, values = self._worker, request.values
        self._drop_expired()
        job_id = values["job_id"] or f"job-{uuid4()}"
        self._require_unused(job_id)
        worker.require_model(values["model"])
        context = worker.model.max_context
        worker.encoder.check_texts([request.prompt])
        with worker.reserve(1, estimate_tokens(request.prompt, context)) as reservation:
            (ids,) = await worker.encoder.encode([request.prompt])
            self._require_unused(job_id)  # another request may have taken it meanwhile
            params = request.params
            resolve_max_tokens(len(ids), params.max_tokens, worker.engine.info.engine)  # raises before a 429 would
            reservation.set_actual(len(ids))
            timeout_s = None if values["timeout_ms"] is None else values["timeout_ms"] / 1000
            (generation,) = worker.start_generations(
                ids, params, priority=values["priority"], timeout_s=timeout_s
            )  # fmt: skip
        job = self._jobs[job_id] = Job(job_id, generation, worker)
        task = asyncio.ensure_future(job.run())
        self._running[task] = job
        task.add_done_callback(self._on_done)
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._poll_running())
        return job

    def _require_unused(self, job_id: str) -> None:
        if job_id in self._jobs:
            raise ConflictError(f"there is a job {job_id} already")

    def find(self, job_id: str) -> Job:
        """Return a known job; raise `NotFoundError` otherwise."""
        self._drop_expired()
        if job_id not in self._jobs:
            raise NotFoundError(f"there is no job {job_id[:64]!r}")
        return self._jobs[job_id]

    async def _poll_running(self) -> None:
        """Report what happens between tokens, while any job runs."""
        while self._running:
            await asyncio.sleep(POLL_S)
            for job in self._running.values():
                job.poll()
        self._polling = None

    def _on_done(self, task: asyncio.Task[None]) -> None:
        job = self._running.pop(task)
        self._finished.append((job, job.nbytes))
        self._finished_bytes += job.nbytes
        self._drop_expired()

    def _drop_expired(self) -> None:
        """Drop finished jobs past their time, and the oldest, but the last, while all take too much memory."""
        oldest = time.monotonic() - self._worker.settings.job_ttl_s
        while self._finished and (
            (self._finished[0][0].finished_at or 0.0) < oldest
            or (self._finished_bytes > MAX_FINISHED_BYTES and len(self._finished) > 1)
        ):
            job, size = self._finished.popleft()
            self._finished_bytes -= size
            del self._jobs[job.id]
