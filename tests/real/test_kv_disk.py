"""A conversation of a real model that goes on after `kill -9`, with OpenAI's client."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.conftest import DEVICE
from tests.helpers.serve_process import ServeProcess

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="without --deterministic a GPU gives other bits")
QUESTION = "Here is a table of squares: " + "; ".join(f"{i} squared is {i * i}" for i in range(150))
LIMIT_S = 120


@pytest.fixture(params=["float16", "int8"])
def options(request: pytest.FixtureRequest, coder: Path) -> list[str | Path]:
    return ["--model", coder, "--served-model-name", "coder", "--max-context", "8192", "--kv-type", request.param]


def ask(server: ServeProcess, messages: list[dict[str, str]]) -> tuple[str, int]:
    """Return a greedy answer, and the cached tokens of its prompt."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S) as client:
        ask: Any = client.chat.completions.create
        reply = ask(model="coder", messages=messages, temperature=0, max_tokens=24)
    return reply.choices[0].message.content, reply.usage.prompt_tokens_details.cached_tokens


def test_conversation_goes_on_after_a_kill(options: list[str | Path], tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    servers = [ServeProcess(*options, "--kv-dir", folder).ready()]
    try:
        messages = [{"role": "user", "content": QUESTION + ". What is 12 squared?"}]
        answer, cached = ask(servers[0], messages)
        assert cached == 0
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And 13 squared?"}]
        end = time.monotonic() + LIMIT_S
        while servers[0].metric("kv_disk_waiting_blocks") or not servers[0].metric("kv_disk_written_blocks_total"):
            assert time.monotonic() < end
            time.sleep(0.05)
        expected, _ = ask(servers[0], messages)
        for pid in (servers[0].engine(), servers[0].process.pid):
            os.kill(pid, signal.SIGKILL)
        servers.append(ServeProcess(*options, "--kv-dir", folder).ready())
        found, cached = ask(servers[1], messages)
        assert found == expected
        assert cached > 1_000
        assert servers[1].metric("kv_disk_read_blocks_total") == cached / 16
    finally:
        for server in servers:
            server.close()
