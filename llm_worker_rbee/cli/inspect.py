"""`llm-worker-rbee inspect`: what is in a model file, without loading it.

It works on every file that can be opened: an architecture that is not supported, a vocabulary without tensors and a
tokenizer that is unknown are things to report, not failures.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import human_bytes
from .common import MODEL_HELP, gather
from .engine_options import CapacityOptions
from .model_report import describe_file, metadata_values, tensor_rows
from .terminal import cell, columns, one_line, print_json, style

if TYPE_CHECKING:
    from ..weights import Checkpoint

LONGEST_VALUE = 60
SHAPE_LABELS = {
    "layers": "layers", "width": "width", "feed_forward": "feed-forward", "heads": "heads", "kv_heads": "KV heads",
}  # fmt: skip


@gather(capacity=CapacityOptions)
def inspect(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--max-context",
            "-c",
            metavar="N",
            min=1,
            show_default="the model's",
            help="The memory needed for N tokens of context.",
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="List every metadata key; with --json, long lists in full.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, tensors and metadata included.")
    ] = False,
    *,
    capacity: CapacityOptions,
) -> None:
    """Show what is in a model file: architecture, shape, block types, tokenizer, memory.

    And what fits on this machine: how many contexts, how many requests at once.

    \b
    Examples:
      llm-worker-rbee inspect
      llm-worker-rbee inspect model.gguf --context 4096 --kv-memory 2G
      llm-worker-rbee inspect model.gguf --tensors --metadata
    """
    planned = capacity.arguments()
    from ..weights import hub, open_checkpoint
    from .progress import progress_bar

    with progress_bar() as progress:
        located = hub.find(model, progress=progress)
    checkpoint = open_checkpoint(located.path, weights=False)
    report = describe_file(checkpoint, located.bytes, context, planned)
    if as_json:
        print_json(
            {**report, "tensors": tensor_rows(checkpoint), "metadata": metadata_values(checkpoint, whole=metadata)}
        )
        return
    print("\n".join(_lines(report)))
    if metadata:
        _section("Metadata", _metadata_lines(checkpoint))
    if tensors:
        rows = [
            (cell(t["name"]), t["type"], " x ".join(map(str, t["shape"])), f"{t['bytes']:,}")
            for t in tensor_rows(checkpoint)
        ]
        _section("Tensors", columns([("NAME", "TYPE", "SHAPE", "BYTES"), *rows], right=[3], indent="  "))


def _section(title: str, lines: list[str]) -> None:
    print(f"\n{style(title, 'bold')}")
    print("\n".join(lines) if lines else "  none")


def _lines(report: dict[str, Any]) -> list[str]:
    rows = [
        ("file", report["path"]),
        ("size", human_bytes(report["file_bytes"])),
        ("name", report["name"] or "not given"),
        ("architecture", _architecture(report)),
        ("parameters", f"{report['parameters']:,}" if report["parameters"] else "none: the file holds no tensors"),
        *_shape_lines(report["shape"]),
        *_tokenizer_lines(report["tokenizer"]),
        ("memory", _memory_line(report["memory"])),
        *([] if report["fits"] is None else [("fits here", _fits_line(report["fits"]))]),
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


def _token(token: dict[str, Any]) -> str:
    return f"{token['text']!r} ({token['id']})"


def _memory_line(memory: dict[str, Any]) -> str:
    weights = human_bytes(memory["weights_bytes"])
    if memory["kv_bytes"] is None:
        return f"{weights} of weights; keys and values unknown"
    total, kv = human_bytes(memory["total_bytes"]), human_bytes(memory["kv_bytes"])
    return f"{total} for {memory['context']:,} tokens: {weights} weights + {kv} keys and values ({memory['kv_type']})"


def _fits_line(fits: dict[str, Any]) -> str:
    from ..engine.kv_cache_budget import DEFAULT_SHARE

    free = fits["available_bytes"]
    beside = "memory unknown" if free is None else f"{human_bytes(free)} free beside the weights"
    if fits["kv_memory"] is not None:
        return f"{beside}; --kv-memory is {human_bytes(fits['kv_memory'])}"
    share = "one context" if free is None else f"at most {DEFAULT_SHARE:.0%}"
    return f"{beside}; {share} of it for keys and values (--kv-memory sets another size)"


def _fits_table(fits: dict[str, Any]) -> list[str]:
    """A line for each type of keys and values; where nothing fits, why."""
    rows = [("KV TYPE", "SIZE", "TOKENS", "WHOLE CONTEXTS", "REQUESTS AT ONCE")]
    refused: dict[str, list[str]] = {}
    for kv_type, cache in fits["kv_types"].items():
        if "error" in cache:
            refused.setdefault(cache["error"], []).append(kv_type)
            continue
        contexts = f"{cache['contexts']:,} of {cache['max_context']:,} tokens"
        requests = f"{cache['requests']:,} of {cache['tokens_each']:,} tokens each"
        rows.append((kv_type, human_bytes(cache["bytes"]), f"{cache['tokens']:,}", contexts, requests))
    table = columns(rows, right=[1, 2]) if len(rows) > 1 else []
    return table + [f"{', '.join(kv_types)}: {error}" for error, kv_types in refused.items()]


def _metadata_lines(checkpoint: "Checkpoint") -> list[str]:
    rows = []
    for key, entry in metadata_values(checkpoint, whole=False).items():
        shown = repr(entry.get("value", entry.get("first")))
        if len(shown) > LONGEST_VALUE:
            shown = shown[: LONGEST_VALUE - 3] + "..."
        count = f" ({entry['count']:,} in all)" if "count" in entry else ""
        rows.append((cell(key), entry["type"], cell(shown) + count))
    return columns(rows, indent="  ")
