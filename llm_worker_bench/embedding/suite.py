"""Texts per second of embedding models, in turn with sentence-transformers and llama.cpp on the same texts.

A rate counts the tokens of all inputs, special ones included, from texts to rows: tokenizing is part of it. This worker
is also measured without tokenizing. Ratios are computed for each repetition.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.models.convert import convert
from llm_worker_rbee.models.pooling_config import read_pooling_config
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.text_model import open_tokenizer
from llm_worker_rbee.tokenizer.pooling_text import PoolingText
from llm_worker_rbee.weights import Checkpoint, open_checkpoint

from .. import statistics, synthetic
from ..peers.find import has_packages
from ..peers.programs import LLAMA_SERVER, OURS, PeerError
from ..processes import busy_cores
from ..results import Recorder, Result, describe_model
from ..workload import vocabulary
from . import sides
from .sides import SENTENCE_TRANSFORMERS, TOKENIZED, EmbedSide, EmbedTask, LlamaServerSide

PEERS = (SENTENCE_TRANSFORMERS, LLAMA_SERVER)
PACKAGES = ("sentence_transformers", "torch")
MIN_TOKENS = 4096  # of a task: shorter calls are repeated with other texts
MIXED_LENGTHS = (20, 200)  # tokens of mixed texts, uniform
FILLER = "the"

Rates = dict[str, tuple[str, list[float]]]  # of each program, by name: its version and the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedPlan:
    """The texts to embed, the repetitions, and the peers to compare with."""

    lengths: Sequence[int] = ()
    batches: Sequence[int] = (1, 32)
    mixed: int = 0  # texts of 20 to 200 tokens, in one call; 0: none
    types: Sequence[str] = ()  # the model is converted to each; none: as it is
    tokenized: bool = False  # random token ids in place of texts
    repetitions: int = 3
    threads: int = 1
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    peers: Sequence[str] = PEERS
    llama_server: str | None = None
    pythons: Sequence[str] = ()
    folder: str | None = None  # of the model as sentence-transformers reads it
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if not self.lengths and not self.mixed:
            raise InvalidRequestError("nothing to measure: --lengths and --texts are both 0", "lengths")
        for peer in self.peers:
            if peer not in PEERS:
                raise InvalidRequestError(f"unknown peer {peer!r}: use some of {', '.join(PEERS)}", "peer")

    @property
    def is_on_gpu(self) -> bool:
        return self.device.startswith("cuda") or self.backend == "cuda"


class TextMaker:
    """Makes seeded texts, or token ids, of a number of tokens."""

    def __init__(self, checkpoint: Checkpoint, seed: int, *, tokenized: bool) -> None:
        config = read_model_config(checkpoint)
        pooling = read_pooling_config(checkpoint, config)
        self.max_length = min(pooling.max_length or config.context_length, config.context_length)
        self._vocab_size, self._rng = config.vocab_size, np.random.default_rng(seed)
        self._text = None
        if not tokenized:
            self._text = PoolingText(open_tokenizer(checkpoint), pooling, config.vocab_size, self.max_length)

    def mixed_lengths(self, count: int) -> list[int]:
        low, high = MIXED_LENGTHS
        lengths: list[int] = self._rng.integers(low, min(high, self.max_length) + 1, count).tolist()
        return lengths

    def task(self, name: str, lengths: Sequence[int], batch: int) -> EmbedTask:
        """Return inputs of these lengths; raise if one is too long for the model."""
        if max(lengths) > self.max_length:
            raise InvalidRequestError(
                f"texts of {max(lengths)} tokens are too long: the model takes {self.max_length}", "lengths"
            )
        if self._text is None:
            quarter = self._vocab_size // 4  # control tokens are at the ends of a vocabulary
            ids = [self._rng.integers(quarter, 3 * quarter, length).tolist() for length in lengths]
            return EmbedTask(name, ids, batch, sum(lengths))
        texts = [self._make_text(self._text, length) for length in lengths]
        tokens = sum(map(len, self._text.encode_batch(texts, prompt=self._text.prompt())))
        return EmbedTask(name, texts, batch, tokens)

    def _make_text(self, text: PoolingText, length: int) -> str:
        """Return words that are so many tokens, special ones and the default prompt included, or a little fewer."""
        choices, prompt = vocabulary(), text.prompt()
        words = [choices[i] for i in self._rng.integers(0, len(choices), length)]
        while True:
            count = len(text.encode(" ".join(words), prompt=prompt, truncate=True))
            if not words or (count < self.max_length and count <= length):
                return " ".join(words + [FILLER] * (length - count))
            words = words[: -max(1, count - length)]


def make_tasks(maker: TextMaker, plan: EmbedPlan) -> list[EmbedTask]:
    """Return the tasks: every length with every batch, and the mixed texts."""
    tasks = [
        maker.task(f"len{length} b{batch}", [length] * max(batch, -(-MIN_TOKENS // length)), batch)
        for length in dict.fromkeys(plan.lengths)
        for batch in dict.fromkeys(plan.batches)
    ]
    if plan.mixed:
        tasks.append(maker.task(f"mixed{plan.mixed}", maker.mixed_lengths(plan.mixed), plan.mixed))
    return tasks


def run(
    recorder: Recorder, progress: StepProgress, source: Path | synthetic.Spec, plan: EmbedPlan, folder: Path
) -> None:
    """Make the files, start all sides, and measure them in turn."""
    files = make_files(source, plan, folder, progress)
    path = next(iter(files.values()))
    recorder.model = describe_model(source if isinstance(source, Path) else path, progress)
    recorder.details["models"] = {row: describe_model(file) for row, file in files.items() if row}
    progress("making texts", 0, 1)
    tasks = make_tasks(TextMaker(open_checkpoint(path), plan.seed, tokenized=plan.tokenized), plan)
    recorder.details["inputs"] = {task.name: {"inputs": len(task.inputs), "tokens": task.tokens} for task in tasks}
    busy = recorder.details.setdefault("busy_cores", {}).setdefault(recorder.model["name"], [busy_cores()])
    left_out = recorder.details.setdefault("left_out", {})
    sides = [*own_sides(files, plan), *peer_sides(source, files, plan, left_out)]
    try:
        measure_in_turn(Measurement(recorder, tasks, list(files)), progress, sides, plan)
    finally:
        for side in sides:
            side.close()
        busy.append(busy_cores())


def make_files(source: Path | synthetic.Spec, plan: EmbedPlan, folder: Path, progress: StepProgress) -> dict[str, Path]:
    """Return the file of each row: the model as it is, or converted to each of the types."""
    if isinstance(source, synthetic.Spec):
        path = folder / f"{str(source).replace(':', '-')}.gguf"
        return {"": path if path.exists() else synthetic.write(source, path, progress=progress)}
    if not plan.types:
        return {"": source}
    files = {}
    for name in plan.types:
        path = folder / f"{source.stem}-{describe_model(source)['sha256'][:8]}-{name.upper()}.gguf"
        if not path.exists():
            show = lambda what, done, total: progress(what, done, total or 0)  # noqa: E731
            convert(open_checkpoint(source), path, name.upper(), progress=show)
        files[name.upper()] = path
    return files


def own_sides(files: dict[str, Path], plan: EmbedPlan) -> Iterator[EmbedSide]:
    """Yield this worker on each file."""
    settings = {"device": plan.device, "backend": plan.backend}
    for row, path in files.items():
        yield sides.worker_side(path, settings, plan.threads, plan.timeout_s, row)


def peer_sides(
    source: Path | synthetic.Spec, files: dict[str, Path], plan: EmbedPlan, left_out: dict[str, str]
) -> Iterator[EmbedSide]:
    """Yield the peers that are installed and can embed these inputs; note the reason for the others."""
    if SENTENCE_TRANSFORMERS in plan.peers:
        try:
            yield _sentence_transformers(source, plan)
        except PeerError as error:
            left_out[SENTENCE_TRANSFORMERS] = str(error)
    if LLAMA_SERVER in plan.peers:
        program = shutil.which(plan.llama_server or LLAMA_SERVER)
        longest = max([*plan.lengths, *([MIXED_LENGTHS[1]] if plan.mixed else [])])
        for row, path in files.items():
            if program is None:
                where = f"{plan.llama_server} is not a program" if plan.llama_server else "it is not on the PATH"
                left_out[LLAMA_SERVER] = f"{where}: --llama-server PATH names one"
            elif path.is_dir():
                left_out[LLAMA_SERVER] = "it reads GGUF files only: --types Q8_0 makes one"
            else:
                yield LlamaServerSide(
                    program, path, plan.threads, longest, plan.timeout_s, on_gpu=plan.is_on_gpu, row=row
                )


def _sentence_transformers(source: Path | synthetic.Spec, plan: EmbedPlan) -> EmbedSide:
    folder = Path(plan.folder) if plan.folder else source
    if plan.is_on_gpu:
        raise PeerError("it is run on the CPU only")
    if plan.tokenized:
        raise PeerError("it takes texts, not token ids")
    if isinstance(folder, synthetic.Spec) or not folder.is_dir():
        raise PeerError("it reads folders only: --folder DIR names the one of this model")
    return sides.sentence_transformers_side(find_python(plan.pythons), folder, plan.threads, plan.timeout_s)


def find_python(pythons: Sequence[str]) -> str:
    """Return an interpreter that has sentence-transformers."""
    tried = dict.fromkeys([*pythons, sys.executable])
    python = next((path for path in tried if has_packages(path, PACKAGES)), None)
    if python is None:
        missing = f"{' and '.join(PACKAGES)} not installed for {', '.join(tried)}"
        raise PeerError(f"{missing}: --peer-python PATH names another")
    return python


@dataclass(slots=True)
class Measurement:
    """The samples so far, by task and row, and the results that they make."""

    recorder: Recorder
    tasks: Sequence[EmbedTask]
    rows: Sequence[str]
    _rates: dict[tuple[str, str], Rates] = field(default_factory=dict)  # by row and task

    def measure(self, side: EmbedSide) -> None:
        """Run every task once; a side without a row of its own counts in all rows."""
        peer = {"version": side.version, "settings": dict(side.settings)}
        self.recorder.details.setdefault("peers", {})[side.title] = peer
        for task in self.tasks:
            for name in side.names(task):
                rate = task.tokens / side.seconds(task, name)
                for row in [side.row] if side.row else self.rows:
                    rates = self._rates.setdefault((row, task.name), {})
                    rates.setdefault(name, (side.version, []))[1].append(rate)
                    self._record(row, task, rates)

    def _record(self, row: str, task: EmbedTask, by_name: Rates) -> None:
        """Make the results of a task anew: ratios change with every sample."""
        _, ours = by_name.get(TOKENIZED if task.is_tokenized else OURS, ("", []))
        for name, (version, rates) in by_name.items():
            pairs = [a / b for a, b in zip(ours, rates, strict=False)]
            ratio, low, high = statistics.estimate(pairs) if pairs else (None, None, None)
            fields: dict[str, Any] = {
                "peer": name,
                "version": version,
                "ours_over_peer": ratio,
                "ratio_interval": [low, high],
                "texts": len(task.inputs),
                "tokens": task.tokens,
            }
            full = f"{row} {task.name}/{name}".strip()
            self.recorder.add_result(Result.from_samples(full, "tok/s", rates, "higher", **fields))


def measure_in_turn(measurement: Measurement, progress: StepProgress, sides: list[EmbedSide], plan: EmbedPlan) -> None:
    """Start and warm up every side, then measure each in turn, in the opposite order every second time."""
    rounds, failed = plan.repetitions + 1, measurement.recorder.details.setdefault("failed", {})
    for number in range(rounds):
        for place, side in enumerate(list(sides) if number % 2 else sides[::-1]):
            what = f"{number} of {plan.repetitions}" if number else "loading and warming up"
            progress(f"{side.title}: {what}", number + place / len(sides), rounds)
            try:
                if number:
                    measurement.measure(side)
                else:
                    side.start()
                    side.warm_up(measurement.tasks, whole=plan.is_on_gpu)
            except PeerError as error:
                side.close()
                if side.name == OURS:  # there is nothing to compare with
                    raise
                sides.remove(side)
                failed[side.title] = str(error)
