"""The profile: tasks that add up to the step, counted work, classes, targets, and an interrupted run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_bench.flame_graph import Flame
from llm_worker_bench.profile import PHASES, report, run
from llm_worker_bench.profile.counting import Pairs, WorkCounter, attention_pairs, limit_of
from llm_worker_bench.profile.report import classify
from llm_worker_bench.profile.timing import Timer, attach, collect_batches
from llm_worker_bench.profile.workload import RandomTokens, Settings, Subject
from llm_worker_bench.results import Recorder, Result, ResultsError, Run
from llm_worker_bench.roofline import Limits, Work, matmul_ceiling
from llm_worker_bench.synthetic import Spec, checkpoint
from llm_worker_bench.synthetic_shapes import DELTA_NET, Shape
from llm_worker_rbee import LLM
from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import AttentionParams, Backend, TaskLabel
from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.kv_cache import KVCache
from tests.cli.conftest import HEADS, LAYERS, WIDTH, write_model
from tests.helpers.layer_inputs import BlockTables

SETTINGS = Settings(pp=8, tg=3, repetitions=2, flame_seconds=0.3)
CALLS = {
    "reference": {
        "embedding": 1, "norm": 2 * LAYERS + 1, "qkv": LAYERS, "rope": 3 * LAYERS, "kv_write": LAYERS,
        "kv_read": 2 * LAYERS, "scores": LAYERS, "mask": LAYERS, "softmax": LAYERS, "values": LAYERS, "output": LAYERS,
        "gate_up": LAYERS, "activation": LAYERS, "down": LAYERS, "head": 3, "sampling": 1,
    },
    "cpu": {
        "embedding": 1, "norm": 2 * LAYERS + 1, "rope_angles": 1, "qkv": LAYERS, "rope_kv_write": LAYERS,
        "attention": 2 * LAYERS, "attention_split": 1, "output": LAYERS, "gate_up": LAYERS, "activation": LAYERS,
        "down": LAYERS, "head": 1, "sampling": 1,
    },
}  # fmt: skip
HOST = {"scheduling", "host"}
Profiled = tuple[Run, dict[str, Flame]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("profile") / "tiny.gguf")


@pytest.fixture(scope="module", params=CALLS)
def llm(model: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(model, backend=request.param)


def subject_of(llm: LLM) -> Subject:
    return Subject(llm.model, llm.checkpoint, llm.kv_type, llm)


def profile_of(llm: LLM, settings: Settings = SETTINGS) -> Profiled:
    recorder, flames = Recorder("profile"), dict[str, Flame]()
    run(recorder, lambda what, done, total: None, subject_of(llm), settings, flames)
    return recorder.to_run(), flames


@pytest.fixture(scope="module")
def profiled(llm: LLM) -> Profiled:
    return profile_of(llm)


def named(run: Run) -> dict[str, Result]:
    return {result.name: result for result in run.results}


@pytest.mark.parametrize("phase", PHASES)
def test_run_components_add_up_to_the_step(profiled: Profiled, llm: LLM, phase: str) -> None:
    parts = {r.name.split("/")[1]: r for r in profiled[0].results if r.name.startswith(phase) and "share" in r.fields}
    calls = {name: part.fields["calls"] for name, part in parts.items() if name not in HOST}
    assert calls == CALLS[llm.backend]
    assert set(parts) >= HOST
    assert all(part.unit == "s" and len(part.samples) == SETTINGS.repetitions for part in parts.values())
    assert all(min(part.samples) >= 0 for part in parts.values())
    assert sum(part.fields["share"] for part in parts.values()) == pytest.approx(1)
    results = named(profiled[0])
    whole = np.sum([part.samples for part in parts.values()], axis=0)
    assert whole == pytest.approx(results[f"{phase}/timed_step"].samples, rel=1e-3)
    of_step = whole / np.array(results[f"{phase}/step"].samples)
    assert results[f"{phase}/components_of_step"].samples == pytest.approx(of_step)
    for part in parts.values():
        assert part.fields["class"] == classify(part.fields["share"])
        if "limit_s" in part.fields and part.estimate:
            assert part.fields["percent_of_limit"] == pytest.approx(100 * part.fields["limit_s"] / part.estimate)


def test_run_step_result_holds_its_tokens(profiled: Profiled) -> None:
    results = named(profiled[0])
    assert results["prefill/step"].fields["tokens"] == SETTINGS.pp
    assert results["decode/step"].fields["tokens"] == 1


def test_run_counts_shapes_and_file_bytes(profiled: Profiled, llm: LLM) -> None:
    results, pp = named(profiled[0]), SETTINGS.pp
    assert results["decode/qkv"].fields["bytes"] == LAYERS * 3 * WIDTH * WIDTH * 4  # float32 in this file
    assert results["prefill/qkv"].fields["operations"] == LAYERS * 2 * pp * 3 * WIDTH * WIDTH
    seen = np.mean(pp + 1 + np.arange(SETTINGS.tg))
    queries = {"prefill": pp * (pp + 1) / 2, "decode": seen}
    for phase, pairs in queries.items():
        if llm.backend == "reference":
            assert results[f"{phase}/scores"].fields["operations"] == pytest.approx(LAYERS * 2 * WIDTH * pairs)
        else:
            softmax = LAYERS * 4 * HEADS * pairs
            counted = results[f"{phase}/attention"].fields["operations"]
            assert counted == pytest.approx(LAYERS * 4 * WIDTH * pairs + softmax)
    assert results["decode/head"].fields["operations"] == 2 * WIDTH * llm.config.vocab_size
    assert "limit_s" not in results["decode/host"].fields


def test_run_flame_graph_names_tasks(profiled: Profiled, llm: LLM) -> None:
    """The frames inside a program are components and kernels, beside Python's of the host."""
    if llm.backend == "reference":
        pytest.skip("it has no program")
    for phase, flame in profiled[1].items():
        stacks = [[frame.name for frame in stack] for stack, _ in flame]
        found = {names[-2] for names in stacks if names[-1].startswith("linear.matmul")}
        assert {"QKV", "gate + up", "down", "head"} <= found, phase
        assert any("Scheduler" in name or "Engine" in name for names in stacks for name in names)


@pytest.mark.parametrize("batch", [1, 3])
def test_attach_changes_no_token(llm: LLM, batch: int) -> None:
    workload, timer = RandomTokens(subject_of(llm), replace(SETTINGS, batch=batch, depth=16)), Timer()
    harness = workload._harness
    plain = harness.decode(16, 4, batch).answers
    before = dict(vars(workload.engine)), dict(vars(workload.engine.runner)), dict(vars(workload.engine.scheduler))
    with attach(workload.engine, timer), collect_batches(workload.engine, timer):
        assert harness.decode(16, 4, batch, on_start=timer.reset).answers == plain
    assert len(timer.batches) == 4
    assert {len(one.context_len) for one in timer.batches} == {batch}
    assert len({int(one.positions[0]) for one in timer.batches}) == 4, "each as it was"
    engine = workload.engine
    assert [set(vars(one)) for one in (engine, engine.runner, engine.scheduler)] == [set(one) for one in before]
    assert engine.model is llm.model
    assert reference.softmax.__module__ == reference.__name__


def test_timer_own_time_excludes_calls_inside() -> None:
    timer, inner, outer = Timer(), TaskLabel("inner", ""), TaskLabel("outer", "")
    labels = (TaskLabel("qkv", "a"), TaskLabel("down", "b"))
    work = timer.wrap(inner, lambda: sum(range(20_000)))

    def both() -> None:
        work()
        timer.add_tasks(labels, np.array([0.25, 0.0]))

    timer.wrap(outer, both)()
    found = timer.tasks()
    assert found[inner].seconds > 0
    assert found[outer].seconds < -0.2  # the planted 0.25 s of tasks did not really pass
    assert (found[labels[0]].seconds, found[labels[0]].calls) == (0.25, 1)
    assert labels[1] not in found  # it had no pieces
    timer.reset()
    assert timer.tasks() == {}


@pytest.mark.parametrize("backend", [reference.ReferenceBackend(), CpuBackend()], ids=lambda backend: backend.name)
def test_work_counter_counts_experts_that_are_chosen(backend: Backend, rng: np.random.Generator) -> None:
    experts = {"experts": 4, "used_experts": 1, "expert_ff": 32, "head_dim": 16, "architecture": "qwen3moe"}
    made = checkpoint(Spec("experts", Shape(2, 64, 4, 2, 96, 300, 320)._replace(**experts), "F32", 2))
    model = load_model(made, backend, read_model_config(made))
    counter = WorkCounter(model, made, KVCache(backend, model.config, 4))
    counted = {
        name: next(iter(works)) for name, works in counter.count(BlockTables([10], rng).batch([(0, 8, 10)])).items()
    }
    assert counted["router"].bytes == 4 * 64 * 4
    gate_up = 4 * 2 * 32 * 64  # values of all experts
    assert counted["experts_gate_up"].bytes == pytest.approx(4 * gate_up * (1 - 0.75**2))
    assert counted["experts_gate_up"].operations == 2 * 2 * gate_up / 4
    assert counted["experts_down"].operations == 2 * gate_up / 4
    assert matmul_ceiling(model, 3)() is not None


@pytest.mark.parametrize("backend", [reference.ReferenceBackend(), CpuBackend()], ids=lambda backend: backend.name)
def test_work_counter_counts_states(backend: Backend, rng: np.random.Generator) -> None:
    """Of a request that goes on from its state and one that begins; each keeps the state after its last token."""
    sizes = {"ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128}
    shape = Shape(4, 64, 4, 2, 96, 300, 320, architecture="qwen35", head_dim=64, keys={**DELTA_NET, **sizes})
    made = checkpoint(Spec("states", shape, "F32", 4))
    model = load_model(made, backend, read_model_config(made))
    counter = WorkCounter(model, made, KVCache(backend, model.config, 4, n_slots=3))
    batch = BlockTables([10, 4], rng).batch([(0, 9, 10), (1, 0, 4)])
    slots = {"state_in": np.array([0, -1]), "state_out": np.array([1, -1, -1, -1, 2])}
    found = counter.count(replace(batch, **slots))
    ((delta, calls),) = found["gated_delta"].items()
    values, channels = 4 * 32 * 32, 2 * 2 * 32 + 4 * 32
    assert (delta.bytes, delta.operations, calls) == (4 * values * 3, 7 * values * 5, 3)
    ((conv, _),) = found["causal_conv"].items()
    assert (conv.bytes, conv.operations) == (4 * channels * 3 * 3, 2 * 4 * channels * 5)
    assert limit_of("gated_delta", found, Limits(1, ((1 << 20, 1e9),), 1e9, ()))["limit_s"] > 0


def test_attention_pairs_window_bounds_the_keys(rng: np.random.Generator) -> None:
    batch = BlockTables([10], rng).batch([(0, 7, 10)])
    assert attention_pairs(batch, AttentionParams(1.0, window=4)) == Pairs(4 + 4 + 4, 4 + 2)
    assert attention_pairs(batch, AttentionParams(1.0)) == Pairs(8 + 9 + 10, 10)


def test_limit_of_fused_component_counts_no_values_between_parts() -> None:
    limits = Limits(1, ((1 << 20, 1e9),), 1e9, (("int8", 4e9),))
    counted = {
        "gate_up": Counter({Work(1e6, 8e6, 1e9, "int8"): 2}),
        "activation": Counter({Work(3e6, 1e6): 2}),
    }
    alone = limit_of("gate_up", counted, limits)
    assert (alone["bytes"], alone["limit_s"]) == (2e6, pytest.approx(4e-3))  # 8e6 int8 operations at 4e9, twice
    assert (alone["bound_by"], alone["arithmetic"]) == ("arithmetic", "int8")
    fused = limit_of("gate_up_activation", counted, limits)
    assert (fused["bytes"], fused["operations"]) == (2e6, 18e6)
    assert fused["limit_s"] == pytest.approx(4e-3 + 2e-3)
    assert limit_of("host", counted, limits) == {}


@pytest.mark.parametrize(
    ("share", "kind"),
    [(0.5, "critical"), (0.1001, "critical"), (0.1, "moderate"), (0.05, "moderate"), (0.0499, "minor")],
)
def test_classify_share_returns_class(share: float, kind: str) -> None:
    assert classify(share) == kind


def planted() -> Run:
    """A decode step of 100 ms: gate and up 60 at a limit of 3, head 25 at a limit of 20, host 11, norm 4."""
    recorder = Recorder("profile")
    recorder.add_result(Result.from_samples("decode/step", "s", [0.1] * 3, tokens=1))
    rows = {"gate_up": (0.060, 0.003, "memory"), "head": (0.025, 0.020, "arithmetic"), "host": (0.011, None, None),
            "norm": (0.004, 0.001, "memory")}  # fmt: skip
    for name, (seconds, limit, bound) in rows.items():
        share = seconds / 0.1
        fields: dict[str, Any] = {"share": share, "class": classify(share), "calls": 2}
        if limit is not None:
            fields |= {"limit_s": limit, "bound_by": bound, "bytes": 3e7, "operations": 2e9}
        recorder.add_result(Result.from_samples(f"decode/{name}", "s", [seconds] * 3, **fields))
    return recorder.to_run()


def test_targets_follow_amdahls_law() -> None:
    gate_up, head, host = report.targets(planted(), "decode")
    assert "60.0% of a decode step" in gate_up
    assert "at 5.0% of its limit (3.00 ms: 30.00 MB to move, bound by memory)" in gate_up
    assert "would take 46.00 ms instead of 100" in gate_up  # 100 - 60 + 2 * 3
    assert gate_up.endswith(": 2.17 times as fast.")
    assert "2,000 million operations, bound by arithmetic" in head
    assert "past half of the limit" in head
    assert "1.12 times as fast" in host  # 100 / 89
    assert report.targets(planted(), "prefill") == ["nothing is critical"]


def test_report_markdown_and_html_say_the_same(tmp_path: Path, profiled: Profiled) -> None:
    run, flames = profiled
    written = report.write_report(tmp_path / "out", run, flames)
    assert {path.name for path in written} == {
        "report.md", "report.html", "flame-prefill.svg", "flame-decode.svg", "profile.speedscope.json", "run.json",
    }  # fmt: skip
    markdown, page = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))
    for phase in PHASES:
        assert report.step_line(run, phase) in markdown
        assert len(report.by_share(run, phase)) > report.NUM_TOP == 5
        for part in report.components(run, phase):
            assert f"| {' | '.join(part.cells())} |" in markdown
            assert f">{part.label}</th>" in page
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert report.markdown(Run.load(tmp_path / "out" / "run.json")) == markdown
    assert len(json.loads((tmp_path / "out" / "profile.speedscope.json").read_text())["profiles"]) == 2


def test_report_write_failure_names_the_folder(tmp_path: Path, profiled: Profiled) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot write .*file"):
        report.write_report(tmp_path / "file", *profiled)


def test_run_interrupted_keeps_finished_repetitions(llm: LLM) -> None:
    recorder = Recorder("profile")

    def press(what: str, done: float, total: float) -> None:
        if what.startswith("repetition 2") and what.endswith("decode"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recorder, press, subject_of(llm), SETTINGS, {})
    results = named(recorder.to_run(complete=False))
    assert len(results["prefill/down"].samples) == 2
    assert len(results["decode/down"].samples) == 1


@pytest.mark.parametrize(("pp", "tg"), [(0, 2), (4, 0)])
def test_run_phase_of_no_tokens_is_left_out(llm: LLM, pp: int, tg: int) -> None:
    found, flames = profile_of(llm, Settings(pp=pp, tg=tg, repetitions=1, flame_seconds=0))
    assert {result.name.split("/")[0] for result in found.results} == {"prefill" if pp else "decode"}
    assert flames == {}


def test_run_prompt_goes_from_text_to_text(model: Path) -> None:
    llm = LLM(model, backend="cpu")
    settings = Settings(tg=3, repetitions=2, flame_seconds=0, prompt="hello there")
    results = named(profile_of(llm, settings)[0])
    tokens = len(llm.tokenize("hello there"))
    assert results["prefill/step"].fields["tokens"] == tokens
    assert (
        results["prefill/qkv"].fields["operations"] == LAYERS * 2 * tokens * 3 * WIDTH * WIDTH
    )  # all of it, each time
    assert results["decode/text"].estimate > 0
    assert {"decode/scheduling", "decode/host", "decode/sampling"} <= set(results)


def test_run_prompt_without_tokenizer_raises(llm: LLM) -> None:
    subject = subject_of(llm)._replace(llm=None)
    with pytest.raises(InvalidRequestError, match="--prompt needs a tokenizer"):
        run(Recorder("profile"), lambda *_: None, subject, Settings(prompt="hello"), {})


def test_run_context_too_short_raises(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=f"--pp 250 and --tg 6 need a context of 257: the model has {256}"):
        run(Recorder("profile"), lambda *_: None, subject_of(llm), Settings(pp=250, tg=6), {})
