"""An engine that dies loses no request: killed in every state, with penalties and log-probabilities; what kills it
alone is refused; what is no message ends that engine only."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_worker_rbee.errors import DeadlineError, InferenceError, RequestCancelledError, WorkerError
from llm_worker_rbee.token_engine import supervised_process
from llm_worker_rbee.token_engine.child_process import ChildProcess
from llm_worker_rbee.token_engine.protocol import Load, Submit, TokenOutput
from llm_worker_rbee.token_engine.supervisor import SupervisedEngine
from tests.conftest import ON_CPU, with_kernels
from tests.helpers import tiny_models
from tests.helpers.engine_faults import INVALID, KILLS, EngineFaults
from tests.helpers.process import is_alive
from tests.helpers.server import write_model
from tests.helpers.token_engine_runs import POISON, load_of, outputs_of, request, summary

LIMIT_S = 120


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.random_hf(max_position_embeddings=1024)  # for answers that take a while on any machine
    return with_kernels(tiny_models.write_random(tmp_path_factory.mktemp("random") / "random.gguf", model))


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineFaults:
    """Faults of engines that are restarted at once, however many there are."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(supervised_process, "MAX_BACKOFF_S", supervised_process.FIRST_BACKOFF_S)
    return EngineFaults(tmp_path)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    path = with_kernels(write_model(tmp_path_factory.mktemp("supervised") / "tiny.gguf"))
    return load_of(path)


def run(main: Callable[[SupervisedEngine], Coroutine[Any, Any, None]], load: Load, **options: Any) -> None:
    """Run a test with a supervised engine, with a bound on all of it; its process must be gone afterwards."""

    async def whole() -> None:
        engine = SupervisedEngine(load, **{"max_restarts": 100, **options})
        processes = [engine._child.process.pid]
        try:
            await engine.start(lambda stage: None)
            await main(engine)
        finally:
            processes.append(engine._child.process.pid)
            await engine.stop(RequestCancelledError("stopped"))
        assert not any(map(is_alive, processes))

    asyncio.run(asyncio.wait_for(whole(), LIMIT_S))


def kill(engine: SupervisedEngine, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(engine._child.process.pid, number)


async def restarted(engine: SupervisedEngine, times: int) -> None:
    while engine.num_restarts < times or engine.status() != "healthy":
        await asyncio.sleep(0.005)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 3, "prompt_logprobs": True},
    "greedy": {"temperature": 0.0},
}


def test_engine_killed_in_decode_goes_on_with_the_same_output(load: Load) -> None:
    """All kinds of parameters at once, two deaths, the second while the first output comes again."""

    async def main(engine: SupervisedEngine) -> None:
        requests = [(i, params) for i, params in enumerate(CASES.values())]
        expected = [summary(await outputs_of(engine.submit(request(i, 4000, **params)))) for i, params in requests]
        streams = [engine.submit(request(i, 4000, **params)) for i, params in requests]
        found: list[list[TokenOutput]] = [await stream.next_outputs() for stream in streams]
        for number in (1, 2):
            kill(engine, (signal.SIGKILL, signal.SIGSEGV)[number - 1])
            await restarted(engine, number)
            for outputs, stream in zip(found, streams, strict=True):
                outputs += await stream.next_outputs()
        for outputs, stream in zip(found, streams, strict=True):
            outputs += await outputs_of(stream)
        assert [summary(outputs) for outputs in found] == expected
        assert all(stream.request.num_restarts == 2 for stream in streams)
        assert engine.stats().num_queried_tokens == 2 * len(requests)  # prompts of one token, each counted once

    run(main, load)


@ON_CPU
def test_engine_killed_in_any_state_of_a_request(load: Load, faults: EngineFaults, random_model: Path) -> None:
    """A model whose every token depends on all before. Six requests for four batch slots: some are queued."""

    async def main(engine: SupervisedEngine) -> None:
        cases = [*CASES.values(), {}]
        made = [partial(request, i, 400, prompt=list(range(60 + i)), **params) for i, params in enumerate(cases)]
        made += [partial(request, 9, 0, prompt=list(range(90)), prompt_logprobs=True)]  # it is only scored
        expected = [summary(await outputs_of(engine.submit(one()))) for one in made]
        assert len({str(one) for one in expected}) == len(made)
        for times, state in enumerate(KILLS, 1):
            faults.arm(state)
            streams = [engine.submit(one()) for one in made]
            assert [summary(await outputs_of(stream)) for stream in streams] == expected, state
            assert (engine.num_restarts, faults.is_armed) == (times, False), state
        num_rounds = 1 + len(KILLS)
        assert engine.stats().num_queried_tokens == num_rounds * sum(one().num_prompt_tokens for one in made)
        kill(engine)  # without a request
        await restarted(engine, len(KILLS) + 1)
        assert summary(await outputs_of(engine.submit(made[0]()))) == expected[0]

    settings = {"max_batch": 4, "max_step_tokens": 32, "prefix_cache": False}
    run(main, load.with_options(model=str(random_model), **settings))


def test_requests_that_are_submitted_during_a_restart_wait(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a timeout is passed on: it counts from the first submission."""
    sent: list[Any] = []
    send = ChildProcess.send
    monkeypatch.setattr(ChildProcess, "send", lambda self, message: (sent.append(message), send(self, message)))

    async def main(engine: SupervisedEngine) -> None:
        expected = summary(await outputs_of(engine.submit(request(1))))
        kill(engine)
        while engine.status() == "healthy":
            await asyncio.sleep(0.001)
        assert engine.status() == "loading"
        late, aborted, expired = (engine.submit(request(1, timeout_s=t)) for t in (LIMIT_S, None, 1e-6))
        aborted.abort()
        assert summary(await outputs_of(late)) == expected
        with pytest.raises(RequestCancelledError):
            await outputs_of(aborted)
        with pytest.raises(DeadlineError, match="after 0 output tokens"):
            await outputs_of(expired)
        assert engine.num_restarts == 1
        left = [message.timeout_s for message in sent if isinstance(message, Submit)]
        assert (len(left), left[0]) == (2, None)
        assert left[1] <= LIMIT_S - supervised_process.FIRST_BACKOFF_S

    run(main, load)


@ON_CPU
def test_request_that_kills_engines_alone_is_refused(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies in the step after token 20 of one request; the others finish with their own output."""
    (tmp_path / "sitecustomize.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main(engine: SupervisedEngine) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(3)]
        streams = [engine.submit(request(i)) for i in range(3)]
        poison = engine.submit(request(666))
        with pytest.raises(InferenceError, match="SIGKILL twice while it computed this request alone"):
            await outputs_of(poison)
        assert [summary(await outputs_of(stream)) for stream in streams] == expected
        # Twice beside others, twice alone; once more if its token 20 was lost at one death and delivered at the next,
        # since a request that gets further is no suspect any more.
        assert engine.num_restarts in (4, 5)
        assert engine.status() == "healthy"

    run(main, load)


def test_too_many_deaths_end_in_failed(load: Load) -> None:
    async def main(engine: SupervisedEngine) -> None:
        stream = engine.submit(request(1, 60_000))
        for times in (1, 2):
            await stream.next_outputs()  # it gets on, so it is not blamed
            kill(engine)
            await restarted(engine, times)
            while len(stream.request.tokens) <= engine._requests[stream.request.id].progress_at_death:
                await stream.next_outputs()
        kill(engine)
        with pytest.raises(InferenceError, match="restarted too often"):
            await outputs_of(stream)
        assert engine.status() == "failed"
        with pytest.raises(InferenceError, match="failed"):
            engine.submit(request(1))

    run(main, load, max_restarts=2)


@ON_CPU
def test_invalid_message_ends_that_engine_only(
    load: Load, faults: EngineFaults, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(engine: SupervisedEngine) -> None:
        expected = summary(await outputs_of(engine.submit(request(1, 50))))
        for times, fault in enumerate(INVALID, 1):
            faults.arm(fault)
            assert summary(await outputs_of(engine.submit(request(1, 50)))) == expected, fault
            assert engine.num_restarts == times, fault
        assert caplog.text.count("after an invalid message") == len(INVALID)

    run(main, load)


def test_engine_that_gets_no_message_ends(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    async def main(engine: SupervisedEngine) -> None:
        expected = summary(await outputs_of(engine.submit(request(1, 200))))
        stream = engine.submit(request(1, 200))
        assert engine._child._transport is not None
        engine._child._transport.write(b"\xff" * 100)
        assert summary(await outputs_of(stream)) == expected
        assert engine.num_restarts == 1
        assert "the engine ends: ProtocolError at" in caplog.text

    run(main, load)


def test_engine_that_does_not_read_holds_no_front_up(load: Load) -> None:
    """More than a socket buffers is submitted while the engine is stopped; the event loop goes on, and all of it is
    answered later."""

    async def main(engine: SupervisedEngine) -> None:
        made = [partial(request, i, 1, prompt=[1] * 4000) for i in range(200)]
        kill(engine, signal.SIGSTOP)
        streams = [engine.submit(one()) for one in made]
        assert engine._child._transport is not None
        assert engine._child._transport.get_write_buffer_size() > 0
        kill(engine, signal.SIGCONT)
        assert [len((await outputs_of(stream))[0].tokens) for stream in streams] == [1] * len(made)
        assert engine.num_restarts == 0

    run(main, load)


def test_stalled_engine_is_restarted(load: Load) -> None:
    async def main(engine: SupervisedEngine) -> None:
        expected = summary(await outputs_of(engine.submit(request(1))))
        kill(engine, signal.SIGSTOP)
        stream = engine.submit(request(1))
        await restarted(engine, 1)
        assert summary(await outputs_of(stream)) == expected

    run(main, load, stall_timeout_s=0.3, restart_on_stall=True)


def test_first_load_that_fails_is_raised_and_not_repeated(load: Load, tmp_path: Path) -> None:
    async def main() -> None:
        for options, message in (
            ({"model": str(tmp_path / "none.gguf")}, "none.gguf"), ({"max_context": 1 << 20}, "max_context"),
        ):  # fmt: skip
            engine = SupervisedEngine(load.with_options(**options))
            with pytest.raises(WorkerError, match=message):
                await engine.start(lambda stage: None)
            await engine.stop(RequestCancelledError("stopped"))
            assert (engine.num_restarts, is_alive(engine._child.process.pid)) == (0, False)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_other_version_of_the_protocol_is_refused(load: Load) -> None:
    async def main() -> None:
        engine = SupervisedEngine(msgspec.structs.replace(load, version=99))
        with pytest.raises(InferenceError, match="version 1 of the protocol, the front 99"):
            await engine.start(lambda stage: None)
        await engine.stop(RequestCancelledError("stopped"))

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_engine_starts_with_many_open_descriptors_and_ignores_the_current_folder(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket's number is above 1,023, the limit of `select`; a module of the folder is not imported."""
    (tmp_path / "msgspec.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] not in (-1, resource.RLIM_INFINITY) and before[1] < 2000:
        pytest.skip(f"at most {before[1]} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, before[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

    async def main(engine: SupervisedEngine) -> None:
        assert len(await outputs_of(engine.submit(request(1, 5)))) == 5

    try:
        run(main, load)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_deadline_passes_while_the_engine_restarts(load: Load) -> None:
    async def main(engine: SupervisedEngine) -> None:
        stream = engine.submit(request(1, 60_000, timeout_s=0.2))
        await stream.next_outputs()
        kill(engine)
        with pytest.raises(DeadlineError, match="timed out after"):
            await outputs_of(stream)
        await restarted(engine, 1)
        stream = engine.submit(request(1, 5, timeout_s=3600))
        assert len(await outputs_of(stream)) == 5
        ended = weakref.ref(stream)
        del stream
        gc.collect()
        assert ended() is None, "the deadline keeps a request that is finished"

    run(main, load)
