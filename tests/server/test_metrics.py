"""Prometheus metrics of real requests."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llm_worker_rbee.server.metrics import Histogram
from tests.helpers.server import Server
from tests.server.conftest import Start

HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds",
)  # fmt: skip
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
    "generation_tokens_total",
)  # fmt: skip


def scraped(server: Server) -> dict[str, float]:
    """Samples by name, and buckets by name and bound."""
    reply = server.http.get("/metrics")
    assert reply.status_code == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            name = sample.name.removeprefix("llm_worker_")
            assert name != sample.name
            found[":".join([name, *sample.labels.values()])] = sample.value
    return found


def test_metrics_count_served_requests(start: Start) -> None:
    server = start()
    before = scraped(server)
    assert all(before[name] == 0 for name in (*GAUGES, *COUNTERS))
    assert before["startup_phase_seconds:weights"] > 0
    config = server.llm.engine.config
    assert before[f"cache_config_info:{config.block_size}:{config.n_blocks}"] == 1
    prompt = "#" * 100
    for _ in range(2):
        body = {"prompt": prompt, "max_tokens": 7, "temperature": 0, "stream": False}
        assert server.post("/v1/jobs", body).json()["tokens_out"] == 7
    after = scraped(server)
    assert after["prompt_tokens_total"] == after["prefix_cache_queries_total"] == 200
    assert after["generation_tokens_total"] == 14
    assert 0 < after["prefix_cache_hits_total"] < 100
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    for name in HISTOGRAMS:
        expected = 12 if name.startswith("inter") else 2
        assert after[f"{name}_count"] == after[f"{name}_bucket:+Inf"] == expected
    assert after["time_to_first_token_seconds_sum"] <= after["e2e_request_latency_seconds_sum"]
    assert 0 < after["request_queue_time_seconds_sum"] <= after["time_to_first_token_seconds_sum"]


def test_metrics_running_gauge_follows_cancel(start: Start) -> None:
    server = start()
    job = server.job(max_tokens=60_000)
    with server.http.stream("GET", f"/v1/jobs/{job}/stream") as stream:
        lines = stream.iter_lines()
        while '"token"' not in next(lines):
            pass
        found = scraped(server)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (1, 0)
        assert found["kv_cache_usage_perc"] > 0
        server.http.delete(f"/v1/jobs/{job}")
    server.require_idle()
    found = scraped(server)
    assert (found["num_requests_running"], found["kv_cache_usage_perc"]) == (0, 0)
    assert found["e2e_request_latency_seconds_count"] == 1


def test_metrics_and_info_compare_predicted_with_measured_steps(start: Start) -> None:
    server = start()
    for _ in range(3):
        server.events(server.job(prompt="#" * 40, max_tokens=20))
    found = scraped(server)
    assert found["engine_steps_total:decode"] > 30
    for kind in ("decode", "prefill"):
        predicted, measured, error = (
            found[f"{name}_total:{kind}"]
            for name in ("step_predicted_seconds", "step_seconds", "step_prediction_error_seconds")
        )
        assert predicted > 0
        assert abs(predicted - measured) <= error * 1.001 + 1e-9
    model = server.http.get("/info").json()["step_time_model"]
    assert list(model) == ["constant", "prefill_constant", "per_token", "per_context"]
    assert model == {term: found[f"step_time_model_seconds:{term}"] for term in model}
    assert sum(model.values()) > 0


def test_metrics_say_whether_drafting_is_paused(start: Start) -> None:
    plain, drafting = start(), start({"speculative": "ngram"})
    assert (scraped(plain)["num_paused_drafters"], scraped(drafting)["num_paused_drafters"]) == (0, 0)
    drafting.http.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 64, "temperature": 0})
    counts = [
        [scraped(server)[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")]
        for server in (plain, drafting)
    ]
    assert counts[0] == [0, 0]
    assert counts[1][0] > 0
    assert counts[1][0] >= counts[1][1]
    for server in (plain, drafting):
        server.llm.engine.draft_control.is_drafting = False
    assert (scraped(plain)["num_paused_drafters"], scraped(drafting)["num_paused_drafters"]) == (0, 1)


def test_metrics_of_two_workers_are_separate(start: Start) -> None:
    one, other = start(), start()
    one.events(one.job())
    assert (scraped(one)["generation_tokens_total"], scraped(other)["generation_tokens_total"]) == (5, 0)


def test_histogram_buckets_are_cumulative() -> None:
    made = Histogram("x_seconds", "X.", (0.1, 1.0))
    for seconds, times in ((0.1, 1), (0.5, 3), (7.0, 1)):
        made.observe(seconds, times)
    found = {sample.labels.get("le", sample.name): sample.value for sample in made.family().samples}
    assert (found["0.1"], found["1.0"], found["+Inf"], found["llm_worker_x_seconds_count"]) == (1, 4, 5, 5)
    assert found["llm_worker_x_seconds_sum"] == pytest.approx(8.6)
