"""Ranking as Jina and Cohere have it, `/v1/rerank`, and scores as vLLM has them, `/v1/score`; errors are OpenAI's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec

from ..dialect import Call, Dialect, Operation, Route, Worker
from ..json_schema import COUNT, NUMBER, TEXT, Schema, array_schema, reply_schema, with_field, with_values
from ..pooling_bodies import TRUNCATE, Documents, RankRequest, Texts, parse_pairs, truncates
from ..schema import Boolean, Field, ParseOptions, Text, integer, require, table_schema, validate_known
from ..settings import ServerSettings
from .openai import SCHEMAS, error_body

RERANK_PATHS, SCORE_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank"), ("/v1/score", "/score")
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


def parse_rerank(body: bytes, options: ParseOptions) -> RankRequest:
    """Validate the body of `/v1/rerank`."""
    values, ignored = validate_known(body, RERANK, options)
    return RankRequest(
        queries=[values["query"]], documents=values["documents"], model=values["model"], top_n=values["top_n"],
        returns_documents=values["return_documents"], truncate=truncates(values), ignored=ignored,
    )  # fmt: skip


def parse_score(body: bytes, options: ParseOptions) -> RankRequest:
    """Validate the body of `/v1/score`."""
    values, ignored = validate_known(body, SCORE, options)
    names = ("text_1", "text_2") if values["text_1"] is not None else ("queries", "documents")
    others = ("queries", "documents") if names[0] == "text_1" else ("text_1", "text_2")
    require(all(values[name] is not None for name in names) and all(values[name] is None for name in others),
            names[0], "required", "give text_1 and text_2, or queries and documents")  # fmt: skip
    return parse_pairs(values, ignored, names)


class Handlers:
    """The routes, for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def rerank(self, call: Call) -> Any:
        request, name, scores, usage = await self._score(call, RERANK_PATHS[0], "rerank")
        ranked = self._worker.pooling.ranking(scores, request.top_n)
        results: Iterable[dict[str, Any]] = ({"index": index, "relevance_score": score} for index, score in ranked)
        head, last = {"id": f"rerank-{uuid4().hex}", "model": name}, {"usage": usage}
        if not request.returns_documents:
            return {**head, "results": list(results), **last}, 200, request.notice_headers()
        documents = request.documents
        return self._worker.pooling.list_response(
            msgspec.json.encode(head)[:-1] + b',"results":[',
            (one | {"document": {"text": documents[one["index"]]}} for one in results),
            b"]," + msgspec.json.encode(last)[1:], request.notice_headers(),
        )  # fmt: skip

    async def score(self, call: Call) -> Any:
        request, name, scores, usage = await self._score(call, SCORE_PATHS[0], "rerank", "embedding")
        ranked = sorted(self._worker.pooling.ranking(scores, None))
        data = [{"index": index, "object": "score", "score": score} for index, score in ranked]
        head = {"id": f"score-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": name}
        return {**head, "data": data, "usage": usage}, 200, request.notice_headers()

    async def _score(self, call: Call, parser: str, *kinds: Any) -> tuple[RankRequest, str, Any, dict[str, int]]:
        body = await call.body()
        async with call.until_disconnect():
            request: RankRequest = await self._worker.parse_pooling(parser, body)
            service = self._worker.find_pooling(request.model, *kinds)
            pooled = await service.score(request, self._worker.pooling.offload)
        usage = {"prompt_tokens": pooled.num_tokens, "total_tokens": pooled.num_tokens}
        return request, service.name, pooled.rows, usage

    def table(self) -> dict[str, Any]:
        return dict.fromkeys(RERANK_PATHS, self.rerank) | dict.fromkeys(SCORE_PATHS, self.score)


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open, names = settings.ignore_unknown_fields, settings.pooling_names
    usage = reply_schema(prompt_tokens=COUNT, total_tokens=COUNT)
    first, second = ("text_1", "text_2"), ("queries", "documents")
    pairs = [
        {"allOf": [*map(with_field, pair), with_values(**{name: {"const": None} for name in other})]}
        for pair, other in ((first, second), (second, first))
    ]
    result = reply_schema(index=COUNT, relevance_score=NUMBER)
    score = reply_schema(index=COUNT, object={"const": "score"}, score=NUMBER)
    return {
        **SCHEMAS,
        "RerankRequest": table_schema(RERANK, names, is_open=is_open),
        "Ranking": reply_schema(id=TEXT, model=TEXT, results=array_schema(result), usage=usage),
        "ScoreRequest": {**table_schema(SCORE, names, is_open=is_open), "oneOf": pairs},
        "Scores": reply_schema(
            id=TEXT, object={"const": "list"}, created=COUNT, model=TEXT, data=array_schema(score), usage=usage),
    }  # fmt: skip


RERANKING = Operation(summary="Documents by their relevance to a query", request="RerankRequest", reply="Ranking")
SCORING = Operation(summary="Scores of pairs of texts", request="ScoreRequest", reply="Scores")
DIALECT = Dialect(
    prefixes=(*RERANK_PATHS, *SCORE_PATHS), error_body=error_body, schemas=_schemas, error_schema="OpenAIError",
    has_large_bodies=True,
    parsers={RERANK_PATHS[0]: (parse_rerank, RankRequest), SCORE_PATHS[0]: (parse_score, RankRequest)},
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        *(Route("POST", path, RERANKING) for path in RERANK_PATHS),
        *(Route("POST", path, SCORING) for path in SCORE_PATHS),
    ),
)  # fmt: skip
