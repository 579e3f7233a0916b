"""The paged K and V tensors of all layers. Ownership of blocks is in engine/block_pool.py.

layer.k, layer.v: (blocks, block_size, kv_heads, head_dim);   slot = block * block_size + offset
Stored as float32, float16, or int8 with a float32 scale for each position and head (`kv_type`); on a GPU as
bfloat16, float16, float32 or float8, in another layout.

A layer with a state instead of keys and values has `n_slots` of them; engine/state_pool.py says whose they are.
"""

from __future__ import annotations

from ..backends.ops import KV_TYPES, Backend, Ints, LayerCache
from ..config import ModelConfig
from ..errors import InsufficientMemoryError, InvalidRequestError, human_bytes


class KVCache:
    """`n_blocks` blocks of `block_size` tokens in each layer."""

    default_block_size = 16

    def __init__(
        self,
        ops: Backend,
        config: ModelConfig,
        n_blocks: int,
        block_size: int = default_block_size,
        kv_type: str = KV_TYPES[0],
        n_slots: int = 1,
    ) -> None:
        if kv_type not in ops.kv_types:
            raise InvalidRequestError(f"unknown KV type {kv_type!r}: use one of {', '.join(ops.kv_types)}", "kv_type")
        self.block_size = block_size
        self.n_blocks = n_blocks
        self.kv_type = kv_type
        self.n_slots = n_slots if config.state_bytes else 0
        try:
            owned = {i: self._layer(ops, config, i) for i in range(config.n_layers) if config.kv_source(i) == i}
            # A layer that shares keys and values reads the cache of an earlier layer.
            self.layers: list[LayerCache] = [owned[config.kv_source(i)] for i in range(config.n_layers)]
        except MemoryError:
            needed = human_bytes(config.kv_bytes(n_blocks * block_size, kv_type) + self.n_slots * config.state_bytes)
            raise InsufficientMemoryError(
                f"not enough memory for the keys and values of {n_blocks * block_size} tokens ({needed}): "
                "use a smaller kv_memory, max_context or kv_type"
            ) from None

    def _layer(self, ops: Backend, config: ModelConfig, i: int) -> LayerCache:
        if (shapes := config.state_shapes(i)) is not None:
            return ops.empty_state(self.n_slots, *shapes)
        return ops.empty_kv(self.n_blocks, self.block_size, *config.kv_shape(i), kind=self.kv_type)

    @property
    def nbytes(self) -> int:
        """Bytes, including padding of the backend."""
        return sum(part.nbytes for layer in {id(layer): layer for layer in self.layers}.values() for part in layer)

    def slots(self, block_table: Ints, positions: Ints) -> Ints:
        """Return the slots of the tokens at `positions` of a request with this block table."""
        return block_table[positions // self.block_size] * self.block_size + positions % self.block_size
