"""Whole models: the drive does what the engine does, the figures are what they say."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.backends import reference
from llm_worker_rbee.bench import drive, e2e, limits, memory
from llm_worker_rbee.bench.drive import Drive
from llm_worker_rbee.bench.e2e import Case, Cost, Plan
from llm_worker_rbee.bench.results import Recorder
from llm_worker_rbee.bench.synthetic import Shape, Spec, checkpoint
from llm_worker_rbee.errors import ContextLengthError, InsufficientMemoryError, InvalidRequestError
from llm_worker_rbee.models import describe, load_model
from tests.cli.conftest import write_model

SHAPE = Shape(2, 64, 4, 2, 96, 300, 320)
SPEC = Spec("small", SHAPE, "Q8_0", 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("e2e") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny)


def answer(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    return llm.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True).tokens


def test_the_drive_computes_what_the_engine_does(llm: LLM) -> None:
    one = Drive(llm.model, 64, batch=3, seed=7)
    prompts = [row.tolist() for row in one.ids]
    assert len({tuple(p) for p in prompts}) == 3
    assert one.prefill(0, 40, 3) == [answer(llm, prompt[:40], 1)[0] for prompt in prompts]
    one.fill(20, 3)
    made = one.decode(20, 9, 3)
    assert made == [answer(llm, prompt[:21], 9) for prompt in prompts]
    # the answers lie over the prompts' own keys now: what is needed of those is computed again
    one.fill(30, 2)
    assert one.prefill(30, 5, 2) == [answer(llm, prompt[:35], 1)[0] for prompt in prompts[:2]]
    assert one.decode(0, 4, 1) == [answer(llm, prompts[0][:1], 4)]


def test_steps_are_bounded_and_may_hold_two_sequences(llm: LLM) -> None:
    one = Drive(llm.model, 220, batch=3)
    wanted = [drive.Span(s, 10, one.ids[s, 10:210]) for s in range(3)]
    steps = list(drive._steps(wanted))
    assert [sum(len(span.ids) for span in step) for step in steps] == [512, 88]
    assert [[(span.sequence, span.start) for span in step] for step in steps] == [
        [(0, 10), (1, 10), (2, 10)],
        [(2, 122)],
    ]
    for s in range(3):
        again = np.concatenate([span.ids for step in steps for span in step if span.sequence == s])
        assert (again == one.ids[s, 10:210]).all()
    assert one.prefill(0, 210, 3) == [answer(llm, row[:210].tolist(), 1)[0] for row in one.ids]


def measured(plan: Plan, source: Path | Spec = SPEC) -> tuple[Recorder, list[str]]:
    recorder, told = Recorder("e2e"), []
    e2e.run(recorder, lambda what, *_: told.append(what), source, plan)
    return recorder, told


def test_names_units_and_arithmetic() -> None:
    plan = Plan(pp=[6, 0, 4], tg=[3], depths=[0, 16], batches=[1, 2], repetitions=3)
    recorder, told = measured(plan)
    found = {result.name: result for result in recorder.results()}
    suffixes = ("", "@b2", "@d16", "@d16@b2")
    assert set(found) == {
        *(f"{kind}{suffix}" for kind in ("pp6", "pp4", "tg3", "bytes_per_token") for suffix in suffixes),
        *(f"ttft{n}{suffix}" for n in (6, 4) for suffix in ("", "@d16")),
        "peak_memory",
    }
    bandwidth = limits.measured(1).memory_bandwidth
    for name, result in found.items():
        unit = "tok/s" if name[:2] in ("pp", "tg") else "s" if name.startswith("ttft") else "B"
        assert result.unit == unit
        assert len(result.samples) == (0 if unit == "B" else 3)
        assert result.better == ("higher" if unit == "tok/s" else "lower")
        if name.startswith("tg"):
            fields = result.fields
            assert fields["bytes_per_token"] == found[f"bytes_per_token{name[3:]}"].estimate
            expected = 100 * fields["bytes_per_token"] * result.estimate / bandwidth
            assert fields["percent_of_limit"] == pytest.approx(expected)
    assert found["pp6"].samples == pytest.approx([6 / s for s in found["ttft6"].samples])
    assert found["peak_memory"].estimate > 10e6
    rounds = [what for what in told if " of 3" in what]
    assert [what.partition(":")[0] for what in rounds[:12]] == [case.name for case in plan.cases()]
    assert [what.partition(":")[0] for what in rounds[12:24]] == [case.name for case in plan.cases()][::-1]
    assert recorder.model == {"name": "small:Q8_0", "bytes": SPEC.nbytes, "synthetic": True, "seed": 0}


def test_one_prompt_length_gives_plain_names(tiny: Path) -> None:
    recorder, _ = measured(Plan(pp=[8], tg=[2], repetitions=1), tiny)
    assert {result.name for result in recorder.results()} == {"pp8", "tg2", "ttft", "bytes_per_token", "peak_memory"}
    assert recorder.model is not None
    assert recorder.model["name"] == "tiny.gguf"
    assert {r.name for r in measured(Plan(pp=[8], tg=[0], repetitions=1))[0].results()} == {
        "pp8",
        "ttft",
        "peak_memory",
    }


def test_bytes_and_operations_by_hand() -> None:
    width, d_ff, kv = SHAPE.width, SHAPE.d_ff, 2 * 16
    values = 2 * (2 * width * width + 2 * kv * width + 3 * d_ff * width)
    norms = 4 * width * (2 * 2 + 1)
    q8 = 34 / 32
    cached = 2 * 2 * kv * 4  # layers, K and V, float32
    untied = checkpoint(SPEC)
    cost = Cost.of(untied, describe(untied))
    head = width * SHAPE.vocabulary
    assert cost.weights == (values + head) * q8 + norms + width * q8  # and one row of the embedding
    assert cost.bytes_per_token(Case("tg", 8, 100, 1)) == cost.weights + cached * 104
    assert cost.bytes_per_token(Case("tg", 8, 100, 4)) == cost.weights / 4 + cached * 104
    assert cost.operations(Case("pp", 10, 0, 3)) == 2 * 3 * (10 * values + head)
    tied = checkpoint(Spec("tied", SHAPE._replace(tied=True), "Q8_0", 2))
    assert Cost.of(tied, describe(tied)).weights == (values + head) * q8 + norms


def test_what_cannot_be_run_is_refused_first(tiny: Path) -> None:
    with pytest.raises(ContextLengthError, match=r"^tg8@d250 needs 258 tokens, the model's context has 256"):
        measured(Plan(pp=[4], tg=[8], depths=[0, 250]), tiny)
    with pytest.raises(ContextLengthError, match=r"^pp321 needs 321 tokens, the model's context has 320"):
        measured(Plan(pp=[321]))
    with pytest.raises(InvalidRequestError, match="--pp and --tg are both 0"):
        measured(Plan(pp=[0], tg=[0]))
    with pytest.raises(InsufficientMemoryError, match=r"keys and values of 100000000 x 300 tokens take [\d,]+"):
        measured(Plan(pp=[300], batches=[100_000_000]))
    huge = Spec("huge", SHAPE._replace(width=1 << 18, d_ff=1 << 20, layers=999), "F16", 999)
    with pytest.raises(InsufficientMemoryError, match=r"^huge:F16 takes [\d,.]+ GB of memory"):
        e2e.run(Recorder("e2e"), lambda *_: None, huge, Plan(pp=[4]))


def test_a_rate_counts_the_tokens_of_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # each run takes 1 s
    recorder, _ = measured(Plan(pp=[4], tg=[3], batches=[1, 2], repetitions=1))
    rates = {result.name: result.estimate for result in recorder.results() if result.unit == "tok/s"}
    assert rates == {"pp4": 4, "pp4@b2": 8, "tg3": 3, "tg3@b2": 6}


def test_what_is_cached_before_a_run_is_there(llm: LLM) -> None:
    run, known = Drive(llm.model, 16), Drive(llm.model, 16)
    Case("tg", 2, 9, 1).seconds(run)
    known.fill(9, 1)
    assert run.decode(9, 4, 1) == known.decode(9, 4, 1)


def test_what_is_named_twice_is_measured_once() -> None:
    plan = Plan(pp=[4, 4], tg=[2, 0, 2], depths=[0, 0], batches=[1, 1])
    assert [case.name for case in plan.cases()] == ["pp4", "tg2"]


def test_what_was_measured_before_ctrl_c_is_kept() -> None:
    recorder = Recorder("e2e")

    def progress(what: str, done: float, total: float) -> None:
        if what == "tg2: 2 of 3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        e2e.run(recorder, progress, SPEC, Plan(pp=[4], tg=[2], repetitions=3))
    kept = {result.name: len(result.samples) for result in recorder.results()}
    assert kept == {"pp4": 1, "ttft": 1, "tg2": 1, "bytes_per_token": 0, "peak_memory": 0}


def test_the_peak_of_memory_starts_again() -> None:
    if not memory.reset_peak():
        pytest.skip("this system cannot reset the highest use of memory")
    before = memory.peak()
    block = np.ones(64 << 20, np.uint8)
    assert memory.peak() >= before + block.nbytes / 2
    del block
    gc.collect()
    assert memory.reset_peak()
    used = memory.used()
    assert used is not None
    assert memory.peak() < before + (48 << 20)


def test_a_synthetic_model_loads_like_any_other() -> None:
    made = checkpoint(SPEC)
    model = load_model(made, reference, describe(made))  # type: ignore[arg-type]
    assert Drive(model, 16).decode(0, 5, 1) == Drive(model, 16).decode(0, 5, 1)
