"""`llm-worker-rbee convert`: a model into a GGUF file of another type."""

from pathlib import Path

import typer

from ..config import WRITTEN_TYPES
from ..errors import InvalidRequestError, counted, human_bytes
from ..models.convert import convert as convert_checkpoint
from ..models.convert import merge_adapters, write_adapter
from ..models.convert.mmproj import convert_projector
from ..progress import transfer_progress
from ..weights import Checkpoint, hub, open_checkpoint
from ..weights.gguf import split_set_paths
from ..weights.lora import read_adapter
from ..weights.vision_names import open_projector
from .commands import ConvertCommand
from .options import parse_lora
from .terminal import note, print_json, require_writable

UNQUANTIZED = {"F64", "F32", "F16", "BF16", "I64"}  # I64: a table of positions


def convert(options: ConvertCommand) -> None:
    """Convert the model."""
    out, to = options.out, options.to.upper()
    if to not in WRITTEN_TYPES:
        raise typer.BadParameter(f"--type {options.to}: use one of {', '.join(WRITTEN_TYPES)}")
    if options.merge_lora and options.lora_base is not None:
        raise typer.BadParameter("--merge-lora is for a model, and --lora-base says that SOURCE is an adapter")
    specs = tuple(map(parse_lora, options.merge_lora or ()))
    require_writable(out, options.force)
    if options.lora_base is not None:
        _convert_adapter(options, out, to)
        return
    with transfer_progress() as progress:
        located = hub.find_model(options.source, progress=progress)
        _require_not_source(located.path, out)
        checkpoint = open_projector(located.path) if options.mmproj else open_checkpoint(located.path)
        _note_quantized_source(checkpoint)
        if specs:
            checkpoint = merge_adapters(
                checkpoint, [(read_adapter(hub.locate_adapter(s.path)), s.scale) for s in specs]
            )
        write = convert_projector if options.mmproj else convert_checkpoint
        result = write(checkpoint, out, to, threads=options.threads, progress=progress)
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


def _convert_adapter(options: ConvertCommand, out: Path, to: str) -> None:
    """Write an adapter as a GGUF file."""
    source = hub.locate_adapter(options.source)
    base = open_checkpoint(hub.find_model(options.lora_base).path)
    count = write_adapter(read_adapter(source), base, out, to)
    if options.as_json:
        facts = {"type": to, "bytes": out.stat().st_size, "tensors": {to: 2 * count}}
        print_json({"source": str(source), "path": str(out), **facts})
        return
    note(f"{counted(count, 'pair')} of matrices")
    print(out)


def _require_not_source(source: Path, out: Path) -> None:
    if out.exists() and any(part.exists() and out.samefile(part) for part in split_set_paths(source)):
        raise InvalidRequestError(f"{out} is the source itself: give another name", "out")


def _note_quantized_source(checkpoint: Checkpoint) -> None:
    kinds = {tensor.kind.name for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1} - UNQUANTIZED
    if kinds:
        note(f"the source is already quantized ({', '.join(sorted(kinds))}): converting from the original loses less")
