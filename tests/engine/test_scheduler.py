"""Which tokens are computed when, without a model (paper_scheduler.py): sharing, order, preemption, freed blocks."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from llm_worker_rbee.engine import scheduler as scheduling
from llm_worker_rbee.engine.request import Request, ScheduledTokens
from llm_worker_rbee.errors import DeadlineError
from tests.helpers.engine_runs import clear_prefix_cache
from tests.helpers.paper_scheduler import PLENTY, PaperPipeline, PaperScheduler, answer_of, next_token


def spread(n: int, start: int = 0) -> list[int]:
    """A prompt of n tokens without a beginning in common with another start."""
    return [(start + i) % 251 for i in range(n)]


# ---- prefixes


def test_prefix_is_computed_once() -> None:
    paper = PaperScheduler()
    first = paper.request(spread(22))
    paper.run()
    before = paper.computed
    second, third = paper.request(spread(22)), paper.request([*spread(9), 99, 99])
    paper.step()
    assert [r.num_cached_tokens for r in (first, second, third)] == [0, 20, 8]
    assert paper.computed - before == 2 + 3
    paper.run()
    paper.require_answers()
    assert (paper.scheduler.stats.num_queried_tokens, paper.scheduler.stats.num_hit_tokens) == (22 + 22 + 11, 28)


def test_last_token_is_computed_despite_full_prefix_hit() -> None:
    paper = PaperScheduler()
    paper.request(spread(16))
    paper.run()
    again = paper.request(spread(16))
    spans = paper.step()
    assert (spans[0].start, spans[0].stop, spans[0].logits_from) == (12, 16, 15)
    paper.run()
    paper.require_answers(again)


def test_output_blocks_are_prefix_hits() -> None:
    paper = PaperScheduler()
    first = paper.request(spread(6), 10)
    paper.run()
    longer = paper.request([*first.ids, 5])
    paper.step()
    assert longer.num_cached_tokens == 12, "of 16: the last token that was said was never computed"
    paper.run()
    paper.require_answers()


def test_request_waits_for_prefix_in_flight() -> None:
    paper = PaperScheduler()
    first = paper.request(spread(21))
    second = paper.request([*spread(16), 99, 98, 97])
    other = paper.request(spread(5, 100))
    starts: dict[Request, int] = {}
    for _ in range(20):
        for span in paper.step(8):
            starts.setdefault(span.request, span.start)
    assert starts == {first: 0, second: 16, other: 0}
    assert second.num_cached_tokens == 16
    paper.run()
    paper.require_answers()
    assert paper.computed == 21 + 3 + 5 + 3 * 3  # nothing twice


@pytest.mark.parametrize("length", [9, 11, 12])  # blocks of 4
def test_request_starts_after_awaited_prefix(length: int) -> None:
    paper = PaperScheduler()
    first, second = (paper.request(spread(length), 20) for _ in range(2))
    assert list(paper.tokens_of(paper.step())) == [first]
    assert paper.tokens_of(paper.step()) == {first: 1, second: length - (length - 1) // 4 * 4}
    paper.run()
    paper.require_answers()


@pytest.mark.parametrize("end", ["abort", "fail", "broken", "deadline"])
def test_aborted_prefill_is_not_awaited(end: str) -> None:
    paper = PaperScheduler()
    first = paper.request(spread(21), deadline=5.0)
    second = paper.request(spread(21))
    assert list(paper.tokens_of(paper.step(8))) == [first]
    if end == "abort":
        assert paper.scheduler.remove(first)
    elif end == "deadline":
        paper.take(paper.scheduler.expire(5.0))
    else:
        paper.step(8, failing=end == "fail", broken=[first])
        assert paper.finished == {first: "error"}
    kept = 0 if end in ("fail", "broken") else 8  # of a request that something went wrong with, nothing is used
    assert [(s.request, s.start) for s in paper.step(8)] == [(second, kept)]
    paper.run(8)
    paper.require_answers(second)


def test_failed_step_publishes_no_blocks() -> None:
    paper = PaperScheduler()
    first = paper.request(spread(21))
    paper.step(8, failing=True)
    assert paper.finished == {first: "error"}
    paper.require_idle()
    again = paper.request(spread(21))
    paper.run()
    assert again.num_cached_tokens == 0
    paper.require_answers(again)


def test_no_sharing_without_prefix_cache() -> None:
    paper = PaperScheduler(prefix_cache=False)
    both = [paper.request(spread(20)) for _ in range(2)]
    assert len(paper.step()) == 2
    paper.run()
    assert [r.num_cached_tokens for r in both] == [0, 0]
    paper.require_answers()


# ---- who is computed when


def test_long_prefill_does_not_stall_decodes() -> None:
    paper = PaperScheduler(n_blocks=200)
    talker = paper.request([1], 30)
    paper.step()
    reader = paper.request(spread(300), 2)
    for i in range(1, 12):
        tokens = paper.tokens_of(paper.step(16))
        assert tokens == {talker: 1, reader: 15}
        assert len(paper.answers[talker]) == i + 1
    paper.run(16)
    paper.require_answers()


def test_long_prefill_does_not_stall_short_prompt() -> None:
    paper = PaperScheduler(n_blocks=200)
    long = paper.request(spread(300), 2)
    paper.step(16)
    short, other = paper.request(spread(6, 400), 2), paper.request(spread(40, 500), 2)
    assert paper.tokens_of(paper.step(16)) == {long: 8 + 2, short: 4, other: 2}  # what is left goes to the first
    assert paper.tokens_of(paper.step(16)) == {long: 8 + 3, short: 2, other: 3}
    assert len(paper.answers[short]) == 1
    paper.run(16)
    paper.require_answers()


@pytest.mark.parametrize(("max_step_tokens", "most"), [(512, scheduling.MIN_PREFILL_TOKENS), (5, 5)])
def test_prefill_progresses_with_tiny_budget(max_step_tokens: int, most: int) -> None:
    paper = PaperScheduler(max_step_tokens=max_step_tokens)
    for _ in range(6):
        paper.request([1], 40)
    paper.step()
    reader = paper.request(spread(100), 2)
    spans = paper.step(1)
    assert paper.tokens_of(spans)[reader] == most
    assert len(spans) == 7


def test_equal_priority_is_first_come_first_served() -> None:
    paper = PaperScheduler(max_batch=2, prefix_cache=False)
    requests = [paper.request(spread(6, 10 * i), 3) for i in range(5)]
    seen: list[Request] = []
    while paper.scheduler.has_work:
        seen += [s.request for s in paper.step(4) if s.request not in seen]
    assert seen == requests
    assert list(paper.finished) == requests
    paper.require_answers()


def test_request_that_lacks_blocks_is_not_overtaken() -> None:
    paper = PaperScheduler(n_blocks=8)
    paper.request(spread(12), 12)
    large, small = paper.request(spread(24, 50), 2), paper.request(spread(3, 90), 2)
    paper.run_until(lambda: small.batch_slot >= 0)
    assert large.batch_slot >= 0 or large in paper.finished
    paper.run()
    paper.require_answers()


def test_urgent_request_prefills_first() -> None:
    paper = PaperScheduler(n_blocks=400)
    long = paper.request(spread(300), 2, priority=10)
    paper.step(16)
    urgent = paper.request(spread(30, 500), 2)
    as_urgent = paper.request(spread(3, 700), 2, priority=10)
    assert list(paper.tokens_of(paper.step(16)))[:2] == [urgent, long]
    paper.run_until(lambda: urgent in paper.finished)
    assert long.num_computed_tokens < 300
    assert as_urgent.batch_slot >= 0 or as_urgent in paper.finished
    paper.run(16)
    paper.require_answers()


def test_less_urgent_prefix_is_not_awaited() -> None:
    paper = PaperScheduler(n_blocks=400)
    slow = paper.request(spread(100), 2, priority=5)
    paper.step(8)
    urgent = paper.request(spread(100), 2)
    assert list(paper.tokens_of(paper.step(8))) == [urgent, slow]
    paper.run(8)
    paper.require_answers()


def test_no_preemption_where_it_makes_too_little_room() -> None:
    paper = PaperScheduler(n_blocks=12, prefix_cache=False)
    paper.request(spread(16), 12)
    others = [paper.request(spread(3, 50 + i), 12, priority=5) for i in range(2)]
    paper.step()
    paper.request(spread(36, 90), 2, priority=1)
    paper.step()
    assert paper.scheduler.stats.num_preemptions == 0
    assert all(other.batch_slot >= 0 for other in others)
    paper.run()
    paper.require_answers()


# ---- preemption


def test_growing_request_preempts_last_and_outputs_are_same() -> None:
    paper = PaperScheduler(n_blocks=8, prefix_cache=False)
    requests = [paper.request(spread(7, 20 * i), 18) for i in range(3)]
    paper.step()
    assert paper.scheduler.running == requests
    late = paper.request(spread(3, 99), 2)
    paper.run_until(lambda: paper.scheduler.stats.num_preemptions)
    assert requests[2] not in paper.scheduler.running
    assert paper.scheduler.waiting == [late, requests[2]], "it stands before those that came later"
    assert requests[2].num_computed_tokens == 0
    paper.run()
    paper.require_answers()
    assert next(iter(paper.finished)) is requests[0]


def test_preempted_request_hits_its_own_blocks() -> None:
    """Its blocks are free, and only those are lost that another request took."""
    paper = PaperScheduler(n_blocks=6)
    paper.request(spread(7), 8)
    second = paper.request(spread(7, 50), 8)
    paper.run_until(lambda: paper.scheduler.stats.num_preemptions)
    assert second.batch_slot < 0
    paper.run_until(lambda: len(paper.finished) == 1)
    assert [(s.request, s.start) for s in paper.step()] == [(second, 8)]
    paper.run()
    paper.require_answers()


def test_admission_leaves_a_block_for_each_running_request() -> None:
    paper = PaperScheduler(n_blocks=4, prefix_cache=False)
    first = paper.request(spread(8), 3)
    paper.request(spread(8, 50), 3)
    assert list(paper.tokens_of(paper.step())) == [first]
    paper.run()
    paper.require_answers()
    assert paper.scheduler.stats.num_preemptions == 0


def test_draft_blocks_are_freed_before_preemption() -> None:
    paper = PaperScheduler(n_blocks=4, prefix_cache=False)
    first, second = paper.request(spread(6), 9), paper.request(spread(4, 50), 4)
    paper.step()
    assert [len(r.blocks) for r in (first, second)] == [2, 1]
    assert paper.scheduler.reserve(first, 12) == 12  # for drafts: the last free block
    paper.step()
    assert [len(r.blocks) for r in (first, second)] == [2, 2]
    assert paper.scheduler.stats.num_preemptions == 0
    paper.run()
    paper.require_answers()


def test_request_that_fills_cache_finishes() -> None:
    paper = PaperScheduler(n_blocks=4)
    full = paper.request(spread(10), 7)  # 17 tokens, of which the last is never computed
    paper.request(spread(10, 40), 7)
    paper.run()
    paper.require_answers()
    assert len(full.tokens) == 7


def test_urgent_request_preempts_for_batch_slot() -> None:
    paper = PaperScheduler(max_batch=2)
    plain, late = paper.request(spread(5), 8), paper.request(spread(5, 30), 8)
    paper.step()
    urgent = paper.request(spread(5, 60), 2, priority=-1)
    spans = paper.tokens_of(paper.step())
    assert set(spans) == {plain, urgent}
    assert paper.scheduler.waiting == [late]
    paper.run()
    assert next(iter(paper.finished)) is urgent
    paper.require_answers()


def test_urgent_request_preempts_for_blocks() -> None:
    paper = PaperScheduler(n_blocks=8)
    paper.request(spread(22), 8, priority=5)
    paper.step()
    urgent = paper.request(spread(20, 99), 4)
    assert list(paper.tokens_of(paper.step())) == [urgent]
    paper.run()
    assert next(iter(paper.finished)) is urgent
    paper.require_answers()


@pytest.mark.parametrize("priority", [0, 1])
def test_no_preemption_for_equal_or_lower_urgency(priority: int) -> None:
    paper = PaperScheduler(max_batch=1)
    first = paper.request(spread(5), 6)
    paper.step()
    paper.request(spread(5, 30), 6, priority=priority)
    paper.run_until(lambda: first in paper.finished)
    assert paper.scheduler.stats.num_preemptions == 0
    paper.run()
    paper.require_answers()


def test_no_preemption_where_there_is_room() -> None:
    paper = PaperScheduler()
    paper.request(spread(5), 6, priority=3)
    paper.step()
    paper.request(spread(5, 30), 6, priority=-3)
    assert len(paper.step()) == 2
    assert paper.scheduler.stats.num_preemptions == 0


# ---- drafts


def right(request: Request, n: int) -> list[int]:
    """The n tokens that the model will say."""
    return answer_of(request).tokens[len(request.tokens) :][:n]


def test_accepted_drafts_save_steps_and_wrong_one_is_replaced() -> None:
    paper = PaperScheduler()
    request = paper.request(spread(5), 9)
    paper.step()
    drafts = right(request, 3)
    request.drafts = [*drafts[:2], drafts[2] + 1]
    span = paper.step()[0]
    assert (span.stop - span.start, span.logits_from) == (4, 5)
    assert paper.answers[request] == answer_of(request).tokens[:4]
    assert (paper.scheduler.stats.num_drafted_tokens, paper.scheduler.stats.num_accepted_tokens) == (3, 2)
    assert request.num_computed_tokens == len(request.ids) - 1
    request.drafts = right(request, 4)
    paper.step()
    assert paper.finished == {request: "length"}
    assert (paper.scheduler.stats.num_drafted_tokens, paper.scheduler.stats.num_accepted_tokens) == (7, 6)
    paper.require_answers()
    paper.require_idle()


def test_stop_token_within_drafts_finishes_request() -> None:
    prompt = next(p for p in (spread(5, i) for i in range(99)) if _end_after(p) == 3)
    paper = PaperScheduler()
    request = paper.request(prompt, 20, end=True)
    paper.step()
    said = list(request.ids)
    for _ in range(5):  # drafts as if nothing ended
        said.append(next_token(said))
    request.drafts = said[len(request.ids) :]
    paper.step()
    paper.require_answers(request)
    assert paper.finished == {request: "stop"}
    assert len(request.tokens) == 3
    paper.require_idle()


def _end_after(prompt: list[int]) -> int:
    paper = PaperScheduler()
    return len(answer_of(paper.request(prompt, 20, end=True)).tokens)


def test_block_of_rejected_drafts_is_not_published() -> None:
    """The drafts fill a block; only what was right of it may be shared."""
    paper = PaperScheduler()
    first = paper.request(spread(4), 12)
    paper.step()
    first.drafts = [7, 7, 7, 7, 7, 7, 7]
    paper.step()
    wrong = paper.request([*first.ids[:5], 7, 7, 7, 7, 7, 7, 7, 7])
    paper.step()
    assert wrong.num_cached_tokens == 4
    paper.run()
    paper.require_answers()


def test_drafts_preempt_no_request() -> None:
    paper = PaperScheduler(n_blocks=4, prefix_cache=False)
    first, second = paper.request(spread(4), 8), paper.request(spread(4, 50), 3)
    paper.step()
    paper.step()
    assert paper.scheduler.pool.num_free == 0
    first.drafts = right(first, 5)
    assert len(paper.step()) == 2
    assert paper.scheduler.stats.num_preemptions == 0
    assert paper.scheduler.stats.num_drafted_tokens == 2  # those for which there was room
    paper.run()
    paper.require_answers(first, second)


# ---- a budget that depends on the decodes of the step


def test_budget_function_gets_decodes_and_depth_of_prefill() -> None:
    paper = PaperScheduler(n_blocks=200, max_batch=2, max_step_tokens=100)
    asked: list[tuple[list[Request], int]] = []

    def budget(decodes: Sequence[ScheduledTokens], start: int) -> int:
        asked.append(([one.request for one in decodes], start))
        return 30

    talker, reader = paper.request(spread(5), 20), paper.request(spread(100, 30), 8)
    computed = []
    for _ in range(4):
        paper.step(budget)
        computed.append(reader.num_computed_tokens)
    assert asked == [([], 0), ([talker], 25), ([talker], 55), ([talker], 85)]
    assert computed == [25, 55, 85, 100]
    paper.request(spread(9, 60), 2)  # waits: both batch slots are taken
    for _ in range(3):
        paper.step(budget)
    assert len(asked) == 4, "no step had room for prefill"
    paper.run()
    paper.require_answers()


# ---- prompts whose log-probabilities are wanted


def test_scored_prompt_is_computed_whole_and_published() -> None:
    paper = PaperScheduler(n_blocks=100)
    paper.request(spread(150), 2)
    paper.run()
    scored = paper.request(spread(150), 2, scored=True)
    chunks = [paper.step()[0] for _ in range(3)]
    assert [(s.start, s.stop, s.logits_from) for s in chunks] == [(0, 64, 0), (64, 128, 64), (128, 150, 128)]
    paper.run()
    clear_prefix_cache(paper.scheduler.pool)
    again = [paper.request(spread(150), 2, scored=True), paper.request(spread(150), 2)]
    paper.run()
    assert again[0].num_cached_tokens == 0
    paper.require_answers()
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 150


@pytest.mark.parametrize(("max_step_tokens", "scored_tokens"), [(512, 64), (4096, 512), (8192, 512)])
def test_scored_tokens_of_large_steps_are_limited(max_step_tokens: int, scored_tokens: int) -> None:
    """Their logits would take gigabytes; other prompts fill the step."""
    paper = PaperScheduler(max_step_tokens=max_step_tokens, n_blocks=4096)
    scored = [paper.request(spread(1500, 10 * i), 2, scored=True) for i in range(2)]
    plain = paper.request(spread(7000, 40), 2)
    step = paper.step(max_step_tokens)
    logits = {one.request: one.stop - one.logits_from for one in step}
    assert sum(logits.get(request, 0) for request in scored) == scored_tokens
    assert sum(one.stop - one.start for one in step) == min(max_step_tokens, scored_tokens + 7000)
    assert plain in logits
    paper.run()
    paper.require_answers(*scored, plain)


def test_preempted_scored_prompt_is_scored_once() -> None:
    paper = PaperScheduler(n_blocks=8)
    scored = paper.request(spread(25), 3, scored=True, priority=1)
    for _ in range(3):
        paper.step(5)
    assert scored.num_unscored_tokens == 25 - 1 - 15
    paper.request(spread(20, 70), 2)
    paper.step(50)
    assert scored.batch_slot < 0
    paper.run(5)
    paper.require_answers()


def test_scored_prompt_of_one_token() -> None:
    paper = PaperScheduler()
    paper.request([1], 3, scored=True)
    paper.run()
    paper.require_answers()


# ---- steps ahead of the tokens of the one before


@pytest.mark.parametrize("seed", range(30))
def test_steps_ahead_give_same_answers(seed: int) -> None:
    """Requests come, end, are aborted and wait for blocks while a step is in flight."""
    rng = random.Random(seed)
    paper = PaperPipeline(
        n_blocks=rng.choice((12, 16, 64)), max_batch=rng.randint(1, 6), max_step_tokens=rng.choice((1, 5, 40))
    )
    kept, aborted = list[Request](), list[Request]()
    for _ in range(60):
        if rng.random() < 0.4:
            prompt = spread(rng.randint(1, 20), rng.choice((0, 0, rng.randrange(200))))
            kept.append(paper.request(prompt, rng.randint(1, 12), end=True, priority=rng.choice((0, 0, 0, 1, -1))))
        if kept and rng.random() < 0.05:
            aborted.append(kept.pop(rng.randrange(len(kept))))
            paper.scheduler.remove(aborted[-1])
        paper.step(rng.choice((4, 30, PLENTY)))
    while paper.scheduler.has_work:
        paper.step()
    paper.require_idle()
    paper.require_answers(*kept)
    assert paper.num_ahead > 20


def test_request_whose_last_token_is_in_flight_is_not_scheduled() -> None:
    paper = PaperPipeline()
    short, long = paper.request(spread(3), 2), paper.request(spread(3, 9), 4)
    steps = []
    while paper.scheduler.has_work:
        steps.append({one.request for one in paper.step()})
    assert steps == [{short, long}, {short, long}, {long}, {long}]
    paper.require_answers()


def test_step_that_would_preempt_is_not_scheduled_ahead() -> None:
    """Neither for a block that is missing, nor for a request that is more urgent."""
    paper = PaperPipeline(n_blocks=4)
    stats = paper.scheduler.stats
    paper.request(spread(3), 10)
    paper.request(spread(3, 50), 10)
    paper.step()
    while paper.in_flight is not None:
        paper.step()
    assert (paper.num_ahead, stats.num_preemptions) == (5, 0)  # tokens 4 to 8 of each: two full blocks
    paper.step()
    assert stats.num_preemptions == 1
    paper.run()
    paper.require_answers()
    roomy = PaperPipeline()
    roomy.request(spread(3), 5, priority=1)
    roomy.step()
    roomy.request(spread(3, 9), 5, priority=0)
    roomy.step()
    assert roomy.num_ahead == 1
    roomy.run()
    roomy.require_answers()


# ---- the ends of a request


@pytest.mark.parametrize("when", ["waiting", "reading", "answering", "preempted"])
def test_remove_frees_everything(when: str) -> None:
    paper = PaperScheduler(max_batch=2, n_blocks=16)
    mate = paper.request(spread(6), 20)
    paper.step()
    request = paper.request(spread(20, 60), 5, deadline=10.0)
    if when != "waiting":
        paper.step(12)
    if when != "reading":
        paper.step(100) if when != "waiting" else None
    if when == "preempted":
        paper.scheduler._preempt(request)
    owned = list(request.blocks)
    assert bool(owned) == (when in ("reading", "answering"))
    assert (request.num_computed_tokens == 20) == (when == "answering")
    assert paper.scheduler.remove(request)
    paper.scheduler.check()
    assert paper.scheduler.running == [mate]
    assert paper.scheduler.waiting == []
    assert paper.scheduler.pool.num_free == 16 - len(mate.blocks)
    assert not paper.scheduler.remove(request), "it was here no more"
    assert paper.scheduler.expire(99.0) == []
    paper.run()
    paper.require_answers(mate)
    assert request not in paper.finished


def test_expire_finishes_waiting_and_running_requests() -> None:
    paper = PaperScheduler(max_batch=1)
    running, waiting, patient = (paper.request(spread(5, 9 * i), 9, deadline=d) for i, d in enumerate((2.0, 1.0, 9.0)))
    paper.step()
    assert paper.scheduler.expire(0.5) == []
    ended = paper.scheduler.expire(2.0)
    assert [(o.request, o.token, o.finish_reason) for o in ended] == [(waiting, -1, "error"), (running, -1, "error")]
    assert all(isinstance(o.error, DeadlineError) for o in ended)
    assert "1 output tokens" in str(ended[1].error)
    paper.run()
    paper.require_answers(patient)
    assert paper.scheduler.expire(10.0) == []


def test_failed_request_does_not_shift_other_tokens() -> None:
    paper = PaperScheduler()
    first, broken, last = (paper.request(spread(5, 30 * i), 6) for i in range(3))
    paper.step()
    first.drafts, broken.drafts = right(first, 2), right(broken, 2)
    paper.step(broken=[broken])
    assert paper.finished == {broken: "error"}
    paper.run()
    paper.require_answers(first, last)


def test_scheduler_modules_import_no_array_library() -> None:
    modules = ", ".join(
        f"llm_worker_rbee.engine.{name}" for name in ("block_pool", "scheduler", "request", "step_time")
    )
    code = f"import sys, {modules}; print({{'numpy', 'numba', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
