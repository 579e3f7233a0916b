"""A model at work without an engine: sequences of random ids through `Transformer.forward`, then greedy sampling.

All sequences share one KV cache and one flat batch a step; a step takes at most CHUNK tokens. Each sequence has ids of
its own, the same for every run: what is cached of them up to some depth is kept between runs, and only what an answer
has overwritten is computed again. llama-bench leaves sampling out; here it is part of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..backends.types import Array, Batch, Ints
from ..cache import KVCache
from ..engine.request import Request, SamplingParams
from ..engine.runner import CHUNK
from ..engine.sampler import sample
from ..models import Transformer


class Span(NamedTuple):
    """Neighbouring tokens of one sequence."""

    sequence: int
    start: int
    ids: Ints


class Drive:
    """A model and room for `batch` sequences of `capacity` tokens."""

    def __init__(
        self, model: Transformer, capacity: int, batch: int = 1, seed: int = 0, kv_type: str = "float32"
    ) -> None:
        self.model = model
        blocks = -(-capacity // KVCache.default_block_size)
        self.cache = KVCache(model.ops, model.config, batch * blocks, kv_type=kv_type)
        self.block_tables: Ints = np.arange(batch * blocks, dtype=np.int64).reshape(batch, blocks)
        self.ids: Ints = np.random.default_rng(seed).integers(0, model.config.vocab_size, (batch, capacity))
        self._cached = [0] * batch  # leading positions whose keys and values are those of `ids`

    def fill(self, depth: int, batch: int) -> None:
        """Bring the first `depth` tokens of the first `batch` sequences into the cache, where they are not there."""
        for sequence in range(batch):
            start = min(self._cached[sequence], depth)
            for spans in _steps([Span(sequence, start, self.ids[sequence, start:depth])]):
                self._forward(spans)
            self._cached[sequence] = max(self._cached[sequence], depth)

    def prefill(self, depth: int, tokens: int, batch: int) -> list[int]:
        """Compute `tokens` of each sequence from `depth` on, and sample the token that follows."""
        wanted = [Span(s, depth, self.ids[s, depth : depth + tokens]) for s in range(batch)]
        chosen = [-1] * batch
        for spans in _steps(wanted):
            logits = self._forward(spans)
            ended = [i for i, span in enumerate(spans) if span.start + len(span.ids) == depth + tokens]
            found = sample(self.model.ops, logits[ended], [_greedy() for _ in ended])
            for i, token in zip(ended, found, strict=True):
                chosen[spans[i].sequence] = token
        for sequence in range(batch):
            self._cached[sequence] = max(self._cached[sequence], depth + tokens)
        return chosen

    def decode(self, depth: int, tokens: int, batch: int) -> list[list[int]]:
        """Generate `tokens` for each sequence from `depth` cached ones: so many steps of one token each.

        The first step computes the sequence's own token at `depth` (at depth 0 it stands for the BOS token).
        """
        requests = [_greedy() for _ in range(batch)]
        pending: Ints = self.ids[:batch, depth]
        for position in range(depth, depth + tokens):
            spans = [Span(s, position, pending[s : s + 1]) for s in range(batch)]
            chosen: list[int] = []
            for first in range(0, batch, CHUNK):
                part = slice(first, first + CHUNK)
                chosen += sample(self.model.ops, self._forward(spans[part]), requests[part])
            for request, token in zip(requests, chosen, strict=True):
                request.tokens.append(token)
            pending = np.array(chosen, np.int64)
        self._cached[:batch] = [min(known, depth) for known in self._cached[:batch]]
        return [request.tokens for request in requests]

    def _forward(self, spans: list[Span]) -> Array:
        """One step; the logits of each span's last token."""
        with np.errstate(all="ignore"):  # overflow shows in the logits, where it is an error
            return self.model.forward(self._batch(spans), self.cache)

    def _batch(self, spans: list[Span]) -> Batch:
        positions = [np.arange(span.start, span.start + len(span.ids), dtype=np.int64) for span in spans]
        tables = self.block_tables[[span.sequence for span in spans]]
        ends = np.cumsum([len(span.ids) for span in spans], dtype=np.int64)
        return Batch(
            ids=np.concatenate([span.ids for span in spans]),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(
                [self.cache.slots(table, at) for table, at in zip(tables, positions, strict=True)]
            ),
            query_start=np.concatenate([[0], ends]).astype(np.int64),
            context_len=np.array([span.start + len(span.ids) for span in spans], np.int64),
            block_table=tables,
            logits_index=ends - 1,
        )


def _greedy() -> Request:
    return Request([], SamplingParams(temperature=0.0), max_tokens=1, seed=0, eos_ids=frozenset())


def _steps(spans: list[Span]) -> Iterator[list[Span]]:
    """Cut spans into steps of at most CHUNK tokens, in order; a step may end one sequence and begin the next."""
    step: list[Span] = []
    room = CHUNK
    for sequence, start, ids in spans:
        while len(ids):
            step.append(Span(sequence, start, ids[:room]))
            start, ids, room = start + min(room, len(ids)), ids[room:], room - min(room, len(ids))
            if room == 0:
                yield step
                step, room = [], CHUNK
    if step:
        yield step
