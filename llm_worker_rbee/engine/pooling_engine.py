"""The engine of a pooling model: packs sequences of many requests into steps, and returns one row for each.

A sequence is never split over steps, and nothing is kept between them. Requests take turns: each adds one sequence to a
step at a time, the longest that still fits, so a request of one text finishes at once while one of thousands runs, and
the sequences of a step have similar lengths. The bits of a row do not depend on the other rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..backends.ops import Ints
from ..errors import InferenceError, InvalidRequestError, WorkerError

Floats = NDArray[np.float32]
Score = Literal["sigmoid", "softmax", "identity"]
BLOCK_SIZE = 16  # tokens: sequences take whole blocks of the workspace
MAX_STEP_SEQUENCES = 512


class PoolingRunner(Protocol):
    """The model's interface for the engine."""

    def run(self, sequences: Sequence[Ints], token_types: Sequence[Ints] | None = None) -> Floats:
        """Return a row for each sequence."""


class PoolingOutput(NamedTuple):
    """Rows of one request that a step computed, or the error that ended it."""

    id: int
    indices: list[int]  # of its sequences
    rows: Floats
    error: WorkerError | None = None


@dataclass(slots=True, eq=False)
class _Request:
    id: int
    sequences: Sequence[Ints]
    token_types: Sequence[Ints] | None
    waiting: list[int]  # indices of its sequences, the shortest first
    sizes: list[int]  # of these, in tokens of whole blocks

    def take(self, budget: int) -> int | None:
        """Return the longest waiting sequence within a budget, if there is one."""
        if not (at := bisect_right(self.sizes, budget)):
            return None
        del self.sizes[at - 1]
        return self.waiting.pop(at - 1)

    def inputs(self, i: int) -> tuple[Ints, Ints | None]:
        return self.sequences[i], None if self.token_types is None else self.token_types[i]


class PoolingEngine:
    """Queues requests and computes them step by step. `name` is the model's, for errors."""

    def __init__(self, model: PoolingRunner, max_step_tokens: int, name: str = "the model") -> None:
        if max_step_tokens < 1:
            raise InvalidRequestError(f"max_step_tokens is {max_step_tokens}: it must be 1 or more", "max_step_tokens")
        self._model, self._name = model, name
        self._max_step_tokens = max(max_step_tokens, BLOCK_SIZE)
        self._queue: deque[_Request] = deque()  # the first one is sure of a place in the next step
        self.num_steps = self.num_sequences = self.num_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def add(self, request_id: int, sequences: Sequence[Ints], token_types: Sequence[Ints] | None = None) -> None:
        """Queue the sequences of a request, none of them empty."""
        if not sequences or not all(map(len, sequences)):
            raise InvalidRequestError("a request to a pooling model needs sequences of one token or more", "input")
        waiting = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        sizes = [_size(sequences[i]) for i in waiting]
        self._queue.append(_Request(request_id, sequences, token_types, waiting, sizes))

    def cancel(self, request_id: int) -> None:
        """Drop a request if it is queued."""
        self._queue = deque(request for request in self._queue if request.id != request_id)

    def step(self) -> list[PoolingOutput]:
        """Compute as many sequences as fit into a step; return the rows by request."""
        packed = self._pack()
        inputs = [request.inputs(i) for request, i in packed]
        sequences = [ids for ids, _ in inputs]
        given_types = [kinds for _, kinds in inputs]
        token_types = None
        if any(kinds is not None for kinds in given_types):
            token_types = [
                np.zeros(len(ids), np.int64) if kinds is None else kinds
                for ids, kinds in zip(sequences, given_types, strict=True)
            ]
        rows = self._model.run(sequences, token_types)
        self.num_steps += 1
        self.num_sequences += len(sequences)
        self.num_tokens += sum(map(len, sequences))
        outputs = self._outputs(packed, rows)
        failed = {output.id for output in outputs if output.error is not None}
        self._queue = deque(request for request in self._queue if request.waiting and request.id not in failed)
        self._queue.rotate(-1)
        return outputs

    def _pack(self) -> list[tuple[_Request, int]]:
        """Take the sequences of a step out of their requests, and return them by length."""
        first = self._queue[0]
        packed = [(first, longest)] if (longest := first.take(1 << 62)) is not None else []
        budget = self._max_step_tokens - sum(_size(request.sequences[i]) for request, i in packed)
        turns = deque([*list(self._queue)[1:], first])
        while turns and budget >= BLOCK_SIZE and len(packed) < MAX_STEP_SEQUENCES:
            request = turns.popleft()
            if (taken := request.take(budget)) is not None:
                packed.append((request, taken))
                budget -= _size(request.sequences[taken])
                turns.append(request)
        return sorted(packed, key=lambda item: len(item[0].sequences[item[1]]))

    def _outputs(self, packed: list[tuple[_Request, int]], rows: Floats) -> list[PoolingOutput]:
        places: dict[int, list[int]] = {}
        for place, (request, _) in enumerate(packed):
            places.setdefault(request.id, []).append(place)
        outputs = []
        for request_id, positions in places.items():
            values = np.ascontiguousarray(rows[positions], np.float32)
            error = None
            if not np.isfinite(values).all():
                error = InferenceError(f"{self._name} gave values that are not numbers: its weights may be damaged")
            outputs.append(PoolingOutput(request_id, [packed[place][1] for place in positions], values, error))
        return outputs


def _size(ids: Ints) -> int:
    return -(-len(ids) // BLOCK_SIZE) * BLOCK_SIZE


def finish_embeddings(rows: Floats, dimensions: int | None = None, normalize: bool = True) -> Floats:
    """Return embeddings: the first `dimensions` values of each row (Matryoshka), then of length 1 if `normalize`."""
    width = rows.shape[1]
    if dimensions is not None and not 1 <= dimensions <= width:
        raise InvalidRequestError(f"dimensions is {dimensions}: the model gives 1 to {width}", "dimensions")
    rows = np.asarray(rows[:, :dimensions], np.float32)
    if not normalize:
        return rows
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    normalized: Floats = (rows / np.maximum(norms, 1e-12)[:, None]).astype(np.float32)
    return normalized


def finish_scores(rows: Floats, score: Score = "sigmoid") -> Floats:
    """Return a score for each row of logits: of its first label, among two ("yes", "no") with "softmax"."""
    logits = rows.astype(np.float64)
    if score == "softmax" and logits.shape[1] > 1:
        return (1 / (1 + np.exp(np.clip(logits[:, 1] - logits[:, 0], -700, 700)))).astype(np.float32)
    values = logits[:, 0]
    if score == "identity":
        return values.astype(np.float32)
    return (1 / (1 + np.exp(-np.clip(values, -700, 700)))).astype(np.float32)
