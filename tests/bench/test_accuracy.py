"""How far a path is from the truth: the arithmetic on planted logits, real models, other libraries in their process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from llm_worker_bench import accuracy, workload
from llm_worker_bench.accuracy import EvaluationSet, LibrarySide, Logits, Scores, WorkerSide
from llm_worker_bench.results import Recorder, Result
from llm_worker_bench.synthetic import Shape, Spec
from llm_worker_rbee.backends.cpu import CpuBackend
from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.errors import InferenceError, InvalidRequestError, MissingDependencyError, WorkerError
from llm_worker_rbee.llm import LLM
from tests.cli.conftest import write_model

NAMES = {
    "ppl_ratio", "kl", "top1", "ppl", "ppl_truth", "mean_abs_dlogprob", "max_abs_dlogprob", "top1_prompts",
}  # fmt: skip
LLAMA_CPP = """
import numpy as np
__version__ = "0.0.test"
print("a library may print to standard output")
class Llama:
    def __init__(self, path, n_ctx, logits_all, **more):
        assert logits_all and n_ctx >= 4
        self.scores = np.zeros((n_ctx, 11), np.float32)
    def reset(self):
        self.n = 0
    def eval(self, ids):
        if ids == [13]:
            raise ValueError("unlucky")
        if ids == [14]:
            import os
            print("last words", file=__import__("sys").stderr, flush=True)
            os._exit(3)
        for i, token in enumerate(ids):
            self.scores[i] = token + 100 * i
"""


@pytest.fixture(scope="module")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


class Planted:
    """Logits that were worked out beforehand, seeded, by the ids requested."""

    def __init__(self, vocabulary: int, noise: float) -> None:
        self.vocabulary, self.noise = vocabulary, noise

    def logits(self, ids: list[int], *, last: bool = False) -> Logits:
        rng = np.random.default_rng(ids)
        shape = len(ids), self.vocabulary
        made = rng.normal(0, 2, shape) + self.noise * rng.normal(0, 1, shape)
        return made[-1:].astype(np.float32) if last else made.astype(np.float32)


def measured(truth: accuracy.Side, path: accuracy.Side, material: EvaluationSet, suffix: str = "") -> dict[str, Result]:
    recorder = Recorder("accuracy")
    reported: list[float] = []

    def progress(what: str, done: float, total: float) -> None:
        reported.append(done / total)

    accuracy.run(recorder, progress, truth, [accuracy.MeasuredPath(path, suffix)], material)
    assert reported == sorted(reported)
    assert reported[-1] == 1
    return {result.name: result for result in recorder.results()}


def probabilities(logits: Logits) -> np.ndarray:
    powers = np.exp(logits.astype(np.longdouble))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float64)


def test_run_results_follow_their_definitions() -> None:
    material = EvaluationSet([[1, 2], [3], [4, 5, 6]], [list(range(40)), [7, 8, 9]])
    truth, path = Planted(50, 0.0), Planted(50, 0.3)
    found = measured(truth, path, material)
    assert set(found) == NAMES
    nll, nll_truth, kl, agree = [], [], [], []
    for window in material.windows:
        p, q = probabilities(truth.logits(window)), probabilities(path.logits(window))
        for i, token in enumerate(window[1:]):
            nll.append(-np.log(q[i, token]))
            nll_truth.append(-np.log(p[i, token]))
            kl.append(sum(p[i] * np.log(p[i] / q[i])))
            agree.append(p[i].argmax() == q[i].argmax())
    differences, first = [], []
    for ids in material.prompts:
        p, q = (np.log(probabilities(side.logits(ids, last=True)))[0] for side in (truth, path))
        top = sorted(range(50), key=lambda token: -p[token])[:5]
        differences += [abs(p[token] - q[token]) for token in top]
        first.append(top[0] == q.argmax())
    expected = {
        "ppl": np.exp(np.mean(nll)), "ppl_truth": np.exp(np.mean(nll_truth)),
        "ppl_ratio": np.exp(np.mean(nll)) / np.exp(np.mean(nll_truth)), "kl": np.mean(kl), "top1": np.mean(agree),
        "mean_abs_dlogprob": np.mean(differences), "max_abs_dlogprob": max(differences), "top1_prompts": np.mean(first),
    }  # fmt: skip
    assert {name: result.estimate for name, result in found.items()} == pytest.approx(expected, rel=1e-9)
    for name, result in found.items():
        assert result.low <= result.estimate <= result.high
        assert result.better == ("higher" if name.startswith("top1") else "lower")
        assert result.fields["count"] == (3 if "prompts" in name or "abs" in name else 41)
    assert found["kl"].low < found["kl"].estimate < found["kl"].high
    assert 0.3 < found["top1"].estimate < 1


def test_run_truth_against_itself_is_exact(tiny_llm: LLM) -> None:
    material = EvaluationSet.encode(
        tiny_llm, [workload.Prompt("he said"), workload.Prompt("x")], "a text to be read " * 40, 300
    )
    found = measured(WorkerSide(tiny_llm), WorkerSide(tiny_llm), material)
    exact = {"ppl_ratio": 1.0, "kl": 0.0, "top1": 1.0, "top1_prompts": 1.0}
    exact |= {"mean_abs_dlogprob": 0.0, "max_abs_dlogprob": 0.0}
    assert {name: (r.low, r.estimate, r.high) for name, r in found.items() if name in exact} == {
        name: (value,) * 3 for name, value in exact.items()
    }
    assert found["ppl"].estimate == found["ppl_truth"].estimate


def test_worker_side_last_position_equals_all_positions(tiny_llm: LLM) -> None:
    ids = tiny_llm.tokenize("some words of a prompt, longer than one chunk of logits " * 3)
    whole, last = WorkerSide(tiny_llm).logits(ids), WorkerSide(tiny_llm).logits(ids, last=True)
    assert whole.shape == (len(ids), tiny_llm.config.vocab_size)
    np.testing.assert_allclose(whole[-1:], last, atol=1e-4)


def test_evaluation_set_windows_hold_the_whole_text(tiny_llm: LLM) -> None:
    text = "windows " * 100
    material = EvaluationSet.encode(tiny_llm, [workload.Prompt("x")], text, 600)
    assert [len(window) for window in material.windows] == [256, 256, 88]
    assert [i for window in material.windows for i in window] == tiny_llm.tokenize(text, add_special=False)[:600]
    assert (material.max_length, sum(map(len, material.prompts + material.windows))) == (256, 601)


def test_evaluation_set_windows_start_with_bos(tmp_path: Path) -> None:
    llm = LLM(write_model(tmp_path / "bos.gguf", {"tokenizer.ggml.add_bos_token": True}))
    material = EvaluationSet.encode(llm, [workload.Prompt("x")], "abcdefgh" * 50, 300)
    assert [window[0] for window in material.windows] == [1, 1]
    assert [len(window) for window in material.windows] == [256, 46]


def test_evaluation_set_invalid_texts_raise(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 2 has 300 tokens"):
        EvaluationSet.encode(tiny_llm, [workload.Prompt("x"), workload.Prompt("y" * 300)], "text", 10)
    with pytest.raises(InvalidRequestError, match="at least 2"):
        EvaluationSet.encode(tiny_llm, [workload.Prompt("x")], "t", 10)


def test_run_non_finite_logits_raise() -> None:
    class Broken(Planted):
        def logits(self, ids: list[int], *, last: bool = False) -> Logits:
            return super().logits(ids, last=last) * np.float32(np.nan)

    with pytest.raises(InferenceError, match=r"llama\.cpp"):
        measured(Planted(9, 0), Broken(9, 0), EvaluationSet([[1]], [[1, 2]]), "llama.cpp")


def test_run_interrupted_keeps_results() -> None:
    recorder = Recorder("accuracy")

    def stop(what: str, done: float, total: float) -> None:
        if what == "window 2 of 2":
            raise KeyboardInterrupt

    path = accuracy.MeasuredPath(Planted(20, 0.1), "other", {"path": "other"})
    with pytest.raises(KeyboardInterrupt):
        accuracy.run(recorder, stop, Planted(20, 0), [path], EvaluationSet([[1]], [list(range(9)), [1, 2]]))
    found = {result.name: result for result in recorder.results()}
    assert set(found) == {f"{name}/other" for name in NAMES}
    assert found["kl/other"].fields == {"path": "other", "count": 8}
    assert len(recorder.details["paths"]["other"]["positions"]["kl"]) == 8


def test_run_padded_vocabulary_is_cut() -> None:
    scores = Scores()
    scores.add_prompt(np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))
    assert scores.prompts == [(0.0, 1.0)]

    class Padded(Planted):
        def logits(self, ids: list[int], *, last: bool = False) -> Logits:
            return np.pad(super().logits(ids, last=last), ((0, 0), (0, 3)))

    found = measured(Planted(9, 0), Padded(9, 0), EvaluationSet([[1]], [[1, 2]]))
    assert found["kl"].estimate == 0


def test_bundled_prompts_and_text_exist() -> None:
    prompts = workload.read_prompts(workload.PROMPTS)
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 20
    assert len(workload.read_text(workload.TEXT).split()) > 1000


# ---- other libraries


@pytest.fixture(scope="module")
def python_with_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has something with llama-cpp-python's interface."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "llama_cpp.py").write_text(LLAMA_CPP)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_library_side_returns_logits_of_ids(python_with_llama_cpp: str, tmp_path: Path) -> None:
    peer = LibrarySide("llama-cpp-python", python_with_llama_cpp, tmp_path / "model.gguf", 8)
    try:
        assert peer.version == "llama-cpp-python 0.0.test"
        whole = peer.logits([5, 6, 7])
        assert whole.dtype == np.float32
        assert whole.tolist() == [[5.0] * 11, [106.0] * 11, [207.0] * 11]
        assert peer.logits([1, 2], last=True).tolist() == [[102.0] * 11]
        with pytest.raises(WorkerError, match="llama-cpp-python: ValueError: unlucky"):
            peer.logits([13])
    finally:
        peer.close()


def test_library_side_crash_shows_last_line(python_with_llama_cpp: str, tmp_path: Path) -> None:
    peer = LibrarySide("llama-cpp-python", python_with_llama_cpp, tmp_path / "model.gguf", 8)
    try:
        for _ in range(2):
            with pytest.raises(WorkerError, match="last words"):
                peer.logits([14])
    finally:
        peer.close()


def test_library_side_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="nowhere/python"):
        LibrarySide("transformers", "nowhere/python", tmp_path / "m.gguf", 8)
    with pytest.raises(InvalidRequestError, match="GGUF files only"):
        LibrarySide("llama-cpp-python", sys.executable, tmp_path, 8)
    with pytest.raises(WorkerError, match=r"^transformers answered b'-c "):
        LibrarySide("transformers", "echo", tmp_path / "m.gguf", 8)
    if importlib.util.find_spec("llama_cpp") is None:
        with pytest.raises(MissingDependencyError, match=r"No module named 'llama_cpp'.*--llama-cpp-python"):
            LibrarySide("llama-cpp-python", sys.executable, tmp_path / "m.gguf", 8)


def test_run_transformers_agrees_on_the_same_file(tmp_path: Path) -> None:
    written = {"rope.freq_base": 10000.0, "rope.dimension_count": 8, "attention.head_count_kv": 4, "vocab_size": 260}
    keys = {f"llama.{key}": value for key, value in written.items()}  # whose absence transformers reads otherwise
    llm = LLM(write_model(tmp_path / "tiny.gguf", keys), kv_type="float32")
    material = EvaluationSet.encode(llm, [workload.Prompt("he said")], "a text to be read", 12)
    peer = LibrarySide("transformers", sys.executable, llm.checkpoint.path, material.max_length)
    try:
        found = measured(peer, WorkerSide(llm), material)
    finally:
        peer.close()
    assert found["max_abs_dlogprob"].estimate < 1e-4
    assert abs(found["kl"].estimate) < 1e-8
    assert found["top1"].estimate == found["top1_prompts"].estimate == 1
    assert found["ppl_ratio"].estimate == pytest.approx(1, abs=1e-5)


def test_library_side_without_reply_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = tmp_path / "python"
    asleep.write_text("#!/bin/sh\nexec sleep 1000\n")
    asleep.chmod(0o755)
    monkeypatch.setattr(LibrarySide, "timeout_s", 0.3)
    with pytest.raises(WorkerError, match=r"transformers did not answer within 0\.3 s"):
        LibrarySide("transformers", str(asleep), tmp_path / "model.gguf", 8)


def test_compare_greedy_of_equal_models_finds_no_difference(tiny_llm: LLM) -> None:
    shown: list[tuple[str, float, float]] = []
    results = accuracy.compare_greedy(tiny_llm, tiny_llm, [[5, 6], [7]], 4, lambda *step: shown.append(step))
    assert shown == [("greedy answer 1 of 2", 0, 2), ("greedy answer 2 of 2", 1, 2)]
    found = {result.name: result for result in results}
    assert {name: result.estimate for name, result in found.items()} == {
        "greedy_same": 1.0, "greedy_same_first_token": 1.0, "greedy_max_gap": 0.0,
    }  # fmt: skip
    assert found["greedy_same"].fields["count"] == 2


@pytest.mark.parametrize("backend", [ReferenceBackend(), CpuBackend()], ids=lambda backend: backend.name)
def test_measure_logit_errors_of_prompts_and_batches(backend: Backend) -> None:
    spec = Spec("small", Shape(2, 64, 4, 2, 96, 300, 512), "Q8_0", 2)
    pair = accuracy.load_synthetic_pair(spec, backend, None, "float32", lambda *_: None)
    recorder = Recorder("accuracy")
    accuracy.measure_logit_errors(recorder, lambda *_: None, *pair, "float32", [1, 3])
    found = {result.name: result.estimate for result in recorder.results()}
    assert set(found) == {f"logit_error/{name}" for name in ("prompt100", "prompt320", "b1", "b3")}
    assert max(found.values()) < (1e-5 if backend.name == "reference" else 5e-2)
