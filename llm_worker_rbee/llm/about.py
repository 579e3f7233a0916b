"""What a model file is called for short: the name of its mix of block types."""

from __future__ import annotations

from collections import Counter

from ..weights import Checkpoint
from ..weights.quant_mix import MIXES

_BY_NUMBER = {mix.file_type: name for name, mix in MIXES.items()}


def quant_name(checkpoint: Checkpoint) -> str:
    """As the file says (Q4_K_M), or the block type that holds most of its bytes."""
    told = checkpoint.metadata.get("general.file_type")
    if isinstance(told, int) and told in _BY_NUMBER:
        return _BY_NUMBER[told]
    size = Counter[str]()
    for tensor in checkpoint.tensors.values():
        size[tensor.kind.name] += tensor.nbytes
    return size.most_common(1)[0][0] if size else "none"
