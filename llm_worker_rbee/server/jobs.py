"""The job dialect: a job is a request whose events are fixed when they are made, and read late, again, by several.

started, then token and metrics in any number, then exactly one of end or error, then [DONE].
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from ..engine.request import SamplingParams
from ..errors import ConflictError, InferenceError, NotFoundError, RequestCancelledError, WorkerError
from . import fields, logs
from .answer import Answer
from .fields import Field, FieldsError, Problem
from .sse import DONE, event
from .worker import Worker

METRICS_S = 1.0
MOST_STOPS = 4
STOP_REASONS = {"length": "MAX_TOKENS", "stop": "EOS"}
SAMPLING = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")
SAMPLING_INTEGERS = ("top_k", "repeat_last_n", "seed")
DEFAULTS = SamplingParams()

TABLE: dict[str, Field] = {
    "operation": Field(fields.choice("infer"), "infer"),
    "job_id": Field(fields.job_id),
    "model": Field(fields.text),
    "prompt": Field(fields.text, is_secret=True),
    "messages": Field(fields.messages, is_secret=True),
    "max_tokens": Field(fields.integer(1), required=True),
    **{name: Field(fields.number, getattr(DEFAULTS, name)) for name in SAMPLING},
    **{name: Field(fields.sampling_integer(name), getattr(DEFAULTS, name)) for name in SAMPLING_INTEGERS},
    "stop": Field(fields.stops(MOST_STOPS), (), is_secret=True),
    "priority": Field(fields.integer(-(1 << 31), (1 << 31) - 1), 0),
    "timeout_ms": Field(fields.integer(1, fields.LONGEST_TIMEOUT_MS)),
    "stream": Field(fields.boolean, True),
}


def checked_job(body: bytes, *, needs_id: bool = False) -> dict[str, Any]:
    """The fields of a job; prompt or messages, one of them."""
    found = fields.read_object(body)
    problems: list[Problem] = []
    try:
        values = fields.checked(found, TABLE)
    except FieldsError as error:
        values, problems = {}, error.problems
    if (found.get("prompt") is None) == (found.get("messages") is None):
        problems.append(Problem("prompt", "required", "give either prompt or messages"))
    if needs_id and found.get("job_id") is None:
        problems.append(Problem("job_id", "required", "job_id is required"))
    if problems:
        raise FieldsError(problems)
    return values


def params_of(values: dict[str, Any]) -> SamplingParams:
    """How the answer is drawn."""
    taken = {name: values[name] for name in (*SAMPLING, *SAMPLING_INTEGERS, "max_tokens", "stop")}
    return SamplingParams(**taken)


class Job:
    """A request and its events."""

    def __init__(self, job_id: str, answer: Answer, seed: int, model: str) -> None:
        self.id = job_id
        self.answer = answer
        self.seed = seed
        self.model = model
        self.events: list[bytes] = []
        self.error: WorkerError | None = None
        self.text: list[str] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.ended_at: float | None = None  # on the clock of time.monotonic
        self._news = asyncio.Event()
        self._metrics_at = time.monotonic() + METRICS_S
        self._index = 0

    async def run(self, worker: Worker) -> None:
        """Make the events, to the last."""
        started = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._put(
            event({"type": "started", "job_id": self.id, "model": self.model, "started_at": started, "seed": self.seed})
        )
        try:
            async for piece in self.answer.pieces():
                self.text.append(piece.text)
                if piece.text:
                    self._token(piece.text, len(piece.tokens))
                self._metrics(worker)
                if piece.finish is not None:
                    self.stop_reason = "STOP_SEQUENCE" if piece.stop is not None else STOP_REASONS[piece.finish]
                    self.stop_sequence = piece.stop
            self._put(event(self._end()))
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            logs.failed(error)
            self._fail(InferenceError(f"the job failed ({type(error).__name__})"))
        finally:
            self.ended_at = time.monotonic()
            self._put(DONE)

    def _token(self, text: str, count: int) -> None:
        said: dict[str, Any] = {"type": "token", "t": text, "i": self._index}
        if count > 1:
            said["n"] = count
        self._index += max(1, count)
        self._put(event(said))

    def _end(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "type": "end", "tokens_out": self.answer.num_tokens, "decode_time_ms": round(self.answer.decode_ms, 3),
            "stop_reason": self.stop_reason,
        }  # fmt: skip
        return told if self.stop_sequence is None else {**told, "stop_sequence_matched": self.stop_sequence}

    def _fail(self, error: WorkerError) -> None:
        self.error = error
        self._put(event({"type": "error", "code": error.code, "message": str(error), "retriable": error.retriable}))

    def _metrics(self, worker: Worker) -> None:
        now = time.monotonic()
        if now < self._metrics_at:
            return
        self._metrics_at = now + METRICS_S
        seconds, pool = self.answer.decode_ms / 1000, worker.loaded.engine.scheduler.pool
        rate = (self.answer.num_tokens - 1) / seconds if seconds > 0 else 0.0
        ttft = 1000 * (self.answer.first_at - self.answer.began_at)
        used = 1 - pool.num_free / pool.n_blocks
        self._put(event({"type": "metrics", "tokens_per_sec": round(rate, 2), "ttft_ms": round(ttft, 3),
                         "kv_cache_usage": round(used, 4), "vram_bytes": 0}))  # fmt: skip

    def _put(self, chunk: bytes) -> None:
        self.events.append(chunk)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def read(self) -> AsyncGenerator[bytes, None]:
        """All events from the first on, to the last; what is there already comes in one piece."""
        at = 0
        while True:
            if at == len(self.events):
                if self.ended_at is not None and self.events and self.events[-1] is DONE:
                    return
                await self._news.wait()
            else:
                chunk, at = b"".join(self.events[at:]), len(self.events)
                yield chunk

    def cancel(self) -> None:
        """Nobody wants the rest of it; one that has ended stays as it is."""
        if self.ended_at is None:
            self.answer.ticket.cancel()

    def result(self) -> dict[str, Any]:
        """The whole, as one object; the error that ended it is raised."""
        if self.error is not None:
            raise self.error
        told = self._end()
        del told["type"]
        return {"job_id": self.id, "text": "".join(self.text), **told, "seed": self.seed}

    def state(self) -> dict[str, Any]:
        """Where it stands."""
        state = "failed" if self.error is not None else "done" if self.ended_at is not None else "running"
        if state == "running" and not self.answer.first_at:
            state = "queued"
        if isinstance(self.error, RequestCancelledError):
            state = "cancelled"
        return {"job_id": self.id, "state": state, "tokens_out": self.answer.num_tokens, "events": len(self.events)}


class Jobs:
    """All jobs that are known, until some time after their end."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, values: dict[str, Any]) -> Job:
        """Take a job on."""
        worker, llm = self._worker, self._worker.llm
        self._forget_old()
        job_id = values["job_id"] or f"job-{uuid4()}"
        if job_id in self._jobs:
            raise ConflictError(f"there is a job {job_id} already")
        worker.require_model(values["model"])
        if values["messages"] is not None:
            ids = await asyncio.to_thread(llm.tokenize_chat, fields.conversation(values["messages"]))
        else:
            ids = await asyncio.to_thread(llm.tokenize, values["prompt"])
        if job_id in self._jobs:  # somebody was quicker
            raise ConflictError(f"there is a job {job_id} already")
        timeout = None if values["timeout_ms"] is None else values["timeout_ms"] / 1000
        seed, (answer,) = worker.answers(ids, params_of(values), priority=values["priority"], timeout_s=timeout)
        job = self._jobs[job_id] = Job(job_id, answer, seed, worker.settings.names[0])
        task = asyncio.ensure_future(job.run(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def get(self, job_id: str) -> Job:
        """One that is known."""
        self._forget_old()
        if job_id not in self._jobs:
            raise NotFoundError(f"there is no job {job_id[:64]!r}")
        return self._jobs[job_id]

    def cancel(self, job_id: str) -> None:
        """End it; one that has ended already stays as it is."""
        self.get(job_id).cancel()

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self._worker.settings.job_ttl_s
        for job_id in [i for i, job in self._jobs.items() if job.ended_at is not None and job.ended_at < oldest]:
            del self._jobs[job_id]
