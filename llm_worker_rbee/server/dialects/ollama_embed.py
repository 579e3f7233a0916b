"""Ollama's embeddings: `/api/embed`, and `/api/embeddings` of older clients."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ..bodies import DIMENSIONS, MAX_INPUTS, EmbedRequest, Inputs
from ..dialect import Call, Dialect, Front, Operation, PoolingService, Route
from ..json_schema import COUNT, NUMBER, TEXT, Schema, array_schema, reply_schema
from ..schema import (
    AnyObject,
    Boolean,
    Field,
    FieldType,
    ParseOptions,
    Text,
    ValidationIssue,
    table_schema,
    type_name,
    validate_known,
)
from ..settings import ServerSettings
from .ollama import ANY_NUMBER, SECOND, Either, error_body, read_keep_alive

EMBED_PATH, LEGACY_PATH = "/api/embed", "/api/embeddings"


class OllamaInput(FieldType):
    """A string, or strings; without any, the reply only says that the model is loaded."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list):
            return ValidationIssue(name, "type", f"{name} must be a string or strings, not {type_name(value)}")
        if len(texts) > MAX_INPUTS:
            return ValidationIssue(name, "length", f"{name} has {len(texts)} items: at most {MAX_INPUTS} are accepted")
        issues = (Text().validate(f"{name}[{i}]", text) for i, text in enumerate(texts))
        return next((issue for issue in issues if issue is not None), None)

    def json_schema(self) -> Schema:
        return {"anyOf": [TEXT, {**array_schema(TEXT), "maxItems": MAX_INPUTS}]}

    def coerce(self, value: Any) -> list[str]:
        return [value] * bool(value) if isinstance(value, str) else value


SHARED: dict[str, Field] = {
    "model": Field(Text()),
    "options": Field(AnyObject()),
    "keep_alive": Field(Either((ANY_NUMBER, Text()), "a duration")),
}
EMBED: dict[str, Field] = {
    **SHARED,
    "input": Field(OllamaInput(), (), is_secret=True),
    "truncate": Field(Boolean(), True),
    "dimensions": DIMENSIONS,
}
LEGACY: dict[str, Field] = {**SHARED, "prompt": Field(Text(), "", is_secret=True)}


def parse_embed(body: bytes, options: ParseOptions) -> EmbedRequest:
    """Validate the body of `/api/embed`."""
    values, ignored = validate_known(body, EMBED, options)
    ignored += ["options"] if values["options"] else []
    return EmbedRequest(
        inputs=Inputs(list(values["input"])),
        keep_alive=read_keep_alive(values, ignored, options),
        model=values["model"],
        dimensions=values["dimensions"],
        truncate=values["truncate"],
        ignored=ignored,
    )


def parse_legacy(body: bytes, options: ParseOptions) -> EmbedRequest:
    """Validate the body of `/api/embeddings`."""
    values, ignored = validate_known(body, LEGACY, options)
    ignored += ["options"] if values["options"] else []  # an embedding has none
    keep_alive = read_keep_alive(values, ignored, options)
    texts = [values["prompt"]] * bool(values["prompt"])
    return EmbedRequest(
        inputs=Inputs(texts), model=values["model"], truncate=True, keep_alive=keep_alive, ignored=ignored
    )


class Handlers:
    """The routes, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker

    async def embed(self, call: Call) -> Any:
        start = time.perf_counter()
        request, service, pooled = await self._embed(call, EMBED_PATH)
        last = {
            "total_duration": int((time.perf_counter() - start) * SECOND),
            "load_duration": 0,
            "prompt_eval_count": 0 if pooled is None else pooled.num_tokens,
        }
        if pooled is None:
            return {"model": service.name, "embeddings": [], **last}
        return service.rows_response(
            pooled.rows,
            b'{"model":' + msgspec.json.encode(service.name) + b',"embeddings":[',
            lambda index, row: row,
            b"]," + msgspec.json.encode(last)[1:],
            headers=request.notice_headers(),
        )

    async def embed_one(self, call: Call) -> Any:
        request, service, pooled = await self._embed(call, LEGACY_PATH)
        if pooled is None:
            return {"embedding": []}
        return service.rows_response(
            pooled.rows, b'{"embedding":', lambda index, row: row, b"}", headers=request.notice_headers()
        )

    async def _embed(self, call: Call, parser: str) -> tuple[EmbedRequest, PoolingService, Any]:
        body = await call.body()
        async with call.until_disconnect():
            request: EmbedRequest = await self._worker.parse_pooling(parser, body)
            async with self._worker.use_pooling(request.model, "embedding", keep_alive=request.keep_alive) as service:
                if not request.inputs.texts:
                    return request, service, None
                return request, service, await service.embed(request, self._worker.pooling_offload)


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open, names = settings.ignore_unknown_fields, settings.pooling_names
    return {
        "OllamaEmbedRequest": table_schema(EMBED, names, is_open=is_open),
        "OllamaLegacyEmbedRequest": table_schema(LEGACY, names, is_open=is_open),
        "OllamaEmbeddings": reply_schema(
            model=TEXT,
            embeddings=array_schema(array_schema(NUMBER)),
            total_duration=COUNT,
            load_duration=COUNT,
            prompt_eval_count=COUNT,
        ),
        "OllamaLegacyEmbedding": reply_schema(embedding=array_schema(NUMBER)),
    }


DIALECT = Dialect(
    prefixes=(EMBED_PATH, LEGACY_PATH), error_body=error_body, schemas=_schemas, error_schema="OllamaError",
    takes_any_content_type=True, has_large_bodies=True,
    parsers={EMBED_PATH: (parse_embed, EmbedRequest), LEGACY_PATH: (parse_legacy, EmbedRequest)},
    make_handlers=lambda worker: {EMBED_PATH: Handlers(worker).embed, LEGACY_PATH: Handlers(worker).embed_one},
    routes=(
        Route("POST", EMBED_PATH, Operation(
            summary="Embeddings of texts (Ollama)", request="OllamaEmbedRequest", reply="OllamaEmbeddings")),
        Route("POST", LEGACY_PATH, Operation(
            summary="The embedding of a text (older clients of Ollama)", request="OllamaLegacyEmbedRequest",
            reply="OllamaLegacyEmbedding")),
    ),
)  # fmt: skip
