"""Vision towers against transformers, on random models: rows of images, and logits of prompts with several images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.engine.model_runner import SingleSequence, forward
from llm_worker_rbee.errors import ModelFileError, UnsupportedModelError
from llm_worker_rbee.images.prompt import NO_IMAGES, ImageSpan, PromptImages, find_spans, step_arrays
from llm_worker_rbee.images.sizes import count_tokens, plan_parts
from llm_worker_rbee.models import load_model, read_model_config, vision_config
from llm_worker_rbee.models.convert import convert, merge_adapters
from llm_worker_rbee.models.convert.mmproj import convert_projector
from llm_worker_rbee.models.families import FAMILIES
from llm_worker_rbee.models.lora import ModelAdapters
from llm_worker_rbee.models.vision import VisionTower, load_vision_tower
from llm_worker_rbee.models.vision_config import FAMILIES as VISION_FAMILIES
from llm_worker_rbee.models.vision_config import open_tower, read_vision_config
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from llm_worker_rbee.weights.lora import read_adapter
from llm_worker_rbee.weights.vision_names import find_projectors, gguf_projector_name, open_projector
from tests.helpers import lora_zoo, tiny_vision
from tests.models.test_convert import add_tokenizer

TOLERANCE = 1e-4  # of the deviation
LOGITS_TOLERANCE = {"gemma4": 3e-4, "gemma4_e": 3e-4}  # whose scores are not divided
SIZES = ((100, 150), (301, 80), (60, 60))
BACKENDS = ("reference", "cpu")
QUANTIZED_TOLERANCE = {"F16": 0.02, "Q8_0": 0.08}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a random model, saved once."""
    root = tmp_path_factory.mktemp("vision")

    def save(name: str) -> Path:
        path = root / name
        return path if path.exists() else add_tokenizer(tiny_vision.save_model(name, path))

    return save


def backend(name: str) -> Backend:
    return select_backend("cpu", name, threads=2 if name == "cpu" else None)


def tower_of(path: Path, ops: Backend) -> VisionTower:
    return load_vision_tower(open_projector(path), ops, "float32")


def pictures(*sizes: tuple[int, int]) -> list[Any]:
    rng = np.random.default_rng(11)
    return [tiny_vision.picture(rng, *size) for size in sizes or SIZES]


def deviation(actual: Any, expected: Any) -> float:
    return float(np.abs(actual - expected).max() / expected.std())


@pytest.mark.parametrize("name", tiny_vision.MODELS)
def test_rows_of_images_are_those_of_transformers(name: str, folder: Callable[[str], Path]) -> None:
    towers = [tower_of(folder(name), backend(kind)) for kind in BACKENDS]
    parts, inputs = tiny_vision.plain_parts(name, towers[0].config.images, pictures())
    expected = tiny_vision.reference_rows(name, inputs)
    for tower in towers:
        rows = tower.encode(parts)
        assert [len(part) for part in rows] == [np.prod(tower.config.images.tokens(*p.shape[:2])) for p in parts]
        assert np.concatenate(rows).shape == expected.shape
        assert deviation(np.concatenate(rows), expected) < TOLERANCE
    assert towers[1].fused is not None


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "mistral3", "gemma4_e"])
def test_part_has_the_same_bits_alone_and_among_others(name: str, folder: Callable[[str], Path]) -> None:
    tower = tower_of(folder(name), backend("cpu"))
    parts, _ = tiny_vision.plain_parts(name, tower.config.images, pictures((140, 90), (90, 200), (70, 70)))
    together = tower.encode(parts)
    for part, rows in zip(parts, together, strict=True):
        np.testing.assert_array_equal(tower.encode([part])[0], rows)


def test_windows_and_deepstack_count(folder: Callable[[str], Path]) -> None:
    tower = tower_of(folder("qwen2_5_vl"), backend("reference"))
    assert tower.config.window == 2
    assert tower.config.full_layers == {1, 3}
    assert [block.attention.params.spans for block in tower.blocks] == [True, False, True, False]  # type: ignore[union-attr]
    parts, inputs = tiny_vision.plain_parts("qwen2_5_vl", tower.config.images, pictures())
    without = replace(tower, blocks=tuple(replace(block, attention=_without_spans(block)) for block in tower.blocks))
    expected = tiny_vision.reference_rows("qwen2_5_vl", inputs)
    assert deviation(np.concatenate(without.encode(parts)), expected) > 100 * TOLERANCE
    deep = tower_of(folder("qwen3_vl"), backend("reference"))
    assert deep.row_width == 3 * deep.config.output_dim


def _without_spans(block: Any) -> Any:
    return replace(block.attention, params=block.attention.params._replace(spans=False))


def run_prompt(
    model: Any,
    tower: VisionTower,
    parts: list[Any],
    ids: list[int],
    spans: list[ImageSpan],
    steps: list[int],
    adapter: int = -1,
) -> Any:
    """Return the logits of all tokens, computed in steps that end at these tokens."""
    images = PromptImages(spans, parts, [b""] * len(parts))
    images.rows = list(tower.encode(parts))
    sequence, logits, start = SingleSequence(model, len(ids)), [], 0
    for stop in (*steps, len(ids)):
        batch = sequence.batch(ids[start:stop], start, all_logits=True)
        fields = arrays(model, images, start, stop, batch.ids if model.pads_images else None)
        if adapter >= 0:
            count = stop - start
            fields |= {"adapters": np.full(count, adapter), "adapter_scales": np.ones(count, np.float32)}
        logits.append(forward(model, replace(batch, **fields), sequence.cache))
        start = stop
    return np.concatenate(logits)


def arrays(model: Any, images: PromptImages, start: int, stop: int, ids: Any = None) -> dict[str, Any]:
    chunks = [(images, start, stop)]
    return step_arrays(chunks, has_axes=model.has_axes, sees_both_ways=model.sees_both_ways, ids=ids)


@pytest.mark.parametrize("name", tiny_vision.MODELS)
def test_logits_of_a_prompt_with_images_are_those_of_transformers(name: str, folder: Callable[[str], Path]) -> None:
    rng = np.random.default_rng(5)
    for kind in BACKENDS:
        ops = backend(kind)
        tower, checkpoint = tower_of(folder(name), ops), open_checkpoint(folder(name))
        config = read_model_config(checkpoint)
        model = load_model(checkpoint, ops, config, image_parts=tower.row_width // config.d_model)
        parts, inputs = tiny_vision.plain_parts(name, tower.config.images, pictures(*SIZES[:2]))
        gap = int(bool(tower.config.family.prompt.row_end))
        ids, spans = tiny_vision.image_prompt(rng, tower.config.images, parts, gap)
        assert find_spans(ids, tiny_vision.IMAGE_TOKEN, [span[1:3] for span in spans]) == spans
        expected = tiny_vision.reference_logits(name, ids, inputs)
        behind = spans[-1].stop + 3
        actual = run_prompt(model, tower, parts, ids, spans, [behind, behind + 1])
        tolerance = LOGITS_TOLERANCE.get(name, TOLERANCE)
        assert deviation(actual, expected) < tolerance
        assert model.sees_both_ways == (name in ("gemma3", "gemma4"))
        if not model.sees_both_ways:  # those whose images no step may cut
            middle = (spans[0].start + spans[0].stop) // 2
            assert deviation(run_prompt(model, tower, parts, ids, spans, [middle, behind]), expected) < tolerance
        else:
            blind = replace(tower_images(model), fused=None)
            assert deviation(run_prompt(blind, tower, parts, ids, spans, []), expected) > 100 * TOLERANCE


def tower_images(model: Any) -> Any:
    """Return the decoder with attention that looks back alone, op by op."""
    blocks = tuple(replace(block, attention=_without_spans(block)) for block in model.blocks)
    return replace(model, blocks=blocks, fused_images=None)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "mistral3", "gemma4_e"])
def test_adapters_change_prompts_with_images(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """As in a model into which the adapter is merged."""
    source = folder(name)
    checkpoint, config = open_checkpoint(source), read_model_config(open_checkpoint(source))
    adapter = read_adapter(lora_zoo.write_random_peft(source, tmp_path / "adapter", rank=4, size=4))
    for kind in BACKENDS:
        ops = backend(kind)
        tower = tower_of(source, ops)
        parts, _ = tiny_vision.plain_parts(name, tower.config.images, pictures(*SIZES[:1]))
        gap = int(bool(tower.config.family.prompt.row_end))
        ids, spans = tiny_vision.image_prompt(np.random.default_rng(5), tower.config.images, parts, gap)
        image_parts = tower.row_width // config.d_model
        plain = load_model(checkpoint, ops, config, image_parts=image_parts)
        slots = ModelAdapters(plain, checkpoint, 8, 1)
        slots.place(0, slots.pack(adapter))
        merged = load_model(merge_adapters(checkpoint, [(adapter, 1.0)]), ops, config, image_parts=image_parts)
        behind = spans[-1].stop + 2
        actual = run_prompt(replace(plain, adapters=slots), tower, parts, ids, spans, [behind], adapter=0)
        assert deviation(actual, run_prompt(merged, tower, parts, ids, spans, [])) < 5e-3
        assert deviation(actual, run_prompt(plain, tower, parts, ids, spans, [])) > 0.1


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_are_those_of_transformers(name: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        ids, spans, grids = list[int](), list[ImageSpan](), list[list[int]]()
        for _ in range(int(rng.integers(1, 4))):
            ids += [1] * int(rng.integers(1, 9))
            rows, columns = (int(n) for n in rng.integers(1, 8, 2))
            spans.append(ImageSpan(len(ids), rows, columns))
            ids += [tiny_vision.IMAGE_TOKEN] * (rows * columns)
            grids.append([1, 2 * rows, 2 * columns])
        ids += [1] * 5
        kinds = torch.tensor([[int(token == tiny_vision.IMAGE_TOKEN) for token in ids]])
        model = tiny_vision.reference_model(name).model
        expected, delta = model.get_rope_index(torch.tensor([ids]), kinds, torch.tensor(grids))
        images = PromptImages(spans, [], [])
        np.testing.assert_array_equal(images.rope_positions(0, len(ids)), expected[:, 0].numpy().T)
        assert images.delta == delta.item()
        late = step_arrays([(images, len(ids) + 7, len(ids) + 9)], has_axes=True, sees_both_ways=True)
        np.testing.assert_array_equal(late["rope_positions"][:, 0], np.arange(2) + len(ids) + 7 + images.delta)
        assert list(late) == ["rope_positions"]


@pytest.mark.parametrize("name", tiny_vision.MODELS)
def test_text_has_the_bits_of_a_model_without_images(name: str, folder: Callable[[str], Path]) -> None:
    ops, checkpoint = backend("cpu"), open_checkpoint(folder(name))
    config, ids = read_model_config(checkpoint), list(range(1, 30))
    tower = tower_of(folder(name), ops)
    models = [load_model(checkpoint, ops, config, image_parts=n) for n in (0, tower.row_width // config.d_model)]
    results = []
    for model in models:
        sequence = SingleSequence(model, len(ids))
        batch = sequence.batch(ids, 0, all_logits=True)
        batch = replace(batch, **arrays(model, NO_IMAGES, 0, len(ids)))
        results.append(forward(model, batch, sequence.cache))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", tiny_vision.MODELS)
def test_pair_of_files_gives_what_the_folder_gives(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    ops, source = backend("cpu"), folder(name)
    expected = tower_of(source, ops)
    parts, inputs = tiny_vision.plain_parts(name, expected.config.images, pictures())
    for kind in ("F32", "F16", "Q8_0"):
        path = tmp_path / f"mmproj-{kind}.gguf"
        convert_projector(open_projector(source), path, kind)
        tower = tower_of(path, ops)
        ours, read = expected.config, tower.config
        assert replace(read.model, norm_eps=ours.model.norm_eps) == ours.model
        assert read.model.norm_eps == np.float32(ours.model.norm_eps)
        same = ("output_dim", "table", "window", "full_layers", "deepstack")
        assert [getattr(read, field) for field in same] == [getattr(ours, field) for field in same]
        assert read.images.kind == ours.images.kind
        rows = np.concatenate(tower.encode(parts))
        if kind == "F32":
            np.testing.assert_array_equal(rows, np.concatenate(expected.encode(parts)))
        else:
            assert deviation(rows, tiny_vision.reference_rows(name, inputs)) < QUANTIZED_TOLERANCE[kind]
    text = tmp_path / "model.gguf"
    convert(open_checkpoint(source), text, "F32")
    checkpoint = open_checkpoint(text)
    assert read_model_config(checkpoint).rope_sections == read_model_config(open_checkpoint(source)).rope_sections
    assert find_projectors(text)[0] == tmp_path / "mmproj-F16.gguf"
    assert find_projectors(source) == [source]


def test_projector_of_a_projector_is_the_same(folder: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = tmp_path / "a-mmproj.gguf", tmp_path / "b-mmproj.gguf"
    convert_projector(open_projector(folder("gemma3")), first, "F32")
    convert_projector(open_projector(first), second, "F32")
    a, b = open_projector(first), open_projector(second)
    assert list(a.tensors) == list(b.tensors)
    assert all((tensor.data == b.tensors[name].data).all() for name, tensor in a.tensors.items())


def test_old_files_with_swapped_mlps_are_read(folder: Callable[[str], Path], tmp_path: Path) -> None:
    source, ops = open_projector(folder("idefics3")), backend("reference")
    path = tmp_path / "old-mmproj.gguf"
    convert_projector(source, path, "F32")
    written = open_checkpoint(path)
    swap = {".ffn_up.": ".ffn_down.", ".ffn_down.": ".ffn_up."}
    names = {name: next((name.replace(a, b) for a, b in swap.items() if a in name), name) for name in written.tensors}
    metadata = {key: value for key, value in written.metadata.items() if key != "general.alignment"}
    tensors = {names[name]: tensor.dequantize() for name, tensor in written.tensors.items()}
    write_gguf(path, metadata, tensors)
    parts, _ = tiny_vision.plain_parts("idefics3", read_vision_config(source).images, pictures())
    for part, rows in zip(
        tower_of(path, ops).encode(parts), tower_of(folder("idefics3"), ops).encode(parts), strict=True
    ):
        np.testing.assert_array_equal(part, rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.projector_type": "gemma4uv"}, "projector type 'gemma4uv' is not supported"),
        ({"clip.use_gelu": False}, "quick GELU"),
        ({"clip.vision.attention.head_count": 5}, "head_count"),
        ({"clip.vision.block_count": 9}, "is missing: the metadata says 9 layers"),
        ({"general.architecture": "llama"}, "a projector file"),
        ({"clip.vision.image_size": 42}, "a side"),
    ],
)
def test_wrong_files_are_refused_by_name(
    changes: dict[str, Any], message: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "mmproj.gguf"
    convert_projector(open_projector(folder("gemma3")), path, "F32")
    written = open_checkpoint(path)
    tensors = {name: tensor.dequantize() for name, tensor in written.tensors.items()}
    write_gguf(path, {**written.metadata, **changes}, tensors)
    with pytest.raises(ModelFileError, match=message):
        tower_of(path, backend("reference"))


def test_folder_without_a_known_tower_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="no vision tower"):
        open_projector(tmp_path)
    checkpoint = open_projector(folder("gemma3"))
    other = {**checkpoint.metadata, "config": {**checkpoint.metadata["config"], "model_type": "gemma4_unified"}}
    with pytest.raises(UnsupportedModelError, match="'gemma4_unified' is not supported"):
        read_vision_config(replace(checkpoint, metadata=other))
    preprocessor = {**checkpoint.metadata, "preprocessor": {"do_pan_and_scan": True}}
    with pytest.raises(UnsupportedModelError, match="do_pan_and_scan"):
        read_vision_config(replace(checkpoint, metadata=preprocessor))


def test_names_of_projector_files_are_those_of_llama_cpp(folder: Callable[[str], Path]) -> None:
    names = {gguf_projector_name(name) for name in open_projector(folder("qwen3_vl")).tensors}
    assert names >= {
        "v.patch_embd.weight", "v.position_embd.weight", "v.blk.0.ln1.weight", "v.blk.1.attn_qkv.bias",
        "v.blk.1.attn_out.weight", "v.blk.0.ffn_up.weight", "v.post_ln.weight", "v.deepstack.2.fc1.weight",
        "v.deepstack.0.norm.bias", "mm.0.weight", "mm.2.bias",
    }  # fmt: skip


def test_projector_of_another_family_is_refused(folder: Callable[[str], Path]) -> None:
    """Qwen2.5-VL and Qwen3-VL agree in all else: the width, M-RoPE, the token."""
    checkpoint = open_checkpoint(folder("qwen3_vl"))
    with pytest.raises(
        ModelFileError, match=r"\(qwen2.5vl_merger\) and .*\(qwen3vl\) .* a model of qwen2vl: yes and no"
    ):
        open_tower(checkpoint, read_model_config(checkpoint), folder("qwen2_5_vl"))
    known = {family.name for family in FAMILIES}
    assert {name for family in VISION_FAMILIES for name in family.text} <= known


@pytest.mark.parametrize("name", tiny_vision.MODELS)
def test_projector_of_the_same_folder_belongs_to_its_model(name: str, folder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(folder(name))
    assert open_tower(checkpoint, read_model_config(checkpoint), folder(name))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("name", tiny_vision.MODELS)
def test_steps_are_planned_for_the_largest_part(
    name: str, kind: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = folder(name)
    if kind == "gguf":
        path = tmp_path / "mmproj.gguf"
        convert_projector(open_projector(folder(name)), path, "F32")
    config = read_vision_config(open_projector(path))
    most, images = config.part_patches, config.images
    plans = [plan_parts(*size, images) for size in ((900, 900), (600, 900), (900, 300), (30, 30))]
    patches = [height * width // images.patch**2 for plan in plans for height, width in plan.sizes]
    assert most / 2 < max(patches) <= most
    assert config.step_patches == vision_config.STEP_PATCHES > most
    assert config.step_bytes > 4 * vision_config.STEP_PATCHES * config.model.d_ff


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "mistral3"])
def test_images_with_sizes_of_their_own_are_made_smaller(name: str, folder: Callable[[str], Path]) -> None:
    config = read_vision_config(open_projector(folder(name)))
    for limit in (4, 12):
        images = config.limit_images(limit)
        for size in ((900, 900), (600, 900), (900, 300)):
            assert 0 < count_tokens(plan_parts(*size, images), images) <= limit
    large = config.images._replace(longest_edge=2048, max_pixels=2048 * 2048)
    (height, width), (low_height, low_width) = (
        plan_parts(2000, 1000, settings).sizes[0] for settings in (large, large.with_detail("low"))
    )
    assert low_height * low_width <= 513 * 513 < height * width


def test_tokens_are_counted_before_anything_is_decoded() -> None:
    rng = np.random.default_rng(2)
    settings = read_settings()
    for name, one in settings.items():
        for _ in range(30):
            height, width = (int(n) for n in rng.integers(20, 300, 2))
            parts, _ = tiny_vision.plain_parts(name, one, [tiny_vision.picture(rng, height, width)])
            counted = count_tokens(plan_parts(height, width, one), one)
            assert counted == sum(np.prod(one.tokens(*part.shape[:2])) for part in parts)


def read_settings() -> dict[str, Any]:
    """Return the settings of each family's tiny model."""
    return {name: tiny_vision.settings_of(name) for name in ("qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3")}
