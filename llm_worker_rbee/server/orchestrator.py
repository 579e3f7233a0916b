"""What a worker tells an orchestrator by itself: that it is ready, again until it is heard, and then that it lives.

Each post runs in a thread of its own with a limit, so that an address that never answers holds nothing up; a failure is
a line in the log and nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .. import __version__
from ..errors import InvalidRequestError
from .worker import Worker

HEARTBEAT_S = 30.0
POST_LIMIT_S = 5.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 30.0
log = logging.getLogger("llm_worker_rbee.server")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # orchestrators are neighbours


def checked_url(url: str | None, option: str) -> str | None:
    """An address that can be posted to."""
    try:
        parts = urlsplit(url or "http://x")
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound or (url is not None and not (url.isascii() and url.isprintable() and " " not in url)) or url == "":
        raise InvalidRequestError(f"{option} {url!r} is not an address such as http://host:port/path", option)
    return url


async def announce(worker: Worker, url: str, port: int) -> None:
    """Tell of a worker that is ready, for as long as it lives."""
    tasks = []
    first_try = asyncio.Event()
    if worker.settings.callback_url is not None:
        tasks.append(asyncio.ensure_future(call_back(worker.settings.callback_url, ready(worker, url), first_try)))
    else:
        first_try.set()
    if worker.settings.heartbeat_url is not None:
        tasks.append(asyncio.ensure_future(_beat(worker, worker.settings.heartbeat_url, port, first_try)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def call_back(url: str, body: Mapping[str, Any], first_try: asyncio.Event) -> None:
    """Until it is heard, less and less often."""
    pause = FIRST_RETRY_S
    while True:
        error = await _heard(url, body)
        first_try.set()
        if error is None:
            log.info("the callback was heard")
            return
        log.warning("the callback was not heard (%s): again in %g s", error, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY_S)


async def _beat(worker: Worker, url: str, port: int, first_try: asyncio.Event) -> None:
    await first_try.wait()
    while True:
        error = await _heard(url, heartbeat(worker, port))
        if error is not None:
            log.warning("the heartbeat was not heard (%s)", error)
        await asyncio.sleep(HEARTBEAT_S)


def ready(worker: Worker, url: str) -> dict[str, Any]:
    """What the callback says."""
    llm = worker.llm
    return {
        "worker_id": worker.settings.worker_id, "url": url, "model_ref": worker.settings.model_ref,
        "backend": llm.backend, "device": llm.device, "vram_bytes": llm.device_bytes,
        "phases": {phase: round(seconds, 6) for phase, seconds in llm.phases.items() if math.isfinite(seconds)},
    }  # fmt: skip


def heartbeat(worker: Worker, port: int) -> dict[str, Any]:
    """What a heartbeat says."""
    return {
        "worker": {
            "id": worker.settings.worker_id, "model_id": worker.settings.names[0], "device": worker.loaded.device,
            "port": port,
            "status": worker.health()["status"], "implementation": "python", "version": __version__,
        },
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }  # fmt: skip


async def _heard(url: str, body: Mapping[str, Any]) -> str | None:
    """Post it; what went wrong, if anything."""
    data = msgspec.json.encode(body)

    def post() -> None:
        asked = urllib.request.Request(url, data, {"content-type": "application/json"}, method="POST")
        with _direct.open(asked, timeout=POST_LIMIT_S) as reply:
            reply.read(1)

    try:
        async with asyncio.timeout(POST_LIMIT_S):
            await _in_daemon(post)
    except TimeoutError:
        return f"no answer within {POST_LIMIT_S:g} s"
    except Exception as error:  # whatever it is: the worker goes on
        return f"{type(error).__name__}: {error}"
    return None


def _in_daemon(act: Callable[[], None]) -> asyncio.Future[None]:
    """In a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(error: Exception | None) -> None:
        if not ended.done():
            ended.set_result(None) if error is None else ended.set_exception(error)

    def run() -> None:
        found: Exception | None = None
        try:
            act()
        except Exception as error:
            found = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=run, name="post", daemon=True).start()
    return ended
