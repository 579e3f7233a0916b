"""Checks before every route: host, API key, header and body limits, correlation id, log line; and the
error bodies of all dialects. Plain ASGI. A worker without a key checks `Host`."""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from ..errors import (
    AuthenticationError,
    HeadersTooLargeError,
    HostNotAllowedError,
    InvalidRequestError,
    MissingKeyError,
    PayloadTooLargeError,
    QueueFullError,
    WorkerError,
)
from . import log
from .dialects import dialect_of
from .settings import VARIABLES, Key, ServerSettings
from .sse import ON_DISCONNECT, WRITE

HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+?)\.?)(?::[0-9]*)?")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PUBLIC_PATHS = {"/health", "/"}
MAX_HEADER_BYTES = 64 * 1024  # checked here once complete, and in `serve.Connection` while they arrive
HEADERS_TOO_LONG = f"the headers are longer than the limit of {MAX_HEADER_BYTES} bytes"
UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# Ours, and what OpenAI's and Anthropic's clients read.
ID_HEADERS = (b"x-correlation-id", b"x-request-id", b"request-id")
CLIENT_CLOSED = 499  # logged where the client disconnected before a status was sent


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host; the only such name is localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_key(key: Key | None, host: str) -> None:
    """Raise if a worker without a key would listen on anything but loopback."""
    if key is None and not is_loopback(host):
        raise InvalidRequestError(
            f"--host {host} can be reached from outside and there is no key: give one with --api-key-file or "
            f"{VARIABLES[0]}, or use --host 127.0.0.1",
            "host",
        )


def check_authorization(header: bytes, api_key: bytes, key: bytes) -> None:
    """Raise unless an Authorization header has the key, or X-API-Key (`api_key`) is the key."""
    if not header and not api_key:
        raise MissingKeyError("no API key: send Authorization: Bearer KEY, or X-API-Key: KEY")
    scheme, _, value = header.partition(b" ")
    is_bearer = scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), key)
    if not is_bearer and not hmac.compare_digest(api_key.strip(), key):
        raise AuthenticationError("the API key is wrong")


def host_name(host: str) -> str | None:
    """Return the name in `name:port` or `[address]:port`, in lower case; None if it is neither."""
    match = HOST.fullmatch(host)
    return None if match is None else (match[1] or match[2]).lower()


def allowed_hosts(settings: ServerSettings) -> frozenset[str] | None:
    """Return the names that `Host` may have in addition to loopback addresses; None: any.

    A page of another site reaches a worker on loopback once its own name resolves to 127.0.0.1 (DNS rebinding); `Host`
    still has that name. With a key there is no check: such a page does not know the key.
    """
    if settings.api_key is not None or "*" in settings.allowed_hosts:
        return None
    advertised = urlsplit(settings.advertise_url or "").hostname
    names = {host_name(host) for host in settings.allowed_hosts}
    return frozenset(name for name in (*LOOPBACK, advertised, *names) if name)


def check_host(values: list[bytes], http_version: str, allowed: frozenset[str] | None) -> None:
    """Raise unless the `Host` headers of a request are one, which HTTP/1.0 may leave out, with an allowed name."""
    if len(values) > 1 or (not values and http_version != "1.0"):
        raise InvalidRequestError(f"the request has {len(values)} Host headers: HTTP/1.1 requires one", "host")
    if allowed is None or not values:
        return
    name = host_name(value := values[0].decode("latin-1"))
    if name is None or not (name in allowed or is_loopback(name)):
        raise HostNotAllowedError(
            f"the host {value[:100]!r} is not a name of this worker, which has no API key: use 127.0.0.1 or localhost, "
            "or start it with --allowed-host NAME or with a key"
        )


class RequestMiddleware:
    """An ASGI application around the routes."""

    def __init__(self, app: Any, settings: ServerSettings, takes_images: Callable[[], bool] = lambda: False) -> None:
        """`takes_images`: a model that is served takes images, so that bodies may be larger."""
        self._app, self._takes_images = app, takes_images
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._allowed_hosts = allowed_hosts(settings)
        self._max_body, self._max_image_body = settings.max_body, max(settings.max_body, settings.max_image_body)
        self._max_pooling_body = (
            settings.max_pooling_body if settings.pooling_names or settings.has_pool else settings.max_body
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        sent = headers.get(b"x-correlation-id", b"").decode("latin-1")
        scope["correlation_id"] = correlation_id = sent if UUID.fullmatch(sent) else str(uuid4())
        log.correlation_id.set(correlation_id)
        start, reply, reason = time.perf_counter(), _ReplyWatcher(send, correlation_id), None
        is_checked = False
        try:
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            check_host(hosts, scope["http_version"], self._allowed_hosts)
            if self._key is not None and scope["path"] not in PUBLIC_PATHS:
                check_authorization(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""), self._key)
            dialect = dialect_of(scope["path"])
            max_body = self._max_image_body if self._takes_images() else self._max_body
            max_body = self._max_pooling_body if dialect.has_large_bodies else max_body
            max_body = dialect.body_limits.get(scope["path"], max_body)
            _check_lengths(scope["headers"], headers, max_body)
            is_checked = True
            await self._app(scope, _limit_body(receive, max_body), reply.send)
        except WorkerError as error:
            reason = None if is_checked else str(error)  # errors of routes may quote the client
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
