"""Greedy answers of a real file here and at llama-server (LLM_WORKER_LLAMA_SERVER is its program): the same tokens, up
to where the log-probabilities of two tokens nearly tie."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm_worker_rbee import LLM
from tests.helpers.serve_process import until
from tests.real.test_generation import PROMPTS

PROGRAM = os.environ.get("LLM_WORKER_LLAMA_SERVER")
NUM_TOKENS = 32
MAX_GAP = 0.3  # of log-probability: its activations have 8 bits
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="LLM_WORKER_LLAMA_SERVER names no llama-server")


@pytest.fixture(scope="module")
def peer(coder: Path) -> Iterator[httpx.Client]:
    """Run llama-server with the same file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [str(PROGRAM), "-m", str(coder), "-c", "1024", "-t", "2", "--port", str(port)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            until(lambda: process.poll() is not None or _is_ready(client))
            yield client
    finally:
        process.kill()
        process.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_greedy_tokens_are_those_of_llama_server(coder: Path, peer: httpx.Client) -> None:
    llm, num_same, gaps = LLM(coder, max_context=512), 0, list[float]()
    for prompt in PROMPTS:
        ours = llm.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, logprobs=5, ignore_eos=True)
        body = {
            "prompt": ours.prompt_tokens,
            "n_predict": NUM_TOKENS,
            "temperature": 0,
            "n_probs": 5,
            "ignore_eos": True,
        }
        theirs: list[Any] = peer.post("/completion", json=body).json()["completion_probabilities"]
        for entry, other in zip(ours.logprobs, theirs, strict=True):
            if entry.token != other["id"]:
                logprobs = {token["id"]: token["logprob"] for token in other["top_logprobs"]}
                gaps.append(logprobs[other["id"]] - logprobs[entry.token])  # raises if it is not among the first
                break
            num_same += 1
    total = NUM_TOKENS * len(PROMPTS)
    print(f"{coder.stem}: {num_same} of {total} tokens before the first difference; gaps there: {gaps}")
    assert max(gaps, default=0.0) < MAX_GAP
    assert num_same > total // 3
