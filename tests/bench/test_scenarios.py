"""Scenarios of whole models: names and units of their results, and that what is measured is what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_worker_bench import e2e, roofline, scenarios
from llm_worker_bench.e2e import Plan
from llm_worker_bench.engine_harness import TimedRun
from llm_worker_bench.results import Recorder
from llm_worker_bench.scenarios import Case, Composition, Cost, ModelBench, SpeculativeDecoding
from llm_worker_bench.synthetic import Shape, Spec, checkpoint
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.errors import ContextLengthError, InferenceError, InvalidRequestError
from llm_worker_rbee.models import read_model_config
from tests.cli.conftest import write_model

SHAPE = Shape(2, 64, 4, 2, 96, 300, 320)
SPEC = Spec("small", SHAPE, "Q8_0", 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scenarios") / "tiny.gguf")


def measured(plan: Plan, source: Path | Spec = SPEC) -> tuple[Recorder, list[str]]:
    recorder, messages = Recorder("e2e"), []
    e2e.run(recorder, lambda what, *_: messages.append(what), source, plan)
    return recorder, messages


def test_cost_bytes_and_operations() -> None:
    width, d_ff, kv = SHAPE.width, SHAPE.d_ff, 2 * 16
    values = 2 * (2 * width * width + 2 * kv * width + 3 * d_ff * width)
    norms = 4 * width * (2 * 2 + 1)
    q8 = 34 / 32
    cached = 2 * 2 * kv * 4  # layers, K and V, float32
    untied = checkpoint(SPEC)
    cost = Cost.from_checkpoint(untied, read_model_config(untied))
    head = width * SHAPE.vocabulary
    assert cost.weights == (values + head) * q8 + norms + width * q8  # and one row of the embedding
    assert cost.bytes_per_token(Case("tg", 8, 100, 1)) == cost.weights + cached * 104
    assert cost.bytes_per_token(Case("tg", 8, 100, 4)) == cost.weights / 4 + cached * 104
    assert cost.operations(Case("pp", 10, 0, 3)) == 2 * 3 * (10 * values + head)
    tied = checkpoint(Spec("tied", SHAPE._replace(tied=True), "Q8_0", 2))
    assert Cost.from_checkpoint(tied, read_model_config(tied)).weights == (values + head) * q8 + norms


def test_cost_of_experts_counts_those_that_are_used() -> None:
    shape = SHAPE._replace(architecture="qwen3moe", head_dim=16, experts=4, used_experts=1, expert_ff=32)
    made = checkpoint(Spec("experts", shape, "F32", 2))
    cost = Cost.from_checkpoint(made, read_model_config(made))
    expert, dense = 2 * 3 * 64 * 32, 2 * (64 * 64 * 2 + 2 * 64 * 32 + 4 * 64)  # of two layers
    assert (cost.experts, cost.expert_matrices, cost.matrices) == (4 * 4 * expert, 4 * expert, dense)
    assert cost.step_weights(1) == cost.weights + 4 * expert
    assert cost.step_weights(2) == cost.weights + 4 * 4 * expert * (1 - 0.75**2)
    assert cost.operations(Case("pp", 10, 0, 1)) == 2 * (10 * (dense + expert) + 300 * 64)


def test_model_bench_ratio_is_taken_by_repetition() -> None:
    """A machine that is twice as slow for a while is so for both sides."""
    one = ModelBench(Recorder("e2e"), None, None, roofline.measure_limits(1), "none")
    one.samples = {"a": [8.0, 4.0, 8.0, 4.0], "b": [4.0, 2.0, 4.0]}
    assert one.ratio("a", "b") == pytest.approx(2)
    assert one.ratio("a", "c") is None


def test_prefix_hit_results(tiny: Path) -> None:
    recorder, _ = measured(Plan(pp=[0], tg=[0], prefix=40, repetitions=3), tiny)
    found = {result.name: result for result in recorder.results()}
    assert set(found) == {"ttft_first@p40", "ttft_shared@p40", "peak_memory"}
    first, shared = found["ttft_first@p40"], found["ttft_shared@p40"]
    assert (first.unit, first.better, len(first.samples), first.fields["prompt"]) == (
        "s",
        "lower",
        3,
        40 + scenarios.TAIL_TOKENS,
    )
    ratios = sorted(a / b for a, b in zip(first.samples, shared.samples, strict=True))
    assert ratios[0] <= shared.fields["times_shorter"] <= ratios[-1]


def test_itl_under_prefill_results(tiny: Path) -> None:
    recorder, messages = measured(Plan(pp=[0], tg=[0], targets_ms=[1000, 0, 1000], repetitions=2), tiny)
    found = {result.name: result for result in recorder.results()}
    length = 256 * 3 // 4  # the context has no room for 2,000
    sides = ("t1000", "none")
    names = {f"itl_{which}@{side}" for which in ("median", "p95", "max") for side in sides}
    assert set(found) == names | {f"ttft{length}@{side}" for side in sides} | {"peak_memory"}
    for side in sides:
        low, middle, high = (found[f"itl_{which}@{side}"].samples for which in ("median", "p95", "max"))
        assert all(0 < a <= b <= c for a, b, c in zip(low, middle, high, strict=True))
        assert all(whole >= longest for whole, longest in zip(found[f"ttft{length}@{side}"].samples, high, strict=True))
    fields = found["itl_median@none"].fields
    assert (fields["target_ms"], fields["answering"], fields["prompt"]) == (None, scenarios.DECODING_REQUESTS, length)
    assert any("target 1000 ms" in text for text in messages)


def test_speculative_decoding_results(tiny: Path) -> None:
    """The model as its own draft is always right."""
    plan = Plan(pp=[0], tg=[8], batches=[3], repetitions=2, draft_model=str(tiny), draft_tokens=3)
    found = {result.name: result for result in measured(plan, tiny)[0].results()}
    assert {"tg8@text@b3", "tg8@draft@b3"} <= set(found)
    fields = found["tg8@draft@b3"].fields
    assert fields["drafted"] == fields["accepted"] > 0
    assert fields["acceptance"] == 1
    assert 2 < fields["tokens_per_step"] <= 4
    plan = Plan(pp=[0], tg=[24], repetitions=1, speculative="ngram")
    found = {result.name: result for result in measured(plan, tiny)[0].results()}
    fields = found["tg24@ngram"].fields
    assert 0 < fields["accepted"] <= fields["drafted"]
    assert fields["acceptance"] == fields["accepted"] / fields["drafted"]
    assert fields["tokens_per_step"] > 1
    assert fields["times_plain"] == pytest.approx(found["tg24@ngram"].estimate / found["tg24@text"].estimate)


def test_speculative_decoding_reports_agreement_where_logits_depend_on_the_batch(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = iter((0, 1, 2, 3))  # the runs of a warm-up and of a sample: each answers otherwise
    run = SpeculativeDecoding._run

    def run_otherwise(self: SpeculativeDecoding, tokens: int) -> TimedRun:
        timed, token = run(self, tokens), next(changed)
        return timed._replace(answers=[[token], *timed.answers[1:]])

    monkeypatch.setattr(SpeculativeDecoding, "_run", run_otherwise)
    plan = Plan(pp=[0], tg=[8], batches=[2], repetitions=1, speculative="ngram")
    with pytest.raises(InferenceError, match="speculative decoding changed an answer"):
        measured(plan, tiny)
    changed = iter((0, 1, 2, 3))
    monkeypatch.setattr(CpuBackend, "deterministic", False)
    found = {result.name: result for result in measured(plan, tiny)[0].results()}
    assert found["tg8@ngram@b2"].fields["same_answers"] == 7 / 8


def test_steps_and_bursts_results() -> None:
    steps = ["3x5", "1x6+2", "0x0+3", "3x5", "2x120+20"]
    plan = Plan(pp=[0], tg=[0], depths=[0, 20], steps=steps, bursts=["4x7"], repetitions=2)
    recorder, messages = measured(plan)
    found = {result.name: result for result in recorder.results()}
    names = {"step3x5", "step1x6+2", "step1x6+2@d20", "step0x0+3", "step0x0+3@d20"}
    names |= {"step2x120+20", "step2x120+20@d20"}  # more than an engine computes beside decodes at first
    bursts = [f"burst4x7/ttft_{which}" for which in ("median", "p95", "max")]
    assert set(found) == names | set(bursts) | {"peak_memory"}
    for name in (*names, *bursts):
        assert (found[name].unit, found[name].better, len(found[name].samples)) == ("s", "lower", 2)
    fields = found["step1x6+2@d20"].fields
    assert (fields["prompts"], fields["decoding"], fields["tokens"], fields["depth"]) == (1, 2, 8, 20)
    for values in zip(*(found[name].samples for name in bursts), strict=True):
        assert 0 < values[0] <= values[1] <= values[2]
    assert messages.index("burst4x7: 2 of 2") < messages.index("step3x5: warming up")  # one engine after the other


@pytest.mark.parametrize("text", ["", "3", "3x", "x3", "0x5", "3x0", "0x0", "0x0+0", "-1x5", "3x5+", "9999x1", "3x5x2"])
def test_composition_parse_invalid_names_the_option(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--step is"):
        Composition.parse(text, "--step")


def test_composition_sizes() -> None:
    assert Composition.parse("1x27+63", "--step") == Composition(1, 27, 63)
    made = Composition.parse("20x26", "--step")
    assert (str(made), made.requests, made.tokens, made.step_tokens) == ("20x26", 20, 520, 546)
    assert (str(Composition(0, 0, 256)), Composition(0, 0, 256).tokens) == ("0x0+256", 256)
    with pytest.raises(InvalidRequestError, match="--burst is '4x7\\+1'"):
        Plan(bursts=["4x7+1"])
    with pytest.raises(ContextLengthError, match=r"^--step needs 330 tokens, the model's context has 320"):
        measured(Plan(pp=[0], tg=[0], steps=["1x330"]))


def test_run_with_pg_counts_output_tokens_of_whole_requests() -> None:
    recorder, _ = measured(Plan(pp=[0], tg=[0], batches=[1, 3], pg=[5, 4], repetitions=2, deterministic=True))
    found = {result.name: result for result in recorder.results()}
    assert set(found) == {"pp5+tg4", "pp5+tg4@b3", "peak_memory"}
    result = found["pp5+tg4@b3"]
    assert (result.unit, result.better, len(result.samples)) == ("tok/s", "higher", 2)
    assert result.samples[-1] == pytest.approx(3 * 4 / result.fields["seconds"])


def test_run_with_pg_of_more_requests_than_the_batch() -> None:
    recorder, _ = measured(Plan(pp=[0], tg=[0], batches=[2], pg=[5, 4], requests=5, repetitions=1))
    result = next(result for result in recorder.results() if result.name == "pp5+tg4@b2@n5")
    assert result.samples[0] == pytest.approx(5 * 4 / result.fields["seconds"])
    assert (result.fields["batch"], result.fields["requests"]) == (2, 5)
