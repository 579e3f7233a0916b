"""What replies and events look like, as JSON Schema: the hand-written half of the description."""

from __future__ import annotations

from .fields import Schema
from .kinds import listed, made_of

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
