"""Several engines as one: the same output, prefixes kept together, and one that dies or is restarted while the others
serve."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_worker_rbee.backends import cpu_info
from llm_worker_rbee.config import EngineConfig, LoraUse
from llm_worker_rbee.errors import InferenceError, RequestCancelledError, WorkerError
from llm_worker_rbee.progress import Stage
from llm_worker_rbee.token_engine import replicas, supervised_process
from llm_worker_rbee.token_engine.protocol import Load
from llm_worker_rbee.token_engine.replicas import ReplicaSet
from llm_worker_rbee.token_engine.routing import MAX_HASHED_BLOCKS, prompt_hashes
from tests.conftest import ON_CPU, with_kernels
from tests.helpers import lora_zoo
from tests.helpers.process import is_alive
from tests.helpers.server import write_model
from tests.helpers.token_engine_runs import POISON, load_of, outputs_of, request, summary

LIMIT_S = 120
LONG = 60_000  # tokens: a request that does not end during a test


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    path = with_kernels(write_model(tmp_path_factory.mktemp("replicas") / "tiny.gguf"))
    return load_of(path, num_sharing=2)


def run(main: Callable[[ReplicaSet], Coroutine[Any, Any, None]], load: Load, **options: Any) -> None:
    """Run a test with two engines, with a bound on all of it; their processes must be gone afterwards."""

    async def whole() -> None:
        engine = ReplicaSet([load, load], **{"max_restarts": 100, **options})
        pids = set()
        try:
            await engine.start(lambda stage: None)
            pids.update(processes(engine))
            await main(engine)
        finally:
            pids.update(processes(engine))
            await engine.stop(RequestCancelledError("stopped"))
        assert not any(map(is_alive, pids))

    asyncio.run(asyncio.wait_for(whole(), LIMIT_S))


def processes(engine: ReplicaSet) -> list[int]:
    return [one._child.process.pid for one in engine._engines]


def open_requests(engine: ReplicaSet) -> list[int]:
    return [one.num_requests for one in engine.replicas]


async def has_status(engine: ReplicaSet, status: str) -> None:
    while engine.status() != status:
        await asyncio.sleep(0.002)


def test_two_engines_give_the_output_of_one_and_share_the_work(load: Load) -> None:
    stages: list[Stage] = []

    async def main(engine: ReplicaSet) -> None:
        assert (engine.info.num_replicas, engine.info.max_batch) == (2, 2 * engine.info.engine.max_batch)
        alone = [summary(await outputs_of(engine._engines[0].submit(request(i)))) for i in range(6)]
        streams = [engine.submit(request(i)) for i in range(6)]
        assert open_requests(engine) == [3, 3]
        assert [summary(await outputs_of(stream)) for stream in streams] == alone
        assert (engine.num_requests, engine.status(), engine.num_restarts) == (0, "healthy", 0)
        each = [one.stats() for one in engine.replicas]
        assert engine.stats().num_blocks == sum(one.num_blocks for one in each)
        assert engine.stats().num_steps == sum(one.num_steps for one in each)
        stream = engine.submit(request(1, LONG))
        stream.abort()
        with pytest.raises(RequestCancelledError):
            await outputs_of(stream)
        assert engine.num_requests == 0

    async def start_again() -> None:
        engine = ReplicaSet([load, load])
        info = await engine.start(stages.append)
        assert "replicas" in info.phases
        await engine.stop(RequestCancelledError("stopped"))

    run(main, load)
    asyncio.run(asyncio.wait_for(start_again(), LIMIT_S))
    assert [(stage.done, stage.total) for stage in stages if stage.stage == "replicas"] == [(1, 2), (2, 2)]


def test_requests_with_one_prefix_go_to_one_engine(load: Load) -> None:
    """Two prefixes arrive in any order, together and later: each is computed once, by an engine of its own."""

    async def main(engine: ReplicaSet) -> None:
        prefixes = [list(range(10, 74)), list(range(100, 164))]
        for _ in range(3):
            made = [request(i, 4, prompt=[*prefixes[i % 2], 5, 6, i]) for i in range(8)]
            streams = [engine.submit(one) for one in made]
            assert open_requests(engine) == [4, 4]
            for stream in streams:
                await outputs_of(stream)
            assert [stream.request.num_cached_tokens for stream in streams[2:]] == [64] * 6
        num_queried, num_hit = 3 * 8 * 67, (3 * 8 - 2) * 64
        stats = engine.stats()
        assert (stats.num_queried_tokens, stats.num_hit_tokens) == (num_queried, num_hit)

    run(main, load)


def test_requests_with_an_adapter_go_to_the_engine_that_has_it(load: Load, tmp_path: Path) -> None:
    assert load.options is not None
    adapter = lora_zoo.write_random_peft(Path(str(load.options.model)), tmp_path / "adapter", rank=4)

    async def main(engine: ReplicaSet) -> None:
        info = await engine.load_lora(str(adapter))
        used = [LoraUse(info.path, info.digest)]
        for i in range(6):
            state = request(i)
            state.submitted = msgspec.structs.replace(state.submitted, loras=used)
            await outputs_of(engine.submit(state))
        await asyncio.sleep(0.3)  # of several reports of counters
        assert sorted(one.stats().lora_bytes > 0 for one in engine.replicas) == [False, True]
        engine.unload_lora(info.digest)
        await outputs_of(engine.submit(request(7)))
        while engine.stats().lora_bytes:
            await asyncio.sleep(0.01)

    run(main, load.with_options(max_loras=2))


def test_requests_of_a_dead_engine_go_on_in_the_other(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead engine is restarted late: what its streams get meanwhile comes from the other one."""
    monkeypatch.setattr(supervised_process, "FIRST_BACKOFF_S", 5.0)

    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(8)]
        streams = [engine.submit(request(i)) for i in range(8)]
        found = [await stream.next_outputs() for stream in streams]
        os.kill(processes(engine)[1], signal.SIGKILL)
        await has_status(engine, "degraded")
        assert open_requests(engine) == [engine.num_requests, 0]
        found = [outputs + await outputs_of(stream) for outputs, stream in zip(found, streams, strict=True)]
        assert [summary(outputs) for outputs in found] == expected
        assert engine.status() == "degraded"
        late = engine.submit(request(0))
        assert open_requests(engine) == [1, 0]
        assert summary(await outputs_of(late)) == expected[0]
        await has_status(engine, "healthy")
        assert engine.num_restarts == 1
        assert {stream.request.num_restarts for stream in streams} <= {0, 1}

    run(main, load)


def test_restart_replaces_one_engine_after_the_other(load: Load) -> None:
    statuses: set[str] = set()

    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(6)]
        before = processes(engine)
        streams = [engine.submit(request(i)) for i in range(6)]
        found = [await stream.next_outputs() for stream in streams]
        restart = asyncio.ensure_future(engine.restart())
        while not restart.done():
            statuses.add(engine.status())
            await asyncio.sleep(0.001)
        assert statuses <= {"healthy", "degraded"}
        assert "degraded" in statuses
        assert not set(before) & set(processes(engine))
        found = [outputs + await outputs_of(stream) for outputs, stream in zip(found, streams, strict=True)]
        assert [summary(outputs) for outputs in found] == expected
        assert (engine.num_restarts, engine.status()) == (0, "healthy")  # nothing died

    run(main, load, max_restarts=0)


def test_requests_wait_where_no_engine_is_left_for_the_moment(load: Load) -> None:
    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(4)]
        streams = [engine.submit(request(i)) for i in range(4)]
        for pid in processes(engine):
            os.kill(pid, signal.SIGKILL)
        await has_status(engine, "loading")
        late = engine.submit(request(0))
        assert [summary(await outputs_of(stream)) for stream in (*streams, late)] == [*expected, expected[0]]

    run(main, load)


def test_engine_that_fails_for_good_leaves_its_requests_to_the_other(load: Load) -> None:
    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(4)]
        streams = [engine.submit(request(i)) for i in range(4)]
        os.kill(processes(engine)[0], signal.SIGKILL)
        assert [summary(await outputs_of(stream)) for stream in streams] == expected
        assert (engine.status(), [one.status() for one in engine.replicas]) == ("degraded", ["failed", "healthy"])
        os.kill(processes(engine)[1], signal.SIGKILL)
        await has_status(engine, "failed")
        with pytest.raises(InferenceError, match="all engines have failed"):
            engine.submit(request(1))

    run(main, load, max_restarts=0)


@ON_CPU
def test_request_that_kills_every_engine_is_refused(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first death moves it to the other engine; from the second on it runs alone."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(POISON)

    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(4)]
        streams = [engine.submit(request(i)) for i in range(4)]
        poison = engine.submit(request(666))
        with pytest.raises(InferenceError, match="SIGKILL twice while it computed this request alone"):
            await outputs_of(poison)
        assert [summary(await outputs_of(stream)) for stream in streams] == expected
        await has_status(engine, "healthy")
        assert engine.num_restarts <= 5

    run(main, load)


def test_stalled_engine_gets_no_more_requests(load: Load) -> None:
    async def main(engine: ReplicaSet) -> None:
        held = [engine.submit(request(i, LONG)) for i in range(2)]
        for stream in held:
            await stream.next_outputs()
        os.kill(processes(engine)[0], signal.SIGSTOP)
        held[1].abort()
        await has_status(engine, "degraded")
        assert [one.status() for one in engine.replicas] == ["stalled", "healthy"]
        await outputs_of(engine.submit(request(1)))
        os.kill(processes(engine)[0], signal.SIGCONT)
        await has_status(engine, "healthy")

    run(main, load, stall_timeout_s=0.5)


def test_engine_that_cannot_load_fails_the_start(load: Load) -> None:
    async def main() -> None:
        broken = load.with_options(device="cuda:99")
        engine = ReplicaSet([load, broken])
        with pytest.raises(WorkerError, match="cuda"):
            await engine.start(lambda stage: None)
        pids = processes(engine)
        await engine.stop(RequestCancelledError("stopped"))
        assert not any(map(is_alive, pids))

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu_info.THREADS_VARIABLE, raising=False)
    whole = cpu_info.choose_thread_count()
    cpu_info.share_cores(1)
    assert cpu_info.choose_thread_count() == whole
    cpu_info.share_cores(2)
    assert cpu_info.choose_thread_count() == max(1, whole // 2)
    cpu_info.share_cores(2)  # what the environment says stays
    assert cpu_info.choose_thread_count() == max(1, whole // 2)


async def kill_before_any_step(engine: ReplicaSet, number: int) -> None:
    """Kill a process that was stopped before it computed anything; return once the front knows."""
    supervised = engine._engines[number]
    os.kill(supervised._child.process.pid, signal.SIGKILL)
    while supervised.is_serving:
        await asyncio.sleep(0.001)


def stop_all(engine: ReplicaSet) -> None:
    for pid in processes(engine):
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("max_restarts", [1, 0])
def test_suspects_leave_an_engine_that_fails_for_good(load: Load, max_restarts: int) -> None:
    """Both die with their engines twice, through no fault of theirs; then each runs alone in the engine that is left.
    With `max_restarts` 0 the first engine is lost at once, and what it had waits in the other."""

    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(3)]
        stop_all(engine)
        suspects = [engine._engines[0].submit(request(i)) for i in range(2)]
        await kill_before_any_step(engine, 0)
        assert open_requests(engine) == [0, 2]
        if max_restarts:
            await has_status(engine, "healthy")
            await kill_before_any_step(engine, 1)
            assert open_requests(engine) == [0, 2]
            innocent = engine.submit(request(2))
            await innocent.next_outputs()
            while engine._engines[1].status() != "healthy":
                await asyncio.sleep(0.002)
            os.kill(processes(engine)[1], signal.SIGKILL)
            while engine._engines[1].status() != "failed":
                await asyncio.sleep(0.002)
            assert [one.request.is_finished for one in suspects] == [False, False]
            await outputs_of(innocent)
        else:
            os.kill(processes(engine)[1], signal.SIGCONT)
        assert [summary(await outputs_of(stream)) for stream in suspects] == expected[:2]

    run(main, load, max_restarts=max_restarts)


def test_requests_of_a_failed_engine_wait_for_one_that_is_loading(load: Load) -> None:
    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(4)]
        first = engine._engines[0]
        first._max_restarts = 0
        streams = [engine.submit(request(i)) for i in range(4)]
        os.kill(processes(engine)[1], signal.SIGKILL)
        while engine._engines[1].status() == "healthy":
            await asyncio.sleep(0.001)
        os.kill(processes(engine)[0], signal.SIGKILL)
        assert [summary(await outputs_of(stream)) for stream in streams] == expected
        assert [one.status() for one in engine.replicas] == ["failed", "healthy"]

    run(main, load)


def test_restart_waits_for_an_engine_that_is_restarted_already(load: Load) -> None:
    statuses: set[tuple[str, ...]] = set()

    async def main(engine: ReplicaSet) -> None:
        os.kill(processes(engine)[0], signal.SIGKILL)
        await has_status(engine, "degraded")
        restart = asyncio.ensure_future(engine.restart())
        while not restart.done():
            statuses.add(tuple(one.status() for one in engine.replicas))
            await asyncio.sleep(0.001)
        assert ("healthy", "loading") in statuses
        assert ("loading", "loading") not in statuses

    run(main, load)


def test_restart_ends_with_the_first_engine_that_cannot_load_again(load: Load, tmp_path: Path) -> None:
    """The model file is gone: the other engine is left as it is, and has all requests."""
    model = tmp_path / "gone.gguf"
    model.write_bytes(Path(load.compute.model or "").read_bytes())

    async def main(engine: ReplicaSet) -> None:
        expected = [summary(await outputs_of(engine.submit(request(i)))) for i in range(4)]
        streams = [engine.submit(request(i)) for i in range(4)]
        model.unlink()
        with pytest.raises(InferenceError, match="could not load the model again"):
            await engine.restart()
        assert [summary(await outputs_of(stream)) for stream in streams] == expected
        assert [one.status() for one in engine.replicas] == ["failed", "healthy"]
        model.write_bytes(Path(load.compute.model or "").read_bytes())
        await engine.restart()  # brings it back
        assert engine.status() == "healthy"

    run(main, load.with_options(model=str(model)), max_restarts=1)


def test_choices_of_one_prompt_are_hashed_once_and_stay_together(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def count(prompt: list[int], config: Any, extra_keys: Any) -> list[bytes]:
        hashed.append(len(prompt))
        return prompt_hashes(prompt, config, extra_keys)

    monkeypatch.setattr(replicas, "prompt_hashes", count)

    async def main(engine: ReplicaSet) -> None:
        prompt = list(range(40))
        streams = [engine.submit(request(i, 4, prompt=prompt)) for i in range(4)]
        assert sorted(open_requests(engine)) == [0, 4]
        for stream in streams:
            await outputs_of(stream)
        assert hashed == [40]

    run(main, load)


def test_hashes_of_a_long_prompt_are_bounded() -> None:
    config = EngineConfig(max_context=1, n_blocks=1)
    prompt = list(range(MAX_HASHED_BLOCKS * config.block_size + 100))
    assert len(prompt_hashes(prompt, config)) == MAX_HASHED_BLOCKS
    assert len(prompt_hashes(prompt[:32], config)) == 1  # the last token is always computed
    assert prompt_hashes(prompt[:32], EngineConfig(max_context=1, n_blocks=1, prefix_cache=False)) == []
