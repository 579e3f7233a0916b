"""What clients send that is wrong: each gets a clear 4xx of its own in the shape of its dialect, before anything large
is made of it, and the worker answers the next one. Case by case:

a body that is not an object, truncated, nested 100,000 deep    test_a_body_that_is_no_request
bytes that are not UTF-8, lone surrogates, NaN, Infinity        test_a_body_that_is_no_request
`\\x00`                                                          test_a_zero_byte_is_text (which is no error)
a wrong content type                                            test_a_wrong_content_type
messages absent, empty, a string, [123], [{}], a role, content  test_messages_that_are_none
a prompt empty, mixed, with ids negative or too large           test_a_prompt_that_is_none
a prompt longer than the context, max_tokens 10^12              test_more_than_the_context_holds
n, logprobs, logit_bias, temperature, stop, seed, max_tokens,
an unknown field, chat_template, chat_template_kwargs           test_a_field_that_is_wrong[route-field]
max_tokens 0, five stops                                        test_what_is_refused_in_one_route_only
a body over the limit                                           test_a_body_over_the_limit
a header of many megabytes                                      test_a_header_of_many_megabytes
no key, a wrong one, an empty one, one in the query string      test_a_key_that_is_none, test_an_empty_key_is_not_no_key
origins that look alike                                         test_origins_that_look_alike
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from uuid import UUID

import httpx
import pytest

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.server.config import Settings
from tests.helpers import tiny_models
from tests.server.conftest import KEY, Start
from tests.server.running import CHAT, CONTEXT, Server, ids

JOB, EXECUTE, COMPLETIONS, CHATS = "/v1/jobs", "/execute", "/v1/completions", "/v1/chat/completions"
SOUND: dict[str, dict[str, Any]] = {
    JOB: {"prompt": "#", "max_tokens": 2},
    EXECUTE: {"prompt": "#", "max_tokens": 2, "job_id": "bad-1"},
    COMPLETIONS: {"prompt": "#", "max_tokens": 2},
    CHATS: {"messages": CHAT, "max_tokens": 2},
}
ALL, OPENAI = tuple(SOUND), (COMPLETIONS, CHATS)
# a name -> what is sent, and where
BODIES: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"42",
    "null": b"null",
    "nothing": b"",
    "truncated": b'{"prompt": "x", "max_tok',
    "100,000 brackets": b"[" * 100_000,
    "100,000 brackets in a field": b'{"prompt": "#", "max_tokens": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not UTF-8": b'{"prompt": "\xff\xfe", "max_tokens": 2}',
    "a lone surrogate": b'{"prompt": "\\ud800 ", "max_tokens": 2}',
    "NaN": b'{"prompt": "#", "max_tokens": 2, "temperature": NaN}',
    "Infinity": b'{"prompt": "#", "max_tokens": 2, "temperature": Infinity}',
    "an endless number": b'{"prompt": "#", "max_tokens": 2, "temperature": 1e999}',
    "a number of 10,000 digits": b'{"prompt": "#", "max_tokens": 2, "seed": ' + b"9" * 10_000 + b"}",
}
MESSAGES: tuple[Any, ...] = (
    None, [], "hello", [123], [{}], [{"role": "wizard", "content": "x"}], [{"role": 5, "content": "x"}],
    [{"role": ["user"], "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"text": "x"}}], [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
)  # fmt: skip
FIELDS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "temperature": (ALL, (-1, 2.1, "warm", True, [], 10**400)),
    "top_p": (ALL, (-0.1, 1.5)),
    "repetition_penalty": (ALL, (0, 3)),
    "top_k": (ALL, (-1, 1.5, "x")),
    "stop": (ALL, ("", [""], ["x"] * 17, [5], 5, {"a": 1}, "x" * 101, [["x"]])),
    "max_tokens": (ALL, (-1, 1.5, "many", True)),
    "seed": (ALL, (1 << 64, -1, 1.5, "x", 10**300)),
    "priority": (ALL, (1 << 40, "high")),
    "timeout_ms": (ALL, (0, -5, 10**400, "soon")),
    "stream": (ALL, ("yes", 1)),
    "model": (ALL, (5, ["tiny"])),
    "zap": (ALL, (1,)),
    "chat_template": (ALL, ("{{ 1 }}",)),
    "chat_template_kwargs": (ALL, ({"a": 1},)),
    "n": (OPENAI, (10**9, 0, -1, 1.5, "two")),
    "logit_bias": (OPENAI, (5, [1], {"x": 1}, {"-1": 1}, {"1.5": 1}, {str(10**12): 1}, {"5": "x"}, {"5": 101},
                            {"5": None}, {str(tiny_models.VOCAB): 1})),
    "stream_options": (OPENAI, (5, {"include_usage": "x"}, {"other": True})),
    "presence_penalty": (OPENAI, (3,)),
    "user": (OPENAI, (5,)),
    "logprobs": ((COMPLETIONS,), (-2, 21, "word", True)),
    "best_of": ((COMPLETIONS,), (3, 0)),
    "suffix": ((COMPLETIONS,), ("x",)),
    "echo": ((COMPLETIONS,), ("x",)),
    "top_logprobs": ((CHATS,), (-2, 21, "word", 3)),
    "response_format": ((CHATS,), ({"type": "json_object"},)),
    "job_id": ((JOB, EXECUTE), ("", "x" * 65, "a/b", "a b", 5, "\x00")),
    "operation": ((JOB, EXECUTE), ("delete", 5)),
}  # fmt: skip
PROMPTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "empty": ((JOB, EXECUTE, COMPLETIONS), ""),
    "a number": ((JOB, EXECUTE, COMPLETIONS), 5),
    "an object": ((JOB, EXECUTE, COMPLETIONS), {"a": 1}),
    "no ids": ((COMPLETIONS,), []),
    "an empty list in it": ((COMPLETIONS,), [[]]),
    "mixed": ((COMPLETIONS,), ["a", 5]),
    "mixed lists": ((COMPLETIONS,), [[5], 5]),
    "words in ids": ((COMPLETIONS,), [[5, "a"]]),
    "a negative id": ((COMPLETIONS,), [5, -1]),
    "an id past the vocabulary": ((COMPLETIONS,), [5, tiny_models.VOCAB]),
    "a huge id": ((COMPLETIONS,), [[5], [1 << 70]]),
    "100,000 of them": ((COMPLETIONS,), ["#"] * 100_000),
    "truth values": ((COMPLETIONS,), [True, False]),
    "fractions": ((COMPLETIONS,), [1.5]),
}


@pytest.fixture(autouse=True)
def goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever was asked, the next request is answered and nothing is left behind."""
    yield
    if "server" in request.fixturenames:
        server: Server = request.getfixturevalue("server")
        server.require_idle()
        server.require_alive()


def require_refused(server: Server, path: str, content: bytes, field: str | None = None) -> str:
    """A 400 in the shape of the route's dialect that names the field; its message."""
    reply = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400, (reply.status_code, reply.text[:300])
    assert len(reply.content) < 2_000
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-correlation-id"]
    body = reply.json()
    if path in OPENAI:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "INVALID_REQUEST")
        named, message = {body["error"]["param"]}, body["error"]["message"]
    else:
        named = {one["field"] for one in body["errors"]}
        message = "; ".join(one["message"] for one in body["errors"])
    assert message
    assert "Traceback" not in message
    assert "/" not in message
    assert field is None or field in named
    return str(message)


def changed(path: str, **fields: Any) -> bytes:
    return json.dumps({**SOUND[path], **fields}).encode()


@pytest.mark.parametrize("path", [*ALL, "/cancel", "/tokenize", "/detokenize", "/apply-template"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request(server: Server, path: str, body: bytes) -> None:
    require_refused(server, path, body)


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_wrong_content_type(server: Server, path: str, kind: str) -> None:
    reply = server.http.post(path, content=changed(path), headers={"content-type": kind})
    assert reply.status_code == 400
    assert kind.partition(";")[0] in reply.text


@pytest.mark.parametrize("path", [CHATS, JOB, EXECUTE, "/apply-template"])
@pytest.mark.parametrize("messages", MESSAGES, ids=[json.dumps(one)[:40] for one in MESSAGES])
def test_messages_that_are_none(server: Server, path: str, messages: Any) -> None:
    body = {name: value for name, value in SOUND.get(path, {}).items() if name not in ("prompt", "messages")}
    named = "messages" if messages is not None or path in (CHATS, "/apply-template") else "prompt"
    require_refused(server, path, json.dumps({**body, "messages": messages}).encode(), named)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [pytest.param(path, prompt, id=f"{path} {name}") for name, (paths, prompt) in PROMPTS.items() for path in paths],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_none(server: Server, path: str, prompt: Any, stream: bool) -> None:
    how = {} if path == "/execute" else {"stream": stream}  # which is nothing but a stream
    require_refused(server, path, changed(path, prompt=prompt, **how), "prompt")


@pytest.mark.parametrize(("path", "field"), [(path, field) for field, (paths, _) in FIELDS.items() for path in paths])
def test_a_field_that_is_wrong(server: Server, path: str, field: str) -> None:
    for value in FIELDS[field][1]:
        assert field in require_refused(server, path, changed(path, **{field: value}), field), value


def test_what_is_refused_in_one_route_only(server: Server) -> None:
    for path in (JOB, EXECUTE, CHATS, COMPLETIONS):
        assert "max_tokens is 0" in require_refused(server, path, changed(path, max_tokens=0), "max_tokens")
    require_refused(server, CHATS, changed(CHATS, max_completion_tokens=0), "max_completion_tokens")
    require_refused(server, JOB, changed(JOB, stop=["x"] * 5), "stop")
    require_refused(server, JOB, changed(JOB, messages=CHAT), "prompt")
    for tokens in (None, "x", [tiny_models.VOCAB], [-1], [1.5], [True]):
        require_refused(server, "/detokenize", json.dumps({"tokens": tokens}).encode(), "tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ALL)
def test_more_than_the_context_holds(server: Server, path: str, stream: bool) -> None:
    """A typed 400 that names both lengths, before the first byte of a stream."""
    long = "#" * (CONTEXT + 1)
    longer = {"messages": [{"role": "user", "content": long}]} if path == CHATS else {"prompt": long}
    for fields, figures in (
        (longer, (f"{CONTEXT + 1}"[:4], f"{CONTEXT}")),
        ({"max_tokens": 10**12}, ("1000000000000",)),
    ):
        how = {} if path == "/execute" else {"stream": stream}  # which is nothing but a stream
        reply = server.post(path, {**SOUND[path], **fields, **how})
        body = reply.json()
        body = body["error"] if path in OPENAI else body
        assert (reply.status_code, body["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
        assert all(figure in body["message"] for figure in figures)
        assert str(CONTEXT) in body["message"]


@pytest.mark.parametrize("path", ALL)
def test_a_zero_byte_is_text(server: Server, path: str) -> None:
    fields = {"messages": [{"role": "user", "content": "\x00"}]} if path == CHATS else {"prompt": "\x00"}
    assert server.post(path, {**SOUND[path], **fields}).status_code == 200


@pytest.mark.parametrize("value", [10**30, 1 << 63, (1 << 63) - 1])
def test_numbers_without_a_limit_may_be_large(server: Server, value: int) -> None:
    reply = server.post(JOB, {"prompt": ">", "max_tokens": 3, "top_k": value, "repeat_last_n": value, "stream": False})
    assert reply.status_code == (200 if value < 1 << 63 else 400), reply.text


@pytest.mark.parametrize("path", [*ALL, "/tokenize"])
@pytest.mark.parametrize("is_counted", [True, False], ids=["with its length", "in pieces"])
def test_a_body_over_the_limit(locked: Server, path: str, is_counted: bool) -> None:
    body = changed(COMPLETIONS, prompt="x" * 200_000)
    pieces = body if is_counted else iter([body[:90_000], body[90_000:]])
    reply = locked.http.post(path, content=pieces, headers={"content-type": "application/json"})
    told = reply.json()
    assert (reply.status_code, told.get("error", told)["code"]) == (413, "PAYLOAD_TOO_LARGE")
    locked.require_alive()


def test_a_header_of_many_megabytes(locked: Server) -> None:
    """Refused, or the connection is closed on it; the worker goes on."""
    with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as sent:
        try:
            sent.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * (8 << 20) + b"\r\n\r\n")
            found = sent.recv(1000)
        except ConnectionError:
            found = b""
    assert not found or found.split()[1] in (b"400", b"413", b"431")
    locked.require_alive()


def test_broken_http(locked: Server) -> None:
    for said in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                 b"POST /v1/jobs HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
                 b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as sent:
            sent.sendall(said)
            sent.shutdown(socket.SHUT_WR)
            found = sent.recv(1000)
        assert not found or found.split()[1][:1] == b"4", said
    locked.require_alive()


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "MISSING_API_KEY"),
        ({"authorization": "Bearer wrong"}, "INVALID_API_KEY"),
        ({"authorization": "Bearer"}, "INVALID_API_KEY"),
        ({"authorization": "Bearer "}, "INVALID_API_KEY"),
        ({"authorization": f"Basic {KEY}"}, "INVALID_API_KEY"),
        ({"authorization": KEY}, "INVALID_API_KEY"),
        ({"authorization": f"Bearer {KEY}x"}, "INVALID_API_KEY"),
        ({"authorization": "Bearer \xff\xfe"}, "INVALID_API_KEY"),
    ],
)
@pytest.mark.parametrize("path", [CHATS, JOB, "/v1/models", "/metrics", "/info", "/nothing", "/v1/jobs/x/stream"])
def test_a_key_that_is_none(locked: Server, path: str, headers: dict[str, str], code: str) -> None:
    """Also for routes that are not there, and also when the right one is in the query."""
    asking = HTTPConnection("127.0.0.1", locked.port, timeout=10)
    asking.request("POST" if path in ALL else "GET", f"{path}?api_key={KEY}&key={KEY}", headers=headers)
    reply = asking.getresponse()
    said = reply.read()
    asking.close()
    told = json.loads(said)
    assert (reply.status, told.get("error", told)["code"]) == (401, code)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert KEY.encode() not in said


def test_what_is_public(locked: Server) -> None:
    assert httpx.get(f"{locked.url}/health").json()["status"] == "healthy"
    assert httpx.get(locked.url).headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_not_no_key(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        Settings(model_ref="x", api_key=key)


def test_a_wrong_method_is_told_in_the_dialect(server: Server) -> None:
    for path in (CHATS, JOB):
        reply = server.http.get(path)
        assert reply.status_code == 405
        assert "POST" in reply.headers["allow"]
        assert (reply.json().keys() == {"error"}) == (path == CHATS)


def test_every_reply_has_a_correlation_id(locked: Server) -> None:
    """The caller's where it is a UUID, otherwise a new one; on errors too."""
    given = "123e4567-e89b-42d3-a456-426614174000"
    for path in ("/health", "/nothing", "/v1/jobs/x/stream"):
        assert locked.http.get(path, headers={"x-correlation-id": given}).headers["x-correlation-id"] == given
        made = [locked.http.get(path, headers={"x-correlation-id": "x"}).headers["x-correlation-id"] for _ in range(2)]
        assert len({UUID(one) for one in made}) == 2


def test_unknown_fields_may_be_ignored_and_are_listed(start: Start) -> None:
    server = start(ignore_unknown_fields=True)
    for stream in (False, True):
        reply = server.post(CHATS, {**SOUND[CHATS], "zap": 1, "zip\r\nx-bad: 1": 2, "stream": stream})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ignored-fields"].startswith("zap,zip")
        assert "x-bad" not in reply.headers
    assert server.post(CHATS, {**SOUND[CHATS], "tools": [{}]}).status_code == 400


def test_origins_that_look_alike(start: Start) -> None:
    """Off unless configured; then those that were named, and nobody who resembles them."""
    server = start(cors_origins=("http://localhost:3000",), api_key=KEY)
    allowed = "access-control-allow-origin"
    for origin in ("http://localhost:3000.evil.com", "http://localhost.evil.com", "http://localhost:30001", "null",
                   "https://localhost:3000"):  # fmt: skip
        assert allowed not in server.http.get("/health", headers={"origin": origin}).headers
    assert server.http.get("/health", headers={"origin": "http://localhost:3000"}).headers[allowed]
    asks = {"origin": "http://localhost:3000", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    request = server.http.build_request("OPTIONS", CHATS, headers=asks)
    del request.headers["authorization"]
    assert server.http.send(request).status_code == 200


def test_no_origin_is_allowed_by_default(locked: Server) -> None:
    reply = locked.http.get("/health", headers={"origin": "http://localhost"})
    assert "access-control-allow-origin" not in reply.headers


def test_ids_and_text_go_both_ways(server: Server) -> None:
    tokens = server.post("/tokenize", {"text": " the <|end|>"}).json()
    assert (tokens["tokens"][0], tiny_models.END in tokens["tokens"]) == (258, False)
    assert tiny_models.END in server.post("/tokenize", {"text": "<|end|>", "parse_special": True}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"text": " the <|end|>"}
    made = server.post("/apply-template", {"messages": CHAT}).json()
    assert made == {
        "prompt": "<|user|>#<|assistant|>",
        "tokens": [tiny_models.USER, *ids("#"), tiny_models.ASSISTANT],
    }
