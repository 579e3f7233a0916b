"""Tiny random models that see images, with a tokenizer and a chat template; and transformers' answers to chats."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from llm_worker_rbee.tokenizer.tokenizer import BYTE_TO_CHAR
from tests.helpers import tiny_vision

FIRST_SPECIAL = tiny_vision.IMAGE_TOKEN
SPECIALS = {
    "qwen": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "gemma": ["<image_soft_token>", "<unused0>", "<start_of_image>", "<end_of_image>"],
    "idefics": ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"],
}
SHARED = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
IMAGE_OF = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma": "<start_of_image>", "idefics": "<image>"}
TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n"
    "{%% if m.content is string %%}{{ m.content }}{%% else %%}"
    "{%% for part in m.content %%}"
    "{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
# As SmolVLM's: content must be a list of parts.
PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }}"
    "{% if m.content[0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def kind_of(name: str) -> str:
    return next(kind for kind in SPECIALS if name.replace("smolvlm", "idefics").startswith(kind))


def template_of(name: str) -> str:
    return PARTS_TEMPLATE if name == "smolvlm" else TEMPLATE % IMAGE_OF[kind_of(name)]


def vocabulary(name: str) -> dict[str, int]:
    """Return the ids of bytes, and of control tokens among them at the places that the configuration names."""
    specials = SPECIALS[kind_of(name)] + SHARED
    ids = [i for i in range(256 + len(specials)) if not FIRST_SPECIAL <= i < FIRST_SPECIAL + len(specials)]
    of_bytes = dict(zip((BYTE_TO_CHAR[byte] for byte in range(256)), ids, strict=True))
    return of_bytes | {special: FIRST_SPECIAL + i for i, special in enumerate(specials)}


def save_chat_model(name: str, folder: Path, template: str | None = None) -> Path:
    """Save a random model with its tokenizer and chat template."""
    tiny_vision.save_model(name, folder)
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    specials = SPECIALS[kind_of(name)] + SHARED
    added = [{"id": FIRST_SPECIAL + i, "content": s, "special": True, **flags} for i, s in enumerate(specials)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    source = {
        "version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary(name), "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(source))
    config = {"eos_token": "<|im_end|>", "chat_template": template or template_of(name)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)  # it names ids past this vocabulary
    whole = json.loads((folder / "config.json").read_text())
    for part in (whole, whole["text_config"]):
        part.pop("bos_token_id", None)
        part["eos_token_id"] = FIRST_SPECIAL + len(specials) - len(SHARED) + 1
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def picture_file(seed: int, height: int = 100, width: int = 150) -> bytes:
    """Return the file of a random picture."""
    file = io.BytesIO()
    Image.fromarray(tiny_vision.picture(np.random.default_rng(seed), height, width)).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def reference_answer(name: str, ids: list[int], files: list[bytes], count: int) -> list[int]:
    """Return the greedy answer of transformers to a prompt with these images."""
    pictures = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]
    settings = tiny_vision.settings_of(name)
    inputs: Any = tiny_vision.plain_parts(name, settings, pictures)[1] if files else {}
    ids, start = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(tiny_vision.reference_logits(name, ids, inputs)[-1].argmax()))
    return ids[start:]


torch.set_num_threads(1)
