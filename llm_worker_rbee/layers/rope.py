"""RoPE tables: every supported scaling becomes one table of inverse frequencies. The rotation itself is an op.

Pairs are (i, i + half); files with neighbouring pairs have their q and k rows permuted at load.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..backends.ops import RopeTable
from ..config import MIN_ROPE_FACTOR, ModelConfig, RopeScaling
from ..errors import ModelFileError

Floats = NDArray[np.float32]


def rope_table(config: ModelConfig, *, local: bool, max_context: int, freq_factors: Floats | None = None) -> RopeTable:
    """Return the table of a layer: `local` is a layer with a window, `freq_factors` a tensor of the file."""
    if local and (config.rope_local_base or config.window_rope_dim):
        base, dim = config.rope_local_base or config.rope_base, config.window_rope_dim or config.rope_dim
        return _with_temperature(RopeTable(inverse_frequencies(base, dim), 1.0), config)
    inv_freq = inverse_frequencies(config.rope_base, config.rope_dim)
    if freq_factors is not None:
        inv_freq = _divide(inv_freq, freq_factors, "rope_freqs.weight")
    return _with_temperature(scaled_table(inv_freq, config.rope_base, config.rope_scaling, max_context), config)


def still_table(config: ModelConfig) -> RopeTable:
    """Return the table of a layer without RoPE: all rotations are by 0."""
    return _with_temperature(RopeTable(np.zeros(config.rope_dim // 2, np.float32), 1.0), config)


def _with_temperature(table: RopeTable, config: ModelConfig) -> RopeTable:
    beta, length = config.temperature_beta, config.rope_scaling.original_context
    return table._replace(temperature_beta=beta, temperature_length=length) if beta else table


def section_axes(sections: tuple[int, ...], pairs: int, *, alternates: bool) -> NDArray[np.int64]:
    """Return the axis of each pair of M-RoPE: 0 time, 1 row, 2 column. Pairs that are left over turn by time."""
    axes = np.zeros(pairs, np.int64)
    if alternates:
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes
    stated = np.repeat(np.arange(3), sections[:3])[:pairs]
    axes[: len(stated)] = stated
    return axes


def inverse_frequencies(base: float, rope_dim: int) -> Floats:
    """Return base^(-2i / rope_dim) for each pair i; the power in float64, as its error grows with the position."""
    exponent = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    return np.float32(1) / np.power(np.float64(base), exponent.astype(np.float64)).astype(np.float32)


def scaled_table(inv_freq: Floats, base: float, scaling: RopeScaling, max_context: int) -> RopeTable:
    """Apply a scaling to unscaled frequencies."""
    if scaling.kind == "linear":
        return RopeTable(inv_freq / np.float32(scaling.factor), 1.0)
    if scaling.kind == "llama3":
        return RopeTable(_llama3(inv_freq, scaling), 1.0)
    if scaling.kind == "yarn":
        return RopeTable(_yarn(inv_freq, base, scaling), _yarn_attention(scaling))
    if scaling.kind == "longrope":
        return _longrope(inv_freq, scaling, max_context)
    if scaling.kind == "proportional":
        turned = np.arange(len(inv_freq)) < int(scaling.rotary_fraction * len(inv_freq))
        return RopeTable(np.where(turned, inv_freq / np.float32(scaling.factor), np.float32(0)), 1.0)
    return RopeTable(inv_freq, scaling.attention_factor or 1.0)


def _divide(inv_freq: Floats, factors: Floats, name: str) -> Floats:
    if factors.shape != inv_freq.shape:
        raise ModelFileError(f"{name} has {factors.size} values, the rotary embedding {inv_freq.size} pairs")
    if not np.isfinite(factors).all() or (factors < MIN_ROPE_FACTOR).any():
        raise ModelFileError(f"{name} holds a value that is not a number of at least {MIN_ROPE_FACTOR}")
    return np.asarray(inv_freq / factors.astype(np.float32), np.float32)


def _llama3(inv_freq: Floats, s: RopeScaling) -> Floats:
    """Stretch long wavelengths by the factor, keep short ones, and blend between."""
    wavelength = 2 * math.pi / inv_freq
    blend = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return np.asarray((1 - blend) * inv_freq / s.factor + blend * inv_freq, np.float32)


def _yarn(inv_freq: Floats, base: float, s: RopeScaling) -> Floats:
    """Keep the frequency of fast pairs, stretch slow ones, with a ramp between two pair indices."""
    dim = 2 * inv_freq.shape[0]

    def pair_with(rotations: float) -> float:
        return float(dim * math.log(s.original_context / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = pair_with(s.beta_fast), pair_with(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    return np.asarray(inv_freq / np.float32(s.factor) * ramp + inv_freq * (1 - ramp), np.float32)


def _yarn_attention(s: RopeScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim)
    return yarn_mscale(s.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return YaRN's factor of attention for a stretch by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(inv_freq: Floats, s: RopeScaling, max_context: int) -> RopeTable:
    """Use short factors up to the original context, else long ones; chosen once by the maximum context."""
    factors = s.long_factors if max_context > s.original_context else s.short_factors
    attention = s.attention_factor
    if attention is None:
        attention = 1.0 if s.factor <= 1 else math.sqrt(1 + math.log(s.factor) / math.log(s.original_context))
    return RopeTable(_divide(inv_freq, np.array(factors, np.float32), "rope scaling 'longrope'"), attention)
