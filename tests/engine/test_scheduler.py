"""Which tokens are computed when, on paper (books.py): sharing, order, preemption, and nothing held by who has left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llm_worker_rbee.engine import scheduler as scheduling
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.errors import DeadlineError
from tests.helpers.paper_scheduler import PaperScheduler, answer_of, next_token


def spread(n: int, start: int = 0) -> list[int]:
    """A prompt of n tokens without a beginning in common with another start."""
    return [(start + i) % 251 for i in range(n)]


# ---- prefixes


def test_a_beginning_is_computed_once() -> None:
    desk = PaperScheduler()
    first = desk.request(spread(22))
    desk.run()
    before = desk.computed
    second, third = desk.request(spread(22)), desk.request([*spread(9), 99, 99])
    desk.step()
    assert [r.num_cached_tokens for r in (first, second, third)] == [0, 20, 8]
    assert desk.computed - before == 2 + 3
    desk.run()
    desk.require_answers()
    assert (desk.scheduler.stats.num_queried_tokens, desk.scheduler.stats.num_hit_tokens) == (22 + 22 + 11, 28)


def test_the_last_token_is_computed_even_if_all_of_it_is_here() -> None:
    desk = PaperScheduler()
    desk.request(spread(16))
    desk.run()
    again = desk.request(spread(16))
    spans = desk.step()
    assert (spans[0].start, spans[0].stop, spans[0].logits_from) == (12, 16, 15)
    desk.run()
    desk.require_answers(again)


def test_an_answer_is_a_beginning_too() -> None:
    desk = PaperScheduler()
    first = desk.request(spread(6), 10)
    desk.run()
    longer = desk.request([*first.ids, 5])
    desk.step()
    assert longer.num_cached_tokens == 12, "of 16: the last token that was said was never computed"
    desk.run()
    desk.require_answers()


def test_who_begins_like_one_that_is_being_read_waits_for_it() -> None:
    desk = PaperScheduler()
    first = desk.request(spread(21))
    second = desk.request([*spread(16), 99, 98, 97])
    other = desk.request(spread(5, 100))
    starts: dict[Request, int] = {}
    for _ in range(20):
        for span in desk.step(8):
            starts.setdefault(span.request, span.start)
    assert starts == {first: 0, second: 16, other: 0}
    assert second.num_cached_tokens == 16
    desk.run()
    desk.require_answers()
    assert desk.computed == 21 + 3 + 5 + 3 * 3  # nothing twice


@pytest.mark.parametrize("length", [9, 11, 12])  # blocks of 4
def test_who_waits_for_a_beginning_starts_in_the_next_step(length: int) -> None:
    desk = PaperScheduler()
    first, second = (desk.request(spread(length), 20) for _ in range(2))
    assert list(desk.tokens_of(desk.step())) == [first]
    assert desk.tokens_of(desk.step()) == {first: 1, second: length - (length - 1) // 4 * 4}
    desk.run()
    desk.require_answers()


@pytest.mark.parametrize("end", ["abort", "fail", "broken", "deadline"])
def test_nobody_waits_for_one_that_has_left(end: str) -> None:
    desk = PaperScheduler()
    first = desk.request(spread(21), deadline=5.0)
    second = desk.request(spread(21))
    assert list(desk.tokens_of(desk.step(8))) == [first]
    if end == "abort":
        assert desk.scheduler.remove(first)
    elif end == "deadline":
        desk.take(desk.scheduler.expire(5.0))
    else:
        desk.step(8, failing=end == "fail", broken=[first])
        assert desk.finished == {first: "error"}
    kept = 0 if end in ("fail", "broken") else 8  # of a request that something went wrong with, nothing is used
    assert [(s.request, s.start) for s in desk.step(8)] == [(second, kept)]
    desk.run(8)
    desk.require_answers(second)


def test_a_failed_step_leaves_nothing_that_can_be_found() -> None:
    desk = PaperScheduler()
    first = desk.request(spread(21))
    desk.step(8, failing=True)
    assert desk.finished == {first: "error"}
    desk.require_idle()
    again = desk.request(spread(21))
    desk.run()
    assert again.num_cached_tokens == 0
    desk.require_answers(again)


def test_nothing_is_shared_without_a_prefix_cache() -> None:
    desk = PaperScheduler(prefix_cache=False)
    both = [desk.request(spread(20)) for _ in range(2)]
    assert len(desk.step()) == 2
    desk.run()
    assert [r.num_cached_tokens for r in both] == [0, 0]
    desk.require_answers()


# ---- who is computed when


def test_a_long_prompt_does_not_stall_who_answers() -> None:
    desk = PaperScheduler(n_blocks=200)
    talker = desk.request([1], 30)
    desk.step()
    reader = desk.request(spread(300), 2)
    for i in range(1, 12):
        tokens = desk.tokens_of(desk.step(16))
        assert tokens == {talker: 1, reader: 15}
        assert len(desk.answers[talker]) == i + 1
    desk.run(16)
    desk.require_answers()


def test_a_long_prompt_does_not_stall_a_short_one_behind_it() -> None:
    desk = PaperScheduler(n_blocks=200)
    long = desk.request(spread(300), 2)
    desk.step(16)
    short, other = desk.request(spread(6, 400), 2), desk.request(spread(40, 500), 2)
    assert desk.tokens_of(desk.step(16)) == {long: 8 + 2, short: 4, other: 2}  # what nobody took goes to the first
    assert desk.tokens_of(desk.step(16)) == {long: 8 + 3, short: 2, other: 3}
    assert len(desk.answers[short]) == 1
    desk.run(16)
    desk.require_answers()


@pytest.mark.parametrize(("asked", "most"), [(512, scheduling.MIN_PREFILL_TOKENS), (5, 5)])
def test_prompts_get_on_however_small_the_budget(asked: int, most: int) -> None:
    desk = PaperScheduler(max_step_tokens=asked)
    for _ in range(6):
        desk.request([1], 40)
    desk.step()
    reader = desk.request(spread(100), 2)
    spans = desk.step(1)
    assert desk.tokens_of(spans)[reader] == most
    assert len(spans) == 7


def test_first_come_first_served() -> None:
    desk = PaperScheduler(max_batch=2, prefix_cache=False)
    everybody = [desk.request(spread(6, 10 * i), 3) for i in range(5)]
    seen: list[Request] = []
    while desk.scheduler.has_work:
        seen += [s.request for s in desk.step(4) if s.request not in seen]
    assert seen == everybody
    assert list(desk.finished) == everybody
    desk.require_answers()


def test_who_lacks_blocks_is_not_overtaken() -> None:
    desk = PaperScheduler(n_blocks=8)
    desk.request(spread(12), 12)
    large, small = desk.request(spread(24, 50), 2), desk.request(spread(3, 90), 2)
    desk.run_until(lambda: small.batch_slot >= 0)
    assert large.batch_slot >= 0 or large in desk.finished
    desk.run()
    desk.require_answers()


def test_who_is_more_urgent_reads_first() -> None:
    desk = PaperScheduler(n_blocks=400)
    long = desk.request(spread(300), 2, priority=10)
    desk.step(16)
    urgent = desk.request(spread(30, 500), 2)
    as_urgent = desk.request(spread(3, 700), 2, priority=10)
    assert list(desk.tokens_of(desk.step(16)))[:2] == [urgent, long]
    desk.run_until(lambda: urgent in desk.finished)
    assert long.num_computed_tokens < 300
    assert as_urgent.batch_slot >= 0 or as_urgent in desk.finished
    desk.run(16)
    desk.require_answers()


def test_nobody_waits_for_one_who_is_less_urgent() -> None:
    desk = PaperScheduler(n_blocks=400)
    slow = desk.request(spread(100), 2, priority=5)
    desk.step(8)
    urgent = desk.request(spread(100), 2)
    assert list(desk.tokens_of(desk.step(8))) == [urgent, slow]
    desk.run(8)
    desk.require_answers()


def test_nobody_is_sent_away_where_it_would_not_help() -> None:
    desk = PaperScheduler(n_blocks=12, prefix_cache=False)
    desk.request(spread(16), 12)
    others = [desk.request(spread(3, 50 + i), 12, priority=5) for i in range(2)]
    desk.step()
    desk.request(spread(36, 90), 2, priority=1)
    desk.step()
    assert desk.scheduler.stats.num_preemptions == 0
    assert all(other.batch_slot >= 0 for other in others)
    desk.run()
    desk.require_answers()


# ---- preemption


def test_who_grows_takes_from_the_last_and_nothing_changes() -> None:
    desk = PaperScheduler(n_blocks=8, prefix_cache=False)
    everybody = [desk.request(spread(7, 20 * i), 18) for i in range(3)]
    desk.step()
    assert desk.scheduler.running == everybody
    late = desk.request(spread(3, 99), 2)
    desk.run_until(lambda: desk.scheduler.stats.num_preemptions)
    assert everybody[2] not in desk.scheduler.running
    assert desk.scheduler.waiting == [late, everybody[2]], "it stands before those who came later"
    assert everybody[2].num_computed_tokens == 0
    desk.run()
    desk.require_answers()
    assert next(iter(desk.finished)) is everybody[0]


def test_what_was_preempted_finds_its_own_blocks_again() -> None:
    """Its blocks are free, and only those are lost that somebody took."""
    desk = PaperScheduler(n_blocks=6)
    desk.request(spread(7), 8)
    second = desk.request(spread(7, 50), 8)
    desk.run_until(lambda: desk.scheduler.stats.num_preemptions)
    assert second.batch_slot < 0
    desk.run_until(lambda: len(desk.finished) == 1)
    assert [(s.request, s.start) for s in desk.step()] == [(second, 8)]
    desk.run()
    desk.require_answers()


def test_nobody_is_let_in_who_would_be_sent_away_in_the_next_step() -> None:
    desk = PaperScheduler(n_blocks=4, prefix_cache=False)
    first = desk.request(spread(8), 3)
    desk.request(spread(8, 50), 3)
    assert list(desk.tokens_of(desk.step())) == [first]
    desk.run()
    desk.require_answers()
    assert desk.scheduler.stats.num_preemptions == 0


def test_blocks_of_guesses_are_taken_back_before_anybody_is_sent_away() -> None:
    desk = PaperScheduler(n_blocks=4, prefix_cache=False)
    first, second = desk.request(spread(6), 9), desk.request(spread(4, 50), 4)
    desk.step()
    assert [len(r.blocks) for r in (first, second)] == [2, 1]
    assert desk.scheduler.reserve(first, 12) == 12  # for guesses: the last free block
    desk.step()
    assert [len(r.blocks) for r in (first, second)] == [2, 2]
    assert desk.scheduler.stats.num_preemptions == 0
    desk.run()
    desk.require_answers()


def test_one_that_fills_the_whole_cache_runs_to_its_end() -> None:
    desk = PaperScheduler(n_blocks=4)
    full = desk.request(spread(10), 7)  # 17 tokens, of which the last is never computed
    desk.request(spread(10, 40), 7)
    desk.run()
    desk.require_answers()
    assert len(full.tokens) == 7


def test_a_more_urgent_one_takes_a_place_a_less_urgent_one_has() -> None:
    desk = PaperScheduler(max_batch=2)
    plain, late = desk.request(spread(5), 8), desk.request(spread(5, 30), 8)
    desk.step()
    urgent = desk.request(spread(5, 60), 2, priority=-1)
    spans = desk.tokens_of(desk.step())
    assert set(spans) == {plain, urgent}
    assert desk.scheduler.waiting == [late]
    desk.run()
    assert next(iter(desk.finished)) is urgent
    desk.require_answers()


def test_a_more_urgent_one_takes_blocks() -> None:
    desk = PaperScheduler(n_blocks=8)
    desk.request(spread(22), 8, priority=5)
    desk.step()
    urgent = desk.request(spread(20, 99), 4)
    assert list(desk.tokens_of(desk.step())) == [urgent]
    desk.run()
    assert next(iter(desk.finished)) is urgent
    desk.require_answers()


@pytest.mark.parametrize("priority", [0, 1])
def test_nobody_gives_way_to_one_as_urgent_or_less(priority: int) -> None:
    desk = PaperScheduler(max_batch=1)
    first = desk.request(spread(5), 6)
    desk.step()
    desk.request(spread(5, 30), 6, priority=priority)
    desk.run_until(lambda: first in desk.finished)
    assert desk.scheduler.stats.num_preemptions == 0
    desk.run()
    desk.require_answers()


def test_nobody_gives_way_where_there_is_room() -> None:
    desk = PaperScheduler()
    desk.request(spread(5), 6, priority=3)
    desk.step()
    desk.request(spread(5, 30), 6, priority=-3)
    assert len(desk.step()) == 2
    assert desk.scheduler.stats.num_preemptions == 0


# ---- guesses


def right(request: Request, n: int) -> list[int]:
    """The n tokens that the model will say."""
    return answer_of(request).tokens[len(request.tokens) :][:n]


def test_right_guesses_save_steps_and_a_wrong_one_is_replaced() -> None:
    desk = PaperScheduler()
    request = desk.request(spread(5), 9)
    desk.step()
    guesses = right(request, 3)
    request.drafts = [*guesses[:2], guesses[2] + 1]
    span = desk.step()[0]
    assert (span.stop - span.start, span.logits_from) == (4, 5)
    assert desk.answers[request] == answer_of(request).tokens[:4]
    assert (desk.scheduler.stats.num_drafted_tokens, desk.scheduler.stats.num_accepted_tokens) == (3, 2)
    assert request.num_computed_tokens == len(request.ids) - 1
    request.drafts = right(request, 4)
    desk.step()
    assert desk.finished == {request: "length"}
    assert (desk.scheduler.stats.num_drafted_tokens, desk.scheduler.stats.num_accepted_tokens) == (7, 6)
    desk.require_answers()
    desk.require_idle()


def test_an_answer_ends_within_guesses() -> None:
    prompt = next(p for p in (spread(5, i) for i in range(99)) if _end_after(p) == 3)
    desk = PaperScheduler()
    request = desk.request(prompt, 20, end=True)
    desk.step()
    said = list(request.ids)
    for _ in range(5):  # guesses as if nothing ended
        said.append(next_token(said))
    request.drafts = said[len(request.ids) :]
    desk.step()
    desk.require_answers(request)
    assert desk.finished == {request: "stop"}
    assert len(request.tokens) == 3
    desk.require_idle()


def _end_after(prompt: list[int]) -> int:
    desk = PaperScheduler()
    return len(answer_of(desk.request(prompt, 20, end=True)).tokens)


def test_a_block_of_wrong_guesses_is_not_found() -> None:
    """The guesses fill a block; only what was right of it may be shared."""
    desk = PaperScheduler()
    first = desk.request(spread(4), 12)
    desk.step()
    first.drafts = [7, 7, 7, 7, 7, 7, 7]
    desk.step()
    wrong = desk.request([*first.ids[:5], 7, 7, 7, 7, 7, 7, 7, 7])
    desk.step()
    assert wrong.num_cached_tokens == 4
    desk.run()
    desk.require_answers()


def test_nobody_is_sent_away_for_a_guess() -> None:
    desk = PaperScheduler(n_blocks=4, prefix_cache=False)
    first, second = desk.request(spread(4), 8), desk.request(spread(4, 50), 3)
    desk.step()
    desk.step()
    assert desk.scheduler.pool.num_free == 0
    first.drafts = right(first, 5)
    assert len(desk.step()) == 2
    assert desk.scheduler.stats.num_preemptions == 0
    assert desk.scheduler.stats.num_drafted_tokens == 2  # those for which there was room
    desk.run()
    desk.require_answers(first, second)


# ---- prompts whose log-probabilities are wanted


def test_a_scored_prompt_is_read_whole_and_helps_others() -> None:
    desk = PaperScheduler(n_blocks=100)
    desk.request(spread(150), 2)
    desk.run()
    scored = desk.request(spread(150), 2, scored=True)
    chunks = [desk.step()[0] for _ in range(3)]
    assert [(s.start, s.stop, s.logits_from) for s in chunks] == [(0, 64, 0), (64, 128, 64), (128, 150, 128)]
    desk.run()
    desk.scheduler.pool.clear_cache()
    again = [desk.request(spread(150), 2, scored=True), desk.request(spread(150), 2)]
    desk.run()
    assert again[0].num_cached_tokens == 0
    desk.require_answers()
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 150


def test_a_scored_prompt_that_was_preempted_is_scored_once() -> None:
    desk = PaperScheduler(n_blocks=8)
    scored = desk.request(spread(25), 3, scored=True, priority=1)
    for _ in range(3):
        desk.step(5)
    assert scored.num_unscored_tokens == 25 - 1 - 15
    desk.request(spread(20, 70), 2)
    desk.step(50)
    assert scored.batch_slot < 0
    desk.run(5)
    desk.require_answers()


def test_a_scored_prompt_of_one_token() -> None:
    desk = PaperScheduler()
    desk.request([1], 3, scored=True)
    desk.run()
    desk.require_answers()


# ---- the ends of a request


@pytest.mark.parametrize("when", ["waiting", "reading", "answering", "preempted"])
def test_abort_frees_everything_at_once(when: str) -> None:
    desk = PaperScheduler(max_batch=2, n_blocks=16)
    mate = desk.request(spread(6), 20)
    desk.step()
    request = desk.request(spread(20, 60), 5, deadline=10.0)
    if when != "waiting":
        desk.step(12)
    if when != "reading":
        desk.step(100) if when != "waiting" else None
    if when == "preempted":
        desk.scheduler._preempt(request)
    owned = list(request.blocks)
    assert bool(owned) == (when in ("reading", "answering"))
    assert (request.num_computed_tokens == 20) == (when == "answering")
    assert desk.scheduler.remove(request)
    desk.scheduler.check()
    assert desk.scheduler.running == [mate]
    assert desk.scheduler.waiting == []
    assert desk.scheduler.pool.num_free == 16 - len(mate.blocks)
    assert not desk.scheduler.remove(request), "it was here no more"
    assert desk.scheduler.expire(99.0) == []
    desk.run()
    desk.require_answers(mate)
    assert request not in desk.finished


def test_deadlines_end_those_who_wait_and_those_who_run() -> None:
    desk = PaperScheduler(max_batch=1)
    running, waiting, patient = (desk.request(spread(5, 9 * i), 9, deadline=d) for i, d in enumerate((2.0, 1.0, 9.0)))
    desk.step()
    assert desk.scheduler.expire(0.5) == []
    ended = desk.scheduler.expire(2.0)
    assert [(o.request, o.token, o.finish_reason) for o in ended] == [(waiting, -1, "error"), (running, -1, "error")]
    assert all(isinstance(o.error, DeadlineError) for o in ended)
    assert "1 output tokens" in str(ended[1].error)
    desk.run()
    desk.require_answers(patient)
    assert desk.scheduler.expire(10.0) == []


def test_one_without_a_token_does_not_shift_those_of_others() -> None:
    desk = PaperScheduler()
    first, broken, last = (desk.request(spread(5, 30 * i), 6) for i in range(3))
    desk.step()
    first.drafts, broken.drafts = right(first, 2), right(broken, 2)
    desk.step(broken=[broken])
    assert desk.finished == {broken: "error"}
    desk.run()
    desk.require_answers(first, last)


def test_scheduler_modules_import_no_array_library() -> None:
    modules = ", ".join(
        f"llm_worker_rbee.engine.{name}" for name in ("block_pool", "scheduler", "request", "token_budget")
    )
    code = f"import sys, {modules}; print({{'numpy', 'numba', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
