"""The experiments: the rules of verdicts, the statistics on a simulated clock, the results and the page of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import claims as experiments
from benchmarks.claims import components, decisions, harness, masks, page, source_tree
from benchmarks.claims.harness import (
    Harness,
    Row,
    Shape,
    Step,
    VerdictName,
    agreed,
    format_speedup,
    judge,
    majority,
    unanimous,
    verdict_line,
    vote_faster,
    vote_saves,
    vote_share,
    vote_speedup,
)
from benchmarks.claims.targets import Target, open_targets
from llm_worker_bench.micro import TimingPlan, measure, timing
from llm_worker_bench.results import Recorder, Run
from llm_worker_bench.statistics import Change, compare
from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InvalidRequestError, MissingDependencyError
from tests.cli.conftest import write_model

SHAPE = Shape(d_model=64, n_heads=2, head_dim=32, d_ff=64)
PLAN = TimingPlan(seconds=0.004, min_samples=3, max_samples=3, warm_up_s=0.0)
CLAIMS = ["1", "2", "3", "3a", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13"]
VERDICTS = ("confirmed", "refuted", "within noise", "mixed", "not judged")
REFERENCE = Target(ReferenceBackend())
NOISE = Change(0.01, -0.02, 0.03, "within noise")
FASTER = Change(-0.5, -0.52, -0.48, "improved")
SLOWER = Change(0.5, 0.48, 0.52, "regressed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experiments") / "tiny.gguf")


@pytest.fixture(scope="module")
def targets() -> tuple[Target, ...]:
    return REFERENCE, Target(select_backend("cpu", "cpu", 1))


@pytest.fixture
def make_harness(tiny: Path) -> Callable[..., Harness]:
    def make(**changes: object) -> Harness:
        made = Harness(
            Recorder("experiments"), lambda *_: None, tiny, (REFERENCE,), plan=PLAN, shape=SHAPE, only_lengths=(1, 5)
        )
        return replace(made, **changes)

    return make


@pytest.fixture(scope="module")
def whole(tiny: Path, targets: tuple[Target, ...]) -> Run:
    """All claims but 2, which starts a server."""
    made = Harness(Recorder("experiments"), lambda *_: None, tiny, targets, plan=PLAN, shape=SHAPE, only_lengths=(1, 5))
    experiments.run(made, [claim for claim in CLAIMS if claim != "2"])
    return made.recorder.to_run()


def test_run_every_claim_ends_in_one_line(whole: Run) -> None:
    verdicts = whole.details["verdicts"]
    assert [one["claim"] for one in verdicts] == [claim for claim in CLAIMS if claim != "2"]
    for one in verdicts:
        assert one["verdict"] in VERDICTS
        assert one["line"].startswith(f"claim {one['claim']}: {one['verdict']} - ")
        assert "\n" not in one["line"]
        assert one["claim"] in ("9", "11", "12", "13") or "99% interval" in one["line"]
    for claim, table in whole.details["tables"].items():
        for rows in (table, *(more["rows"] for more in whole.details["more_tables"][claim])):
            assert len(rows) > 1
            assert {len(row) for row in rows} == {len(rows[0])}


@pytest.mark.parametrize("claim", ["1", "3", "3a", "4", "5"])
def test_run_judges_decode_and_prefill_of_each_backend(whole: Run, claim: str) -> None:
    (one,) = [one for one in whole.details["verdicts"] if one["claim"] == claim]
    assert list(one["backends"]) == ["reference", "cpu"]
    for name, found in one["backends"].items():
        assert list(found["phases"]) == ["decode", "prefill"]
        assert f"on {name} {found['verdict']}" in one["line"]
        assert found["summary"].count("99% interval") == 4  # two lengths of both
    assert one["verdict"] == agreed([found["verdict"] for found in one["backends"].values()])


def test_run_results_are_named_by_claim_side_and_step(whole: Run) -> None:
    results = {result.key: result for result in whole.results}
    steps = [f"{phase}/{n}" for phase in ("decode", "prefill") for n in (1, 5)]
    timed = [
        *((f"claim{c}/{side}/{s}", b) for c in "14" for side in ("modules", "integrated") for s in steps
          for b in ("reference", "cpu")),
        *((f"claim3/{side}/{s}", b) for side in ("separate", "unified") for s in steps for b in ("reference", "cpu")),
        *((f"claim3a/{side}/{s}", b) for side in ("made", "kept", "none") for s in steps for b in ("reference", "cpu")),
        *((f"claim5/{side}/{s}", b) for side in ("formula", "angles", "table") for s in steps
          for b in ("reference", "cpu")),
        *((f"claim6/whole/{side}/prefill/{n}", None) for side in ("made", "kept") for n in (1, 5)),
        ("claim10/calls/empty/1", None), ("claim10/calls/cpu/integrated/1", None),
        ("claim9/QKV, Q4_1 weights/decode/5", "cpu"), ("claim11/kv/paged/decode/5", None),
    ]  # fmt: skip
    for key in timed:
        assert results[key].unit == "s"
        assert len(results[key].samples) == PLAN.min_samples
    assert results["claim3a/bytes/prefill/5", "cpu"].estimate == 5 * 5 * 4
    assert results["claim3/unified/memory/prefill/5", "reference"].unit == "B"


def test_run_has_the_four_combinations_of_ops_and_architecture(whole: Run) -> None:
    for claim in ("1", "4"):
        (table,) = whole.details["more_tables"][claim]
        assert table["rows"][0][2:] == [
            "ops, in modules", "ops, integrated", "architecture, on the reference", "architecture, on the kernels",
            "both",
        ]  # fmt: skip
        assert len(table["rows"]) == 5  # two lengths of decode and of prefill


def test_markdown_needs_only_the_run(whole: Run, tmp_path: Path) -> None:
    whole.save(tmp_path / "run.json")
    text = experiments.markdown(Run.load(tmp_path / "run.json"))
    assert text == experiments.markdown(whole)
    assert text.startswith("# ")
    for one in whole.details["verdicts"]:
        assert f"\n`{one['line']}`\n" in text
        assert f"\n## Claim {one['claim']}\n\n> {experiments.EXPERIMENTS[one['claim']].claim}\n" in text
        assert f"**Decision: {decisions.decide(one['claim'], one['verdict']).name}**" in text
    assert whole.machine["cpu"] in text
    assert '"7 to 9 hours of work"' in text
    assert text.count("- Risk: ") == text.count("- Today: ") == len(whole.details["verdicts"])


def gpu_run(run: Run, verdict: str) -> Run:
    """Return the run as if its kernels had run on a GPU of another machine."""

    def rename(rows: list[list[str]]) -> list[list[str]]:
        return [["cuda" if cell == "cpu" else cell for cell in row] for row in rows]

    def add(one: dict[str, Any]) -> dict[str, Any]:
        named = {"cuda" if name == "cpu" else name: dict(of) for name, of in one["backends"].items()}
        return {**one, "backends": {k: {**of, "verdict": verdict} if k == "cuda" else of for k, of in named.items()}}

    details = {
        **run.details,
        "backends": {"reference": "reference (1 thread)", "cuda": "cuda (cuda:0)"},
        "verdicts": [add(one) for one in run.details["verdicts"]],
        "tables": {claim: rename(rows) for claim, rows in run.details["tables"].items()},
    }
    return replace(run, details=details, machine={**run.machine, "cpu": "Other", "gpus": ["NVIDIA H200, 139 GiB"]})


def test_markdown_of_two_runs_adds_the_backends_of_the_second(whole: Run) -> None:
    other = gpu_run(whole, "refuted")
    text = experiments.markdown([whole, other])
    assert "| claim | verdict | reference | cpu | cuda | decision |" in text
    assert "Other with " in text
    assert "NVIDIA H200" in text
    section = text.partition("\n## Claim 5\n")[2].partition("\n## ")[0]
    assert "\nOn cuda (cuda:0), Other with" in section
    assert section.count("\n| cuda | decode after 5 tokens") == 1
    assert "; on cuda refuted" in section
    merged = page.merge_verdict([whole, other], "5")
    assert list(merged["backends"]) == ["reference", "cpu", "cuda"]
    assert merged["verdict"] == agreed([one["verdict"] for one in merged["backends"].values()])
    assert page.merge_verdict([whole, whole], "5")["added"] == []


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("verdict", VERDICTS)
def test_decisions_do_not_contradict_verdicts(claim: str, verdict: str) -> None:
    decision = decisions.decide(claim, verdict)
    assert decision.name in ("accept", "modify", "reject")
    assert decision.reason
    assert decision.risk
    assert decision.today
    if verdict == "confirmed" and decision.name == "reject":
        assert decisions.NOT_NEEDED in decision.reason
    if verdict != "confirmed":
        assert decision.name != "accept"
        assert decisions.NOT_NEEDED not in decision.reason


def test_select_returns_claims_in_table_order(make_harness: Callable[..., Harness]) -> None:
    assert experiments.select(["5", "3A", "claim 1"]) == ["1", "3a", "5"]
    assert experiments.select([]) == list(experiments.EXPERIMENTS) == CLAIMS == list(decisions.CHOICES)
    with pytest.raises(InvalidRequestError, match="there is no claim '14': known are 1, 2, 3, 3a, 4, 5"):
        experiments.select(["14"])
    one = make_harness()
    experiments.run(one, ["5"])
    assert list(one.recorder.details["tables"]) == ["5"]


def test_run_interrupted_keeps_finished_claims(make_harness: Callable[..., Harness]) -> None:
    def press(what: str, done: float, total: float) -> None:
        if what.startswith("claim 5: decode/1"):
            raise KeyboardInterrupt

    one = make_harness(progress=press)
    with pytest.raises(KeyboardInterrupt):
        experiments.run(one, ["3a", "5"])
    assert [verdict["claim"] for verdict in one.recorder.details["verdicts"]] == ["3a"]
    assert any(result.name == "claim3a/kept/prefill/5" for result in one.recorder.results())
    assert experiments.markdown(one.recorder.to_run(complete=False))


def test_run_progress_is_monotonic(make_harness: Callable[..., Harness]) -> None:
    seen: list[float] = []
    experiments.run(make_harness(progress=lambda what, done, total: seen.append(done / total)), ["3a", "5", "13"])
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_claims_share_what_was_measured(make_harness: Callable[..., Harness]) -> None:
    one = make_harness()
    experiments.run(one, ["3a", "7", "8"])
    names = [result.name for result in one.recorder.results()]
    assert any(name.startswith("claim3a/") for name in names)
    assert not any(name.startswith(("claim7/", "claim8/")) for name in names)


def test_open_targets_names_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found, left_out = open_targets([])
    assert [target.name for target in found][:1] == ["reference"]
    assert "cuda" in left_out
    with pytest.raises(InvalidRequestError, match="unknown backend 'gpu': use one of reference, cpu, cuda"):
        open_targets(["gpu"])
    with pytest.raises(MissingDependencyError, match=r"no backend is there to test \(cuda: "):
        open_targets(["cuda"])


# The statistics, on a clock of our own: nothing here depends on the machine.


class SimulatedMachine:
    """A clock that calls of functions advance: each costs its seconds times noise, on a machine whose speed drifts."""

    def __init__(self, seed: int, drift: float = 0.0) -> None:
        self.now, self.rng, self.drift = 0.0, np.random.default_rng(seed), drift

    def perf_counter(self) -> float:
        return self.now

    def function(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds * (1 + self.drift * self.now) * float(np.exp(0.02 * self.rng.standard_normal()))

        return call


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace what experiments measure: side i of any group costs `costs[i]`."""

    def install(costs: Sequence[float], seed: int = 1, drift: float = 0.0) -> None:
        machine = SimulatedMachine(seed, drift)
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=machine.perf_counter))

        def measure_simulated(functions: Sequence[Any], plan: TimingPlan, on_progress: Any = None) -> Any:
            return measure([machine.function(costs[i % len(costs)]) for i in range(len(functions))], plan)

        monkeypatch.setattr(harness, "measure", measure_simulated)

    return install


@pytest.mark.parametrize("claim", ["1", "3"])
@pytest.mark.parametrize("drift", [0.0, 0.02])  # two percent slower in each second
@pytest.mark.parametrize(("second", "verdict"), [(1.0, "within noise"), (0.95, "confirmed"), (1.05, "refuted")])
def test_equal_code_is_within_noise_and_planted_5_percent_is_found(
    make_harness: Callable[..., Harness], simulate: Callable[..., None], claim: str, drift: float, second: float,
    verdict: str,
) -> None:  # fmt: skip
    simulate([1e-3, second * 1e-3], seed=int(100 * second), drift=drift)
    one = make_harness(plan=harness.QUICK)
    experiments.run(one, [claim])
    (found,) = one.recorder.details["verdicts"]
    assert found["backends"]["reference"]["phases"] == {"decode": verdict, "prefill": verdict}
    assert found["verdict"] == verdict


@pytest.mark.parametrize(("second", "verdict"), [(1.0, "refuted"), (0.6, "refuted"), (0.4, "confirmed")])
def test_claim_4_needs_twice_the_speed(
    make_harness: Callable[..., Harness], simulate: Callable[..., None], second: float, verdict: str
) -> None:
    simulate([1e-3, second * 1e-3])
    one = make_harness(plan=harness.QUICK)
    experiments.run(one, ["4"])
    assert one.recorder.details["verdicts"][0]["verdict"] == verdict


def test_equal_masks_refute_what_was_claimed_of_them(
    make_harness: Callable[..., Harness], simulate: Callable[..., None]
) -> None:
    simulate([1e-3])
    one = make_harness(plan=harness.QUICK)
    experiments.run(one, ["3a", "6", "7", "8"])
    found = {verdict["claim"]: verdict["verdict"] for verdict in one.recorder.details["verdicts"]}
    assert found == {"3a": "refuted", "6": "refuted", "7": "refuted", "8": "within noise"}


def test_equal_ops_confirm_that_nothing_is_gained(
    make_harness: Callable[..., Harness], simulate: Callable[..., None], targets: tuple[Target, ...]
) -> None:
    simulate([1e-3])
    one = make_harness(plan=harness.QUICK, targets=targets)
    experiments.run(one, ["9", "11"])
    assert [verdict["verdict"] for verdict in one.recorder.details["verdicts"]] == ["confirmed", "confirmed"]
    simulate([1e-3, 0.8e-3])
    experiments.run(one, ["9"])
    assert one.recorder.details["verdicts"][0]["verdict"] == "refuted"


def test_run_on_a_machine_that_drifted_says_so(
    make_harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = iter([2.0e-3, 1.0e-3, 1.02e-3, 1.3e-3])  # the first one warms up
    monkeypatch.setattr(harness, "machine_seconds", lambda: next(speeds))
    one = make_harness()
    experiments.run(one, ["12", "13"])
    drift = one.recorder.details["drift"]
    assert drift["drifted"]
    assert drift["change"] == pytest.approx(0.3)
    assert (drift["slowest"], drift["fastest"]) == ("after claim 13", "before the first claim")
    assert "The machine drifted: its speed changed by 30.0%" in experiments.markdown(one.recorder.to_run())
    steady = harness.find_drift([("a", 1.0), ("b", 1.05)])
    assert not steady["drifted"]
    assert "no drift over 10%" in harness.drift_line(steady)


def test_components_default_model_covers_all_parts(default_model: Path, make_harness: Callable[..., Harness]) -> None:
    found = components.run(make_harness(model=default_model, claim="2"))
    rows = found.tables[0].rows
    assert [row[1] for row in rows[1:]] == ["yes", "yes", "yes", "yes"], rows
    assert found.verdict == "confirmed"
    assert found.summary.startswith("4 of 4 parts do their job on a real file (100%)")
    assert "together what the whole reply says" in rows[-1][2]


def test_components_server_that_does_not_start_is_not_covered(
    make_harness: Callable[..., Harness], tmp_path: Path
) -> None:
    found = components.run(make_harness(model=tmp_path / "none.gguf", claim="2"))
    assert found.verdict == "refuted"
    assert "the server ended with exit status 1" in found.tables[0].rows[-1][2]


def test_components_other_token_ids_are_not_covered(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(components.REFERENCE_IDS, "Hello, world!", "1 2 3")
    with pytest.raises(components.NotCoveredError, match="the ids of 'Hello, world!' are not those"):
        components.PARTS["tokenizer equals the reference"](default_model)


def test_source_tree_counts_are_those_of_the_files() -> None:
    folders = source_tree.count_folders()
    layers = sorted((source_tree.PACKAGE / "layers").glob("*.py"))
    assert folders["layers"][0] == sum(len(path.read_text(encoding="utf-8").splitlines()) for path in layers)
    assert folders["layers"][2] == 1  # numpy
    assert folders["server"][3] > 100
    assert {"numpy", "starlette", "msgspec"} <= set(source_tree.count_libraries())
    one_file, modules = source_tree.count_block()
    assert 0 < one_file < modules


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


def test_vote_share_and_place_in_range() -> None:
    shares = {(0.01, 0.04): "confirmed", (0.06, 0.08): "refuted", (0.04, 0.06): "within noise"}
    for (low, high), vote in shares.items():
        assert vote_share(Change(low - 1, low - 1, high - 1, "improved"), 0.05) == vote
    places = {(0.55, 0.75): "inside", (0.1, 0.2): "below", (0.85, 0.9): "above", (0.4, 0.6): "at an end of it"}
    for (low, high), place in places.items():
        assert masks.place_in_range(Change(-low, -high, -low, "improved"))[0] == place


def test_majority_or_longest_decides() -> None:
    assert majority(["confirmed", "confirmed", "refuted"]) == "confirmed"
    assert majority(["confirmed", "confirmed", "refuted", "refuted"]) == "refuted"  # the longest decides
    assert majority(["confirmed", "within noise", "refuted"]) == "refuted"
    assert majority(["within noise"]) == "within noise"
    assert unanimous(["confirmed", "confirmed"]) == "confirmed"
    assert unanimous(["confirmed", "within noise"]) == "within noise"
    assert unanimous(["confirmed", "refuted"]) == "refuted"
    assert agreed(["confirmed", "confirmed"]) == "confirmed"
    assert agreed(["confirmed", "refuted"]) == "mixed"


def test_judge_gives_a_verdict_per_phase_per_backend_and_over_all() -> None:
    steps = Step("decode", 8), Step("prefill", 8)
    rows = [Row(b, s, FASTER, "confirmed") for b in ("reference", "cpu") for s in steps]
    assert judge(rows, [], format_speedup).verdict == "confirmed"
    found = judge([*rows[:3], Row("cpu", steps[1], SLOWER, "refuted")], [], format_speedup, "more")
    assert found.backends["cpu"]["phases"] == {"decode": "confirmed", "prefill": "refuted"}
    assert (found.verdict, found.backends["cpu"]["verdict"]) == ("mixed", "mixed")
    line = verdict_line("4", found.verdict, found.summary, found.backends)
    assert line.startswith("claim 4: mixed - on reference confirmed: decode after 8 tokens 2.00 times (99% interval")
    assert "; on cpu mixed (decode confirmed, prefill refuted): decode after 8 tokens" in line
    assert line.endswith("; more")
    both = [rows[2], Row("cpu", steps[1], SLOWER, "refuted")]
    assert judge(both, [], format_speedup, together=unanimous).verdict == "refuted"


def test_format_speedup() -> None:
    change = compare([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert format_speedup(change) == "2.00 times (99% interval 2.00 to 2.00)"
