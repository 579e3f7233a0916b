"""The description of the routes (OpenAPI 3.2) for `/openapi.json`. Bounds, defaults and choices of requests come from
the tables that requests are checked against, so the two cannot differ; replies are described in `openapi_replies`.

A null is as good as an absent field, except where the field is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import __version__
from . import schema as small_fields
from .config import Settings
from .dialects import jobs, openai_schema
from .schema import Field, Schema, listed, made_of


def of_field(field: Field) -> Schema:
    """What a field may hold, as JSON Schema."""
    schema = field.kind.schema()
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


def of_table(table: Mapping[str, Field], *, is_open: bool = False) -> Schema:
    """A body."""
    properties = {name: of_field(field) for name, field in table.items()}
    return made_of(properties, *(name for name, field in table.items() if field.required), is_open=is_open)


def _requests(settings: Settings) -> dict[str, Schema]:
    is_open = settings.ignore_unknown_fields
    job = {**of_table(jobs.TABLE), "oneOf": [_with("prompt"), _with("messages")]}
    named = {**job, "required": [*job["required"], "job_id"]}
    only = {"job_id": jobs.TABLE["job_id"].kind.schema(), "stream": {"enum": [True, None], "default": True}}
    named["properties"] = {**job["properties"], **only}
    streams = {"anyOf": [_if(stream_options={"enum": [None, {}]}), _with("stream", const=True)]}
    made = {
        "ChatRequest": {
            **of_table(openai_schema.CHAT, is_open=is_open),
            "anyOf": [_if(top_logprobs={"type": "null"}), _with("logprobs", const=True)],
            "allOf": [streams],
        },
        "CompletionRequest": {
            **of_table(openai_schema.COMPLETION, is_open=is_open),
            "anyOf": [_if(max_tokens={"not": {"const": 0}}), _with("echo", const=True)],
            "allOf": [streams],
        },
        "JobRequest": job, "NamedJobRequest": named, "CancelRequest": of_table(small_fields.CANCEL),
        "TokenizeRequest": of_table(small_fields.TOKENIZE), "DetokenizeRequest": of_table(small_fields.DETOKENIZE),
        "TemplateRequest": of_table(small_fields.APPLY_TEMPLATE),
    }  # fmt: skip
    for schema in made.values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*settings.names, None]}
    return made


def _with(name: str, **value: Any) -> Schema:
    """A body that says something under that name."""
    return {**_if(**{name: value or {"not": {"type": "null"}}}), "required": [name]}


def _if(**properties: Schema) -> Schema:
    return {"properties": properties}


# method, path, what it does, the request's schema, the reply's, that of the events of a stream
ROUTES: tuple[tuple[str, str, str, str | None, str, str | None], ...] = (
    ("get", "/", "A page to chat on", None, "text/html", None),
    ("get", "/health", "Forward progress; 503 unless healthy", None, "Health", None),
    ("get", "/v1/ready", "Whether requests are taken", None, "Ready", None),
    ("get", "/info", "The model, what it runs on", None, "Info", None),
    ("get", "/metrics", "Prometheus", None, "text/plain", None),
    ("get", "/openapi.json", "This description", None, "Any", None),
    ("get", "/v1/loading/progress", "How loading goes on", None, "text/event-stream", "LoadingEvent"),
    ("get", "/v1/models", "The model that is served", None, "Models", None),
    ("get", "/v1/models/{name}", "The same, by name", None, "Model", None),
    ("post", "/v1/chat/completions", "Answer a conversation", "ChatRequest", "ChatCompletion", "ChatChunk"),
    ("post", "/v1/completions", "Go on with prompts", "CompletionRequest", "Completion", "Completion"),
    ("post", "/v1/jobs", "Take a job on", "JobRequest", "JobReply", None),
    ("post", "/v1/inference", "The same", "JobRequest", "JobReply", None),
    ("get", "/v1/jobs/{job_id}", "Where a job stands", None, "JobState", None),
    ("get", "/v1/jobs/{job_id}/stream", "The events of a job, from the first", None, "text/event-stream", "JobEvent"),
    ("delete", "/v1/jobs/{job_id}", "End a job", None, "JobName", None),
    ("post", "/cancel", "End a job", "CancelRequest", "JobName", None),
    ("post", "/execute", "A job answered by its events", "NamedJobRequest", "text/event-stream", "JobEvent"),
    ("post", "/tokenize", "Text to token ids", "TokenizeRequest", "Tokens", None),
    ("post", "/detokenize", "Token ids to text", "DetokenizeRequest", "Text", None),
    ("post", "/apply-template", "Messages to the prompt made of them", "TemplateRequest", "Prompt", None),
)
PUBLIC = ("/", "/health")
OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}")
STATUSES = {
    400: "something is wrong in the request", 401: "the key is missing or wrong", 404: "not known here",
    409: "the name is in use", 413: "the body is too large", 429: "the queue is full", 500: "a failure of the worker",
    503: "loading or shutting down", 504: "the time was up",
}  # fmt: skip


def description(settings: Settings) -> dict[str, Any]:
    """The whole."""
    paths: dict[str, Any] = {}
    for method, path, what, request, reply, event in ROUTES:
        paths.setdefault(path, {})[method] = _operation(method, path, what, request, reply, event)
    return {
        "openapi": "3.2.0",
        "info": {"title": "llm-worker-rbee", "version": __version__, "description": "An LLM inference worker."},
        "security": [{"key": []}] if settings.api_key is not None else [],
        "paths": paths,
        "components": {
            "schemas": {**_requests(settings), **REPLIES},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(method: str, path: str, what: str, request: str | None, reply: str, event: str | None) -> dict[str, Any]:
    good = "202" if reply == "JobName" else "200"
    made: dict[str, Any] = {
        "summary": what, "operationId": f"{method} {path}",
        "responses": {good: {"description": "done", "content": _content(reply, event)}, **_errors(path, request)},
    }  # fmt: skip
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if request is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(request)}}}
    if path in PUBLIC:
        made["security"] = []
    return made


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
    """One event: JSON in its data, an error of that dialect too, and in the last one [DONE]."""
    inside = ref(event) if event in ("JobEvent", "LoadingEvent") else {"anyOf": [ref(event), ref("OpenAIError")]}
    told = {"contentMediaType": "application/json", "contentSchema": inside}
    return made_of({"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, told]}}, "data", is_open=True)


def _errors(path: str, request: str | None) -> dict[str, Any]:
    if path == "/health":
        return {"503": {"description": "not healthy", "content": _content("Health", None)}}
    if path in PUBLIC:
        return {}
    shape = "OpenAIError" if path in OPENAI else "Error"
    bad = "OpenAIError" if path in OPENAI else "FieldErrors"
    left_out = () if request is not None else (400, 409, 413, 429, 504)
    return {
        str(status): {"description": why, "content": _content(bad if status == 400 else shape, None)}
        for status, why in STATUSES.items() if status not in left_out
    }  # fmt: skip


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}


def ref(name: str) -> Schema:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _whole(**properties: Schema) -> Schema:
    """A reply that has all of these, and may have more one day."""
    return made_of(properties, *properties, is_open=True)


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _event(kind: str, **properties: Schema) -> Schema:
    return _whole(type={"const": kind}, **properties)


FINISH: Schema = {"enum": ["stop", "length", None]}
STOP_REASON: Schema = {"enum": ["MAX_TOKENS", "EOS", "STOP_SEQUENCE"]}
LOGPROBS: Schema = _or_null({"type": "object"})
HEAD: dict[str, Schema] = {"id": TEXT, "object": TEXT, "created": COUNT, "model": TEXT}


def _reply(choice: Schema, **more: Schema) -> Schema:
    return _whole(**HEAD, choices=listed(choice), **more)


REPLIES: dict[str, Schema] = {
    "Any": {"type": "object"},
    "Health": _whole(
        status={"enum": ["loading", "healthy", "stalled", "stopping", "failed"]}, model=TEXT, uptime_s=NUMBER,
        last_step_age_s=NUMBER, running=COUNT, waiting=COUNT),
    "Ready": _whole(ready=FLAG, state={"enum": ["loading", "idle", "busy", "error"]}),
    "Info": _whole(
        model=TEXT, architecture=TEXT, quant=TEXT, parameters=COUNT, context_length=COUNT, backend=TEXT, device=TEXT,
        kv_type=TEXT, memory=_whole(
            weights_bytes=COUNT, kv_cache_bytes=COUNT, process_bytes=_or_null(COUNT), device_bytes=COUNT,
            graph_bytes=COUNT),
        worker_id=TEXT, versions=_whole(worker=TEXT, python=TEXT)),
    "LoadingEvent": _whole(stage=TEXT),
    "Model": _whole(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, context_length=COUNT),
    "Models": _whole(object={"const": "list"}, data=listed(ref("Model"))),
    "Usage": _whole(
        prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT,
        prompt_tokens_details=_whole(cached_tokens=COUNT)),
    "ChatCompletion": _reply(
        _whole(
            index=COUNT, message=_whole(role={"const": "assistant"}, content=TEXT), logprobs=LOGPROBS,
            finish_reason=FINISH),
        usage=ref("Usage")),
    "ChatChunk": _reply(_whole(index=COUNT, delta={"type": "object"}, logprobs=LOGPROBS, finish_reason=FINISH)),
    "Completion": _reply(_whole(index=COUNT, text=TEXT, logprobs=LOGPROBS, finish_reason=FINISH)),
    "JobAccepted": _whole(job_id=TEXT, sse_url=TEXT),
    "JobResult": _whole(
        job_id=TEXT, text=TEXT, tokens_out=COUNT, stop_reason=STOP_REASON, decode_time_ms=NUMBER, seed=COUNT),
    "JobReply": {"anyOf": [ref("JobAccepted"), ref("JobResult")]},
    "JobName": _whole(job_id=TEXT),
    "JobState": _whole(
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
    "Tokens": _whole(tokens=listed(COUNT), pieces=listed(TEXT)),
    "Text": _whole(text=TEXT),
    "Prompt": _whole(prompt=TEXT, tokens=listed(COUNT)),
    "Error": _whole(code=TEXT, message=TEXT, retriable=FLAG),
    "FieldErrors": {"anyOf": [
        _whole(errors=listed(_whole(field=TEXT, constraint=TEXT, message=TEXT), 1)), ref("Error"),
    ]},
    "OpenAIError": _whole(error=_whole(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
}  # fmt: skip
