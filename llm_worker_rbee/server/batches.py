"""Batches: their lines are answered by the routes of the worker, below all other requests, and kept in journals.

A batch goes through its states as OpenAI names them. One line is a body for a route, as a client would send it, without
the client's connection; it waits until the worker takes it. What is finished is in the journal: after a crash the batch
goes on with the other lines. While nothing can be written, no line is begun, and results wait in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import uuid4

import msgspec

from ..engine.request import BATCH_PRIORITY
from ..errors import ConflictError, EngineCrashError, InvalidRequestError, NotFoundError, StorageFullError, WorkerError
from . import log
from .batch_store import (
    EMBEDDINGS,
    Entry,
    Envelope,
    FileStore,
    Journal,
    Line,
    Result,
    plan_lines,
    print_anthropic,
    print_openai,
)
from .bodies import GenerateRequest, model_of
from .settings import RETRY_FAILED_S

if TYPE_CHECKING:
    from .model_pool import Member

T = TypeVar("T")
Answer = Callable[[str, bytes], Awaitable[tuple[Any, Exception | None]]]  # the response of a route to a body
MAX_OPEN, MAX_BATCHES = 100, 10_000
MAX_UNWRITTEN = 1_000  # results of a batch in memory
NUM_EMBEDDINGS = 2  # lines at a time: they have no priorities
NUM_TRIES, RETRY_S = 3, 1.0  # of a line that failed in the worker; after a refusal for now
AFTER_ERROR: dict[str, str] = {  # by its code, what a line does; any other error ends it
    **dict.fromkeys(("QUEUE_FULL", "MODEL_LOADING", "SHUTTING_DOWN"), "wait"),
    **dict.fromkeys(("INFERENCE_FAILED", "INSUFFICIENT_MEMORY", "SERVICE_UNAVAILABLE", "INVALID_MODEL"), "count"),
}
DISK_RETRY_S, CLEAN_S = 2.0, 600.0
POLL_S = 0.1  # whether another model of a pool needs memory
QUIET_S, MAX_QUIET_S = 3.0, 600.0  # of the other models, before a line has its own loaded; it waits at most so long
REQUESTS, RESULTS = "messages", "messages_results"  # purposes of files
IS_BATCH = "llm_worker.batch"  # in the scope of a line of a batch
SPARE_LINES = 8  # beyond a full batch of the engine
ENDED = ("completed", "failed", "expired", "cancelled")
UNANSWERED = {"expired": "batch_expired", "cancelled": "batch_cancelled"}  # the codes of lines that have no reply
logger = logging.getLogger("llm_worker_rbee.server")


class Batch:
    """One batch: its state, and which of its lines are finished."""

    def __init__(self, batch_id: str, journal: Journal, entries: Iterable[Entry]) -> None:
        self.id, self.journal, self.state = batch_id, journal, dict[str, Any](status="validating")
        self.finished: set[int] = set()
        self.counts = dict.fromkeys(("total", "completed", "failed", "unanswered"), 0)  # of those that failed
        self.apply(entries)
        self.created_at: int = self.state["created_at"]  # of the first entry, as is all that does not change
        self.ending: str | None = self.state.get("ending", "cancelled" if "cancelling_at" in self.state else None)
        self.unwritten: list[Entry] = []  # results that are not in the journal yet
        self.writing: asyncio.Task[None] | None = None
        self.work: asyncio.Task[None] | None = None  # on its lines
        self.runner: asyncio.Task[None] | None = None
        self.waiting_since: dict[Member, float] = {}  # for their turn in a pool

    def apply(self, entries: Iterable[Entry]) -> None:
        """Change the state as entries of the journal say; nothing changes after its end."""
        for entry in entries:
            if self.is_open:
                self.state |= entry.state
                self.counts |= entry.state.get("counts", {})
            result = entry.result
            if result is not None and result.line not in self.finished:
                self.finished.add(result.line)
                self.counts["completed" if result.is_success else "failed"] += 1
                self.counts["unanswered"] += result.code in UNANSWERED.values()

    def append(self, entries: list[Entry]) -> None:
        """Write entries to the journal, then apply them."""
        self.journal.append(entries)
        self.apply(entries)

    @property
    def is_open(self) -> bool:
        return self.state["status"] not in ENDED

    @property
    def is_anthropic(self) -> bool:
        return self.id.startswith("msgbatch_")

    @property
    def num_finished(self) -> int:
        return self.counts["completed"] + self.counts["failed"]

    def results(self) -> Iterator[Result]:
        """Yield the results in the journal, each line once."""
        seen = set[int]()
        for entry in self.journal.entries():
            if entry.result is not None and entry.result.line not in seen:
                seen.add(entry.result.line)
                yield entry.result


class BatchService:
    """The files and batches of a worker, and what answers their lines."""

    def __init__(self, worker: Any, answer: Answer, option: str = "files_dir") -> None:
        settings = worker.settings
        assert settings.files_dir is not None
        self._worker, self._answer, self._max_line = worker, answer, settings.max_body
        self.store = FileStore(settings.files_dir, settings.files_bytes, settings.files_age_s, option=option)
        self.problem: str | None = None  # why nothing can be written
        self.num_running = self.num_lines = self.num_failed = 0  # lines at work; finished since the start
        self._starting = asyncio.Lock()  # of the batch whose lines are begun
        self._embeddings = asyncio.Semaphore(NUM_EMBEDDINGS)
        self._changed = asyncio.Event()
        self._lines_of: Counter[Member] = Counter()  # lines at work of models in a pool
        self._cleaning: asyncio.Task[None] | None = None
        self.batches: dict[str, Batch] = {}
        for batch_id, journal in self.store.journals.items():
            try:
                batch = Batch(batch_id, journal, journal.entries())
            except (OSError, KeyError):
                logger.error("%s cannot be read, or its beginning is damaged: it is left out", journal.name)
            else:
                self.batches[batch_id] = batch

    def start(self) -> None:
        """Go on with the batches that are open."""
        for batch in sorted(self.open, key=lambda batch: batch.created_at):
            batch.runner = asyncio.ensure_future(self._run(batch))
        self._cleaning = asyncio.ensure_future(self._clean())

    @property
    def open(self) -> list[Batch]:
        return [batch for batch in list(self.batches.values()) if batch.is_open]

    async def stop(self) -> None:
        """Stop at once; open batches go on when the worker starts again."""
        tasks = [task for batch in self.batches.values() if (task := batch.runner)]
        tasks += [self._cleaning] if self._cleaning else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if writing := [task for batch in self.batches.values() if (task := batch.writing)]:
            await asyncio.wait(writing, timeout=DISK_RETRY_S)

    async def _run(self, batch: Batch) -> None:
        """Answer the lines of a batch that have no result, then write its files, then its end."""
        state: dict[str, Any] = {}
        try:
            if batch.state["status"] != "finalizing":
                await self._answer_lines(batch)
            state = await self._stored(lambda: self._write_files(batch))
            ending = batch.state["ending"]
        except Exception as error:
            if not (is_known := isinstance(error, InvalidRequestError | NotFoundError)):
                log.request_failed(error)
            code = getattr(error, "field", None) or ("no_input" if is_known else "internal")
            message = str(error) if is_known else "internal error of the worker"
            ending, state["errors"] = "failed", [{"code": code, "message": message, "line": None}]
            with suppress(Exception):  # the results that it has stay readable
                state |= await self._stored(lambda: self._write_files(batch))
        state |= {"status": ending, f"{ending}_at": int(time.time()), "counts": batch.counts}
        await self._append(batch, [Entry(state)])
        if ending != "failed":
            with suppress(OSError):  # the results are in their files: the journal needs them no more
                batch.journal = await asyncio.to_thread(self.store.create_journal, batch.id, batch.state)
        batch.finished = set()
        if batch.is_anthropic:
            with suppress(NotFoundError):
                self.store.delete(batch.state["input_file_id"])
        logger.info("batch %s is %s: %s", batch.id, ending, batch.counts)

    async def _answer_lines(self, batch: Batch) -> None:
        """Answer the lines; what is left at the end of the batch gets an error."""
        with await asyncio.to_thread(self.store.open, batch.state["input_file_id"]) as file:
            lines = await asyncio.to_thread(plan_lines, file, batch.state["endpoint"], self._max_line)
            if "in_progress_at" not in batch.state:
                begun = {"in_progress_at": int(time.time()), "counts": {"total": len(lines)}}
                status = {"status": "in_progress"} if batch.ending is None else {}
                await self._append(batch, [Entry(begun | status)])
            if batch.ending is None:
                batch.work = asyncio.ensure_future(self._run_lines(batch, lines, file.fileno()))
                try:
                    await asyncio.wait([batch.work], timeout=max(0.0, batch.state["expires_at"] - time.time()))
                    if not batch.work.done():
                        batch.ending = batch.ending or "expired"
                    elif not batch.work.cancelled():
                        batch.work.result()
                finally:
                    batch.work.cancel()
                    await asyncio.gather(batch.work, return_exceptions=True)
        if batch.writing is not None:
            await asyncio.shield(batch.writing)
        batch.ending = batch.ending or "completed"
        code, message = UNANSWERED.get(batch.ending), f"the batch was {batch.ending} before the line was answered"
        left = [line for line in lines if line.number not in batch.finished]
        errors = [Entry(result=Result(line.number, line.custom_id, code=code, message=message)) for line in left]
        state = {"status": "finalizing", "finalizing_at": int(time.time()), "ending": batch.ending}
        await self._append(batch, [*errors, Entry(state)])

    async def _run_lines(self, batch: Batch, lines: Iterable[Line], file: int) -> None:
        """Answer as many lines at a time as fill the engine; lines of another batch begin after all of them."""
        async with asyncio.TaskGroup() as group, self._starting:
            for line in (line for line in lines if line.number not in batch.finished):
                while self.problem or self.num_running >= self._num_places() or len(batch.unwritten) >= MAX_UNWRITTEN:
                    self._changed.clear()
                    await self._changed.wait()
                self.num_running += 1
                group.create_task(self._run_line(batch, line, file))

    def _num_places(self) -> int:
        """Return how many lines are begun: a full batch of the engine, and some that wait for a place in it."""
        chats: list[Any] = [member.service for member in self._worker.pool.members if member.source.kind == "chat"]
        limits = [chat.admission.limits().max_batch for chat in chats if chat is not None and chat.is_loaded]
        return SPARE_LINES + max(limits, default=0)

    async def _run_line(self, batch: Batch, line: Line, file: int) -> None:
        try:
            if line.error is not None:
                message = f"line {line.number}: {line.error}"
                result = Result(line.number, line.custom_id, code="invalid_line", message=message)
            else:
                async with self._embeddings if line.url == EMBEDDINGS else nullcontext():
                    result = await self._reply(batch, line, file)
        except Exception as error:
            log.request_failed(error)
            result = Result(line.number, line.custom_id, code="internal", message="internal error of the worker")
        finally:
            self.num_running -= 1
            self._changed.set()
        batch.unwritten.append(Entry(result=result))
        if batch.writing is None or batch.writing.done():
            batch.writing = asyncio.ensure_future(self._write(batch))

    async def _reply(self, batch: Batch, line: Line, file: int) -> Result:
        """Return the reply to a line, once the worker does not refuse it for now."""
        data = await asyncio.to_thread(os.pread, file, line.size, line.offset)
        body = bytes(msgspec.json.decode(data, type=Envelope).body)
        request_id, tries = str(uuid4()), 0
        log.correlation_id.set(request_id)
        while True:
            delay, member = RETRY_S, None
            if self._worker.settings.has_pool:
                with suppress(WorkerError):  # which the route says
                    member = await self._worker.find(model_of(body), "embedding" if line.url == EMBEDDINGS else "chat")
            has_turn = member is None or self._has_turn(batch, member)
            if has_turn and (answered := await self._answer_unless_drained(line.url, body, member)):
                reply, error = answered
                after = "end" if error is None else self._after(error, member)
                tries += after == "count"
                if after == "end" or tries == NUM_TRIES:
                    rows = getattr(reply, "body_iterator", None)  # of a long reply
                    content = reply.body if rows is None else b"".join([part async for part in rows])
                    return Result(line.number, line.custom_id, reply.status_code, request_id, msgspec.Raw(content))
                delay = float(reply.headers.get("retry-after", RETRY_S))
            has_failed = member is not None and member.state == "failed"  # meanwhile its error is the reply
            await asyncio.sleep(RETRY_FAILED_S if has_failed else delay)

    def _after(self, error: Exception, member: Member | None) -> str:
        """Return what a line does after an error."""
        code = getattr(error, "code", "INFERENCE_FAILED")
        if code == "TIMEOUT" and member is not None and not member.is_serving:
            return "count"  # of the load, not of the line
        after = "end" if isinstance(error, EngineCrashError) else AFTER_ERROR.get(code, "end")
        return "wait" if after == "count" and self._worker.engine_status() == "failed" else after

    async def _answer_unless_drained(self, url: str, body: bytes, member: Member | None) -> Any:
        """Return the reply to a line and its error; None if another request needs the memory: it goes first."""
        if member is None:
            return await self._answer(url, body)
        work = asyncio.ensure_future(self._answer(url, body))
        self._lines_of[member] += 1
        try:
            while not (await asyncio.wait([work], timeout=POLL_S))[0]:
                queue = [other for other in self._worker.pool.members if other.waits_for_room]
                is_behind = any(len(other.waiters) > self._lines_of[other] for other in queue if other is not member)
                if member.drained_for or (member.waits_for_room and is_behind):
                    return None
            return work.result()
        finally:
            self._lines_of[member] -= 1
            work.cancel()

    def _has_turn(self, batch: Batch, member: Member) -> bool:
        """Return whether a line may have its model: the others of the pool are quiet, or it has waited long."""
        if member.is_serving:
            batch.waiting_since.pop(member, None)
            return True
        now = time.monotonic()
        others = [other for other in self._worker.pool.residents if other is not member]
        is_busy = any(item.is_busy or item.waiters or now - item.last_used_at < QUIET_S for item in others)
        return now - batch.waiting_since.setdefault(member, now) >= MAX_QUIET_S or not is_busy

    async def _write(self, batch: Batch) -> None:
        """Write results until none is left; those that come meanwhile are written together."""
        while batch.unwritten:
            results, batch.unwritten = batch.unwritten, []
            failed = batch.counts["failed"]
            await self._append(batch, results)
            self.num_lines += len(results)
            self.num_failed += batch.counts["failed"] - failed
            self._changed.set()

    async def _append(self, batch: Batch, entries: list[Entry]) -> None:
        await self._stored(lambda: batch.append(entries))

    async def _stored(self, work: Callable[[], T]) -> T:
        """Return the result of work that writes, once there is room for it."""
        while True:
            try:
                result = await asyncio.to_thread(work)
            except OSError as error:
                if self.problem is None:
                    logger.error("batches wait: nothing can be written (%s)", error.strerror)
                self.problem = f"nothing can be written: {error.strerror}"
                await asyncio.sleep(DISK_RETRY_S)
                continue
            if self.problem is not None:
                self.problem = None
                self._changed.set()
                logger.info("batches go on: the disk can be written again")
            return result

    def _write_files(self, batch: Batch) -> dict[str, Any]:
        """Write the results of a batch to files; return their names in its state."""
        prefix, state = batch.id.rpartition("_")[2], dict[str, Any]()
        outcomes: dict[str, tuple[bool, ...]] = {"output": (True,), "error": (False,)}
        purpose, write = "batch_output", cast(Callable[[Result, str], bytes], print_openai)
        if batch.is_anthropic:
            outcomes, purpose, write = {"results": (True, False)}, RESULTS, print_anthropic
        for kind, chosen in outcomes.items():
            lines = (write(result, batch.id) for result in batch.results() if result.is_success in chosen)
            file_id = f"file-{prefix[1:]}{'e' if kind == 'error' else 'f'}"  # the same after a crash
            if self.store.add(lines, f"{batch.id}_{kind}.jsonl", purpose, file_id=file_id).bytes:
                state[f"{kind}_file_id"] = file_id
            else:
                self.store.delete(file_id)
        return state

    async def create(self, kind: str, endpoint: str | None, file_id: str, window_s: float, **more: Any) -> Batch:
        """Begin a batch; `more` is a part of its state."""
        if len(self.open) >= MAX_OPEN or len(self.batches) >= MAX_BATCHES:
            raise StorageFullError(f"{len(self.open)} of {len(self.batches)} batches are open: wait, or delete some")
        file, now = self.store.get(file_id), int(time.time())
        if file.purpose not in ("batch", REQUESTS):
            raise InvalidRequestError(f"the purpose of the file is {file.purpose!r}: it must be batch", "input_file_id")
        times = {"created_at": now, "expires_at": now + int(window_s)}
        state = {"status": "validating", "endpoint": endpoint, "input_file_id": file_id, **times, **more}
        batch_id = f"{kind}_{uuid4().hex}"
        journal = await storing(lambda: self.store.create_journal(batch_id, state))
        batch = self.batches[batch_id] = Batch(batch_id, journal, [Entry(state)])
        batch.runner = asyncio.ensure_future(self._run(batch))
        return batch

    def get(self, kind: str, batch_id: str) -> Batch:
        batch = self.batches.get(batch_id)
        if batch is None or not batch_id.startswith(f"{kind}_"):
            raise NotFoundError(f"there is no batch {batch_id[:100]!r}")
        return batch

    def listed(self, kind: str) -> list[Batch]:
        """Return the batches of an API, the latest first."""
        chosen = [batch for batch in list(self.batches.values()) if batch.id.startswith(f"{kind}_")]
        return sorted(chosen, key=lambda batch: (-batch.created_at, batch.id))

    async def cancel(self, kind: str, batch_id: str) -> Batch:
        """End a batch with the results that it has."""
        batch = self.get(kind, batch_id)
        if not batch.is_open:
            raise ConflictError(f"the batch is {batch.state['status']} already")
        if batch.ending is None:
            batch.ending = "cancelled"
            entry = Entry({"status": "cancelling", "cancelling_at": int(time.time())})
            try:
                await storing(lambda: batch.append([entry]))
            except StorageFullError:
                batch.ending = None
                raise
            if batch.work is not None:
                batch.work.cancel()
        return batch

    def require_unused(self, file_id: str) -> None:
        """Raise if an open batch reads a file."""
        if any(batch.state["input_file_id"] == file_id for batch in self.open):
            raise ConflictError("a batch reads the file: cancel it first")

    def delete(self, batch: Batch) -> None:
        """Delete a batch that has ended."""
        if batch.is_open:
            raise ConflictError("the batch has not ended: cancel it first")
        self.drop(batch)

    def drop(self, batch: Batch) -> None:
        """Forget a batch that nothing works on, and its results."""
        for name in ("output_file_id", "error_file_id", "results_file_id"):
            with suppress(NotFoundError):
                self.store.delete(batch.state.get(name) or "")
        self.store.delete_journal(batch.id)
        self.batches.pop(batch.id, None)

    async def _clean(self) -> None:
        """Delete what is too old, now and then."""
        while True:
            now = time.time()
            for file in list(self.store.files.values()):
                if (file.expires_at or file.created_at + self.store.max_age_s) <= now:
                    with suppress(ConflictError, NotFoundError):
                        self.require_unused(file.id)
                        self.store.delete(file.id)
            for batch in list(self.batches.values()):
                if batch.state.get(f"{batch.state['status']}_at", now) + self.store.max_age_s <= now:
                    with suppress(ConflictError):
                        self.delete(batch)
            await asyncio.sleep(CLEAN_S)

    def describe(self) -> dict[str, Any]:
        """Return what `/info` shows: the open batches, and why they wait."""
        batches = [
            {"id": batch.id, "status": batch.state["status"], "endpoint": batch.state["endpoint"], **batch.counts}
            for batch in self.open
        ]
        size = {"files": len(self.store.files), "bytes": self.store.num_bytes, "limit_bytes": self.store.max_bytes}
        return {"open": batches, "running_lines": self.num_running, "problem": self.problem, **size}


async def storing(work: Callable[[], T]) -> T:
    """Return the result of work that writes, in a thread; raise if there is no room."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise StorageFullError(f"nothing can be written: {error.strerror}") from None


def as_batch_work(parsed: GenerateRequest) -> GenerateRequest:
    """Return the request of a line, which comes after all requests of clients; its own priority counts among lines."""
    if parsed.stream:
        raise InvalidRequestError("stream must be false: a batch has whole replies", "stream")
    return msgspec.structs.replace(parsed, priority=BATCH_PRIORITY + max(0, parsed.priority))


def batch_service(worker: Any) -> BatchService:
    """Return the batches of a worker; raise if it has none."""
    if (service := cast(BatchService | None, worker.batches)) is None:
        raise NotFoundError("files and batches are off: start the worker with --files-dir DIR")
    return service


def page_of(query: Mapping[str, str], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a list that the query names by `after` and `limit`."""
    limit, after = query.get("limit", "20"), query.get("after") or query.get("after_id")
    if not (limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= 10_000):
        raise InvalidRequestError(f"limit is {limit[:20]!r}: it must be from 1 to 10000", "limit")
    if "before_id" in query:
        raise InvalidRequestError("before_id is not supported by this worker: use after_id", "before_id")
    first = next((i + 1 for i, entry in enumerate(entries) if entry["id"] == after), 0)
    if after and not first:
        raise NotFoundError(f"after is {after[:100]!r}: it is no entry of the list")
    shown = entries[first : first + int(limit)]
    ids = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, "has_more": first + len(shown) < len(entries), **ids}


def stream_file(service: BatchService, file_id: str, media_type: str) -> tuple[Iterator[bytes], int, dict[str, str]]:
    """Return a file of clients, or of results, with the status and headers of a reply."""
    headers = {"content-length": str(service.store.get(file_id).bytes), "content-type": media_type}
    return service.store.read(file_id), 200, headers
