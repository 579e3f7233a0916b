"""The experiments: both sides compute the same, the rules of verdicts, and the results of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.ops import RopeTable
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.bench import experiments
from llm_worker_rbee.bench.experiments import cache_mask_rope, components, fused_forward
from llm_worker_rbee.bench.experiments.harness import (
    Harness,
    Shape,
    VerdictName,
    format_by_length,
    format_speedup,
    majority,
    require_equal,
    unanimous,
    vote_faster,
    vote_saves,
    vote_speedup,
)
from llm_worker_rbee.bench.micro import ROPE_BASE, TimingPlan
from llm_worker_rbee.bench.results import Recorder, Run
from llm_worker_rbee.bench.statistics import Change, compare
from llm_worker_rbee.errors import InferenceError, InvalidRequestError, UnsupportedModelError
from llm_worker_rbee.layers.rope import inverse_frequencies
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.cli.conftest import HEADS, model_keys, model_tensors, vocabulary, write_model

SHAPE = Shape(d_model=32, n_heads=4, head_dim=8, d_ff=48)
PLAN = TimingPlan(seconds=0.004, min_samples=3, max_samples=3, warm_up_s=0.0)
PHASES = ("prefill", "decode")
NOISE = Change(0.01, -0.02, 0.03, "within noise")
FASTER = Change(-0.5, -0.52, -0.48, "improved")
SLOWER = Change(0.5, 0.48, 0.52, "regressed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experiments") / "tiny.gguf")


@pytest.fixture
def make_harness(tiny: Path) -> Callable[..., Harness]:
    def make(**changes: object) -> Harness:
        harness = Harness(Recorder("experiments"), lambda *_: None, tiny, plan=PLAN, shape=SHAPE, only_lengths=(1, 5))
        return replace(harness, **changes)

    return make


@pytest.fixture(scope="module")
def whole(tiny: Path) -> Run:
    harness = Harness(Recorder("experiments"), lambda *_: None, tiny, plan=PLAN, shape=SHAPE, only_lengths=(1, 5))
    experiments.run(harness)
    return harness.recorder.to_run()


def test_run_every_claim_ends_in_one_line(whole: Run) -> None:
    verdicts = whole.details["verdicts"]
    assert [one["claim"] for one in verdicts] == ["1", "2", "3", "3a", "4", "5"]
    for one in verdicts:
        assert one["verdict"] in ("confirmed", "refuted", "within noise")
        assert one["line"].startswith(f"claim {one['claim']}: {one['verdict']} - ")
        assert "\n" not in one["line"]
        assert one["claim"] == "2" or "99% interval" in one["line"]
    for claim, table in whole.details["tables"].items():
        assert len(table) == (5 if claim in ("2", "4") else 3)  # two lengths; four parts; two phases of two lengths
        assert {len(row) for row in table} == {len(table[0])}


def test_run_results_are_named_by_claim_side_and_length(whole: Run) -> None:
    results = {result.name: result for result in whole.results}
    timed = [
        *(f"claim1/{side}/{n}" for side in ("modules", "fused") for n in (1, 5)), "claim1/modules/calls",
        *(f"claim3/{side}/{n}" for side in ("separate", "unified") for n in (1, 5)),
        *(f"claim3a/{side}/{n}" for side in ("create", "cached", "creation", "lookup", "add") for n in (1, 5)),
        *(f"claim3a/{side}/{n}" for side in ("masked_softmax", "no_mask") for n in (1, 5)),
        *(f"claim4/{side}/{phase}{n}" for side in ("modules", "fused") for phase in PHASES for n in (1, 5)),
        *(f"claim5/{side}/{n}" for side in ("formula", "tables", "backend/reference") for n in (1, 5)),
    ]  # fmt: skip
    for name in timed:
        assert results[name].unit == "s"
        assert len(results[name].samples) == PLAN.min_samples
    assert results["claim3a/bytes/5"].estimate == 5 * 5 * 4
    assert results["claim3/unified/5/memory"].unit == "B"
    assert results["claim2/covered"].estimate == 0.75  # this vocabulary has no reference ids


def test_markdown_needs_only_the_run(whole: Run, tmp_path: Path) -> None:
    whole.save(tmp_path / "run.json")
    page = experiments.markdown(Run.load(tmp_path / "run.json"))
    assert page == experiments.markdown(whole)
    for one in whole.details["verdicts"]:
        assert f"\n`{one['line']}`\n" in page
        assert f"## Claim {one['claim']}: {experiments.EXPERIMENTS[one['claim']].claim}\n" in page
    assert whole.machine["cpu"] in page
    assert "| 5 | " in page
    assert "`llm-worker-rbee bench experiments --claims docs/claims.md`" in page
    thorough = replace(whole, settings={**whole.settings, "all": True})
    assert "`llm-worker-rbee bench experiments --all --claims docs/claims.md`" in experiments.markdown(thorough)


def test_select_returns_claims_in_table_order(make_harness: Callable[..., Harness]) -> None:
    assert experiments.select(["5", "3A", "claim 1"]) == ["1", "3a", "5"]
    assert experiments.select([]) == list(experiments.EXPERIMENTS)
    with pytest.raises(InvalidRequestError, match="there is no claim '7': known are 1, 2, 3, 3a, 4, 5"):
        experiments.select(["7"])
    one = make_harness()
    experiments.run(one, ["5"])
    assert list(one.recorder.details["tables"]) == ["5"]


def test_run_interrupted_keeps_finished_claims(make_harness: Callable[..., Harness]) -> None:
    def press(what: str, done: float, total: float) -> None:
        if what.startswith("claim 5: 1"):
            raise KeyboardInterrupt

    one = make_harness(progress=press)
    with pytest.raises(KeyboardInterrupt):
        experiments.run(one, ["3a", "5"])
    assert [verdict["claim"] for verdict in one.recorder.details["verdicts"]] == ["3a"]
    assert any(result.name == "claim3a/cached/5" for result in one.recorder.results())


def test_run_progress_is_monotonic(make_harness: Callable[..., Harness]) -> None:
    seen: list[float] = []
    experiments.run(make_harness(progress=lambda what, done, total: seen.append(done / total)), ["2", "3a", "5"])
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    "length", [1, 7, fused_forward.QUERY_TILE, fused_forward.QUERY_TILE + 1, 2 * fused_forward.QUERY_TILE + 3]
)
def test_run_block_equals_the_layers(length: int, rng: np.random.Generator) -> None:
    block = fused_forward.make_block(SHAPE)
    sides = fused_forward.make_sides(block, rng.standard_normal((length, SHAPE.d_model), dtype=np.float32))
    (added, stream), (added_too, stream_too) = sides["modules"](), sides["fused"]()
    assert np.allclose(added, added_too, atol=1e-5)
    assert np.allclose(stream, stream_too, atol=1e-5)


@pytest.mark.parametrize(("prompt", "steps"), [(1, 1), (9, 3), (fused_forward.QUERY_TILE + 6, 2)])
def test_whole_forward_sides_equal_the_models_logits(tiny: Path, prompt: int, steps: int) -> None:
    checkpoint = open_checkpoint(tiny)
    model = load_model(checkpoint, fused_forward.DENSE, read_model_config(checkpoint))
    sides = fused_forward.Sides(model, prompt, steps)
    for work in (sides.prefill, sides.decode, sides.decode):  # decode again: it starts at the prompt's end anew
        one, other = work("modules"), work("fused")
        assert one.shape == other.shape
        assert np.allclose(one, other, atol=1e-4)
    sequence = fused_forward.SingleSequence(
        load_model(checkpoint, ReferenceBackend(), read_model_config(checkpoint)), prompt + steps
    )
    plain = sequence.model.forward(sequence.batch(sides.ids, 0, all_logits=False), sequence.cache)
    assert np.allclose(plain, sides.decode("fused"), atol=1e-4)


def test_whole_forward_grouped_heads_agree(tmp_path: Path) -> None:
    """As the default model has them: several query heads on one KV head."""
    keys = {**model_keys(), **vocabulary(), "llama.attention.head_count_kv": HEADS // 2}
    tensors = model_tensors(len(keys["tokenizer.ggml.tokens"]))
    halved = {name: t[: len(t) // 2] if "attn_k." in name or "attn_v." in name else t for name, t in tensors.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "grouped.gguf", keys, halved))
    sides = fused_forward.Sides(
        load_model(checkpoint, fused_forward.DENSE, read_model_config(checkpoint)), fused_forward.QUERY_TILE + 5, 1
    )
    for work in (sides.prefill, sides.decode):
        one, other = work("modules"), work("fused")
        assert np.abs(one - other).max() < 1e-4
        assert one.argmax() == other.argmax()


def test_require_plain_llama_other_model_raises(tiny: Path) -> None:
    config = read_model_config(open_checkpoint(tiny))
    fused_forward.require_plain_llama(config)
    with pytest.raises(UnsupportedModelError, match="needs a plain llama: this model has a window"):
        fused_forward.require_plain_llama(replace(config, windows=(4,) * config.n_layers))
    with pytest.raises(UnsupportedModelError, match="activation gelu_tanh"):
        fused_forward.require_plain_llama(replace(config, activation="gelu_tanh"))


def test_unified_and_separate_caches_are_equal(rng: np.random.Generator) -> None:
    q, k, v = cache_mask_rope.make_prompt(SHAPE, 6)
    one, other = (make(SHAPE, 6).attend(q, k, v) for make in cache_mask_rope.CACHES.values())
    assert one.tobytes() == other.tobytes()
    table = RopeTable(inverse_frequencies(ROPE_BASE, SHAPE.head_dim), 1.0)
    turned, positions = reference.rope(q, np.arange(6), table), np.arange(6)
    keys = reference.rope(k, positions, table)
    mask = reference.causal_mask(positions, positions)
    scores = np.einsum("thd,shd->hts", turned, keys) * SHAPE.head_dim**-0.5
    weights = reference.softmax(np.where(mask, scores, -np.inf).astype(np.float32))
    assert np.allclose(one, np.einsum("hts,shd->thd", weights, v), atol=1e-5)


def test_measure_memory_is_little_more_than_the_arrays() -> None:
    n, heads, dim = 64, SHAPE.n_heads, SHAPE.head_dim
    arrays = 4 * (2 * n * heads * dim + 2 * n * dim // 2 + n * n)
    for make in cache_mask_rope.CACHES.values():
        held = cache_mask_rope.measure_memory(lambda m=make: m(SHAPE, n), cache_mask_rope.make_prompt(SHAPE, n))  # type: ignore[misc]
        assert arrays < held < arrays + 8192


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
def test_bounded_softmax_equals_masked_softmax(length: int, rng: np.random.Generator) -> None:
    sides = cache_mask_rope.mask_sides(rng.standard_normal((3, length, length), dtype=np.float32))
    assert np.allclose(sides["no_mask"](), sides["masked_softmax"](), atol=1e-6)
    assert sides["create"]().tobytes() == sides["cached"]().tobytes() == sides["add"]().tobytes()
    assert sides["creation"]().tobytes() == sides["lookup"]().tobytes()


def test_rope_formula_tables_and_backend_agree(rng: np.random.Generator) -> None:
    x, tolerance = rng.standard_normal((130, 4, 16), dtype=np.float32), cache_mask_rope.ROPE_TOLERANCE
    straight = cache_mask_rope.split_pairs(cache_mask_rope.rope_formula(x, 0, ROPE_BASE))
    in_place = cache_mask_rope.split_pairs(x)
    result = cache_mask_rope.RopeTables(x).rotate(in_place)
    assert result is in_place
    assert np.abs(straight - result).max() < tolerance
    by_backend: Any = cache_mask_rope.backend_rope("reference", cache_mask_rope.split_pairs(x))()
    assert np.abs(straight - by_backend).max() < tolerance


def test_require_equal_different_sides_raises() -> None:
    one = np.zeros(4, np.float32)
    require_equal(one, one + np.float32(1e-6), 1e-5, "x")
    for wrong in (one + np.float32(1e-3), one * np.nan, np.zeros(5, np.float32)):
        with pytest.raises(InferenceError, match="x: the two sides of the experiment differ"):
            require_equal(one, wrong, 1e-5, "x")


def test_components_default_model_covers_all_parts(default_model: Path, make_harness: Callable[..., Harness]) -> None:
    found = components.run(make_harness(model=default_model, claim="2"))
    assert [row[1] for row in found.table[1:]] == ["yes", "yes", "yes", "yes"], found.table
    assert found.line.startswith("claim 2: confirmed - 4 of 4 parts do their job on a real file (100%)")
    assert "together what the whole reply says" in found.table[-1][2]


def test_components_server_that_does_not_start_is_not_covered(
    make_harness: Callable[..., Harness], tmp_path: Path
) -> None:
    found = components.run(make_harness(model=tmp_path / "none.gguf", claim="2"))
    assert found.verdict == "refuted"
    assert "the server ended with exit status 1" in found.table[-1][2]


def test_components_other_token_ids_are_not_covered(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(components.REFERENCE_IDS, "Hello, world!", "1 2 3")
    with pytest.raises(components.NotCoveredError, match="the ids of 'Hello, world!' are not those"):
        components.PARTS["tokenizer equals the reference"](default_model)


@pytest.mark.parametrize(
    ("change", "faster", "saves", "twice"),
    [
        (FASTER, "confirmed", "confirmed", "within noise"),  # 1.92 to 2.08 times
        (SLOWER, "refuted", "refuted", "refuted"),
        (NOISE, "within noise", "refuted", "refuted"),
        (Change(-0.05, -0.06, -0.04, "improved"), "confirmed", "refuted", "refuted"),
        (Change(-0.12, -0.30, 0.05, "within noise"), "within noise", "within noise", "refuted"),
        (Change(-0.6, -0.65, -0.55, "improved"), "confirmed", "confirmed", "confirmed"),
    ],
)
def test_votes_follow_the_rules(change: Change, faster: VerdictName, saves: VerdictName, twice: VerdictName) -> None:
    assert (vote_faster(change), vote_saves(change), vote_speedup(change, 2.0)) == (faster, saves, twice)


def test_majority_or_longest_decides() -> None:
    assert majority(["confirmed", "confirmed", "refuted"]) == "confirmed"
    assert majority(["confirmed", "confirmed", "refuted", "refuted"]) == "refuted"  # the longest decides
    assert majority(["confirmed", "within noise", "refuted"]) == "refuted"
    assert majority(["within noise"]) == "within noise"
    assert unanimous(["confirmed", "confirmed"]) == "confirmed"
    assert unanimous(["confirmed", "within noise"]) == "within noise"
    assert unanimous(["confirmed", "refuted"]) == "refuted"


def test_format_by_length_and_speedup() -> None:
    change = compare([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert format_speedup(change) == "2.00 times (99% interval 2.00 to 2.00)"
    assert format_by_length({1: change, 8: change}) == (
        "1 token -50.0% (99% interval -50.0% to -50.0%), 8 tokens -50.0% (99% interval -50.0% to -50.0%)"
    )
