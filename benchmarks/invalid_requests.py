"""Bodies that a server must refuse with a 4xx status, and bytes that are no HTTP request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

CHAT, TEXT, JOBS, EXECUTE = "/v1/chat/completions", "/v1/completions", "/v1/jobs", "/execute"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
NOT_OBJECTS = [b"", b"[]", b"42", b"null", b'"text"', b"{", b'{"prompt": "x"', b"[" * 100_000, b"\xff\xfe{}", b"{}",
               b'{"prompt": "\\ud800", "max_tokens": 1}', b"\x00" * 100]  # fmt: skip
INVALID_ON_ALL: list[dict[str, Any]] = [
    {"temperature": -1}, {"temperature": "hot"}, {"temperature": 9}, {"top_p": 2}, {"min_p": -0.1}, {"typical_p": "x"},
    {"top_k": -5}, {"top_k": 1.5}, {"repetition_penalty": 0}, {"repeat_last_n": -2}, {"seed": 2**64}, {"seed": -2},
    {"seed": 0.5}, {"stop": [""]}, {"stop": 3}, {"stop": ["x"] * 99}, {"stop": ["x" * 1000]}, {"max_tokens": -2},
    {"max_tokens": "many"}, {"stream": "yes"}, {"priority": "high"}, {"timeout_ms": 0},
    {"no_such_field": 1}, {"model": "someone-else"}, {"model": 5}, {"chat_template": "{{ 1 }}"},
]  # fmt: skip
INVALID_ON_OPENAI: list[dict[str, Any]] = [
    {"n": 0}, {"n": 10**9}, {"n": "two"}, {"logprobs": -2}, {"logprobs": "all"}, {"logit_bias": {"x": 1}},
    {"logit_bias": {"1": 1000}}, {"logit_bias": {"999999999": 1}}, {"stream_options": 4}, {"presence_penalty": 9},
    {"best_of": 7}, {"suffix": "end"}, {"tools": [{"type": "function"}]}, {"response_format": {"type": "xml"}},
]  # fmt: skip
BAD_MESSAGES: list[Any] = [
    None, [], "Hi", [123], [{}], [{"role": "pope", "content": "x"}], [{"role": "user", "content": 5}],
]  # fmt: skip
BAD_PROMPTS: list[Any] = [None, "", [], ["a", 1], [-1], [10**9], [[]], {"a": 1}]
INVALID_ON_PATH: dict[str, list[dict[str, Any]]] = {
    CHAT: [*({"messages": messages} for messages in BAD_MESSAGES), {"top_logprobs": 3}],
    TEXT: [{"prompt": prompt} for prompt in BAD_PROMPTS],
    JOBS: [
        {"max_tokens": -1},
        {"max_tokens": 10**12},
        {"job_id": "a b"},
        {"job_id": "x" * 65},
        {"operation": "train"},
        {"prompt": 5},
        {"messages": MESSAGES},
    ],
    EXECUTE: [{"job_id": None}, {"job_id": ""}, {"prompt": ["x"]}],
}
VALID_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    TEXT: {"prompt": "Hi", "max_tokens": 2},
    JOBS: {"prompt": "Hi", "max_tokens": 2},
    EXECUTE: {"prompt": "Hi", "max_tokens": 2, "job_id": "nonsense"},
}


def _invalid_bodies() -> Iterator[tuple[str, bytes]]:
    for path, valid in VALID_BODIES.items():
        yield from ((path, raw) for raw in NOT_OBJECTS)
        changes = INVALID_ON_ALL + INVALID_ON_PATH[path] + (INVALID_ON_OPENAI if path in (CHAT, TEXT) else [])
        for change in changes:
            if not (path == CHAT and change in ({"best_of": 7}, {"suffix": "end"})):
                yield path, json.dumps({**valid, **change}).encode()
    yield (
        CHAT,
        json.dumps({**VALID_BODIES[CHAT], "messages": [{"role": "user", "content": "word " * 200_000}]}).encode(),
    )


BAD_BODIES = list(_invalid_bodies())
_HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"NONSENSE / HTTP/9.9\r\n\r\n", b"\r\n" * 50,
    _HEAD, _HEAD + b"Content-Length: 1000\r\n\r\n{", _HEAD + b"Content-Length: -5\r\n\r\n",
    _HEAD + b"Content-Length: 99999999999999\r\n\r\n", _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", _HEAD + b"X: " + b"y" * 100_000,
]  # fmt: skip
