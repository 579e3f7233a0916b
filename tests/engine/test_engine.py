"""The engine on real models: several choices, log-probabilities, deadlines, failures inside a step, a cache that is far
too small, and drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_worker_rbee.backends.ops import Batch, FusedForward
from llm_worker_rbee.engine import engine as serving
from llm_worker_rbee.engine import speculative
from llm_worker_rbee.engine.request import Request, ScheduledTokens, resolve_max_tokens
from llm_worker_rbee.engine.speculative import Drafter, DraftModel
from llm_worker_rbee.engine.step_time import STEP_KINDS, StepSize, StepTimeModel, StepTimes
from llm_worker_rbee.errors import ContextLengthError, DeadlineError, InferenceError, InsufficientMemoryError
from llm_worker_rbee.models import Transformer
from llm_worker_rbee.sampling_params import TokenLogprob
from tests.helpers import tiny_models
from tests.helpers.engine_runs import (
    AlternatingControl,
    Answer,
    Listener,
    Question,
    alone,
    engine,
    load,
    require_idle,
    run,
    small_file,
)
from tests.helpers.model_runs import compute_logits, to_numpy

MARK = 150  # a token that only some prompts have
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 11, "logprobs": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return load(small_file(tmp_path_factory.mktemp("engine") / "small.gguf", "Q4_1"))


def ask(length: int, answer: int = 8, which: int = 0, **options: Any) -> Question:
    prompt = np.random.default_rng(which).integers(3, 140, length)
    return Question(tuple(prompt.tolist()), answer, options or GREEDY)


def answers(listener: Listener, requests: list[Request]) -> list[Answer]:
    return [listener.answer(request) for request in requests]


# ---- choices and log-probabilities


def test_samples_of_one_prompt_differ_by_sample_index(model: Transformer) -> None:
    questions = [replace(ask(45, 12, temperature=1.5, seed=7, logprobs=0), sample_index=i) for i in range(4)]
    requests = [question.request() for question in questions]
    served = engine(model)
    found = answers(run(served, *requests), requests)
    assert found == [alone(model, question) for question in questions]
    assert len({tuple(answer.tokens) for answer in found}) == 4
    assert len({answer.logprobs[0].logprob for answer in found}) > 1
    assert [request.num_cached_tokens for request in requests] == [0, 32, 32, 32]


def test_samples_of_one_prompt_share_its_blocks(model: Transformer) -> None:
    requests = [replace(ask(33, 10, temperature=1.5, seed=7), sample_index=i).request() for i in range(3)]
    served = engine(model)
    for request in requests:
        served.add(request)
    for _ in range(4):
        served.step()
    first = requests[0].blocks[:2]
    assert [request.blocks[:2] for request in requests] == [first] * 3
    assert served.scheduler.pool.num_free == 128 - 2 - 3
    served.abort(requests[0])
    assert served.scheduler.pool.num_free == 128 - 2 - 2
    run(served)
    assert [len(request.tokens) for request in requests[1:]] == [10, 10]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


@pytest.mark.parametrize("length", [1, 2, 64, 65, 150])  # scored 64 at a time
def test_logprobs_match_logits(model: Transformer, length: int) -> None:
    question = ask(length, 5, temperature=0.8, seed=3, logprobs=4, prompt_logprobs=True)
    request, mate = question.request(), ask(70, 9).request()
    answer = run(engine(model), mate, request).answer(request)
    expected = log_softmax(compute_logits(model, request.ids))
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    scored = [*answer.prompt_logprobs[1:], *answer.logprobs]
    assert len(scored) == length - 1 + 5
    for at, entry in enumerate(scored):
        assert isinstance(entry, TokenLogprob)
        assert entry.token == request.ids[at + 1]
        assert entry.logprob == pytest.approx(expected[at, entry.token], abs=1e-5)
        best = np.argsort(-expected[at], kind="stable")[:4]
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[at, best].tolist(), abs=1e-5)


# ---- what cannot be, what comes too late, what is not wanted any more


def test_resolve_max_tokens_beyond_context_or_cache_raises_with_the_sizes(model: Transformer) -> None:
    served = engine(model, max_context=100, n_blocks=4)
    with pytest.raises(ContextLengthError, match=r"90 tokens.*max_tokens is 11.*101.*context of 100") as caught:
        resolve_max_tokens(90, 11, served.config)
    assert caught.value.field == "max_tokens"
    with pytest.raises(ContextLengthError, match=r"60 tokens.*max_tokens is 6\b.*66.*KV cache holds 64"):
        resolve_max_tokens(60, 6, served.config)
    for length, max_tokens in ((90, 11), (60, 6)):
        with pytest.raises(AssertionError, match="longer than the context or the KV cache"):
            served.add(ask(length, max_tokens).request())
    assert not served.has_work
    question = ask(60, 5)  # 65: the last token needs no place
    request = question.request()
    assert run(served, request).answer(request) == alone(model, question)


def test_step_after_deadline_finishes_request_with_error(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    served, now = engine(model, max_batch=2), time.monotonic()
    late = ask(20, which=1).request(deadline=now - 1.0)
    patient = ask(20, which=2).request(deadline=now + 3600)
    listener = run(served, late, patient)
    (ended,) = listener.outputs[late]
    assert (ended.finish_reason, ended.token) == ("error", -1)
    assert isinstance(ended.error, DeadlineError)
    assert listener.answer(patient) == alone(model, ask(20, which=2))
    slow = ask(20, 30, 3).request(deadline=now + 3600)
    served.add(slow)
    for _ in range(5):
        served.step()
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: now + 3601, perf_counter=time.perf_counter))
    (ended,) = served.step()
    assert (ended.request, ended.finish_reason) == (slow, "error")
    assert "5 output tokens" in str(ended.error)
    require_idle(served)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])  # waiting, reading, reading, answering
def test_abort_frees_all_blocks(model: Transformer, steps: int) -> None:
    served, mate = engine(model, max_step_tokens=33), ask(10, 20, 1).request()
    unwanted = ask(90, 20, 2).request()
    served.add(mate)
    served.add(unwanted)
    listener = Listener()
    for _ in range(steps):
        listener.take(served.step())
    assert served.abort(unwanted)
    assert not served.abort(unwanted)
    assert served.scheduler.pool.num_free == 128 - len(mate.blocks)
    listener.take(run(served).outputs.get(mate, []))
    assert mate.tokens == alone(model, ask(10, 20, 1)).tokens
    assert all(output.finish_reason is None for output in listener.outputs.get(unwanted, []))
    assert not served.abort(mate), "it had ended"
    assert not served.abort(ask(5).request()), "it was never here"


# ---- failures inside a step

Fault = Callable[[Batch, NDArray[np.float32]], NDArray[np.float32]]


class FaultyForward:
    """A fused forward whose logits go through a fault before they are sampled."""

    samples = False

    def __init__(self, whole: FusedForward, fault: Fault) -> None:
        self._whole, self._fault = whole, fault

    def __call__(self, batch: Batch, kv: Any) -> NDArray[np.float32]:
        return self._fault(batch, self._whole(batch, kv))


def with_fault(model: Transformer, fault: Fault) -> Transformer:
    """The same model, whose steps go through `fault` at their end."""
    assert model.fused is not None
    return replace(model, fused=cast(FusedForward, FaultyForward(model.fused, fault)))


@pytest.mark.parametrize("error", [RuntimeError("a kernel broke"), MemoryError(), InferenceError("no")])
def test_failed_step_finishes_only_its_requests(model: Transformer, error: Exception) -> None:
    failures = [error]

    def once(batch: Batch, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if failures and len(batch.context_len) == 2 and batch.context_len.max() > 40:
            raise failures.pop()
        return logits

    served = engine(with_fault(model, once), max_batch=2)
    questions = [ask(45, 9, 1), ask(20, 9, 2), ask(45, 9, 1), ask(7, 9, **DRAWN)]
    requests = [question.request() for question in questions]
    listener = run(served, *requests)
    assert not failures
    ended = [listener.outputs[request][-1] for request in requests]
    assert [output.finish_reason for output in ended] == ["error", "error", "length", "length"]
    reported = ended[0].error
    if isinstance(error, MemoryError):
        assert isinstance(reported, InsufficientMemoryError)
        assert "use a smaller kv_memory" in str(reported)
    else:
        assert isinstance(reported, InferenceError)
        assert reported is error or type(error).__name__ in str(reported) or str(reported) == str(error)
    assert str(error) in f"{reported} {reported.__cause__}", "the cause is kept"
    assert reported is not ended[1].error
    assert requests[2].num_cached_tokens == 0, "what a broken step computed is not to be found"
    assert answers(listener, requests[2:]) == [alone(model, question) for question in questions[2:]]


def poisoned(batch: Batch, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Nothing can be chosen after the mark."""
    logits = logits + 0
    logits[np.flatnonzero(to_numpy(batch.ids)[batch.logits_index] == MARK), 7] = np.nan
    return logits


@pytest.mark.parametrize("options", [GREEDY, DRAWN, {**GREEDY, "prompt_logprobs": True}])
@pytest.mark.parametrize("at", [5, -1])  # inside the prompt, where only a scored one looks; at its end
def test_nan_logits_finish_only_their_request(model: Transformer, options: dict[str, Any], at: int) -> None:
    served = engine(with_fault(model, poisoned))
    unsaid = {"logit_bias": {MARK: -100.0}}
    questions = [ask(12, 6, i, **(DRAWN if i % 2 else GREEDY), **unsaid) for i in range(4)]
    prompt = list(questions[1].prompt)
    prompt[at] = MARK
    questions[1] = replace(questions[1], prompt=tuple(prompt), options={**options, **unsaid})
    requests = [question.request() for question in questions]
    listener = run(served, *requests)
    fails = at == -1 or "prompt_logprobs" in options
    (*_, last) = listener.outputs[requests[1]]
    assert last.finish_reason == ("error" if fails else "length")
    assert (last.error is not None) == fails
    others = [0, 2, 3] if fails else [0, 1, 2, 3]
    for i in others:
        assert listener.answer(requests[i]) == alone(model, questions[i])


class UndecidedForward(FaultyForward):
    """A fused forward that samples, and leaves some rows to `Backend.sample`; after the mark none can be chosen."""

    samples = True

    def sample(self, batch: Batch, kv: Any, rows: Any) -> tuple[NDArray[np.float32], list[int]]:
        logits, tokens = self._whole.sample(batch, kv, rows)
        logits = self._fault(batch, logits)
        return logits, [
            token if (token + i) % 3 and np.isfinite(logits[i].max()) else -1 for i, token in enumerate(tokens)
        ]


def test_rows_that_a_step_leaves_undecided_are_sampled_again(model: Transformer) -> None:
    assert model.fused is not None
    served = engine(replace(model, fused=cast(FusedForward, UndecidedForward(model.fused, poisoned))))
    unsaid = {"logit_bias": {MARK: -100.0}}
    questions = [ask(12, 9, i, **(DRAWN if i % 2 else GREEDY), **unsaid) for i in range(4)]
    questions[1] = replace(questions[1], prompt=(*questions[1].prompt[:-1], MARK))
    requests = [question.request() for question in questions]
    listener = run(served, *requests)
    assert listener.outputs[requests[1]][-1].finish_reason == "error"
    for i in (0, 2, 3):
        assert listener.answer(requests[i]) == alone(model, questions[i])


def test_failing_drafter_is_disabled(model: Transformer) -> None:
    class Broken(Drafter):
        calls = 0

        def draft(self, running: Any, *_: Any) -> None:
            self.calls += 1
            if self.calls == 3:
                running[0].drafts = [1, 2]
                raise ValueError("out of ideas")

    served, drafter = engine(model), Broken()
    served.drafter = drafter
    questions = [ask(12, 9, i) for i in range(3)]
    requests = [question.request() for question in questions]
    with pytest.warns(RuntimeWarning, match="out of ideas"):
        listener = run(served, *requests)
    assert answers(listener, requests) == [alone(model, question) for question in questions]
    assert drafter.calls == 3


def test_reset_drops_requests_and_engine_serves_on(model: Transformer) -> None:
    """As after an interruption: who was here is not known any more, and can still be aborted by who does not know."""
    served = engine(model)
    before = [ask(40, 9, i).request() for i in range(3)]
    for request in before:
        served.add(request)
    served.step()
    served.reset()
    require_idle(served)
    assert not served.abort(before[0])
    again = ask(40, 9, 0).request()
    assert run(served, again).answer(again) == alone(model, ask(40, 9, 0))
    assert again.num_cached_tokens == 0


# ---- too little memory


def test_small_kv_cache_preempts_and_gives_same_outputs(model: Transformer) -> None:
    questions = [ask(30 + 2 * i, 20 + i, i, **(DRAWN if i % 2 else GREEDY)) for i in range(20)]
    requests = [question.request() for question in questions]
    wanted = sum(-(-(len(q.prompt) + q.max_tokens) // 16) for q in questions)
    served = engine(model, n_blocks=wanted // 10, max_batch=20)
    listener = run(served, *requests)
    assert answers(listener, requests) == [alone(model, question) for question in questions]
    assert served.scheduler.stats.num_preemptions > 0


def test_shared_prefix_is_computed_once(model: Transformer) -> None:
    computed: list[int] = []

    def count(batch: Batch, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        computed.append(len(batch.ids))
        return logits

    served = engine(with_fault(model, count))
    first, second = ask(200, 1), ask(200, 1)
    run(served, first.request())
    assert sum(computed) == 200
    computed.clear()
    request = second.request()
    assert run(served, request).answer(request) == alone(model, second)
    assert sum(computed) == 200 - 192
    assert served.scheduler.stats.num_hit_tokens == 192


# ---- the token budget


def known_times(per_token: float) -> StepTimeModel:
    """Step times that were learnt from steps of 100 and 200 tokens."""
    model = StepTimeModel()
    for tokens in (100, 200) * 4:
        model.observe(StepSize("prefill", False, tokens, 0.0), tokens * per_token)
    return model


def test_prefill_is_chunked_to_token_budget_beside_decodes(model: Transformer) -> None:
    served = engine(model, target_itl_ms=100.0)
    talker, reader = ask(5, 30).request(), ask(200, 2, 1).request()
    served.add(talker)
    served.step()
    served.step_time = known_times(2e-3)  # 50 tokens in 100 ms
    served.add(reader)
    before = 0
    while not reader.num_computed_tokens:  # one step; two where one is in flight
        before = len(talker.tokens)
        served.step()
    assert 35 < reader.num_computed_tokens < 50
    assert len(talker.tokens) == before + 1
    served.abort(talker)
    served.step()
    if not reader.tokens:  # that one was in flight
        served.step()
    assert len(reader.tokens) == 1, "no request decodes: all the rest at once"


def test_token_budget_is_at_most_max_step_tokens(model: Transformer) -> None:
    served = engine(model, target_itl_ms=100.0, max_step_tokens=40)
    talker, reader = ask(5, 30).request(), ask(200, 2, 1).request()
    served.add(talker)
    served.step()
    served.step_time = known_times(1e-6)
    served.add(reader)
    while not reader.num_computed_tokens:
        served.step()
    assert reader.num_computed_tokens == 39


def test_recomputed_request_alone_prefills_without_budget(model: Transformer) -> None:
    """A preempted request gets its next token after all its tokens: no other request waits for one."""
    served = engine(model, target_itl_ms=100.0)
    request = ask(100, 30).request()
    served.add(request)
    for _ in range(5):
        served.step()
    served.scheduler._preempt(request)
    served.scheduler.pool.unpublish(list(range(served.config.n_blocks)))
    served.step_time = known_times(1.0)
    served.step()
    assert len(request.tokens) == 6


def test_all_steps_are_learnt_by_kind(model: Transformer) -> None:
    served = engine(model, speculative="ngram")
    served.step_time = known_times(1e-3)
    served.step_time.totals = {kind: StepTimes() for kind in STEP_KINDS}
    request = Question((5, 6, 7, 8) * 5, 30, {**GREEDY, "logit_bias": {9: 100.0}}).request()
    beside = ask(60, 2).request()
    served.add(request)
    served.step()
    served.add(beside)
    run(served)
    assert served.scheduler.stats.num_drafted_tokens > 0
    totals = served.step_time.totals
    assert (totals["prefill"].num_steps, totals["mixed"].num_steps > 0) == (1, True)
    assert sum(times.num_steps for times in totals.values()) == served.num_steps
    assert all(times.measured_s > 0 for times in totals.values())


def test_seconds_per_prefill_token_counts_decodes_beside(model: Transformer) -> None:
    served = engine(model, target_itl_ms=100.0, max_step_tokens=100)
    assert served.seconds_per_prefill_token() == 0.0, "nothing is known"
    served.step_time = known_times(1e-3)
    assert served.seconds_per_prefill_token() == pytest.approx(1e-3, rel=0.05)
    requests = [ask(5, 30, i).request() for i in range(4)]
    for request in requests:
        served.add(request)
    served.step()
    served.step_time = known_times(8e-3)  # 10 tokens in time, of which 4 decode: 16 prompt tokens in 160 ms
    assert served.seconds_per_prefill_token() == pytest.approx(0.16 / 16, rel=0.05)


# ---- drafts


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """It says abcdefg again and again."""
    letters = [*b"abcdefg"]
    follows = dict(zip(letters, [*letters[1:], letters[0]], strict=True))
    return load(tiny_models.write_scripted(tmp_path_factory.mktemp("parrot") / "parrot.gguf", follows))


def test_ngram_drafter_saves_steps_on_repetition(parrot: Transformer) -> None:
    question = Question((*b"abcdefgab",), 100, GREEDY)
    plain, drafting = engine(parrot), engine(parrot, speculative="ngram", draft_tokens=8)
    first, second = question.request(), question.request()
    assert run(plain, first).answer(first) == run(drafting, second).answer(second)
    scheduler = drafting.scheduler
    assert plain.num_steps == 100
    assert drafting.num_steps < 20
    assert scheduler.stats.num_accepted_tokens > 0.9 * scheduler.stats.num_drafted_tokens > 70
    assert scheduler.stats.num_accepted_tokens + drafting.num_steps == 100, (
        "each token was an accepted draft or came of a step"
    )


def test_drafts_stop_at_max_total_tokens(parrot: Transformer) -> None:
    """One that fills its context to the last token: there is no place for more."""
    served = engine(parrot, speculative="ngram", draft_tokens=16, max_context=32, n_blocks=10)
    question = Question((*b"abcdefgab",), 23, GREEDY)
    request = question.request()
    assert run(served, request).answer(request) == alone(parrot, question)
    assert served.scheduler.stats.num_drafted_tokens == served.scheduler.stats.num_accepted_tokens > 10


@pytest.fixture(scope="module")
def mumbler(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """It says the same letters, and leaves out one now and then."""
    letters = [*b"abcdefg"]
    follows = {x: {letters[(i + 1) % 7]: 1.0, letters[(i + 2) % 7]: 0.932} for i, x in enumerate(letters)}
    return load(tiny_models.write_scripted(tmp_path_factory.mktemp("mumbler") / "mumbler.gguf", follows))


@pytest.mark.parametrize("draft_tokens", [1, 4, 16])
def test_ngram_drafts_do_not_change_outputs(mumbler: Transformer, draft_tokens: int) -> None:
    """Right or wrong: where answers are drawn, and where tokens that were said are penalized."""
    options = [GREEDY, DRAWN, {**DRAWN, "temperature": 0.4, "repetition_penalty": 1.01, "frequency_penalty": 0.1}]
    questions = [replace(Question((*b"abcdefgabc",), 60, options[i % 3]), sample_index=i) for i in range(9)]
    questions += [replace(questions[1], eos=frozenset(b"f"), sample_index=i) for i in range(9)]
    requests = [question.request() for question in questions]
    served = engine(mumbler, speculative="ngram", draft_tokens=draft_tokens)
    assert answers(run(served, *requests), requests) == [alone(mumbler, question) for question in questions]
    scheduler = served.scheduler
    assert 50 < scheduler.stats.num_accepted_tokens < scheduler.stats.num_drafted_tokens - 50
    assert sum(len(request.tokens) for request in requests) > 9 * 60


def test_draft_model_tracks_its_computed_blocks(model: Transformer) -> None:
    """Of a request that ends with its first token the guesser computes nothing; who shares it is guessed for."""
    served = engine(model)
    served.drafter = DraftModel(model, served.config, model.config.vocab_size)
    run(served, ask(96, 1, 1, **GREEDY).request())
    question = ask(96, 30, 1, **GREEDY)
    request = question.request()
    assert run(served, request).answer(request) == alone(model, question)
    assert request.num_cached_tokens == 80
    counts = served.scheduler.stats
    assert counts.num_accepted_tokens > 0.9 * counts.num_drafted_tokens > 10


def test_scored_prompts_share_max_scored_tokens(model: Transformer) -> None:
    rows: list[int] = []

    def count(batch: Batch, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        rows.append(len(batch.logits_index))
        return logits

    served = engine(with_fault(model, count))
    questions = [ask(60 + i, 2, i, prompt_logprobs=True, **GREEDY) for i in range(5)]
    requests = [question.request() for question in questions]
    assert answers(run(served, *requests), requests) == [alone(model, question) for question in questions]
    assert max(rows) <= 64 + len(requests)


@pytest.mark.parametrize("n_blocks", [128, 9])  # roomy, and with preemptions
@pytest.mark.parametrize("twin", [True, False])
def test_draft_model_does_not_change_outputs(model: Transformer, tmp_path: Path, twin: bool, n_blocks: int) -> None:
    """The model itself drafts right nearly always, whatever is drawn; another random one hardly ever."""
    guesser = model if twin else load(small_file(tmp_path / "other.gguf", "Q4_1", seed=5))
    questions = [ask(20 + 5 * (i % 3), 30, i % 3, **(DRAWN if i % 2 else GREEDY)) for i in range(6)]
    questions = [replace(question, sample_index=i) for i, question in enumerate(questions)]
    served = engine(model, n_blocks=n_blocks, max_step_tokens=40)
    served.drafter = DraftModel(guesser, served.config, model.config.vocab_size)
    requests = [question.request() for question in questions]
    assert answers(run(served, *requests), requests) == [alone(model, question) for question in questions]
    scheduler = served.scheduler
    assert scheduler.stats.num_drafted_tokens > 50
    share = scheduler.stats.num_accepted_tokens / scheduler.stats.num_drafted_tokens
    assert share > 0.9 if twin else share < 0.5
    assert (scheduler.stats.num_preemptions > 0) == (n_blocks == 9)


def test_draft_model_goes_on_after_dropped_drafts(model: Transformer) -> None:
    """As where their blocks are needed: the next token is sampled, and is the first of them."""
    served, question = engine(model), ask(12, 30)
    served.drafter = DraftModel(model, served.config, model.config.vocab_size)
    request, listener = question.request(), Listener()
    served.add(request)
    while served.has_work:
        if served.num_steps % 2:
            assert request.drafts or request.max_total_tokens - len(request.ids) < 2
            request.drafts = []
        listener.take(served.step())
    assert listener.answer(request) == alone(model, question)
    assert served.scheduler.stats.num_accepted_tokens == served.scheduler.stats.num_drafted_tokens > 5


def test_draft_model_catches_up_after_a_pause(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of `max_step_tokens`, and with the right keys and values: the model itself then drafts right."""
    sizes: list[int] = []
    forward = speculative.forward

    def record(model: Transformer, batch: Batch, cache: Any) -> Any:
        sizes.append(len(batch.ids))
        return forward(model, batch, cache)

    monkeypatch.setattr(speculative, "forward", record)
    questions = [ask(12, 220, i) for i in range(3)]
    served = engine(model, max_step_tokens=40)
    served.drafter = DraftModel(model, served.config, model.config.vocab_size)
    control = served.draft_control = AlternatingControl(5, 120, 10_000)
    requests = [question.request() for question in questions]
    for request in requests:
        served.add(request)
    listener, counts = Listener(), served.scheduler.stats
    while control.num_switches < 2 and served.has_work:
        listener.take(served.step())
    num_drafted, num_accepted, num_calls = counts.num_drafted_tokens, counts.num_accepted_tokens, len(sizes)
    while served.has_work:
        listener.take(served.step())
    require_idle(served)
    assert answers(listener, requests) == [alone(model, question) for question in questions]
    drafted, accepted = counts.num_drafted_tokens - num_drafted, counts.num_accepted_tokens - num_accepted
    assert accepted > 0.9 * drafted > 100
    assert max(sizes) <= 40
    assert sum(sizes[num_calls:]) > 3 * 120, "what was generated during the pause is computed too"


@pytest.mark.parametrize(("draft_s", "is_drafting"), [(0.005, False), (0.0005, True)])
def test_drafting_is_paused_where_it_takes_longer(
    parrot: Transformer, monkeypatch: pytest.MonkeyPatch, draft_s: float, is_drafting: bool
) -> None:
    """A step takes 1 ms and `draft_s` for its draft, which is always right: two tokens in place of one."""
    now = [1.0]
    monkeypatch.setattr(serving, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: 0.0))
    served = engine(parrot, speculative="ngram", draft_tokens=1)
    run = served._run

    def spend(scheduled: list[ScheduledTokens]) -> Any:
        now[0] += 0.001 + (draft_s if any(one.request.drafts for one in scheduled) else 0.0)
        return run(scheduled)

    served._run, served.pipeline.is_enabled = spend, False
    question = Question((*b"abcdefgab",), 120, GREEDY)
    modes: list[bool] = []
    for _ in range(3):
        request = question.request()
        served.add(request)
        while served.has_work:
            modes.append(served.is_drafting)
            served.step()
        assert request.tokens == alone(parrot, question).tokens
    assert all(modes[:64])
    assert not all(modes)
    assert served.is_drafting == is_drafting
