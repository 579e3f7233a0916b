"""What is on disk of files and batches, in the folder of --files-dir, and the lines of batches.

    file-<id>            a line of JSON about the file, then its bytes
    batch_<id>.journal   one batch: its first state, its results, changes of its state

Files are written under another name, synced and renamed: they are here whole or not at all. A journal is append-only;
the state of a batch is what its entries add up to. An entry is a line of a checksum and a JSON object, with another
line break before it: one that a crash cut off damages no other. One that does not verify is as if it were not there,
and its request is answered again. A result counts once it is on disk (`fsync`). One process uses a folder at a time.
Names come from ids, never from clients, and links are not followed. All of this blocks: it belongs to threads.

A line is `{"custom_id", "method": "POST", "url", "body"}`. Lines are ordered by model, route and the beginnings of
their prompts, so that prompts with a common prefix follow each other.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import msgspec

from ..engine.kv_store import open_folder
from ..errors import InvalidRequestError, NotFoundError, StorageFullError, human_bytes

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
JOURNAL, TEMPORARY = ".journal", ".tmp"
FILE_ID, BATCH_ID = re.compile("file-[0-9a-f]{32}"), re.compile("(batch|msgbatch)_[0-9a-f]{32}")
MAX_FILES = 10_000
MAX_NAME = 255
MAX_ABOUT_BYTES = 4 << 10
CHUNK_BYTES = 1 << 20
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MESSAGES, EMBEDDINGS = "/v1/messages", ENDPOINTS[3]
MAX_LINES, MAX_FILE_BYTES = 50_000, 200 << 20  # as OpenAI has them
MAX_ID_CHARS = 512
PREFIXES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10)  # bytes of prompts: lines are ordered by the digest of each
DIGEST_BYTES = 6
PARTS = ("tools", "system", "instructions", "messages", "prompt", "input")  # of a prompt, as templates have them
logger = logging.getLogger("llm_worker_rbee.server")


class StoredFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a client, or of the results of a batch."""

    id: str
    filename: str
    purpose: str
    created_at: int
    expires_at: int | None = None
    bytes: int = 0  # as the folder has it


class Result(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The result of one line: a reply, or the error that is in its place."""

    line: int  # from 1
    custom_id: str | None
    status: int = 0  # of the reply; 0: there is none
    request_id: str = ""
    body: msgspec.Raw = msgspec.Raw(b"null")
    code: str | None = None  # of the error
    message: str = ""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of a journal: fields of the batch's state that change, or a result."""

    state: dict[str, Any] = {}
    result: Result | None = None


def encode_entry(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    payload = msgspec.json.encode(entry)
    return b"\n%08x %b\n" % (zlib.crc32(payload), payload)


def decode_entry(line: bytes) -> Entry | None:
    """Return the entry of a line of a journal; None if it does not verify."""
    payload = line[9:].removesuffix(b"\n")
    with suppress(ValueError, msgspec.MsgspecError):
        if int(line[:8], 16) == zlib.crc32(payload):
            return msgspec.json.decode(payload, type=Entry)
    return None


def write_all(file: FileIO, data: bytes) -> None:
    """Write to a file without a buffer; raise if there is no room for all of it."""
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Journal:
    """The journal of one batch. It is open only while it is read or written: there may be thousands."""

    def __init__(self, folder: int, name: str) -> None:
        self.name, self._folder, self._lock = name, folder, threading.Lock()

    def entries(self) -> Iterator[Entry]:
        """Yield what verifies."""
        num_damaged = 0
        with open(os.open(self.name, READ, dir_fd=self._folder), "rb") as file:
            for line in file:
                if (entry := decode_entry(line)) is not None:
                    yield entry
                else:
                    num_damaged += line != b"\n"
        if num_damaged:
            logger.warning("%d lines of %s are damaged: their requests are answered again", num_damaged, self.name)

    def append(self, entries: Iterable[Entry]) -> None:
        """Write entries so that they survive a crash; after an error there is none of them."""
        data = b"".join(map(encode_entry, entries))
        with self._lock, open(os.open(self.name, APPEND, dir_fd=self._folder), "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                write_all(file, data)
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise


class FileStore:
    """The folder."""

    def __init__(self, path: str | Path, max_bytes: int, max_age_s: float, *, option: str = "files_dir") -> None:
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        try:
            self.folder = open_folder(path, option=option)
            fcntl.flock(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            used = error.errno in (errno.EAGAIN, errno.EACCES) and hasattr(self, "folder")
            why = "another process uses it: give each worker a folder of its own" if used else error.strerror
            raise InvalidRequestError(f"{option} is {path}: {why}", option) from None
        self.files: dict[str, StoredFile] = {}
        self.journals: dict[str, Journal] = {}  # of earlier runs, by the ids of their batches
        self.num_received = 0  # bytes of uploads that are under way
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(TEMPORARY):
                self._unlink(name)  # a crash left it
            elif FILE_ID.fullmatch(name):
                self._read_about(name)
            elif BATCH_ID.fullmatch(stem := name.removesuffix(JOURNAL)) and stem != name:
                self.journals[stem] = Journal(self.folder, name)

    def close(self) -> None:
        os.close(self.folder)

    def _read_about(self, name: str) -> None:
        """Enter a file that is here."""
        try:
            with self._open(name) as file:
                about = msgspec.json.decode(file.readline(MAX_ABOUT_BYTES), type=StoredFile)
                size = os.fstat(file.fileno()).st_size - file.tell()
        except (OSError, ValueError, msgspec.MsgspecError):
            logger.error("%s cannot be read: it is left out", name)
            return
        self.files[name] = msgspec.structs.replace(about, id=name, bytes=size)

    def _open(self, name: str) -> BinaryIO:
        return open(os.open(name, READ, dir_fd=self.folder), "rb")

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self.folder)

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in list(self.files.values())) + self.num_received

    def require_room(self, size: int = 0) -> None:
        """Raise if clients may not keep so many bytes more."""
        if len(self.files) >= MAX_FILES:
            raise StorageFullError(f"there are {len(self.files)} files: delete some of them")
        if (total := self.num_bytes + size) > self.max_bytes:
            held, limit = human_bytes(total), human_bytes(self.max_bytes)
            raise StorageFullError(f"the files would have {held}, the limit is {limit}: delete some of them")

    def write(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write a file whole or not at all; return its size."""
        temporary, size = name + TEMPORARY, 0
        self._unlink(temporary)
        try:
            with open(os.open(temporary, CREATE, 0o600, dir_fd=self.folder), "wb") as file:
                for chunk in chunks:
                    size += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except BaseException:
            self._unlink(temporary)
            raise
        os.fsync(self.folder)
        return size

    def add(
        self,
        chunks: Iterable[bytes],
        filename: str,
        purpose: str,
        *,
        file_id: str | None = None,
        expires_s: int | None = None,
    ) -> StoredFile:
        """Store a file."""
        now, file_id = int(time.time()), file_id or f"file-{uuid4().hex}"
        expires = None if expires_s is None else now + expires_s
        about = StoredFile(file_id, filename[:MAX_NAME], purpose, now, expires)
        head = msgspec.json.encode(about) + b"\n"

        def parts() -> Iterator[bytes]:
            yield head
            yield from chunks

        size = self.write(file_id, parts()) - len(head)
        self.files[file_id] = about = msgspec.structs.replace(about, bytes=size)
        return about

    def get(self, file_id: str) -> StoredFile:
        if (about := self.files.get(file_id)) is None:
            raise NotFoundError(f"there is no file {file_id[:100]!r}")
        return about

    def open(self, file_id: str) -> BinaryIO:
        """Return a file, open at its first byte."""
        try:
            file = self._open(self.get(file_id).id)
        except OSError as error:
            raise NotFoundError(f"the file {file_id!r} cannot be read: {error.strerror}") from None
        file.readline(MAX_ABOUT_BYTES)
        return file

    def read(self, file_id: str) -> Iterator[bytes]:
        """Open a file, and return its bytes in parts."""
        file = self.open(file_id)

        def parts() -> Iterator[bytes]:
            with file:
                yield from iter(partial(file.read, CHUNK_BYTES), b"")

        return parts()

    def delete(self, file_id: str) -> None:
        self._unlink(self.get(file_id).id)
        self.files.pop(file_id, None)  # another thread may have deleted it

    @contextmanager
    def receive(self) -> Iterator[tuple[FileIO, Callable[[bytes], None]]]:
        """Provide a file without a name, of which a crash leaves nothing, and what writes to it within the limits."""
        self.require_room()
        name, size = uuid4().hex + TEMPORARY, 0
        with open(os.open(name, CREATE, 0o600, dir_fd=self.folder), "w+b", buffering=0) as file:
            os.unlink(name, dir_fd=self.folder)

            def write(data: bytes) -> None:
                nonlocal size
                self.require_room(len(data))
                write_all(file, data)
                size, self.num_received = size + len(data), self.num_received + len(data)

            try:
                yield file, write
            finally:
                self.num_received -= size

    def create_journal(self, batch_id: str, state: dict[str, Any]) -> Journal:
        """Return the journal of a new batch, or of one that has ended, with this state alone."""
        self.write(batch_id + JOURNAL, [encode_entry(Entry(state))])
        return Journal(self.folder, batch_id + JOURNAL)

    def delete_journal(self, batch_id: str) -> None:
        self._unlink(batch_id + JOURNAL)


class Line(NamedTuple):
    """A line of a batch, and where it is in its file."""

    number: int  # from 1
    offset: int
    size: int
    custom_id: str | None = None
    url: str = ""
    order: bytes = b""
    error: str | None = None


class Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """What a line is read for before it is answered; its body is left to the parser of its route."""

    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


def plan_lines(file: BinaryIO, endpoint: str | None, max_line: int) -> list[Line]:
    """Return the lines of a batch in the order of work; those that cannot be answered have their errors."""
    lines, numbers = list[Line](), dict[str, int]()
    for number, (offset, data) in enumerate(read_lines(file, max_line), 1):
        if (data and len(lines) == MAX_LINES) or number > 2 * MAX_LINES:
            raise InvalidRequestError(f"the file has more than {MAX_LINES} lines", "too_many_lines")
        if not data:
            continue
        line = parse_line(Line(number, offset, len(data)), data, endpoint, max_line)
        if line.custom_id is not None and (first := numbers.setdefault(line.custom_id, number)) != number:
            error = f"custom_id {line.custom_id[:100]!r} is the id of line {first} already"
            line = line._replace(custom_id=None, error=error)
        lines.append(line)
    if not lines:
        raise InvalidRequestError("the file has no lines", "empty_file")
    lines.sort(key=lambda line: (line.order, line.number))
    return lines


def read_lines(file: BinaryIO, max_line: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offsets and bytes of lines; of a line over `max_line` one byte more than that."""
    offset = file.tell()
    while data := file.readline(max_line + 1):
        size, rest = len(data), data
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(CHUNK_BYTES)
            size += len(rest)
        yield offset, data.rstrip()
        offset += size


def parse_line(line: Line, data: bytes, endpoint: str | None, max_line: int) -> Line:
    """Return a line with what its text says; one that is not valid has its error."""
    if line.size > max_line:
        return line._replace(error=f"the line is longer than {max_line} bytes")
    try:
        envelope = msgspec.json.decode(data, type=Envelope)
    except RecursionError:
        return line._replace(error="the line is nested too deeply")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return line._replace(error=f"the line is not a request: {error}")
    custom_id, url = envelope.custom_id, envelope.url
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        return line._replace(error=f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters")
    line = line._replace(custom_id=custom_id)
    if envelope.method != "POST":
        return line._replace(error="method must be POST")
    if url not in ((*ENDPOINTS, MESSAGES) if endpoint is None else (endpoint,)):
        return line._replace(error=f"url must be {endpoint or ' or '.join(ENDPOINTS)}")
    try:
        body = msgspec.json.decode(envelope.body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return line._replace(error="body must be an object")
    return line._replace(url=url, order=order_of(url, body))


def order_of(url: str, body: Mapping[str, bytes | msgspec.Raw]) -> bytes:
    """Return the sort key of a line: the digests of its model and route, and of longer and longer beginnings."""
    text = b"".join(bytes(body.get(name, b""))[: PREFIXES[-1]] for name in PARTS)
    keys = url.encode() + bytes(body.get("model", b"")), *(text[:size] for size in PREFIXES)
    return b"".join(blake2b(key, digest_size=DIGEST_BYTES).digest() for key in keys)


def print_openai(result: Result, batch_id: str) -> bytes:
    """Return the line of a result in OpenAI's form."""
    response = {"status_code": result.status, "request_id": result.request_id, "body": result.body}
    error = None if result.code is None else {"code": result.code, "message": result.message}
    line = {
        "id": f"batch_req_{batch_id[-8:]}{result.line:024x}",
        "custom_id": result.custom_id,
        "response": response if result.status else None,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"


def print_anthropic(result: Result, _: str) -> bytes:
    """Return the line of a result in Anthropic's form."""
    outcome: dict[str, Any] = {"type": "succeeded", "message": result.body}
    if result.code in ("batch_cancelled", "batch_expired"):
        outcome = {"type": "canceled" if result.code == "batch_cancelled" else "expired"}
    elif not result.is_success:
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": result.message}}
        outcome = {"type": "errored", "error": result.body if result.status else error}
    return msgspec.json.encode({"custom_id": result.custom_id, "result": outcome}) + b"\n"
