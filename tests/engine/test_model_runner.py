"""The batches of a runner: it keeps the arrays of decode steps, and they are those of a runner that keeps none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from llm_worker_rbee.backends.ops import Batch
from llm_worker_rbee.engine.model_runner import ModelRunner
from llm_worker_rbee.engine.request import Request, SamplerOutput, ScheduledTokens
from tests.helpers.paper_scheduler import ALPHABET, PaperScheduler, some_drafts

MAX_CONTEXT = 600


def runner_of(paper: PaperScheduler) -> ModelRunner:
    config = paper.config
    cache = SimpleNamespace(block_size=config.block_size, n_slots=config.n_slots)
    model = SimpleNamespace(ops=SimpleNamespace(has_device_memory=False), adapters=None, image_parts=0)
    return ModelRunner(cast(Any, model), cast(Any, cache), config.max_batch, MAX_CONTEXT)


class ComparingScheduler(PaperScheduler):
    """A scheduler on paper that compares the batch of each step with a new runner's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.runner, self.batches, self.num_decodes = runner_of(self), set[int](), 0
        self._held: list[Batch] = []  # so that no other gets the identity of one

    def _compute(self, spans: Sequence[ScheduledTokens], broken: Sequence[Request]) -> SamplerOutput:
        if not spans:
            return super()._compute(spans, broken)
        batch = self.runner.batch(spans)
        for span in spans:
            assert span.request.num_blocks_in_table == len(span.request.blocks)
            span.request.num_blocks_in_table = 0
        self.compare(batch, runner_of(self).batch(spans))
        if len(batch.ids) == len(spans):
            self.num_decodes += 1
            self.batches.add(id(batch))
            self._held.append(batch)
        return super()._compute(spans, broken)

    def compare(self, batch: Batch, expected: Batch) -> None:
        for field in fields(Batch):
            value, wanted = getattr(batch, field.name), getattr(expected, field.name)
            if field.name == "block_table":
                for i, length in enumerate(batch.context_len.tolist()):
                    used = -(-length // self.config.block_size)
                    np.testing.assert_array_equal(value[i, :used], wanted[i, :used])
            elif isinstance(wanted, np.ndarray):
                np.testing.assert_array_equal(value, wanted, err_msg=field.name)


@pytest.mark.parametrize("n_slots", [0, 12])
@pytest.mark.parametrize("seed", range(12))
def test_kept_batch_is_that_of_a_new_runner(seed: int, n_slots: int) -> None:
    """While requests come, end, are aborted, preempted and resumed, share prefixes, and have drafts."""
    rng = random.Random(seed)
    paper = ComparingScheduler(
        n_blocks=rng.choice((14, 40, 120)), max_batch=rng.randint(1, 6), n_slots=n_slots, prefix_cache=seed % 3 > 0
    )
    has_drafts, steps = seed % 2 > 0, 0
    while steps < 150 or paper.scheduler.has_work:
        if steps < 150 and (rng.random() < 0.1 or not paper.scheduler.has_work):
            prompt = [rng.choice(ALPHABET[:2]) for _ in range(rng.randint(1, 24))]
            paper.request(prompt, rng.randint(1, 30), priority=rng.choice((0, 0, 1)))
        running = paper.scheduler.running
        if running and rng.random() < 0.03:
            paper.scheduler.remove(rng.choice(running))
        elif running and rng.random() < 0.05:
            paper.scheduler._preempt(rng.choice(running))
        for request in running if has_drafts and rng.random() < 0.3 else ():
            request.drafts = some_drafts(rng, request, 3)
        paper.step(budget=rng.choice((1, 9, 1000)))
        steps += 1
        assert steps < 2000, "it comes to no end"
    assert len(paper.batches) < paper.num_decodes, "none was kept"


def test_no_batch_is_kept_for_a_device() -> None:
    paper = ComparingScheduler(n_blocks=60, max_batch=3)
    paper.runner._keeps_arrays = False
    paper.request([1] * 9, 40)
    paper.run()
    assert len(paper.batches) == paper.num_decodes


def test_kept_batch_follows_a_request_to_other_blocks() -> None:
    """A request resumes in another slot, with other blocks, between two steps of the same requests."""
    paper = ComparingScheduler(n_blocks=60, max_batch=3)
    first, second = (paper.request([i] * 9, 40) for i in range(2))
    for _ in range(4):
        paper.step()
    kept = paper.runner._decode
    assert kept is not None
    assert kept.requests == (first, second)
    blocks, slot = list(second.blocks), second.batch_slot
    paper.scheduler._preempt(second)
    third = paper.request([2] * 13, 1, priority=-1)
    paper.scheduler.pool.unpublish(blocks)
    paper.step()
    assert third.batch_slot == slot or third.is_finished
    for _ in range(3):
        paper.step()
    assert second.blocks != blocks
    assert paper.runner._decode is not None
    assert paper.runner._decode.requests == (first, second)
