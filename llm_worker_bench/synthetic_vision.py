"""Projector files of a real shape with random weights, and decoders that know the tokens of images: for speed only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights.gguf_writer import Raw, write_gguf
from llm_worker_rbee.weights.quants import BLOCK_TYPES

from . import synthetic
from .synthetic_shapes import SHAPES

BLOCK_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_out")
IDEFICS_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "\n\n")  # the last one for llama.cpp
MAX_TILES = 4  # of a side
TEMPLATE = (
    "{%% for m in messages %%}{{ m.role }}: {%% if m.content is string %%}{{ m.content }}{%% else %%}"
    "{%% for part in m.content %%}{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}\n{%% endfor %%}assistant: "
)


class Tower(NamedTuple):
    """The dimensions of a tower, and its metadata."""

    layers: int
    width: int
    d_ff: int
    patch: int
    merge: int
    tokens: tuple[str, ...]  # of the decoder's vocabulary
    mark: str  # of an image, in prompts
    keys: Mapping[str, Any]  # of `clip.`

    @property
    def is_gated(self) -> bool:
        return "use_silu" in self.keys


TOWERS = {
    "qwen2.5-vl-7b": Tower(
        32,
        1280,
        3420,
        14,
        2,
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "projector_type": "qwen2.5vl_merger",
            "use_silu": True,
            "vision.image_size": 560,
            "vision.attention.head_count": 16,
            "vision.spatial_merge_size": 2,
            "vision.n_wa_pattern": 8,
            "vision.window_size": 112,
            "vision.image_min_pixels": 3136,
            "vision.image_max_pixels": 12845056,
        },
    ),
    "smolvlm-256m": Tower(
        12,
        768,
        3072,
        16,
        4,
        (*IDEFICS_TOKENS, *(f"<row_{r + 1}_col_{c + 1}>" for r in range(MAX_TILES) for c in range(MAX_TILES))),
        "<image>",
        {
            "projector_type": "idefics3",
            "use_gelu": True,
            "vision.image_size": 512,
            "vision.attention.head_count": 12,
            "vision.projector.scale_factor": 4,
            "vision.preproc_image_size": 2048,
        },
    ),
}


def write_pair(text: str, folder: Path, progress: StepProgress | None = None) -> tuple[Path, Path]:
    """Write the decoder and the projector of `shape:mix`; matrices of the tower have the mix's largest type."""
    spec = synthetic.parse(text)
    if spec.name not in TOWERS:
        raise InvalidRequestError(f"{spec.name!r} has no tower: use one of {', '.join(TOWERS)}", "synthetic")
    tower = TOWERS[spec.name]
    keys = {"tokenizer.chat_template": TEMPLATE % tower.mark}
    model = synthetic.write(spec, folder / "model.gguf", 0, progress, control_tokens=tower.tokens, keys=keys)
    kind = spec.mix.base if spec.mix.base in ("F32", "F16", "BF16", "Q8_0") else "F16"
    return model, _write_projector(tower, SHAPES[spec.name].width, kind, folder / "mmproj.gguf")


def _write_projector(tower: Tower, out: int, kind: str, path: Path) -> Path:
    tensors: dict[str, Any] = {}
    for number, (name, shape) in enumerate(_shapes(tower, out).items()):
        if len(shape) == 1 or name == "v.position_embd.weight":
            value = 0.0 if name.endswith(".bias") else 1.0 if len(shape) == 1 else 0.02
            tensors[name] = np.full(shape, value, np.float32)
        elif len(shape) == 4:
            random = np.random.default_rng(number).standard_normal(shape, np.float32)
            tensors[name] = (random / np.sqrt(np.float32(shape[1] * shape[2] * shape[3]))).astype(np.float16)
        else:
            block = BLOCK_TYPES[kind if shape[-1] % BLOCK_TYPES[kind].block_size == 0 else "F16"]
            tensors[name] = Raw(block.name, shape, synthetic.random_tensor(block, shape, number).data)
    metadata = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True}
    keys = {
        "vision.block_count": tower.layers,
        "vision.embedding_length": tower.width,
        "vision.feed_forward_length": tower.d_ff,
        "vision.patch_size": tower.patch,
        "vision.projection_dim": out,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_mean": [0.5] * 3,
        "vision.image_std": [0.5] * 3,
        **tower.keys,
    }
    return write_gguf(path, {**metadata, **{f"clip.{key}": value for key, value in keys.items()}}, tensors)


def _shapes(tower: Tower, out: int) -> dict[str, tuple[int, ...]]:
    width, merged, pixels = tower.width, tower.width * tower.merge**2, (tower.width, 3, tower.patch, tower.patch)
    biased = {"v.post_ln": ()} if tower.is_gated else {"v.post_ln": (width,), "v.patch_embd": (width,)}
    tensors: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": pixels, "v.post_ln.weight": (width,)}
    tensors |= {f"{name}.bias": shape for name, shape in biased.items() if shape}
    if tower.is_gated:
        tensors |= {"v.patch_embd.weight.1": pixels, "mm.0.weight": (merged, merged), "mm.0.bias": (merged,)}
        tensors |= {"mm.2.weight": (out, merged), "mm.2.bias": (out,)}
    else:
        positions = (tower.keys["vision.image_size"] // tower.patch) ** 2
        tensors |= {"v.position_embd.weight": (positions, width), "mm.model.fc.weight": (out, merged)}
    matrices = dict.fromkeys(BLOCK_MATRICES, (width, width)) | {"ffn_up": (tower.d_ff, width)}
    matrices |= {"ffn_down": (width, tower.d_ff)} | ({"ffn_gate": (tower.d_ff, width)} if tower.is_gated else {})
    for layer in range(tower.layers):
        for norm in ("ln1", "ln2"):
            for suffix in ("weight",) if tower.is_gated else ("weight", "bias"):
                tensors[f"v.blk.{layer}.{norm}.{suffix}"] = (width,)
        for name, shape in matrices.items():
            tensors |= {f"v.blk.{layer}.{name}.weight": shape, f"v.blk.{layer}.{name}.bias": shape[:1]}
    return tensors
