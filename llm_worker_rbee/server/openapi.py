"""The description of the routes (OpenAPI 3.1) for `/openapi.json`. Bounds, defaults and choices of requests come from
the tables that requests are checked against, so the two cannot differ; replies are described in `openapi_replies`.

A null is as good as an absent field, except where the field is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getclosurevars
from typing import Any

from .. import __version__
from ..engine.request import MAX_STOP_CHARS, NUMBERS
from . import fields, jobs, openai_fields
from .fields import Field
from .openapi_replies import REPLIES, listed, made_of, ref
from .settings import Settings

Schema = dict[str, Any]
PART = made_of({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text")
CONTENT: Schema = {"anyOf": [{"type": "string"}, listed(PART)]}
MESSAGE = made_of({"role": {"enum": [*fields.ROLES]}, "content": CONTENT}, "role", "content")
MESSAGES = listed({**MESSAGE, "additionalProperties": True}, 1)
IDS = listed({"type": "integer", "minimum": 0}, 1)
BIAS: Schema = {
    "type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}  # fmt: skip
# what no table of bounds can say
BY_NAME: dict[str, Schema] = {
    "messages": MESSAGES,
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            listed({"type": "string", "minLength": 1}, 1),
            IDS,
            listed(IDS, 1),
        ]
    },
    "logit_bias": BIAS,
    "stream_options": made_of({"include_usage": {"type": "boolean"}}),
    "job_id": {"type": "string", "pattern": f"^{fields.JOB_ID.pattern}$"},
}
PLAIN: dict[Any, Schema] = {fields.boolean: {"type": "boolean"}, fields.text: {"type": "string"}}
CANCEL = {"job_id": Field(fields.job_id, required=True)}
SHORT: dict[str, Schema] = {
    "TokenizeRequest": made_of(
        {"text": {"type": "string"}, "add_special": {"type": ["boolean", "null"], "default": True},
         "parse_special": {"type": ["boolean", "null"], "default": False}}, "text"),
    "DetokenizeRequest": made_of({"tokens": listed({"type": "integer", "minimum": 0})}, "tokens"),
    "TemplateRequest": made_of({"messages": MESSAGES}, "messages"),
}  # fmt: skip


def of_field(name: str, field: Field) -> Schema:
    """What a field may hold, as JSON Schema."""
    schema = {**_checked_by(name, field)}
    if not field.required:
        schema = _or_null(schema)
        if field.default is not None:
            schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return schema


def _checked_by(name: str, field: Field) -> Schema:
    """The bounds of a check: those of sampling are in its table, the others are held by the check itself."""
    if field.check in PLAIN:
        return PLAIN[field.check]
    if name in BY_NAME:
        return BY_NAME[name]
    if field.check is fields.number:
        low, high, is_open = NUMBERS[name]
        return {"type": "number", "exclusiveMinimum" if is_open else "minimum": low, "maximum": high}
    held = getclosurevars(field.check).nonlocals
    if "least" in held:
        bounds = {"minimum": held["least"], "maximum": held["most"]}
        return {"type": "integer", **{key: value for key, value in bounds.items() if value is not None}}
    if "allowed" in held:
        return {"enum": list(held["allowed"])}
    one = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {"anyOf": [one, {**listed(one), "maxItems": held["most"]}]}


def _or_null(schema: Schema) -> Schema:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def of_table(table: Mapping[str, Field], *, is_open: bool = False) -> Schema:
    """A body."""
    properties = {name: of_field(name, field) for name, field in table.items()}
    made = made_of(properties, *(name for name, field in table.items() if field.required))
    return {**made, "additionalProperties": is_open}


def _requests(settings: Settings) -> dict[str, Schema]:
    is_open = settings.ignore_unknown_fields
    job = of_table(jobs.TABLE)
    job["properties"]["prompt"] = {"type": ["string", "null"], "minLength": 1}
    has = [made_of({name: {"not": {"type": "null"}}}, name) for name in ("prompt", "messages")]
    job["oneOf"] = [{**one, "additionalProperties": True} for one in has]
    named = {**job, "required": [*job["required"], "job_id"]}
    named["properties"] = {**job["properties"], "job_id": BY_NAME["job_id"]}
    made = {
        "ChatRequest": of_table(openai_fields.CHAT, is_open=is_open),
        "CompletionRequest": of_table(openai_fields.COMPLETION, is_open=is_open),
        "JobRequest": job, "NamedJobRequest": named, "CancelRequest": of_table(CANCEL), **SHORT,
    }  # fmt: skip
    for schema in made.values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*settings.names, None]}
    return made


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
        "openapi": "3.1.0",
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
        told = f"data: events, each a {event}, then [DONE]"
        content["text/event-stream"] = {"schema": {"type": "string", "description": told}}
    return content


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
