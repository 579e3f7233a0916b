"""A pooling model in a process of its own: rows of many requests, a process that dies, and what it is refused for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_worker_rbee.backends.ops import Ints
from llm_worker_rbee.config import PoolingOptions
from llm_worker_rbee.errors import InferenceError, InvalidRequestError, ModelFileError, ShuttingDownError
from llm_worker_rbee.load_pooling import load_pooling
from llm_worker_rbee.token_engine import pooling_supervisor
from llm_worker_rbee.token_engine.pooling_supervisor import SupervisedPooling
from llm_worker_rbee.token_engine.protocol import Load
from tests.helpers.process import is_alive
from tests.helpers.tiny_pooling import MAX_LENGTH, WORDS, load_of, require_same, write_bert

LIMIT_S = 120
# A sitecustomize module: an engine that computes the token 77 dies.
POISON = """
import os, signal, sys
if any("token_engine.child" in word for word in sys.orig_argv):
    from llm_worker_rbee.engine.pooling_engine import PoolingEngine
    add = PoolingEngine.add
    def dying(self, request_id, sequences, token_types=None):
        if any(77 in ids for ids in sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        return add(self, request_id, sequences, token_types)
    PoolingEngine.add = dying
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("pooling") / "tiny")


def texts(count: int, seed: int = 0) -> list[Ints]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 70, rng.integers(1, MAX_LENGTH + 1)) for _ in range(count)]


def run(main: Callable[[SupervisedPooling], Coroutine[Any, Any, None]], load: Load) -> None:
    async def whole() -> None:
        engine = SupervisedPooling(load, max_restarts=100)
        try:
            await engine.start(lambda stage: None)
            await main(engine)
        finally:
            await engine.stop(ShuttingDownError("stopped"))
        assert not is_alive(engine._child.process.pid)

    asyncio.run(asyncio.wait_for(whole(), LIMIT_S))


def test_rows_are_the_same_alone_in_a_batch_and_after_a_death(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling_supervisor, "INLINE_BYTES", 1000)
    model = load_pooling(PoolingOptions(model=str(folder), device="cpu", backend="reference")).model
    nice = 5 + os.getpriority(os.PRIO_PROCESS, 0)

    async def main(engine: SupervisedPooling) -> None:
        assert os.getpriority(os.PRIO_PROCESS, engine._child.process.pid) == nice
        if (group := Path(f"/proc/{engine._child.process.pid}/autogroup")).exists():
            assert group.read_text().endswith(f"nice {nice}\n")
        assert (engine.info.output_dim, engine.info.max_length) == (32, MAX_LENGTH)
        given = [texts(60), texts(1, 1), texts(7, 2)]
        expected = [np.concatenate([model.run([ids]) for ids in sequences]) for sequences in given]
        computing = [asyncio.ensure_future(engine.compute(sequences)) for sequences in given]
        while engine.stats.num_steps == 0:  # some rows have come, others are computed again
            await asyncio.sleep(0.001)
        os.kill(engine._child.process.pid, signal.SIGKILL)
        for found, rows in zip(await asyncio.gather(*computing), expected, strict=True):
            require_same(found, rows)
        assert (engine.num_restarts, engine.status(), engine.num_requests) == (1, "healthy", 0)
        await engine.restart()
        require_same(await engine.compute(given[1]), expected[1])

    run(main, msgspec.structs.replace(load_of(folder), nice=nice))


def test_cancelled_request_leaves_the_engine(folder: Path) -> None:
    async def main(engine: SupervisedPooling) -> None:
        computing = asyncio.ensure_future(engine.compute(texts(2000)))
        while engine.stats.num_steps == 0:
            await asyncio.sleep(0.001)
        computing.cancel()
        await engine.compute(texts(1))
        assert engine.num_requests == 0
        assert engine.stats.num_sequences < 2000

    run(main, load_of(folder))


def test_request_that_ends_processes_alone_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert len(WORDS) > 77

    async def main(engine: SupervisedPooling) -> None:
        poison = asyncio.ensure_future(engine.compute([np.array([77])]))
        other = asyncio.ensure_future(engine.compute(texts(3)))
        with pytest.raises(InferenceError, match="twice"):
            await poison
        assert (await other).shape == (3, 32)
        assert (engine.num_restarts, engine.num_requests) == (4, 0)  # two deaths together, two alone

    run(main, load_of(folder))


def test_model_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    async def main(engine: SupervisedPooling) -> None:
        raise AssertionError("it was loaded")

    with pytest.raises(InvalidRequestError, match="reranker"):
        run(main, load_of(folder, "rerank"))
    with pytest.raises(ModelFileError, match="NaN"):
        run(main, load_of(write_bert(tmp_path / "damaged", is_broken=True)))
