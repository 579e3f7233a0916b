"""Peers: real processes that answer, crash, hang or print something else; transformers itself on a tiny file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import __version__, machine
from llm_worker_rbee.bench import peers
from llm_worker_rbee.bench.engine_harness import EngineHarness, TimedRun
from llm_worker_rbee.bench.peers import OURS, LibraryPeer, LlamaBench, PeerError, Plan, Task, load_worker
from llm_worker_rbee.bench.results import Recorder, Result
from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError
from llm_worker_rbee.llm import LLM
from tests.cli.conftest import write_model

THREADS = min(2, machine.usable_cores())
# One row as llama-bench prints it (llama.cpp of 2026-08), the fields that vary filled in.
FAKE = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
n_prompt, n_gen = int(given["-p"]), int(given["-n"])
print(json.dumps([{{
    "build_commit": "0c1e570", "build_number": 7031, "cpu_info": "A CPU", "gpu_info": "", "backends": "CPU",
    "model_filename": given["-m"], "n_threads": int(given["-t"]), "n_gpu_layers": int(given["-ngl"]),
    "n_prompt": n_prompt, "n_gen": n_gen, "n_depth": 0, "avg_ns": 4471942087, "stddev_ns": 0,
    "avg_ts": 1000.0 * int(given["-r"]) + 0.25 * int(given["-t"]) + n_prompt + n_gen / 1000, "stddev_ts": 0.0,
}}], indent=2))
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("peers") / "tiny.gguf")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(program(tmp_path_factory.mktemp("bin") / "llama-bench", FAKE.format(python=sys.executable)))


def results(recorder: Recorder) -> dict[str, Result]:
    return {result.name: result for result in recorder.results()}


def run(model: Path, plan: Plan) -> Recorder:
    recorder = Recorder("peers")
    peers.run(recorder, lambda *_: None, model, plan)
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


def test_llama_bench_output_is_parsed(fake: str) -> None:
    bench = LlamaBench(fake, "model.gguf", 2, 30)
    bench.start()
    assert bench.version == "build 7031 (0c1e570)"
    assert bench.measure_rate(Task("pp", 64)) == 1064.5
    assert bench.measure_rate(Task("tg", 16)) == 1000.516


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'cannot load' >&2; exit 3", "llama-bench ended with exit status 3: cannot load"),
        ("kill -ILL $$", "llama-bench was ended by SIGILL"),
        ("echo hello", "llama-bench printed no JSON of the known form: b'hello"),
        ("echo '[]'", "llama-bench printed no JSON"),
        ("exec tail -f /dev/null", "llama-bench did not end within 0.2 s"),
    ],
)
def test_llama_bench_failure_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = program(tmp_path / "llama-bench", f"#!/bin/sh\n{text}\n")
    with pytest.raises(PeerError) as caught:
        LlamaBench(str(path), "model.gguf", 1, 0.2 if "tail" in text else 30).measure_rate(Task("pp", 8))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such library')", "the peer ended with exit status 1: no such library"),
        ("raise ValueError('bad')", "the peer ended with exit status 1: ValueError: bad"),
        ("import os; os.abort()", "the peer was ended by SIGABRT"),
        ("print('hello', flush=True); input()", "the peer answered b'hello', which has no version"),
        ("input()", "the peer did not answer within 0.2 s"),
    ],
)
def test_library_peer_start_failure_is_one_line(program: str, message: str) -> None:
    child = LibraryPeer("the peer", [sys.executable, "-c", program], os.environ, 0.2 if program == "input()" else 30)
    with pytest.raises(PeerError) as caught:
        child.start()
    child.close()
    assert str(caught.value).startswith(message)


def test_library_peer_end_between_requests_raises() -> None:
    text = (
        "import json; print(json.dumps({'version': '1'}), flush=True); input(); print('{\"seconds\": 0.5}', flush=True)"
    )
    child = LibraryPeer("the peer", [sys.executable, "-c", text], os.environ, 30)
    child.start()
    assert child.version == "1"
    assert child.measure_rate(Task("pp", 8)) == 16.0
    with pytest.raises(PeerError, match="the peer ended with exit status 0"):
        child.measure_rate(Task("pp", 8))
    child.close()
    child.close()


def test_run_alternates_peers_and_reports_ratios(tiny: Path, fake: str) -> None:
    plan = Plan(pp=[12, 12], tg=[3, 0], repetitions=2, peers=["llama-bench"], llama_bench=fake)
    progress: list[str] = []
    recorder = Recorder("peers")
    peers.run(recorder, lambda what, *_: progress.append(what), tiny, plan)
    found = results(recorder)
    assert set(found) == {f"{test}/{peer}" for test in ("pp12", "tg3") for peer in (OURS, "llama-bench")}
    ours, theirs = found[f"pp12/{OURS}"], found["pp12/llama-bench"]
    assert theirs.samples == (1012.25, 1012.25)
    assert (theirs.unit, theirs.better, theirs.fields["peer"]) == ("tok/s", "higher", "llama-bench")
    assert theirs.fields["version"] == "build 7031 (0c1e570)"
    assert ours.fields["version"] == __version__
    assert theirs.fields["ours_over_peer"] == pytest.approx(ours.estimate / 1012.25)
    assert ours.fields["ours_over_peer"] == 1.0
    order = [what.partition(":")[0] for what in progress if " of 2" in what]
    assert order == [OURS, "llama-bench", "llama-bench", OURS]
    assert recorder.details == {"left_out": {}}


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


def test_run_transformers_generates_the_same_tokens(tmp_path: Path) -> None:
    metadata = {"rope.freq_base": 10000.0, "rope.dimension_count": 8, "attention.head_count_kv": 4, "vocab_size": 260}
    model = write_model(tmp_path / "tiny.gguf", {f"llama.{key}": value for key, value in metadata.items()})
    log = tmp_path / "log"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(log=str(log)))
    python = program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    recorder = run(model, Plan(pp=[16], tg=[4], repetitions=1, peers=["transformers"], pythons=[str(python)]))
    found = results(recorder)
    assert recorder.details == {"left_out": {}}
    assert found["tg4/transformers"].estimate > 0
    assert "torch" in found["pp16/transformers"].fields["version"]
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert [len(ids) for ids in seen] == [16, 1, 1, 1, 1] * 2
    first, *following = [ids[0] for ids in seen[-4:]]
    llm = LLM(model)
    assert llm.generate([first], max_tokens=3, temperature=0.0, ignore_eos=True).tokens == following


def test_load_worker_runs_prefill_decode_and_prompts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def note(name: str, *given: Any) -> TimedRun:
        calls.append((name, *given))
        return TimedRun(0.5, 7, 1, [])

    for name in ("prefill", "decode", "decode_prompts"):
        monkeypatch.setattr(EngineHarness, name, lambda self, *given, name=name: note(name, *given))
    given = {"model": str(tiny), "context": 16, "batch": 2, "device": "auto", "backend": "auto"}
    version, measure = load_worker(given)
    assert measure("pp", 16) == measure("tg", 5) == {"seconds": 0.5, "tokens": 7}
    assert measure("tg", 5, [[1], [2, 3]]) == {"seconds": 0.5, "tokens": 7}
    assert version == __version__
    assert calls == [("prefill", 0, 16, 1), ("decode", 0, 5, 1), ("decode_prompts", [[1], [2, 3]], 5)]


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
    with pytest.raises(InvalidRequestError, match=r"^unknown peer 'vllm': use some of llama-bench"):
        run(tiny, Plan(pp=[4], peers=["vllm"]))
    with pytest.raises(InvalidRequestError, match=r"--peer-python .*nowhere: No such file"):
        run(tiny, Plan(pp=[4], peers=["llama-cpp-python"], pythons=[str(tmp_path / "nowhere")]))


def test_run_failing_worker_raises(tiny: Path) -> None:
    with pytest.raises(PeerError, match=r"^llm-worker-rbee: InvalidRequestError: unknown backend 'none'"):
        run(tiny, Plan(pp=[4], tg=[0], peers=[], backend="none"))
