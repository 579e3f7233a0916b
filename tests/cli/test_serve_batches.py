"""Batches of a `serve` that is killed, and of `run-batch`: every line has one result, whatever dies when."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import with_kernels
from tests.helpers.process import spawn
from tests.helpers.serve_process import LIMIT_S, ServeProcess, until
from tests.helpers.server import SAID, write_model
from tests.helpers.tiny_pooling import write_bert
from tests.helpers.token_engine_runs import POISON
from tests.server.test_batches import CHATS, COMPLETIONS, line, results

from .conftest import Run

ENDED = ("completed", "failed", "expired", "cancelled")
EMBEDDINGS = "/v1/embeddings"
NUM_LINES = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kernels(write_model(tmp_path_factory.mktemp("batches") / "tiny.gguf"))


def client_of(serve: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=20)


def lines() -> Iterator[str]:
    """Yield lines whose answers take some steps, each with another prompt."""
    for i in range(NUM_LINES):
        yield line(f"id-{i}", prompt=f"{i}?", max_tokens=120, seed=i, temperature=1.0)


def submit(client: openai.OpenAI) -> str:
    file = client.files.create(file=("in.jsonl", "\n".join(lines()).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h").id


def require_once(client: openai.OpenAI, batch: Any) -> None:
    assert batch.request_counts.model_dump() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    ids = [one["custom_id"] for one in results(client, batch.output_file_id)]
    assert sorted(ids) == sorted(f"id-{i}" for i in range(NUM_LINES))


@pytest.mark.parametrize("seed", range(3))
def test_worker_is_killed_at_any_time(model: Path, tmp_path: Path, seed: int) -> None:
    """While lines are parsed, answered or written, and while the files of results are made."""
    rng, kills, batch_id = random.Random(seed), 0, ""
    args = ("-m", model, "--files-dir", tmp_path / "files")
    while True:
        serve = ServeProcess(*args)
        with client_of(serve) as client:
            batch_id = batch_id or submit(client)
            die_at = time.monotonic() + rng.choice((0.0, 0.05, 0.3, 1.0, 2.0, 3.0)) if kills < 5 else None
            while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
                if die_at is not None and time.monotonic() >= die_at:
                    break
                time.sleep(0.02)
            if batch.status in ENDED:
                assert batch.status == "completed"
                require_once(client, batch)
                serve.close()
                return
        serve.close()
        kills += 1


def test_engine_is_killed_and_worker_restarted_in_a_batch(model: Path, tmp_path: Path) -> None:
    args = ("-m", model, "--files-dir", tmp_path / "files")
    serve = ServeProcess(*args).ready()
    with client_of(serve) as client:
        batch_id = submit(client)
        for kill in range(3):
            while client.batches.retrieve(batch_id).request_counts.completed < 10 * kill + 1:
                time.sleep(0.01)
            for pid in serve.engines():
                os.kill(pid, signal.SIGKILL)
    serve.process.terminate()
    assert serve.process.wait(LIMIT_S) == 0
    serve.close()
    serve = ServeProcess(*args).ready()
    with client_of(serve) as client:
        end = time.monotonic() + LIMIT_S
        while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
            assert time.monotonic() < end
            time.sleep(0.05)
        require_once(client, batch)
    serve.close()


def test_line_that_kills_the_engine_ends_with_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(POISON)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    serve = ServeProcess("-m", model, "--files-dir", tmp_path / "files", PYTHONPATH=path).ready()
    with client_of(serve) as client:
        rows = [line(f"{seed}", prompt="?", max_tokens=40, seed=seed, temperature=1.0) for seed in (1, 666, 2)]
        file = client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status in ENDED)
        batch = client.batches.retrieve(batch.id)
        assert sorted(row["custom_id"] for row in results(client, batch.output_file_id)) == ["1", "2"]
        (error,) = results(client, batch.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("666", 500)
        assert "not tried again" in error["response"]["body"]["error"]["message"]
        assert serve.metric("engine_restarts_total") <= 4
    serve.close()


def test_run_batch(cli: Run, model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = line("chat", CHATS, messages=[{"role": "user", "content": "#"}], max_tokens=3, temperature=0)
    source.write_text("\n".join([line("a"), "{", chat, line("a")]))
    done = cli("run-batch", source, target, "-m", model)
    assert done.returncode == 0, done.stderr
    assert b"4 lines in" in done.stderr
    printed = {one["custom_id"]: one for one in map(json.loads, target.read_text().splitlines()) if one["custom_id"]}
    assert printed["a"]["response"]["body"]["choices"][0]["text"] == SAID
    assert printed["chat"]["response"]["status_code"] == 200
    assert len(target.read_text().splitlines()) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    again = cli("run-batch", source, target, "-m", model)
    assert again.returncode == 1
    assert b"exists already" in again.stderr


def spawn_batch(*args: str | Path) -> subprocess.Popen[bytes]:
    source, target, model = args
    line = [sys.executable, "-m", "llm_worker_rbee", "run-batch", source, target, "-m", model]
    return spawn(line, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", ["ctrl-c", "killed"])
def test_run_batch_goes_on(cli: Run, model: Path, tmp_path: Path, kind: str) -> None:
    """After its results were cut off in the middle of one; not with another input."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines()))
    assert cli("run-batch", source, tmp_path / "whole.jsonl", "-m", model, "-q").returncode == 0
    bad = tmp_path / "other.jsonl"
    bad.write_text("\n")
    empty = cli("run-batch", bad, target, "-m", model)
    assert empty.returncode == 1
    assert b"no lines" in empty.stderr
    with spawn_batch(source, target, model) as process:
        folder = tmp_path / "out.jsonl.batch"
        until(lambda: any(path.read_bytes().count(b"\n") > 40 for path in folder.glob("batch_*.journal")))
        process.send_signal(signal.SIGINT if kind == "ctrl-c" else signal.SIGKILL)
        assert process.wait(LIMIT_S) == (130 if kind == "ctrl-c" else -signal.SIGKILL)
    (journal,) = folder.glob("batch_*.journal")
    with journal.open("r+b") as file:
        file.truncate(journal.stat().st_size - 3)
    source.write_text(text := source.read_text() + "\n" + line("one more"))
    refused = cli("run-batch", source, target, "-m", model)
    assert b"another input" in refused.stderr
    source.write_text(text.rpartition("\n")[0])
    assert cli("run-batch", source, target, "-m", model, "-q").returncode == 0
    whole, own = (sorted(json.loads(text)["custom_id"] for text in path.read_text().splitlines()) for path in
                  (tmp_path / "whole.jsonl", target))  # fmt: skip
    assert whole == own


@pytest.fixture
def models(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.gguf").write_bytes(model.read_bytes())
    write_bert(folder / "embedder")
    return folder


def pool_of(models: Path) -> ServeProcess:
    limits = ("--max-models", "1", "--kv-memory", "16M")
    return ServeProcess("--models-dir", models, "--files-dir", models / "files", *limits).ready()


def run(client: openai.OpenAI, endpoint: Any, *rows: str) -> list[dict[str, Any]]:
    """The results of a batch."""
    file = client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts.model_dump() == {"total": len(rows), "completed": len(rows), "failed": 0}
    return results(client, batch.output_file_id)


def loads(serve: ServeProcess) -> dict[str, float]:
    families = text_string_to_metric_families(serve.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {one.labels["model"]: one.value for one in samples if one.name == "llm_worker_model_loads_total"}


def test_lines_of_models_that_take_turns_are_grouped(models: Path) -> None:
    serve = pool_of(models)
    with client_of(serve) as client:
        rows = [line(f"id-{i}", model=("one", "two")[i % 2], temperature=0) for i in range(20)]
        printed = run(client, COMPLETIONS, *rows)
        assert {row["response"]["body"]["choices"][0]["text"] for row in printed} == {SAID}
        assert {row["custom_id"] for row in printed} == {f"id-{i}" for i in range(20)}
        assert loads(serve) == {"one": 1, "two": 1, "embedder": 0}
        vectors = run(client, EMBEDDINGS, *(line(f"{i}", EMBEDDINGS, model="embedder", input=f"{i}") for i in range(9)))
        one = client.embeddings.create(model="embedder", input="7", encoding_format="float").data[0].embedding
        (same,) = (row["response"]["body"]["data"][0]["embedding"] for row in vectors if row["custom_id"] == "7")
        assert same == pytest.approx(one, abs=1e-5)
    serve.close()


def test_lines_of_a_model_that_cannot_be_loaded_get_its_error(models: Path) -> None:
    """And the lines of another model are answered."""
    whole = (models / "two.gguf").read_bytes()
    serve = pool_of(models)
    (models / "two.gguf").write_bytes(whole[: len(whole) * 2 // 3])
    with client_of(serve) as client:
        rows = [line(f"id-{i}", model=("one", "two")[i % 2], temperature=0) for i in range(6)]
        file = client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status in ENDED)
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 3, "failed": 3}
        assert {row["custom_id"] for row in results(client, batch.output_file_id)} == {"id-0", "id-2", "id-4"}
        errors = [row["response"]["body"]["error"]["message"] for row in results(client, batch.error_file_id)]
        assert len(errors) == 3
        assert all("two" in error for error in errors), errors
    serve.close()


def test_request_of_another_model_goes_before_lines(models: Path) -> None:
    """It needs the memory of their model: they are given up, and answered after it."""
    serve = pool_of(models)
    with client_of(serve) as client:
        rows = [line(f"id-{i}", prompt="#", max_tokens=30_000, model="one") for i in range(4)]
        file = client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        until(lambda: "llm_worker_batch_lines_running 4.0" in serve.http.get("/metrics").text and loads(serve)["one"])
        assert client.completions.create(model="two", prompt=">", max_tokens=20, temperature=0).choices[0].text == SAID
        assert client.batches.retrieve(batch.id).status == "in_progress"
        until(lambda: loads(serve)["one"] == 2)
        assert client.batches.cancel(batch.id).status == "cancelling"
        until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
    serve.close()


def test_run_batch_of_embeddings(cli: Run, model: Path, models: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([line("text"), *(line(f"{i}", EMBEDDINGS, input=[f"{i}", "b"]) for i in range(5))]))
    with source.open("a") as file:
        file.write("\n" + line("long", EMBEDDINGS, input=["b"] * 2_000))
    done = cli("run-batch", source, target, "-m", model, "--embedding-model", models / "embedder")
    assert done.returncode == 0, done.stderr
    printed = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, target.read_text().splitlines())}
    assert {name: len(body.get("data", ())) for name, body in printed.items()} == {
        **{"text": 0, "long": 2_000},
        **dict.fromkeys("01234", 2),
    }
