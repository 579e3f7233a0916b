"""KV blocks on disk: a folder of append-only segments, found by the hashes of the prefix cache.

    FOLDER/models.json                      digests of model files, by device, inode, size and times
    FOLDER/<namespace>/<time>-<pid>-<n>.kv  a segment: a header, then records

A namespace stands for everything that the bits of a block depend on beside its tokens: model, KV type, shapes, backend
and kernels. A segment has one writer, the process that made it, and any number of readers. A record is a header with
the block's hash, its token ids and two checksums, then the bytes of the block. A record that was cut off by a crash is
the end of its segment; what does not verify is never used, and its segment is set aside. Nothing is mapped: a file that
is cut while it is read gives a short read. A record without bytes says that the blocks of this hash before it are not
to be used. Files are open only while they are read, and the one that is written. No arrays here, and nothing of
requests.
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

from ..errors import InvalidRequestError, ModelFileError, human_bytes

VERSION = 1
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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
AGE_CHECK_S = 600.0  # between two looks for segments that are too old
MODELS, MAX_MODELS = "models.json", 256
ABOUT, COST = "about.json", "seconds_per_byte"  # of a namespace
CHUNK_BYTES = 8 << 20
SHA256 = re.compile("[0-9a-f]{64}")
logger = logging.getLogger("llm_worker_rbee.engine")


@dataclass(slots=True)
class TierStats:
    """What an engine read from disk and wrote to it since it started, and read from the host's memory."""

    num_read_blocks: int = 0
    num_written_blocks: int = 0
    num_failed_blocks: int = 0  # that did not verify: they were computed
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    num_evicted_segments: int = 0
    num_waiting_blocks: int = 0  # to be written, now
    num_ram_blocks: int = 0  # in the host's memory, now
    num_ram_read_blocks: int = 0
    ram_read_bytes: int = 0


class Place(NamedTuple):
    """Where a record is."""

    segment: Segment
    offset: int
    size: int  # of the block


class Segment:
    """A file of records; those before `end` are in the index."""

    def __init__(self, name: str, end: int) -> None:
        self.name, self.end = name, end
        self.touched_at = 0.0


def open_folder(path: str | Path, *, create: bool = True, option: str = "kv_dir") -> int:
    """Return the descriptor of a folder that is this user's alone; make it if it is missing. Raise if others could read
    or replace what is in it."""
    if create:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        fd = os.open(path, READ | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise InvalidRequestError(f"{option} is {path}: it is a link or a file, not a folder", option) from None
        raise
    info = os.fstat(fd)
    problem = ""
    if info.st_uid != os.geteuid():
        problem = "it belongs to another user: name a folder of your own"
    elif info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = f"other users may open it (mode {stat.S_IMODE(info.st_mode):o}): run `chmod 700 {path}`"
    if problem:
        os.close(fd)
        raise InvalidRequestError(f"{option} is {path}: {problem}", option)
    return fd


def check_folder(path: str | Path) -> None:
    """Raise if a folder cannot be used, with the remedy."""
    try:
        os.close(open_folder(path))
    except OSError as error:
        raise InvalidRequestError(f"kv_dir is {path}: {error.strerror}", "kv_dir") from None


def file_facts(files: Sequence[Path]) -> list[list[int]]:
    """Return device, inode, size and times of files: they differ once a file is changed or replaced."""
    return [_facts(info) for info in map(os.stat, files)]


def _facts(info: os.stat_result) -> list[int]:
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def model_digest(folder: int, files: Sequence[Path], facts: Sequence[Sequence[int]]) -> bytes:
    """Return a digest of the contents of model files, which had these facts when they were loaded; raise if they have
    others. A digest that was computed before is kept by the facts."""
    if file_facts(files) != list(map(list, facts)):
        raise ModelFileError("the model's files have changed since they were loaded")
    key = hashlib.sha256(json.dumps(list(map(list, facts))).encode()).hexdigest()[:32]
    known = _read_object(folder, MODELS)
    if not isinstance(known.get(key), str) or not SHA256.fullmatch(known[key]):
        digest = hashlib.sha256()
        for path, expected in zip(files, facts, strict=True):
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    if not threading.main_thread().is_alive():
                        raise ModelFileError("the process ends")
                if _facts(os.fstat(file.fileno())) != list(expected):
                    raise ModelFileError("the model's files have changed since they were loaded")
            digest.update(b"/")
        known = dict([*known.items(), (key, digest.hexdigest())][-MAX_MODELS:])
        with suppress(OSError):  # it is computed again next time
            _replace_file(folder, MODELS, json.dumps(known).encode())
    return bytes.fromhex(known[key])


def _read_object(folder: int, name: str) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one where there is none."""
    with suppress(OSError, ValueError):
        with os.fdopen(os.open(name, READ, dir_fd=folder)) as file:
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
    """The blocks of one namespace. One thread writes and refreshes, others may read and look blocks up."""

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
        self._head_bytes = RECORD_HEADER.size + 8 * block_size + CHECKSUMS.size
        name = namespace.hex()
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
        self._fd = os.open(name, READ | os.O_DIRECTORY, dir_fd=folder)
        self._about = dict(about or {})
        self.seconds_per_byte = 0.0  # of computing a block again, as predicted; 0: not known
        self._describe()
        self._lock = threading.RLock()  # of changes to the next three
        self._segments: dict[str, Segment] = {}
        self._index: dict[bytes, Place] = {}
        self._writing: tuple[Segment, int] | None = None  # and its file descriptor
        self._num_made, self._refreshed_at, self._aged_at, self._retry_at = 0, 0.0, -AGE_CHECK_S, 0.0
        self.num_evicted = self.num_damaged = 0
        self.refresh()

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            self._end_segment()
        for name in ("_fd", "_folder"):
            with suppress(OSError, AttributeError):
                os.close(getattr(self, name))

    def _describe(self) -> None:
        """Write what the namespace is, and what its blocks cost."""
        if self.seconds_per_byte:
            self._about[COST] = self.seconds_per_byte
        else:
            self._about |= {key: value for key, value in _read_object(self._fd, ABOUT).items() if key == COST}
        with suppress(OSError):
            _replace_file(self._fd, ABOUT, json.dumps(self._about).encode())

    def __len__(self) -> int:
        return len(self._index)

    def find(self, block_hash: bytes) -> Place | None:
        """Return where a block is, if it is here."""
        return self._index.get(block_hash)

    @property
    def is_refresh_due(self) -> bool:
        """Whether the last look at the folder is a while ago."""
        return time.monotonic() - self._refreshed_at >= REFRESH_S

    def refresh(self) -> None:
        """Take in what other processes wrote, or removed; remove what is too old."""
        self._refreshed_at = time.monotonic()
        if self._max_age_s is not None and self._refreshed_at - self._aged_at >= AGE_CHECK_S:
            self._aged_at = self._refreshed_at
            self._make_room(0)
        with self._lock, suppress(OSError):
            names = {name for name in os.listdir(self._fd) if name.endswith(SUFFIX)}
            for name in self._segments.keys() - names:
                self._forget(name)
            for name in sorted(names):
                if self._writing is None or name != self._writing[0].name:
                    with suppress(OSError):  # one file that cannot be read leaves the others
                        self._scan(name)

    def read(self, place: Place, block_hash: bytes, ids: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Read a block into `parts`; return whether it is this block, whole. Otherwise they hold anything. A segment
        that is damaged is set aside."""
        segment, head = place.segment, bytearray(self._head_bytes)
        try:
            fd = self._open(segment.name)
        except OSError:
            self._forget(segment.name)  # another process has removed it
            return False
        try:
            size = os.preadv(fd, [head, *parts], place.offset)
            self._touch(segment, fd)
        except OSError as error:
            self._set_aside(segment.name, error.strerror or str(error))
            return False
        finally:
            os.close(fd)
        expected = self._head(block_hash, ids, place.size, _checksum(parts))
        if size == len(head) + place.size == len(head) + sum(map(len, parts)) and head == expected:
            return True
        if zlib.crc32(head[:-4]) == int.from_bytes(head[-4:], "little") and head[:-8] != expected[:-8]:
            with self._lock:  # another block is here
                self._index.pop(block_hash, None)
        else:
            self._set_aside(segment.name, "a block does not have its checksum")
        return False

    def write(self, block_hash: bytes, ids: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Append a block; return False if it cannot be written now, for example because the disk is full."""
        if block_hash in self._index:
            return True
        place = self._append(self._head(block_hash, ids, sum(map(len, parts)), _checksum(parts)), parts)
        if place is not None:
            with self._lock:
                self._index[block_hash] = place
        return place is not None

    def drop(self, block_hash: bytes) -> None:
        """Withdraw a block that was written, for all readers."""
        with self._lock:
            is_known = self._index.pop(block_hash, None) is not None
        if is_known:
            self._append(self._head(block_hash, [0] * self._block_size, 0, 0), ())

    def _head(self, block_hash: bytes, ids: Sequence[int], size: int, checksum: int) -> bytes:
        head = RECORD_HEADER.pack(RECORD, len(ids), block_hash, size) + array("q", ids).tobytes()
        head += checksum.to_bytes(4, "little")
        return head + zlib.crc32(head).to_bytes(4, "little")

    def _append(self, head: bytes, parts: Sequence[memoryview]) -> Place | None:
        """Append a record; return None if that is not possible now."""
        if time.monotonic() < self._retry_at:
            return None
        size = sum(map(len, parts))
        try:
            with self._lock:  # a reader that finds the segment gone closes it
                segment, fd = self._segment_for(len(head) + size)
                _write_at(fd, [head, *parts], segment.end)
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_S
            self._end_segment()
            logger.warning("keys and values are not written to kv_dir for %.0f s: %s", RETRY_S, error.strerror)
            return None
        place = Place(segment, segment.end, size)
        segment.end += len(head) + size
        return place

    def _segment_for(self, size: int) -> tuple[Segment, int]:
        """Return the segment that is written, or a new one if it has no room or was removed."""
        with self._lock:
            writing = self._writing
            if writing is not None and writing[0].end + size <= self._segment_bytes:
                return writing
            self._end_segment()
        self._describe()
        self._make_room(max(self._segment_bytes, len(self._header) + size))
        with self._lock:
            name = f"{time.time_ns():016x}-{os.getpid()}-{self._num_made}{SUFFIX}"
            self._num_made += 1
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=self._fd)
            segment = self._segments[name] = Segment(name, len(self._header))
            self._writing = segment, fd
            _write_at(fd, [self._header], 0)
            return self._writing

    def _end_segment(self) -> None:
        with self._lock:
            if self._writing is not None:
                os.close(self._writing[1])
                self._writing = None

    def _open(self, name: str) -> int:
        """Return the descriptor of a segment, open for reading; raise `OSError` if it is no file of this user."""
        fd = os.open(name, READ, dir_fd=self._fd)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            os.close(fd)
            raise PermissionError(errno.EPERM, "no file of this user")
        return fd

    def _scan(self, name: str) -> None:
        """Add the records of a segment that are not in the index; a damaged header ends it."""
        fd = self._open(name)
        try:
            size, segment = os.fstat(fd).st_size, self._segments.get(name)
            if segment is None:
                head = os.pread(fd, len(self._header), 0)
                if head != self._header:
                    if len(head) == len(self._header):  # a shorter one is being made
                        self._set_aside(name, "it is of another version or namespace")
                    return
                segment = self._segments[name] = Segment(name, len(self._header))
            while segment.end + self._head_bytes <= size:
                head = os.pread(fd, self._head_bytes, segment.end)
                if len(head) < self._head_bytes or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
                    return
                magic, count, block_hash, nbytes = RECORD_HEADER.unpack_from(head)
                if magic != RECORD or count != self._block_size or segment.end + len(head) + nbytes > size:
                    return
                if nbytes:
                    self._index.setdefault(block_hash, Place(segment, segment.end, nbytes))
                else:
                    self._index.pop(block_hash, None)
                segment.end += len(head) + nbytes
        finally:
            os.close(fd)

    def _touch(self, segment: Segment, fd: int) -> None:
        """Mark that a segment was used, for eviction."""
        now = time.monotonic()
        if now - segment.touched_at > TOUCH_S:
            segment.touched_at = now
            with suppress(OSError):
                os.utime(fd)

    def _set_aside(self, name: str, why: str) -> None:
        """Rename a segment, so that no process reads it again."""
        self.num_damaged += 1
        logger.warning("kv_dir: the segment %s is set aside: %s", name, why)
        with suppress(OSError):
            os.rename(name, name + DAMAGED, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            segment = self._segments.pop(name, None)
            if self._writing is not None and self._writing[0].name == name:
                self._end_segment()
            for block_hash in [key for key, place in self._index.items() if place.segment is segment]:
                del self._index[block_hash]

    def _make_room(self, size: int) -> None:
        """Remove segments that are too old; then, until a new one has room, the ones with the longest time since their
        last use for the seconds that computing their blocks would take."""
        now, costs, files = time.time(), dict[str, float](), list(list_files(self._folder))
        for namespace in {file.namespace for file in files}:
            cost = read_about(self._folder, namespace).get(COST)
            if isinstance(cost, float) and cost > 0:
                costs[namespace] = cost
        usual = sum(costs.values()) / len(costs) if costs else 1.0
        total = sum(file.size for file in files)
        oldest = float("-inf") if self._max_age_s is None else now - self._max_age_s
        files.sort(key=lambda file: (file.used_at >= oldest, (file.used_at - now) / costs.get(file.namespace, usual)))
        for file in files:
            if total + size <= self._max_bytes and file.used_at >= oldest:
                break
            total -= file.size
            with suppress(OSError):
                os.unlink(f"{file.namespace}/{file.name}", dir_fd=self._folder)
                self.num_evicted += 1
            if file.name in self._segments:
                self._forget(file.name)


def _write_at(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    if os.pwritev(fd, buffers, offset) != sum(map(len, buffers)):
        with suppress(OSError):
            os.ftruncate(fd, offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    """Return the description of a namespace: model, KV type, backend."""
    return _read_object(folder, f"{namespace}/{ABOUT}")


def check_segment(folder: int, file: StoredFile) -> tuple[int, bool]:
    """Return how many blocks of a segment verify, and whether there is anything else in it."""
    with os.fdopen(os.open(f"{file.namespace}/{file.name}", READ, dir_fd=folder), "rb") as data:
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
    """Remove segments; return the bytes. The folders stay: workers that run may write to them."""
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            os.unlink(f"{file.namespace}/{file.name}", dir_fd=folder)
            total += file.size
    return total


def list_files(folder: int) -> Iterator[StoredFile]:
    """Return all segments in a folder, those set aside too."""
    for namespace in os.listdir(folder):
        try:
            fd = os.open(namespace, READ | os.O_DIRECTORY, dir_fd=folder)
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
