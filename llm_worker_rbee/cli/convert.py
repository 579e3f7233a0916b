"""`llm-worker-rbee convert`: a model into a GGUF file of another type."""

from pathlib import Path
from typing import Annotated

import typer

from ..config import WRITTEN_TYPES
from ..errors import InvalidRequestError, human_bytes
from ..models.convert import convert as convert_checkpoint
from ..progress import transfer_progress
from ..weights import Checkpoint, hub, open_checkpoint
from ..weights.gguf import split_set_paths
from .terminal import note, print_json, require_writable

UNQUANTIZED = {"F64", "F32", "F16", "BF16", "I64"}  # I64: a table of positions


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A GGUF file, a folder of safetensors, or the name of a model.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    to: Annotated[str, typer.Option("--type", "-t", metavar="T", help=f"One of {' '.join(WRITTEN_TYPES)}.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.gguf if it exists.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Threads to use. Default: all cores.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: source, path, type, bytes, tensors.")
    ] = False,
) -> None:
    """Convert a model to a GGUF of another type, and print its path.

    Matrices are quantized, norms and biases stay F32. A failed or stopped conversion leaves no file.

    \b
    Examples:
      llm-worker-rbee convert model-folder model.Q4_K_M.gguf --type Q4_K_M
      llm-worker-rbee convert smollm2 smollm2.Q8_0.gguf --type Q8_0
    """
    if to.upper() not in WRITTEN_TYPES:
        raise typer.BadParameter(f"--type {to}: use one of {', '.join(WRITTEN_TYPES)}")
    require_writable(out, force)
    with transfer_progress() as progress:
        located = hub.find_model(source, progress=progress)
        _require_not_source(located.path, out)
        checkpoint = open_checkpoint(located.path)
        _note_quantized_source(checkpoint)
        result = convert_checkpoint(checkpoint, out, to, threads=threads, progress=progress)
    if as_json:
        print_json(
            {
                "source": str(located.path),
                "path": str(out),
                "type": to.upper(),
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
