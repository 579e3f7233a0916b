"""How far a path is from the truth: float32 on the dequantized weights, by our reference or by transformers.

Two measures. At the last position of each prompt, the log-probabilities of the truth's five likeliest tokens. At every
position of a text, cut into windows that each start anew: perplexity, KL(truth || path), whether the likeliest token is
the same. Every side reads the same ids; one window's logits of two sides are in memory at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.request import Request, SamplingParams
from ..engine.solo import Solo
from ..errors import InferenceError, InvalidRequestError, MissingDependencyError, WorkerError
from ..llm import LLM
from . import statistics
from .results import Better, Recorder, Result
from .workload import Prompt

WINDOW = 256
LIKELIEST = 5
ROWS = 16  # positions worked on at a time, in float64
MOST_KEPT = 4096  # positions whose figures a saved run has

Steps = Callable[[str, float, float], None]
Floats = NDArray[np.float64]
Logits = NDArray[np.float32]


class Side(Protocol):
    """Something that gives logits: (positions, vocabulary), or (1, vocabulary) of the last position."""

    def logits(self, ids: list[int], *, last: bool = False) -> Logits:
        """All positions from an empty context, or the last one."""


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """A side with the name that its results carry; ours have none behind theirs."""

    side: Side
    suffix: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ours:
    """This worker, on the backend that its model was loaded for."""

    llm: LLM

    def logits(self, ids: list[int], *, last: bool = False) -> Logits:
        """As a prompt goes that is alone."""
        request = Request(ids, SamplingParams(), 1, 0, frozenset())
        chunks = Solo(self.llm.model, len(ids), self.llm.kv_type).catch_up(request, all_logits=not last)
        # a GPU's array is fetched first
        parts = [np.asarray(getattr(part, "cpu", lambda p=part: p)(), np.float32) for _, part in chunks]
        return parts[-1][-1:] if last else np.concatenate(parts)

    @property
    def backend(self) -> str:
        """Its name, as results have it."""
        return self.llm.model.ops.name


@dataclass(frozen=True, slots=True)
class Material:
    """What all sides read, as ids."""

    prompts: list[list[int]]
    windows: list[list[int]]

    @staticmethod
    def of(llm: LLM, prompts: Sequence[Prompt], text: str, tokens: int) -> Material:
        """Encode prompts and the first `tokens` tokens of the text; what cannot be used is refused."""
        encoded = [_encoded(llm, prompt) for prompt in prompts]
        for number, ids in enumerate(encoded, 1):
            if not 1 <= len(ids) <= llm.max_context:
                raise InvalidRequestError(
                    f"prompt {number} has {len(ids)} tokens: 1 to {llm.max_context}, the model's context, can be used"
                )
        first = [llm.tokenizer.bos_id] if llm.tokenizer.add_bos and llm.tokenizer.bos_id is not None else []
        ids = llm.tokenize(text, add_special=False)[:tokens]
        size = min(WINDOW, llm.max_context) - len(first)
        windows = [first + ids[i : i + size] for i in range(0, len(ids), max(size, 1))]
        windows = [window for window in windows if len(window) > 1]
        if not windows:
            raise InvalidRequestError(f"the text has {len(ids)} tokens: at least 2 are needed")
        return Material(encoded, windows)

    @property
    def longest(self) -> int:
        """The most tokens that a side reads at once."""
        return max(map(len, self.prompts + self.windows))

    @property
    def tokens(self) -> int:
        """How many one side reads."""
        return sum(map(len, self.prompts + self.windows))


def _encoded(llm: LLM, prompt: Prompt) -> list[int]:
    if prompt.messages is not None:
        return llm.tokenize_chat(prompt.messages)
    return llm.tokenize(prompt.text or "")


@dataclass(slots=True)
class Scores:
    """What one path has given so far."""

    positions: list[tuple[float, float, float, float]] = field(default_factory=list)  # nll, nll of truth, kl, agrees
    prompts: list[tuple[float, float]] = field(default_factory=list)  # mean |difference|, agrees
    largest: float = 0.0

    def add_prompt(self, truth: Logits, path: Logits) -> None:
        """Take the last position of a prompt: (1, vocabulary) of both sides."""
        (known,), (given,) = log_softmax(truth), log_softmax(path)
        top = np.argsort(-known, kind="stable")[:LIKELIEST]
        differences = np.abs(known[top] - given[top])
        self.prompts.append((float(differences.mean()), float(given.argmax() == top[0])))
        self.largest = max(self.largest, float(differences.max()))

    def add_window(self, truth: Logits, path: Logits, ids: list[int]) -> None:
        """Take all positions of a window whose next token is in it."""
        for start in range(0, len(ids) - 1, ROWS):
            following = np.array(ids[start + 1 : start + 1 + ROWS])
            rows = slice(start, start + len(following))
            known, given = log_softmax(truth[rows]), log_softmax(path[rows])
            place = np.arange(len(following)), following
            divergence = (np.exp(known) * (known - given)).sum(axis=1)
            agree = known.argmax(axis=1) == given.argmax(axis=1)
            columns = (-given[place], -known[place], divergence, agree.astype(np.float64))
            self.positions += [tuple(row) for row in np.stack(columns, axis=1).tolist()]


def log_softmax(logits: Logits) -> Floats:
    """In float64 along the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def run(recorder: Recorder, steps: Steps, truth: Side, paths: Sequence[MeasuredPath], material: Material) -> None:
    """Measure every path against the truth; what was measured is recorded however it ends."""
    scores = [Scores() for _ in paths]
    try:
        for what, ids in _sequences(material, steps, 1 + len(paths)):
            last = what == "prompt"
            known = _checked(truth.logits(ids, last=last), "the truth")
            for path, own in zip(paths, scores, strict=True):
                given = _checked(path.side.logits(ids, last=last), path.suffix or "the path")
                width = min(known.shape[1], given.shape[1])  # some pad the vocabulary
                if last:
                    own.add_prompt(known[:, :width], given[:, :width])
                else:
                    own.add_window(known[:, :width], given[:, :width], ids)
    finally:
        for path, own in zip(paths, scores, strict=True):
            for result in results(own, path):
                recorder.add_result(result)
            recorder.details.setdefault("paths", {})[path.suffix or "ours"] = _details(own)


def _sequences(material: Material, steps: Steps, sides: int) -> Iterator[tuple[str, list[int]]]:
    done = 0
    for what, all_ids in (("prompt", material.prompts), ("window", material.windows)):
        for number, ids in enumerate(all_ids, 1):
            steps(f"{what} {number} of {len(all_ids)}", done * sides, material.tokens * sides)
            yield what, ids
            done += len(ids)
    steps("done", done * sides, material.tokens * sides)


def _checked(logits: Logits, whose: str) -> Logits:
    if not np.isfinite(logits).all():
        raise InferenceError(f"{whose} gives logits that are no finite numbers")
    return logits


def results(scores: Scores, path: MeasuredPath) -> list[Result]:
    """The figures of one path, with bootstrap intervals over positions and over prompts."""
    made: list[Result] = []

    def put(name: str, values: Floats, better: Better, count: int) -> None:
        value, resampled = float(values[0]), values[1:]
        low, high = statistics.interval(resampled, count) if count >= statistics.MIN_SAMPLES else (value, value)
        fields = {**path.fields, "count": count}
        full = f"{name}/{path.suffix}" if path.suffix else name
        made.append(Result(full, "", value, min(low, value), max(high, value), better, fields=fields))

    if scores.positions:
        n = len(scores.positions)
        nll, nll_truth, kl, top1 = _means(np.array(scores.positions)).T
        put("ppl_ratio", np.exp(nll - nll_truth), "lower", n)
        put("kl", kl, "lower", n)
        put("top1", top1, "higher", n)
        put("ppl", np.exp(nll), "lower", n)
        put("ppl_truth", np.exp(nll_truth), "lower", n)
    if scores.prompts:
        n = len(scores.prompts)
        difference, top1 = _means(np.array(scores.prompts)).T
        put("mean_abs_dlogprob", difference, "lower", n)
        put("max_abs_dlogprob", np.full(2, scores.largest), "lower", n)
        put("top1_prompts", top1, "higher", n)
    return made


def _means(rows: Floats) -> Floats:
    """(1 + resamples, columns): the means of all rows, then those of resampled rows."""
    rng = np.random.default_rng(20261115)
    n = len(rows)
    drawn = (np.bincount(rng.integers(0, n, n), minlength=n) @ rows / n for _ in range(statistics.RESAMPLES))
    return np.stack([rows.mean(axis=0), *drawn])


def _details(scores: Scores) -> dict[str, Any]:
    names = ("nll", "nll_truth", "kl", "top1")
    columns = zip(*scores.positions[:MOST_KEPT], strict=True) if scores.positions else ()
    positions = {n: [float(f"{v:.6g}") for v in column] for n, column in zip(names, columns, strict=False)}
    prompts = [{"mean_abs_dlogprob": float(f"{d:.6g}"), "top1": bool(agrees)} for d, agrees in scores.prompts]
    return {"positions": positions, "prompts": prompts}


CHILD = Path(__file__).with_name("library_child.py")
GGUF_ONLY = {"llama-cpp-python"}
TOLD = 2000  # last characters of what a failed child wrote
HIDDEN = ("PYTHONPATH", "PYTHONHOME")  # ours, not the other interpreter's
COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Peer:
    """A library under way; `close` ends its process."""

    limit_s = 600.0  # for loading the model, and for each answer

    def __init__(self, kind: str, python: str, model: Path, context: int, threads: int = 1) -> None:
        """Start the process and wait until it has loaded the model for sequences of up to `context` tokens."""
        if kind in GGUF_ONLY and model.is_dir():
            raise InvalidRequestError(f"{kind} reads GGUF files only, and {model.name} is a folder")
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="llm-worker-rbee-")
        self._told = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        try:
            self._process = subprocess.Popen(
                [_absolute(python), "-c", CHILD.read_text(), kind, str(model.resolve()), str(context), str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._told, encoding="utf-8",
                env={**{k: v for k, v in os.environ.items() if k not in HIDDEN}, **dict.fromkeys(COUNTS, str(threads))},
                cwd=self._folder.name,  # an empty one: our modules must not stand before its own
                start_new_session=True,  # Ctrl-C is for us; we end it
            )  # fmt: skip
        except OSError as error:
            self._folder.cleanup()
            raise MissingDependencyError(f"cannot run {python!r}: {error.strerror}") from None
        try:
            self.version = str(self._reply()["version"])
        except BaseException:
            self.close()
            raise

    def logits(self, ids: list[int], *, last: bool = False) -> NDArray[np.float32]:
        """(positions, vocabulary), or (1, vocabulary) of the last one."""
        file = Path(self._folder.name) / "logits.npy"
        try:
            assert self._process.stdin is not None
            print(json.dumps({"ids": ids, "last": last, "file": str(file)}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # the reply, or its absence, says why
        self._reply()
        return np.asarray(np.load(file, allow_pickle=False), np.float32)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._told.close()
        self._folder.cleanup()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(self.limit_s, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        told = _parsed(line) if line else {"error": self._last_words()}
        if "error" in told:
            missing = "No module named" in told["error"]
            hint = ": name an interpreter that has it with --peer-python or --llama-cpp-python" if missing else ""
            raise (MissingDependencyError if missing else WorkerError)(f"{self.kind}: {told['error']}{hint}")
        return told

    def _last_words(self) -> str:
        self._process.wait()
        self._told.seek(0)
        text = self._told.read()[-TOLD:].decode(errors="replace").strip()
        status = self._process.returncode
        if status == -signal.SIGKILL:
            return f"it did not answer within {self.limit_s:g} s, or the system ended it for want of memory"
        if status == -signal.SIGILL:
            return "it uses instructions that this processor refuses: build it anew here, with fewer of them"
        return text.rpartition("\n")[2] or f"its process ended with status {status}"


def _parsed(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    return told if isinstance(told, dict) else {"error": f"it answered {line[:100]!r}: is that a Python?"}


def _absolute(python: str) -> str:
    """A path that holds in any folder, its links unresolved (they make an environment); a bare name is looked up."""
    return str(Path(python).absolute()) if "/" in python else python
