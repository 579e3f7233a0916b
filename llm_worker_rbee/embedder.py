"""The offline API of pooling models: texts in, embeddings or scores out, in this process.

    embedder = Embedder()                                   # a path, a short name, or hf:owner/repo[:quant]
    embedder.embed(["One text", "another"])                 # float32, (2, dimension)
    embedder.similarity(embedder.embed("a query"), embedder.embed(documents))
    Reranker("bge-reranker.gguf").rank("a query", documents)

Inputs are packed by length into steps; a row has the same bits alone and among others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from numbers import Integral
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from .backends.ops import Ints
from .config import PoolingOptions
from .engine.pooling_engine import PoolingEngine, Score, finish_embeddings, finish_scores
from .errors import InvalidRequestError
from .load import LoadPhases
from .load_pooling import load_pooling
from .progress import Advance, OnStage, request_progress
from .tokenizer.pooling_text import EncodedPairs
from .weights.hub import DEFAULT_EMBEDDING_MODEL, Progress

__all__ = ["Embedder", "RankResult", "Reranker"]

Floats = NDArray[np.float32]
Text = str | Sequence[int] | NDArray[Any]
OnProgress = Callable[[int, int, int], None]  # finished inputs, of how many, their tokens
ShowProgress = bool | OnProgress | None


@dataclass(frozen=True, slots=True)
class RankResult:
    """A document, its place among those that were given, and its score."""

    index: int
    score: float
    document: str


class _PoolingRunner:
    """A loaded pooling model and the engine that packs its steps."""

    _task: str  # embed or rank

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        quantize: str | None = None,
        max_length: int | None = None,
        max_step_tokens: int | None = None,
        deterministic: bool = False,
        progress: Progress | None = None,
        on_stage: OnStage | None = None,
    ) -> None:
        self.loading = LoadPhases(on_stage, progress)
        self.phases = self.loading.seconds
        options = PoolingOptions(
            model=str(model),
            device=device,
            backend=backend,
            threads=threads,
            quantize=quantize,
            max_length=max_length,
            deterministic=deterministic,
            task=self._task,
        )
        loaded = load_pooling(options, self.loading)
        self.checkpoint, self.config, self.pooling = loaded.checkpoint, loaded.config, loaded.pooling
        self.model, self.text, self.quant = loaded.model, loaded.text, loaded.quant
        self.notes = loaded.notes
        budget = loaded.max_step_tokens if max_step_tokens is None else max_step_tokens
        self.engine = PoolingEngine(self.model, budget, self.checkpoint.path.name)
        self.name = self.checkpoint.path.name
        self._width = self.model.output_dim
        self._lock = threading.Lock()  # one call computes at a time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the weights; the object cannot be used afterwards."""
        for name in ("model", "engine", "checkpoint"):
            self.__dict__.pop(name, None)

    @property
    def device(self) -> str:
        """What it computes on: cpu, cuda:0, ..."""
        return self.model.ops.device

    @property
    def backend(self) -> str:
        """The name of the backend: reference, cpu or cuda."""
        return self.model.ops.name

    @property
    def max_length(self) -> int:
        """Tokens of one input at most, special tokens included."""
        return self.text.max_length

    def _compute(self, sequences: Sequence[Ints], token_types: Sequence[Ints] | None, show: ShowProgress) -> Floats:
        """Return the rows of sequences, in their order."""
        if "model" not in self.__dict__:
            raise InvalidRequestError(f"{self.name} is closed: load it again", "model")
        rows = np.empty((len(sequences), self._width), np.float32)
        if not sequences:
            return rows
        with self._lock, _shown_progress(len(sequences), show) as advance:
            self.engine.add(0, sequences, token_types)
            try:
                while self.engine.has_work:
                    for output in self.engine.step():
                        if output.error is not None:
                            raise output.error
                        rows[output.indices] = output.rows
                        tokens = sum(len(sequences[i]) for i in output.indices)
                        advance(requests=len(output.indices), tokens=tokens)
            finally:
                self.engine.cancel(0)
        return rows


class Embedder(_PoolingRunner):
    """A loaded embedding model."""

    _task = "embed"

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Load a model: a path, a short name, `hf:owner/repo[:quant]`, or None for the built-in one.

        Options are `device`, `backend`, `threads` and `quantize` as for `LLM`; `max_length` lowers the tokens of one
        input; `max_step_tokens` is the token budget of a step; `deterministic` makes rows independent of the batch, as
        they always are on the CPU; `progress` is called during downloads, compiling and quantizing, `on_stage` during
        every phase of loading.
        """
        super().__init__(DEFAULT_EMBEDDING_MODEL if model is None else model, **options)

    @property
    def dimension(self) -> int:
        """The values of an embedding."""
        return self._width

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        progress: ShowProgress = None,
    ) -> Floats:
        """Return the embeddings of texts, or of token ids: (n, dimension); of a single one: (dimension,).

        `prompt` is text before each input, `prompt_name` one of the model's own (`prompts`); without both it is the
        model's default. `dimensions` keeps the first values of each row (Matryoshka), then `normalize` (default: as the
        model says) makes its length 1. An input over `max_length` raises, or is cut at its end with `truncate`.
        `progress` shows a bar: None on a terminal, True anywhere; or it is called with three numbers: finished inputs,
        all inputs, finished tokens.
        """
        inputs, is_single = _as_list(texts)
        finish_embeddings(np.empty((0, self.dimension), np.float32), dimensions)  # a wrong value fails at once
        sequences = self.encode(inputs, prompt=prompt, prompt_name=prompt_name, truncate=truncate)
        rows = self._compute(sequences, None, False if is_single and progress is None else progress)
        vectors = finish_embeddings(rows, dimensions, self.pooling.normalize if normalize is None else normalize)
        return vectors[0] if is_single else vectors

    @property
    def prompts(self) -> dict[str, str]:
        """The texts that the model was trained to have before an input, by name."""
        return dict(self.pooling.prompts)

    def tokenize(self, text: str, *, prompt: str | None = None, prompt_name: str | None = None) -> list[int]:
        """Return the ids of a text as the model sees it, special tokens and prompt included."""
        (ids,) = self.encode([text], prompt=prompt, prompt_name=prompt_name)
        return [int(token) for token in ids]

    def similarity(self, a: Any, b: Any) -> Floats:
        """Return the similarity of each embedding of `a` to each of `b`, as the model says: cosine, dot, ..."""
        return similarity(a, b, self.pooling.similarity)

    def encode(
        self,
        inputs: Sequence[Any],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> list[Ints]:
        """Return the ids of texts, or check ids: what `embed` computes."""
        if prompt is not None and prompt_name is not None:
            raise InvalidRequestError("prompt and prompt_name exclude each other: give one of them", "prompt")
        if all(isinstance(item, str) for item in inputs):
            before = self.text.prompt(prompt_name) if prompt is None else prompt
            return self.text.encode_batch(inputs, prompt=before, truncate=truncate) if inputs else []
        if prompt or prompt_name:
            raise InvalidRequestError(
                "a prompt goes before a text, not before token ids: put it into the ids", "prompt"
            )
        return self.text.check_ids([_check_ids(i, item) for i, item in enumerate(inputs)], truncate=truncate)


class Reranker(_PoolingRunner):
    """A loaded reranker: a cross-encoder, or a decoder that judges pairs."""

    _task = "rank"

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load a reranker: a path, a short name or `hf:owner/repo[:quant]`; options as for `Embedder`."""
        super().__init__(model, **options)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        progress: ShowProgress = None,
    ) -> list[RankResult]:
        """Return the documents with their scores, the best first; with `top_n` only so many.

        A pair over `max_length` raises, or its document is cut at its end with `truncate`.
        """
        if top_n is not None and top_n < 1:
            raise InvalidRequestError(f"top_n is {top_n}: it must be 1 or more", "top_n")
        documents = _check_texts(documents, "documents")
        pairs = self.text.encode_pairs(_check_text(query, "query"), documents, truncate=truncate)
        scores = self._scores(pairs, progress)
        order = np.argsort(-scores, kind="stable")[:top_n]
        return [RankResult(int(i), float(scores[i]), documents[i]) for i in order]

    def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, progress: ShowProgress = None
    ) -> Floats:
        """Return the score of each pair of a query and a document: (n,)."""
        encoded = EncodedPairs([], [])
        for query, group in groupby(pairs, key=lambda pair: _check_text(pair[0], "query")):
            documents = _check_texts([document for _, document in group], "documents")
            batch = self.text.encode_pairs(query, documents, truncate=truncate)
            encoded.ids.extend(batch.ids)
            encoded.token_types.extend(batch.token_types)
        return self._scores(encoded, progress)

    def _scores(self, pairs: EncodedPairs, show: ShowProgress) -> Floats:
        return finish_scores(self._compute(pairs.ids, pairs.token_types, show), cast(Score, self.pooling.score))


def similarity(a: Any, b: Any, kind: str = "cosine") -> Floats:
    """Return the similarities of the rows of `a` and `b`: cosine, dot, or the negative euclidean or manhattan distance.

    A single row on a side has no axis of its own in the result.
    """
    left, right = (np.atleast_2d(np.asarray(rows, np.float32)) for rows in (a, b))
    if left.shape[1] != right.shape[1]:
        raise InvalidRequestError(f"embeddings of {left.shape[1]} and of {right.shape[1]} values cannot be compared")
    if kind == "cosine":
        scores = finish_embeddings(left) @ finish_embeddings(right).T
    elif kind == "dot":
        scores = left @ right.T
    elif kind == "euclidean":
        scores = -np.stack([np.linalg.norm(right - row, axis=1) for row in left])
    else:
        scores = -np.stack([np.abs(right - row).sum(axis=1) for row in left])
    shape = np.shape(a)[:-1] + np.shape(b)[:-1]
    return np.asarray(scores, np.float32).reshape(shape)


@contextmanager
def _shown_progress(total: int, show: ShowProgress) -> Iterator[Advance]:
    if not callable(show):
        with request_progress(total, show, what="embedding", noun="inputs") as advance:
            yield advance
        return
    done = num_tokens = 0

    def report(*, requests: int = 0, tokens: int = 0) -> None:
        nonlocal done, num_tokens
        done, num_tokens = done + requests, num_tokens + tokens
        show(done, total, num_tokens)

    yield report


def _as_list(texts: Any) -> tuple[list[Any], bool]:
    """Return the inputs, and whether a single one was given, a text or its ids."""
    if isinstance(texts, str):
        return [texts], True
    if isinstance(texts, (bytes, bytearray)) or not isinstance(texts, (Sequence, np.ndarray)):
        raise InvalidRequestError(f"texts must be text, token ids or a list of them, not {_type(texts)}", "texts")
    is_single = len(texts) > 0 and isinstance(texts[0], Integral)
    return ([texts], True) if is_single else (list(texts), False)


def _check_ids(i: int, ids: Any) -> Any:
    array = np.asarray(ids) if isinstance(ids, (Sequence, np.ndarray)) and not isinstance(ids, str) else np.empty(())
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(f"input {i} must be text, or as all others a list of token ids", "texts")
    return array


def _check_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} must be text, not {_type(text)}", name)
    return text


def _check_texts(texts: Any, name: str) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InvalidRequestError(f"{name} must be a list of texts, not {_type(texts)}", name)
    for i, text in enumerate(texts):
        _check_text(text, f"{name}[{i}]")
    return list(texts)


def _type(value: object) -> str:
    return type(value).__name__
