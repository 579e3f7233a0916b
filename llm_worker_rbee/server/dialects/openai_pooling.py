"""The routes of pooling models: OpenAI's `/v1/embeddings`, Jina's and Cohere's ranking, `/v1/rerank`, and vLLM's
scores, `/v1/score`; errors are OpenAI's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec

from ..bodies import DIMENSIONS, MAX_INPUTS, EmbedRequest, Inputs, RankRequest
from ..dialect import Call, Dialect, Front, Operation, PoolingService, Route
from ..json_schema import COUNT, NUMBER, TEXT, Schema, array_schema, reply_schema, with_field, with_values
from ..object_fields import ListOf, ObjectOf
from ..schema import (
    Boolean,
    Enum,
    Field,
    FieldType,
    ParseOptions,
    Text,
    TokenIds,
    ValidationIssue,
    are_token_ids,
    integer,
    require,
    table_schema,
    type_name,
    validate_known,
)
from ..settings import ServerSettings
from .openai import SCHEMAS, error_body

PATH = "/v1/embeddings"
RERANK_PATHS, SCORE_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank"), ("/v1/score", "/score")
INPUT_TYPES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}
TRUNCATE: dict[str, Field] = {
    "truncate": Field(Boolean(), False),
    "truncate_prompt_tokens": Field(Enum((-1,), is_supported=False)),  # of vLLM; -1 is the model's maximum
}


class EmbeddingInput(FieldType):
    """A string, strings, token ids, or lists of token ids; none of them empty, and at most `MAX_INPUTS`."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if isinstance(value, str):
            return Text(1).validate(name, value)
        if not isinstance(value, list):
            message = f"{name} must be a string, strings, token ids or lists of token ids, not {type_name(value)}"
            return ValidationIssue(name, "type", message)
        if not value:
            return ValidationIssue(name, "length", f"{name} is an empty list")
        if not isinstance(value[0], str | list):
            return TokenIds().validate(name, value)
        if len(value) > MAX_INPUTS:
            message = f"{name} has {len(value)} items: at most {MAX_INPUTS} are accepted"
            return ValidationIssue(name, "length", message)
        return next((issue for i, x in enumerate(value) if (issue := self._validate_item(name, i, x, value))), None)

    def _validate_item(self, name: str, i: int, x: Any, value: list[Any]) -> ValidationIssue | None:
        place = f"{name}[{i}]"
        if type(x) is not type(value[0]):
            return ValidationIssue(place, "type", f"{place} is {type_name(x)}, and {name}[0] is not: do not mix them")
        if not x:
            return ValidationIssue(place, "length", f"{place} is empty")
        if isinstance(x, list) and not are_token_ids(x):
            return ValidationIssue(place, "type", f"{place} must be a list of token ids")
        return None

    def json_schema(self) -> Schema:
        ids: Schema = {**TokenIds().json_schema(), "minItems": 1}
        text = Text(1).json_schema()
        lists = ({**array_schema(kind, 1), "maxItems": MAX_INPUTS} for kind in (text, ids))
        return {"anyOf": [text, ids, *lists]}


class Documents(FieldType):
    """Strings, or objects with a `text`."""

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        if not isinstance(value, list):
            return ValidationIssue(name, "type", f"{name} must be a list, not {type_name(value)}")
        if not 1 <= len(value) <= MAX_INPUTS:
            message = f"{name} has {len(value)} items: it must have 1 to {MAX_INPUTS}"
            return ValidationIssue(name, "length", message)
        for i, item in enumerate(value):
            text = item.get("text") if isinstance(item, dict) else item
            if (issue := Text(1).validate(f"{name}[{i}]", text)) is not None:
                return issue
        return None

    def json_schema(self) -> Schema:
        text = Text(1).json_schema()
        nested = ObjectOf({"text": Field(Text(1), required=True)}, is_open=True).json_schema()
        return {**array_schema({"anyOf": [text, nested]}, 1), "maxItems": MAX_INPUTS}

    def coerce(self, value: Any) -> list[str]:
        return [item["text"] if isinstance(item, dict) else item for item in value]


class Texts(FieldType):
    """A string, or strings."""

    _items = ListOf(Text(1), 1, MAX_INPUTS)

    def validate(self, name: str, value: Any) -> ValidationIssue | None:
        return Text(1).validate(name, value) if isinstance(value, str) else self._items.validate(name, value)

    def json_schema(self) -> Schema:
        return {"anyOf": [Text(1).json_schema(), self._items.json_schema()]}

    def coerce(self, value: Any) -> list[str]:
        return [value] if isinstance(value, str) else value


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
RERANK: dict[str, Field] = {
    "query": Field(Text(1), required=True, is_secret=True),
    "documents": Field(Documents(), required=True, is_secret=True),
    "model": Field(Text()),
    "top_n": Field(integer(1)),
    "return_documents": Field(Boolean(), False),
    "user": Field(Text()),  # without effect
    **TRUNCATE,
}
SCORE: dict[str, Field] = {
    "text_1": Field(Texts(), is_secret=True),
    "text_2": Field(Texts(), is_secret=True),
    "queries": Field(Texts(), is_secret=True),  # the same, as newer clients call it
    "documents": Field(Texts(), is_secret=True),
    "model": Field(Text()),
    "user": Field(Text()),  # without effect
    **TRUNCATE,
}


def truncates(values: dict[str, Any]) -> bool:
    """Return whether to truncate inputs that are too long."""
    return bool(values["truncate"] or values["truncate_prompt_tokens"] is not None)


def parse_embeddings(body: bytes, options: ParseOptions) -> EmbedRequest:
    """Validate the body of `/v1/embeddings`."""
    values, ignored = validate_known(body, EMBEDDINGS, options)
    require(
        values["prompt_name"] is None or values["input_type"] is None,
        "input_type",
        "conflict",
        "prompt_name and input_type exclude each other: give one of them",
    )
    return EmbedRequest(
        inputs=Inputs.of(values["input"]),
        model=values["model"],
        dimensions=values["dimensions"],
        prompt_name=values["prompt_name"],
        input_type=INPUT_TYPES.get(values["input_type"]),
        truncate=truncates(values),
        is_base64=values["encoding_format"] == "base64",
        ignored=ignored,
    )


def _item(index: int, row: bytes) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, row)


def parse_rerank(body: bytes, options: ParseOptions) -> RankRequest:
    """Validate the body of `/v1/rerank`."""
    values, ignored = validate_known(body, RERANK, options)
    return RankRequest(
        queries=[values["query"]],
        documents=values["documents"],
        model=values["model"],
        top_n=values["top_n"],
        returns_documents=values["return_documents"],
        truncate=truncates(values),
        ignored=ignored,
    )


def parse_score(body: bytes, options: ParseOptions) -> RankRequest:
    """Validate the body of `/v1/score`."""
    values, ignored = validate_known(body, SCORE, options)
    names = ("text_1", "text_2") if values["text_1"] is not None else ("queries", "documents")
    others = ("queries", "documents") if names[0] == "text_1" else ("text_1", "text_2")
    require(
        all(values[name] is not None for name in names) and all(values[name] is None for name in others),
        names[0],
        "required",
        "give text_1 and text_2, or queries and documents",
    )
    first, second = (values[name] for name in names)
    require(
        len(first) in (1, len(second)),
        names[1],
        "length",
        f"{names[0]} has {len(first)} items and {names[1]} {len(second)}: give as many, or one of {names[0]}",
    )
    return RankRequest(
        queries=first, documents=second, model=values["model"], truncate=truncates(values), ignored=ignored
    )


class Handlers:
    """The routes, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker

    async def embed(self, call: Call) -> Any:
        body = await call.body()
        async with call.until_disconnect():
            request: EmbedRequest = await self._worker.parse_pooling(PATH, body)
            async with self._worker.use_pooling(request.model, "embedding") as service:
                pooled = await service.embed(request, self._worker.pooling_offload)
        usage = msgspec.json.encode({"prompt_tokens": pooled.num_tokens, "total_tokens": pooled.num_tokens})
        name = msgspec.json.encode(service.name)
        return service.rows_response(
            pooled.rows,
            b'{"object":"list","data":[',
            _item,
            b'],"model":' + name + b',"usage":' + usage + b"}",
            is_base64=request.is_base64,
            headers=request.notice_headers(),
        )

    async def rerank(self, call: Call) -> Any:
        request, service, scores, usage = await self._score(call, RERANK_PATHS[0], "rerank")
        ranked = service.ranking(scores, request.top_n)
        results: Iterable[dict[str, Any]] = ({"index": index, "relevance_score": score} for index, score in ranked)
        head, last = {"id": f"rerank-{uuid4().hex}", "model": service.name}, {"usage": usage}
        if not request.returns_documents:
            return {**head, "results": list(results), **last}, 200, request.notice_headers()
        documents = request.documents
        return service.list_response(
            msgspec.json.encode(head)[:-1] + b',"results":[',
            (result | {"document": {"text": documents[result["index"]]}} for result in results),
            b"]," + msgspec.json.encode(last)[1:],
            request.notice_headers(),
        )

    async def score(self, call: Call) -> Any:
        request, service, scores, usage = await self._score(call, SCORE_PATHS[0], "rerank", "embedding")
        ranked = sorted(service.ranking(scores, None))
        data = [{"index": index, "object": "score", "score": score} for index, score in ranked]
        head = {"id": f"score-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": service.name}
        return {**head, "data": data, "usage": usage}, 200, request.notice_headers()

    async def _score(
        self, call: Call, parser: str, *kinds: Any
    ) -> tuple[RankRequest, PoolingService, Any, dict[str, int]]:
        body = await call.body()
        async with call.until_disconnect():
            request: RankRequest = await self._worker.parse_pooling(parser, body)
            async with self._worker.use_pooling(request.model, *kinds) as service:
                pooled = await service.score(request, self._worker.pooling_offload)
        usage = {"prompt_tokens": pooled.num_tokens, "total_tokens": pooled.num_tokens}
        return request, service, pooled.rows, usage

    def table(self) -> dict[str, Any]:
        ranking = dict.fromkeys(RERANK_PATHS, self.rerank) | dict.fromkeys(SCORE_PATHS, self.score)
        return {PATH: self.embed, **ranking}


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open, names = settings.ignore_unknown_fields, settings.pooling_names
    usage = reply_schema(prompt_tokens=COUNT, total_tokens=COUNT)
    first, second = ("text_1", "text_2"), ("queries", "documents")
    pairs = [
        {"allOf": [*map(with_field, pair), with_values(**{name: {"const": None} for name in other})]}
        for pair, other in ((first, second), (second, first))
    ]
    values: Schema = {"anyOf": [array_schema({"type": "number"}), TEXT]}
    item = reply_schema(object={"const": "embedding"}, index=COUNT, embedding=values)
    result = reply_schema(index=COUNT, relevance_score=NUMBER)
    score = reply_schema(index=COUNT, object={"const": "score"}, score=NUMBER)
    return {
        **SCHEMAS,
        "EmbeddingsRequest": {
            **table_schema(EMBEDDINGS, names, is_open=is_open),
            "anyOf": [with_values(prompt_name={"const": None}), with_values(input_type={"const": None})],
        },
        "Embeddings": reply_schema(object={"const": "list"}, data=array_schema(item), model=TEXT, usage=usage),
        "RerankRequest": table_schema(RERANK, names, is_open=is_open),
        "Ranking": reply_schema(id=TEXT, model=TEXT, results=array_schema(result), usage=usage),
        "ScoreRequest": {**table_schema(SCORE, names, is_open=is_open), "oneOf": pairs},
        "Scores": reply_schema(
            id=TEXT, object={"const": "list"}, created=COUNT, model=TEXT, data=array_schema(score), usage=usage
        ),
    }


EMBEDDING = Operation(summary="Embeddings of texts or token ids", request="EmbeddingsRequest", reply="Embeddings")
RERANKING = Operation(summary="Documents by their relevance to a query", request="RerankRequest", reply="Ranking")
SCORING = Operation(summary="Scores of pairs of texts", request="ScoreRequest", reply="Scores")
DIALECT = Dialect(
    prefixes=(PATH, *RERANK_PATHS, *SCORE_PATHS),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OpenAIError",
    has_large_bodies=True,
    parsers={
        PATH: (parse_embeddings, EmbedRequest),
        RERANK_PATHS[0]: (parse_rerank, RankRequest),
        SCORE_PATHS[0]: (parse_score, RankRequest),
    },
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("POST", PATH, EMBEDDING),
        *(Route("POST", path, RERANKING) for path in RERANK_PATHS),
        *(Route("POST", path, SCORING) for path in SCORE_PATHS),
    ),
)
