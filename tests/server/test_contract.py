"""What the contract promises and no other file here shows: defaults and limits by their figures, what each dialect
takes beside its main fields, admission, one step to a freed block, and that one request never touches another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.server.dialects import jobs, openai_schema
from llm_worker_rbee.server.schema import Enum, decode_object
from tests.conftest import DEVICE
from tests.helpers import tiny_models
from tests.server.conftest import Start
from tests.server.running import CHAT, SAID, Server, events, step_through, until

JOBS, CHATS, COMPLETIONS = "/v1/jobs", "/v1/chat/completions", "/v1/completions"
# what a job's field is when it is not given, and the values at its ends: the last that is taken, the first that is not
LIMITS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "max_tokens": (None, [1], [0]),
    "temperature": (1.0, [0, 2], [-0.001, 2.001]),
    "top_p": (1.0, [0, 1], [-0.001, 1.001]),
    "min_p": (0.0, [0, 1], [-0.001, 1.001]),
    "typical_p": (1.0, [0, 1], [-0.001, 1.001]),
    "repetition_penalty": (1.0, [0.001, 2], [0, 2.001]),
    "top_k": (0, [0], [-1]),
    "repeat_last_n": (128, [0], [-1]),
    "seed": (None, [0, 2**64 - 1], [-1, 2**64]),
    "stop": ((), [["x"] * 4, ["x" * 100], []], [["x"] * 5, ["x" * 101], [""]]),
    "priority": (0, [-5, 5], [0.5]),
    "timeout_ms": (None, [1], [0]),
    "stream": (True, [False], [0]),
    "operation": ("infer", ["infer"], ["train"]),
    "job_id": (None, ["aZ09_-", "a" * 64], ["", "a" * 65, "a.b"]),
}
UNHONOURED = [
    (path, name)
    for path, table in ((CHATS, openai_schema.CHAT), (COMPLETIONS, openai_schema.COMPLETION))
    for name, field in table.items()
    if isinstance(field.type, Enum)
]
ASKED: dict[str, dict[str, Any]] = {CHATS: {"messages": CHAT}, COMPLETIONS: {"prompt": "#"}}


@pytest.mark.parametrize("name", LIMITS)
def test_defaults_and_limits_of_a_job(name: str) -> None:
    default, taken, refused = LIMITS[name]
    field = jobs.JOB[name]
    assert field.default == default
    assert [field.type.validate(name, value) for value in taken] == [None] * len(taken)
    assert all(field.type.validate(name, value) for value in refused)


def test_whole_numbers_may_be_written_with_a_point(server: Server) -> None:
    body = b'{"prompt": ">", "max_tokens": 3.0, "seed": 7.0, "top_k": 1e0, "stream": false}'
    assert isinstance(decode_object(body)["seed"], float)
    result = server.http.post(JOBS, content=body, headers={"content-type": "application/json"}).json()
    assert (result["text"], result["tokens_out"], result["seed"]) == (SAID[:3], 3, 7)
    assert server.post(COMPLETIONS, {"prompt": [35.0], "temperature": 0}).json()["choices"][0]["text"] == "ab" * 8
    assert server.post("/detokenize", {"tokens": [97.0, 98]}).json() == {"text": "ab"}


def test_a_job_is_taken_on_with_where_its_events_are(server: Server) -> None:
    reply = server.post("/v1/inference", {"prompt": "#", "max_tokens": 1, "job_id": "where-1"}).json()
    assert reply == {"job_id": "where-1", "sse_url": "/v1/jobs/where-1/stream"}
    assert server.http.get(reply["sse_url"]).headers["content-type"].startswith("text/event-stream")


def test_the_name_of_a_forgotten_job_is_free_again(start: Start) -> None:
    server = start(job_ttl_s=0.0)
    server.job(job_id="again", max_tokens=1)
    until(lambda: server.http.get("/v1/jobs/again").status_code == 404)
    assert server.job(job_id="again", max_tokens=1) == "again"


def test_what_can_never_fit_in_the_cache_is_refused_with_the_figures(start: Start) -> None:
    server = start({"kv_memory": 1 << 18})
    context = server.http.get("/v1/models").json()["data"][0]["context_length"]
    assert context < 65_536
    reply = server.post(JOBS, {"prompt": "#", "max_tokens": context})
    assert (reply.status_code, reply.json()["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    assert all(str(figure) in reply.json()["message"] for figure in (1, context, context + 1))
    whole = server.post(CHATS, {"messages": CHAT, "temperature": 0}).json()  # no limit given: what is left
    assert whole["usage"]["total_tokens"] == context
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_fields_beside_the_main_ones_are_taken(server: Server, path: str) -> None:
    more = {
        "user": "u", "presence_penalty": 0.5, "frequency_penalty": -0.5, "top_k": 5, "min_p": 0.01, "typical_p": 0.99,
        "repetition_penalty": 1.1, "repeat_last_n": 8, "priority": -1, "timeout_ms": 60_000, "top_p": 0.9,
    }  # fmt: skip
    reply = server.post(path, {**ASKED[path], "max_tokens": 2, **more})
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 2)
    if path == CHATS:
        reply = server.post(path, {**ASKED[path], "max_completion_tokens": 3, "temperature": 0})
        assert reply.json()["usage"]["completion_tokens"] == 3
    else:
        assert server.post(path, {**ASKED[path], "n": 2, "best_of": 2}).status_code == 200


@pytest.mark.parametrize(("path", "name"), UNHONOURED)
def test_a_known_field_that_is_not_honoured(server: Server, path: str, name: str) -> None:
    """Refused by its name, unless it asks for nothing."""
    kind = (openai_schema.CHAT if path == CHATS else openai_schema.COMPLETION)[name].type
    assert isinstance(kind, Enum)
    for value in (*kind.allowed, None):
        assert server.post(path, {**ASKED[path], "max_tokens": 1, name: value}).status_code == 200, value
    error = server.post(path, {**ASKED[path], name: {"something": "else"}}).json()["error"]
    assert (error["param"], error["code"]) == (name, "INVALID_REQUEST")
    assert name in error["message"]


def test_the_names_of_the_model(start: Start) -> None:
    """The reference as it was given, the name that it is served under, none; no path of ours for another one."""
    server = start(served_name="nice")
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "nice"
    for name in ("nice", "tiny", None):
        assert server.post(CHATS, {"messages": CHAT, "max_tokens": 1, "model": name}).json()["model"] == "nice"
        assert server.http.get(f"/v1/models/{name or 'tiny'}").status_code == 200
    error = server.post(CHATS, {"messages": CHAT, "model": "other"}).json()["error"]
    assert (error["code"], "tiny" in error["message"]) == ("model_not_found", False)
    reply = server.post(JOBS, {"prompt": "#", "max_tokens": 1, "model": "other"})
    assert (reply.status_code, reply.json()["code"]) == (404, "NOT_FOUND")


def test_a_model_without_a_chat_template_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("bare") / "bare.gguf"
    metadata = {k: v for k, v in tiny_models.tokenizer_metadata().items() if k != "tokenizer.chat_template"}
    tiny_models.write_scripted(path, {i: i for i in range(256)}, metadata)
    with Server(lambda: LLM(path, device=DEVICE, kv_memory=1 << 20)) as server:
        server.ready()
        error = server.post(CHATS, {"messages": CHAT}).json()["error"]
        assert error["code"] == "INVALID_REQUEST"
        assert "has no chat template" in error["message"]
        assert str(path.parent) not in error["message"]
        (job,) = server.post(JOBS, {"messages": CHAT, "max_tokens": 1}).json()["errors"]
        assert "has no chat template" in job["message"]
        assert server.post(COMPLETIONS, {"prompt": "#"}).status_code == 200


def test_time_that_is_up_is_told_in_the_openai_dialect_too(server: Server) -> None:
    asked = {"messages": CHAT, "max_tokens": 60_000, "timeout_ms": 50}
    reply = server.post(CHATS, asked)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "TIMEOUT")
    assert events(server.post(CHATS, {**asked, "stream": True}).text)[-1]["error"]["code"] == "TIMEOUT"


@pytest.mark.parametrize("limit", [{"max_queue": 1}, {"max_queued_tokens": 100}], ids=["requests", "prompt tokens"])
def test_admission_is_bounded(start: Start, limit: dict[str, int]) -> None:
    """By the requests and by the prompt tokens that wait; a job hears of it in its own dialect."""
    server = start({"max_batch": 1}, **limit)
    running = server.job(max_tokens=60_000)
    until(lambda: server.worker.num_unstarted == 0)
    waiting = server.job(prompt="#" * 60, max_tokens=1)
    reply = server.post(JOBS, {"prompt": "#" * 60, "max_tokens": 1})
    assert (reply.status_code, reply.json()["code"], reply.json()["retriable"]) == (429, "QUEUE_FULL", True)
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    server.http.delete(f"/v1/jobs/{running}")
    assert server.events(waiting)[-1]["type"] == "end"


@pytest.fixture
def gated(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, threading.Semaphore, list[int]]]:
    """A server whose steps wait until they may; how many requests each one had."""
    server = start()
    may_step, steps = threading.Semaphore(0), list[int]()
    engine = server.worker.loaded.engine
    run = engine.runner.run

    def one_by_one(spans: Any) -> Any:
        steps.append(len(spans))
        may_step.acquire()
        return run(spans)

    step_through(one_by_one, engine, monkeypatch)
    yield server, may_step, steps
    may_step.release(1_000_000)
    server.require_idle()


Gated = tuple[Server, threading.Semaphore, list[int]]


def leaves(server: Server) -> Callable[[], None]:
    """A client in mid-stream; calling it is leaving."""
    stream = server.http.stream("POST", "/execute", json={"prompt": "#", "max_tokens": 99, "job_id": "left"})
    stream.__enter__()
    return lambda: stream.__exit__(None, None, None)


def cancels(server: Server) -> Callable[[], None]:
    job = server.job(max_tokens=99)
    return lambda: server.http.delete(f"/v1/jobs/{job}").raise_for_status() and None


@pytest.mark.parametrize("begin", [cancels, leaves])
def test_who_is_gone_is_out_within_one_step(gated: Gated, begin: Callable[[Server], Callable[[], None]]) -> None:
    """Given up while a step runs: that step ends, there is no other with it, and its blocks are free."""
    server, may_step, steps = gated
    end = begin(server)
    until(lambda: len(steps) == 1)
    may_step.release(2)
    until(lambda: len(steps) == 3)
    scheduler = server.worker.loaded.engine.scheduler
    (request,) = scheduler.running
    end()
    until(lambda: _is_given_up(server, request))
    may_step.release()
    server.require_idle()
    assert steps == [1, 1, 1]
    assert scheduler.pool.num_free == scheduler.pool.n_blocks


def _is_given_up(server: Server, request: Any) -> bool:
    """The engine's thread will hear of it before its next step."""
    serving = server.worker._engine
    assert serving is not None
    return any(one is request and reader is None for one, reader in list(serving._inbox))


def test_bad_requests_do_not_touch_who_is_answered(server: Server) -> None:
    asked = {"prompt": "?", "max_tokens": 400, "seed": 5, "stream": False}
    alone = server.post(JOBS, asked).json()["text"]
    bad: list[tuple[str, Any]] = [
        (JOBS, {}), (CHATS, {"messages": "x"}), (COMPLETIONS, {"prompt": [tiny_models.VOCAB]}), (COMPLETIONS, [1]),
        (JOBS, {"prompt": "#" * 70_000, "max_tokens": 1}), (CHATS, {"messages": CHAT, "logit_bias": {"999999": 1}}),
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(server.post, JOBS, asked) for _ in range(3)]
        replies = [server.post(path, body).status_code for path, body in bad * 3]
        assert [one.result().json()["text"] for one in good] == [alone] * 3
    assert set(replies) == {400}


def test_an_answer_by_events_cannot_be_asked_for_whole(server: Server) -> None:
    body = {"job_id": "whole-1", "prompt": "#", "max_tokens": 1, "stream": False}
    reply = server.post("/execute", body)
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (400, "stream")
    for path, asked in (("/v1/chat/completions", {"messages": CHAT}), (COMPLETIONS, {"prompt": "#"})):
        reply = server.post(path, {**asked, "stream_options": {"include_usage": True}})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options")
    reply = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
