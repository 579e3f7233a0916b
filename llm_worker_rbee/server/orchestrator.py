"""Messages to an orchestrator: a callback when the worker is ready, retried until it is accepted, then heartbeats.

Each POST runs in a thread with a time limit, so that an address that never answers blocks nothing; a failure is logged
and never fatal.
"""

from __future__ import annotations

import asyncio
import logging
import math
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .. import __version__
from ..errors import InvalidRequestError
from .offload import run_in_daemon_thread
from .worker import Front

HEARTBEAT_S = 30.0
POST_TIMEOUT_S = 5.0
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
logger = logging.getLogger("llm_worker_rbee.server")
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an orchestrator is never behind a proxy


def require_url(url: str | None, option: str) -> str | None:
    """Return the URL; raise unless it is None or can be posted to."""
    try:
        parts = urlsplit(url or "http://x")
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or (url is not None and not (url.isascii() and url.isprintable() and " " not in url)) or url == "":
        raise InvalidRequestError(f"{option} {url!r} is not a URL such as http://host:port/path", option)
    return url


async def announce(worker: Front, url: str, port: int) -> None:
    """Send the callback and heartbeats of a ready worker until cancelled."""
    tasks = []
    first_try = asyncio.Event()
    if worker.settings.callback_url is not None:
        body = ready_message(worker, url)
        tasks.append(asyncio.ensure_future(_send_callbacks(worker, worker.settings.callback_url, body, first_try)))
    else:
        first_try.set()
    if worker.settings.heartbeat_url is not None:
        tasks.append(asyncio.ensure_future(_send_heartbeats(worker, worker.settings.heartbeat_url, port, first_try)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _send_callbacks(worker: Front, url: str, ready: Mapping[str, Any], first_try: asyncio.Event) -> None:
    """Post that the worker is ready, then the ends of jobs about models, in their order."""
    await send_callback(url, ready, first_try)
    while True:
        await send_callback(url, await worker.messages.get(), first_try)


async def send_callback(url: str, body: Mapping[str, Any], first_try: asyncio.Event) -> None:
    """Post until accepted, with back-off."""
    pause = FIRST_RETRY_S
    while True:
        error = await _post(url, body)
        first_try.set()
        if error is None:
            logger.info("callback accepted")
            return
        logger.warning("callback failed (%s): retry in %g s", error, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_RETRY_S)


async def _send_heartbeats(worker: Front, url: str, port: int, first_try: asyncio.Event) -> None:
    await first_try.wait()
    while True:
        error = await _post(url, heartbeat_message(worker, port))
        if error is not None:
            logger.warning("heartbeat failed (%s)", error)
        await asyncio.sleep(HEARTBEAT_S)


def ready_message(worker: Front, url: str) -> dict[str, Any]:
    """Return the body of the callback."""
    ready = {"worker_id": worker.settings.worker_id, "url": url, "model_ref": worker.settings.model_ref}
    if worker.chat is None:
        pool, device = worker.pool, worker.pool.device
        vram_bytes = 0 if device == "cpu" else pool.used_bytes
        place = {"backend": device.partition(":")[0], "device": device, "vram_bytes": vram_bytes}
        return ready | place | {"phases": {}, **pool.describe()}
    info = worker.chat.engine.info
    return ready | {
        "backend": info.backend,
        "device": info.device,
        "vram_bytes": worker.chat.engine.stats().device_bytes,
        "phases": {phase: round(seconds, 6) for phase, seconds in info.phases.items() if math.isfinite(seconds)},
    }


def heartbeat_message(worker: Front, port: int) -> dict[str, Any]:
    """Return the body of a heartbeat."""
    return {
        "worker": {
            "id": worker.settings.worker_id,
            "model_id": worker.settings.served_name or worker.settings.model_ref,
            "device": worker.pool.device if worker.chat is None else worker.chat.engine.info.device,
            "port": port,
            "status": worker.health()["status"],
            "implementation": "python",
            "version": __version__,
            **(worker.pool.describe() if worker.settings.has_pool else {}),
        },
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


async def _post(url: str, body: Mapping[str, Any]) -> str | None:
    """Post the body; return the error, or None."""
    data = msgspec.json.encode(body)

    def post() -> None:
        request = urllib.request.Request(url, data, {"content-type": "application/json"}, method="POST")
        with _opener.open(request, timeout=POST_TIMEOUT_S) as reply:
            reply.read(1)

    try:
        async with asyncio.timeout(POST_TIMEOUT_S):
            await asyncio.wrap_future(run_in_daemon_thread(post, "post"))
    except TimeoutError:
        return f"no answer within {POST_TIMEOUT_S:g} s"
    except Exception as error:  # never fatal
        return f"{type(error).__name__}: {error}"
    return None
