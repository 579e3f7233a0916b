"""The labelled set is whole, and the metrics are those of their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llm_worker_bench.embedding.retrieval import RetrievalSet, metrics


def test_set_has_distinct_texts_and_a_relevant_passage_for_each_query() -> None:
    found = RetrievalSet.read()
    assert (len(found.queries), len(found.passages)) == (40, 120)
    assert len(set(found.texts)) == 160
    assert all(1 <= len(known) <= 3 for known in found.relevant)
    assert len(frozenset.union(*found.relevant)) == sum(map(len, found.relevant))  # none answers two queries
    assert all(20 <= len(text) <= 250 for text in found.texts if text not in found.queries)


def test_metrics_of_a_ranking_worked_out_by_hand() -> None:
    found = metrics([7, 3, 9, 5, 1], frozenset({3, 5}))  # ranks 2 and 4
    ideal = 1 + 1 / math.log2(3)
    assert found == pytest.approx(
        {"ndcg@10": (1 / math.log2(3) + 1 / math.log2(5)) / ideal, "recall@1": 0.0, "recall@3": 0.5, "mrr": 0.5}
    )
    assert metrics([*range(20)], frozenset({15})) == {"ndcg@10": 0.0, "recall@1": 0.0, "recall@3": 0.0, "mrr": 1 / 16}
    assert metrics([4, 2], frozenset({9})) == {"ndcg@10": 0.0, "recall@1": 0.0, "recall@3": 0.0, "mrr": 0.0}
    assert set(metrics([6, 1, 2], frozenset({6})).values()) == {1.0}


def test_evaluate_ranks_passages_by_their_dot_product() -> None:
    small = RetrievalSet(("q", "r"), ("a", "b", "c"), (frozenset({1}), frozenset({0, 2})))
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [1, 0], [0.8, 0.6]], np.float32)
    found = small.evaluate(vectors)
    assert found["mrr"].tolist() == [1.0, 1.0]  # b is nearest to q; a, then c, to r
    assert found["recall@3"].tolist() == [1.0, 1.0]
    assert found["recall@1"].tolist() == [1.0, 0.5]
