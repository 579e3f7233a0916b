"""Guided requests at the engine's end of the protocol: compiled in a thread, refused alone, same after a restart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.errors import GrammarDeadEndError, InvalidRequestError
from llm_worker_rbee.sampling_params import StructuredOutputsParams
from llm_worker_rbee.token_engine.engine_loop import EngineLoop
from llm_worker_rbee.token_engine.protocol import TokenOutput
from llm_worker_rbee.token_engine.supervisor import SupervisedEngine
from tests.conftest import with_kernels
from tests.helpers import tiny_models
from tests.helpers.token_engine_runs import load_of, outputs_of, request, summary


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kernels(tiny_models.write_random(tmp_path_factory.mktemp("guided") / "random.gguf"))


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, kv_memory=16 << 20)


def guided(**kind: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kind)


def run_all(loop: EngineLoop) -> dict[int, list[TokenOutput]]:
    found: dict[int, list[TokenOutput]] = {}
    while loop.has_work:
        for output in loop.step().outputs:
            found.setdefault(output.id, []).append(output)
    return found


def text_of(outputs: list[TokenOutput]) -> str:
    tokens = [token for output in outputs for token in output.tokens]
    assert outputs[-1].finish_reason == "stop"
    tokens.pop()  # the end of the text
    return b"".join(map(tiny_models.token_bytes, tokens)).decode()


def test_other_requests_go_on_while_a_grammar_compiles(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, gate = EngineLoop(llm.engine), threading.Event()
    compiler = llm.engine.grammar_compiler
    assert compiler is not None
    matcher_of = compiler._matcher_of

    def slow(params: StructuredOutputsParams) -> Any:
        assert gate.wait(60)
        return matcher_of(params)

    monkeypatch.setattr(compiler, "_matcher_of", slow)
    waiting, dropped = (request(1, 20, structured_outputs=guided(regex="[ab]{4}")) for _ in range(2))
    free = request(2, 10)
    for one in (waiting, dropped, free):
        loop.submit(one.submitted)
    found: list[TokenOutput] = []
    while not found or found[-1].finish_reason is None:
        found += loop.step().outputs
    assert {output.id for output in found} == {free.id}
    assert loop.has_work
    assert loop.step().outputs == []  # it waits a moment, and blocks no one
    loop.abort(dropped.id)
    gate.set()
    rest = run_all(loop)
    assert set(rest) == {waiting.id}
    assert len(text_of(rest[waiting.id])) == 4
    assert loop.num_requests == 0


def test_invalid_grammar_ends_its_request_only(llm: LLM) -> None:
    loop = EngineLoop(llm.engine)
    bad, good = (
        request(1, 9, structured_outputs=guided(regex="(")),
        request(2, 9, structured_outputs=guided(regex="ab")),
    )
    for one in (bad, good):
        loop.submit(one.submitted)
    found = run_all(loop)
    assert isinstance(found[bad.id][-1].error, InvalidRequestError)
    assert text_of(found[good.id]) == "ab"


def test_tokens_come_before_the_error_of_a_dead_end(llm: LLM) -> None:
    endless = {"$ref": "#/$defs/x"}
    schema = {"type": "array", "prefixItems": [{"const": 12}, endless], "minItems": 2, "$defs": {"x": endless}}
    stream = llm.stream("a", seed=1, max_tokens=60, structured_outputs=guided(json={**schema, "items": False}))
    with pytest.raises(GrammarDeadEndError, match="allows no token"):
        stream.completion()
    assert stream.so_far().text.startswith("[")


def test_llm_generate_chat_and_n(llm: LLM) -> None:
    fields = {"structured_outputs": guided(choice=["yes", "no"]), "max_tokens": 9, "seed": 1}
    assert llm.generate("Is it?", **fields).text in ("yes", "no")
    assert llm.chat([{"role": "user", "content": "Is it?"}], **fields).text in ("yes", "no")
    several = llm.generate(["a", "b"], n=3, **fields)
    assert {one.text for group in several for one in group} <= {"yes", "no"}
    assert {one.finish_reason for group in several for one in group} == {"stop"}
    with_stop = llm.generate("a", stop=["b"], structured_outputs=guided(regex="aab+c"), max_tokens=9)
    assert (with_stop.text, with_stop.finish_reason, with_stop.stop_sequence) == ("aa", "stop", "b")


def test_engine_that_dies_gives_the_same_guided_answer(path: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["alpha", "beta", 3]}, "minItems": 9}

    async def main() -> None:
        engine = SupervisedEngine(load_of(path))
        await engine.start(lambda stage: None)
        try:
            params = {"structured_outputs": guided(json=schema), "close_on_length": True, "logprobs": 2}
            expected = summary(await outputs_of(engine.submit(request(7, 100, **params))))
            stream = engine.submit(request(7, 100, **params))
            first = await stream.next_outputs()
            os.kill(engine._child.process.pid, signal.SIGKILL)
            found = summary([*first, *await outputs_of(stream)])
            assert engine.num_restarts == 1
            assert found == expected
            assert found[3] == "stop"
            assert len(json.loads(b"".join(map(tiny_models.token_bytes, found[0][:-1])))) >= 9
        finally:
            await engine.stop(GrammarDeadEndError("done"))

    asyncio.run(asyncio.wait_for(main(), 120))


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
DEEP = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**CHAIN, "d3000": {"type": "null"}}}


def test_offline_api_checks_grammars_and_names_the_tool(llm: LLM) -> None:
    """Nothing reaches llguidance in this process that was not compiled in a child."""
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.json cannot be used"):
        llm.generate("a", structured_outputs=guided(json=DEEP))
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.grammar cannot be used"):
        llm.generate("a", structured_outputs=guided(grammar="root ::= ("))
    assert llm.generate("a", structured_outputs=guided(grammar='root ::= "xy"'), max_tokens=9).text == "xy"
