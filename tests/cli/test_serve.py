"""`serve` as an orchestrator has it: spawned, heard of, used, watched, stopped; and what it refuses at once."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_worker_rbee import __version__
from llm_worker_rbee.cli.commands import LimitFlags
from llm_worker_rbee.server.model_source import open_ahead
from llm_worker_rbee.server.settings import ServerSettings
from tests.conftest import with_kernels
from tests.helpers.process import spawn as spawn_process
from tests.helpers.server import write_model

from .conftest import Run, environment
from .conftest import write_model as write_tiny

LIMIT_S = 60


class Worker:
    """The real command in a process of its own."""

    def __init__(self, *args: str | Path, **env: str) -> None:
        line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", *map(str, args)]
        kept = {k: v for k, v in environment().items() if k not in ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")}
        self.process = spawn_process(
            line,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kept | {"LLORCH_LOG_FORMAT": "json"} | env,
        )
        assert self.process.stdout is not None
        self.first_line = self.last_line = self.process.stdout.readline()
        found = re.search(r"https?://[^ ,]+", self.first_line)
        assert found is not None, (self.first_line, self.process.communicate(timeout=LIMIT_S))
        self.url = found[0]

    def curl_line(self) -> str:
        """What the banner says to paste, once the model is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "curl" in line:
                return line.strip()
            self.last_line = line.strip()
        raise AssertionError("it ended before it was ready")

    def end(self, *signals: signal.Signals) -> tuple[int, list[dict[str, Any]]]:
        for one in signals:
            self.process.send_signal(one)
        _, said = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    spawned: list[Worker] = []

    def start(*args: str | Path, **env: str) -> Worker:
        spawned.append(Worker(*args, **env))
        return spawned[-1]

    yield start
    for one in spawned:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="session")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on after `#` for longer than any test waits."""
    return with_kernels(write_model(tmp_path_factory.mktemp("babbling") / "babbling.gguf"))


class Orchestrator:
    """Hears callbacks and heartbeats; the first callback is answered with an error."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        heard, refused = self.heard, []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                heard.put((self.path, body))
                is_first = self.path == "/ready" and not refused
                refused.append(self.path)
                self.send_response(503 if is_first else 204)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def next(self) -> tuple[str, dict[str, Any]]:
        return self.heard.get(timeout=LIMIT_S)


@pytest.fixture
def orchestrator() -> Iterator[Orchestrator]:
    made = Orchestrator()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_serve_lifecycle_with_orchestrator(
    worker: Callable[..., Worker], orchestrator: Orchestrator, tiny: Path
) -> None:
    urls = ("--callback-url", f"{orchestrator.url}/ready", "--heartbeat-url", f"{orchestrator.url}/beat")
    spawned = worker(
        "-m", tiny, "--worker-id", "w-1", "--served-model-name", "mine", *urls, LLM_WORKER_API_KEY="secret"
    )
    heard: dict[str, list[dict[str, Any]]] = {"/ready": [], "/beat": []}
    while len(heard["/ready"]) < 2 or not heard["/beat"]:  # the first callback was refused: it comes again
        path, body = orchestrator.next()
        heard[path].append(body)
    first, again = heard["/ready"]
    assert first == again
    assert first | {"phases": None} == {
        "worker_id": "w-1", "url": spawned.url, "model_ref": str(tiny), "backend": "cpu", "device": "cpu",
        "vram_bytes": 0, "phases": None,
    }  # fmt: skip
    assert {"open", "tokenizer", "weights", "kernels", "warm-up"} <= set(first["phases"])
    port = httpx.URL(spawned.url).port
    assert heard["/beat"][0]["worker"] == {
        "id": "w-1", "model_id": "mine", "device": "cpu", "port": port, "status": "healthy",
        "implementation": "python", "version": __version__,
    }  # fmt: skip
    correlation = "12345678-1234-1234-1234-123456789abc"
    headers = {"authorization": "Bearer secret", "x-correlation-id": correlation}
    with httpx.Client(base_url=spawned.url, headers=headers, timeout=LIMIT_S) as client:
        assert client.get("/health").json()["status"] == "healthy"
        job = client.post("/v1/jobs", json={"prompt": "a private matter", "max_tokens": 5, "seed": 1}).json()
        events = [line for line in client.get(job["sse_url"]).text.split("\n\n") if line]
        assert json.loads(events[0].removeprefix("data: "))["type"] == "started"
        assert json.loads(events[-2].removeprefix("data: "))["type"] == "end"
        found = client.get("/metrics").text
        assert "llm_worker_generation_tokens_total 5.0\n" in found
        assert "llm_worker_prompt_tokens_total 16.0\n" in found  # warming up is not among them
        assert httpx.get(f"{spawned.url}/metrics").status_code == 401
    status, lines = spawned.end(signal.SIGTERM)
    assert status == 0
    assert any(line.get("correlation_id") == correlation and line.get("path") == "/v1/jobs" for line in lines)
    assert "private" not in json.dumps(lines)
    assert "secret" not in json.dumps(lines)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{spawned.url}/health")


def test_first_signal_drains_and_rejects_new_requests(worker: Callable[..., Worker], babbling: Path) -> None:
    spawned = worker("-m", babbling, "--shutdown-timeout", "1")
    spawned.curl_line()
    body = {"job_id": "j", "prompt": "#", "max_tokens": 60_000, "temperature": 0}
    with (
        httpx.Client(base_url=spawned.url, timeout=LIMIT_S) as client,
        client.stream("POST", "/execute", json=body) as s,
    ):
        lines = s.iter_lines()
        while '"token"' not in next(lines):
            pass
        spawned.process.send_signal(signal.SIGTERM)
        refused = httpx.post(f"{spawned.url}/v1/jobs", json={"prompt": "y", "max_tokens": 1})
        while refused.status_code == 200:  # it has not heard yet
            refused = httpx.post(f"{spawned.url}/v1/jobs", json={"prompt": "y", "max_tokens": 1})
        assert (refused.status_code, refused.json()["code"]) == (503, "SHUTTING_DOWN")
        assert httpx.get(f"{spawned.url}/health").json()["status"] == "stopping"
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["type"] == "error"
    assert json.loads(rest[-2].removeprefix("data: "))["code"] == "SHUTTING_DOWN"
    assert spawned.end()[0] == 0


def test_second_signal_exits_at_once(worker: Callable[..., Worker], babbling: Path) -> None:
    spawned = worker("-m", babbling, "--shutdown-timeout", "600")
    spawned.curl_line()
    body = {"job_id": "j", "prompt": "#", "max_tokens": 60_000, "temperature": 0}
    with httpx.stream("POST", f"{spawned.url}/execute", json=body, timeout=LIMIT_S) as stream:
        pieces = stream.iter_bytes()  # one that is dropped closes the connection, and the job ends
        next(pieces)
        spawned.process.send_signal(signal.SIGINT)
        while httpx.get(f"{spawned.url}/health").json()["status"] != "stopping":
            pass
        assert spawned.end(signal.SIGTERM)[0] == 128 + signal.SIGTERM


def test_banner_curl_line_works(worker: Callable[..., Worker], tiny: Path, tmp_path: Path) -> None:
    key = tmp_path / "the key's file"
    key.write_text("k-1\n")
    spawned = worker("-m", tiny, "--api-key-file", key, "--max-batch", "7")
    line = spawned.curl_line()
    limits = "up to 7 requests in a batch and 512 tokens in a step"
    assert re.fullmatch(rf"ready after [\d.]+ s, {limits}; open {spawned.url} in a browser, or try:", spawned.last_line)
    assert "k-1" not in line
    done = subprocess.run(["bash", "-c", line.replace("curl ", "curl -s ", 1)], capture_output=True, timeout=LIMIT_S)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
    assert spawned.end(signal.SIGINT)[0] == 0


@pytest.mark.parametrize(("origin", "has_key"), [("*", False), ("*", True), ("https://a.example", False)])
def test_any_origin_without_a_key_warns(worker: Callable[..., Worker], tiny: Path, origin: str, has_key: bool) -> None:
    spawned = worker("-m", tiny, "--cors-origin", origin, **({"LLM_WORKER_API_KEY": "k"} if has_key else {}))
    status, lines = spawned.end(signal.SIGTERM)
    warnings = [line["message"] for line in lines if line["level"] == "warning"]
    assert status == 0
    assert any("--cors-origin '*' without an API key" in text for text in warnings) == (origin == "*" and not has_key)


def test_failed_load_exits_with_one_line(spawn: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF no more")
    done = spawn("serve", "--port", "0", "-m", tmp_path / "bad.gguf")
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-1].startswith("error: ")
    assert b"Traceback" not in done.stderr


def test_port_in_use_is_named(spawn: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = spawn("serve", "--port", str(taken.getsockname()[1]))
    assert (done.returncode, done.stdout) == (1, b"")
    assert "cannot listen at --host 127.0.0.1 --port" in done.stderr.decode()


@pytest.mark.parametrize(
    ("source", "report"),
    [
        ("{% if %}", "the chat template is wrong in line 1"),
        ("{{ nothing.of.it }}", "the chat template failed: UndefinedError: 'nothing' is undefined"),
        ("{{ raise_exception('no chats') }}", "the chat template refused: no chats"),
    ],
)
def test_broken_chat_template_fails_at_start(spawn: Run, tiny: Path, tmp_path: Path, source: str, report: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(source)
    done = spawn("serve", "--port", "0", "--backend", "reference", "-m", tiny, "--chat-template", file)
    assert done.returncode == 1
    assert b"ready" not in done.stdout
    assert done.stderr.decode().startswith(f"error: --chat-template {file} cannot be used: {report}")
    assert done.stderr.count(b"\n") == 1


def test_broken_template_of_model_is_a_warning(worker: Callable[..., Worker], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", {"tokenizer.chat_template": "{{ raise_exception('no chats') }}"})
    spawned = worker("-m", path, "--backend", "reference")
    assert "/v1/chat/completions" in spawned.curl_line()
    status, lines = spawned.end(signal.SIGTERM)
    assert status == 0
    assert "chats may fail: the chat template refused: no chats" in [line["message"] for line in lines]


@pytest.mark.parametrize(
    ("args", "env", "status", "report"),
    [
        (["--host", "0.0.0.0"], {}, 1, "there is no key"),
        (["--host", "::"], {}, 1, "there is no key"),
        (["--host", "example.org"], {}, 1, "there is no key"),
        ([], {"LLM_WORKER_API_KEY": ""}, 1, "LLM_WORKER_API_KEY is empty"),
        ([], {"LLORCH_API_TOKEN": " "}, 1, "LLORCH_API_TOKEN is empty"),
        ([], {"LLM_WORKER_API_KEY": "a", "LLORCH_API_TOKEN": "b"}, 1, "hold different keys"),
        ([], {"LLM_WORKER_API_KEY": "two words"}, 1, "cannot be a key"),
        (["--api-key-file", "/nowhere/key"], {}, 1, "cannot read /nowhere/key"),
        (["--callback-url", "ftp://x"], {}, 1, "--callback-url 'ftp://x' is not a URL"),
        (["--heartbeat-url", "http://[x"], {}, 1, "--heartbeat-url"),
        (["--cors-origin", "evil.com"], {}, 2, "--cors-origin 'evil.com'"),
        (["--allowed-host", "http://x"], {}, 2, "--allowed-host 'http://x' is not a name"),
        (["--worker-id", "a\nb"], {}, 2, "--worker-id"),
        (["--port", "70000"], {}, 2, "--port"),
        (["--ssl-keyfile", "x"], {}, 2, "--ssl-certfile"),
        (["--ssl-certfile", "/nowhere/cert"], {}, 1, "--ssl-certfile /nowhere/cert"),
        (["--max-batch", "0"], {}, 2, "--max-batch"),
        (["--embedding-model", "x", "--engine-process", "off"], {}, 2, "need --engine-process on"),
        ([], {"LLORCH_LOG_FORMAT": "xml"}, 1, "LLORCH_LOG_FORMAT is 'xml'"),
    ],
)
def test_invalid_serve_options_fail_before_loading(
    cli: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], env: dict[str, str], status: int, report: str
) -> None:
    for name in ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN", "LLORCH_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = cli("serve", *args)
    assert (done.returncode, done.stdout) == (status, b"")
    assert report in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def make_certificate(folder: Path, *more: str) -> None:
    """Write key.pem and cert.pem, or skip the test."""
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
         "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         *(more or ["-nodes"])],
        cwd=folder, capture_output=True,
    ) if _has_openssl() else None  # fmt: skip
    if made is None or made.returncode:
        pytest.skip("openssl is not installed")


def test_tls_files_that_cannot_be_used_say_why(cli: Run, tmp_path: Path) -> None:
    for name in ("one", "two", "locked"):
        (tmp_path / name).mkdir()
        make_certificate(tmp_path / name, *(["-passout", "pass:secret"] if name == "locked" else []))
    junk, one = tmp_path / "junk.pem", tmp_path / "one" / "cert.pem"
    junk.write_text("junk")
    key = tmp_path / "two" / "key.pem"
    locked = tmp_path / "locked"
    for certificate, private, report in (
        (junk, None, f"--ssl-certfile {junk} holds no certificate in PEM format"),
        (
            one,
            None,
            f"--ssl-certfile {one} holds no private key in PEM format (-----BEGIN PRIVATE KEY-----); give it with",
        ),
        (one, junk, f"--ssl-keyfile {junk} holds no private key in PEM format"),
        (one, key, f"--ssl-keyfile {key} cannot be used: it does not belong to the certificate {one}"),
        (locked / "cert.pem", locked / "key.pem", "the key is encrypted: decrypt it with `openssl pkey"),
        (one, tmp_path / "none", f"--ssl-keyfile {tmp_path / 'none'}: No such file"),
    ):
        done = cli("serve", "--ssl-certfile", certificate, *([] if private is None else ["--ssl-keyfile", private]))
        assert done.returncode == 1
        assert report in done.stderr.decode()
        assert "PEM lib" not in done.stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_serve_goes_on_where_stdout_is_full(tiny: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [
        sys.executable,
        "-m",
        "llm_worker_rbee",
        "serve",
        "--port",
        str(port),
        "--backend",
        "reference",
        "-m",
        str(tiny),
    ]
    env = environment(LLORCH_LOG_FORMAT="json")
    with open("/dev/full", "w") as full:
        process = spawn_process(line, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr is not None
        warning = json.loads(process.stderr.readline())
        assert warning["message"] == "cannot write to standard output: No space left on device"
        with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
            assert client.get(f"http://127.0.0.1:{port}/health").json()["status"] in ("loading", "healthy")
        process.send_signal(signal.SIGTERM)
        _, report = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, report
    finally:
        process.kill()
        process.communicate()


def test_serve_https(worker: Callable[..., Worker], tiny: Path, tmp_path: Path) -> None:
    make_certificate(tmp_path)
    spawned = worker("-m", tiny, "--ssl-certfile", tmp_path / "cert.pem", "--ssl-keyfile", tmp_path / "key.pem")
    assert spawned.url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    reply = httpx.get(f"{spawned.url}/health", verify=trusted)
    assert reply.headers["content-type"] == "application/json", (reply.status_code, reply.text)
    assert reply.json()["status"] in ("loading", "healthy")
    assert spawned.end(signal.SIGTERM)[0] == 0  # also where it is loading still


def _has_openssl() -> bool:
    return any(os.access(Path(folder, "openssl"), os.X_OK) for folder in os.environ["PATH"].split(os.pathsep))


def test_limit_defaults_are_as_documented() -> None:
    documented = {
        "max_queue": None, "max_queued_tokens": None, "max_body": 4 << 20,
            "max_image_body": 32 << 20, "max_images": 20, "max_image_bytes": 20 << 20, "max_image_pixels": 50_000_000,
            "max_pooling_body": 64 << 20, "job_ttl_s": 300.0,
        "shutdown_timeout_s": 30.0, "stall_timeout_s": 30.0, "ignore_unknown_fields": False,
        "open_objects": False, "allow_priority": False,
    }  # fmt: skip
    assert vars(LimitFlags()) == documented
    settings = ServerSettings(model_ref="x")
    assert {name: getattr(settings, name) for name in documented} == documented


def test_text_side_is_opened_before_the_engine_has_found_the_model(tiny: Path) -> None:
    on_located, opened = open_ahead(lambda path: path.name, str(tiny))
    assert opened() == tiny.name
    on_located(str(tiny))  # the engine's report comes later, and changes nothing
    on_located, opened = open_ahead(lambda path: path.name, "not-yet-fetched")
    on_located(str(tiny))
    assert opened() == tiny.name
