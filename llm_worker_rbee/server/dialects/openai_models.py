"""The verbs about models: `/models`, `/models/load`, `/models/unload` and `/models/sse` as in llama-server's router,
and `/sleep`, `/wake_up` and `/is_sleeping` as in vLLM. Errors have the form of OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ...errors import InvalidRequestError
from ..dialect import Call, Dialect, Front, Handler, Member, Operation, Route, require_store
from ..json_schema import FLAG, TEXT, Schema, array_schema, reply_schema
from ..schema import KINDS, Field, Text, require, table_parser, table_schema
from ..settings import ServerSettings
from ..sse import EventStream, encode_event
from .openai import error_body

NAMED = {"model": Field(Text(1), required=True)}
LEVELS = ("1", "2")
WATCH_S, DOWNLOAD = 0.1, "download_progress"  # between two looks at the models; an event


class Handlers:
    """The routes, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker

    def table(self) -> dict[str, Handler]:
        return {
            "/models": self.models,
            "/models/load": self.load,
            "/models/unload": self.unload,
            "/models/sse": self.watch,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/is_sleeping": self.is_sleeping,
        }

    async def _find(self, call: Call) -> Member:
        values: dict[str, Any] = await self._worker.parse("model_verb", await call.body())
        return await self._worker.find(values["model"], *KINDS)

    async def models(self, call: Call) -> dict[str, Any]:
        if call.method in ("POST", "DELETE"):
            return await self._change(call)
        self._worker.require_ready()
        await self._worker.refresh()
        return {"object": "list", "data": [_entry(member) for member in self._worker.pool.members]}

    async def _change(self, call: Call) -> dict[str, Any]:
        """Fetch a model of the hub in the background, or remove one."""
        store = require_store(self._worker, call)
        if call.method == "POST":
            values: dict[str, Any] = await self._worker.parse("model_verb", await call.body())
            store.start_pull(values["model"])
        else:
            require("model" in call.query, "model", "required", "?model= is required: the name of a model")
            await store.delete(await self._worker.find(call.query["model"], *KINDS))
        return {"success": True}

    async def watch(self, _: Call) -> EventStream:
        return EventStream(self._events(), ping_s=self._worker.settings.ping_s)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield what changes of the models, and at first how they all are."""
        shown: dict[tuple[str, str], dict[str, Any]] = {}
        while self._worker.state != "stopping":
            present: dict[tuple[str, str], dict[str, Any]] = {}
            for member in self._worker.pool.members:
                status = member.status()
                present[member.name, "model_status"] = {"status": status.pop("value"), **status}
            for pull in () if self._worker.store is None else self._worker.store.describe():
                present[pull["model"], DOWNLOAD] = pull["progress"]
            removed = [(name, "model_remove") for name, event in shown.keys() - present.keys() if event != DOWNLOAD]
            changed = [key for key, data in present.items() if shown.get(key) != data]
            for name, event in (*removed, *changed):
                yield encode_event({"model": name, "event": event, "data": present.get((name, event), {})})
            shown = present
            await asyncio.sleep(WATCH_S)

    async def load(self, call: Call) -> dict[str, Any]:
        """Begin to load a model; `GET /models` has the progress."""
        member, pool = await self._find(call), self._worker.pool
        await pool.require_fits(member)
        pool.start_load(member)
        return {"success": True}

    async def unload(self, call: Call) -> dict[str, Any]:
        """Unload a model once its requests have ended."""
        member = await self._find(call)
        async with call.until_disconnect():
            await self._worker.pool.unload(member)
        return {"success": True}

    async def sleep(self, call: Call) -> dict[str, Any]:
        """Unload all models once their requests have ended; they wake with the next request, or with `/wake_up`."""
        call.require_own_page()
        if (level := call.query.get("level", LEVELS[0])) not in LEVELS:
            raise InvalidRequestError(f"level is {level[:20]!r}: it must be 1 or 2, which do the same here", "level")
        async with call.until_disconnect():
            await self._worker.pool.sleep()
        return {"is_sleeping": True}

    async def wake_up(self, call: Call) -> dict[str, Any]:
        call.require_own_page()
        async with call.until_disconnect():
            await self._worker.pool.wake()
        return {"is_sleeping": False}

    async def is_sleeping(self, _: Call) -> dict[str, Any]:
        states = {member.state for member in self._worker.pool.members}
        return {"is_sleeping": "sleeping" in states and not states & {"loaded", "loading"}}


def _entry(member: Member) -> dict[str, Any]:
    return {
        "id": member.name,
        "object": "model",
        "kind": member.source.kind,
        "in_cache": True,
        "status": member.status(),
        "size_bytes": member.size_bytes,
        "requests": member.num_requests,
        "waiting": len(member.waiters),
        "expires_in_s": member.expires_in_s,
        "context_length": member.context_length,
    }


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    status = reply_schema(value={"enum": ["unloaded", "loading", "loaded", "sleeping", "failed"]})
    entry = reply_schema(id=TEXT, object={"const": "model"}, status=status)
    return {
        "NamedModel": table_schema(NAMED, settings.schema_names, is_open=settings.ignore_unknown_fields),
        "RouterModels": reply_schema(object={"const": "list"}, data=array_schema(entry)),
        "Success": reply_schema(success=FLAG),
        "ModelEvent": reply_schema(model=TEXT, event=TEXT, data={"type": "object"}),
        "Sleeping": reply_schema(is_sleeping=FLAG),
    }


LOAD = Operation(summary="Load a model", request="NamedModel", reply="Success")
SLEEP = Operation(summary="Let all models sleep (vLLM)", reply="Sleeping")
DIALECT = Dialect(
    prefixes=("/models", "/sleep", "/wake_up", "/is_sleeping"),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OpenAIError",
    parsers={"model_verb": table_parser(NAMED)},
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("GET", "/models", Operation(summary="The models and their states (llama-server)", reply="RouterModels")),
        Route("POST", "/models", replace(LOAD, summary="Fetch a model of the hub"), needs_pool=True),
        Route("DELETE", "/models", replace(LOAD, summary="Remove a model", request=None), needs_pool=True),
        Route("GET", "/models/sse", Operation(summary="Changes of the models", event="ModelEvent"), needs_pool=True),
        Route("POST", "/models/load", LOAD, needs_pool=True),
        Route("POST", "/models/unload", replace(LOAD, summary="Unload a model"), needs_pool=True),
        Route("POST", "/sleep", SLEEP, needs_pool=True),
        Route("POST", "/wake_up", replace(SLEEP, summary="Wake the models that sleep (vLLM)"), needs_pool=True),
        Route("GET", "/is_sleeping", replace(SLEEP, summary="Whether all models sleep (vLLM)"), needs_pool=True),
    ),
)
