"""Small random models with a head for multi-token prediction, in both forms, and the same head computed by torch.

The head's block is one more layer of a transformers model, which is then left out of the model itself.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llm_worker_rbee.backends.ops import Backend
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.mtp import MtpDrafter
from llm_worker_rbee.models import MtpHead, Transformer, load_model_with_head, read_model_config
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.gguf_writer import write_gguf
from tests.helpers import model_zoo

Floats = NDArray[np.float32]
WEIGHTS = "model.safetensors"
FULL, LINEAR = "full_attention", "linear_attention"
QWEN = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, FULL], "max_position_embeddings": 256}
VARIANTS = {
    "qwen3_5": model_zoo.Variant("qwen3_5_text", {**model_zoo.QWEN_MROPE, **QWEN}),
    "qwen3_next": model_zoo.Variant("qwen3_next", {**model_zoo.QWEN_LINEAR, **model_zoo.QWEN_EXPERTS, **QWEN}),
    "glm4moe": replace(
        model_zoo.ZOO["glm4moe"], settings={**model_zoo.ZOO["glm4moe"].settings, "max_position_embeddings": 256}
    ),
}
# in a GGUF after `nextn.`, in files of Qwen after `mtp.`, and in a layer of GLM
NAMES = {
    "eh_proj": ("fc", "eh_proj"), "enorm": ("pre_fc_norm_embedding", "enorm"), "hnorm": ("pre_fc_norm_hidden", "hnorm"),
    "shared_head_norm": ("norm", "shared_head.norm"),
}  # fmt: skip
SILENT = ("o_proj", "out_proj", "down_proj")  # without these a layer adds nothing


@dataclass(frozen=True)
class MtpModel:
    """A transformers model whose last layer is that of the head, and the other weights of the head."""

    variant: model_zoo.Variant
    hf: Any
    weights: dict[str, Floats]

    @property
    def n_layers(self) -> int:
        return int(self.hf.config.num_hidden_layers) - 1

    def save_gguf(self, path: Path, **more_keys: Any) -> Path:
        keys, tensors = model_zoo.gguf_metadata(self.variant, self.hf), model_zoo.gguf_tensors(self.variant, self.hf)
        keys[f"{keys['general.architecture']}.nextn_predict_layers"] = 1
        more = {f"blk.{self.n_layers}.nextn.{name}.weight": weight for name, weight in self.weights.items()}
        return write_gguf(path, {**keys, **more_keys}, {**tensors, **more})

    def save_hf(self, folder: Path) -> Path:
        model_zoo.save_hf(self.hf, folder)
        tensors, layer = load_file(folder / WEIGHTS), f"model.layers.{self.n_layers}."
        settings = json.loads((folder / "config.json").read_text())
        settings["num_hidden_layers"] = self.n_layers
        is_qwen, offset = "qwen" in self.variant.family, np.float32(0)
        if is_qwen:
            tensors = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
            settings["layer_types"], layer, offset = settings["layer_types"][:-1], "mtp.", np.float32(1)
        else:
            settings["num_nextn_predict_layers"] = 1
        for name, weight in self.weights.items():
            stored = weight - offset if "norm" in name else weight
            tensors[f"{layer}{NAMES[name][0 if is_qwen else 1]}.weight"] = stored
        save_file(tensors, folder / WEIGHTS)
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    def expected(self, ids: list[int]) -> tuple[Floats, Floats]:
        """Return the logits of the model, and of its head at every token: from this token and the hidden state before
        it, zeros for the first."""
        import torch

        base, head = self._part(slice(None, -1)), self._part(slice(-1, None))
        weights = {name: torch.tensor(weight) for name, weight in self.weights.items()}

        def norm(x: Any, name: str) -> Any:
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[name], base.config.rms_norm_eps)

        with torch.no_grad():
            hidden = base.model(torch.tensor([ids]), use_cache=False).last_hidden_state
            before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
            embedded = base.model.embed_tokens(torch.tensor([ids]))
            joined = torch.cat([norm(embedded, "enorm"), norm(before, "hnorm")], -1)
            head.model.norm = torch.nn.Identity()
            x = joined @ weights["eh_proj"].T
            made = head.model(inputs_embeds=x, use_cache=False).last_hidden_state
            drafted = base.lm_head(norm(made, "shared_head_norm"))
            return base.lm_head(hidden)[0].numpy(), drafted[0].numpy()

    def _part(self, layers: slice) -> Any:
        """Return a model of some layers."""
        made = copy.deepcopy(self.hf)
        made.model.layers = made.model.layers[layers]
        made.config.num_hidden_layers = len(made.model.layers)
        if getattr(made.config, "layer_types", None):
            made.config.layer_types = made.config.layer_types[layers]
        return made


def make(name: str, *, predicts_well: bool = False, vocab_size: int = model_zoo.VOCAB) -> MtpModel:
    """Return a random model; with `predicts_well` the next token follows from the last one, in the head too."""
    import torch

    variant = VARIANTS[name]
    variant = replace(variant, settings={**variant.settings, "vocab_size": vocab_size})
    hf, rng = model_zoo.make_hf(variant), np.random.default_rng(5)
    width = hf.config.hidden_size
    weights = {norm: rng.uniform(0.5, 1.5, width).astype(np.float32) for norm in NAMES if "norm" in norm}
    weights["eh_proj"] = (rng.standard_normal((width, 2 * width)) * 1.5 / (2 * width) ** 0.5).astype(np.float32)
    if predicts_well:
        with torch.no_grad():
            for key, weight in hf.named_parameters():
                if key.split(".")[-2] in SILENT:
                    weight.zero_()
        final = hf.model.norm.weight.detach().numpy() + (1 if "qwen" in variant.family else 0)
        weights |= {"enorm": np.ones(width, np.float32), "shared_head_norm": final.astype(np.float32)}
        weights["eh_proj"] = np.concatenate([np.eye(width), np.zeros((width, width))], 1).astype(np.float32)
    return MtpModel(variant, hf, weights)


def load(path: Path, ops: Backend, kv_type: str = "float32") -> tuple[Transformer, MtpHead]:
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    ops.load_kernels(checkpoint, config, kv_type)
    return load_model_with_head(checkpoint, ops, config)


def engine(model: Transformer, head: MtpHead | None, kv_type: str = "float32", **options: Any) -> Engine:
    """Return an engine that drafts with a head, or plain without."""
    settings = {"max_context": 128, "n_blocks": 64, "target_itl_ms": 1e9, "debug": True, **options}
    config = EngineConfig(**settings)
    return Engine(model, config, kv_type, None if head is None else MtpDrafter(head, config, kv_type))
