"""Under pressure: what is too much is refused early, cheaply and with honest figures, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_worker_rbee.engine.request import Request, SamplingParams
from llm_worker_rbee.errors import QueueFullError, ShuttingDownError
from llm_worker_rbee.server import app, offload
from llm_worker_rbee.server.admission import Admission
from llm_worker_rbee.server.config import Settings
from llm_worker_rbee.server.dialects import jobs, openai
from llm_worker_rbee.server.offload import BoundedExecutor
from tests.server.conftest import Start
from tests.server.running import CONTEXT, Server, ids, step_through, until

COMPLETIONS, CHATS, JOBS = "/v1/completions", "/v1/chat/completions", "/v1/jobs"
LONG = 60_000
Gate = Callable[[Server], threading.Event]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No step of a server's engine begins until the event is set."""
    gates: list[threading.Event] = []

    def close(server: Server) -> threading.Event:
        gates.append(opened := threading.Event())
        engine = server.worker.loaded.engine
        run = engine.runner.run
        step_through(lambda spans: opened.wait() and run(spans), engine, monkeypatch)
        return opened

    yield close
    for opened in gates:
        opened.set()


def sent(server: Server, path: str, body: Any) -> socket.socket:
    """A client that may leave before it is answered."""
    client, raw = socket.create_connection(("127.0.0.1", server.port)), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


# --- before tokenizing


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        (COMPLETIONS, {"prompt": "x" * 2_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["#", "x" * 2_000_000]}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1] * (CONTEXT + 1)]}, "prompt"),
        (JOBS, {"prompt": "x" * 2_000_000, "max_tokens": 1}, None),
    ],
)
def test_what_can_never_fit_is_not_tokenized(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any], field: str | None
) -> None:
    """The bytes tell it already, or the number of ids; with the figures."""

    def encode(text: str, *_: Any, **__: Any) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    tokenizer = server.worker.loaded.tokenizer
    whole = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: whole(text, **more) if text == "#" else encode(text))
    reply = server.post(path, asked)
    error = reply.json() if field is None else reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    assert field is None or error["param"] == field
    assert str(CONTEXT) in error["message"]
    server.require_idle()


def test_who_is_gone_is_not_tokenized_and_holds_nobody_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large texts: one is at it, the others wait and are counted; they leave, and are never begun."""
    server = start(max_queued_tokens=10_000_000)
    tokenizer, seen, may_go = server.worker.loaded.tokenizer, list[int](), threading.Event()
    encode = tokenizer.encode

    def slow(text: str, **more: Any) -> list[int]:
        seen.append(len(text))
        if len(text) > offload.LARGE_BYTES:
            may_go.wait()
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", slow)
    size = offload.LARGE_BYTES * 2
    bodies = [(COMPLETIONS, {"prompt": "x" * size}), ("/tokenize", {"text": "x" * size}),
              (JOBS, {"prompt": "x" * size, "max_tokens": 1})]  # fmt: skip
    first = sent(server, *bodies[0])
    until(lambda: seen == [size])
    others = [sent(server, *body) for body in bodies * 3]
    until(lambda: server.worker.offload._large._num_bytes > len(others) * size)
    assert server.http.get("/health").json()["waiting"] >= 1
    assert server.http.get("/v1/ready").json()["state"] == "busy"
    server.require_alive()  # small work has its own threads
    for client in (first, *others):
        client.close()
    until(lambda: server.worker.offload._large._num_bytes == 0)
    may_go.set()
    server.require_idle()
    assert seen.count(size) == 1


def test_what_is_being_tokenized_is_counted_in_admission(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bytes at first, by its tokens then; a place that was held is free again whatever happened."""
    server = start(max_queued_tokens=50)
    tokenizer, may_go = server.worker.loaded.tokenizer, threading.Event()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: may_go.wait() and encode(text, **more))
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.post, COMPLETIONS, {"prompt": "#" * 196, "max_tokens": 1})
        until(lambda: server.worker.admission.load == (0, 1, 50))
        refused = server.post(COMPLETIONS, {"prompt": "####", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "QUEUE_FULL")
        may_go.set()
        assert held.result().json()["usage"]["prompt_tokens"] == 196
    server.require_idle()


def test_lines_are_bounded_by_their_bytes() -> None:
    """One alone may be as large as it likes; behind it there is no room for more than a little."""

    async def tried() -> None:
        line, may_go = BoundedExecutor("tested", 1), threading.Event()
        first = asyncio.ensure_future(line.run(offload.MAX_QUEUED_BYTES * 2, may_go.wait))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="bytes of other requests") as caught:
            await line.run(1, may_go.wait)
        assert 1 <= caught.value.retry_after <= 60
        may_go.set()
        assert await first
        assert await line.run(1, may_go.wait)
        line.close()
        with pytest.raises(ShuttingDownError):
            await line.run(1, may_go.wait)

    asyncio.run(tried())


# --- the event loop is not held up


def test_large_bodies_and_replies_are_not_made_in_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, checking, tokenizing, pieces and text: in whose thread?"""
    loop_thread, where = server._thread, dict[str, threading.Thread]()

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def told(*given: Any, **more: Any) -> Any:
            where[name] = threading.current_thread()
            return real(*given, **more)

        monkeypatch.setattr(owner, name, told)

    tokenizer = server.worker.loaded.tokenizer
    for owner in (app, jobs, openai):
        watched(owner, "decode_object")
        watched(owner, "validate_body")
    for owner, name in ((tokenizer, "piece"), (tokenizer, "decode"), (openai.Reply, "_object")):
        watched(owner, name)
    text = "a" * (offload.LARGE_BYTES + 1)
    asked: list[tuple[str, Any, set[str]]] = [
        ("/tokenize", {"text": text}, {"piece"}),
        ("/detokenize", {"tokens": [97] * (offload.LARGE_BYTES // 2)}, {"decode"}),
        (JOBS, {"prompt": text, "max_tokens": 1, "top_k": -1}, set()),
        (COMPLETIONS, {"prompt": [1] * 34_000, "max_tokens": 1, "echo": True}, {"_object"}),
    ]
    for path, body, more in asked:
        where.clear()
        server.post(path, body)
        assert where.keys() >= {"decode_object", "validate_body"} | more
        assert loop_thread not in where.values(), (path, where)


def test_many_problems_are_told_briefly(server: Server, start: Start) -> None:
    unknown = {f"x{i}": 0 for i in range(5_000)}
    told = server.post(JOBS, {"prompt": "#", "max_tokens": 1, **unknown})
    errors = told.json()["errors"]
    assert (told.status_code, len(errors), len(told.content) < 10_000) == (400, 33, True)
    assert (errors[0]["field"], errors[-1]["message"]) == ("x0", "and 4968 more unknown fields")
    assert "and 4968 more" in server.post(COMPLETIONS, {"prompt": "#", **unknown}).json()["error"]["message"]
    lenient = start(ignore_unknown_fields=True).post(COMPLETIONS, {"prompt": "#", "max_tokens": 1, **unknown})
    assert lenient.status_code == 200
    assert lenient.headers["x-ignored-fields"].startswith("x0,x1,")


# --- who comes in, and when again


def test_a_batch_larger_than_the_queue_comes_in_when_nothing_waits(start: Start, gate: Gate) -> None:
    """All of it or nothing: an idle worker takes it, one with something to read does not."""
    server = start({"max_batch": 2}, max_queued_tokens=100)
    batch = {"prompt": [ids("#" * 60)] * 5, "max_tokens": 1}
    assert len(server.post(COMPLETIONS, batch).json()["choices"]) == 5
    server.require_idle()
    opened = gate(server)
    job = server.job(prompt="?" * 60, max_tokens=1)
    refused = server.post(COMPLETIONS, batch)
    assert (refused.status_code, server.worker.num_open) == (429, 1)
    opened.set()
    assert server.events(job)[-1]["type"] == "end"
    assert server.post(COMPLETIONS, batch).status_code == 200
    many = server.post(COMPLETIONS, {"prompt": ["#"] * 300, "max_tokens": 1})
    assert (many.status_code, "at most 258" in many.json()["error"]["message"]) == (400, True)


def test_a_request_runs_from_its_first_step_on(start: Start, gate: Gate) -> None:
    """While its prompt is read too; and without a queue nobody waits. Health, metrics and readiness agree."""
    server = start({"max_batch": 1}, max_queue=0)
    opened = gate(server)
    job = server.job(max_tokens=3)
    until(lambda: server.worker.admission.load.running == 1)
    health, metrics = server.http.get("/health").json(), server.http.get("/metrics").text
    assert (health["running"], health["waiting"]) == (1, 0)
    assert "llm_worker_num_requests_running 1.0" in metrics
    assert "llm_worker_num_requests_waiting 0.0" in metrics
    assert server.http.get("/v1/ready").json()["state"] == "busy"
    refused = server.post(JOBS, {"prompt": "#", "max_tokens": 1})
    assert (refused.status_code, refused.json()["code"]) == (429, "QUEUE_FULL")
    opened.set()
    assert server.events(job)[-1]["tokens_out"] == 3
    server.require_idle()
    server.require_alive()


def test_retry_after_is_when_somebody_will_have_ended(server: Server) -> None:
    """From what those who run may still say, the speed of answers, and how much of it answers have lately said."""
    engine, admission = server.worker.loaded.engine, Admission(Settings(model_ref="x", max_queue=0))

    def running(max_tokens: int, said: int) -> Request:
        made = Request([1] * 10, SamplingParams(), max_tokens, 0, frozenset())
        made.ids += [1] * said
        made.arrival, made.is_finished, made.batch_slot, made.num_computed_tokens = 0, False, 0, 10
        admission.add(made)
        return made

    def told(requests: int) -> int:
        with pytest.raises(QueueFullError) as caught, admission.reserve(engine, requests, 1):
            pass
        return caught.value.retry_after

    slots = engine.config.max_batch
    requests = [running(1_000, 100 + 10 * i) for i in range(slots)]  # the last one has the least to say
    for _ in range(3):
        admission.observe_itl(0.02 * 5, 5)
    least = (900 - 10 * (slots - 1)) * 0.02
    assert told(1) == pytest.approx(least, abs=1)
    assert told(3) == pytest.approx(least + 2 * 10 * 0.02, abs=1)
    assert told(slots) == pytest.approx(900 * 0.02, abs=1)
    for _ in range(100):  # answers that end after a tenth of what they might say
        short = running(1_000, 100)
        admission.remove(short)
    assert told(slots) == pytest.approx(90 * 0.02, abs=1)
    requests[0].max_tokens, requests[0].max_total_tokens = 10**9, 10**9
    assert told(slots) == 60
    admission.remove(requests[1])
    with admission.reserve(engine, 1, 1):
        assert admission.load.waiting == 1


def test_retry_after_of_a_full_worker_is_not_one_for_ever(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long answers in all places: who comes then hears of their length."""
    server = start({"max_batch": 2}, max_queue=1)
    spoke = server.worker.admission.observe_itl
    monkeypatch.setattr(server.worker.admission, "observe_itl", lambda seconds, tokens: spoke(0.01 * tokens, tokens))
    jobs = [server.job(max_tokens=LONG) for _ in range(3)]
    until(lambda: server.worker.admission._itl_s)
    refused = server.post(COMPLETIONS, {"prompt": "#", "max_tokens": 1})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
    for job in jobs:
        server.http.delete(f"/v1/jobs/{job}")
    server.require_idle()


# --- a prompt that fills the context


@pytest.mark.parametrize("scores", [{"logprobs": 0}, {}])
def test_a_prompt_as_long_as_the_context_is_scored(start: Start, scores: dict[str, int]) -> None:
    """Nothing is left for an answer, and none is asked for; one more does not fit."""
    server = start({"max_context": 256})
    asked = {"max_tokens": 0, "echo": True, **scores}
    reply = server.post(COMPLETIONS, {"prompt": ids("#") * 256, **asked})
    assert reply.status_code == 200, reply.text
    choice, usage = reply.json()["choices"][0], reply.json()["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("#" * 256, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (256, 0)
    if scores:
        found = choice["logprobs"]["token_logprobs"]
        assert (len(found), found[0]) == (256, None)
        assert all(value <= 0 for value in found[1:])
    for more, max_tokens in ((1, 0), (0, 1)):
        refused = server.post(COMPLETIONS, {"prompt": ids("#") * (256 + more), **asked, "max_tokens": max_tokens})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    server.require_idle()
