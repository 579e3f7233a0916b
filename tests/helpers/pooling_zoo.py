"""Small random embedding models and rerankers of every family, made with transformers: folders of sentence-transformers
and GGUF files of the same weights.

Windows are shorter than the sequences, and norms and biases are random. torch and transformers are imported by the
functions that use them: it takes seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.models.families import gguf_architecture, read_model_config
from llm_worker_rbee.models.pooling import PoolingModel
from llm_worker_rbee.models.pooling_config import read_pooling_config
from llm_worker_rbee.models.pooling_loader import load_pooling_model
from llm_worker_rbee.weights import Checkpoint, open_checkpoint
from llm_worker_rbee.weights.encoder_names import is_training_head
from llm_worker_rbee.weights.gguf_writer import Typed, write_gguf

VOCAB, LONGEST = 96, 40
YES, NO = 7, 11  # tokens of a reranker without a classifier
Floats = NDArray[np.float32]
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": LONGEST, "pad_token_id": 0,
}  # fmt: skip
ROBERTA = {"max_position_embeddings": LONGEST + 2, "pad_token_id": 1, "type_vocab_size": 1}
DECODER = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
MODERN = {
    "num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GEMMA = {
    **DECODER, "sliding_window": 8, "use_bidirectional_attention": True, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
ONE_LABEL = {"num_labels": 1}


@dataclass(frozen=True)
class Variant:
    """One member of the zoo."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    mode: str = "mean"  # of pooling: as sentence-transformers names it; "rank" is a classifier
    dense: tuple[tuple[int, int, str], ...] = ()  # (in, out, activation) of each dense layer
    normalizes: bool = True


POOLING_ZOO = {
    "bert": Variant("bert"),
    "bert-cls": Variant("bert", {"hidden_act": "gelu_new"}, "cls", normalizes=False),
    "bert-dense": Variant("bert", dense=((64, 32, "Tanh"),)),
    "xlm-roberta": Variant("xlm-roberta", ROBERTA, "cls"),
    "roberta": Variant("roberta", ROBERTA),
    "nomic": Variant("nomic_bert"),
    "modernbert": Variant("modernbert", MODERN, "cls"),
    "qwen3": Variant("qwen3", DECODER, "lasttoken"),
    "gemma": Variant("gemma3_text", GEMMA, dense=((64, 96, "Identity"), (96, 64, "Identity"))),
    "bert-rank": Variant("bert", ONE_LABEL, "rank"),
    "xlm-roberta-rank": Variant("xlm-roberta", {**ROBERTA, **ONE_LABEL}, "rank"),
    "modernbert-rank": Variant(
        "modernbert", {**MODERN, **ONE_LABEL, "classifier_pooling": "mean", "hidden_activation": "silu"}, "rank"
    ),
    "qwen3-rank": Variant("qwen3", DECODER, "yes-no"),
}
EMBEDDERS = tuple(name for name, variant in POOLING_ZOO.items() if variant.mode not in ("rank", "yes-no"))
NO_GGUF_KEY = {"bert-cls", "bert-dense"}  # activations without a GGUF key
RERANKERS = tuple(name for name in POOLING_ZOO if name not in EMBEDDERS)


def make_hf(variant: Variant, seed: int = 0) -> Any:
    """Return a float32 transformers model with random weights."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(variant.model_type, **{**SHAPE, **variant.settings})
    kind = {"rank": "AutoModelForSequenceClassification", "yes-no": "AutoModelForCausalLM"}.get(
        variant.mode, "AutoModel"
    )
    torch.manual_seed(seed)
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager").float().eval()
    plus_one = variant.model_type == "gemma3_text"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                weight.copy_(torch.rand_like(weight) + 0.5 - (1.0 if plus_one else 0.0))
            elif name.endswith("bias"):
                weight.copy_(torch.randn_like(weight) * 0.5)
            elif "embed" in name:
                weight.copy_(torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * 1.5 / weight.shape[-1] ** 0.5)
    return model


def dense_weights(variant: Variant) -> list[tuple[Floats, Floats | None]]:
    """Return (weight, bias) of each dense layer; those without an activation have no bias."""
    rng = np.random.default_rng(3)
    made: list[tuple[Floats, Floats | None]] = []
    for columns, rows, activation in variant.dense:
        weight = (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        bias = None if activation == "Identity" else rng.standard_normal(rows).astype(np.float32)
        made.append((weight, bias))
    return made


def save_folder(variant: Variant, model: Any, folder: Path) -> Path:
    """Write a folder of sentence-transformers; that of a reranker is of transformers alone."""
    from safetensors.numpy import save_file

    model.save_pretrained(folder)
    if variant.mode == "rank":
        return folder
    names = "sentence_transformers.models."
    modules = [("", f"{names}Transformer")]
    if variant.mode == "yes-no":
        modules.append(("1_LogitScore", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"))
        write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": YES, "false_token_id": NO})
    else:
        modules.append(("1_Pooling", f"{names}Pooling"))
        write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": variant.mode, "include_prompt": True})
    for number, ((weight, bias), layer) in enumerate(zip(dense_weights(variant), variant.dense, strict=True), 2):
        columns, rows, activation = layer
        kind = "linear.Identity" if activation == "Identity" else f"activation.{activation}"
        settings = {"in_features": columns, "out_features": rows, "activation_function": f"torch.nn.modules.{kind}"}
        path = f"{number}_Dense"
        write_json(folder / path / "config.json", {**settings, "bias": bias is not None})
        tensors = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
        save_file(tensors, folder / path / "model.safetensors")
        modules.append((path, f"{names}Dense"))
    if variant.normalizes and variant.mode != "yes-no":
        modules.append(("9_Normalize", f"{names}Normalize"))
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    write_json(folder / "modules.json", listed)
    return folder


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def save_gguf(variant: Variant, folder: Path, path: Path, extra: dict[str, Any] | None = None) -> Path:
    """Write the weights of a folder as GGUF, with the keys of llama.cpp's converter."""
    checkpoint = open_checkpoint(folder)
    tensors = {
        name: gguf_value(variant, name, tensor.dequantize())
        for name, tensor in checkpoint.tensors.items() if not is_training_head(name)
    }  # fmt: skip
    if variant.mode == "yes-no":
        head = tensors.pop("output.weight", tensors["token_embd.weight"])
        tensors["cls.output.weight"] = np.ascontiguousarray(head[[YES, NO]])
    return write_gguf(path, {**gguf_metadata(variant, checkpoint), **(extra or {})}, tensors)


def gguf_value(variant: Variant, name: str, value: Floats) -> Floats:
    is_less_one = variant.model_type == "gemma3_text" and "norm" in name
    return np.ascontiguousarray(value + np.float32(1) if is_less_one else value)


def gguf_metadata(variant: Variant, checkpoint: Checkpoint) -> dict[str, Any]:
    c = read_model_config(checkpoint)
    arch, epsilon = gguf_architecture(c), "layer_norm_epsilon" if c.family.norms.layer else "layer_norm_rms_epsilon"
    keys: dict[str, Any] = {
        "context_length": c.context_length,
        "embedding_length": c.d_model,
        "block_count": c.n_layers,
        "feed_forward_length": c.d_ff,
        "attention.head_count": c.n_heads,
        f"attention.{epsilon}": c.norm_eps,
        "attention.causal": c.causal,
    }
    if variant.model_type in ("qwen3", "gemma3_text"):
        keys |= {"attention.head_count_kv": c.n_kv_heads}
        keys |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if not c.family.learned_positions:
        keys["rope.freq_base"] = c.rope_base
    if any(c.windows):
        keys |= {"attention.sliding_window": max(c.windows), "rope.freq_base_swa": c.rope_local_base}
    if variant.model_type == "modernbert":
        keys |= {"attention.sliding_window_pattern": 3, "hidden_activation": c.activation}
    elif any(c.windows):
        keys["attention.sliding_window_pattern"] = 2
    if variant.mode != "rank":  # the converter writes none for a folder without modules.json
        keys["pooling_type"] = {"mean": 1, "cls": 2, "lasttoken": 3, "yes-no": 4}[variant.mode]
    for number, (columns, rows, _) in enumerate(variant.dense, 2):
        keys |= {f"dense_{number}_feat_in": columns, f"dense_{number}_feat_out": rows}
    named = {f"{arch}.{key}": value for key, value in keys.items()}
    if c.token_types:
        named["tokenizer.ggml.token_type_count"] = Typed("uint32", c.token_types)
    return {"general.architecture": arch, **named, f"{arch}.vocab_size": Typed("uint32", VOCAB)}


def load(path: Path, backend: str = "reference", task: str = "") -> PoolingModel:
    """Return the pooling model of a file or folder."""
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    ops = select_backend(backend=backend)
    return load_pooling_model(checkpoint, ops, config, read_pooling_config(checkpoint, config, task), "float32")


def sequences(lengths: tuple[int, ...] = (1, 2, 17, LONGEST, 23)) -> list[NDArray[np.int64]]:
    """Return sequences of random tokens."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, n) for n in lengths]


def expected_rows(
    variant: Variant, model: Any, rows: list[NDArray[np.int64]], token_types: list[NDArray[np.int64]] | None = None
) -> Floats:
    """Return what transformers computes for each sequence alone: its embedding, not normalized, or its logits."""
    import torch

    out = []
    for i, ids in enumerate(rows):
        inputs = {"input_ids": torch.tensor(ids[None])}
        if token_types is not None:
            inputs["token_type_ids"] = torch.tensor(token_types[i][None])
        with torch.no_grad():
            made = model(**inputs)
        if variant.mode == "rank":
            out.append(made.logits[0].numpy())
        elif variant.mode == "yes-no":
            out.append(made.logits[0, -1, [YES, NO]].numpy())
        else:
            out.append(pooled(variant, made.last_hidden_state[0].numpy()))
    return np.stack(out)


def pooled(variant: Variant, hidden: Floats) -> Floats:
    """Return the pooled row of a sequence's hidden states, after the dense layers."""
    row = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[variant.mode]
    for (weight, bias), (*_, activation) in zip(dense_weights(variant), variant.dense, strict=True):
        row = weight @ row if bias is None else weight @ row + bias
        row = np.tanh(row) if activation == "Tanh" else row
    return row
