"""Claim 2: each ready-made part does its job on a real file, or does not.

Speed is no question here. A part that cannot be tried counts as not covered, with the reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llm_worker_bench.http_client import Address, Client, EventParser, RequestFailedError
from llm_worker_bench.results import Result
from llm_worker_bench.server_process import worker_server
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.llm import open_tokenizer
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.weights import open_checkpoint

from .harness import Finding, Harness, Table

MIN_COVERED = 0.9
KV_MEMORY, TIMEOUT_S, MAX_TRIES = "64M", 300.0, 20  # of the server that streams
BODY = {"prompt": "Once upon a time", "max_tokens": 128, "temperature": 0}
VOCABULARY = ("smollm", 49152)  # pre-tokenizer and size that the ids below belong to
TOKEN_IDS = Path(__file__).with_name("token_ids.json")
# Ids that llama.cpp's tokenizer gives for the vocabulary of the built-in model (tools/llama_cpp_token_table.py).
REFERENCE_IDS: dict[str, str] = json.loads(TOKEN_IDS.read_text(encoding="utf-8"))


class NotCoveredError(Exception):
    """A part that does not do its job, and why."""


def run(runner: Harness) -> Finding:
    """Try each part."""
    table = [["part", "does its job", "what was tried", "time"]]
    covered: list[bool] = []
    for name, try_part in PARTS.items():
        runner.report_progress(name, len(covered) / len(PARTS))
        start = time.perf_counter()
        try:
            works, outcome = True, try_part(runner.model)
        except (NotCoveredError, WorkerError) as reason:
            works, outcome = False, str(reason)
        seconds = time.perf_counter() - start
        runner.recorder.add_result(Result.from_samples(f"claim2/{name}", "s", [seconds], works=works))
        table.append([name, "yes" if works else "no", outcome, f"{seconds:.2f} s"])
        covered.append(works)
    share = sum(covered) / len(covered)
    runner.recorder.add_result(Result.exact("claim2/covered", "of 1", share, "higher"))
    parts = ", ".join(f"{row[0]}: {row[1] if row[1] == 'yes' else 'no, ' + row[2]}" for row in table[1:])
    summary = f"{sum(covered)} of {len(covered)} parts do their job on a real file ({share:.0%}): {parts}"
    return Finding("confirmed" if share >= MIN_COVERED else "refuted", summary, [Table(table)])


def _load_gguf(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    if checkpoint.format != "gguf":
        raise NotCoveredError(f"{path.name} is no GGUF file: give one")
    samples = {tensor.kind.name: tensor for tensor in checkpoint.tensors.values()}
    for kind, tensor in samples.items():
        values = tensor.dequantize()
        if values.shape != tensor.shape or not np.isfinite(values).all():
            raise NotCoveredError(f"tensor {tensor.name!r} of type {kind} does not decode")
    return f"{len(checkpoint.tensors)} tensors mapped, one of each type decoded ({', '.join(sorted(samples))})"


def _compare_token_ids(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    tokenizer = open_tokenizer(checkpoint)
    for text in REFERENCE_IDS:
        back = tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False)
        if back != text:
            raise NotCoveredError(f"{text!r} comes back as {back!r}")
    keys = checkpoint.metadata
    if (keys.get("tokenizer.ggml.pre"), len(keys.get("tokenizer.ggml.tokens", ()))) != VOCABULARY:
        raise NotCoveredError("texts come back unchanged, but no reference ids are kept for this vocabulary")
    for text, ids in REFERENCE_IDS.items():
        if tokenizer.encode(text, add_special=False) != list(map(int, ids.split())):
            raise NotCoveredError(f"the ids of {text!r} are not those of the reference tokenizer")
    return f"{len(REFERENCE_IDS)} texts give the ids of llama.cpp's tokenizer, and come back unchanged"


def _detect_family(path: Path) -> str:
    config = read_model_config(open_checkpoint(path))
    shape = f"{config.n_layers} layers, width {config.d_model}, {config.n_heads} heads on {config.n_kv_heads}"
    return f"family {config.family.name}, {shape}"


def _stream_from_server(path: Path) -> str:
    """Serve the file in a process: a stream must come in pieces and equal the whole reply."""
    with worker_server(["-m", str(path), "--kv-memory", KV_MEMORY], timeout_s=TIMEOUT_S) as server:
        for _ in range(MAX_TRIES):  # on a busy machine pieces may wait for their reader
            try:
                pieces, moments, whole = asyncio.run(_stream_and_whole(Client(Address.parse(server.url))))
            except (RequestFailedError, TimeoutError, ValueError, LookupError) as error:
                server.require_alive()
                raise NotCoveredError(f"the server's answer is not what it should be: {error}") from None
            if moments > 1:
                break
    if "".join(pieces) != whole:
        raise NotCoveredError(f"the stream says {''.join(pieces)!r}, the whole reply {whole!r}")
    if moments < 2:
        raise NotCoveredError(f"{len(pieces)} pieces came all at once")
    return f"{len(pieces)} pieces at {moments} moments, together what the whole reply says"


async def _stream_and_whole(client: Client) -> tuple[list[str], int, str]:
    """Return the texts of a stream's events, the number of reads they came in, and the text of the same whole reply."""
    pieces: list[str] = []
    moments, parser = 0, EventParser()
    streamed, whole = (json.dumps(BODY | {"stream": stream}).encode() for stream in (True, False))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async with client.request("POST", "/v1/completions", streamed) as response:
                async for part in response.parts():
                    found = [json.loads(data) for data in parser.feed(part) if data != "[DONE]"]
                    pieces += [event["choices"][0]["text"] for event in found]
                    moments += bool(found)
            async with client.request("POST", "/v1/completions", whole) as response:
                return pieces, moments, json.loads(await response.text(1 << 20))["choices"][0]["text"]
    finally:
        client.close()


PARTS: dict[str, Callable[[Path], str]] = {
    "GGUF loads": _load_gguf,
    "tokenizer equals the reference": _compare_token_ids,
    "model is detected": _detect_family,
    "HTTP streams": _stream_from_server,
}
