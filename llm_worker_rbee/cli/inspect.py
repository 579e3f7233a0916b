"""`llm-worker-rbee inspect`: what is in a model file. Weights are loaded for `--program` only.

It works on every file that can be opened: an unsupported architecture, a vocabulary without tensors or an
unknown tokenizer is reported, and is no failure. One dictionary of plain values makes the text and the JSON.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..backends import select, select_backend
from ..backends.ops import Backend
from ..config import KV_DEFAULT, KV_ON_CPU, ExpertConfig, LoadOptions, ModelConfig, SchedulerLimits
from ..engine.memory_plan import (
    DEVICE_MEMORY_FRACTION,
    HOST_MEMORY_FRACTION,
    device_weight_bytes,
    fallback_to_cpu,
    plan_cache,
    plan_memory,
)
from ..errors import InsufficientMemoryError, WorkerError, human_bytes
from ..models import read_model_config
from ..models.mtp import has_head, head_config
from ..models.pooling_config import is_pooling_model, read_pooling_config
from ..models.sampling_defaults import read_sampling_defaults
from ..models.vision import find_projector
from ..progress import transfer_progress
from ..sampling_params import BUILT_IN, NEUTRAL_SAMPLING
from ..text_model import open_tokenizer
from ..weights import Checkpoint, hub, open_checkpoint
from .commands import InspectCommand
from .loading import load_model, option_names_in_errors
from .options import LoadFlags, ModelFlags
from .terminal import Status, cell, columns, one_line, print_json, program_lines, style

MAX_VALUE_CHARS = 60
SHAPE_LABELS = {
    "layers": "layers",
    "width": "width",
    "feed_forward": "feed-forward",
    "heads": "heads",
    "kv_heads": "KV heads",
}


def inspect(options: InspectCommand) -> None:
    """Print the report of the file."""
    load_options = options.capacity.apply(LoadOptions(max_context=options.context, device=options.device))
    with transfer_progress() as progress:
        located = hub.find_model(options.model, progress=progress)
    checkpoint = open_checkpoint(located.path, weights=False)
    report = describe_file(checkpoint, located.bytes, load_options)
    step: list[Any] = []
    if options.program:
        llm = load_model(ModelFlags(model=str(located.path)), LoadFlags(device=options.device), Status())
        step = llm.model.program(llm.kv_type)
        report["program"] = [{"repeats": n, "ops": [line._asdict() for line in lines]} for n, lines in step]
    if options.as_json:
        print_json(
            {
                **report,
                "tensors": tensor_rows(checkpoint),
                "metadata": metadata_values(checkpoint, whole=options.metadata),
            }
        )
        return
    print("\n".join(_lines(report)))
    if options.metadata:
        _section("Metadata", _metadata_lines(checkpoint))
    if options.tensors:
        rows = [
            (cell(t["name"]), t["type"], " x ".join(map(str, t["shape"])), f"{t['bytes']:,}")
            for t in tensor_rows(checkpoint)
        ]
        _section("Tensors", columns([("NAME", "TYPE", "SHAPE", "BYTES"), *rows], right=[3], indent="  "))
    if options.program:
        _section(f"Program of a step on {llm.device}, keys and values {llm.kv_type}", program_lines(step))


def _section(title: str, lines: list[str]) -> None:
    print(f"\n{style(title, 'bold')}")
    print("\n".join(lines) if lines else "  none")


def _lines(report: dict[str, Any]) -> list[str]:
    rows = [
        ("file", report["path"]),
        ("size", human_bytes(report["file_bytes"])),
        ("name", report["name"] or "not given"),
        ("architecture", _architecture(report)),
        *(
            []
            if report["quantization_method"] is None
            else [("quantized", _method_line(report["quantization_method"]))]
        ),
        ("parameters", f"{report['parameters']:,}" if report["parameters"] else "none: the file holds no tensors"),
        *_shape_lines(report["shape"]),
        *([] if report["experts"] is None else [("experts", _experts_line(report["experts"]))]),
        *([] if report["mtp"] is None else [("drafts", _mtp_line(report["mtp"]))]),
        *([] if report["pooling"] is None else _pooling_lines(report["pooling"])),
        *_tokenizer_lines(report["tokenizer"]),
        *([("sampling", _sampling_line(report["sampling_defaults"]))] if report["pooling"] is None else []),
        *(("warning", text) for text in report["warnings"]),
        ("memory", _memory_line(report["memory"], is_pooling=report["pooling"] is not None)),
        *([] if report["fits"] is None else _fits_lines(report["fits"])),
    ]
    lines = columns([(style(key, "bold"), one_line(value)) for key, value in rows])
    if report["fits"] is not None:
        lines += ["", *_fits_table(report["fits"])]
    if report["quantization"]:
        table = [
            (q["type"], str(q["tensors"]), human_bytes(q["bytes"]), f"{q['share']:.1%}") for q in report["quantization"]
        ]
        lines += ["", *columns([("TYPE", "TENSORS", "SIZE", "SHARE"), *table], right=[1, 2, 3])]
    return lines


def _architecture(report: dict[str, Any]) -> str:
    name = report["architecture"] or "not given"
    return f"{name} (supported)" if report["supported"] else f"{name} (cannot be run: {report['reason']})"


def _method_line(method: dict[str, Any]) -> str:
    """Return the quantization settings of config.json."""
    bits = f"{method['bits']} bits" if method["bits"] else ""
    groups = {0: "", -1: "a scale per row"}.get(method["group_size"], f"groups of {method['group_size']}")
    block = f"blocks of {method['block'][0]} x {method['block'][1]}" if method["block"] else ""
    return ", ".join(filter(None, (method["method"], method["format"], bits, groups, block)))


def _shape_lines(shape: dict[str, Any]) -> list[tuple[str, str]]:
    parts = [f"{shape[key]:,} {label}" for key, label in SHAPE_LABELS.items() if key in shape]
    if "head_dim" in shape:
        parts[-1] += f" of {shape['head_dim']}"
    lines = [("shape", ", ".join(parts) or "not given")]
    if "context" in shape:
        lines.append(("context", f"{shape['context']:,} tokens"))
    if shape.get("sliding_window"):
        layers = f"{shape['layers_with_window']} of {shape['layers']} layers"
        lines.append(("window", f"{shape['sliding_window']:,} tokens in {layers}"))
    if "rope_base" in shape:
        scaling = (
            "" if shape["rope_scaling"] == "none" else f", {shape['rope_scaling']} scaling by {shape['rope_factor']:g}"
        )
        lines.append(("rope", f"base {shape['rope_base']:,g}, over {shape['rope_dim']} values a head{scaling}"))
    return lines


def _experts_line(e: dict[str, Any]) -> str:
    shared = f", one of {e['shared_feed_forward']:,} for all" if e["shared_feed_forward"] else ""
    active = f"{e['active_parameters']:,} parameters and {human_bytes(e['bytes_per_token'])} a token"
    return f"{e['used']} of {e['count']}, feed-forward {e['feed_forward']:,}{shared}; {active}"


def _mtp_line(mtp: dict[str, Any]) -> str:
    sizes = f"{human_bytes(mtp['weights_bytes'])} weights, {human_bytes(mtp['kv_token_bytes'])} a token"
    return f"a head for multi-token prediction ({sizes}, {mtp['kv_type']}): --speculative mtp uses it"


def _tokenizer_lines(t: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in t:
        return [("tokenizer", f"not usable: {t['error']}")]
    ends = ", ".join(_token(token) for token in t["eos"])
    bos = f"{_token(t['bos'])}, {'added' if t['add_bos'] else 'not added'}" if t["bos"] else "none"
    return [
        ("tokenizer", f"{t['kind']}, {t['vocabulary']:,} tokens"),
        ("begin", bos),
        ("end", (ends or "none") + (", added" if t["add_eos"] else "")),
        ("chat template", "yes" if t["chat_template"] else "none"),
    ]


def _sampling_line(defaults: dict[str, Any]) -> str:
    """Return the defaults that differ from neutral values, by source."""
    by_source: dict[str, list[str]] = {}
    for name, default in defaults.items():
        if default["value"] != NEUTRAL_SAMPLING[name] or default["source"] != BUILT_IN:
            by_source.setdefault(default["source"], []).append(f"{name} {default['value']:g}")
    return "; ".join(f"{', '.join(shown)} ({source})" for source, shown in by_source.items())


def _token(token: dict[str, Any]) -> str:
    return f"{token['text']!r} ({token['id']})"


def _pooling_lines(pooling: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the outputs and inputs of a pooling model."""
    if "error" in pooling:
        return [("pooling", f"not usable: {pooling['error']}")]
    normalized = ", normalized" if pooling["normalize"] else ""
    what = f"scores of pairs ({pooling['score']}): a reranker" if pooling["score"] else f"embeddings{normalized}"
    prompts = [f"{name} {text!r}" for name, text in pooling["prompts"].items()]
    default = f"; default {pooling['default_prompt']}" if pooling["default_prompt"] else ""
    return [
        ("pooling", f"{pooling['kind']}, {what}"),
        *([] if pooling["score"] else [("dimension", f"{pooling['dimension']:,}, similarity {pooling['similarity']}")]),
        ("max length", f"{pooling['max_length']:,} tokens"),
        *([("prompts", ", ".join(prompts) + default)] if prompts else []),
        *(("note", text) for text in pooling["notes"]),
    ]


def _memory_line(memory: dict[str, Any], *, is_pooling: bool) -> str:
    weights = human_bytes(memory["weights_bytes"])
    if is_pooling:
        return f"{weights} of weights; no KV cache"
    if memory["kv_bytes"] is None:
        return f"{weights} of weights; keys and values unknown"
    total, kv = human_bytes(memory["total_bytes"]), human_bytes(memory["kv_bytes"])
    states = f" + {human_bytes(memory['state_bytes'])} of state" if memory["state_bytes"] else ""
    parts = f"{weights} weights + {kv} keys and values ({memory['kv_type']}){states}"
    return f"{total} for {memory['context']:,} tokens: {parts}"


def _fits_lines(fits: dict[str, Any]) -> list[tuple[str, str]]:
    free, on_device = fits["available_bytes"], fits["device"] != "cpu"
    what = "the weights and the arrays of a step" if on_device else "the weights"
    where = f" on {fits['device']}" if on_device else ""
    beside = "memory unknown" if free is None else f"{human_bytes(free)} free{where} beside {what}"
    fraction = DEVICE_MEMORY_FRACTION if on_device else HOST_MEMORY_FRACTION
    share = "one context" if free is None else f"at most {fraction:.0%}"
    used = f"{share} of it for keys and values (--kv-memory sets another size)"
    if fits["kv_memory"] is not None:
        used = f"--kv-memory is {human_bytes(fits['kv_memory'])}"
    limits = str(SchedulerLimits(fits["max_batch"], fits["max_step_tokens"]))
    return [("fits here", f"{beside}; {used}"), ("steps", f"{limits} (--max-batch, --max-step-tokens)")]


def _fits_table(fits: dict[str, Any]) -> list[str]:
    """Return a line for each KV type; where nothing fits, the reason."""
    rows = [("KV TYPE", "SIZE", "TOKENS", "WHOLE CONTEXTS", "REQUESTS AT ONCE")]
    refused: dict[str, list[str]] = {}
    for kv_type, cache in fits["kv_types"].items():
        if "error" in cache:
            refused.setdefault(cache["error"], []).append(kv_type)
            continue
        contexts = f"{cache['contexts']:,} of {cache['max_context']:,} tokens"
        requests = f"{cache['requests']:,} of {cache['tokens_each']:,} tokens each"
        if cache["n_slots"]:
            requests += f", {cache['n_slots']:,} states of {human_bytes(cache['slot_bytes'])}"
        rows.append((kv_type, human_bytes(cache["bytes"]), f"{cache['tokens']:,}", contexts, requests))
    table = columns(rows, right=[1, 2]) if len(rows) > 1 else []
    return table + [f"{', '.join(kv_types)}: {error}" for error, kv_types in refused.items()]


def _metadata_lines(checkpoint: Checkpoint) -> list[str]:
    rows = []
    for key, entry in metadata_values(checkpoint, whole=False).items():
        shown = repr(entry.get("value", entry.get("first")))
        if len(shown) > MAX_VALUE_CHARS:
            shown = shown[: MAX_VALUE_CHARS - 3] + "..."
        count = f" ({entry['count']:,} in all)" if "count" in entry else ""
        rows.append((cell(key), entry["type"], cell(shown) + count))
    return columns(rows, indent="  ")


CAPACITY_FIELDS = (
    "bytes",
    "tokens",
    "max_context",
    "contexts",
    "max_batch",
    "requests",
    "tokens_each",
    "n_slots",
    "slot_bytes",
)
MAX_LIST_ITEMS = 8  # longer lists are cut
# keys of any architecture in a GGUF: name in the report -> key after `<architecture>.`
COMMON_KEYS = {
    "layers": "block_count",
    "width": "embedding_length",
    "feed_forward": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "context": "context_length",
}


def describe_file(checkpoint: Checkpoint, file_bytes: int, options: LoadOptions) -> dict[str, Any]:
    """Return everything but the lists of tensors and metadata; `options` say what should fit."""
    config: ModelConfig | None = None
    reason = None
    try:
        config = read_model_config(checkpoint)
        reason = None if checkpoint.tensors else "it holds no tensors"
        reason = checkpoint.metadata.get("quantization", {}).get("problem") or reason
    except WorkerError as error:
        reason = str(error)
    shape = _shape_of(config) if config else _shape_from_keys(checkpoint)
    sampling = read_sampling_defaults(checkpoint)
    name, context = checkpoint.metadata.get("general.name"), options.max_context or shape.get("context")
    is_pooling = config is not None and is_pooling_model(checkpoint, config)
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
        "experts": None if config is None or config.experts is None else _experts(checkpoint, config.experts),
        "mtp": None if config is None else _mtp(checkpoint, config),
        "pooling": _pooling(checkpoint, config) if config is not None and is_pooling else None,
        "quantization": _quantization(checkpoint),
        "quantization_method": checkpoint.metadata.get("quantization"),
        "tokenizer": _tokenizer(checkpoint),
        "sampling_defaults": sampling.report(),
        "warnings": sampling.warnings,
        "memory": _memory(checkpoint, config if checkpoint.tensors else None, context),
        "fits": None if config is None or reason or is_pooling else _fits(checkpoint, options),
    }


def _shape_of(c: ModelConfig) -> dict[str, Any]:
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
        **({} if c.family.learned_positions else _rope(c)),
    }


def _rope(c: ModelConfig) -> dict[str, Any]:
    scaling = c.rope_scaling
    return {
        "rope_base": c.rope_base,
        "rope_dim": c.rope_dim,
        "rope_scaling": scaling.kind,
        "rope_factor": scaling.factor,
    }


def _experts(checkpoint: Checkpoint, e: ExpertConfig) -> dict[str, Any]:
    """Return the experts, and what a token uses of all weights: those experts, and of the embedding one row."""
    tensors, experts = checkpoint.tensors, checkpoint.expert_tensors
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    dense = [t for name, t in tensors.items() if name not in experts and name not in looked_up]
    values, size = (
        sum(getattr(t, name) for t in dense) + int(sum(getattr(t, name) for t in experts.values()) * e.share())
        for name in ("size", "nbytes")
    )
    return {
        "count": e.count,
        "used": e.used,
        "feed_forward": e.d_ff,
        "shared_feed_forward": e.shared_d_ff,
        "scoring": e.spec.scoring,
        "active_parameters": values,
        "bytes_per_token": size,
    }


def _mtp(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any] | None:
    """Return the head for multi-token prediction, and what it adds to the memory where it is used."""
    if not has_head(checkpoint, config):
        return None
    tensors = (t for name, t in checkpoint.tensors.items() if name.startswith(f"blk.{config.n_layers}."))
    return {
        "layers": config.nextn_layers,
        "weights_bytes": sum(tensor.nbytes for tensor in tensors),
        "kv_type": KV_DEFAULT,
        "kv_token_bytes": head_config(config).kv_bytes(1, KV_DEFAULT),
    }


def _pooling(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Any]:
    """Return how an embedding model or a reranker pools."""
    try:
        pooling = read_pooling_config(checkpoint, config)
    except WorkerError as error:
        return {"error": str(error)}
    return {
        "kind": pooling.kind,
        "normalize": pooling.normalize,
        "score": pooling.score or None,
        "dimension": pooling.dense[-1].rows if pooling.dense else config.d_model,
        "similarity": pooling.similarity,
        "max_length": min(pooling.max_length or config.context_length, config.context_length),
        "prompts": dict(pooling.prompts),
        "default_prompt": pooling.default_prompt or None,
        "notes": list(pooling.notes),
    }


def _shape_from_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    values = {name: checkpoint.metadata.get(f"{checkpoint.architecture}.{key}") for name, key in COMMON_KEYS.items()}
    return {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}


def _quantization(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    count, size = Counter[str](), Counter[str]()
    for tensor in checkpoint.tensors.values():
        count[tensor.kind.name] += 1
        size[tensor.kind.name] += tensor.nbytes
    total = max(1, checkpoint.nbytes)
    return [{"type": kind, "tensors": count[kind], "bytes": n, "share": n / total} for kind, n in size.most_common()]


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        tokenizer = open_tokenizer(checkpoint)
    except WorkerError as error:
        return {"error": str(error)}
    bos = tokenizer.bos_id
    return {
        "kind": tokenizer.kind,
        "vocabulary": tokenizer.vocab_size,
        "bos": None if bos is None else {"id": bos, "text": tokenizer.piece(bos)},
        "eos": [{"id": token, "text": tokenizer.piece(token)} for token in sorted(tokenizer.eos_ids)],
        "add_bos": tokenizer.add_bos,
        "add_eos": tokenizer.add_eos,
        "chat_template": tokenizer.chat_template is not None,
    }


def _memory(checkpoint: Checkpoint, config: ModelConfig | None, context: int | None) -> dict[str, Any]:
    """Return the size of the weights, as in the file, and of a KV cache of the default type."""
    weights = checkpoint.nbytes
    kv = config.kv_bytes(context, KV_DEFAULT) if config is not None and context else None
    state = 0 if config is None else config.state_bytes  # of one sequence
    return {
        "context": context,
        "weights_bytes": weights,
        "kv_type": None if kv is None else KV_DEFAULT,
        "kv_bytes": kv,
        "state_bytes": state,
        "total_bytes": None if kv is None else weights + kv + state,
    }


def _fits(checkpoint: Checkpoint, options: LoadOptions) -> dict[str, Any]:
    """Return the steps, and the KV cache of each type, that an engine would have on this machine now."""
    options = find_projector(checkpoint, options)[0]
    models, backend = [checkpoint], _gpu_backend(checkpoint, options.device)
    caches: dict[str, Any] = {}
    for kv_type in KV_ON_CPU if backend is None else backend.kv_types:
        try:
            with option_names_in_errors(max_context="--context"):
                cache = plan_cache(plan_memory(backend, models, kv_type, options), models, kv_type, options)
        except InsufficientMemoryError as error:
            caches[kv_type] = {"error": str(error)}
            continue
        caches[kv_type] = {name: getattr(cache, name) for name in CAPACITY_FIELDS}
    plan = plan_memory(backend, models, KV_DEFAULT if backend is None else backend.default_kv_type, options)
    return {
        "device": "cpu" if backend is None else backend.device,
        "available_bytes": plan.available,
        "kv_memory": options.kv_memory,
        **plan.limits._asdict(),
        "kv_types": caches,
    }


def _gpu_backend(checkpoint: Checkpoint, device: str) -> Backend | None:
    """Return the backend of the GPU that an engine would compute on; None: it would take the CPU."""
    if device == "cpu" or (device == "auto" and (not select.has_driver() or select.missing_packages())):
        return None
    backend = select_backend(device)
    if device == "auto":
        backend, _ = fallback_to_cpu(backend, device_weight_bytes([checkpoint], LoadOptions()))
    return backend if backend.has_device_memory else None


def tensor_rows(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return name, type, shape and bytes of every tensor."""
    return [
        {"name": t.name, "type": t.kind.name, "shape": list(t.shape), "bytes": t.nbytes}
        for t in checkpoint.tensors.values()
    ]


def metadata_values(checkpoint: Checkpoint, *, whole: bool) -> dict[str, Any]:
    """Return type and value of each key; without `whole`, a long list is cut and its length added."""
    return {
        key: {"type": checkpoint.value_types.get(key, type(value).__name__), **_value(value, whole=whole)}
        for key, value in _keys(checkpoint.metadata)
    }


def _keys(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a GGUF, or of each JSON file of a folder, after the file's name."""
    for key, value in metadata.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", deep) for inner, deep in value.items())
        else:
            yield key, value


def _value(value: Any, *, whole: bool) -> dict[str, Any]:
    plain = _plain(value)
    if isinstance(plain, list) and len(plain) > MAX_LIST_ITEMS and not whole:
        return {"count": len(plain), "first": plain[:MAX_LIST_ITEMS]}
    return {"value": plain}


def _plain(value: Any) -> Any:
    """Return arrays as lists, also inside of lists."""
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value
