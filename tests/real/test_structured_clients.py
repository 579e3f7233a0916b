"""Models of answers that clients ask of a real model, none of which forbids additional properties: every document is
complete, valid, and has no property that the model does not name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.helpers.serve_process import ServeProcess
from tests.real.clients.answer_models import PROMPTS, Person
from tests.real.conftest import CODERS

ENVIRONMENTS = os.environ.get("LLM_WORKER_CLIENTS")  # a folder with one environment for each client
SESSIONS = Path(__file__).parent / "clients"
pytestmark = pytest.mark.parametrize("coder", CODERS[:1], indirect=True)
every_model = pytest.mark.parametrize("model", list(PROMPTS), ids=lambda model: model.__name__)


def require_named(text: str, model: type[BaseModel]) -> None:
    """Fail for a property that the model does not name: pydantic drops it without a word."""
    document = json.loads(text.removeprefix("```json").removesuffix("```"))
    assert model.model_validate(document).model_dump(mode="json", exclude_unset=True) == document


@every_model
@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_parse(server: ServeProcess, model: type[BaseModel], is_streamed: bool) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "response_format": model}
    messages: Any = [{"role": "user", "content": PROMPTS[model]}]
    if is_streamed:
        with client.chat.completions.stream(model="coder", messages=messages, **options) as stream:
            reply = stream.get_final_completion()
    else:
        reply = client.chat.completions.parse(model="coder", messages=messages, **options)
    assert isinstance(reply.choices[0].message.parsed, model)
    require_named(reply.choices[0].message.content or "", model)


@every_model
def test_openai_responses_parse(server: ServeProcess, model: type[BaseModel]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    reply = client.responses.parse(
        model="coder", input=PROMPTS[model], text_format=model, temperature=0, max_output_tokens=400
    )
    assert isinstance(reply.output_parsed, model)
    require_named(reply.output_text, model)


def langchain_chat(server: ServeProcess) -> ChatOpenAI:
    options: dict[str, Any] = {"api_key": "none", "temperature": 0, "max_completion_tokens": 400}
    return ChatOpenAI(model="coder", base_url=f"{server.url}/v1", **options)


@every_model
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(server: ServeProcess, model: type[BaseModel], method: Any) -> None:
    chat = langchain_chat(server)
    reply: Any = chat.with_structured_output(model, method=method, include_raw=True).invoke(PROMPTS[model])
    assert reply["parsing_error"] is None, reply["raw"]
    calls = reply["raw"].tool_calls
    require_named(json.dumps(calls[0]["args"]) if calls else reply["raw"].content, model)


def test_langchain_json_mode(server: ServeProcess) -> None:
    """Any object may come: the prompt says which."""
    chat = langchain_chat(server)
    prompt = f"{PROMPTS[Person]} Answer with a JSON object with the keys name and age."
    reply: Any = chat.with_structured_output(Person, method="json_mode", include_raw=True).invoke(prompt)
    assert reply["parsed"] == Person(name="Ada Lovelace", age=36)
    require_named(reply["raw"].content, Person)


@every_model
def test_langchain_ollama(server: ServeProcess, model: type[BaseModel]) -> None:
    chat = ChatOllama(model="coder", base_url=server.url, temperature=0, num_predict=400)
    reply: Any = chat.with_structured_output(model, include_raw=True).invoke(PROMPTS[model])
    assert reply["parsing_error"] is None, reply["raw"]
    require_named(reply["raw"].content, model)


@every_model
def test_ollama(server: ServeProcess, model: type[BaseModel]) -> None:
    reply = ollama.Client(server.url).chat(
        "coder", [{"role": "user", "content": PROMPTS[model]}], format=model.model_json_schema(),
        options={"temperature": 0, "num_predict": 400},
    )  # fmt: skip
    assert reply.done_reason == "stop"
    require_named(reply.message.content or "", model)


def run_session(server: ServeProcess, client: str, *args: str) -> Any:
    """Return what a session prints."""
    if ENVIRONMENTS is None:
        pytest.skip("clients in environments of their own: make test-real")
    python = Path(ENVIRONMENTS).absolute() / client / "bin" / "python"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command: list[str | Path] = [python, SESSIONS / f"{client}_session.py", server.url, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=kept)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON", "MD_JSON", "ANTHROPIC_JSON"])
def test_instructor(server: ServeProcess, mode: str) -> None:
    answers = run_session(server, "instructor", mode)
    assert not [answer for answer in answers.values() if "error" in answer], answers
    for model in PROMPTS:
        require_named(answers[model.__name__]["text"], model)


def test_llama_index_over_ollama(server: ServeProcess) -> None:
    answers = run_session(server, "llama_index")
    assert not [answer for answer in answers.values() if "error" in answer], answers
    for model in PROMPTS:
        require_named(answers[model.__name__]["text"], model)
