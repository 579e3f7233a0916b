"""Where keys and values live between steps."""

from .kv_cache import KVCache

__all__ = ["KVCache"]
