"""`llm-worker-rbee convert`: a model into a GGUF file of another type."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidRequestError, human_bytes
from ..progress import transfer_progress
from .terminal import note, print_json

if TYPE_CHECKING:
    from ..weights import Checkpoint

# Named here for --help, which imports nothing heavy; a test holds it against models.convert.TYPES.
TYPES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K Q4_K_S Q4_K_M Q5_K_S Q5_K_M"
PLAIN = {"F64", "F32", "F16", "BF16"}


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A GGUF file, a folder of safetensors, or the name of a model.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    to: Annotated[str, typer.Option("--type", "-t", metavar="T", help=f"One of {TYPES}.")],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.gguf if it is there.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Cores to use. All by default.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: source, path, type, bytes, tensors.")
    ] = False,
) -> None:
    """Convert a model to a GGUF of another type, and print its path.

    Matrices are quantized, norms and biases stay F32. Nothing is left behind if it fails or is stopped.

    \b
    Examples:
      llm-worker-rbee convert model-folder model.Q4_K_M.gguf --type Q4_K_M
      llm-worker-rbee convert smollm2 smollm2.Q8_0.gguf --type Q8_0
    """
    from ..models.convert import convert as write
    from ..weights import hub, open_checkpoint

    if to.upper() not in TYPES.split():
        raise typer.BadParameter(f"--type {to}: use one of {', '.join(TYPES.split())}")
    _require_free(out, force)
    with transfer_progress() as progress:
        located = hub.find_model(source, progress=progress)
        _require_another(located.path, out)
        checkpoint = open_checkpoint(located.path)
        _tell_of_loss(checkpoint)
        made = write(checkpoint, out, to, threads=threads, progress=progress)
    if as_json:
        print_json(
            {"source": str(located.path), "path": str(out), "type": to.upper(), "bytes": made.bytes,
             "tensors": made.tensors}
        )  # fmt: skip
        return
    note(f"{human_bytes(located.bytes)} -> {human_bytes(made.bytes)}")
    print(out)


def _require_free(out: Path, force: bool) -> None:
    """Before anything is fetched or computed."""
    if out.is_dir():
        raise InvalidRequestError(f"{out} is a folder: give the name of a file", "out")
    if not out.parent.is_dir():
        raise InvalidRequestError(f"the folder {out.parent} does not exist: make it first", "out")
    if out.exists() and not force:
        raise InvalidRequestError(f"{out} is there already: give another name, or --force to replace it", "out")


def _require_another(source: Path, out: Path) -> None:
    from ..weights.gguf import split_set_paths

    if out.exists() and any(part.exists() and out.samefile(part) for part in split_set_paths(source)):
        raise InvalidRequestError(f"{out} is what is to be converted: give another name", "out")


def _tell_of_loss(checkpoint: "Checkpoint") -> None:
    """Values that were rounded once are rounded again."""
    kinds = {tensor.kind.name for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1} - PLAIN
    if kinds:
        note(f"the source is quantized already ({', '.join(sorted(kinds))}): converting from the original loses less")
