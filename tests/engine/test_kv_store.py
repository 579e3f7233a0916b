"""KV blocks on disk: what is read is what was written, whatever happens to the files and to the process that writes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_worker_rbee.engine import kv_store
from llm_worker_rbee.engine.block_pool import chained_hash
from llm_worker_rbee.engine.kv_store import (
    BlockStore,
    StoredFile,
    check_folder,
    file_facts,
    list_files,
    model_digest,
    open_folder,
)
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError

SIZE, BYTES = 4, 600  # tokens and bytes of a block
NAMESPACE = bytes(range(16))
ROOT = Path(__file__).parents[2]


def ids_of(number: int) -> list[int]:
    return [number * SIZE + i for i in range(SIZE)]


def hash_of(number: int) -> bytes:
    return chained_hash(b"", ids_of(number))


def block_of(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def open_store(folder: Path, namespace: bytes = NAMESPACE, max_bytes: int = 1 << 30, **options: float) -> BlockStore:
    return BlockStore(open_folder(folder), namespace, SIZE, max_bytes, **options)


def segments_in(folder: Path) -> list[StoredFile]:
    fd = open_folder(folder)
    try:
        return list(list_files(fd))
    finally:
        os.close(fd)


def write(store: BlockStore, *numbers: int) -> bool:
    written = []
    for number in numbers:
        parts = block_of(number)[:100], block_of(number)[100:]
        written.append(store.write(hash_of(number), ids_of(number), [memoryview(part) for part in parts]))
    return all(written)


def read(store: BlockStore, number: int) -> bytes | None:
    """Return a block, None if the store has none that verifies."""
    place, parts = store.find(hash_of(number)), [bytearray(50), bytearray(BYTES - 50)]
    if place is None or not store.read(place, hash_of(number), ids_of(number), [memoryview(part) for part in parts]):
        return None
    return b"".join(parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_blocks_are_found_by_later_processes_and_by_others(folder: Path) -> None:
    first, second = open_store(folder), open_store(folder)
    assert write(first, 1, 2)
    assert [read(first, n) for n in (1, 2, 3)] == [block_of(1), block_of(2), None]
    assert read(second, 1) is None
    second.refresh()
    assert write(second, 3)
    assert [read(second, n) for n in (1, 2, 3)] == [block_of(n) for n in (1, 2, 3)]
    assert len(segments_in(folder)) == 2  # each writes its own segment
    third = open_store(folder)
    assert (len(third), [read(third, n) for n in (1, 2, 3)]) == (3, [block_of(n) for n in (1, 2, 3)])
    assert len(open_store(folder, bytes(16))) == 0  # another namespace


def test_block_of_other_tokens_or_another_size_is_never_used(folder: Path) -> None:
    store = open_store(folder)
    write(store, 1)
    place = store.find(hash_of(1))
    assert place is not None
    whole = [memoryview(bytearray(BYTES))]
    assert store.read(place, hash_of(1), ids_of(1), whole)
    assert not store.read(place, hash_of(1), ids_of(1), [memoryview(bytearray(BYTES - 1))])
    assert not store.read(place, hash_of(1), ids_of(2), whole)
    assert not store.read(place, hash_of(2), ids_of(1), whole)
    assert len(store) == 0


def test_folder_and_files_are_for_this_user_alone(folder: Path, tmp_path: Path) -> None:
    write(open_store(folder), 1)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    folder.chmod(0o750)
    with pytest.raises(InvalidRequestError, match=r"mode 750.*chmod 700"):
        check_folder(folder)
    folder.chmod(0o700)
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(folder)
    file.touch()
    for path in (link, file):
        with pytest.raises(InvalidRequestError, match="not a folder"):
            check_folder(path)
    with pytest.raises(InvalidRequestError, match="No such file"):
        check_folder(tmp_path / "none" / "kv")
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        with pytest.raises(InvalidRequestError, match="another user"):
            check_folder(folder)


def test_what_is_no_segment_is_left_alone(folder: Path, tmp_path: Path) -> None:
    write(open_store(folder), 1)
    (space,) = (path for path in folder.iterdir() if path.is_dir())
    (segment,) = space.glob("*.kv")
    outside = tmp_path / "outside.kv"
    shutil.copy(segment, outside)
    segment.unlink()
    (space / "0-link.kv").symlink_to(outside)
    os.mkfifo(space / "1-fifo.kv")
    (space / "2-folder.kv").mkdir()
    (space / "3-short.kv").write_bytes(b"RBEE")
    (space / "notes").write_text("mine")
    store = open_store(folder)
    assert (len(store), read(store, 1)) == (0, None)
    assert write(store, 2)
    assert read(store, 2) == block_of(2)
    assert outside.exists()


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return a file with some damage."""
    at, other = rng.randrange(len(data)), rng.randrange(len(data))
    match rng.randrange(6):
        case 0:  # a bit
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:  # cut off
            return data[:at]
        case 2:  # a lost page
            return data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]
        case 3:  # bytes that do not belong here
            return data[:at] + rng.randbytes(rng.randint(1, 40)) + data[at:]
        case 4:  # bytes that are missing
            return data[:at] + data[at + rng.randint(1, 40) :]
        case _:  # a part that is elsewhere
            return data[:at] + data[other : other + 300] + data[at + 300 :]


def test_damaged_segments_give_no_wrong_block(folder: Path, tmp_path: Path) -> None:
    """A thousand files; whatever verifies is what was written, and the store goes on."""
    numbers = range(8)
    write(open_store(folder), *numbers)
    (segment,) = folder.rglob("*.kv")
    data, rng = segment.read_bytes(), random.Random(7)
    num_lost = 0
    for i in range(1000):
        shutil.rmtree(folder)
        segment.parent.mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        opened_before = rng.random() < 0.5  # the damage comes while the store is open
        segment.write_bytes(data)
        store = open_store(folder) if opened_before else None
        segment.write_bytes(damaged(rng, data))
        store = store or open_store(folder)
        blocks = [read(store, n) for n in numbers]
        assert all(block in (None, block_of(n)) for n, block in zip(numbers, blocks, strict=True)), i
        num_lost += blocks.count(None)
        assert write(store, 20)
        assert read(store, 20) == block_of(20)
    assert 500 < num_lost < 8 * 1000  # the damage was damage, and did not take everything


WRITER = """
import sys
from pathlib import Path
from tests.engine.test_kv_store import open_store, write
store = open_store(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 1 << 30):
    write(store, number)
    print(number, flush=True)
"""


def test_killed_writer_leaves_a_folder_that_works(folder: Path) -> None:
    """Everything that it had said is written is there; the next one goes on."""
    rng, first, written = random.Random(3), 0, 0
    for _ in range(int(os.environ.get("LLM_WORKER_KILLS", "8"))):
        command = [sys.executable, "-c", WRITER, str(folder), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            stop = first + rng.randrange(1, 60)
            written = next(number for line in process.stdout if (number := int(line)) >= stop)
            process.send_signal(signal.SIGKILL)
        store = open_store(folder)
        assert all(read(store, n) == block_of(n) for n in range(written + 1))
        assert store.num_damaged == 0
        first = written + 1


def limited(limit: int) -> Callable[[], None]:
    def limit_files() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return limit_files


FULL = """
import sys
from pathlib import Path
from tests.engine.test_kv_store import open_store, read, write, block_of
store = open_store(Path(sys.argv[1]))
print([write(store, n) for n in range(8)], all(read(store, n) in (None, block_of(n)) for n in range(8)))
"""


def test_full_disk_stops_writing_and_leaves_whole_blocks(folder: Path) -> None:
    """The limit of a file stands for the one of a disk: the system writes a part, then fails."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(folder)], capture_output=True, text=True, cwd=ROOT, preexec_fn=limited(2500)
    )
    assert done.stdout.split("]")[0].count("True") == 3, done.stderr
    assert done.stdout.endswith("True\n")
    assert done.stderr.count("are not written to kv_dir") == 1  # once, not for each block
    store = open_store(folder)
    assert (len(store), read(store, 2)) == (3, block_of(2))
    assert write(store, 9)


def test_limit_counts_all_namespaces_and_keeps_what_was_used(folder: Path) -> None:
    limit = 16 * BYTES
    old = open_store(folder, bytes(16), limit)
    write(old, *range(6))
    for path in folder.rglob("*.kv"):
        os.utime(path, (1, 1))
    store = open_store(folder, max_bytes=limit)
    for number in range(100, 140):
        write(store, number)
        assert sum(file.size for file in segments_in(folder)) <= limit
    assert store.num_evicted > 0
    assert len(open_store(folder, bytes(16), limit)) == 0  # the oldest went first
    assert read(store, 139) == block_of(139)
    assert read(store, 100) is None
    kept = [number for number in range(100, 140) if read(store, number) is not None]
    assert kept == list(range(kept[0], 140))
    for file in segments_in(folder):  # reading marks a segment as used
        os.utime(folder / file.namespace / file.name, (1, 1))
    again = open_store(folder, max_bytes=limit)
    assert read(again, kept[0]) is not None
    for number in range(200, 206):
        write(again, number)
    assert read(again, kept[0]) == block_of(kept[0])


def test_blocks_that_are_cheap_to_compute_go_first(folder: Path) -> None:
    """Of two models: a block of the slow one is worth ten times as many days."""
    slow, quick = open_store(folder, bytes(16)), open_store(folder, b"quick".ljust(16))
    slow.seconds_per_byte, quick.seconds_per_byte = 1e-6, 1e-7
    write(slow, 1)
    write(quick, 2)
    for days, name in ((5, bytes(16).hex()), (1, b"quick".ljust(16).hex())):
        for path in (folder / name).glob("*.kv"):
            os.utime(path, (then := time.time() - days * 86_400, then))
    third = open_store(folder, b"third".ljust(16), max_bytes=11 * BYTES)
    assert third.seconds_per_byte == 0.0
    for number in range(100, 107):
        write(third, number)
    assert read(open_store(folder, bytes(16)), 1) == block_of(1)
    assert read(open_store(folder, b"quick".ljust(16)), 2) is None
    assert open_store(folder, bytes(16))._about["seconds_per_byte"] == 1e-6


def test_segments_that_nobody_used_for_long_are_removed(folder: Path) -> None:
    write(open_store(folder), 1)
    for path in folder.rglob("*.kv"):
        os.utime(path, (1, 1))
    store = open_store(folder, max_age_s=3600.0)
    write(store, 2)
    assert (read(store, 1), read(store, 2)) == (None, block_of(2))
    assert len(segments_in(folder)) == 1


def digest_of(folder: int, model: Path) -> bytes:
    return model_digest(folder, [model], file_facts([model]))


def test_digest_of_a_model_is_kept_until_its_file_changes(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    fd = open_folder(folder)  # until the end of the process
    first = digest_of(fd, model)
    known = folder / kv_store.MODELS
    key, value = next(iter(json.loads(known.read_text()).items()))
    assert bytes.fromhex(value) == first
    known.write_text(json.dumps({key: "ab" * 32}))  # it is not computed again
    assert digest_of(fd, model) == bytes.fromhex("ab" * 32)
    for text in ("", "[1]", '{"x": 1}', "\x00", json.dumps({key: "no hex"})):
        known.write_text(text)
        assert digest_of(fd, model) == first, text
    model.write_bytes(b"other")
    assert digest_of(fd, model) != first


def test_digest_of_a_model_that_was_replaced_is_refused(folder: Path, tmp_path: Path) -> None:
    """The weights in memory are those of the file before."""
    model, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    model.write_bytes(b"one")
    other.write_bytes(b"two")
    facts = file_facts([model])
    other.replace(model)
    with pytest.raises(ModelFileError, match="changed since"):
        model_digest(open_folder(folder), [model], facts)


def test_dropped_block_is_found_by_nobody_until_it_is_written_again(folder: Path) -> None:
    store, other = open_store(folder), open_store(folder)
    write(store, 1, 2)
    store.drop(hash_of(1))
    other.refresh()
    assert [read(one, 1) for one in (store, other, open_store(folder))] == [None] * 3
    write(store, 1)
    other.refresh()
    assert [read(one, n) for one in (store, other, open_store(folder)) for n in (1, 2)] == [
        block_of(1),
        block_of(2),
    ] * 3


def test_many_segments_need_no_open_files(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        write(open_store(folder), number)
    store = open_store(folder)
    assert [read(store, n) for n in range(50)] == [block_of(n) for n in range(50)]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_threads_that_write_refresh_and_read_agree(folder: Path) -> None:
    """A second process's store is refreshed while the first one writes, and both read all the time."""
    store, other = open_store(folder, max_bytes=400 * BYTES), open_store(folder, max_bytes=400 * BYTES)
    interval, errors = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-5)

    def look() -> None:
        try:
            rng = random.Random(1)
            while not is_done:
                for one in (store, other):
                    if read(one, n := rng.randrange(300)) not in (None, block_of(n)):
                        errors.append(n)
        except Exception as error:
            errors.append(error)

    is_done: list[bool] = []
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(300):
            write(store, number)
            other.refresh()
    finally:
        is_done.append(True)
        thread.join()
        sys.setswitchinterval(interval)
    assert (errors, store.num_damaged, other.num_damaged) == ([], 0, 0)
    assert read(other, 299) == block_of(299)
