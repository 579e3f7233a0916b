"""Tiny random models that see images, of each family, built and saved by transformers; and pictures for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from llm_worker_rbee.backends.ops import RopeTable
from llm_worker_rbee.images.decode_process import cut_parts
from llm_worker_rbee.images.prompt import ImageSpan
from llm_worker_rbee.images.sizes import ImageSettings, plan_parts
from llm_worker_rbee.models.vision_config import read_vision_config
from llm_worker_rbee.weights import Checkpoint, Tensor
from llm_worker_rbee.weights.quants import BLOCK_TYPES

TEXT = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip


class Width(NamedTuple):
    """The shape of a tower's blocks."""

    hidden: int
    d_ff: int
    heads: int

    def sizes(self) -> dict[str, int]:
        return {"hidden_size": self.hidden, "intermediate_size": self.d_ff}


WIDTH, WIDE = Width(48, 80, 3), Width(256, 512, 4)  # blocks of Q4_K have 256 values
UNALIGNED = 84  # width of an MLP whose rows do not begin at 16 bytes
IMAGE_TOKEN, BREAK_TOKEN = 100, 99
SIZES = ("image_sizes", "image_position_ids")  # what transformers' processors say of them
SPECIAL = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}


def _qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = TEXT | {"rope_parameters": rope, "tie_word_embeddings": False, "num_attention_heads": 2}
    vision = {
        "depth": 4, **WIDTH.sizes(), "num_heads": WIDTH.heads, "patch_size": 14, "window_size": 56,
        "intermediate_size": UNALIGNED,
        "fullatt_block_indexes": [1, 3], "out_hidden_size": 64,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **SPECIAL)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {
        "depth": 3, **WIDTH.sizes(), "num_heads": WIDTH.heads, "patch_size": 16,
        "out_hidden_size": 64, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **SPECIAL)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_5() -> Any:
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }  # fmt: skip
    text = TEXT | {
        "rope_parameters": rope, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    vision = {
        "depth": 2, **WIDTH.sizes(), "num_heads": WIDTH.heads, "patch_size": 16,
        "out_hidden_size": 64, "num_position_embeddings": 36,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **SPECIAL)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _gemma3() -> Any:
    text = TEXT | {"sliding_window": 16, "num_hidden_layers": 6, "query_pre_attn_scalar": 32}
    vision = {
        **WIDTH.sizes(), "num_hidden_layers": 2, "num_attention_heads": WIDTH.heads, "image_size": 56,
        "patch_size": 7, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=16, image_token_id=IMAGE_TOKEN, boi_token_id=102,
        eoi_token_id=103,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _idefics3(kind: str) -> Any:
    text = TEXT | {"model_type": "llama", "pad_token_id": 0}
    vision = {
        **WIDTH.sizes(), "num_hidden_layers": 2, "num_attention_heads": WIDTH.heads, "image_size": 48,
        "patch_size": 8,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, scale_factor=3, image_token_id=IMAGE_TOKEN
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _pixtral(kind: str) -> Any:
    text = TEXT | {"model_type": "mistral", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    vision = {
        "model_type": "pixtral", **WIDTH.sizes(), "num_hidden_layers": 2,
        "num_attention_heads": WIDTH.heads, "patch_size": 8, "image_size": 128, "hidden_act": "silu",
    }  # fmt: skip
    more = {"vision_feature_select_strategy": "full"} if kind == "Llava" else {"multimodal_projector_bias": False}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1,
        tie_word_embeddings=False, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _gemma4(*, small: bool) -> Any:
    """Return a model like E2B, with per-layer embeddings and limits of products, or one like 31B."""
    text = TEXT | {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64, "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "pad_token_id": 0,
        "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16 if small else 0,
        "use_bidirectional_attention": None if small else "vision",
    }  # fmt: skip
    vision = {
        **WIDTH.sizes(), "num_hidden_layers": 2, "num_attention_heads": WIDTH.heads,
        "head_dim": WIDTH.hidden // WIDTH.heads,
        "num_key_value_heads": WIDTH.heads, "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 1024,
        "use_clipped_linears": small, "standardize": not small,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, boi_token_id=102, eoi_token_id=103,
        video_token_id=104, audio_token_id=105,
    )  # fmt: skip
    return transformers.Gemma4ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_5, "gemma3": _gemma3,
    "idefics3": lambda: _idefics3("Idefics3"), "smolvlm": lambda: _idefics3("SmolVLM"),
    "llava": lambda: _pixtral("Llava"), "mistral3": lambda: _pixtral("Mistral3"),
    "gemma4": lambda: _gemma4(small=False), "gemma4_e": lambda: _gemma4(small=True),
}  # fmt: skip
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64, "patch_size": 14},
    "qwen3_vl": {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}, "patch_size": 16, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "gemma3": {"size": {"height": 56, "width": 56}},
    "idefics3": {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": 48}},
}  # fmt: skip
PREPROCESSORS |= {
    "llava": {"size": {"longest_edge": 128}, "patch_size": 8},
    "mistral3": {"size": {"longest_edge": 128}, "patch_size": 16},
    "gemma4": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
}  # fmt: skip
PREPROCESSORS |= {"gemma4_e": PREPROCESSORS["gemma4"]}
PREPROCESSORS |= {"qwen3_5": PREPROCESSORS["qwen3_vl"], "smolvlm": PREPROCESSORS["idefics3"]}
PROCESSOR_OF = {
    "qwen2_5_vl": "Qwen2VLImageProcessorPil", "qwen3_vl": "Qwen2VLImageProcessorPil",
    "qwen3_5": "Qwen2VLImageProcessorPil", "gemma3": "Gemma3ImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil",
    "smolvlm": "SmolVLMImageProcessorPil", "llava": "PixtralImageProcessorPil", "mistral3": "PixtralImageProcessorPil",
    "gemma4": "Gemma4ImageProcessorPil", "gemma4_e": "Gemma4ImageProcessorPil",
}  # fmt: skip


@cache
def reference_model(name: str) -> Any:
    """Return a random model in float32, its parameters larger than transformers begins with."""
    torch.manual_seed(7)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.7 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for limit, buffer in model.named_buffers():
            if limit.endswith(("std_bias", "std_scale")):
                buffer.copy_(torch.randn_like(buffer) * 0.3 + limit.endswith("scale"))
            elif limit.endswith(("put_min", "put_max")):
                buffer.fill_(float(torch.rand(()) * 0.5 + 0.7) * (-1 if limit.endswith("min") else 1))
    return model


def image_processor(name: str) -> Any:
    """Return transformers' image processor that uses Pillow, with the settings of the saved folder."""
    return getattr(transformers, PROCESSOR_OF[name])(**PREPROCESSORS[name])


def save_model(name: str, folder: Path) -> Path:
    """Save a random model with the settings of its image processor."""
    reference_model(name).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))
    return folder


def picture(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Return a random picture with slow and fast changes."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x * rng.uniform(0.01, 0.5) + y * rng.uniform(0.01, 0.5) + rng.uniform(0, 6)) for _ in range(3)]
    noisy = np.stack(waves, axis=-1) * 90 + 128 + rng.normal(0, 20, (height, width, 3))
    return noisy.clip(0, 255).astype(np.uint8)


def plain_parts(name: str, settings: Any, pictures: list[NDArray[np.uint8]]) -> tuple[list[NDArray[np.uint8]], Any]:
    """Return the parts of pictures as the decoder cuts them, and transformers' inputs for the same pictures."""
    parts = list[NDArray[np.uint8]]()
    for pixels in pictures:
        plan = plan_parts(*pixels.shape[:2], settings)
        _, data = cut_parts(Image.fromarray(pixels), settings)
        parts += [np.frombuffer(d, np.uint8).reshape(*size, 3) for d, size in zip(data, plan.sizes, strict=True)]
    images = [Image.fromarray(pixels) for pixels in pictures]
    return parts, image_processor(name)([images] if settings.kind == "tiles" else images, return_tensors="pt")


def reference_rows(name: str, inputs: Any) -> NDArray[np.float32]:
    """Return the rows of images that transformers computes, those of deepstack behind the others."""
    grids = {key: inputs[key] for key in ("image_grid_thw", "pixel_attention_mask", *SIZES) if key in inputs}
    if name in ("llava", "mistral3"):
        grids["vision_feature_layer"] = -1
    with torch.no_grad():
        out = reference_model(name).model.get_image_features(inputs["pixel_values"], **grids)
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in out.pooler_output])
    features = getattr(out, "deepstack_features", None) or ()
    return np.concatenate([rows.numpy(), *(torch.cat(list(feature)).numpy() for feature in features)], axis=1)


def image_prompt(
    rng: np.random.Generator, settings: Any, parts: list[NDArray[np.uint8]], gap: int = 0
) -> tuple[list[int], list[ImageSpan]]:
    """Return a prompt with words before, between and behind the parts of images, and where these stand."""
    ids, spans = list[int](), list[ImageSpan]()
    for part in parts:
        ids += rng.integers(1, 90, 5).tolist()
        spans.append(ImageSpan(len(ids), *settings.tokens(*part.shape[:2]), gap))
        ids += [BREAK_TOKEN] * (spans[-1].stop - spans[-1].start)
        for place in spans[-1].offsets():
            ids[spans[-1].start + place] = IMAGE_TOKEN
    return ids + rng.integers(1, 90, 9).tolist(), spans


def reference_logits(name: str, ids: list[int], inputs: Any) -> NDArray[np.float32]:
    """Return the logits of all tokens of a prompt that transformers computes."""
    kinds = torch.tensor([[int(token == IMAGE_TOKEN) for token in ids]])
    more = {key: value for key, value in inputs.items() if key not in ("num_crops", "num_soft_tokens_per_image")}
    if name.startswith(("qwen", "gemma4")):
        more["mm_token_type_ids"] = kinds
    elif name == "gemma3":
        more["token_type_ids"] = kinds
    with torch.no_grad():
        logits: NDArray[np.float32] = reference_model(name)(input_ids=torch.tensor([ids]), **more).logits[0].numpy()
    return logits


def settings_of(name: str) -> ImageSettings:
    """Return our settings of a tiny model's images."""
    config = {"model_type": name, **MODELS[name]().config.to_dict()}
    rows = {"qwen3_vl": 36, "qwen3_5": 36, "gemma3": 64, "idefics3": 36, "smolvlm": 36}.get(name)
    output = Tensor("mm.2.weight", BLOCK_TYPES["F32"], (64, 192), np.zeros(0, np.uint8))
    tensors = {"mm.2.weight": output}
    if rows or name.startswith("gemma4"):
        tensors["position_embd.weight"] = replace(output, shape=(rows, 48) if rows else (2, 1024, 48))
    metadata = {"config": config, "preprocessor": PREPROCESSORS[name]}
    return read_vision_config(Checkpoint(Path(name), "safetensors", name, metadata, tensors, {})).images


STILL = RopeTable(np.zeros(8, np.float32), 1.0)  # of heads of 16 values, which do not turn
