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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeVar
from uuid import uuid4

import msgspec

from ..engine.request import BATCH_PRIORITY
from ..errors import ConflictError, InvalidRequestError, NotFoundError, StorageFullError, WorkerError
from . import log
from .batch_store import (
    ENDPOINTS,
    LINES,
    LINES_BYTES,
    Entry,
    Envelope,
    FileStore,
    Journal,
    Line,
    LineHead,
    Result,
    print_anthropic,
    print_openai,
    read_chunks,
)
from .bodies import GenerateRequest
from .schema import JSON_TYPE
from .settings import ServerSettings
from .sse import ON_DISCONNECT


class LineWorker(Protocol):
    """What batches need of a worker."""

    settings: ServerSettings
    batches: BatchService | None
    pool: Any

    @property
    def chat(self) -> Any: ...
    def engine_status(self) -> str: ...
    async def parse(self, parser: str, body: bytes) -> Any: ...


T = TypeVar("T")

MAX_LINES, MAX_FILE_BYTES = 50_000, 200 << 20  # as OpenAI has them
MAX_OPEN, MAX_BATCHES = 100, 10_000
MAX_UNWRITTEN = 1_000  # results in memory
NUM_EMBEDDINGS = 2  # lines at a time: they have no priorities
NUM_TRIES, RETRY_S = 3, 1.0  # of a line that failed in the worker; after a refusal for now
DISK_RETRY_S, CLEAN_S = 2.0, 600.0
REQUESTS, RESULTS = "messages", "messages_results"  # purposes of files that only their batch shows
IS_BATCH = "llm_worker.batch"  # in the scope of a line of a batch
SPARE_LINES = 8  # beyond a full batch of the engine
ENDED = ("completed", "failed", "expired", "cancelled")
MESSAGES_OF_END = {
    "expired": ("batch_expired", "the line was not answered before the completion window ended"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the line was answered"),
}
logger = logging.getLogger("llm_worker_rbee.server")


class Batch:
    """One batch: its state, and which of its lines are finished."""

    def __init__(self, batch_id: str, state: dict[str, Any], journal: Journal, entries: Iterable[Entry] = ()) -> None:
        self.id, self.state, self.journal = batch_id, state, journal
        self.finished: set[int] = set()
        self.num_failed = 0
        self.lines: list[Line] | None = None  # once they are parsed
        self.ending: str | None = "cancelled" if state.get("cancelling_at") else None
        self.work: asyncio.Task[None] | None = None
        self.runner: asyncio.Task[None] | None = None
        for entry in entries:
            self.state |= entry.state
            self.note(entry.result)
        self.ending = "cancelled" if self.state.get("cancelling_at") else None

    @classmethod
    def recover(cls, batch_id: str, journal: Journal) -> Batch | None:
        """Return the batch of a journal; None if its first line is damaged."""
        entries = journal.entries()
        first = next(entries, None)
        if first is None or not {"status", "created_at", "input_file_id", "expires_at"} <= first.state.keys():
            return None
        return cls(batch_id, dict(first.state), journal, entries)

    def note(self, result: Result | None) -> None:
        """Count a result that is in the journal."""
        if result is not None and result.line not in self.finished:
            self.finished.add(result.line)
            self.num_failed += not result.is_success

    @property
    def is_open(self) -> bool:
        return self.state["status"] not in ENDED

    @property
    def is_anthropic(self) -> bool:
        return self.id.startswith("msgbatch_")

    def counts(self) -> dict[str, int]:
        """Return the lines: all, answered, failed."""
        if not self.is_open:
            return dict(self.state["counts"])
        total = self.state.get("total", 0)
        return {"total": total, "completed": len(self.finished) - self.num_failed, "failed": self.num_failed}

    def results(self) -> Iterator[Result]:
        """Yield the results in the journal, each line once, then the lines that have none."""
        seen = set[int]()
        for entry in self.journal.entries():
            if entry.result is not None and entry.result.line not in seen:
                seen.add(entry.result.line)
                yield entry.result
        for line in self.lines or ():
            if line.number not in seen:
                code, message = MESSAGES_OF_END[self.ending or "cancelled"]
                yield Result(line.number, line.head.custom_id, code=code, message=message)


class BatchRunner:
    """Runs batches, one after another, as many lines at a time as fill the engine."""

    def __init__(self, worker: LineWorker, app: Callable[..., Awaitable[None]], *, has_clients: bool = True) -> None:
        """`app` has the routes; without clients, lines are the worker's requests instead of batch work."""
        self._worker, self._app, self._has_clients = worker, app, has_clients
        self._max_line = worker.settings.max_body
        self.problem: str | None = None  # why nothing can be written
        self.num_running = self.num_lines = self.num_failed = 0  # lines at work; finished since the start
        self._starting = asyncio.Lock()  # of the batch whose lines are begun
        self._embeddings = asyncio.Semaphore(NUM_EMBEDDINGS)
        self._changed = asyncio.Event()
        self._unwritten: list[tuple[Batch, Result]] = []
        self._writing: asyncio.Task[None] | None = None

    async def run(self, batch: Batch, open_input: Callable[[], BinaryIO]) -> str:
        """Answer the lines of a batch that have no result; return how it ended."""
        try:
            async with asyncio.timeout(max(0.0, batch.state["expires_at"] - time.time())):
                batch.work = asyncio.ensure_future(self._run_lines(batch, open_input))
                await batch.work
        except TimeoutError:
            batch.ending = "expired"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if batch.ending is None or (task is not None and task.cancelling()):  # the worker stops
                raise
        except InvalidRequestError as error:
            await self.set_state(batch, errors=[{"code": error.field, "message": str(error), "line": None}])
            return "failed"
        finally:
            if batch.work is not None and not batch.work.done():
                batch.work.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await batch.work
        await self.flush()
        if batch.lines is None:  # what is not finished is to be named
            batch.lines = await self._plan(batch, open_input)
        return batch.ending or "completed"

    async def _run_lines(self, batch: Batch, open_input: Callable[[], BinaryIO]) -> None:
        if batch.ending is not None:
            return
        batch.lines = await self._plan(batch, open_input)
        if batch.state["status"] == "validating":
            await self.set_state(batch, status="in_progress", in_progress_at=int(time.time()), total=len(batch.lines))
        with await asyncio.to_thread(open_input) as file:
            async with asyncio.TaskGroup() as group, self._starting:
                for line in batch.lines:
                    if line.number not in batch.finished:
                        await self._wait_for_place()
                        self.num_running += 1
                        group.create_task(self._run_line(batch, line, file.fileno()))
        await self.flush()

    async def _wait_for_place(self) -> None:
        while self.problem or self.num_running >= self._num_places() or len(self._unwritten) >= MAX_UNWRITTEN:
            self._changed.clear()
            await self._changed.wait()

    async def _plan(self, batch: Batch, open_input: Callable[[], BinaryIO]) -> list[Line]:
        """Return the lines that can be answered, in the order of work; the others get their errors."""
        lines, numbers = list[Line](), dict[str, int]()
        with await asyncio.to_thread(open_input) as file:
            chunks = read_chunks(file, self._max_line)
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                heads = await self._parse_chunk([line for _, _, line in chunk])
                for (number, offset, data), head in zip(chunk, heads, strict=True):
                    if not head.is_blank:
                        lines.append(Line(number, offset, len(data), self._check(batch, head, number, numbers)))
                if len(lines) > MAX_LINES:
                    raise InvalidRequestError(f"the file has more than {MAX_LINES} lines", "too_many_lines")
        if not lines:
            raise InvalidRequestError("the file has no lines", "empty_file")
        lines.sort(key=lambda line: (line.head.order, line.number))
        return lines

    def _check(self, batch: Batch, head: LineHead, number: int, numbers: dict[str, int]) -> LineHead:
        """Return the head of a line with the errors that depend on the batch and on other lines."""
        error, custom_id, endpoint = head.error, head.custom_id, batch.state["endpoint"]
        if error is None and endpoint is not None and head.url != endpoint:
            error = f"url must be {endpoint}, the endpoint of the batch"
        if custom_id is not None and (first := numbers.setdefault(custom_id, number)) != number:
            error, custom_id = f"custom_id {custom_id!r:.100} is the id of line {first} already", None
        return LineHead(custom_id, head.url, b"" if error else head.order, error)

    async def _parse_chunk(self, lines: list[bytes]) -> list[LineHead]:
        """Parse lines together; if that fails, each alone."""
        is_long = [len(line) > self._max_line for line in lines]
        if any(is_long):
            long = LineHead(error=f"the line is longer than {self._max_line} bytes")
            return [
                long if cut else (await self._parse_chunk([line]))[0] for cut, line in zip(is_long, lines, strict=True)
            ]
        for _ in range(NUM_TRIES):
            try:
                heads: list[LineHead] = await self._worker.parse(LINES, b"\n".join(lines) + b"\n")
                return heads
            except WorkerError as error:
                reason = error
                if error.status in (429, 503):
                    await asyncio.sleep(RETRY_S)
        if len(lines) == 1:
            return [LineHead(error=f"the line could not be parsed: {reason}")]
        return [(await self._parse_chunk([line]))[0] for line in lines]

    async def _run_line(self, batch: Batch, line: Line, file: int) -> None:
        try:
            result = await self._result(line, file)
        finally:
            self.num_running -= 1
            self._changed.set()
        self._unwritten.append((batch, result))
        self._start_writing()

    async def _result(self, line: Line, file: int) -> Result:
        head = line.head
        if head.error is not None:
            return Result(line.number, head.custom_id, code="invalid_line", message=f"line {line.number}: {head.error}")
        if head.url == ENDPOINTS[3]:
            async with self._embeddings:
                return await self._reply(line, file)
        return await self._reply(line, file)

    async def _reply(self, line: Line, file: int) -> Result:
        """Return the reply to a line, once the worker does not refuse it for now."""
        data = await asyncio.to_thread(os.pread, file, line.size, line.offset)
        try:
            body = bytes(msgspec.json.decode(data, type=Envelope).body)
        except msgspec.MsgspecError:
            return Result(line.number, line.head.custom_id, code="invalid_line", message="the file has changed")
        request_id, tries = str(uuid4()), 0
        while True:
            status, reply, retry_s = await self._answer(line.head.url, body, request_id)
            tries += status == 500
            if status not in (429, 503) and (status != 500 or tries == NUM_TRIES):
                return Result(line.number, line.head.custom_id, status, request_id, msgspec.Raw(reply))
            await asyncio.sleep(retry_s or RETRY_S)

    async def _answer(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes, float | None]:
        """Return the status and the reply of a route to a body, and the seconds after which a refusal may end."""
        log.correlation_id.set(request_id)
        kind = [(b"content-type", JSON_TYPE.encode())]
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "headers": kind}
        scope |= {"query_string": b"", "scheme": "http", "client": None, "server": None}
        scope |= {ON_DISCONNECT: lambda callback: lambda: None, **({IS_BATCH: True} if self._has_clients else {})}
        status, parts, retry_s = 500, list[bytes](), None

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, retry_s
            if message["type"] == "http.response.start":
                status = message["status"]
                retry_s = next((float(value) for name, value in message["headers"] if name == b"retry-after"), None)
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception as error:  # the reply has its status
            log.request_failed(error)
        if status == 500 and self._worker.engine_status() in ("failed", "loading"):
            status = 503  # the engine restarts, and the line need not be the cause
        return status, b"".join(parts) or b"null", retry_s

    def _num_places(self) -> int:
        """Return how many lines are begun: a full batch of the engine, and some that wait for a place in it."""
        chats: list[Any] = [self._worker.chat]
        if self._worker.pool is not None:
            chats = [member.service for member in self._worker.pool.members if member.source.kind == "chat"]
        limits = [chat.admission.limits().max_batch for chat in chats if chat is not None and chat.is_loaded]
        return SPARE_LINES + max(limits, default=0)

    def _start_writing(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        """Write results until none is left; those that come meanwhile are written together."""
        while self._unwritten:
            batch, taken = self._unwritten[0][0], len(self._unwritten)
            results = [result for owner, result in self._unwritten[:taken] if owner is batch]
            await self.stored(partial(batch.journal.append, [Entry(result=result) for result in results]))
            others = [item for item in self._unwritten[:taken] if item[0] is not batch]
            self._unwritten[:taken] = others
            for result in results:
                batch.note(result)
            self.num_lines += len(results)
            self.num_failed += sum(not result.is_success for result in results)
            self._changed.set()

    async def flush(self) -> None:
        while self._unwritten:
            self._start_writing()
            assert self._writing is not None
            await asyncio.shield(self._writing)

    async def stored(self, work: Callable[[], T]) -> T:
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

    async def set_state(self, batch: Batch, **state: Any) -> None:
        """Change the state of a batch, in its journal first."""
        await self.flush()
        await self.stored(lambda: batch.journal.append([Entry(state)]))
        batch.state |= state


class BatchService:
    """The files and batches of a worker."""

    def __init__(self, settings: ServerSettings, runner: BatchRunner) -> None:
        assert settings.files_dir is not None
        self.runner = runner
        self.store = FileStore(settings.files_dir, max_bytes=settings.files_bytes, max_age_s=settings.files_age_s)
        self.batches: dict[str, Batch] = {}
        self._cleaning: asyncio.Task[None] | None = None
        for batch_id, journal in self.store.journals():
            if (batch := Batch.recover(batch_id, journal)) is None:
                self.store.set_aside(journal)
            else:
                self.batches[batch_id] = batch

    def start(self) -> None:
        """Go on with the batches that are open."""
        for batch in sorted(self.open, key=lambda batch: batch.state["created_at"]):
            self._start(batch)
        self._cleaning = asyncio.ensure_future(self._clean())

    def _start(self, batch: Batch) -> None:
        batch.runner = asyncio.ensure_future(self._run(batch))

    @property
    def open(self) -> list[Batch]:
        return [batch for batch in self.batches.values() if batch.is_open]

    async def stop(self) -> None:
        """Stop at once; open batches go on when the worker starts again."""
        tasks = [batch.runner for batch in self.batches.values() if batch.runner] + [self._cleaning]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(DISK_RETRY_S):
                await self.runner.flush()

    async def _run(self, batch: Batch) -> None:
        file_id = batch.state["input_file_id"]
        try:
            ending = await self.runner.run(batch, lambda: os.fdopen(self.store.open(file_id), "rb"))
        except (OSError, NotFoundError):
            ending = "failed"
            await self.runner.set_state(batch, errors=[{"code": "no_input", "message": "the input file is gone"}])
        except Exception as error:
            log.request_failed(error)
            ending = "failed"
        await self._finish(batch, ending)

    async def _finish(self, batch: Batch, ending: str) -> None:
        """Write the files of a batch, then its end."""
        batch.ending, now = ending, int(time.time())
        state: dict[str, Any] = {}
        if ending != "failed":
            await self.runner.set_state(batch, status="finalizing", finalizing_at=now)
            state = await self.runner.stored(lambda: self._write_files(batch))
        state |= {"status": ending, f"{ending}_at": int(time.time())}
        state.setdefault("counts", batch.counts())
        await self.runner.set_state(batch, **state)
        with suppress(OSError):  # the results are in their files: the journal needs them no more
            batch.journal = await asyncio.to_thread(self.store.create_journal, batch.id, batch.state)
        batch.lines, batch.finished = None, set()
        if batch.is_anthropic:
            self.forget_input(batch)
        logger.info("batch %s is %s: %s", batch.id, ending, batch.state["counts"])

    def forget_input(self, batch: Batch) -> None:
        """Delete the input of a batch that came with its creation."""
        with suppress(NotFoundError):
            self.store.delete(batch.state["input_file_id"])

    def _write_files(self, batch: Batch) -> dict[str, Any]:
        """Write the results of a batch to files; return what the batch says of them."""
        prefix, counts = batch.id.rpartition("_")[2], dict.fromkeys(("total", "completed", "failed", "unanswered"), 0)
        unanswered = {code for code, _ in MESSAGES_OF_END.values()}
        for result in batch.results():
            counts["total"] += 1
            counts["completed" if result.is_success else "failed"] += 1
            counts["unanswered"] += result.code in unanswered
        state: dict[str, Any] = {"counts": counts}
        kinds = {"results": (True, False)} if batch.is_anthropic else {"output": (True,), "error": (False,)}
        write = print_anthropic if batch.is_anthropic else print_openai
        for kind, outcomes in kinds.items():
            if any(counts["completed" if is_success else "failed"] for is_success in outcomes):
                lines = (write(result, batch.id) for result in batch.results() if result.is_success in outcomes)
                file_id = f"file-{prefix[1:]}{'e' if kind == 'error' else 'f'}"  # the same after a crash
                self.store.add(
                    lines, f"{batch.id}_{kind}.jsonl", RESULTS if batch.is_anthropic else "batch_output", file_id
                )
                state[f"{kind}_file_id"] = file_id
        return state

    async def create(
        self, kind: str, endpoint: str, file_id: str, window_s: float, metadata: Any = None, total: int = 0
    ) -> Batch:
        """Begin a batch."""
        if len(self.open) >= MAX_OPEN or len(self.batches) >= MAX_BATCHES:
            raise StorageFullError(f"{len(self.open)} of {len(self.batches)} batches are open: wait, or delete some")
        file, now = self.store.get(file_id), int(time.time())
        if file.purpose not in ("batch", REQUESTS):
            raise InvalidRequestError(f"the purpose of the file is {file.purpose!r}: it must be batch", "input_file_id")
        state = {
            "status": "validating",
            "endpoint": endpoint,
            "input_file_id": file_id,
            "metadata": metadata,
            "created_at": now,
            "expires_at": now + int(window_s),
            "total": total,
        }
        batch_id = f"{kind}_{uuid4().hex}"
        journal = await storing(lambda: self.store.create_journal(batch_id, state))
        batch = self.batches[batch_id] = Batch(batch_id, state, journal)
        self._start(batch)
        return batch

    def get(self, kind: str, batch_id: str) -> Batch:
        batch = self.batches.get(batch_id)
        if batch is None or not batch_id.startswith(f"{kind}_"):
            raise NotFoundError(f"there is no batch {batch_id[:100]!r}")
        return batch

    def listed(self, kind: str) -> list[Batch]:
        """Return the batches of an API, the latest first."""
        chosen = [batch for batch in self.batches.values() if batch.id.startswith(f"{kind}_")]
        return sorted(chosen, key=lambda batch: (-batch.state["created_at"], batch.id))

    async def cancel(self, batch: Batch) -> None:
        """End a batch with the results that it has."""
        if not batch.is_open:
            raise ConflictError(f"the batch is {batch.state['status']} already")
        if batch.ending is None and batch.state["status"] != "finalizing":
            batch.ending = "cancelled"
            state = {"status": "cancelling", "cancelling_at": int(time.time())}
            await storing(lambda: batch.journal.append([Entry(state)]))
            batch.state |= state
            if batch.work is not None:
                batch.work.cancel()

    def require_unused(self, file_id: str) -> None:
        """Raise if an open batch reads a file."""
        if any(batch.state["input_file_id"] == file_id for batch in self.open):
            raise ConflictError("a batch reads the file: cancel it first")

    def delete(self, batch: Batch) -> None:
        """Delete a batch that has ended, with its results."""
        if batch.is_open:
            raise ConflictError("the batch has not ended: cancel it first")
        for name in ("output_file_id", "error_file_id", "results_file_id"):
            with suppress(NotFoundError):
                self.store.delete(batch.state.get(name) or "")
        self.store.delete_journal(batch.id)
        del self.batches[batch.id]

    async def _clean(self) -> None:
        """Delete what is too old, now and then."""
        while True:
            now = time.time()
            for file_id in self.store.expired(now):
                with suppress(ConflictError):
                    self.require_unused(file_id)
                    self.store.delete(file_id)
            for batch in list(self.batches.values()):
                if not batch.is_open and batch.state["created_at"] + self.store.max_age_s <= now:
                    self.delete(batch)
            await asyncio.sleep(CLEAN_S)

    def describe(self) -> dict[str, Any]:
        """Return what `/info` shows: the open batches, and why they wait."""
        batches = [
            {"id": batch.id, "status": batch.state["status"], "endpoint": batch.state["endpoint"], **batch.counts()}
            for batch in self.open
        ]
        size = {"files": len(self.store.files), "bytes": self.store.num_bytes, "limit_bytes": self.store.max_bytes}
        return {"open": batches, "running_lines": self.runner.num_running, "problem": self.runner.problem, **size}


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


def batch_service(worker: LineWorker) -> BatchService:
    """Return the batches of a worker; raise if it has none."""
    if worker.batches is None:
        raise NotFoundError("files and batches are off: start the worker with --files-dir DIR")
    return worker.batches


def page_of(query: Mapping[str, str], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a list that the query names by `after` and `limit`."""
    limit, after = query.get("limit", "20"), query.get("after") or query.get("after_id")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= 10_000:
        raise InvalidRequestError(f"limit is {limit[:20]!r}: it must be from 1 to 10000", "limit")
    first = next((i + 1 for i, entry in enumerate(entries) if entry["id"] == after), 0)
    shown = entries[first : first + int(limit)]
    ids = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, "has_more": first + len(shown) < len(entries), **ids}


@dataclass(frozen=True, slots=True)
class FileReply:
    """The bytes of a file as a reply."""

    file: BinaryIO
    size: int
    media_type: str

    def chunks(self) -> Iterator[bytes]:
        with self.file:
            yield from iter(partial(self.file.read, LINES_BYTES), b"")


def stream_file(service: BatchService, file_id: str, media_type: str) -> FileReply:
    """Return a file of clients, or of results, as a reply."""
    return FileReply(os.fdopen(service.store.open(file_id), "rb"), service.store.get(file_id).bytes, media_type)
