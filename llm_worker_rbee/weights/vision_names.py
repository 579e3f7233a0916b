"""The tensors of a vision tower by the names that decoders have (`blk.0.attn_norm`), from an mmproj GGUF or a folder.

A projector file of llama.cpp has `v.` before the tower's names and `mm.` before the projector's. Old ones have `ffn_up`
and `ffn_down` swapped, which their shapes show. A folder of transformers holds tower and decoder together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from ..errors import ModelFileError, UnsupportedModelError
from .checkpoint import Checkpoint, Tensor
from .gguf import PROJECTOR, open_gguf
from .safetensors import read_json, read_shards

CLIP = "clip"  # general.architecture of projector files
PREFERRED_TYPES = ("bf16", "f16", "f32", "q8_0")  # in names of files; "f16" is a part of "bf16"
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOP_NAMES = {
    "patch_embed.proj": "patch_embd",
    "embeddings.patch_embedding": "patch_embd",
    "pos_embed": "position_embd",
    "embeddings.position_embedding": "position_embd",
    "post_layernorm": "post_ln",
    "merger.ln_q": "post_ln",
    "merger.norm": "post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "modality_projection.proj": "mm.model.fc",
    "mm_soft_emb_norm": "mm.soft_emb_norm",
    "patch_conv": "patch_embd",
    "ln_pre": "pre_ln",
    "norm": "mm.input_norm",
    "patch_merger.merging_layer": "mm.patch_merger",
    "linear_1": "mm.1",
    "linear_2": "mm.2",
    "patch_embedder.input_proj": "patch_embd",
    "embedding_projection": "mm.input_projection",
}
WHOLE_NAMES = {  # without a suffix
    "mm_input_projection_weight": "mm.input_projection.weight",
    "patch_embedder.position_embedding_table": "position_embd.weight",
}
LAYER_NAMES = {
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "layer_norm1": "attn_norm",
    "layer_norm2": "ffn_norm",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
LAYER_NAMES |= {
    f"{part}.{x}_proj": f"attn_{'output' if x == 'o' else x}" for part in ("attention", "self_attn") for x in "qkvo"
} | {f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
DEEPSTACK_NAMES = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
GGUF_LAYER_NAMES = {"ln1": "attn_norm", "ln2": "ffn_norm", "attn_out": "attn_output"}
PREFIX = re.compile(
    r"^(?:model\.)?(?:visual|vision_tower\.vision_model|vision_tower|vision_model|multi_modal_projector|connector"
    r"|embed_vision)\."
)
LAYER = re.compile(
    r"^(?:encoder\.|transformer\.)?(?:layers|blocks|blk)\.([0-9]{1,6})\.(.+)\.(weight|bias|(?:in|out)put_(?:min|max))$"
)
# Of encoders of sound beside the tower; and the embedding of a token, which the decoder has too.
NOT_READ = re.compile(r"^(?:a\.|mm\.a\.|v\.token_embd\.img_break$)")
MLP_ROLE = re.compile(r"\bffn_(?:up|down)\b")
DEEPSTACK = re.compile(r"^deepstack_merger_list\.([0-9]{1,6})\.(\w+)\.(weight|bias)$")


def open_projector(path: Path) -> Checkpoint:
    """Open the tower of a projector file or of a folder, whose `metadata` are config and preprocessor."""
    if path.is_dir():
        return _open_folder(path)
    checkpoint = open_gguf(path)
    if checkpoint.architecture != CLIP:
        raise ModelFileError(
            f"{path.name} holds the architecture {checkpoint.architecture!r}: a projector file (mmproj) holds {CLIP!r}"
        )
    named = {_from_gguf(name): tensor for name, tensor in checkpoint.tensors.items() if not NOT_READ.match(name)}
    return replace(checkpoint, tensors=_unswap_mlp({name: replace(t, name=name) for name, t in named.items()}))


def find_projectors(model: Path) -> list[Path]:
    """Return the projectors that lie beside a model: the folder itself, or files named mmproj, in their order."""
    folder = model if model.is_dir() else model.parent
    if model.is_dir() and (model / "config.json").exists():
        return [model] if isinstance(read_json(model / "config.json").get("vision_config"), dict) else []
    return sorted((path for path in folder.iterdir() if is_projector(path.name)), key=projector_order)


def is_projector(name: str) -> bool:
    """Return whether a file has the name of a projector."""
    return name.lower().endswith(".gguf") and PROJECTOR in PurePosixPath(name).name.lower()


def projector_order(path: PurePath) -> tuple[int, str]:
    """Sort projectors: those with the most exact type first, not larger than F16 where there is a choice."""
    name = path.name.lower()
    return next((i for i, kind in enumerate(PREFERRED_TYPES) if kind in name), len(PREFERRED_TYPES)), name


def _open_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    if not isinstance(config.get("vision_config"), dict):
        raise UnsupportedModelError(f"{folder.name}: its config.json has no vision_config, so it has no vision tower")
    preprocessor: dict[str, Any] = {}
    for name in PREPROCESSOR_FILES:
        if (folder / name).exists():
            preprocessor = read_json(folder / name)
            preprocessor = preprocessor.get("image_processor", preprocessor)
            break
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_shards(folder).items():
        if (part := PREFIX.match(name)) is not None:
            new = _from_hf(name[part.end() :], config["vision_config"])
            if new in tensors:
                raise ModelFileError(f"tensors {name!r} and {tensors[new].name!r} both map to {new!r}")
            tensors[new] = replace(tensor, name=new)
    metadata = {"config": config, "preprocessor": preprocessor}
    return Checkpoint(folder, "safetensors", str(config.get("model_type")), metadata, tensors, value_types={})


def _from_hf(name: str, config: Mapping[str, Any]) -> str:
    """Return our name of a tensor of transformers without its prefix; an unknown one is returned as it is."""
    if name in WHOLE_NAMES:
        return WHOLE_NAMES[name]
    name = name.replace(".linear.", ".")
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    if (layer := LAYER.match(name)) is not None and layer[2] in LAYER_NAMES:
        return f"blk.{int(layer[1])}.{LAYER_NAMES[layer[2]]}.{layer[3]}"
    part, layers = DEEPSTACK.match(name), config.get("deepstack_visual_indexes") or []
    if part is not None and part[2] in DEEPSTACK_NAMES and int(part[1]) < len(layers):
        return f"deepstack.{layers[int(part[1])]}.{DEEPSTACK_NAMES[part[2]]}.{part[3]}"
    return name


def _from_gguf(name: str) -> str:
    short = name.removeprefix("v.")
    layer = LAYER.match(short)
    if layer is None:
        return short
    return f"blk.{int(layer[1])}.{GGUF_LAYER_NAMES.get(layer[2], layer[2])}.{layer[3]}"


def gguf_projector_name(name: str) -> str:
    """Return the name of our tensor in a projector file."""
    if name.startswith("mm."):
        return name
    if (layer := LAYER.match(name)) is None:
        return f"v.{name}"
    old = {ours: theirs for theirs, ours in GGUF_LAYER_NAMES.items()}
    return f"v.blk.{layer[1]}.{old.get(layer[2], layer[2])}.{layer[3]}"


def _unswap_mlp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with `ffn_up` and `ffn_down` by what they do: down has as many rows as the blocks are wide."""
    out, down = tensors.get("blk.0.attn_output.weight"), tensors.get("blk.0.ffn_down.weight")
    if (
        out is None
        or down is None
        or len(down.shape) != 2
        or down.shape[0] == out.shape[0]
        or down.shape[1] != out.shape[0]
    ):
        return tensors
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    renamed = {MLP_ROLE.sub(lambda role: names[role[0]], name): tensor for name, tensor in tensors.items()}
    return {name: replace(tensor, name=name) for name, tensor in renamed.items()}
