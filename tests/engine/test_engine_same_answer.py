"""Same request, same output: tokens and log-probabilities are the same bits as when a request is alone, for any batch,
chunking, prefix hit, preemption, abort and number of threads. On a GPU this is the mode of `--deterministic`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee.backends import resolve_kv_type, select_backend
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.engine.speculative import Drafter, DraftModel, MakeBatch, Reserve, max_drafts
from llm_worker_rbee.models import Transformer
from tests.conftest import DEVICE
from tests.helpers.engine_runs import (
    EXPERTS,
    GEMMA4,
    LFM2,
    QWEN35,
    Answer,
    Listener,
    Question,
    alone,
    clear_prefix_cache,
    engine,
    load,
    require_idle,
    small_file,
    some_questions,
)

KINDS = ("Q4_1", "Q8_0", "F32")
MOE = "experts"
STATES = {"lfm2": LFM2, "qwen35": QWEN35}  # models whose layers have states of each request beside the KV cache
KV_TYPES = ("float32", "float16", "int8" if DEVICE == "cpu" else "float8")
DRAFTERS = ("answers", "ngram", "off", "model", "ngram")
PER_SEED = 30 if DEVICE == "cpu" else 8
LONGEST_TROUBLE = 100  # steps; a prompt that is read token by token must come to its end some time


class Workload:
    """A model, requests, and the outputs that they must get."""

    def __init__(self, model: Transformer, questions: list[Question]) -> None:
        self.model, self.questions = model, questions
        self._answers: dict[tuple[int, str], Answer] = {}

    def answer(self, which: int, kv_type: str) -> Answer:
        if (which, kv_type) not in self._answers:
            self._answers[which, kv_type] = alone(self.model, self.questions[which], kv_type)
        return self._answers[which, kv_type]


class AnswerDrafter(Drafter):
    """Drafts the tokens that are going to come; one in three drafts ends with a wrong one."""

    def __init__(self, rng: random.Random, answers: dict[Request, Answer], max_length: int) -> None:
        self.rng, self.answers, self.max_length = rng, answers, max_length

    def draft(self, running: Sequence[Request], reserve: Reserve, batch: MakeBatch) -> None:
        for request in running:
            length = min(self.max_length, max_drafts(request))
            if length and request in self.answers:
                drafts = self.answers[request].tokens[len(request.tokens) :][:length]
                if drafts and not self.rng.randrange(3):
                    drafts[-1] ^= 1
                request.drafts = drafts


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workload]:
    folder = tmp_path_factory.mktemp("same")
    models = {kind: load(small_file(folder / f"{kind}.gguf", kind, seed), *KV_TYPES) for seed, kind in enumerate(KINDS)}
    models[MOE] = load(small_file(folder / "experts.gguf", "Q8_0", variant=EXPERTS), *KV_TYPES)
    for kind, variant in (STATES | GEMMA4).items():
        models[kind] = load(small_file(folder / f"{kind}.gguf", "Q8_0", variant=variant), *KV_TYPES)
    return {
        kind: Workload(model, some_questions(24, 160, (1, 90), i)) for i, (kind, model) in enumerate(models.items())
    }


def some_settings(rng: random.Random, largest: int) -> dict[str, Any]:
    """An engine that may be cramped: of its cache, of its batch, of its steps."""
    size = rng.choice((16, 16, 32))
    least = -(-largest // size)
    return {
        "block_size": size,
        "n_blocks": rng.choice((least, least + 1, 2 * least, 6 * least)),
        "max_batch": rng.randint(1, 12),
        "max_step_tokens": rng.choice((1, 5, 17, 40, 90, 512)),
        "prefix_cache": rng.random() < 0.8,
        "draft_tokens": rng.randint(1, 6),
        "target_itl_ms": rng.choice((1e9, 5.0, 0.01)),  # a budget that follows the clock: other chunks in every run
    }


def set_threads(model: Any, threads: int) -> None:
    model.ops.threads = threads
    if model.fused is not None:
        model.fused.threads = threads


def disturb(rng: random.Random, engine: Engine, mates: list[Request]) -> None:
    """What may happen between two steps."""
    if mates and rng.random() < 0.1:
        engine.abort(mates.pop())
    if engine.scheduler.running and rng.random() < 0.05 and engine.pipeline.in_flight is None:
        engine.scheduler._preempt(rng.choice(engine.scheduler.running))
    if rng.random() < 0.05:
        clear_prefix_cache(engine.scheduler.pool)
    if engine.scheduler.states is not None and rng.random() < 0.05:
        clear_prefix_cache(engine.scheduler.states._pool)
    if rng.random() < 0.2:
        set_threads(engine.model, rng.randint(1, 2))


def play(
    rng: random.Random,
    workload: Workload,
    kv_type: str,
    most: int,
    steps: int,
    drafter: str = "ngram",
    draft_model: Transformer | None = None,
    prepare: Callable[[Engine], object] = lambda made: None,
) -> Engine:
    """One schedule: some questions and some mates that will be sent away, each arriving at its own time."""
    which = rng.sample(range(len(workload.questions)), rng.randint(most // 3, most))
    chosen = [workload.questions[i] for i in which]
    settings = some_settings(rng, max(len(q.prompt) + q.max_tokens for q in chosen))
    if workload.model.config.state_bytes:
        settings["n_slots"] = rng.choice((0, 3, 8, 20, 40))
    made = engine(workload.model, kv_type, speculative="ngram" if drafter == "ngram" else "off", **settings)
    prepare(made)
    requests = [q.request(priority=rng.choice((0, 0, 1))) for q in chosen]
    if drafter == "model":
        assert draft_model is not None
        made.drafter = DraftModel(draft_model, made.config, workload.model.config.vocab_size, kv_type)
    elif drafter == "answers":
        answers = {request: workload.answer(i, kv_type) for i, request in zip(which, requests, strict=True)}
        made.drafter = AnswerDrafter(rng, answers, made.config.draft_tokens)
    mates = [rng.choice(chosen).request(priority=rng.choice((0, -1))) for _ in range(rng.randint(0, 2))]
    arrivals = sorted(((rng.randrange(steps), i, r) for i, r in enumerate(requests + mates)), reverse=True)
    listener, step, arrived = Listener(), 0, list[Request]()
    while made.has_work or arrivals:
        while arrivals and (arrivals[-1][0] <= step or not made.has_work):
            made.add(request := arrivals.pop()[2])
            arrived += [request] if request in mates else []
        if step < LONGEST_TROUBLE:
            disturb(rng, made, arrived)
        listener.take(made.step())
        step += 1
        assert step < 3_000, "it comes to no end"
    require_idle(made)
    for i, request in zip(which, requests, strict=True):
        assert listener.answer(request) == workload.answer(i, kv_type), f"question {i}"
    return made


@pytest.mark.parametrize("seed", range(10))
def test_same_output_under_random_schedules_small_model(small: dict[str, Workload], seed: int) -> None:
    require_same_output(small, KINDS, random.Random(seed), PER_SEED)


def test_same_output_under_random_schedules_with_experts(small: dict[str, Workload]) -> None:
    require_same_output(small, (MOE,), random.Random(3), PER_SEED // 2)


@pytest.mark.parametrize(("seed", "kind"), [*enumerate(STATES)])
def test_same_output_under_random_schedules_with_states(small: dict[str, Workload], seed: int, kind: str) -> None:
    """States are rolled back after rejected drafts, dropped with a preemption, and found again as snapshots."""
    require_same_output(small, (kind,), random.Random(seed), PER_SEED // 2)


@pytest.mark.parametrize(("seed", "kind"), [*enumerate(GEMMA4)])
def test_same_output_under_random_schedules_of_gemma_4(small: dict[str, Workload], seed: int, kind: str) -> None:
    """Layers of two head sizes, windows, shared keys and values, per-layer embeddings, experts beside the MLP."""
    require_same_output(small, (kind,), random.Random(seed), max(len(DRAFTERS), PER_SEED // 5))


def require_same_output(workloads: dict[str, Workload], kinds: Sequence[str], rng: random.Random, count: int) -> None:
    seen = dict.fromkeys(("preempted", "hit", "accepted", "rejected"), 0)
    for i, drafter in enumerate(islice(cycle(DRAFTERS), 3 * count)):
        if i >= count and all(seen.values()):  # schedules follow the clock: a busy machine may need more of them
            break
        kind, kv_type = rng.choice(kinds), rng.choice(("float32", *KV_TYPES))
        draft_model = workloads[KINDS[0]].model if drafter == "model" else None
        scheduler = play(rng, workloads[kind], kv_type, 12, 25, drafter, draft_model).scheduler
        seen["preempted"] += scheduler.stats.num_preemptions
        seen["hit"] += scheduler.stats.num_hit_tokens
        seen["accepted"] += scheduler.stats.num_accepted_tokens
        seen["rejected"] += scheduler.stats.num_drafted_tokens - scheduler.stats.num_accepted_tokens
    assert all(seen.values()), f"these schedules show nothing: {seen}"


@pytest.fixture(scope="module")
def real(default_model: Path) -> Workload:
    model = load(default_model, "float32", resolve_kv_type(select_backend(DEVICE)))
    return Workload(model, some_questions(12, model.config.vocab_size, (4, 70)))


@pytest.mark.parametrize("seed", range(6))
def test_same_output_under_random_schedules_default_model(real: Workload, seed: int) -> None:
    kv_type = resolve_kv_type(select_backend(DEVICE)) if seed else "float32"
    play(random.Random(seed), real, kv_type, 12, 10, DRAFTERS[seed % 3])
