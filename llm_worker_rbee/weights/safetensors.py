"""Reader of a folder with config.json and *.safetensors: gives the same `Checkpoint` as a GGUF file.

The header is parsed here because the safetensors package has no bfloat16 in its NumPy interface and copies tensors;
here a tensor is a view of the mapped file. Pickled weights are refused: loading them can execute code.

    header length u64 | header JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}} | data
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError, UnsupportedModelError
from .checkpoint import PICKLE_SUFFIXES, Checkpoint, Tensor, count_values, map_file
from .encoder_names import ENCODER_NAMES, rename_encoder
from .hf_experts import rearrange_experts
from .hf_quant import merge_quantized, read_quantization
from .quants import BLOCK_TYPES, BlockType
from .sentence_transformers import read_dense_layers, read_sentence_transformers

DECODABLE_TYPES = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")  # named as our block types
LISTED_TYPES = {"BOOL": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}


def _cannot_decode(data: NDArray[np.uint8]) -> NoReturn:
    raise UnsupportedModelError("this type cannot be dequantized")


# `inspect` lists tensors of these types too; their id keeps them out of a model.
LISTED_ID = -1
DTYPES = {name: BLOCK_TYPES[name] for name in DECODABLE_TYPES} | {
    name: BlockType(name, LISTED_ID, 1, size, _cannot_decode) for name, size in LISTED_TYPES.items()
}
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "score.weight": "cls.output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{role}_proj": f"ffn_{role}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for role in ("gate", "up", "down")
    },
    "mlp.router": "ffn_gate_inp",
    "mlp.router.layer": "ffn_gate_inp",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "mlp.w1": "ffn_gate",
    "mlp.w2": "ffn_down",
    "mlp.w3": "ffn_up",
    "mlp.input_linear": "ffn_gate_up_exps",
    "mlp.output_linear": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
# Gemma and OLMo use `post_attention_layernorm` for another norm.
SANDWICH_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
# Names without a suffix; experts are stacked in one tensor, or have one each.
PLAIN_NAMES = {
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    **{
        f"mlp.experts.{role}_proj_{part}": f"ffn_{role}_exps.{part}"
        for role in ("gate_up", "down")
        for part in ("bias", "blocks", "scales")
    },
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
}
# Parts of a head for multi-token prediction that is stored apart from the layers.
MTP_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
    "embed_tokens": "embed_tokens",
}
MTP_PATTERN = re.compile(r"^(?:model\.)?mtp\.(?:layers\.([0-9]{1,6})\.(.+)|(\w+)\.weight)$")
MLP_NAME = re.compile(r"^(block_sparse_moe|feed_forward)\.")
CONV_NAMES = (".shortconv.conv.weight", ".ssm_conv1d.weight")  # (channels, 1, kernel) here, (channels, kernel) in GGUF
EXPERT_ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
EXPERT_PATTERN = re.compile(r"^mlp\.experts\.([0-9]{1,6})\.(\w+)\.weight$")
LAYER_PATTERN = re.compile(r"^model\.layers\.([0-9]{1,6})\.(.+)$")
SUFFIX_PATTERN = re.compile(r"^(.+)\.(weight|bias)$")
# Parts of a model that also takes images or sound.
OTHER_PARTS = (
    "vision_tower",
    "vision_model",
    "visual",
    "vision_embed_tokens",
    "embed_vision",
    "multi_modal_projector",
    "connector",
    "audio_tower",
    "audio_model",
    "embed_audio",
    "vision_embedder",
    "audio_embedder",
)
TEXT_PREFIX = re.compile(r"^(model\.)?(?:language|text)_model\.")


def open_hf(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Open a model folder; known tensors get GGUF names. `weights=False` also accepts a tokenizer or config alone."""
    config = read_json(folder / "config.json") if weights or (folder / "config.json").exists() else {}
    tensors = read_shards(folder) if weights or any(folder.glob("*.safetensors")) else {}
    metadata: dict[str, Any] = {"config": config}
    generation = folder / "generation_config.json"
    if generation.exists():
        metadata["generation_config"] = read_json(generation)
    quantization = read_quantization(_quantization_config(folder, config))
    if isinstance(config.get("text_config"), dict) or isinstance(config.get("vision_config"), dict):
        metadata["vision"] = config.get("vision_config")
        metadata["config"] = config = _text_config(config)
        tensors, metadata["left_out"] = _text_tensors(tensors)
    if quantization is not None:
        tensors, quantization = merge_quantized(tensors, quantization)
        metadata["quantization"] = asdict(quantization)
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise ModelFileError("config.json: 'model_type' is not a string")
    named = _named_tensors(tensors, config)
    if sentence := read_sentence_transformers(folder, _load_json):
        metadata["sentence_transformers"] = sentence
        named |= read_dense_layers(folder, sentence, read_safetensors) if tensors else {}
    return Checkpoint(folder, "safetensors", model_type, metadata, named, value_types={})


def _named_tensors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by their GGUF names."""
    if config.get("model_type") in ENCODER_NAMES:
        return rename_encoder(tensors, config)
    if "embed_tokens.weight" in tensors:  # a decoder without its output head
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return rearrange_experts(_rename(_place_mtp(tensors, config)))


def _quantization_config(folder: Path, config: Mapping[str, Any]) -> object:
    """Return the settings of quantized weights, from config.json, its text model, or ModelOpt's own file."""
    text, own_file = config.get("text_config"), folder / "hf_quant_config.json"
    quant = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if quant is None and own_file.exists():
        own = read_json(own_file).get("quantization", {})
        if not isinstance(own, dict):
            raise ModelFileError("hf_quant_config.json: 'quantization' is not an object")
        return {"quant_method": "modelopt", **own}
    return quant


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's configuration in a model of several parts; missing keys come from the whole's."""
    if not isinstance(config.get("text_config"), dict):  # an old folder of Qwen2.5-VL: its keys are the whole's
        text = {key: value for key, value in config.items() if key != "vision_config"}
        return {**text, "model_type": f"{config.get('model_type')}_text"}
    whole = {key: value for key, value in config.items() if key != "model_type" and not key.endswith("_config")}
    return {"tie_word_embeddings": True, **whole, **config["text_config"]}


def _text_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of the text model, by its own names, and the names of the omitted parts."""
    named: dict[str, Tensor] = {}
    left_out: set[str] = set()
    for name, tensor in tensors.items():
        part = name.removeprefix("model.").partition(".")[0]
        if part in OTHER_PARTS:
            left_out.add(part)
        elif text := TEXT_PREFIX.match(name):
            rest = name[text.end() :]
            named[rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"] = tensor
        else:
            named[name] = tensor
    return named, sorted(left_out)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise ModelFileError with the file's name if that fails."""
    value = _load_json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} must hold a JSON object, not {type(value).__name__}")
    return value


def _load_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise ModelFileError(f"{path.name} has {path.stat().st_size} bytes: at most {MAX_HEADER_BYTES} are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing: a model folder must hold it") from error
    except (ValueError, RecursionError, OSError) as error:
        raise ModelFileError(f"{path.name} is not readable JSON: {error}") from error


def _place_mtp(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name a head for multi-token prediction as further layers after the others."""
    count, placed = config.get("num_hidden_layers"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        part = MTP_PATTERN.match(name)
        if part is None or type(count) is not int or (part[3] is not None and part[3] not in MTP_NAMES):
            placed[name] = tensor
        elif part[3] is None:
            placed[f"model.layers.{count + int(part[1])}.{part[2]}"] = tensor
        else:
            placed[f"model.layers.{count}.{MTP_NAMES[part[3]]}.weight"] = tensor
    return placed


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    layer_names = names_of_layers(tensors)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new_name = gguf_name(name, layer_names)
        if new_name in out:
            raise ModelFileError(f"tensors {name!r} and {out[new_name].name!r} both map to {new_name!r}")
        if new_name.endswith(CONV_NAMES) and len(tensor.shape) == 3 and tensor.shape[1] == 1:
            tensor = replace(tensor, shape=tensor.shape[::2])  # each channel for itself
        out[new_name] = tensor
    return {name: replace(tensor, name=name) for name, tensor in out.items()}


def names_of_layers(names: Iterable[str]) -> Mapping[str, str]:
    """Return the GGUF names of the parts of a layer, for a model with these tensors."""
    return SANDWICH_NAMES if any("post_feedforward_layernorm" in name for name in names) else LAYER_NAMES


def gguf_name(name: str, layer_names: Mapping[str, str] = LAYER_NAMES) -> str:
    """Return the GGUF name of a transformers tensor; an unknown name is returned unchanged."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    layer = LAYER_PATTERN.match(name)
    if layer is None:
        return name
    number, rest = int(layer[1]), MLP_NAME.sub("mlp.", layer[2])
    expert, suffixed = EXPERT_PATTERN.match(rest), SUFFIX_PATTERN.match(rest)
    if rest in PLAIN_NAMES:
        return f"blk.{number}.{PLAIN_NAMES[rest]}"
    if expert and expert[2] in EXPERT_ROLES:
        return f"blk.{number}.ffn_{EXPERT_ROLES[expert[2]]}.{int(expert[1])}.weight"
    if suffixed and suffixed[1] in layer_names:
        return f"blk.{number}.{layer_names[suffixed[1]]}.{suffixed[2]}"
    return name


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder by their names in the files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _read_indexed(folder, read_json(index))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if pickles := [path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES]:
            raise UnsupportedModelError(
                f"{folder.name}: {min(pickles)} holds pickled weights, which can execute code "
                "and are refused: convert them to safetensors"
            )
        raise ModelFileError(f"{folder}: no *.safetensors file in this folder")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if name in tensors:
                raise ModelFileError(f"{file.name}: tensor {name!r} is in two files")
            tensors[name] = tensor
    return tensors


def _read_indexed(folder: Path, index: Mapping[str, Any]) -> dict[str, Tensor]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelFileError("model.safetensors.index.json: 'weight_map' is not an object of file names")
    shards: dict[str, dict[str, Tensor]] = {}
    for file in sorted(set(weight_map.values())):
        path = folder / file
        if Path(file).name != file or len(file.encode(errors="replace")) > 255:
            raise ModelFileError(f"model.safetensors.index.json names {file[:80]!r}, which is not a file of the folder")
        if not path.exists():
            raise ModelFileError(f"{file!r} is missing: model.safetensors.index.json names it")
        shards[file] = read_safetensors(path)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ModelFileError(f"{file!r} lacks tensor {name!r}, which model.safetensors.index.json places there")
    if extra := {name for shard in shards.values() for name in shard} - weight_map.keys():
        raise ModelFileError(f"tensor {min(extra)!r} is in a shard, but not in model.safetensors.index.json")
    return {name: shards[file][name] for name, file in weight_map.items()}


def read_safetensors(path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> dict[str, Tensor]:
    """Return all tensors of one file as views of its mapping; checks the header against the file size first."""
    view = map_file(path, 8)
    size = len(view)
    length = int.from_bytes(view[:8], "little")
    if length > min(size - 8, max_header_bytes):
        raise ModelFileError(f"{path.name}: a header of {length} bytes does not fit (the file has {size})")
    header = _parse_header(path, view[8 : 8 + length])
    base = 8 + length
    extents = {name: _extent(path, name, entry, size - base) for name, entry in header.items()}
    _check_overlap(path, extents)
    return {name: _tensor(name, header[name], view, base, *extents[name]) for name in header}


def _parse_header(path: Path, text: bytes) -> dict[str, dict[str, Any]]:
    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in pairs:
            if name in out:
                raise ValueError(f"name {name!r} appears twice")
            out[name] = value
        return out

    try:
        header = json.loads(text, object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: its header is not readable JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{path.name}: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _all_natural(values: object) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    return all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _extent(path: Path, name: str, entry: object, room: int) -> tuple[int, int]:
    if not isinstance(entry, dict) or not all(_all_natural(entry.get(key)) for key in ("shape", "data_offsets")):
        raise ModelFileError(f"{path.name}: tensor {name!r} has no valid shape or data_offsets")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} has unsupported type {dtype!r} (supported: {', '.join(DTYPES)})"
        )
    begin, end = entry["data_offsets"] if len(entry["data_offsets"]) == 2 else (1, 0)
    count = count_values(entry["shape"])
    if count is None:
        raise ModelFileError(f"{path.name}: tensor {name!r}: shape {entry['shape']} overflows")
    expected = count * DTYPES[dtype].block_bytes
    if not begin <= end <= room or end - begin != expected:
        raise ModelFileError(
            f"{path.name}: tensor {name!r} of {expected} bytes does not fit data_offsets "
            f"{entry['data_offsets']} in {room} bytes of data"
        )
    return begin, end


def _check_overlap(path: Path, extents: Mapping[str, tuple[int, int]]) -> None:
    last, before = 0, ""
    for name, (begin, end) in sorted(extents.items(), key=lambda item: item[1]):
        if begin < last and end > begin:
            raise ModelFileError(f"{path.name}: tensors {before!r} and {name!r} overlap")
        last, before = max(last, end), name


def _tensor(name: str, entry: Mapping[str, Any], view: mmap.mmap, base: int, begin: int, end: int) -> Tensor:
    data = np.frombuffer(view, np.uint8, end - begin, base + begin if end > begin else 0)
    return Tensor(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), data)
