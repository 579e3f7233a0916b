"""Ollama's routes that change the models: pull, create, copy, delete. Only a worker with --models-dir has them, for
clients with its key, or on this machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ...errors import NotFoundError, WorkerError
from ..bodies import ModelDefaults
from ..dialect import Call, Dialect, Front, Handler, Member, ModelStore, Operation, Route
from ..json_schema import TEXT, Schema, reply_schema
from ..object_fields import ListOf, ObjectOf
from ..schema import (
    KINDS,
    AnyObject,
    Boolean,
    Field,
    Text,
    require,
    table_parser,
    table_schema,
    unsupported,
)
from ..settings import ServerSettings
from ..sse import EventStream, encode_json
from .ollama import error_body

NO_STORE = "the models of this worker are chosen when it starts (llm-worker-rbee serve --models-dir)"
SUCCESS, NDJSON = {"status": "success"}, {"content-type": "application/x-ndjson"}
MAX_PULL_S = 7 * 24 * 3600.0  # no ping goes between the lines of a stream
NAMED: dict[str, Field] = {"model": Field(Text(1)), "name": Field(Text(1))}  # the same, as older clients call it
# `insecure` has no effect: the environment names the hub.
PULL: dict[str, Field] = {**NAMED, "stream": Field(Boolean(), True), "insecure": Field(Boolean())}
CREATE: dict[str, Field] = {
    **NAMED,
    "from": Field(Text(1)),
    "system": Field(Text()),
    "parameters": Field(AnyObject()),
    "messages": Field(ListOf(ObjectOf({"role": Field(Text(1), required=True), "content": Field(Text())}))),
    "stream": Field(Boolean(), True),
    "template": unsupported(""),  # of Go; the model's own is Jinja
    "modelfile": unsupported(""),
    "license": unsupported("", []),
    **dict.fromkeys(("quantize", "quantization"), unsupported("")),
    **dict.fromkeys(("files", "adapters"), unsupported({})),
}
COPY: dict[str, Field] = {"source": Field(Text(1), required=True), "destination": Field(Text(1), required=True)}
BODIES = {"pull": PULL, "create": CREATE, "copy": COPY, "delete": NAMED}


class Handlers:
    """The routes, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker

    def table(self) -> dict[str, Handler]:
        changing = {"/api/pull": self.pull, "/api/create": self.create, "/api/copy": self.copy}
        return {**changing, "/api/delete": self.delete, "/api/push": self.push}

    async def _read(self, call: Call) -> tuple[ModelStore, dict[str, Any]]:
        """Return the store and the validated body; raise unless the client may change the models."""
        if (store := self._worker.store) is None:
            raise NotFoundError(f"{call.path} is not supported: {NO_STORE}")
        call.require_trusted(has_key=self._worker.settings.api_key is not None)
        values: dict[str, Any] = await self._worker.parse(call.path, await call.body())
        if "name" in values:
            values["model"] = values["model"] or values["name"]
            require(values["model"] is not None, "model", "required", "model is required")
        self._worker.require_ready()
        return store, values

    async def _find(self, name: str) -> Member:
        return await self._worker.find(name, *KINDS)

    async def pull(self, call: Call) -> Any:
        store, values = await self._read(call)
        pull = store.start_pull(values["model"])
        if values["stream"]:
            return EventStream(_lines(pull.read()), ping_s=MAX_PULL_S, headers=NDJSON, on_end=pull.leave)
        try:
            async with call.until_disconnect():
                async for _ in pull.read():
                    continue
        finally:
            pull.leave()
        return SUCCESS

    async def create(self, call: Call) -> Any:
        """Give a model of the folder another name and other defaults."""
        store, values = await self._read(call)
        require(values["from"] is not None, "from", "required", "from is required: the name of a model that is here")
        defaults = ModelDefaults.of({name: values[name] for name in ("system", "parameters", "messages")})
        await store.create(await self._find(values["from"]), values["model"], defaults)
        return EventStream(_lines(_created()), ping_s=MAX_PULL_S, headers=NDJSON) if values["stream"] else SUCCESS

    async def copy(self, call: Call) -> dict[str, Any]:
        store, values = await self._read(call)
        await store.create(await self._find(values["source"]), values["destination"])
        return {}

    async def delete(self, call: Call) -> dict[str, Any]:
        store, values = await self._read(call)
        await store.delete(await self._find(values["model"]))
        return {}

    async def push(self, _: Call) -> Any:
        raise NotFoundError("/api/push is not supported: models stay on this machine")


async def _lines(source: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Yield progress as lines of JSON; an error is the last one."""
    try:
        async for progress in source:
            yield encode_json(progress) + b"\n"
    except WorkerError as error:
        yield encode_json(error_body(error)) + b"\n"


async def _created() -> AsyncGenerator[dict[str, Any], None]:
    for status in ("using existing layer", "writing manifest", "success"):
        yield {"status": status}


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open = settings.ignore_unknown_fields
    schemas = {f"Ollama{verb}Request": table_schema(table, is_open=is_open) for verb, table in BODIES.items()}
    return {**schemas, "OllamaStatus": reply_schema(status=TEXT)}


def _operation(summary: str, name: str, event: str | None = None) -> Operation:
    return Operation(summary=summary, request=f"Ollama{name}Request", reply=event or "Any", event=event)


DIALECT = Dialect(
    prefixes=("/api",),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OllamaError",
    takes_any_content_type=True,
    parsers={f"/api/{verb}": table_parser(table) for verb, table in BODIES.items()},
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("POST", "/api/pull", _operation("Fetch a model of the hub (Ollama)", "pull", "OllamaStatus")),
        Route("POST", "/api/create", _operation("A model with other defaults (Ollama)", "create", "OllamaStatus")),
        Route("POST", "/api/copy", _operation("Copy a model (Ollama)", "copy")),
        Route("DELETE", "/api/delete", _operation("Remove a model (Ollama)", "delete")),
        Route("POST", "/api/push", Operation(summary="Refused", reply="OllamaError", status=404)),
    ),
)
