"""Routes: content type, methods, CORS, model names, token routes, disconnects."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from typing import Any

import pytest

from llm_worker_rbee.server import app as app_module
from llm_worker_rbee.server import dialects, log
from llm_worker_rbee.server.settings import ServerSettings
from tests.helpers import tiny_models
from tests.helpers.server import CHAT, LIMIT_S, Server, connected, ids, read_body, until
from tests.server.conftest import KEY, Start

pytestmark = pytest.mark.usefixtures("leaves_server_healthy")

JOB, EXECUTE, COMPLETIONS, CHATS = "/v1/jobs", "/execute", "/v1/completions", "/v1/chat/completions"
SOUND: dict[str, dict[str, Any]] = {
    JOB: {"prompt": "#", "max_tokens": 2},
    EXECUTE: {"prompt": "#", "max_tokens": 2, "job_id": "bad-1"},
    COMPLETIONS: {"prompt": "#", "max_tokens": 2},
    CHATS: {"messages": CHAT, "max_tokens": 2},
}
ALL, OPENAI = tuple(SOUND), (COMPLETIONS, CHATS)


def changed(path: str, **fields: Any) -> bytes:
    return json.dumps({**SOUND[path], **fields}).encode()


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_content_type_wrong_is_refused(server: Server, path: str, kind: str) -> None:
    reply = server.http.post(path, content=changed(path), headers={"content-type": kind})
    assert reply.status_code == 400
    assert kind.partition(";")[0] in reply.text


def test_wrong_method_error_has_shape_of_dialect(server: Server) -> None:
    for path in (CHATS, JOB):
        reply = server.http.get(path)
        assert reply.status_code == 405
        assert "POST" in reply.headers["allow"]
        assert (reply.json().keys() == {"error"}) == (path == CHATS)
        error = reply.json().get("error", reply.json())
        assert error["code"] == "METHOD_NOT_ALLOWED"
        assert error["message"] == f"GET is not a method of '{path}': use POST"


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat"])
def test_unknown_route_under_v1_has_shape_of_openai(server: Server, path: str) -> None:
    reply = server.post(path, {"input": "x"})
    assert reply.status_code == 404
    assert reply.json()["error"] == {
        "message": f"there is no route POST '{path}'", "type": "invalid_request_error", "param": None,
        "code": "NOT_FOUND",
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/nothing", "/v1/jobs/a/b", "/v1/loading", "/v1/ready/x"])
def test_unknown_route_elsewhere_has_shape_of_jobs(server: Server, path: str) -> None:
    reply = server.http.get(path)
    expected = {"code": "NOT_FOUND", "message": f"there is no route GET '{path}'", "retriable": False}
    assert (reply.status_code, reply.json()) == (404, expected)


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "identity, gzip"])
def test_compressed_body_is_415(server: Server, path: str, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    reply = server.http.post(path, content=gzip.compress(changed(path)), headers=headers)
    error = reply.json().get("error", reply.json())
    assert (reply.status_code, error["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")
    assert "uncompressed" in error["message"]


def test_content_encoding_identity_is_accepted(server: Server) -> None:
    headers = {"content-type": "application/json", "content-encoding": "identity"}
    assert server.http.post(CHATS, content=changed(CHATS), headers=headers).status_code == 200


def test_cors_similar_origins_are_refused(start: Start) -> None:
    """Off by default; then exactly the configured origins."""
    server = start(cors_origins=("http://localhost:3000",), api_key=KEY)
    allowed = "access-control-allow-origin"
    for origin in ("http://localhost:3000.evil.com", "http://localhost.evil.com", "http://localhost:30001", "null",
                   "https://localhost:3000"):  # fmt: skip
        assert allowed not in server.http.get("/health", headers={"origin": origin}).headers
    assert server.http.get("/health", headers={"origin": "http://localhost:3000"}).headers[allowed]
    preflight = {"origin": "http://localhost:3000", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    request = server.http.build_request("OPTIONS", CHATS, headers=preflight)
    del request.headers["authorization"]
    assert server.http.send(request).status_code == 200


def test_cors_default_allows_no_origin(locked: Server) -> None:
    reply = locked.http.get("/health", headers={"origin": "http://localhost"})
    assert "access-control-allow-origin" not in reply.headers


def test_tokenize_and_detokenize_round_trip(server: Server) -> None:
    tokens = server.post("/tokenize", {"text": " the <|end|>"}).json()
    assert (tokens["tokens"][0], tiny_models.END in tokens["tokens"]) == (258, False)
    assert tiny_models.END in server.post("/tokenize", {"text": "<|end|>", "parse_special": True}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"text": " the <|end|>"}
    made = server.post("/apply-template", {"messages": CHAT}).json()
    assert made == {
        "prompt": "<|user|>#<|assistant|>",
        "tokens": [tiny_models.USER, *ids("#"), tiny_models.ASSISTANT],
    }


@pytest.mark.parametrize("letter", ["x", "é"])
def test_text_over_limit_is_not_tokenized(server: Server, monkeypatch: pytest.MonkeyPatch, letter: str) -> None:
    """The bound is on the work, in UTF-8 bytes; the limit itself is accepted."""
    longest = dialects.MAX_TEXT_BYTES // len(letter.encode())
    for path, body in (
        ("/tokenize", lambda text: {"text": text}),
        ("/apply-template", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(server.llm.tokenizer, "encode", lambda *_, **__: pytest.fail("the text was tokenized"))
            reply = server.post(path, body(letter * longest + "x" * 10))
        assert (reply.status_code, reply.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")
        assert all(word in reply.json()["message"] for word in (str(dialects.MAX_TEXT_BYTES), "in parts"))
    assert len(server.post("/tokenize", {"text": letter * longest}).json()["tokens"]) >= longest


JOBS, CHATS, COMPLETIONS = "/v1/jobs", "/v1/chat/completions", "/v1/completions"


def test_model_names_served_and_reference_are_accepted(start: Start) -> None:
    """The reference as given, the served name, or none; an unknown name reveals no path."""
    server = start(served_name="nice")
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "nice"
    for name in ("nice", "tiny", None):
        assert server.post(CHATS, {"messages": CHAT, "max_tokens": 1, "model": name}).json()["model"] == "nice"
        assert server.http.get(f"/v1/models/{name or 'tiny'}").status_code == 200
    error = server.post(CHATS, {"messages": CHAT, "model": "other"}).json()["error"]
    assert (error["code"], "tiny" in error["message"]) == ("model_not_found", False)
    assert error["message"] == "the model 'other' is not served here: use 'nice', or no model"
    reply = server.post(JOBS, {"prompt": "#", "max_tokens": 1, "model": "other"})
    assert (reply.status_code, reply.json()["code"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("smollm2", "smollm2"), ("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0", "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("/models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m"),
        ("tiny.gguf", "tiny"), ("~/big-00001-of-00003.gguf", "big"), ("models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("./models/v1.5", "v1.5"),
    ],
)  # fmt: skip
def test_a_path_is_served_by_its_stem_and_by_itself(reference: str, name: str) -> None:
    settings = ServerSettings(model_ref=reference)
    assert (settings.names[0], settings.listed_names, set(settings.names)) == (name, (name,), {name, reference})
    named = ServerSettings(model_ref=reference, served_name="mine", embedding_model=reference)
    assert (named.names[0], named.listed_names, named.pooling_names) == ("mine", ("mine", name), (name,))


def test_body_missing_is_504_after_timeout(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "BODY_TIMEOUT_S", 0.2)
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
        head = f"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 100\r\n\r\n"
        client.sendall(head.encode() + b'{"prompt":')
        assert client.recv(12) == b"HTTP/1.1 504"
        assert json.loads(read_body(client))["code"] == "TIMEOUT"
    server.require_alive()


JSON = "content-type: application/json\r\n"


def test_content_type_missing_is_refused(server: Server) -> None:
    """A page of another origin can send such a body without a preflight."""
    body = json.dumps({"prompt": "#", "max_tokens": 1}).encode()
    reply = server.http.post("/v1/jobs", content=body, headers={"origin": "https://evil.example"})
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (400, "content-type")


def test_cors_allowed_origin_may_send_own_headers(start: Start) -> None:
    server = start(cors_origins=("https://mine.example",))
    headers_to_send = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    headers = {"origin": "https://mine.example", "access-control-request-method": "POST",
               "access-control-request-headers": headers_to_send}  # fmt: skip
    reply = server.http.options("/v1/chat/completions", headers=headers)
    assert (reply.status_code, reply.headers["access-control-allow-headers"]) == (200, headers_to_send)


def test_disconnect_within_body_is_logged_as_499(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, int]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
        (record.levelname, getattr(record, "figures", {}).get("status", 0))
    )
    monkeypatch.setattr(log, "logger", logging.Logger("of this test"))
    log.logger.addHandler(handler)
    server = start()
    with connected(server) as client:
        client.sendall(f"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: 100\r\n\r\n{{".encode())
        until(lambda: server.num_connections == 1)
    until(lambda: lines and server.num_connections == 0)
    assert lines == [("INFO", 499)]


def test_job_route_405_lists_allowed_methods(server: Server) -> None:
    reply = server.http.put(f"/v1/jobs/{server.job()}")
    assert (reply.status_code, set(reply.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "DELETE"})
