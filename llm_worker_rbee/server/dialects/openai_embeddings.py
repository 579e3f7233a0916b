"""OpenAI's embeddings: `/v1/embeddings`."""

from __future__ import annotations

from typing import Any

import msgspec

from ..dialect import Call, Dialect, Operation, Route, Worker
from ..json_schema import COUNT, TEXT, Schema, array_schema, reply_schema, with_values
from ..pooling_bodies import DIMENSIONS, TRUNCATE, EmbeddingInput, EmbedRequest, Inputs, truncates
from ..schema import Enum, Field, ParseOptions, Text, require, table_schema, validate_known
from ..settings import ServerSettings
from .openai import SCHEMAS, error_body

PATH = "/v1/embeddings"
INPUT_TYPES = {
    "query": "query", "search_query": "query", "document": "document", "passage": "document",
    "search_document": "document",
}  # fmt: skip
EMBEDDINGS: dict[str, Field] = {
    "input": Field(EmbeddingInput(), required=True, is_secret=True),
    "model": Field(Text()),
    "encoding_format": Field(Enum(("float", "base64")), "float"),
    "dimensions": DIMENSIONS,
    "prompt_name": Field(Text()),
    "input_type": Field(Enum(tuple(INPUT_TYPES))),
    "user": Field(Text()),  # without effect
    **TRUNCATE,
}


def parse_embeddings(body: bytes, options: ParseOptions) -> EmbedRequest:
    """Validate the body of `/v1/embeddings`."""
    values, ignored = validate_known(body, EMBEDDINGS, options)
    require(values["prompt_name"] is None or values["input_type"] is None, "input_type", "conflict",
            "prompt_name and input_type exclude each other: give one of them")  # fmt: skip
    return EmbedRequest(
        inputs=Inputs.of(values["input"]), model=values["model"], dimensions=values["dimensions"],
        prompt_name=values["prompt_name"], input_type=INPUT_TYPES.get(values["input_type"]),
        truncate=truncates(values), is_base64=values["encoding_format"] == "base64", ignored=ignored,
    )  # fmt: skip


class Handlers:
    """The route, for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def embed(self, call: Call) -> Any:
        body = await call.body()
        async with call.until_disconnect():
            request: EmbedRequest = await self._worker.parse_pooling(PATH, body)
            service = self._worker.find_pooling(request.model, "embedding")
            pooled = await service.embed(request, self._worker.pooling.offload)
        usage = msgspec.json.encode({"prompt_tokens": pooled.num_tokens, "total_tokens": pooled.num_tokens})
        name = msgspec.json.encode(service.name)
        return self._worker.pooling.rows_response(
            pooled.rows, b'{"object":"list","data":[', _item, b'],"model":' + name + b',"usage":' + usage + b"}",
            is_base64=request.is_base64, headers=request.notice_headers(),
        )  # fmt: skip


def _item(index: int, row: bytes) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, row)


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    values: Schema = {"anyOf": [array_schema({"type": "number"}), TEXT]}
    item = reply_schema(object={"const": "embedding"}, index=COUNT, embedding=values)
    return {
        **SCHEMAS,
        "EmbeddingsRequest": {
            **table_schema(EMBEDDINGS, settings.pooling_names, is_open=settings.ignore_unknown_fields),
            "anyOf": [with_values(prompt_name={"const": None}), with_values(input_type={"const": None})],
        },
        "Embeddings": reply_schema(
            object={"const": "list"}, data=array_schema(item), model=TEXT,
            usage=reply_schema(prompt_tokens=COUNT, total_tokens=COUNT)),
    }  # fmt: skip


DIALECT = Dialect(
    prefixes=(PATH,), error_body=error_body, schemas=_schemas, error_schema="OpenAIError", has_large_bodies=True,
    parsers={PATH: (parse_embeddings, EmbedRequest)},
    make_handlers=lambda worker: {PATH: Handlers(worker).embed},
    routes=(Route("POST", PATH, Operation(
        summary="Embeddings of texts or token ids", request="EmbeddingsRequest", reply="Embeddings")),),
)  # fmt: skip
