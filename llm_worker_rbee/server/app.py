"""The routes and the ASGI application; `dialects` has the replies of the APIs, this module those about the worker
itself (page, info, tokens). `middleware` runs before every route."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import platform
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache, partial
from importlib import metadata
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from .. import __version__
from ..errors import (
    ContextLengthError,
    DeadlineError,
    HostNotAllowedError,
    InferenceError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    RequestCancelledError,
    UnsupportedMediaTypeError,
    WorkerError,
)
from ..text_model import TextModel
from ..tokenizer.tokenizer import MARK
from . import log, openapi
from .batches import IS_BATCH, BatchService, as_batch_work
from .bodies import Conversation, GenerateRequest, PackedIds, model_of
from .dialect import GenerateRoute, Handler
from .dialects import DIALECTS, body_parsers, dialect_of, generate_routes
from .metrics import CONTENT_TYPE
from .middleware import RequestMiddleware, error_response, host_name, is_loopback
from .model_pool import Member
from .pooling import PoolingService
from .reply import Reply, start_reply
from .schema import CHUNK_ITEMS, JSON_TYPE, KINDS
from .sse import DONE, HEADERS, ON_DISCONNECT, EventStream, PushStream, encode_event, watch_disconnect
from .worker import Front, Worker

BODY_TIMEOUT_S = 60.0
CORS_METHODS = ("GET", "POST", "DELETE")
CORS_HEADERS = ("retry-after", "x-correlation-id", "x-effective-max-tokens", "x-ignored-fields", "x-skipped-tools")
INLINE_BLOCK = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
logger = logging.getLogger("llm_worker_rbee.server")
PACKAGES, CUDA_PACKAGES = ("numpy", "numba"), ("torch", "triton")  # whose versions /info reports


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply with the data as JSON."""
    return Response(msgspec.json.encode(data), status, headers, JSON_TYPE)


class RequestCall:
    """One request, as a `Call`."""

    def __init__(self, request: Request, takes_any: bool = False) -> None:
        self._request, self._takes_any = request, takes_any

    @property
    def method(self) -> str:
        return self._request.method

    @property
    def path(self) -> str:
        return self._request.url.path

    @property
    def path_params(self) -> dict[str, Any]:
        return self._request.path_params

    @property
    def query(self) -> Mapping[str, str]:
        return self._request.query_params

    def require_own_page(self) -> None:
        """Raise if a page of another site sent the request."""
        headers = self._request.headers
        if "origin" in headers and urlsplit(headers["origin"]).netloc != headers.get("host"):
            raise HostNotAllowedError("a page of another site must not call this route")

    def require_trusted(self, has_key: bool) -> None:
        """Raise unless the client has the key, which was checked, or is on this machine, and no proxy or page."""
        self.require_own_page()
        headers, client = self._request.headers, self._request.client
        is_forwarded = any(name == "forwarded" or name.startswith("x-forwarded-") for name in headers)
        is_local = (
            client is not None and is_loopback(client.host) and is_loopback(host_name(headers.get("host", "")) or "")
        )
        if not has_key and (is_forwarded or not is_local or headers.get("sec-fetch-site") == "cross-site"):
            raise HostNotAllowedError(
                "models are changed by clients with the worker's key, or on its own machine without a proxy: start it "
                "with --api-key-file"
            )

    async def body(self) -> bytes:
        """Return the body; raise unless it is JSON and arrives in time."""
        return await read_body(self._request, self._takes_any)

    @property
    def content_type(self) -> str:
        return self._request.headers.get("content-type", "")

    @property
    def base_url(self) -> str:
        return str(self._request.base_url)

    def stream(self) -> AsyncIterator[bytes]:
        """Return the body in parts, of any type."""
        return self._request.stream()

    def until_disconnect(self) -> CancelOnDisconnect:
        """Return a context whose task is cancelled, as by `asyncio.timeout`, if the client disconnects."""
        return CancelOnDisconnect(self._request)


async def read_body(request: Request, takes_any: bool = False) -> bytes:
    """Return the body of a request; raise unless it is JSON and arrives in time.

    `takes_any`: its content type may say otherwise, unless a page sent it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_from_page = any(name in request.headers for name in ("origin", "sec-fetch-site"))
    if kind != JSON_TYPE and (is_from_page or not takes_any):
        raise InvalidRequestError(f"the content type is {kind[:100]!r}: it must be application/json", "content-type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(f"the content encoding is {encoding[:100]!r}: send the body uncompressed")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except ClientDisconnect:
        raise RequestCancelledError("the client disconnected") from None
    except TimeoutError:
        raise DeadlineError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None


class CancelOnDisconnect:
    """A context whose task is cancelled, as by `asyncio.timeout`, if the client disconnects."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._has_disconnected = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._stop_watching = watch_disconnect(self._request.scope, self._request.receive, self._on_disconnect)

    def _on_disconnect(self) -> None:
        if self._task is not None and not self._has_disconnected:
            self._has_disconnected = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        task, self._task = self._task, None
        self._stop_watching()
        del self._stop_watching, self._request  # they refer back to this, and hold the body
        if self._has_disconnected and task is not None:
            task.uncancel()
            if kind is asyncio.CancelledError:
                raise RequestCancelledError("the client disconnected") from None


class Routes:
    """The handlers of all routes, for one worker."""

    def __init__(self, worker: Front) -> None:
        self.worker = worker
        worker.offload.parsers = worker.pooling_offload.parsers = body_parsers()
        self._openapi = msgspec.json.encode(openapi.description(worker.settings))
        self._of_lines: dict[str, Any] = {route.path: route.endpoint for route in self.table()}

    async def page(self, _: Request) -> Response:
        text, policy = load_page()
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(text, 200, headers, "text/html")

    async def openapi(self, _: Request) -> Response:
        return Response(self._openapi, 200, media_type=JSON_TYPE)

    async def health(self, _: Request) -> Response:
        health = self.worker.health()
        return json_response(health, 200 if health["status"] in ("healthy", "degraded") else 503)

    async def ready(self, _: Request) -> Response:
        state = {"loading": "loading", "failed": "error", "stopping": "error"}.get(self.worker.state)
        if state is None and self.worker.engine_status() == "failed":
            state = "error"
        reply: dict[str, Any] = {"ready": state is None, "state": state or ("busy" if self.worker.is_busy else "idle")}
        return json_response(reply if state != "loading" else {**reply, "progress_url": "/v1/loading/progress"})

    async def loading_progress(self, _: Request) -> EventStream:
        """Stream the stages of loading, from the first."""

        async def events() -> AsyncGenerator[bytes, None]:
            position = 0
            while True:
                changed, new = self.worker.loading_changed, self.worker.loading_events[position:]
                position += len(new)
                if new:
                    yield b"".join(map(encode_event, new))
                elif self.worker.state == "loading":
                    await changed.wait()
                else:
                    yield DONE
                    return

        return self._events(events())

    async def metrics(self, _: Request) -> Response:
        return Response(self.worker.metrics(), 200, {"content-type": CONTENT_TYPE})

    async def models(self, _: Request) -> Response:
        self.worker.require_ready()
        await self.worker.refresh()
        data = [entry for member in self.worker.pool.members for entry in self._entries(member)]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        member = await self.worker.find(name, *KINDS)
        adapter = member.service.loras.find(name) if isinstance(member.service, Worker) else None
        own = member.name if adapter is None else adapter.name
        return json_response(next(entry for entry in self._entries(member) if entry["id"] == own))

    def _entries(self, member: Member) -> list[dict[str, Any]]:
        """Return the entry of a model, with its state, and the entries of its adapters."""
        service = member.service
        entry = {
            "id": member.name,
            "object": "model",
            "created": int(self.worker.started_at),
            "owned_by": "llm-worker-rbee",
            "context_length": member.context_length or 0,
            "kind": member.source.kind,
            "status": member.status(),
            "size_bytes": member.size_bytes,
        }
        facts = member.source.facts
        if isinstance(service, Worker):
            entry["architecture"] = modalities(has_images=service.takes_images)
        elif facts is not None and member.source.kind == "chat":
            entry["architecture"] = modalities(has_images=facts.takes_images)
        if isinstance(service, PoolingService) and member.state == "loaded":
            entry["dimensions"] = service.engine.info.output_dim
        loras = service.loras.listed if isinstance(service, Worker) else ()
        return [entry, *(entry | {"id": lora.name, "root": lora.path, "parent": member.name} for lora in loras)]

    async def info(self, _: Request) -> Response:
        self.worker.require_ready()
        return json_response(describe_server(self.worker))

    async def _generate(self, route: GenerateRoute, request: Request) -> Response | PushStream:
        """Parse a body and reply with the model's answer, streamed or whole."""
        body = await read_body(request, dialect_of(route.path).takes_any_content_type)
        worker, pool = self.worker, self.worker.pool
        async with CancelOnDisconnect(request):
            member = await worker.find(model_of(body), "chat")
            if not member.is_serving or (route.unloads and worker.settings.has_pool):
                parsed = await worker.parse(route.path, body)  # one that is not valid loads no model
                if parsed.keep_alive == 0 and not parsed.prompts:
                    await pool.unload(member)
                    made_at = time.perf_counter()
                    return await self._reply(Reply(member.name, worker.offload, parsed, [], [], route.printer, made_at))
            async with pool.use(member) as chat:
                assert isinstance(chat, Worker)
                parsed = await worker.parse(route.path, body, chat=chat)
                if IS_BATCH in request.scope:
                    parsed = as_batch_work(parsed)
                if parsed.keep_alive is not None:
                    pool.set_keep_alive(member, parsed.keep_alive)
                return await self._answer(chat, route, parsed)

    async def _answer(self, chat: Worker, route: GenerateRoute, parsed: GenerateRequest) -> Response | PushStream:
        """Return the model's answer to a parsed body."""
        try:
            reply = await start_reply(chat, parsed, route.printer)
        except ContextLengthError as error:
            if not parsed.stream or route.print_overflow is None:
                raise
            return Response(route.print_overflow(parsed, error), 200, HEADERS)
        return await self._reply(reply)

    async def _reply(self, reply: Reply) -> Response | PushStream:
        parsed = reply.request
        headers = {"x-effective-max-tokens": str(reply.max_tokens), **parsed.notice_headers()}
        if parsed.skipped:
            logger.warning("tools of types that this worker does not have: %s", headers["x-skipped-tools"])
        if not parsed.stream:
            return Response(await reply.complete(), 200, headers, JSON_TYPE)
        printer = reply.printer
        headers["content-type"] = printer.media_type
        return PushStream(reply, ping_s=self.worker.settings.ping_s, headers=headers, ping=printer.ping)

    async def answer(self, path: str, body: bytes) -> tuple[Any, Exception | None]:
        """Return the reply to a line of a batch: the route's reply, without a client; and the error that it says."""

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        headers = [(b"content-type", JSON_TYPE.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        request = Request(scope | {IS_BATCH: True, ON_DISCONNECT: lambda callback: lambda: None}, receive)
        try:
            return await self._of_lines[path](request), None
        except Exception as error:
            if not isinstance(error, WorkerError):
                log.request_failed(error)
            return await _on_error(request, error), error

    async def _handle(self, handler: Handler, request: Request) -> Any:
        """Call a dialect's handler; convert its result to a response if it is none."""
        answer = await handler(RequestCall(request, dialect_of(request.url.path).takes_any_content_type))
        if isinstance(answer, tuple):
            return (StreamingResponse if isinstance(answer[0], Iterator) else json_response)(*answer)
        return json_response(answer) if isinstance(answer, dict) else answer

    async def _offload(self, parser: str, reply: Callable[[TextModel, Any], bytes], request: Request) -> Response:
        """Parse a body and make the reply to it in a thread."""
        body = await read_body(request)
        async with CancelOnDisconnect(request):
            parsed = await self.worker.parse(parser, body)
            async with self.worker.use(model_of(body)) as chat:
                model = chat.model
                encoded = await self.worker.offload.run(len(body), lambda: reply(model, parsed))
                return Response(encoded, 200, media_type=JSON_TYPE)

    def _events(self, source: AsyncGenerator[bytes, None], on_end: Callable[[], None] = lambda: None) -> EventStream:
        return EventStream(source, ping_s=self.worker.settings.ping_s, on_end=on_end)

    def table(self) -> list[Route]:
        routes: list[tuple[str, Callable[[Request], Any], str]] = [
            ("/health", self.health, "GET"),
            ("/openapi.json", self.openapi, "GET"),
            ("/", self.page, "GET"),
            ("/v1/ready", self.ready, "GET"),
            ("/info", self.info, "GET"),
            ("/metrics", self.metrics, "GET"),
            ("/v1/loading/progress", self.loading_progress, "GET"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"),
            ("/tokenize", partial(self._offload, "tokenize", tokenize), "POST"),
            ("/detokenize", partial(self._offload, "detokenize", detokenize), "POST"),
            ("/apply-template", partial(self._offload, "apply_template", apply_template), "POST"),
        ]
        routes += [(route.path, partial(self._generate, route), "POST") for route in generate_routes()]
        for dialect in DIALECTS:
            handlers, methods = dialect.make_handlers(self.worker), defaultdict[str, list[str]](list)
            for route in dialect.routes:
                if self.worker.settings.has_pool or not route.needs_pool:
                    methods[route.path].append(route.method)
            routes += [(path, partial(self._handle, handlers[path]), " ".join(methods[path])) for path in methods]
        return [Route(path, handler, methods=methods.split()) for path, handler, methods in routes]

    def direct_table(self) -> dict[tuple[str, str], Callable[[Request], Any]]:
        """Return the most frequent routes, by method and path."""
        table: dict[tuple[str, str], Callable[[Request], Any]] = {
            ("POST", route.path): partial(self._generate, route) for route in generate_routes()
        }
        return table | {("GET", "/health"): self.health}


def application(worker: Front) -> RequestMiddleware | CORSMiddleware:
    """Return the server as an ASGI application; it loads the model when it starts."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        loading = asyncio.ensure_future(worker.start())
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        if worker.batches is not None:
            worker.batches.start()
        yield
        if worker.batches is not None:
            await worker.batches.stop()
            worker.batches.store.close()
        await worker.stop()

    routes = Routes(worker)
    app = starlette(routes, lifespan=lifespan)
    if worker.settings.files_dir is not None:
        worker.batches = BatchService(worker, routes.answer)
    wrapped = RequestMiddleware(DirectRoutes(app, routes.direct_table()), worker.settings, lambda: worker.takes_images)
    origins = worker.settings.cors_origins
    return (
        wrapped if not origins else CORSMiddleware(wrapped, origins, CORS_METHODS, ("*",), expose_headers=CORS_HEADERS)
    )


class DirectRoutes:
    """An ASGI application that calls the routes that are called most, without searching them; all others by `app`.

    Their errors are left to the middleware around it.
    """

    def __init__(self, app: Starlette, table: dict[tuple[str, str], Callable[[Request], Any]]) -> None:
        self._app, self._table = app, table

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        handler = self._table.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)


def starlette(routes: Routes, **options: Any) -> Starlette:
    """Return the application without the checks of the middleware."""
    handlers: Any = {404: _on_no_route, 405: _on_no_route, WorkerError: _on_error, Exception: _on_error}
    return Starlette(routes=routes.table(), exception_handlers=handlers, **options)


async def _on_no_route(request: Request, error: Exception) -> Response:
    path, extra = request.url.path, getattr(error, "headers", None) or {}
    refusal: WorkerError = NotFoundError(f"there is no route {request.method} {path[:100]!r}")
    if getattr(error, "status_code", 404) == 405:
        refusal = MethodNotAllowedError(f"{request.method} is not a method of {path[:100]!r}: use {extra.get('Allow')}")
    status, headers, body = error_response(path, refusal)
    return Response(body, status, {**headers, **extra})


async def _on_error(request: Request, error: Exception) -> Response:
    shown = error if isinstance(error, WorkerError) else InferenceError("internal error of the worker")
    status, headers, body = error_response(request.url.path, shown)
    return Response(body, status, headers)


def modalities(*, has_images: bool) -> dict[str, Any]:
    """Return what a model takes and gives, as llama-server has it."""
    return {"input_modalities": ["text", "image"] if has_images else ["text"], "output_modalities": ["text"]}


@cache
def load_page() -> tuple[bytes, str]:
    """Return the page, and a content security policy that allows its own script and style only."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    hashes: dict[str, str] = {}
    for kind, content in INLINE_BLOCK.findall(text):
        hashes[kind] = "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"
    policy = {
        "default-src": "'none'",
        "script-src": hashes["script"],
        "style-src": hashes["style"],
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text.encode(), "; ".join(f"{name} {value}" for name, value in policy.items())


def describe_server(worker: Front) -> dict[str, Any]:
    """Return the reply of `/info`: all models of a pool, or a chat model and the pooling models beside it."""
    described: dict[Member, dict[str, Any]] = {}
    backends: set[str] = set()
    for member in worker.pool.members:
        if member.state == "loaded" and isinstance(service := member.service, Worker | PoolingService):
            described[member] = describe_chat(service) if isinstance(service, Worker) else service.describe()
            backends.add(service.engine.info.backend)
    info: dict[str, Any] = {
        "worker_id": worker.settings.worker_id,
        "batches": None if worker.batches is None else worker.batches.describe(),
        "versions": _versions("cuda" if "cuda" in backends else "cpu"),
    }
    if not worker.settings.has_pool:
        first, *pooling = described.values()
        return {**first, "pooling": pooling, **info}
    members = []
    for member in worker.pool.members:
        own = {"memory": [row._asdict() for row in member.rows], "loads": member.num_loads}
        members.append(member.describe() | own | ({"info": described[member]} if member in described else {}))
    limits = {"max_models": worker.pool.max_models, "max_waiting": worker.pool.max_waiting}
    return {"models": members, "memory": worker.pool.describe()["memory"], "limits": limits, **info}


def describe_chat(worker: Worker) -> dict[str, Any]:
    """Return what `/info` tells of a chat model: device, memory, limits, sampling defaults."""
    context_length = worker.model.max_context
    info, stats, limits = worker.engine.info, worker.engine.stats(), worker.admission.limits()
    return {
        "model": worker.names[0], "architecture": info.architecture, "quant": info.quant,
        "parameters": info.parameters, "context_length": context_length, "backend": info.backend,
        "device": info.device, "kv_type": info.kv_type,
        "memory": {
            "weights_bytes": info.weights_bytes, "kv_cache_bytes": info.kv_cache_bytes,
            "process_bytes": stats.process_bytes, "device_bytes": stats.device_bytes, "graph_bytes": stats.graph_bytes,
            "lora_bytes": stats.lora_bytes,
        },
        "limits": {
            "max_batch": info.engine.max_batch, "max_step_tokens": info.engine.max_step_tokens,
            "max_queue": limits.max_queue, "max_queued_tokens": limits.max_queued_tokens,
            "target_itl_ms": info.engine.target_itl_ms,
        },
        "kv_disk": None if stats.kv_disk is None else asdict(stats.kv_disk),
        "step_time_model": None if stats.step_time_model is None else stats.step_time_model._asdict(),
        "replicas": [
            {"device": replica.info.device, "status": replica.status(), "restarts": replica.num_restarts,
             "requests": replica.num_requests, "kv_cache_usage": round(replica.stats().kv_cache_usage, 6)}
            for replica in worker.engine.replicas
        ],
        "loras": [
            {"name": named.name, "rank": named.info.rank, "scale": named.scale, "digest": named.info.digest.hex()}
            for named in worker.loras.listed
        ],
        "sampling_defaults": worker.model.sampling_defaults.report(),
    }  # fmt: skip


@cache
def _versions(backend: str) -> dict[str, str]:
    versions = {"worker": __version__, "python": platform.python_version()}
    for name in (*PACKAGES, *(CUDA_PACKAGES if backend == "cuda" else ())):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # compiled kernels need no Numba
            continue
    return versions


def tokenize(model: TextModel, values: dict[str, Any]) -> bytes:
    """Return the reply of `/tokenize`."""
    ids = model.tokenize(values["text"], add_special=values["add_special"], parse_special=values["parse_special"])
    pieces = {token: model.tokenizer.piece(token) for token in set(ids)}
    return b'{"tokens":' + _encode_list(ids) + b',"pieces":' + _encode_list([pieces[token] for token in ids]) + b"}"


def _encode_list(values: list[Any]) -> bytes:
    """Encode a long list a chunk at a time, so that other threads get the interpreter."""
    chunks = (values[at : at + CHUNK_ITEMS] for at in range(0, len(values), CHUNK_ITEMS))
    return b"[" + b",".join([msgspec.json.encode(chunk)[1:-1] for chunk in chunks]) + b"]"


def detokenize(model: TextModel, packed: PackedIds) -> bytes:
    """Return the reply of `/detokenize`."""
    vocab_size = model.vocab_size
    if (largest := packed.max()) >= vocab_size:
        raise InvalidRequestError(f"tokens: {str(largest)[:20]} is not a token id (0..{vocab_size - 1})", "tokens")
    return msgspec.json.encode({"text": model.detokenize(packed.view())})


def apply_template(model: TextModel, conversation: Conversation) -> bytes:
    """Return the reply of `/apply-template`."""
    prompt = model.render_chat(conversation.messages, conversation.options)
    tokens = model.tokenizer.encode(prompt, parse_special=True, protected=True)
    return msgspec.json.encode({"prompt": prompt.replace(MARK, ""), "tokens": tokens})
