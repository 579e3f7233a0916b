"""The files of the sentence-transformers library in a model folder: its modules, prompts, and dense layers.

modules.json                       [{"type", "path"}, ...]: Transformer, Pooling, Dense, Normalize
config_sentence_transformers.json  prompts, similarity
sentence_bert_config.json          max_seq_length, do_lower_case
1_Pooling/config.json, 2_Dense/config.json, 2_Dense/model.safetensors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, UnsupportedModelError
from .checkpoint import PICKLE_SUFFIXES, Tensor

MODULES, SETTINGS, TOKENIZER = "modules.json", "config_sentence_transformers.json", "tokenizer_config.json"
UNLIMITED = 1 << 40  # tokens
FIRST_DENSE = 2  # of the names of dense layers, as in EmbeddingGemma's GGUF
MAX_MODULES = 64


def module_kind(module: Mapping[str, Any]) -> str:
    """Return the class name of a module, `Pooling` for one."""
    return str(module["type"]).rpartition(".")[2]


def read_sentence_transformers(folder: Path, read_json: Callable[[Path], Any]) -> dict[str, Any]:
    """Return modules (with the config of each), settings and the transformer's settings; empty without modules."""
    if not (folder / MODULES).exists():
        return {}
    modules = read_json(folder / MODULES)
    if not isinstance(modules, list) or len(modules) > MAX_MODULES or not all(map(_is_module, modules)):
        raise ModelFileError(f"{MODULES} must be a list of at most {MAX_MODULES} objects with a type and a path")
    read = [{**module, "config": _read_object(folder / module["path"], read_json)} for module in modules]
    settings = _read_object_of(folder / SETTINGS, read_json)
    names = sorted(folder.glob("sentence_*_config.json"))
    transformer = _read_object_of(names[0], read_json) if names else {}
    if transformer.get("max_seq_length") is None:  # newer versions leave it to the tokenizer
        transformer["max_seq_length"] = _tokenizer_length(_read_object_of(folder / TOKENIZER, read_json))
    return {"modules": read, "settings": settings, "transformer": transformer}


def _tokenizer_length(config: Mapping[str, Any]) -> int:
    """Return the longest sequence of a tokenizer; 0: it does not say. transformers writes a huge number for that."""
    length = config.get("model_max_length")
    return length if type(length) is int and 0 < length < UNLIMITED else 0


def _is_module(module: object) -> bool:
    if not isinstance(module, dict):
        return False
    kind, path = module.get("type"), module.get("path")
    if not isinstance(kind, str) or not isinstance(path, str):
        return False
    return Path(path).name == path.rstrip("/") != ".."


def _read_object(folder: Path, read_json: Callable[[Path], Any]) -> dict[str, Any]:
    return _read_object_of(folder / "config.json", read_json)


def _read_object_of(path: Path, read_json: Callable[[Path], Any]) -> dict[str, Any]:
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} must hold a JSON object, not {type(value).__name__}")
    return value


def read_dense_layers(
    folder: Path, layout: Mapping[str, Any], read_safetensors: Callable[[Path], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of the dense layers after pooling: `dense_2.weight`, `dense_2.bias`, `dense_3.weight`, ..."""
    tensors: dict[str, Tensor] = {}
    layers = [module for module in layout.get("modules", ()) if module_kind(module) == "Dense"]
    for number, module in enumerate(layers, FIRST_DENSE):
        inside = folder / module["path"]
        path = inside / "model.safetensors"
        if not path.exists():
            pickles = [file.name for file in inside.glob("*") if file.suffix in PICKLE_SUFFIXES]
            if pickles:
                raise UnsupportedModelError(
                    f"{module['path']}: {min(pickles)} holds pickled weights, which can execute code and are refused: "
                    "convert them to safetensors"
                )
            raise ModelFileError(f"{path} is missing: {MODULES} names a dense layer")
        for name, tensor in read_safetensors(path).items():
            if not name.startswith("linear."):
                raise ModelFileError(f"{module['path']}: tensor {name!r} is not part of a dense layer")
            new_name = name.replace("linear.", f"dense_{number}.", 1)
            tensors[new_name] = replace(tensor, name=new_name)
    return tensors
