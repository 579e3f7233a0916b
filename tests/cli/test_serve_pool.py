"""`serve` with several models: real processes and tiny models, clients of OpenAI, Ollama and vLLM, engines that die."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from typer.testing import CliRunner

from llm_worker_rbee.cli import app
from tests.conftest import ON_CPU, with_kernels
from tests.helpers.process import spawn
from tests.helpers.serve_process import ServeProcess, command, until
from tests.helpers.server import SAID, events, write_model
from tests.helpers.tiny_pooling import write_bert

pytestmark = ON_CPU
Serve = Callable[..., ServeProcess]
LIMITS = ("--kv-memory", "16M")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chat models `one`, `two` and `owner/three`, an embedding model, a reranker, a broken file, a link that leads
    out."""
    folder = tmp_path_factory.mktemp("models")
    first = with_kernels(write_model(folder / "one.gguf"))
    (folder / "owner").mkdir()
    for name in ("two", "owner/three"):
        (folder / f"{name}.gguf").write_bytes(first.read_bytes())
    write_bert(folder / "embedder")
    write_bert(folder / "ranker", "rerank")
    (folder / "broken.gguf").write_bytes(first.read_bytes()[:5000])
    outside = tmp_path_factory.mktemp("outside") / "secret.gguf"
    outside.write_bytes(first.read_bytes())
    (folder / "link.gguf").symlink_to(outside)
    (folder / "notes.txt").write_text("no model")
    return folder


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    started: list[ServeProcess] = []

    def start(*args: str | Path) -> ServeProcess:
        started.append(ServeProcess(*LIMITS, *args))
        return started[-1].ready()

    yield start
    for running in started:
        running.close()


def complete(running: ServeProcess, model: str | None, prompt: str = ">", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 20, "temperature": 0, **fields}
    return running.http.post("/v1/completions", json={name: value for name, value in body.items() if value is not None})


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def states(running: ServeProcess) -> dict[str, str]:
    return {entry["model"]: entry["status"] for entry in running.http.get("/health").json()["models"]}


def all_engines(running: ServeProcess) -> list[int]:
    """Return the processes of engines, that which waits for the next load included: a thread has started it."""
    return [pid for pid in running.processes() if "token_engine.child" in command(pid)]


def engine_of(running: ServeProcess) -> list[int]:
    """Return the processes of engines that have loaded a model: the spare one has not opened a file of it."""
    return [pid for pid in all_engines(running) if any(".gguf" in line for line in _maps(pid))]


def _maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []


def test_request_names_a_model_of_the_folder(serve: Serve, folder: Path) -> None:
    running = serve("--models-dir", folder)
    chats = ["broken", "one", "two", "owner/three"]
    assert sorted(states(running)) == sorted([*chats, "embedder", "ranker"])
    assert set(states(running).values()) == {"unloaded"}
    assert running.http.get("/health").json()["status"] == "healthy"  # without a model
    assert running.http.get("/v1/ready").json()["ready"]
    for name in ("one", "two", "owner/three", "one:latest"):
        assert text(complete(running, name)) == SAID
    assert {name for name, state in states(running).items() if state == "loaded"} == {"one", "two", "owner/three"}
    vectors = running.http.post("/v1/embeddings", json={"model": "embedder", "input": ["a", "b"]}).json()["data"]
    assert len(vectors) == 2
    ranked = running.http.post("/v1/rerank", json={"query": "a", "documents": ["b", "c"]})  # the only one of its kind
    assert ranked.json()["model"] == "ranker"
    loaded = {name for name, state in states(running).items() if state == "loaded"}
    assert loaded == {"one", "embedder", "ranker"}  # three models at a time
    assert text(complete(running, None)) == SAID  # the first whose file can be used
    with ThreadPoolExecutor(8) as clients:  # unknown names: each looks at the folder again
        assert {reply.status_code for reply in clients.map(lambda i: complete(running, f"no-{i}"), range(24))} == {404}
    assert len(running.http.get("/v1/models").json()["data"]) == 6


@pytest.mark.parametrize("name", ["../one", "/etc/passwd", "link", "hf:owner/repo", "one.gguf/..", "no\x00", "smollm2"])
def test_name_that_the_folder_does_not_have_is_refused(serve: Serve, folder: Path, name: str) -> None:
    running = serve("--models-dir", folder, "--max-models", "1")
    reply = complete(running, name)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert set(states(running).values()) == {"unloaded"}


def test_broken_file_and_wrong_kind_and_wrong_body_touch_no_other(serve: Serve, folder: Path) -> None:
    running = serve("--models-dir", folder)
    assert text(complete(running, "one")) == SAID
    for _ in range(2):
        reply = complete(running, "broken")
        assert reply.status_code == 500
        assert "broken.gguf" in reply.json()["error"]["message"]
    reply = running.http.post("/v1/embeddings", json={"model": "one", "input": "x"})
    assert (reply.status_code, "of kind 'chat', which does not do this" in reply.text) == (400, True)
    assert complete(running, "two", temperature=-1).status_code == 400
    assert states(running) | {"one": "loaded", "two": "unloaded", "broken": "failed"} == states(running)
    health = running.http.get("/health").json()
    assert health["status"] == "healthy"  # a file that is no model is no fault of the worker
    assert next(model["reason"] for model in health["models"] if model["model"] == "broken")
    assert text(complete(running, "one")) == SAID


def test_new_file_is_served_and_a_removed_one_is_not(serve: Serve, folder: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    running = serve("--models-dir", models)
    assert running.http.get("/v1/models").json()["data"] == []
    reply = complete(running, None)
    assert (reply.status_code, "there is no model of kind chat here" in reply.text) == (404, True)
    (models / "late.gguf").write_bytes((folder / "one.gguf").read_bytes())
    assert text(complete(running, "late")) == SAID
    assert running.http.post("/models/unload", json={"model": "late"}).json() == {"success": True}
    (models / "late.gguf").unlink()
    assert running.http.get("/v1/models").json()["data"] == []
    assert complete(running, "late").status_code == 404


def test_changed_file_is_read_again(serve: Serve, folder: Path, tmp_path: Path) -> None:
    """A copy that was not complete, and another model in the place of one that sleeps."""
    whole = (folder / "one.gguf").read_bytes()
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "copy.gguf"
    file.write_bytes(whole[:5000])
    running = serve("--models-dir", tmp_path / "models")
    assert complete(running, "copy").status_code == 500
    file.write_bytes(whole)
    assert text(complete(running, "copy")) == SAID
    assert running.http.post("/sleep").status_code == 200
    replacement = tmp_path / "new.gguf"
    replacement.write_bytes(whole.replace(b"{%- for", b"{%-  for", 1) + b"\0" * 64)
    replacement.replace(file)
    assert text(complete(running, "copy")) == SAID
    assert states(running) == {"copy": "loaded"}
    file.unlink()
    assert running.http.post("/models/unload", json={"model": "copy"}).status_code == 200
    assert complete(running, "copy").status_code == 404


def test_two_models_take_turns_under_eight_clients(serve: Serve, folder: Path) -> None:
    """Only one fits at a time; every request is answered, and by its own model."""
    running = serve("-m", folder / "one.gguf", "-m", folder / "two.gguf", "--max-models", "1")

    def ask(i: int) -> tuple[str, str]:
        name = ("one", "two")[i % 2]
        reply = complete(running, name, stream=False)
        return text(reply), reply.json()["model"]

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(ask, range(64)))
    assert answers == [(SAID, ("one", "two")[i % 2]) for i in range(64)]
    assert sorted(states(running).values()) == ["loaded", "unloaded"]


def test_memory_limit(serve: Serve, folder: Path) -> None:
    """A model takes its weights, its KV cache and its process: 200 MB and more, so two of them exceed 300 MB."""
    running = serve("-m", folder / "one.gguf", "-m", folder / "two.gguf", "--model-memory", "300MB")
    for name in ("one", "two", "one"):
        assert text(complete(running, name)) == SAID
        memory = running.http.get("/health").json()["memory"]
        assert 200e6 < memory["used_bytes"] <= memory["limit_bytes"] == 300e6
        assert {key for key, state in states(running).items() if state == "loaded"} == {name}
    running.close()
    running = serve("--models-dir", folder, "--model-memory", "100MB")
    reply = complete(running, "one")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "INSUFFICIENT_MEMORY")
    assert "process 201.3 MB" in reply.json()["error"]["message"]
    assert "100.0 MB" in reply.json()["error"]["message"]


def expiry(model: ollama.ProcessResponse.Model) -> datetime:
    assert model.expires_at is not None
    return model.expires_at


def test_ollama_client_lists_loads_and_unloads(serve: Serve, folder: Path) -> None:
    running = serve("--models-dir", folder, "--sleep-after", "1h")
    client = ollama.Client(running.url)
    assert {"one:latest", "owner/three:latest", "embedder:latest"} < {model.model for model in client.list().models}
    assert client.show("one").modelinfo is not None
    assert client.ps().models == []
    loaded = client.generate("one")  # without a prompt
    assert (loaded.done_reason, loaded.response) == ("load", "")
    (running_model,) = client.ps().models
    assert running_model.model == "one:latest"
    assert (running_model.size or 0) > 200e6
    assert datetime.now(UTC) < expiry(running_model) < datetime.now(UTC) + timedelta(hours=1)
    client.generate("one", keep_alive=-1)
    assert expiry(client.ps().models[0]).year == 9999
    assert client.generate("one", keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.chat("two", keep_alive="10ms").done_reason == "load"
    until(lambda: states(running)["two"] == "sleeping")
    assert client.generate("two", ">", raw=True, options={"temperature": 0}, keep_alive=0).response == SAID
    until(lambda: states(running)["two"] == "unloaded")
    client.generate("one", keep_alive="99999999h")
    assert expiry(client.ps().models[0]).year == 9999
    client.generate("one", keep_alive=0)
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        client.generate("one", keep_alive="soon")
    assert states(running)["one"] == "unloaded"  # a body that is not valid loads nothing
    assert client.embed("embedder", "x", keep_alive=0).embeddings
    until(lambda: states(running)["embedder"] == "unloaded")


def test_router_verbs_of_llama_server_and_sleep_of_vllm(serve: Serve, folder: Path) -> None:
    running = serve("--models-dir", folder)

    def listed() -> dict[str, Any]:
        return {entry["id"]: entry["status"] for entry in running.http.get("/models").json()["data"]}

    assert listed()["one"] == {"value": "unloaded"}
    assert running.http.post("/models/load", json={"model": "one"}).json() == {"success": True}
    until(lambda: listed()["one"]["value"] == "loaded")
    assert running.http.post("/models/load", json={"model": "nothing"}).status_code == 404
    assert running.http.post("/models/load", json={}).status_code == 400
    running.http.post("/models/load", json={"model": "broken"})
    until(lambda: listed()["broken"]["value"] == "failed")
    assert listed()["broken"]["failed"] is True
    assert running.http.post("/sleep?level=1").json() == {"is_sleeping": True}
    assert (listed()["one"]["value"], running.http.get("/is_sleeping").json()) == ("sleeping", {"is_sleeping": True})
    assert running.http.post("/wake_up").json() == {"is_sleeping": False}
    assert listed()["one"]["value"] == "loaded"
    assert running.http.post("/sleep?level=7").status_code == 400
    foreign = running.http.post("/sleep", headers={"origin": "https://evil.example"})
    assert (foreign.status_code, listed()["one"]["value"]) == (403, "loaded")
    assert running.http.post("/models/unload", json={"model": "one"}).json() == {"success": True}
    assert listed()["one"]["value"] == "unloaded"


def test_woken_model_goes_on_with_its_conversation(serve: Serve, folder: Path, tmp_path: Path) -> None:
    """With a folder for keys and values: asleep, unloaded for another model, and killed while it sleeps."""
    running = serve("-m", folder / "one.gguf", "--models-dir", folder, "--max-models", "1", "--kv-dir", tmp_path / "kv")
    prompt = "#" + "ab" * 300

    def cached() -> int:
        usage = complete(running, "one", prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert running.http.post("/sleep").is_success
    assert states(running)["one"] == "sleeping"
    assert cached() > 500
    assert text(complete(running, "two")) == SAID
    assert states(running)["one"] == "unloaded"
    assert cached() > 500


def test_openai_client_streams_while_another_model_is_loaded_and_killed(serve: Serve, folder: Path) -> None:
    running = serve("-m", folder / "one.gguf", "-m", folder / "two.gguf")
    until(lambda: set(states(running).values()) == {"loaded"})
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="one", prompt="#", max_tokens=2000, temperature=0, stream=True)
    parts = [next(stream).choices[0].text]
    survivors = set(engine_of(running))
    assert complete(running, "two", prompt="#").status_code == 200
    for pid in survivors:  # both, in the middle of an answer: each goes on in a new process
        os.kill(pid, signal.SIGKILL)
    parts += [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(parts) == "ab" * 1000
    assert text(complete(running, "two")) == SAID


def test_engine_killed_while_it_loads_fails_that_load_alone(serve: Serve, folder: Path) -> None:
    running = serve("-m", folder / "one.gguf", "--models-dir", folder)
    before = set(all_engines(running))
    replies: list[httpx.Response] = []
    killed = threading.Event()

    def kill_new() -> None:
        while not killed.is_set():
            for pid in set(all_engines(running)) - before:
                os.kill(pid, signal.SIGKILL)
                killed.set()

    killer = threading.Thread(target=kill_new)
    killer.start()
    replies.append(complete(running, "two"))
    killed.set()
    killer.join()
    assert text(replies[0]) == SAID  # it was loaded again
    assert text(complete(running, "one")) == SAID
    until(lambda: complete(running, "two").status_code == 200)


def test_engine_killed_while_it_is_unloaded_or_asleep_or_waits(serve: Serve, folder: Path) -> None:
    """What is killed in any state is loaded again by the next request, and the other model answers meanwhile."""
    running = serve("-m", folder / "one.gguf", "-m", folder / "two.gguf", "--max-models", "1")
    for _ in range(3):
        until(lambda: len(engine_of(running)) == 1)
        (engine,) = engine_of(running)
        with ThreadPoolExecutor(4) as clients:  # a waits for b's memory, while b is killed under its own requests
            replies = [clients.submit(complete, running, name) for name in ("one", "two", "one", "two")]
            with suppress(ProcessLookupError):  # it was unloaded in time
                os.kill(engine, signal.SIGKILL)
            assert [text(reply.result()) for reply in replies] == [SAID] * 4
    assert running.http.post("/sleep").status_code == 200
    for spare in all_engines(running):  # the process that waits for the next load
        os.kill(spare, signal.SIGKILL)
    assert text(complete(running, "one")) == SAID
    assert running.http.get("/health").json()["status"] == "healthy"


def test_engine_that_dies_too_often_fails_and_comes_back(serve: Serve, folder: Path) -> None:
    running = serve("-m", folder / "one.gguf", "--models-dir", folder, "--engine-restarts", "0")
    assert text(complete(running, "two")) == SAID
    survivor = set(engine_of(running))
    assert running.http.post("/models/unload", json={"model": "two"}).is_success
    (victim,) = survivor & set(engine_of(running))
    os.kill(victim, signal.SIGKILL)
    until(lambda: states(running)["one"] == "failed")
    assert text(complete(running, "two")) == SAID
    until(lambda: complete(running, "one").status_code == 200)


def test_stopped_engine_holds_up_its_own_requests_alone(serve: Serve, folder: Path) -> None:
    running = serve("-m", folder / "one.gguf", "--models-dir", folder, "--load-timeout", "30")
    (first,) = engine_of(running)
    os.kill(first, signal.SIGSTOP)
    try:
        assert text(complete(running, "two")) == SAID
        assert states(running)["two"] == "loaded"
    finally:
        os.kill(first, signal.SIGCONT)
    assert text(complete(running, "one")) == SAID


def test_twenty_loads_and_unloads_leave_memory_and_processes_as_they_were(serve: Serve, folder: Path) -> None:
    running = serve("--models-dir", folder, "--max-models", "1")

    def cycle() -> tuple[int, int]:
        for name, path in (("one", "/api/generate"), ("embedder", "/api/embed")):
            running.http.post(path, json={"model": name}).raise_for_status()
            running.http.post("/models/unload", json={"model": name}).raise_for_status()
        return anonymous_bytes(running.process.pid), len(engine_of(running))

    first = [cycle() for _ in range(5)][-1]
    last = [cycle() for _ in range(20)][-1]
    assert last[1] == first[1] == 0
    assert last[0] < first[0] * 1.1 + 4e6


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_metrics_and_lists_have_each_model(serve: Serve, folder: Path) -> None:
    running = serve("-m", folder / "one.gguf", "--models-dir", folder)
    assert text(complete(running, "one")) == SAID
    metrics = running.http.get("/metrics").text
    assert 'llm_worker_generation_tokens_total{model="one"}' in metrics
    assert 'llm_worker_model_state{model="two",state="unloaded"} 1.0' in metrics
    assert metrics.count("# HELP llm_worker_generation_tokens_total") == 1
    entries = {entry["id"]: entry for entry in running.http.get("/v1/models").json()["data"]}
    assert entries["one"]["status"] == {"value": "loaded"}
    assert entries["embedder"]["kind"] == "embedding"
    assert running.http.get("/v1/models/two").json()["status"] == {"value": "unloaded"}
    info = running.http.get("/info").json()
    rows = next(model["memory"] for model in info["models"] if model["model"] == "one")
    assert [row["owner"] for row in rows] == ["weights", "process", "KV cache"]
    assert running.http.post("/tokenize", json={"model": "two", "text": "ab"}).json()["tokens"] == [97, 98]
    job = running.http.post("/v1/jobs", json={"model": "two", "prompt": ">", "max_tokens": 9, "stream": False})
    assert job.json()["text"] == SAID


def test_jobs_load_and_unload_models_and_report_to_the_callback(serve: Serve, folder: Path) -> None:
    posts: queue.Queue[Any] = queue.Queue()

    class Orchestrator(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Orchestrator) as orchestrator:
        threading.Thread(target=orchestrator.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{orchestrator.server_port}"
        running = serve("--models-dir", folder, "--callback-url", url, "--heartbeat-url", url)
        started = [posts.get(timeout=30) for _ in range(2)]
        heartbeat = next(post["worker"] for post in started if "worker" in post)
        assert {model["model"]: model["status"] for model in heartbeat["models"]}["one"] == "unloaded"
        for operation, status in (("load", "loaded"), ("sleep", "sleeping"), ("unload", "unloaded")):
            body = {"operation": operation, "model": "one", "job_id": operation}
            assert running.http.post("/v1/jobs", json=body).json()["sse_url"] == f"/v1/jobs/{operation}/stream"
            read = events(running.http.get(f"/v1/jobs/{operation}/stream").text)
            assert [read[0]["type"], read[-1]["type"], read[-1]["status"]] == ["started", "end", status]
            reported = posts.get(timeout=30)
            assert (reported["job_id"], reported["status"], reported["model"]) == (operation, status, "one")
            assert states(running)["one"] == status
        broken = running.http.post("/v1/jobs", json={"operation": "load", "model": "broken", "stream": False})
        assert (broken.status_code, broken.json()["code"]) == (500, "INVALID_MODEL")
        assert "broken.gguf" in posts.get(timeout=30)["error"]
        assert running.http.post("/v1/jobs", json={"operation": "load", "model": "none"}).status_code == 404
        assert running.http.post("/v1/jobs", json={"operation": "load"}).status_code == 400
        orchestrator.shutdown()


def test_signal_ends_all_processes(serve: Serve, folder: Path) -> None:
    running = serve("-m", folder / "one.gguf", "-m", folder / "two.gguf")
    until(lambda: set(states(running).values()) == {"loaded"})
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0
    until(lambda: not running.processes())


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["-m", "a", "-m", "a"], "the same model twice"),
        (["-m", "a", "-m", "b", "--served-model-name", "x"], "--served-model-name is for a single model"),
        (["--models-dir", "/no/such/folder"], "is not a folder"),
        (["--models-dir", "/tmp", "--sleep-after", "soon"], "give a duration such as 5m"),
        (["--models-dir", "/tmp", "--model-memory", "much"], "give a size such as"),
        (["--models-dir", "/tmp", "--max-models", "0"], "max-models"),
        (["--models-dir", "/tmp", "--engine-process", "off"], "--engine-process off is for a single model"),
    ],
)
def test_wrong_usage(args: list[str], problem: str) -> None:
    line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", *args]
    with spawn(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert problem in errors


def test_pool_on_a_gpu_that_is_not_there_says_so(folder: Path) -> None:
    """A child has looked for it: the driver stays out of the worker's own process."""
    line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", "--device", "cuda", "--models-dir"]
    with spawn([*line, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert errors.startswith("error: --device cuda cannot be used (")


def test_ps_and_stop_of_the_command_line(serve: Serve, folder: Path) -> None:
    running = serve("-m", folder / "one.gguf", "--models-dir", folder)
    listed = CliRunner().invoke(app, ["ps", "--url", running.url])
    head, row = (line.split() for line in listed.stdout.splitlines())
    assert head == ["NAME", "KIND", "STATE", "SIZE", "REQUESTS", "UNTIL"]
    assert (row[:3], row[-2:]) == (["one", "chat", "loaded"], ["for", "ever"])
    everything = json.loads(CliRunner().invoke(app, ["ps", "--all", "--json", "--url", running.url]).stdout)["models"]
    assert {entry["id"] for entry in everything} > {"one", "two", "embedder"}
    stopped = CliRunner().invoke(app, ["stop", "one", "--url", running.url])
    assert (stopped.stdout, states(running)["one"]) == ("one is unloaded\n", "unloaded")
    unknown = CliRunner().invoke(app, ["stop", "nothing", "--url", running.url])
    assert "the model 'nothing' is not served here" in str(unknown.exception)
    assert CliRunner().invoke(app, ["stop", "--all", "--url", running.url]).exit_code == 0
    assert CliRunner().invoke(app, ["stop"]).exit_code == 2
    absent = CliRunner().invoke(app, ["ps", "--url", "http://127.0.0.1:9"])
    assert "no worker answers at http://127.0.0.1:9" in str(absent.exception)
