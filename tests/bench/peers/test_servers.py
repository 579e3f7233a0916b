"""Servers as peers: real sockets, a process that speaks as llama-server does, well or badly, and `serve` itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from llm_worker_bench.engine_harness import encode_bundled_prompts
from llm_worker_bench.http_client import RequestFailedError
from llm_worker_bench.peers import suite
from llm_worker_bench.peers.plan import Plan
from llm_worker_bench.peers.programs import OURS, PeerError, Task, shared_rate
from llm_worker_bench.peers.servers import (
    LlamaServer,
    Stream,
    TokenCount,
    WorkerServer,
    count_chunks,
    count_tokens,
)
from llm_worker_bench.results import Recorder
from llm_worker_rbee import __version__
from llm_worker_rbee.weights import open_checkpoint
from tests.cli.conftest import write_model
from tests.helpers import fake_llama_server as fake

from .test_programs import program

TEST = Task("tg", 5, ((1, 2, 3), (4,)))


def server(folder: Path, mode: str = "") -> Path:
    text = f'#!/bin/sh\nLOG={folder / "log"} MODE={mode} exec {sys.executable} {fake.__file__} "$@"\n'
    return program(folder / "llama-server", text)


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def test_llama_server_is_started_measured_and_ended(tmp_path: Path) -> None:
    peer = LlamaServer(str(server(tmp_path)), "model.gguf", 2, slots=2, context=257, timeout_s=30)
    assert peer.can_run(TEST)
    assert not peer.can_run(Task("tg", 5))
    try:
        peer.start()
        assert peer.version == "b7031-0c1e570"
        assert peer.measure_rate(TEST) > 0
        pid = peer.process.pid
    finally:
        peer.close()
        peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    options, *requests = notes(tmp_path)
    assert options["options"] == {
        "-m": "model.gguf", "-t": "2", "-ngl": "0", "-np": "2", "-c": "1024", "--host": "127.0.0.1",
    }  # fmt: skip
    assert sorted(one["prompt"] for one in requests) == [[1, 2, 3], [4]]
    for one in requests:
        assert one == {
            "path": "/completion", "prompt": one["prompt"], "n_predict": 5, "temperature": 0.0, "ignore_eos": True,
            "cache_prompt": False, "stream": True, "samplers": ["temperature"],
        }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("short", "llama-server: generated 4 tokens instead of 5"),
        ("refuse", 'llama-server: HTTP status 400: {"error": {"message": "no slot"}}'),
        ("words", "llama-server: an event is not a JSON object: 'hello'"),
        ("half", "llama-server: the server closed the connection inside the body"),
        ("quiet", "llama-server: no answer within 1 s"),
    ],
)
def test_llama_server_bad_answers_are_one_line(tmp_path: Path, mode: str, message: str) -> None:
    peer = LlamaServer(str(server(tmp_path, mode)), "model.gguf", 1, 2, 16, 30)
    try:
        peer.start()
        peer._timeout_s = 1 if mode == "quiet" else 30
        with pytest.raises(PeerError) as caught:
            peer.measure_rate(TEST)
    finally:
        peer.close()
    assert str(caught.value) == message


def test_llama_server_start_failures_are_one_line(tmp_path: Path) -> None:
    crashing = LlamaServer(str(server(tmp_path, "crash")), "model.gguf", 1, 1, 16, 30)
    with pytest.raises(PeerError, match=r"^llama-server ended with exit status 1: cannot load the model$"):
        crashing.start()
    crashing.close()
    silent = LlamaServer(str(program(tmp_path / "silent", "#!/bin/sh\nexec tail -f /dev/null\n")), "m", 1, 1, 16, 0.2)
    with pytest.raises(PeerError, match=r"^llama-server was not ready within 0.2 s$"):
        silent.start()
    silent.close()
    with pytest.raises(PeerError, match=r"^llama-server cannot be started: No such file"):
        LlamaServer(str(tmp_path / "nowhere"), "m", 1, 1, 16, 1).start()


def test_shared_rate_counts_while_all_are_answered() -> None:
    slow = [TokenCount(2.0, 1), TokenCount(4.0, 2), TokenCount(6.0, 3), TokenCount(8.0, 4), TokenCount(8.0, 4)]
    fast = [TokenCount(1.0, 1), TokenCount(2.0, 3), TokenCount(3.5, 4), TokenCount(5.0, 6), TokenCount(5.5, 6)]
    # from 2.0, when the slow one has begun, to 5.0, when the fast one is complete: 1 and 3 tokens
    assert shared_rate([slow, fast]) == pytest.approx(4 / 3)
    with pytest.raises(RequestFailedError, match="ended before the last began"):
        shared_rate([slow, [TokenCount(0.5, 1), TokenCount(1.0, 2)]])


def test_count_tokens_takes_the_time_of_the_part_that_completes_an_event() -> None:
    stream: Stream = [
        (1.0, b""),
        (2.0, b'data: {"n": 1}\n\nda'),
        (3.0, b'ta: {"n"'),
        (4.0, b': 2}\n\ndata: {"n": 0}\n\n'),
    ]
    assert count_tokens(stream, "n") == [TokenCount(2.0, 1), TokenCount(4.0, 2)]
    for body, message in (
        (b"data: zz\n\n", "not a JSON object"),
        (b"data: 3\n\n", "not a JSON object"),
        (b"", "has n"),
    ):
        with pytest.raises(RequestFailedError, match=message):
            count_tokens([(1.0, body)], "n")


def test_count_chunks_spreads_the_tokens_of_the_usage_over_the_chunks() -> None:
    chunk, usage = (
        b'data: {"choices": [{"text": "a"}]}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": %d}}',
    )
    stream: Stream = [(1.0, chunk), (2.0, chunk), (3.0, chunk), (4.0, usage % 3 + b"\n\ndata: [DONE]\n\n")]
    assert count_chunks(stream) == [TokenCount(1.0, 1), TokenCount(2.0, 2), TokenCount(3.0, 3)]
    stream[3] = (4.0, usage % 6 + b"\n\n")
    assert count_chunks(stream) == [TokenCount(1.0, 2), TokenCount(2.0, 4), TokenCount(3.0, 6)]
    with pytest.raises(RequestFailedError, match="no usage at the end"):
        count_chunks(stream[:3])
    with pytest.raises(RequestFailedError, match=r"an event is an error: .*too long"):
        count_chunks([(1.0, b'data: {"error": {"message": "too long"}}\n\n')])


def test_worker_server_answers_all_prompts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", context=1024)
    peer = WorkerServer(str(model), 2, 1024, ["--threads", "1"], timeout_s=60)
    try:
        peer.start()
        assert (peer.name, peer.version) == (OURS, __version__)
        task = Task("tg", 800, ((1, 2, 3), (4, 5)))
        assert peer.measure_rate(task) > 0
        with pytest.raises(PeerError, match=r"^llm-worker-rbee: generated 1021 tokens instead of 1100$"):
            peer.measure_rate(task._replace(tokens=1100))
        pid = peer.process.pid
    finally:
        peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    broken = WorkerServer(str(tmp_path / "nowhere.gguf"), 2, 64, [], timeout_s=60)
    with pytest.raises(PeerError, match=r"^llm-worker-rbee serve ended with exit status 1: .*nowhere"):
        broken.start()


def test_run_llama_server_gets_the_same_prompts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", context=1024)
    names = ["llama-bench", "llama-cpp-python", "transformers", "llama-server"]
    plan = Plan(pp=[8], tg=[480], batches=[3], repetitions=2, peers=names, llama_server=str(server(tmp_path)))
    recorder = Recorder("peers")
    suite.run(recorder, lambda *_: None, model, plan)
    found = {result.name: result for result in recorder.results()}
    assert set(found) == {f"tg480@b3/{OURS}", "tg480@b3/llama-server"}  # the others do one at a time
    ours, theirs = found[f"tg480@b3/{OURS}"], found["tg480@b3/llama-server"]
    ratios = [a / b for a, b in zip(ours.samples, theirs.samples, strict=True)]
    assert theirs.fields["ours_over_peer"] == pytest.approx(fmean(ratios))
    assert theirs.fields["ratio_interval"] == pytest.approx([min(ratios), max(ratios)])
    assert (recorder.details["left_out"], recorder.details.get("failed")) == ({}, None)
    options, *requests = notes(tmp_path)
    assert options["options"]["-np"] == "3"
    assert sorted(one["prompt"] for one in requests) == sorted(3 * encode_bundled_prompts(open_checkpoint(model), 3))
    assert [one["n_predict"] for one in requests] == [32] * 3 + [480] * 6  # warming up, then two runs


def test_run_without_llama_server_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "tiny.gguf", context=1024)
    monkeypatch.setenv("PATH", str(tmp_path))
    recorder = Recorder("peers")
    suite.run(recorder, lambda *_: None, model, Plan(tg=[480], batches=[2], repetitions=1, peers=["llama-server"]))
    assert recorder.details["left_out"] == {"llama-server": "it is not on the PATH: --llama-server PATH names one"}
    assert [result.name for result in recorder.results()] == [f"tg480@b2/{OURS}"]
