"""Blocks that come from disk: the same bits as computed ones, under random schedules, and after every damage."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.backends.ops import HostRows
from llm_worker_rbee.config import LoadOptions
from llm_worker_rbee.engine import kv_tier
from llm_worker_rbee.engine.dummy_model import DummyModel
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.kv_store import BlockStore, open_folder
from llm_worker_rbee.engine.kv_tier import TRIAL_BLOCKS, TRIAL_INTERVAL
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.engine.speculative import Drafter, MakeBatch, Reserve, max_drafts
from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.load import LoadPhases, make_engine, make_tier
from llm_worker_rbee.load import load as load_files
from tests.conftest import DEVICE
from tests.engine.test_async_scheduling import AsyncBackend, make_async
from tests.engine.test_engine_same_answer import Workload, play
from tests.helpers import model_zoo
from tests.helpers.engine_runs import (
    GEMMA4,
    LFM2,
    QWEN35,
    Listener,
    Question,
    clear_prefix_cache,
    engine,
    load,
    run,
    small_file,
    some_questions,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/backends/cuda/test_host_rows.py is for a GPU")
KV_TYPES = ("float32", "float16", "int8")
VARIANTS = {"windows": GEMMA4["gemma4-e"], "lfm2": LFM2, "qwen35": QWEN35}


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workload]:
    folder = tmp_path_factory.mktemp("tier")
    files = {"plain": small_file(folder / "plain.gguf", "Q8_0")}
    for name, variant in VARIANTS.items():
        files[name] = small_file(folder / f"{name}.gguf", "Q8_0", variant=variant)
    return {name: Workload(load(file, *KV_TYPES), some_questions(24, 160, (1, 90))) for name, file in files.items()}


def store_in(folder: Path, made: Engine) -> BlockStore:
    """Open the store of a model, KV type and block size; its folder is theirs alone."""
    return BlockStore(
        open_folder(folder), made.config.block_size.to_bytes(16, "little"), made.config.block_size, 1 << 30
    )


def attach(folder: Path, made: Engine, *, reads: bool = True) -> None:
    """Let an engine use the disk; reading always pays where computing takes no time."""
    if not made.config.prefix_cache:
        return
    tier = make_tier(made, partial(store_in, folder, made), 0)
    tier._pays = lambda *_: reads  # type: ignore[method-assign]
    made.use_tier(tier)


class CopiedRows(HostRows):
    """Rows of their own for blocks of NumPy arrays, as a GPU's backend has."""

    def __init__(self, arrays: Sequence[Any], num_rows: int) -> None:
        super().__init__(arrays)
        self.num_rows, self._own = num_rows, [bytearray(self.row_bytes) for _ in range(num_rows)]

    def views(self, row: int) -> list[memoryview]:
        return [memoryview(self._own[row])]

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        for block, row in zip(blocks, rows, strict=True):
            self._own[row][:] = b"".join(HostRows.views(self, block))

    def load(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        for row, block in zip(rows, blocks, strict=True):
            at = 0
            for part in super().views(block):
                part[:] = self._own[row][at : at + len(part)]
                at += len(part)


def attach_ram(made: Engine, num_rows: int, open_store: Callable[[], Any] = lambda: None) -> None:
    """Let an engine use so many rows of the host's memory, and a disk, as one on a GPU does."""
    if made.config.prefix_cache:
        made.use_tier(make_tier(made, open_store, num_rows))
        assert made.tier is not None
        made.tier._pays = lambda *_: True  # type: ignore[method-assign]


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("name", ["plain", *VARIANTS])
def test_same_output_under_random_schedules(
    workloads: dict[str, Workload], tmp_path: Path, name: str, kv_type: str
) -> None:
    """Each engine finds what the ones before it wrote: its caches, batches and chunks are others."""
    rng, read = random.Random(f"{name} {kv_type}"), 0
    for drafter in ("off", "ngram", "answers") * 7:
        made = play(rng, workloads[name], kv_type, 12, 25, drafter, prepare=partial(attach, tmp_path))
        if made.tier is not None:
            read += made.tier.stats.num_read_blocks
            assert made.tier.stats.num_failed_blocks == 0
            made.tier.close()
    assert read > 3


@pytest.mark.parametrize("has_disk", [False, True], ids=["ram", "disk"])
@pytest.mark.parametrize("name", ["plain", "qwen35"])
def test_same_output_with_the_memory_of_the_host(
    workloads: dict[str, Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_disk: bool
) -> None:
    """Blocks that the KV cache has no room for come back, and those of another engine through the disk."""
    workload, rng, from_disk = workloads[name], random.Random(name), 0
    monkeypatch.setattr(type(workload.model.ops), "host_rows", lambda _, arrays, num_rows: CopiedRows(arrays, num_rows))

    def prepare(made: Engine) -> None:
        attach_ram(made, rng.choice((8, 30, 200)), partial(store_in, tmp_path, made) if has_disk else lambda: None)

    for drafter in ("off", "ngram", "answers") * 7:
        made = play(rng, workload, "float16", 12, 25, drafter, prepare=prepare)
        if made.tier is not None:
            from_disk += made.tier.stats.num_read_blocks
            assert made.tier.stats.num_failed_blocks == 0
            made.tier.close()
    assert (from_disk > 0) is has_disk


@pytest.mark.parametrize("name", ["plain", "lfm2"])
def test_evicted_blocks_come_back_from_the_memory_of_the_host(
    workloads: dict[str, Workload], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    workload = workloads[name]
    monkeypatch.setattr(type(workload.model.ops), "host_rows", lambda _, arrays, num_rows: CopiedRows(arrays, num_rows))
    made = engine(workload.model, n_blocks=20, max_batch=1, n_slots=8)
    attach_ram(made, 200)
    assert made.tier is not None
    request = LONG.request()
    expected = run(made, request).answer(request)
    for i in range(5):
        run(made, replace(LONG, prompt=(i, *LONG.prompt)).request())  # their blocks are others
    assert not made.scheduler.pool.match(request.hashes)
    again = LONG.request()
    assert run(made, again).answer(again) == expected
    assert again.num_cached_tokens == 192
    assert made.tier.stats.num_ram_read_blocks == 12 + (name == "lfm2")  # and a state
    assert made.tier.stats.num_ram_blocks > 60
    assert made.tier.stats.num_read_blocks == made.tier.stats.num_written_blocks == 0


def answer(workload: Workload, folder: Path, question: Question, **options: Any) -> tuple[Engine, Any]:
    """Answer a question in a new engine; return both."""
    made = engine(workload.model, **options)
    attach(folder, made)
    request = question.request()
    listener: Listener = run(made, request)
    return made, listener.answer(request)


LONG = Question(tuple(3 + i % 90 for i in range(200)), 20, {"temperature": 0.0, "logprobs": 2}, frozenset())


def test_later_engine_reads_instead_of_computing(workloads: dict[str, Workload], tmp_path: Path) -> None:
    workload = workloads["plain"]
    first, expected = answer(workload, tmp_path, LONG)
    assert first.tier is not None
    assert first.tier.stats.num_written_blocks == 13  # of 219 computed tokens: the last one is not
    assert first.tier.stats.written_bytes == 13 * first.tier.block_bytes
    second, found = answer(workload, tmp_path, LONG)
    assert second.tier is not None
    assert found == expected
    assert second.tier.stats.num_read_blocks == 12  # the last token of the prompt is computed in any case
    assert second.tier.stats.read_bytes == 12 * second.tier.block_bytes
    assert second.scheduler.stats.num_hit_tokens == 192
    assert second.tier.stats.num_written_blocks == 0  # they are there
    longer = Question((*LONG.prompt, *expected.tokens, 7, 8, 9), 5, {"temperature": 0.0}, frozenset())
    third, found = answer(workload, tmp_path, longer)
    assert third.scheduler.stats.num_hit_tokens == 208  # the answer's blocks too
    assert found == answer(workload, tmp_path / "none", longer)[1]


@pytest.mark.parametrize("name", ["plain", "lfm2"])
def test_same_output_where_steps_are_launched_ahead(
    workloads: dict[str, Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU: blocks come from rows and from disk while steps are in flight."""
    workload, rng, reads = workloads[name], random.Random(name), Counter[str]()
    device = AsyncBackend(workload.model.ops, 0.05)
    ahead = Workload(make_async(workload.model, device), workload.questions)
    monkeypatch.setattr(type(workload.model.ops), "host_rows", lambda _, arrays, num_rows: CopiedRows(arrays, num_rows))

    def prepare(made: Engine) -> None:
        attach_ram(made, rng.choice((16, 60, 200)), partial(store_in, tmp_path, made))

    for which in range(len(ahead.questions)):
        ahead._answers[which, "float16"] = workload.answer(which, "float16")
    for _ in range(20):
        made = play(rng, ahead, "float16", 12, 25, "off", prepare=prepare)
        if made.tier is not None:
            reads["disk"] += made.tier.stats.num_read_blocks
            reads["ram"] += made.tier.stats.num_ram_read_blocks
            made.tier.close()
    assert reads["disk"] > 3
    assert device.num_ahead > 100


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_later_engine_reads_states(workloads: dict[str, Workload], tmp_path: Path, name: str) -> None:
    """Snapshots after the last full block of the prompt and of the answer; a damaged one costs the whole prefix."""
    workload = workloads[name]
    first, expected = answer(workload, tmp_path, LONG)
    assert first.tier is not None
    assert first.tier.stats.num_written_blocks == 13 + 2
    second, found = answer(workload, tmp_path, LONG)
    assert found == expected
    assert second.tier is not None
    assert second.tier.stats.num_read_blocks == 12 + 1
    assert second.scheduler.stats.num_hit_tokens == 192
    longer = Question((*LONG.prompt, *expected.tokens, 7, 8, 9), 5, {"temperature": 0.0}, frozenset())
    third, found = answer(workload, tmp_path, longer)
    assert third.scheduler.stats.num_hit_tokens == 208
    assert found == answer(workload, tmp_path / "none", longer)[1]


def test_snapshot_where_prompts_part_is_kept(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """A third prompt with the same beginning reads it in another engine."""
    workload, beginning = workloads["lfm2"], LONG.prompt[:100]
    made = engine(workload.model)
    attach(tmp_path, made)
    for i in range(2):
        run(made, Question((*beginning, *[i + 3] * 80), 2).request())
    third, question = engine(workload.model), Question((*beginning, *[9] * 80), 8, {"temperature": 0.0})
    attach(tmp_path, third)
    request = question.request()
    listener = run(third, request)
    assert request.num_cached_tokens == 96
    assert listener.answer(request) == answer(workload, tmp_path / "none", question)[1]


def test_damaged_blocks_are_computed_again(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """Segments are damaged between engines, and under an engine that has them in its index."""
    workload, rng = workloads["plain"], random.Random(1)
    _, expected = answer(workload, tmp_path, LONG)
    (segment,) = tmp_path.rglob("*.kv")
    data, num_hit, num_failed = segment.read_bytes(), set(), 0
    for i in range(60):
        for path in tmp_path.rglob("*.kv*"):
            path.unlink()
        segment.write_bytes(data)
        made = engine(workload.model)
        attach(tmp_path, made)
        assert made.tier is not None
        if i % 2:
            made.tier._opening.result()
        at = rng.randrange(len(data))
        segment.write_bytes(rng.choice((data[:at], data[:at] + b"?" + data[at + 1 :])))
        request = LONG.request()
        assert run(made, request).answer(request) == expected
        num_hit.add(made.scheduler.stats.num_hit_tokens)
        num_failed += made.tier.stats.num_failed_blocks > 0
    assert len(num_hit) > 5
    assert num_failed > 5


@pytest.mark.parametrize("open_store", [lambda: None, lambda: 1 / 0], ids=["none", "failing"])
def test_engine_without_a_store_works(workloads: dict[str, Workload], open_store: Callable[[], Any]) -> None:
    made = engine(workloads["plain"].model)
    made.use_tier(make_tier(made, open_store, 0))
    request = LONG.request()
    assert len(run(made, request).answer(request).tokens) == 20
    assert made.tier is not None
    assert not made.tier.has_work


def test_reading_that_does_not_pay_is_left(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """Some blocks are read to measure the disk; and again later, as it may have been slow once."""
    workload = workloads["plain"]
    question = Question((*LONG.prompt, *LONG.prompt), 20, LONG.options)
    _, expected = answer(workload, tmp_path, question, max_context=512)
    made = engine(workload.model, max_batch=1, max_context=512)
    attach(tmp_path, made, reads=False)
    assert made.tier is not None
    cached = []
    for _ in range(TRIAL_INTERVAL + 2):
        request = question.request()
        assert run(made, request).answer(request) == expected
        cached.append(request.num_cached_tokens)
        clear_prefix_cache(made.scheduler.pool)
    assert cached[0] == 16 * TRIAL_BLOCKS
    assert 3 < cached.count(16 * TRIAL_BLOCKS) < 8
    assert set(cached) == {0, 16 * TRIAL_BLOCKS}
    assert not any(cached[TRIAL_INTERVAL // 2 + 1 : TRIAL_INTERVAL - 6])
    tier = make_tier(made, lambda: None, 0)
    assert tier._pays(1.0, None)  # the time of a step is not known yet
    assert tier._pays(1.0, 2.0)
    assert not tier._pays(1.0, 0.5)


def test_requests_with_one_beginning_read_it_once(workloads: dict[str, Workload], tmp_path: Path) -> None:
    workload = workloads["plain"]
    _, expected = answer(workload, tmp_path, LONG)
    made = engine(workload.model, max_batch=8)
    attach(tmp_path, made)
    assert made.tier is not None
    made.tier._opening.result()
    requests = [LONG.request() for _ in range(5)]
    listener = run(made, *requests)
    assert all(listener.answer(request) == expected for request in requests)
    assert made.tier.stats.num_read_blocks == 12
    assert made.scheduler.stats.num_hit_tokens == 5 * 192


def test_blocks_of_a_failed_request_are_not_read_again(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """Its keys and values may be what made a later step fail."""
    workload = workloads["plain"]
    made = engine(workload.model)
    attach(tmp_path, made)
    assert made.tier is not None
    request = LONG.request()
    made.add(request)
    while made.tier.stats.num_written_blocks < 12:
        made.step()
        made.tier.collect(is_idle=True, has_next=False, num_running=1)
    made.scheduler.remove(request, keep_cached=False)
    while made.has_work:
        made.step()
    made.tier._writer.submit(int).result()
    again = engine(workload.model)
    attach(tmp_path, again)
    second = LONG.request()
    run(again, second)
    assert again.scheduler.stats.num_hit_tokens == 0


def test_dummy_model_keeps_nothing(workloads: dict[str, Workload], tmp_path: Path) -> None:
    made = engine(workloads["plain"].model)
    attach(tmp_path, made)
    made.replace_model(DummyModel([5, 6], 0.0))
    run(made, LONG.request())
    assert not list(tmp_path.rglob("*.kv"))


def test_failing_tier_is_left(workloads: dict[str, Workload], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a thread that computes while the process ends: its threads take no work any more."""
    workload = workloads["plain"]
    _, expected = answer(workload, tmp_path, LONG)
    made = engine(workload.model)
    attach(tmp_path, made)
    assert made.tier is not None
    made.tier._opening.result()
    made.tier.close()
    request = LONG.request()
    assert run(made, request).answer(request) == expected
    assert made.tier is None
    assert "kv_dir and kv_ram are not used any more" in caplog.text


def test_request_whose_blocks_are_read_holds_nobody_up(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """The reader waits until another request has ended; one that was aborted meanwhile leaves nothing behind."""
    workload = workloads["plain"]
    answer(workload, tmp_path, LONG)
    made = engine(workload.model)
    attach(tmp_path, made)
    assert made.tier is not None
    store = made.tier._opening.result()
    assert store is not None
    read, may_read = store.read, []

    def late_read(*args: Any) -> bool:
        while not may_read:
            time.sleep(0.001)
        return read(*args)

    store.read = late_read  # type: ignore[method-assign]
    waiting, aborted = LONG.request(), LONG.request()
    made.add(waiting)
    made.add(aborted)
    assert made.step() == []
    assert waiting.is_held
    assert aborted.is_held
    other = Question((5, 6, 7), 9, {"temperature": 0.0}, frozenset()).request()
    made.add(other)
    outputs = [output for _ in range(12) for output in made.step()]
    assert {output.request for output in outputs} == {other}
    assert outputs[-1].finish_reason == "length"
    made.abort(aborted)
    may_read.append(True)
    listener = Listener()
    while made.has_work:
        listener.take(made.step())
    assert len(listener.answer(waiting).tokens) == 20
    assert made.scheduler.stats.num_hit_tokens == 192
    made.scheduler.check()
    assert made.scheduler.pool.num_free == made.config.n_blocks


def test_reset_engine_goes_on_with_the_disk(workloads: dict[str, Workload], tmp_path: Path) -> None:
    made = engine(workloads["plain"].model)
    attach(tmp_path, made)
    made.add(LONG.request())
    for _ in range(3):
        made.step()
    made.reset()
    request = LONG.request()
    assert len(run(made, request).answer(request).tokens) == 20
    assert made.tier is not None
    assert made.tier.store is not None
    assert len(made.tier.store) == 13


def test_offline_api_continues_in_another_process(default_model: Path, tmp_path: Path) -> None:
    """Also with blocks that were not written yet when the process ended, and not with another model's or KV type's."""
    prompt = "A fox and a crow met under an old oak. " * 20
    options: dict[str, Any] = {"model": default_model, "device": "cpu", "max_context": 1024, "kv_dir": tmp_path / "kv"}
    first = LLM(**options)
    expected = first.generate(prompt, max_tokens=8, temperature=0.0).text
    assert first.engine.tier is not None
    first.engine.tier.flush(60)
    second = LLM(**options)
    assert second.generate(prompt, max_tokens=8, temperature=0.0).text == expected
    assert second.engine.tier is not None
    assert second.engine.tier.stats.num_read_blocks > 10
    other = LLM(**options, kv_type="float32")
    other.generate(prompt, max_tokens=8, temperature=0.0)
    assert other.engine.tier is not None
    assert other.engine.tier.stats.num_read_blocks == 0


def test_options_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="kv_ram is for a GPU"):
        LLM(device="cpu", kv_ram=1 << 30)
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    with pytest.raises(InvalidRequestError, match="chmod 700"):
        LLM(kv_dir=tmp_path / "open")
    with pytest.raises(InvalidRequestError, match="prefix cache"):
        LLM(kv_dir=tmp_path / "kv", prefix_cache=False)
    with pytest.raises(InvalidRequestError, match="kv_disk is 0"):
        LLM(kv_dir=tmp_path / "kv", kv_disk=0)


@pytest.mark.parametrize("n_blocks", [18, 20, 24, 32])
def test_long_conversations_do_not_evict_each_other(
    workloads: dict[str, Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_blocks: int
) -> None:
    """Each takes several jobs, and together they have no room."""
    monkeypatch.setattr(kv_tier, "READ_BLOCKS", 4)
    model = workloads["plain"].model
    prompts = [tuple((3 + 7 * k + i * (k + 1)) % 90 + 3 for i in range(200)) for k in range(4)]
    questions = [Question(prompt, 4, {"temperature": 0.0}) for prompt in prompts]
    expected = [answer(workloads["plain"], tmp_path, question)[1] for question in questions]
    made = engine(model, n_blocks=n_blocks, max_batch=4)
    attach(tmp_path, made)
    assert made.tier is not None
    made.tier._opening.result()
    requests = [question.request() for question in questions]
    listener = run(made, *requests)
    assert [listener.answer(request) for request in requests] == expected
    assert made.tier.stats.num_read_blocks <= 12 * len(requests)
    assert sum(request.num_cached_tokens == 192 for request in requests) >= 2


def test_states_that_are_read_leave_slots_for_drafts(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """A request drafts, another decodes, and many snapshots wait to be read."""

    class OneDrafts(Drafter):
        def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
            for request in running:
                if request is drafting:
                    request.drafts = [3 + i for i in range(min(6, max_drafts(request)))]

    workload, rng = workloads["lfm2"], random.Random(1)
    questions = [Question(tuple(rng.randrange(3, 90) for _ in range(49)), 4, {"temperature": 0.0}) for _ in range(12)]
    expected = [answer(workload, tmp_path, question)[1] for question in questions]
    made = engine(workload.model, max_batch=3, n_slots=17, draft_tokens=6, n_blocks=120)
    made.drafter = OneDrafts()
    attach(tmp_path, made)
    assert made.tier is not None
    made.tier._opening.result()
    decoding, drafting = (Question((5, 6, i), 60, {"temperature": 0.0}).request() for i in (7, 8))
    made.add(decoding)
    made.add(drafting)
    while len(drafting.tokens) < 4:
        made.step()
    requests = [question.request() for question in questions]
    listener = run(made, *requests)
    assert [listener.answer(request) for request in requests] == expected
    assert made.tier.stats.num_read_blocks > 0


def test_closed_tier_ends_its_threads(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """In the middle of a job: what it began is finished, and the process can end."""
    workload = workloads["plain"]
    answer(workload, tmp_path, LONG)
    made = engine(workload.model)
    attach(tmp_path, made)
    assert made.tier is not None
    tier, store = made.tier, made.tier._opening.result()
    assert store is not None
    read, may_read = store.read, Event()

    def late_read(*args: Any) -> bool:
        may_read.wait()
        return read(*args)

    store.read = late_read  # type: ignore[method-assign]
    made.add(LONG.request())
    made.step()
    (reading,) = tier._readings
    tier.close()
    may_read.set()
    for threads in (tier._reader, tier._writer, tier._verifiers):
        threads.shutdown(wait=True)
    assert reading.future.done()


def test_withdrawn_blocks_are_not_kept_by_copies_that_were_under_way(
    workloads: dict[str, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, may_save = workloads["plain"], Event()

    class LateRows(CopiedRows):
        def save(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
            may_save.wait()
            super().save(blocks, rows)

    monkeypatch.setattr(type(workload.model.ops), "host_rows", lambda _, arrays, num_rows: LateRows(arrays, num_rows))
    made = engine(workload.model)
    attach_ram(made, 100)
    assert made.tier is not None
    request = LONG.request()
    made.add(request)
    while made.tier._written is None:
        made.step()
    made.scheduler.remove(request, keep_cached=False)
    may_save.set()
    while made.has_work:
        made.step()
    assert made.tier.stats.num_ram_blocks == 0


def test_key_has_the_angles(tmp_path: Path) -> None:
    """A model may choose them by the longest context."""
    rope = {**model_zoo.LONGROPE, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64}
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 64, "max_position_embeddings": 512}
    file = small_file(tmp_path / "long.gguf", "Q8_0", variant=model_zoo.Variant("phi3", settings))
    for max_context, count in ((64, 1), (48, 1), (256, 2), (300, 2)):
        kept = LoadOptions(model=str(file), device="cpu", max_context=max_context, kv_dir=str(tmp_path / "kv"))
        tier = make_engine(load_files(kept, LoadPhases(), needs_tokenizer=False), kept).tier
        assert tier is not None
        assert tier._opening.result() is not None
        assert len([path for path in (tmp_path / "kv").iterdir() if path.is_dir()]) == count
