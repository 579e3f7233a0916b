"""Workloads and prompt files: seeded lengths and arrivals, shared prefixes, lines that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_bench.workload import Lengths, Workload, read_prompts, vocabulary
from llm_worker_rbee.errors import InvalidRequestError


def workload(requests: int = 4, **changes: Any) -> Workload:
    return Workload(requests, Lengths.parse("5", "i"), Lengths.parse("4", "o"), **changes)


def test_workload_requests_depend_on_seed_and_index_alone() -> None:
    work = workload(5, seed=3)
    jobs = list(work.jobs())
    assert jobs[3] == work.job(3) == list(workload(9, seed=3).jobs())[3]
    assert len({job.prompt.text for job in jobs}) == 5
    assert jobs[0] != workload(5, seed=4).job(0)
    assert all(job.prompt.words == 5 and job.max_tokens == 4 and job.arrival is None for job in jobs)
    assert set(" ".join(str(job.prompt.text) for job in jobs).split()) <= set(vocabulary())


@pytest.mark.parametrize(
    ("text", "low", "high"), [("7", 7, 7), ("3-5", 3, 5), ("normal:50,10", 1, 120), ("normal:1,9", 1, 80)]
)
def test_lengths_draw_within_bounds(text: str, low: int, high: int) -> None:
    rng = np.random.default_rng(1)
    drawn = [Lengths.parse(text, "--input-len").draw(rng) for _ in range(500)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    if text == "3-5":
        assert set(drawn) == {3, 4, 5}
    if text == "normal:50,10":
        assert abs(np.mean(drawn) - 50) < 2
        assert abs(np.std(drawn) - 10) < 2


@pytest.mark.parametrize("text", ["", "0", "-3", "5-3", "1e3", "normal:0,1", "normal:5", "9999999", "٣", "3-9999999"])
def test_lengths_parse_invalid_names_the_option(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--output-len"):
        Lengths.parse(text, "--output-len")


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_workload_arrivals_have_rate_and_burstiness(burstiness: float) -> None:
    arrivals = [job.arrival for job in workload(3000, rate=50.0, burstiness=burstiness).jobs()]
    gaps = np.diff(np.array(arrivals, float))
    assert arrivals[0] == 0
    assert abs(gaps.mean() * 50 - 1) < 0.12
    assert abs((gaps.std() / gaps.mean()) ** 2 * burstiness - 1) < 0.3  # a gamma's variance is mean^2 / shape
    assert workload(3000, rate=50.0, burstiness=burstiness).count_arrivals(float(arrivals[100] or 0)) == 100


def test_workload_shares_prefixes_within_a_group() -> None:
    work = workload(6, shared_prefix=20, prefix_groups=2)
    starts = [str(job.prompt.text).split()[:20] for job in work.jobs()]
    assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3]
    assert all(job.prompt.words == 25 for job in work.jobs())
    assert str(work.warm_up(1)[0].prompt.text).split()[:20] not in starts


def test_workload_of_token_ids_has_exact_lengths() -> None:
    work = workload(6, vocab_size=400, shared_prefix=3, prefix_groups=2)
    prompts = [job.prompt for job in work.jobs()]
    assert all(prompt.text is None and prompt.words == 8 for prompt in prompts)
    starts = [(prompt.ids or [])[:3] for prompt in prompts]
    assert starts[0] == starts[2] != starts[1] == starts[3]
    ids = [token for prompt in prompts for token in prompt.ids or ()]
    assert min(ids) >= 100
    assert max(ids) < 300
    assert work.job(4) == workload(9, vocab_size=400, shared_prefix=3, prefix_groups=2).job(4)
    assert len({tuple(prompt.ids or ()) for prompt in prompts}) == 6


def test_read_prompts_of_jsonl_and_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a b c"}\n\n{"messages": [{"role": "user", "content": "x y"}], "max_tokens": 9}\n')
    prompts = read_prompts(path)
    jobs = list(workload(3, prompts=prompts).jobs())
    assert [job.max_tokens for job in jobs] == [4, 9, 4]
    assert [job.prompt.words for job in jobs] == [3, 2, 3]
    (tmp_path / "p.txt").write_text("one\r\n{two\n")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt")] == ["one", "{two"]


@pytest.mark.parametrize(
    "line",
    ["{", "3", "{}", '{"prompt": ""}', '{"prompt": 1}', '{"messages": []}', '{"messages": [{"content": "x"}]}',
     '{"prompt": "x", "messages": []}', '{"prompt": "x", "max_tokens": 0}', '{"prompt": "x", "max_tokens": true}',
     '{"prompt": "x", "top_k": 1}'],
)  # fmt: skip
def test_read_prompts_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(InvalidRequestError, match="line 2"):
        read_prompts(path)
