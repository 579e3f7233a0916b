"""How many threads the kernels use."""

from __future__ import annotations

import numba as nb


def count() -> int:
    """Threads of the kernels of this process."""
    return int(nb.get_num_threads())
