"""Events of a job, and the jobs that load, unload or let a model sleep: started, progress, then end or error, [DONE].

The end goes to `--callback-url`, too.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from typing import Any

from ...errors import InferenceError, InvalidRequestError, RequestCancelledError, WorkerError
from ...sampling_params import SamplingParams
from .. import log
from ..bodies import GenerateRequest
from ..dialect import Front, Member
from ..schema import KINDS, Boolean, Enum, Field, FieldType, Text, validate_body
from ..sse import DONE, encode_event

OPERATIONS = ("load", "unload", "sleep")
JOB_BYTES, EVENT_BYTES = 4096, 64  # overhead, an estimate


def model_job(job_id: FieldType) -> dict[str, Field]:
    """Return the table of the bodies of these jobs."""
    return {
        "operation": Field(Enum(OPERATIONS), required=True),
        "job_id": Field(job_id),
        "model": Field(Text(1), required=True),
        "stream": Field(Boolean(), True),
    }


def parse_model_job(fields: Mapping[str, Any], table: Mapping[str, Field]) -> GenerateRequest:
    """Validate the body of a job about a model; it has no prompt."""
    values = validate_body(fields, table)
    kept = {"job_id": values["job_id"], "operation": values["operation"]}
    params = SamplingParams()
    return GenerateRequest(prompts=[], params=params, model=values["model"], stream=values["stream"], values=kept)


def now() -> str:
    """Return the date in the form of events."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JobEvents(ABC):
    """The events of a job, which never change, for any number of readers."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.events: list[bytes] = []
        self.error: WorkerError | None = None
        self.finished_at: float | None = None  # on the monotonic clock
        self._changed = asyncio.Event()

    @property
    def nbytes(self) -> int:
        """An estimate of the memory that the job takes after its end."""
        return JOB_BYTES + sum(len(event) + EVENT_BYTES for event in self.events)

    def _emit(self, event: dict[str, Any]) -> None:
        self._append(encode_event(event))

    def _append(self, event: bytes) -> None:
        """Add an event, unless the last one was added."""
        if self.events and self.events[-1] is DONE:
            return
        self.events.append(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _fail(self, error: WorkerError) -> None:
        self.error = error.with_traceback(None)  # a traceback would keep the request alive
        self._emit({"type": "error", "code": error.code, "message": str(error), "retriable": error.retriable})

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

    async def run(self) -> None:
        """Make all events."""
        try:
            await self._work()
        except asyncio.CancelledError:
            self._fail(RequestCancelledError("the job was cancelled"))
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            log.request_failed(error)
            self._fail(InferenceError(f"the job failed ({type(error).__name__})"))
        finally:
            self.finished_at = time.monotonic()
            self._release()
            self._append(DONE)

    @abstractmethod
    async def _work(self) -> None:
        """Make the events up to the end, or raise."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what a finished job does not need."""

    @abstractmethod
    def poll(self) -> None:
        """Emit what has changed since the last call."""

    @abstractmethod
    def cancel(self) -> None:
        """End the job soon; a finished one stays as it is."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the whole result; raise the error that ended the job."""

    num_tokens = 0

    def state(self) -> dict[str, Any]:
        """Return state and counts."""
        state = "failed" if self.error is not None else "done" if self.finished_at is not None else self._progress()
        state = "cancelled" if isinstance(self.error, RequestCancelledError) else state
        return {"job_id": self.id, "state": state, "tokens_out": self.num_tokens, "events": len(self.events)}

    def _progress(self) -> str:
        """Return the state of a job that has not finished."""
        return "running"


class ModelJob(JobEvents):
    """A job that loads, unloads or lets a model sleep."""

    def __init__(self, job_id: str, operation: str, member: Member, worker: Front) -> None:
        super().__init__(job_id)
        self._operation, self._member, self._worker = operation, member, worker
        self._stage: Any = None
        self._task: asyncio.Task[Any] | None = None
        self._about = {"operation": operation, "model": member.name}
        self._end: dict[str, Any] = {}

    @classmethod
    async def start(cls, job_id: str, request: GenerateRequest, worker: Front) -> ModelJob:
        """Return the job of a request; raise if there is no such model."""
        if not worker.settings.has_pool:
            raise InvalidRequestError("this worker serves the model that it was started with", "operation")
        member = await worker.find(request.model, *KINDS)
        return cls(job_id, request.values["operation"], member, worker)

    async def _work(self) -> None:
        member, start, pool = self._member, time.monotonic(), self._worker.pool
        self._task = asyncio.current_task()
        self._emit({"type": "started", "job_id": self.id, **self._about, "started_at": now()})
        if self._operation == "load":
            await pool.load(member)
        else:
            await pool.unload(member, "sleeping" if self._operation == "sleep" else "unloaded")
        seconds = round(time.monotonic() - start, 3)
        self._end = {**self._about, "status": member.state, "bytes": member.size_bytes, "seconds": seconds}
        self._emit({"type": "end", **self._end})

    def _release(self) -> None:
        self._task = None
        ended = self._end or {**self._about, "status": self._member.state, "error": str(self.error)}
        self._worker.report({"job_id": self.id, **ended})

    def poll(self) -> None:
        stage = self._member.stage
        if self.events and stage is not None and stage != self._stage:
            self._stage = stage
            self._emit({"type": "progress", "stage": stage.stage, "done": stage.done, "total": stage.total})

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"job_id": self.id, **self._end}
