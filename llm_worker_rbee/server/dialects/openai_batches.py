"""OpenAI's files and batches: `/v1/files`, which takes a form with a file, and `/v1/batches`.

The parser of forms is bounded and knows no more than this route needs: fields, and one file that goes to disk as it
arrives.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from ...config import parse_duration
from ...errors import DeadlineError, InvalidRequestError, NotFoundError, PayloadTooLargeError
from ..batch_store import ENDPOINTS, StoredFile, Upload
from ..batches import MAX_FILE_BYTES, REQUESTS, Batch, BatchService, batch_service, page_of, storing, stream_file
from ..dialect import Call, Dialect, Front, Handler, Operation, Route
from ..json_schema import COUNT, TEXT, Schema, array_schema, or_null, ref, reply_schema
from ..schema import AnyObject, Enum, Field, ParseOptions, Text, decode_object, require, table_schema, validate_body
from ..settings import ServerSettings
from .openai import error_body

FILES, BATCHES = "/v1/files", "/v1/batches"
FORM_BYTES = 64 << 10  # beside the file
MAX_PARTS, MAX_HEAD_BYTES, MAX_FIELD_BYTES = 16, 8 << 10, 4 << 10
UPLOAD_TIMEOUT_S = 3600.0
CHUNK_BYTES = 1 << 20
MAX_WINDOW_S, MIN_EXPIRY_S, MAX_EXPIRY_S = 30 * 86400, 3600, 30 * 86400
BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
NAME, FILENAME = re.compile(rb'[;\s]name="([^"\r\n]*)"'), re.compile(rb'[;\s]filename="([^"\r\n]*)"')
TIMES = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
CREATE = {
    "input_file_id": Field(Text(1), required=True),
    "endpoint": Field(Enum(ENDPOINTS), required=True),
    "completion_window": Field(Text(1), "24h"),
    "metadata": Field(AnyObject()),
}


def parse_create(body: bytes, _: ParseOptions) -> dict[str, Any]:
    """Validate the body of `/v1/batches`."""
    values = validate_body(decode_object(body), CREATE)
    values["window_s"] = seconds = parse_duration(values["completion_window"], "completion_window")
    message = f"completion_window must be a time of at most {MAX_WINDOW_S // 3600}h, such as 24h"
    require(1 <= seconds <= MAX_WINDOW_S, "completion_window", "range", message)
    return values


class FormReader:
    """Reads a form in parts: `next_part` gives the head of a part, `content` its bytes."""

    def __init__(self, chunks: AsyncIterator[bytes], content_type: str) -> None:
        match = BOUNDARY.match(content_type)
        if match is None:
            message = f"the content type is {content_type[:100]!r}: it must be multipart/form-data with a boundary"
            raise InvalidRequestError(message, "content-type")
        self._delimiter = b"\r\n--" + (match[1] or match[2]).encode("latin-1", "replace")
        self._chunks, self._buffer, self._num_parts = chunks, bytearray(b"\r\n"), 0

    async def _fill(self) -> None:
        chunk = await anext(self._chunks, b"")
        if not chunk:  # an empty one is the last
            raise InvalidRequestError("the form ends before its last boundary", "body")
        self._buffer += chunk

    async def _take_until(self, mark: bytes, limit: int) -> bytes:
        while (end := self._buffer.find(mark)) < 0:
            if len(self._buffer) > limit:
                raise InvalidRequestError(f"a part of the form has a head or field over {limit} bytes", "body")
            await self._fill()
        taken = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return taken

    async def next_part(self) -> tuple[str, str | None] | None:
        """Return the name of the next part, and the name of its file; None at the end."""
        if self._num_parts == 0:
            await self._take_until(self._delimiter, MAX_HEAD_BYTES)
        while len(self._buffer) < 2:
            await self._fill()
        if self._buffer.startswith(b"--"):
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts", "body")
        head = await self._take_until(b"\r\n\r\n", MAX_HEAD_BYTES)
        name, filename = NAME.search(head), FILENAME.search(head)
        if name is None:
            raise InvalidRequestError("a part of the form has no name", "body")
        return name[1].decode(errors="replace"), None if filename is None else filename[1].decode(errors="replace")

    async def field(self) -> str:
        """Return the value of a part that is no file."""
        return (await self._take_until(self._delimiter, MAX_FIELD_BYTES)).decode(errors="replace")

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the bytes of a file."""
        while (end := self._buffer.find(self._delimiter)) < 0:
            if (ready := len(self._buffer) - len(self._delimiter)) >= CHUNK_BYTES:
                yield bytes(self._buffer[:ready])
                del self._buffer[:ready]
            await self._fill()
        yield bytes(self._buffer[:end])
        del self._buffer[: end + len(self._delimiter)]


def encode_file(file: StoredFile) -> dict[str, Any]:
    """Return a file as OpenAI shows it."""
    about = {"id": file.id, "object": "file", "bytes": file.bytes, "created_at": file.created_at, "status": "processed"}
    return {**about, "filename": file.filename, "purpose": file.purpose, "expires_at": file.expires_at}


def encode_batch(batch: Batch) -> dict[str, Any]:
    """Return a batch as OpenAI shows it."""
    state, counts = batch.state, batch.counts()
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
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                return encode_file(await self._receive(service, call))
        purpose = call.query.get("purpose")
        files = [file for file in service.store.files.values() if not file.purpose.startswith(REQUESTS)]
        chosen = [file for file in files if purpose in (None, "", file.purpose)]
        ordered = sorted(chosen, key=lambda file: (file.created_at, file.id), reverse=call.query.get("order") != "asc")
        return page_of(call.query, [encode_file(file) for file in ordered])

    async def _receive(self, service: BatchService, call: Call) -> StoredFile:
        form, fields, filename = FormReader(call.stream(), call.content_type), dict[str, str](), None
        upload: Upload | None = None
        try:
            while (part := await form.next_part()) is not None:
                name, part_file = part
                if part_file is None:
                    fields[name] = await form.field()
                    continue
                if name != "file" or upload is not None:
                    raise InvalidRequestError(
                        f"the form has a file {name[:100]!r}: it must have one, named file", "file"
                    )
                filename, upload = part_file, await storing(service.store.begin)
                async for data in form.content():
                    if upload.size + len(data) > MAX_FILE_BYTES:
                        raise PayloadTooLargeError(f"the file has more than {MAX_FILE_BYTES} bytes")
                    await storing(partial(upload.write, data))
            if upload is None or filename is None:
                raise InvalidRequestError("the form has no file", "file")
            expires_s = check_fields(fields)
            return await storing(partial(upload.finish, filename, fields["purpose"], expires_s))
        except TimeoutError:
            raise DeadlineError("the file did not arrive in time") from None
        finally:
            if upload is not None:
                upload.close()

    def _file(self, call: Call) -> tuple[BatchService, StoredFile]:
        service = batch_service(self._worker)
        file = service.store.get(call.path_params["id"])
        if file.purpose.startswith(REQUESTS):
            raise NotFoundError(f"there is no file {file.id!r}")
        return service, file

    async def file(self, call: Call) -> Any:
        service, file = self._file(call)
        if call.method == "GET":
            return encode_file(file)
        service.require_unused(file.id)
        await storing(partial(service.store.delete, file.id))
        return {"id": file.id, "object": "file", "deleted": True}

    async def content(self, call: Call) -> Any:
        service, file = self._file(call)
        return await storing(partial(stream_file, service, file.id, "application/octet-stream"))

    async def batches(self, call: Call) -> Any:
        service = batch_service(self._worker)
        if call.method == "GET":
            return page_of(call.query, [encode_batch(batch) for batch in service.listed("batch")])
        values = await self._worker.parse(BATCHES, await call.body())
        self._worker.require_ready()
        file_id, endpoint = values["input_file_id"], values["endpoint"]
        return encode_batch(await service.create("batch", endpoint, file_id, values["window_s"], values["metadata"]))

    async def batch(self, call: Call) -> Any:
        return encode_batch(batch_service(self._worker).get("batch", call.path_params["id"]))

    async def cancel(self, call: Call) -> Any:
        service = batch_service(self._worker)
        batch = service.get("batch", call.path_params["id"])
        await service.cancel(batch)
        return encode_batch(batch)

    def table(self) -> Mapping[str, Handler]:
        return {
            FILES: self.files,
            FILES + "/{id}": self.file,
            FILES + "/{id}/content": self.content,
            BATCHES: self.batches,
            BATCHES + "/{id}": self.batch,
            BATCHES + "/{id}/cancel": self.cancel,
        }


def check_fields(fields: Mapping[str, str]) -> int | None:
    """Check the fields of a form; return the seconds after which the file expires."""
    known = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
    if unknown := [name for name in fields if name not in known]:
        raise InvalidRequestError(f"the form has a field {unknown[0][:100]!r}: it may have {', '.join(known)}", "body")
    if fields.get("purpose") != "batch":
        raise InvalidRequestError(f"purpose is {fields.get('purpose', '')[:100]!r}: it must be batch", "purpose")
    seconds = fields.get(known[2])
    if seconds is None:
        return None
    if fields.get(known[1]) != "created_at" or not seconds.isdecimal():
        raise InvalidRequestError("expires_after must have the anchor created_at, and seconds", "expires_after")
    if not MIN_EXPIRY_S <= int(seconds[:12]) <= MAX_EXPIRY_S:
        message = f"expires_after[seconds] must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
        raise InvalidRequestError(message, "expires_after")
    return int(seconds)


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
