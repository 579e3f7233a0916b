"""Embeddings and rankings over HTTP, beside a chat model: every API, what is refused, and processes that die."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from llm_worker_rbee import LLM
from llm_worker_rbee.config import PoolingOptions
from llm_worker_rbee.engine.pooling_engine import Floats, finish_embeddings, finish_scores
from llm_worker_rbee.load_pooling import LoadedPooling, load_pooling
from llm_worker_rbee.server import pooling as service_module
from llm_worker_rbee.server.pooling import shorten
from llm_worker_rbee.token_engine import pooling_supervisor
from tests.helpers.server import Server, until
from tests.helpers.tiny_pooling import MAX_LENGTH, NAMES, TASKS, WIDTH, WORDS, pooling_models, require_same

EMBEDDER, RANKER = NAMES["embedding"], NAMES["rerank"]
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"


class Both:
    """The server and the models that it serves, computed here."""

    def __init__(self, server: Server, folder: Any) -> None:
        self.server = server
        options = PoolingOptions(device="cpu", backend="reference")
        self.models: dict[str, LoadedPooling] = {
            name: load_pooling(replace(options, model=str(folder / name), task=TASKS[kind]))
            for kind, name in NAMES.items()
        }

    def embed(self, texts: list[str], dimensions: int | None = None) -> Floats:
        loaded = self.models[EMBEDDER]
        return finish_embeddings(np.concatenate([loaded.model.run([loaded.text.encode(text)]) for text in texts]),
                                 dimensions)  # fmt: skip

    def score(self, query: str, documents: list[str]) -> list[float]:
        loaded = self.models[RANKER]
        ids, types = loaded.text.encode_pairs(query, documents)
        return [float(one) for one in finish_scores(loaded.model.run(ids, types), "sigmoid")]


@pytest.fixture(scope="module")
def both(load: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("pooling")
    settings = {"embedding_model": EMBEDDER, "rerank_model": RANKER, "max_pooling_body": 8 << 20}
    with Server(load, pooling=pooling_models(folder), **settings) as running:
        yield Both(running.ready(), folder)


def values(reply: httpx.Response) -> Floats:
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data], np.float32)


def test_openai_client_gets_the_values_of_the_model(both: Both) -> None:
    texts = ["hello world", "a", "some longer text, with more words."]
    with both.server.openai() as client:
        found = client.embeddings.create(model=EMBEDDER, input=texts)  # base64, which the client decodes
        cut = client.embeddings.create(model=EMBEDDER, input=texts[0], dimensions=5, encoding_format="float")
    expected = both.embed(texts)
    require_same(np.array([one.embedding for one in found.data], np.float32), expected)
    require_same(np.array(cut.data[0].embedding, np.float32), both.embed(texts[:1], 5)[0])
    count = sum(len(both.models[EMBEDDER].text.encode(text)) for text in texts)
    assert (found.usage.prompt_tokens, found.usage.total_tokens, found.model) == (count, count, EMBEDDER)


@pytest.mark.parametrize("count", [1, 2, 33, 2048])
def test_any_number_of_inputs(both: Both, count: int) -> None:
    texts = [f"{i % 10}" if count > 100 else f"text {i}, {'x' * (i % 40)}" for i in range(count)]
    some = sorted({0, count // 2, count - 1})
    floats = values(both.server.post(EMBEDDINGS, {"input": texts}))
    assert floats.shape == (count, WIDTH)
    require_same(floats[some], both.embed([texts[i] for i in some]))
    packed = both.server.post(EMBEDDINGS, {"input": texts[:100], "encoding_format": "base64"}).json()["data"]
    rows = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in packed]
    np.testing.assert_array_equal(np.stack(rows), floats[:100])


def test_token_ids_are_taken_as_they_are(both: Both) -> None:
    text = both.models[EMBEDDER].text
    given = [text.encode("hello").tolist(), text.encode("world, again").tolist()]
    found = values(both.server.post(EMBEDDINGS, {"input": given}))
    require_same(found, both.embed(["hello", "world, again"]))
    require_same(values(both.server.post(EMBEDDINGS, {"input": given[0]})), found[:1])


LONG = "x " * (MAX_LENGTH + 1)
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (EMBEDDINGS, {}, 400, "input is required"),
    (EMBEDDINGS, {"input": []}, 400, "empty list"),
    (EMBEDDINGS, {"input": ""}, 400, "input is empty"),
    (EMBEDDINGS, {"input": [""]}, 400, r"input\[0\] is empty"),
    (EMBEDDINGS, {"input": ["a", [1]]}, 400, "mix"),
    (EMBEDDINGS, {"input": [[]]}, 400, r"input\[0\] is empty"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, 400, "2049 items: at most 2048"),
    (EMBEDDINGS, {"input": [[1], [len(WORDS)]]}, 400, f"input 1: .*0..{len(WORDS) - 1}"),
    (EMBEDDINGS, {"input": "a", "dimensions": WIDTH + 1}, 400, f"dimensions is {WIDTH + 1}"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, 400, "dimensions is 0"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
    (EMBEDDINGS, {"input": "a", "prompt_name": "zap"}, 400, "zap"),
    (EMBEDDINGS, {"input": "a", "zap": 1}, 400, "zap"),
    (EMBEDDINGS, {"input": [1], "prompt_name": "zap"}, 400, "zap"),
    (EMBEDDINGS, {"input": "a", "model": "zap"}, 404, f"use '{EMBEDDER}'"),
    (EMBEDDINGS, {"input": "a", "model": "tiny"}, 400, "kind 'chat'"),
    (EMBEDDINGS, {"input": "a", "model": RANKER}, 400, "rerank"),
    (EMBEDDINGS, {"input": ["a"] * 40 + [LONG]}, 400, f"input 40 has .* tokens, the model takes {MAX_LENGTH}"),
    (EMBEDDINGS, {"input": "x" * 100_000}, 400, "truncate"),
    (RERANK, {"query": "a", "documents": []}, 400, "documents has 0 items"),
    (RERANK, {"query": "", "documents": ["a"]}, 400, "query is empty"),
    (RERANK, {"query": "a", "documents": ["a", {"title": "b"}]}, 400, r"documents\[1\]"),
    (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n"),
    (RERANK, {"query": "a", "documents": ["b"] * 33 + [LONG]}, 400, "documents 33 has"),
    (RERANK, {"query": "a", "documents": ["a"], "model": EMBEDDER}, 400, "embedding"),
    (SCORE, {"text_1": "a"}, 400, "text_2"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "as many"),
    (SCORE, {"text_1": "a", "text_2": "b", "queries": "a", "documents": "b"}, 400, "text_1"),
    ("/api/embed", {"model": EMBEDDER, "input": 5}, 400, "input"),
    ("/api/embed", {"model": EMBEDDER, "input": LONG, "truncate": False}, 400, "truncate"),
    ("/v1/chat/completions", {"model": EMBEDDER, "messages": [{"role": "user", "content": "a"}]}, 400, "embedding"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_refusals_name_the_thing(both: Both, path: str, body: dict[str, Any], status: int, message: str) -> None:
    reply = both.server.post(path, body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert re.search(message, error if isinstance(error, str) else error["message"])


def test_long_inputs_are_cut_where_that_is_asked_for(both: Both) -> None:
    for more in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        reply = both.server.post(EMBEDDINGS, {"input": [LONG, "a " * 300_000], **more})
        assert reply.json()["usage"]["prompt_tokens"] == 2 * MAX_LENGTH
        require_same(values(reply)[0], both.embed(["x " * (MAX_LENGTH - 2)])[0])
    reply = both.server.post(RERANK, {"query": "a", "documents": [LONG], "truncate": True})
    assert reply.json()["usage"]["total_tokens"] == MAX_LENGTH


def test_large_bodies_have_a_limit_of_their_own(both: Both) -> None:
    body = {"input": ["a" * 50_000] * 100, "truncate": True}
    assert values(both.server.post(EMBEDDINGS, body)).shape == (100, WIDTH)
    assert both.server.post(EMBEDDINGS, {"input": ["a" * 90_000] * 100}).status_code == 413
    assert both.server.post("/v1/completions", {"prompt": "a" * (5 << 20)}).status_code == 413


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank"])
def test_rerank(both: Both, path: str) -> None:
    documents = ["one", "two", "three, and more", "four"]
    expected = both.score("the query", documents)
    order = sorted(range(4), key=lambda i: -expected[i])
    body = {"model": RANKER, "query": "the query", "documents": documents, "top_n": 3, "return_documents": True}
    reply = both.server.post(path, body).json()
    assert [one["index"] for one in reply["results"]] == order[:3]
    require_same([one["relevance_score"] for one in reply["results"]], [expected[i] for i in order[:3]])
    assert [one["document"]["text"] for one in reply["results"]] == [documents[i] for i in order[:3]]
    given: dict[str, Any] = {"query": "the query", "documents": [{"text": text} for text in documents]}
    whole = both.server.post(path, given).json()["results"]
    assert [one["index"] for one in whole] == order
    assert "document" not in whole[0]


def test_scores_of_a_ranker_and_cosines_of_an_embedder(both: Both) -> None:
    documents = ["one", "two"]
    for body in ({"text_1": "q", "text_2": documents}, {"queries": ["q"], "documents": documents}):
        reply = both.server.post(SCORE, body).json()
        require_same([one["score"] for one in reply["data"]], both.score("q", documents))
    pairs = both.server.post(SCORE, {"text_1": ["q", "r"], "text_2": documents}).json()["data"]
    require_same(pairs[1]["score"], both.score("r", documents)[1])
    rows = both.embed(["q", *documents])
    cosines = both.server.post(SCORE, {"model": EMBEDDER, "text_1": "q", "text_2": documents}).json()["data"]
    np.testing.assert_allclose([one["score"] for one in cosines], rows[1:] @ rows[0], rtol=1e-5)


def test_prompts_by_name_and_by_type(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    text = both.server.pooling[0].text
    monkeypatch.setattr(text, "pooling", replace(text.pooling, prompts={"passage": "p. ", "search_query": "q. "}))
    document, query = both.embed(["p. hello"]), both.embed(["q. hello"])
    for given, expected in (
        ({"prompt_name": "passage"}, document), ({"input_type": "passage"}, document),
        ({"input_type": "document"}, document), ({"input_type": "query"}, query), ({}, both.embed(["hello"])),
    ):  # fmt: skip
        found = values(both.server.post(EMBEDDINGS, {"input": "hello", **given}))
        require_same(found, expected)
    for name, value in (("prompt_name", "passage"), ("input_type", "query")):
        reply = both.server.post(EMBEDDINGS, {"input": [2, 5, 3], name: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        assert "put it into the ids" in reply.text


def test_query_times_documents_is_bounded(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_REQUEST_TOKENS", 1000)
    body = {"query": "a" * 200, "documents": ["b"] * 50}
    reply = both.server.post(RERANK, body)
    assert (reply.status_code, "about 2562 tokens" in reply.text) == (413, True)
    assert both.server.post(RERANK, {**body, "documents": ["b"] * 10, "truncate": True}).status_code == 200
    monkeypatch.undo()
    monkeypatch.setattr(pooling_supervisor, "MAX_DATA_BYTES", 100)
    reply = both.server.post(EMBEDDINGS, {"input": ["a" * 20, "b" * 20]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")


def test_langchain(both: Both) -> None:
    client = OpenAIEmbeddings(
        model=EMBEDDER, base_url=f"{both.server.url}/v1", api_key=SecretStr("none"), check_embedding_ctx_length=False
    )
    found = np.array(client.embed_documents(["hello", "world"]), np.float32)
    require_same(found, both.embed(["hello", "world"]))
    require_same(np.array(client.embed_query("hello"), np.float32), found[0])


def test_ollama_names_all_models(both: Both) -> None:
    for path in ("/api/tags", "/api/ps"):
        listed = both.server.http.get(path).json()["models"]
        assert [one["name"] for one in listed] == [f"{name}:latest" for name in ("tiny", EMBEDDER, RANKER)]
        assert listed[1]["details"]["family"] == "bert"
    shown = both.server.post("/api/show", {"model": EMBEDDER + ":latest"}).json()
    assert (shown["capabilities"], shown["model_info"]["bert.embedding_length"]) == (["embedding"], WIDTH)


@pytest.mark.parametrize("tag", ["", ":latest"])
def test_every_route_takes_the_name_with_and_without_its_tag(both: Both, tag: str) -> None:
    texts = {"text_1": "a", "text_2": "b"}
    for path, name, body in (
        (EMBEDDINGS, EMBEDDER, {"input": "a"}), (RERANK, RANKER, {"query": "a", "documents": ["b"]}),
        (SCORE, RANKER, texts), (SCORE, EMBEDDER, texts), ("/api/embed", EMBEDDER, {"input": "a"}),
        ("/api/embeddings", EMBEDDER, {"prompt": "a"}), ("/api/show", RANKER, {}),
    ):  # fmt: skip
        assert both.server.post(path, {**body, "model": name + tag}).status_code == 200, path
    assert both.server.http.get(f"/v1/models/{EMBEDDER}{tag}").status_code == 200
    assert both.server.post(EMBEDDINGS, {"input": "a", "model": f"tiny{tag}"}).status_code == 400


def test_ollama(both: Both) -> None:
    reply = both.server.post("/api/embed", {"model": EMBEDDER + ":latest", "input": ["hello", LONG], "dimensions": 7})
    found = np.array(reply.json()["embeddings"], np.float32)
    require_same(found[0], both.embed(["hello"], 7)[0])
    assert found.shape == (2, 7)
    assert reply.json()["prompt_eval_count"] > MAX_LENGTH
    assert both.server.post("/api/embed", {"model": EMBEDDER, "input": ""}).json()["embeddings"] == []
    one = both.server.post("/api/embeddings", {"model": EMBEDDER, "prompt": "hello", "keep_alive": "5m"})
    require_same(np.array(one.json()["embedding"], np.float32), both.embed(["hello"])[0])
    assert one.headers["x-ignored-fields"] == "keep_alive"
    assert both.server.post("/api/embeddings", {"model": EMBEDDER, "prompt": ""}).json() == {"embedding": []}


def test_models_are_told_apart(both: Both) -> None:
    server = both.server
    listed = {one["id"]: one["kind"] for one in server.http.get("/v1/models").json()["data"]}
    assert listed == {"tiny": "chat", EMBEDDER: "embedding", RANKER: "rerank"}
    assert server.http.get(f"/v1/models/{EMBEDDER}").json()["dimensions"] == WIDTH
    assert [one["status"] for one in server.http.get("/health").json()["pooling"]] == ["healthy"] * 2
    assert {one["kind"] for one in server.http.get("/info").json()["pooling"]} == {"embedding", "rerank"}
    metrics = server.http.get("/metrics").text
    assert f'llm_worker_pooling_sequences_total{{kind="embedding",model="{EMBEDDER}"}}' in metrics
    assert f'llm_worker_pooling_requests_total{{kind="rerank",model="{RANKER}"}}' in metrics


def test_worker_without_pooling_models_says_how_to_get_them(server: Server) -> None:
    for path, body, option in (
        (EMBEDDINGS, {"input": "a"}, "--embedding-model"),
        (RERANK, {"query": "a", "documents": ["b"]}, "--rerank-model"),
        ("/api/embed", {"input": "a"}, "--embedding-model"),
    ):
        reply = server.post(path, body)
        assert (reply.status_code, option in reply.text) == (404, True)
    body = {"input": "a" * server.worker.settings.max_body}
    assert server.post(EMBEDDINGS, body).status_code == 413


def test_route_without_its_model_says_so_while_another_loads(load: Callable[..., LLM]) -> None:
    may_load = threading.Event()

    def slow() -> LLM:
        may_load.wait(60)
        return load()

    with Server(slow) as running:
        reply = running.post(RERANK, {"query": "a", "documents": ["b"]})
        may_load.set()
        assert (reply.status_code, "--rerank-model" in reply.text) == (404, True)
        running.ready()


def test_chat_is_served_while_pooling_models_load(
    load: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their routes reply 503 with a time to retry; `/health` is degraded, and the log says why."""
    models = pooling_models(tmp_path)
    pids = [service.engine._child.process.pid for service in models.values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    settings = {"embedding_model": EMBEDDER, "rerank_model": RANKER}
    with caplog.at_level("INFO"), Server(load, pooling=models, **settings) as running:
        until(lambda: running.worker.state == "ready")
        running.require_alive()
        health = running.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert [one["status"] for one in health.json()["pooling"]] == ["loading"] * 2
        assert f"the model {EMBEDDER} is still loading" in caplog.text
        for path, body in (
            (EMBEDDINGS, {"input": "a"}), (RERANK, {"query": "a", "documents": ["b"]}),
            (SCORE, {"text_1": "a", "text_2": "b", "model": EMBEDDER}), ("/api/embed", {"input": ""}),
            ("/api/show", {"model": EMBEDDER}),
        ):  # fmt: skip
            reply = running.post(path, body)
            assert (reply.status_code, "is loading" in reply.text) == (503, True)
            assert int(reply.headers["retry-after"]) >= 1
        assert running.post(EMBEDDINGS, {"input": "a"}).json()["error"]["code"] == "MODEL_LOADING"
        assert running.http.get(f"/v1/models/{EMBEDDER}").status_code == 503
        listed = running.http.get("/v1/models").json()["data"]
        assert [one["status"]["value"] for one in listed] == ["loaded", "loading", "loading"]
        for path in ("/info", "/metrics", "/api/tags", "/api/ps"):
            assert running.http.get(path).status_code == 200
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        until(lambda: running.http.get("/health").json()["status"] == "healthy")
        assert values(running.post(EMBEDDINGS, {"input": "a"})).shape == (1, WIDTH)
        assert f"the model {EMBEDDER} is loaded" in caplog.text


def test_chat_and_embedding_model_of_one_name(load: Callable[..., LLM], tmp_path: Path) -> None:
    """As files of two folders may have: the route says which is meant."""
    with Server(load, pooling=pooling_models(tmp_path, "tiny"), embedding_model="tiny") as running:
        running.ready()
        assert values(running.post(EMBEDDINGS, {"input": "a", "model": "tiny"})).shape == (1, WIDTH)
        reply = running.post("/v1/completions", {"prompt": ">", "model": "tiny", "max_tokens": 1})
        assert reply.status_code == 200


def test_pooling_model_that_fails_after_chat_is_ready_fails_the_worker(
    load: Callable[..., LLM], tmp_path: Path
) -> None:
    models = pooling_models(tmp_path)
    pid = models[NAMES["embedding"]].engine._child.process.pid
    os.kill(pid, signal.SIGSTOP)
    with Server(load, pooling=models) as running:
        until(lambda: running.worker.state == "ready")
        running.require_alive()
        os.kill(pid, signal.SIGKILL)
        until(lambda: running.worker.state == "failed")
        assert "while it loaded the model" in str(running.worker.failure)
        assert running.http.get("/health").json()["status"] == "failed"


def test_request_goes_on_in_the_next_process(both: Both) -> None:
    engine = both.server.pooling[0].engine
    texts = [f"text {i} {'x' * 40}" for i in range(400)]
    before, restarts = engine.stats.num_steps, engine.num_restarts

    def kill() -> None:
        until(lambda: engine.stats.num_steps > before)
        os.kill(engine._child.process.pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    found = values(both.server.post(EMBEDDINGS, {"input": texts}))
    killing.join()
    assert engine.num_restarts == restarts + 1
    require_same(found[[0, 399]], both.embed([texts[0], texts[399]]))


def test_disconnect_cancels(both: Both) -> None:
    service = both.server.pooling[0]
    body = json.dumps({"input": [f"text {i} {'x' * 50}" for i in range(2048)]})
    before = service.engine.stats.num_steps
    with httpx.Client(base_url=both.server.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post(EMBEDDINGS, content=body, headers={"content-type": "application/json"}, timeout=0.3)
    until(lambda: service.admission.num_reservations == 0 and service.engine.num_requests == 0)
    assert service.engine.stats.num_steps - before < 2048 * 60 // 1024
    assert service.admission.load == (0, 0, 0)


def test_full_queue_is_refused_with_a_time_to_retry(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_QUEUED_SEQUENCES", 100)
    service = both.server.pooling[0]
    slow = threading.Thread(target=lambda: both.server.post(EMBEDDINGS, {"input": ["some words " * 5] * 500}))
    slow.start()
    until(lambda: service.admission.num_reservations == 1)
    reply = both.server.post(EMBEDDINGS, {"input": "a"})
    slow.join()
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "QUEUE_FULL")
    assert int(reply.headers["retry-after"]) >= 1
    assert values(both.server.post(EMBEDDINGS, {"input": ["a"] * 200})).shape == (200, WIDTH)  # alone it enters


def test_numbers_have_few_digits_and_no_error() -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((50, 100)) * 10.0 ** rng.integers(-30, 30, (50, 100))).astype(np.float32)
    rows[0, :4] = 0.0, -0.0, 1.0, 3.4e38
    short = shorten(rows)
    np.testing.assert_array_equal(short.astype(np.float32), rows)
    usual = shorten(rng.standard_normal((50, 100)).astype(np.float32))
    assert max(len(repr(abs(one))) for one in usual.ravel().tolist() if abs(one) > 1e-3) <= 14
