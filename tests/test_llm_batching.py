"""Many answers at once through the Python API: the same as one after the other, fair, and free again when dropped."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM, SamplingParams
from llm_worker_rbee.config import LoadOptions
from llm_worker_rbee.errors import (
    ContextLengthError,
    DeadlineError,
    InsufficientMemoryError,
    InvalidRequestError,
    RequestCancelledError,
)
from tests.helpers import mtp_models, tiny_models

PROMPTS = ["Hello", "the other one", "a much longer prompt, of several blocks of the cache, to be read", "Hello", "x"]
FIXED: dict[str, Any] = {"max_tokens": 24, "seed": 5, "ignore_eos": True, "logprobs": 1}


@pytest.fixture
def llm(tiny_file: Path) -> LLM:
    """One of its own for each test: they count what is free."""
    return LLM(tiny_file, deterministic=True, debug=True)


def is_free(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    scheduler.check()
    return not llm.engine.has_work and scheduler.pool.num_free == scheduler.pool.n_blocks


def test_batch_gives_outputs_of_single_requests(llm: LLM) -> None:
    alone = [llm.generate(prompt, **FIXED) for prompt in PROMPTS]
    before = llm.engine.num_steps
    together = llm.generate(PROMPTS, **FIXED)
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert [c.text for c in together] == [c.text for c in alone]
    assert [c.logprobs for c in together] == [c.logprobs for c in alone]
    assert llm.engine.num_steps - before < 2 * FIXED["max_tokens"]  # not one after the other
    assert is_free(llm)


def test_batch_with_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (3, 9)]
    found = llm.generate(["one", [1, 2, 3]], params)
    assert [len(c.tokens) for c in found] == [3, 9]
    assert [c.seed for c in found] == [3, 9]
    assert found[1].tokens == llm.generate([1, 2, 3], params[1]).tokens
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 params"):
        llm.generate(["one", "two"], params[:1])


def test_n_completions_share_prompt_and_differ(llm: LLM) -> None:
    prompt = PROMPTS[2]
    answers = llm.generate(prompt, n=4, **FIXED)
    assert len({tuple(c.tokens) for c in answers}) == 4
    assert len({c.seed for c in answers}) == 1
    assert answers[0].tokens == llm.generate(prompt, **FIXED).tokens  # the first is the one that there is without n
    whole = (len(answers[0].prompt_tokens) - 1) // 16 * 16
    assert [c.cached_tokens for c in answers] == [0, whole, whole, whole]
    nested = llm.generate([prompt, "x"], n=2, **FIXED)
    assert [c.tokens for c in nested[0]] == [c.tokens for c in answers[:2]]
    assert [len(group) for group in nested] == [2, 2]


@pytest.mark.parametrize("n", [0, -1, True, 1.5, 10**9])
def test_bad_n_raises(n: Any, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n is"):
        llm.generate("a", n=n)


def test_interleaved_streams_share_steps(llm: LLM) -> None:
    whole = [llm.generate(prompt, **FIXED) for prompt in PROMPTS[:3]]
    streams = [llm.stream(prompt, **FIXED) for prompt in PROMPTS[:3]]
    before = llm.engine.num_steps
    texts = ["", "", ""]
    for _ in range(FIXED["max_tokens"]):
        for i, stream in enumerate(streams):
            texts[i] += next(stream).text
    assert texts == [c.text for c in whole]
    assert llm.engine.num_steps - before < 2 * FIXED["max_tokens"]


def test_stop_string_finishes_one_of_batch(tmp_path: Path) -> None:
    llm = LLM(tiny_models.write_scripted(tmp_path / "scripted.gguf", tiny_models.say("abcdefgh")))
    found = llm.generate([">", ">", ">"], [SamplingParams(temperature=0, stop=stop) for stop in ("cd", (), "g")])
    assert [c.text for c in found] == ["ab", "abcdefgh", "abcdef"]
    assert [c.stop_sequence for c in found] == ["cd", None, "g"]
    llm.generate(">", max_tokens=1)
    assert is_free(llm)


def test_dropped_or_closed_stream_frees_blocks(llm: LLM) -> None:
    for chunk in llm.stream("dropped", **FIXED):
        assert chunk.token is not None
        break
    closed = llm.stream("closed", **FIXED)
    next(closed)
    closed.close()
    assert list(closed) == []
    assert closed.so_far().finish_reason is None
    assert len(closed.so_far().tokens) == 1
    gc.collect()
    llm.generate("next", max_tokens=1)
    assert is_free(llm)


def test_failed_stream_leaves_others_running(llm: LLM) -> None:
    kept = llm.stream("kept", **FIXED)
    next(kept)
    with pytest.raises(DeadlineError, match="timed out after 0 output tokens"):
        llm.generate(["slow", "other"], timeout=1e-9, **FIXED)
    assert kept.completion().tokens == llm.generate("kept", **FIXED).tokens
    assert is_free(llm)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", True])
def test_bad_timeout_raises(timeout: Any, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="timeout is"):
        llm.generate("a", timeout=timeout)


def test_concurrent_threads_get_their_own_outputs(llm: LLM) -> None:
    alone = [llm.generate(prompt, **FIXED).tokens for prompt in PROMPTS]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = llm.generate(PROMPTS[i], **FIXED).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(PROMPTS))] == alone
    assert is_free(llm)


@pytest.mark.parametrize("where", ["schedule", "update", "run"])
def test_interrupt_during_step_leaves_usable_model(where: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate("Hello", **FIXED).tokens
    stream, other = llm.stream("Hello", **FIXED), llm.stream("other", **FIXED)
    next(stream), next(other)
    part = llm.engine.runner if where == "run" else llm.engine.scheduler
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.pipeline, "is_enabled", False)  # an in-flight step calls neither of them
        actual = getattr(part, where)

        def interrupted(*args: Any) -> Any:
            actual(*args)
            raise KeyboardInterrupt

        patched.setattr(part, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.completion()
    if where == "run":  # nothing was written: it goes on
        assert stream.completion().tokens == whole
        other.completion()
    else:
        for one in (stream, other):
            with pytest.raises(RequestCancelledError, match="interrupted"):
                one.completion()
    assert llm.generate("Hello", **FIXED).tokens == whole
    assert is_free(llm)


def test_two_interrupts_leave_usable_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first where nothing is written, the second while the scheduler changes its state."""
    whole = llm.generate("Hello", **FIXED).tokens
    stream = llm.stream("Hello", **FIXED)
    next(stream)
    for part, where in ((llm.engine.runner, "batch"), (llm.engine.scheduler.pool, "acquire")):
        with monkeypatch.context() as patched:

            def interrupted(*_: Any) -> None:
                raise KeyboardInterrupt

            patched.setattr(part, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("Another, so that blocks are wanted", **FIXED)
    with pytest.raises(RequestCancelledError):
        stream.completion()
    assert llm.generate("Hello", **FIXED).tokens == whole
    assert is_free(llm)


def test_speculative_decoding_does_not_change_outputs(tiny_file: Path, llm: LLM) -> None:
    repeated = [5, 6, 7, 8] * 6
    plain = llm.generate([*PROMPTS, repeated], **FIXED)
    guessing = LLM(tiny_file, deterministic=True, speculative="ngram", draft_tokens=3, debug=True)
    modelled = LLM(tiny_file, deterministic=True, draft_model=tiny_file, debug=True)
    for one in (guessing, modelled):
        assert [c.tokens for c in one.generate([*PROMPTS, repeated], **FIXED)] == [c.tokens for c in plain]
        assert is_free(one)
    scheduler = modelled.engine.scheduler
    assert (
        scheduler.stats.num_drafted_tokens == scheduler.stats.num_accepted_tokens > 0
    )  # the model is its own draft model


def test_head_in_the_file_drafts_without_a_second_file(tmp_path: Path, tiny_file: Path) -> None:
    """The keys and values of the head are part of the cache."""
    model = mtp_models.make("qwen3_5", predicts_well=True, vocab_size=tiny_models.VOCAB)
    path = model.save_gguf(tmp_path / "m.gguf", **tiny_models.tokenizer_metadata())
    plain = LLM(path, kv_memory=1 << 20, debug=True)
    drafting = LLM(path, kv_memory=1 << 20, speculative="mtp", draft_tokens=3, debug=True)
    tokens = [c.tokens for c in plain.generate(PROMPTS, **FIXED)]
    assert [c.tokens for c in drafting.generate(PROMPTS, **FIXED)] == tokens
    stats = drafting.engine.scheduler.stats
    assert stats.num_accepted_tokens > 0.8 * stats.num_drafted_tokens > 0
    assert drafting.capacity.tokens < plain.capacity.tokens
    with pytest.raises(InvalidRequestError, match="no head for multi-token prediction") as caught:
        LLM(tiny_file, speculative="mtp")
    assert caught.value.field == "speculative"
    with pytest.raises(InvalidRequestError, match="two ways to draft"):
        LLM(path, draft_model=tiny_file, speculative="mtp")


def test_draft_model_with_other_vocabulary_raises(tiny_file: Path, tmp_path: Path) -> None:
    pieces = tiny_models.tokenizer_metadata()["tokenizer.ggml.tokens"]
    other = tiny_models.write_random(
        tmp_path / "other.gguf", tokens=[*pieces[:-5], "odd", *pieces[-4:]], merges=["Ġ t", "h e"]
    )
    with pytest.raises(InvalidRequestError, match="tokenizer") as caught:
        LLM(tiny_file, draft_model=other)
    assert caught.value.field == "draft_model"
    with pytest.raises(InvalidRequestError, match="two ways to draft"):
        LLM(tiny_file, draft_model=tiny_file, speculative="ngram")


def test_small_kv_cache_serves_all_and_refuses_too_long(tiny_file: Path, llm: LLM) -> None:
    prompts = [[i + 1] * 40 for i in range(8)]
    plain = [c.tokens for c in llm.generate(prompts, **FIXED)]
    token = llm.capacity.bytes // llm.capacity.tokens
    small = LLM(tiny_file, deterministic=True, kv_memory=128 * token, debug=True)
    assert small.capacity.n_blocks == 8
    assert small.max_context == 128
    assert [c.tokens for c in small.generate(prompts, **FIXED)] == plain
    assert is_free(small)
    with pytest.raises(ContextLengthError, match="200 tokens") as caught:
        small.generate([1] * 200)
    assert "128" in str(caught.value)
    with pytest.raises(InsufficientMemoryError, match="128 tokens take"):
        LLM(tiny_file, kv_memory=16 * token)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"target_itl_ms": -1}, "target_itl_ms is -1"),
        ({"speculative": "magic"}, "unknown speculative 'magic'"),
        ({"draft_tokens": 99}, "draft_tokens is 99"),
        ({"block_size": 32}, "unknown option 'block_size'"),
        ({"bath": 3}, "unknown option 'bath'"),
        ({"kv_memory": -5}, "kv_memory is -5"),
    ],
)
def test_bad_engine_settings_raise_with_name(settings: dict[str, Any], message: str, tiny_file: Path) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        LLM(tiny_file, **settings)
    assert caught.value.field == next(iter(settings))


def test_options_beside_a_record_of_options_are_refused(tiny_file: Path) -> None:
    with pytest.raises(InvalidRequestError, match="max_batch is given beside LoadOptions: set it there"):
        LLM(LoadOptions(model=str(tiny_file)), max_batch=3)
    assert LLM(LoadOptions(model=str(tiny_file), max_batch=3)).engine.config.max_batch == 3
