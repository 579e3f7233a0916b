"""`llm-worker-rbee ps` and `stop`: the models of a running worker, and unloading one, over HTTP."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any

import typer

from ..errors import InvalidRequestError, UnavailableError, WorkerError, human_bytes
from ..server.settings import find_key
from .commands import PsCommand, StopCommand
from .options import WorkerFlags
from .terminal import cell, columns, print_json

TIMEOUT_S, UNLOAD_TIMEOUT_S = 10.0, 600.0  # to unload a model, its running requests are waited for
MAX_REPLY_BYTES = 16 << 20


def ps(options: PsCommand) -> None:
    """Print the models of a worker, with their states."""
    listed: list[dict[str, Any]] = _request(options.worker, "GET", "/models")["data"]
    if not options.all_:
        listed = [entry for entry in listed if entry["status"]["value"] not in ("unloaded", "sleeping")]
    if options.as_json:
        print_json({"models": listed})
        return
    rows: list[tuple[str, ...]] = [("NAME", "KIND", "STATE", "SIZE", "REQUESTS", "UNTIL")]
    rows += [_row(entry) for entry in listed]
    print("\n".join(columns([[cell(text) for text in row] for row in rows], right=[3, 4])))


def stop(options: StopCommand) -> None:
    """Unload a model, or let all of them sleep."""
    if (options.model is None) != options.all_:
        raise typer.BadParameter("give the name of a model, or --all")
    if options.model is None:
        _request(options.worker, "POST", "/sleep", timeout_s=UNLOAD_TIMEOUT_S)
        print("all models sleep until they are used again")
        return
    _request(options.worker, "POST", "/models/unload", {"model": options.model}, UNLOAD_TIMEOUT_S)
    print(f"{options.model} is unloaded")


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    status = entry["status"]
    state, progress = status["value"], status.get("progress")
    if progress is not None:
        part = f" {progress['done'] / progress['total']:.0%}" if progress["total"] else ""
        state += f" ({progress['stage']}{part})"
    elif "reason" in status:
        state += f": {status['reason']}"
    size, seconds = entry.get("size_bytes", 0), entry.get("expires_in_s")
    until = "for ever" if seconds is None else f"in {seconds:.0f} s"
    return (
        entry["id"],
        entry.get("kind", "chat"),
        state,
        human_bytes(size) if size else "",
        str(entry.get("requests", "")),
        until if status["value"] == "loaded" else "",
    )


def _request(
    worker: WorkerFlags, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Return the reply of a worker; raise its error."""
    url = worker.url.rstrip("/") + path
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--url {worker.url!r} is not a URL such as http://127.0.0.1:8080")
    key, headers = find_key(worker.api_key_file, os.environ), {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key.value}"
    data = None if body is None else json.dumps(body).encode()
    context = ssl.create_default_context()
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    try:
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as reply:
            return _decode(reply.read(MAX_REPLY_BYTES), worker.url)
    except urllib.error.HTTPError as error:
        with error:
            problem = _decode(error.read(MAX_REPLY_BYTES), worker.url)
        inner = problem.get("error", problem)
        message = inner.get("message") if isinstance(inner, dict) else inner
        raise WorkerError(f"the worker at {worker.url} refuses: {message}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"no worker answers at {worker.url} ({reason}): start one, or give --url") from None


def _decode(data: bytes, url: str) -> dict[str, Any]:
    try:
        decoded = json.loads(data)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise InvalidRequestError(f"what answers at {url} is no llm-worker-rbee")
    return decoded
