"""The KV cache."""

from .kv_cache import KVCache

__all__ = ["KVCache"]
