"""Journals and files of batches: cut at every byte, flipped bits, a full disk, links, two writers."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import openai
import pytest

from llm_worker_rbee.errors import InvalidRequestError, NotFoundError, StorageFullError
from llm_worker_rbee.server.batch_store import Entry, FileStore, Result, encode_entry
from llm_worker_rbee.server.batches import Batch
from tests.server.conftest import Start
from tests.server.test_batches import finish, line, results, run

BATCH = "batch_" + "1" * 32
STATE = {"status": "in_progress", "created_at": 1, "expires_at": 2, "input_file_id": "x", "endpoint": None}


def open_store(path: Path) -> FileStore:
    return FileStore(path, 1 << 20, 1e9)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = open_store(tmp_path / "files")
    yield opened
    opened.close()


def result(number: int) -> Result:
    return Result(number, f"id-{number}", 200, "r", msgspec.Raw(b'{"text":"\\n"}'))


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process becomes larger than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def reopened(path: Path) -> Batch | None:
    """The batch that a worker finds; None if there is none."""
    store = open_store(path)
    try:
        return Batch(BATCH, store.journals[BATCH], store.journals[BATCH].entries())
    except KeyError:
        return None
    finally:
        store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the journal of a batch of three results."""
    path = tmp_path / "files"
    store = open_store(path)
    journal = store.create_journal(BATCH, STATE)
    for number in (1, 2, 3):
        journal.append([Entry(result=result(number))])
    store.close()
    return path


def test_journal_that_is_cut_at_any_byte(folder: Path) -> None:
    path = folder / f"{BATCH}.journal"
    data = path.read_bytes()
    ends = [at for at in range(len(data)) if data[at : at + 1] == b"\n"][1::2]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        batch = reopened(folder)
        if size < ends[0]:
            assert batch is None
            continue
        assert batch is not None
        whole = {number for number in (1, 2, 3) if ends[number] <= size}
        assert batch.finished == whole
        store = open_store(folder)
        store.journals[BATCH].append([Entry(result=result(number)) for number in {1, 2, 3} - whole])
        assert sorted(one.line for one in Batch(BATCH, store.journals[BATCH], [Entry(STATE)]).results()) == [1, 2, 3]
        store.close()
        again = reopened(folder)
        assert again is not None
        assert again.finished == {1, 2, 3}


def test_flipped_bit_costs_a_line_and_gives_no_wrong_one(folder: Path) -> None:
    path = folder / f"{BATCH}.journal"
    data = path.read_bytes()
    first = data.index(b"\n", 1) + 1
    store = open_store(folder)
    for bit in range(8 * first, 8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        batch = Batch(BATCH, store.journals[BATCH], store.journals[BATCH].entries())
        assert len(batch.finished) >= 2
        for one in batch.results():
            assert one == result(one.line)
    store.close()


def test_journal_with_a_damaged_beginning_is_left_alone(start: Start, folder: Path) -> None:
    path = folder / f"{BATCH}.journal"
    path.write_bytes(damaged := path.read_bytes().replace(b"in_progress", b"in_regress"))
    other = folder / f"batch_{'2' * 32}.journal"
    other.symlink_to(path)
    serving = start(files_dir=folder)
    assert not serving.worker.batches.batches
    assert path.read_bytes() == damaged


def test_thousands_of_journals_need_no_descriptors(store: FileStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    journals = [store.create_journal(f"batch_{i:032x}", STATE) for i in range(50)]
    for journal in journals:
        journal.append([Entry(result=result(1))])
    assert len(os.listdir("/proc/self/fd")) == before


def test_journal_on_a_full_disk_keeps_what_it_had(store: FileStore, tmp_path: Path) -> None:
    journal = store.create_journal(BATCH, STATE)
    journal.append([Entry(result=result(1))])
    path = tmp_path / "files" / journal.name
    before = path.read_bytes()
    for room in range(len(encode_entry(Entry(result=result(2))))):
        with full_disk(len(before) + room), pytest.raises(OSError, match=r"File too large|No space left"):
            journal.append([Entry(result=result(2))])
        assert path.read_bytes() == before
    journal.append([Entry(result=result(2))])
    assert Batch(BATCH, journal, journal.entries()).finished == {1, 2}


def test_upload_on_a_full_disk_leaves_nothing(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), store.receive() as (_, write), full_disk(100):
        write(b"x" * 200)
    with full_disk(60), pytest.raises(OSError, match="File too large"):
        store.add([b"x" * 50], "name" * 20, "batch")
    assert not list((tmp_path / "files").iterdir())
    assert not store.num_bytes


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "files")
    kept, damaged, empty = (store.add([b"data"], "n", "batch", expires_s=5) for _ in range(3))
    store.close()
    folder = tmp_path / "files"
    (folder / damaged.id).write_bytes(b"x" * 9_000)
    (folder / empty.id).write_bytes(b"")
    (folder / f"file-{'0' * 32}.tmp").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"of the user")
    store = open_store(folder)
    assert store.files == {kept.id: kept}
    assert b"".join(store.read(kept.id)) == b"data"
    assert sorted(path.name for path in folder.iterdir()) == sorted([kept.id, damaged.id, empty.id, "notes.txt"])
    store.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "files")
    file = store.add([b"data"], "n", "batch")
    data = tmp_path / "files" / file.id
    data.unlink()
    (tmp_path / "secret").write_bytes(b"mine")
    data.symlink_to(tmp_path / "secret")
    with pytest.raises(NotFoundError, match="symbolic"):
        store.open(file.id)
    store.close()
    (tmp_path / "link").symlink_to(tmp_path / "files")
    with pytest.raises(InvalidRequestError, match="files_dir"):
        open_store(tmp_path / "link")
    os.chmod(tmp_path / "files", 0o755)
    with pytest.raises(InvalidRequestError, match="chmod 700"):
        open_store(tmp_path / "files")


def test_folder_has_one_worker_at_a_time(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="another process uses it"):
        open_store(tmp_path / "files")
    with pytest.raises(NotFoundError):
        store.get("file-" + "0" * 32)
    with pytest.raises(StorageFullError):
        store.require_room(2 << 20)


def test_files_of_a_batch_wait_for_room_on_the_disk(start: Start, tmp_path: Path) -> None:
    """The journal fits and the file of the results, which is larger, does not: nothing is left out of it."""
    serving, body = start(files_dir=tmp_path / "files"), {"prompt": "#", "max_tokens": 60, "ignore_eos": True}
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        lines = [line(f"id-{i}", **body) for i in range(20)]
        whole = run(client, lines)
        size = len(client.files.content(whole.output_file_id or "").content)
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        with full_disk(size - 1):
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            end = time.monotonic() + 30
            while not serving.http.get("/info").json()["batches"]["problem"]:
                assert time.monotonic() < end
                time.sleep(0.05)
            assert client.batches.retrieve(batch.id).status == "finalizing"
        ended = finish(client, batch.id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 20)
        assert {row["custom_id"] for row in results(client, ended.output_file_id)} == {f"id-{i}" for i in range(20)}


def test_batch_waits_for_room_on_the_disk(start: Start, tmp_path: Path) -> None:
    serving = start(files_dir=tmp_path / "files")
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        lines = "\n".join(line(f"id-{i}") for i in range(20)).encode()
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        with full_disk(3000):
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            end = time.monotonic() + 30
            while not (problem := serving.http.get("/info").json()["batches"]["problem"]):
                assert time.monotonic() < end
                time.sleep(0.05)
            assert problem in [
                f"nothing can be written: {reason}" for reason in ("File too large", "No space left on device")
            ]
            assert "llm_worker_batch_storage_full 1.0" in serving.http.get("/metrics").text
            assert client.batches.retrieve(batch.id).status == "in_progress"
            with pytest.raises(openai.InternalServerError) as caught:
                client.files.create(file=("in.jsonl", b"x" * 5000), purpose="batch")
            assert caught.value.status_code == 507
        ended = finish(client, batch.id)
        assert (ended.status, ended.request_counts.completed) == ("completed", 20)
        assert serving.http.get("/info").json()["batches"]["problem"] is None
