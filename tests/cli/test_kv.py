"""`serve --kv-dir` through real processes that are killed, and the command for its folder."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEVICE
from tests.helpers.serve_process import ServeProcess

from .conftest import Run

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="keys and values of a GPU are not written to disk")
PROMPT = "A long beginning, number by number: " + ", ".join(map(str, range(40)))
LIMIT_S = 60


@pytest.fixture
def serve(tiny: Path) -> Iterator[Callable[..., ServeProcess]]:
    processes: list[ServeProcess] = []

    def start(*args: str | Path) -> ServeProcess:
        processes.append(ServeProcess("--model", tiny, *args))
        return processes[-1].ready()

    yield start
    for process in processes:
        process.close()


def ask(server: ServeProcess, prompt: str = PROMPT) -> tuple[str, int]:
    """Return a greedy answer, and how many prompt tokens were cached."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, "logprobs": 1}
    reply: Any = server.http.post("/v1/completions", json=body).json()
    return json.dumps(reply["choices"]), reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_for(server: ServeProcess, name: str, value: float) -> None:
    end = time.monotonic() + LIMIT_S
    while server.metric(name) < value:
        assert time.monotonic() < end, (name, server.metric(name))
        time.sleep(0.01)


def test_answer_goes_on_after_worker_and_engine_are_killed(serve: Callable[..., ServeProcess], tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    expected, cached = ask(serve())
    assert cached == 0
    first = serve("--kv-dir", folder)
    assert ask(first) == (expected, 0)
    num_blocks = (len(PROMPT.encode()) + 39) // 16
    wait_for(first, "kv_disk_written_blocks_total", num_blocks)
    assert first.http.get("/info").json()["kv_disk"]["num_written_blocks"] == num_blocks
    for pid in (first.engine(), first.process.pid):
        os.kill(pid, signal.SIGKILL)
    second = serve("--kv-dir", folder)
    answer, cached = ask(second)
    assert answer == expected
    assert cached == (len(PROMPT.encode()) - 1) // 16 * 16
    assert second.metric("kv_disk_read_blocks_total") == cached // 16
    assert second.metric("kv_disk_failed_blocks_total") == 0
    os.kill(second.engine(), signal.SIGKILL)  # the front starts another one, which reads, too
    answer, cached = ask(second)
    assert (answer, cached) == (expected, (len(PROMPT.encode()) - 1) // 16 * 16)
    for path in folder.rglob("*.kv"):
        path.write_bytes(b"?" + path.read_bytes()[1:])
    assert ask(serve("--kv-dir", folder)) == (expected, 0)


def test_two_engines_share_a_folder(serve: Callable[..., ServeProcess], tmp_path: Path) -> None:
    """What one writes, another that is running finds."""
    first, second = serve("--kv-dir", tmp_path / "kv"), serve("--kv-dir", tmp_path / "kv")
    expected, _ = ask(first)
    wait_for(first, "kv_disk_written_blocks_total", 10)
    end = time.monotonic() + LIMIT_S
    while (found := ask(second, PROMPT))[1] == 0:  # it looks once a second
        assert time.monotonic() < end
        for path in (tmp_path / "kv").rglob("*.kv"):
            assert path.exists()
    assert found[0] == expected


def test_kv_command_lists_checks_and_removes(cli: Run, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    done = cli("run", "--model", tiny, "--kv-dir", folder, "--raw", "--max-tokens", "5", PROMPT)
    assert done.returncode == 0, done.stderr
    gc.collect()  # the engine's end, which writes what waits
    listed = cli("kv", "ls", folder).stdout.decode().splitlines()
    assert listed[0].split() == ["MODEL", "KV", "TYPE", "BACKEND", "SIZE", "LAST", "USED"]
    assert listed[1].split()[:3] == ["tiny.gguf", "float16", "cpu"]
    (entry,) = json.loads(cli("kv", "ls", folder, "--json").stdout)["namespaces"]
    assert (entry["model"], entry["damaged"]) == ("tiny.gguf", 0)
    checked = json.loads(cli("kv", "check", folder, "--json").stdout)
    assert checked["blocks"] == (len(PROMPT.encode()) + 4) // 16
    assert checked["damaged"] == []
    (segment,) = folder.rglob("*.kv")
    data = segment.read_bytes()
    for changed, blocks in ((data[:-1], checked["blocks"] - 1), (data[:-1] + b"?", checked["blocks"] - 1), (b"?", 0)):
        segment.write_bytes(changed)
        done = cli("kv", "check", folder)
        assert done.returncode == 1
        assert f"{blocks} block" in done.stdout.decode()
        assert f"damaged, or cut off by a crash: {segment.parent.name}/{segment.name}" in done.stdout.decode()
    assert cli("kv", "rm", folder, "--older", "1").stdout == b"removed 0 files (0.0 kB)\n"
    assert cli("kv", "rm", folder).stdout.startswith(b"removed 1 file (")
    assert cli("kv", "ls", folder).stdout.decode() == f"nothing is kept in {folder}\n"
    assert not list(folder.rglob("*.kv"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("zap", "."), "'zap' is no action: use ls, check, rm"),
        (("ls", "nowhere"), "No such file or directory: nowhere"),
        (("ls", ".", "--older", "1"), "--older goes with rm"),
    ],
)
def test_kv_command_wrong_usage(cli: Run, args: tuple[str, ...], message: str) -> None:
    done = cli("kv", *args)
    assert done.returncode in (1, 2)
    assert message in done.stderr.decode()


def test_folder_that_others_may_open_is_refused(cli: Run, tiny: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for command in (("run", "hello"), ("serve", "--port", "0")):
        done = cli(*command, "--model", tiny, "--kv-dir", tmp_path)
        assert done.returncode == 2
        assert "mode 755" in done.stderr.decode()
        assert f"chmod 700 {tmp_path}" in done.stderr.decode()
