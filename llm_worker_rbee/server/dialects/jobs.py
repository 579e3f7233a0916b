"""The job dialect: a job's events never change, so late, repeated and several readers get the same ones.

Order: started, then any number of token, metrics and narration, then exactly one of end or error, then [DONE].
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ...engine.request import resolve_max_tokens
from ...errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RequestCancelledError,
    WorkerError,
)
from ...sampling_params import StructuredOutputsParams
from ...token_engine.protocol import RequestState
from ...tokenizer.chat.events import EventFold
from .. import log
from ..bodies import Conversation, GenerateRequest, Messages, estimate_tokens
from ..dialect import Call, Dialect, Front, Generation, Handler, Operation, Route, Worker
from ..json_schema import COUNT, FLAG, NUMBER, TEXT, Schema, array_schema, ref, reply_schema, with_field
from ..schema import (
    MISSING,
    PRIORITY,
    SAMPLING,
    TIMEOUT_MS,
    Boolean,
    Enum,
    Field,
    FieldType,
    ParseOptions,
    StopStrings,
    StructuredOutputs,
    Text,
    ValidationError,
    ValidationIssue,
    decode_object,
    integer,
    sampling_params,
    table_schema,
    validate_body,
)
from ..settings import ServerSettings
from ..sse import EventStream
from .jobs_models import OPERATIONS, JobEvents, ModelJob, model_job, now, parse_model_job

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class JobId(FieldType):
    """A job's id, chosen by the client."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, str) and JOB_ID.fullmatch(value):
            return None
        return ValidationIssue(name, "format", f"{name} must have 1 to 64 of the characters A-Z a-z 0-9 _ -")

    def json_schema(self) -> Schema:
        return {"type": "string", "pattern": f"^{JOB_ID.pattern}$"}


MAX_STOPS = 4
NOT_IN_JOBS = ("presence_penalty", "frequency_penalty")
JOB_SAMPLING = {name: field for name, field in SAMPLING.items() if name not in NOT_IN_JOBS}
JOB: dict[str, Field] = {
    "operation": Field(Enum(("infer",)), "infer"),
    "job_id": Field(JobId()),
    "model": Field(Text()),
    "prompt": Field(Text(1), is_secret=True),
    "messages": Field(Messages(), is_secret=True),
    "max_tokens": Field(integer(1), required=True),
    **JOB_SAMPLING,
    "stop": Field(StopStrings(MAX_STOPS), (), is_secret=True),
    "structured_outputs": Field(StructuredOutputs()),
    "close_on_length": Field(Boolean(), False),
    "priority": PRIORITY,
    "timeout_ms": TIMEOUT_MS,
    "stream": Field(Boolean(), True),
}
MODEL_JOB = model_job(JobId())
CANCEL = {"job_id": Field(JobId(), required=True)}

METRICS_S = 1.0  # between two metrics events
POLL_S = 0.1  # between two looks at running jobs
MAX_FINISHED_BYTES = 256 << 20  # of finished jobs: past it the oldest are dropped before their time
STOP_REASONS = {"length": "MAX_TOKENS", "stop": "EOS"}


def error_body(error: WorkerError) -> dict[str, Any]:
    """Return an error: all issues of an invalid body, or a code."""
    if isinstance(error, ValidationError):
        return {"errors": [_encode_issue(issue) for issue in error.issues]}
    if isinstance(error, InvalidRequestError) and error.code == InvalidRequestError.code:
        return {"errors": [_encode_issue(ValidationIssue(error.field or "body", "invalid", str(error)))]}
    return {"code": error.code, "message": str(error), "retriable": error.retriable}


def _encode_issue(issue: ValidationIssue) -> dict[str, Any]:
    encoded = {"field": issue.field, "constraint": issue.constraint, "message": issue.message}
    return encoded if issue.value is MISSING else {**encoded, "value": issue.value}


def parse_job(body: bytes, options: ParseOptions) -> GenerateRequest:
    """Validate a job's body: either prompt or messages. With `is_stream` the job_id is required."""
    fields = decode_object(body)
    if fields.get("operation") in OPERATIONS:
        return parse_model_job(fields, MODEL_JOB)
    issues: list[ValidationIssue] = []
    try:
        values = validate_body(fields, JOB)
    except ValidationError as error:
        values, issues = {}, error.issues
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        issues.append(ValidationIssue("prompt", "required", "give either prompt or messages"))
    if options.is_stream and fields.get("job_id") is None:
        issues.append(ValidationIssue("job_id", "required", "job_id is required"))
    if options.is_stream and fields.get("stream") is False:
        message = "the reply of this route is a stream: POST /v1/jobs for a whole one"
        issues.append(ValidationIssue("stream", "unsupported", message))
    if issues:
        raise ValidationError(issues)
    guided = values["structured_outputs"]
    params = sampling_params(
        values,
        options.limits,
        values["max_tokens"],
        close_on_length=values["close_on_length"],
        structured_outputs=None if guided is None else StructuredOutputsParams(**guided),
    )
    prompt = Conversation.encode(values["messages"]) if values["prompt"] is None else values["prompt"]
    same = {name: values[name] for name in ("model", "stream", "priority", "timeout_ms")}
    return GenerateRequest(**same, prompts=[prompt], params=params, values={"job_id": values["job_id"]})


def parse_cancel(body: bytes, _: ParseOptions) -> dict[str, Any]:
    """Validate the body of `/cancel`."""
    return validate_body(decode_object(body), CANCEL)


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
        """Report changes since the last call."""
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


class Job(JobEvents):
    """A generation and its events."""

    def __init__(self, job_id: str, generation: Generation, worker: Worker, model: str) -> None:
        """`model` is the name of the model, or of the adapter that the request names."""
        super().__init__(job_id)
        self._model = model
        self.generation: Generation | None = generation  # until its end
        self.narrator: Narrator | None = Narrator(worker.settings.worker_id, job_id, generation.request, self._emit)
        self.num_tokens, self.decode_ms = 0, 0.0
        self._seed = generation.request.submitted.seed
        self._worker = worker
        self._num_others = worker.num_unstarted - 1
        self._texts: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._next_metrics_at = time.monotonic() + METRICS_S
        self._num_sent = self._num_held_back = 0  # tokens in token events; tokens whose text is not visible yet

    async def _work(self) -> None:
        generation, narrator = self.generation, self.narrator
        assert generation is not None
        assert narrator is not None
        started = {"type": "started", "job_id": self.id, "model": self._model}
        self._emit(started | {"started_at": now(), "seed": self._seed})
        narrator.queued(self._num_others)
        events = EventFold()
        async for delta in generation.deltas():
            self.num_tokens, self.decode_ms = generation.num_tokens, generation.decode_ms
            narrator.poll()
            text = delta.text if delta.events is None else events.add(delta.events)  # content, not reasoning
            self._texts.append(text)
            self._num_held_back += len(delta.tokens)
            if text:
                self._emit_token(text)
            self._emit_metrics(generation)
            if delta.finish_reason is not None:
                self._stop_reason = STOP_REASONS[delta.finish_reason]
                if delta.stop_sequence is not None:
                    self._stop_reason, self._stop_sequence = "STOP_SEQUENCE", delta.stop_sequence
        self._emit(self._end_event())

    def _release(self) -> None:
        self.generation, self.narrator = None, None  # frees the request
        self._texts = ["".join(self._texts)]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(map(len, self._texts))

    def _emit_token(self, text: str) -> None:
        """Emit all tokens since the last token event, including tokens whose text was held back."""
        event: dict[str, Any] = {"type": "token", "t": text, "i": self._num_sent}
        if self._num_held_back != 1:
            event["n"] = self._num_held_back
        self._num_sent, self._num_held_back = self._num_sent + self._num_held_back, 0
        self._emit(event)

    def _end_event(self) -> dict[str, Any]:
        event: dict[str, Any] = {
            "type": "end",
            "tokens_out": self.num_tokens,
            "decode_time_ms": round(self.decode_ms, 3),
            "stop_reason": self._stop_reason,
        }
        return event if self._stop_sequence is None else {**event, "stop_sequence_matched": self._stop_sequence}

    def _emit_metrics(self, generation: Generation) -> None:
        now = time.monotonic()
        if now < self._next_metrics_at:
            return
        self._next_metrics_at = now + METRICS_S
        seconds, stats = self.decode_ms / 1000, self._worker.engine.stats()
        rate = (self.num_tokens - 1) / seconds if seconds > 0 else 0.0
        first = generation.first_token_at
        ttft = round(1000 * (first - generation.started_at), 3) if first else None
        self._emit(
            {
                "type": "metrics",
                "tokens_per_sec": round(rate, 2),
                "ttft_ms": ttft,
                "kv_cache_usage": round(stats.kv_cache_usage, 4),
                "vram_bytes": stats.device_bytes,
            }
        )

    def poll(self) -> None:
        """Emit the changes between two tokens; nothing before the started event."""
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

    def _progress(self) -> str:
        return "running" if self.num_tokens else "queued"


class Jobs:
    """All known jobs: until some time after their end, or until finished ones take too much memory."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker
        self._jobs: dict[str, JobEvents] = {}
        self._running: dict[asyncio.Task[None], JobEvents] = {}
        self._finished: deque[tuple[JobEvents, int]] = deque()  # by their end, with the memory of each
        self._finished_bytes = 0
        self._polling: asyncio.Task[None] | None = None

    async def start_job(self, request: GenerateRequest) -> JobEvents:
        """Start a job from a validated body."""
        self._drop_expired()
        job_id = request.values["job_id"] or f"job-{uuid4()}"
        self._require_unused(job_id)
        if "operation" in request.values:
            return self._run(await ModelJob.start(job_id, request, self._worker))
        async with self._worker.use(request.model) as worker:
            return self._run(await self._start(worker, request, job_id))

    async def _start(self, worker: Worker, request: GenerateRequest, job_id: str) -> Job:
        (prompt,), context, started_at = request.prompts, worker.model.max_context, time.perf_counter()
        model, loras = worker.loras.name_of(request.model), worker.loras.uses_of(request.model, None)
        worker.encoder.check_texts([prompt])
        with worker.admission.reserve(1, estimate_tokens(prompt, context)) as reservation:
            (encoded,) = await worker.encoder.encode([prompt], request.params.structured_outputs, request.timeout_s)
            self._require_unused(job_id)  # another request may have taken it meanwhile
            params = request.params.with_structured_outputs(encoded.structured_outputs)
            ids = encoded.ids
            resolve_max_tokens(len(ids), params.max_tokens, worker.engine.info.engine)  # raises before a 429 would
            reservation.set_actual(len(ids))
            timeout_s = request.time_left(started_at)
            (generation,) = worker.start_generations(
                encoded, params, priority=request.priority, timeout_s=timeout_s, loras=loras
            )
        return Job(job_id, generation, worker, model)

    def _run(self, job: JobEvents) -> JobEvents:
        self._jobs[job.id] = job
        task = asyncio.ensure_future(job.run())
        self._running[task] = job
        task.add_done_callback(self._on_done)
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._poll_running())
        return job

    def _require_unused(self, job_id: str) -> None:
        if job_id in self._jobs:
            raise ConflictError(f"there is a job {job_id} already")

    def find(self, job_id: str) -> JobEvents:
        """Return a known job; raise `NotFoundError` otherwise."""
        self._drop_expired()
        if job_id not in self._jobs:
            raise NotFoundError(f"there is no job {job_id[:64]!r}")
        return self._jobs[job_id]

    async def _poll_running(self) -> None:
        """Report events between tokens while any job runs."""
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
        """Drop finished jobs past their time, and the oldest (except the last) while all take too much memory."""
        oldest = time.monotonic() - self._worker.settings.job_ttl_s
        while self._finished and (
            (self._finished[0][0].finished_at or 0.0) < oldest
            or (self._finished_bytes > MAX_FINISHED_BYTES and len(self._finished) > 1)
        ):
            job, size = self._finished.popleft()
            self._finished_bytes -= size
            del self._jobs[job.id]


class Handlers:
    """The routes of jobs, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._worker, self._jobs = worker, Jobs(worker)

    def table(self) -> dict[str, Handler]:
        return {
            "/v1/jobs": self.post,
            "/v1/inference": self.post,
            "/execute": self.execute,
            "/cancel": self.cancel,
            "/v1/jobs/{job_id}/stream": self.stream,
            "/v1/jobs/{job_id}": self.get_or_delete,
        }

    async def post(self, call: Call) -> Any:
        """Start a job; reply with the URL of its events, or with the whole result."""
        request, job = await self._start(call)
        if request.stream:
            return {"job_id": job.id, "sse_url": f"/v1/jobs/{job.id}/stream"}
        try:
            async with call.until_disconnect():
                async for _ in job.read():
                    pass
        except RequestCancelledError:
            job.cancel()
            raise
        return job.result()

    async def execute(self, call: Call) -> EventStream:
        """Start a job whose reply is its events; a disconnect cancels it."""
        _, job = await self._start(call, is_stream=True)
        return EventStream(job.read(), ping_s=self._worker.settings.ping_s, on_end=job.cancel)

    async def _start(self, call: Call, is_stream: bool = False) -> tuple[GenerateRequest, JobEvents]:
        body = await call.body()
        async with call.until_disconnect():
            request: GenerateRequest = await self._worker.parse("job", body, is_stream=is_stream)
            return request, await self._jobs.start_job(request)

    async def stream(self, call: Call) -> EventStream:
        job = self._jobs.find(call.path_params["job_id"])
        return EventStream(job.read(), ping_s=self._worker.settings.ping_s)

    async def get_or_delete(self, call: Call) -> Any:
        """GET: state and counts. DELETE: cancel."""
        job = self._jobs.find(call.path_params["job_id"])
        if call.method != "DELETE":
            return job.state()
        job.cancel()
        return {"job_id": job.id}, 202

    async def cancel(self, call: Call) -> Any:
        values: dict[str, Any] = await self._worker.parse("cancel", await call.body())
        self._jobs.find(values["job_id"]).cancel()
        return values, 202


STOP_REASON: Schema = {"enum": ["MAX_TOKENS", "EOS", "STOP_SEQUENCE"]}


def _event(kind: str, **properties: Schema) -> Schema:
    return reply_schema(type={"const": kind}, **properties)


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    job = {**table_schema(JOB, settings.schema_names), "oneOf": [with_field("prompt"), with_field("messages")]}
    named = {**job, "required": [*job["required"], "job_id"]}
    narrower = {"job_id": JOB["job_id"].type.json_schema(), "stream": {"enum": [True, None], "default": True}}
    named["properties"] = {**job["properties"], **narrower}
    about_model = table_schema(MODEL_JOB, settings.schema_names)
    job = {"anyOf": [job, about_model]} if settings.has_pool else job
    return {"JobRequest": job, "NamedJobRequest": named, "CancelRequest": table_schema(CANCEL), **REPLIES}


REPLIES: dict[str, Schema] = {
    "JobAccepted": reply_schema(job_id=TEXT, sse_url=TEXT),
    "JobResult": reply_schema(
        job_id=TEXT, text=TEXT, tokens_out=COUNT, stop_reason=STOP_REASON, decode_time_ms=NUMBER, seed=COUNT),
    "ModelJobResult": reply_schema(job_id=TEXT, operation=TEXT, model=TEXT, status=TEXT, bytes=COUNT, seconds=NUMBER),
    "JobReply": {"anyOf": [ref("JobAccepted"), ref("JobResult"), ref("ModelJobResult")]},
    "JobName": reply_schema(job_id=TEXT),
    "JobState": reply_schema(
        job_id=TEXT, state={"enum": ["queued", "running", "done", "failed", "cancelled"]}, tokens_out=COUNT),
    "JobEvent": {"oneOf": [
        _event("started", job_id=TEXT, model=TEXT, started_at={"type": "string", "format": "date-time"}, seed=COUNT),
        _event("token", t=TEXT, i=COUNT),
        _event(
            "metrics", tokens_per_sec=NUMBER, ttft_ms={"type": ["number", "null"]}, kv_cache_usage=NUMBER,
            vram_bytes=COUNT,
        ),
        _event("narration", actor=TEXT, action=TEXT, target=TEXT, human=TEXT),
        _event("end", tokens_out=COUNT, decode_time_ms=NUMBER, stop_reason=STOP_REASON),
        _event("error", code=TEXT, message=TEXT, retriable=FLAG),
    ]},
    "Error": reply_schema(code=TEXT, message=TEXT, retriable=FLAG),
    "FieldErrors": {"anyOf": [
        reply_schema(errors=array_schema(reply_schema(field=TEXT, constraint=TEXT, message=TEXT), 1)), ref("Error"),
    ]},
}  # fmt: skip
START = Operation(summary="Start a job", request="JobRequest", reply="JobReply")
EXECUTE = Operation(
    summary="Start a job; the reply is its events",
    request="NamedJobRequest",
    reply="text/event-stream",
    event="JobEvent",
)
DIALECT = Dialect(
    prefixes=("/", "/v1/jobs", "/v1/inference", "/v1/ready", "/v1/loading"),
    error_body=error_body,
    schemas=_schemas,
    error_schema="Error",
    invalid_schema="FieldErrors",
    parsers={"job": (parse_job, GenerateRequest), "cancel": (parse_cancel, dict[str, Any])},
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("POST", "/v1/jobs", START),
        Route("POST", "/v1/inference", replace(START, summary="Start a job (alias)")),
        Route("GET", "/v1/jobs/{job_id}", Operation(summary="State and counts of a job", reply="JobState")),
        Route(
            "GET",
            "/v1/jobs/{job_id}/stream",
            Operation(summary="The events of a job, from the first", reply="text/event-stream", event="JobEvent"),
        ),
        Route("DELETE", "/v1/jobs/{job_id}", Operation(summary="Cancel a job", reply="JobName", status=202)),
        Route(
            "POST", "/cancel", Operation(summary="Cancel a job", request="CancelRequest", reply="JobName", status=202)
        ),
        Route("POST", "/execute", EXECUTE),
    ),
)
