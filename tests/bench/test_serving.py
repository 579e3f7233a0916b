"""HTTP load on a real server on a real port, and the statistics of a run."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from typing import Any

import numpy as np
import pytest

from llm_worker_bench import baseline
from llm_worker_bench import serving as bench_serving
from llm_worker_bench.http_client import Answer, Client, Target, add_event, api_address
from llm_worker_bench.results import Recorder, Result
from llm_worker_bench.server_process import ServingError
from llm_worker_bench.serving import (
    InterTokenLatencies,
    Limits,
    Load,
    LoadStatistics,
    connect,
    raise_file_limit,
    run,
)
from llm_worker_bench.workload import Job, Lengths, Prompt, Workload
from tests.helpers.openai_server import WORDS, Server, serving


def quiet(what: str, done: float, total: float) -> None:
    assert 0 <= done <= total, what


def workload(requests: int = 4, **changes: Any) -> Workload:
    return Workload(requests, Lengths.parse("5", "i"), Lengths.parse("4", "o"), **changes)


def target(server: Server, **changes: Any) -> Target:
    return Target(Client(api_address(server.url)), "small", **changes)


def measured(server: Server, work: Workload, limits: Limits | None = None, **changes: Any) -> dict[str, Result]:
    recorder = Recorder("serving")
    run(recorder, Load(target(server, **changes), work, limits or Limits(concurrency=2, warm_up=0), quiet))
    found = {result.name: result for result in recorder.results()}
    for result in found.values():
        assert result.low <= result.estimate <= result.high, result
    found["details"] = recorder.details  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("mode", ["ok", "cut", "sized"])
def test_run_counts_what_the_server_counts(endpoint: Any, mode: str) -> None:
    with serving(mode) as server:
        found = measured(server, workload(6), endpoint=endpoint, ignore_eos=True)
    details: Any = found["details"]
    assert found["completed"].estimate == 6
    assert found["errors"].estimate == 0
    assert (details["prompt_tokens"], details["output_tokens"], details["counted_by"]) == (42, 48, "usage")
    seconds = details["duration_s"]
    assert found["request_throughput"].estimate == pytest.approx(6 / seconds, rel=1e-3)
    assert found["output_throughput"].estimate == pytest.approx(48 / seconds, rel=1e-3)
    assert found["total_token_throughput"].estimate == pytest.approx(90 / seconds, rel=1e-3)
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = [found[f"{name}/{which}"].estimate for which in ("median", "p95", "p99")]
        assert values == sorted(values)
        assert found[f"{name}/mean"].fields["count"] == (18 if name == "itl" else 6)
        assert found[f"{name}/mean"].unit == "s"
    assert "queue_delay/mean" not in found
    path, headers, body = server.requests[0]
    assert path == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")
    assert headers["host"] == server.url.removeprefix("http://")
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("small", 4, True, True)
    assert ("messages" in body) == (endpoint == "chat")


def test_run_without_usage_counts_deltas() -> None:
    with serving("silent") as server:
        details: Any = measured(server, workload(3))["details"]
    assert (details["output_tokens"], details["prompt_tokens"], details["counted_by"]) == (12, 15, "chunks")
    with serving() as server:
        measured(server, workload(1), usage=False)
        assert "stream_options" not in server.requests[0][2]
        assert "ignore_eos" not in server.requests[0][2]


def test_run_failures_are_counted_by_kind_and_in_no_latency() -> None:
    modes = ("ok", "busy", "json", "drop", "error", "garbage", "unfinished", "broken", "ok")
    with serving(*modes) as server:
        found = measured(server, workload(9), Limits(concurrency=1, warm_up=0))
    kinds = {"http 503": 1, "protocol": 2, "connect": 1, "server": 1, "truncated": 2}
    assert found["errors"].fields["by_kind"] == kinds
    assert found["errors"].estimate == sum(kinds.values())
    assert found["completed"].estimate == found["ttft/mean"].fields["count"] == found["e2e/p99"].fields["count"] == 2
    details: Any = found["details"]
    assert details["errors"]["http 503"] == ["try later"]
    assert details["errors"]["server"] == ["out of memory"]
    assert details["output_tokens"] == 2 * 2 * len(WORDS)


def test_run_without_a_token_names_no_source_of_counts() -> None:
    with serving("busy") as server:
        details: Any = measured(server, workload(1), Limits(concurrency=1, warm_up=0))["details"]
    assert (details["output_tokens"], details["counted_by"]) == (0, "none")


def test_run_slow_request_is_a_timeout() -> None:
    with serving("hang", "endless", "ok") as server:
        found = measured(server, workload(3), Limits(concurrency=1, timeout=0.3, warm_up=0))
    assert found["errors"].fields["by_kind"] == {"timeout": 2}
    assert found["completed"].estimate == 1


def test_run_reuses_connections_up_to_the_concurrency() -> None:
    with serving(hold=3) as server:
        details: Any = measured(server, workload(12), Limits(concurrency=3, warm_up=0))["details"]
        assert server.most == 3
        assert server.connections == details["connections"] == 3
    with serving(hold=8) as server:
        measured(server, workload(8), Limits(warm_up=0))
        assert server.most == 8


def test_run_at_a_rate_reports_queue_delay() -> None:
    with serving() as server:
        found = measured(server, workload(10, rate=1000.0), Limits(concurrency=1, warm_up=2))
        assert len(server.requests) == 12
    for which in ("mean", "p99"):
        assert found[f"queue_delay/{which}"].estimate >= 0
        assert found[f"e2e_from_arrival/{which}"].estimate >= found[f"e2e/{which}"].estimate
    late = found["queue_delay/mean"].estimate + found["ttft/mean"].estimate
    assert found["ttft_from_arrival/mean"].estimate == pytest.approx(late)


def test_run_with_duration_stops_sending_and_counts_unsent() -> None:
    work = workload(1000, rate=200.0)
    with serving("hang") as server:
        found = measured(server, work, Limits(concurrency=1, timeout=0.5, duration=0.3, warm_up=0))
        assert len(server.requests) == 1
    assert found["unsent"].estimate == work.count_arrivals(0.3) - 1 > 20
    with serving() as server:
        found = measured(server, workload(1_000_000), Limits(concurrency=1, duration=0.2, warm_up=0))
    assert 0 < found["completed"].estimate == len(server.requests) < 1_000_000


def test_run_interrupted_keeps_results() -> None:
    with serving("ok", "ok", "ok", "hang") as server:
        recorder = Recorder("serving")

        def stop(what: str, done: float, total: float) -> None:
            if len(server.requests) > 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(recorder, Load(target(server), workload(9), Limits(concurrency=1, warm_up=0), stop))
    found = {result.name: result for result in recorder.results()}
    assert found["completed"].estimate == 3
    assert found["e2e/mean"].estimate > 0


def test_load_progress_shows_counts() -> None:
    shown: list[str] = []
    with serving("ok", "busy", "ok") as server:
        load = Load(target(server), workload(4), Limits(concurrency=1), lambda what, *_: shown.append(what))
        asyncio.run(load.execute())
    assert shown[0] == "warming up"
    assert shown[-1].startswith("4/4 done · 0 in flight · ")
    assert shown[-1].endswith("tok/s · 1 errors")


def test_connect_lists_models_or_explains_failure() -> None:
    def of(url: str, key: str = "k") -> Any:
        return lambda name: Target(Client(api_address(url), {"Authorization": f"Bearer {key}"}), name)

    with serving(key="k") as server:
        assert connect(of(server.url), None, 5).model == "small"
        assert connect(of(server.url), "other", 5).model == "other"
        with pytest.raises(ServingError, match=r"401: wrong key.*--api-key"):
            connect(of(server.url, "wrong"), "other", 5)
        url = server.url
    with pytest.raises(ServingError, match=r"cannot connect to 127\.0\.0\.1:\d+: Connection refused"):
        connect(of(url), "other", 5)


def test_run_failing_warm_up_raises_before_the_load() -> None:
    with serving("busy") as server:
        with pytest.raises(ServingError, match=r"warm-up request failed \(http 503\): try later"):
            measured(server, workload(50), Limits(warm_up=1))
        assert len(server.requests) == 1


def test_raise_file_limit_too_high_raises() -> None:
    with pytest.raises(ServingError, match="--concurrency"):
        raise_file_limit(1 << 40)


def test_load_statistics_latencies_from_sending_and_from_arrival() -> None:
    answer = Answer(arrivals=[12.0, 12.5, 14.0], ended=14.5, finished=True, output_tokens=6)
    tally = LoadStatistics()
    tally.add_answer(Job(0, 1.0, Prompt("a b"), 9), answer, start=10.0, sent=11.5)
    assert {name: list(values) for name, values in tally.latencies.items()} == {
        "ttft": [0.5], "e2e": [3.0], "tpot": [0.5], "queue_delay": [0.5],
        "ttft_from_arrival": [1.0], "e2e_from_arrival": [3.5],
    }  # fmt: skip
    assert list(tally.itls.values) == [0.5, 1.5]
    assert (tally.prompt_tokens, tally.output_tokens, tally.completed) == (2, 6, 1)


def test_load_statistics_empty_answer_has_ttft_but_no_tpot() -> None:
    answer = Answer()
    add_event(answer, json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}), 3.0)
    tally = LoadStatistics()
    tally.add_answer(Job(0, None, Prompt("a"), 9), answer, start=1.0, sent=2.0)
    assert list(tally.latencies["ttft"]) == [1.0]
    assert "tpot" not in tally.latencies


def test_summarize_percentiles_and_coverage_of_intervals() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(40):
        values = rng.exponential(1.0, 60)
        found = bench_serving.summarize(values, np.arange(60))
        assert found["mean"].value == pytest.approx(values.mean())
        assert found["p95"].value == pytest.approx(np.quantile(values, 0.95))
        covered += found["p95"].low <= -math.log(0.05) <= found["p95"].high
    assert covered >= 34  # 95% of 40, less what chance allows


def test_summarize_resamples_itls_by_request() -> None:
    """Ten answers, each with a pace of its own: a thousand gaps say no more about the mean than ten answers do."""
    rng = np.random.default_rng(6)
    paces = rng.uniform(1, 3, 10)
    values, owners = np.repeat(paces, 100), np.repeat(np.arange(10), 100)
    decode_prompts = bench_serving.summarize(values, owners)["mean"]
    apart = bench_serving.summarize(values, np.arange(1000))["mean"]
    assert decode_prompts.high - decode_prompts.low > 5 * (apart.high - apart.low)


def test_inter_token_latencies_are_sampled_uniformly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serving, "MAX_ITLS", 500)
    gaps = InterTokenLatencies()
    for i in range(5000):
        gaps.add(float(i), i)
    assert len(gaps.values) == 500
    assert list(gaps.values) == [float(owner) for owner in gaps.owners]
    assert abs(np.mean(gaps.values) - 2500) < 250


def test_evenly_chosen_values_are_bounded() -> None:
    assert bench_serving._evenly_chosen(array("d")) == []
    chosen = bench_serving._evenly_chosen(array("d", range(100_000)))
    assert (len(chosen), chosen[0], chosen[-1]) == (bench_serving.MAX_SAVED_VALUES, 0.0, 99_999.0)


def test_change_of_results_without_samples_compares_intervals() -> None:
    def change(low: float, high: float) -> str:
        before = Result("ttft/p95", "s", 1.0, 0.9, 1.1)
        return baseline.compare_results(before, Result("ttft/p95", "s", (low + high) / 2, low, high)).verdict

    assert change(1.0, 1.3) == "within noise"
    assert change(1.2, 1.4) == "regressed"
    assert change(0.5, 0.7) == "improved"
