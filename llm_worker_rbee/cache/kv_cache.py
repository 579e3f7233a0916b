"""The paged K and V tensors of all layers. Nothing here knows a request: who owns which block is accounted elsewhere.

layer.k, layer.v: (blocks, block_size, kv_heads, head_dim);   slot = block * block_size + offset
"""

from __future__ import annotations

from ..backends.types import Ints, KVLayer, Ops
from ..config import ModelConfig
from ..errors import InsufficientMemoryError, human_bytes


class KVCache:
    """`n_blocks` blocks of `block_size` tokens in each layer."""

    default_block_size = 16

    def __init__(self, ops: Ops, config: ModelConfig, n_blocks: int, block_size: int = default_block_size) -> None:
        self.block_size = block_size
        self.n_blocks = n_blocks
        shape = (n_blocks, block_size, config.n_kv_heads, config.head_dim)
        try:
            self.layers: list[KVLayer] = [ops.empty_kv(*shape) for _ in range(config.n_layers)]
        except MemoryError:
            needed = human_bytes(config.kv_bytes(n_blocks * block_size))
            raise InsufficientMemoryError(
                f"not enough memory for the keys and values of {n_blocks * block_size} tokens ({needed}): "
                "ask for fewer tokens (max_tokens) or a smaller context (max_context)"
            ) from None

    def slots(self, block_table: Ints, positions: Ints) -> Ints:
        """Where the tokens at `positions` of a request with this block table are written."""
        return block_table[positions // self.block_size] * self.block_size + positions % self.block_size
