"""Rows and suites beside peers: real processes in turn, transformers itself on a tiny file, files that rows make."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from llm_worker_bench.peers import suite
from llm_worker_bench.peers.plan import Plan, Row
from llm_worker_bench.peers.programs import OURS, PeerError
from llm_worker_bench.results import Recorder, Result
from llm_worker_rbee import __version__, machine
from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError
from llm_worker_rbee.llm import LLM
from tests.cli.conftest import write_model

from .test_programs import fake as fake
from .test_programs import program
from .test_programs import tiny as tiny

THREADS = min(2, machine.usable_cores())


def results(recorder: Recorder) -> dict[str, Result]:
    return {result.name: result for result in recorder.results()}


def run(model: Path, plan: Plan) -> Recorder:
    recorder = Recorder("peers")
    suite.run(recorder, lambda *_: None, model, plan)
    return recorder


# What is used of llama-cpp-python: it notes how it was opened, and how many tokens each run read and made.
LLAMA_CPP = """
import json, sys
__version__ = "0.0.test"
def note(*what):
    with open({log!r}, "a") as file:
        print(json.dumps(what), file=file)
class Llama:
    def __init__(self, model, n_ctx, n_threads, n_threads_batch, n_gpu_layers, verbose):
        note(n_ctx, n_threads, n_threads_batch, n_gpu_layers)
    def n_vocab(self): return 9
    def reset(self): pass
    def generate(self, ids, temp):
        made = 0
        try:
            while True:
                made += 1
                yield 1
        finally:
            note(len(ids), made, temp)
"""


# Runs in the peer's process before anything else: notes the ids that the model is given.
WATCH = """
import json, sys
if "transformers" in sys.orig_argv:
    import torch
    def note(module, args):
        if isinstance(module, torch.nn.Embedding):
            with open({log!r}, "a") as file:
                print(json.dumps(args[0].tolist()[0]), file=file)
    torch.nn.modules.module.register_module_forward_pre_hook(note)
"""


def test_run_llama_cpp_python_gets_the_same_tasks(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP.format(log=str(log)))
    python = program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    plan = Plan(pp=[16], tg=[12], repetitions=1, threads=THREADS, peers=["llama-cpp-python"], pythons=[str(python)])
    found = results(run(tiny, plan))
    assert found["tg12/llama-cpp-python"].fields["version"] == "0.0.test"
    assert log.read_text().splitlines() == [
        f"[16, {THREADS}, {THREADS}, 0]",
        "[16, 1, 0.0]",  # warming up
        "[1, 8, 0.0]",
        "[16, 1, 0.0]",  # a prompt of 16 tokens to the first sampled one
        "[1, 12, 0.0]",
    ]


def test_run_alternates_peers_and_reports_ratios(tiny: Path, fake: str) -> None:
    plan = Plan(pp=[12, 12], tg=[3, 0], repetitions=2, peers=["llama-bench"], llama_bench=fake)
    progress: list[str] = []
    recorder = Recorder("peers")
    suite.run(recorder, lambda what, *_: progress.append(what), tiny, plan)
    found = results(recorder)
    assert set(found) == {f"{test}/{peer}" for test in ("pp12", "tg3") for peer in (OURS, "llama-bench")}
    ours, theirs = found[f"pp12/{OURS}"], found["pp12/llama-bench"]
    assert theirs.samples == (1012.25, 1012.25)
    assert (theirs.unit, theirs.better, theirs.fields["peer"]) == ("tok/s", "higher", "llama-bench")
    assert theirs.fields["version"] == "build 7031 (0c1e570)"
    assert ours.fields["version"] == __version__
    assert theirs.fields["ours_over_peer"] == pytest.approx(ours.estimate / 1012.25)
    assert (ours.fields["ours_over_peer"], ours.fields["ratio_interval"]) == (1.0, [1.0, 1.0])
    assert theirs.fields["ratio_interval"] == [min(ours.samples) / 1012.25, max(ours.samples) / 1012.25]
    order = [what.partition(":")[0] for what in progress if " of 2" in what]
    assert order == [OURS, "llama-bench", "llama-bench", OURS]
    assert (recorder.details["left_out"], recorder.details.get("failed")) == ({}, None)


def test_run_transformers_generates_the_same_tokens(tmp_path: Path) -> None:
    metadata = {"rope.freq_base": 10000.0, "rope.dimension_count": 8, "attention.head_count_kv": 4, "vocab_size": 260}
    model = write_model(tmp_path / "tiny.gguf", {f"llama.{key}": value for key, value in metadata.items()})
    log = tmp_path / "log"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(log=str(log)))
    python = program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    recorder = run(model, Plan(pp=[16], tg=[4], repetitions=1, peers=["transformers"], pythons=[str(python)]))
    found = results(recorder)
    assert (recorder.details["left_out"], recorder.details.get("failed")) == ({}, None)
    assert found["tg4/transformers"].estimate > 0
    assert "torch" in found["pp16/transformers"].fields["version"]
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert [len(ids) for ids in seen] == [16, 1, 1, 1, 1] * 2
    first, *following = [ids[0] for ids in seen[-4:]]
    llm = LLM(model)
    assert llm.generate([first], max_tokens=3, temperature=0.0, ignore_eos=True).tokens == following


def test_run_failed_peer_is_killed(tiny: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = f'#!/bin/sh\ncase "$2" in *find_spec*) exit 0;; esac\necho $$ > {pid}\necho hello\nexec tail -f /dev/null\n'
    plan = Plan(
        pp=[4], tg=[0], repetitions=1, peers=["transformers"], pythons=[str(program(tmp_path / "python", text))]
    )
    recorder = run(tiny, plan)
    assert recorder.details["failed"] == {"transformers": "transformers answered b'hello', which has no version"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_run_missing_peer_is_left_out_and_failed_one_named(tiny: Path, tmp_path: Path) -> None:
    bad = program(tmp_path / "llama-bench", "#!/bin/sh\necho 'no luck' >&2\nexit 4\n")
    bare = program(tmp_path / "python", "#!/bin/sh\nexit 1\n")  # an interpreter without any package
    names = ["llama-bench", "llama-cpp-python"]
    plan = Plan(pp=[4], tg=[0], repetitions=1, peers=names, llama_bench=str(bad), pythons=[str(bare)])
    recorder = run(tiny, plan)
    assert set(results(recorder)) == {f"pp4/{OURS}"}
    assert recorder.details["failed"] == {"llama-bench": "llama-bench ended with exit status 4: no luck"}
    reason = recorder.details["left_out"]["llama-cpp-python"]
    assert reason.startswith(f"llama_cpp not installed for {bare}, ")
    missing = str(tmp_path / "nowhere")
    recorder = run(tiny, Plan(pp=[4], tg=[0], repetitions=1, peers=["llama-bench"], llama_bench=missing))
    assert recorder.details["left_out"]["llama-bench"] == f"{missing} is not a program: --llama-bench PATH names one"


def test_run_invalid_plans_raise(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ContextLengthError, match=r"^pp257 needs 257 tokens, the model's context has 256"):
        run(tiny, Plan(pp=[257]))
    with pytest.raises(InvalidRequestError, match="--pp and --tg are both 0"):
        run(tiny, Plan(pp=[0], tg=[]))
    with pytest.raises(InvalidRequestError, match=r"^unknown peer 'ollama': use some of llama-bench"):
        run(tiny, Plan(pp=[4], peers=["ollama"]))
    with pytest.raises(InvalidRequestError, match=r"--peer-python .*nowhere: No such file"):
        run(tiny, Plan(pp=[4], peers=["llama-cpp-python"], pythons=[str(tmp_path / "nowhere")]))


def test_run_failing_worker_raises(tiny: Path) -> None:
    with pytest.raises(PeerError, match=r"^llm-worker-rbee: InvalidRequestError: unknown backend 'none'"):
        run(tiny, Plan(pp=[4], tg=[0], peers=[], backend="none"))


def test_run_rows_names_results_and_goes_on_after_a_failure(tiny: Path, fake: str, tmp_path: Path) -> None:
    rows = [
        Row("plain", (8,), (2,), model=tiny),
        Row("too long", (300,), (), model=tiny),
        Row("q8_0", (8,), (), model=tiny, converted="Q8_0"),
    ]
    plan = Plan(repetitions=1, threads=THREADS, peers=["llama-bench"], llama_bench=fake)
    recorder, finished, seen = Recorder("peers", {"threads": THREADS}), list[str](), list[tuple[str, float, float]]()
    progress = lambda *step: seen.append(step)  # noqa: E731
    suite.run_rows(recorder, progress, rows, tmp_path, plan, lambda row: finished.append(row.name))
    assert finished == ["plain", "too long", "q8_0"]
    tests = ("plain pp8", "plain tg2", "q8_0 pp8")
    assert {r.name for r in recorder.results()} == {
        f"{test}/{peer}" for test in tests for peer in (OURS, "llama-bench")
    }
    assert list(recorder.details["failed"]) == ["too long"]
    assert "pp300 needs 300 tokens" in recorder.details["failed"]["too long"]
    names = [one["name"] for one in recorder.details["models"].values()]
    assert names[0] == "tiny.gguf"
    assert re.fullmatch(r"tiny-[0-9a-f]{8}-as-Q8_0\.gguf", names[1])
    assert recorder.details["peers"]["llama-bench"] == {
        "version": "build 7031 (0c1e570)",
        "settings": {"backends": "CPU", "n_threads": THREADS, "n_gpu_layers": 0},
    }
    assert recorder.details["peers"][OURS]["settings"]["threads"] == THREADS
    assert {name: len(cores) for name, cores in recorder.details["busy_cores"].items()} == {"plain": 2, "q8_0": 2}
    assert all(0 <= done <= total == 3 for _, done, total in seen)
    assert {what.partition(":")[0] for what, _, _ in seen} == {"plain", "q8_0"}
    run = recorder.to_run()
    assert [test for test, _, _ in suite.compared(run)] == list(tests)
    assert [test for test, _, _ in suite.compared(run, "q8_0")] == ["q8_0 pp8"]
    lines = suite.markdown(run).splitlines()
    assert lines[2].count("|") == lines[4].count("|") == 6
    ratio = {result.name: result for result in run.results}["plain tg2/llama-bench"].fields["ours_over_peer"]
    assert lines[5].startswith("| plain tg2 | llama-bench, build 7031 (0c1e570) | ")
    assert lines[5].endswith(f"| {ratio:.2f} ({ratio:.2f} to {ratio:.2f}) |")
    assert lines[-3].startswith("- failed: too long: pp300 needs 300 tokens")
    assert lines[-1].startswith("Cores that were busy before and after each row: plain ")
