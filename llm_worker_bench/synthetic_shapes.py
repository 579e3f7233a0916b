"""The shapes of synthetic models: dimensions, tensors and metadata keys of real ones, with the names of GGUF files.

A model is a row of `SHAPES`. An architecture whose layers differ from the usual ones has a row in `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from llm_worker_rbee.models.families import BY_GGUF

Tensors = dict[str, tuple[int, ...]]  # name in a layer -> shape
NO_KEYS: Mapping[str, Any] = MappingProxyType({})


class Shape(NamedTuple):
    """The dimensions of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    d_ff: int
    vocabulary: int
    context: int
    rope_base: float = 10000.0
    tied: bool = False
    eps: float = 1e-5
    architecture: str = "llama"
    head_dim: int = 0  # 0: width / heads
    window: int = 0  # of sliding-window attention; 0: none
    experts: int = 0  # 0: a dense model
    used_experts: int = 0  # by a token
    expert_ff: int = 0
    keys: Mapping[str, Any] = NO_KEYS  # more metadata of the architecture

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads


MINISTRAL_ROPE = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 16384,
    "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.temperature_scale": 0.1,
}
GPT_OSS_ROPE = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096}
DELTA_NET = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 4096,
    "full_attention_interval": 4,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
}
GEMMA4 = {
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "rope.dimension_count": 512,
    "rope.dimension_count_swa": 256,
    "rope.freq_base_swa": 10000.0,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}


def _encoder(layers: int, width: int, heads: int, vocabulary: int, context: int, pooling: int, eps: float) -> Shape:
    """Return the dimensions of a BERT; `pooling` is llama.cpp's number: 1 mean, 2 cls."""
    keys = {"attention.layer_norm_epsilon": eps, "attention.causal": False, "pooling_type": pooling}
    return Shape(
        layers, width, heads, heads, 4 * width, vocabulary, context, tied=True, eps=eps, architecture="bert", keys=keys
    )


SHAPES: dict[str, Shape] = {
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": Shape(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192, rope_base=500000.0),
    "llama3.2-1b": Shape(16, 2048, 32, 8, 8192, 128256, 131072, rope_base=500000.0, tied=True),
    "llama3.2-3b": Shape(28, 3072, 24, 8, 8192, 128256, 131072, rope_base=500000.0, tied=True),
    "mistral-7b": Shape(32, 4096, 32, 8, 14336, 32000, 32768),
    "ministral3-8b": Shape(
        34, 4096, 32, 8, 14336, 131072, 262144, 1e6, architecture="mistral3", head_dim=128, keys=MINISTRAL_ROPE
    ),
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 5632, 32000, 2048),
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49152, 8192, rope_base=100000.0, tied=True),
    "smolvlm-256m": Shape(30, 576, 9, 3, 1536, 49280, 8192, rope_base=100000.0, tied=True),
    "smollm2-1.7b": Shape(24, 2048, 32, 32, 8192, 49152, 8192, rope_base=130000.0, tied=True),
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 4864, 151936, 32768, 1e6, tied=True, eps=1e-6, architecture="qwen2"),
    "qwen2.5-vl-7b": Shape(
        28, 3584, 28, 4, 18944, 152064, 128000, 1e6, eps=1e-6, architecture="qwen2vl",
        keys={"rope.dimension_sections": [16, 24, 24, 0]},
    ),
    "qwen3-30b-a3b": Shape(
        48, 2048, 32, 4, 6144, 151936, 40960, 1e6, eps=1e-6, architecture="qwen3moe", head_dim=128, experts=128,
        used_experts=8, expert_ff=768,
    ),
    "qwen3.5-9b": Shape(
        32, 4096, 16, 4, 12288, 248320, 262144, 1e7, eps=1e-6, architecture="qwen35", head_dim=256, keys=DELTA_NET
    ),
    "gpt-oss-20b": Shape(
        24, 2880, 64, 8, 2880, 201088, 131072, 150000.0, architecture="gpt-oss", head_dim=64, window=128, experts=32,
        used_experts=4, expert_ff=2880, keys=GPT_OSS_ROPE,
    ),
    "lfm2-2.6b": Shape(30, 2048, 32, 8, 10752, 65536, 128000, 1e6, tied=True, architecture="lfm2"),
    "phi3-mini": Shape(32, 3072, 32, 32, 8192, 32064, 4096, architecture="phi3"),
    "gemma3-4b": Shape(34, 2560, 8, 4, 10240, 262144, 131072, 1e6, True, 1e-6, "gemma3", head_dim=256, window=1024),
    "gemma4-12b": Shape(
        48, 3840, 16, 8, 15360, 262144, 262144, 1e6, True, 1e-6, "gemma4", head_dim=256, window=1024, keys=GEMMA4
    ),
    "minilm": _encoder(6, 384, 12, 30522, 512, 1, 1e-12),
    "bge-large": _encoder(24, 1024, 16, 30522, 512, 2, 1e-12),
    "bge-m3": _encoder(24, 1024, 16, 250002, 8192, 2, 1e-5),
}  # fmt: skip
SEGMENTS = 2  # rows of an encoder's table of token types
FULL_HEAD, FULL_KV_HEADS, FULL_EVERY = 512, 1, 6  # of the layers of Gemma 4 without a window
LFM2_ATTENTION = (2, 5, 9, 13, 17, 21, 24, 27)  # the other layers have a short convolution
SHORT_CONVOLUTION = 3  # tokens


def _usual_layer(s: Shape, layer: int) -> Tensors:
    family, q, kv = BY_GGUF[s.architecture], s.heads * s.head_size, s.kv_heads * s.head_size
    norms = dict.fromkeys(("attn_norm", family.tensors.gguf_mlp_norm) if family.norms.pre else (), s.width)
    norms |= dict.fromkeys(("post_attention_norm", "post_ffw_norm") if family.norms.post else (), s.width)
    if family.attention.qk_norm:
        widths = (q, kv) if family.attention.qk_norm == "wide" else (s.head_size, s.head_size)
        norms |= dict(zip(("attn_q_norm", "attn_k_norm"), widths, strict=True))
    if family.tensors.fused_qkv:
        matrices: Tensors = {"attn_output": (s.width, q), "attn_qkv": (q + 2 * kv, s.width)}
    else:
        matrices = _attention(s.width, q, kv)
    tensors: Tensors = {f"{name}.weight": (width,) for name, width in norms.items()}
    for name, shape in (matrices | _mlp(s, fused=family.tensors.fused_gate_up)).items():
        tensors[f"{name}.weight"] = shape
        if family.attention.qkv_bias and name in ("attn_q", "attn_k", "attn_v"):
            tensors[f"{name}.bias"] = shape[:1]
    return tensors


def _attention(width: int, q: int, kv: int) -> Tensors:
    return {"attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q)}


def _mlp(s: Shape, *, fused: bool = False) -> Tensors:
    if s.experts:
        up, down = (s.experts, s.expert_ff, s.width), (s.experts, s.width, s.expert_ff)
        experts = {"ffn_gate_exps": up, "ffn_up_exps": up, "ffn_down_exps": down}
        return {"ffn_gate_inp": (s.experts, s.width), **experts}
    if fused:
        return {"ffn_up": (2 * s.d_ff, s.width), "ffn_down": (s.width, s.d_ff)}
    return {"ffn_gate": (s.d_ff, s.width), "ffn_up": (s.d_ff, s.width), "ffn_down": (s.width, s.d_ff)}


def _layer(norms: Mapping[str, int], matrices: Tensors) -> Tensors:
    weights = {**{name: (width,) for name, width in norms.items()}, **matrices}
    return {f"{name}.weight": shape for name, shape in weights.items()}


def _gpt_oss_layer(s: Shape, layer: int) -> Tensors:
    matrices = _attention(s.width, s.heads * s.head_size, s.kv_heads * s.head_size) | _mlp(s)
    norms = {"attn_norm": s.width, "post_attention_norm": s.width, "attn_sinks": s.heads}
    return _layer(norms, matrices) | {f"{name}.bias": shape[:-1] for name, shape in matrices.items()}


def _lfm2_layer(s: Shape, layer: int) -> Tensors:
    norms = {"attn_norm": s.width, "ffn_norm": s.width}
    if layer in LFM2_ATTENTION:
        norms |= {"attn_q_norm": s.head_size, "attn_k_norm": s.head_size}
        mixer = _attention(s.width, s.width, s.kv_heads * s.head_size)
    else:
        mixer = {
            "shortconv.conv": (s.width, SHORT_CONVOLUTION),
            "shortconv.in_proj": (3 * s.width, s.width),
            "shortconv.out_proj": (s.width, s.width),
        }
    return _layer(norms, mixer | _mlp(s))


def _qwen35_layer(s: Shape, layer: int) -> Tensors:
    norms, q, keys = {"attn_norm": s.width, "post_attention_norm": s.width}, s.heads * s.head_size, s.keys
    if (layer + 1) % keys["full_attention_interval"] == 0:  # queries with their gates
        mixer = _attention(s.width, 2 * q, s.kv_heads * s.head_size) | {"attn_output": (s.width, q)}
        return _layer(norms | {"attn_q_norm": s.head_size, "attn_k_norm": s.head_size}, mixer | _mlp(s))
    heads, size, values = keys["ssm.time_step_rank"], keys["ssm.state_size"], keys["ssm.inner_size"]
    channels = 2 * keys["ssm.group_count"] * size + values
    mixer = {
        "attn_qkv": (channels, s.width),
        "attn_gate": (values, s.width),
        "ssm_beta": (heads, s.width),
        "ssm_alpha": (heads, s.width),
        "ssm_out": (s.width, values),
        "ssm_conv1d": (channels, keys["ssm.conv_kernel"]),
    }
    return {"ssm_dt.bias": (heads,), "ssm_a": (heads,), **_layer(norms | {"ssm_norm": size}, mixer | _mlp(s))}


def _gemma4_layer(s: Shape, layer: int) -> Tensors:
    """Layers without a window have fewer, larger heads, whose values are the keys."""
    is_full = (layer + 1) % FULL_EVERY == 0
    size, kv_heads = (FULL_HEAD, FULL_KV_HEADS) if is_full else (s.head_size, s.kv_heads)
    norms = dict.fromkeys(("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), s.width)
    norms |= {"attn_q_norm": size, "attn_k_norm": size, "layer_output_scale": 1}
    mixer = _attention(s.width, s.heads * size, kv_heads * size)
    if is_full:
        del mixer["attn_v"]
    return _layer(norms, mixer | _mlp(s))


def _bert_layer(s: Shape, layer: int) -> Tensors:
    matrices = _attention(s.width, s.width, s.width) | {"ffn_up": (s.d_ff, s.width), "ffn_down": (s.width, s.d_ff)}
    norms = dict.fromkeys(("attn_output_norm", "layer_output_norm"), s.width)
    biases = {name: shape[:1] for name, shape in matrices.items()} | {name: (width,) for name, width in norms.items()}
    return _layer(norms, matrices) | {f"{name}.bias": shape for name, shape in biases.items()}


def _bert_tables(s: Shape) -> Tensors:
    tables = {"position_embd": (s.context, s.width), "token_types": (SEGMENTS, s.width)}
    return {f"{name}.weight": shape for name, shape in tables.items()} | {"token_embd_norm.bias": (s.width,)}


def _lfm2_keys(s: Shape, layers: int) -> dict[str, Any]:
    kv_heads = [s.kv_heads if layer in LFM2_ATTENTION else 0 for layer in range(layers)]
    return {"shortconv.l_cache": SHORT_CONVOLUTION, "attention.head_count_kv": kv_heads}


def _gemma4_keys(s: Shape, layers: int) -> dict[str, Any]:
    sliding = [(layer + 1) % FULL_EVERY > 0 for layer in range(layers)]
    kv_heads = [s.kv_heads if is_sliding else FULL_KV_HEADS for is_sliding in sliding]
    return {"attention.sliding_window_pattern": sliding, "attention.head_count_kv": kv_heads}


class Architecture(NamedTuple):
    """The tensors and keys of an architecture."""

    layer: Callable[[Shape, int], Tensors] = _usual_layer
    keys: Callable[[Shape, int], dict[str, Any]] = lambda s, layers: {}  # of so many layers
    output_norm: str = "output_norm"
    more: Callable[[Shape], Tensors] = lambda s: {}  # float32 tensors outside the layers


ARCHITECTURES = {
    "gpt-oss": Architecture(_gpt_oss_layer),
    "lfm2": Architecture(_lfm2_layer, _lfm2_keys, "token_embd_norm"),
    "qwen35": Architecture(_qwen35_layer),
    "gemma4": Architecture(_gemma4_layer, _gemma4_keys, more=lambda s: {"rope_freqs.weight": (FULL_HEAD // 2,)}),
    "bert": Architecture(_bert_layer, output_norm="token_embd_norm", more=_bert_tables),
}


def architecture(shape: Shape) -> Architecture:
    """Return the tensors and keys of a shape's architecture."""
    return ARCHITECTURES.get(shape.architecture, Architecture())


def architecture_keys(s: Shape, layers: int) -> dict[str, Any]:
    """Return the metadata of the architecture, without its prefix."""
    head, experts = s.head_size, {}
    if s.experts:
        experts = {
            "expert_count": s.experts,
            "expert_used_count": s.used_experts,
            "expert_feed_forward_length": s.expert_ff,
        }
    return {
        "context_length": s.context,
        "embedding_length": s.width,
        "block_count": layers,
        "feed_forward_length": s.d_ff,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.layer_norm_rms_epsilon": s.eps,
        "rope.dimension_count": head,
        "rope.freq_base": s.rope_base,
        "vocab_size": s.vocabulary,
        **({"attention.key_length": head, "attention.value_length": head} if s.head_dim else {}),
        **({"attention.sliding_window": s.window} if s.window else {}),
        **experts,
        **s.keys,
        **architecture(s).keys(s, layers),
    }
