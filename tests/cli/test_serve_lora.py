"""LoRA adapters over HTTP: names, scales, loading while the worker serves, the prefix cache, a killed engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.weights.hub import locate_model
from tests.helpers import lora_zoo
from tests.helpers.serve_process import ServeProcess, until

PROMPT = "Once upon a time, in a small town by the sea, there lived a woman of eighty who had"
OPTIONS: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16}
Serve = Callable[..., ServeProcess]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two adapters of the default model."""
    made, model = tmp_path_factory.mktemp("adapters"), locate_model(None)
    for seed, name in enumerate(("one", "two")):
        lora_zoo.write_random_peft(model, made / name, rank=8, seed=seed, size=3)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """Return the texts of the offline API, each alone: without an adapter, with one, and with both."""
    llm = LLM(loras={"one": folder / "one", "two": folder / "two"}, max_loras=3, max_context=256)
    both = {"one": 0.5, "two": 0.25}
    cases = {"": {}, "one": "one", "two": "two", "half": {"one": 0.5}, "both": both}
    options = {name: value for name, value in OPTIONS.items() if name != "prompt"}
    texts = {name: llm.generate(PROMPT, lora=lora, **options).text for name, lora in cases.items()}
    assert len(set(texts.values())) == len(texts), "the check would be vacuous"
    return texts


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[ServeProcess] = []

    def start(*args: str | Path) -> ServeProcess:
        started.append(ServeProcess("--max-context", "512", *args))
        return started[-1].ready()

    yield start
    for process in started:
        process.close()


def text(running: ServeProcess, **fields: Any) -> str:
    reply = running.http.post("/v1/completions", json={**OPTIONS, **fields})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def load(running: ServeProcess, name: str, path: str, **fields: Any) -> Any:
    return running.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def test_openai_client_uses_two_adapters(serve: Serve, folder: Path, expected: dict[str, str]) -> None:
    running = serve("--lora", f"one={folder / 'one'}", "--lora", f"two={folder / 'two'}:1.0", "--max-loras", "3")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    listed = {model.id: model.model_dump() for model in client.models.list().data}
    assert list(listed) == ["smollm2", "one", "two"]
    assert listed["one"]["parent"] == "smollm2"
    assert listed["one"]["root"] == str(folder / "one")
    streams = {
        name: client.completions.create(model=model, stream=True, **OPTIONS)
        for name, model in (("one", "one"), ("", "smollm2"), ("two", "smollm2:two"), ("half", "one"))
        if name != "half"
    }
    for name, stream in streams.items():
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected[name]
        assert {chunk.model for chunk in chunks} == {name or "smollm2"}
    with pytest.raises(openai.NotFoundError, match="three"):
        client.completions.create(model="three", **OPTIONS)
    assert text(running, model="one:latest") == text(running, model="smollm2:one:latest") == expected["one"]
    chat = client.chat.completions.create(model="one", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert chat.model == "one"


def test_request_names_adapters_with_scales(serve: Serve, folder: Path, expected: dict[str, str]) -> None:
    running = serve("--lora", f"one={folder / 'one'}", "--lora", f"two={folder / 'two'}", "--max-loras", "3")
    assert text(running, lora=[{"id": 0, "scale": 0.5}]) == expected["half"]
    assert text(running, lora=[{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.25}]) == expected["both"]
    assert text(running, lora=[{"id": 0, "scale": 0}]) == expected[""] == text(running)
    adapters = running.http.get("/lora-adapters").json()
    assert [(entry["id"], entry["name"], entry["scale"]) for entry in adapters] == [(0, "one", 0.0), (1, "two", 0.0)]
    assert running.http.post("/lora-adapters", json=[{"id": 1, "scale": 1.0}]).status_code == 200
    assert text(running) == expected["two"]
    assert text(running, model="one") == expected["one"]
    assert text(running, lora=[]) == expected[""]
    unknown = [{"id": 2, "scale": 1}]
    malformed: list[Any] = [[{"id": 0}], [{"id": 0, "scale": 1}] * 2, [{"id": 0, "scale": 1e9}], {}]
    for wrong, status in ((unknown, 404), *((wrong, 400) for wrong in malformed)):
        assert running.http.post("/v1/completions", json={**OPTIONS, "lora": wrong}).status_code == status
        assert running.http.post("/lora-adapters", json=wrong).status_code == status
    conflict = running.http.post("/v1/completions", json={**OPTIONS, "model": "one", "lora": [{"id": 1, "scale": 1}]})
    assert conflict.status_code == 400


def test_jobs_use_adapters(serve: Serve, folder: Path, expected: dict[str, str]) -> None:
    running = serve("--lora", f"one={folder / 'one'}", "--lora", f"two={folder / 'two'}", "--max-loras", "3")

    def job(**fields: Any) -> str:
        reply = running.http.post("/v1/jobs", json={**OPTIONS, "stream": False, **fields})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["text"])

    assert (job(model="one"), job(model="smollm2"), job()) == (expected["one"], expected[""], expected[""])
    assert running.http.post("/lora-adapters", json=[{"id": 1, "scale": 1.0}]).status_code == 200
    assert job() == expected["two"]
    for fields, name in (({"model": "one:latest"}, "one"), ({}, "two")):
        stream = running.http.post("/execute", json={**OPTIONS, "job_id": f"job-{name}", **fields}).text
        sent = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert sent[0]["model"] == fields.get("model", "smollm2").removesuffix(":latest")
        assert "".join(event["t"] for event in sent if event["type"] == "token") == expected[name]


def test_client_that_leaves_a_load_holds_up_no_other_change(serve: Serve, folder: Path) -> None:
    """A load waits for a slot that a request has; when its client goes, adapters can be changed again."""
    running = serve("--lora-dir", folder, "--max-loras", "1", "--max-cpu-loras", "3", "--max-context", "4096")
    assert load(running, "one", "one").status_code == 200
    options = {**OPTIONS, "max_tokens": 4000, "ignore_eos": True, "model": "one", "stream": True}
    with running.http.stream("POST", "/v1/completions", json=options) as stream:
        lines = stream.iter_lines()
        next(lines)
        body = {"lora_name": "two", "lora_path": "two"}
        with pytest.raises(httpx.ReadTimeout):
            running.http.post("/v1/load_lora_adapter", json=body, timeout=1.0)
        assert running.http.post("/v1/unload_lora_adapter", json={"lora_name": "two"}, timeout=30).status_code == 404
        assert next(line for line in lines if line), "the slot is free: the check would be vacuous"
    assert load(running, "two", "two").status_code == 200


def test_adapter_is_loaded_replaced_and_unloaded_over_http(
    serve: Serve, folder: Path, expected: dict[str, str]
) -> None:
    running = serve("--lora-dir", folder, "--max-loras", "3")
    assert text(running) == expected[""]
    assert load(running, "mine", "one").json()["success"]
    assert text(running, model="mine") == expected["one"]
    assert load(running, "mine", "two").status_code == 409
    assert load(running, "mine", "two", load_inplace=True).status_code == 200
    assert text(running, model="mine") == expected["two"], "the prefix cache gave blocks of the old content"
    assert load(running, "smollm2", "one").status_code == 409
    assert load(running, "other", str(folder / "one")).status_code == 200
    again = load(running, "third", "two", scale=0.5)  # the same content as another one: it takes no slot
    assert again.status_code == 200
    assert text(running, model="third") != expected["two"]
    assert running.http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert running.http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404
    assert running.http.post("/v1/completions", json={**OPTIONS, "model": "mine"}).status_code == 404
    assert text(running, model="third") != text(running)
    assert text(running) == expected[""]


@pytest.mark.parametrize("path", ["../two", "/etc", "one/../../x", ".", "missing", "one\0", "hf:owner/repo"])
def test_path_outside_the_folder_is_refused(serve_small: ServeProcess, folder: Path, path: str) -> None:
    reply = load(serve_small, "mine", path)
    assert reply.status_code == 400
    assert "lora_path" in reply.text or "--lora-dir" in reply.text


@pytest.fixture(scope="module")
def serve_small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    inner = tmp_path_factory.mktemp("inner")
    shutil.copytree(folder / "one", inner / "one")
    (inner / "link").symlink_to(folder / "two")
    running = ServeProcess("--max-context", "512", "--lora-dir", inner, "--max-loras", "1").ready()
    yield running
    running.close()


def test_link_that_leads_out_is_refused(serve_small: ServeProcess) -> None:
    assert load(serve_small, "mine", "link").status_code == 400


def test_one_too_many_is_refused_with_the_remedy(serve_small: ServeProcess, folder: Path) -> None:
    assert load(serve_small, "mine", "one").status_code == 200
    lora_zoo.write_random_peft(locate_model(None), folder / "big", rank=32)
    shutil.copytree(folder / "two", Path(load_root(serve_small)) / "copy")
    reply = load(serve_small, "second", "copy")
    assert reply.status_code == 400
    assert "max_loras" in reply.text
    shutil.copytree(folder / "big", Path(load_root(serve_small)) / "big")
    reply = load(serve_small, "mine", "big", load_inplace=True)
    assert reply.status_code == 400
    assert "rank 32" in reply.text
    assert "max_lora_rank is 16" in reply.text
    assert text(serve_small, model="mine"), "the name keeps what it had"


def load_root(running: ServeProcess) -> str:
    """Return the folder of the worker's adapters."""
    models = running.http.get("/v1/models").json()["data"]
    return str(Path(next(model["root"] for model in models if "root" in model)).parent)


def test_adapter_survives_a_killed_engine(serve: Serve, folder: Path, expected: dict[str, str]) -> None:
    running = serve("--lora-dir", folder, "--lora", f"one={folder / 'one'}", "--engine-restarts", "10")
    assert load(running, "late", "two").status_code == 200
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    options = {**OPTIONS, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="late", **options).choices[0].text
    stream = client.completions.create(model="late", stream=True, **options)
    parts = [next(stream).choices[0].text]
    os.kill(running.engine(), signal.SIGKILL)
    parts += [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(parts) == whole
    assert text(running, model="late") == expected["two"]
    assert text(running, model="one") == expected["one"]


def test_storm_of_loads_beside_streams_and_a_killed_engine(
    serve: Serve, folder: Path, expected: dict[str, str]
) -> None:
    """Names come and go in several threads while others stream, and the engine is killed: no stream has other tokens,
    and each load or unload has an honest end."""
    running = serve("--lora-dir", folder, "--max-loras", "2", "--engine-restarts", "10")
    assert load(running, "kept", "one").status_code == 200

    def ask(_: int) -> set[str]:
        return {text(running, model="kept") for _ in range(6)}

    def change(number: int) -> set[int]:
        name, statuses = f"other{number % 2}", set[int]()
        for _ in range(8):
            statuses.add(load(running, name, "two", load_inplace=bool(number // 2)).status_code)
            gone = running.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            statuses.add(gone.status_code)
        return statuses

    with ThreadPoolExecutor(8) as threads:
        asked, changed = threads.map(ask, range(4)), threads.map(change, range(4))
        os.kill(running.engine(), signal.SIGKILL)
        assert set().union(*asked) == {expected["one"]}
        assert set().union(*changed) <= {200, 400, 404, 409}
    assert text(running) == expected[""]
    assert [entry["name"] for entry in running.http.get("/lora-adapters").json()] == ["kept"]


def test_adapter_that_cannot_be_read_again_fails_its_requests_alone(
    serve: Serve, folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    for name in ("one", "two", "gone"):
        shutil.copytree(folder / ("two" if name == "gone" else name), tmp_path / name)
    running = serve("--lora-dir", tmp_path, "--engine-restarts", "10")
    assert {load(running, name, name).status_code for name in ("one", "gone")} == {200}
    shutil.rmtree(tmp_path / "gone")
    assert text(running, model="gone") == expected["two"]
    os.kill(running.engine(), signal.SIGKILL)
    assert text(running, model="one") == expected["one"]
    reply = running.http.post("/v1/completions", json={**OPTIONS, "model": "gone"})
    assert (reply.status_code, "no such file" in reply.text) == (500, True), reply.text
    (tmp_path / "one" / "adapter_config.json").write_text((tmp_path / "two" / "adapter_config.json").read_text() + " ")
    shutil.copy(tmp_path / "two" / "adapter_model.safetensors", tmp_path / "one")
    assert text(running, model="one") == expected["one"], "what was read stays"
    os.kill(running.engine(), signal.SIGKILL)
    reply = running.http.post("/v1/completions", json={**OPTIONS, "model": "one"})
    assert (reply.status_code, "has changed since it was loaded" in reply.text) == (400, True), reply.text
    assert load(running, "one", "one", load_inplace=True).status_code == 200
    assert text(running, model="one") == expected["two"]


def test_replicas_all_have_an_adapter(serve: Serve, folder: Path, expected: dict[str, str]) -> None:
    running = serve("--lora-dir", folder, "--replicas", "2", "--kv-memory", "64M")
    assert load(running, "late", "two").status_code == 200
    engines = running.engines()
    assert len(engines) == 2
    os.kill(engines[0], signal.SIGKILL)
    assert text(running, model="late") == expected["two"]
    until(lambda: len(running.engines()) == 2 and running.http.get("/health").json()["status"] == "healthy")
    os.kill(engines[1], signal.SIGKILL)
    assert text(running, model="late") == expected["two"]
