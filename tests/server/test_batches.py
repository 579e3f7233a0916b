"""Files and batches through the real server, with the clients of OpenAI and Anthropic unchanged."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.helpers.server import CHAT, SAID, Server
from tests.server.conftest import Start

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT_S = 60


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> str:
    defaults: dict[str, Any] = {"prompt": ">", "max_tokens": 20} if url == COMPLETIONS else {}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {**defaults, **body}})


@pytest.fixture
def serving(start: Start, tmp_path: Path) -> Server:
    return start(files_dir=tmp_path / "files")


@pytest.fixture
def client(serving: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def finish(client: openai.OpenAI, batch_id: str) -> Any:
    end = time.monotonic() + LIMIT_S
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    return batch


def run(client: openai.OpenAI, lines: list[str], endpoint: Any = COMPLETIONS, **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, **{"completion_window": "24h", **options})
    assert batch.status == "validating"
    return finish(client, batch.id)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_batch_of_completions(client: openai.OpenAI) -> None:
    lines = [line(f"id-{i}") for i in range(30)]
    batch = run(client, lines, metadata={"run": "7"})
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"run": "7"}, None)
    assert batch.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    assert batch.error_file_id is None
    output = results(client, batch.output_file_id)
    assert sorted(one["custom_id"] for one in output) == sorted(f"id-{i}" for i in range(30))
    for one in output:
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        assert one["response"]["body"]["choices"][0]["text"] == SAID
    assert [listed.id for listed in client.batches.list()] == [batch.id]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [(CHATS, {"messages": CHAT, "max_tokens": 4}), ("/v1/responses", {"input": "#", "max_output_tokens": 4})],
)
def test_batch_gives_what_a_request_gives(client: openai.OpenAI, serving: Server, endpoint: str, body: Any) -> None:
    batch = run(client, [line("a", endpoint, **body, temperature=0)], endpoint)
    (result,) = results(client, batch.output_file_id)
    direct = serving.post(endpoint, {**body, "temperature": 0}).json()
    own = result["response"]["body"]
    assert own.keys() == direct.keys()
    assert own.get("choices") == direct.get("choices")


def test_bad_lines_are_errors_of_their_line(client: openai.OpenAI) -> None:
    lines = [
        line("good"), "{", "[]", '{"custom_id":1}', line("other", CHATS), line("good"), "", line("stream", stream=True),
        line("bad", max_tokens=-7), line("model", model="none"), "[" * 100_000, '{"a":"\\ud800"}', line("ä" * 513),
        json.dumps({"custom_id": "get", "method": "GET", "url": COMPLETIONS, "body": {}}),
        json.dumps({"custom_id": "list", "method": "POST", "url": COMPLETIONS, "body": []}),
    ]  # fmt: skip
    batch = run(client, lines)
    assert batch.request_counts.model_dump() == {"total": 14, "completed": 1, "failed": 13}
    assert [one["custom_id"] for one in results(client, batch.output_file_id)] == ["good"]
    errors = results(client, batch.error_file_id)
    by_line = {one["error"]["message"].split(":")[0]: one for one in errors if one["error"]}
    assert sorted(by_line) == sorted(f"line {i}" for i in (2, 3, 4, 5, 6, 11, 12, 13, 14, 15))
    assert "line 1" in by_line["line 6"]["error"]["message"]
    assert by_line["line 6"]["custom_id"] is None, "every custom_id once"
    answered = {one["custom_id"]: one["response"] for one in errors if one["response"]}
    assert {name: one["status_code"] for name, one in answered.items()} == {"stream": 400, "bad": 400, "model": 404}
    assert answered["bad"]["body"]["error"]["param"] == "max_tokens"


HOSTILE = {
    "NUL": b"\x00" * 99,
    "NUL in a text": line("nul", prompt="a\x00b").replace("\\u0000", "\x00").encode(),
    "not UTF-8": line("latin").encode().replace(b">", b"\xe4"),
    "not UTF-8, an id": b'{"custom_id":"\xff","method":"POST","url":"/v1/completions","body":{}}',
    "UTF-16": line("wide").encode("utf-16")[2:].replace(b"\n", b"?"),
    "cut off": line("cut").encode()[:-9],
    "huge": line("huge", prompt="x" * 5_000_000).encode(),
    "huge and no JSON": b"y" * 9_000_000,
    "nested": b'{"custom_id":"nested","method":"POST","url":"/v1/completions","body":{"a":' + b"[" * 90_000,
    "nested, an id": b'{"custom_id":' + b'{"a":' * 50_000,
    "an id that is a number": line(7).encode(),
    "two values": line("two").encode() + line("values").encode(),
    "a body that is text": b'{"custom_id":"t","method":"POST","url":"/v1/completions","body":"{}"}',
    "an unknown field": line("field").encode()[:-1] + b',"priority":-5}',
    "a route of another kind": line("files", "/v1/files").encode(),
}


def test_hostile_lines_are_errors_of_their_line(client: openai.OpenAI) -> None:
    rows = [line("first").encode(), *HOSTILE.values(), b"   ", b"\r", line("last").encode() + b"\r", b""]
    file = client.files.create(file=("in.jsonl", b"\n".join(rows)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    batch = finish(client, batch.id)
    counts = {"total": 2 + len(HOSTILE), "completed": 2, "failed": len(HOSTILE)}
    assert (batch.status, batch.request_counts.model_dump()) == ("completed", counts)
    assert {one["custom_id"] for one in results(client, batch.output_file_id)} == {"first", "last"}
    errors = results(client, batch.error_file_id)
    texts = [one["error"]["message"] for one in errors if one["error"]]
    refused = {one["custom_id"]: one["response"]["status_code"] for one in errors if one["response"]}
    numbers = {f"line {i}" for i, name in enumerate(HOSTILE, 2) if name != "not UTF-8"}
    assert {text.split(":")[0] for text in texts} == numbers
    assert refused == {"latin": 400}, "the body is left to the parser of its route"


@pytest.mark.parametrize(("num_lines", "blank"), [(50_001, 0), (1, 100_001)])
def test_file_of_too_many_lines_fails_the_batch(client: openai.OpenAI, num_lines: int, blank: int) -> None:
    batch = run(client, [line("a")] * num_lines + [""] * blank)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "too_many_lines")
    assert batch.output_file_id is None


def test_cancellation_at_any_time(client: openai.OpenAI, serving: Server) -> None:
    """While lines are read, answered, written, and after the end: one result for each line, and one end."""
    rng = random.Random(5)
    rows = [line(f"id-{i}", max_tokens=rng.choice((1, 20))) for i in range(12)]
    file = client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
    for _ in range(25):
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        time.sleep(rng.choice((0.0, 0.005, 0.02, 0.05, 0.1, 0.2)))
        with suppress(openai.ConflictError):
            client.batches.cancel(batch.id)
        ended = finish(client, batch.id)
        printed = results(client, ended.output_file_id) + results(client, ended.error_file_id)
        assert sorted(one["custom_id"] for one in printed) == sorted(f"id-{i}" for i in range(12))
        counts = ended.request_counts
        assert (counts.completed + counts.failed, counts.total) == (12, 12)
        assert (counts.failed == 0) or ended.status == "cancelled"
    serving.require_idle()


def test_batch_whose_input_is_gone_fails(client: openai.OpenAI, serving: Server) -> None:
    file = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    (serving.worker.settings.files_dir / file.id).unlink()
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    ended = finish(client, batch.id)
    assert (ended.status, ended.errors.data[0].code) == ("failed", "no_input")


def test_empty_file_fails_the_batch(client: openai.OpenAI) -> None:
    batch = run(client, ["", ""])
    assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")


def test_cancelled_batch_keeps_its_results(client: openai.OpenAI, serving: Server) -> None:
    lines = [line("short"), *(line(f"long-{i}", prompt="#", max_tokens=30_000) for i in range(5))]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    while client.batches.retrieve(batch.id).request_counts.completed < 1:
        time.sleep(0.02)
    with pytest.raises(openai.ConflictError):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = finish(client, batch.id)
    assert (ended.status, ended.request_counts.completed) == ("cancelled", 1)
    assert [one["custom_id"] for one in results(client, ended.output_file_id)] == ["short"]
    codes = {one["custom_id"]: one["error"]["code"] for one in results(client, ended.error_file_id)}
    assert codes == {f"long-{i}": "batch_cancelled" for i in range(5)}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    serving.require_idle()


def test_batch_expires(client: openai.OpenAI) -> None:
    batch = run(client, [line("short"), line("long", prompt="#", max_tokens=60_000)], completion_window="2s")
    assert batch.status == "expired"
    (error,) = results(client, batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("long", "batch_expired")


def test_files(client: openai.OpenAI, serving: Server) -> None:
    content = bytes(range(256)) * 9000 + b"\r\n--not the boundary\r\n"
    file = client.files.create(file=("a \xe4.jsonl", content), purpose="batch")
    assert (file.bytes, file.purpose, file.status) == (len(content), "batch", "processed")
    assert client.files.content(file.id).content == content
    assert [one.id for one in client.files.list()] == [file.id]
    assert client.files.retrieve(file.id).created_at == file.created_at
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    for bad in ("../../etc/passwd", "file-0", "file-" + "0" * 32):
        assert serving.http.get(f"/v1/files/{bad}").status_code == 404


FORM = "multipart/form-data; boundary=x"
FIELD = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\ndata\r\n'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"), ("multipart/form-data", FIELD + FILE + b"--x--"), (FORM, b""), (FORM, b"--x--"),
        (FORM, FIELD + FILE), (FORM, FIELD + b"--x--"), (FORM, FILE + b"--x--"), (FORM, FIELD + FILE + FILE + b"--x--"),
        (FORM, b"y" * 100_000), (FORM, b"--x\r\n" + b"h" * 100_000), (FORM, b"--x\r\n\r\n\r\n--x--"),
        (FORM, FIELD.replace(b"batch", b"z" * 100_000) + FILE + b"--x--"), (FORM, FIELD * 100 + FILE + b"--x--"),
        (FORM, FIELD.replace(b"batch", b"vision") + FILE + b"--x--"),
        (FORM, FIELD.replace(b"purpose", b"zap") + FIELD + FILE + b"--x--"),
    ],
)  # fmt: skip
def test_forms_that_are_wrong(serving: Server, content_type: str, body: bytes) -> None:
    for chunk in (1 << 20, 7):
        parts = (body[at : at + chunk] for at in range(0, min(len(body), 5000 * chunk), chunk))
        reply = serving.http.post("/v1/files", content=parts, headers={"content-type": content_type})
        assert reply.status_code == 400, reply.text
    assert not serving.worker.batches.store.files
    assert not [path for path in serving.worker.settings.files_dir.iterdir() if path.suffix != ".journal"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
def test_form_in_chunks_of_any_size(serving: Server, chunk: int) -> None:
    body = b"preamble\r\n" + FILE.replace(b"data", b"\r\n--\r\n--y\r\n-x-") + FIELD + b"--x--\r\nepilogue"
    parts = (body[at : at + chunk] for at in range(0, len(body), chunk))
    reply = serving.http.post("/v1/files", content=parts, headers={"content-type": FORM})
    assert reply.status_code == 200, reply.text
    assert serving.http.get(f"/v1/files/{reply.json()['id']}/content").content == b"\r\n--\r\n--y\r\n-x-"


def test_page_of_another_site_stores_nothing(serving: Server) -> None:
    headers = {"content-type": FORM, "origin": "https://elsewhere.example"}
    assert serving.http.post("/v1/files", content=FIELD + FILE + b"--x--", headers=headers).status_code == 403


def test_routes_say_that_they_are_off(server: Server) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/files/file-1/content"):
        reply = server.http.get(path)
        assert reply.status_code == 404
        assert "--files-dir" in reply.text
    assert server.http.post("/v1/files", content=b"x", headers={"content-type": FORM}).status_code == 404


def test_limit_of_the_folder(start: Start, tmp_path: Path) -> None:
    serving = start(files_dir=tmp_path / "files", files_bytes=10_000)
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        client.files.create(file=("a", b"x" * 9_000), purpose="batch")
        with pytest.raises(openai.InternalServerError) as caught:
            client.files.create(file=("b", b"x" * 2_000), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (507, "INSUFFICIENT_STORAGE")
    assert len(serving.worker.batches.store.files) == 1


def test_batches_of_messages(serving: Server) -> None:
    with anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "#"}]
        good = {"model": "tiny", "max_tokens": 4, "messages": messages}
        batch = client.messages.batches.create(
            requests=[
                {"custom_id": "good", "params": good},
                {"custom_id": "bad", "params": {**good, "max_tokens": -1}},
                {"custom_id": "model", "params": {**good, "model": "none"}},
            ]
        )  # type: ignore[typeddict-item]
        end = time.monotonic() + LIMIT_S
        while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
            assert time.monotonic() < end
            time.sleep(0.05)
        counts = {"canceled": 0, "errored": 2, "expired": 0, "processing": 0, "succeeded": 1}
        assert batch.request_counts.model_dump() == counts
        by_id = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
        assert {name: one.type for name, one in by_id.items()} == {
            "good": "succeeded",
            "bad": "errored",
            "model": "errored",
        }
        assert by_id["good"].message.usage.output_tokens == 4
        assert by_id["model"].error.error.type == "not_found_error"
        assert [one.id for one in client.messages.batches.list()] == [batch.id]
        assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
        assert not serving.worker.batches.store.files
        long = {**good, "max_tokens": 30_000}
        batch = client.messages.batches.create(requests=[{"custom_id": "long", "params": long}])
        client.messages.batches.cancel(batch.id)
        while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
            time.sleep(0.05)
        assert batch.request_counts.canceled == 1
        assert [one.result.type for one in client.messages.batches.results(batch.id)] == ["canceled"]
    serving.require_idle()


@pytest.mark.parametrize(
    "body",
    [
        "[]", "{}", "{", '{"requests":[]}', '{"requests":[{"custom_id":"a"}]}', '{"requests":' + "[" * 90_000,
        '{"requests":[{"custom_id":"ä","params":{}}]}',
        '{"requests":[{"custom_id":"a","params":{}},{"custom_id":"a","params":{}}]}',
    ],
)  # fmt: skip
def test_batches_of_messages_that_are_wrong(serving: Server, body: str) -> None:
    reply = serving.http.post("/v1/messages/batches", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not serving.worker.batches.batches


def test_metrics_and_info(client: openai.OpenAI, serving: Server) -> None:
    run(client, [line("a"), line("b", max_tokens=-7)])
    info = serving.http.get("/info").json()["batches"]
    assert (info["open"], info["problem"], info["files"]) == ([], None, 3)
    metrics = serving.http.get("/metrics").text
    assert "llm_worker_batch_lines_finished_total 2.0" in metrics
    assert "llm_worker_batch_lines_failed_total 1.0" in metrics


def test_clients_pass_a_full_batch(client: openai.OpenAI, serving: Server) -> None:
    """Neither the queue nor the order of clients has lines of a batch."""
    lines = [line(f"{i}", prompt="#", max_tokens=20_000) for i in range(100)]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    while not serving.worker.batches.num_running:
        time.sleep(0.02)
    assert client.completions.create(model="tiny", prompt=">", max_tokens=20).choices[0].text == SAID
    assert serving.http.get("/health").json()["waiting"] == 0
    client.batches.cancel(batch.id)
    assert finish(client, batch.id).status == "cancelled"


def test_raw_http_of_a_batch(serving: Server) -> None:
    for query in ("limit=0", "limit=000000001" + "9" * 5_000, "limit=x", "before_id=x", "limit=1&limit=-1"):
        assert serving.http.get(f"/v1/batches?{query}").status_code == 400, query
    assert serving.http.get("/v1/files?after=file-0").status_code == 404
    form = FIELD + FIELD.replace(b"purpose", b"expires_after[seconds]").replace(b"batch", b"7200" + b"9" * 4_000) + FILE
    assert serving.http.post("/v1/files", content=form + b"--x--", headers={"content-type": FORM}).status_code == 400
    for body in ({}, {"input_file_id": "x", "endpoint": "/v1/zap"}, {"input_file_id": "x", "endpoint": CHATS, "a": 1}):
        assert serving.post("/v1/batches", body).status_code == 400
    body = {"input_file_id": "file-" + "0" * 32, "endpoint": CHATS, "completion_window": "24h"}
    assert serving.post("/v1/batches", body).status_code == 404
    assert serving.post("/v1/batches", {**body, "completion_window": "900h"}).status_code == 400
    assert isinstance(serving.http, httpx.Client)
