"""Random LoRA adapters for the models of the zoo: of PEFT, and the same pairs as a GGUF file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.engine.model_runner import SingleSequence
from llm_worker_rbee.engine.request import Request
from llm_worker_rbee.models import Transformer, load_model, read_model_config
from llm_worker_rbee.models.lora import ModelAdapters
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.weights import Checkpoint, open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from llm_worker_rbee.weights.lora import read_adapter
from tests.helpers import model_runs


def linear_names(model: Any, *, with_head: bool = True, with_embedding: bool = True) -> list[str]:
    """Return the last names of the modules of a transformers model that a pair can change."""
    import torch

    names = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    names = {name.rsplit(".", 1)[-1] for name in names if with_head or name != "lm_head"}
    return sorted(names | ({"embed_tokens"} if with_embedding else set()))


def add_adapter(model: Any, seed: int = 0, **settings: Any) -> Any:
    """Return a PEFT model around a model, whose pairs are random and large enough to change the logits."""
    import peft
    import torch

    options = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": linear_names(model), **settings}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                fan_in = weight.shape[-1] if "lora_A" in name else weight.shape[-1] * 4
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.7 / fan_in**0.5)
    return wrapped


def save_adapter(wrapped: Any, folder: Path) -> Path:
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder


def logits_of(model: Any, ids: list[int]) -> NDArray[np.float32]:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].float().numpy())


def load_with(
    path: Path, adapters: list[Path], max_context: int | None = None, backend: str = "reference"
) -> Transformer:
    """Load a model with adapters in its slots 0, 1, ..."""
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, select_backend(backend=backend), read_model_config(checkpoint), max_context)
    slots = ModelAdapters(model, checkpoint, 16, len(adapters))
    for slot, adapter in enumerate(adapters):
        slots.place(slot, slots.pack(read_adapter(adapter)))
    return replace(model, adapters=slots)


def compute_logits(
    path: Path, adapter: Path, ids: list[int], max_context: int | None = None, backend: str = "reference"
) -> NDArray[np.float32]:
    """Return the logits at every position with an adapter."""
    return run(load_with(path, [adapter], max_context, backend), ids, 0)


def run(model: Transformer, ids: list[int], slot: int, scale: float = 1.0, chunk: int = 512) -> NDArray[np.float32]:
    """Return the logits at every position with the adapter of a slot."""
    params = SamplingParams().resolve()
    request = Request(list(ids), params, 1, 0, frozenset(), adapter_slot=slot, adapter_scale=scale)
    runner, parts = SingleSequence(model, len(ids)), []
    while request.num_computed_tokens < len(ids):
        parts.append(model_runs.to_numpy(runner.step(request, chunk, all_logits=True)))
    return np.concatenate(parts)


HF_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_random_peft(
    model: Path, folder: Path, rank: int = 16, seed: int = 0, size: float = 1.0, roles: tuple[str, ...] = ()
) -> Path:
    """Write a PEFT folder with random pairs for the matrices of a model's layers."""
    random, tensors = np.random.default_rng(seed), dict[str, NDArray[np.float32]]()
    for name, tensor in open_checkpoint(model).tensors.items():
        parts = name.split(".")
        if parts[0] == "blk" and parts[-1] == "weight" and parts[2] in (roles or HF_MODULES):
            prefix = f"base_model.model.model.layers.{parts[1]}.{HF_MODULES[parts[2]]}"
            rows, columns = tensor.shape
            a = random.standard_normal((rank, columns), np.float32) / np.float32(columns**0.5)
            b = random.standard_normal((rows, rank), np.float32) * np.float32(0.1 * size / rank**0.5)
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    modules = [HF_MODULES[role].rsplit(".", 1)[-1] for role in roles or HF_MODULES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_gguf_adapter(path: Path, base: Checkpoint, tensors: dict[str, Any], alpha: float = 0.0, **keys: Any) -> Path:
    """Write tensors as a GGUF adapter of a base."""
    metadata = {
        "general.type": "adapter",
        "general.architecture": base.architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
        **keys,
    }
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)
