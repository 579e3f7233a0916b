"""Prefix-aware routing in Ray Serve, by the policy of `token_engine.routing`.

The reports of replicas have their cached blocks and their load, a second old at most; the router of a front
adds the requests that it has sent since. Before the first reports Ray's usual rule decides: the shorter queue of two
random replicas. Ray copies this module into each process: nothing here is shared (see reports.py).
"""

from __future__ import annotations

import random

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..token_engine.routing import Candidate, PrefixIndex, choose
from . import reports
from .reports import SHORT_BYTES, EngineReport, shorten, split_hashes

NUM_ARGUMENTS = 4  # of `Engine.generate`: version, submission, hashes, number of tokens


class ReplicaState:
    """The router's state of a replica: its last report, and the requests sent to it since."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded
        self.report = msgspec.msgpack.decode(encoded, type=EngineReport)
        self._load = self.report.load
        self._index = PrefixIndex()
        self._index.update(stored=split_hashes(self.report.hashes, SHORT_BYTES), removed=())

    def match(self, hashes: list[bytes]) -> Candidate:
        """Return the replica as the policy sees it."""
        return Candidate(self._index.match(hashes) * self.report.block_size, self._load, len(self._index))

    def add(self, hashes: list[bytes], num_tokens: int) -> None:
        """Count a request sent to it, with the number of uncached tokens."""
        self._index.add_pending(hashes)
        self._load += num_tokens


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """The request router of the deployment `Engine`."""

    def initialize_state(self) -> None:
        self._states: dict[ReplicaID, ReplicaState] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        states: dict[ReplicaID, ReplicaState] = {}
        for replica in replicas:
            encoded, before = replica.routing_stats.get(reports.KEY), self._states.get(replica.replica_id)
            if before is not None and before.encoded == encoded:
                states[replica.replica_id] = before
            elif encoded is not None:
                states[replica.replica_id] = ReplicaState(encoded)
        self._states = states
        reports.latest = {replica_id.unique_id: state.report for replica_id, state in states.items()}
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        healthy = [replica for replica in candidate_replicas if self._is_healthy(replica)]
        if not healthy or pending_request is None or len(pending_request.args) < NUM_ARGUMENTS:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        _, _, joined, num_tokens = pending_request.args
        hashes = list(map(shorten, split_hashes(joined)))
        candidates = [self._states[replica.replica_id].match(hashes) for replica in healthy]
        best = choose(candidates)
        self._states[healthy[best].replica_id].add(hashes, num_tokens - candidates[best].num_matched_tokens)
        return [[healthy[best]], [replica for replica in candidate_replicas if replica is not healthy[best]]]

    def _is_healthy(self, replica: RunningReplica) -> bool:
        state = self._states.get(replica.replica_id)
        return state is not None and state.report.status == "healthy"
