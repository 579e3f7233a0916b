"""A long batch of the default model in which three engines and the worker are killed: every line has one result."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from openai import OpenAI

from tests.helpers.serve_process import ServeProcess

NUM_LINES = int(os.environ.get("LLM_WORKER_BATCH_LINES", "0"))
KILLS = (0.1, 0.25, 0.4)  # of an engine, when so much is finished
RESTART = 0.6
LIMIT_S = 3_000
pytestmark = [
    pytest.mark.skipif(not NUM_LINES, reason="LLM_WORKER_BATCH_LINES says how many lines: make test-extra does"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def line(i: int) -> str:
    body = {"prompt": f"The square of {i} is", "max_tokens": 1 + i % 2, "temperature": 1.0, "seed": i}
    return json.dumps({"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body})


def start(folder: Path) -> tuple[ServeProcess, OpenAI]:
    serve = ServeProcess("--files-dir", folder).ready()
    return serve, OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=9)


def wait_for(client: OpenAI, batch_id: str, count: int) -> None:
    end = time.monotonic() + LIMIT_S
    while client.batches.retrieve(batch_id).request_counts.completed < count:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_every_line_has_one_result(tmp_path: Path) -> None:
    serve, client = start(tmp_path / "files")
    file = client.files.create(file=("in.jsonl", "\n".join(map(line, range(NUM_LINES))).encode()), purpose="batch")
    created = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    for part in KILLS:
        wait_for(client, created.id, int(part * NUM_LINES))
        os.kill(serve.engine(), signal.SIGKILL)
    wait_for(client, created.id, int(RESTART * NUM_LINES))
    serve.process.kill()
    serve.close()
    serve, client = start(tmp_path / "files")
    assert client.batches.retrieve(created.id).request_counts.completed >= RESTART * NUM_LINES
    wait_for(client, created.id, NUM_LINES)
    while (batch := client.batches.retrieve(created.id)).status != "completed":
        time.sleep(0.05)
    assert batch.request_counts.model_dump() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert batch.output_file_id is not None
    results = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in results) == sorted(f"id-{i}" for i in range(NUM_LINES))
    assert all(one["response"]["status_code"] == 200 for one in results)
    serve.close()
