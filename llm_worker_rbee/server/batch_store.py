"""The lines of batches, and what is on disk of them: files of clients, and journals, in the folder of --files-dir.

    file-<id>.data, file-<id>.json      the bytes of a file, and what is known of it; there is no file without both
    batch_<id>.journal                  one batch: its first state, its results, changes of its state

A journal is append-only: lines of a checksum and a JSON object. What a crash cut off is the end of the journal; a line
that does not verify is as if it were not there, so its request is answered again. A result counts once it is on disk
(`fsync`). One process uses a folder at a time. Names come from ids, never from clients, and links are not followed.
All of this blocks: it belongs to threads.

A line is `{"custom_id", "method": "POST", "url", "body"}`. Lines are parsed in the process for large bodies. They are
ordered by model, route and the beginnings of their prompts, so that prompts with a common prefix follow each other.
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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec

from ..engine.kv_store import open_folder
from ..errors import InvalidRequestError, NotFoundError, StorageFullError, human_bytes
from .schema import ParseOptions, decode_object

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DATA, ABOUT, JOURNAL, TEMPORARY, DAMAGED = ".data", ".json", ".journal", ".tmp", ".damaged"
FILE_ID, BATCH_ID = re.compile("file-[0-9a-f]{32}"), re.compile("(batch|msgbatch)_[0-9a-f]{32}")
MAX_FILES = 10_000
MAX_NAME = 255
LINES = "batch_lines"  # the name of their parser
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MESSAGES = "/v1/messages"
MAX_ID_CHARS = 512
LINES_BYTES = 1 << 20  # of lines that are parsed at a time
PREFIXES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10)  # bytes of prompts: lines are ordered by the digest of each
DIGEST_BYTES = 6
PARTS = ("tools", "system", "instructions", "messages", "prompt", "input")  # of a prompt, as templates have them
logger = logging.getLogger("llm_worker_rbee.server")


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a client, or of the results of a batch."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


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
    """A line of a journal: fields of the batch's state that change, or a result."""

    state: dict[str, Any] = {}
    result: Result | None = None


def encode_entry(entry: Entry) -> bytes:
    """Return the line of a journal."""
    payload = msgspec.json.encode(entry)
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def decode_entry(line: bytes) -> Entry | None:
    """Return the entry of a line of a journal; None if it does not verify."""
    try:
        if line[8:9] == b" " and line.endswith(b"\n") and int(line[:8], 16) == zlib.crc32(payload := line[9:-1]):
            return msgspec.json.decode(payload, type=Entry)
    except (ValueError, msgspec.MsgspecError):
        pass
    return None


class Journal:
    """The journal of one batch."""

    def __init__(self, folder: int, name: str) -> None:
        self.name, self._folder, self._lock = name, folder, threading.Lock()
        self._fd = os.open(name, WRITE & ~os.O_CREAT, dir_fd=folder)
        self._size = os.fstat(self._fd).st_size  # of whole lines, once it was read

    def __del__(self) -> None:
        if (fd := vars(self).pop("_fd", -1)) >= 0:
            os.close(fd)

    def entries(self) -> Iterator[Entry]:
        """Yield what verifies. At the end, what is after the last whole line is cut off."""
        end = num_damaged = 0
        with open(os.open(self.name, READ, dir_fd=self._folder), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                if (entry := decode_entry(line)) is None:
                    num_damaged += 1
                else:
                    yield entry
        if num_damaged:
            logger.warning("%d lines of %s are damaged: their requests are answered again", num_damaged, self.name)
        if end < self._size:
            os.ftruncate(self._fd, end)
        self._size = end

    def append(self, entries: Iterable[Entry]) -> None:
        """Write entries so that they survive a crash; after an error there is none of them."""
        data, written = memoryview(b"".join(map(encode_entry, entries))), 0
        with self._lock:
            try:
                while written < len(data):
                    written += os.pwrite(self._fd, data[written:], self._size + written)
                os.fsync(self._fd)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, self._size)
                raise
            self._size += len(data)


def write_file(folder: int, name: str, chunks: Iterable[bytes]) -> int:
    """Write a file whole or not at all; return its size."""
    temporary, size = name + TEMPORARY, 0
    try:
        with open(os.open(temporary, WRITE | os.O_TRUNC, 0o600, dir_fd=folder), "wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)
    return size


class FileStore:
    """The folder."""

    def __init__(self, path: str | Path, *, max_bytes: int, max_age_s: float, option: str = "files_dir") -> None:
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        try:
            self.folder = open_folder(path, option=option)
            fcntl.flock(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            used = error.errno in (errno.EAGAIN, errno.EACCES) and hasattr(self, "folder")
            why = "another process uses it: give each worker a folder of its own" if used else error.strerror
            raise InvalidRequestError(f"{option} is {path}: {why}", option) from None
        self.files: dict[str, StoredFile] = {}
        self.uploads: set[Upload] = set()
        self._scan()

    def close(self) -> None:
        os.close(self.folder)

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values()) + sum(upload.size for upload in self.uploads)

    def _scan(self) -> None:
        """Read what is here; remove what a crash left."""
        names = set(os.listdir(self.folder))
        for name in sorted(names):
            stem, suffix = os.path.splitext(name)
            if suffix == ABOUT and FILE_ID.fullmatch(stem):
                if (about := self._read_about(name, stem)) is not None and stem + DATA in names:
                    self.files[stem] = about
                else:
                    self._unlink(name)
        for name in names:
            stem, suffix = os.path.splitext(name)
            is_orphan = suffix == DATA and FILE_ID.fullmatch(stem) and stem not in self.files
            if is_orphan or suffix == TEMPORARY:
                self._unlink(name)

    def _read_about(self, name: str, file_id: str) -> StoredFile | None:
        try:
            with open(os.open(name, READ, dir_fd=self.folder), "rb") as file:
                about = msgspec.json.decode(file.read(1 << 16), type=StoredFile)
            size = os.stat(file_id + DATA, dir_fd=self.folder, follow_symlinks=False).st_size
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        return about if about.id == file_id and about.bytes == size else None

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self.folder)

    def require_room(self, size: int = 0) -> None:
        """Raise if clients may not keep so many bytes more."""
        if len(self.files) >= MAX_FILES:
            raise StorageFullError(f"there are {len(self.files)} files: delete some of them")
        if (total := self.num_bytes + size) > self.max_bytes:
            held, limit = human_bytes(total), human_bytes(self.max_bytes)
            raise StorageFullError(f"the files would have {held}, the limit is {limit}: delete some of them")

    def begin(self) -> Upload:
        """Return a file that is received in parts."""
        self.require_room()
        return Upload(self)

    def add(self, chunks: Iterable[bytes], filename: str, purpose: str, file_id: str | None = None) -> StoredFile:
        """Store a file of the worker's own: the results of a batch, which count for the limit but are not refused."""
        file_id = file_id or f"file-{uuid4().hex}"
        size = write_file(self.folder, file_id + DATA, chunks)
        return self.describe(file_id, filename, purpose, size)

    def describe(
        self, file_id: str, filename: str, purpose: str, size: int, expires_s: int | None = None
    ) -> StoredFile:
        """Make a file whose bytes are here known."""
        now = int(time.time())
        expires = None if expires_s is None else now + expires_s
        about = StoredFile(file_id, filename[:MAX_NAME], purpose, size, now, expires)
        write_file(self.folder, file_id + ABOUT, [msgspec.json.encode(about)])
        self.files[file_id] = about
        return about

    def get(self, file_id: str) -> StoredFile:
        if (about := self.files.get(file_id)) is None:
            raise NotFoundError(f"there is no file {file_id[:100]!r}")
        return about

    def open(self, file_id: str) -> int:
        """Return a descriptor of the bytes of a file."""
        return os.open(self.get(file_id).id + DATA, READ, dir_fd=self.folder)

    def delete(self, file_id: str) -> None:
        self.get(file_id)
        self._unlink(file_id + ABOUT)
        self._unlink(file_id + DATA)
        del self.files[file_id]

    def create_journal(self, batch_id: str, state: dict[str, Any]) -> Journal:
        """Return the journal of a new batch, or of one that has ended, with this state alone."""
        write_file(self.folder, batch_id + JOURNAL, [encode_entry(Entry(state))])
        return Journal(self.folder, batch_id + JOURNAL)

    def journals(self) -> Iterator[tuple[str, Journal]]:
        """Yield the journals of earlier runs, by the ids of their batches."""
        for name in sorted(os.listdir(self.folder)):
            stem, suffix = os.path.splitext(name)
            if suffix == JOURNAL and BATCH_ID.fullmatch(stem):
                try:
                    yield stem, Journal(self.folder, name)
                except OSError as error:
                    logger.error("%s cannot be opened: %s", name, error.strerror)

    def set_aside(self, journal: Journal) -> None:
        """Rename a journal that cannot be used."""
        logger.error("%s is damaged: it is set aside", journal.name)
        with suppress(OSError):
            os.replace(journal.name, journal.name + DAMAGED, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def delete_journal(self, batch_id: str) -> None:
        self._unlink(batch_id + JOURNAL)

    def expired(self, now: float) -> list[str]:
        """Return the files that are too old."""
        ages = ((file, file.expires_at or file.created_at + self.max_age_s) for file in self.files.values())
        return [file.id for file, end in ages if end <= now]


class Upload:
    """A file that is received in parts; nothing is left of one that is not finished."""

    def __init__(self, store: FileStore) -> None:
        self._store, self._id, self.size = store, f"file-{uuid4().hex}", 0
        self._fd = os.open(self._id + TEMPORARY, WRITE | os.O_EXCL, 0o600, dir_fd=store.folder)
        store.uploads.add(self)

    def write(self, data: bytes) -> None:
        self._store.require_room(len(data))
        written = 0
        while written < len(data):
            written += os.write(self._fd, data[written:])
        self.size += len(data)

    def finish(self, filename: str, purpose: str, expires_s: int | None) -> StoredFile:
        """Keep the file."""
        folder, name = self._store.folder, self._id + DATA
        os.fsync(self._fd)
        os.replace(self._id + TEMPORARY, name, src_dir_fd=folder, dst_dir_fd=folder)
        return self._store.describe(self._id, filename, purpose, self.size, expires_s)

    def close(self) -> None:
        """End the upload; drop what was not kept."""
        os.close(self._fd)
        self._store.uploads.discard(self)
        for suffix in (TEMPORARY, *(() if self._id in self._store.files else (DATA,))):
            self._store._unlink(self._id + suffix)


class LineHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is known of a line before it is answered."""

    custom_id: str | None = None
    url: str = ""
    order: bytes = b""
    error: str | None = None
    is_blank: bool = False


class Line(msgspec.Struct, frozen=True, gc=False):
    """A line, and where it is in its file."""

    number: int  # from 1
    offset: int
    size: int
    head: LineHead


class Envelope(msgspec.Struct):
    """A line that was parsed before, for its body."""

    body: msgspec.Raw


def parse_lines(data: bytes, _: ParseOptions) -> list[LineHead]:
    """Return the heads of lines; one that is not valid has its error."""
    return [parse_line(line) for line in data.removesuffix(b"\n").split(b"\n")]


def parse_line(line: bytes) -> LineHead:
    """Return the head of a line."""
    if not line.strip():
        return LineHead(is_blank=True)
    try:
        value = decode_object(line)
    except InvalidRequestError as error:
        return LineHead(error=str(error).replace("the body", "the line", 1))
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        return LineHead(error=f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters")
    if value.get("method", "POST") != "POST":
        return LineHead(custom_id, error="method must be POST")
    if url not in (*ENDPOINTS, MESSAGES):
        return LineHead(custom_id, error=f"url must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        return LineHead(custom_id, error="body must be an object")
    if body.get("stream"):
        return LineHead(custom_id, error="stream must be false: a batch has whole replies")
    return LineHead(custom_id, url, order_of(url, body))


def order_of(url: str, body: dict[str, Any]) -> bytes:
    """Return the sort key of a line."""
    text = b"".join(msgspec.json.encode(body[name]) for name in PARTS if body.get(name) is not None)
    digests = [blake2b(str(body.get("model")).encode(errors="replace") + url.encode(), digest_size=DIGEST_BYTES)]
    digests += [blake2b(text[:size], digest_size=DIGEST_BYTES) for size in PREFIXES]
    return b"".join(digest.digest() for digest in digests)


def read_chunks(file: BinaryIO, max_line: int) -> Iterator[list[tuple[int, int, bytes]]]:
    """Yield lists of lines: number, offset, bytes; a line over `max_line` is cut to `max_line` + 1 bytes."""
    chunk, size, number, offset = list[tuple[int, int, bytes]](), 0, 0, 0
    while line := file.readline(max_line + 1):
        number, start = number + 1, offset
        offset += len(line)
        while not line.endswith(b"\n") and (rest := file.readline(LINES_BYTES)):
            offset += len(rest)
            line = line if len(line) > max_line else line + rest
            if rest.endswith(b"\n"):
                break
        chunk.append((number, start, line.rstrip(b"\r\n")))
        size += len(line)
        if size >= LINES_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


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
