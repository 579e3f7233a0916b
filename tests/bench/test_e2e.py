"""Whole models: the figures are what they say, and stand beside what they should."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from llm_worker_bench import e2e, engine_harness
from llm_worker_bench.e2e import Plan
from llm_worker_bench.engine_harness import EngineHarness
from llm_worker_bench.results import Recorder
from llm_worker_bench.synthetic import Shape, Spec, checkpoint, parse
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import (
    ContextLengthError,
    InsufficientMemoryError,
    InvalidRequestError,
)
from llm_worker_rbee.models import load_model, read_model_config
from tests.cli.conftest import write_model

SHAPE = Shape(2, 64, 4, 2, 96, 300, 320)
SPEC = Spec("small", SHAPE, "Q8_0", 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("e2e") / "tiny.gguf")


def measured(plan: Plan, source: Path | Spec = SPEC) -> tuple[Recorder, list[str]]:
    recorder, messages = Recorder("e2e"), []
    e2e.run(recorder, lambda what, *_: messages.append(what), source, plan)
    return recorder, messages


def test_run_names_units_and_arithmetic() -> None:
    plan = Plan(pp=[6, 0, 4], tg=[3], depths=[0, 16], batches=[1, 2], repetitions=3)
    recorder, messages = measured(plan)
    found = {result.name: result for result in recorder.results()}
    suffixes = ("", "@b2", "@d16", "@d16@b2")
    assert set(found) == {
        *(f"{kind}{suffix}" for kind in ("pp6", "pp4", "tg3", "bytes_per_token") for suffix in suffixes),
        *(f"ttft{n}{suffix}" for n in (6, 4) for suffix in ("", "@d16")),
        "peak_memory",
        *(f"products/tg3{suffix}" for suffix in ("@b2", "@d16@b2")),
    }
    bandwidth = recorder.details["limits"]["bandwidth"][-1]["bytes_per_second"]
    for name, result in found.items():
        unit = "tok/s" if name[:2] in ("pp", "tg", "pr") else "s" if name.startswith("ttft") else "B"
        assert result.unit == unit
        assert len(result.samples) == (0 if unit == "B" else 3)
        assert result.better == ("higher" if unit == "tok/s" else "lower")
        if name.startswith("tg"):
            fields = result.fields
            assert fields["bytes_per_token"] == found[f"bytes_per_token{name[3:]}"].estimate
            expected = 100 * fields["bytes_per_token"] * result.estimate / bandwidth
            assert fields["percent_of_limit"] == pytest.approx(expected)
            assert ("times_one" in fields) == ("percent_of_products" in fields) == name.endswith("@b2")
    assert found["pp6"].samples == pytest.approx([6 / s for s in found["ttft6"].samples])
    assert found["peak_memory"].estimate > 10e6
    order = [case.name for case in plan.cases()]
    rounds = [what.partition(":")[0] for what in messages if " of 3" in what]
    assert rounds == order + order[::-1] + order
    assert recorder.model == {"name": "small:Q8_0", "bytes": SPEC.nbytes, "synthetic": True, "seed": 0}


def test_run_one_prompt_length_gives_plain_names(tiny: Path) -> None:
    recorder, _ = measured(Plan(pp=[8], tg=[2], repetitions=1), tiny)
    assert {result.name for result in recorder.results()} == {"pp8", "tg2", "ttft", "bytes_per_token", "peak_memory"}
    assert recorder.model is not None
    assert recorder.model["name"] == "tiny.gguf"
    assert {r.name for r in measured(Plan(pp=[8], tg=[0], repetitions=1))[0].results()} == {
        "pp8",
        "ttft",
        "peak_memory",
    }


def test_run_impossible_plans_raise_first(tiny: Path) -> None:
    with pytest.raises(ContextLengthError, match=r"^tg8@d250 needs 258 tokens, the model's context has 256"):
        measured(Plan(pp=[4], tg=[8], depths=[0, 250]), tiny)
    with pytest.raises(ContextLengthError, match=r"^pp321 needs 321 tokens, the model's context has 320"):
        measured(Plan(pp=[321]))
    with pytest.raises(InvalidRequestError, match="--pp and --tg are both 0"):
        measured(Plan(pp=[0], tg=[0]))
    with pytest.raises(ContextLengthError, match=r"^--prefix needs 304 tokens, the model's context has 256"):
        measured(Plan(pp=[4], tg=[8], prefix=300), tiny)
    with pytest.raises(InvalidRequestError, match="real text: a synthetic model generates none"):
        measured(Plan(pp=[4], tg=[8], speculative="ngram"))
    with pytest.raises(InvalidRequestError, match="2 output tokens or more"):
        measured(Plan(pp=[4], tg=[1], speculative="ngram"), tiny)
    with pytest.raises(
        ContextLengthError, match=r"^the prompts and tg250 need \d+ tokens, the model's context has 256"
    ):
        measured(Plan(pp=[0], tg=[250], speculative="ngram"), tiny)
    with pytest.raises(InsufficientMemoryError, match=r"keys and values of 100000000 x 300 tokens take [\d,]+"):
        measured(Plan(pp=[300], batches=[100_000_000]))
    huge = Spec("huge", SHAPE._replace(width=1 << 18, d_ff=1 << 20, layers=999), "F16", 999)
    with pytest.raises(InsufficientMemoryError, match=r"^huge:F16 takes [\d,.]+ GB of memory"):
        e2e.run(Recorder("e2e"), lambda *_: None, huge, Plan(pp=[4]))


def test_throughput_counts_tokens_of_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)  # each run takes 1 s
    monkeypatch.setattr(engine_harness, "time", clock)
    recorder, _ = measured(Plan(pp=[4], tg=[3], batches=[2], repetitions=1))
    found = {result.name: result for result in recorder.results()}
    rates = {name: result.estimate for name, result in found.items() if result.unit == "tok/s"}
    # several stand beside one, and beside their products: each step is 1 s by this clock, and so is what comes between
    assert rates == {"pp4@b2": 8, "tg3": 3, "tg3@b2": 2, "products/tg3@b2": 2}
    fields = found["tg3@b2"].fields
    assert (fields["times_one"], fields["percent_of_products"]) == (pytest.approx(2 / 3), 100)


def test_plan_repeated_lengths_make_one_case() -> None:
    plan = Plan(pp=[4, 4], tg=[2, 0, 2], depths=[0, 0], batches=[1, 1])
    assert [case.name for case in plan.cases()] == ["pp4", "tg2"]


def test_run_interrupted_keeps_samples() -> None:
    recorder = Recorder("e2e")

    def progress(what: str, done: float, total: float) -> None:
        if what == "tg2: 2 of 3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        e2e.run(recorder, progress, SPEC, Plan(pp=[4], tg=[2], repetitions=3))
    kept = {result.name: len(result.samples) for result in recorder.results()}
    assert kept == {"pp4": 1, "ttft": 1, "tg2": 1, "bytes_per_token": 0, "peak_memory": 0}


def test_engine_harness_runs_a_synthetic_model() -> None:
    made = checkpoint(SPEC)
    model = load_model(made, ReferenceBackend(), read_model_config(made))
    assert EngineHarness(model, 16).decode(0, 5, 1).answers == EngineHarness(model, 16).decode(0, 5, 1).answers


def test_run_isolated_names_results_by_model_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    small, huge = parse("smollm2-135m:Q8_0:1"), parse("smollm2-135m:Q4_0:2")
    plans: list[tuple[str, Plan]] = []

    def measure(model: Spec, plan: Plan) -> dict[str, object]:
        plans.append((str(model), plan))
        result = {"name": "tg2", "unit": "tok/s", "estimate": 1.0, "low": 1.0, "high": 1.0, "samples": [1.0]}
        return {"error": "crashed"} if model == huge else {"results": [result], "model": {}, "details": {}}

    monkeypatch.setattr(e2e, "_measure_in_child", measure)
    recorder, plan = Recorder("e2e"), Plan(device="cuda", repetitions=3)
    e2e.run_isolated(recorder, lambda *_: None, [small, huge], plan)
    assert [result.name for result in recorder.results()] == ["smollm2-135m:Q8_0:1/tg2"]
    assert recorder.details["failed"] == {"smollm2-135m:Q4_0:2": "crashed"}
    assert plans == [(str(small), plan), (str(huge), plan)]
