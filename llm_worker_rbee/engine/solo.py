"""One request alone, with blocks of its own: for those who look at logits (accuracy, profiles), not for serving."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backends.ops import Array, Batch, Ints
from ..cache import KVCache
from ..models import Transformer
from .request import Request

CHUNK = 512  # tokens a step: bounds the memory of the scores
CHUNK_WITH_LOGITS = 64  # likewise, where each token's logits are wanted too


class Solo:
    """A model and room for one sequence of at most `capacity` tokens."""

    def __init__(self, model: Transformer, capacity: int, kv_type: str = "float32") -> None:
        self.model = model
        n_blocks = -(-capacity // KVCache.default_block_size)
        self.cache = KVCache(model.ops, model.config, n_blocks, kv_type=kv_type)
        self.block_table: Ints = np.arange(n_blocks, dtype=np.int64)

    def step(self, request: Request, limit: int, *, all_logits: bool = False) -> Array:
        """Compute up to `limit` tokens that are not computed yet; logits of the last of them, or of all."""
        start = request.num_computed_tokens
        ids = request.ids[start : start + limit]
        batch = self.batch(ids, start, all_logits=all_logits)
        with np.errstate(all="ignore"):  # overflow shows in the logits, where it is an error
            logits = self.model.forward(batch, self.cache)
        request.num_computed_tokens += len(ids)
        return logits

    def batch(self, ids: list[int], start: int, *, all_logits: bool) -> Batch:
        """The arrays of one step of one request."""
        n = len(ids)
        positions = np.arange(start, start + n, dtype=np.int64)
        return Batch(
            ids=np.array(ids, np.int64),
            positions=positions,
            slot_mapping=self.cache.slots(self.block_table, positions),
            query_start=np.array([0, n], np.int64),
            context_len=np.array([start + n], np.int64),
            block_table=self.block_table[None, :],
            logits_index=np.arange(n, dtype=np.int64) if all_logits else np.array([n - 1], np.int64),
        )

    def catch_up(self, request: Request, *, all_logits: bool = False) -> Iterator[tuple[int, Array]]:
        """Compute all that is not computed yet; of each chunk its first position and logits, as `step` gives them."""
        limit = CHUNK_WITH_LOGITS if all_logits else CHUNK
        while request.num_computed_tokens < request.num_tokens:
            start = request.num_computed_tokens
            yield start, self.step(request, limit, all_logits=all_logits)
