"""`serve` as two processes: what the front imports, an engine that is killed under load, ends that leave no orphan."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from llm_worker_rbee.backends.cpu.kernel_cache import cache_dir
from llm_worker_rbee.backends.cpu_info import THREADS_VARIABLE
from llm_worker_rbee.backends.kernel_folder import CACHE_VARIABLE
from llm_worker_rbee.backends.kernel_library import PREBUILT_VARIABLE
from llm_worker_rbee.backends.ops import COMPILING
from llm_worker_rbee.machine import usable_cores
from tests.conftest import ON_CPU, with_kernels
from tests.helpers.engine_faults import FAILED_STEP, HALF_MESSAGE, LAST_TOKEN, EngineFaults
from tests.helpers.process import is_alive
from tests.helpers.serve_process import LIMIT_S, ServeProcess, children, command, until
from tests.helpers.server import write_model
from tests.helpers.tiny_pooling import TASKS, write_bert

KERNELS = "llvmlite", "/cpu/prebuilt/"  # compiled when needed, and ahead of time

Serve = Callable[..., ServeProcess]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on with random digits after `?`."""
    return with_kernels(write_model(tmp_path_factory.mktemp("digits") / "digits.gguf"))


@pytest.fixture
def serve(digits: Path) -> Iterator[Serve]:
    started: list[ServeProcess] = []

    def start(*args: str) -> ServeProcess:
        started.append(ServeProcess("-m", digits, "--kv-memory", "16M", *args))
        return started[-1]

    yield start
    for running in started:
        running.close()


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineFaults:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return EngineFaults(tmp_path)


@ON_CPU
def test_front_loads_neither_kernels_nor_weights(serve: Serve) -> None:
    running = serve().ready()
    engine = running.engine()
    front_maps = Path(f"/proc/{running.process.pid}/maps").read_text()
    assert not any(name in front_maps for name in (*KERNELS, "torch"))
    engine_maps = Path(f"/proc/{engine}/maps").read_text()
    assert sum(name in engine_maps for name in KERNELS) == 1  # none is compiled where there is a library


def test_embeddings_and_rankings_beside_chat(serve: Serve, tmp_path: Path) -> None:
    embedder, ranker = (write_bert(tmp_path / kind, kind) for kind in TASKS)
    line = ["--embedding-model", str(embedder), "--rerank-model", str(ranker), "--backend", "reference"]
    running = serve(*line, "--deterministic", "--restart-on-stall").ready()
    until(lambda: running.http.get("/health").json()["status"] == "healthy")
    listed = running.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["kind"]) for one in listed[1:]] == [(kind, kind) for kind in TASKS]  # names of folders
    assert len(running.engines()) == 3
    for name in (None, "embedding", str(embedder)):
        body = {"input": ["a", "b"], "dimensions": 5, "model": name}
        reply = running.http.post("/v1/embeddings", json=body).json()
        assert [len(one["embedding"]) for one in reply["data"]] == [5, 5]
    ranked = running.http.post("/v1/rerank", json={"query": "a", "documents": ["b", "c"]}).json()["results"]
    assert sorted(one["index"] for one in ranked) == [0, 1]
    assert running.complete(1, max_tokens=2)


def test_chat_model_as_embedding_model_is_refused(serve: Serve, digits: Path) -> None:
    running = serve("--embedding-model", str(digits))
    _, errors = running.process.communicate(timeout=LIMIT_S)
    assert running.process.returncode == 1
    assert f"error: {digits.name} is a chat model, not an embedding model" in errors.splitlines()[-1]
    assert "--embedding-model" in errors.splitlines()[-1]


def test_embedding_model_that_dies_while_it_loads_ends_the_worker(serve: Serve, tmp_path: Path) -> None:
    running = serve("--embedding-model", str(write_bert(tmp_path / "embedder")), "--backend", "reference")
    until(lambda: len(running.engines()) == 2)
    embedder = running.engines()[1]
    os.kill(embedder, signal.SIGSTOP)
    running.ready()
    assert running.complete(1, max_tokens=2)
    os.kill(embedder, signal.SIGKILL)
    _, errors = running.process.communicate(timeout=LIMIT_S)
    assert running.process.returncode == 1
    assert "was killed by SIGKILL while it loaded the model" in errors.splitlines()[-1]
    assert not running.processes()


def test_engine_killed_under_16_streams_fails_none(serve: Serve) -> None:
    """Each stream has the text, stop string included, that it has alone; deaths are narrated, counted and logged."""
    running = serve("--engine-restarts", "100").ready()
    bodies = [{"seed": seed, "stop": ["999"] if seed % 2 else None, "n": 1 + (seed == 3)} for seed in range(16)]
    expected = [running.complete(**body) for body in bodies]
    job = running.http.post("/v1/jobs", json={"prompt": "?", "max_tokens": 60_000}).json()["job_id"]
    with ThreadPoolExecutor(16) as pool:
        for times in range(1, 4):
            found = [pool.submit(running.complete, **body) for body in bodies]
            os.kill(running.engine(), signal.SIGKILL)
            assert [task.result() for task in found] == expected
            metrics = running.http.get("/metrics").text
            assert f"llm_worker_engine_restarts_total {times}.0" in metrics.splitlines()
    running.http.delete(f"/v1/jobs/{job}")
    actions = re.findall(r'"action":"(\w+)"', running.http.get(f"/v1/jobs/{job}/stream").text)
    assert actions[:2] == ["queued", "reading"]
    assert actions.count("restarted") == 3
    assert running.http.get("/health").json()["status"] == "healthy"
    running.process.send_signal(signal.SIGTERM)
    _, said = running.process.communicate(timeout=LIMIT_S)
    messages = [json.loads(line)["message"] for line in said.splitlines()]
    assert sum("the engine was killed by SIGKILL: restart in" in message for message in messages) == 3
    assert running.process.returncode == 0


def test_replicas_serve_while_one_is_killed_and_while_all_are_restarted(serve: Serve) -> None:
    running = serve("--replicas", "2", "--engine-restarts", "100").ready()
    expected = [running.complete(seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as pool:
        before = running.engines()
        assert len(before) == 2
        found = [pool.submit(running.complete, seed) for seed in range(16)]
        os.kill(before[0], signal.SIGKILL)
        until(
            lambda: (health := running.http.get("/health")).json()["status"] == "degraded" or health.status_code != 200
        )
        assert running.http.get("/health").status_code == 200
        assert [task.result() for task in found] == expected
        until(lambda: running.http.get("/health").json()["status"] == "healthy")
        found = [pool.submit(running.complete, seed) for seed in range(16)]
        killed = running.engines()
        running.process.send_signal(signal.SIGUSR2)
        until(lambda: len(running.engines()) == 2 and not set(killed) & set(running.engines()))
        assert [task.result() for task in found] == expected
        until(lambda: running.http.get("/health").json()["status"] == "healthy")
    assert (running.metric("engine_restarts_total"), running.metric("num_engines_serving")) == (1, 2)
    replicas = running.http.get("/info").json()["replicas"]
    assert [(one["status"], one["requests"]) for one in replicas] == [("healthy", 0)] * 2
    assert sum(one["restarts"] for one in replicas) == 1
    processes = running.processes()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(LIMIT_S) == 0
    assert not any(map(is_alive, processes))


def test_one_engine_is_restarted_by_a_signal_without_a_failed_request(serve: Serve) -> None:
    running = serve("--engine-restarts", "0").ready()
    expected, before = running.complete(1), running.engine()
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(running.complete, 1)
        running.process.send_signal(signal.SIGUSR2)
        until(lambda: running.engines() not in ([], [before]))
        assert task.result() == expected
    assert running.metric("engine_restarts_total") == 0


@ON_CPU
def test_failed_step_is_logged_with_the_correlation_id(serve: Serve, faults: EngineFaults) -> None:
    running, mark = serve().ready(), str(uuid4())
    faults.arm(FAILED_STEP)
    body = {"prompt": "?", "max_tokens": 3}
    assert running.http.post("/v1/completions", json=body, headers={"x-correlation-id": mark}).status_code == 500
    assert running.complete(1, 3)
    running.process.send_signal(signal.SIGTERM)
    lines = [json.loads(line) for line in running.process.communicate(timeout=LIMIT_S)[1].splitlines()]
    assert [line["correlation_id"] for line in lines if "ZeroDivisionError at" in line["message"]] == [mark]


@ON_CPU
def test_streams_go_on_from_every_state(serve: Serve, faults: EngineFaults) -> None:
    """Stop strings, `n`, log-probabilities and penalties: each event's content comes once, and in order. The output
    depends on the prompt's length; other letters make it miss the prefix cache."""
    running = serve("--engine-restarts", "100").ready()
    bodies: list[dict[str, Any]] = [
        {"seed": 1, "n": 3}, {"seed": 2, "stop": ["99", "77"]}, {"seed": 3, "logprobs": 3, "frequency_penalty": 0.5},
    ]  # fmt: skip
    with ThreadPoolExecutor(len(bodies)) as pool:
        expected = list(pool.map(partial(streamed, running, letter="a"), bodies))
        for times, state in enumerate(("prefill", "decode", LAST_TOKEN, HALF_MESSAGE), 1):
            faults.arm(state)
            assert list(pool.map(partial(streamed, running, letter="abcde"[times]), bodies)) == expected, state
            assert running.metric("engine_restarts_total") == times, state
    assert running.metric("prompt_tokens_total") == running.metric("prefix_cache_queries_total") == 5 * 5 * 701


def streamed(running: ServeProcess, fields: dict[str, Any], letter: str = "x") -> dict[int, Any]:
    """Return text, log-probabilities and finish reason of each choice of a streamed completion. A step computes 512
    tokens, so the prefill takes two."""
    body = {"prompt": letter * 700 + "?", "max_tokens": 200, "temperature": 1.0, "stream": True, **fields}
    found: dict[int, Any] = {}
    with running.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    whole = found.setdefault(choice["index"], {"text": "", "tokens": [], "scores": [], "finish": []})
                    whole["text"] += choice["text"]
                    whole["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
                    whole["scores"] += (choice["logprobs"] or {}).get("token_logprobs", [])
                    whole["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert all(len(one["finish"]) == 1 for one in found.values())
    return found


def test_client_that_does_not_read_holds_no_other_up(serve: Serve) -> None:
    """Its stream fills the buffers of its connection, and is ended; others are streamed all the time."""
    running = serve("--stall-timeout", "1").ready()
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "?", "max_tokens": 60_000, "stream": True, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        lazy.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: running.metric("num_requests_running") == 1)
        while running.metric("num_requests_running") == 1:
            assert [len(one["text"]) for one in streamed(running, {"n": 2}).values()] == [200, 200]
        assert lazy.recv(4096).startswith(b"HTTP/1.1 200")
    until(lambda: running.metric("kv_cache_usage_perc") == 0)
    assert running.metric("engine_restarts_total") == 0


def test_failed_load_leaves_no_process(tmp_path: Path) -> None:
    """A file that is no model, and one whose weights are cut off: the engine fails early and late."""
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    for name, data in (("none.gguf", b"GGUF"), ("cut.gguf", whole[:-1000])):
        (tmp_path / name).write_bytes(data)
        running = ServeProcess("-m", tmp_path / name)
        _, said = running.process.communicate(timeout=LIMIT_S)
        assert (running.process.returncode, running.processes()) == (1, []), said
        running.close()


@ON_CPU
def test_two_workers_share_a_cache_that_both_fill(digits: Path, tmp_path: Path) -> None:
    """Both miss the same kernels, compile and store them, and answer alike on their own ports."""
    compiles = {PREBUILT_VARIABLE: "0"}
    warm_up = [sys.executable, "-m", "llm_worker_rbee", "warmup", str(digits)]
    subprocess.run(warm_up, env={**os.environ, **compiles}, check=True, capture_output=True)
    folder = cache_dir()
    assert folder is not None
    copied = Path(shutil.copytree(folder, tmp_path / folder.name))
    missing = {path.name for path in copied.glob("elementwise.norm*")}
    assert missing
    for name in missing:
        (copied / name).unlink()
    workers = [ServeProcess("-m", digits, **{CACHE_VARIABLE: str(tmp_path)}, **compiles) for _ in range(2)]
    try:
        first, second = (worker.ready().complete(1, 50) for worker in workers)
        assert first == second
        assert workers[0].url != workers[1].url
        assert missing <= {path.name for path in copied.iterdir()}
    finally:
        for worker in workers:
            worker.close()


@ON_CPU
def test_engine_killed_while_it_compiles_takes_its_helpers_along(digits: Path, tmp_path: Path) -> None:
    if usable_cores() < 2:
        pytest.skip("one core: there are no helper processes")
    running = ServeProcess(
        "-m", digits, **{CACHE_VARIABLE: str(tmp_path), PREBUILT_VARIABLE: "0", THREADS_VARIABLE: "2"}
    )
    until(lambda: any(path.is_file() for path in tmp_path.rglob("*")))  # kernels are being compiled
    helpers = [pid for pid in running.processes() if "run_helper" in command(pid)]
    assert helpers
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)  # they get no further with their present kernel, and can still be killed
    os.kill(running.engine(), signal.SIGKILL)
    until(lambda: not running.processes())
    assert "was killed by SIGKILL while it loaded the model" in running.process.communicate()[1]
    running.close()


@ON_CPU
def test_stopped_terminal_does_not_stop_the_front(digits: Path, tmp_path: Path) -> None:
    """As after Ctrl-S: the progress of compiling cannot be drawn, and is still reported over HTTP."""
    master, slave = pty.openpty()
    running = ServeProcess(
        "-m", digits, stderr=slave, TERM="xterm", **{CACHE_VARIABLE: str(tmp_path), PREBUILT_VARIABLE: "0"}
    )
    termios.tcflow(slave, termios.TCOOFF)
    with running.http.stream("GET", "/v1/loading/progress") as events:
        reports = (line for line in events.iter_lines() if COMPILING in line)
        for _ in range(2):
            assert '"stage":"kernels"' in next(reports)
            assert running.http.get("/health").json()["status"] == "loading"
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(LIMIT_S) == 0
    running.close()
    os.close(slave)
    os.close(master)


def test_health_while_engine_restarts_is_loading(serve: Serve) -> None:
    running = serve().ready()
    os.kill(running.engine(), signal.SIGKILL)
    until(lambda: running.http.get("/health").json()["status"] == "loading")
    assert running.complete(1, 3)  # it waits, and is answered
    until(lambda: running.http.get("/health").status_code == 200)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_ready", [False, True])
def test_front_that_ends_takes_its_engine_along(serve: Serve, number: signal.Signals, is_ready: bool) -> None:
    running = serve()
    if is_ready:
        running.ready()
    engine = running.engine()
    running.process.send_signal(number)
    running.process.wait(LIMIT_S)
    until(lambda: not is_alive(engine) and not running.processes(), 2.0)
    assert running.process.returncode == (-number if number == signal.SIGKILL else 0)


def test_signal_to_both_processes_drains(serve: Serve) -> None:
    """As a service manager does at a stop: the running request is answered, and no engine is restarted."""
    running = serve().ready()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.complete, 1, 3000)
        until(lambda: "num_requests_running 1.0" in running.http.get("/metrics").text)
        for pid in (running.engine(), running.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert len(reply.result()[0]["text"]) == 3000
    _, said = running.process.communicate(timeout=LIMIT_S)
    assert (running.process.returncode, "restart" in said) == (0, False)


def test_engine_process_off_has_no_child(serve: Serve) -> None:
    running = serve("--engine-process", "off").ready()
    assert not any("token_engine.child" in command(pid) for pid in children(running.process.pid))
    assert running.complete(1, 5)


def test_engine_process_wrong_value_is_a_usage_error(digits: Path) -> None:
    line = [sys.executable, "-m", "llm_worker_rbee", "serve", "-m", str(digits), "--engine-process", "maybe"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, "use on or off" in done.stderr) == (2, True)
