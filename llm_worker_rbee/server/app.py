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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
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
from ..generation import NamedLora
from ..text_model import TextModel
from ..tokenizer.tokenizer import MARK
from . import openapi
from .batches import BatchRunner, BatchService, FileReply, as_batch_work
from .bodies import Conversation, GenerateRequest, PackedIds
from .dialect import GenerateRoute, Handler
from .dialects import DIALECTS, body_parsers, dialect_of, generate_routes
from .metrics import CONTENT_TYPE
from .middleware import RequestMiddleware, error_response, host_name, is_loopback
from .model_pool import Member
from .pool_worker import PoolWorker
from .pooling import PoolingService
from .reply import Reply, start_reply
from .schema import CHUNK_ITEMS, JSON_TYPE, KINDS
from .sse import DONE, HEADERS, EventStream, PushStream, encode_event, watch_disconnect
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
        self._openapi = msgspec.json.encode(openapi.description(worker.settings))

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
        return json_response({"object": "list", "data": await self._listed()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if isinstance(self.worker, PoolWorker):
            return json_response(self._member(await self.worker.find(name, *KINDS)))
        if (service := self.worker.pooling.named(name)) is not None:
            return json_response(self._pooling_model(service))
        async with self.worker.use(name) as chat:
            adapter = chat.loras.find(name)
            return json_response(self._model(chat) if adapter is None else self._adapter(chat, adapter))

    async def _listed(self) -> list[dict[str, Any]]:
        if isinstance(self.worker, PoolWorker):
            await self.worker.refresh()
            return [self._member(member) for member in self.worker.pool.members]
        pooling = [self._pooling_model(service) for service in self.worker.pooling.loaded]
        async with self.worker.use(None) as chat:
            return [self._model(chat), *(self._adapter(chat, named) for named in chat.loras.listed), *pooling]

    def _model(self, chat: Worker) -> dict[str, Any]:
        entry = self._entry(chat.names[0], "chat", chat.model.max_context)
        return entry | {"architecture": modalities(has_images=chat.takes_images)}

    def _adapter(self, chat: Worker, named: NamedLora) -> dict[str, Any]:
        return self._model(chat) | {"id": named.name, "root": named.path, "parent": chat.names[0]}

    def _pooling_model(self, service: PoolingService) -> dict[str, Any]:
        self.worker.require_ready()
        service.require_loaded()
        info = service.engine.info
        return self._entry(service.name, service.kind, info.max_length) | {"dimensions": info.output_dim}

    def _member(self, member: Member) -> dict[str, Any]:
        """Return the entry of a model of a pool, with its state."""
        service, facts = member.service, member.source.facts
        entry = self._entry(member.name, member.source.kind, 0 if facts is None else facts.context_length)
        if isinstance(service, PoolingService):
            entry = self._pooling_model(service)
        elif isinstance(service, Worker):
            entry = self._model(service)
        elif facts is not None and member.source.kind == "chat":
            entry["architecture"] = modalities(has_images=facts.takes_images)
        return entry | {"status": member.status(), "size_bytes": member.size_bytes}

    def _entry(self, name: str, kind: str, context_length: int) -> dict[str, Any]:
        created, owner = int(self.worker.started_at), "llm-worker-rbee"
        entry = {"id": name, "object": "model", "created": created, "owned_by": owner, "context_length": context_length}
        return entry | {"kind": kind}

    async def info(self, _: Request) -> Response:
        if isinstance(self.worker, PoolWorker):
            return json_response(describe_pool(self.worker))
        async with self.worker.use(None) as chat:
            return json_response(describe_worker(chat))

    async def _generate(self, route: GenerateRoute, request: Request) -> Response | PushStream:
        """Parse a body and reply with the model's answer, streamed or whole."""
        body = await read_body(request, dialect_of(route.path).takes_any_content_type)
        async with CancelOnDisconnect(request):
            if (chat := self.worker.chat) is not None:
                return await self._answer(chat, route, as_batch_work(request.scope, await chat.parse(route.path, body)))
            assert isinstance(self.worker, PoolWorker)
            member = await self.worker.find(model_of(body), "chat")
            if not member.is_serving or route.unloads:  # a body that is not valid loads no model
                parsed = await self.worker.parse(route.path, body)
                if parsed.keep_alive == 0 and not parsed.prompts:
                    await self.worker.pool.unload(member)
                    return await self._reply(Reply(self.worker, parsed, [], [], route.printer, time.perf_counter()))
            async with self.worker.use_member(member) as chat:
                parsed = as_batch_work(request.scope, await chat.parse(route.path, body))
                if parsed.keep_alive is not None:
                    self.worker.pool.set_keep_alive(member, parsed.keep_alive)
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

    async def _handle(self, handler: Handler, request: Request) -> Any:
        """Call a dialect's handler; convert its result to a response if it is none."""
        answer = await handler(RequestCall(request, dialect_of(request.url.path).takes_any_content_type))
        if isinstance(answer, FileReply):
            headers = {"content-length": str(answer.size)}
            return StreamingResponse(answer.chunks(), 200, headers, answer.media_type)
        if isinstance(answer, tuple):
            return json_response(*answer)
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
                if self.worker.pool is not None or not route.needs_pool:
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
        worker.batches = BatchService(worker.settings, BatchRunner(worker, app))
    wrapped = RequestMiddleware(DirectRoutes(app, routes.direct_table()), worker.settings, lambda: worker.takes_images)
    origins = worker.settings.cors_origins
    return (
        wrapped if not origins else CORSMiddleware(wrapped, origins, CORS_METHODS, ("*",), expose_headers=CORS_HEADERS)
    )


class NamedModel(msgspec.Struct):
    """What a body is read for before its model is known."""

    model: Any = None


def model_of(body: bytes) -> str | None:
    """Return the model that a body names; one that is not valid is left to its parser."""
    try:
        name = msgspec.json.decode(body, type=NamedModel).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


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


def make_runner(worker: Front) -> BatchRunner:
    """Return what answers the lines of batches of a worker without clients: their lines are its requests."""
    return BatchRunner(worker, starlette(Routes(worker)), has_clients=False)


def starlette(routes: Routes, **options: Any) -> Starlette:
    """Return the application without the checks of the middleware."""
    routes.worker.offload.parsers = routes.worker.pooling.offload.parsers = body_parsers()
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


def describe_pool(worker: PoolWorker) -> dict[str, Any]:
    """Return the reply of `/info` of a pool: its memory, and what each loaded model is."""
    members, backends = [], {"cpu"}
    for member in worker.pool.members:
        described = member.describe()
        if isinstance(member.service, PoolingService):
            described["info"] = member.service.describe()
        elif isinstance(member.service, Worker):
            described["info"] = describe_worker(member.service)
            backends.add(member.service.engine.info.backend)
        rows = [{"owner": row.owner, "bytes": row.bytes, "reason": row.reason} for row in member.rows]
        members.append(described | {"memory": rows, "loads": member.num_loads})
    return {
        "models": members,
        "memory": {"used_bytes": worker.pool.used_bytes, "limit_bytes": worker.pool.max_bytes},
        "limits": {"max_models": worker.pool.max_models, "max_waiting": worker.pool.max_waiting},
        "worker_id": worker.settings.worker_id,
        "batches": None if worker.batches is None else worker.batches.describe(),
        "versions": _versions("cuda" if "cuda" in backends else "cpu"),
    }


def describe_worker(worker: Worker) -> dict[str, Any]:
    """Return the reply of `/info`: model, device, memory, limits, sampling defaults, versions."""
    context_length = worker.model.max_context  # raises until the model is loaded
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
            {"name": named.name, "rank": named.rank, "scale": named.scale, "digest": named.digest.hex()}
            for named in worker.loras.listed
        ],
        "pooling": [service.describe() for service in worker.pooling.loaded],
        "batches": None if worker.batches is None else worker.batches.describe(),
        "sampling_defaults": worker.model.sampling_defaults.report(),
        "worker_id": worker.settings.worker_id, "versions": _versions(info.backend),
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
