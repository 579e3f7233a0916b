"""The description of the routes (OpenAPI 3.2) for `/openapi.json`.

Bounds, defaults and choices of request bodies come from the tables that validate them, so the two cannot differ;
schemas of replies and events are in the dialects, or here. A null equals an absent field, except where the field is
required.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import __version__
from ..engine.step_time import StepTimeCoefficients
from ..sampling_params import NEUTRAL_SAMPLING
from .dialect import Operation
from .dialects import APPLY_TEMPLATE, DETOKENIZE, DIALECTS, TOKENIZE, dialect_of
from .json_schema import COUNT, FLAG, NUMBER, TEXT, Schema, array_schema, object_schema, or_null, ref, reply_schema
from .middleware import PUBLIC_PATHS
from .schema import table_schema
from .settings import ServerSettings

# Routes that belong to no dialect: method, path, what they are.
ROUTES: tuple[tuple[str, str, Operation], ...] = (
    ("get", "/", Operation(summary="A chat page", reply="text/html")),
    ("get", "/health", Operation(summary="Forward progress; 503 unless healthy or degraded", reply="Health")),
    ("get", "/v1/ready", Operation(summary="Whether requests are accepted", reply="Ready")),
    ("get", "/info", Operation(summary="Model, device, memory, limits, sampling defaults, versions", reply="Info")),
    ("get", "/metrics", Operation(summary="Prometheus metrics", reply="text/plain")),
    ("get", "/openapi.json", Operation(summary="This description")),
    (
        "get",
        "/v1/loading/progress",
        Operation(summary="Progress of loading the model", reply="text/event-stream", event="LoadingEvent"),
    ),
    ("get", "/v1/models", Operation(summary="The served model", reply="Models")),
    ("get", "/v1/models/{name}", Operation(summary="The served model, by name", reply="Model")),
    ("post", "/tokenize", Operation(summary="Text to token ids", request="TokenizeRequest", reply="Tokens")),
    ("post", "/detokenize", Operation(summary="Token ids to text", request="DetokenizeRequest", reply="Text")),
    (
        "post",
        "/apply-template",
        Operation(summary="Messages to the prompt of the chat template", request="TemplateRequest", reply="Prompt"),
    ),
)
NDJSON_EVENTS = ("OllamaChatReply", "OllamaGenerateReply")  # events that are lines of JSON
STATUSES = {
    400: "invalid request",
    401: "missing or wrong API key",
    403: "host not allowed",
    404: "not found",
    409: "job_id in use",
    413: "body too large",
    415: "compressed body",
    422: "a grammar with no way on, or too slow",
    429: "queue full",
    500: "failure of the worker",
    503: "loading or shutting down",
    504: "timeout",
}


def all_operations(*, has_pool: bool) -> Iterator[tuple[str, str, Operation]]:
    """Yield method, path and operation of every route."""
    yield from ROUTES
    for dialect in DIALECTS:
        yield from (("post", route.path, route.operation) for route in dialect.generate)
        routes = (route for route in dialect.routes if has_pool or not route.needs_pool)
        yield from ((route.method.lower(), route.path, route.operation) for route in routes)


def description(settings: ServerSettings) -> dict[str, Any]:
    """Return the whole description."""
    paths: dict[str, Any] = {}
    for method, path, operation in all_operations(has_pool=settings.has_pool):
        paths.setdefault(path, {})[method] = _operation(method, path, operation)
    schemas = {
        "TokenizeRequest": table_schema(TOKENIZE),
        "DetokenizeRequest": table_schema(DETOKENIZE),
        "TemplateRequest": table_schema(APPLY_TEMPLATE),
        **REPLIES,
    }
    for dialect in DIALECTS:
        schemas |= dialect.schemas(settings)
    if not settings.allow_priority:
        for schema in schemas.values():
            if "priority" in schema.get("properties", {}):
                schema["properties"]["priority"] = {"enum": [0, None]}
    return {
        "openapi": "3.2.0",
        "info": {"title": "llm-worker-rbee", "version": __version__, "description": "An LLM inference worker."},
        "security": [{"key": []}, {"x-api-key": []}] if settings.api_key is not None else [],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    content = _content(operation.reply, operation.event, dialect_of(path).error_schema)
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{method} {path}",
        "responses": {
            str(operation.status): {"description": "done", "content": content},
            **_errors(path, operation.request),
        },
    }
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if request := operation.request:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(request)}}}
    if path in PUBLIC_PATHS:
        described["security"] = []
    return described


def _content(reply: str, event: str | None = None, error: str = "Error") -> dict[str, Any]:
    content: dict[str, Any] = {}
    if "/" not in reply:
        content["application/json"] = {"schema": ref(reply)}
    elif event is None:
        content[reply] = {"schema": {"type": "string"}}
    if event is not None:
        media_type = "application/x-ndjson" if event in NDJSON_EVENTS else "text/event-stream"
        content[media_type] = {"itemSchema": _item(event, error)}
    return content


def _item(event: str, error: str) -> Schema:
    """Return the schema of one event: JSON, possibly an error of the dialect; of server-sent events also [DONE]."""
    if event in NDJSON_EVENTS:
        return {"anyOf": [ref(event), ref(error)]}
    data = ref(event) if error == "Error" else {"anyOf": [ref(event), ref(error)]}
    json_data = {"contentMediaType": "application/json", "contentSchema": data}
    return object_schema({"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, json_data]}}, "data", is_open=True)


def _errors(path: str, request: str | None) -> dict[str, Any]:
    if path == "/health":
        return {"503": {"description": "not healthy", "content": _content("Health")}}
    if path in PUBLIC_PATHS:
        return {}
    dialect = dialect_of(path)
    invalid = dialect.invalid_schema or dialect.error_schema
    without_body = () if request is not None else (400, 409, 413, 415, 422, 429, 504)
    return {
        str(status): {"description": why, "content": _content(invalid if status == 400 else dialect.error_schema)}
        for status, why in STATUSES.items()
        if status not in without_body
    }


REPLIES: dict[str, Schema] = {
    "Any": {"type": "object"},
    "Health": reply_schema(
        status={"enum": ["loading", "healthy", "degraded", "stalled", "stopping", "failed"]}, model=TEXT,
        uptime_s=NUMBER, last_step_age_s=NUMBER, running=COUNT, waiting=COUNT,
        pooling=array_schema(reply_schema(model=TEXT, kind=TEXT, status=TEXT, inputs=COUNT, restarts=COUNT))),
    "Ready": reply_schema(ready=FLAG, state={"enum": ["loading", "idle", "busy", "error"]}),
    "Info": reply_schema(
        model=TEXT, architecture=TEXT, quant=TEXT, parameters=COUNT, context_length=COUNT, backend=TEXT, device=TEXT,
        kv_type=TEXT, memory=reply_schema(
            weights_bytes=COUNT, kv_cache_bytes=COUNT, process_bytes=or_null(COUNT), device_bytes=COUNT,
            graph_bytes=COUNT),
        limits=reply_schema(
            max_batch=COUNT, max_step_tokens=COUNT, max_queue=COUNT, max_queued_tokens=COUNT, target_itl_ms=NUMBER),
        step_time_model=or_null(reply_schema(**dict.fromkeys(StepTimeCoefficients._fields, NUMBER))),
        replicas=array_schema(
            reply_schema(device=TEXT, status=TEXT, restarts=COUNT, requests=COUNT, kv_cache_usage=NUMBER)),
        sampling_defaults=reply_schema(**dict.fromkeys(NEUTRAL_SAMPLING, reply_schema(value=NUMBER, source=TEXT))),
        pooling=array_schema(reply_schema(model=TEXT, kind=TEXT, status=TEXT, dimensions=COUNT)),
        worker_id=TEXT, versions=reply_schema(worker=TEXT, python=TEXT)),
    "LoadingEvent": reply_schema(stage=TEXT),
    "Model": reply_schema(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, context_length=COUNT,
                          kind={"enum": ["chat", "embedding", "rerank"]}),
    "Models": reply_schema(object={"const": "list"}, data=array_schema(ref("Model"))),
    "Tokens": reply_schema(tokens=array_schema(COUNT), pieces=array_schema(TEXT)),
    "Text": reply_schema(text=TEXT),
    "Prompt": reply_schema(prompt=TEXT, tokens=array_schema(COUNT)),
}  # fmt: skip
