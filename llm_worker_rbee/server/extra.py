"""Two routes about the worker itself: the page, which holds no data, and the description of all routes."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .openapi import description
from .settings import Settings

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
