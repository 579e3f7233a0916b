"""OpenAI's files and batches: `/v1/files`, which takes a form with a file, and `/v1/batches`.

The body of an upload goes to disk as it arrives, and is parsed there: fields, and one file.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from io import FileIO
from mmap import ACCESS_READ, mmap
from typing import Any, NamedTuple

from ...config import parse_duration
from ...errors import DeadlineError, InvalidRequestError
from ...sampling_params import Bounds
from ..batch_store import CHUNK_BYTES, ENDPOINTS, MAX_FILE_BYTES, StoredFile
from ..batches import Batch, BatchService, batch_service, page_of, storing, stream_file
from ..dialect import Call, Dialect, Front, Handler, Operation, Route
from ..json_schema import COUNT, TEXT, Schema, array_schema, or_null, ref, reply_schema
from ..schema import (
    AnyObject,
    Enum,
    Field,
    Number,
    ParseOptions,
    Text,
    decode_object,
    require,
    table_schema,
    validate_body,
)
from ..settings import ServerSettings
from .openai import error_body

FILES, BATCHES = "/v1/files", "/v1/batches"
FORM_BYTES = 64 << 10  # beside the file
MAX_PARTS, MAX_HEAD_BYTES, MAX_FIELD_BYTES = 16, 8 << 10, 4 << 10
UPLOAD_TIMEOUT_S = 60.0
MAX_WINDOW_S, MIN_EXPIRY_S = 30 * 86400, 3600
BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
NAME, FILENAME = re.compile(rb'[;\s]name="([^"\r\n]*)"'), re.compile(rb'[;\s]filename="([^"\r\n]*)"')
TIMES = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
CREATE = {
    "input_file_id": Field(Text(1), required=True),
    "endpoint": Field(Enum(ENDPOINTS), required=True),
    "completion_window": Field(Text(1), "24h"),
    "metadata": Field(AnyObject()),
}
EXPIRES_S = "expires_after[seconds]"
FORM = {
    "purpose": Field(Enum(("batch",)), required=True),
    "expires_after[anchor]": Field(Enum(("created_at",))),
    EXPIRES_S: Field(Number(Bounds(MIN_EXPIRY_S, MAX_WINDOW_S, is_integer=True))),
}


def parse_create(body: bytes, _: ParseOptions) -> dict[str, Any]:
    """Validate the body of `/v1/batches`."""
    values = validate_body(decode_object(body), CREATE)
    values["window_s"] = seconds = parse_duration(values["completion_window"], "completion_window")
    message = f"completion_window must be a time of at most {MAX_WINDOW_S // 3600}h, such as 24h"
    require(1 <= seconds <= MAX_WINDOW_S, "completion_window", "range", message)
    return values


class Part(NamedTuple):
    """A part of a form: its name, the name of its file, and where its bytes are."""

    name: str
    filename: str | None
    start: int
    stop: int


def find(data: bytes | mmap, mark: bytes, start: int) -> int:
    """Return where the mark is, -1 if it is not there; other threads run in between."""
    places = (data.find(mark, at, at + CHUNK_BYTES + len(mark)) for at in range(start, len(data), CHUNK_BYTES))
    return next((place for place in places if place >= 0), -1)


def form_parts(data: bytes | mmap, content_type: str) -> Iterator[Part]:
    """Yield the parts of a form."""
    match = BOUNDARY.match(content_type)
    if match is None:
        message = f"the content type is {content_type[:100]!r}: it must be multipart/form-data with a boundary"
        raise InvalidRequestError(message, "content-type")
    delimiter = b"\r\n--" + (match[1] or match[2]).encode("latin-1", "replace")
    at = data.find(delimiter[2:], 0, MAX_HEAD_BYTES) - 2
    for _ in range(MAX_PARTS + 1):
        start = at + len(delimiter)
        if at > -3 and data[start : start + 2] == b"--":
            return
        end = data.find(b"\r\n\r\n", start, start + MAX_HEAD_BYTES)
        at = find(data, delimiter, end + 4)
        if at < 0 or end < 0:
            raise InvalidRequestError(
                f"a part of the form is cut off, or its head is over {MAX_HEAD_BYTES} bytes", "body"
            )
        name, filename = NAME.search(data[start:end]), FILENAME.search(data[start:end])
        if name is None:
            raise InvalidRequestError("a part of the form has no name", "body")
        shown = None if filename is None else filename[1].decode(errors="replace")
        yield Part(name[1].decode(errors="replace"), shown, end + 4, at)
    raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts", "body")


def read_form(body: FileIO, content_type: str) -> tuple[Part, dict[str, Any]]:
    """Return where the file of a form is, and the values of its fields; raise unless it has one file."""
    require(body.seek(0, os.SEEK_END) > 0, "body", "length", "the form is empty")
    fields, files = dict[str, Any](), list[Part]()
    with mmap(body.fileno(), 0, access=ACCESS_READ) as data:
        for part in form_parts(data, content_type):
            if part.filename is not None:
                files.append(part)
                continue
            value = data[part.start : min(part.stop, part.start + MAX_FIELD_BYTES)].decode(errors="replace")
            fields[part.name] = int(value) if part.name == EXPIRES_S and re.fullmatch("[0-9]{1,12}", value) else value
    if len(files) != 1 or files[0].name != "file":
        names = ", ".join(repr(part.name[:100]) for part in files) or "none"
        raise InvalidRequestError(f"the files of the form are {names}: it must have one, named 'file'", "file")
    return files[0], validate_body(fields, FORM)


def read_part(body: FileIO, part: Part) -> Iterator[bytes]:
    """Yield the bytes of a file in parts."""
    for at in range(part.start, part.stop, CHUNK_BYTES):
        body.seek(at)
        yield body.read(min(CHUNK_BYTES, part.stop - at))


def encode_file(file: StoredFile) -> dict[str, Any]:
    """Return a file as OpenAI shows it."""
    about = {"id": file.id, "object": "file", "bytes": file.bytes, "created_at": file.created_at, "status": "processed"}
    return {**about, "filename": file.filename, "purpose": file.purpose, "expires_at": file.expires_at}


def encode_batch(batch: Batch) -> dict[str, Any]:
    """Return a batch as OpenAI shows it."""
    state, counts = batch.state, batch.counts
    names = ("endpoint", "input_file_id", "metadata", "status", "output_file_id", "error_file_id", "created_at")
    errors = {"object": "list", "data": state["errors"]} if state.get("errors") else None
    return {
        "id": batch.id,
        "object": "batch",
        "completion_window": f"{(state['expires_at'] - state['created_at']) // 3600}h",
        "errors": errors,
        **{name: state.get(name) for name in names},
        **{f"{name}_at": state.get(f"{name}_at") for name in TIMES},
        "request_counts": {name: counts[name] for name in ("total", "completed", "failed")},
    }


class Handlers:
    """The routes of files and batches."""

    def __init__(self, worker: Front) -> None:
        self._worker = worker

    async def files(self, call: Call) -> Any:
        service = batch_service(self._worker)
        if call.method == "POST":
            call.require_own_page()  # a form needs no leave of the worker to be sent by a page
            try:
                async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                    return encode_file(await self._receive(service, call))
            except TimeoutError:
                raise DeadlineError("the file did not arrive in time") from None
        purpose = call.query.get("purpose")
        files = [file for file in service.store.files.values() if purpose in (None, "", file.purpose)]
        ordered = sorted(files, key=lambda file: (file.created_at, file.id), reverse=call.query.get("order") != "asc")
        return page_of(call.query, [encode_file(file) for file in ordered])

    async def _receive(self, service: BatchService, call: Call) -> StoredFile:
        """Store the file of a form."""
        with service.store.receive() as (body, write):
            async for data in call.stream():
                await storing(partial(write, data))
            part, fields = await storing(partial(read_form, body, call.content_type))
            add = partial(service.store.add, read_part(body, part), part.filename or "", fields["purpose"])
            return await storing(partial(add, expires_s=fields[EXPIRES_S]))

    async def file(self, call: Call) -> Any:
        service = batch_service(self._worker)
        file = service.store.get(call.path_params["id"])
        if call.method == "GET":
            return encode_file(file)
        service.require_unused(file.id)
        await storing(partial(service.store.delete, file.id))
        return {"id": file.id, "object": "file", "deleted": True}

    async def content(self, call: Call) -> Any:
        service, file_id = batch_service(self._worker), call.path_params["id"]
        return await asyncio.to_thread(stream_file, service, file_id, "application/octet-stream")

    async def batches(self, call: Call) -> Any:
        service = batch_service(self._worker)
        if call.method == "GET":
            return page_of(call.query, [encode_batch(batch) for batch in service.listed("batch")])
        values = await self._worker.parse(BATCHES, await call.body())
        self._worker.require_ready()
        metadata, names = values["metadata"], ("endpoint", "input_file_id", "window_s")
        return encode_batch(await service.create("batch", *(values[name] for name in names), metadata=metadata))

    async def batch(self, call: Call) -> Any:
        return encode_batch(batch_service(self._worker).get("batch", call.path_params["id"]))

    async def cancel(self, call: Call) -> Any:
        return encode_batch(await batch_service(self._worker).cancel("batch", call.path_params["id"]))

    def table(self) -> Mapping[str, Handler]:
        return {
            FILES: self.files,
            FILES + "/{id}": self.file,
            FILES + "/{id}/content": self.content,
            BATCHES: self.batches,
            BATCHES + "/{id}": self.batch,
            BATCHES + "/{id}/cancel": self.cancel,
        }


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    file = reply_schema(id=TEXT, object={"const": "file"}, bytes=COUNT, created_at=COUNT, filename=TEXT, purpose=TEXT)
    counts = reply_schema(total=COUNT, completed=COUNT, failed=COUNT)
    shown = reply_schema(id=TEXT, object={"const": "batch"}, status=TEXT, created_at=COUNT, request_counts=counts)
    ids = {"first_id": or_null(TEXT), "last_id": or_null(TEXT)}
    return {
        "File": file,
        "Files": reply_schema(object={"const": "list"}, data=array_schema(ref("File")), **ids),
        "DeletedFile": reply_schema(id=TEXT, object={"const": "file"}, deleted={"const": True}),
        "BatchRequest": table_schema(CREATE),
        "Batch": shown,
        "Batches": reply_schema(object={"const": "list"}, data=array_schema(ref("Batch")), **ids),
    }


DIALECT = Dialect(
    prefixes=(FILES, BATCHES),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OpenAIError",
    body_limits={FILES: MAX_FILE_BYTES + FORM_BYTES},
    parsers={BATCHES: (parse_create, dict[str, Any])},
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("POST", FILES, Operation(summary="Store a file: a form with purpose and file", reply="File")),
        Route("GET", FILES, Operation(summary="The files", reply="Files")),
        Route("GET", FILES + "/{id}", Operation(summary="A file", reply="File")),
        Route("DELETE", FILES + "/{id}", Operation(summary="Delete a file", reply="DeletedFile")),
        Route("GET", FILES + "/{id}/content", Operation(summary="The bytes", reply="application/octet-stream")),
        Route("POST", BATCHES, Operation(summary="Begin a batch", request="BatchRequest", reply="Batch")),
        Route("GET", BATCHES, Operation(summary="The batches", reply="Batches")),
        Route("GET", BATCHES + "/{id}", Operation(summary="A batch", reply="Batch")),
        Route("POST", BATCHES + "/{id}/cancel", Operation(summary="End a batch", reply="Batch")),
    ),
)
