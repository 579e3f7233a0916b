"""The routes: which path and method goes where. Each is a few lines; what they do is in the other files here."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import platform
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..errors import (
    DeadlineError,
    InferenceError,
    InvalidRequestError,
    NotFoundError,
    RequestCancelledError,
    WorkerError,
)
from . import log, metrics, schema
from .config import Settings
from .dialects import jobs, openai
from .dialects.jobs import Job, Jobs
from .middleware import Guard, told
from .openapi import description
from .schema import APPLY_TEMPLATE, CANCEL, DETOKENIZE, MANY, TOKENIZE
from .sse import DONE, EventStream, event, gone
from .worker import Worker

T = TypeVar("T")
Begin = Callable[[Worker, bytes, list[str] | None], Coroutine[Any, Any, openai.Asked]]
METHODS = ("GET", "POST", "DELETE")
EXPOSED = ("retry-after", "x-correlation-id", "x-ignored-fields")
NOT_IN_HEADERS = re.compile(r"[^!-~]")  # whatever a client calls its fields
BODY_S = 60.0  # for all of a body
JSON_TYPE = "application/json"  # and nothing else: a page from elsewhere can then not ask without being allowed to


def json(data: Any, status: int = 200, **headers: str) -> Response:
    """A reply."""
    return encoded(msgspec.json.encode(data), status, **headers)


def encoded(body: bytes, status: int = 200, **headers: str) -> Response:
    """A reply that is JSON already."""
    return Response(body, status, headers, "application/json")


class Routes:
    """What each route does, for one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.jobs = Jobs(worker)

    async def health(self, _: Request) -> Response:
        """Forward progress."""
        found = self.worker.health()
        return json(found, 200 if found["status"] == "healthy" else 503)

    async def ready(self, _: Request) -> Response:
        """Whether requests are taken."""
        state = {"loading": "loading", "failed": "error", "stopping": "error"}.get(self.worker.state)
        found: dict[str, Any] = {
            "ready": self.worker.state == "ready", "state": state or ("busy" if self.worker.is_busy else "idle"),
        }  # fmt: skip
        return json(found if state != "loading" else {**found, "progress_url": "/v1/loading/progress"})

    async def loading(self, _: Request) -> EventStream:
        """How loading goes on, from its beginning."""

        async def events() -> AsyncGenerator[bytes, None]:
            at = 0
            while True:
                news, found = self.worker.news, self.worker.loading[at:]
                at += len(found)
                if found:
                    yield b"".join(map(event, found))
                elif self.worker.state == "loading":
                    await news.wait()
                else:
                    yield DONE
                    return

        return self._events(events())

    async def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        return Response(metrics.exposition(self.worker), 200, {"content-type": metrics.CONTENT_TYPE})

    async def models(self, _: Request) -> Response:
        """The one that is served."""
        return json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The same, by name."""
        self.worker.require_model(request.path_params["name"])
        return json(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.worker.settings.names[0], "object": "model", "created": int(self.worker.started_at),
            "owned_by": "llm-worker-rbee", "context_length": self.worker.llm.max_context,
        }  # fmt: skip

    async def info(self, _: Request) -> Response:
        """What is served, on what."""
        return json(info(self.worker))

    async def chat(self, request: Request) -> Response | EventStream:
        """OpenAI: a conversation."""
        return await self._openai(request, openai.chat)

    async def completions(self, request: Request) -> Response | EventStream:
        """OpenAI: prompts."""
        return await self._openai(request, openai.completion)

    async def _openai(self, request: Request, begin: Begin) -> Response | EventStream:
        ignored: list[str] | None = [] if self.worker.settings.ignore_unknown_fields else None
        asked = await _unless_gone(request, begin(self.worker, await _body(request), ignored))
        headers = {"x-ignored-fields": NOT_IN_HEADERS.sub("?", ",".join(ignored))[:1_000]} if ignored else {}
        if asked.values["stream"]:
            return self._events(openai.stream(self.worker, asked), asked.close, **headers)
        return encoded(await _unless_gone(request, openai.whole(self.worker, asked)), 200, **headers)

    async def post_job(self, request: Request) -> Response:
        """A job: where its events are, or the whole result."""
        values, job = await self._job(request)
        if values["stream"]:
            return json({"job_id": job.id, "sse_url": f"/v1/jobs/{job.id}/stream"})
        finished = asyncio.ensure_future(_drained(job))
        await _until_done_or_gone(request, finished, job.cancel)
        await finished
        return json(job.result())

    async def execute(self, request: Request) -> EventStream:
        """A job whose reply is its events; a client that goes away cancels it."""
        _, job = await self._job(request, is_stream=True)
        return self._events(job.read(), on_end=job.cancel)

    async def _job(self, request: Request, is_stream: bool = False) -> tuple[dict[str, Any], Job]:
        body = await _body(request)

        async def begun() -> tuple[dict[str, Any], Job]:
            values = await self.worker.desk.read(body, lambda body: jobs.checked_job(body, is_stream=is_stream))
            return values, await self.jobs.begin(values)

        return await _unless_gone(request, begun())

    async def job_stream(self, request: Request) -> EventStream:
        """The events of a job, from the first."""
        return self._events(self.jobs.get(request.path_params["job_id"]).read())

    async def job(self, request: Request) -> Response:
        """Where a job stands; DELETE ends it."""
        job = self.jobs.get(request.path_params["job_id"])
        if request.method != "DELETE":
            return json(job.state())
        job.cancel()
        return json({"job_id": job.id}, 202)

    async def cancel(self, request: Request) -> Response:
        """The same, by name in the body."""
        values = schema.checked(schema.read_object(await _body(request)), CANCEL)
        self.jobs.cancel(values["job_id"])
        return json(values, 202)

    async def tokenize(self, request: Request) -> Response:
        """Text -> ids."""
        return await self._made(request, tokenized)

    async def detokenize(self, request: Request) -> Response:
        """Ids -> text."""
        return await self._made(request, detokenized)

    async def apply_template(self, request: Request) -> Response:
        """Messages -> the prompt that the template makes of them."""
        return await self._made(request, template_applied)

    async def _made(self, request: Request, make: Callable[[Worker, bytes], bytes]) -> Response:
        body = await _body(request)
        return encoded(await _unless_gone(request, self.worker.desk.run(len(body), lambda: make(self.worker, body))))

    def _events(
        self, source: AsyncGenerator[bytes, None], on_end: Callable[[], None] = lambda: None, **headers: str
    ) -> EventStream:
        return EventStream(source, ping_s=self.worker.settings.ping_s, headers=headers, on_end=on_end)

    def table(self) -> list[Route]:
        """Paths and methods."""
        routes = [
            ("/", page, "GET"), ("/openapi.json", openapi(self.worker.settings), "GET"),
            ("/health", self.health, "GET"), ("/v1/ready", self.ready, "GET"), ("/info", self.info, "GET"),
            ("/metrics", self.metrics, "GET"),
            ("/v1/loading/progress", self.loading, "GET"), ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"), ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/completions", self.completions, "POST"), ("/v1/jobs", self.post_job, "POST"),
            ("/v1/inference", self.post_job, "POST"), ("/execute", self.execute, "POST"),
            ("/v1/jobs/{job_id}/stream", self.job_stream, "GET"), ("/v1/jobs/{job_id}", self.job, "GET DELETE"),
            ("/cancel", self.cancel, "POST"),
            ("/tokenize", self.tokenize, "POST"), ("/detokenize", self.detokenize, "POST"),
            ("/apply-template", self.apply_template, "POST"),
        ]  # fmt: skip
        return [Route(path, act, methods=methods.split()) for path, act, methods in routes]


def application(worker: Worker) -> Guard | CORSMiddleware:
    """The whole server as an ASGI application; it loads the model when it starts."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        loading = asyncio.ensure_future(worker.start())
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        yield
        await worker.stop()

    app = Starlette(
        routes=Routes(worker).table(), lifespan=lifespan,
        exception_handlers={404: _not_found, 405: _not_found, WorkerError: _told, Exception: _told},
    )  # fmt: skip
    guard = Guard(app, worker.settings.api_key, worker.settings.max_body, _logged)
    origins = worker.settings.cors_origins
    return guard if not origins else CORSMiddleware(guard, origins, METHODS, ("*",), expose_headers=EXPOSED)


def _logged(_: str, error: BaseException) -> None:
    log.failed(error)


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    why = "there is no such route" if status == 404 else f"{request.method} is not a method of this route"
    _, headers, body = told(request.url.path, NotFoundError(why))
    return Response(body, status, {**headers, **(getattr(error, "headers", None) or {})})


async def _told(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, WorkerError) else InferenceError("something went wrong inside the worker")
    status, headers, body = told(request.url.path, known)
    return Response(body, status, headers)


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise InvalidRequestError(f"the content type is {kind[:100]!r}: it must be application/json", "content-type")
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except ClientDisconnect:
        raise RequestCancelledError("the client went away") from None
    except TimeoutError:
        raise DeadlineError(f"the body did not come within {BODY_S:g} s") from None


async def _drained(job: Job) -> None:
    async for _ in job.read():
        pass


async def _unless_gone(request: Request, made: Coroutine[Any, Any, T]) -> T:
    """What comes of it; given up when the client goes away."""
    task = asyncio.ensure_future(made)
    await _until_done_or_gone(request, task)
    return await task


async def _until_done_or_gone(
    request: Request, task: asyncio.Future[Any], on_gone: Callable[[], None] | None = None
) -> None:
    """Wait for a reply; a client that goes away does not wait any more."""
    leaving = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            (on_gone or task.cancel)()
            raise RequestCancelledError("the client went away")
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        leaving.cancel()


INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


async def page(_: Request) -> Response:
    """Chat and gauges for a person."""
    text, policy = _page()
    headers = {
        "content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }  # fmt: skip
    return Response(text, 200, headers, "text/html")


def openapi(settings: Settings) -> Callable[[Request], Awaitable[Response]]:
    """What is served, for programs."""
    described = msgspec.json.encode(description(settings))

    async def answer(_: Request) -> Response:
        return Response(described, 200, media_type="application/json")

    return answer


@cache
def _page() -> tuple[bytes, str]:
    """The file, and a policy under which its own script and style run, and nothing else of anybody's."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    hashes: dict[str, str] = {}
    for kind, inside in INLINE.findall(text):
        hashes[kind] = "'sha256-" + base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() + "'"
    allowed = {
        "default-src": "'none'", "script-src": hashes["script"], "style-src": hashes["style"], "img-src": "data:",
        "connect-src": "'self'", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    return text.encode(), "; ".join(f"{name} {value}" for name, value in allowed.items())


PACKAGES = ("numpy", "numba")
OF_A_GPU = ("torch", "triton")


def info(worker: Worker) -> dict[str, Any]:
    """All of it; the model must be here."""
    llm = worker.llm
    return {
        "model": worker.settings.names[0], "architecture": llm.config.family.name, "quant": llm.quant,
        "parameters": sum(tensor.size for tensor in llm.checkpoint.tensors.values()),
        "context_length": llm.max_context, "backend": llm.backend, "device": llm.device, "kv_type": llm.kv_type,
        "memory": {
            "weights_bytes": llm.checkpoint.nbytes, "kv_cache_bytes": llm.capacity.bytes,
            "process_bytes": resident_bytes(), "device_bytes": llm.device_bytes, "graph_bytes": llm.graph_bytes,
        },
        "worker_id": worker.settings.worker_id, "versions": _versions(llm.backend),
    }  # fmt: skip


def resident_bytes() -> int | None:
    """Memory of this process that is in use now; not everywhere known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


@cache
def _versions(backend: str) -> dict[str, str]:
    found = {"worker": __version__, "python": platform.python_version()}
    for name in (*PACKAGES, *(OF_A_GPU if backend == "cuda" else ())):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # the reference needs no Numba
            continue
    return found


def tokenized(worker: Worker, body: bytes) -> bytes:
    """Text -> ids."""
    values = schema.checked(schema.read_object(body), TOKENIZE)
    llm = worker.llm
    ids = llm.tokenize(values["text"], add_special=values["add_special"], parse_special=values["parse_special"])
    pieces = {token: llm.tokenizer.piece(token) for token in set(ids)}
    return b'{"tokens":' + _listed(ids) + b',"pieces":' + _listed([pieces[token] for token in ids]) + b"}"


def _listed(values: list[Any]) -> bytes:
    """A list as JSON, a part at a time, so that other threads can breathe where it is long."""
    parts = (values[at : at + MANY] for at in range(0, len(values), MANY))
    return b"[" + b",".join([msgspec.json.encode(part)[1:-1] for part in parts]) + b"]"


def detokenized(worker: Worker, body: bytes) -> bytes:
    """Ids -> text."""
    ids = schema.checked(schema.read_object(body), DETOKENIZE)["tokens"]
    llm, size = worker.llm, worker.llm.config.vocab_size
    if (largest := max(ids, default=0)) >= size:
        raise InvalidRequestError(f"tokens: {str(largest)[:20]} is not a token id (0..{size - 1})", "tokens")
    return msgspec.json.encode({"text": llm.detokenize(ids)})


def template_applied(worker: Worker, body: bytes) -> bytes:
    """Messages -> the prompt that the template makes of them."""
    values = schema.checked(schema.read_object(body), APPLY_TEMPLATE)
    llm, messages = worker.llm, schema.conversation(values["messages"])
    return msgspec.json.encode({"prompt": llm.apply_chat_template(messages), "tokens": llm.tokenize_chat(messages)})
