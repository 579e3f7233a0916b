"""What `inspect` tells of a model file, as plain values; the text for people and the JSON are made from these."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..config import KV_DEFAULT
from ..errors import InsufficientMemoryError, WorkerError
from .computing import naming_options

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..weights import Checkpoint

LONGEST_WHOLE_LIST = 8  # longer ones are cut to so many entries
# what a GGUF of any architecture may tell: our name -> the key behind `<architecture>.`
COMMON_KEYS = {
    "layers": "block_count",
    "width": "embedding_length",
    "feed_forward": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "context": "context_length",
}


def describe_file(
    checkpoint: "Checkpoint", file_bytes: int, context: int | None, capacity: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but the lists of tensors and of metadata, as plain values; `capacity`: how a cache is planned."""
    from ..models.families import describe

    config: ModelConfig | None = None
    reason = None
    try:
        config = describe(checkpoint)
        reason = None if checkpoint.tensors else "it holds no tensors"
    except WorkerError as error:
        reason = str(error)
    shape = _shape_of(config) if config else _shape_from_keys(checkpoint)
    name = checkpoint.metadata.get("general.name")
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "file_bytes": file_bytes,
        "name": name if isinstance(name, str) else None,
        "architecture": checkpoint.architecture,
        "supported": reason is None,
        "reason": reason,
        "parameters": sum(tensor.size for tensor in checkpoint.tensors.values()),
        "shape": shape,
        "quantization": _quantization(checkpoint),
        "tokenizer": _tokenizer(checkpoint),
        "memory": _memory(checkpoint, config if checkpoint.tensors else None, context or shape.get("context")),
        "fits": None if config is None or reason else _fits(checkpoint, config, context, capacity),
    }


def _shape_of(c: "ModelConfig") -> dict[str, Any]:
    windows = sorted(set(c.windows) - {0})
    return {
        "layers": c.n_layers,
        "width": c.d_model,
        "feed_forward": c.d_ff,
        "heads": c.n_heads,
        "kv_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocabulary": c.vocab_size,
        "context": c.context_length,
        "sliding_window": windows[0] if windows else None,
        "layers_with_window": sum(window > 0 for window in c.windows),
        "rope_base": c.rope_base,
        "rope_dim": c.rope_dim,
        "rope_scaling": c.rope_scaling.kind,
        "rope_factor": c.rope_scaling.factor,
    }


def _shape_from_keys(checkpoint: "Checkpoint") -> dict[str, Any]:
    found = {name: checkpoint.metadata.get(f"{checkpoint.architecture}.{key}") for name, key in COMMON_KEYS.items()}
    return {name: value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}


def _quantization(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    count, size = Counter[str](), Counter[str]()
    for tensor in checkpoint.tensors.values():
        count[tensor.kind.name] += 1
        size[tensor.kind.name] += tensor.nbytes
    total = max(1, checkpoint.nbytes)
    return [{"type": kind, "tensors": count[kind], "bytes": n, "share": n / total} for kind, n in size.most_common()]


def _tokenizer(checkpoint: "Checkpoint") -> dict[str, Any]:
    from ..llm import open_tokenizer

    try:
        tokenizer = open_tokenizer(checkpoint)
    except WorkerError as error:
        return {"error": str(error)}
    return {
        "kind": tokenizer.kind,
        "vocabulary": tokenizer.vocab_size,
        "bos": None
        if tokenizer.bos_id is None
        else {"id": tokenizer.bos_id, "text": tokenizer.piece(tokenizer.bos_id)},
        "eos": [{"id": token, "text": tokenizer.piece(token)} for token in sorted(tokenizer.eos_ids)],
        "add_bos": tokenizer.add_bos,
        "add_eos": tokenizer.add_eos,
        "chat_template": tokenizer.chat_template is not None,
    }


def _memory(checkpoint: "Checkpoint", config: "ModelConfig | None", context: int | None) -> dict[str, Any]:
    """Weights about as large as in the file; keys and values as kernels keep them where nothing else is asked for."""
    weights = checkpoint.nbytes
    kv = config.kv_bytes(context, KV_DEFAULT) if config is not None and context else None
    return {
        "context": context,
        "weights_bytes": weights,
        "kv_type": None if kv is None else KV_DEFAULT,
        "kv_bytes": kv,
        "total_bytes": None if kv is None else weights + kv,
    }


def _fits(
    checkpoint: "Checkpoint", config: "ModelConfig", context: int | None, capacity: Mapping[str, Any]
) -> dict[str, Any]:
    """The cache that an engine would make on this machine now, for each type of keys and values."""
    from ..config import KV_ON_CPU
    from ..engine.kv_cache_budget import available_memory, plan

    available = available_memory(checkpoint.nbytes)
    caches: dict[str, Any] = {}
    for kv_type in KV_ON_CPU:
        try:
            with naming_options(max_context="--context"):
                made = plan(config, kv_type, max_context=context, available=available, **capacity)
        except InsufficientMemoryError as error:
            caches[kv_type] = {"error": str(error)}
            continue
        caches[kv_type] = {
            name: getattr(made, name)
            for name in ("bytes", "tokens", "max_context", "contexts", "requests", "tokens_each")
        }
    return {"available_bytes": available, **capacity, "kv_types": caches}


def tensor_rows(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    """Every tensor: name, type, shape, bytes."""
    return [
        {"name": t.name, "type": t.kind.name, "shape": list(t.shape), "bytes": t.nbytes}
        for t in checkpoint.tensors.values()
    ]


def metadata_values(checkpoint: "Checkpoint", *, whole: bool) -> dict[str, Any]:
    """Each key's type and value; a long list is cut to its beginning beside its length, unless asked for whole."""
    return {
        key: {"type": checkpoint.value_types.get(key, type(value).__name__), **_value(value, whole=whole)}
        for key, value in _keys(checkpoint.metadata)
    }


def _keys(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of a GGUF; of a folder, those of each JSON file with the file's name before them."""
    for key, value in metadata.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", deep) for inner, deep in value.items())
        else:
            yield key, value


def _value(value: Any, *, whole: bool) -> dict[str, Any]:
    plain = _plain(value)
    if isinstance(plain, list) and len(plain) > LONGEST_WHOLE_LIST and not whole:
        return {"count": len(plain), "first": plain[:LONGEST_WHOLE_LIST]}
    return {"value": plain}


def _plain(value: Any) -> Any:
    """Arrays as lists, those inside of lists too."""
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value
