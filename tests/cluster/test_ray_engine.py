"""Answers through Ray are those of one process, also when engines die or are stopped in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from llm_worker_rbee import LLM

from .conftest import Cluster, actor_ids, child_ids, kill, until
from .streams import bodies, expected, read_all

MAX_TOKENS = 48


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    return expected(llm, bodies(MAX_TOKENS))


def test_answers_are_those_of_one_process(cluster: Cluster, texts: list[str]) -> None:
    assert asyncio.run(read_all(cluster.url, bodies(MAX_TOKENS), lambda: None)) == texts
    assert all(report.stats.num_queried_tokens for report in cluster.reports().values())  # both engines computed


@pytest.mark.parametrize("pids", [actor_ids, child_ids], ids=["actor", "child"])
def test_killed_engine_loses_no_stream(cluster: Cluster, texts: list[str], pids: Callable[[], list[int]]) -> None:
    before = pids()
    assert len(before) == 2
    found = asyncio.run(read_all(cluster.url, bodies(MAX_TOKENS), lambda: kill(before[0])))
    assert found == texts
    cluster.until_healthy(2)
    after = until(lambda: len(found := pids()) == 2 and found)
    assert before[1] in after
    assert before[0] not in after
