"""The job dialect: a job is a request whose events are fixed when they are made, and read late, again, by several.

started, then token, metrics and narration in any number, then exactly one of end or error, then [DONE].
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from ...engine.request import Request, SamplingParams
from ...errors import ConflictError, InferenceError, NotFoundError, RequestCancelledError, WorkerError
from .. import log, prompt_encoder, schema
from ..answer import Answer
from ..schema import (
    PRIORITY,
    TIMEOUT_MS,
    Field,
    FieldsError,
    Flag,
    Messages,
    Name,
    Only,
    Problem,
    Stops,
    Text,
    Whole,
    sampling,
)
from ..sse import DONE, event
from ..worker import Worker

METRICS_S = 1.0
MOST_ENDED_BYTES = 256 << 20  # of jobs that have ended: past it the oldest are forgotten before their time
JOB_BYTES, EVENT_BYTES = 4096, 64  # beside the bytes of their events, about
MOST_STOPS = 4
STOP_REASONS = {"length": "MAX_TOKENS", "stop": "EOS"}
SAMPLING = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")
SAMPLING_INTEGERS = ("top_k", "repeat_last_n", "seed")
DEFAULTS = SamplingParams()

TABLE: dict[str, Field] = {
    "operation": Field(Only(("infer",)), "infer"),
    "job_id": Field(Name()),
    "model": Field(Text()),
    "prompt": Field(Text(1), is_secret=True),
    "messages": Field(Messages(), is_secret=True),
    "max_tokens": Field(Whole(1), required=True),
    **{name: Field(sampling(name), getattr(DEFAULTS, name)) for name in (*SAMPLING, *SAMPLING_INTEGERS)},
    "stop": Field(Stops(MOST_STOPS), (), is_secret=True),
    "priority": Field(PRIORITY, 0),
    "timeout_ms": Field(TIMEOUT_MS),
    "stream": Field(Flag(), True),
}


def checked_job(body: bytes, *, is_stream: bool = False) -> dict[str, Any]:
    """The fields of a job; prompt or messages, one of them. One whose reply is its stream has a name."""
    found = schema.read_object(body)
    problems: list[Problem] = []
    try:
        values = schema.checked(found, TABLE)
    except FieldsError as error:
        values, problems = {}, error.problems
    if (found.get("prompt") is None) == (found.get("messages") is None):
        problems.append(Problem("prompt", "required", "give either prompt or messages"))
    if is_stream and found.get("job_id") is None:
        problems.append(Problem("job_id", "required", "job_id is required"))
    if is_stream and found.get("stream") is False:
        problems.append(Problem("stream", "unsupported", "the reply is a stream here: POST /v1/jobs for a whole one"))
    if problems:
        raise FieldsError(problems)
    return values


def params_of(values: dict[str, Any]) -> SamplingParams:
    """How the answer is drawn."""
    taken = {name: values[name] for name in (*SAMPLING, *SAMPLING_INTEGERS, "max_tokens", "stop")}
    return SamplingParams(**taken)


class Job:
    """A request and its events."""

    def __init__(self, job_id: str, answer: Answer, seed: int, worker: Worker) -> None:
        self.id = job_id
        self.answer: Answer | None = answer  # until its end
        self.seed = seed
        self.model = worker.settings.names[0]
        self.num_tokens, self.decode_ms = 0, 0.0
        self.narrator: Narrator | None = Narrator(worker.settings.worker_id, job_id, answer.ticket.request, self._tell)
        self._num_others = worker.num_unstarted - 1
        self.events: list[bytes] = []
        self.error: WorkerError | None = None
        self.text: list[str] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.ended_at: float | None = None  # on the clock of time.monotonic
        self._news = asyncio.Event()
        self._metrics_at = time.monotonic() + METRICS_S
        self._index = self._num_untold = 0  # tokens that were told, and those whose text is held back

    async def run(self, worker: Worker) -> None:
        """Make the events, to the last."""
        assert self.answer is not None
        answer = self.answer
        started = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._tell(
            {"type": "started", "job_id": self.id, "model": self.model, "started_at": started, "seed": self.seed}
        )
        narrator = self.narrator
        assert narrator is not None
        narrator.queued(self._num_others)
        try:
            async for piece in answer.pieces():
                self.num_tokens, self.decode_ms = answer.num_tokens, answer.decode_ms
                narrator.look()
                self.text.append(piece.text)
                self._num_untold += len(piece.tokens)
                if piece.text:
                    self._token(piece.text)
                self._metrics(worker, answer)
                if piece.finish is not None:
                    self.stop_reason = "STOP_SEQUENCE" if piece.stop is not None else STOP_REASONS[piece.finish]
                    self.stop_sequence = piece.stop
            self._tell(self._end())
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            log.failed(error)
            self._fail(InferenceError(f"the job failed ({type(error).__name__})"))
        finally:
            self.ended_at, self.answer, self.narrator = time.monotonic(), None, None  # its request may go
            self.text = ["".join(self.text)]
            self._put(DONE)

    @property
    def nbytes(self) -> int:
        """About the memory that it takes after its end."""
        return JOB_BYTES + sum(len(one) + EVENT_BYTES for one in self.events) + sum(map(len, self.text))

    def _tell(self, told: dict[str, Any]) -> None:
        self._put(event(told))

    def _token(self, text: str) -> None:
        """All tokens since the last one of these: also those whose text was held back."""
        said: dict[str, Any] = {"type": "token", "t": text, "i": self._index}
        if self._num_untold != 1:
            said["n"] = self._num_untold
        self._index, self._num_untold = self._index + self._num_untold, 0
        self._tell(said)

    def _end(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "type": "end", "tokens_out": self.num_tokens, "decode_time_ms": round(self.decode_ms, 3),
            "stop_reason": self.stop_reason,
        }  # fmt: skip
        return told if self.stop_sequence is None else {**told, "stop_sequence_matched": self.stop_sequence}

    def _fail(self, error: WorkerError) -> None:
        self.error = error.with_traceback(None)  # which would keep all of the request
        self._tell({"type": "error", "code": error.code, "message": str(error), "retriable": error.retriable})

    def _metrics(self, worker: Worker, answer: Answer) -> None:
        now = time.monotonic()
        if now < self._metrics_at:
            return
        self._metrics_at = now + METRICS_S
        seconds, llm = self.decode_ms / 1000, worker.loaded
        rate = (self.num_tokens - 1) / seconds if seconds > 0 else 0.0
        ttft = round(1000 * (answer.first_at - answer.began_at), 3) if answer.first_at else None
        used = 1 - llm.engine.scheduler.pool.num_free / llm.engine.scheduler.pool.n_blocks
        self._tell({"type": "metrics", "tokens_per_sec": round(rate, 2), "ttft_ms": ttft,
                    "kv_cache_usage": round(used, 4), "vram_bytes": llm.device_bytes})  # fmt: skip

    def _put(self, chunk: bytes) -> None:
        """One more event; nothing follows the last one, whoever else had something to tell."""
        if self.events and self.events[-1] is DONE:
            return
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

    def look(self, worker: Worker) -> None:
        """Between two tokens: what is there to tell? Nothing before it has started."""
        if self.events and self.narrator is not None and self.answer is not None:
            self.narrator.look()
            if self.answer.ticket.request.first_scheduled_time:  # it does not only wait
                self._metrics(worker, self.answer)

    def cancel(self) -> None:
        """Nobody wants the rest of it; one that has ended stays as it is."""
        if self.answer is not None:
            self.answer.ticket.abort()

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
        if state == "running" and not self.num_tokens:
            state = "queued"
        if isinstance(self.error, RequestCancelledError):
            state = "cancelled"
        return {"job_id": self.id, "state": state, "tokens_out": self.num_tokens, "events": len(self.events)}


class Jobs:
    """All jobs that are known, until some time after their end, or until those that have ended take too much memory."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._jobs: dict[str, Job] = {}
        self._running: dict[asyncio.Task[None], Job] = {}
        self._ended: deque[tuple[Job, int]] = deque()  # in the order of their ends, and the memory of each
        self._ended_bytes = 0
        self._watching: asyncio.Task[None] | None = None

    async def begin(self, values: dict[str, Any]) -> Job:
        """Take a job on."""
        worker = self._worker
        self._forget_old()
        job_id = values["job_id"] or f"job-{uuid4()}"
        if job_id in self._jobs:
            raise ConflictError(f"there is a job {job_id} already")
        worker.require_model(values["model"])
        with worker.held(1, prompt_encoder.estimate(values["prompt"] or values["messages"])) as hold:
            ids = await self._ids(values)
            if job_id in self._jobs:  # somebody was quicker
                raise ConflictError(f"there is a job {job_id} already")
            hold.correct(len(ids))
            timeout = None if values["timeout_ms"] is None else values["timeout_ms"] / 1000
            seed, (answer,) = worker.answers(ids, params_of(values), priority=values["priority"], timeout_s=timeout)
        job = self._jobs[job_id] = Job(job_id, answer, seed, worker)
        task = asyncio.ensure_future(job.run(worker))
        self._running[task] = job
        task.add_done_callback(self._on_end)
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        return job

    async def _ids(self, values: dict[str, Any]) -> list[int]:
        made = self._worker.prompts
        if values["messages"] is not None:
            return await made.chat_ids(schema.conversation(values["messages"]))
        (ids,) = await made.ids([values["prompt"]])
        return ids

    def get(self, job_id: str) -> Job:
        """One that is known."""
        self._forget_old()
        if job_id not in self._jobs:
            raise NotFoundError(f"there is no job {job_id[:64]!r}")
        return self._jobs[job_id]

    def cancel(self, job_id: str) -> None:
        """End it; one that has ended already stays as it is."""
        self.get(job_id).cancel()

    async def _watch(self) -> None:
        """What happens to jobs between their tokens is told too; without jobs there is nothing to look at."""
        while self._running:
            await asyncio.sleep(WATCH_S)
            for job in self._running.values():
                job.look(self._worker)
        self._watching = None

    def _on_end(self, task: asyncio.Task[None]) -> None:
        job = self._running.pop(task)
        self._ended.append((job, job.nbytes))
        self._ended_bytes += job.nbytes
        self._forget_old()

    def _forget_old(self) -> None:
        """Those whose time is over; and the oldest, down to the last, where all together are too much."""
        oldest = time.monotonic() - self._worker.settings.job_ttl_s
        while self._ended and (
            (self._ended[0][0].ended_at or 0.0) < oldest
            or (self._ended_bytes > MOST_ENDED_BYTES and len(self._ended) > 1)
        ):
            job, size = self._ended.popleft()
            self._ended_bytes -= size
            del self._jobs[job.id]


WATCH_S = 0.1  # between two looks


class Narrator:
    """Tells of one job; made where its request is at hand."""

    def __init__(self, actor: str, job_id: str, request: Request, put: Callable[[dict[str, Any]], None]) -> None:
        self._request, self._put = request, put
        self._actor, self._job_id, self._correlation = actor, job_id, log.correlation.get()
        self._has_begun = self._is_away = False
        self._num_preemptions = 0

    def queued(self, others: int) -> None:
        """It was taken on, and so many others wait for their first token."""
        before = "nobody else waits" if not others else f"{others} other{'s' * (others > 1)} waiting too"
        self._say("queued", f"Taken on with a prompt of {self._request.num_prompt_tokens} tokens; {before}.")

    def look(self) -> None:
        """Tell what has changed since the last look. The engine's thread goes on meanwhile: the order matters here."""
        request = self._request
        if not self._has_begun:
            if request.num_cached_tokens < 0:
                return
            self._has_begun = True
            found = f"; {request.num_cached_tokens} of them are in the cache" if request.num_cached_tokens else ""
            self._say("reading", f"Reading the prompt of {request.num_prompt_tokens} tokens{found}.")
        if request.num_preemptions > self._num_preemptions:
            self._num_preemptions, self._is_away = request.num_preemptions, True
            self._say(*PREEMPTED)
        if self._is_away and request.batch_slot >= 0:
            self._is_away = False
            self._say("resumed", "It goes on.")

    def _say(self, action: str, human: str) -> None:
        told = {"type": "narration", "actor": self._actor, "action": action, "target": self._job_id, "human": human}
        marks = {"correlation_id": self._correlation} if self._correlation is not None else {}
        self._put({**told, **marks, "job_id": self._job_id})


PREEMPTED = ("preempted", "It gave its memory to others; it waits, and will go on where it was.")
