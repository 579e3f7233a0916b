"""Linear attention of the zoo's models as GGUF files hold it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def tile_heads(value: Floats, k_heads: int, v_heads: int, axis: int = 0) -> Floats:
    """Reorder value heads, (key head, one of its values), to (one of its values, key head)."""
    axis %= value.ndim
    shape = value.shape
    parts = value.reshape(*shape[:axis], k_heads, v_heads // k_heads, shape[axis] // v_heads, *shape[axis + 1 :])
    return np.ascontiguousarray(parts.swapaxes(axis, axis + 1).reshape(shape))


def gguf_tensors(name: str, value: Floats, c: Any, *, is_tiled: bool) -> dict[str, Floats]:
    """Return what a tensor of a layer with the gated delta rule is in a GGUF, by name."""
    k_heads, v_heads, role = c.linear_num_key_heads, c.linear_num_value_heads, name.split(".")[2]
    keys = 2 * k_heads * c.linear_key_head_dim
    if role == "ssm_a":
        value = -np.exp(value)
    if role == "ssm_conv1d":
        value = value[:, 0]
    if role == "ssm_in":
        group = v_heads // k_heads * c.linear_value_head_dim
        parts = np.split(value.reshape(k_heads, -1, value.shape[1]), np.cumsum([keys // 2 // k_heads] * 2 + [group]), 1)
        q, k, v, z = (np.ascontiguousarray(part.reshape(-1, value.shape[1])) for part in parts)
        prefix = name.removesuffix("ssm_in.weight")
        return {f"{prefix}attn_qkv.weight": np.concatenate((q, k, v)), f"{prefix}attn_gate.weight": z}
    if not is_tiled or role == "ssm_norm":
        return {name: np.ascontiguousarray(value)}
    if role in ("attn_qkv", "ssm_conv1d"):
        return {name: np.concatenate((value[:keys], tile_heads(value[keys:], k_heads, v_heads)))}
    return {name: tile_heads(value, k_heads, v_heads, 1 if role == "ssm_out" else 0)}


def gguf_keys(c: Any) -> dict[str, Any]:
    """Return the keys of linear attention; none for a model without."""
    if not hasattr(c, "linear_num_key_heads"):
        return {}
    keys = {
        "ssm.conv_kernel": c.linear_conv_kernel_dim, "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads, "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        "full_attention_interval": c.layer_types.index("full_attention") + 1,
    }  # fmt: skip
    sections = c.rope_parameters.get("mrope_section")
    return keys | ({"rope.dimension_sections": [*sections, 0]} if sections else {})
