"""`serve --models-dir`: pull, create, copy and delete with Ollama's client against a local hub; a model's defaults."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.conftest import ON_CPU, with_kernels
from tests.helpers.hub_server import Hub, running_hub
from tests.helpers.serve_process import ServeProcess, until
from tests.helpers.server import SAID, write_model
from tests.helpers.tiny_pooling import write_bert

pytestmark = ON_CPU
Serve = Callable[..., ServeProcess]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return with_kernels(write_model(tmp_path_factory.mktemp("model") / "m.gguf")).read_bytes()


@pytest.fixture(scope="module")
def hub(weights: bytes) -> Iterator[type[Hub]]:
    quants = {f"X-{quant}.gguf": weights for quant in ("Q4_K_M", "Q8_0")}
    repos = {"me/tiny": quants, "me/damaged": quants, "me/large": {"L.gguf": bytes(41_000_000)}}
    slow = {name: data + bytes(30 << 20) for name, data in quants.items()}  # the library writes pieces of 10 MB
    with running_hub({**repos, "me/gated": quants, "me/slow": slow}) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, weights: bytes) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "one.gguf").write_bytes(weights)
    return folder


@pytest.fixture
def serve(folder: Path, hub: type[Hub], tmp_path: Path) -> Iterator[Serve]:
    started: list[ServeProcess] = []
    hub.gate.clear()

    def start(*args: str | Path, **environment: str) -> ServeProcess:
        own = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": ""}
        own |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TRANSFORMERS_OFFLINE": "", "HF_HUB_DOWNLOAD_TIMEOUT": "90"}
        own |= environment
        started.append(ServeProcess("--kv-memory", "16M", "--max-pull", "40MB", "--models-dir", folder, *args, **own))
        until(lambda: started[-1].http.get("/health").json()["status"] == "healthy")
        return started[-1]

    yield start
    for running in started:
        running.close()


def lines(running: ServeProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in running.http.post(path, json=body).text.splitlines()]


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_ollama_client_pulls_and_uses_a_model_of_the_hub(serve: Serve, folder: Path) -> None:
    running = serve()
    client = ollama.Client(running.url)
    progress = list(client.pull("hf.co/me/tiny:Q8_0", stream=True))
    statuses = [report.status for report in progress]
    assert (statuses[0], statuses[-2:]) == ("pulling manifest", ["writing manifest", "success"])
    assert any(str(status).startswith("pulling ") for status in statuses[1:])
    assert "verifying sha256 digest" in statuses
    assert max(report.completed or 0 for report in progress) == (folder / "one.gguf").stat().st_size
    assert files(folder) == {"one.gguf", "hf.co/me/tiny:Q8_0.gguf"}
    for name in ("hf.co/me/tiny:Q8_0", "hf:me/tiny:Q8_0"):
        assert client.generate(name, ">", raw=True, options={"temperature": 0}).response == SAID
    assert client.pull("hf:me/tiny").status == "success"  # the preferred quantization, not streamed
    assert {"hf.co/me/tiny:latest", "hf.co/me/tiny:Q8_0"} < {model.model for model in client.list().models}
    assert client.pull("hf.co/me/tiny:Q8_0").status == "success"  # it is here
    client.delete("hf.co/me/tiny:Q8_0")
    client.delete("hf.co/me/tiny")
    assert files(folder) == {"one.gguf"}
    assert not (folder / "hf.co").exists()
    with pytest.raises(ollama.ResponseError, match="is not served here"):
        client.generate("hf.co/me/tiny", ">")  # a name in a request starts no download


@pytest.mark.parametrize(
    ("name", "status", "problem"),
    [
        ("llama3.2", 404, "pull model manifest: file does not exist"),
        ("hf.co/me/none", 404, "no model 'me/none'"),
        ("hf.co/me/tiny:Q2_K", 404, "it holds"),
        ("hf.co/me/../tiny", 404, "file does not exist"),
        ("hf.co/../../etc/passwd", 404, "file does not exist"),
        ("hf:me/tiny:../../x", 404, "file does not exist"),
        ("https://hf.co/me/tiny", 404, "file does not exist"),
        ("hf.co/me/gated", 500, "is gated"),
        ("hf.co/me/damaged:Q8_0", 500, "damaged on its way"),
        ("hf.co/me/large", 500, "more than the 40.0 MB that --max-pull allows"),
    ],
)
def test_pull_that_cannot_be(serve: Serve, folder: Path, name: str, status: int, problem: str) -> None:
    running = serve()
    reply = running.http.post("/api/pull", json={"model": name, "stream": False})
    assert (reply.status_code, problem in reply.json()["error"]) == (status, True), reply.text
    assert str(folder) not in reply.text
    if status != 404 or "none" in name or "Q2" in name:
        assert problem in lines(running, "/api/pull", model=name)[-1]["error"]
    assert {path for path in files(folder) if not path.startswith(".")} == {"one.gguf"}


def test_pull_stops_with_its_last_client_and_resumes(serve: Serve, folder: Path, hub: type[Hub]) -> None:
    running = serve()

    def pullers() -> list[int]:
        return [pid for pid in running.processes() if b"report_pull" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def partial() -> list[Path]:
        return [path for path in folder.rglob("*.incomplete") if path.stat().st_size > 0]

    body = {"model": "hf.co/me/slow:Q8_0"}
    with running.http.stream("POST", "/api/pull", json=body) as first:
        received = first.iter_lines()
        next(received)
        with running.http.stream("POST", "/api/pull", json=body) as second:
            assert json.loads(next(second.iter_lines()))["status"].startswith("pulling")
            until(partial)
            assert len(pullers()) == 1  # both read the same pull
            with running.http.stream("POST", "/api/pull", json={"model": "hf.co/me/slow:Q4_K_M"}) as other:
                assert json.loads(next(other.iter_lines()))["status"].startswith("pulling")
                refused = running.http.post("/api/pull", json={"model": "hf.co/me/tiny"})
                assert (refused.status_code, "2 models are being pulled" in refused.text) == (429, True)
                watched = running.http.get("/health").json()["pulls"]
                assert {pull["model"] for pull in watched} == {"hf.co/me/slow:Q8_0", "hf.co/me/slow:Q4_K_M"}
        assert len(pullers()) >= 1  # the first client still reads
    until(lambda: not pullers())
    assert partial()
    hub.gate.set()
    assert lines(running, "/api/pull", **body)[-1] == {"status": "success"}
    assert hub.seen["range of me/slow"] > 0
    assert files(folder) - {"one.gguf"} >= {"hf.co/me/slow:Q8_0.gguf"}


def test_worker_that_stops_ends_its_pulls(serve: Serve) -> None:
    running = serve()
    with running.http.stream("POST", "/api/pull", json={"model": "hf.co/me/slow"}) as reply:
        received = reply.iter_lines()
        next(received)
        running.process.terminate()
        rest = list(received)
    assert "was stopped" in rest[-1]
    assert running.process.wait(30) == 0
    until(lambda: not running.processes())


def test_ollama_client_creates_copies_and_deletes(serve: Serve, folder: Path) -> None:
    running = serve()
    client = ollama.Client(running.url)
    parameters = {"temperature": 0, "stop": ["wrd"], "num_predict": 5, "num_ctx": 200}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert client.create("team/pirate:v1", from_="one", system="Be rude", parameters=parameters, messages=messages)
    assert files(folder) == {"one.gguf", "team/pirate:v1.gguf", "team/pirate:v1.defaults.json"}
    assert (folder / "one.gguf").samefile(folder / "team/pirate:v1.gguf")
    shown = running.http.post("/api/show", json={"model": "team/pirate:v1"}).json()
    assert (shown["system"], shown["messages"]) == ("Be rude", messages)
    assert [line.split() for line in shown["parameters"].splitlines() if "stop" in line] == [["stop", '"wrd"']]
    rendered = running.http.post(
        "/apply-template", json={"model": "team/pirate:v1", "messages": [{"role": "user", "content": "x"}]}
    ).json()["prompt"]
    assert [rendered.index(text) for text in ("Be rude", "a", "b", "x")] == sorted(
        rendered.index(text) for text in ("Be rude", "a", "b", "x")
    )
    own = [{"role": "system", "content": "Mine"}, {"role": "user", "content": "x"}]
    rendered = running.http.post("/apply-template", json={"model": "team/pirate:v1", "messages": own}).json()["prompt"]
    assert "Be rude" not in rendered
    assert rendered.index("Mine") < rendered.index("x")
    assert client.generate("team/pirate:v1", ">", raw=True).response == SAID[:5]  # num_predict, temperature
    api = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    said = api.completions.create(model="team/pirate:v1", prompt=">", max_tokens=20).choices[0]
    assert (said.text, said.finish_reason) == (SAID.partition("wrd")[0], "stop")
    asked = client.generate("team/pirate:v1", ">", raw=True, options={"num_predict": 20, "stop": ["zz"]})
    assert asked.response == SAID  # the request counts more
    info = next(
        entry["info"] for entry in running.http.get("/info").json()["models"] if entry["model"] == "team/pirate:v1"
    )
    assert info["context_length"] <= 200
    changed = lines(running, "/api/create", model="team/pirate:v1", **{"from": "team/pirate:v1"}, system="Be kind")
    assert changed[-1] == {"status": "success"}
    shown = running.http.post("/api/show", json={"model": "team/pirate:v1"}).json()
    assert (shown["system"], shown["messages"]) == ("Be kind", messages)
    client.copy("team/pirate:v1", "second")
    assert running.http.post("/api/show", json={"model": "second"}).json()["system"] == "Be kind"
    client.delete("team/pirate:v1")
    assert client.generate("second", ">", raw=True).response == SAID[:5]
    assert files(folder) == {"one.gguf", "second.gguf", "second.defaults.json"}
    with pytest.raises(ollama.ResponseError, match="no model"):
        client.delete("team/pirate:v1")


HOSTILE = ["../x", "/etc/x", "a/../../x", ".hidden", "a/.b", "x\x00", "a" * 300, "a b", "~root", "a//b", "", "a/b/c/d",
           "x-00001-of-00002", "a:b:c", "café", "x\n", "link/x", "a\\b", "..", "a/", "-x"]  # fmt: skip


def test_no_name_leaves_the_folder(serve: Serve, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    running = serve()
    for name in HOSTILE:
        for path, body in (
            ("/api/copy", {"source": "one", "destination": name}),
            ("/api/create", {"model": name, "from": "one", "stream": False}),
        ):
            reply = running.http.post(path, json=body)
            assert reply.status_code == 400, (path, name, reply.text)
            assert str(folder) not in reply.text
        deleted = running.http.request("DELETE", "/api/delete", json={"model": name})
        assert deleted.status_code in (400, 404), name
    assert files(folder) == {"one.gguf"}
    assert not list(outside.iterdir())


def test_no_model_lies_within_another(serve: Serve, folder: Path) -> None:
    """A file in the folder of a model would be a part of it, and go with it; so would models in a folder that becomes
    one."""
    write_bert(folder / "embedder")
    (folder / "team").mkdir()
    (folder / "team" / "two.gguf").hardlink_to(folder / "one.gguf")
    running, before = serve(), files(folder)
    for source, name in (("one", "embedder/x"), ("embedder", "embedder/x"), ("embedder", "team")):
        for path, body in (
            ("/api/copy", {"source": source, "destination": name}),
            ("/api/create", {"model": name, "from": source, "system": "x", "stream": False}),
        ):
            reply = running.http.post(path, json=body)
            assert (reply.status_code, "other" in reply.text) == (409, True), reply.text
    assert (
        running.http.post("/api/copy", json={"source": "embedder", "destination": "team/embedder"}).status_code == 200
    )
    assert running.http.request("DELETE", "/api/delete", json={"model": "team/embedder"}).status_code == 200
    assert files(folder) == before


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"model": "x"}, "from is required"),
        ({"from": "one"}, "model is required"),
        ({"model": "x", "from": "one", "template": "{{ .Prompt }}"}, "template is not supported"),
        ({"model": "x", "from": "one", "quantize": "q4_K_M"}, "quantize is not supported"),
        ({"model": "x", "files": {"a.gguf": "sha256:0"}}, "files is not supported"),
        ({"model": "x", "from": "one", "adapters": {"a": "b"}}, "adapters is not supported"),
        ({"model": "x", "from": "one", "parameters": {"mirostat": 1}}, "mirostat"),
        ({"model": "x", "from": "one", "parameters": {"temperature": "hot"}}, "temperature"),
        ({"model": "x", "from": "one", "parameters": {"temperature": 99}}, "temperature is 99"),
        ({"model": "x", "from": "one", "parameters": []}, "parameters must be an object"),
        ({"model": "x", "from": "one", "messages": [{"role": "tool", "content": "x"}]}, "tool"),
        ({"model": "x", "from": "one", "messages": "x"}, "messages must be a list"),
        ({"model": "x", "from": "one", "system": 1}, "system must be a string"),
        ({"model": "x", "from": "one", "unknown": 1}, "unknown field"),
        ({"model": "x", "from": "one", "system": "x" * 200_000}, "more than 131072 bytes"),
        ({"model": "x", "from": "one", "parameters": {"num_ctx": 0}}, "num_ctx must be"),
    ],
)
def test_create_with_what_it_does_not_take(serve: Serve, folder: Path, body: dict[str, Any], problem: str) -> None:
    running = serve()
    reply = running.http.post("/api/create", json=body)
    assert (reply.status_code, problem in reply.json()["error"]) == (400, True), reply.text
    assert files(folder) == {"one.gguf"}


def test_models_of_options_and_other_files_are_not_changed(serve: Serve, folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes((folder / "one.gguf").read_bytes())
    (folder / "two.gguf").write_bytes(own.read_bytes())
    running = serve("-m", own)
    for verb, body in (("DELETE", {"model": "own"}), ("POST", {"source": "own", "destination": "x"})):
        path = {"DELETE": "/api/delete", "POST": "/api/copy"}[verb]
        reply = running.http.request(verb, path, json=body)
        assert (reply.status_code, "is not in --models-dir" in reply.text) == (400, True)
    for path, body in (
        ("/api/copy", {"source": "one", "destination": "two"}),
        ("/api/create", {"model": "two", "from": "one", "system": "x"}),
    ):
        reply = running.http.post(path, json=body)
        assert (reply.status_code, "delete it first" in reply.text) == (409, True)
    assert files(folder) == {"one.gguf", "two.gguf"}


def test_only_the_key_or_this_machine_changes_models(serve: Serve, tmp_path: Path, folder: Path) -> None:
    running = serve()
    body = {"source": "one", "destination": "x"}
    for headers in (
        {"X-Forwarded-For": "1.2.3.4"},
        {"Forwarded": "for=1.2.3.4"},
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert running.http.post("/api/copy", json=body, headers=headers).status_code == 403, headers
    assert files(folder) == {"one.gguf"}
    open_host = serve("--allowed-host", "*")
    assert open_host.http.post("/api/copy", json=body, headers={"Host": "other.example"}).status_code == 403
    key = tmp_path / "key"
    key.write_text("secret")
    keyed = serve("--api-key-file", key)
    assert keyed.http.post("/api/copy", json=body).status_code == 401
    allowed = {"Authorization": "Bearer secret", "X-Forwarded-For": "1.2.3.4"}
    assert keyed.http.post("/api/copy", json=body, headers=allowed).status_code == 200
    assert files(folder) == {"one.gguf", "x.gguf"}


@pytest.mark.parametrize("engine_process", ["on", "off"])
def test_worker_without_the_folder_has_no_store(weights: bytes, tmp_path: Path, engine_process: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(weights)
    (tmp_path / "m.defaults.json").write_text('{"parameters": {"temperature": 0, "num_predict": 3}}')
    running = ServeProcess("-m", path, "--engine-process", engine_process).ready()
    try:
        for route in ("pull", "create", "copy", "push"):
            reply = running.http.post(f"/api/{route}", json={"model": "hf.co/me/tiny"})
            assert (reply.status_code, "error" in reply.json()) == (404, True)
        assert running.http.request("DELETE", "/api/delete", json={"model": "m"}).status_code == 404
        said = running.http.post("/api/generate", json={"prompt": ">", "raw": True, "stream": False}).json()
        assert said["response"] == SAID[:3]  # a single model has its defaults, too
    finally:
        running.close()


def test_delete_waits_for_the_answers_of_the_model(serve: Serve, folder: Path) -> None:
    running = serve()
    client = ollama.Client(running.url)
    client.copy("one", "busy")
    stream = client.generate("busy", "#", raw=True, stream=True, options={"num_predict": 400, "temperature": 0})
    first = next(iter(stream)).response
    deleting = threading.Thread(target=client.delete, args=("busy",))
    deleting.start()
    assert len(str(first) + "".join(str(part.response) for part in stream)) == 400
    deleting.join()
    assert files(folder) == {"one.gguf"}


@pytest.mark.parametrize("text", ["{", '{"sistem": "x"}', '{"parameters": {"top_k": "x"}}', "[]", '{"system": 1}'])
def test_damaged_defaults_fail_their_own_model(serve: Serve, folder: Path, text: str) -> None:
    (folder / "two.gguf").write_bytes((folder / "one.gguf").read_bytes())
    (folder / "two.defaults.json").write_text(text)
    running = serve()
    reply = running.http.post("/v1/completions", json={"model": "two", "prompt": ">"})
    message = reply.json()["error"]["message"]
    assert (reply.status_code, "two.defaults.json cannot be used" in message) == (500, True)
    assert str(folder) not in message
    (folder / "two.defaults.json").write_text('{"system": "Now it is right"}')
    until(lambda: running.http.post("/v1/completions", json={"model": "two", "prompt": ">"}).status_code == 200)


def test_router_verbs_of_llama_server_pull_and_remove(serve: Serve, folder: Path) -> None:
    running = serve()
    events: list[dict[str, Any]] = []
    seen = threading.Event()

    def watch() -> None:
        with httpx.stream("GET", f"{running.url}/models/sse", timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                    seen.set()
                if events and events[-1]["event"] == "model_remove":
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert seen.wait(30)
    assert running.http.post("/models", json={"model": "hf.co/me/tiny:Q8_0"}).json() == {"success": True}
    until(lambda: "hf.co/me/tiny:Q8_0.gguf" in files(folder))
    until(lambda: any(event["model"] == "hf.co/me/tiny:Q8_0" and event["event"] == "model_status" for event in events))
    running.http.post("/models/load", json={"model": "one"}).raise_for_status()
    until(lambda: any(event["data"].get("status") == "loaded" for event in events))
    assert running.http.delete("/models", params={"model": "hf.co/me/tiny:Q8_0"}).json() == {"success": True}
    watcher.join(30)
    assert not watcher.is_alive()
    assert {"model": "one", "event": "model_status", "data": {"status": "unloaded"}} in events
    assert events[-1]["model"] == "hf.co/me/tiny:Q8_0"
    assert running.http.delete("/models").status_code == 400
    assert running.http.post("/models", json={"model": "llama3"}).status_code == 404
    assert running.http.delete("/models", params={"model": "one"}, headers={"forwarded": "for=x"}).status_code == 403


def test_requests_of_open_webui(serve: Serve, folder: Path) -> None:
    """Those of its routers for Ollama and OpenAI: the connection, the list with what is loaded, pulls and removals."""
    running = serve()
    headers = {"Content-Type": "application/json", "X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Role": "admin"}
    assert running.http.get("/api/version", headers=headers).json()["version"].count(".") == 2
    listed = running.http.get("/api/tags", headers=headers).json()["models"]
    assert [(model["name"], model["model"]) for model in listed] == [("one:latest", "one:latest")]
    assert {"digest", "size", "modified_at", "details"} < set(listed[0])
    assert running.http.get("/api/ps", headers=headers).json() == {"models": []}
    running.http.post("/api/generate", json={"model": "one:latest"}).raise_for_status()
    (loaded,) = running.http.get("/api/ps", headers=headers).json()["models"]
    assert loaded["name"] == "one:latest"
    assert datetime.fromisoformat(loaded["expires_at"]).timestamp() > 0
    (entry,) = running.http.get("/v1/models", headers=headers).json()["data"]
    assert (entry["id"], entry["object"]) == ("one", "model")
    shown = running.http.post("/api/show", json={"name": "one:latest"}, headers=headers).json()
    assert {"details", "model_info", "capabilities"} < set(shown)
    pull = json.dumps({"model": "hf.co/me/tiny:Q8_0", "insecure": True})
    lines = running.http.post("/api/pull", content=pull, headers=headers).text.splitlines()
    assert json.loads(lines[-1]) == {"status": "success"}
    chat = {"model": "hf.co/me/tiny:Q8_0", "messages": [{"role": "user", "content": "#"}], "stream": False}
    chat |= {"options": {"num_predict": 4}, "keep_alive": "5m"}
    assert running.http.post("/api/chat", json=chat, headers=headers).json()["message"]["role"] == "assistant"
    assert running.http.request("DELETE", "/api/delete", json={"model": "hf.co/me/tiny:Q8_0"}).is_success
    assert files(folder) == {"one.gguf"}


def test_raw_socket_with_two_hosts_or_none_changes_nothing(serve: Serve, folder: Path) -> None:
    running = serve()
    body = b'{"source": "one", "destination": "x"}'
    host, port = running.url.removeprefix("http://").split(":")
    for head in (b"HTTP/1.0\r\n", b"HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(b"POST /api/copy " + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            status = sock.makefile("rb").readline().split()[1]
        assert status in (b"400", b"403")
    assert files(folder) == {"one.gguf"}
