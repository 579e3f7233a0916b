"""Examples, routes, metrics and options that the documentation names."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.cli import load_command
from llm_worker_rbee.server.openapi import ROUTES
from tests.helpers.server import Server
from tests.helpers.tiny_pooling import pooling_models
from tests.server.conftest import KEY

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "http.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
SHELL = "curl() { command curl -sS --max-time 20 -w '\\n%{http_code}' \"$@\"; }\n"
ADDRESS = "http://127.0.0.1:8080"
ENDS = ("data: [DONE]", 'data: {"type":"response.incomplete"', 'data: {"type":"message_stop"')  # of streams


@pytest.fixture(scope="module")
def named(load: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose models have the names in the examples."""
    pooling = pooling_models(tmp_path_factory.mktemp("pooling"), "all-minilm-l6-v2")
    kept = {"kv_dir": str(tmp_path_factory.mktemp("kv"))}
    with Server(partial(load, **kept), served_name="smollm2", pooling=pooling) as running:
        yield running.ready()


def pasted(example: str, server: Server) -> tuple[str, int]:
    """Return body and status of an example."""
    script = SHELL + example.replace(ADDRESS, server.url)
    settings = {**os.environ, "LLM_WORKER_API_KEY": KEY}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, env=settings)
    assert done.returncode == 0, done.stderr
    body, _, status = done.stdout.rpartition("\n")
    return body, int(status)


def test_http_examples_give_documented_replies(named: Server, locked: Server) -> None:
    for example in EXAMPLES:  # in their order: a job is begun, read, ended
        said = re.match(r"# (with a key)?(?:, )?(?:status (\d+))?$", example.partition("\n")[0])
        body, status = pasted(example, locked if said and said[1] else named)
        assert status == int((said and said[2]) or 200), f"{example}{body}"
        if " -N " in example:
            assert body.startswith(("data: {", "event: ")), example
            assert body.rstrip().rpartition("\n")[2].startswith(ENDS), example
            assert '"error":{' not in body, body
        elif not any(word in example for word in ("curl -i", "/metrics", ":8080/\n")):
            json.loads(body)
    named.require_idle()


def test_every_route_has_an_example() -> None:
    names = {
        ("delete" if "-X DELETE" in example else "post" if " -d " in example else "get", path)
        for example in EXAMPLES
        for path in re.findall(rf"{ADDRESS}(\S+)", example)
    }
    for method, path, *_ in ROUTES:
        pattern = re.sub(r"\{\w+\}", "[^/]+", path)
        assert any(method == verb and re.fullmatch(pattern, given) for verb, given in names), (method, path)


def test_dashboard_metrics_exist(named: Server) -> None:
    served = set(re.findall(r"^(llm_worker_\w+)", named.http.get("/metrics").text, re.MULTILINE))
    panels = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))["panels"]
    names = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"llm_worker_\w+", target["expr"])
    }
    assert names
    missing = names - served
    assert not missing


def test_named_options_exist() -> None:
    command = load_command("serve")
    options = {name for one in command.params for name in one.opts}
    text = TEXT + (DOCS / "deploy.md").read_text(encoding="utf-8")
    served = " ".join(
        line.partition("serve")[2] for line in text.splitlines() if "ExecStart" in line or "ENTRYPOINT" in line
    )
    named = set(re.findall(r"`(--[a-z-]+)", text)) | set(re.findall(r"--[a-z-]+", served))
    assert len(named) > 5
    assert named <= options
