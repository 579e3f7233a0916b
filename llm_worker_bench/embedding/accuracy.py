"""How far embeddings are from the truth: cosine to float32, and retrieval of the labelled set with both.

The truth is the reference backend on the file's own weights, or sentence-transformers in float32. The texts come from
the labelled set, with pieces of the built-in text of many lengths; all sides get the same texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.embedder import Embedder

from ..peers.programs import PeerError
from ..results import Better, Recorder, Result
from ..statistics import MIN_SAMPLES, RESAMPLES, interval
from ..workload import TEXT, read_text
from . import sides
from .retrieval import RetrievalSet, Vectors
from .suite import find_python

PIECES = 40  # of the built-in text
PIECE_WORDS = (1, 150)  # fit into 256 tokens
SEED = 20261117
TIMEOUT_S = 600.0  # of loading sentence-transformers, and of its answer

Embed = Callable[[Sequence[str]], Vectors]  # texts -> rows of length 1


def pieces() -> list[str]:
    """Return pieces of the built-in text, of one word to many."""
    words, rng = read_text(TEXT).split(), np.random.default_rng(SEED)
    low, high = PIECE_WORDS
    counts = np.geomspace(low, min(high, len(words)), PIECES).astype(int)
    starts = [int(rng.integers(0, len(words) - count + 1)) for count in counts]
    return [" ".join(words[start : start + count]) for start, count in zip(starts, counts, strict=True)]


def embed_with(embedder: Embedder) -> Embed:
    """Return a function that embeds texts with this worker."""
    return lambda texts: sides.normalized(embedder.embed(list(texts), truncate=True, progress=False))


def embed_with_library(recorder: Recorder, folder: Path, python: str, threads: int) -> Embed:
    """Return a function that starts sentence-transformers and embeds texts with it."""
    if not folder.is_dir():
        raise PeerError(f"{sides.SENTENCE_TRANSFORMERS} reads folders only, and {folder.name} is a file")
    side = sides.sentence_transformers_side(find_python([python]), folder, threads, TIMEOUT_S)

    def embed(texts: Sequence[str]) -> Vectors:
        with tempfile.TemporaryDirectory(prefix="llm-worker-rbee-") as scratch, closing(side):
            side.start()
            recorder.details["peers"] = {side.name: f"{side.name} {side.version}"}
            return side.vectors(texts, Path(scratch) / "rows.npy")

    return embed


def compare(recorder: Recorder, embed: Embed, truth: Embed, **fields: Any) -> None:
    """Record the cosines of all texts and the retrieval metrics of both sides."""
    labelled = RetrievalSet.read()
    texts = [*labelled.texts, *pieces()]
    expected, actual = truth(texts), embed(texts)
    cosines = (expected.astype(np.float64) * actual).sum(axis=1)

    def put(name: str, value: float, low: float, high: float, count: int, better: Better = "higher") -> None:
        recorder.add_result(Result(name, "", value, low, high, better, fields={**fields, "count": count}))

    put("cosine/mean", *_mean(cosines), len(texts))
    for name, value in (("min", cosines.min()), ("p1", np.percentile(cosines, 1))):
        put(f"cosine/{name}", float(value), float(value), float(value), len(texts))
    count = len(labelled.texts)
    for suffix, rows in (("", actual), ("/truth", expected)):
        for name, values in labelled.evaluate(rows[:count]).items():
            put(name + suffix, *_mean(values), len(values))
    recorder.details["cosines"] = [float(f"{value:.8g}") for value in cosines]


def _mean(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the mean and its bootstrap interval."""
    mean, count = float(values.mean()), len(values)
    if count < MIN_SAMPLES:
        return mean, mean, mean
    rng = np.random.default_rng(SEED)
    low, high = interval(values[rng.integers(0, count, (RESAMPLES, count))].mean(axis=1), count)
    return mean, min(low, mean), max(high, mean)
