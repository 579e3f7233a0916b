"""The profile: wrapped ops, shares that add up, classes, targets, and an interrupted run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.backends import reference
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import OPS, AttentionParams, Backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.bench import profile
from llm_worker_rbee.bench.flame_graph import Flame
from llm_worker_rbee.bench.profile import (
    PHASES,
    CountedOps,
    Settings,
    TimedOps,
    Timer,
    Workload,
    attention_work,
    classify,
    index_weights,
    run,
    timer_cost,
)
from llm_worker_rbee.bench.results import Recorder, Result, Run
from llm_worker_rbee.errors import ContextLengthError
from tests.cli.conftest import HEADS, LAYERS, WIDTH, write_model
from tests.helpers.layer_inputs import BlockTables

SETTINGS = Settings(pp=8, tg=3, repetitions=3, flame_seconds=0.05)
CALLS = {
    "embedding": 1, "norm": 2 * LAYERS + 1, "qkv": LAYERS, "rope": 2 * LAYERS, "kv_write": LAYERS, "attention": LAYERS,
    "output": LAYERS, "mlp": 3 * LAYERS, "head": 3, "sampling": 1, "scheduling": 1, "python": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_model(tmp_path_factory.mktemp("profile") / "tiny.gguf"), backend="reference")


@pytest.fixture(scope="module")
def profiled(llm: LLM) -> tuple[Run, dict[str, Flame]]:
    recorder, flames = Recorder("profile", {"backend": "reference"}), dict[str, Flame]()
    run(recorder, lambda what, done, total: None, llm, SETTINGS, flames)
    return recorder.to_run(), flames


def named(run: Run) -> dict[str, Result]:
    return {result.name: result for result in run.results}


def tokens_of(llm: LLM, ops: Any) -> list[int]:
    work = Workload(replace(llm.model, ops=cast(Backend, ops)), SETTINGS)
    work.prefill()
    for _ in range(SETTINGS.tg):
        work.decode()
    return list(work.request.tokens)


@pytest.mark.parametrize("phase", PHASES)
def test_run_components_add_up_to_the_step(profiled: Any, phase: str) -> None:
    results = named(profiled[0])
    parts = {name: results[f"{phase}/{name}"] for name in CALLS}
    assert {name for name in results if name.startswith(phase)} == {f"{phase}/{name}" for name in (*CALLS, "step")}
    assert {name: part.fields["calls"] for name, part in parts.items()} == CALLS
    assert all(part.unit == "s" and len(part.samples) == SETTINGS.repetitions for part in parts.values())
    assert sum(part.fields["share"] for part in parts.values()) == pytest.approx(1)
    whole = np.sum([part.samples for part in parts.values()], axis=0)
    assert whole == pytest.approx(results[f"{phase}/step"].samples)
    for name, part in parts.items():
        assert part.fields["class"] == classify(part.fields["share"])
        assert part.samples[0] >= 0
        assert name == "python" or part.estimate > 0
        if "limit_s" in part.fields:
            assert part.fields["percent_of_limit"] == pytest.approx(100 * part.fields["limit_s"] / part.estimate)


def test_run_step_result_holds_its_tokens(profiled: Any) -> None:
    results = named(profiled[0])
    assert results["prefill/step"].fields["tokens"] == SETTINGS.pp
    assert results["decode/step"].fields["tokens"] == 1


def test_counted_ops_count_shapes_and_file_bytes(profiled: Any, llm: LLM) -> None:
    results, pp = named(profiled[0]), SETTINGS.pp
    weights = 3 * WIDTH * WIDTH * 4  # float32 in this file
    moved = LAYERS * (weights + 4 * (WIDTH + 3 * WIDTH))
    assert results["decode/qkv"].fields["bytes"] == pytest.approx(moved)
    assert results["prefill/qkv"].fields["operations"] == pytest.approx(LAYERS * 2 * pp * 3 * WIDTH * WIDTH)
    pairs = pp * (pp + 1) / 2
    assert results["prefill/attention"].fields["operations"] == pytest.approx(LAYERS * 4 * WIDTH * pairs)
    seen = np.mean(pp + 1 + np.arange(SETTINGS.tg))
    assert results["decode/attention"].fields["operations"] == pytest.approx(LAYERS * 4 * WIDTH * seen)
    head = results["decode/head"].fields
    assert head["operations"] == pytest.approx(2 * WIDTH * llm.config.vocab_size)
    assert head["percent_of_limit"] > 0
    assert "limit_s" not in results["decode/python"].fields


def test_attention_work_window_bounds_the_keys(rng: np.random.Generator) -> None:
    kv, q = reference.empty_kv(8, 4, 2, 8), np.zeros((3, HEADS, 8), np.float32)
    batch = BlockTables([10], rng).batch([(0, 7, 10)])
    params = AttentionParams(1.0, window=4)
    work = attention_work(q, kv, batch, params, q)
    assert work.operations == 4 * HEADS * 8 * (4 + 4 + 4)
    assert work.bytes == (4 + 2) * 2 * (2 * 8 * 4) + 2 * q.nbytes  # three windows of 4, one further each
    transposed = CpuBackend().empty_kv(2, 16, 2, 16, "int8")  # 16 bytes of each head, and a scale
    of_bytes = attention_work(q, transposed, batch, params, q).bytes
    assert of_bytes == (4 + 2) * 2 * (2 * 16 + 2 * 4) + 2 * q.nbytes
    everything = attention_work(q, kv, batch, AttentionParams(1.0), q)
    assert everything.operations == 4 * HEADS * 8 * (8 + 9 + 10)
    assert everything.bytes == 10 * 2 * (2 * 8 * 4) + 2 * q.nbytes


def test_wrapped_ops_change_no_token(llm: LLM) -> None:
    weights, plain = index_weights(llm.model, llm.checkpoint), tokens_of(llm, llm.model.ops)
    assert tokens_of(llm, TimedOps(llm.model.ops, weights, Timer())) == plain
    assert tokens_of(llm, CountedOps(llm.model.ops, weights, 1.0)) == plain
    assert len(set(plain)) > 1


def test_wrapped_ops_fused_rope_store_has_one_component(llm: LLM) -> None:
    fused = SimpleNamespace(**{name: getattr(ReferenceBackend(), name) for name in (*OPS, "split_heads", "kv_types")})
    timer = Timer()
    weights = index_weights(llm.model, llm.checkpoint)
    assert tokens_of(llm, TimedOps(cast(Backend, fused), weights, timer)) == tokens_of(llm, ReferenceBackend())
    noted = timer.drain()
    assert noted["rope_kv_write"].calls == LAYERS * (1 + SETTINGS.tg)
    assert not {"rope", "kv_write"} & set(noted)
    counted = CountedOps(cast(Backend, fused), weights, 1.0)
    tokens_of(llm, counted)
    assert counted.drain_work()["rope_kv_write"].total() == noted["rope_kv_write"].calls


def test_wrapped_ops_unknown_op_gets_its_own_component(llm: LLM) -> None:
    strange = SimpleNamespace(whole_block=lambda x, kv: x + 1, version="7")
    timer, x = Timer(), np.zeros(5, np.float32)
    ops: Any = TimedOps(cast(Backend, strange), {}, timer)
    assert ops.whole_block(x, None).sum() == 5
    assert ops.version == "7"
    assert {name: spent.calls for name, spent in timer.drain().items()} == {"whole_block": 1}
    assert timer.drain() == {}
    counted: Any = CountedOps(cast(Backend, strange), {}, 1.0)
    counted.whole_block(x, kv=reference.empty_kv(2, 2, 2, 2))
    (work,) = counted.drain_work()["whole_block"]
    assert work.bytes == 2 * x.nbytes  # its arrays, not a cache that it may touch a corner of


def test_timer_cost_is_recorded(profiled: Any) -> None:
    cost = profiled[0].details["profiler"]
    assert 0 < cost["seconds_per_call"] < 1e-3
    assert set(cost["share"]) == set(PHASES)
    assert 0 <= timer_cost(2, 100) < 1e-3


@pytest.mark.parametrize(
    ("share", "kind"),
    [(0.5, "critical"), (0.1001, "critical"), (0.1, "moderate"), (0.05, "moderate"), (0.0499, "minor")],
)
def test_classify_share_returns_class(share: float, kind: str) -> None:
    assert classify(share) == kind


def planted() -> Run:
    """A decode step of 100 ms: MLP 60 at a limit of 3, head 25 at a limit of 20, Python 11, norm 4."""
    recorder = Recorder("profile")
    recorder.add_result(Result.from_samples("decode/step", "s", [0.1] * 3, tokens=1))
    rows = {"mlp": (0.060, 0.003, "memory"), "head": (0.025, 0.020, "arithmetic"), "python": (0.011, None, None),
            "norm": (0.004, 0.001, "memory")}  # fmt: skip
    for name, (seconds, limit, bound) in rows.items():
        share = seconds / 0.1
        fields: dict[str, Any] = {"share": share, "class": classify(share), "calls": 2}
        if limit is not None:
            fields |= {"limit_s": limit, "bound_by": bound, "bytes": 3e7, "operations": 2e9}
        recorder.add_result(Result.from_samples(f"decode/{name}", "s", [seconds] * 3, **fields))
    return recorder.to_run()


def test_targets_follow_amdahls_law() -> None:
    mlp, head, python = profile.targets(planted(), "decode")
    assert "60.0% of a decode step" in mlp
    assert "at 5.0% of its limit (3.00 ms: 30.00 MB to move, bound by memory)" in mlp
    assert "would take 46.00 ms instead of 100" in mlp  # 100 - 60 + 2 * 3
    assert mlp.endswith(": 2.17 times as fast.")
    assert "2,000 million operations, bound by arithmetic" in head
    assert "past half of the limit" in head
    assert "1.12 times as fast" in python  # 100 / 89
    assert profile.targets(planted(), "prefill") == ["nothing is critical"]


def test_report_markdown_and_html_say_the_same(tmp_path: Path, profiled: tuple[Run, dict[str, Flame]]) -> None:
    run, flames = profiled
    written = profile.write_report(tmp_path / "out", run, flames)
    assert {path.name for path in written} == {
        "report.md", "report.html", "flame-prefill.svg", "flame-decode.svg", "profile.speedscope.json", "run.json",
    }  # fmt: skip
    markdown, page = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html"))
    for phase in PHASES:
        assert profile.step_line(run, phase) in markdown
        assert len(profile.by_share(run, phase)) > profile.NUM_TOP == 5
        for part in profile.components(run, phase):
            assert f"| {' | '.join(part.cells())} |" in markdown
            assert f">{part.label}</th>" in page
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    again = Run.load(tmp_path / "out" / "run.json")
    assert profile.components(again, "decode")[0].cells()[0] == "embedding"
    assert len(json.loads((tmp_path / "out" / "profile.speedscope.json").read_text())["profiles"]) == 2


def test_report_write_failure_names_the_folder(tmp_path: Path, profiled: tuple[Run, dict[str, Flame]]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(profile.ResultsError, match=r"cannot write .*file"):
        profile.write_report(tmp_path / "file", *profiled)


def test_run_interrupted_keeps_finished_repetitions(llm: LLM) -> None:
    recorder = Recorder("profile")

    def press(what: str, done: float, total: float) -> None:
        if what.startswith("repetition 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recorder, press, llm, SETTINGS, {})
    results = named(recorder.to_run(complete=False))
    assert len(results["prefill/mlp"].samples) == 2
    assert len(results["decode/mlp"].samples) == 1


def test_run_context_too_short_raises(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=f"--pp 250 and --tg 6 need a context of 257: the model has {256}"):
        run(Recorder("profile"), lambda *_: None, llm, Settings(pp=250, tg=6), {})
