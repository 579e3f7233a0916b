"""How a checkpoint pools: the keys of a GGUF, the modules of a sentence-transformers folder, or a config.json alone.

A module, pooling mode or activation that is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import MAX_CONTEXT, MAX_WIDTH, DenseConfig, ModelConfig, PoolingConfig
from ..errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ..weights import Checkpoint
from ..weights.sentence_transformers import FIRST_DENSE, module_kind
from .metadata_reader import MetadataReader

GGUF_KINDS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
KIND_OF_MODE = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
MODULE_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
DENSE_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}
SCORES = {"Sigmoid": "sigmoid", "Identity": "identity"}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
TASKS = ("embed", "rank")
CLASSIFIER = "cls.output.weight"
YES_NO = ("yes", "no")
# The prompt of Qwen3-Reranker, with its default instruction.
YES_NO_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def is_pooling_model(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether it is an embedding model or a reranker: an encoder, or a decoder whose files say how it pools."""
    if config.family.is_encoder or not config.causal or CLASSIFIER in checkpoint.tensors:
        return True
    if checkpoint.format == "gguf":
        return bool(checkpoint.metadata.get(f"{checkpoint.architecture}.pooling_type"))
    return "sentence_transformers" in checkpoint.metadata


def read_pooling_config(checkpoint: Checkpoint, config: ModelConfig, task: str = "") -> PoolingConfig:
    """Return how a checkpoint pools; `task` is "embed" or "rank", or "" to follow its files."""
    if checkpoint.format == "gguf":
        pooling = _from_gguf(checkpoint, config, task)
    else:
        pooling = _from_folder(checkpoint, config, task)
    if task and pooling.is_ranker != (task == "rank"):
        name = checkpoint.path.name
        if pooling.is_ranker:
            raise InvalidRequestError(f"{name} is a reranker, not an embedding model: use it to rerank", "model")
        raise InvalidRequestError(f"{name} is an embedding model, not a reranker: it has no classifier", "model")
    return pooling


def _from_gguf(checkpoint: Checkpoint, config: ModelConfig, task: str) -> PoolingConfig:
    metadata, architecture = checkpoint.metadata, checkpoint.architecture
    keys = MetadataReader(metadata, f"{architecture}.")
    number = keys.integer("pooling_type", -1, -1) if keys.has("pooling_type") else -1
    kind = GGUF_KINDS.get(number, "unknown")
    if number >= 0 and kind in ("none", "unknown"):
        raise UnsupportedModelError(
            f"{keys.describe_key('pooling_type')} is {number}: pooling {kind!r} is not supported"
        )
    if kind == "rank" or (number < 0 and (CLASSIFIER in checkpoint.tensors or _ranks_by_words(config, task))):
        return _gguf_ranker(checkpoint, config)
    dense = []
    for n in (FIRST_DENSE, FIRST_DENSE + 1):
        tensor = checkpoint.tensors.get(f"dense_{n}.weight")
        if tensor is not None and len(tensor.shape) == 2:
            stated = [keys.integer(f"dense_{n}_feat_{way}", tensor.shape[i]) for way, i in (("out", 0), ("in", 1))]
            dense.append(DenseConfig(f"dense_{n}", stated[1], stated[0]))
    note = f"{checkpoint.path.name} does not say how to pool: {{}} is used"
    pooling = _pooled(kind if number >= 0 else "", config, note, dense=tuple(dense))
    if config.family.name != "gemma-embedding" or dense:
        return pooling
    lacking = f"{checkpoint.path.name} has no dense layers after pooling: its rows are not EmbeddingGemma's"
    return replace(pooling, notes=(*pooling.notes, lacking))


def _gguf_ranker(checkpoint: Checkpoint, config: ModelConfig) -> PoolingConfig:
    if not config.family.is_encoder:
        template = checkpoint.metadata.get("tokenizer.chat_template.rerank")
        return _yes_no_ranker(checkpoint, (), template if isinstance(template, str) and template else YES_NO_TEMPLATE)
    notes = (
        ()
        if "cls.weight" in checkpoint.tensors
        else (
            f"{checkpoint.path.name} has no dense layer before its classifier, which llama.cpp's converter leaves "
            "out of BERT: its scores are not the model's; convert the folder instead",
        )
    )
    kind = config.family.classifier_pooling
    return PoolingConfig(kind=kind, normalize=False, score=_score_of_labels(checkpoint), notes=notes)


def _from_folder(checkpoint: Checkpoint, config: ModelConfig, task: str) -> PoolingConfig:
    layout = checkpoint.metadata.get("sentence_transformers", {})
    if CLASSIFIER in checkpoint.tensors:
        return _classifier(checkpoint, config)
    modules = layout.get("modules", [])
    logit_score = next((module for module in modules if module_kind(module) == "LogitScore"), None)
    if logit_score is not None:
        return _yes_no_ranker(checkpoint, _label_tokens(logit_score), YES_NO_TEMPLATE)
    if not modules:
        if _ranks_by_words(config, task):
            return _yes_no_ranker(checkpoint, (), YES_NO_TEMPLATE)
        return _pooled("", config, f"{checkpoint.path.name} has no modules.json: pooling {{}} is used")
    return PoolingConfig(**_module_fields(modules), **_text_fields(layout))


def _pooled(kind: str, config: ModelConfig, note: str, **fields: Any) -> PoolingConfig:
    """Return a pooling; where the files name none, the mean of encoders and the last token of decoders."""
    usual = "last" if config.causal else "mean"
    return PoolingConfig(kind=kind or usual, notes=() if kind else (note.format(usual),), **fields)


def _ranks_by_words(config: ModelConfig, task: str) -> bool:
    """Return whether a decoder without a classifier is to rank, by the logits of yes and no."""
    return task == "rank" and not config.family.is_encoder and config.causal


def _yes_no_ranker(checkpoint: Checkpoint, tokens: tuple[int, ...], template: str) -> PoolingConfig:
    classifier = checkpoint.tensors.get(CLASSIFIER)
    if classifier is not None and (len(classifier.shape) != 2 or classifier.shape[0] > len(YES_NO)):
        raise UnsupportedModelError(f"{checkpoint.path.name}: a reranker has one label, or yes and no")
    words = YES_NO if classifier is None else ()
    return PoolingConfig(
        kind="last", normalize=False, score="softmax", label_words=words, label_tokens=tokens, pair_template=template
    )


def _label_tokens(module: Mapping[str, Any]) -> tuple[int, ...]:
    keys = MetadataReader(module["config"], source=f"{module['path']}/config.json: ")
    return tuple(keys.integer(f"{word}_token_id", maximum=MAX_WIDTH << 4) for word in ("true", "false"))


def _classifier(checkpoint: Checkpoint, config: ModelConfig) -> PoolingConfig:
    """Return the pooling of a cross-encoder: a classifier of sequences with one label."""
    values = checkpoint.metadata["config"]
    classes = values.get("architectures")
    if isinstance(classes, list) and classes and not str(classes[0]).endswith("ForSequenceClassification"):
        raise UnsupportedModelError(f"config.json: {classes[0]} is not a classifier of sequences")
    keys = MetadataReader(values, source="config.json: ")
    fields: dict[str, Any] = {"kind": keys.get("classifier_pooling", str, "cls"), "normalize": False}
    if not config.family.is_encoder:
        fields |= {"kind": "last", "pair_template": YES_NO_TEMPLATE}
    if (used := keys.get("classifier_activation", str, "gelu")) != "gelu":
        raise UnsupportedModelError(f"{keys.describe_key('classifier_activation')}: {used!r} is not supported")
    newer = checkpoint.metadata.get("sentence_transformers", {}).get("settings", {})
    settings = {**keys.get("sentence_transformers", dict, {}), **newer}
    activation = settings.get("activation_fn", values.get("sbert_ce_default_activation_function"))
    usual = _score_of_labels(checkpoint)
    if activation is None:
        return PoolingConfig(**fields, score=usual)
    name = str(activation).rpartition(".")[2]
    if name not in SCORES:
        raise UnsupportedModelError(f"config.json: activation {name!r} of a reranker is not supported")
    return PoolingConfig(**fields, score=SCORES[name])


def _score_of_labels(checkpoint: Checkpoint) -> str:
    classifier = checkpoint.tensors.get(CLASSIFIER)
    if classifier is None:
        raise ModelFileError(f"tensor {CLASSIFIER!r} is missing: a reranker needs it")
    if classifier.shape[0] != 1:
        raise UnsupportedModelError(
            f"{checkpoint.path.name} classifies into {classifier.shape[0]} labels: a reranker has one"
        )
    return "sigmoid"


def _module_fields(modules: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pooling, the dense layers and the normalization of a list of modules."""
    kinds = [module_kind(module) for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        if kind not in MODULE_KINDS:
            raise UnsupportedModelError(f"modules.json: {module['type']} is not supported")
    middle = [kind for kind in kinds[2:] if kind == "Dense"]
    usual = ["Transformer", "Pooling", *middle, *(["Normalize"] if kinds[-1] == "Normalize" else [])]
    if kinds != usual:
        raise UnsupportedModelError(f"modules.json: the order {', '.join(kinds)} is not supported")
    if modules[0]["path"]:
        raise UnsupportedModelError(f"modules.json: a transformer in {modules[0]['path']!r} is not supported")
    if not modules[1]["config"]:
        raise ModelFileError(f"{modules[1]['path']}/config.json is missing or empty: it says how the model pools")
    layers = [module for module, kind in zip(modules, kinds, strict=True) if kind == "Dense"]
    return {
        "kind": pooling_kind(modules[1]["config"]),
        "dense": tuple(_dense(number, module) for number, module in enumerate(layers, FIRST_DENSE)),
        "normalize": kinds[-1] == "Normalize",
    }


def pooling_kind(config: Mapping[str, Any]) -> str:
    """Return the kind of pooling of a 1_Pooling/config.json, with a flag for each mode or `pooling_mode`."""
    stated = config.get("pooling_mode", [mode for key, mode in MODES.items() if config.get(key)] or "mean")
    modes = [stated] if isinstance(stated, str) else stated
    if not isinstance(modes, list) or len(modes) != 1:
        raise UnsupportedModelError(f"1_Pooling/config.json: pooling modes {modes!r} together are not supported")
    if not isinstance(modes[0], str) or modes[0] not in KIND_OF_MODE:
        raise UnsupportedModelError(f"1_Pooling/config.json: pooling mode {modes[0]!r} is not supported")
    if config.get("include_prompt", True) is not True:
        raise UnsupportedModelError("1_Pooling/config.json: pooling without the prompt is not supported")
    return KIND_OF_MODE[modes[0]]


def _dense(number: int, module: Mapping[str, Any]) -> DenseConfig:
    keys = MetadataReader(module["config"], source=f"{module['path']}/config.json: ")
    activation = keys.get("activation_function", str, "Tanh").rpartition(".")[2]
    if activation not in DENSE_ACTIVATIONS:
        raise UnsupportedModelError(f"{keys.describe_key('activation_function')}: {activation!r} is not supported")
    if keys.get("use_residual", bool, False):
        raise UnsupportedModelError(f"{keys.describe_key('use_residual')} is true: not supported")
    if (name := keys.get("module_input_name", str, "sentence_embedding")) != "sentence_embedding":
        raise UnsupportedModelError(f"{keys.describe_key('module_input_name')} is {name!r}: not supported")
    columns, rows = (keys.integer(f"{way}_features", minimum=1, maximum=MAX_WIDTH) for way in ("in", "out"))
    return DenseConfig(f"dense_{number}", columns, rows, DENSE_ACTIVATIONS[activation])


def _text_fields(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about texts: prompts, similarity, length, lower case."""
    settings = MetadataReader(layout["settings"], source="config_sentence_transformers.json: ")
    transformer = MetadataReader(layout["transformer"], source="sentence_bert_config.json: ")
    prompts = settings.get("prompts", dict, {})
    if not all(isinstance(text, str) for text in prompts.values()):
        raise settings.error("prompts", "must be an object of strings")
    default = settings.get("default_prompt_name", str, "")
    if default and default not in prompts:
        raise settings.error("default_prompt_name", f"is {default!r}, which is none of the prompts")
    similarity = settings.get("similarity_fn_name", str, "cosine")
    if similarity not in SIMILARITIES:
        raise UnsupportedModelError(f"{settings.describe_key('similarity_fn_name')}: {similarity!r} is not supported")
    return {
        "prompts": prompts,
        "default_prompt": default,
        "similarity": similarity,
        "max_length": transformer.integer("max_seq_length", 0, maximum=MAX_CONTEXT),
        "lower_case": transformer.get("do_lower_case", bool, False),
    }
