"""llama-server as a peer: real sockets and a real process that speaks its protocol, well or badly."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.bench import peers
from llm_worker_rbee.bench.peers import OURS, Plan
from llm_worker_rbee.bench.peers.llama_server import LlamaServer, Made, Stream, StreamError, counted, rate
from llm_worker_rbee.bench.peers.process import PeerError, Task
from llm_worker_rbee.bench.prompt_ids import prompts_of
from llm_worker_rbee.bench.results import Recorder
from llm_worker_rbee.weights import open_checkpoint
from tests.bench import llama_server as fake
from tests.cli.conftest import write_model

from .test_peers import program

TEST = Task("tg", 5, ((1, 2, 3), (4,)))


def server(folder: Path, mode: str = "") -> Path:
    text = f'#!/bin/sh\nLOG={folder / "log"} MODE={mode} exec {sys.executable} {fake.__file__} "$@"\n'
    return program(folder / "llama-server", text)


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def test_it_is_started_asked_and_ended(tmp_path: Path) -> None:
    peer = LlamaServer(str(server(tmp_path)), "model.gguf", 2, slots=2, context=257, timeout_s=30)
    assert peer.takes(TEST)
    assert not peer.takes(Task("tg", 5))
    try:
        peer.start()
        assert peer.version == "b7031-0c1e570"
        assert peer.rate(TEST) > 0
        assert peer._process is not None
        pid = peer._process.pid
    finally:
        peer.close()
        peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    options, *asked = notes(tmp_path)
    assert options["options"] == {
        "-m": "model.gguf", "-t": "2", "-ngl": "0", "-np": "2", "-c": "1024", "--host": "127.0.0.1",
    }  # fmt: skip
    assert sorted(one["prompt"] for one in asked) == [[1, 2, 3], [4]]
    for one in asked:
        assert one == {
            "path": "/completion", "prompt": one["prompt"], "n_predict": 5, "temperature": 0.0, "ignore_eos": True,
            "cache_prompt": False, "stream": True, "samplers": ["temperature"],
        }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("short", "llama-server: it made 4 tokens where 5 were asked for"),
        ("refuse", 'llama-server: it answered \'HTTP/1.1 400 Bad Request\': {"error": {"message": "no slot"}}'),
        ("words", "llama-server: an event of its answer is not JSON: 'hello'"),
        ("half", "llama-server: its answer broke off"),
        ("quiet", "llama-server: it did not answer within 1 s"),
    ],
)
def test_one_that_answers_badly(tmp_path: Path, mode: str, told: str) -> None:
    peer = LlamaServer(str(server(tmp_path, mode)), "model.gguf", 1, 2, 16, 30)
    try:
        peer.start()
        peer._timeout_s = 1 if mode == "quiet" else 30
        with pytest.raises(PeerError) as caught:
            peer.rate(TEST)
    finally:
        peer.close()
    assert str(caught.value) == told


def test_one_that_does_not_start(tmp_path: Path) -> None:
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


def test_the_rate_is_taken_while_all_are_answered() -> None:
    slow = [Made(2.0, 1), Made(4.0, 2), Made(6.0, 3), Made(8.0, 4), Made(8.0, 4)]
    fast = [Made(1.0, 1), Made(2.0, 3), Made(3.5, 4), Made(5.0, 6), Made(5.5, 6)]
    # from 2.0, when the slow one has begun, to 5.0, when the fast one is complete: 1 and 3 tokens
    assert rate([slow, fast]) == pytest.approx(4 / 3)
    with pytest.raises(StreamError, match="ended before the last began"):
        rate([slow, [Made(0.5, 1), Made(1.0, 2)]])


def test_each_event_has_the_moment_when_it_was_complete() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = [b'data: {"n": 1}\n\nda', b'ta: {"n": 2}\n\n', b'data: {"n": 0}\n\n']
    whole = head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    cuts = [0, len(head) + 5, whole.index(b'"n": 2') + 3, whole.index(b'"n": 2') + 5, len(whole)]
    stream = Stream([1.0, 2.0, 3.0, 4.0], [whole[a:b] for a, b in pairwise(cuts)])
    assert counted(stream, "n") == [Made(2.0, 1), Made(4.0, 2)]
    plain = Stream([1.0], [b'HTTP/1.1 200 OK\r\n\r\ndata: {"n": 3}\n\n'])
    assert counted(plain, "n") == [Made(1.0, 3)]
    for body, told in ((b"zz\r\n", "not what it is known to be"), (b"", "broke off"), (b"0\r\n\r\n", "tells n")):
        with pytest.raises(StreamError, match=told):
            counted(Stream([1.0], [head + body]), "n")


def test_beside_ours_on_the_same_prompts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf")
    plan = Plan(pp=[8], tg=[40], batches=[3], repetitions=2, llama_server=str(server(tmp_path)))
    recorder = Recorder("peers")
    peers.run(recorder, lambda *_: None, model, plan)
    found = {result.name: result for result in recorder.results()}
    assert set(found) == {f"tg40@b3/{OURS}", "tg40@b3/llama-server"}  # the others do one at a time
    ours, theirs = found[f"tg40@b3/{OURS}"], found["tg40@b3/llama-server"]
    assert theirs.fields["ours_over_peer"] == pytest.approx(ours.estimate / theirs.estimate)
    assert recorder.details == {"left_out": {}}
    options, *asked = notes(tmp_path)
    assert options["options"]["-np"] == "3"
    assert sorted(one["prompt"] for one in asked) == sorted(3 * prompts_of(open_checkpoint(model), 3))
    assert [one["n_predict"] for one in asked] == [32] * 3 + [40] * 6  # warming up, then two runs


def test_without_the_program_it_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "tiny.gguf")
    monkeypatch.setenv("PATH", str(tmp_path))
    recorder = Recorder("peers")
    peers.run(recorder, lambda *_: None, model, Plan(tg=[8], batches=[2], repetitions=1, peers=["llama-server"]))
    assert recorder.details["left_out"] == {"llama-server": "it is not on the PATH: --llama-server PATH names one"}
    assert [result.name for result in recorder.results()] == [f"tg8@b2/{OURS}"]
