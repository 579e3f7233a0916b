"""The Python API, as a notebook would use it, on a tiny random model and on models that say a given text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llm_worker_rbee
from llm_worker_rbee import LLM, Chunk, Completion, SamplingParams
from llm_worker_rbee.cli.loading import with_option_names
from llm_worker_rbee.errors import ChatTemplateError, ContextLengthError, InvalidRequestError, ModelNotFoundError
from llm_worker_rbee.sampling_params import BUILT_IN_SAMPLING, NEUTRAL_SAMPLING
from llm_worker_rbee.weights.gguf_writer import Typed, write_gguf
from tests.helpers import minimal_gguf, model_runs, tiny_models

FIXED: dict[str, Any] = {"max_tokens": 8, "seed": 5, "ignore_eos": True}


def same(a: Completion, b: Completion) -> bool:
    return replace(a, timings=b.timings) == b


def test_generate_accepts_text_ids_and_list(tiny_llm: LLM) -> None:
    text = tiny_llm.generate("Hello again", **FIXED)
    assert isinstance(text, Completion)
    assert text.prompt_tokens == tiny_llm.tokenize("Hello again")
    assert len(text.tokens) == 8
    assert same(tiny_llm.generate(text.prompt_tokens, **FIXED), text)
    assert same(tiny_llm.generate(tuple(text.prompt_tokens), **FIXED), text)
    several = tiny_llm.generate(["Hello again", "and", "Hello again"], **FIXED)
    assert same(several[0], text)
    assert same(several[2], text)
    assert several[1].tokens != text.tokens


def test_stream_chunks_join_to_completion(tiny_llm: LLM) -> None:
    for seed in range(5):
        options = {**FIXED, "seed": seed, "max_tokens": 20, "logprobs": 2}
        chunks = list(tiny_llm.stream("Hello", **options))
        whole = tiny_llm.generate("Hello", **options)
        assert "".join(c.text for c in chunks) == whole.text
        assert [c.token for c in chunks] == whole.tokens
        assert [c.logprob for c in chunks] == whole.logprobs
        assert [c.finish_reason for c in chunks] == [None] * 19 + ["length"]
        assert whole.text == tiny_llm.tokenizer.decode(whole.tokens, continuation=True)


def test_stream_resumes_after_break(tiny_llm: LLM) -> None:
    expected = tiny_llm.generate("Hello", **FIXED)
    stream = tiny_llm.stream("Hello", **FIXED)
    assert stream.so_far().tokens == [], "called before the first token"
    seen: list[Chunk] = []
    for chunk in stream:
        seen.append(chunk)
        if len(seen) == 3:
            break
    assert stream.so_far().tokens == expected.tokens[:3]
    assert same(stream.completion(), expected)
    assert same(stream.completion(), expected), "a second call changes nothing"
    assert list(stream) == []


def test_options_as_keywords_equal_params(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    by_params = tiny_llm.generate("Hello", params)
    assert same(tiny_llm.generate("Hello", **FIXED), by_params)
    assert tiny_llm.generate("Hello", params, max_tokens=3).tokens == by_params.tokens[:3], "a keyword wins"
    assert tiny_llm.generate("Hello", params, seed=6).tokens != by_params.tokens


def sampled_with(llm: LLM, *args: Any, **options: Any) -> dict[str, float]:
    params = llm.stream(">", *args, **options).params
    return {name: getattr(params, name) for name in NEUTRAL_SAMPLING}


def test_unset_parameters_are_built_in_where_the_model_states_none(tiny_llm: LLM) -> None:
    assert sampled_with(tiny_llm) == sampled_with(tiny_llm, SamplingParams()) == BUILT_IN_SAMPLING
    assert (BUILT_IN_SAMPLING["temperature"], BUILT_IN_SAMPLING["top_p"], BUILT_IN_SAMPLING["min_p"]) == (
        0.7,
        0.95,
        0.05,
    )
    assert sampled_with(tiny_llm, temperature=1.0, top_p=1.0, min_p=0.0) == NEUTRAL_SAMPLING
    assert sampled_with(tiny_llm, SamplingParams(top_k=3, seed=1)) == {**BUILT_IN_SAMPLING, "top_k": 3}


def test_int8_keys_with_a_bias_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "qwen2.gguf"
    write_gguf(path, minimal_gguf.metadata("qwen2"), minimal_gguf.tensors("qwen2"))
    note = LLM(path, kv_type="int8").notes[0]
    assert with_option_names(note).startswith("the model's keys have biases, which --kv-type int8 rounds coarsely: ")
    assert LLM(path, kv_type="float16").notes == []


def test_unset_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    """Even odds of two tokens: what the file states decides which ones are drawn, what a request sets wins over it."""
    stated = {"general.sampling.temp": 1.5, "general.sampling.top_k": Typed("int32", 1), "general.sampling.top_p": "x"}
    script = {ord(">"): {ord("a"): 1.0, ord("b"): 0.99}}
    metadata = {**tiny_models.tokenizer_metadata(), **stated}
    llm = LLM(tiny_models.write_scripted(tmp_path / "m.gguf", script, metadata))
    expected = {**BUILT_IN_SAMPLING, "temperature": 1.5, "top_k": 1}
    assert sampled_with(llm) == sampled_with(llm, SamplingParams(max_tokens=3)) == expected
    assert llm.notes[-1].startswith("GGUF metadata: general.sampling.top_p is ignored: top_p must be a finite number")

    def answers(**options: Any) -> set[str]:
        return {llm.generate(">", max_tokens=1, seed=seed, **options).text for seed in range(20)}

    assert answers() == {"a"}
    assert answers(top_k=0) == answers(top_k=-1, temperature=1.0) == {"a", "b"}
    assert sampled_with(llm, temperature=None, top_k=None) == expected, "None is not set"


def test_greedy_output_ignores_seed(tiny_llm: LLM) -> None:
    answers = {
        tuple(tiny_llm.generate("Hello", temperature=0, max_tokens=5, seed=s, ignore_eos=True).tokens) for s in range(3)
    }
    assert len(answers) == 1


def test_drawn_seed_reproduces_output(tiny_llm: LLM) -> None:
    first, second = (tiny_llm.generate("Hello", max_tokens=12, ignore_eos=True) for _ in range(2))
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    assert same(tiny_llm.generate("Hello", max_tokens=12, ignore_eos=True, seed=first.seed), first)


def test_tokenize_detokenize_round_trip(tiny_llm: LLM) -> None:
    assert tiny_llm.tokenize("ab the") == [97, 98, 258]
    assert tiny_llm.detokenize([97, 98, 258]) == "ab the"
    assert tiny_llm.tokenize("<|end|>") != [tiny_models.END], "a control token typed by a user is text"
    assert tiny_llm.tokenize("<|end|>", parse_special=True) == [tiny_models.END]
    assert tiny_llm.detokenize([97, tiny_models.END]) == "a"
    assert tiny_llm.detokenize([97, tiny_models.END], skip_special=False) == "a<|end|>"
    assert tiny_llm.tokenize("") == []


def test_chat_applies_template(tmp_path: Path) -> None:
    llm = LLM(tiny_models.write_scripted(tmp_path / "m.gguf", tiny_models.say("Hi you!", first=tiny_models.ASSISTANT)))
    messages = [{"role": "user", "content": "Hello"}]
    assert llm.apply_chat_template(messages) == "<|user|>Hello<|assistant|>"
    answer = llm.chat(messages, temperature=0, max_tokens=20)
    assert answer.prompt_tokens == [tiny_models.USER, *b"Hello", tiny_models.ASSISTANT]
    assert answer.text == "Hi you!"
    assert "".join(c.text for c in llm.stream_chat(messages, temperature=0, max_tokens=20)) == "Hi you!"


def test_chat_with_custom_or_missing_template(tmp_path: Path) -> None:
    metadata = tiny_models.tokenizer_metadata()
    del metadata["tokenizer.chat_template"]
    path = tiny_models.write_scripted(tmp_path / "m.gguf", tiny_models.say("ok"), metadata)
    with pytest.raises(ChatTemplateError, match=r"m\.gguf has no chat template"):
        LLM(path).chat([{"role": "user", "content": "x"}])
    own = LLM(path, chat_template="{{ messages[0]['content'] }}>")
    assert own.chat([{"role": "user", "content": "x"}], temperature=0, max_tokens=5).text == "ok"


def test_logprobs_of_output_and_prompt(tiny_llm: LLM) -> None:
    """Raw log-softmax whatever the sampling does, the prompt's too, and the same in chunks."""
    ids = tiny_llm.tokenize("The quick brown fox jumps over a lazy dog, and so on and on and on until it is long")
    assert len(ids) > 64
    answer = tiny_llm.generate(
        ids, **FIXED, temperature=0.3, repetition_penalty=1.5, top_k=5, logprobs=4, prompt_logprobs=True
    )
    logits = model_runs.compute_logits(tiny_llm.model, ids + answer.tokens[:-1], kv_type=tiny_llm.kv_type)
    scores = answer.prompt_logprobs
    assert scores is not None
    assert answer.logprobs is not None
    assert scores[0] is None
    assert len(scores) == len(ids)
    wide = logits.astype(np.float64)
    for at, entry in enumerate([*scores[1:], *answer.logprobs]):
        assert entry is not None
        row = wide[at]
        assert entry.token == (ids + answer.tokens)[at + 1]
        assert entry.logprob == pytest.approx(row[entry.token] - np.log(np.exp(row).sum()), abs=1e-4)
        assert len(entry.top) == 4
        assert entry.top[0][0] == row.argmax()


def test_logprobs_are_none_by_default(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate("a", **FIXED)
    assert answer.logprobs is None
    assert answer.prompt_logprobs is None


def test_timings_are_consistent(tiny_llm: LLM) -> None:
    timings = tiny_llm.generate("a", **FIXED).timings
    assert timings.tokens == 8
    assert 0 < timings.time_to_first_token < timings.total
    assert timings.tokens_per_second > 0
    assert tiny_llm.generate("a", max_tokens=1, seed=1, ignore_eos=True).timings.tokens_per_second == 0


def test_load_reports_phases(tiny_file: Path) -> None:
    phases = LLM(str(tiny_file)).phases
    assert list(phases) == ["backend", "locate", "open", "tokenizer", "kernels", "weights"]
    assert all(seconds > 0 for seconds in phases.values())


def bad_prompts(vocab: int) -> list[Any]:
    return [
        "",
        [],
        [-1],
        [vocab],
        [1, vocab + 5],
        [True],
        [1.5],
        ["a", 3],
        [[1], [2.5]],
        5,
        None,
        b"bytes",
        {"a": 1},
        [None],
    ]


@pytest.mark.parametrize("prompt", bad_prompts(tiny_models.VOCAB), ids=repr)
def test_bad_prompt_raises(prompt: Any, tiny_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tiny_llm.generate(prompt, **FIXED)
    assert caught.value.field == "prompt"
    assert "prompt" in str(caught.value)


def test_ids_out_of_range_raise_with_range(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=rf"9999 is not a token id \(0\.\.{tiny_models.VOCAB - 1}\)"):
        tiny_llm.generate([1, 9999])


@pytest.mark.parametrize("extra", [0, 1, 500])
def test_prompt_too_long_raises_with_both_sizes(extra: int, tiny_llm: LLM) -> None:
    length = tiny_llm.max_context + extra
    with pytest.raises(ContextLengthError, match=rf"\b{length} tokens, the context {tiny_llm.max_context}\b"):
        tiny_llm.stream([1] * length)


@pytest.mark.parametrize("requested", [119, 10**12])
def test_max_tokens_too_large_raises_with_all_sizes(requested: int, tiny_llm: LLM) -> None:
    with pytest.raises(
        ContextLengthError, match=rf"10 tokens.*max_tokens is {requested}.*{tiny_llm.max_context}"
    ) as caught:
        tiny_llm.generate([1] * 10, max_tokens=requested)
    assert caught.value.field == "max_tokens"


def test_context_can_be_filled(tiny_llm: LLM) -> None:
    answer = tiny_llm.generate([1] * 10, max_tokens=tiny_llm.max_context - 10, ignore_eos=True, seed=1)
    assert len(answer.tokens) == tiny_llm.max_context - 10
    assert len(tiny_llm.generate([1] * (tiny_llm.max_context - 1), ignore_eos=True, seed=1).tokens) == 1


@pytest.mark.parametrize("options", [{"temprature": 1}, {"max_new_tokens": 5}])
def test_unknown_option_raises_with_name(options: dict[str, Any], tiny_llm: LLM) -> None:
    (name,) = options
    with pytest.raises(InvalidRequestError, match=f"'{name}'") as caught:
        tiny_llm.generate("a", **options)
    assert caught.value.field == name


def test_logit_bias_past_vocabulary_raises(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=f"logit_bias names token {tiny_models.VOCAB}"):
        tiny_llm.generate("a", logit_bias={tiny_models.VOCAB: 1.0})


def test_errors_raise_before_first_token(tiny_llm: LLM) -> None:
    """Making the stream is enough: nothing has to be drawn from it first."""
    with pytest.raises(InvalidRequestError):
        tiny_llm.stream("", max_tokens=1)


@pytest.mark.parametrize("context", [0, -1, 129])
def test_bad_max_context_raises(context: int, tiny_file: Path) -> None:
    with pytest.raises(InvalidRequestError, match="max_context"):
        LLM(tiny_file, max_context=context)


def test_smaller_max_context_is_used(tiny_file: Path) -> None:
    llm = LLM(tiny_file, max_context=12)
    assert len(llm.generate("ab", ignore_eos=True, seed=1).tokens) == 10


def test_missing_model_raises(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere\.gguf"):
        LLM(tmp_path / "nowhere.gguf")


def test_notebook_example_works(tiny_file: Path) -> None:
    """Load, ask, stream with a plain for loop, change an option, compare, look at an object."""
    llm = LLM(tiny_file)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=6, seed=42)
    text = ""
    for chunk in llm.stream("Once upon a time", params):
        text += chunk.text
    assert text == llm.generate("Once upon a time", params).text
    cooler = replace(params, temperature=0)
    assert llm.generate("Once upon a time", cooler).tokens == llm.generate("Once upon a time", cooler).tokens
    assert "finish_reason=" in repr(llm.generate("x", params))
    assert "temperature=0.8" in repr(params)
    assert LLM.generate.__doc__
    assert LLM.stream.__doc__


@pytest.mark.parametrize("requested", [0, -1, 10**9, "64", 2.5, True])
def test_max_context_beyond_model_raises(tiny_file: Path, requested: Any) -> None:
    with pytest.raises(InvalidRequestError, match="max_context is") as caught:
        LLM(str(tiny_file), max_context=requested)
    assert caught.value.field == "max_context"


def test_package_dir_lists_public_names() -> None:
    assert set(llm_worker_rbee.__all__) == set(dir(llm_worker_rbee))
    assert all(getattr(llm_worker_rbee, name) is not None for name in llm_worker_rbee.__all__)
