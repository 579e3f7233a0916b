"""Ollama's routes for the version and the models, and those that change them: pull, create, copy, delete. Only a worker
with --models-dir has the latter, for clients with its key, or on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from ...errors import NotFoundError, WorkerError
from ..bodies import OPTION_NAMES, ModelDefaults
from ..dialect import (
    Call,
    Dialect,
    Front,
    Handler,
    Member,
    ModelFacts,
    ModelStore,
    Operation,
    Route,
    TextModel,
    require_store,
)
from ..json_schema import COUNT, TEXT, Schema, array_schema, reply_schema
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
    tagged_name,
    unsupported,
)
from ..settings import ServerSettings
from ..sse import EventStream, encode_json
from .ollama import TIME, error_body, timestamp

VERSION = "0.14.0"  # of Ollama, whose API this is: clients compare it with the one that they need
FOREVER = "9999-12-31T23:59:59Z"
SHOW: dict[str, Field] = {
    "model": Field(Text()),
    "name": Field(Text()),  # the same, as older clients call it
    "verbose": Field(Boolean(), False),  # without effect
}


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
    """The routes about the models, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker

    def table(self) -> dict[str, Handler]:
        reading = {"/api/version": self.version, "/api/tags": self.tags, "/api/ps": self.ps, "/api/show": self.show}
        changing = {"/api/pull": self.pull, "/api/create": self.create, "/api/copy": self.copy}
        return {**reading, **changing, "/api/delete": self.delete, "/api/push": self.push}

    async def version(self, _: Call) -> dict[str, Any]:
        return {"version": VERSION}

    async def tags(self, _: Call) -> dict[str, Any]:
        self._worker.require_ready()
        await self._worker.refresh()
        return {"models": [entry for member in self._worker.pool.members for entry in _entries(member)]}

    async def ps(self, _: Call) -> dict[str, Any]:
        self._worker.require_ready()
        members = self._worker.pool.residents
        return {"models": [_running(member, entry) for member in members for entry in _entries(member)]}

    async def show(self, call: Call) -> dict[str, Any]:
        """Describe a model."""
        values: dict[str, Any] = await self._worker.parse("ollama_show", await call.body())
        member = await self._worker.find(values["model"] or values["name"], *KINDS)
        source, facts = member.source, member.source.facts
        if facts is None:
            raise source.error
        if source.kind != "chat":
            shown = _shown(facts, facts.context_length, ["embedding"] if source.kind == "embedding" else [])
            if member.service is not None and member.state == "loaded":
                shown["model_info"][f"{facts.architecture}.embedding_length"] = member.service.engine.info.output_dim
            return shown
        if source.text is not None:
            return await self._shown_chat(facts, source.text)
        opened: TextModel = await asyncio.to_thread(source.open_text)
        try:
            return await self._shown_chat(facts, opened)
        finally:
            opened.close()

    async def _shown_chat(self, facts: ModelFacts, model: TextModel) -> dict[str, Any]:
        capabilities, template = await self._worker.offload.run(0, lambda: describe_chat(model, facts))
        defaults = model.sampling_defaults.values | {"num_ctx": model.max_context}
        stops = [("stop", f'"{stop}"') for stop in defaults.pop("stop", ())]
        names = {own: name for name, own in OPTION_NAMES.items()}
        parameters = "\n".join(f"{names.get(name, name):<30} {value}" for name, value in (*defaults.items(), *stops))
        shown = _shown(facts, model.max_context, capabilities)
        shown["model_info"][f"{facts.architecture}.vocab_size"] = model.vocab_size
        shown |= {"parameters": parameters, "template": template, "messages": model.first_messages}
        return shown if model.system is None else shown | {"system": model.system}

    async def _read(self, call: Call) -> tuple[ModelStore, dict[str, Any]]:
        """Return the store and the validated body; raise unless the client may change the models."""
        store = require_store(self._worker, call)
        values: dict[str, Any] = await self._worker.parse(call.path, await call.body())
        if "name" in values:
            values["model"] = values["model"] or values["name"]
            require(values["model"] is not None, "model", "required", "model is required")
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


def _entries(member: Member) -> list[dict[str, Any]]:
    """Return the entries of a model in lists, one for each name; none if its files cannot be used."""
    if (facts := member.source.facts) is None:
        return []
    identity = f"{facts.path} {facts.architecture} {facts.quant} {facts.parameters} {facts.weights_bytes}"
    entry = {
        "modified_at": timestamp(facts.modified_at),
        "size": facts.weights_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(facts),
        "status": member.state,
    }
    names = map(tagged_name, member.source.names[: member.source.num_listed])
    return [{"name": name, "model": name, **entry} for name in names]


def _running(member: Member, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a model that takes memory, with how much and for how long."""
    seconds, context = member.expires_in_s, member.context_length
    return entry | {
        "expires_at": FOREVER if seconds is None else timestamp(time.time() + seconds),
        "size": member.size_bytes,
        "size_vram": sum(row.bytes for row in member.rows if row.memory == "device"),
        "context_length": context,
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if facts.path.endswith(".gguf") else "safetensors",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": human_parameters(facts.parameters),
        "quantization_level": facts.quant,
    }


def _shown(facts: ModelFacts, context: int, capabilities: list[str]) -> dict[str, Any]:
    return {
        "modelfile": "",
        "license": "",
        "modified_at": timestamp(facts.modified_at),
        "parameters": "",
        "template": "",
        "details": _details(facts),
        "capabilities": capabilities,
        "model_info": {
            "general.architecture": facts.architecture,
            "general.parameter_count": facts.parameters,
            f"{facts.architecture}.context_length": context,
        },
    }


def human_parameters(count: int) -> str:
    """Return a number of parameters as in the name of a model, such as 1.7B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def describe_chat(model: TextModel, facts: ModelFacts) -> tuple[list[str], str]:
    """Return the capabilities of a model, and its chat template."""
    if not model.has_chat_template:
        return ["completion"], ""
    chat = model.chat_format
    tools, thinking = ["tools"] * chat.has_native_tools, ["thinking"] * chat.has_reasoning
    return ["completion", *["vision"] * facts.takes_images, *tools, *thinking], model.chat_template.source


DETAILS = reply_schema(
    format=TEXT, family=TEXT, families=array_schema(TEXT), parameter_size=TEXT, quantization_level=TEXT
)
LISTED: dict[str, Schema] = {
    "name": TEXT,
    "model": TEXT,
    "modified_at": TIME,
    "size": COUNT,
    "digest": TEXT,
    "details": DETAILS,
}


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    running = reply_schema(**LISTED, expires_at=TIME, size_vram=COUNT, context_length=COUNT)
    is_open = settings.ignore_unknown_fields
    changing = {f"Ollama{verb}Request": table_schema(table, is_open=is_open) for verb, table in BODIES.items()}
    return {
        **changing,
        "OllamaStatus": reply_schema(status=TEXT),
        "OllamaShowRequest": table_schema(SHOW, settings.schema_names, is_open=is_open),
        "OllamaVersion": reply_schema(version=TEXT),
        "OllamaModels": reply_schema(models=array_schema(reply_schema(**LISTED))),
        "OllamaRunningModels": reply_schema(models=array_schema(running)),
        "OllamaModel": reply_schema(
            template=TEXT,
            parameters=TEXT,
            details=DETAILS,
            model_info={"type": "object"},
            capabilities=array_schema(TEXT),
        ),
    }


def _operation(summary: str, name: str, event: str | None = None) -> Operation:
    return Operation(summary=summary, request=f"Ollama{name}Request", reply=event or "Any", event=event)


DIALECT = Dialect(
    prefixes=("/api",),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OllamaError",
    takes_any_content_type=True,
    parsers={
        "ollama_show": table_parser(SHOW),
        **{f"/api/{verb}": table_parser(table) for verb, table in BODIES.items()},
    },
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("GET", "/api/version", Operation(summary="The version of Ollama's API", reply="OllamaVersion")),
        Route("GET", "/api/tags", Operation(summary="The served models (Ollama)", reply="OllamaModels")),
        Route("GET", "/api/ps", Operation(summary="The loaded models (Ollama)", reply="OllamaRunningModels")),
        Route(
            "POST",
            "/api/show",
            Operation(summary="A description of a model (Ollama)", request="OllamaShowRequest", reply="OllamaModel"),
        ),
        Route("POST", "/api/pull", _operation("Fetch a model of the hub (Ollama)", "pull", "OllamaStatus")),
        Route("POST", "/api/create", _operation("A model with other defaults (Ollama)", "create", "OllamaStatus")),
        Route("POST", "/api/copy", _operation("Copy a model (Ollama)", "copy")),
        Route("DELETE", "/api/delete", _operation("Remove a model (Ollama)", "delete")),
        Route("POST", "/api/push", Operation(summary="Refused", reply="OllamaError", status=404)),
    ),
)
