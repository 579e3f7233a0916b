"""Safetensors folders, written by transformers and the safetensors package, and damaged ones."""

from __future__ import annotations

import json
import mmap
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.weights import Checkpoint, open_checkpoint
from llm_worker_rbee.weights.gguf_writer import Raw, TensorLike, write_gguf
from llm_worker_rbee.weights.safetensors import gguf_name, names_of_layers

from ..helpers import model_runs
from ..helpers.model_zoo import ZOO, make_hf, save_hf
from .test_gguf import base_of

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SMALL = {"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
         "extra": {"dtype": "F16", "shape": [2, 2], "data_offsets": [16, 24]}}  # fmt: skip


def raw_bytes(weight: torch.Tensor) -> bytes:
    return weight.contiguous().view(torch.uint8).numpy().tobytes()


def as_gguf(model: Any, variant: str, kind: str, path: Path) -> Checkpoint:
    """Weights, types and row order are the same, under GGUF names."""
    names = names_of_layers(model.state_dict())
    tensors: dict[str, TensorLike] = {}
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[gguf_name(name, names)] = Raw(kind, tuple(weight.shape), raw_bytes(weight))
    return open_checkpoint(write_gguf(path, {}, tensors))


def assert_equal_tensors(ours: Checkpoint, other: Checkpoint) -> None:
    assert set(ours.tensors) == set(other.tensors)
    for name, tensor in ours.tensors.items():
        twin = other.tensors[name]
        assert (tensor.kind.name, tensor.shape) == (twin.kind.name, twin.shape), name
        assert np.array_equal(tensor.data, twin.data), name
        assert np.array_equal(tensor.dequantize(), twin.dequantize()), name


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "phi3", "gemma2", "llama-bias", "olmo2", "glm4"])
def test_open_hf_tensors_equal_those_of_gguf(tmp_path: Path, variant: str, kind: str) -> None:
    model = make_hf(ZOO[variant]).to(DTYPES[kind])
    folder = open_checkpoint(save_hf(model, tmp_path / "hf"))
    assert (folder.format, folder.architecture) == ("safetensors", model.config.model_type)
    assert {t.kind.name for t in folder.tensors.values()} == {kind}
    assert_equal_tensors(folder, as_gguf(model, variant, kind, tmp_path / "m.gguf"))
    values = {gguf_name(n): w for n, w in model.state_dict().items()}
    assert np.array_equal(folder.tensors["token_embd.weight"].dequantize(), values["token_embd.weight"].float().numpy())


@pytest.mark.parametrize("kind", DTYPES)
def test_open_hf_sharded_folder_gives_all_tensors(tmp_path: Path, kind: str) -> None:
    model = make_hf(ZOO["qwen3"]).to(DTYPES[kind])
    whole, parts = save_hf(model, tmp_path / "whole"), save_hf(model, tmp_path / "parts", shard="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    assert (parts / "model.safetensors.index.json").exists()
    assert_equal_tensors(open_checkpoint(parts), open_checkpoint(whole))


def test_open_hf_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_hf(make_hf(ZOO["qwen3"]), tmp_path))
    for tensor in checkpoint.tensors.values():
        assert isinstance(base_of(tensor.data), mmap.mmap)
        assert not tensor.data.flags.writeable
    assert set(checkpoint.metadata) == {"config", "generation_config"}


def test_read_safetensors_every_dtype_of_the_package(tmp_path: Path) -> None:
    whole = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
    kinds = {"F64": torch.float64, **whole, **DTYPES}
    weights = {name: (torch.arange(24).reshape(2, 3, 4) - 12).to(kind) for name, kind in kinds.items()}
    weights |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(7.0)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    found = open_checkpoint(tmp_path).tensors
    for name in kinds:
        assert found[name].kind.name == name
        assert np.array_equal(found[name].dequantize(), np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 12)
    assert (found["empty"].shape, found["empty"].dequantize().shape) == ((0, 5), (0, 5))
    assert float(found["scalar"].dequantize()) == 7.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", DTYPES)
def test_load_model_non_finite_value_raises(tmp_path: Path, kind: str, value: float) -> None:
    model = make_hf(ZOO["qwen3"]).to(DTYPES[kind])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    with pytest.raises(ModelFileError, match=r"tensor 'blk\.1\.ffn_up\.weight' holds a NaN or infinite value"):
        model_runs.load(save_hf(model, tmp_path))


def safetensors(header: Any, data: int = 24) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def folder_with(path: Path, model: bytes, config: bytes = b"{}") -> Path:
    (path / "config.json").write_bytes(config)
    (path / "model.safetensors").write_bytes(model)
    return path


BAD: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "model.safetensors: the file is empty"),
    "seven bytes": (bytes(7), "model.safetensors: 7 bytes are too few"),
    "header of 2^63 bytes": (struct.pack("<Q", 2**63) + bytes(100), f"header of {2**63} bytes"),
    "header of 2^64-1 bytes": (struct.pack("<Q", 2**64 - 1) + bytes(100), f"header of {2**64 - 1} bytes"),
    "header one byte too long": (struct.pack("<Q", 101) + bytes(100), "header of 101 bytes"),
    "header empty": (safetensors(b""), "not readable JSON"),
    "header not JSON": (safetensors(b"{"), "not readable JSON"),
    "header not UTF-8": (safetensors(b'{"\xff": 1}'), "not readable JSON"),
    "header a list": (safetensors([]), "not a JSON object"),
    "100,000 brackets": (safetensors(b"[" * 100_000), "not readable JSON"),
    "100,000 objects": (safetensors(b'{"a":' * 100_000), "not readable JSON"),
    "number of 10,000 digits": (safetensors(b'{"a": ' + b"9" * 10_000 + b"}"), "not readable JSON"),
    "duplicate key": (safetensors(b'{"t": 1, "t": 2}'), "name 't' appears twice"),
    "duplicate key inside": (safetensors(b'{"t": {"dtype": "F32", "dtype": "F16"}}'), "name 'dtype' appears twice"),
    "entry not an object": (safetensors({"t": 3}), "tensor 't'"),
    "no shape": (safetensors({"t": {"dtype": "F32", "data_offsets": [0, 4]}}), "tensor 't'"),
    "no offsets": (safetensors({"t": {"dtype": "F32", "shape": [1]}}), "tensor 't'"),
    "three offsets": (safetensors(entry(offsets=(0, 16, 16))), "'model.norm.weight'"),
    "negative shape": (safetensors(entry(shape=(-4,))), "'model.norm.weight'"),
    "shape of floats": (safetensors(entry(shape=(4.0,))), "'model.norm.weight'"),
    "shape of bools": (safetensors(entry(shape=(True, 4))), "'model.norm.weight'"),
    "shape that overflows": (safetensors(entry(shape=(2**62, 4))), "'model.norm.weight': shape .* overflows"),
    "shape that overflows beside a zero": (safetensors(entry(shape=(2**62, 2**62, 0), offsets=(0, 0))), "overflows"),
    "100,000 dimensions": (safetensors(entry(shape=[2**62] * 100_000)), "'model.norm.weight'"),
    "unknown dtype": (safetensors(entry(dtype="F6_E2M3")), "'model.norm.weight' has unsupported type 'F6_E2M3'"),
    "dtype a list": (safetensors(entry(dtype=["F32"])), "'model.norm.weight' has unsupported type"),
    "dtype missing": (safetensors(entry(dtype=None)), "'model.norm.weight' has unsupported type"),
    "dtype of another width": (safetensors(entry(dtype="F16")), "'model.norm.weight' of 8 bytes does not fit"),
    "offsets reversed": (safetensors(entry(offsets=(16, 0))), "'model.norm.weight'"),
    "offsets past the end": (safetensors(entry(offsets=(16, 32))), "'model.norm.weight'"),
    "offsets of 2^63": (safetensors(entry(offsets=(2**63, 2**63 + 16))), "'model.norm.weight'"),
    "overlapping extents": (safetensors({**SMALL, "extra": {**SMALL["extra"], "data_offsets": [8, 16]}}), "overlap"),
    "one byte short": (safetensors(SMALL, data=23), "'extra'"),
    "two names for one tensor": (safetensors({**SMALL, "output_norm.weight": {**SMALL["extra"]}, "extra": {
        "dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}), "both map to 'output_norm.weight'"),
}  # fmt: skip


def test_read_safetensors_valid_file_opens(tmp_path: Path) -> None:
    assert set(open_checkpoint(folder_with(tmp_path, safetensors(SMALL))).tensors) == {"output_norm.weight", "extra"}


@pytest.mark.parametrize("case", BAD)
def test_read_safetensors_malformed_file_raises(tmp_path: Path, case: str) -> None:
    data, expected = BAD[case]
    folder = folder_with(tmp_path, data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            open_checkpoint(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert peak < 40_000_000 if "100,000" in case else peak < 1_000_000


def test_file_truncated_at_every_byte_raises(tmp_path: Path) -> None:
    whole = safetensors(SMALL)
    for length in range(len(whole)):
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            open_checkpoint(folder_with(tmp_path, whole[:length]))


@pytest.mark.parametrize(("config", "expected"), [
    (b"", "config.json is not readable JSON"),
    (b"[]", "config.json must hold a JSON object"),
    (b"\xff", "config.json is not readable JSON"),
    (b"[" * 100_000, "config.json is not readable JSON"),
    (b'{"model_type": 3}', "'model_type' is not a string"),
])  # fmt: skip
def test_open_hf_malformed_config_raises(tmp_path: Path, config: bytes, expected: str) -> None:
    with pytest.raises(ModelFileError, match=expected):
        open_checkpoint(folder_with(tmp_path, safetensors(SMALL), config))


def test_open_hf_without_config_raises(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(SMALL))
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("config", ["{}", '{"architectures": []}', '{"architectures": "x"}', '{"architectures": [{}]}'])
def test_read_model_config_unknown_architecture_raises(tmp_path: Path, config: str) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path, safetensors(SMALL), config.encode()))
    with pytest.raises(ModelFileError, match=r"'model_type' is missing|is not supported"):
        read_model_config(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_open_checkpoint_pickled_weights_raises_unsupported(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(UnsupportedModelError, match=rf"{name} holds pickled weights.*refused"):
        open_checkpoint(tmp_path)


def test_open_hf_folder_without_weights_raises(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"no \*\.safetensors file"):
        open_checkpoint(tmp_path)


def test_open_checkpoint_bare_safetensors_file_names_the_folder(tmp_path: Path) -> None:
    folder_with(tmp_path, safetensors(SMALL))
    with pytest.raises(ModelFileError, match=r"model\.safetensors: open the folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def set_map(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return edit


def point_to(name: str) -> Callable[[Path], None]:
    return set_map(lambda index: index["weight_map"].update({"b": name}))


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


SHARDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing shard": (lambda folder: (folder / "two.safetensors").unlink(), "'two.safetensors' is missing"),
    "tensor not in its shard": (point_to("one.safetensors"), "lacks tensor 'b'"),
    "tensor nowhere": (set_map(lambda index: index["weight_map"].update(c="one.safetensors")), "lacks tensor 'c'"),
    "tensor not in the index": (set_map(lambda index: index["weight_map"].pop("a2")), "tensor 'a2' is in a shard"),
    "no map": (set_map(lambda index: index.pop("weight_map")), "'weight_map'"),
    "map of numbers": (set_map(lambda index: index["weight_map"].update(a=3)), "'weight_map'"),
    "shard outside the folder": (point_to("../two.safetensors"), "not a file of the folder"),
    "shard at an absolute path": (point_to("/etc/passwd"), "not a file of the folder"),
    "shard with no name": (point_to(""), "cannot open|missing"),
    "shard with a null byte": (point_to("a\0b"), "missing"),
    "shard with a lone surrogate": (point_to("\ud800"), "missing"),
    "index not JSON": (break_index, "index.json is not readable JSON"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_open_hf_inconsistent_shards_raises(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2), "a2": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "a2": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "a2", "b"}
    damage, expected = SHARDS[case]
    damage(tmp_path)
    with pytest.raises(ModelFileError, match=expected):
        open_checkpoint(tmp_path)


def test_open_hf_tensor_in_two_files_without_index_raises(tmp_path: Path) -> None:
    folder_with(tmp_path, safetensors(SMALL))
    (tmp_path / "other.safetensors").write_bytes(safetensors(SMALL))
    with pytest.raises(ModelFileError, match=r"other\.safetensors: tensor '.*' is in two files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("number", ["9" * 5000, "x", "-1", ""])
def test_gguf_name_invalid_layer_number_is_unchanged(number: str) -> None:
    name = f"model.layers.{number}.mlp.up_proj.weight"
    assert gguf_name(name) == name
