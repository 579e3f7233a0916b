"""Quantization mixes (Q4_K_M, Q3_K_L, ...): the block type of each tensor, as a table of rules. No quantizing here.

The rules follow llama.cpp's llama-quant.cpp (2026-08) without an importance matrix, for models of fewer than 80
layers; checked against files that its quantizer wrote. Routers, weights of convolutions and the projection of
per-layer embeddings stay float32. `attn_v` counts all layers, where llama.cpp counts the layers that have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..errors import InvalidRequestError
from .checkpoint import Checkpoint
from .quants import BLOCK_TYPES

OUTPUT, EMBEDDING, LAYER_EMBEDDING = "output", "token_embd", "per_layer_token_embd"
# A fused matrix gets the type of its most sensitive part; experts get the type of a dense MLP.
SAME_ROLES = {"attn_qkv": "attn_v", "ffn_down_exps": "ffn_down", "ffn_down_shexp": "ffn_down"}
FLOAT_ROLES = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "per_layer_model_proj")  # never quantized
EXPERT_ROLES = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")
FLOAT_TYPES = ("F32", "F16", "BF16")
MIN_GROUPED_HEADS = 4  # query heads per KV head from which on `attn_v` is small enough for more bits
EIGHT_EXPERTS = 8  # as Mixtral has them: its attention is small in comparison and gets more bits


@dataclass(frozen=True, slots=True)
class Place:
    """The inputs of the rules: the layer, the number of layers, query heads per KV head, experts."""

    layer: int
    n_layers: int
    heads_per_kv: int
    experts: int = 0


Condition = Callable[[Place], bool]
Rules = tuple[tuple[Condition, str], ...]  # the first that applies gives the type


def _always(place: Place) -> bool:
    return True


def _has_grouped_heads(place: Place) -> bool:
    return place.heads_per_kv >= MIN_GROUPED_HEADS


def _has_eight_experts(place: Place) -> bool:
    return place.experts == EIGHT_EXPERTS


def _first_layers(layers: int) -> Condition:
    return lambda place: place.layer < layers


def _first_fraction(of: int) -> Condition:
    return lambda place: place.layer < place.n_layers // of


def _use_more_bits(place: Place) -> bool:
    """Return True for the first and last eighth of the layers and every third one between."""
    eighth = place.n_layers // 8
    outside = place.layer < eighth or place.layer >= 7 * place.n_layers // 8
    return outside or (place.layer - eighth) % 3 == 2


@dataclass(frozen=True, slots=True)
class Mix:
    """The base type, llama.cpp's number of the mix, and rules for matrices that get another type."""

    base: str
    file_type: int  # general.file_type
    rules: Mapping[str, Rules] = field(default_factory=dict)


_IQ4: dict[str, Rules] = {"attn_v": ((_has_grouped_heads, "Q5_K"),), "ffn_down": ((_first_fraction(8), "Q5_K"),)}
_MEDIUM: dict[str, Rules] = {"attn_v": ((_use_more_bits, "Q6_K"),), "ffn_down": ((_use_more_bits, "Q6_K"),)}
_BASIC: dict[str, Mix] = {
    "F32": Mix("F32", 0),
    "F16": Mix("F16", 1),
    "BF16": Mix("BF16", 32),
    "Q4_0": Mix("Q4_0", 2),
    "Q4_1": Mix("Q4_1", 3),
    "Q5_0": Mix("Q5_0", 8),
    "Q5_1": Mix("Q5_1", 9),
    "Q8_0": Mix("Q8_0", 7),
    "Q2_K": Mix(
        "Q2_K",
        10,
        {
            "attn_v": ((_has_grouped_heads, "Q4_K"), (_always, "Q3_K")),
            "attn_output": ((_always, "Q3_K"),),
            "ffn_down": ((_always, "Q3_K"),),
        },
    ),
    "Q3_K_S": Mix("Q3_K", 11),
    "Q3_K_M": Mix(
        "Q3_K",
        12,
        {
            "attn_v": ((_first_layers(2), "Q5_K"), (_always, "Q4_K")),
            "attn_output": ((_always, "Q4_K"),),
            "ffn_down": ((_first_fraction(16), "Q5_K"), (_always, "Q4_K")),
        },
    ),
    "Q3_K_L": Mix("Q3_K", 13, dict.fromkeys(("attn_v", "attn_output", "ffn_down"), ((_always, "Q5_K"),))),
    "Q4_K_S": Mix("Q4_K", 14, {"attn_v": ((_first_layers(4), "Q5_K"),), "ffn_down": ((_first_fraction(8), "Q5_K"),)}),
    "Q4_K_M": Mix("Q4_K", 15, _MEDIUM),
    "Q5_K_S": Mix("Q5_K", 16),
    "Q5_K_M": Mix("Q5_K", 17, _MEDIUM),
    "Q6_K": Mix("Q6_K", 18),
    "IQ4_NL": Mix("IQ4_NL", 25, _IQ4),
    "IQ4_XS": Mix("IQ4_XS", 30, _IQ4),
}
# In these mixes, the output projection of attention, too, gets more bits in models with eight experts.
_EIGHT_EXPERTS_OUTPUT = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")


def _with_rules_of_experts(name: str, mix: Mix) -> Mix:
    if mix.base in FLOAT_TYPES:
        return mix
    kinds = dict.fromkeys(("attn_v", "attn_k"), "Q8_0")
    kinds |= {"attn_output": "Q5_K"} if name in _EIGHT_EXPERTS_OUTPUT else {}
    first = {role: ((_has_eight_experts, kind), *mix.rules.get(role, ())) for role, kind in kinds.items()}
    return replace(mix, rules={**mix.rules, **first})


# MXFP4_MOE is how gpt-oss is distributed.
MIXES = {name: _with_rules_of_experts(name, mix) for name, mix in _BASIC.items()}
MIXES["MXFP4_MOE"] = Mix("Q8_0", 38, dict.fromkeys(EXPERT_ROLES, ((_always, "MXFP4"),)))
# Replacement for a type whose block does not divide the row.
FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


def find_mix(name: str) -> Mix:
    """Return the mix of this name."""
    if name not in MIXES:
        raise InvalidRequestError(f"unknown type mix {name!r}: use one of {', '.join(MIXES)}", "synthetic")
    return MIXES[name]


def matrix_type(mix: Mix, role: str, columns: int, place: Place, *, tied: bool) -> str:
    """Return the block type of a matrix by its role (`attn_v`, `ffn_down`, `output`, `token_embd`, ...)."""
    if role in FLOAT_ROLES:
        return "F32"
    if mix.base in FLOAT_TYPES:
        return mix.base
    rules = mix.rules.get(role) or mix.rules.get(SAME_ROLES.get(role, role), ())
    chosen = next((kind for where, kind in rules if where(place)), mix.base)
    if role == OUTPUT or (role in (EMBEDDING, LAYER_EMBEDDING) and tied):
        chosen = "Q8_0" if mix.base == "Q8_0" or columns % BLOCK_TYPES[mix.base].block_size else "Q6_K"
    candidates = (chosen, FALLBACKS.get(chosen, chosen), "F16")
    return next(kind for kind in candidates if columns % BLOCK_TYPES[kind].block_size == 0)


def quant_name(checkpoint: Checkpoint) -> str:
    """Return the mix that the file names (Q4_K_M), or the block type that holds most of its bytes."""
    file_type = checkpoint.metadata.get("general.file_type")
    named = {mix.file_type: name for name, mix in MIXES.items()}
    if isinstance(file_type, int) and file_type in named:
        return named[file_type]
    size = Counter[str]()
    for tensor in checkpoint.tensors.values():
        size[tensor.kind.name] += tensor.nbytes
    return size.most_common(1)[0][0] if size else "none"
