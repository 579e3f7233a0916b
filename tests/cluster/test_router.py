"""Requests with one prefix meet in one engine."""

from __future__ import annotations

from .conftest import Cluster, until

NUM_PREFIXES, NUM_ROUNDS, PREFIX_TOKENS = 4, 4, 256
BLOCK = 16


def test_requests_with_one_prefix_meet_in_one_engine(cluster: Cluster) -> None:
    """At random the chance of as many hits is 2 ** -12: each prefix has to stay where it was computed."""
    queried = {name: report.stats.num_queried_tokens for name, report in cluster.reports().items()}
    cached = 0
    for round_ in range(NUM_ROUNDS):
        for prefix in range(NUM_PREFIXES):
            prompt = [1000 * (prefix + 1) + i for i in range(PREFIX_TOKENS)] + [77 + round_]
            usage = cluster.complete(prompt, max_tokens=2)["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == NUM_PREFIXES * (NUM_ROUNDS - 1) * PREFIX_TOKENS

    def are_counted() -> bool:
        now = {name: report.stats.num_queried_tokens for name, report in cluster.reports().items()}
        added = [now[name] - queried[name] for name in now]
        return sum(added) == NUM_PREFIXES * NUM_ROUNDS * (PREFIX_TOKENS + 1) and min(added) > 0  # both had work

    until(are_counted)
