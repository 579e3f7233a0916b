"""How far a path is from the truth: float32 on the dequantized weights, by the reference backend or by transformers.

At the last position of each prompt, the log-probabilities of the truth's five likeliest tokens. At every position of a
text, cut into windows without context: perplexity, KL(truth || path), whether the likeliest token is the same. Greedy
answers to the prompts with `--greedy`. For synthetic models, the error of the logits for prompts and batch sizes. All
sides get the same ids; the logits of one window of two sides are in memory at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends.ops import Array, Backend, Batch, Ints
from llm_worker_rbee.backends.reference import ReferenceBackend
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.errors import InferenceError, InvalidRequestError, MissingDependencyError, WorkerError
from llm_worker_rbee.generation import Completion
from llm_worker_rbee.llm import LLM
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.convert import is_fp8, quantize_checkpoint
from llm_worker_rbee.models.kv_cache import KVCache
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.sampling_params import SamplingParams

from . import statistics
from .peers import library_child
from .processes import ChildFailedError, ChildProcess, library_environment
from .results import Better, Recorder, Result
from .synthetic import Spec, checkpoint
from .workload import Prompt

WINDOW = 256
TOP_TOKENS = 5
POSITIONS_AT_ONCE = 16  # in float64
MAX_SAVED_POSITIONS = 4096

PROMPT_LENGTHS = (100, 320)  # of the logit errors of a synthetic model; a token behind the longest is decoded
BLOCK_SIZE = 16
GREEDY_LOGPROBS = 20  # so that the tokens of the other side are among them

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]


class Side(Protocol):
    """A source of logits."""

    def logits(self, ids: list[int], *, last: bool = False) -> Logits:
        """Return (positions, vocabulary) from an empty context, or (1, vocabulary) of the last position."""


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """A side with the suffix of its result names; this worker has none."""

    side: Side
    suffix: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerSide:
    """This worker, on the backend of its model."""

    llm: LLM

    def logits(self, ids: list[int], *, last: bool = False) -> Logits:
        request = Request(ids, SamplingParams().resolve(), 1, 0, frozenset())
        chunks = SingleSequence(self.llm.model, len(ids), self.llm.kv_type).catch_up(request, all_logits=not last)
        parts = [to_numpy(part) for _, part in chunks]
        return parts[-1][-1:] if last else np.concatenate(parts)


def to_numpy(array: Array) -> Logits:
    """Return a backend's array as float32 on the host."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array, np.float32)


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The ids that all sides get."""

    prompts: list[list[int]]
    windows: list[list[int]]

    @staticmethod
    def encode(llm: LLM, prompts: Sequence[Prompt], text: str, tokens: int) -> EvaluationSet:
        """Encode prompts and the first `tokens` tokens of the text; raise if one does not fit the context."""
        encoded = [
            llm.tokenize(prompt.text or "") if prompt.messages is None else llm.tokenize_chat(prompt.messages)
            for prompt in prompts
        ]
        for number, ids in enumerate(encoded, 1):
            if not 1 <= len(ids) <= llm.max_context:
                raise InvalidRequestError(
                    f"prompt {number} has {len(ids)} tokens: it must have 1 to {llm.max_context}, the model's context"
                )
        first = [llm.tokenizer.bos_id] if llm.tokenizer.add_bos and llm.tokenizer.bos_id is not None else []
        ids = llm.tokenize(text, add_special=False)[:tokens]
        size = min(WINDOW, llm.max_context) - len(first)
        windows = [first + ids[i : i + size] for i in range(0, len(ids), max(size, 1))]
        windows = [window for window in windows if len(window) > 1]
        if not windows:
            raise InvalidRequestError(f"the text has {len(ids)} tokens: at least 2 are needed")
        return EvaluationSet(encoded, windows)

    @property
    def max_length(self) -> int:
        return max(map(len, self.prompts + self.windows))


@dataclass(slots=True)
class Scores:
    """The scores of one path so far."""

    positions: list[tuple[float, float, float, float]] = field(default_factory=list)  # nll, nll of truth, kl, agrees
    prompts: list[tuple[float, float]] = field(default_factory=list)  # mean |difference|, agrees
    largest: float = 0.0

    def add_prompt(self, truth: Logits, path: Logits) -> None:
        """Add the last position of a prompt: (1, vocabulary) of both sides."""
        (expected,), (actual,) = log_softmax(truth), log_softmax(path)
        top = np.argsort(-expected, kind="stable")[:TOP_TOKENS]
        differences = np.abs(expected[top] - actual[top])
        self.prompts.append((float(differences.mean()), float(actual.argmax() == top[0])))
        self.largest = max(self.largest, float(differences.max()))

    def add_window(self, truth: Logits, path: Logits, ids: list[int]) -> None:
        """Add all positions of a window whose next token is in it."""
        for start in range(0, len(ids) - 1, POSITIONS_AT_ONCE):
            following = np.array(ids[start + 1 : start + 1 + POSITIONS_AT_ONCE])
            rows = slice(start, start + len(following))
            expected, actual = log_softmax(truth[rows]), log_softmax(path[rows])
            place = np.arange(len(following)), following
            divergence = (np.exp(expected) * (expected - actual)).sum(axis=1)
            agree = expected.argmax(axis=1) == actual.argmax(axis=1)
            columns = (-actual[place], -expected[place], divergence, agree.astype(np.float64))
            self.positions += [tuple(row) for row in np.stack(columns, axis=1).tolist()]


def log_softmax(logits: Logits) -> Floats:
    """Return the log-probabilities in float64, along the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def run(
    recorder: Recorder, progress: StepProgress, truth: Side, paths: Sequence[MeasuredPath], evaluation: EvaluationSet
) -> None:
    """Measure every path against the truth; record all measurements, even after an error."""
    scores = [Scores() for _ in paths]
    try:
        for what, ids in _sequences(evaluation, progress, 1 + len(paths)):
            last = what == "prompt"
            expected = _require_finite(truth.logits(ids, last=last), "the truth")
            for path, own in zip(paths, scores, strict=True):
                actual = _require_finite(path.side.logits(ids, last=last), path.suffix or "the path")
                width = min(expected.shape[1], actual.shape[1])  # some libraries pad the vocabulary
                if last:
                    own.add_prompt(expected[:, :width], actual[:, :width])
                else:
                    own.add_window(expected[:, :width], actual[:, :width], ids)
    finally:
        for path, own in zip(paths, scores, strict=True):
            for result in results(own, path):
                recorder.add_result(result)
            recorder.details.setdefault("paths", {})[path.suffix or "ours"] = _details(own)


def _sequences(evaluation: EvaluationSet, progress: StepProgress, sides: int) -> Iterator[tuple[str, list[int]]]:
    done, total = 0, sum(map(len, evaluation.prompts + evaluation.windows))
    for what, all_ids in (("prompt", evaluation.prompts), ("window", evaluation.windows)):
        for number, ids in enumerate(all_ids, 1):
            progress(f"{what} {number} of {len(all_ids)}", done * sides, total * sides)
            yield what, ids
            done += len(ids)
    progress("done", done * sides, total * sides)


def _require_finite(logits: Logits, side: str) -> Logits:
    if not np.isfinite(logits).all():
        raise InferenceError(f"the logits of {side} are not finite")
    return logits


def results(scores: Scores, path: MeasuredPath) -> list[Result]:
    """Return the results of one path, with bootstrap intervals over positions and over prompts."""
    out: list[Result] = []

    def put(name: str, values: Floats, better: Better, count: int) -> None:
        value, resampled = float(values[0]), values[1:]
        low, high = statistics.interval(resampled, count) if count >= statistics.MIN_SAMPLES else (value, value)
        fields = {**path.fields, "count": count}
        full = f"{name}/{path.suffix}" if path.suffix else name
        out.append(Result(full, "", value, min(low, value), max(high, value), better, fields=fields))

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
    return out


def _means(rows: Floats) -> Floats:
    """Return (1 + resamples, columns): the means of all rows, then the means of each resample."""
    rng = np.random.default_rng(20261115)
    n = len(rows)
    drawn = (np.bincount(rng.integers(0, n, n), minlength=n) @ rows / n for _ in range(statistics.RESAMPLES))
    return np.stack([rows.mean(axis=0), *drawn])


def _details(scores: Scores) -> dict[str, Any]:
    names = ("nll", "nll_truth", "kl", "top1")
    columns = zip(*scores.positions[:MAX_SAVED_POSITIONS], strict=True) if scores.positions else ()
    positions = {n: [float(f"{v:.6g}") for v in column] for n, column in zip(names, columns, strict=False)}
    prompts = [{"mean_abs_dlogprob": float(f"{d:.6g}"), "top1": bool(agrees)} for d, agrees in scores.prompts]
    return {"positions": positions, "prompts": prompts}


class LibrarySide:
    """Another library in a child process, under the interpreter that has it; logits come back through a file."""

    timeout_s = 600.0  # of loading the model, and of each reply

    def __init__(self, library: str, python: str, model: Path, context: int, threads: int = 1) -> None:
        """Start the process and load the model for sequences of up to `context` tokens."""
        if library == "llama-cpp-python" and model.is_dir():
            raise InvalidRequestError(f"{library} reads GGUF files only, and {model.name} is a folder")
        self._library, self._python = library, python
        self._folder = tempfile.TemporaryDirectory(prefix="llm-worker-rbee-")
        settings = {"model": str(model.resolve()), "context": context, "threads": threads, "logits": True}
        source = Path(library_child.__file__).read_text(encoding="utf-8")
        # a path that holds in any folder, links unresolved (they make an environment); a bare name is looked up
        program = str(Path(python).absolute()) if "/" in python else python
        command = [program, "-c", source, library, json.dumps(settings)]
        # in an empty folder: our modules must not shadow the library's
        self._child = ChildProcess(library, command, library_environment(threads), self.timeout_s, self._folder.name)
        try:
            self.version = f"{library} {self._explain(lambda: self._child.start()['version'])}"
        except BaseException:
            self.close()
            raise

    def logits(self, ids: list[int], *, last: bool = False) -> Logits:
        file = Path(self._folder.name) / "logits.npy"
        self._explain(lambda: self._child.request({"ids": ids, "last": last, "file": str(file)}, "rows"))
        return np.asarray(np.load(file, allow_pickle=False), np.float32)

    def close(self) -> None:
        self._child.close()
        self._folder.cleanup()

    def _explain(self, act: Callable[[], Any]) -> Any:
        """Run `act`; name the remedy for a missing interpreter or package."""
        try:
            return act()
        except ChildFailedError as error:
            if isinstance(error.__cause__, OSError):
                raise MissingDependencyError(f"cannot run {self._python!r}: {error.__cause__.strerror}") from None
            if "No module named" in str(error):
                remedy = "name an interpreter that has it with --peer-python or --llama-cpp-python"
                raise MissingDependencyError(f"{error}: {remedy}") from None
            raise WorkerError(str(error)) from None


def compare_greedy(
    path: LLM, truth: LLM, prompts: Sequence[list[int]], tokens: int, progress: StepProgress
) -> list[Result]:
    """Compare greedy answers: how many are the same, and how sure the truth is of its token where they diverge."""
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0}
    options: dict[str, Any] = {**greedy, "max_tokens": tokens, "logprobs": GREEDY_LOGPROBS}
    pairs = []
    for number, ids in enumerate(prompts):
        progress(f"greedy answer {number + 1} of {len(prompts)}", number, len(prompts))
        pairs.append((path.generate(ids, **options), truth.generate(ids, **options)))
    gaps = [gap for pair in pairs if (gap := _divergence_gap(*pair)) is not None]
    same = sum(ours.tokens == theirs.tokens for ours, theirs in pairs) / len(pairs)
    first = sum(ours.tokens[:1] == theirs.tokens[:1] for ours, theirs in pairs) / len(pairs)
    fields: dict[str, Any] = {"backend": path.model.ops.name, "count": len(pairs), "tokens": tokens}
    return [
        Result.exact("greedy_same", "", same, "higher", **fields),
        Result.exact("greedy_same_first_token", "", first, "higher", **fields),
        Result.exact("greedy_max_gap", "", max(gaps, default=0.0), **fields, gaps=[round(gap, 4) for gap in gaps]),
    ]


def _divergence_gap(ours: Completion, theirs: Completion) -> float | None:
    """Return by how much log-probability the truth prefers its own token where the answers diverge; None: nowhere."""
    for place, (own, other) in enumerate(zip(theirs.tokens, ours.tokens, strict=False)):
        if own != other:
            assert theirs.logprobs is not None
            top = dict(theirs.logprobs[place].top)
            return float(top[own] - top.get(other, -np.inf))
    return None


def load_synthetic_pair(
    spec: Spec, backend: Backend, quantize: str | None, kv_type: str, progress: StepProgress
) -> tuple[Transformer, Transformer]:
    """Load a synthetic model on a backend, quantized if requested, and as it is on the reference backend."""
    weights = checkpoint(spec, progress=progress)
    quantize = quantize or spec.quantize
    if is_fp8(quantize):
        backend.require_fp8()
    packed = weights if quantize is None else quantize_checkpoint(weights, quantize)
    config, context = read_model_config(weights), PROMPT_LENGTHS[-1] + 1
    backend.load_kernels(packed, config, kv_type)
    return load_model(packed, backend, config, context), load_model(weights, ReferenceBackend(), config, context)


def measure_logit_errors(
    recorder: Recorder,
    progress: StepProgress,
    model: Transformer,
    truth: Transformer,
    kv_type: str,
    batches: Sequence[int],
) -> None:
    """Record the error of the logits, as a part of their standard deviation: of prompts, and of decode at batch sizes.

    Both models have the same random weights; every sequence of a batch has keys and values of its own.
    """
    rng, longest = np.random.default_rng(5), PROMPT_LENGTHS[-1]
    ids = rng.integers(0, model.config.vocab_size, longest + 1)
    blocks = -(-(longest + 1) // BLOCK_SIZE)
    progress("the truth", 0, 0)
    truths = _forward(truth, KVCache(truth.ops, truth.config, blocks, BLOCK_SIZE, "float32"), ids, 0, np.arange(blocks))
    tables = rng.permutation(max(batches) * blocks).reshape(-1, blocks)
    cache = KVCache(model.ops, model.config, tables.size, BLOCK_SIZE, kv_type, n_slots=len(tables))

    def put(name: str, logits: Logits, rows: Logits) -> None:
        error = float(np.sqrt(np.square(logits - rows, dtype=np.float64).mean()) / rows.std())
        recorder.add_result(Result.exact(f"logit_error/{name}", "", error, backend=model.ops.name))

    for length in PROMPT_LENGTHS:
        put(f"prompt{length}", _forward(model, cache, ids[:length], 0, tables[0]), truths[:length])
    for number, batch in enumerate(batches):
        progress(f"batch {batch}", number, len(batches))
        for slot, table in enumerate(tables[:batch]):
            _forward(model, cache, ids[:longest], 0, table, slot, all_logits=False)
        logits = _forward(model, cache, ids[longest:], longest, tables[:batch])
        put(f"b{batch}", logits, np.broadcast_to(truths[longest:], logits.shape))


def _forward(
    model: Transformer, cache: KVCache, ids: Ints, start: int, tables: Ints, slot: int = 0, *, all_logits: bool = True
) -> Logits:
    """Run the same ids for every block table, at positions from `start`; their states lie in slots from `slot` on."""
    tables = np.atleast_2d(tables)[:, : -(-(start + len(ids)) // BLOCK_SIZE)]
    copies, n = len(tables), len(ids)
    positions, query_start = np.arange(start, start + n), np.arange(copies + 1) * n
    states = np.arange(slot, slot + copies)
    state_out = np.full(n * copies, -1)
    state_out[query_start[1:] - 1] = states
    batch = Batch(
        ids=np.tile(ids, copies),
        positions=np.tile(positions, copies),
        query_start=query_start,
        slot_mapping=np.concatenate([cache.slots(table, positions) for table in tables]),
        context_len=np.full(copies, start + n),
        block_table=tables,
        logits_index=np.arange(n * copies) if all_logits else query_start[1:] - 1,
        state_in=states if start else np.full(copies, -1),
        state_out=state_out,
    )
    return to_numpy(model.forward(batch, cache))
