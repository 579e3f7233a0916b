"""A request as a handler gets it: its body within limits, and a context that a disconnect cancels."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ..errors import DeadlineError, InvalidRequestError, RequestCancelledError, UnsupportedMediaTypeError
from .sse import watch_disconnect

JSON_TYPE = "application/json"  # required of bodies: a page of another origin cannot send it without a CORS preflight
BODY_TIMEOUT_S = 60.0


class Call:
    """One request."""

    def __init__(self, request: Request, takes_any: bool = False) -> None:
        self._request, self._takes_any = request, takes_any

    @property
    def method(self) -> str:
        return self._request.method

    @property
    def path_params(self) -> dict[str, Any]:
        return self._request.path_params

    async def body(self) -> bytes:
        """Return the body; raise unless it is JSON and arrives in time."""
        return await read_body(self._request, self._takes_any)

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
    """A context whose task is cancelled, as by `asyncio.timeout`, if the client disconnects: that raises an error."""

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
