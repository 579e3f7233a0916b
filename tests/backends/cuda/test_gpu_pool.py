"""On a real GPU: `serve` with several models, whose memory the driver has back after each unload."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llm_worker_rbee.backends.cuda import device
from tests.helpers.serve_process import ServeProcess
from tests.helpers.server import write_model

NUM_CYCLES = 50


def used_bytes(gpu: str) -> int:
    """Return the memory of a GPU that is in use, as NVML has it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


@pytest.mark.gpu
@pytest.mark.skipif(device.is_interpreted(), reason="needs a GPU")
@pytest.mark.timeout(1200)
def test_memory_is_free_after_each_of_many_unloads(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / f"{name}.gguf")
    running = ServeProcess("--device", "cuda:0", "--models-dir", tmp_path, "--kv-memory", "64M", "--max-models", "2")
    try:
        running.ready()
        before = used_bytes("0")
        for i in range(NUM_CYCLES):
            name = ("one", "two")[i % 2]
            reply = running.http.post("/v1/completions", json={"model": name, "prompt": ">", "max_tokens": 2})
            assert reply.status_code == 200, reply.text
            planned = running.http.get("/health").json()["memory"]
            loaded = used_bytes("0")
            assert before < loaded <= before + planned["used_bytes"] <= before + planned["limit_bytes"]
            (entry,) = running.http.get("/api/ps").json()["models"]
            assert entry["size_vram"] == entry["size"] == planned["used_bytes"]
            assert running.http.post("/models/unload", json={"model": name}).status_code == 200
            assert abs(used_bytes("0") - before) <= 0.02 * loaded
    finally:
        running.close()
