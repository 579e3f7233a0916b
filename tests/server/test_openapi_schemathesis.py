"""Requests generated from the description of the routes; LLM_WORKER_EXAMPLES=4 asks four times as many."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from llm_worker_rbee import LLM
from llm_worker_rbee.server.bodies import DETAILS, IMAGE_URL
from llm_worker_rbee.server.dialects import dialect_of
from llm_worker_rbee.server.dialects.anthropic import image_fields
from llm_worker_rbee.server.dialects.ollama import IMAGES
from llm_worker_rbee.server.object_fields import ObjectOf
from llm_worker_rbee.server.openapi import all_operations
from tests.cli.conftest import environment
from tests.conftest import DEVICE
from tests.helpers import tiny_models
from tests.helpers.server import Server, until
from tests.helpers.tiny_pooling import NAMES, WIDTH, WORDS, pooling_models
from tests.server.conftest import KEY

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
UNLIMITED = ("/v1/chat/completions", "/v1/completions")
POSITIVE, NEGATIVE = schemathesis.GenerationMode
CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.positive_data_acceptance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.ignored_auth,
)
TIMES = int(os.environ.get("LLM_WORKER_EXAMPLES", "1"))  # as many requests as usual
EXAMPLES = {POSITIVE: 10 * TIMES, NEGATIVE: 15 * TIMES}
LONGEST = 8  # tokens of an answer
ALIASES = ("/v2/rerank", "/rerank", "/score")
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def described(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The description, as it is served."""
    line = [sys.executable, "-m", "llm_worker_rbee", "serve", "--port", "0", "--device", DEVICE, "--kv-memory", "16MB"]
    said = tmp_path_factory.mktemp("schemathesis") / "stderr"
    with said.open("w") as errors, subprocess.Popen(
        [*line, "--model", str(model_file), "--served-model-name", "tiny"],
        stdout=subprocess.PIPE, stderr=errors, text=True, env=environment() | {"LLM_WORKER_API_KEY": KEY},
    ) as worker:  # fmt: skip
        try:
            url = next(found[0] for text in worker.stdout or () if (found := re.search(r"http://[^ ,]+", text)))
            until(lambda: httpx.get(f"{url}/health").status_code == 200)
            yield schemathesis.openapi.from_url(f"{url}/openapi.json", headers=HEADERS)
            until(lambda: not httpx.get(f"{url}/health").json()["running"])
        finally:
            worker.terminate()
            worker.communicate(timeout=60)


@pytest.fixture(scope="module")
def described_pooling(load: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The description of a worker with pooling models."""
    names = {"embedding_model": NAMES["embedding"], "rerank_model": NAMES["rerank"]}
    pooling = pooling_models(tmp_path_factory.mktemp("pooling"))
    with Server(load, pooling=pooling, api_key=KEY, **names) as running:
        yield schemathesis.openapi.from_url(f"{running.ready().url}/openapi.json", headers=HEADERS)


def within_pooling(path: str, body: Any) -> Any:
    """As `within_the_model`, for the routes of pooling models: texts that are too long are cut."""
    if not isinstance(body, dict):
        return body
    made = dict(body)
    if made.get("truncate") in (None, False):
        made["truncate"] = True
    if _is_whole(made.get("dimensions")) and made["dimensions"] >= 1:
        made["dimensions"] = min(made["dimensions"], WIDTH)
    if isinstance(made.get("prompt_name"), str):
        made["prompt_name"] = ""  # the model has none
    if isinstance(made.get("input"), list):
        made["input"] = _known(made["input"], len(WORDS))
    kinds = ("embedding",) if "embed" in path else ("rerank",)
    name, _, tag = str(made.get("model")).partition(":")
    if name in NAMES.values():
        made["model"] = NAMES[kinds[0]] + (f":{tag}" if tag else "")
    for first, second in (("text_1", "text_2"), ("queries", "documents")):
        if isinstance(made.get(first), list) and made.get(second) is not None:
            made[first] = made[first][:1]  # as many as of the other, or one
    return made


def within_the_model(path: str, body: Any) -> Any:
    """The same body within bounds that no description has: what the context and the vocabulary hold, the time that
    there is, that `best_of` is `n`, and that two names of one limit agree. What is wrong with it stays wrong."""
    if not isinstance(body, dict):
        return body
    made: dict[str, Any] = _without_images(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if _is_whole(made.get(name)):
            is_unlimited = made[name] == -1 and path in UNLIMITED  # what is left of the context
            made[name] = LONGEST if is_unlimited else min(made[name], LONGEST)
    if path == "/v1/chat/completions" and made.get("max_tokens", made.get("max_completion_tokens")) is None:
        made["max_tokens"] = LONGEST
    if all(_is_whole(made.get(name)) and made[name] >= 1 for name in ("max_tokens", "max_completion_tokens")):
        made["max_completion_tokens"] = made["max_tokens"]
    if _is_whole(made.get("timeout_ms")) and made["timeout_ms"] > 0:
        made["timeout_ms"] = max(made["timeout_ms"], 60_000)
    if _is_whole(made.get("best_of")) and 1 <= made["best_of"] <= 16:
        made["best_of"] = made.get("n") or 1
    for name in ("prompt", "tokens"):
        if isinstance(made.get(name), list):
            made[name] = _known(made[name])
    if isinstance(made.get("logit_bias"), dict):
        made["logit_bias"] = {_known_name(name): amount for name, amount in made["logit_bias"].items()}
    if path == "/v1/responses" and ((limit := made.get("max_output_tokens")) is None or _is_whole(limit)):
        made["max_output_tokens"] = LONGEST if limit is None else min(limit, LONGEST)
    if path in ("/api/chat", "/api/generate"):
        return _within_ollama(made)
    if isinstance(made.get("chat_template_kwargs"), dict):
        made["chat_template_kwargs"] = {}  # names of variables
    if path in (*UNLIMITED, "/v1/responses", "/v1/jobs", "/v1/inference", "/execute"):
        return _with_plain_grammar(_with_plain_tools(made))
    return _within_anthropic(made) if path.startswith("/v1/messages") else made


def _without_images(value: Any) -> Any:
    """Return the same value with texts in the place of valid images, which the model does not take."""
    if isinstance(value, list):
        return [_without_images(item) for item in value]
    if not isinstance(value, dict):
        return value
    source = value.get("image_url", value.get("source"))
    url = source.get("url") if isinstance(source, dict) else source
    details = [one.get("detail") in (*DETAILS, None) for one in (value, source) if isinstance(one, dict)]
    is_url = isinstance(url, str) and re.match(IMAGE_URL, url) is not None and all(details)
    if value.get("type") == "image_url" and isinstance(source, dict) and is_url and source.keys() <= {"url", "detail"}:
        return {"type": "text", "text": ""}
    if value.get("type") == "input_image" and is_url and value.keys() <= {"type", "image_url", "detail"}:
        return {"type": "input_text", "text": ""}
    if value.get("type") == "image" and ObjectOf(image_fields(False), tag="type").validate("image", value) is None:
        return {"type": "text", "text": ""}
    if "images" in value and value["images"] and IMAGES.validate("images", value["images"]) is None:
        value = {**value, "images": []}
    return {name: _without_images(item) for name, item in value.items()}


def _within_anthropic(made: dict[str, Any]) -> dict[str, Any]:
    """The same body without a choice of tools that it may not have, with plain schemas, and with the user's turn."""
    messages, choice, tools = (made.get(name) for name in ("messages", "tool_choice", "tools"))
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        made["messages"] = [*messages, {"role": "user", "content": ""}]
    if isinstance(choice, dict) and (choice.get("type") == "any" or isinstance(choice.get("name"), str)):
        made["tool_choice"] = {name: value for name, value in choice.items() if name != "name"} | {"type": "auto"}
    if isinstance(tools, list):
        made["tools"] = [_with_plain_examples(_with_plain_schema(tool, "input_schema")) for tool in tools]
    config = made.get("output_config")
    if isinstance(config, dict) and "format" in config:
        made["output_config"] = {**config, "format": _with_plain_schema(config["format"], "schema")}
    if "output_format" in made:
        made["output_format"] = _with_plain_schema(made["output_format"], "schema")
    return made


def _within_ollama(body: dict[str, Any]) -> dict[str, Any]:
    """As `within_the_model`; any object is the schema of a format for the description, but few are for the grammar."""
    options = body.get("options") if body.get("options") is not None else {}
    if isinstance(options, dict):
        options = dict(options)
        if _is_whole(context := options.get("num_ctx")):
            options["num_ctx"] = min(context, 256)
        if (count := options.get("num_predict")) in (None, -1, -2) or (_is_whole(count) and count > 0):
            options["num_predict"] = LONGEST
    body = {**body, "tools": _within_64_bits(body["tools"])} if "tools" in body else body
    return {**body, "options": options} | ({"format": {}} if isinstance(body.get("format"), dict) else {})


PLAIN: dict[str, tuple[Any, Any]] = {  # types of grammars, and one of each
    "json": ((dict, bool, str), {}), "regex": (str, "a"), "grammar": (str, 'start: "a"'),
}  # fmt: skip


def _with_plain_grammar(made: dict[str, Any]) -> dict[str, Any]:
    """The same body with one grammar at most, a plain one: for the description any text is one."""
    text, given = made.get("text"), made.get("structured_outputs")
    if isinstance(wanted := made.get("response_format"), dict) and "json_schema" in wanted:
        made["response_format"] = {**wanted, "json_schema": _with_plain_schema(wanted["json_schema"], "schema")}
    if isinstance(text, dict) and "format" in text:
        made["text"] = {**text, "format": _with_plain_schema(text["format"], "schema")}
    if isinstance(given, dict) and len(given) == 1:
        ((kind, value),) = given.items()
        if kind in PLAIN and isinstance(value, PLAIN[kind][0]):
            made["structured_outputs"] = {kind: PLAIN[kind][1]}
    has_format = wanted is not None or (isinstance(text, dict) and text.get("format") is not None)
    given = made.get("structured_outputs")
    choices = given.get("choice") if isinstance(given, dict) and len(given) == 1 else None
    has_choices = isinstance(choices, list) and choices and all(isinstance(one, str) and one for one in choices)
    if has_format and (has_choices or given in [{kind: plain} for kind, (_, plain) in PLAIN.items()]):
        del made["structured_outputs"]
    if isinstance(grammar := made.get("grammar"), str) and grammar:
        made["grammar"] = None if has_format or made.get("structured_outputs") is not None else PLAIN["grammar"][1]
    return made


def _with_plain_tools(made: dict[str, Any]) -> dict[str, Any]:
    """The same body with plain schemas and grammars of tools, and without a choice of one that it may not have."""
    choice, tools = made.get("tool_choice"), made.get("tools")
    is_named = isinstance(choice, dict) and isinstance(choice.get("function", choice), dict)
    is_required = choice == "required" or (isinstance(choice, dict) and choice.get("mode") == "required")
    if is_required or (is_named and isinstance(choice.get("function", choice).get("name"), str)):
        made["tool_choice"] = "auto"
    if isinstance(tools, list):
        made["tools"] = [_within_64_bits(_with_plain_tool(tool)) for tool in tools]
    return made


def _within_64_bits(value: Any) -> Any:
    """The same value with integers that the worker can pass on to a template; larger ones are refused by name."""
    if isinstance(value, dict):
        return {key: _within_64_bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_within_64_bits(item) for item in value]
    return value % 2**63 if _is_whole(value) and abs(value) >= 2**63 and isinstance(value, int) else value


def _with_plain_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    tool = _with_plain_schema(tool, "parameters")
    if isinstance(function := tool.get("function"), dict):
        tool = {**tool, "function": _with_plain_schema(function, "parameters")}
    if isinstance(form := tool.get("format"), dict) and isinstance(form.get("definition"), str):
        tool = {**tool, "format": {**form, "definition": PLAIN["grammar"][1]}}
    return {**tool, "tools": [*map(_with_plain_tool, tool["tools"])]} if isinstance(tool.get("tools"), list) else tool


def _with_plain_examples(tool: Any) -> Any:
    """The same tool without integers of more than 64 bits in its examples."""
    given = tool.get("input_examples") if isinstance(tool, dict) else None
    is_plain = isinstance(given, list) and all(isinstance(one, dict) for one in given)
    return {**tool, "input_examples": [{}] * len(given)} if is_plain else tool


def _with_plain_schema(value: Any, name: str) -> Any:
    has_schema = isinstance(value, dict) and isinstance(value.get(name), dict)
    return {**value, name: {"type": "object"}} if has_schema else value


def _known_name(name: str) -> str:
    return str(int(name) % tiny_models.VOCAB) if re.fullmatch(r"[0-9]{1,9}", name) else name


def _is_whole(value: Any) -> bool:
    return value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


def _known(ids: Any, vocab: int = tiny_models.VOCAB) -> Any:
    if isinstance(ids, list):
        return [_known(one, vocab) for one in ids]
    return ids % vocab if _is_whole(ids) and ids >= 0 else ids


CASES = [
    pytest.param(method, path, mode, id=f"{method} {path} {mode.value}")
    for method, path, operation in all_operations(has_pool=False)
    if path not in ALIASES
    for mode in ((POSITIVE, NEGATIVE) if operation.request else (POSITIVE,))  # without a body nothing can be wrong
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_described_operation_conforms(request: pytest.FixtureRequest, method: str, path: str, mode: Any) -> None:
    is_pooling = dialect_of(path).has_large_bodies
    described = request.getfixturevalue("described_pooling" if is_pooling else "described")
    operation, within = described[path][method.upper()], within_pooling if is_pooling else within_the_model

    @settings(
        max_examples=EXAMPLES[mode] // (2 if is_pooling else 1),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.body = within(path, case.body)
        reply = case.call(headers=HEADERS, timeout=20)
        is_dead_end = reply.status_code == 422  # random weights may sample into one
        accepted = checks.positive_data_acceptance
        case.validate_response(reply, checks=[one for one in CHECKS if not (is_dead_end and one is accepted)])

    ask()
