"""Ollama's routes for the version and the models."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any, cast

from ...token_engine.protocol import ModelInfo, PoolingInfo
from ..bodies import OPTION_NAMES
from ..dialect import (
    Call,
    Dialect,
    Front,
    Handler,
    Member,
    ModelFacts,
    Operation,
    PoolingService,
    PoolWorker,
    Route,
    TextModel,
    Worker,
)
from ..json_schema import COUNT, TEXT, Schema, array_schema, reply_schema
from ..schema import Boolean, Field, Text, table_parser, table_schema, tagged_name
from ..settings import ServerSettings
from .ollama import TIME, error_body, timestamp

Facts = ModelInfo | PoolingInfo | ModelFacts
VERSION = "0.14.0"  # of Ollama, whose API this is: clients compare it with the one that they need
FOREVER = "9999-12-31T23:59:59Z"
SHOW: dict[str, Field] = {
    "model": Field(Text()),
    "name": Field(Text()),  # the same, as older clients call it
    "verbose": Field(Boolean(), False),  # without effect
}


class Handlers:
    """The routes about the models, for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._started_at, self._offload = worker.started_at, worker.offload

    def table(self) -> dict[str, Handler]:
        return {"/api/version": self.version, "/api/tags": self.tags, "/api/ps": self.ps, "/api/show": self.show}

    async def version(self, _: Call) -> dict[str, Any]:
        return {"version": VERSION}

    async def tags(self, _: Call) -> dict[str, Any]:
        return {"models": [self._model(name, info) for name, info in self._served()]}

    async def ps(self, _: Call) -> dict[str, Any]:
        return {"models": [self._model(name, info) | self._running(info) for name, info in self._served()]}

    def _served(self) -> list[tuple[str, ModelInfo | PoolingInfo]]:
        """Return name and description of each model: the chat model by its names, then pooling models."""
        self._worker.require_ready()
        pooling = [(tagged_name(service.name), service.engine.info) for service in self._worker.pooling.loaded]
        return [
            *((tagged_name(name), self._worker.engine.info) for name in self._worker.settings.listed_names),
            *pooling,
        ]

    def _running(self, info: ModelInfo | PoolingInfo) -> dict[str, Any]:
        size, context = info.weights_bytes, self._worker.model.max_context
        if isinstance(info, PoolingInfo):
            context = info.max_length
        else:
            size += info.kv_cache_bytes
        return {
            "expires_at": FOREVER,
            "size": size,
            "size_vram": size if info.backend == "cuda" else 0,
            "context_length": context,
        }

    def _model(self, name: str, info: Facts) -> dict[str, Any]:
        identity = f"{info.path} {info.architecture} {info.quant} {info.parameters} {info.weights_bytes}"
        return {
            "name": name,
            "model": name,
            "modified_at": timestamp(self._started_at),
            "size": info.weights_bytes,
            "digest": hashlib.sha256(identity.encode()).hexdigest(),
            "details": self._details(info),
        }

    def _details(self, info: Facts) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf" if info.path.endswith(".gguf") else "safetensors",
            "family": info.architecture,
            "families": [info.architecture],
            "parameter_size": human_parameters(info.parameters),
            "quantization_level": info.quant,
        }

    async def show(self, call: Call) -> dict[str, Any]:
        """Describe a model."""
        values: dict[str, Any] = await self._worker.parse("ollama_show", await call.body())
        name = values["model"] or values["name"]
        if name is not None and (service := self._worker.pooling.named(name)) is not None:
            self._worker.require_ready()
            service.require_loaded()
            return self._shown_pooling(service)
        self._worker.require_model(name)
        return await self._shown_chat(self._worker.engine.info, self._worker.model)

    async def _shown_chat(self, info: Facts, model: TextModel) -> dict[str, Any]:
        capabilities, template = await self._offload.run(0, lambda: describe_chat(model))
        defaults = model.sampling_defaults.values | {"num_ctx": model.max_context}
        stops = [("stop", f'"{stop}"') for stop in defaults.pop("stop", ())]
        names = {own: name for name, own in OPTION_NAMES.items()}
        parameters = "\n".join(f"{names.get(name, name):<30} {value}" for name, value in (*defaults.items(), *stops))
        chat = {"parameters": parameters, "template": template, "messages": model.first_messages}
        chat |= {} if model.system is None else {"system": model.system}
        return self._shown(info, model.max_context, model.vocab_size, capabilities) | chat

    def _shown_pooling(self, service: PoolingService) -> dict[str, Any]:
        info = service.engine.info
        capabilities = ["embedding"] if service.kind == "embedding" else []
        shown = self._shown(info, info.max_length, info.vocab_size, capabilities)
        shown["model_info"][f"{info.architecture}.embedding_length"] = info.output_dim
        return shown

    def _shown(self, info: Facts, context: int, vocab_size: int | None, capabilities: list[str]) -> dict[str, Any]:
        model_info = {
            "general.architecture": info.architecture,
            "general.parameter_count": info.parameters,
            f"{info.architecture}.context_length": context,
        }
        if vocab_size is not None:
            model_info[f"{info.architecture}.vocab_size"] = vocab_size
        return {
            "modelfile": "",
            "license": "",
            "modified_at": timestamp(self._started_at),
            "parameters": "",
            "template": "",
            "details": self._details(info),
            "capabilities": capabilities,
            "model_info": model_info,
        }


class PoolHandlers(Handlers):
    """The same for the models of a pool, whether they are loaded or not."""

    def __init__(self, worker: PoolWorker) -> None:
        self._models = worker
        self._started_at, self._offload = worker.started_at, worker.offload

    async def tags(self, _: Call) -> dict[str, Any]:
        self._models.require_ready()
        await self._models.refresh()
        return {"models": [self._member(member) for member in self._models.pool.members if member.source.facts]}

    async def ps(self, _: Call) -> dict[str, Any]:
        self._models.require_ready()
        return {"models": [self._resident(member) for member in self._models.pool.residents]}

    def _member(self, member: Member) -> dict[str, Any]:
        facts = member.source.require_facts()
        listed = self._model(tagged_name(member.name), facts)
        return listed | {"modified_at": timestamp(facts.modified_at), "status": member.state}

    def _resident(self, member: Member) -> dict[str, Any]:
        """Describe a model that takes memory."""
        seconds, context = member.expires_in_s, member.source.require_facts().context_length
        if member.service is not None:
            context = member.service.context_length
        return self._member(member) | {
            "expires_at": FOREVER if seconds is None else timestamp(time.time() + seconds),
            "size": member.size_bytes,
            "size_vram": 0,
            "context_length": context,
        }

    async def show(self, call: Call) -> dict[str, Any]:
        values: dict[str, Any] = await self._models.parse("ollama_show", await call.body())
        member = await self._models.find(values["model"] or values["name"], "chat", "embedding", "rerank")
        facts, text = member.source.require_facts(), member.source.text
        if member.source.kind != "chat":
            capabilities = ["embedding"] if member.source.kind == "embedding" else []
            return self._shown(facts, facts.context_length, None, capabilities)
        if text is not None:
            return await self._shown_chat(facts, text)
        opened: TextModel = await asyncio.to_thread(member.source.open_text)
        try:
            return await self._shown_chat(facts, opened)
        finally:
            opened.close()


def _make_handlers(worker: Front) -> dict[str, Handler]:
    return (Handlers(worker.chat) if worker.chat is not None else PoolHandlers(cast(PoolWorker, worker))).table()


def human_parameters(count: int) -> str:
    """Return a number of parameters as in the name of a model, such as 1.7B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def describe_chat(model: TextModel) -> tuple[list[str], str]:
    """Return the capabilities of a model, and its chat template."""
    if not model.has_chat_template:
        return ["completion"], ""
    chat = model.chat_format
    tools, thinking = ["tools"] * chat.has_native_tools, ["thinking"] * chat.has_reasoning
    return ["completion", *["vision"] * (model.vision is not None), *tools, *thinking], model.chat_template.source


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
    return {
        "OllamaShowRequest": table_schema(SHOW, settings.schema_names, is_open=settings.ignore_unknown_fields),
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


DIALECT = Dialect(
    prefixes=("/api",),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OllamaError",
    takes_any_content_type=True,
    parsers={"ollama_show": table_parser(SHOW)},
    make_handlers=_make_handlers,
    routes=(
        Route("GET", "/api/version", Operation(summary="The version of Ollama's API", reply="OllamaVersion")),
        Route("GET", "/api/tags", Operation(summary="The served models (Ollama)", reply="OllamaModels")),
        Route("GET", "/api/ps", Operation(summary="The loaded models (Ollama)", reply="OllamaRunningModels")),
        Route(
            "POST",
            "/api/show",
            Operation(summary="A description of a model (Ollama)", request="OllamaShowRequest", reply="OllamaModel"),
        ),
    ),
)
