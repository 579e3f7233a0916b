"""KV blocks on disk: a folder of append-only segments, found by the hashes of the prefix cache.

    FOLDER/models.json                      digests of model files, by device, inode, size and time of change
    FOLDER/<namespace>/<time>-<pid>-<n>.kv  a segment: a header, then records

A namespace stands for everything that the bits of a block depend on beside its tokens: model, KV type, shapes, backend
and kernels. A segment has one writer, the process that made it, and any number of readers. A record is a header with
the block's hash, its token ids and two checksums, then the bytes of the block. A record that was cut off by a crash is
the end of its segment; what does not verify is never used, and its segment is set aside. Nothing is mapped: a file that
is cut while it is read gives a short read. No arrays here, and nothing of requests.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidRequestError, human_bytes

VERSION = 1
MAGIC, RECORD = b"RBEEKV\0\1", b"KVB1"
SEGMENT_HEADER = struct.Struct("<8sII16sI")  # magic, version, tokens of a block, namespace, checksum of these
RECORD_HEADER = struct.Struct("<4sI16sQ")  # magic, number of ids, hash, bytes of the block; then ids, two checksums
CHECKSUMS = struct.Struct("<II")  # of the block, and of all that stands before this number
SEGMENT_BYTES = 64 << 20
MIN_SEGMENTS = 4  # in the limit, so that eviction never takes most of it
SUFFIX, DAMAGED = ".kv", ".damaged"
REFRESH_S = 1.0  # between two looks for what other processes wrote
TOUCH_S = 60.0  # between two marks of a segment's last use
RETRY_S = 60.0  # after a write that failed
MODELS, MAX_MODELS = "models.json", 256
ABOUT = "about.json"  # of a namespace
SHA256 = re.compile("[0-9a-f]{64}")
logger = logging.getLogger("llm_worker_rbee.engine")


@dataclass(slots=True)
class TierStats:
    """What an engine read from disk and wrote to it since it started."""

    num_read_blocks: int = 0
    num_written_blocks: int = 0
    num_failed_blocks: int = 0  # that did not verify: they were computed
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    num_evicted_segments: int = 0
    num_waiting_blocks: int = 0  # to be written, now


class Place(NamedTuple):
    """Where a record is."""

    segment: Segment
    offset: int
    size: int  # of the block


class Segment:
    """A file of records, open for reading."""

    def __init__(self, name: str, fd: int, end: int) -> None:
        self.name, self.fd, self.end = name, fd, end  # records before `end` are in the index
        self.touched_at = 0.0

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


def open_folder(path: str | Path, *, create: bool = True) -> int:
    """Return the descriptor of a folder that is this user's alone; make it if it is missing. Raise if others could read
    or replace what is in it."""
    if create:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise InvalidRequestError(f"kv_dir is {path}: it is a link or a file, not a folder", "kv_dir") from None
        raise
    info = os.fstat(fd)
    problem = ""
    if info.st_uid != os.geteuid():
        problem = "it belongs to another user: name a folder of your own"
    elif info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = f"other users may open it (mode {stat.S_IMODE(info.st_mode):o}): run `chmod 700 {path}`"
    if problem:
        os.close(fd)
        raise InvalidRequestError(f"kv_dir is {path}: {problem}", "kv_dir")
    return fd


def check_folder(path: str | Path) -> None:
    """Raise if a folder cannot be used, with the remedy."""
    try:
        os.close(open_folder(path))
    except OSError as error:
        raise InvalidRequestError(f"kv_dir is {path}: {error.strerror}", "kv_dir") from None


def model_digest(folder: int, files: Sequence[Path]) -> bytes:
    """Return a digest of the contents of model files; one that was computed before is kept by inode, size and time."""
    facts = [[info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns] for info in map(os.stat, files)]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    known = _read_object(folder, MODELS)
    if not isinstance(known.get(key), str) or not SHA256.fullmatch(known[key]):
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        known = dict([*known.items(), (key, digest.hexdigest())][-MAX_MODELS:])
        with suppress(OSError):  # it is computed again next time
            _replace_file(folder, MODELS, json.dumps(known).encode())
    return bytes.fromhex(known[key])


def _read_object(folder: int, name: str) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one where there is none."""
    with suppress(OSError, ValueError):
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)) as file:
            value = json.load(file)
        return value if isinstance(value, dict) else {}
    return {}


def _replace_file(folder: int, name: str, data: bytes) -> None:
    temporary = f"{name}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


class BlockStore:
    """The blocks of one namespace. One thread may write while others read."""

    def __init__(
        self,
        folder: int,
        namespace: bytes,
        block_size: int,
        max_bytes: int,
        max_age_s: float | None = None,
        about: Mapping[str, object] | None = None,
    ) -> None:
        """`folder`, of `open_folder`, becomes the store's own; `max_bytes` counts all namespaces in it; `about` is for
        people."""
        self._folder, self._block_size = folder, block_size
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._segment_bytes = min(SEGMENT_BYTES, max(max_bytes // MIN_SEGMENTS, 1))
        self._header = SEGMENT_HEADER.pack(MAGIC, VERSION, block_size, namespace, 0)[:-4]
        self._header += zlib.crc32(self._header).to_bytes(4, "little")
        name = namespace.hex()
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
        self._fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with suppress(OSError):
            _replace_file(self._fd, ABOUT, json.dumps(about or {}).encode())
        self._segments: dict[str, Segment] = {}
        self._index: dict[bytes, Place] = {}
        self._lock = threading.Lock()  # of the two above
        self._writing: Segment | None = None
        self._num_made, self._refreshed_at, self._retry_at = 0, 0.0, 0.0
        self.num_evicted = self.num_damaged = 0
        self.refresh()

    def __del__(self) -> None:
        for name in ("_fd", "_folder"):
            with suppress(OSError, AttributeError):
                os.close(getattr(self, name))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def _head_bytes(self) -> int:
        return RECORD_HEADER.size + 8 * self._block_size + CHECKSUMS.size

    def find(self, block_hash: bytes) -> Place | None:
        """Return where a block is, if it is here."""
        return self._index.get(block_hash)

    def refresh(self) -> None:
        """Take in what other processes wrote, or removed."""
        self._refreshed_at = time.monotonic()
        names = {name for name in os.listdir(self._fd) if name.endswith(SUFFIX)}
        for name in self._segments.keys() - names:
            self._forget(name)
        for name in sorted(names):
            segment = self._segments.get(name) or self._open(name)
            if segment is not None and segment is not self._writing:
                self._scan(segment)

    def refresh_if_due(self) -> None:
        """Do so if the last time is a while ago."""
        if time.monotonic() - self._refreshed_at >= REFRESH_S:
            with suppress(OSError):
                self.refresh()

    def read(self, place: Place, block_hash: bytes, ids: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Read a block into `parts`; return whether it is this block, whole. Otherwise they hold anything, and the
        segment is set aside."""
        segment, head = place.segment, bytearray(self._head_bytes)
        try:
            size = os.preadv(segment.fd, [head, *parts], place.offset)
        except OSError as error:
            self._set_aside(segment, error.strerror or str(error))
            return False
        expected = self._head(block_hash, ids, place.size, _checksum(parts))
        if size == len(head) + place.size == len(head) + sum(map(len, parts)) and head == expected:
            self._touch(segment)
            return True
        self._set_aside(segment, "a block does not have its checksum or its tokens")
        return False

    def write(self, block_hash: bytes, ids: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Append a block; return False if it cannot be written now, for example because the disk is full."""
        if block_hash in self._index:
            return True
        if time.monotonic() < self._retry_at:
            return False
        size, checksum = sum(map(len, parts)), _checksum(parts)
        try:
            segment = self._segment_for(self._head_bytes + size)
            self._append(segment, [self._head(block_hash, ids, size, checksum), *parts])
        except OSError as error:
            self._retry_at, self._writing = time.monotonic() + RETRY_S, None
            logger.warning("keys and values are not written to kv_dir for %.0f s: %s", RETRY_S, error.strerror)
            return False
        with self._lock:
            self._index[block_hash] = Place(segment, segment.end, size)
            segment.end += self._head_bytes + size
        return True

    def _head(self, block_hash: bytes, ids: Sequence[int], size: int, checksum: int) -> bytes:
        head = RECORD_HEADER.pack(RECORD, len(ids), block_hash, size) + array("q", ids).tobytes()
        head += checksum.to_bytes(4, "little")
        return head + zlib.crc32(head).to_bytes(4, "little")

    def _append(self, segment: Segment, buffers: Sequence[bytes | memoryview]) -> None:
        size = sum(map(len, buffers))
        if os.pwritev(segment.fd, buffers, segment.end) != size:
            with suppress(OSError):
                os.ftruncate(segment.fd, segment.end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _segment_for(self, size: int) -> Segment:
        """Return the segment that is written, or a new one if it has no room."""
        segment = self._writing
        if segment is None or segment.end + size > self._segment_bytes:
            self._make_room()
            segment = self._writing = self._make_segment()
        return segment

    def _make_segment(self) -> Segment:
        name = f"{time.time_ns():016x}-{os.getpid()}-{self._num_made}{SUFFIX}"
        self._num_made += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        segment = Segment(name, os.open(name, flags, 0o600, dir_fd=self._fd), 0)
        self._append(segment, [self._header])
        segment.end = len(self._header)
        self._segments[name] = segment
        return segment

    def _open(self, name: str) -> Segment | None:
        """Open a segment of another process; return None if it is none of this namespace and version."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        segment, info = Segment(name, fd, len(self._header)), os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            return None
        head = os.pread(fd, len(self._header), 0)
        if head != self._header:
            if len(head) == len(self._header):  # a shorter one is being made
                self._set_aside(segment, "it is of another version or namespace")
            return None
        with self._lock:
            self._segments[name] = segment
        return segment

    def _scan(self, segment: Segment) -> None:
        """Add the records of a segment that are not in the index; a damaged header ends it."""
        size = os.fstat(segment.fd).st_size
        while segment.end + self._head_bytes <= size:
            head = os.pread(segment.fd, self._head_bytes, segment.end)
            if len(head) < self._head_bytes or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
                return
            magic, count, block_hash, nbytes = RECORD_HEADER.unpack_from(head)
            if magic != RECORD or count != self._block_size or segment.end + len(head) + nbytes > size:
                return
            with self._lock:
                self._index.setdefault(block_hash, Place(segment, segment.end, nbytes))
            segment.end += len(head) + nbytes

    def _touch(self, segment: Segment) -> None:
        """Mark that a segment was used, for eviction."""
        now = time.monotonic()
        if now - segment.touched_at > TOUCH_S:
            segment.touched_at = now
            with suppress(OSError):
                os.utime(segment.fd)

    def _set_aside(self, segment: Segment, why: str) -> None:
        """Rename a segment, so that nobody reads it again."""
        self.num_damaged += 1
        logger.warning("kv_dir: the segment %s is set aside: %s", segment.name, why)
        with suppress(OSError):
            os.rename(segment.name, segment.name + DAMAGED, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._forget(segment.name)

    def _forget(self, name: str) -> None:
        with self._lock:
            segment = self._segments.pop(name, None)
            if segment is self._writing:
                self._writing = None
            for block_hash in [key for key, place in self._index.items() if place.segment is segment]:
                del self._index[block_hash]

    def _make_room(self) -> None:
        """Remove segments that are too old, and those that were used least recently, until a new one has room."""
        files = sorted(list_files(self._folder), key=lambda file: file.used_at)
        total, oldest = sum(file.size for file in files), time.time() - (self._max_age_s or float("inf"))
        for file in files:
            if total + self._segment_bytes <= self._max_bytes and file.used_at >= oldest:
                break
            with suppress(OSError):
                os.unlink(f"{file.namespace}/{file.name}", dir_fd=self._folder)
                total -= file.size
                self.num_evicted += 1
        self.refresh()


def _checksum(parts: Sequence[memoryview]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


class StoredFile(NamedTuple):
    """A segment in a folder."""

    namespace: str
    name: str
    size: int
    used_at: float

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name} ({human_bytes(self.size)})"


def read_about(folder: int, namespace: str) -> dict[str, Any]:
    """Return what a namespace says of itself, for people."""
    return _read_object(folder, f"{namespace}/{ABOUT}")


def check_segment(folder: int, file: StoredFile) -> tuple[int, bool]:
    """Return how many blocks of a segment verify, and whether there is anything else in it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(f"{file.namespace}/{file.name}", flags, dir_fd=folder), "rb") as data:
        header = data.read(SEGMENT_HEADER.size)
        if len(header) < SEGMENT_HEADER.size or zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "little"):
            return 0, True
        magic, version, block_size, namespace, _ = SEGMENT_HEADER.unpack(header)
        if (magic, version, namespace.hex()) != (MAGIC, VERSION, file.namespace):
            return 0, True
        count, size = 0, RECORD_HEADER.size + 8 * block_size + CHECKSUMS.size
        while head := data.read(size):
            if len(head) < size or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
                return count, True
            nbytes = RECORD_HEADER.unpack_from(head)[3]
            block = data.read(nbytes) if nbytes <= file.size else b""
            if len(block) < nbytes or zlib.crc32(block) != CHECKSUMS.unpack_from(head, size - CHECKSUMS.size)[0]:
                return count, True
            count += 1
        return count, False


def remove_files(folder: int, files: Sequence[StoredFile]) -> int:
    """Remove segments, and namespaces that become empty; return the bytes."""
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            os.unlink(f"{file.namespace}/{file.name}", dir_fd=folder)
            total += file.size
    for namespace in {file.namespace for file in files} - {file.namespace for file in list_files(folder)}:
        with suppress(FileNotFoundError):
            os.unlink(f"{namespace}/{ABOUT}", dir_fd=folder)
        with suppress(OSError):  # what is not ours stays
            os.rmdir(namespace, dir_fd=folder)
    return total


def list_files(folder: int) -> Iterator[StoredFile]:
    """Return all segments in a folder, those set aside too."""
    for namespace in os.listdir(folder):
        try:
            fd = os.open(namespace, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            continue
        try:
            for name in os.listdir(fd):
                with suppress(OSError):
                    info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode) and name.endswith((SUFFIX, SUFFIX + DAMAGED)):
                        yield StoredFile(namespace, name, info.st_size, info.st_mtime)
        finally:
            os.close(fd)
