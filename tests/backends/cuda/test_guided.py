"""Guided answers of the whole GPU path, under Triton's interpreter: steps ahead, masks, sampling on the device."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.backends.reference import ReferenceBackend  # noqa: E402
from llm_worker_rbee.config import EngineConfig  # noqa: E402
from llm_worker_rbee.engine import async_scheduling  # noqa: E402
from llm_worker_rbee.engine.engine import Engine  # noqa: E402
from llm_worker_rbee.engine.request import Request  # noqa: E402
from llm_worker_rbee.models import Transformer, load_model, read_model_config  # noqa: E402
from llm_worker_rbee.sampling_params import StructuredOutputsParams  # noqa: E402
from llm_worker_rbee.structured_outputs.grammar import GrammarCompiler  # noqa: E402
from llm_worker_rbee.text_model import open_tokenizer  # noqa: E402
from llm_worker_rbee.weights import open_checkpoint  # noqa: E402
from tests.engine.test_async_guided import guided  # noqa: E402
from tests.engine.test_async_scheduling import SyncBackend  # noqa: E402
from tests.helpers import cuda_models, engine_runs, tiny_models  # noqa: E402
from tests.helpers.synthetic import Shape  # noqa: E402

ops = CudaBackend(deterministic=True)
SHAPE = Shape(1, 64, 2, 1, 64, tiny_models.VOCAB, 64, head_dim=32)
CODE = StructuredOutputsParams(regex="[a-f]{2}-[0-9]")
COLOUR = StructuredOutputsParams(choice=["red", "grey", "pink"])


@pytest.fixture(scope="module")
def compiler(tiny_file: Path) -> GrammarCompiler:
    return GrammarCompiler(lambda: open_tokenizer(open_checkpoint(tiny_file)), tiny_models.VOCAB)


def load(backend: Any) -> Transformer:
    checkpoint = cuda_models.random_checkpoint(SHAPE, "F16")
    return load_model(checkpoint, backend, read_model_config(checkpoint))


def make_engine(model: Transformer, compiler: GrammarCompiler) -> Engine:
    engine = Engine(model, EngineConfig(max_context=32, n_blocks=8, debug=True))
    engine.grammar_compiler = compiler
    return engine


def make_requests(compiler: GrammarCompiler) -> list[Request]:
    """Greedy and drawn, guided and not."""
    return [
        guided(compiler, CODE, 8, temperature=0, logprobs=2, logprobs_mode="masked"),
        guided(compiler, COLOUR, 3, 3, repetition_penalty=1.2, top_p=0.9, logprobs=1),
        guided(compiler, None, 4, prompt=[9, 8, 7], temperature=0, presence_penalty=0.5),
    ]


def test_guided_answers_are_those_of_sync_steps_and_of_the_reference(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_scheduling, "GAP_S", 1e9)  # a gap between steps that no draft makes up for
    model, found = load(ops), []
    for made in (model, replace(model, ops=SyncBackend(ops)), load(ReferenceBackend())):  # type: ignore[arg-type]
        requests = make_requests(compiler)
        listener = engine_runs.run(make_engine(made, compiler), *requests)
        found.append([listener.answer(request) for request in requests])
    ahead, plain, expected = found
    assert ahead == plain
    assert [one.tokens for one in ahead] == [one.tokens for one in expected]
    for ours, theirs in zip(ahead, expected, strict=True):
        assert [one.logprob for one in ours.logprobs] == pytest.approx(
            [one.logprob for one in theirs.logprobs], abs=0.1
        )
    assert [one.finish for one in ahead] == ["stop", "length", "length"]
    assert re.fullmatch(CODE.regex or "", bytes(ahead[0].tokens).decode())
    assert bytes(ahead[1].tokens).decode() in ("red", "gre", "pin")


def test_abort_of_guided_request_in_flight(compiler: GrammarCompiler) -> None:
    """Its rows of the step in flight are discarded; the other request goes on as if alone."""
    model = load(ops)

    def answer(*others: Request) -> list[int]:
        engine, kept = make_engine(model, compiler), guided(compiler, CODE, 8, 7)
        for request in (*others, kept):
            engine.add(request)
        engine.step()
        for other in others:
            assert engine.abort(other)
        while engine.has_work:
            engine.step()
        assert engine.scheduler.pool.num_free == 8
        return kept.tokens

    assert answer() == answer(guided(compiler, COLOUR, 8, 8))
