"""The op table and its backends: `ops.py` declares it, `reference.py` defines it, `cpu/` and `cuda/` are fast.

`layers/` and `models/` touch arrays through a `Backend` alone.
"""

from __future__ import annotations

from .ops import OPS, Backend
from .select import BACKENDS, DEVICES, resolve_kv_type, select_backend

__all__ = [
    "BACKENDS",
    "DEVICES",
    "OPS",
    "Backend",
    "resolve_kv_type",
    "select_backend",
]
