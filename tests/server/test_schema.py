"""Invalid bodies on every route: each is refused with 400 and its field, and the server goes on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from llm_worker_rbee.server.schema import decode_object
from tests.helpers import tiny_models
from tests.helpers.scripted_engine import ScriptedServer
from tests.helpers.server import CHAT, CONTEXT, SAID, Server
from tests.server.conftest import Start

pytestmark = pytest.mark.usefixtures("leaves_server_healthy")

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
    "top_k": (ALL, (-2, 1.5, "x")),
    "stop": (ALL, ("", [""], ["x"] * 17, [5], 5, {"a": 1}, "x" * 101, [["x"]])),
    "max_tokens": (ALL, (-2, 1.5, "many", True)),
    "seed": (ALL, (1 << 64, -2, 1.5, "x", 10**300)),
    "priority": (ALL, (1 << 40, "high")),
    "timeout_ms": (ALL, (0, -5, 10**400, "soon")),
    "stream": (ALL, ("yes", 1)),
    "model": (ALL, (5, ["tiny"])),
    "zap": (ALL, (1,)),
    "chat_template": (ALL, ("{{ 1 }}",)),
    "chat_template_kwargs": ((CHATS,), (5, [1], {"a": list(range(2000))})),
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
    "response_format": (OPENAI, (5, {}, {"type": "xml"}, {"type": "json_schema"},
                                 {"type": "json_schema", "json_schema": {}})),
    "structured_outputs": (ALL, (5, {}, {"zap": 1}, {"regex": 5}, {"regex": "a", "choice": ["b"]}, {"json": "{"})),
    "tools": ((CHATS,), (5, [5], [{"type": "zap"}], [{"type": "function", "function": {}}])),
    "tool_choice": ((CHATS,), ("all", 5, {"type": "function"}, "required")),
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


def require_refused(server: Server, path: str, content: bytes, field: str | None = None) -> str:
    """Require a 400 in the shape of the dialect that names the field; return its message."""
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
def test_body_not_an_object_is_refused(server: Server, path: str, body: bytes) -> None:
    require_refused(server, path, body)


@pytest.mark.parametrize("path", [CHATS, JOB, EXECUTE, "/apply-template"])
@pytest.mark.parametrize("messages", MESSAGES, ids=[json.dumps(one)[:40] for one in MESSAGES])
def test_messages_invalid_are_refused(server: Server, path: str, messages: Any) -> None:
    body = {name: value for name, value in SOUND.get(path, {}).items() if name not in ("prompt", "messages")}
    named = "messages" if messages is not None or path in (CHATS, "/apply-template") else "prompt"
    require_refused(server, path, json.dumps({**body, "messages": messages}).encode(), named)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [pytest.param(path, prompt, id=f"{path} {name}") for name, (paths, prompt) in PROMPTS.items() for path in paths],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_invalid_is_refused(server: Server, path: str, prompt: Any, stream: bool) -> None:
    how = {} if path == "/execute" else {"stream": stream}  # which is nothing but a stream
    require_refused(server, path, changed(path, prompt=prompt, **how), "prompt")


@pytest.mark.parametrize(("path", "field"), [(path, field) for field, (paths, _) in FIELDS.items() for path in paths])
def test_field_invalid_is_refused_by_name(server: Server, path: str, field: str) -> None:
    for value in FIELDS[field][1]:
        assert field in require_refused(server, path, changed(path, **{field: value}), field), value


def test_fields_invalid_on_one_route_are_refused_there(server: Server) -> None:
    for path in (JOB, EXECUTE, CHATS, COMPLETIONS):
        assert "max_tokens is 0" in require_refused(server, path, changed(path, max_tokens=0), "max_tokens")
    require_refused(server, CHATS, changed(CHATS, max_completion_tokens=0), "max_completion_tokens")
    require_refused(server, JOB, changed(JOB, max_tokens=-1), "max_tokens")
    require_refused(server, JOB, changed(JOB, stop=["x"] * 5), "stop")
    require_refused(server, JOB, changed(JOB, messages=CHAT), "prompt")
    for tokens in (None, "x", [tiny_models.VOCAB], [-1], [1.5], [True]):
        require_refused(server, "/detokenize", json.dumps({"tokens": tokens}).encode(), "tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ALL)
def test_prompt_over_context_is_refused_with_figures(server: Server, path: str, stream: bool) -> None:
    """A 400 with both lengths, before the first byte of a stream."""
    long = "#" * (CONTEXT + 1)
    longer = {"messages": [{"role": "user", "content": long}]} if path == CHATS else {"prompt": long}
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [(longer, (f"{CONTEXT + 1}"[:4], f"{CONTEXT}"))]
    if path not in OPENAI:  # there it is reduced to what is left
        cases.append(({"max_tokens": 10**12}, ("1000000000000",)))
    for fields, figures in cases:
        how = {} if path == "/execute" else {"stream": stream}  # which is nothing but a stream
        reply = server.post(path, {**SOUND[path], **fields, **how})
        body = reply.json()
        body = body["error"] if path in OPENAI else body
        assert (reply.status_code, body["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
        assert all(figure in body["message"] for figure in figures)
        assert str(CONTEXT) in body["message"]


@pytest.mark.parametrize("path", ALL)
def test_prompt_with_zero_byte_is_accepted(server: Server, path: str) -> None:
    fields = {"messages": [{"role": "user", "content": "\x00"}]} if path == CHATS else {"prompt": "\x00"}
    assert server.post(path, {**SOUND[path], **fields}).status_code == 200


@pytest.mark.parametrize("value", [10**30, 1 << 63, (1 << 63) - 1])
def test_unbounded_number_large_is_accepted(server: Server, value: int) -> None:
    reply = server.post(JOB, {"prompt": ">", "max_tokens": 3, "top_k": value, "repeat_last_n": value, "stream": False})
    assert reply.status_code == (200 if value < 1 << 63 else 400), reply.text


def test_unknown_fields_ignored_are_listed_in_header(start: Start) -> None:
    server = start(ignore_unknown_fields=True)
    for stream in (False, True):
        reply = server.post(CHATS, {**SOUND[CHATS], "zap": 1, "zip\r\nx-bad: 1": 2, "stream": stream})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ignored-fields"].startswith("zap,zip")
        assert "x-bad" not in reply.headers
    assert server.post(CHATS, {**SOUND[CHATS], "tools": [{}]}).status_code == 400


MESSAGES_PATH, RESPONSES, OLLAMA, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
SMALL = {"type": "text", "text": "What is it?"}
URL = "data:image;base64,aGk="
IMAGES: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, {"messages": [{"role": "user", "content": [SMALL, {"type": "image_url", "image_url": {"url": URL}}]}]},
     "messages[0].content[1]: tiny.gguf takes no images, since no vision tower is loaded"),
    (JOB, {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "image": URL}]}]},
     "messages[0].content must be text, or a list of parts of the types text and image_url"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "messages[0].content[0].type is 'input_audio': audio is not supported"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
     "input[0].content[0]: tiny.gguf takes no images"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "1"}]}]},
     "input[0].content[0].type is 'input_file': files are not supported"),
    (MESSAGES_PATH, {"max_tokens": 2, "messages": [{"role": "user", "content": [SMALL, {"type": "image"}]}]},
     "messages[0].content[1].source is required"),
    (MESSAGES_PATH, {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "document"}]}]},
     "messages[0].content[0].type is 'document': documents are not supported"),
    (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
     "messages[0].images[0]: tiny.gguf takes no images"),
    (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images[0]: tiny.gguf takes no images"),
]  # fmt: skip


def error_text(reply: httpx.Response) -> str:
    """Return the message of an error in any dialect."""
    body = reply.json()
    if "errors" in body:
        return "; ".join(one["message"] for one in body["errors"])
    error = body.get("error", body)
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(("path", "body", "message"), IMAGES)
def test_images_are_refused_in_plain_words(server: Server, path: str, body: dict[str, Any], message: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert error_text(reply).startswith(message)


LONE = r'"a\ud83d"'
SURROGATES: dict[str, tuple[str, str]] = {
    CHATS: ('{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}',
            "messages[0].content[0].text"),
    COMPLETIONS: ('{"prompt": %s}', "prompt"),
    JOB: ('{"max_tokens": 2, "prompt": %s}', "prompt"),
    EXECUTE: ('{"max_tokens": 2, "job_id": "a", "messages": [{"role": "user", "content": %s}]}', "messages[0].content"),
    RESPONSES: ('{"input": [{"role": "user", "content": %s}]}', "input[0].content"),
    MESSAGES_PATH: ('{"max_tokens": 2, "messages": [{"role": "user", "content": "x"}], "system": %s}', "system"),
    "/v1/messages/count_tokens": ('{"messages": [{"role": "user", "content": %s}]}', "messages[0].content"),
    OLLAMA: ('{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": %s}]}',
             "messages[1].content"),
    GENERATE: ('{"prompt": "x", "options": {"stop": ["x", %s]}}', "options.stop[1]"),
    "/v1/embeddings": ('{"input": ["x", %s]}', "input[1]"),
    "/v1/rerank": ('{"query": "x", "documents": [{"text": %s}]}', "documents[0].text"),
    "/api/embed": ('{"input": %s}', "input"),
    "/tokenize": ('{"text": %s}', "text"),
    "/apply-template": ('{"messages": [{"role": "user", "content": %s}]}', "messages[0].content"),
}  # fmt: skip


@pytest.mark.parametrize("path", SURROGATES)
def test_lone_surrogate_is_refused_with_its_field(server: Server, path: str) -> None:
    """Escaped at the end of a text or within it, as bytes, and in a large body; other bytes that are not UTF-8 too."""
    body, field = SURROGATES[path]
    lone = f"{field} is not valid Unicode: it holds the lone surrogate U+D83D"
    for text, message in (
        (LONE, lone), (r'"a\ud83d b"', lone), (r'"\ud83d\u0041"', lone), (f'"{"x" * 100_000}{LONE[1:]}', lone),
        (b'"\xff"', f"{field} is not valid UTF-8: it holds the byte 0xFF"),
        (b'"\xed\xa0\x80"', f"{field} is not valid UTF-8: it holds the byte 0xED"),
    ):  # fmt: skip
        sent = body.encode().replace(b"%s", text if isinstance(text, bytes) else text.encode())
        reply = server.http.post(path, content=sent, headers={"content-type": "application/json"})
        assert (reply.status_code, error_text(reply)) == (400, message)


@pytest.mark.parametrize("escaped", ["\\ud83d", "a\\ud83d b", "\\ude00"])
def test_lone_surrogate_in_arguments_of_a_call_is_refused_with_its_message(
    scripted: ScriptedServer, escaped: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{escaped}"}}'}}
    sound = {**call, "function": {"name": "f", "arguments": r'{"a": "\ud83d\ude00 \\ud83d"}'}}
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [sound]}]
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    assert scripted.post("/apply-template", {"messages": [*chat, result]}).status_code == 200
    chat += [result, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    reply = scripted.post(CHATS, {"messages": chat, "max_tokens": 2})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert error_text(reply).startswith("messages[3] is not valid Unicode: it holds a lone surrogate")


def test_lone_surrogate_in_a_name_is_refused(server: Server) -> None:
    sent = r'{"prompt": "x", "logit_bias": {"\udc00": 1}}'
    reply = server.http.post(COMPLETIONS, content=sent, headers={"content-type": "application/json"})
    expected = "a name in logit_bias is not valid Unicode: it holds the lone surrogate U+DC00"
    assert (reply.status_code, error_text(reply)) == (400, expected)


JOBS, CHATS, COMPLETIONS = "/v1/jobs", "/v1/chat/completions", "/v1/completions"


def test_integer_written_as_float_is_accepted(server: Server) -> None:
    body = b'{"prompt": ">", "max_tokens": 3.0, "seed": 7.0, "top_k": 1e0, "stream": false}'
    assert isinstance(decode_object(body)["seed"], float)
    result = server.http.post(JOBS, content=body, headers={"content-type": "application/json"}).json()
    assert (result["text"], result["tokens_out"], result["seed"]) == (SAID[:3], 3, 7)
    assert server.post(COMPLETIONS, {"prompt": [35.0], "temperature": 0}).json()["choices"][0]["text"] == "ab" * 8
    assert server.post("/detokenize", {"tokens": [97.0, 98]}).json() == {"text": "ab"}


def test_invalid_requests_do_not_affect_running_stream(server: Server) -> None:
    job = {"prompt": "?", "max_tokens": 400, "seed": 5, "stream": False}
    alone = server.post(JOBS, job).json()["text"]
    bad: list[tuple[str, Any]] = [
        (JOBS, {}), (CHATS, {"messages": "x"}), (COMPLETIONS, {"prompt": [tiny_models.VOCAB]}), (COMPLETIONS, [1]),
        (JOBS, {"prompt": "#" * 70_000, "max_tokens": 1}), (CHATS, {"messages": CHAT, "logit_bias": {"999999": 1}}),
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(server.post, JOBS, job) for _ in range(3)]
        replies = [server.post(path, body).status_code for path, body in bad * 3]
        assert [one.result().json()["text"] for one in good] == [alone] * 3
    assert set(replies) == {400}


def test_many_unknown_fields_are_reported_briefly(server: Server, start: Start) -> None:
    unknown = {f"x{i}": 0 for i in range(5_000)}
    reply = server.post(JOBS, {"prompt": "#", "max_tokens": 1, **unknown})
    errors = reply.json()["errors"]
    assert (reply.status_code, len(errors), len(reply.content) < 10_000) == (400, 33, True)
    assert (errors[0]["field"], errors[-1]["message"]) == ("x0", "and 4968 more unknown fields")
    assert "and 4968 more" in server.post(COMPLETIONS, {"prompt": "#", **unknown}).json()["error"]["message"]
    lenient = start(ignore_unknown_fields=True).post(COMPLETIONS, {"prompt": "#", "max_tokens": 1, **unknown})
    assert lenient.status_code == 200
    assert lenient.headers["x-ignored-fields"].startswith("x0,x1,")
