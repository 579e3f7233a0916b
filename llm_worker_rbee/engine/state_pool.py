"""The states of sequences, for models with layers that keep a state: which request holds which slot, and snapshots.

A slot holds the state after some number of tokens, in all layers. A step reads one slot of a request and writes others:
it never changes the state that it starts from, so that it can be computed again, and a state is kept by not giving its
slot back. A snapshot is a slot that was published under the hash of the blocks before it; a request that starts from it
reads it and writes elsewhere. Slots are counted, found and evicted like KV blocks. No arrays here.

    request.states: {tokens: slot}  the state that the next step starts from, and the states that steps in flight write
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidRequestError
from .block_pool import BlockPool
from .request import Request, ScheduledTokens

# A running request without drafts has three states: collected, of the step in flight, of the step ahead.
SLOTS_PER_REQUEST = 3
# A prompt's last chunk is split at its last full block only if the snapshot there saves so many blocks.
MIN_SNAPSHOT_BLOCKS = 2
DEFAULT_SNAPSHOTS = 64  # slots in addition to running requests' slots, by default


def default_slots(max_batch: int, draft_tokens: int = 0) -> int:
    """Return the slots for a full batch, with drafts, and some for snapshots."""
    return max_batch * (SLOTS_PER_REQUEST + draft_tokens) + DEFAULT_SNAPSHOTS


class StatePool:
    """`n_slots` slots for at most `max_batch` running requests, and for snapshots of `block_size` tokens' multiples."""

    def __init__(self, n_slots: int, max_batch: int, block_size: int, *, caching: bool = True) -> None:
        if n_slots < SLOTS_PER_REQUEST:
            raise InvalidRequestError(f"n_slots is {n_slots}: a request needs {SLOTS_PER_REQUEST} states", "n_slots")
        self.max_running = min(max_batch, n_slots // SLOTS_PER_REQUEST)
        self.on_publish: Callable[[bytes, list[int]], None] | None = None  # called with a snapshot that lasts
        self._block_size = block_size
        self._pool = BlockPool(n_slots, block_size, caching=caching)

    @property
    def n_slots(self) -> int:
        return self._pool.n_blocks

    @property
    def pool(self) -> BlockPool:
        """The pool of slots."""
        return self._pool

    @property
    def num_spare(self) -> int:
        """Slots that may be pinned: running requests never need them, whatever drafts hold now."""
        needed = self.max_running * SLOTS_PER_REQUEST
        return min(self.n_slots - self._pool.pinned.total(), self._pool.num_free) - needed

    @property
    def num_used(self) -> int:
        """Slots that requests hold."""
        return self._pool.n_blocks - self._pool.num_free

    @property
    def num_snapshots(self) -> int:
        return self._pool.num_cached

    def longest_snapshot(self, hashes: Sequence[bytes]) -> int:
        """Return the number of these blocks in the longest prefix with a snapshot."""
        return next((i for i in range(len(hashes), 0, -1) if self._pool.is_cached(hashes[i - 1])), 0)

    def start(self, request: Request, num_blocks: int) -> None:
        """Let a request start from the snapshot after its first blocks; from the zero state if there are none."""
        if num_blocks:
            (slot,) = self._pool.match([request.hashes[num_blocks - 1]])
            self._pool.acquire([slot], 0)
            request.states = {num_blocks * self._block_size: slot}

    def chunk_stop(self, request: Request, start: int, stop: int) -> int:
        """Return the end of a prompt chunk whose state becomes a snapshot: the end of a full block."""
        size, length = self._block_size, len(request.ids)
        if not self._pool.caching:
            return stop
        least, matched = MIN_SNAPSHOT_BLOCKS * size, request.num_matched_tokens
        if matched < stop and matched - start >= least:
            return matched  # where a prompt with the same beginning went on differently
        if stop < length:
            aligned = stop // size * size
            return aligned if aligned > start else stop
        last = (length - 1) // size * size
        return last if last - start >= least else stop

    def draft_room(self, request: Request, running: Sequence[Request]) -> int:
        """Return the number of drafts of a request with slots that no other request holds or may need."""
        others = sum(max(len(other.states), SLOTS_PER_REQUEST) for other in running if other is not request)
        others += (self.max_running - len(running)) * SLOTS_PER_REQUEST + self._pool.pinned.total()
        return max(0, self.n_slots - others - 2)  # its own: the state at its start, and after the next token

    def prepare(self, scheduled: ScheduledTokens) -> None:
        """Allocate slots for the states that a step writes: after its last token, with drafts after each token."""
        request, start, stop, _ = scheduled
        length = len(request.ids) + (request.pending_row >= 0)
        positions = range(start + 1, stop + 1) if stop > length else range(stop, stop + 1)
        states = request.states
        if stale := [at for at in states if at > start and at not in positions]:  # of drafts, or of a dropped step
            self._pool.release([states.pop(at) for at in stale])
        for at in positions:
            if at not in states:
                slot = self._pool.allocate_one()
                assert slot is not None, "a running request found no slot for its state"
                states[at] = slot

    def publish(self, request: Request) -> None:
        """Enter the states after full blocks into the prefix cache; of the output only the last one is kept."""
        size, prompt = self._block_size, request.num_prompt_tokens
        for at in sorted(request.states):
            if at % size or not size <= at <= request.num_computed_tokens:
                continue
            block_hash = request.hashes[at // size - 1]
            if self._pool.is_cached(block_hash):
                continue
            self._pool.publish(request.states[at], block_hash)
            if at > prompt:
                self._forget(request.output_snapshot)
                request.output_snapshot = block_hash
            elif prompt - at <= size or at == request.num_matched_tokens:  # after the prompt, or before another one
                self._notify(request, at)

    def commit(self, request: Request) -> None:
        """Give back the states before the collected one."""
        states, computed = request.states, request.num_computed_tokens
        if past := [at for at in states if at < computed]:
            self._pool.release([states.pop(at) for at in past])

    def release(self, request: Request) -> None:
        """Give back all slots of a request; its snapshots stay findable."""
        if request.output_snapshot is not None:
            self._notify(request, (request.hashes.index(request.output_snapshot) + 1) * self._block_size)
        self._pool.release(list(request.states.values()))
        request.states, request.output_snapshot = {}, None

    def _notify(self, request: Request, at: int) -> None:
        if self.on_publish is not None:
            size = self._block_size
            self.on_publish(request.hashes[at // size - 1], request.ids[at - size : at])

    def unpublish(self, request: Request) -> None:
        """Remove the snapshots of a failed request's prefix."""
        for block_hash in request.hashes:
            self._forget(block_hash)

    def _forget(self, block_hash: bytes | None) -> None:
        if block_hash is not None:
            self._pool.unpublish(self._pool.match([block_hash]))

    def check(self, running: Sequence[Request]) -> None:
        """Assert that slots and requests agree, for tests and debug runs."""
        self._pool.check([list(request.states.values()) for request in running])
        for request in running:
            computed = request.num_computed_tokens
            assert not computed or computed in request.states, "a request has no state to go on from"
            assert min(request.states, default=computed) >= computed, "a request holds a state from before"
