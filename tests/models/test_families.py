"""Each family against transformers: from safetensors, and from a GGUF of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.helpers import model_runs, model_zoo

TOLERANCE = 1e-3
WEIGHTS = "model.safetensors"
NEW_TOKENS = 12

# GGUF files of others have the same weights as the model that they were made of.
READ_BY_TRANSFORMERS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")

Made = tuple[model_zoo.Variant, Any, Path, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a zoo model by name: (variant, transformers model, safetensors folder, GGUF file), made once."""
    cache: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            variant = model_zoo.ZOO[name]
            model = model_zoo.make_hf(variant)
            hf = model_zoo.save_hf(model, folder / "hf")
            cache[name] = variant, model, hf, model_zoo.save_gguf(variant, model, folder / f"{name}.gguf")
        return cache[name]

    return make


def largest_difference(ours: model_runs.Transformer, theirs: Any, ids: list[int]) -> float:
    return float(np.abs(model_runs.compute_logits(ours, ids) - model_zoo.hf_logits(theirs, ids)).max())


def load_gguf_with_transformers(gguf: Path, config: Any) -> Any:
    """Load weights from the GGUF, the shape from `config`: transformers reads only some keys."""
    as_llama = config.model_type == "mistral"  # GGUF files of Mistral are llama files
    shape = transformers.LlamaConfig(**{**config.to_dict(), "model_type": "llama"}) if as_llama else config
    torch.manual_seed(99)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, config=shape, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if not as_llama:
        return loaded
    mistral = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    mistral.load_state_dict(loaded.state_dict())
    return mistral


@pytest.mark.parametrize("name", model_zoo.ZOO)
def test_family_safetensors_equals_transformers(name: str, made: Callable[[str], Made]) -> None:
    variant, theirs, hf, _ = made(name)
    ids = model_zoo.prompt_ids(variant)
    expected = model_zoo.hf_logits(theirs, ids)
    assert expected.max() - expected.min() >= 5, "the check would be vacuous"
    ours = model_runs.load(hf, variant.max_context)
    assert largest_difference(ours, theirs, ids) < TOLERANCE
    assert model_runs.greedy(ours, ids, NEW_TOKENS) == model_zoo.hf_greedy(theirs, ids, NEW_TOKENS)


@pytest.mark.parametrize("name", [n for n in model_zoo.ZOO if n not in model_zoo.NO_GGUF_KEY])
def test_family_gguf_equals_transformers(name: str, made: Callable[[str], Made]) -> None:
    variant, model, _, gguf = made(name)
    is_read = model.config.model_type in READ_BY_TRANSFORMERS
    theirs = load_gguf_with_transformers(gguf, model.config) if is_read else model
    ids = model_zoo.prompt_ids(variant, seed=8)
    ours = model_runs.load(gguf, variant.max_context)
    assert largest_difference(ours, theirs, ids) < TOLERANCE
    assert model_runs.greedy(ours, ids, NEW_TOKENS) == model_zoo.hf_greedy(theirs, ids, NEW_TOKENS)


QUANTIZED = [("llama", "Q8_0"), ("llama-tied", "Q4_0"), ("mistral", "Q4_0"), ("qwen2", "Q5_0"), ("qwen3", "Q4_1"),
             ("phi3", "Q5_1"), ("gemma2", "Q8_0")]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), QUANTIZED)
def test_family_quantized_gguf_equals_transformers(
    name: str, kind: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Quantized rows are permuted whole, fused ones stay together: transformers dequantizes the same file."""
    variant, model, _, _ = made(name)
    path = tmp_path / f"{name}.gguf"
    model_zoo.save_quantized(variant, model, path, kind)
    theirs = load_gguf_with_transformers(path, model.config)
    ids = model_zoo.prompt_ids(variant, seed=9)
    ours = model_runs.load(path, variant.max_context)
    assert ours.blocks[0].attention.output.weight.parts[0].kind.name == kind
    assert largest_difference(ours, theirs, ids) < TOLERANCE
    assert model_runs.greedy(ours, ids, NEW_TOKENS) == model_zoo.hf_greedy(theirs, ids, NEW_TOKENS)


CHUNKED = (
    "llama", "mistral-window", "gemma2", "gemma3", "phi3-long", "ministral3", "olmo3", "lfm2", "lfm2-wide",
    "qwen3_5", "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 5, 23])
@pytest.mark.parametrize("name", CHUNKED)
def test_family_chunked_prefill_equals_whole_prefill(name: str, chunk: int, made: Callable[[str], Made]) -> None:
    variant, theirs, hf, _ = made(name)
    ids = model_zoo.prompt_ids(variant)
    ours = model_runs.load(hf, variant.max_context)
    assert np.abs(model_runs.compute_logits(ours, ids, chunk) - model_zoo.hf_logits(theirs, ids)).max() < TOLERANCE


DENSE = ("granite", "smollm3", "ministral3", "olmo2", "olmo3", "glm4", "lfm2")


@pytest.mark.parametrize("name", DENSE)
def test_tensor_names_are_those_of_the_gguf_package(name: str, made: Callable[[str], Made]) -> None:
    variant, model, folder, _ = made(name)
    (arch,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == model_zoo.architecture_of(variant))
    known = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    names = {known.get_name(key, (".weight", ".bias")) for key in load_file(folder / "model.safetensors")}
    assert names == open_checkpoint(folder).tensors.keys()


FEATURES = [(name, feature) for name, variant in model_zoo.ZOO.items() for feature in variant.features]


@pytest.mark.parametrize(("name", "feature"), FEATURES)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_family_without_a_feature_differs(name: str, feature: str, form: str, made: Callable[[str], Made]) -> None:
    variant, theirs, hf, gguf = made(name)
    if form == "gguf" and name in model_zoo.NO_GGUF_KEY:
        form = "safetensors"
    ids = model_zoo.prompt_ids(variant)
    broken = model_runs.load_without(hf if form == "safetensors" else gguf, feature, variant.max_context)
    assert largest_difference(broken, theirs, ids) > 10 * TOLERANCE


def test_linear_attention_loads_beside_images_and_heads_that_predict_more_tokens(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Vision towers are left out, and layers of multi-token prediction: behind the others in a GGUF, else `mtp`."""
    variant, theirs, hf, _ = made("qwen3_5")
    ids, extra = model_zoo.prompt_ids(variant), np.ones((8, 64), np.float32)
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in load_file(hf / WEIGHTS).items()}
    save_file({**tensors, "model.visual.patch_embed.weight": extra, "mtp.fc.weight": extra}, tmp_path / WEIGHTS)
    text = json.loads((hf / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert largest_difference(model_runs.load(tmp_path), theirs, ids) < TOLERANCE
    keys, named = model_zoo.gguf_metadata(variant, theirs), model_zoo.gguf_tensors(variant, theirs)
    keys |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    more = {"blk.4.nextn.eh_proj.weight": extra, "blk.4.attn_norm.weight": extra[0]}
    path = write_gguf(tmp_path / "m.gguf", keys, {**named, **more})
    assert largest_difference(model_runs.load(path), theirs, ids) < TOLERANCE
