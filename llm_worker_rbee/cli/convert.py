"""`llm-worker-rbee convert`: a model into a GGUF file of another type."""

from pathlib import Path

import typer

from ..config import WRITTEN_TYPES
from ..errors import InvalidRequestError, human_bytes
from ..models.convert import convert as convert_checkpoint
from ..progress import transfer_progress
from ..weights import Checkpoint, hub, open_checkpoint
from ..weights.gguf import split_set_paths
from .commands import ConvertCommand
from .terminal import note, print_json, require_writable

UNQUANTIZED = {"F64", "F32", "F16", "BF16", "I64"}  # I64: a table of positions


def convert(options: ConvertCommand) -> None:
    """Convert the model."""
    out, to = options.out, options.to.upper()
    if to not in WRITTEN_TYPES:
        raise typer.BadParameter(f"--type {options.to}: use one of {', '.join(WRITTEN_TYPES)}")
    require_writable(out, options.force)
    with transfer_progress() as progress:
        located = hub.find_model(options.source, progress=progress)
        _require_not_source(located.path, out)
        checkpoint = open_checkpoint(located.path)
        _note_quantized_source(checkpoint)
        result = convert_checkpoint(checkpoint, out, to, threads=options.threads, progress=progress)
    if options.as_json:
        print_json(
            {
                "source": str(located.path),
                "path": str(out),
                "type": to,
                "bytes": result.bytes,
                "tensors": result.tensors,
            }
        )
        return
    note(f"{human_bytes(located.bytes)} -> {human_bytes(result.bytes)}")
    print(out)


def _require_not_source(source: Path, out: Path) -> None:
    if out.exists() and any(part.exists() and out.samefile(part) for part in split_set_paths(source)):
        raise InvalidRequestError(f"{out} is the source itself: give another name", "out")


def _note_quantized_source(checkpoint: Checkpoint) -> None:
    kinds = {tensor.kind.name for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1} - UNQUANTIZED
    if kinds:
        note(f"the source is already quantized ({', '.join(sorted(kinds))}): converting from the original loses less")
