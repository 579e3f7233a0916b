"""Projector files as llama.cpp's converter writes them, by the `gguf` package; old variants; quantized towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.models.convert.mmproj import convert_projector
from llm_worker_rbee.models.vision import VisionTower, load_vision_tower
from llm_worker_rbee.models.vision_config import BY_HF, read_vision_config
from llm_worker_rbee.weights import Checkpoint, open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from llm_worker_rbee.weights.safetensors import read_shards
from llm_worker_rbee.weights.vision_names import PREFIX, open_projector
from tests.helpers import tiny_vision

Floats = NDArray[np.float32]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "llava", "mistral3", "gemma4", "gemma4_e")
SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
SIZES = ((100, 150), (60, 60))
TOLERANCE = {"F16": 0.005, "BF16": 0.02, "Q8_0": 0.08, "Q4_K": 0.6}  # of the deviation, of random weights
ROUGHER = 7  # so many times for Gemma 4, whose scores are not divided by the size of a head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a random model, saved once."""
    root = tmp_path_factory.mktemp("vision")
    return lambda name: root / name if (root / name).exists() else tiny_vision.save_model(name, root / name)


def backend(name: str) -> Backend:
    return select_backend("cpu", name, threads=2 if name == "cpu" else None)


def rows_of(path: Path, name: str, ops: Backend) -> tuple[VisionTower, Floats]:
    """Return a tower and its rows of two pictures."""
    tower = load_vision_tower(open_projector(path), ops, "float32")
    rng = np.random.default_rng(11)
    pictures = [tiny_vision.picture(rng, *size) for size in SIZES]
    settings = read_vision_config(open_projector(path)).images
    return tower, np.concatenate(tower.encode(tiny_vision.plain_parts(name, settings, pictures)[0]))


def permuted(values: Floats, heads: int) -> Floats:
    """Return rows of q or k in llama.cpp's order, as its LlamaModel.permute does."""
    return values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_as_llama_cpp(folder: Path, name: str, path: Path, **changes: Any) -> None:
    """Write the tower of a folder with the names, the changes and the keys of llama.cpp's converter."""
    hf = tiny_vision.reference_model(name)
    config, family = hf.config, BY_HF[hf.config.model_type]
    vision, projector = config.vision_config, family.encoder.name
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    is_mixed = projector == "gemma4v"
    (writer.add_clip_vision_projector_type if is_mixed else writer.add_clip_projector_type)(projector)
    heads = getattr(vision, "num_attention_heads", None) or vision.num_heads
    writer.add_vision_projection_dim(config.get_text_config().hidden_size)
    writer.add_vision_image_size(getattr(vision, "image_size", 224))
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(changes.get("n_ff", vision.intermediate_size))
    layers = getattr(vision, "num_hidden_layers", None) or vision.depth
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(heads)
    preprocessor = tiny_vision.image_processor(name)
    writer.add_vision_image_mean(list(preprocessor.image_mean))
    writer.add_vision_image_std(list(preprocessor.image_std))
    writer.add_vision_attention_layernorm_eps(getattr(vision, "layer_norm_eps", family.eps))
    add_family_keys(writer, name, config, preprocessor)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers + 2)  # mm.2, too
    for tensor_name, tensor in read_shards(folder).items():
        if PREFIX.match(tensor_name) is None:
            continue
        for new, data in changed(tensor_name, np.array(tensor.dequantize(), ndmin=1), projector, heads):
            writer.add_tensor(gguf_name(names, new), np.ascontiguousarray(data))
    if projector == "pixtral":
        writer.add_tensor("v.token_embd.img_break", np.ones(config.get_text_config().hidden_size, np.float32))
    if is_mixed:  # files of E2B hold an encoder of sound, too
        writer.add_clip_has_audio_encoder(True)
        writer.add_clip_audio_projector_type("gemma4a")
        writer.add_tensor("a.blk.0.ffn_up.weight", np.ones((4, 4), np.float32))
        writer.add_tensor("mm.a.input_projection.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_family_keys(writer: gguf.GGUFWriter, name: str, config: Any, preprocessor: Any) -> None:
    vision = config.vision_config
    if name.startswith("qwen"):
        size = tiny_vision.PREPROCESSORS[name].get("size", {})
        writer.add_vision_min_pixels(size.get("shortest_edge", 0) or preprocessor.size["shortest_edge"])
        writer.add_vision_max_pixels(size.get("longest_edge", 0) or preprocessor.size["longest_edge"])
        writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
    if name == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
        writer.add_vision_window_size(vision.window_size)
    elif name in ("qwen3_vl", "gemma3", "idefics3"):
        writer.add_vision_use_gelu(True)
    elif name in ("llava", "mistral3"):
        writer.add_vision_use_silu(True)
    if name == "qwen3_vl":
        writer.add_vision_is_deepstack_layers([i in vision.deepstack_visual_indexes for i in range(vision.depth)])
    if name == "gemma3":
        writer.add_vision_projector_scale_factor(2)
    if name == "idefics3":
        writer.add_vision_projector_scale_factor(config.scale_factor)
        writer.add_vision_preproc_image_size(preprocessor.size["longest_edge"])
    if name == "mistral3":
        writer.add_vision_spatial_merge_size(config.spatial_merge_size)


def changed(name: str, data: Floats, projector: str, heads: int) -> list[tuple[str, Floats]]:
    """Return what the converter writes for a tensor."""
    if projector == "pixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        return [(name, permuted(data, heads))]
    if projector == "gemma3" and name.endswith("soft_emb_norm.weight"):
        return [(name, data + 1)]
    if projector == "gemma3" and name.endswith("mm_input_projection_weight"):
        return [(name.replace("_weight", ".weight"), data)]
    if data.ndim == 5:
        return [("v.patch_embd.weight", data[:, :, 0]), ("v.patch_embd.weight.1", data[:, :, 1])]
    if projector == "qwen2.5vl_merger" and ".qkv." in name:
        return [(name.replace("qkv", x), part) for x, part in zip("qkv", np.split(data, 3), strict=True)]
    if projector == "gemma4v":
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        name = f"{name}.weight" if name.endswith("position_embedding_table") else name
        if name.endswith("patch_embedder.input_proj.weight"):
            side = int((data.shape[1] // 3) ** 0.5)
            data = data.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    return [(name, data)]


def gguf_name(names: Any, name: str) -> str:
    """Return the name in a GGUF, by the table of the `gguf` package."""
    if name.startswith("v."):
        return name
    if ".merger." in name and "visual" in name and "mlp" not in name and "ln_q" not in name:  # of Qwen3-VL
        part, _, suffix = name.rpartition(".merger.")[2].partition(".")
        return f"{ {'norm': 'v.post_ln', 'linear_fc1': 'mm.0', 'linear_fc2': 'mm.2'}[part] }.{suffix}"
    if "deepstack_merger_list" in name:
        number, part, suffix = name.rpartition("merger_list.")[2].split(".")
        return f"v.deepstack.{2 * int(number)}.{part.removeprefix('linear_')}.{suffix}"
    plain = name.removeprefix("model.")
    deep = plain.replace("vision_tower.", "vision_tower.vision_model.")
    for other in (name, plain, f"model.{plain}", deep):
        if (found := names.get_name(other, try_suffixes=SUFFIXES)) is not None:
            return str(found)
    raise AssertionError(f"llama.cpp has no name for {name}")


@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_llama_cpps_converter_are_read(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    ops, path = backend("cpu"), tmp_path / "mmproj-F32.gguf"
    write_as_llama_cpp(folder(name), name, path)
    tower, rows = rows_of(path, name, ops)
    expected_tower, _ = rows_of(folder(name), name, ops)
    expected = np.concatenate(expected_tower.encode(same_parts(name, tower)))
    np.testing.assert_array_equal(rows, expected)


def same_parts(name: str, tower: VisionTower) -> list[Any]:
    """Return the parts that a tower of a file takes, whose limits of pixels may be others."""
    rng = np.random.default_rng(11)
    return tiny_vision.plain_parts(name, tower.config.images, [tiny_vision.picture(rng, *size) for size in SIZES])[0]


def test_length_of_feed_forward_may_be_missing(folder: Callable[[str], Path], tmp_path: Path) -> None:
    ops, path = backend("reference"), tmp_path / "mmproj.gguf"
    write_as_llama_cpp(folder("qwen2_5_vl"), "qwen2_5_vl", path, n_ff=0)
    tower, rows = rows_of(path, "qwen2_5_vl", ops)
    assert tower.config.model.d_ff == tiny_vision.UNALIGNED
    np.testing.assert_array_equal(rows, rows_of(folder("qwen2_5_vl"), "qwen2_5_vl", ops)[1])


@pytest.mark.parametrize("name", ["gemma3", "idefics3", "qwen2_5_vl"])
def test_swapped_mlps_are_read_as_they_are_meant(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    ops, path = backend("reference"), tmp_path / "mmproj.gguf"
    convert_projector(open_projector(folder(name)), path, "F32")
    written = open_checkpoint(path)
    swap = {".ffn_up.": ".ffn_down.", ".ffn_down.": ".ffn_up."}
    tensors = {}
    for tensor_name, tensor in written.tensors.items():
        new = next((tensor_name.replace(a, b) for a, b in swap.items() if a in tensor_name), tensor_name)
        tensors[new] = tensor.dequantize()
    metadata = {key: value for key, value in written.metadata.items() if key != "general.alignment"}
    write_gguf(path, metadata, tensors)
    np.testing.assert_array_equal(rows_of(path, name, ops)[1], rows_of(folder(name), name, ops)[1])


@pytest.fixture
def wide() -> Iterator[None]:
    """Make towers wide enough for every block type."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_vision, "WIDTH", tiny_vision.WIDE)
        tiny_vision.reference_model.cache_clear()
        yield
    tiny_vision.reference_model.cache_clear()


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_towers(name: str, wide: None, tmp_path: Path) -> None:
    """Near the float32 tower on both backends, and near each other."""
    folder, path, rows = tiny_vision.save_model(name, tmp_path / name), tmp_path / "mmproj.gguf", {}
    _, expected = rows_of(folder, name, backend("reference"))
    for kind, tolerance in TOLERANCE.items():
        times = ROUGHER if name.startswith("gemma4") else 1
        result = convert_projector(open_projector(folder), path, kind)
        assert result.tensors.get(kind, 0) >= 8
        for which in ("reference", "cpu"):
            _, rows[which] = rows_of(path, name, backend(which))
            assert np.abs(rows[which] - expected).max() < times * tolerance * expected.std()
        limit = {"F16": 1e-3, "BF16": 1e-3}.get(kind, 0.06)  # the cpu backend rounds activations to int8
        assert np.abs(rows["cpu"] - rows["reference"]).max() < times * limit * expected.std()


def with_config(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    config = {**checkpoint.metadata["config"], **changes}
    return replace(checkpoint, metadata={**checkpoint.metadata, "config": config})


def test_variants_without_a_key_in_files_are_refused(folder: Callable[[str], Path]) -> None:
    for name, changes, message in (
        ("mistral3", {"vision_feature_layer": -2}, "vision_feature_layer' is -2"),
        ("mistral3", {"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ("llava", {"vision_feature_select_strategy": "default"}, "select_strategy"),
    ):
        checkpoint = open_projector(folder(name))
        checkpoint = with_config(checkpoint, **changes)
        with pytest.raises(UnsupportedModelError, match=message):
            read_vision_config(checkpoint)
    checkpoint = open_projector(folder("gemma4"))
    vision = {**checkpoint.metadata["config"]["vision_config"], "rope_parameters": {"rope_theta": 10.0}}
    checkpoint = with_config(checkpoint, vision_config=vision)
    with pytest.raises(UnsupportedModelError, match=r"rope_theta' is 10\.0"):
        read_vision_config(checkpoint)


def test_clip_towers_of_llava_are_refused(folder: Callable[[str], Path]) -> None:
    checkpoint = open_projector(folder("llava"))
    vision = {**checkpoint.metadata["config"]["vision_config"], "model_type": "clip_vision_model"}
    checkpoint = with_config(checkpoint, vision_config=vision)
    with pytest.raises(UnsupportedModelError, match="'clip_vision_model': only 'pixtral' is supported"):
        read_vision_config(checkpoint)


def test_limits_that_cross_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    convert_projector(open_projector(folder("gemma4_e")), path, "F32")
    written = open_checkpoint(path)
    tensors = {name: tensor.dequantize() for name, tensor in written.tensors.items()}
    tensors["v.blk.0.attn_q.input_min"] = np.array([9.0], np.float32)
    write_gguf(path, written.metadata, tensors)
    with pytest.raises(ModelFileError, match="input_min"):
        rows_of(path, "gemma4_e", backend("reference"))


def test_products_with_other_limits_of_inputs_are_joined(folder: Callable[[str], Path]) -> None:
    tower, _ = rows_of(folder("gemma4_e"), "gemma4_e", backend("reference"))
    qkv = tower.blocks[0].attention.qkv  # type: ignore[union-attr]
    assert len(qkv.others) == 2
    assert qkv.weight.rows == 48
    with torch.no_grad():
        buffers = dict(tiny_vision.reference_model("gemma4_e").named_buffers())
    low = buffers["model.vision_tower.encoder.layers.0.self_attn.k_proj.input_min"]
    assert qkv.others[0].inputs is not None
    assert qkv.others[0].inputs[0][0] == low.item()
