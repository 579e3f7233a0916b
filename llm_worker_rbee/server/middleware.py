"""What stands before every route: the key, the length of a body, the correlation id. Plain ASGI."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

import msgspec

from ..errors import (
    AuthenticationError,
    HeadersTooLargeError,
    InvalidRequestError,
    MissingKeyError,
    PayloadTooLargeError,
    QueueFullError,
    WorkerError,
)
from . import log
from .dialects.openai_schema import error_body
from .schema import MISSING, FieldsError, Problem

PUBLIC = {"/health", "/"}
OPENAI = re.compile(r"/v1/(chat/completions|completions|models(/.*)?)")
MAX_HEADERS = 64 * 1024  # more is refused: here where they came whole, in `run.Connection` while they come
TOO_LONG = f"the headers are longer than the {MAX_HEADERS} bytes that are taken"
UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Guard:
    """An application that lets in who may come in."""

    def __init__(
        self, app: Any, api_key: str | None, max_body: int, on_error: Callable[[str, BaseException], None]
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._max_body = max_body
        self._on_error = on_error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-correlation-id", b"").decode("latin-1")
        scope["correlation_id"] = correlation = given if UUID.fullmatch(given) else str(uuid4())
        log.correlation.set(correlation)
        has_started = False
        status, began = 499, time.perf_counter()

        async def marked(message: Any) -> None:
            nonlocal has_started, status
            if message["type"] == "http.response.start":
                has_started, status = True, message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-correlation-id", correlation.encode())]}
            await send(message)

        try:
            self._require_key(scope["path"], headers)
            self._require_length(scope["headers"], headers)
            await self._app(scope, self._counted(receive), marked)
        except WorkerError as error:
            if not has_started:
                await respond(marked, scope["path"], error)
        except Exception as error:
            self._on_error(correlation, error)
            if not has_started:
                await respond(marked, scope["path"], WorkerError("something went wrong inside the worker"))
        finally:
            log.done(scope, status, time.perf_counter() - began)

    def _require_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self._key is None or path in PUBLIC:
            return
        said = headers.get(b"authorization", b"")
        if not said:
            raise MissingKeyError("no API key: send Authorization: Bearer KEY")
        kind, _, key = said.partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise AuthenticationError("the API key is not the right one")

    def _require_length(self, lines: Iterable[tuple[bytes, bytes]], headers: Mapping[bytes, bytes]) -> None:
        if sum(len(name) + len(value) for name, value in lines) > MAX_HEADERS:
            raise HeadersTooLargeError(TOO_LONG)
        said = headers.get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._max_body:
            raise PayloadTooLargeError(f"the body has {int(said)} bytes: at most {self._max_body} are taken")

    def _counted(self, receive: Any) -> Any:
        """A body that comes in pieces is counted as it comes."""
        taken = 0

        async def counted() -> Any:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise PayloadTooLargeError(f"the body is longer than the {self._max_body} bytes that are taken")
            return message

        return counted


def told(path: str, error: WorkerError) -> tuple[int, dict[str, str], bytes]:
    """An error as the dialect of the route tells it: status, headers, body."""
    if OPENAI.fullmatch(path):
        body: dict[str, Any] = error_body(error)
    elif problems := _problems(error):
        body = {"errors": [_problem(problem) for problem in problems]}
    else:
        body = {"code": error.code, "message": str(error), "retriable": error.retriable}
    headers = {"content-type": "application/json"}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return error.status, headers, msgspec.json.encode(body)


async def respond(send: Any, path: str, error: WorkerError) -> None:
    """Say it."""
    status, headers, body = told(path, error)
    lines = [(name.encode(), value.encode()) for name, value in {**headers, "content-length": str(len(body))}.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def _problems(error: WorkerError) -> list[Problem]:
    """What is wrong with a request; errors with a code of their own are told by it."""
    if isinstance(error, FieldsError):
        return error.problems
    if isinstance(error, InvalidRequestError) and error.code == InvalidRequestError.code:
        return [Problem(error.field or "body", "invalid", str(error))]
    return []


def _problem(problem: Problem) -> dict[str, Any]:
    told = {"field": problem.field, "constraint": problem.constraint, "message": problem.message}
    return told if problem.value is MISSING else {**told, "value": problem.value}
