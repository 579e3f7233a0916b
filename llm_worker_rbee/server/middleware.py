"""What every request passes before its route: host, API key, header and body limits, correlation id, log line; and the
error bodies of all dialects. Plain ASGI."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

import msgspec

from ..config import ServerSettings
from ..errors import HeadersTooLargeError, PayloadTooLargeError, QueueFullError, WorkerError
from . import log
from .auth import allowed_hosts, check_authorization, check_host
from .dialects import dialect_of
from .sse import ON_DISCONNECT, WRITE

PUBLIC_PATHS = {"/health", "/"}
MAX_HEADER_BYTES = 64 * 1024  # checked here once complete, and in `serve.Connection` while they arrive
HEADERS_TOO_LONG = f"the headers are longer than the limit of {MAX_HEADER_BYTES} bytes"
UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
ID_HEADERS = (
    b"x-correlation-id",
    b"x-request-id",
    b"request-id",
)  # ours, and what OpenAI's and Anthropic's clients read
CLIENT_CLOSED = 499  # logged where the client disconnected before a status was sent


class RequestMiddleware:
    """An ASGI application around the routes."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        self._app = app
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._allowed_hosts = allowed_hosts(settings)
        self._max_body = settings.max_body
        self._max_pooling_body = settings.max_pooling_body if settings.pooling_names else settings.max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-correlation-id", b"").decode("latin-1")
        scope["correlation_id"] = correlation_id = given if UUID.fullmatch(given) else str(uuid4())
        log.correlation_id.set(correlation_id)
        start, reply, reason = time.perf_counter(), _ReplyWatcher(send, correlation_id), None
        is_checked = False
        try:
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            check_host(hosts, scope["http_version"], self._allowed_hosts)
            if self._key is not None and scope["path"] not in PUBLIC_PATHS:
                check_authorization(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""), self._key)
            max_body = self._max_pooling_body if dialect_of(scope["path"]).has_large_bodies else self._max_body
            _check_lengths(scope["headers"], headers, max_body)
            is_checked = True
            await self._app(scope, _limit_body(receive, max_body), reply.send)
        except WorkerError as error:
            reason = None if is_checked else str(error)  # those of routes may quote what a client wrote
            if not reply.has_started:
                await send_error(reply.send, scope["path"], error)
        except Exception as error:
            log.request_failed(error)
            if not reply.has_started:
                await send_error(reply.send, scope["path"], WorkerError("internal error of the worker"))
        finally:
            for name in (WRITE, ON_DISCONNECT):  # they refer to the scope: it would be kept until a garbage collection
                scope.pop(name, None)
            log.request_done(scope, reply.status, time.perf_counter() - start, reason)


def _check_lengths(lines: Iterable[tuple[bytes, bytes]], headers: Mapping[bytes, bytes], max_body: int) -> None:
    if sum(len(name) + len(value) for name, value in lines) > MAX_HEADER_BYTES:
        raise HeadersTooLargeError(HEADERS_TOO_LONG)
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_body:
        raise PayloadTooLargeError(f"the body has {int(length)} bytes: at most {max_body} are accepted")


def _limit_body(receive: Any, max_body: int) -> Any:
    """Return a `receive` that raises once the body, which may come without a length, is too long."""
    num_bytes = 0

    async def limited() -> Any:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_body:
            raise PayloadTooLargeError(f"the body is longer than the limit of {max_body} bytes")
        return message

    return limited


class _ReplyWatcher:
    """Adds the correlation id to a reply and keeps its status."""

    def __init__(self, send: Any, correlation_id: str) -> None:
        self.has_started, self.status = False, CLIENT_CLOSED
        self._send, self._headers = send, [(name, correlation_id.encode()) for name in ID_HEADERS]

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_started, self.status = True, message["status"]
            message = {**message, "headers": [*message["headers"], *self._headers]}
        await self._send(message)


def error_response(path: str, error: WorkerError) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an error, in the dialect of the path."""
    headers = {"content-type": "application/json"}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return error.status, headers, msgspec.json.encode(dialect_of(path).error_body(error))


async def send_error(send: Any, path: str, error: WorkerError) -> None:
    """Send an error as the whole reply."""
    status, headers, body = error_response(path, error)
    lines = [(name.encode(), value.encode()) for name, value in {**headers, "content-length": str(len(body))}.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
