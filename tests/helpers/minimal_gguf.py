"""GGUF models of a few kilobytes (metadata, tokenizer, tensors of several types) for tests that damage them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llm_worker_rbee.weights.gguf_writer import Raw, TensorLike, Typed, write_gguf
from llm_worker_rbee.weights.quants import BLOCK_TYPES

WIDTH, HEADS, KV_HEADS, D_FF, LAYERS, CONTEXT = 8, 2, 1, 32, 1, 64
HEAD_DIM = WIDTH // HEADS
Metadata = dict[str, Any]
Tensors = dict[str, TensorLike]

SPM: Metadata = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "<0x41>", "▁", "a", "b", "▁a", "ab", "é", "<|x|>"],
    "tokenizer.ggml.scores": np.array([0, 0, 0, 0, 0, -5, -6, -7, -1, -2, -8, 0], np.float32),
    "tokenizer.ggml.token_type": np.array([2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 4], np.int32),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
BPE: Metadata = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "Ġ", "ab", "Ġa", "abc", "<|end|>", "<|im_end|>", "é"],
    "tokenizer.ggml.merges": ["a b", "Ġ a", "ab c"],
    "tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 1, 1, 1, 3, 3, 1], np.int32),
    "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.eot_token_id": 8,
    "tokenizer.ggml.add_bos_token": False,
}
EXTRA_KEYS: dict[str, Metadata] = {
    "llama": {"rope.dimension_count": HEAD_DIM, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "qwen2": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.attn_factor": 1.5,
    },
    "phi3": {"rope.scaling.original_context_length": 16, "attention.sliding_window": 4, "attention.value_length": 4},
    "gemma2": {
        "attention.key_length": HEAD_DIM,
        "attention.sliding_window": 8,
        "attn_logit_softcapping": 50.0,
        "attention.sliding_window_pattern": [True],
        "final_logit_softcapping": 30.0,
        "rope.freq_base_swa": 1e4,
    },
}
TOKENIZERS = {"llama": SPM, "qwen2": BPE, "phi3": SPM, "gemma2": BPE}
FAMILIES = tuple(EXTRA_KEYS)


def metadata(family: str) -> Metadata:
    keys = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": D_FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **EXTRA_KEYS[family],
    }
    named = {f"{family}.{key}": value for key, value in keys.items()}
    return {"general.architecture": family, "general.name": "tiny", **named, **TOKENIZERS[family]}


def quantized(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Raw:
    """Return random blocks with finite scales (an exponent bit of every byte is cleared)."""
    block = BLOCK_TYPES[kind]
    data = rng.integers(0, 256, rows * block.row_bytes(columns), dtype=np.uint8) & np.uint8(0xB7)
    return Raw(kind, (rows, columns), data)


def tensors(family: str, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)

    def normal(*shape: int, kind: type = np.float16) -> np.ndarray[Any, Any]:
        return rng.normal(size=shape).astype(kind)

    q, kv, vocab = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, len(TOKENIZERS[family]["tokenizer.ggml.tokens"])
    out: Tensors = {"token_embd.weight": normal(vocab, WIDTH), "output_norm.weight": normal(WIDTH, kind=np.float32)}
    for i in range(LAYERS):
        p = f"blk.{i}."
        names = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if family == "gemma2" else [])
        out |= {f"{p}{name}.weight": normal(WIDTH, kind=np.float32) for name in names}
        out |= {f"{p}attn_output.weight": normal(WIDTH, q), f"{p}ffn_down.weight": quantized("Q4_0", WIDTH, D_FF, rng)}
        if family == "phi3":
            out |= {f"{p}attn_qkv.weight": normal(q + 2 * kv, WIDTH), f"{p}ffn_up.weight": normal(2 * D_FF, WIDTH)}
            continue
        out |= {
            f"{p}attn_q.weight": normal(q, WIDTH, kind=np.float32),
            f"{p}attn_k.weight": normal(kv, WIDTH),
            f"{p}attn_v.weight": quantized("BF16", kv, WIDTH, rng),
            f"{p}ffn_gate.weight": normal(D_FF, WIDTH),
            f"{p}ffn_up.weight": normal(D_FF, WIDTH),
        }
        if family == "qwen2":
            out |= {f"{p}attn_{x}.bias": normal(n, kind=np.float32) for x, n in (("q", q), ("k", kv), ("v", kv))}
    factors = np.array([1.0, 2.0], np.float32)
    if family == "llama":
        out |= {"rope_freqs.weight": factors, "output.weight": normal(vocab, WIDTH)}
    if family == "phi3":
        out |= {f"rope_factors_{kind}.weight": factors for kind in ("short", "long")}
    return out


def typed_variants(value: Any) -> list[Any]:
    """Return values that a damaged file may hold instead of `value`: every type, every edge."""
    edges: list[Any] = [0, 1, 2, 3, -1, 10**9, 2**32 - 1, 2**64 - 1, -(2**63)]
    floats = (0.0, -1.0, np.nan, np.inf, 1e-38, 3e38, 1e-6, 1.0)
    edges += [Typed(kind, x) for kind in ("float32", "float64") for x in floats]
    edges += [True, "", "x", "\x00", "yarn", "longrope", "linear", "gpt2", "llama", Typed("string", [])]
    edges += [[], [[]], [[1], [2]], ["x"], [1, 2], [7, 7], [True], [-1]]
    edges += [Typed("float32", [np.nan]), Typed("float64", [1e308])]
    if isinstance(value, list | np.ndarray) and len(value):
        edges += [list(value)[:-1], [*value, value[0]], [value[-1]] * len(value), list(value)[::-1], list(value) * 2]
    return edges


def write_split(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorLike], files: int) -> list[Path]:
    """Write a split set next to `path`; the metadata is in the first file."""
    names = list(tensors)
    paths = []
    for number in range(files):
        split = {
            "split.no": Typed("uint16", number),
            "split.count": Typed("uint16", files),
            "split.tensors.count": Typed("int32", len(names)),
        }
        part = {name: tensors[name] for name in names[number::files]}
        target = path.with_name(f"{path.stem}-{number + 1:05d}-of-{files:05d}.gguf")
        paths.append(write_gguf(target, {**(metadata if number == 0 else {}), **split}, part))
    return paths
