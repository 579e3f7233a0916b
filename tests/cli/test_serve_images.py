"""Images over HTTP: clients that others wrote, transformers' answers, cached prefixes, a killed engine, bad files."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import re
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import httpx
import ollama
import openai
import pytest
from PIL import Image

from llm_worker_rbee import LLM
from llm_worker_rbee.cli import inspect
from llm_worker_rbee.config import IMAGE_ROWS_BYTES, LoadOptions
from llm_worker_rbee.engine import memory_plan
from llm_worker_rbee.models.convert import convert
from llm_worker_rbee.models.convert.mmproj import convert_projector
from llm_worker_rbee.models.vision import find_projector
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.vision_names import open_projector
from tests.helpers import vision_chat
from tests.helpers.serve_process import ServeProcess, until

NAME, TOKENS = "qwen3_vl", 6
PICTURES = [vision_chat.picture_file(1), vision_chat.picture_file(2, 60, 90)]
URLS = list(map(vision_chat.data_url, PICTURES))
BASE64 = [base64.b64encode(data).decode() for data in PICTURES]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
ANTHROPIC: dict[str, Any] = {"max_tokens": TOKENS, "extra_body": {"temperature": 0}}
PADDING = re.compile(r"\[PAD\d+\]")  # rows of the embedding that a GGUF names
Serve = Callable[..., ServeProcess]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_chat.save_chat_model(NAME, tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_type="float32", device="cpu")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ServeProcess]:
    process = ServeProcess("-m", folder, "--kv-type", "float32", "--served-model-name", "tiny").ready()
    yield process
    process.close()


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    started: list[ServeProcess] = []

    def start(*args: str | Path) -> ServeProcess:
        started.append(ServeProcess("-m", folder, "--kv-type", "float32", "--served-model-name", "tiny", *args))
        return started[-1].ready()

    yield start
    for process in started:
        process.close()


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def expected_text(llm: LLM, messages: list[Any], files: list[bytes]) -> tuple[str, int]:
    """Return the text of transformers' greedy answer, and the tokens of the prompt."""
    ids = llm.prepare_chat(messages).ids
    tokens = vision_chat.reference_answer(NAME, ids, files, TOKENS)
    if (end := next(iter(llm.tokenizer.eos_ids))) in tokens:
        tokens = tokens[: tokens.index(end)]
    return llm.detokenize(tokens), len(ids)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[str, int]:
    parts = [{"type": "image", "image": PICTURES[0]}, text("Which of "), {"type": "image", "image": PICTURES[1]},
             text(" is it?")]  # fmt: skip
    return expected_text(llm, user(*parts), PICTURES)


def ask(process: ServeProcess, messages: list[Any], **fields: Any) -> httpx.Response:
    return process.http.post("/v1/chat/completions", json={"messages": messages, **GREEDY, **fields})


def require_alive(process: ServeProcess) -> None:
    reply = ask(process, [{"role": "user", "content": "Hello"}])
    assert reply.status_code == 200, reply.text


BOTH = user(image(URLS[0]), text("Which of "), image(URLS[1], detail="high"), text(" is it?"))


def test_inspect_plans_with_the_tower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda backend=None: 8 << 30)
    checkpoint = open_checkpoint(folder)
    bare, whole = (inspect._fits(checkpoint, LoadOptions(device="cpu", mmproj=path)) for path in ("none", None))
    tower = find_projector(checkpoint, LoadOptions())[0].tower_memory
    assert bare["available_bytes"] - whole["available_bytes"] == tower + IMAGE_ROWS_BYTES > IMAGE_ROWS_BYTES


def test_openai_client(running: ServeProcess, expected: tuple[str, int]) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    reply = client.chat.completions.create(model="tiny", messages=BOTH, **GREEDY)
    assert (reply.choices[0].message.content, reply.usage.prompt_tokens) == expected
    assert reply.usage.prompt_tokens_details.model_dump()["image_tokens"] == 15 + 6
    stream = client.chat.completions.create(model="tiny", messages=BOTH, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected[0]
    content = [
        {"type": "input_image", "image_url": URLS[0], "detail": "auto"}, {"type": "input_text", "text": "Which of "},
        {"type": "input_image", "image_url": URLS[1], "detail": "auto"}, {"type": "input_text", "text": " is it?"},
    ]  # fmt: skip
    answer = client.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=TOKENS, store=False
    )
    assert (answer.output_text, answer.usage.input_tokens) == expected


def test_anthropic_client(running: ServeProcess, expected: tuple[str, int], llm: LLM) -> None:
    client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
    sources = [{"type": "base64", "media_type": "image/png", "data": data} for data in BASE64]
    first, second = ({"type": "image", "source": source} for source in sources)
    content: Any = [first, text("Which of "), second, text(" is it?")]
    fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    reply = client.messages.create(**fields, **ANTHROPIC)
    assert (reply.content[0].text, reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)) == expected
    assert client.messages.count_tokens(**fields).input_tokens == expected[1]
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("Seen:"), first]}
    history: Any = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": [call]}]
    history.append({"role": "user", "content": [result]})
    own = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "name": "look",
         "content": [text("Seen:"), {"type": "image", "image": PICTURES[0]}]}]  # fmt: skip
    seen, count = expected_text(llm, own, PICTURES[:1])
    reply = client.messages.create(model="tiny", messages=history, **ANTHROPIC)
    assert "".join(block.text for block in reply.content) == seen
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == count


def test_ollama_client(running: ServeProcess, llm: LLM) -> None:
    client, options = ollama.Client(running.url), {"temperature": 0, "num_predict": TOKENS}
    words, count = expected_text(llm, [{"role": "user", "content": "What?", "images": PICTURES}], PICTURES)
    messages = [{"role": "user", "content": "What?", "images": PICTURES}]
    reply = client.chat("tiny", messages=messages, options=options)
    assert (reply.message.content, reply.prompt_eval_count) == (words, count)
    reply = client.generate("tiny", prompt="What?", images=PICTURES, options=options)
    assert (reply.response, reply.prompt_eval_count) == (words, count)
    assert "vision" in client.show("tiny").capabilities


def test_jobs_and_capabilities(running: ServeProcess, expected: tuple[str, int]) -> None:
    reply = running.http.post("/v1/jobs", json={"messages": BOTH, "stream": False, **GREEDY})
    assert reply.json()["text"] == expected[0], reply.text
    (listed,) = running.http.get("/v1/models").json()["data"]
    assert listed["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}


def test_second_question_about_a_picture_computes_none_of_its_tokens(running: ServeProcess) -> None:
    picture = vision_chat.data_url(vision_chat.picture_file(77, 250, 250))
    first, second = (ask(running, user(image(picture), text(f" {q}?"))).json()["usage"] for q in ("Who", "Why"))
    assert first["prompt_tokens_details"]["cached_tokens"] < 16
    image_tokens = second["prompt_tokens_details"]["image_tokens"]
    assert image_tokens > 32
    assert second["prompt_tokens_details"]["cached_tokens"] >= image_tokens
    other = vision_chat.data_url(vision_chat.picture_file(78, 250, 250))
    usage = ask(running, user(image(other), text(" Who?"))).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < 16, "another picture of the same size"


def test_choices_guided_answers_tools_and_low_detail(running: ServeProcess, expected: tuple[str, int]) -> None:
    reply = ask(running, BOTH, n=3).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == [expected[0]] * 3
    reply = ask(running, BOTH, structured_outputs={"choice": ["yes", "no"]}).json()
    assert reply["choices"][0]["message"]["content"] in ("yes", "no")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    reply = ask(running, BOTH, tools=[tool], tool_choice="required", max_tokens=60).json()
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    large = vision_chat.data_url(vision_chat.picture_file(5, 700, 900))
    usages = [ask(running, user(image(large, detail=detail))).json()["usage"] for detail in ("high", "low")]
    assert usages[0]["prompt_tokens"] >= usages[1]["prompt_tokens"]


def test_killed_engine_goes_on_with_images(serve: Serve) -> None:
    process = serve()
    fields = {**GREEDY, "max_tokens": 400, "ignore_eos": True, "temperature": 1, "seed": 3}
    whole = ask(process, BOTH, **fields).json()["choices"][0]["message"]["content"]
    client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
    extra = {"ignore_eos": True, "cache_salt": "anew"}
    for attempt in range(3):  # the answer may end before the engine is killed
        stream = client.chat.completions.create(
            model="tiny", messages=BOTH, stream=True, temperature=1, seed=3, max_tokens=400, extra_body=extra
        )
        texts = [next(stream).choices[0].delta.content]
        os.kill(process.engine(), signal.SIGKILL)
        texts += [chunk.choices[0].delta.content for chunk in stream]
        assert "".join(filter(None, texts)) == whole
        until(lambda restarts=attempt + 1: process.metric("engine_restarts_total") == restarts)
        process.ready()


def test_replicas_and_files_of_a_pair(tmp_path: Path, folder: Path, expected: tuple[str, int]) -> None:
    convert(open_checkpoint(folder), tmp_path / "model.gguf", "F32")
    convert_projector(open_projector(folder), tmp_path / "mmproj-model-F32.gguf", "F32")
    arguments = "-m", tmp_path / "model.gguf", "--kv-type", "float32", "--replicas", "2"
    process = ServeProcess(*arguments).ready()
    try:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda _: ask(process, BOTH).json(), range(8)))
        assert {PADDING.sub("", reply["choices"][0]["message"]["content"]) for reply in replies} == {expected[0]}
    finally:
        process.close()
    process = ServeProcess("-m", tmp_path / "model.gguf", "--mmproj", "none").ready()
    try:
        reply = ask(process, BOTH)
        assert reply.status_code == 400
        assert "messages[0].content[0]: model.gguf takes no images" in reply.text
        assert "--mmproj" in reply.text
        require_alive(process)
    finally:
        process.close()


def test_pool_of_models_takes_images(tmp_path: Path, folder: Path, expected: tuple[str, int]) -> None:
    models = tmp_path / "models"
    (models / "pair").mkdir(parents=True)
    convert(open_checkpoint(folder), models / "pair" / "sees.gguf", "F32")
    convert_projector(open_projector(folder), models / "pair" / "mmproj-F32.gguf", "F32")
    convert(open_checkpoint(folder), models / "blind.gguf", "F32")
    process = ServeProcess("--models-dir", models, "--kv-type", "float32").ready()
    try:
        places = {"pair/sees": models / "pair" / "mmproj-F32.gguf", "blind": models / "mmproj-F32.gguf"}
        for name, other in (("pair/sees", "blind"), ("blind", "pair/sees"), ("pair/sees", "blind")):  # none is loaded
            if not places[name].exists():
                places[other].rename(places[name])
            listed = {one["id"]: one["architecture"] for one in process.http.get("/v1/models").json()["data"]}
            assert [key for key, one in listed.items() if "image" in one["input_modalities"]] == [name]
            shown = {key: process.http.post("/api/show", json={"model": key}).json() for key in listed}
            assert [key for key, one in shown.items() if "vision" in one["capabilities"]] == [name]
        reply = ask(process, BOTH, model="pair/sees").json()
        assert PADDING.sub("", reply["choices"][0]["message"]["content"]) == expected[0]
        assert ask(process, BOTH, model="blind").status_code == 400
    finally:
        process.close()


def bomb(side: int) -> bytes:
    """Return a small PNG whose header says that it has side x side pixels, and whose data has many of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * (3 * side + 1) * min(side, 2000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def hostile_files() -> dict[str, bytes]:
    jpeg, webp = io.BytesIO(), io.BytesIO()
    Image.open(io.BytesIO(PICTURES[0])).save(jpeg, "JPEG")
    Image.open(io.BytesIO(PICTURES[0])).save(webp, "WEBP")
    deep = io.BytesIO()
    Image.new("I;16", (40, 40)).save(deep, "PNG")
    tiff = io.BytesIO()
    Image.new("RGB", (40, 40)).save(tiff, "TIFF")
    return {
        "bomb": bomb(60_000), "cut": PICTURES[0][: len(PICTURES[0]) // 2],
        "cut jpeg": jpeg.getvalue()[:700], "cut webp": webp.getvalue()[:200], "html": b"<script>alert(1)</script>",
        "pdf and png": b"%PDF-1.4\n" + PICTURES[0], "zip": b"PK\3\4" + bytes(60), "svg": b"<svg xmlns='x'/>",
        "16 bits": deep.getvalue(), "tiff": tiff.getvalue(), "long": bytes(21 << 20),
        "ratio": vision_chat.picture_file(1, 1, 900), "gif header": b"GIF89a", "one byte": b"\x89",
    }  # fmt: skip


def test_hostile_images_are_refused_by_their_places(running: ServeProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(ask, running, [{"role": "user", "content": "Count"}], max_tokens=200, ignore_eos=True)
        for name, data in hostile_files().items():
            reply = ask(running, user(text("x"), image(vision_chat.data_url(data))))
            assert reply.status_code == 400, (name, reply.text[:300])
            assert reply.json()["error"]["message"].startswith("messages[0].content[1]: the image "), reply.text
        assert bystander.result().status_code == 200
    require_alive(running)


def test_urls_and_forms_that_are_no_images_are_refused(running: ServeProcess) -> None:
    cases = {
        "file:///etc/passwd": "must be a data URL", "/etc/passwd": "must be a data URL",
        "data:text/html;base64,aGk=": "must be a data URL", "data:image/png;base64,@@@": "is not valid base64",
        "data:image/png;base64,": "is empty", "ftp://example.com/a.png": "must be a data URL",
        "http://127.0.0.1/a.png": "this worker fetches no images", "https://example.com/a.png": "fetches no images",
    }  # fmt: skip
    for url, message in cases.items():
        reply = ask(running, user(image(url)))
        assert reply.status_code == 400, (url, reply.text)
        assert message in reply.json()["error"]["message"], (url, reply.text)
        assert reply.json()["error"]["message"].startswith("messages[0].content[0]")
    forms: list[dict[str, Any]] = [{}, {"image_url": {"url": 5}}, {"image_url": {"url": URLS[0], "detail": "all"}}]
    for part in [{"type": "image_url", **form} for form in forms] + [{"type": "image", "image": URLS[0]}]:
        assert ask(running, user(part)).status_code == 400
    assert ask(running, user(*[image(URLS[1])] * 21)).json()["error"]["message"].startswith("the request has 21 images")
    assistant = [*BOTH, {"role": "assistant", "content": [image(URLS[0])]}, *BOTH]
    assert ask(running, assistant).status_code == 400
    names = ask(running, user(image(URLS[0]), text("<|image_pad|> <|vision_start|>\ufdd1")))
    assert names.status_code == 200, names.text
    mark = "\ufdd1"
    calls = [{"id": mark, "type": "function", "function": {"name": mark, "arguments": json.dumps({mark: mark})}}]
    answer = {"role": "assistant", "content": mark, "refusal": mark, "reasoning_content": mark, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": mark, "content": mark}
    tool = {"type": "function", "function": {"name": "f", "description": mark}}
    before, after = [{"role": "system", "content": mark}, {"role": "user", "content": mark}], user(image(URLS[1]))
    for chat, tools in (([*before, answer, result, *after], []), (after, [tool])):
        reply = ask(running, chat, tools=tools, chat_template_kwargs={"x": mark}, max_tokens=1)
        assert reply.status_code == 200, reply.text
    refused = running.http.post("/apply-template", json={"messages": after})
    assert refused.status_code == 400, refused.text
    assert "messages[0].content must be text, or a list of parts of the types text" in refused.text
    require_alive(running)


def test_time_of_decoding_counts(running: ServeProcess) -> None:
    file = io.BytesIO()
    Image.new("RGB", (7000, 7000)).save(file, "PNG")
    reply = ask(running, user(image(vision_chat.data_url(file.getvalue()))), timeout_ms=20)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "TIMEOUT"), reply.text
    require_alive(running)


def test_too_many_tokens_are_counted_before_anything_is_encoded(running: ServeProcess) -> None:
    large = vision_chat.data_url(vision_chat.picture_file(9, 256, 256))
    reply = ask(running, user(*[image(large)] * 9))
    assert reply.status_code == 400
    assert "576 tokens, the context 512" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "CONTEXT_LENGTH_EXCEEDED"


def test_mutated_images_harm_nobody(running: ServeProcess) -> None:
    rng = random.Random(5)
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(PICTURES[0])).save(jpeg, "JPEG")
    files = [PICTURES[1], jpeg.getvalue()]
    for i in range(int(os.environ.get("LLM_WORKER_MUTATIONS", "40"))):
        data = bytearray(files[i % 2])
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        reply = ask(running, user(image(vision_chat.data_url(bytes(data)))), max_tokens=1)
        assert reply.status_code in (200, 400), reply.text
    require_alive(running)
    assert running.http.get("/health").json()["status"] == "healthy"


class Pictures(BaseHTTPRequestHandler):
    """A server that a request must not reach."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PICTURES[0])

    def log_message(self, *_: Any) -> None: ...


def test_private_addresses_are_not_asked(serve: Serve) -> None:
    server = HTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    hosts = [
        "localhost",
        "127.0.0.1",
        "0.0.0.0",
        "2130706433",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
    ]
    try:
        process = serve(*(part for host in ("localhost", "127.0.0.1", "*.example.com") for part in
                          ("--allow-image-urls", host)))  # fmt: skip
        for host in hosts:
            reply = ask(process, user(image(f"http://{host}:{port}/secret")))
            assert reply.status_code == 400, (host, reply.text)
            message = json.loads(reply.text)["error"]["message"]
            assert "not public" in message or "--allow-image-urls" in message, (host, message)
        assert not Pictures.asked
        require_alive(process)
    finally:
        server.shutdown()
