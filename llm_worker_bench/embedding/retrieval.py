"""The labelled retrieval set of data/retrieval.json, and the metrics of a ranking: nDCG, recall, reciprocal rank.

Forty queries and 120 passages on many topics; a query has one or two relevant passages, and others that share its words
but not its meaning. Relevance is yes or no.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..workload import DATA, read_text

RETRIEVAL = DATA / "retrieval.json"
CUTOFF = 10  # of nDCG
RECALL_CUTOFFS = (1, 3)

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RetrievalSet:
    """Queries, passages, and for each query the numbers of its relevant passages."""

    queries: tuple[str, ...]
    passages: tuple[str, ...]
    relevant: tuple[frozenset[int], ...]

    @staticmethod
    @cache
    def read(path: Path = RETRIEVAL) -> RetrievalSet:
        content = json.loads(read_text(path))
        numbers = {passage["id"]: number for number, passage in enumerate(content["passages"])}
        return RetrievalSet(
            tuple(query["text"] for query in content["queries"]),
            tuple(passage["text"] for passage in content["passages"]),
            tuple(frozenset(numbers[name] for name in query["relevant"]) for query in content["queries"]),
        )

    @property
    def texts(self) -> list[str]:
        """All queries, then all passages."""
        return [*self.queries, *self.passages]

    def evaluate(self, vectors: Vectors) -> dict[str, NDArray[np.float64]]:
        """Return the metrics of each query, from the normalized embeddings of `texts`."""
        queries, passages = np.split(vectors.astype(np.float64), [len(self.queries)])
        rankings = np.argsort(-(queries @ passages.T), axis=1, kind="stable")
        rows = [metrics(ranking.tolist(), relevant) for ranking, relevant in zip(rankings, self.relevant, strict=True)]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def metrics(ranking: Sequence[int], relevant: frozenset[int]) -> Mapping[str, float]:
    """Return nDCG@10, recall@1, recall@3 and the reciprocal rank of one ranking, best first."""
    ranks = [rank for rank, item in enumerate(ranking, 1) if item in relevant]
    gain = sum(1 / np.log2(rank + 1) for rank in ranks if rank <= CUTOFF)
    ideal = sum(1 / np.log2(rank + 1) for rank in range(1, min(len(relevant), CUTOFF) + 1))
    recalls = {f"recall@{k}": sum(rank <= k for rank in ranks) / len(relevant) for k in RECALL_CUTOFFS}
    return {f"ndcg@{CUTOFF}": float(gain / ideal), **recalls, "mrr": 1 / ranks[0] if ranks else 0.0}
