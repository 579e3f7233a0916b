"""The verbs about models: `GET /models`, `/models/load` and `/models/unload` as in the router of llama-server, and
`/sleep`, `/wake_up` and `/is_sleeping` as in vLLM. Errors have the form of OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from ...errors import InvalidRequestError
from ..dialect import Call, Dialect, Front, Handler, Member, Operation, PoolWorker, Route
from ..json_schema import FLAG, TEXT, Schema, array_schema, reply_schema
from ..schema import KINDS, Field, ParseOptions, Text, table_schema, validate_known
from ..settings import ServerSettings
from .openai import error_body

NAMED = {"model": Field(Text(1), required=True)}
LEVELS = ("1", "2")


class Handlers:
    """The routes, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker
        self._models = cast(PoolWorker, worker)  # of the routes that only a pool has

    def table(self) -> dict[str, Handler]:
        return {
            "/models": self.models,
            "/models/load": self.load,
            "/models/unload": self.unload,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/is_sleeping": self.is_sleeping,
        }

    async def _find(self, call: Call) -> Member:
        values: dict[str, Any] = await self._worker.parse("model_verb", await call.body())
        return await self._models.find(values["model"], *KINDS)

    async def models(self, _: Call) -> dict[str, Any]:
        if self._worker.pool is None:
            self._worker.require_ready()
            names = [self._worker.names[0], *(service.name for service in self._worker.pooling.loaded)]
            return _list([{"id": name, "status": {"value": "loaded"}} for name in names])
        self._models.require_ready()
        await self._models.refresh()
        return _list([_entry(member) for member in self._models.pool.members])

    async def load(self, call: Call) -> dict[str, Any]:
        """Begin to load a model; `GET /models` has the progress."""
        member, pool = await self._find(call), self._models.pool
        await pool.require_fits(member)
        pool.start_load(member)
        return {"success": True}

    async def unload(self, call: Call) -> dict[str, Any]:
        """Unload a model once its requests have ended."""
        member = await self._find(call)
        async with call.until_disconnect():
            await self._models.pool.unload(member)
        return {"success": True}

    async def sleep(self, call: Call) -> dict[str, Any]:
        """Unload all models once their requests have ended; they wake with the next request, or with `/wake_up`."""
        call.require_own_page()
        if (level := call.query.get("level", LEVELS[0])) not in LEVELS:
            raise InvalidRequestError(f"level is {level[:20]!r}: it must be 1 or 2, which do the same here", "level")
        async with call.until_disconnect():
            await self._models.pool.sleep()
        return {"is_sleeping": True}

    async def wake_up(self, call: Call) -> dict[str, Any]:
        call.require_own_page()
        async with call.until_disconnect():
            await self._models.pool.wake()
        return {"is_sleeping": False}

    async def is_sleeping(self, _: Call) -> dict[str, Any]:
        states = {member.state for member in self._models.pool.members}
        return {"is_sleeping": "sleeping" in states and not states & {"loaded", "loading"}}


def _list(data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": [entry | {"object": "model"} for entry in data]}


def _entry(member: Member) -> dict[str, Any]:
    facts = member.source.facts
    return {
        "id": member.name,
        "kind": member.source.kind,
        "in_cache": True,
        "status": member.status(),
        "size_bytes": member.size_bytes,
        "requests": member.num_requests,
        "waiting": len(member.waiters),
        "expires_in_s": member.expires_in_s,
        "context_length": None if facts is None else facts.context_length,
    }


def parse_named(body: bytes, options: ParseOptions) -> dict[str, Any]:
    """Validate a body that names a model."""
    return validate_known(body, NAMED, options)[0]


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    status = reply_schema(value={"enum": ["unloaded", "loading", "loaded", "sleeping", "failed"]})
    entry = reply_schema(id=TEXT, object={"const": "model"}, status=status)
    return {
        "NamedModel": table_schema(NAMED, settings.schema_names, is_open=settings.ignore_unknown_fields),
        "RouterModels": reply_schema(object={"const": "list"}, data=array_schema(entry)),
        "Success": reply_schema(success=FLAG),
        "Sleeping": reply_schema(is_sleeping=FLAG),
    }


LOAD = Operation(summary="Load a model", request="NamedModel", reply="Success")
SLEEP = Operation(summary="Let all models sleep (vLLM)", reply="Sleeping")
DIALECT = Dialect(
    prefixes=("/models", "/sleep", "/wake_up", "/is_sleeping"),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OpenAIError",
    parsers={"model_verb": (parse_named, dict[str, Any])},
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("GET", "/models", Operation(summary="The models and their states (llama-server)", reply="RouterModels")),
        Route("POST", "/models/load", LOAD, needs_pool=True),
        Route("POST", "/models/unload", replace(LOAD, summary="Unload a model"), needs_pool=True),
        Route("POST", "/sleep", SLEEP, needs_pool=True),
        Route("POST", "/wake_up", replace(SLEEP, summary="Wake the models that sleep (vLLM)"), needs_pool=True),
        Route("GET", "/is_sleeping", replace(SLEEP, summary="Whether all models sleep (vLLM)"), needs_pool=True),
    ),
)
