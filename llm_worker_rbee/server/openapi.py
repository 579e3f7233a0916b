"""The description of the routes (OpenAPI 3.2) for `/openapi.json`.

Bounds, defaults and choices of request bodies come from the tables that validate them, so the two cannot differ;
schemas of replies and events are written here. A null equals an absent field, except where the field is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import __version__
from ..config import ServerSettings
from ..engine.request import NEUTRAL_SAMPLING
from ..engine.step_time import StepTimeCoefficients
from . import schema as bodies
from .middleware import PUBLIC_PATHS
from .schema import Field, Schema, array_schema, object_schema


def field_schema(field: Field) -> Schema:
    """Return the JSON Schema of a field, with null and default where it is optional."""
    schema = field.type.json_schema()
    if not field.required:
        schema = _nullable(schema)
        if field.default is not None:
            schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return schema


def _nullable(schema: Schema) -> Schema:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def table_schema(table: Mapping[str, Field], *, is_open: bool = False) -> Schema:
    """Return the JSON Schema of a body."""
    properties = {name: field_schema(field) for name, field in table.items()}
    return object_schema(properties, *(name for name, field in table.items() if field.required), is_open=is_open)


def _request_schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open = settings.ignore_unknown_fields
    job = {**table_schema(bodies.JOB), "oneOf": [_with("prompt"), _with("messages")]}
    named = {**job, "required": [*job["required"], "job_id"]}
    narrower = {"job_id": bodies.JOB["job_id"].type.json_schema(), "stream": {"enum": [True, None], "default": True}}
    named["properties"] = {**job["properties"], **narrower}
    streams = {"anyOf": [_if(stream_options={"enum": [None, {}]}), _with("stream", const=True)]}
    schemas = {
        "ChatRequest": {
            **table_schema(bodies.CHAT, is_open=is_open),
            "anyOf": [_if(top_logprobs={"type": "null"}), _with("logprobs", const=True)],
            "allOf": [streams],
        },
        "CompletionRequest": {
            **table_schema(bodies.COMPLETION, is_open=is_open),
            "anyOf": [_if(max_tokens={"not": {"const": 0}}), _with("echo", const=True)],
            "allOf": [streams],
        },
        "JobRequest": job, "NamedJobRequest": named, "CancelRequest": table_schema(bodies.CANCEL),
        "TokenizeRequest": table_schema(bodies.TOKENIZE), "DetokenizeRequest": table_schema(bodies.DETOKENIZE),
        "TemplateRequest": table_schema(bodies.APPLY_TEMPLATE),
    }  # fmt: skip
    for schema in schemas.values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*settings.names, None]}
    return schemas


def _with(name: str, **value: Any) -> Schema:
    """Return the condition that a body has the field, with that value where one is given."""
    return {**_if(**{name: value or {"not": {"type": "null"}}}), "required": [name]}


def _if(**properties: Schema) -> Schema:
    return {"properties": properties}


# method, path, summary, schema of the request, of the reply, of the events of a stream
ROUTES: tuple[tuple[str, str, str, str | None, str, str | None], ...] = (
    ("get", "/", "A chat page", None, "text/html", None),
    ("get", "/health", "Forward progress; 503 unless healthy or degraded", None, "Health", None),
    ("get", "/v1/ready", "Whether requests are accepted", None, "Ready", None),
    ("get", "/info", "Model, device, memory, limits, sampling defaults, versions", None, "Info", None),
    ("get", "/metrics", "Prometheus metrics", None, "text/plain", None),
    ("get", "/openapi.json", "This description", None, "Any", None),
    ("get", "/v1/loading/progress", "Progress of loading the model", None, "text/event-stream", "LoadingEvent"),
    ("get", "/v1/models", "The served model", None, "Models", None),
    ("get", "/v1/models/{name}", "The served model, by name", None, "Model", None),
    ("post", "/v1/chat/completions", "Complete a conversation", "ChatRequest", "ChatCompletion", "ChatChunk"),
    ("post", "/v1/completions", "Complete prompts", "CompletionRequest", "Completion", "Completion"),
    ("post", "/v1/jobs", "Start a job", "JobRequest", "JobReply", None),
    ("post", "/v1/inference", "Start a job (alias)", "JobRequest", "JobReply", None),
    ("get", "/v1/jobs/{job_id}", "State and counts of a job", None, "JobState", None),
    ("get", "/v1/jobs/{job_id}/stream", "The events of a job, from the first", None, "text/event-stream", "JobEvent"),
    ("delete", "/v1/jobs/{job_id}", "Cancel a job", None, "JobName", None),
    ("post", "/cancel", "Cancel a job", "CancelRequest", "JobName", None),
    ("post", "/execute", "Start a job; the reply is its events", "NamedJobRequest", "text/event-stream", "JobEvent"),
    ("post", "/tokenize", "Text to token ids", "TokenizeRequest", "Tokens", None),
    ("post", "/detokenize", "Token ids to text", "DetokenizeRequest", "Text", None),
    ("post", "/apply-template", "Messages to the prompt of the chat template", "TemplateRequest", "Prompt", None),
)
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}")
STATUSES = {
    400: "invalid request", 401: "missing or wrong API key", 403: "host not allowed", 404: "not found",
    409: "job_id in use", 413: "body too large", 415: "compressed body", 429: "queue full",
    500: "failure of the worker", 503: "loading or shutting down", 504: "timeout",
}  # fmt: skip


def description(settings: ServerSettings) -> dict[str, Any]:
    """Return the whole description."""
    paths: dict[str, Any] = {}
    for method, path, summary, request, reply, event in ROUTES:
        paths.setdefault(path, {})[method] = _operation(method, path, summary, request, reply, event)
    return {
        "openapi": "3.2.0",
        "info": {"title": "llm-worker-rbee", "version": __version__, "description": "An LLM inference worker."},
        "security": [{"key": []}] if settings.api_key is not None else [],
        "paths": paths,
        "components": {
            "schemas": {**_request_schemas(settings), **REPLIES},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    method: str, path: str, summary: str, request: str | None, reply: str, event: str | None
) -> dict[str, Any]:
    status = "202" if reply == "JobName" else "200"
    operation: dict[str, Any] = {
        "summary": summary, "operationId": f"{method} {path}",
        "responses": {status: {"description": "done", "content": _content(reply, event)}, **_errors(path, request)},
    }  # fmt: skip
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(request)}}}
    if path in PUBLIC_PATHS:
        operation["security"] = []
    return operation


def _content(reply: str, event: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if "/" not in reply:
        content["application/json"] = {"schema": ref(reply)}
    elif event is None:
        content[reply] = {"schema": {"type": "string"}}
    if event is not None:
        content["text/event-stream"] = {"itemSchema": _item(event)}
    return content


def _item(event: str) -> Schema:
    """Return the schema of one event: its data is JSON, possibly an error of the dialect, or [DONE]."""
    data = ref(event) if event in ("JobEvent", "LoadingEvent") else {"anyOf": [ref(event), ref("OpenAIError")]}
    json_data = {"contentMediaType": "application/json", "contentSchema": data}
    return object_schema({"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, json_data]}}, "data", is_open=True)


def _errors(path: str, request: str | None) -> dict[str, Any]:
    if path == "/health":
        return {"503": {"description": "not healthy", "content": _content("Health", None)}}
    if path in PUBLIC_PATHS:
        return {}
    schema = "OpenAIError" if path in OPENAI_PATHS else "Error"
    invalid = "OpenAIError" if path in OPENAI_PATHS else "FieldErrors"
    without_body = () if request is not None else (400, 409, 413, 415, 429, 504)
    return {
        str(status): {"description": why, "content": _content(invalid if status == 400 else schema, None)}
        for status, why in STATUSES.items() if status not in without_body
    }  # fmt: skip


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def ref(name: str) -> Schema:
    """Return a reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Schema) -> Schema:
    """Return the schema of a reply that has all of these, and possibly more in later versions."""
    return object_schema(properties, *properties, is_open=True)


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _event(kind: str, **properties: Schema) -> Schema:
    return _object(type={"const": kind}, **properties)


FINISH: Schema = {"enum": ["stop", "length", None]}
STOP_REASON: Schema = {"enum": ["MAX_TOKENS", "EOS", "STOP_SEQUENCE"]}
LOGPROBS: Schema = _or_null({"type": "object"})
HEAD: dict[str, Schema] = {"id": TEXT, "object": TEXT, "created": COUNT, "model": TEXT}


def _completion(choice: Schema, **more: Schema) -> Schema:
    return _object(**HEAD, choices=array_schema(choice), **more)


REPLIES: dict[str, Schema] = {
    "Any": {"type": "object"},
    "Health": _object(
        status={"enum": ["loading", "healthy", "degraded", "stalled", "stopping", "failed"]}, model=TEXT,
        uptime_s=NUMBER, last_step_age_s=NUMBER, running=COUNT, waiting=COUNT),
    "Ready": _object(ready=FLAG, state={"enum": ["loading", "idle", "busy", "error"]}),
    "Info": _object(
        model=TEXT, architecture=TEXT, quant=TEXT, parameters=COUNT, context_length=COUNT, backend=TEXT, device=TEXT,
        kv_type=TEXT, memory=_object(
            weights_bytes=COUNT, kv_cache_bytes=COUNT, process_bytes=_or_null(COUNT), device_bytes=COUNT,
            graph_bytes=COUNT),
        limits=_object(
            max_batch=COUNT, max_step_tokens=COUNT, max_queue=COUNT, max_queued_tokens=COUNT, target_itl_ms=NUMBER),
        step_time_model=_or_null(_object(**dict.fromkeys(StepTimeCoefficients._fields, NUMBER))),
        replicas=array_schema(
            _object(device=TEXT, status=TEXT, restarts=COUNT, requests=COUNT, kv_cache_usage=NUMBER)),
        sampling_defaults=_object(**dict.fromkeys(NEUTRAL_SAMPLING, _object(value=NUMBER, source=TEXT))),
        worker_id=TEXT, versions=_object(worker=TEXT, python=TEXT)),
    "LoadingEvent": _object(stage=TEXT),
    "Model": _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, context_length=COUNT),
    "Models": _object(object={"const": "list"}, data=array_schema(ref("Model"))),
    "Usage": _object(
        prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
        prompt_tokens_details=_object(cached_tokens=COUNT)),
    "ChatCompletion": _completion(
        _object(
            index=COUNT, message=_object(role={"const": "assistant"}, content=TEXT), logprobs=LOGPROBS,
            finish_reason=FINISH),
        usage=ref("Usage")),
    "ChatChunk": _completion(_object(index=COUNT, delta={"type": "object"}, logprobs=LOGPROBS, finish_reason=FINISH)),
    "Completion": _completion(_object(index=COUNT, text=TEXT, logprobs=LOGPROBS, finish_reason=FINISH)),
    "JobAccepted": _object(job_id=TEXT, sse_url=TEXT),
    "JobResult": _object(
        job_id=TEXT, text=TEXT, tokens_out=COUNT, stop_reason=STOP_REASON, decode_time_ms=NUMBER, seed=COUNT),
    "JobReply": {"anyOf": [ref("JobAccepted"), ref("JobResult")]},
    "JobName": _object(job_id=TEXT),
    "JobState": _object(
        job_id=TEXT, state={"enum": ["queued", "running", "done", "failed", "cancelled"]}, tokens_out=COUNT),
    "JobEvent": {"oneOf": [
        _event("started", job_id=TEXT, model=TEXT, started_at={"type": "string", "format": "date-time"}, seed=COUNT),
        _event("token", t=TEXT, i=COUNT),
        _event(
            "metrics", tokens_per_sec=NUMBER, ttft_ms={"type": ["number", "null"]}, kv_cache_usage=NUMBER,
            vram_bytes=COUNT,
        ),
        _event("narration", actor=TEXT, action=TEXT, target=TEXT, human=TEXT),
        _event("end", tokens_out=COUNT, decode_time_ms=NUMBER, stop_reason=STOP_REASON),
        _event("error", code=TEXT, message=TEXT, retriable=FLAG),
    ]},
    "Tokens": _object(tokens=array_schema(COUNT), pieces=array_schema(TEXT)),
    "Text": _object(text=TEXT),
    "Prompt": _object(prompt=TEXT, tokens=array_schema(COUNT)),
    "Error": _object(code=TEXT, message=TEXT, retriable=FLAG),
    "FieldErrors": {"anyOf": [
        _object(errors=array_schema(_object(field=TEXT, constraint=TEXT, message=TEXT), 1)), ref("Error"),
    ]},
    "OpenAIError": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
}  # fmt: skip
