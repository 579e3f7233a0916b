"""Admission: what is too much is refused early, with an honest Retry-After."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest

from llm_worker_rbee.errors import QueueFullError
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.server import offload
from llm_worker_rbee.server.admission import Admission
from llm_worker_rbee.server.settings import ServerSettings
from llm_worker_rbee.token_engine.protocol import RequestState, Submit
from tests.helpers.server import CHAT, Server, ids, step_through, until
from tests.server.conftest import Start

JOBS, CHATS, COMPLETIONS = "/v1/jobs", "/v1/chat/completions", "/v1/completions"


def test_request_over_kv_cache_is_refused_with_figures(start: Start) -> None:
    server = start({"kv_memory": 1 << 18})
    context = server.http.get("/v1/models").json()["data"][0]["context_length"]
    assert context < 65_536
    reply = server.post(JOBS, {"prompt": "#", "max_tokens": context})
    assert (reply.status_code, reply.json()["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    assert all(str(figure) in reply.json()["message"] for figure in (1, context, context + 1))
    whole = server.post(CHATS, {"messages": CHAT, "temperature": 0}).json()  # no limit given: what is left
    assert whole["usage"]["total_tokens"] == context
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("limit", [{"max_queue": 1}, {"max_queued_tokens": 100}], ids=["requests", "prompt tokens"])
def test_admission_full_is_429_with_retry_after(start: Start, limit: dict[str, int]) -> None:
    """Bounded by requests and by waiting prompt tokens; a job gets the error of its own dialect."""
    server = start({"max_batch": 1}, **limit)
    running = server.job(max_tokens=60_000)
    until(lambda: server.chat.num_unstarted == 0)
    waiting = server.job(prompt="#" * 60, max_tokens=1)
    reply = server.post(JOBS, {"prompt": "#" * 60, "max_tokens": 1})
    assert (reply.status_code, reply.json()["code"], reply.json()["retriable"]) == (429, "QUEUE_FULL", True)
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    server.http.delete(f"/v1/jobs/{running}")
    assert server.events(waiting)[-1]["type"] == "end"


def test_prompt_over_context_is_400_also_under_load(start: Start) -> None:
    """A retry would never succeed. A text is refused by its bytes, or once it is tokenized."""
    server = start({"max_batch": 1}, max_queue=1)
    context = server.http.get("/v1/models").json()["data"][0]["context_length"]
    running, waiting = server.job(max_tokens=60_000), server.job(max_tokens=60_000)
    bodies: dict[str, dict[str, object]] = {
        JOBS: {"prompt": "#" * 50 * context, "max_tokens": 1},
        COMPLETIONS: {"prompt": "#" * 50 * context},
    }
    for path, body in bodies.items():
        reply = server.post(path, body)
        assert (reply.status_code, reply.json().get("error", reply.json())["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
        assert server.post(path, {**body, "prompt": "#"}).status_code == 429
    for job in (running, waiting):
        server.http.delete(f"/v1/jobs/{job}")


def test_prompt_over_context_is_400_also_where_tokens_wait(start: Start) -> None:
    server = start({"max_batch": 1}, max_queued_tokens=70_000)
    context = server.http.get("/v1/models").json()["data"][0]["context_length"]
    running = server.job(max_tokens=60_000)
    until(lambda: server.chat.num_unstarted == 0)
    waiting = server.job(prompt="#" * 4_000, max_tokens=1)
    text = "#" * (context + 5_000)
    for path, body in (
        (JOBS, {"prompt": text, "max_tokens": 1}),
        (JOBS, {"prompt": "#", "max_tokens": context}),
        (COMPLETIONS, {"prompt": text}),
        (CHATS, {"messages": [{"role": "user", "content": text}]}),
    ):
        reply = server.post(path, body)
        assert (reply.status_code, reply.json().get("error", reply.json())["code"]) == (400, "CONTEXT_LENGTH_EXCEEDED")
    for job in (running, waiting):
        server.http.delete(f"/v1/jobs/{job}")


LONG = 60_000
Gate = Callable[[Server], threading.Event]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Hold back every step of a server's engine until the event is set."""
    gates: list[threading.Event] = []

    def close(server: Server) -> threading.Event:
        gates.append(opened := threading.Event())
        engine = server.llm.engine
        run = engine.runner.run
        step_through(lambda spans: opened.wait() and run(spans), engine, monkeypatch)
        return opened

    yield close
    for opened in gates:
        opened.set()


def test_reservation_counts_while_prompt_is_tokenized(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """First by an estimate from its bytes, then by its tokens; the reservation is released in any case."""
    server = start(max_queued_tokens=50)
    monkeypatch.setattr(offload, "INLINE_BYTES", 0)  # else it would stop the event loop
    tokenizer, may_go = server.llm.tokenizer, threading.Event()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: may_go.wait() and encode(text, **more))
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.post, COMPLETIONS, {"prompt": "#" * 196, "max_tokens": 1})
        until(lambda: server.chat.admission.load == (0, 1, 50))
        refused = server.post(COMPLETIONS, {"prompt": "####", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "QUEUE_FULL")
        may_go.set()
        assert held.result().json()["usage"]["prompt_tokens"] == 196
    server.require_idle()


def test_batch_over_queue_enters_only_idle_worker(start: Start, gate: Gate) -> None:
    """All or nothing: accepted by an idle worker, refused while prompt tokens wait for prefill."""
    server = start({"max_batch": 2}, max_queued_tokens=100)
    batch = {"prompt": [ids("#" * 60)] * 5, "max_tokens": 1}
    assert len(server.post(COMPLETIONS, batch).json()["choices"]) == 5
    server.require_idle()
    opened = gate(server)
    job = server.job(prompt="?" * 60, max_tokens=1)
    refused = server.post(COMPLETIONS, batch)
    assert (refused.status_code, server.chat.num_open) == (429, 1)
    opened.set()
    assert server.events(job)[-1]["type"] == "end"
    assert server.post(COMPLETIONS, batch).status_code == 200
    many = server.post(COMPLETIONS, {"prompt": ["#"] * 300, "max_tokens": 1})
    assert (many.status_code, "at most 258" in many.json()["error"]["message"]) == (400, True)


def test_request_counts_as_running_from_first_step(start: Start, gate: Gate) -> None:
    """During prefill too; with max_queue=0 nothing waits. Health, metrics and readiness agree."""
    server = start({"max_batch": 1}, max_queue=0)
    opened = gate(server)
    job = server.job(max_tokens=3)
    until(lambda: server.chat.admission.load.running == 1)
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


def test_default_queue_follows_batch_and_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = server.chat.engine
    admission = Admission.of_chat(engine, ServerSettings(model_ref="x"))

    def limits(max_batch: int, max_step_tokens: int, num_replicas: int = 1) -> tuple[int, int]:
        config = replace(engine.info.engine, max_batch=max_batch, max_step_tokens=max_step_tokens)
        info = msgspec.structs.replace(engine.info, engine=config, num_replicas=num_replicas)
        monkeypatch.setattr(engine, "info", info)
        return admission.limits()[1:]

    assert limits(64, 512) == limits(1, 16) == (256, 262_144)
    assert limits(512, 8192) == (2048, 524_288)
    assert limits(64, 8192, 3) == (768, 3 * 524_288)
    assert limits(448, 8192)[0] + 448 >= 2048
    with admission.reserve(2048, 2048 * 200), pytest.raises(QueueFullError):
        admission.require(2240 - 2048 + 1, 1)


def test_admission_counts_prompts_once(server: Server) -> None:
    """A request that is added or removed twice counts once; the tokens of prompts bound what waits for prefill."""
    admission = Admission.of_chat(server.chat.engine, ServerSettings(model_ref="x", max_queued_tokens=100))
    submitted = Submit(id=0, prompt=[1] * 60, params=SamplingParams(), max_tokens=5, seed=0, eos_ids=[])
    request = RequestState(submitted)
    admission.add(request)
    admission.add(request)
    with admission.reserve(1, 40):
        assert admission.load == (0, 2, 100)
        with pytest.raises(QueueFullError, match="100 prompt tokens wait for prefill"):
            admission.require(1, 1)
    request.tokens.append(1)  # prefill is done
    request.is_running = True
    with admission.reserve(1, 90):
        assert admission.load == (1, 1, 90)
    admission.remove(request)
    admission.remove(request)
    with admission.reserve(1, 100):
        assert admission.load == (0, 1, 100)


def test_retry_after_follows_running_requests(server: Server) -> None:
    """From the tokens left to running requests, the inter-token latency, and the part of max_tokens used of late."""
    engine = server.chat.engine
    admission = Admission.of_chat(engine, ServerSettings(model_ref="x", max_queue=0))

    def running(max_tokens: int, said: int) -> RequestState:
        made = RequestState(
            Submit(id=0, prompt=[1] * 10, params=SamplingParams(), max_tokens=max_tokens, seed=0, eos_ids=[])
        )
        made.tokens += [1] * said
        made.is_running = True
        admission.add(made)
        return made

    def retry_after(requests: int) -> int:
        with pytest.raises(QueueFullError) as caught, admission.reserve(requests, 1):
            pass
        return caught.value.retry_after

    slots = engine.info.engine.max_batch
    requests = [running(1_000, 100 + 10 * i) for i in range(slots)]  # the last one has the least to say
    for _ in range(3):
        admission.observe_itl(0.02 * 5, 5)
    least = (900 - 10 * (slots - 1)) * 0.02
    assert retry_after(1) == pytest.approx(least, abs=1)
    assert retry_after(3) == pytest.approx(least + 2 * 10 * 0.02, abs=1)
    assert retry_after(slots) == pytest.approx(900 * 0.02, abs=1)
    for _ in range(100):  # answers that end after a tenth of what they might say
        short = running(1_000, 100)
        admission.remove(short)
    assert retry_after(slots) == pytest.approx(90 * 0.02, abs=1)
    admission.remove(requests[0])
    running(10**9, 100)
    assert retry_after(slots) == 60
    admission.remove(requests[1])
    with admission.reserve(1, 1):
        assert admission.load.waiting == 1


def test_retry_after_of_long_requests_is_long(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With long requests in all slots the next client gets a long Retry-After."""
    server = start({"max_batch": 2}, max_queue=1)
    spoke = server.chat.admission.observe_itl
    monkeypatch.setattr(server.chat.admission, "observe_itl", lambda seconds, tokens: spoke(0.01 * tokens, tokens))
    jobs = [server.job(max_tokens=LONG) for _ in range(3)]
    until(lambda: server.chat.admission._itl_s)
    refused = server.post(COMPLETIONS, {"prompt": "#", "max_tokens": 1})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
    for job in jobs:
        server.http.delete(f"/v1/jobs/{job}")
    server.require_idle()
