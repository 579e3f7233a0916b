"""Anthropic's batches of messages, `/v1/messages/batches`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from ...errors import ConflictError, StorageFullError
from ..batch_store import MAX_LINES, MESSAGES
from ..batches import REQUESTS, Batch, batch_service, page_of, storing, stream_file
from ..dialect import Call, Dialect, Front, Handler, Operation, Route
from ..json_schema import TEXT, Schema, array_schema, object_schema, ref, reply_schema
from ..schema import ParseOptions, require
from ..settings import ServerSettings
from .anthropic import error_body

PATH = f"{MESSAGES}/batches"
MAX_BYTES = 32 << 20
WINDOW_S = 86400
CUSTOM_ID = re.compile("[a-zA-Z0-9_-]{1,64}")
STATES = {"cancelling": "canceling", "completed": "ended", "failed": "ended", "expired": "ended", "cancelled": "ended"}


class BatchedMessage(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    params: msgspec.Raw


class MessageBatch(msgspec.Struct):
    """The body of a batch."""

    requests: list[BatchedMessage]


def parse_batch(body: bytes, _: ParseOptions) -> bytes:
    """Validate the body of a batch, and return its lines; their messages are left to the parser of messages."""
    problem = ""
    try:
        requests = msgspec.json.decode(body, type=MessageBatch).requests
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        requests, problem = [], str(error)
    require(not problem, "requests", "json", f"requests: {problem}")
    require(1 <= len(requests) <= MAX_LINES, "requests", "length", f"requests must have 1 to {MAX_LINES} entries")
    numbers: dict[str, int] = {}
    lines = bytearray()
    for i, request in enumerate(requests):
        name = f"requests.{i}.custom_id"
        is_valid = CUSTOM_ID.fullmatch(request.custom_id) is not None
        require(is_valid, name, "format", f"{name} must have 1 to 64 of a-z, A-Z, 0-9, _ and -")
        first = numbers.setdefault(request.custom_id, i)
        require(first == i, name, "conflict", f"{name} is the custom_id of requests.{first} already")
        head = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES}
        params = msgspec.json.format(bytes(request.params), indent=-1)  # on one line
        lines += msgspec.json.encode(head)[:-1] + b',"body":' + params + b"}\n"
    return bytes(lines)


def encode_batch(batch: Batch, base: str) -> dict[str, Any]:
    """Return a batch as Anthropic shows it."""
    state, counts = batch.state, batch.counts
    status, unanswered = STATES.get(state["status"], "in_progress"), counts["unanswered"]
    ended = None if batch.is_open else state.get(f"{state['status']}_at")
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": 0 if ended else counts["total"] - counts["completed"] - counts["failed"],
            "succeeded": counts["completed"],
            "errored": counts["failed"] - unanswered,
            "canceled": unanswered if state["status"] == "cancelled" else 0,
            "expired": unanswered if state["status"] == "expired" else 0,
        },
        "created_at": _date(state["created_at"]),
        "expires_at": _date(state["expires_at"]),
        "ended_at": _date(ended),
        "cancel_initiated_at": _date(state.get("cancelling_at")),
        "archived_at": None,
        "results_url": f"{base}{PATH}/{batch.id}/results" if ended and state.get("results_file_id") else None,
    }


def _date(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def make_handlers(worker: Front) -> Mapping[str, Handler]:
    """Return the handlers of batches, by their paths."""

    def find(call: Call) -> Batch:
        return batch_service(worker).get("msgbatch", call.path_params["id"])

    def base(call: Call) -> str:
        return (worker.settings.advertise_url or call.base_url).rstrip("/")

    async def batches(call: Call) -> Any:
        service = batch_service(worker)
        if call.method == "GET":
            return page_of(call.query, [encode_batch(batch, base(call)) for batch in service.listed("msgbatch")])
        lines: bytes = await worker.parse(PATH, await call.body())
        worker.require_ready()
        service.store.require_room(len(lines))
        file = await storing(partial(service.store.add, [lines], "requests.jsonl", REQUESTS))
        try:
            batch = await service.create("msgbatch", MESSAGES, file.id, WINDOW_S, counts={"total": lines.count(b"\n")})
        except StorageFullError:
            service.store.delete(file.id)
            raise
        return encode_batch(batch, base(call))

    async def one_batch(call: Call) -> Any:
        batch = find(call)
        if call.method == "GET":
            return encode_batch(batch, base(call))
        await storing(partial(batch_service(worker).delete, batch))
        return {"id": batch.id, "type": "message_batch_deleted"}

    async def cancel(call: Call) -> Any:
        return encode_batch(await batch_service(worker).cancel("msgbatch", call.path_params["id"]), base(call))

    async def results(call: Call) -> Any:
        file_id = find(call).state.get("results_file_id")
        if file_id is None:
            raise ConflictError("the batch has no results yet")
        return await asyncio.to_thread(stream_file, batch_service(worker), file_id, "application/x-jsonl")

    return {PATH: batches, PATH + "/{id}": one_batch, PATH + "/{id}/cancel": cancel, PATH + "/{id}/results": results}


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    custom_id: Schema = {"type": "string", "pattern": f"^{CUSTOM_ID.pattern}$"}
    request = object_schema({"custom_id": custom_id, "params": {"type": "object"}}, "custom_id", "params", is_open=True)
    requests = {**array_schema(request), "minItems": 1}
    return {
        "MessageBatchRequest": object_schema({"requests": requests}, "requests", is_open=True),
        "MessageBatch": reply_schema(id=TEXT, type={"const": "message_batch"}, processing_status=TEXT, created_at=TEXT),
        "MessageBatches": reply_schema(data=array_schema(ref("MessageBatch"))),
        "DeletedMessageBatch": reply_schema(id=TEXT, type={"const": "message_batch_deleted"}),
    }


CREATE = Operation(summary="Begin a batch of messages", request="MessageBatchRequest", reply="MessageBatch")
DIALECT = Dialect(
    prefixes=(PATH,),
    error_body=error_body,
    schemas=_schemas,
    error_schema="AnthropicError",
    body_limits={PATH: MAX_BYTES},
    parsers={PATH: (parse_batch, bytes)},
    make_handlers=make_handlers,
    routes=(
        Route("POST", PATH, CREATE),
        Route("GET", PATH, Operation(summary="The batches of messages", reply="MessageBatches")),
        Route("GET", PATH + "/{id}", Operation(summary="A batch of messages", reply="MessageBatch")),
        Route("DELETE", PATH + "/{id}", Operation(summary="Delete a batch", reply="DeletedMessageBatch")),
        Route("POST", PATH + "/{id}/cancel", Operation(summary="End a batch", reply="MessageBatch")),
        Route("GET", PATH + "/{id}/results", Operation(summary="Its results", reply="application/x-jsonl")),
    ),
)
