"""Large bodies are parsed in another process: with the result of parsing here, and whatever happens to that process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_worker_rbee.errors import (
    InferenceError,
    PayloadTooLargeError,
    ShuttingDownError,
    UnavailableError,
    WorkerError,
)
from llm_worker_rbee.server import body_process, offload
from llm_worker_rbee.server.bodies import PackedIds
from llm_worker_rbee.server.body_process import BodyProcess
from llm_worker_rbee.server.dialects import body_parsers
from llm_worker_rbee.server.offload import OffloadPool
from llm_worker_rbee.server.schema import ModelLimits, ParseOptions, ValidationError
from tests.helpers.server import Server, until

OPTIONS = [
    ParseOptions(ModelLimits(max_context=64, vocab_size=1000)),
    ParseOptions(None, ignores_unknown=True, is_stream=True),
]
CHAT = {"role": "user", "content": "x"}
BODIES: list[bytes] = [
    b'{"model": "one"}',
    b"", b"[]", b"{", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"prompt": "x", "seed": 1e999}',
    *(json.dumps(body).encode() for body in (
        {}, {"prompt": "text\n\u00e9\u6f22 \U0001f600"}, {"prompt": ["a", "b"]}, {"prompt": [1, 2.0, 3]},
        {"prompt": [[1], [2, 999]]}, {"prompt": [1] * 65}, {"prompt": [10**30]}, {"prompt": ["a", 1]}, {"prompt": ""},
        {"prompt": "x", "max_tokens": 10**30}, {"prompt": "x", "max_tokens": -1, "seed": 2**64 - 1},
        {"prompt": "x", "max_tokens": 1, "logit_bias": {"5": 1, "999": -100}}, {"prompt": "x", "logit_bias": {"x": 1}},
        {"prompt": "x", "logit_bias": {"1000": 1}}, {"prompt": "x", "temperature": 9, "top_k": -7, "zap": 1, "zip": 2},
        {"prompt": "x", "stop": ["a", "b"], "n": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "x", "max_tokens": 0}, {"prompt": "x", "metadata": {"a": [1, {"b": None}]}, "user": "u"},
        {"prompt": "x", "max_tokens": 5, "job_id": "a", "timeout_ms": 5, "priority": -3},
        {"lora_name": "a", "lora_path": "b"}, {"lora_name": "a"},
        {"messages": [CHAT]}, {"messages": [CHAT], "max_tokens": 1, "job_id": "a b"}, {"messages": [{"role": "x"}]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}, CHAT]},
        {"messages": [CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "logprobs": True},
        {"messages": [CHAT], "top_logprobs": 3}, {"messages": [CHAT], "max_tokens": 1, "max_completion_tokens": 2},
        {"text": "abc", "add_special": False}, {"text": 5}, {"tokens": [1, 2]}, {"tokens": [-1]}, {"tokens": "x"},
        {"job_id": "j"}, {"input": "x", "stream": True}, {"input": [CHAT, {"type": "zap"}]},
        {"input": [CHAT, {"type": "reasoning", "content": [{"text": "y"}]}, {"type": "message", **CHAT}], "tools": [
            {"type": "custom", "name": "f"}, {"type": "namespace", "name": "n_", "tools": [{"type": "zap"}]}]},
        {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
        {"text_1": "a", "text_2": ["b", "c"]}, {"requests": [{"custom_id": "a", "params": {"b": [1]}}]},
        {"input_file_id": "a", "endpoint": "/v1/completions"},
        {"source": "a", "destination": "b"},
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Iterator[BodyProcess]:
    process = BodyProcess()
    yield process
    process.close()


@pytest.fixture
def process() -> Iterator[BodyProcess]:
    made = BodyProcess()
    yield made
    made.close()


def outcome(parse: Any) -> Any:
    """Return the record, or all that a client is told of an error."""
    try:
        return parse()
    except WorkerError as error:
        issues = error.issues if isinstance(error, ValidationError) else None
        return type(error), str(error), error.code, error.status, getattr(error, "field", None), issues


def test_unexpected_error_is_one_of_the_worker(shared: BodyProcess, caplog: pytest.LogCaptureFixture) -> None:
    """A parser that does not exist stands for any mistake in one; the process goes on."""
    before = outcome(partial(shared.parse, "job", b'{"prompt": "x"}', ParseOptions(), dict))
    pid = shared.pid
    with pytest.raises(InferenceError, match="internal error of the worker"):
        shared.parse("none", b"{}", ParseOptions(), dict)
    assert "KeyError at body_process.py" in caplog.text
    assert outcome(partial(shared.parse, "job", b'{"prompt": "x"}', ParseOptions(), dict)) == before
    assert shared.pid == pid


@pytest.mark.parametrize("parser", body_parsers())
def test_body_process_equals_parsing_here(shared: BodyProcess, parser: str) -> None:
    here, there = body_parsers()[parser][0], partial(shared.parse, parser, record=body_parsers()[parser][1])
    given = [(body, options) for body in BODIES for options in OPTIONS]
    outcomes = [(outcome(partial(here, *one)), outcome(partial(there, *one))) for one in given]
    assert [pair for pair in outcomes if pair[0] != pair[1]] == []
    assert len({isinstance(one, tuple) for one, _ in outcomes}) == 2  # some are accepted, some refused


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(
    ["prompt", "messages", "max_tokens", "temperature", "stop", "logit_bias", "n", "seed", "text", "tokens", "other"]
)


@settings(max_examples=50, deadline=None)
@given(
    body=st.dictionaries(names, json_values, max_size=4), parser=st.sampled_from([*body_parsers()]),
    padding=st.sampled_from(["before", "inside", "after"]),
)  # fmt: skip
def test_offload_padded_body_equals_small_one(body: dict[str, Any], parser: str, padding: str) -> None:
    """White space changes the way that a body takes and nothing else; a message of an error may name its position."""
    small = json.dumps(body).encode()
    blank = b" " * offload.LARGE_BYTES
    large = {"before": blank + small, "inside": small[:-1] + blank + b"}", "after": small + blank}[padding]

    async def parsed() -> tuple[Any, Any]:
        return await offload_outcome(pool, small), await offload_outcome(pool, large)

    async def offload_outcome(pool: OffloadPool, raw: bytes) -> Any:
        try:
            record = await pool.parse(parser, raw, OPTIONS[0])
        except WorkerError as error:
            return outcome_of(error)
        return record

    pool = shared_pool()
    here, there = asyncio.run(parsed())
    assert here == there


def outcome_of(error: WorkerError) -> Any:
    def fail() -> None:
        raise error

    return outcome(fail)


_pools: list[OffloadPool] = []


def shared_pool() -> OffloadPool:
    if not _pools:
        _pools.append(OffloadPool())
        _pools[-1].parsers = body_parsers()
    return _pools[0]


@pytest.fixture(scope="module", autouse=True)
def pools_are_closed() -> Iterator[None]:
    yield
    for pool in _pools:
        pool.close()
    _pools.clear()


def test_process_killed_between_bodies_is_replaced(process: BodyProcess, caplog: pytest.LogCaptureFixture) -> None:
    process.parse("detokenize", b'{"tokens": [1]}', OPTIONS[0], PackedIds)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert process.parse("detokenize", b'{"tokens": [2]}', OPTIONS[0], PackedIds).view().tolist() == [2]
    assert process.pid != first


def replaced_program(folder: Path, how: str, *, is_once: bool) -> str:
    """Return a program that reads a request and then ends or hangs, once or always; else it is the real one."""
    marker = folder / "marker"
    marker.touch()
    end = {"kill": "os.kill(os.getpid(), signal.SIGKILL)", "hang": "time.sleep(600)", "exit": "sys.exit(3)"}[how]
    remove = f"os.remove({str(marker)!r})" if is_once else "pass"
    return f"""
import os, signal, sys, time
if os.path.exists({str(marker)!r}):
    sys.stdin.buffer.readline()
    {remove}
    {end}
{body_process.PROGRAM}
"""


@pytest.mark.parametrize(("how", "message"), [("kill", "SIGKILL"), ("hang", "in time"), ("exit", "status 3")])
def test_process_that_dies_or_hangs_parses_again_then_is_unavailable(
    process: BodyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    if how == "hang":
        monkeypatch.setattr(body_process, "MAX_WAIT_S", 2.0)
        monkeypatch.setattr(body_process, "MAX_WAIT_S_PER_BYTE", 0.0)
    monkeypatch.setattr(body_process, "PROGRAM", replaced_program(tmp_path, how, is_once=True))
    body = b'{"tokens": [5]}' + b" " * (4 << 20)
    assert process.parse("detokenize", body, OPTIONS[0], PackedIds).view().tolist() == [5]
    process.close()
    monkeypatch.undo()
    monkeypatch.setattr(body_process, "MAX_WAIT_S", 0.5)
    monkeypatch.setattr(body_process, "MAX_WAIT_S_PER_BYTE", 0.0)
    monkeypatch.setattr(body_process, "PROGRAM", replaced_program(tmp_path, how, is_once=False))
    other = BodyProcess()
    with pytest.raises(UnavailableError, match=message) as caught:
        other.parse("detokenize", body, OPTIONS[0], PackedIds)
    assert (caught.value.status, caught.value.retriable) == (503, True)
    assert other.pid is None


def test_process_closed_in_the_middle_of_a_body(
    process: BodyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_process, "PROGRAM", replaced_program(tmp_path, "hang", is_once=False))
    caught: list[BaseException] = []

    def parse() -> None:
        try:
            process.parse("detokenize", b"{}" + b" " * (4 << 20), OPTIONS[0], PackedIds)
        except WorkerError as error:
            caught.append(error)

    thread = threading.Thread(target=parse)
    thread.start()
    until(lambda: process.pid is not None)
    process.close()
    thread.join(10)
    assert [type(error) for error in caught] == [ShuttingDownError]


def test_body_over_memory_limit_is_refused(process: BodyProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "import llm_worker_rbee.server.body_process as c; c.MEMORY_PER_BYTE = 0; c.BASE_MEMORY = 100 << 20;"
    head, _, rest = body_process.PROGRAM.partition("from ")
    monkeypatch.setattr(body_process, "PROGRAM", f"{head}{few}from {rest}")
    nested = b'{"tokens": [' + b",".join([b"{}"] * 1_000_000) + b"]}"
    with pytest.raises(PayloadTooLargeError, match="100 MiB of memory"):
        process.parse("detokenize", nested, OPTIONS[0], PackedIds)
    assert process.parse("detokenize", b'{"tokens": [1]}', OPTIONS[0], PackedIds).view().tolist() == [1]


def test_process_imports_neither_arrays_nor_the_framework() -> None:
    """They would take 20 MB and half a second before the first body (docs/decisions/server.md)."""
    modules = "llm_worker_rbee.server.body_process, llm_worker_rbee.server.dialects"
    code = f"import sys, {modules}; print({{'numpy', 'starlette', 'uvicorn'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_process_ends_with_its_parent() -> None:
    """Also if the parent is killed."""
    script = (
        "import time\nfrom llm_worker_rbee.server.bodies import PackedIds\n"
        "from llm_worker_rbee.server.schema import ParseOptions\n"
        "from llm_worker_rbee.server.body_process import BodyProcess\n"
        "p = BodyProcess(); p.parse('detokenize', b'{\"tokens\": []}', ParseOptions(), PackedIds)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text())


def test_cancelled_body_frees_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_process, "PROGRAM", replaced_program(tmp_path, "hang", is_once=False))

    async def cancelled() -> None:
        pool = OffloadPool()
        pool.parsers = body_parsers()
        body = b"{}" + b" " * offload.MAX_QUEUED_BYTES
        tasks = [asyncio.ensure_future(pool.parse("detokenize", body, OPTIONS[0])) for _ in range(1)]
        await asyncio.sleep(0)
        assert pool._large._num_bytes > offload.MAX_QUEUED_BYTES
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool._large._num_bytes == 0
        pool.close()

    asyncio.run(cancelled())


def test_server_with_killed_process_answers(server: Server) -> None:
    large = {"tokens": [97] * offload.LARGE_BYTES}
    assert server.post("/detokenize", large).json() == {"text": "a" * offload.LARGE_BYTES}
    pid = server.worker.offload.body_process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert server.post("/detokenize", large).json() == {"text": "a" * offload.LARGE_BYTES}


def test_child_refusals_are_all_error_classes_of_parsers() -> None:
    for kind in body_process.REFUSALS.values():
        error = kind("message")
        assert outcome_of(body_process.Refusal.of(error).error()) == outcome_of(error)
