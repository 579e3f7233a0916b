"""LoRA adapters in the engine: bits that do not depend on the batch, the prefix cache, places, unloading."""

from __future__ import annotations

import shutil
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llm_worker_rbee import LLM
from llm_worker_rbee.config import LoraUse
from llm_worker_rbee.engine.request import BATCH_PRIORITY
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError, WorkerError
from llm_worker_rbee.llm import Stream, StructuredOutputsParams, together
from llm_worker_rbee.token_engine.protocol import Abort, RequestState, Submit, TokenOutput, UnloadLora, request_ids
from llm_worker_rbee.weights.hub import locate_model
from tests.helpers import lora_zoo

PROMPT = "Once upon a time, in a small town by the sea, there lived"
LONG = " ".join(f"Number {i} is followed by {i + 1}." for i in range(40))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("adapters"), locate_model(None)
    sizes = {"one": 8, "two": 16, "three": 3}
    return {
        name: lora_zoo.write_random_peft(model, folder / name, rank=rank, seed=rank, size=2)
        for name, rank in sizes.items()
    }


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return LLM(loras=dict(folders), max_loras=5, max_context=2048, max_step_tokens=192)


def facts(stream: Stream) -> list[tuple[int, float]]:
    """Return tokens with their log-probabilities, which show every bit."""
    completion = stream.so_far()
    assert completion.logprobs is not None
    return [(entry.token, entry.logprob) for entry in completion.logprobs]


def run(llm: LLM, *requests: tuple[str, Any], **options: Any) -> list[list[tuple[int, float]]]:
    """Compute requests in one batch: prompt and adapters of each."""
    options = {"max_tokens": 24, "temperature": 0, "logprobs": 0, "ignore_eos": True, **options}
    streams = [llm.stream(prompt, lora=lora, **options) for prompt, lora in requests]
    for _ in together(streams):
        pass
    return [facts(stream) for stream in streams]


CASES: list[tuple[str, Any]] = [
    (PROMPT, None),
    (PROMPT, "one"),
    (LONG, "two"),
    (PROMPT + " a", {"one": 0.5}),
    (LONG + "!", None),
    (PROMPT, "three"),
    (PROMPT, {"one": 0.5, "three": -0.25}),
    (PROMPT, "one"),
]


def test_same_bits_alone_and_beside_any_other_adapter(llm: LLM) -> None:
    alone = [run(llm, case)[0] for case in CASES]
    assert len({tuple(token for token, _ in one) for one in alone}) >= 6, "the check would be vacuous"
    assert run(llm, *CASES) == alone
    assert run(llm, *CASES[::-1]) == alone[::-1]


def test_same_bits_without_the_prefix_cache_and_in_other_chunks(llm: LLM, folders: dict[str, Path]) -> None:
    other = LLM(loras=dict(folders), max_loras=5, max_context=2048, max_step_tokens=64, max_batch=3, prefix_cache=False)
    assert run(other, *CASES) == run(llm, *CASES)


def test_request_without_adapter_has_the_bits_of_a_model_without_any(llm: LLM) -> None:
    plain = LLM(max_context=2048, max_step_tokens=192)
    expected = run(plain, (PROMPT, None), (LONG, None))
    assert plain.model.adapters is None
    assert run(llm, (PROMPT, None), (LONG, None)) == expected
    assert run(llm, (PROMPT, None), (LONG, None), (PROMPT, "two"))[:2] == expected


def test_scale_of_zero_is_the_base_and_one_is_the_adapter(llm: LLM) -> None:
    base, one = run(llm, (PROMPT, None)), run(llm, (PROMPT, "one"))
    assert run(llm, (PROMPT, {"one": 0})) == base
    assert run(llm, (PROMPT, {"one": 1})) == one != base


def test_blocks_of_one_adapter_are_not_those_of_another(llm: LLM) -> None:
    first = llm.generate(LONG, lora="one", max_tokens=1)
    again = llm.generate(LONG, lora="one", max_tokens=1)
    assert again.cached_tokens > 0
    for lora in ("two", {"one": 0.5}, None):
        prompt = LONG.replace("Number", "Item")
        llm.generate(prompt, lora="one", max_tokens=1)
        assert llm.generate(prompt, lora=lora, max_tokens=1).cached_tokens == 0
        llm.engine.scheduler.pool.unpublish(list(range(llm.engine.config.n_blocks)))
    assert first.prompt_tokens == again.prompt_tokens


def test_unknown_adapter_and_wrong_scales_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="there is no adapter 'four': there are 'one', 'two', 'three'"):
        llm.generate(PROMPT, lora="four")
    for scale in (float("nan"), 1e9, True, "1"):
        with pytest.raises(InvalidRequestError, match="scale"):
            llm.generate(PROMPT, lora={"one": scale})


def test_combination_of_too_many_ranks_is_refused(folders: dict[str, Path]) -> None:
    llm = LLM(loras=dict(folders), max_loras=4, max_lora_rank=16, max_context=256)
    four = llm.generate(PROMPT, lora={"one": 1.0, "two": 1.0, "three": 1.0}, max_tokens=2)
    assert four.tokens
    other = llm.generate(PROMPT, lora={"one": 0.5, "two": 1.0}, max_tokens=2)  # in the place of the first combination
    assert other.tokens
    with pytest.raises(InvalidRequestError, match="max_lora_rank is 4"):
        LLM(loras=dict(folders), max_lora_rank=4)
    with pytest.raises(InvalidRequestError, match="3 adapters are named, max_loras is 2"):
        LLM(loras=dict(folders), max_loras=2)


def test_unloaded_adapter_stays_for_its_requests(llm: LLM) -> None:
    """A request that runs ends as it began, the slot is free afterwards; a later one reads the adapter again."""
    pool, loop = llm.engine.adapters, llm._sync_engine._loop
    assert pool is not None
    named, expected = llm.loras["three"], run(llm, (PROMPT, "three"))
    stream = llm.stream(PROMPT, lora="three", max_tokens=24, temperature=0, logprobs=0, ignore_eos=True)
    next(stream)
    before = pool.nbytes
    loop.receive(UnloadLora(named.info.digest))
    assert pool.nbytes < before, "combinations with it stay without a request"
    before = pool.nbytes
    for _ in stream:
        pass
    assert [facts(stream)] == expected
    assert pool.nbytes < before
    assert run(llm, (PROMPT, "three")) == expected


def test_adapters_take_turns_in_few_slots(folders: dict[str, Path], llm: LLM) -> None:
    """Requests wait for a slot, in their order; then they have the bits as beside slots for all."""
    few = LLM(loras={"one": folders["one"]}, max_loras=1, max_context=2048, max_step_tokens=192)
    few.loras = dict(llm.loras)
    assert few.engine.adapters is not None
    assert run(few, *CASES) == run(llm, *CASES)
    assert list(few.engine.adapters._slots) == [0]


def test_adapters_beside_a_device_wait_in_the_memory_of_the_host(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(folders[name], tmp_path / name)
    paths = {name: tmp_path / name for name in ("one", "two")}
    llm = LLM(loras=paths, max_loras=1, max_cpu_loras=2, max_context=256)
    pool = llm.engine.adapters
    assert pool is not None
    pool._num_kept = 2  # as beside a device's memory
    expected = {name: run(llm, (PROMPT, name)) for name in ("two", "one", "two")}
    for path in paths.values():
        shutil.rmtree(path)
    assert {name: run(llm, (PROMPT, name)) for name in ("one", "two")} == expected
    llm._sync_engine._loop.receive(UnloadLora(llm.loras["one"].info.digest))
    with pytest.raises(ModelFileError, match="no such file"):
        llm.generate(PROMPT, lora="one")


def load(llm: LLM, path: str, digest: bytes = b"") -> RequestState:
    """Load an adapter as a front does."""
    submitted = llm.stream(PROMPT)._generation.request.submitted
    state = RequestState(replace(submitted, id=next(request_ids), prompt=[], loras=[LoraUse(path, digest)]))
    loop, outputs = llm._sync_engine._loop, list[TokenOutput]()
    loop.receive(state.submitted)
    while not outputs:
        step = loop.step()
        outputs = [output for output in step.outputs if output.id == state.id]
        for event in step.events:
            state.apply(event)
    if outputs[0].error is not None:
        raise outputs[0].error
    return state


def test_adapter_is_loaded_without_a_prompt(llm: LLM, folders: dict[str, Path]) -> None:
    info = load(llm, str(folders["two"])).lora
    assert info == llm.loras["two"].info
    assert not llm.engine.has_work


def test_changed_content_is_refused_by_its_digest(llm: LLM, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="has changed since it was loaded: load it again"):
        load(llm, str(folders["two"]), b"another digest..")
    with pytest.raises(ModelFileError, match="no such file"):
        load(llm, str(tmp_path / "gone"))
    assert run(llm, (PROMPT, "two")), "the engine goes on"


def test_refused_requests_hold_no_slot(llm: LLM) -> None:
    """One that fails after it got its adapter, or is aborted while it waits, lets go of it."""
    pool = llm.engine.adapters
    assert pool is not None
    with pytest.raises(WorkerError):
        llm.generate(PROMPT, lora="one", structured_outputs=StructuredOutputsParams(grammar="root ::= missing"))
    stream = llm.stream(PROMPT, lora={"one": 0.3, "two": 0.3})
    next(stream)
    waiting = llm.stream(PROMPT, lora={"one": 0.2, "two": 0.2})
    waiting.close()
    stream.close()
    llm.generate(PROMPT, max_tokens=1)  # what is closed is dropped before the next step
    assert all(slot.num_requests == 0 for slot in pool._slots.values())


def test_slots_go_by_priority_and_pass_a_request_that_waits(llm: LLM, folders: dict[str, Path]) -> None:
    """Where all slots are in use, a request that waits gets the first that is empty: a later one for that slot waits
    behind it, one for another slot does not, and one that is more urgent comes first."""
    two = LLM(loras={name: folders[name] for name in ("one", "two")}, max_loras=2, max_context=2048)
    two.loras = dict(llm.loras)
    loop, pool = two._sync_engine._loop, two.engine.adapters
    assert pool is not None
    params = two.stream(PROMPT, temperature=0, ignore_eos=True)._generation.request.submitted.params

    def submit(name: str, max_tokens: int, priority: int = 0) -> int:
        info, number = two.loras[name].info, next(request_ids)
        submitted = Submit(
            id=number, prompt=[1, 2, 3], params=params, max_tokens=max_tokens, seed=0, eos_ids=[], priority=priority,
            loras=[LoraUse(two.loras[name].path, info.digest)],
        )  # fmt: skip
        loop.receive(submitted)
        return number

    names = {submit("two", 8): "short", **{submit("one", 24): "long" for _ in range(3)}}
    loop.step()
    names |= {submit("three", 2, BATCH_PRIORITY): "batch", submit("three", 2): "waits"}
    names |= {submit("one", 2): "passes", submit("two", 2): "behind", submit("two", 2, -1): "urgent"}
    ended: list[str] = []
    while loop.has_work:
        ended += [names[output.id] for output in loop.step().outputs if output.finish_reason]
    assert ended.index("urgent") < ended.index("passes") < ended.index("short") < ended.index("waits")
    assert ended.index("waits") < ended.index("behind"), ended


def test_error_that_nobody_waited_for_is_not_of_the_next_request(
    llm: LLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    loop, pool = llm._sync_engine._loop, llm.engine.adapters
    assert pool is not None
    submitted = llm.stream(PROMPT)._generation.request.submitted
    path = tmp_path / "late"
    loop.receive(replace(submitted, id=(number := next(request_ids)), prompt=[], loras=[LoraUse(str(path))]))
    loop._add_adapted()
    wait(pool.reading)
    loop.receive(Abort(number))
    shutil.copytree(folders["two"], path)
    assert load(llm, str(path)).lora is not None


def test_keys_of_blocks_differ_by_content_scale_and_salt(llm: LLM) -> None:
    stream = llm.stream(PROMPT)
    submitted = stream._generation.request.submitted
    a, b = LoraUse("path", b"a" * 16), LoraUse("path", b"b" * 16)
    uses: list[list[LoraUse]] = [[], [a], [a._replace(scale=0.5)], [b], [a, a]]
    keys = [tuple(replace(submitted, loras=use).extra_keys) for use in uses]
    assert len(set(keys)) == len(uses)
    assert all(not key.isascii() for _, key in keys[1])
    stream.close()
