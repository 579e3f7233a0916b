"""Root-mean-square and layer normalisation, alone or fused with the residual addition before them."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.ops import Array, Backend


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    weight: Array  # (width,), or (heads, head_dim) for a norm over all heads
    eps: float

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Normalise over the axes of the weight."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, ops: Backend, x: Array, residual: Array, scale: float = 1.0) -> tuple[Array, Array]:
        """Return (norm, sum), the sum being (residual + x) * scale."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, scale)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    weight: Array  # (width,)
    bias: Array | None
    eps: float

    def __call__(self, ops: Backend, x: Array) -> Array:
        """Normalise over the last axis."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add_and_norm(self, ops: Backend, x: Array, residual: Array, scale: float = 1.0) -> tuple[Array, Array]:
        """Return (norm, sum), the sum being residual + x."""
        assert scale == 1.0  # only RMS norms have one
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
